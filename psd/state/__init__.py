"""The state of one shard. Decides; knows neither gRPC nor sockets nor flags.

    shard.py                   the face of a shard: all that the rim may ask
    desks/                     one for each kind of request; they speak for the whole shard
    core.py, job.py            what desks share: identity, members, the one lock; the job that was declared
    cuts/                      this shard's part of each cut
    durability/                the shard's files, and what of them outlives the process
    tables/, aggregation/      from gradients to rows, and to parameters
    workers/                   who takes part
    locks.py, tickets.py, ...  locks, waits, counts, pages

A desk knows the shard; a part in any other folder does not. Imports point down this list, and folders form no circle.
"""
