"""The state of one shard. Decides what happens; must not know gRPC, sockets or flags.

    shard.py                   the face of a shard: all that the rim may call
    desks/                     one for each kind of request; they act on the whole shard
    core.py, job.py            what desks share: identity, members, the one lock; the job that was declared
    cuts/                      this shard's part of each cut
    durability/                the shard's files, and which of them outlive the process
    tables/, aggregation/      how gradients become updates of rows, and of parameters
    workers/                   the workers that take part
    locks.py, tickets.py, ...  locks, waits, counts, pages

Desks know the shard; the other folders do not. Imports point down this list, and folders form no circle.
"""
