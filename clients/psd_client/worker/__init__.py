"""One worker of a job: its session, what it has pushed, its heartbeats and its end. Faces build on worker.flat_calls."""
