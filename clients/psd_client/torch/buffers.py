"""Copies of a model's buffers, such as BatchNorm's running statistics, to and from the flat memory that is sent and received.

Must not know when or how buffers are stored.
"""

from __future__ import annotations

import torch

from psd_client.lanes.flat import FlatBuffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.parameters import as_tensors
from psd_client.worker.flat_calls import FlatCalls


class Buffers:
    """Those buffers of a model that the shards keep.

    Args:
        flat: memory from which the buffers are sent, and into which they are received.
        times_gone_back: how often the job had gone back to a checkpoint when the contents of `flat` were received.
    """

    def __init__(self, declaration: TorchDeclaration, flat: FlatBuffers, times_gone_back: int = 0) -> None:
        self._times_gone_back = times_gone_back
        self._declaration = declaration
        self._views = as_tensors(flat)[len(declaration.parameters) :]

    def send(self, times_gone_back: int) -> None:
        """Write the buffers to the flat memory, to be sent; or, if the job has gone back, take over its buffers."""
        if not self.follow(times_gone_back):
            self.write()

    def follow(self, times_gone_back: int) -> bool:
        """Take over the received buffers if the job has gone back since the last call; return whether it has."""
        if times_gone_back == self._times_gone_back:
            return False
        self._times_gone_back = times_gone_back
        self.receive()
        return True

    @torch.no_grad()
    def write(self) -> None:
        """Write the model's buffers to the flat memory."""
        for buffer, view in zip(self._declaration.buffers, self._views, strict=True):
            view.copy_(buffer)

    @torch.no_grad()
    def receive(self) -> None:
        """Copy the received buffers into the model. Equal ones are not written, as their memory may be read-only."""
        for buffer, view in zip(self._declaration.buffers, self._views, strict=True):
            value = view.to(buffer.device, buffer.dtype)
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def kept_buffers(declaration: TorchDeclaration, worker: FlatCalls) -> Buffers:
    """A model's buffers with the job's values, sent from now on whenever they are due."""
    buffers = Buffers(declaration, worker.parameters, worker.times_gone_back)
    buffers.receive()
    if declaration.places:
        worker.keep_buffers(buffers.send)
    return buffers
