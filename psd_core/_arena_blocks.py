"""The life of a page: spare, published, pinned, free. What an update and its readers call, and nothing else.

One lock, held for a few list operations, guards free lists and pins; publishing is one store. Knows nothing of how an arena is
made, opened or removed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from psd_core import _arena_format as form
from psd_core import _store_file as files
from psd_core._arena import SUMS_BYTES, Content, Words
from psd_core._arena_lent import LentBlock, LentPage, Terms
from psd_core._arena_page import Page, PageState
from psd_core._arena_pages import Place, Pool, Views
from psd_core._arena_planes import PlaneFile, Planes, Region
from psd_core._store_format import ArenaError, StoreClosed

STREAMED_BYTES = 64 << 20
"""Bytes of all parameters from which they are written past the processor's caches: what these hold of one block has gone before
that block's next version is written."""
STREAMED_BLOCK_BYTES = 256 << 10
"""Bytes of a block from which that is so."""


class Found(NamedTuple):
    """A published page, as `adopt` takes it over.

    Attributes:
        base: place of the page whose body it has; None: its own. content: the checksum of the body.
        region: where the parameter lies in a plane; None: in the body.
    """

    place: Place
    version: int
    base: Place | None
    content: int
    region: Region | None = None


class Unused(NamedTuple):
    """Memory that goes back to the system: places and regions."""

    places: Sequence[Place] = ()
    regions: Sequence[Region] = ()


class Blocks:
    """The pages of all blocks of an arena. Blocks are known by index.

    Args:
        directory: of the planes' files.
    """

    def __init__(
        self, file: files.File, front: form.Front, mapping: mmap.mmap, directory: Path, crash_point: Callable[[str], None]
    ) -> None:
        self.table = Words(mapping, front.table_at, len(front.shapes))
        self.extents = Words(mapping, front.extents_at, front.extents_max)
        self.pool = Pool(file, front.size, front.page_sizes, self.extents, crash_point)
        self.planes = Planes(directory, front.shapes, self.pool.lock)
        kind_of = {kind.size: kind for kind in self.pool.kinds}
        self._apart_kinds = [kind_of[layout.size] for layout in front.apart_layouts]
        self._kinds = [kind_of[layout.size] for layout in front.layouts]
        self._head_kinds = [kind_of[layout.head_size] for layout in front.layouts]
        is_large = sum(shape.nbytes for shape in front.shapes) >= STREAMED_BYTES
        self._is_streamed = [is_large and shape.nbytes >= STREAMED_BLOCK_BYTES for shape in front.shapes]
        self._front = front
        self._current: list[Page | None] = [None] * len(front.shapes)
        self._mapping = mapping
        self._lent: list[LentBlock | None] = [None] * len(front.shapes)
        self._crash_point = crash_point

    def adopt(self, found: Sequence[Found | None]) -> None:
        """Take over, after opening, what was found of each published block; every other place is free."""
        used = set()
        for block, entry in enumerate(found):
            if entry is None:
                continue
            base, region = None, entry.region
            if entry.base is not None:
                base, region = self._page(block, entry.base, region=region), None
                base.pins, base.state, base.content = 1, PageState.PUBLISHED, entry.content
                used.add(entry.base.number)
            page = self._page(block, entry.place, base, region)
            page.version, page.pins, page.state, page.content = entry.version, 1, PageState.PUBLISHED, entry.content
            self._current[block] = page
            used.add(entry.place.number)
        self.pool.adopt(used)

    def lend(self, block: int, terms: Terms, on_store: Callable[[str], None] | None) -> LentBlock:
        """Lend a block to a C core, which has its pages from now on."""
        assert self._lent[block] is None, f"block {block} is lent already"
        lent = LentBlock(block, terms, self._front, self._mapping, self.pool, self._kinds[block], self._all_lent, on_store)
        page, self._current[block] = self._current[block], None
        if page is not None:
            lent.adopt(page)
        self._lent[block] = lent
        return lent

    def _all_lent(self) -> list[LentBlock]:
        return [lent for lent in self._lent if lent is not None]

    def stop(self) -> None:
        """Give no page out any more, and publish none."""
        self.pool.stop(lambda: sum(lent.core.stop() for lent in self._all_lent()))

    def begin_planes(self, blocks: Collection[int]) -> PlaneFile:
        """Let the next versions of these blocks lie in planes; spare pages of their size go back to the system."""
        file = self.planes.begin(blocks)
        kinds = [kind for block in blocks if (kind := self._kinds[block]) is not self._apart_kinds[block]]
        self.pool.punch(self.pool.withdraw_idle(kinds))
        return file

    def current(self, block: int) -> Page | None:
        """The published page, not pinned: for the thread that updates the block. None: never published."""
        lent = self._lent[block]
        return self._current[block] if lent is None else lent.current()

    def pin(self, block: int) -> Page:
        """The published page, which stays as it is until `unpin`. Raises ArenaError if there is none, StoreClosed."""
        lent = self._lent[block]
        if lent is not None:
            return lent.pin()
        with self.pool.lock:
            page = self._current[block]
            if page is None:
                raise ArenaError(f"block {block} was never published")
            self.pool.hand_out()
            page.pins += 1
        return page

    def unpin(self, page: Page) -> None:
        """Give a pinned page back."""
        if isinstance(page, LentPage):
            page.lent.unpin(page)
            return
        with self.pool.lock:
            surplus = self._unpin(page)
            self.pool.take_back()
        self._give_back(surplus)

    def spare(self, block: int) -> Page:
        """A page to write the block's next version into: all of it, since its contents are undefined.

        Raises:
            StoreFull: no space, or no room in the arena's own tables. Nothing has changed.
            StoreClosed: it has been closed.
        """
        lent = self._lent[block]
        if lent is not None:
            return lent.spare()
        before = self._current[block]
        region = self.planes.take(block, 0 if before is None else before.version + 1)
        try:
            place = self.pool.take(self._kinds[block] if region is None else self._apart_kinds[block])
        except BaseException:
            with self.pool.lock:
                unused = [] if region is None else self.planes.give(region)
            self.planes.release(unused)
            raise
        page = self._page(block, place, region=region)
        if self._is_streamed[block]:
            page.sums = np.zeros(SUMS_BYTES, np.uint8)
        return page

    def spare_alike(self, block: int) -> Page:
        """A page for a next version whose parameter, slots and extra arrays are the current one's: sessions, clocks and steps
        are to be written, and nothing else. Costs no more than these: it has the body of the current one; if a head takes as
        much room as all, a copy.

        Raises:
            StoreFull, StoreClosed: as `spare`.
        """
        before = self.current(block)
        assert before is not None, f"block {block} was never published"
        kind = self._head_kinds[block]
        base = before if before.base is None else before.base
        if (kind is self._kinds[block] and base.region is None) or self._lent[block] is not None:
            page = self.spare(block)
            for old, new in zip(before.arrays, page.arrays, strict=True):
                np.copyto(new, old)
            return page
        place = self.pool.take(kind)
        with self.pool.lock:
            base.pins += 1
        return self._page(block, place, base)

    def publish(self, block: int, page: Page, version: int) -> None:
        """Make a spare the block's current page, in one step. The old page is free when its last pin goes.

        Raises:
            StoreClosed: it has been closed; the page is given back.
        """
        assert page.state is PageState.SPARE, f"block {block}: the page to publish is {page.state.value}"
        assert page.block == block, f"block {block}: the page to publish is one of block {page.block}"
        if isinstance(page, LentPage):
            page.lent.publish(page, version)
            return
        head, number, base = page.head, page.place.number, page.base
        for tail in page.tails if base is None else ():
            tail.fill(0)  # equal values have equal checksums, whatever has lain in this place before
        page.content = _content(page) if base is None else base.content
        self._crash_point("arena.publish.before_header")
        of_body = 0 if base is None else base.place.number
        region = page.region if base is None else base.region
        if region is not None:
            of_body = form.pack_body(of_body, region.plane, region.file.number)
        head.write(1, form.PAGE_MAGIC, block, number, version, head.count, page.content, of_body)
        check = head.checksum(1, head.count - 1)
        head.write(0, check)
        self._crash_point("arena.publish.before_flip")
        with self.pool.lock:
            self.pool.take_back()
            if self.pool.is_closed:
                page.state = PageState.FREE
                raise StoreClosed(f"block {block}: the arena has been closed; the page is not published")
            page.version, page.state, page.pins = version, PageState.PUBLISHED, 1
            self.table.store(block, form.pack_entry(number, check))
            self._crash_point("arena.publish.after_flip")
            before = self._current[block]
            self._current[block] = page
            # Until here, a reader could still pin the old page: it was whole, and free it is only from here on.
            surplus = Unused() if before is None else self._unpin(before)
        self._give_back(surplus)

    def discard(self, page: Page) -> None:
        """Give back a spare that will not be published."""
        if isinstance(page, LentPage):
            page.lent.discard(page)
            return
        with self.pool.lock:
            assert page.state is PageState.SPARE, f"block {page.block}: the page to discard is {page.state.value}"
            surplus = self._free(page)
            self.pool.take_back()
        self._give_back(surplus)

    @property
    def current_bytes(self) -> int:
        """Bytes of the published pages."""
        current = [page for page in self._current if page is not None]
        pages = [*current, *(page.base for page in current if page.base is not None)]
        apart = sum(page.parameter.nbytes for page in pages if page.region is not None)
        return sum(page.place.kind.size for page in pages) + apart + sum(lent.current_bytes for lent in self._all_lent())

    @property
    def spare_bytes(self) -> int:
        """Bytes of the places that no version lives in and nobody has in hand."""
        return self.pool.spare_bytes() + self.planes.idle_bytes + sum(lent.spare_bytes for lent in self._all_lent())

    def _unpin(self, page: Page) -> Unused:
        assert page.state is PageState.PUBLISHED, f"block {page.block}: the page to unpin is {page.state.value}"
        page.pins -= 1
        return Unused() if page.pins > 0 else self._free(page)

    def _free(self, page: Page) -> Unused:
        page.state = PageState.FREE
        if page.base is not None:
            of_base = self._unpin(page.base)
            return Unused((*self.pool.give(page.place), *of_base.places), of_base.regions)
        if page.region is not None:
            return Unused(self.pool.give(page.place), self.planes.give(page.region))
        # Of a block whose versions lie in planes now, no whole page is needed soon.
        is_over = self.planes.has(page.block)
        return Unused(self.pool.withdraw(page.place) if is_over else self.pool.give(page.place))

    def _give_back(self, unused: Unused) -> None:
        if unused.places:
            self.pool.punch(unused.places)
        if unused.regions:
            self.planes.release(unused.regions)

    def _page(self, block: int, place: Place, base: Page | None = None, region: Region | None = None) -> Page:
        front = self._front
        layouts = front.layouts if region is None else front.apart_layouts
        views = place.views(front.shapes[block], layouts[block], front.workers)
        with_body: Page | Views = views if base is None else base
        parameter = with_body.parameter if region is None else region.file.array(region.plane, block)
        assert parameter is not None
        # A new object each time: whoever still holds one of an earlier use of this place cannot free the place by mistake.
        return Page(
            block,
            parameter,
            with_body.slots,
            with_body.extra,
            views.steps,
            views.sessions,
            views.clocks,
            version=0,
            pins=0,
            state=PageState.SPARE,
            place=place,
            head=views.head,
            body=with_body.body,
            tails=with_body.tails,
            base=base,
            region=region,
        )


def _content(page: Page) -> int:
    """The checksum of a page's body; of a parameter that is apart, first."""
    if page.region is None and page.sums is None:
        return int(page.body.content())
    content = Content(page.sums)
    done = content.nbytes  # of the parameter, which comes first
    if page.region is None:
        content.add(memoryview(page.body)[done:])
    else:
        content.add(page.parameter.view(np.uint8)[done:])
        content.add(page.body)
    return int(content.check())
