"""psd-run --on ray: shards and workers as actors."""
