"""Cuts: this shard's part of each cut, from its announcement until all pages are pinned. Must not know files."""
