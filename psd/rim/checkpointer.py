"""Checkpoints of one shard: the thread that writes them, and their outcomes.

The shard decides when a cut is due (psd/state/desks/cut_schedule.py) and collects its pages (psd/state/cuts/cuts.py); these
threads write them, and the last shard makes the checkpoint valid. Training goes on: pages are pinned, and released as they are
written; rows of tables are copied from their snapshots, some MiB at a time. A failure costs only that checkpoint; it is logged
and shown by status, and valid checkpoints stay.
"""

from __future__ import annotations

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
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, PsdError, error_text
from psd.rim.vector_gate import GivenUp, VectorCuts, VectorGate
from psd.state.cuts.snapshots import Snapshot, new_id
from psd.state.cuts.table_bases import TableBases
from psd.state.desks.vectors import VectorsCut
from psd.state.shard import Shard
from psd.v1 import data_pb2

logger = logging.getLogger(__name__)

TAKE_S_MAX = 3600.0

POLL_S = 0.1
"""Seconds between two checks for other shards' files."""

AGAIN_S = 1.0
"""Seconds after which a cut on demand that was given up is tried again."""

SETTLED_S = 5.0
"""Most seconds between two such checks while nobody waits."""


@dataclass
class CheckpointProgress:
    """Progress of checkpoints, for status and the metrics.

    Attributes:
        written: parts that this process has stored. failed: checkpoints whose part it could not store.
        last_at: time of the last one on the shard's clock. last_wall: the same in seconds since 1970.
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
        gate: the gate for batches on vectors. wall: returns seconds since 1970.
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
        self._now = now
        self._wall = wall
        self._done = shard.cuts.take_part()
        self._to_write: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._asked_for: dict[str, Future[str]] = {}  # by cut id
        self._coming: dict[Snapshot, float] = {}  # snapshots that wait for other shards, and since when
        self._bases = TableBases(directory)
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self._vector_cuts = VectorCuts(
            gate,
            shard.vectors,
            directory,
            config.shard_index,
            lease_s=config.lease_s,
            is_ending=self._is_ending,
            pause=self._stopping.wait,
            now=now,
        )
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
        while True:
            cut_id = new_id()
            try:
                name = self._take(cut_id, deadline)
                self.await_complete(name, deadline, cut_id)
            except CheckpointFailed:
                if cut_id not in self._shard.cuts.given_up or self._now() > deadline:
                    raise
                self._stopping.wait(AGAIN_S)
            else:
                return name

    def _take(self, cut_id: str, deadline: float) -> str:
        """Store this shard's part of a new cut; return the name of the checkpoint."""
        with self.storing(cut_id) as stored:
            self._shard.schedule.announce(cut_id)
            try:
                return stored.result(max(0.0, deadline - self._now()))
            except FutureTimeoutError:
                raise CheckpointFailed(
                    "this shard's blocks have not reached the cut in time: a synchronous job must keep training for that"
                ) from None

    @contextmanager
    def storing(self, cut_id: str) -> Iterator[Future[str]]:
        """A context with a future for this shard's part of a cut: its result is the checkpoint's name."""
        self._asked_for[cut_id] = Future()
        try:
            yield self._asked_for[cut_id]
        finally:
            del self._asked_for[cut_id]

    def await_complete(self, name: str, deadline: float, cut_id: str = "") -> None:
        """Wait until all shards have stored their parts; CheckpointFailed if they have not at `deadline`, on this shard's
        clock, or if the cut with this id is given up."""
        while (why := self.why_incomplete(name)) is not None:
            if self._now() > deadline or cut_id in self._shard.cuts.given_up:
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
        """Wait until no snapshot is left to write; False if that takes too long."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._shard.cuts.unwritten, timeout_s)

    # -- writing -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Write the remaining snapshots, also one that can begin only after the others, and end."""
        self._stopping.set()
        if self._threads[-1].is_alive():
            with self._idle:
                self._idle.wait_for(lambda: not self._shard.cuts.is_storing)
        self._done.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _sort(self) -> None:
        """Pass snapshots to the writing thread; report missed cuts at once, even while a slow store is written to."""
        while (snapshot := self._done.get()) is not None:
            if not snapshot.why_missed:
                self._to_write.put(snapshot)
            elif snapshot.is_final or not (self._stopping.is_set() or self._is_past(snapshot)):
                self._leave(snapshot)  # else the shard ended before, or the cut is of an earlier process: no failure
                cut = snapshot.cut
                if snapshot.positions is not None:
                    self._shard.cuts.give_up(cut.id, snapshot.why_missed)
                self._on_failure(cut, CheckpointFailed(f"cut {cut.id} at step {cut.step}: {snapshot.why_missed}"))
        self._to_write.put(None)

    def _leave(self, snapshot: Snapshot) -> None:
        """Tell shards that wait for this one that it takes no part."""
        cut = self._cut_of(snapshot)
        if snapshot.is_final or not self._vector_cuts.is_shared(cut):
            return
        try:
            self._vector_cuts.leave(cut)
        except PsdError as error:
            logger.debug("%s", error)

    def _next(self) -> Snapshot | None:
        """Wait for the next snapshot to write. Meanwhile check whether the last one is valid, and who has come to others."""
        pause_s = POLL_S
        while True:
            for snapshot in list(self._coming):
                if self._is_come(snapshot):
                    return snapshot
            is_settled = self._bases.is_settled()
            timeout_s = POLL_S if self._coming else None if is_settled else pause_s
            pause_s = min(2 * pause_s, SETTLED_S)
            try:
                found = self._to_write.get(timeout=timeout_s)
            except Empty:
                continue
            self._bases.is_settled()  # check the last one before this one replaces it
            if found is None or found.is_final:
                return found
            if self._is_past(found):
                self._pass_over(found)
            elif self._vector_cuts.is_shared(self._cut_of(found)):
                self._come(found)
            else:
                return found

    def _pass_over(self, snapshot: Snapshot) -> None:
        """Take no part in a cut of an earlier process; complete its checkpoint if this shard's part is stored."""
        with self._failing(snapshot):
            stored = self._stored(snapshot)
            if stored is None:
                raise GivenUp(f"{self._cut_of(snapshot).name}: a later checkpoint is stored")
            self._directory.complete(stored)
            self._release(snapshot)

    def _come(self, snapshot: Snapshot) -> None:
        """Begin to wait for other shards, before batches on vectors are held back for a snapshot."""
        with self._failing(snapshot):
            self._vector_cuts.come(self._cut_of(snapshot))
            self._coming[snapshot] = self._now()

    def _is_come(self, snapshot: Snapshot) -> bool:
        """True, once, if all shards have come to the cut of a snapshot that waits for them."""
        is_fresh = not self._shard.is_recovered or self._shard.schedule.has_announced(snapshot.cut.id)
        is_come = False
        with self._failing(snapshot):
            cut = self._cut_of(snapshot)
            if snapshot.job.policy.has_rounds and self._shard.schedule.progress < cut.step:
                self._coming[snapshot] = self._now()  # a shard without trained blocks is ahead of the others' rounds
            is_come = self._vector_cuts.have_all_come(cut, self._now() - self._coming[snapshot], is_fresh=is_fresh)
            if is_come:
                del self._coming[snapshot]
        return is_come

    def _is_ending(self) -> bool:
        return self._shard.is_draining or self._stopping.is_set()

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            with self._failing(snapshot):
                self._write(snapshot)
                self._release(snapshot)
        for snapshot in list(self._coming):
            self._is_come(snapshot)  # fails now, because the shard ends

    @contextmanager
    def _failing(self, snapshot: Snapshot) -> Iterator[None]:
        """A context for work on a snapshot, which is given up if the work fails."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, (PsdError, GivenUp)):
                logger.exception("a checkpoint failed because of a defect")
            failure = error if isinstance(error, PsdError) else CheckpointFailed(error_text(error))
            self._coming.pop(snapshot, None)
            if failure.detail.get("parts") == "differ":
                self._shard.cuts.give_up(snapshot.cut.id, str(failure))
            self._bases.on_failed(snapshot)
            self._discard(self._cut_of(snapshot))
            # Cuts may fail in many ways while shards end, one after the other; the last checkpoint is stored separately.
            is_let_go = isinstance(error, GivenUp) or (self._is_ending() and not snapshot.is_final)
            self._on_failure(snapshot.cut, failure, is_news=not is_let_go)
            self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        self._shard.cuts.release(snapshot)
        with self._idle:
            self._idle.notify_all()

    def _is_past(self, snapshot: Snapshot) -> bool:
        """True for a cut whose part an earlier process of the shard has stored, or that is older than a valid checkpoint:
        workers name the latest cuts for a while."""
        if not self._shard.is_recovered:
            return False
        try:
            return self._stored(snapshot) is not None or self._directory.has_later(self._cut_of(snapshot))
        except PsdError:
            return False

    def _stored(self, snapshot: Snapshot) -> Cut | None:
        """The cut, if an earlier process of the shard has stored its part."""
        return self._directory.stored(self._cut_of(snapshot), self._config.shard_index)

    def _cut_of(self, snapshot: Snapshot) -> Cut:
        return Cut(
            cut_id=snapshot.cut.id,
            step=snapshot.cut.step,
            timeline=snapshot.timeline,
            run_id=self._shard.run_id,
            created_at=snapshot.cut.created_at,
            layout=snapshot.job.layout,
            order=snapshot.cut.order,
        )

    def _write(self, snapshot: Snapshot) -> None:
        job, cut, own = snapshot.job, self._cut_of(snapshot), self._config.shard_index
        # Shards without blocks get no pushes, and may hear of a cut too late: the first one writes their parts, too. Both write
        # the same, since either may be the last.
        others = range(1, 1 if job.spec.tables else job.layout.shard_count)
        empty = [index for index in others if not job.layout.blocks_of(index)]
        started = self._now()
        with self._vectors(snapshot, cut) as vectors:
            if vectors is None and own in empty:
                nbytes = self._directory.write_part(cut, own, ())
            else:
                nbytes = self._directory.write_part(
                    cut,
                    own,
                    self._parts(snapshot),
                    worker_clocks=snapshot.worker_clocks,
                    client_states=snapshot.client_states,
                    learning_rates=snapshot.learning_rates,
                    tables=snapshot.tables,
                    base=snapshot.cut.base,
                    vectors=vectors,
                )
        if own == 0 and vectors is None:
            for index in empty:
                self._directory.write_part(cut, index, ())
        is_complete = self._directory.complete(cut)
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
        if is_complete:  # only the last shard knows this, so the job's logs have one line for a checkpoint
            logger.info("stored checkpoint %s", cut.name)
            self._clean_up(cut, has_notes=vectors is not None)
        asked_for = self._asked_for.get(cut.cut_id)
        if asked_for is not None:
            asked_for.set_result(cut.name)

    def _vectors(self, snapshot: Snapshot, cut: Cut) -> AbstractContextManager[VectorsCut | None]:
        """The vectors of a cut. At the end no more batches come; a batch that a worker sent to some shards only stays so."""
        if snapshot.is_final or not self._vector_cuts.is_shared(cut):
            return self._shard.vectors.snapshot(() if snapshot.is_final else None)
        return self._vector_cuts.take(cut)

    def _clean_up(self, cut: Cut, *, has_notes: bool) -> None:
        """Remove what a stored checkpoint has made superfluous. Failures are logged, and are none of that checkpoint."""
        try:
            if has_notes:
                self._directory.notes.remove(cut.name)
            self._directory.collect_garbage()
        except PsdError as error:
            logger.warning("what is older than checkpoint %s could not be removed: %s", cut.name, error)

    def _discard(self, cut: Cut) -> None:
        """Remove a failed cut's files; the next checkpoint removes what cannot be removed now."""
        try:
            self._directory.discard(cut)
        except PsdError as error:
            logger.warning("could not remove the unfinished checkpoint %s: %s", cut.name, error)

    def _parts(self, snapshot: Snapshot) -> Iterator[BlockPart]:
        """The blocks in the order of the layout; each page is released when the next is asked for."""
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

    def _on_failure(self, cut: data_pb2.Cut, error: PsdError, *, is_news: bool = True) -> None:
        if is_news:
            self.fail(error)
        else:
            logger.debug("%s", error)
        stored = self._asked_for.get(cut.id)
        if stored is not None:
            stored.set_exception(error)

    def fail(self, error: PsdError) -> None:
        """Note that a checkpoint could not be stored."""
        logger.error("a checkpoint failed: %s", error, extra={"reason": error.reason})
        with self._idle:
            self.progress = replace(self.progress, failed=self.progress.failed + 1, error=str(error))
