"""psdctl top on a terminal, with Textual. The one module that imports it.

A thread takes snapshots; the terminal shows the latest one or, while it is paused, the one at which it was paused. Must not
know shards or messages.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static
from typing_extensions import override

from psd.contract import facts
from psd.watch.history import Moment
from psd.watch.sampler import Sampler
from psd.watch.snapshot import CurvePoint, Event, JobSnapshot
from psd.watch.top import lines
from psd.watch.top.columns import SHARD_COLUMNS, SORTS, Grid, grid, sorted_workers, worker_columns

_HELP = """\
[b]psdctl top[/b]

Is it training, how fast, what limits it, who is slow.

  q        quit
  p        pause the picture; the job goes on
  s        sort the workers by another column
  r        reverse the order
  e        all events that are known, the latest first
  tab      go to the other table; arrows and page keys move in it
  ?        this page; any key leaves it

{columns}
Columns that do not fit are left out; a wider terminal has more."""

_EXPLAINED = ("latency_s", "cpu_share", "awaited_share", "last_seen_s", "behind")
"""Numbers whose headings need an explanation; a small terminal has no room for more."""

_COLUMNS = "\n".join(
    f"[b]{fact.title.upper():<11}[/b]" + ("\n" + " " * 11).join(wrap(fact.help, 60))
    for fact in (*facts.SHARD, *facts.WORKER)
    if fact.name in _EXPLAINED
)

READERS_MAX = 3
"""Readers that are shown; a terminal has no room for all."""

_STYLES = {
    **dict.fromkeys(("no answer", "failed", "expired"), "bold red"),
    **dict.fromkeys(("draining", "restoring", "absent"), "yellow"),
    **dict.fromkeys(("serving", "live"), "green"),
    "finished": "dim",
}

_LEVELS = {"warning": "yellow", "error": "bold red"}

_SCROLLING = ("up", "down", "pageup", "pagedown", "home", "end")

EARLY_S = 0.5
EARLY_LOOKS = 5
"""The first looks follow each other faster, so that there are rates and sparklines at once."""

EVENTS_MIN = 3
"""Events for which there is room however many workers there are,"""
EVENTS_MAX = 12
"""and those that are shown where there is more room; a key shows all."""

_FRAME = 2
"""Lines of the events' heading and of the footer."""

SMALL_HEIGHT = 18
"""In a terminal that is lower, one event is shown."""


class HelpScreen(ModalScreen[None]):
    """The keys and the columns."""

    CSS = """
    HelpScreen { align: center middle; }
    #help { width: 78; height: auto; max-height: 100%; padding: 0 2; border: round $accent; }
    """

    @override
    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(_HELP.format(columns=_COLUMNS))

    def on_key(self, event: Key) -> None:
        """Close the screen on any key but those that scroll a page which a small terminal cuts."""
        if event.key not in _SCROLLING:
            self.dismiss()


class EventsScreen(ModalScreen[None]):
    """All events that are known, the latest first.

    Args:
        events: the latest last.
    """

    CSS = """
    EventsScreen { align: center middle; }
    #all { width: 100%; height: auto; max-height: 100%; padding: 0 1; border: round $accent; }
    """

    def __init__(self, events: Sequence[Event]) -> None:
        super().__init__()
        self._events = events

    @override
    def compose(self) -> ComposeResult:
        told = [Text(lines.event_line(event), style=_LEVELS.get(event.level, "")) for event in reversed(self._events)]
        with VerticalScroll(id="all"):
            yield Static(Text("\n").join(told) if told else Text("nothing is known to have happened"))

    def on_key(self, event: Key) -> None:
        """Close the screen on any key but those that scroll."""
        if event.key not in _SCROLLING:
            self.dismiss()


class TopApp(App[None]):
    """Shows a job, live.

    Args:
        interval_s: seconds between two snapshots. sort: one of SORTS. early_s: seconds between the first ones.
    """

    TITLE = "psdctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #waits, #events { height: auto; padding: 0 1; }
    #shards { height: auto; max-height: 30%; }
    #waits { color: $text-muted; }
    #workers { height: 1fr; min-height: 4; }
    DataTable { overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("e", "events", "Events"),
        Binding("question_mark", "help", "Help"),
    ]

    def __init__(self, sampler: Sampler, interval_s: float, sort: str = "rank", early_s: float = EARLY_S) -> None:
        super().__init__()
        self._sampler = sampler
        self._interval_s = interval_s
        self._early_s = min(early_s, interval_s)
        self._sort = sort
        self._is_reversed = False
        self._is_paused = False
        self._ended = threading.Event()
        self._seen: tuple[JobSnapshot, Sequence[Moment], dict[str, Sequence[CurvePoint]], Sequence[Event]] | None = None

    @override
    def compose(self) -> ComposeResult:
        yield Static("asking the shards ...", id="head", markup=False)
        yield DataTable(id="shards", cursor_type="row")
        yield DataTable(id="workers", cursor_type="row")
        yield Static(id="waits", markup=False)
        yield Static(id="events", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to take snapshots."""
        self.query_one("#workers").focus()
        self.run_worker(self._look_on, thread=True, exit_on_error=True)

    def _look_on(self) -> None:
        waits_s = itertools.chain(itertools.repeat(self._early_s, EARLY_LOOKS), itertools.repeat(self._interval_s))
        while not self._ended.is_set():
            now, history = self._sampler.look(), self._sampler.history
            seen = now, history.moments, history.curves, [*history.events]
            if not self._ended.is_set():
                self.call_from_thread(self.take, *seen)
            self._ended.wait(next(waits_s))

    def on_unmount(self) -> None:
        """Take no more snapshots."""
        self._ended.set()

    def take(
        self,
        now: JobSnapshot,
        moments: Sequence[Moment],
        curves: dict[str, Sequence[CurvePoint]],
        events: Sequence[Event],
    ) -> None:
        """Show a snapshot, unless the display is paused."""
        if not self._is_paused:
            self._seen = now, moments, curves, events
            self._show()

    def on_resize(self) -> None:
        """Show the parts that fit the new size."""
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        if self._seen is None:
            return
        now, moments, curves, events = self._seen
        width = self.size.width - 2
        paused = [f"paused; sorted by {self._sort}; p goes on"] if self._is_paused else []
        head = [*lines.head_lines(now, width), *lines.spark_lines(moments, width), *lines.curve_lines(curves, width), *paused]
        self.query_one("#head", Static).update("\n".join(head))
        # A table has a blank on each side of every cell.
        shards = grid(SHARD_COLUMNS, now.shards, width)
        self._fill("#shards", shards)
        workers = grid(
            worker_columns(now.workers), sorted_workers(now.workers, self._sort, is_reversed=self._is_reversed), width
        )
        self._fill("#workers", workers)
        waits = [*lines.reader_lines(now, width, READERS_MAX), *lines.wait_lines(now, width)]
        self.query_one("#waits", Static).update("\n".join(waits))
        height = self.size.height
        tables = min(len(shards.rows) + 1, 3 * height // 10) + len(workers.rows) + 1
        free = height - len(head) - tables - len(waits) - _FRAME
        count = 1 if height < SMALL_HEIGHT else max(EVENTS_MIN, min(EVENTS_MAX, free))
        self.query_one("#events", Static).update(_events_text(events, width, count))

    def _fill(self, which: str, found: Grid) -> None:
        """Replace the rows of a table; keep the cursor and the scroll position."""
        table = self.query_one(which, DataTable)
        row, scrolled_to = table.cursor_row, table.scroll_y
        if tuple(column.label.plain for column in table.ordered_columns) != found.titles:
            table.clear(columns=True)
            table.add_columns(*found.titles)
        else:
            table.clear()
        for cells in found.rows:
            style = _STYLES.get(cells[1].partition(",")[0], "") if len(cells) > 1 else ""
            justified = zip(cells, found.is_left, strict=True)
            table.add_row(*(Text(cell, style=style, justify="left" if is_left else "right") for cell, is_left in justified))
        if found.rows:
            table.move_cursor(row=min(row, len(found.rows) - 1), scroll=False)
            table.scroll_to(y=scrolled_to, animate=False)

    def action_pause(self) -> None:
        """Stop showing new snapshots, or go on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_sort(self) -> None:
        """Sort by the next of SORTS."""
        orders = [*SORTS]
        self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        self.notify(f"sorted by {self._sort}", timeout=2)
        self._show()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._is_reversed = not self._is_reversed
        self._show()

    def action_events(self) -> None:
        """Show all events."""
        self.push_screen(EventsScreen(self._seen[3] if self._seen is not None else ()))

    def action_help(self) -> None:
        """Explain the keys and the columns."""
        self.push_screen(HelpScreen())


def _events_text(events: Sequence[Event], width: int, count: int) -> Text:
    """The last events under their heading."""
    shown = lines.event_lines(events, width, count)
    levels = [event.level for event in reversed(events)]
    styled = [Text(line, style=_LEVELS.get(level, "")) for line, level in zip(shown, levels, strict=False)]
    return Text("\n").join([Text("EVENTS" if events else "EVENTS  none yet", style="bold"), *styled])
