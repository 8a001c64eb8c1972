"""psd, a parameter server for distributed machine learning.

Layers, imports point down only (tests/test_layers.py holds the table):

    cli        the processes psd-server, psd-run, psdctl
    rim        gRPC services, health, reflection: moves bytes and translates errors
    state      one shard: blocks, rounds, clocks, membership, rules; decides, and knows neither gRPC nor sockets
    checkpoint the files in which a job is stored; knows neither blocks in memory nor when to store
    contract   what both sides share: messages (psd.v1), frames, layout, job spec, errors, configuration
    psd_core   C kernels on caller-owned memory

Workers import `psd_client`, which sees the contract only.
"""

__version__ = "0.1.0"
