"""Tables on a shard: their stores, and how pushes of rows become updates."""
