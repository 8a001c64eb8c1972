"""A worker's session with the shards: joining, membership, heartbeats, the declaration of the job, and cuts."""
