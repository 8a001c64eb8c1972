"""Checkpoints as a shard takes them: when one is due, the thread that writes it, and what became of it.

Shard 0 announces cuts (by time, by steps, or on demand); every shard writes its part when its blocks have reached the cut, and
whoever is last makes the checkpoint valid. Training is not stopped: pages are pinned, and given back as they are written. A
failure costs that checkpoint only; it is logged, shown by status, and what was valid stays.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.config import ServerConfig
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, PsdError
from psd.state import locks
from psd.state.cuts import AHEAD, Snapshot
from psd.state.shard import Shard
from psd.v1 import data_pb2

logger = logging.getLogger(__name__)

TAKE_S_MAX = 3600.0

SNAPSHOTS_MAX = 2
"""One that is being written and one that waits: each may pin another version of every block."""

FINAL_ID = "final"
"""Cut id of the checkpoint that is taken when all workers have left."""


@dataclass
class Progress:
    """What status and the metrics show.

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


@dataclass
class _Announced:
    step: int
    at: float
    done: Future[str] = field(default_factory=Future)


class Checkpointer:
    """Takes a shard's part in checkpoints.

    Args:
        wall: seconds since 1970.
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        directory: CheckpointDirectory,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.progress = Progress(directory.location)
        self._shard = shard
        self._config = config
        self._directory = directory
        self._now = now
        self._wall = wall
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._unwritten = 0
        self._announced: dict[str, _Announced] = {}
        self._lock = locks.new(locks.Level.CHECKPOINTS)
        self._due_lock = locks.new(locks.Level.ANNOUNCING)
        self._timeline = 0
        self._last_step = 0
        self._last_announced_at = now()
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psd-checkpoints", daemon=True)

    def start(self) -> None:
        """Begin to write what is handed over."""
        self._thread.start()

    def on_ready(self, snapshot: Snapshot) -> None:
        """Take a snapshot over; returns at once."""
        with self._lock:
            is_taken = self._unwritten < SNAPSHOTS_MAX or snapshot.cut.id == FINAL_ID
            self._unwritten += is_taken
        if is_taken:
            self._queue.put(snapshot)
        else:
            self._shard.cuts.abandon(snapshot)
            self._fail(
                snapshot.cut, CheckpointFailed("those before are not written yet: the storage is too slow for this pace")
            )

    def on_missed(self, cut: data_pb2.Cut, why: str) -> None:
        """A cut cannot be completed on this shard. One that the shard's end has come before is no failure."""
        if self._stopping.is_set():
            return
        self._fail(cut, CheckpointFailed(f"cut {cut.id} at step {cut.step}: {why}"))

    # -- when --------------------------------------------------------------------------------------------------------

    def announce_due(self) -> None:
        """Announce a cut if one is due; shard 0 only. To be called after each push, and now and then."""
        config = self._config
        is_scheduled = config.checkpoint_steps or config.checkpoint_secs
        if config.shard_index != 0 or not is_scheduled or not self._shard.is_training:
            return
        with self._due_lock:
            self._announce_due(config)

    def _announce_due(self, config: ServerConfig) -> None:
        if self._shard.core.timeline != self._timeline:
            self._timeline, self._last_step = self._shard.core.timeline, 0
        with self._lock:
            if self._unwritten:
                return  # by steps or by time: not faster than they can be written
        step = self._shard.progress
        if config.checkpoint_steps:
            due = self._next_multiple(step)
            if due is not None:
                self._announce(due)
        if config.checkpoint_secs and self._now() - self._last_announced_at >= config.checkpoint_secs:
            self._last_announced_at = self._now()
            with self._lock:  # beside readers' cuts
                is_open = any(cut.id in self._announced for cut in self._shard.cuts.open)
            if step > self._last_step and not is_open:
                self._announce(step + AHEAD if self._shard.has_rounds else step)

    def _next_multiple(self, step: int) -> int | None:
        """The step of the next cut by --checkpoint-steps, if it is to be announced now."""
        steps = self._config.checkpoint_steps
        if self._shard.has_rounds:
            due = -(-(step + AHEAD) // steps) * steps
            return due if due > self._last_step else None
        due = step // steps * steps
        return step if due > 0 and due > self._last_step // steps * steps else None

    def take_now(self, timeout_s: float | None) -> str:
        """Take a checkpoint; its name, when it is complete on all shards.

        Raises:
            CheckpointFailed: it could not be written, or not all shards came to it in time.
        """
        deadline = self._now() + min(TAKE_S_MAX, max(0.0, (timeout_s or TAKE_S_MAX) - 1))
        done = self._request()
        try:
            name = done.result(max(0.0, deadline - self._now()))
        except FutureTimeoutError:
            raise CheckpointFailed(
                "this shard's blocks have not come to the cut in time: a synchronous job must go on training for that"
            ) from None
        while True:
            try:
                self._directory.load(name)
            except CheckpointCorrupt as error:
                if self._now() > deadline:
                    raise CheckpointFailed(f"checkpoint {name} was not completed by all shards in time: {error}") from None
            else:
                return name
            self._stopping.wait(0.1)  # the other shards write to the same directory and do not talk to this one

    def _request(self) -> Future[str]:
        step = self._shard.progress
        return self._announce(step + AHEAD if self._shard.has_rounds else step)

    def take_before_drain(self, timeout_s: float) -> None:
        """Before the shard shuts down: wait for a checkpoint that begins now, but not for long.

        Any shard may be the one that is told to end; shard 0 announces at once, the others when nothing comes from there.
        Without workers no round would reach the cut.
        """
        if not self._shard.is_training or (self._shard.has_rounds and not self._shard.has_workers):
            return
        written = self.progress.written
        deadline = self._now() + timeout_s
        if self._config.shard_index == 0 or not self._wait_written(written, timeout_s / 4):
            self._request()
        if not self._wait_written(written, max(0.0, deadline - self._now())):
            logger.warning("no checkpoint was completed within %.1f s before the end", timeout_s)

    def _wait_written(self, written: int, timeout_s: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self.progress.written > written, timeout_s)

    def _announce(self, step: int) -> Future[str]:
        self._last_step = max(self._last_step, step)
        cut = data_pb2.Cut(id=secrets.token_hex(4), step=step, created_at=self._wall())
        with self._lock:
            announced = self._announced[cut.id] = _Announced(step, self._now())
            for old in list(self._announced)[:-16]:
                del self._announced[old]
        self._shard.learn_cuts([cut])
        return announced.done

    def take_final(self) -> None:
        """Take this shard's part of a last checkpoint, now that no worker changes anything any more."""
        if self._shard.is_training:
            self._shard.take_final_cut(FINAL_ID)

    # -- writing -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Write what was handed over, and end."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            try:
                self._write(snapshot)
            except PsdError as error:
                self._fail(snapshot.cut, error)
            except Exception as error:
                logger.exception("a checkpoint failed by a defect")
                self._fail(snapshot.cut, CheckpointFailed(str(error)))
            finally:
                self._shard.release_snapshot(snapshot)
                with self._lock:
                    self._unwritten -= 1
                with self._idle:
                    self._idle.notify_all()

    def _write(self, snapshot: Snapshot) -> None:
        job = snapshot.job
        cut = Cut(
            cut_id=snapshot.cut.id,
            step=snapshot.cut.step,
            timeline=snapshot.timeline,
            run_id=self._shard.core.run_id,
            created_at=snapshot.cut.created_at,
            layout=job.layout,
        )
        started = self._now()
        try:
            nbytes = self._directory.write_part(
                cut,
                self._config.shard_index,
                self._parts(snapshot),
                worker_clocks=snapshot.worker_clocks,
                client_states=snapshot.client_states,
            )
            if self._config.shard_index == 0:
                # Workers do not push to shards without blocks, which hear of no cut therefore; their parts say just that.
                for index in range(job.layout.shard_count):
                    if not job.layout.blocks_of(index):
                        self._directory.write_part(cut, index, ())
            is_complete = self._directory.complete(cut)
        except PsdError:
            self._discard(cut)
            raise
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
        with self._lock:
            announced = self._announced.get(cut.cut_id)
        logger.info("stored a checkpoint", extra={"checkpoint": cut.name, "bytes": nbytes, "took_s": round(took_s, 3)})
        if is_complete:
            self._directory.collect_garbage()
        if announced is not None and not announced.done.done():
            announced.done.set_result(cut.name)

    def _discard(self, cut: Cut) -> None:
        """Make room again; what cannot be removed now goes with the next checkpoint."""
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

    def _fail(self, cut: data_pb2.Cut, error: PsdError) -> None:
        logger.error("a checkpoint failed; training goes on: %s", error, extra={"step": cut.step, "reason": error.reason})
        with self._idle:
            self.progress = replace(self.progress, failed=self.progress.failed + 1, error=str(error))
        with self._lock:
            announced = self._announced.get(cut.id)
        if announced is not None and not announced.done.done():
            announced.done.set_exception(error)
