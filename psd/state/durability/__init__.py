"""Durability: the arena, cuts, and the way back from a checkpoint. Must not know how checkpoints are written."""
