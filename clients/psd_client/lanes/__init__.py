"""Lanes: the ways of bytes to each shard, how an operation runs at several shards at once, and where its numbers lie.

Must not know sessions, clocks or rounds.
"""
