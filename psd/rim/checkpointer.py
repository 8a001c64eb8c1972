"""Checkpoints of one shard: the thread that writes them, and their outcomes.

The shard says when a cut is due (psd/state/durability/schedule.py) and collects its pages (psd/state/durability/cuts.py);
here they are written, and whichever shard is last makes the checkpoint valid. Training is not stopped: pages are pinned, and
given back as they are written; rows of tables are copied from their snapshots, some MiB at a time. A failure costs that
checkpoint only; it is logged, shown by status, and what was valid stays.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.config import ServerConfig
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, PsdError
from psd.rim.vector_gate import VectorGate, vectors_of_cut
from psd.state.durability.cuts import FINAL_ID, Snapshot, new_id
from psd.state.durability.table_bases import TableBases
from psd.state.shard import Shard
from psd.state.vectors.desk import VectorsCut
from psd.v1 import data_pb2

logger = logging.getLogger(__name__)

TAKE_S_MAX = 3600.0

POLL_S = 0.1
"""Seconds between two looks at what other shards have stored."""

SETTLED_S = 5.0
"""Most seconds between them while nobody waits."""


@dataclass
class CheckpointProgress:
    """Progress of checkpoints, for status and the metrics.

    Attributes:
        written: parts that this process has stored. failed: checkpoints that it could not take its part in.
        last_at: on the shard's clock. last_wall: in seconds since 1970.
    """

    location: str
    written: int = 0
    failed: int = 0
    last: str = ""
    last_at: float = 0.0
    last_wall: float = 0.0
    last_bytes: int = 0
    last_took_s: float = 0.0
    error: str = ""


class Checkpointer:
    """Takes and writes this shard's part of checkpoints.

    Args:
        gate: that batches on vectors pass. wall: seconds since 1970.
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        directory: CheckpointDirectory,
        gate: VectorGate,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.progress = CheckpointProgress(directory.location)
        self._shard = shard
        self._config = config
        self._directory = directory
        self._gate = gate
        self._now = now
        self._wall = wall
        self._done = shard.cuts.take_part()
        self._to_write: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._asked_for: dict[str, Future[str]] = {}  # by cut id
        self._bases = TableBases(directory)
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._sort, name="psd-cuts", daemon=True),
            threading.Thread(target=self._run, name="psd-checkpoints", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads that take snapshots and write them."""
        for thread in self._threads:
            thread.start()

    def take_now(self, timeout_s: float | None) -> str:
        """Take a checkpoint; return its name when it is complete on all shards.

        Raises:
            CheckpointFailed: it could not be written, or not all shards came to it in time.
        """
        deadline = self._now() + min(TAKE_S_MAX, max(0.0, (timeout_s or TAKE_S_MAX) - 1))
        cut_id = new_id()
        with self.storing(cut_id) as stored:
            self._shard.schedule.announce(cut_id)
            try:
                name = stored.result(max(0.0, deadline - self._now()))
            except FutureTimeoutError:
                raise CheckpointFailed(
                    "this shard's blocks have not reached the cut in time: a synchronous job must keep training for that"
                ) from None
        self.await_complete(name, deadline)
        return name

    @contextmanager
    def storing(self, cut_id: str) -> Iterator[Future[str]]:
        """Learn what becomes of this shard's part of a cut: inside, a future of the checkpoint's name."""
        self._asked_for[cut_id] = Future()
        try:
            yield self._asked_for[cut_id]
        finally:
            del self._asked_for[cut_id]

    def await_complete(self, name: str, deadline: float) -> None:
        """Wait until all shards have stored their part; CheckpointFailed if they have not at `deadline`, by our clock."""
        while (why := self.why_incomplete(name)) is not None:
            if self._now() > deadline:
                raise CheckpointFailed(f"checkpoint {name} was not completed by all shards in time: {why}")
            self._stopping.wait(POLL_S)  # the other shards write to the same directory and do not talk to this one

    def why_incomplete(self, name: str) -> str | None:
        """The reason why a checkpoint is not valid; None if it is."""
        try:
            self._directory.load(name)
        except CheckpointCorrupt as error:
            return str(error)
        return None

    def await_written(self, timeout_s: float) -> bool:
        """Wait until nothing is left to be written; False if that takes too long."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._shard.cuts.unwritten, timeout_s)

    # -- writing -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Write the snapshots handed over, and end."""
        self._stopping.set()
        self._done.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _sort(self) -> None:
        """Report missed cuts at once, even while a slow store is written to."""
        while (snapshot := self._done.get()) is not None:
            if not snapshot.why_missed:
                self._to_write.put(snapshot)
            elif snapshot.cut.id == FINAL_ID or not self._stopping.is_set():  # what the shard's end comes before is no failure
                cut = snapshot.cut
                self._on_failure(cut, CheckpointFailed(f"cut {cut.id} at step {cut.step}: {snapshot.why_missed}"))
        self._to_write.put(None)

    def _next(self) -> Snapshot | None:
        """Wait for the next snapshot to write, and look from time to time whether the one before is valid."""
        pause_s = POLL_S
        while not self._bases.is_settled():
            with contextlib.suppress(Empty):
                snapshot = self._to_write.get(timeout=pause_s)
                self._bases.is_settled()  # soon it is asked about this one
                return snapshot
            pause_s = min(2 * pause_s, SETTLED_S)
        return self._to_write.get()

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            try:
                self._write(snapshot)
            except PsdError as error:
                self._on_failure(snapshot.cut, error)
            except Exception as error:
                logger.exception("a checkpoint failed because of a defect")
                self._on_failure(snapshot.cut, CheckpointFailed(str(error)))
            finally:
                self._shard.cuts.release(snapshot)
                with self._idle:
                    self._idle.notify_all()

    def _write(self, snapshot: Snapshot) -> None:
        job = snapshot.job
        cut = Cut(
            cut_id=snapshot.cut.id,
            step=snapshot.cut.step,
            timeline=snapshot.timeline,
            run_id=self._shard.run_id,
            created_at=snapshot.cut.created_at,
            layout=job.layout,
        )
        started = self._now()
        try:
            with self._vectors(cut) as vectors:
                nbytes = self._directory.write_part(
                    cut,
                    self._config.shard_index,
                    self._parts(snapshot),
                    worker_clocks=snapshot.worker_clocks,
                    client_states=snapshot.client_states,
                    learning_rates=snapshot.learning_rates,
                    tables=snapshot.tables,
                    base=snapshot.cut.base,
                    vectors=vectors,
                )
            if self._config.shard_index == 0 and vectors is None:
                # Workers do not push to shards without blocks, which may hear of a cut too late; their parts say just that.
                for index in range(job.layout.shard_count):
                    if not job.spec.tables and not job.layout.blocks_of(index):
                        self._directory.write_part(cut, index, ())
            is_complete = self._directory.complete(cut)
        except PsdError:
            self._bases.on_failed(snapshot)
            self._discard(cut)
            raise
        self._bases.on_written(snapshot, cut.name)
        took_s = self._now() - started
        with self._idle:
            self.progress = replace(
                self.progress,
                written=self.progress.written + 1,
                last=cut.name,
                last_at=self._now(),
                last_wall=self._wall(),
                last_bytes=nbytes,
                last_took_s=took_s,
                error="",
            )
        facts = {"checkpoint": cut.name, "bytes": nbytes, "took_s": round(took_s, 3)}
        logger.debug("stored this shard's part of a checkpoint", extra=facts)
        if is_complete:  # known to the shard that was last: the job's logs have one line for a checkpoint
            logger.info("stored checkpoint %s", cut.name)
            self._clean_up(cut, has_notes=vectors is not None)
        stored = self._asked_for.get(cut.cut_id)
        if stored is not None:
            stored.set_result(cut.name)

    def _vectors(self, cut: Cut) -> AbstractContextManager[VectorsCut | None]:
        """The vectors of a cut. At the end no batches come any more, and perhaps not all shards to wait for."""
        shard = self._shard
        if cut.cut_id == FINAL_ID or shard.is_draining:
            return shard.vectors.snapshot()
        return vectors_of_cut(
            self._gate, shard.vectors, self._directory, cut, self._config.shard_index, pause=self._stopping.wait, now=self._now
        )

    def _clean_up(self, cut: Cut, *, has_notes: bool) -> None:
        """Remove what a stored checkpoint has made superfluous; what fails there is logged, and no failure of that one."""
        try:
            if has_notes:
                self._directory.remove_batches(cut)
            self._directory.collect_garbage()
        except PsdError as error:
            logger.warning("what is older than checkpoint %s could not be removed: %s", cut.name, error)

    def _discard(self, cut: Cut) -> None:
        """Make room again; the next checkpoint removes what cannot be removed now."""
        try:
            self._directory.discard(cut)
        except PsdError as error:
            logger.warning("could not remove the unfinished checkpoint %s: %s", cut.name, error)

    def _parts(self, snapshot: Snapshot) -> Iterator[BlockPart]:
        """The blocks in the order of the layout; each page is given back when the next is asked for."""
        job = snapshot.job
        for index, block in job.blocks.items():
            page = snapshot.pages[index]
            plan = block.plan
            group = job.spec.groups[plan.group]
            yield BlockPart(
                space=plan.space,
                offset=plan.offset,
                length=plan.length,
                version=page.version,
                parameter=page.parameter,
                slots=dict(zip(group.info.slots(group.flags), page.slots, strict=True)),
                steps=page.steps,
                sessions=page.sessions,
                clocks=page.clocks,
            )
            del snapshot.pages[index]
            job.arena.unpin(page)

    def _on_failure(self, cut: data_pb2.Cut, error: PsdError) -> None:
        self.fail(error)
        stored = self._asked_for.get(cut.id)
        if stored is not None:
            stored.set_exception(error)

    def fail(self, error: PsdError) -> None:
        """Note that a checkpoint could not be stored."""
        logger.error("a checkpoint failed: %s", error, extra={"reason": error.reason})
        with self._idle:
            self.progress = replace(self.progress, failed=self.progress.failed + 1, error=str(error))
