"""The state of one shard. Decides; knows neither gRPC nor sockets nor flags.

shard.py, core.py, life.py, locks.py    the shard: its face to the rim, what its parts share, its life cycle and its locks
job.py, exchange.py, transfers.py       the job, and the pushes and pulls in progress
tickets.py, counts.py, status.py        who waits, what was counted, what is shown
workers/                                who takes part
aggregation/                            from gradients to parameters
durability/                             what outlives the process
"""
