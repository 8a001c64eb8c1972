"""Durability: the files of a shard, and which of them outlive the process. Must not know checkpoints or membership."""
