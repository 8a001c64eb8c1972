"""A worker's session with the shards: joining, membership, heartbeats, and what is agreed there."""
