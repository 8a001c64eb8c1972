"""Relays: processes without a state of their own, which follow a job's shards, or other relays, and serve its readers.

A relay is a reader of the job that hands on what it reads. To its own readers it is the job's only shard, with the blocks of
all shards, and their checksums: so readers have the same digest everywhere, and hear what has changed in the same way. Must not
know flags, signals or exit statuses: psd/cli/relay.py does.
"""
