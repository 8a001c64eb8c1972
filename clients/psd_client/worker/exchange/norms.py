"""Tells the shards the norms of the tensors that a job merges by norm and direction: a shard has pieces of them only.

Must not know what the shards do with them.
"""

from __future__ import annotations

import psd_core
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.exchange.sent_push import SentPush


class Norms(Rider):
    """The norms of one worker's gradients.

    Args:
        gradients: the buffers that hold the gradient of the push that is being made.
    """

    def __init__(self, gradients: FlatBuffers) -> None:
        self._gradients = gradients
        self._tensors = gradients.layout.spec.directed_tensors

    def write(self, sent: SentPush) -> None:
        """Write the norm of each tensor; 0 for one without a gradient."""
        is_there = sent.present
        sent.header.norms.extend(
            self._norm(tensor) if is_there is None or is_there[tensor] else 0.0 for tensor in self._tensors
        )

    def _norm(self, tensor: int) -> float:
        total = psd_core.square_sum(self._gradients.views[tensor].reshape(-1))
        return psd_core.square_root(total) if total is not None else 0.0
