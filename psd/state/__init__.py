"""The state of one shard: blocks, rounds, clocks, membership, rules. Decides; knows neither gRPC nor sockets nor flags."""
