"""A worker's pushes and pulls of trained values. Must not know heartbeats, or who closes the connection."""
