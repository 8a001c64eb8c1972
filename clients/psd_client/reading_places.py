"""The memory in which a reader receives, and which part of it has what a shard's changes are changes to.

As with a worker, large tensors are not copied for the program: it gets the place where they were received, and the next version
goes to another one, or to the same one if the program holds it no more. The program may write to what it has; a change to a
block that was written to is found by its checksum, and all of the block is fetched. Must not know shards, cuts or names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from psd.contract.layout import Layout
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.segment import Segment
from psd_client.worker.exchange.lending import ParameterPlaces


class ReceivingPlaces(Protocol):
    """The places in which a reader receives. layout: None: of any layout."""

    @property
    def layout(self) -> Layout | None: ...  # noqa: D102 - above

    def renew(self, layout: Layout, codecs: list[str]) -> FlatBuffers:
        """The place to receive into, in these codecs; its `base` has what is held of each block."""
        ...

    def lend(self, place: FlatBuffers, tensors: Collection[int]) -> Sequence[NDArray[Any] | None]:
        """Take note that all has been received, and return the tensors that are the program's; None for the others."""
        ...


class ReadingPlaces:
    """The places of one reader. segment: as in ParameterPlaces."""

    def __init__(self, layout: Layout, segment: Segment | None) -> None:
        self.layout: Layout = layout
        self._places = ParameterPlaces(layout, segment, is_lending=True)
        self._latest = self._places.current  # which has the last version that all came of

    @property
    def shared(self) -> list[FlatBuffers]:
        """The places in the segment."""
        return self._places.shared

    def renew(self, layout: Layout, codecs: list[str]) -> FlatBuffers:
        """Return the place to receive into; its base is the one that was received in last."""
        assert layout is self.layout
        place = self._places.renew()
        place.base = self._latest if self._latest is not place else None
        for each in {place, self._latest}:
            each.read_in(codecs)
        return place

    def lend(self, place: FlatBuffers, tensors: Collection[int]) -> Sequence[NDArray[Any] | None]:
        """Lend the tensors, and let the place be the next one's base."""
        place.base, self._latest = None, place
        return self._places.lend(tensors)


class GivenPlace:
    """One place, which its giver takes back after each pull.

    Args:
        buffers: may be of another layout, and is not used then. None: there are none yet.
        base: an earlier version that stays as it is, from which on changes are told; None: `buffers` has what there is.

    Attributes:
        layout: None.
    """

    def __init__(self, buffers: FlatBuffers | None, base: FlatBuffers | None = None) -> None:
        self.layout = None
        self._buffers = buffers
        self._base = base

    @property
    def buffers(self) -> FlatBuffers:
        """The buffers that were received into."""
        assert self._buffers is not None
        return self._buffers

    def renew(self, layout: Layout, codecs: list[str]) -> FlatBuffers:
        """Return the place, with its base."""
        if self._buffers is None or self._buffers.layout is not layout:
            self._buffers = FlatBuffers(layout)
        self._buffers.base = self._base if self._base is not None and self._base.layout is layout else None
        self._buffers.read_in(codecs)
        return self._buffers

    def lend(self, place: FlatBuffers, tensors: Collection[int]) -> Sequence[NDArray[Any] | None]:
        """Lend nothing."""
        del tensors
        return [None] * len(place.views)
