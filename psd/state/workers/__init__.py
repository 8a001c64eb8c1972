"""Workers of a job: which take part, which one provides its values, which wait at a barrier. Must not know gradients."""
