"""Places in memory where a worker's parameters are received, and which of them the program holds.

A large model is not copied for the program. The program gets the place where it was received, as arrays of its own, and the
next parameters go to another place. When the program has dropped these arrays, and all views of their memory, the place is used
again. So arrays that were returned never change, as if they were copies. Must not know names, shards or sockets.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Layout
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.held import HeldParameters
from psd_client.lanes.segment import Segment

LENT_BYTES_MIN = 1 << 20
"""Bytes of the smallest model that is lent: copying a smaller one takes no longer than lending it."""

_PLACES_MAX = 3


def lent_places(layout: Layout) -> int:
    """Number of places for a program to which they can be lent. A place that is never used costs nothing."""
    return _PLACES_MAX if sum(block.nbytes for block in layout.blocks) >= LENT_BYTES_MIN else 1


class ParameterPlaces:
    """The places of one worker.

    Args:
        segment: shared memory for all of them; None: ordinary memory.
        is_lending: True if places can be lent to the program. Otherwise there is one place, which is used again and again.

    Attributes:
        shared: the places in the segment, which the shards must know. is_lending: False if there is one place only.
        reads_planes: True if parameters may be read where a shard of this machine has them. has_choice: True if either holds.
        held: what differences are added to, whatever the place; None: the job has none.
    """

    def __init__(self, layout: Layout, segment: Segment | None, *, is_lending: bool) -> None:
        self._layout = layout
        self.held = HeldParameters(layout) if layout.spec.compression.has_differences else None
        self._count_max = lent_places(layout) if is_lending else 1
        self.is_lending = self._count_max > 1
        self._places = [self._place(segment) for _ in range(1 if segment is None else self._count_max)]
        self._owners: dict[FlatBuffers, list[weakref.ref[NDArray[Any]]]] = {}
        self.shared = list(self._places) if segment is not None else []
        self.current = self._places[0]
        self.reads_planes = False
        self.has_choice = self.is_lending
        if segment is not None:
            _sharing.add(self)

    def _place(self, segment: Segment | None = None) -> FlatBuffers:
        place = FlatBuffers(self._layout, segment=segment)
        place.held = self.held
        return place

    def renew(self) -> FlatBuffers:
        """The place to receive into: the current one or, if that is lent, a free one with its versions and static tensors."""
        if self._is_lent(self.current) or self.current not in self._places:
            free = self._free()
            if not free:
                free.append(self._place())
                self._places += free
            before, self.current = self.current, free[0]
            self.current.versions[:] = before.versions
            for space, old, new in zip(self._layout.spaces, before.spaces, self.current.spaces, strict=True):
                if self._layout.spec.groups[space.group].is_static:
                    np.copyto(new, old)
        return self.current

    def read_planes(self) -> None:
        """Let the program read the parameters where a shard of this machine has them, if it can, until its next pull.

        It must not write to them. Call this before anything is received, without `is_lending`.
        """
        assert not self.is_lending
        self.reads_planes = bool(self.shared) and self._layout.shard_count == 1
        self.current.maps_planes, self.has_choice = self.reads_planes, self.reads_planes

    def settle(self) -> FlatBuffers:
        """Return where the parameters are, after a pull that may have been answered by planes. If not all lie in one plane,
        they are copied."""
        own = self.current
        if not own.lent:
            own.is_filled = True
            return own
        place = next(iter(own.lent.values()))
        if all(own.lent.get(block) is place for block in place.of_plane):
            if own.is_filled:
                own.discard(place)
            return place
        own.take_over()
        return own

    def lend(self, wanted: Collection[int] | None = None) -> list[NDArray[Any] | None]:
        """The current place's tensors for the program, to keep and to change; None for those that are not lent.

        Args:
            wanted: lend these alone; None: all.
        """
        if not (self._can_grow or any(place is not self.current for place in self._free())):
            return [None] * len(self.current.views)
        lent: list[NDArray[Any] | None] = []
        owners = self._owners[self.current] = [ref for ref in self._owners.get(self.current, ()) if ref() is not None]
        for index, (tensor, view) in enumerate(zip(self._layout.spec.tensors, self.current.views, strict=True)):
            if (
                not view.size
                or (wanted is not None and index not in wanted)
                or self._layout.spec.groups[tensor.group].is_static
            ):
                lent.append(None)
                continue
            # Over a memoryview, so that this array, and not the whole place, is the base of all views of it.
            owner: NDArray[Any] = np.frombuffer(view.data.cast("B"), view.dtype)
            owners.append(weakref.ref(owner))
            lent.append(owner.reshape(view.shape))
        return lent

    def _free(self) -> list[FlatBuffers]:
        """The places that are not lent; those that were used before come first."""
        free = [place for place in self._places if not self._is_lent(place)]
        return sorted(free, key=lambda place: place not in self._owners)

    @property
    def _can_grow(self) -> bool:
        return not self.shared and len(self._places) < self._count_max

    def _is_lent(self, place: FlatBuffers) -> bool:
        return any(ref() is not None for ref in self._owners.get(place, ()))

    def on_fork(self) -> None:
        """Never again use the places that are lent now: a child process that shares the memory may hold them, too."""
        self._places = [place for place in self._places if not self._is_lent(place)]


_sharing: weakref.WeakSet[ParameterPlaces] = weakref.WeakSet()


def _on_fork() -> None:
    for places in list(_sharing):
        places.on_fork()


os.register_at_fork(after_in_parent=_on_fork)
