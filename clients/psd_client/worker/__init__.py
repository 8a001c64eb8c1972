"""One worker of a job: its session, its pushes and pulls, its heartbeats and its end. Faces build on worker.flat_calls."""
