"""A block of an arena whose pages are lent to its C core (_block.pyx), which counts gradients and publishes by itself.

The core goes round in a few places, and asks for one more when none of them is free; what it does not need any more goes back
to the arena's pool. While a place is lent, the core alone knows who has pinned its page. Must not know rounds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psd_core import _arena_format as form
from psd_core import _block
from psd_core._arena_page import Page, PageState
from psd_core._arena_pages import PageKind, Place, Pool, Views
from psd_core._block import BlockCore
from psd_core._c_headers import checksum
from psd_core._step_block import planned
from psd_core._store_format import ArenaError, StoreClosed, StoreFull

PLACES_KEPT = 4
"""Free places that a core keeps. It needs one for an update, and one more for each reader that holds an old page meanwhile."""

WORKERS_MAX = 1024

if checksum() != _block.RULES_CHECKSUM:
    raise ImportError("psd_core: its block core was built with another rules.py; build it again: pip install --editable .")


@dataclass(frozen=True, slots=True)
class Terms:
    """The way in which a lent block counts gradients.

    Attributes:
        rule, flags: as in psd_core.step_block. ends: (k,) uint32, the segments' ends.
        ages_rate: "lr" is divided by 1 + the age of a gradient.
        has_rounds: gradients are summed until a round has its contributors. Else each is an update.
        is_mean: their mean is applied, weighted. quorum: contributors of a round, if so many are waited for.
    """

    rule: str
    flags: Collection[str]
    ends: NDArray[np.uint32]
    ages_rate: bool
    has_rounds: bool
    is_mean: bool
    quorum: int


_STATES = {1: PageState.FREE, 2: PageState.SPARE, 3: PageState.PUBLISHED}


class LentPage(Page):
    """One version of a lent block. Its pins and its state are the core's.

    Attributes:
        lent: the block. entry, use: by which the core knows it.
    """

    __slots__ = ("entry", "lent", "use")

    def __init__(self, lent: LentBlock, entry: int, place: Place, views: Views, body: Views) -> None:
        self.use, self.version, self.content = lent.core.facts(entry)
        self.lent = lent
        self.entry = entry
        self.block = lent.block
        self.place = place
        assert body.parameter is not None
        self.parameter, self.slots, self.extra = body.parameter, body.slots, body.extra
        self.steps, self.sessions, self.clocks = views.steps, views.sessions, views.clocks
        self.base = self.region = self.sums = None  # the core's pages lie in no plane, and it makes their checksums

    @property
    def pins(self) -> int:  # type: ignore[override]
        """Readers, plus one while the page is current."""
        return self.lent.core.pins(self.entry, self.use)

    @property
    def state(self) -> PageState:  # type: ignore[override]
        """State that decides what it may be given to."""
        return _STATES[self.lent.core.state(self.entry, self.use)]


class LentBlock:
    """Block that is lent for as long as the arena is open.

    Args:
        mapping: of the arena's front.
        others: returns the arena's lent blocks, which have places to spare when there is no room.

    Attributes:
        core: counts gradients. block: its index.
    """

    def __init__(
        self,
        block: int,
        terms: Terms,
        front: form.Front,
        mapping: mmap.mmap,
        pool: Pool,
        kind: PageKind,
        others: Callable[[], Iterable[LentBlock]],
        on_store: Callable[[str], None] | None,
    ) -> None:
        shape, layout = front.shapes[block], front.layouts[block]
        plan = planned(terms.rule, tuple(terms.flags))
        self.block = block
        self.core = BlockCore(
            mapping,
            front.table_at + 8 * block,
            dtype={"float32": "f", "float64": "d"}[shape.dtype],
            length=shape.length,
            ends=terms.ends,
            workers=front.workers,
            head_words=layout.head_words,
            body_words=layout.body_words,
            stride=layout.body_words * 8 // (1 + shape.slot_count + shape.extra_count),
            index=block,
            rule=plan.number,
            flags=plan.flags,
            slot_at=tuple([-1 if place is None else place for place in plan.places]),
            scalars=len(plan.scalars),
            zeros=plan.zeros,
            rate=plan.scalars.index("lr") if terms.ages_rate else -1,
            has_rounds=terms.has_rounds,
            is_mean=terms.is_mean,
            quorum=terms.quorum,
            on_store=on_store,
        )
        self._shape = shape
        self._layout = layout
        self._workers = front.workers
        self._pool = pool
        self._kind = kind
        self._others = others
        self._places: dict[int, tuple[Place, Place]] = {}  # by entry: of the head, and of the body
        self._pages: dict[int, LentPage] = {}  # the last one of each entry

    # -- pages -------------------------------------------------------------------------------------------------------------

    def adopt(self, page: Page) -> None:
        """Take over the published page, which nobody has pinned."""
        assert page.pins == 1, f"block {self.block}: somebody reads the page that is to be lent"
        assert page.region is None, f"block {self.block}: its parameter lies in a plane"
        entry = self._lend(page.place, page.place if page.base is None else page.base.place)
        self.core.adopt(entry, page.version, page.content)

    def extend(self) -> None:
        """Lend one more place. Raises StoreFull, StoreClosed."""
        try:
            place = self._pool.take(self._kind)
        except StoreFull:
            found = next((each for lent in self._others() if (each := lent.give_up(self._kind)) is not None), None)
            if found is None:
                raise
            place = found
        else:
            with self._pool.lock:
                self._pool.take_back()  # the core tells `stop` what is in somebody's hands
        self._lend(place, place)

    def _lend(self, head: Place, body: Place) -> int:
        base = 0 if head is body else body.number
        at = body.start + self._layout.parameter_at
        entry = self.core.lend(head.mapping, head.start, head.number, body.mapping, at, base)
        self._places[entry] = head, body
        self._pages.pop(entry, None)
        return entry

    def give_up(self, kind: PageKind) -> Place | None:
        """A place of that kind that nobody uses, if there is one; it is lent no more."""
        while kind is self._kind and (entry := self.core.surplus(0)) >= 0:
            head, body = self._places.pop(entry)
            if head is body:
                return head
            self._give(head, body)
        return None

    def _give(self, *places: Place) -> None:
        with self._pool.lock:
            surplus = [each for place in dict.fromkeys(places) for each in self._pool.give(place)]
        if surplus:
            self._pool.punch(surplus)

    def page(self, entry: int) -> LentPage:
        """The page of an entry, as it is used now."""
        page = self._pages.get(entry)
        if page is None or page.use != self.core.facts(entry)[0]:
            head, body = self._places[entry]
            views = head.views(self._shape, self._layout, self._workers)
            of_body = views if head is body else body.views(self._shape, self._layout, self._workers)
            page = self._pages[entry] = LentPage(self, entry, head, views, of_body)
        return page

    def current(self) -> Page | None:
        """The published page, not pinned; None: never published."""
        entry = self.core.current
        return None if entry < 0 else self.page(entry)

    def pin(self) -> Page:
        """The published page, which stays as it is until `unpin`. Raises ArenaError if there is none, StoreClosed."""
        entry = self.core.pin()
        if entry >= 0:
            return self.page(entry)
        if self.core.is_closed:
            raise StoreClosed("the arena has been closed")
        raise ArenaError(f"block {self.block} was never published")

    def unpin(self, page: LentPage) -> None:
        """Give a pinned page back."""
        self.core.unpin(page.entry, page.use)
        self._came_back()

    def spare(self) -> Page:
        """A page to write the block's next version into; its contents are undefined. Raises StoreFull, StoreClosed."""
        while (entry := self.core.spare()) < 0:
            self.extend()
        return self.page(entry)

    def publish(self, page: LentPage, version: int) -> None:
        """Make a spare the current page, in one step. Raises StoreClosed; the page is given back."""
        status = self.core.publish(page.entry, page.use, version)
        if status == _block.GIVEN_BACK:
            self.came_too_late()
        _, page.version, page.content = self.core.facts(page.entry)

    def discard(self, page: LentPage) -> None:
        """Give back a spare that will not be published."""
        self.core.discard(page.entry, page.use)
        self._came_back()

    def came_too_late(self) -> None:
        """Note that the core has written a page that it could not publish any more. Raises StoreClosed."""
        self._came_back()
        raise StoreClosed(f"block {self.block}: the arena has been closed; the page is not published")

    def _came_back(self) -> None:
        if self.core.is_closed:
            with self._pool.lock:
                self._pool.take_back()
        elif (entry := self.core.surplus(PLACES_KEPT)) >= 0:
            self._give(*self._places.pop(entry))

    @property
    def current_bytes(self) -> int:
        """Bytes of the published page."""
        entry = self.core.current
        return 0 if entry < 0 else sum(place.kind.size for place in dict.fromkeys(self._places[entry]))

    @property
    def spare_bytes(self) -> int:
        """Memory of places that nobody uses."""
        return self.core.free * self._kind.size
