"""Copies of a model's buffers, such as BatchNorm's running statistics, to and from where they travel.

Must not know when buffers are stored, nor how.
"""

from __future__ import annotations

import torch

from psd_client.lanes.flat import FlatBuffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.parameters import as_tensors


class Buffers:
    """The buffers of one model that the shards keep.

    Args:
        flat: where they are sent from and received.
    """

    def __init__(self, declaration: TorchDeclaration, flat: FlatBuffers) -> None:
        views = as_tensors(flat)[len(declaration.parameters) :]
        self._pairs = list(zip(declaration.buffers, views, strict=True))

    @torch.no_grad()
    def send(self) -> None:
        """Write them to where they are sent from."""
        for buffer, view in self._pairs:
            view.copy_(buffer)

    @torch.no_grad()
    def receive(self) -> None:
        """Take over what was received. What is equal is not written to: it may be memory that cannot be."""
        for buffer, view in self._pairs:
            value = view.to(buffer.device, buffer.dtype)
            if not torch.equal(buffer, value):
                buffer.copy_(value)
