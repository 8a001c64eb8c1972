"""Torch's views of flat buffers, and copies from these into the parameters of a model.

Parameters keep their own memory: it may have another device, dtype or memory layout, and back-propagation may still read it
while the next values arrive.

The copies are torch._foreach_copy_, one call for many tensors. It has no public name; its public neighbours either lay out a
new vector at each step (torch.cat, parameters_to_vector) or replace the parameters' memory (vector_to_parameters).

Must not know shards, sessions or gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest
from psd_client.lanes.flat import FlatBuffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.worker.flat_calls import FlatCalls


def as_tensors(buffers: FlatBuffers) -> list[torch.Tensor]:
    """Torch's views of the buffers, one per tensor of the spec."""
    return [as_tensor(view) for view in buffers.views]


def as_tensor(view: NDArray[Any]) -> torch.Tensor:
    """Torch's view of an array's memory; uint16, which holds the bits of bfloat16, becomes torch.bfloat16. The view of an
    array that cannot be written to is only to be read."""
    if view.flags.writeable:
        tensor = torch.from_numpy(view)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch knows no tensors that can only be read
            tensor = torch.from_numpy(view)
    return tensor.view(torch.bfloat16) if view.dtype == np.uint16 else tensor


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors pairwise; the lists may be empty."""
    if targets:
        torch._foreach_copy_(targets, sources)


def is_alike(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """True if a view of the flat buffer could replace the parameter, or its gradient."""
    return parameter.device == view.device and parameter.dtype == view.dtype and parameter.is_contiguous()


class Received:
    """Torch's views of the buffers in which a worker has received its parameters: of several, if it reads a shard's planes.

    Args:
        worker: declared.
    """

    def __init__(self, worker: FlatCalls) -> None:
        self._worker = worker
        self._views: WeakKeyDictionary[FlatBuffers, list[torch.Tensor]] = WeakKeyDictionary()

    @property
    def buffers(self) -> FlatBuffers:
        """The buffers of the last pull."""
        return self._worker.parameters

    @property
    def views(self) -> list[torch.Tensor]:
        """The views of these, one per tensor of the spec."""
        return self._views_of(self._worker.parameters)

    def views_of_block(self, block: int) -> list[torch.Tensor]:
        """Views of all tensors where a block was received, perhaps while others still are."""
        return self._views_of(self._worker.receiving.place_of(block))

    def _views_of(self, buffers: FlatBuffers) -> list[torch.Tensor]:
        found = self._views.get(buffers)
        if found is None:
            found = self._views[buffers] = as_tensors(buffers)
        return found


class Parameters:
    """The trained parameters of one model.

    Args:
        worker: receives the parameters.

    Attributes:
        versions: version of the values that the model has, by block.
    """

    def __init__(self, declaration: TorchDeclaration, worker: FlatCalls) -> None:
        self._received = Received(worker)
        buffers = self._received.buffers
        self._trained = {index: declaration.parameters[index] for index in declaration.trained}
        self._pieces = {block.index: list(buffers.pieces(block.index)) for block in buffers.layout.blocks if block.trained}
        self._blocks_of: dict[int, set[int]] = {}
        for block, pieces in self._pieces.items():
            for tensor, _ in pieces:
                self._blocks_of.setdefault(tensor, set()).add(block)
        self._left: set[int] = set()  # blocks that were not copied the last time
        self._names = [tensor.name for tensor in declaration.tensors]
        self.versions = list(buffers.versions)
        self.note()

    def check_unchanged(self, tensors: Iterable[int] | None = None) -> None:
        """Raise InvalidRequest if the program has changed a parameter since it was received: the next copy would undo that.

        tensors: indices of those to look at; None: all.

        A parameter that has its received value again counts as unchanged. Two kinds of changes are not noticed: those that
        torch does not count, such as `.data.clamp_()`; and changes of a parameter that was received only in part, whose value
        is not known here.
        """
        for index in self._trained if tensors is None else tensors:
            parameter = self._trained[index]
            if _mark(parameter) == self._marks[index]:
                continue
            received = self._received.buffers.versions
            is_known = all(self.versions[block] == received[block] for block in self._blocks_of.get(index, ()))
            if is_known and not self._is_as_received(index):
                raise InvalidRequest(
                    f"parameter {self._names[index]!r} was changed by the program (load_state_dict, fill_, .data or the like), "
                    "and a step would undo that: the values are the shards'. To set parameters call "
                    "optimizer.load_parameters(state_dict) on all workers; optimizer.pull() takes the shards' values again"
                )
            self._marks[index] = _mark(parameter)

    def _is_as_received(self, index: int) -> bool:
        parameter = self._trained[index].detach()
        return torch.equal(parameter, self._received.views[index].to(parameter.device, parameter.dtype))

    def note(self) -> None:
        """Note the state of the parameters, to notice if the program changes one from now on."""
        self._marks = {index: _mark(parameter) for index, parameter in self._trained.items()}

    @torch.no_grad()
    def copy(self) -> None:
        """Copy all parameters, after they have been received."""
        self._copy(self._trained)
        self._left = set()
        self.versions = list(self._received.buffers.versions)
        self.note()

    @torch.no_grad()
    def copy_received(self) -> None:
        """Copy the parameters of blocks that have been received since they were copied the last time."""
        received = {block for block in self._pieces if self.versions[block] != self._received.buffers.versions[block]}
        tensors = [index for index in self._trained if not received.isdisjoint(self._blocks_of.get(index, ()))]
        self._copy(tensors)
        self.versions = list(self._received.buffers.versions)
        self._marks |= {index: _mark(self._trained[index]) for index in tensors}

    @torch.no_grad()
    def copy_as_received(self, next_block: Callable[[bool], int | None], *, is_all: bool) -> None:
        """Copy block by block, while other blocks are still being received; a parameter with another layout is copied as a
        whole.

        Args:
            next_block: returns the index of a block that has been received. Returns None if all have been received, possibly
                more than once, or if it is told not to wait and there is none.
            is_all: copy all blocks; else only wait for those that were left out the last time, and copy what else is there.
        """
        try:
            self._copy_as_received(next_block, is_all=is_all)
        finally:
            self.note()

    def _copy_as_received(self, next_block: Callable[[bool], int | None], *, is_all: bool) -> None:
        views = self._received.views
        apart = {tensor for tensor, parameter in self._trained.items() if not is_alike(parameter, views[tensor])}
        copied: dict[int, int] = {}
        while (block := next_block(is_all or not self._left <= copied.keys())) is not None:
            copied[block] = self._received.buffers.versions[block]
            self._copy_block(block, apart)
        if is_all:
            for block in self._pieces:
                if copied.get(block) != self._received.buffers.versions[block]:
                    copied[block] = self._received.buffers.versions[block]
                    self._copy_block(block, apart)
        self._left = self._pieces.keys() - copied.keys()
        # Parameters in `apart` are copied once all of their blocks are there; until then none of these blocks counts as copied.
        lacking = {tensor for tensor in apart if self._blocks_of.get(tensor, set()) & self._left}
        whole = list(apart - lacking)
        copy_all([self._trained[index] for index in whole], [self._whole(index) for index in whole])
        self._left.update(*(self._blocks_of[tensor] for tensor in lacking))
        for block in copied.keys() - self._left:
            self.versions[block] = copied[block]

    def _copy(self, tensors: Iterable[int]) -> None:
        copied, views = list(tensors), self._received.views
        copy_all([self._trained[index] for index in copied], [views[index] for index in copied])

    def _whole(self, tensor: int) -> torch.Tensor:
        """A tensor as it was received, perhaps while others still are, and in whichever buffers its blocks are."""
        found = {block: self._received.views_of_block(block)[tensor] for block in self._blocks_of.get(tensor, ())}
        views = list(found.values()) or [self._received.views[tensor]]
        if all(view is views[0] for view in views):
            return views[0]
        whole = torch.empty_like(views[0])
        for block, view in found.items():
            for piece, elements in self._pieces[block]:
                if piece == tensor:
                    whole.view(-1)[elements] = view.view(-1)[elements]
        return whole

    def _copy_block(self, block: int, apart: set[int]) -> None:
        """Copy a block, except the pieces of the tensors `apart`."""
        pieces = [(tensor, elements) for tensor, elements in self._pieces[block] if tensor not in apart]
        views = self._received.views_of_block(block)
        targets = [self._trained[tensor].view(-1)[elements] for tensor, elements in pieces]
        copy_all(targets, [views[tensor].view(-1)[elements] for tensor, elements in pieces])


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Torch's count of in-place changes, and the address of the data."""
    return parameter._version, parameter.data_ptr()  # noqa: SLF001
