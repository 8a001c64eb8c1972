"""Lanes: a worker's connections to each shard, operations on several shards at once, and the memory of their values.

Must not know sessions, clocks or rounds.
"""
