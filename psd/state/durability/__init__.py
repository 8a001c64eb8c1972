"""Durability: the files of a shard, and what of them outlives the process. Must not know checkpoints, or who takes part."""
