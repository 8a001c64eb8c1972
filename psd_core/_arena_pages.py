"""Pages of an arena: extents, free lists, growth, and giving memory back. Knows no blocks' contents and publishes nothing.

A *place* is where a page can lie. A free place is either *backed*, so that writing to it cannot fail, or a *hole*, which costs
no memory and is reserved before it is lent. Backed ones are lent last-in-first-out: the page that was written last is the one
that is still in the processor's cache.

Memory goes back without a system call per update: each kind of page remembers how many backed places lay idle throughout
the last few dozen frees. What is beyond SPARE_PAGES_KEPT of those is surplus, and later frees punch it out, a few at a time.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _arena_format as form
from psd_core import _store_file as files
from psd_core._arena import Words
from psd_core._store_format import CACHE_LINE_BYTES, StoreClosed, StoreFull, align

SPARE_PAGES_KEPT = 8
"""Idle backed places kept per kind. A spare is in use only while an update runs or a reader holds an old page."""
GROWTH_PAGES_MIN = 4
_TRIM_BATCH = 4
_PERIOD_MIN = 64
_VIEWS_MAX = 8


class Views:
    """The arrays of one block shape over one place; all but those of the head only if it has room for them.

    Attributes:
        parameter: None if it is apart, in a plane.
        tails: the bytes between the end of the parameter, or of another array of the body, and the next cache line.
    """

    __slots__ = ("body", "clocks", "extra", "head", "parameter", "sessions", "slots", "steps", "tails")
    parameter: NDArray[Any] | None

    def __init__(
        self, mapping: mmap.mmap, start: int, size: int, shape: form.BlockShape, layout: form.PageLayout, workers: int
    ):
        def array(count: int, dtype: str, at: int) -> NDArray[Any]:
            view: NDArray[Any] = np.ndarray((count,), dtype, mapping, start + at)
            return view

        self.head = Words(mapping, start, layout.head_words)
        self.sessions = array(workers, "u8", layout.sessions_at)
        self.clocks = array(workers, "u8", layout.clocks_at)
        self.steps = array(shape.segment_count, "u8", layout.steps_at)
        if size < layout.size:
            return
        self.body = Words(mapping, start + layout.parameter_at, layout.body_words)
        own_at = () if layout.is_apart else (layout.parameter_at,)
        self.parameter = array(shape.length, shape.dtype, layout.parameter_at) if own_at else None
        self.slots = tuple(array(shape.length, shape.dtype, at) for at in layout.slots_at)
        self.extra = tuple(array(shape.length, shape.dtype, at) for at in layout.extra_at)
        nbytes = shape.nbytes
        tail, arrays_at = -nbytes % CACHE_LINE_BYTES, (*own_at, *layout.slots_at, *layout.extra_at)
        self.tails = [array(tail, "u1", at + nbytes) for at in arrays_at if tail]


class Place:
    """Room for a page. `offset` counts from the start of the file, `start` from that of the mapping."""

    __slots__ = ("_views", "kind", "mapping", "offset", "start")

    def __init__(self, kind: PageKind, offset: int, mapping: mmap.mmap, start: int) -> None:
        self.kind = kind
        self.offset = offset
        self.mapping = mapping
        self.start = start
        self._views: dict[tuple[form.BlockShape, bool], Views] = {}

    @property
    def number(self) -> int:
        """The offset in units, as the block table has it."""
        return self.offset // form.UNIT_BYTES

    def views(self, shape: form.BlockShape, layout: form.PageLayout, workers: int) -> Views:
        """The arrays for a shape. They are kept: making them costs more than everything else about lending a page."""
        views = self._views.get((shape, layout.is_apart))
        if views is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            views = self._views[shape, layout.is_apart] = Views(
                self.mapping, self.start, self.kind.size, shape, layout, workers
            )
        return views


class PageKind:
    """All places of one size."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.places = 0
        self.backed: deque[Place] = deque()  # lent from the right, trimmed from the left
        self.holes: list[Place] = []
        self.idle_min = 0  # fewest backed places seen idle since `frees` was 0
        self.frees = 0
        self.surplus = 0


class Pool:
    """All places of an arena. Thread-safe; `lock` also guards the arena's pins.

    After `close` it gives nothing out. What comes back changes nothing: neither lists nor the file, which may be somebody
    else's by then. A page that is still in somebody's hands is good memory until that one lets go of it.
    """

    def __init__(
        self,
        file: files.File,
        front_bytes: int,
        page_sizes: Sequence[int],
        records: Words,
        crash_point: Callable[[str], None],
    ) -> None:
        self.lock = threading.Lock()
        self.kinds = [PageKind(i, size) for i, size in enumerate(page_sizes)]
        self.places: dict[int, Place] = {}  # by page number
        self.file_end = front_bytes
        self.backed_bytes = front_bytes
        self._file = file
        self._records = records
        self._record_count = 0
        self._crash_point = crash_point
        self._can_punch = True
        self._in_hands = 0  # pages that somebody writes or has pinned
        self._is_closed = False
        self._when_unheld: Callable[[], None] | None = None

    def stop(self, held: Callable[[], int]) -> None:
        """Give no page out any more. held: stops those whom places are lent to, and returns the pages in hands there that are
        to be counted from now on."""
        with self.lock:
            self._is_closed = True
            self._in_hands += held()

    def close(self, when_unheld: Callable[[], None]) -> None:
        """Do what `stop` does, and call `when_unheld` when nobody holds a page, now or later."""
        with self.lock:
            self._is_closed = True
            self._when_unheld = when_unheld
            self._call_if_unheld()

    def hand_out(self) -> None:
        """Note that a page is given out. Call with the lock held. Raises StoreClosed."""
        if self._is_closed:
            raise StoreClosed("the arena has been closed")
        self._in_hands += 1

    def take_back(self) -> None:
        """Note that a page has come back. Call with the lock held."""
        self._in_hands -= 1
        if self._when_unheld is not None:
            self._call_if_unheld()

    def _call_if_unheld(self) -> None:
        if self._in_hands == 0 and self._when_unheld is not None:
            self._when_unheld()
            self._when_unheld = None

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def add_extent(self, kind: PageKind, count: int, *, publish: bool) -> list[Place]:
        """Map the next extent, and record it if `publish`. Its places are the caller's to put on a list."""
        index, start = self._record_count, self.file_end
        if index >= self._records.count:
            raise StoreFull(f"the arena has no room for more than {index} extents")
        nbytes = align(count * kind.size, form.EXTENT_ALIGN_BYTES)
        if publish:
            self._file.extend(start + nbytes)
        mapping = self._file.map_shared(start, nbytes)
        if publish:
            self._crash_point("arena.grow.before_record")
            self._records.store(index, form.pack_extent(index, kind.index, count))
            self._crash_point("arena.grow.after_record")
        self._record_count += 1
        self.file_end = start + nbytes
        kind.places += count
        places = [Place(kind, start + i * kind.size, mapping, i * kind.size) for i in range(count)]
        self.places.update((place.number, place) for place in places)
        return places

    def back_all(self, places: Sequence[Place]) -> None:
        """Reserve and fault in the adjacent places of a new extent, and put them on the free list."""
        first, nbytes = places[0], len(places) * places[0].kind.size
        self._file.reserve(first.offset, nbytes)
        files.populate(first.mapping, first.start, nbytes)
        first.kind.backed.extend(reversed(places))
        self.backed_bytes += nbytes

    def adopt(self, used: set[int]) -> None:
        """Take over an opened arena: the places that are not in `used` (page numbers) are free, as holes."""
        for number, place in self.places.items():
            if number in used:
                self.backed_bytes += place.kind.size
            else:
                self._file.release(place.offset, place.kind.size)
                place.kind.holes.append(place)
        for kind in self.kinds:
            kind.holes.reverse()

    def take(self, kind: PageKind) -> Place:
        """A free place that can be written to, handed out. Raises StoreFull, StoreClosed."""
        with self.lock:
            self.hand_out()
            try:
                place, is_backed = self._pop(kind)
            except BaseException:
                self.take_back()
                raise
        if is_backed:
            return place
        try:
            # Outside the lock: fresh memory is slow (a MiB takes a few hundred microseconds), and others have spares.
            self._file.reserve(place.offset, kind.size)
        except BaseException:
            with self.lock:
                kind.holes.append(place)
                self.backed_bytes -= kind.size
                self.take_back()
            raise
        files.populate(place.mapping, place.start, kind.size)
        return place

    def _pop(self, kind: PageKind) -> tuple[Place, bool]:
        """A free place, and whether it is backed; a place that is not is counted as if it were."""
        if kind.backed:
            place = kind.backed.pop()
            if len(kind.backed) < kind.idle_min:
                kind.idle_min = len(kind.backed)
            return place, True
        kind.idle_min = 0
        if not kind.holes:
            step = max(GROWTH_PAGES_MIN, kind.places // 8)
            kind.holes.extend(reversed(self.add_extent(kind, step, publish=True)))
        self.backed_bytes += kind.size
        return kind.holes.pop(), False

    def give(self, place: Place) -> list[Place]:
        """Put a place that nobody reads any more on its list. Call with the lock held, and `punch` the result without it."""
        if self._is_closed:
            return []
        self._crash_point("arena.free")
        kind = place.kind
        kind.backed.append(place)
        kind.frees += 1
        if kind.frees >= max(_PERIOD_MIN, kind.places):
            kind.surplus = kind.idle_min - SPARE_PAGES_KEPT
            kind.frees, kind.idle_min = 0, len(kind.backed)
        if kind.surplus <= 0:
            return []
        count = min(kind.surplus, _TRIM_BATCH)
        kind.surplus -= count
        return self._cut(kind, count)

    def withdraw(self, place: Place) -> list[Place]:
        """Take back a place that is not needed soon: its memory goes. Call as `give`."""
        if self._is_closed:
            return []
        self._crash_point("arena.free")
        return [place]

    def withdraw_idle(self, kinds: Collection[PageKind]) -> list[Place]:
        """Take all backed places of these kinds, which are not needed soon, off their lists, to be punched."""
        with self.lock:
            return [place for kind in kinds for place in self._cut(kind, len(kind.backed), kept=0)]

    def trim(self) -> None:
        """Give all surplus back now."""
        for kind in self.kinds:
            with self.lock:
                kind.surplus = 0
                surplus = self._cut(kind, len(kind.backed))
            self.punch(surplus)

    def punch(self, places: Sequence[Place]) -> None:
        """Make holes of backed places that are on no list."""
        for place in places:
            self._crash_point("arena.trim")
            punched = self._can_punch and self._file.release(place.offset, place.kind.size)
            with self.lock:
                if punched:
                    place.kind.holes.append(place)
                    self.backed_bytes -= place.kind.size
                else:
                    self._can_punch = False
                    place.kind.backed.appendleft(place)

    def _cut(self, kind: PageKind, count: int, kept: int = SPARE_PAGES_KEPT) -> list[Place]:
        """Remove up to `count` of the coldest backed places, and leave `kept`."""
        if self._is_closed or not self._can_punch:
            return []
        count = max(0, min(count, len(kind.backed) - kept))
        kind.idle_min = max(0, kind.idle_min - count)
        return [kind.backed.popleft() for _ in range(count)]

    def spare_bytes(self) -> int:
        """Memory of free places."""
        with self.lock:
            return sum(kind.size * len(kind.backed) for kind in self.kinds)
