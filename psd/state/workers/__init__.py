"""Workers of a job: who is in it, who provides its values, who waits at a barrier. Must not know gradients."""
