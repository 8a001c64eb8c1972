"""psdctl follow: a directory for each new version of a running job, and a command that is told of them."""
