"""The readers that fetch parameters from this shard, as they have named themselves: how far each is, and what it has taken.

Readers take part in nothing, and have no sessions: a shard knows them by their requests alone. One that has asked for nothing
for FORGET_S is forgotten. Thread-safe. Must not know messages' services.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

from psd.contract.errors import InvalidRequest, NotDeclared, Overloaded
from psd.contract.integers import INTEGER_MAX
from psd.contract.printable import is_printable, utf8_size
from psd.contract.reads import check_read
from psd.state import locks
from psd.state.job import Job
from psd.v1 import control_pb2, data_pb2

FORGET_S = 600.0
"""Seconds after its last request when a reader is forgotten."""

NAME_BYTES_MAX = 256

NUMBER_MAX = (1 << 32) - 1
"""Most readers that ReaderNote.relayed_readers can tell of."""


@dataclass(slots=True)
class KnownReader:
    """One reader. Times are monotonic seconds.

    Attributes:
        id, name: as in ReaderNote.
        version: of the parameters that it was sent last; None: none yet. got_at: when it had them.
        reads: how often it was sent some. sent_bytes: their bytes. fetch_s: seconds that the last sending took.
        lane: by which it asked last.
        open_calls: requests that are being answered. fetching_since: when the sending in progress began; None: there is none.
        seen_at: when it asked for something last, or had its answer.
        relayed_readers: of a relay: the readers that it has in turn; None: it is none.
    """

    id: int
    name: str
    seen_at: float
    lane: str = ""
    version: int | None = None
    got_at: float = 0.0
    reads: int = 0
    sent_bytes: int = 0
    fetch_s: float = 0.0
    open_calls: int = 0
    fetching_since: float | None = None
    relayed_readers: int | None = None


class Readers:
    """The readers of one shard.

    Args:
        now: returns monotonic seconds. readers_max: most readers that are known at a time.
        reads_max: most calls that fetch at a time. refusal: said of one more, after its name; empty: in a shard's words.

    Attributes:
        sent_bytes: bytes sent to all readers, those that are forgotten or unknown, too. calls: calls that fetch, now.
    """

    def __init__(self, now: Callable[[], float], readers_max: int, reads_max: int, refusal: str = "") -> None:
        self.sent_bytes = 0
        self.calls = 0
        self._now = now
        self._max = readers_max
        self._reads_max = reads_max
        self._refusal = refusal or f"{reads_max} callers are fetching already (the shard's --max-reads)"
        self._known: dict[int, KnownReader] = {}
        self._lock = locks.new(locks.Level.LEAF)

    @contextmanager
    def fetching(self, call: str) -> Iterator[None]:
        """Within: a call that fetches is being made. Raises Overloaded if there are too many."""
        with self._lock:
            if self.calls >= self._reads_max:
                raise Overloaded(f"{call}: {self._refusal}")
            self.calls += 1
        try:
            yield
        finally:
            with self._lock:
                self.calls -= 1

    def check(self, request: control_pb2.OpenReadsRequest) -> None:
        """Take note of a reader that asks for a connection.

        Raises:
            InvalidRequest: it does not say who it is, or its id or its name is no such. Overloaded: there are too many readers.
        """
        if not request.HasField("reader"):
            raise InvalidRequest("reader: absent, but a connection is for one reader")
        reader = self._reader(request.reader)
        with self._lock:
            reader.open_calls -= 1

    @contextmanager
    def asked_by(self, request: data_pb2.ReadRequest, lane: str) -> Iterator[KnownReader]:
        """Within: a reader's request is being answered. A reader that does not say who it is, is not remembered.

        Raises:
            InvalidRequest: its id or its name is no such. Overloaded: there are too many readers.
        """
        reader = self._reader(request.reader) if request.HasField("reader") else KnownReader(0, "", 0.0)
        reader.lane = lane
        try:
            yield reader
        finally:
            with self._lock:
                reader.open_calls -= 1
                reader.seen_at = now = self._now()
                if reader.fetching_since is not None:
                    reader.fetch_s, reader.fetching_since = now - reader.fetching_since, None

    def begin_sending(self, reader: KnownReader) -> None:
        """Note that the version for which it waits is there, and is being sent."""
        with self._lock:
            reader.fetching_since = self._now()

    def sent(self, reader: KnownReader, nbytes: int) -> None:
        """Note that it was sent some bytes."""
        with self._lock:
            reader.sent_bytes += nbytes
            self.sent_bytes += nbytes

    def has(self, reader: KnownReader, version: int) -> None:
        """Note that it was sent all of a version."""
        with self._lock:
            reader.version, reader.got_at = version, self._now()
            reader.reads += 1

    def all(self) -> list[KnownReader]:
        """Copies of what is known of each, in the order in which they came."""
        with self._lock:
            self._forget(self._now())
            return [copy(reader) for reader in self._known.values()]

    def number(self) -> int:
        """Number of them, up to NUMBER_MAX; in place of a relay, its readers."""
        known = self.all()
        return min(NUMBER_MAX, sum(1 if reader.relayed_readers is None else reader.relayed_readers for reader in known))

    def _reader(self, note: data_pb2.ReaderNote) -> KnownReader:
        if not 0 < note.id <= INTEGER_MAX:
            raise InvalidRequest(f"reader.id: expected 1 to {INTEGER_MAX}, got {note.id}")
        if utf8_size(note.name) > NAME_BYTES_MAX or not is_printable(note.name):
            raise InvalidRequest(f"reader.name: expected at most {NAME_BYTES_MAX} bytes, printable")
        now = self._now()
        with self._lock:
            self._forget(now)
            reader = self._known.get(note.id)
            if reader is None:
                if len(self._known) >= self._max:
                    raise Overloaded(
                        f"reader: {self._max} have asked in the last {FORGET_S:g} s already (the shard's --max-readers)"
                    )
                reader = self._known[note.id] = KnownReader(note.id, note.name, now)
            reader.name, reader.seen_at = note.name, now
            reader.relayed_readers = note.relayed_readers if note.HasField("relayed_readers") else None
            reader.open_calls += 1
            return reader

    def _forget(self, now: float) -> None:
        gone = [r.id for r in self._known.values() if not r.open_calls and now - r.seen_at > FORGET_S]
        for reader_id in gone:
            del self._known[reader_id]


def check_asked(request: data_pb2.ReadRequest, job: Job) -> None:
    """Raise BlockOutOfRange if a reader asks for what is not this shard's, NotDeclared if for a version that nobody has put,
    InvalidRequest if its request is none."""
    for index in request.blocks:
        job.block(index)
    check_read(request)
    if job.spec.is_publication and request.cut.step == 0:
        raise NotDeclared("nothing has been published yet")
