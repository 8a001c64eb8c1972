"""The rim of a shard: gRPC services, health, reflection. Moves bytes, waits, translates errors; decides nothing."""
