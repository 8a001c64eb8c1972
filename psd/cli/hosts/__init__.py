"""A job on one or several machines, each with a psd-run: how they meet, who leads, and how the job is carried out."""
