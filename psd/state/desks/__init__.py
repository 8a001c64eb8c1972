"""Desks: each answers one kind of request. Desks know the whole shard; the parts in other folders do not."""
