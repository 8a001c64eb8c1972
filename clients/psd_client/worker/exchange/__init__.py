"""A worker's pushes and pulls of trained values. Must not know heartbeats, or how the connection is closed."""
