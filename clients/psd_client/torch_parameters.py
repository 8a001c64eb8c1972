"""From the client's flat buffer into the parameters of a torch model, which keep memory of their own: it may be on another
device, of another dtype or memory layout, and back-propagation may still read it while the next values arrive.

The copies are torch._foreach_copy_, one call for many tensors. It has no public name; its public neighbours either lay out a
new vector at each step (torch.cat, parameters_to_vector) or replace the parameters' memory (vector_to_parameters).

Must not know shards, sessions or gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from psd_client.flat import FlatBuffers
from psd_client.torch_declaration import Declaration


def is_alike(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """True if a view of the flat buffer could take the place of the parameter, or of its gradient."""
    return parameter.device == view.device and parameter.dtype == view.dtype and parameter.is_contiguous()


class Parameters:
    """The trained parameters of one model.

    Args:
        buffers: where they are received.
    """

    def __init__(self, declaration: Declaration, buffers: FlatBuffers) -> None:
        self._buffers = buffers
        views = [torch.from_numpy(view) for view in buffers.views]
        self._pairs = {index: (declaration.parameters[index], views[index]) for index in declaration.trained}
        self._blocks = [block.index for block in buffers.layout.blocks if block.trained]

    @torch.no_grad()
    def copy(self) -> None:
        """All of them."""
        self._copy(self._pairs)

    @torch.no_grad()
    def copy_as_received(self, received: Iterable[int]) -> None:
        """All of them, those that can be piece by piece while others are still being received.

        Args:
            received: indices of blocks. When it ends, all have been received, or received anew.
        """
        copied: dict[int, int] = {}
        for block in received:
            copied[block] = self._buffers.versions[block]
            self._copy_block(block)
        for block in self._blocks:
            if copied.get(block) != self._buffers.versions[block]:
                self._copy_block(block)
        self._copy([index for index, pair in self._pairs.items() if not is_alike(*pair)])

    def _copy(self, tensors: Iterable[int]) -> None:
        pairs = [self._pairs[index] for index in tensors]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [view for _, view in pairs])

    def _copy_block(self, block: int) -> None:
        targets, sources = [], []
        for tensor, elements in self._buffers.pieces(block):
            parameter, view = self._pairs[tensor]
            if is_alike(parameter, view):
                targets.append(parameter.view(-1)[elements])
                sources.append(view.view(-1)[elements])
        if targets:
            torch._foreach_copy_(targets, sources)
