"""What a process's state is, as a key: two processes with the same key do the same whatever happens from then on.

Objects are walked attribute by attribute, whatever their class, and parked fibers frame by frame, so new code is covered as it
is written. Left out is what decides nothing (times, counters, messages for people) and what never changes (specs, layouts).
A type that cannot be looked into is an error, not a hole. Python's own stack of values is out of reach: no code that is checked
may wait in the middle of a comprehension whose results it keeps.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from google.protobuf.message import Message as Protobuf
from green import Event, Fiber, Fibers, Future, Lock, Sleep, Waiters

from psd.state.tickets import Ticket
from psd.state.version_waits import VersionWaits
from psd_client.flat import FlatBuffers
from psd_client.transport import Lane
from psd_core.arena import Arena, Page

LEFT_OUT_TYPES = frozenset(
    "Accumulators Admission Block ClientConfig Checkpointer Counters Cuts Executor Fanout GroupSpec Heartbeats Health Histogram "
    "JobSpec Layout Limits Logger PosixPath Readers RetryPolicy RoundTimes RuleInfo ServerConfig Shards Storage SimpleNamespace "
    "TensorSpec WaitReporter Waiting finalize Elementwise Static Scanner Call FlatCalls Program Setting WorkerProcess "
    "DataPlane ControlService Context".split()
)
LEFT_OUT_ATTRIBUTES = frozenset(
    # Times, and what people are told.
    "since last_seen left_at awaited_s _last_tick _started host pid _pid transport times _busy "
    # Counters, and caches of what follows from the rest.
    "counts rejoins sent_bytes received_bytes counters opened_count _fit_scalars _min_clock _is_min_clock_known _gates_min_clock "
    "_readers readers is_skipped last_text last_missing "
    # What a worker has received: no gradient of these tests is made from it.
    "parameters _values "
    # Connections to the rest of the process.
    "_core _membership_of _lanes _heartbeats _shut_down _policy _config config storage rules directory _save".split()
)
LEFT_OUT_LOCALS = frozenset(
    "began now pause failures failing_since deadline timeout_s timeout left_at stats_before context waited clock_before".split()
)
"""Of `clock`, see _walk_frame: retry.py has the function that tells the time by that name."""

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
        if isinstance(value, _ATOMS):
            self._words.append(repr(value) if not isinstance(value, enum.Enum) else value.name)
        elif isinstance(value, Protobuf):
            self._words.append(repr(value.SerializeToString(deterministic=True)))
        elif isinstance(value, np.ndarray):
            self._words.append(f"{value.dtype.name}{value.tobytes()!r}")
        elif isinstance(value, np.generic | enum.Enum):
            self._words.append(repr(value))
        elif isinstance(value, list | tuple | deque):
            self._sequence(value)
        elif isinstance(value, dict):
            self._pairs(value.items())
        elif isinstance(value, set | frozenset):
            self._sequence(sorted(value, key=repr))
        elif isinstance(value, memoryview):
            self._words.append(repr(bytes(value)))
        elif isinstance(value, _CALLABLES):
            self._words.append("f")
        elif isinstance(value, Lane):
            self._words.append(f"lane {value.shard}")
        elif isinstance(value, _LOCKS) or type(value).__name__ in LEFT_OUT_TYPES:
            self._words.append("-")
        else:
            self._object(value)

    def _sequence(self, values: Iterable[Any]) -> None:
        self._words.append("[")
        for value in values:
            if not (isinstance(value, Ticket) and value.future.done()):  # else: nobody waits for it, it is cleared away later
                self.walk(value)
        self._words.append("]")

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._words.append("{")
        for key, value in sorted(pairs, key=lambda pair: repr(pair[0])):
            self._words.append(repr(key))
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
        if isinstance(value, BaseException):
            self._pairs(getattr(value, "detail", {}).items())
        elif isinstance(value, Future):
            self._words.append(f"{value.is_done}")
            self.walk(value.error if value.error is not None else value.value)
        elif isinstance(value, Event):
            self._words.append(f"{value.value}")
        elif isinstance(value, FlatBuffers):
            self._sequence(value.spaces)
        elif isinstance(value, VersionWaits):
            self._pairs((v, [t for t in tickets if not t.future.done()]) for v, tickets in value._tickets.items())
        elif isinstance(value, Arena):
            self._words.append("-")  # walked by whoever knows its blocks: `arena`
        elif isinstance(value, Page):
            self.page(value)
        elif isinstance(value, types.GeneratorType):
            self._words.append(value.__qualname__)
            if value.gi_frame is not None:
                self._frame(value.gi_frame)
        else:
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        found = dict(getattr(value, "__dict__", ()))
        for kind in type(value).__mro__:
            for name in kind.__dict__.get("__slots__", ()) if not isinstance(kind.__dict__.get("__slots__"), str) else ():
                if hasattr(value, name):
                    found[name] = getattr(value, name)
        if not found and type(value).__module__ == "builtins":
            raise TypeError(f"cannot look into a {type(value).__name__}")
        self._pairs((n, v) for n, v in found.items() if n not in LEFT_OUT_ATTRIBUTES and not n.startswith("__"))

    def page(self, page: Page | None) -> None:
        """Write down one version of a block."""
        if page is None:
            self._words.append("none")
            return
        self._words.append(str(page.version))
        for array in (page.parameter, *page.slots, page.steps, page.sessions, page.clocks):
            self._words.append(repr(array.tobytes()))

    def fiber(self, fiber: Fiber) -> None:
        """Write down where a parked fiber is, and what it has in hand."""
        self._words.append(f"<{fiber.thread} {fiber.last_shard if isinstance(fiber.awaits, Sleep) else ''}")
        frame = fiber.gr_frame
        while frame is not None:
            self._frame(frame)
            frame = frame.f_back
        self._words.append(">")

    def _frame(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not self._is_ours(code.co_filename):
            return
        if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
            raise TypeError(f"{code.co_filename}:{frame.f_lineno} waits in the middle of a comprehension")
        self._words.append(f"{code.co_name}@{frame.f_lasti}")
        self._pairs((n, v) for n, v in frame.f_locals.items() if n not in LEFT_OUT_LOCALS)
