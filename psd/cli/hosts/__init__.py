"""A job on one or several machines, with a psd-run on each: how they meet, which one leads, and how the job is carried out."""
