"""The places of gradients in the flat buffer: which gradients lie there, and that none lies in another parameter's place.

Once a hook has put a parameter's gradient into its place, `.grad` is a view of the buffer. The program may do three things with
that view. It may assign it to other parameters: before the place is written again, the assigned gradient gets its own memory.
It may give the view other memory, by `.grad.data =`, `model.half()`, `model.share_memory()` or a queue of
torch.multiprocessing: the place then gets a new view. And it may keep the view while the parameter's `.grad` is set to None or
to another tensor: then the kept view gets its own memory, and the place a new view.

Must not know shards, pushes or hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from psd_client.torch.parameters import as_tensor

_REFERENCES = 2
"""Reference count of a view that only psd holds: the list's reference, and the argument of the function that counts."""


class Places:
    """The places of some parameters' gradients.

    Args:
        views: a view of the buffer for each parameter; this class replaces them. arrays: the same views in NumPy, which
            programs cannot reach. spaces: the buffer's memory.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        views: list[torch.Tensor],
        arrays: Sequence[NDArray[Any]],
        spaces: Sequence[NDArray[Any]],
    ) -> None:
        self._parameters = parameters
        self._views = views
        self._kept = [(array, view.data_ptr()) for array, view in zip(arrays, views, strict=True)]
        self._own = {id(view) for view in views}
        self._taken: set[int] = set()  # places that are, or may be, the gradient of some parameter
        self._moved: list[torch.Tensor] = []  # gradients that were in the buffer, and now are not
        starts = [space.__array_interface__["data"][0] for space in spaces]
        self._ranges = [(start, start + space.nbytes) for start, space in zip(starts, spaces, strict=True)]

    def renew(self, numbers: Iterable[int]) -> None:
        """Replace those views that have been given other memory."""
        for number in numbers:
            array, address = self._kept[number]
            if self._views[number].data_ptr() != address:
                self._own.discard(id(self._views[number]))
                self._views[number] = as_tensor(array)
                self._own.add(id(self._views[number]))
                self._taken.discard(number)

    def put(self, number: int) -> None:
        """Put a parameter's gradient into its place, unless the program has moved it: several parameters may then share it, and
        back-propagation adds to it for each of them."""
        self.clear(number)
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        assert gradient is not None
        if not any(gradient is moved for moved in self._moved):
            with torch.no_grad():
                view.copy_(gradient)
            parameter.grad = view
            self._taken.add(number)

    def clear(self, number: int) -> None:
        """Remove a gradient that another parameter has, or that the program has kept, from a parameter's place."""
        if number in self._taken and self._parameters[number].grad is not self._views[number]:
            self.part()

    @torch.no_grad()
    def part(self) -> None:
        """Do what `clear` does for all places: gradients of other parameters, and kept ones, get their own memory."""
        taken: set[int] = set()
        apart: dict[int, torch.Tensor] = {}
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = parameter.grad
            if gradient is view:
                taken.add(number)
            elif gradient is not None and (id(gradient) in self._own or self.has(gradient)):
                apart[id(gradient)] = gradient.clone()
        left, self._taken = self._taken - taken, taken
        if apart or self._moved:
            self._part(apart)
        del parameter, view, gradient  # these hold a reference to one of the views
        for number in left:
            if sys.getrefcount(self._views[number]) > _REFERENCES:
                self._views[number].data = self._views[number].clone()
                self.renew((number,))

    def _part(self, apart: dict[int, torch.Tensor]) -> None:
        """Replace each parameter's `.grad` whose id is in `apart`."""
        for number, parameter in enumerate(self._parameters):
            gradient = apart.get(id(parameter.grad))
            if gradient is not None:
                parameter.grad = gradient
                self._taken.discard(number)
        in_use = {id(parameter.grad) for parameter in self._parameters}
        self._moved = [gradient for gradient in (*self._moved, *apart.values()) if id(gradient) in in_use]

    def has(self, gradient: torch.Tensor) -> bool:
        """True if a gradient lies in the buffer."""
        if gradient.device.type != "cpu" or gradient.layout is not torch.strided:
            return False
        address = gradient.data_ptr()
        return any(start <= address < stop for start, stop in self._ranges)
