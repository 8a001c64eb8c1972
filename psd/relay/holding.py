"""The version that a relay has, and the calls that wait for a later one. Thread-safe.

A version never changes. A later one takes its place as a whole, and readers that are being sent the earlier one keep it until
they have it, and as long as it is kept to tell readers what has changed; then its memory is used for a later one. Versions only
grow. Must not know gRPC, nor where versions come from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from psd.contract import frames
from psd.contract.config import Limits
from psd.contract.errors import (
    BlockOutOfRange,
    CutMissed,
    Draining,
    ForeignRun,
    InvalidRequest,
    LayoutMismatch,
    NotDeclared,
    PsdError,
    WaitTimeout,
)
from psd.contract.integers import INTEGER_MAX
from psd.contract.layout import Block, Layout
from psd.contract.layout_message import layout_message
from psd.contract.reads import check_read
from psd.state.counts import Counters
from psd.state.kept_versions import KeptVersions
from psd.state.readers import Readers
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.reader import WholeCopy
from psd_core import codecs


@dataclass(eq=False)
class HeldVersion:
    """One version of all parameters.

    Attributes:
        described: the answer to Describe. buffers: hold the values. blocks: of the layout for one shard, by index.
        kept: what readers have of it and of earlier versions of the layout. since: when the relay got it, by the clock of its
            `Holding`. users: readers that are being sent it, and blocks that are kept.
    """

    described: control_pb2.DescribeReply
    buffers: FlatBuffers
    blocks: Mapping[int, Block]
    since: float
    kept: KeptVersions = field(default_factory=lambda: KeptVersions(0))
    users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pin(self) -> None:
        """Let the buffers stay as they are until `release`."""
        with self._lock:
            self.users += 1

    def release(self) -> None:
        """Undo one `pin`."""
        with self._lock:
            self.users -= 1

    @property
    def version(self) -> int:
        """The version, as the shards count."""
        return self.described.progress

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum([block.nbytes for block in self.blocks.values()])

    def frame(self, index: int, codec: str, has: int | None = None) -> bytes:
        """The frame of a block, in the answer to Read.

        Args:
            codec: as in ReadRequest. has: the entry of `held` there; None: there is none.
        """
        block, values, content = self.blocks[index], self.buffers.block(index), self.buffers.contents[index]
        form, told = block.read_codec(codec), None
        if has is not None:
            told = self.kept.told(index, has, content, values, form)
            self.pin()
            self.kept.keep(index, content, values, self.release)
        message = data_pb2.PullFrame(block=index, version=self.version, content=content)
        if told is not None:
            message.delta_check = told.check
        payload = told.delta if told is not None else codecs.encoded_if_finite(form, values) if form else values
        return frames.join(message.SerializeToString(), payload)


def held_version(copy: WholeCopy, layout: Layout, relay_of: str, since: float) -> HeldVersion:
    """The version that a copy holds.

    Args:
        layout: as that of the copy, but gathered. relay_of: the servers from which it is.
    """
    described = control_pb2.DescribeReply()
    described.CopyFrom(copy.described)
    described.progress, described.relay_of, described.relayed_shards = copy.version, relay_of, layout.shard_count
    described.layout.CopyFrom(layout_message(layout, 0))
    described.has_blocks = True  # `progress` is the job's
    described.incarnation = 0  # no bulk lane
    return HeldVersion(described, copy.buffers, {block.index: block for block in layout.blocks}, since)


class Holding:
    """Holder of a relay's version.

    Args:
        name: the relay and what it follows, in words for messages. limits: on readers, their calls, and kept versions.
        now: returns monotonic seconds.

    Attributes:
        is_draining: True once the relay takes no new work. readers: who has asked lately, and calls in progress.
        counters: as of a shard; what it sends and receives is in those of gRPC. on_first: called with the first version.
    """

    def __init__(self, name: str, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.now = now
        self.is_draining = False
        refusal = f"{limits.reads_max} readers are served already ({name}; its --max-reads)"
        self.readers = Readers(now, limits.readers_max, limits.reads_max, refusal)
        self.counters = Counters()
        self.on_first: Callable[[], None] = lambda: None
        self._limits = limits
        self._held: HeldVersion | None = None
        self._earlier: list[HeldVersion] = []  # that are still used
        self._why_none = "it has not asked yet"
        self._changed = threading.Condition()

    def age_s(self, moment: float) -> float:
        """Seconds since a moment of the holding's clock."""
        return max(0.0, self.now() - moment)

    @property
    def held(self) -> HeldVersion | None:
        """The version that the relay has; None before the first."""
        return self._held

    def take(self, held: HeldVersion) -> FlatBuffers | None:
        """Let a version take the place of the one before, which must be older, and answer those who wait for it.

        Returns:
            The buffers of an earlier one that nobody uses any more, if there are some.
        """
        with self._changed:
            before = self._held
            assert before is None or before.version < held.version, "a version on a relay never goes back"
            is_alike = before is not None and before.described.layout_digest == held.described.layout_digest
            held.kept = before.kept if before is not None and is_alike else KeptVersions(self._limits.keep_versions)
            if before is not None and not is_alike:
                before.kept.forget(for_ever=True)
            self._held = held
            self._changed.notify_all()
            if before is not None:
                self._earlier.append(before)
            spare = next((each.buffers for each in reversed(self._earlier) if not each.users), None)
            self._earlier = [each for each in self._earlier if each.users]
        if before is None:
            self.on_first()
        return spare

    def explain(self, why_none: str) -> None:
        """Say why there is no version yet."""
        self._why_none = why_none

    def some(self) -> HeldVersion:
        """The version that the relay has.

        Raises:
            NotDeclared: there is none yet.
        """
        if self._held is None:
            raise NotDeclared(f"{self.name} has no version yet: {self._why_none}")
        return self._held

    @contextmanager
    def reading(
        self, request: data_pb2.ReadRequest, timeout_s: float, on_hang_up: Callable[[Callable[[], None]], bool]
    ) -> Iterator[HeldVersion]:
        """The version that answers a request, which stays as it is meanwhile; waits until there is one.

        Args:
            on_hang_up: registers a function to be called when the reader hangs up; returns False if it has already.

        Raises:
            Overloaded: there are too many readers. NotDeclared: there is no version at all.
            WaitTimeout: there is none in time. CutMissed: the version asked for is not held any more. Draining: the relay ends.
            InvalidRequest, ForeignRun, LayoutMismatch, BlockOutOfRange: a field is wrong.
        """
        with self.readers.fetching("Read"):
            found = self._found(request, timeout_s, on_hang_up)
            try:
                yield found
            finally:
                with self._changed:
                    found.release()

    def _found(
        self, request: data_pb2.ReadRequest, timeout_s: float, on_hang_up: Callable[[Callable[[], None]], bool]
    ) -> HeldVersion:
        """The version that answers a request, with one user more."""
        step = request.cut.step
        if step > INTEGER_MAX:
            raise InvalidRequest(f"cut.step: {step} is above the limit of {INTEGER_MAX}")
        self._check(request, self.some())
        has_hung_up = False

        def hang_up() -> None:
            nonlocal has_hung_up
            with self._changed:
                has_hung_up = True
                self._changed.notify_all()

        if self.some().version < step and not on_hang_up(hang_up):
            has_hung_up = True
        with self._changed:
            self._changed.wait_for(lambda: has_hung_up or self.is_draining or self.some().version >= step, timeout_s)
            found = self.some()
            if has_hung_up:
                raise InvalidRequest("the reader hung up")
            if found.version < step:
                self.check_draining()
                text = f"{self.name} has version {found.version}, and none from {step} on has come in time"
                raise WaitTimeout(text, missing=[])
            if found.version > step and not request.or_newer:
                raise CutMissed(f"cut.step: {self.name} has version {found.version}, beyond {step}; or_newer takes that")
            self._check(request, found)
            found.pin()
        return found

    @staticmethod
    def _check(request: data_pb2.ReadRequest, held: HeldVersion) -> None:
        check_run(request.run_id, held)
        if request.layout_digest != held.described.layout_digest:
            raise LayoutMismatch("layout_digest: is not this job's, laid out for one shard")
        check_read(request)
        for index in request.blocks:
            if index not in held.blocks:
                raise BlockOutOfRange(f"blocks: {index} is no block of the job, which has {len(held.blocks)} on a relay")

    # -- what guards the calls -----------------------------------------------------------------------------------------

    def check_draining(self) -> None:
        """Raise Draining if the relay takes no new work."""
        if self.is_draining:
            raise Draining(f"{self.name} is shutting down", shard=0)

    def count_error(self, error: PsdError) -> None:
        """Note that a call has ended in an error."""
        with self._changed:
            self.counters.count_error(error)

    def drain(self) -> None:
        """Take no new work, and end waits with Draining, so that readers go elsewhere."""
        with self._changed:
            self.is_draining = True
            self._changed.notify_all()


def check_run(run_id: str, held: HeldVersion) -> None:
    """Raise ForeignRun if a reader means another run."""
    if run_id and run_id != held.described.run_id:
        raise ForeignRun(f"run_id: this relay serves {held.described.run_id!r}, not {run_id!r}")
