"""Desks: each answers one kind of request for the whole shard, which the parts in other folders do not know."""
