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
        times_gone_back: how often the job had gone back to a checkpoint when what is in `flat` was received.
    """

    def __init__(self, declaration: TorchDeclaration, flat: FlatBuffers, times_gone_back: int = 0) -> None:
        self._times_gone_back = times_gone_back
        self._declaration = declaration
        self._views = as_tensors(flat)[len(declaration.parameters) :]

    def send(self, times_gone_back: int) -> None:
        """Write them to where they are sent from, after following the job back to a checkpoint, if it has gone back."""
        if not self.follow(times_gone_back):
            self.write()

    def follow(self, times_gone_back: int) -> bool:
        """Take over what was received when the job went back to a checkpoint; False if it has not since the last time."""
        if times_gone_back == self._times_gone_back:
            return False
        self._times_gone_back = times_gone_back
        self.receive()
        return True

    @torch.no_grad()
    def write(self) -> None:
        """Write them to where they are sent from."""
        for buffer, view in zip(self._declaration.buffers, self._views, strict=True):
            view.copy_(buffer)

    @torch.no_grad()
    def receive(self) -> None:
        """Take over what was received. What is equal is not written to: it may be memory that cannot be."""
        for buffer, view in zip(self._declaration.buffers, self._views, strict=True):
            value = view.to(buffer.device, buffer.dtype)
            if not torch.equal(buffer, value):
                buffer.copy_(value)
