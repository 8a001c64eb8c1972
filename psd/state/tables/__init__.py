"""Tables on a shard: their stores, and from pushes of rows to updates."""
