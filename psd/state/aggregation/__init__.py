"""Aggregation: blocks and rounds, when a round closes, and how its gradients are applied. Must not know leases or files."""
