"""What a process's state is, as a key: two processes with the same key do the same whatever happens from then on.

Objects are walked attribute by attribute, whatever their class, and parked fibers frame by frame, so new code is covered as it
is written. Left out is what decides nothing (times, counters, messages for people) and what never changes (specs, layouts).
A type that cannot be looked into is an error, not a hole. Python's own stack of values is out of reach: no code that is checked
may wait in the middle of a comprehension whose results matter (the heartbeats' do not).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from google.protobuf.message import Message as Protobuf
from green import Event, Fiber, Fibers, Future, Lock, Sleep, Waiters

from psd.state.aggregation.small_block import SmallBlock
from psd.state.aggregation.version_waits import VersionWaits
from psd.state.cuts.cuts import Cuts
from psd.state.tickets import Ticket
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import Lane
from psd_core.arena import Arena, Page
from psd_core.steps import RankPlace, Ranks, TablesCore
from psd_core.table import RowSums, TableStore

LEFT_OUT_TYPES = frozenset(
    [
        "Accumulators",
        "Admission",
        "Block",
        "BufferDesk",
        "BufferKeeper",
        "ParameterDesk",
        "ParameterLoad",
        "Loads",
        "Call",
        "Checkpointer",
        "ClientConfig",
        "Context",
        "ControlService",
        "Counters",
        "DataPlane",
        "Desks",
        "Elementwise",
        "Executor",
        "FlatCalls",
        "GroupSpec",
        "Heartbeats",
        "Histogram",
        "History",
        "JobSpec",
        "Layout",
        "LentBlock",
        "Limits",
        "Logger",
        "Operation",
        "PausingLock",
        "PosixPath",
        "Program",
        "Readers",
        "RetryPolicy",
        "RoundTimes",
        "RowChecks",
        "RuleInfo",
        "Scanner",
        "ServerConfig",
        "Setting",
        "Shards",
        "SimpleNamespace",
        "Static",
        "SumsPool",
        "Storage",
        "TensorSpec",
        "WaitReporter",
        "Waiting",
        "Outage",
        "ShardHealth",
        "WatchedStorage",
        "WorkerProcess",
        "finalize",
    ]
)
LEFT_OUT_ATTRIBUTES = frozenset(
    # Times, and what people are told.
    [
        "since",
        "last_seen",
        "awaited_s",
        "samples",
        "_last_tick",
        "_started",
        "host",
        "pid",
        "_pid",
        "transport",
        "times",
        "_busy",
        "_gives_up_at",
        "counts",
        "rejoins",
        "sent_bytes",
        "received_bytes",
        "counters",
        "opened_count",
        "_fit_scalars",
        "_min_clock",
        "_is_min_clock_known",
        "_gates_min_clock",
        "is_skipped",
        "last_text",
        "last_missing",
        "parameters",
        "_values",
        "_core",
        "_membership_of",
        "_lanes",
        "_heartbeats",
        "_ended",
        "_heartbeats",
        "_policy",
        "_config",
        "config",
        "storage",
        "rules",
        "directory",
        "_save",
        "held_since",
        "_carried",
    ]
)
LEFT_OUT_LOCALS = frozenset(
    [
        ".0",
        "began",
        "now",
        "pause",
        "failures",
        "failing_since",
        "deadline",
        "timeout_s",
        "timeout",
        "left_at",
        "stats_before",
        "context",
        "waited",
        "clock_before",
    ]
)
"""Of `clock`, see _walk_frame: shards.py has the function that tells the time by that name."""

_ATOMS = (type(None), bool, int, float, str, bytes, complex)
_CALLABLES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.BuiltinMethodType,
    functools.partial,
    type,
    types.ModuleType,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Event, Lock, Waiters, Fibers, Fiber, Sleep)


_first = operator.itemgetter(0)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class that tell something."""
    slots = [kind_.__dict__.get("__slots__", ()) for kind_ in kind.__mro__]
    names = {name for group in slots if not isinstance(group, str) for name in group}
    return tuple(sorted(name for name in names - LEFT_OUT_ATTRIBUTES if not name.startswith("__")))


class Walker:
    """Writes down a state; `key` is its digest."""

    def __init__(self, is_ours: Callable[[str], bool]) -> None:
        self._is_ours = is_ours
        self._words: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def key(self) -> bytes:
        """The digest of all that was walked."""
        return hashlib.blake2b("\x1f".join(self._words).encode(), digest_size=12).digest()

    @property
    def words(self) -> list[str]:
        """All that was walked, to compare two states by."""
        return self._words

    def walk(self, value: Any) -> None:
        """Write down a value and all that hangs on it."""
        kind = type(value)
        how = _HOW.get(kind)
        if how is None:
            how = _HOW[kind] = _how(kind)
        how(self, value)

    def _atom(self, value: Any) -> None:
        self._words.append(repr(value))

    def _message(self, value: Any) -> None:
        self._words.append(repr(value.SerializeToString(deterministic=True)))

    def _array(self, value: Any) -> None:
        self._words.append(f"{value.dtype.name}{value.tobytes()!r}")

    def _set(self, value: Any) -> None:
        self._sequence(sorted(value, key=repr))

    def _view(self, value: Any) -> None:
        self._words.append(repr(bytes(value)))

    def _lane(self, value: Any) -> None:
        self._words.append(f"lane {value.shard}")

    def _nothing(self, value: Any) -> None:
        self._words.append("-")

    def _mapping(self, value: Any) -> None:
        self._pairs(value.items())

    def _sequence(self, values: Iterable[Any]) -> None:
        self._words.append("[")
        for value in values:
            if not (isinstance(value, Ticket) and value.future.done()):  # else: nobody waits for it, it is cleared away later
                self.walk(value)
        self._words.append("]")

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._words.append("{")
        for key, value in sorted([(repr(key), value) for key, value in pairs], key=_first):
            self._words.append(key)
            self.walk(value)
        self._words.append("}")

    def _object(self, value: Any) -> None:
        known = self._seen.get(id(value))
        if known is not None:
            self._words.append(f"#{known}")
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._words.append(type(value).__name__)
        kind = type(value)
        inside = _INSIDE.get(kind)
        if inside is None:
            inside = _INSIDE[kind] = next((how for base, how in _INSIDE_BY_BASE if issubclass(kind, base)), Walker._attributes)
        inside(self, value)

    def _error(self, value: BaseException) -> None:
        self._pairs(getattr(value, "detail", {}).items())

    def _future(self, value: Future) -> None:
        self._words.append(f"{value.is_done}")
        self.walk(value.error if value.error is not None else value.value)

    def _event(self, value: Event) -> None:
        self._words.append(f"{value.value}")

    def _buffers(self, value: FlatBuffers) -> None:
        self._sequence(value.spaces)

    def _waits(self, value: VersionWaits) -> None:
        self._pairs((v, [t for t in tickets if not t.future.done()]) for v, tickets in value._tickets.items())

    def _place(self, value: RankPlace) -> None:
        self._words.append(f"{value.clock}")
        self._attributes(value)

    def _small_block(self, value: SmallBlock) -> None:
        self._words.append(repr((value.version, value._core.round, value.lacks_space)))
        self._attributes(value)

    def _tables_core(self, value: TablesCore) -> None:
        told = value.is_lent, value.is_due, value.has_steps, value.has_tickets, value.unit
        self._words.append(repr((value.version, value.round, value.has_sum, *told)))

    def _cuts(self, value: Cuts) -> None:
        self.walk([sorted(value._known), value.awaits_positions])
        for cut in value._open:
            self.walk([cut.cut, cut.positions, cut.pages, cut.awaits_tables, cut.why_missed])

    def _sums(self, value: RowSums) -> None:
        self._words.append(repr((value.ids.tobytes(), value.values.tobytes())))

    def _generator(self, value: types.GeneratorType[Any, Any, Any]) -> None:
        self._words.append(value.__qualname__)
        if value.gi_frame is not None:
            self._frame(value.gi_frame)

    def _attributes(self, value: Any) -> None:
        kind = type(value)
        found = dict(getattr(value, "__dict__", ()))
        for name in _slots(kind):
            if hasattr(value, name):
                found[name] = getattr(value, name)
        if not found and kind.__module__ == "builtins":
            raise TypeError(f"cannot look into a {kind.__name__}")
        self._pairs([(name, each) for name, each in found.items() if name not in LEFT_OUT_ATTRIBUTES])

    def page(self, page: Page | None) -> None:
        """Write down one version of a block."""
        if page is None:
            self._words.append("none")
            return
        self._words.append(str(page.version))
        for array in (page.parameter, *page.slots, page.steps, page.sessions, page.clocks):
            self._words.append(repr(array.tobytes()))

    def table(self, store: TableStore) -> None:
        """Write down a table's rows, and of the clocks at which they were used only in which order these come."""
        found = [(head, row.tobytes()) for batch in store.walk() for head, row in zip(*batch, strict=True)]
        uses = sorted({int(head["used"]) for head, _ in found})
        rows = sorted((int(head["id"]), row, uses.index(int(head["used"]))) for head, row in found)
        self._words.append(repr((store.notes().tobytes(), store.counters()["step"], rows)))

    def fiber(self, fiber: Fiber) -> None:
        """Write down where a parked fiber is, and what it has in hand."""
        self._words.append(f"<{fiber.thread} {fiber.now} {fiber.last_shard if isinstance(fiber.awaits, Sleep) else ''}")
        frame = fiber.gr_frame
        while frame is not None:
            self._frame(frame)
            frame = frame.f_back
        self._words.append(">")

    def _frame(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not self._is_ours(code.co_filename):
            return
        if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>") and not code.co_filename.endswith("heartbeat.py"):
            raise TypeError(f"{code.co_filename}:{frame.f_lineno} waits in the middle of a comprehension")
        self._words.append(f"{code.co_name}@{frame.f_lasti}")
        self._pairs((n, v) for n, v in frame.f_locals.items() if n not in LEFT_OUT_LOCALS)


def _how(kind: type) -> Callable[[Walker, Any], None]:
    """How values of a type are written down."""
    nothing = (*_LOCKS, *_CALLABLES, types.TracebackType)
    if any(base.__name__ in LEFT_OUT_TYPES for base in kind.__mro__) or issubclass(kind, nothing):
        return Walker._nothing
    for base, how in _BY_BASE:
        if issubclass(kind, base):
            return how
    return Walker._object


_BY_BASE: tuple[tuple[Any, Callable[[Walker, Any], None]], ...] = (
    ((*_ATOMS, np.generic, enum.Enum), Walker._atom),
    (Protobuf, Walker._message),
    (np.ndarray, Walker._array),
    ((list, tuple, deque), Walker._sequence),
    (dict, Walker._mapping),
    ((set, frozenset), Walker._set),
    (memoryview, Walker._view),
    (Lane, Walker._lane),
)
_HOW: dict[type, Callable[[Walker, Any], None]] = {}

_INSIDE_BY_BASE: tuple[tuple[type, Callable[[Walker, Any], None]], ...] = (
    (BaseException, Walker._error),
    (Future, Walker._future),
    (Event, Walker._event),
    (FlatBuffers, Walker._buffers),
    (VersionWaits, Walker._waits),
    (Arena, Walker._nothing),  # walked by whoever knows its blocks: `arena`
    (Page, Walker.page),
    (RankPlace, Walker._place),
    (Ranks, Walker._nothing),  # the workers walk their places
    (TableStore, Walker.table),
    (TablesCore, Walker._tables_core),
    (SmallBlock, Walker._small_block),
    (Cuts, Walker._cuts),
    (RowSums, Walker._sums),
    (types.GeneratorType, Walker._generator),
)
_INSIDE: dict[type, Callable[[Walker, Any], None]] = {}
