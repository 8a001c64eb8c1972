"""Server-side vectors on a shard: batches, exactly once, over the store of psd_core."""
