"""One worker's connection: the order of things (connected, declared, closed), one thread at a time, and the end.

A worker that ends in whatever way says so to the shards: on close(), when the object is forgotten, and when the interpreter
exits. This is the level on which the faces of frameworks build: flat buffers in, flat buffers out. client.py adds names.
ending.py is for those that nobody closes. The work is done below: session.py (who takes part) and exchange.py (bytes).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from psd.contract.config import ClientConfig
from psd.contract.consistency import Consistency
from psd.contract.environment import job_defaults
from psd.contract.errors import InvalidRequest, NonFiniteGradient, NotDeclared, PsdError, RolledBack, WaitTimeout
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd_client import ending
from psd_client.exchange import Exchange
from psd_client.feed import Feed
from psd_client.flat import FlatBuffers
from psd_client.heartbeat import Heartbeats
from psd_client.retry import RetryPolicy
from psd_client.session import Session
from psd_client.shards import Shards
from psd_client.transport import Cancelled, Lane
from psd_client.waiting import Health, WaitReporter

logger = logging.getLogger("psd_client")

CLIENT_STATE_BYTES_MAX = 1 << 20

WorkerT = TypeVar("WorkerT", bound="Worker")


class Worker:
    """One worker of a job, over flat buffers.

    Args:
        config: settings. lanes: the way to each shard, in their order; closed with the connection.
    """

    def __init__(self, config: ClientConfig, lanes: Sequence[Lane]) -> None:
        self._config = config
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._exchange: Exchange | None = None
        self._feed: Feed | None = None
        self._last_failed = False
        health = Health([lane.address for lane in lanes])
        self._reporter = WaitReporter(config.rank, config.report_after_s)
        self._shards = Shards(lanes, RetryPolicy(config.retry_timeout_s), health)
        self._session = Session(config, self._shards)
        heartbeats = Heartbeats(config.rank, self._session, lanes, health, self._reporter)
        # Runs once: at close(), when the object is forgotten, or when the interpreter exits, for whatever reason.
        self._shut_down = weakref.finalize(self, ending.forgotten, self._pid, heartbeats, self._session, self._shards)
        self._shut_down.atexit = False  # ending.py does it, which knows how the program ends
        ending.remember(self)
        heartbeats.start()
        try:
            with self._operation("connect"):
                self._session.join()
        except BaseException as error:
            self._close(error)
            raise
        heartbeats.wake()

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._config.rank

    @property
    def world_size(self) -> int:
        """How many workers the job has."""
        return self._config.world_size

    @property
    def clock(self) -> int:
        """Steps that this worker has finished; a worker that joins a running job begins at the others' clock."""
        return self._session.clock

    def barrier(self, name: str) -> None:
        """Wait until all workers that are in the job have called barrier with this name.

        Raises:
            BarrierTimeout: the workers that it names have not come until the wait timeout.
        """
        with self._operation(f"barrier {name!r}"):
            self._session.barrier(name)

    def stats(self) -> dict[str, int]:
        """What this worker has done so far.

        Returns:
            pushes: that all shards have. pushes_dropped: whose lease ran out on the way. blocks_counted, blocks_duplicate,
            blocks_late: what the shards did with the pushes' blocks. rounds_skipped: see `is_skipped`. rejoins: new sessions
            after the first. sent_bytes, received_bytes: numbers moved.
        """
        counts = dict(self._exchange.counts) if self._exchange is not None else {}
        lanes = self._shards.lanes
        return counts | {
            "rejoins": self._session.rejoins,
            "sent_bytes": sum(lane.sent_bytes for lane in lanes),
            "received_bytes": sum(lane.received_bytes for lane in lanes),
        }

    @property
    def transports(self) -> list[str]:
        """Per shard, how bulk data travels ("shm", "tcp", "grpc"), and why not better; empty before `declare`."""
        return [lane.transport for lane in self._shards.lanes]

    def save_client_state(self, state: bytes) -> None:
        """Have checkpoints hold what this worker needs to go on: where it is in its data, the state of random numbers.

        Call it before the push of a step; it then belongs to the time after that step. `client_state` gives it back after a
        restore. At most 1 MiB; it travels with the next push, to shard 0. With overlap, where the push begins in backward(),
        call it before that.
        """
        if len(state) > CLIENT_STATE_BYTES_MAX:
            raise InvalidRequest(f"client state: has {len(state)} bytes, the limit is {CLIENT_STATE_BYTES_MAX}")
        self._declared.client_state = bytes(state)

    @property
    def client_state(self) -> bytes:
        """What a worker of this rank had saved, as of the step at which this one goes on; empty if nothing.

        Set by `declare`, and anew when the job goes back to a checkpoint.
        """
        return self._session.stored_state

    def close(self) -> None:
        """Say that this worker has finished, and disconnect; nobody waits for it any more. Idempotent.

        Synchronous: if the last call was a push, this waits until its round has closed, because until then a shard that is
        killed needs the gradient again: until all other workers have pushed, or ended, or their leases have; at most for the
        wait timeout. What prevents that is logged. Nothing is waited for after a failure. (A program that ends without close()
        waits likewise, but only up to Python 3.11: later ones give an exiting program no threads for it.)
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Leave as one who has finished, or has failed by `error`."""
        is_success = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            feed = self._feed
            if feed is not None and feed.is_finished and is_success:
                self._busy.acquire()  # the push ends by itself
                self._busy.release()
            elif feed is not None:
                feed.abort()
            if is_success and self._exchange is not None:
                self._confirm_last(self._exchange)
        except BaseException:  # Ctrl-C
            is_success = False
            raise
        finally:
            arguments = self._shut_down.detach()  # a finalizer that is called does nothing any more while the interpreter exits
            if arguments is not None:
                self._session.has_failed = not is_success
                ending.shut_down(*arguments[2])

    def _abort_feed(self) -> None:
        """At the end of the program. Nobody completes a push that is still being computed: let its threads go."""
        feed = self._feed
        if feed is not None and not feed.is_finished:
            feed.abort()

    def _confirm_last(self, exchange: Exchange) -> None:
        """Keep the last push until its round has closed; not after a failure, nor if another thread uses the connection."""
        is_usable = self._shut_down.alive and os.getpid() == self._pid and not self._busy.locked()
        if not is_usable or self._last_failed or not exchange.is_unconfirmed:
            return
        self._session.is_leaving = True
        try:
            with self._operation("close"):
                exchange.confirm()
        except (PsdError, RuntimeError) as error:
            logger.warning(
                "psd: worker %d: ends without knowing that its last push has been applied; if a shard is killed now, that "
                "gradient is lost: %s",
                self.rank,
                error,
            )

    def __enter__(self: WorkerT) -> WorkerT:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close(error)

    @property
    def gradients(self) -> FlatBuffers:
        """Where the gradients of the next push are to be written."""
        return self._declared.gradients

    @property
    def parameters(self) -> FlatBuffers:
        """Where pulls leave the parameters."""
        return self._declared.parameters

    def declare_tensors(
        self,
        tensors: Sequence[TensorSpec],
        groups: Sequence[GroupSpec],
        *,
        initial: Callable[[FlatBuffers], None],
        consistency: str | None = None,
        reduce: str | None = None,
        quorum: int | None = None,
        aggregation: str | None = None,
        clip_norm: float | None = None,
        nan_policy: str = "refuse",
    ) -> None:
        """As `declare`: `initial` writes this worker's values into the buffers; then `parameters` holds the job's."""
        with self._operation("declare"):
            if self._exchange is not None:
                raise RuntimeError("psd: this worker has declared its job already; a job is declared once")
            default = job_defaults()
            mode = Consistency.parse(consistency) if consistency is not None else default.consistency
            if quorum is None:
                quorum = default.quorum if mode.mode == "sync" else 0
            if aggregation is None:
                is_layerwise = any(group.is_layerwise for group in groups)
                needs_exact = clip_norm is not None or nan_policy == "skip" or is_layerwise
                aggregation = "fast" if mode.mode != "sync" else "exact" if needs_exact else default.aggregation
            if clip_norm is not None and not clip_norm > 0:
                raise InvalidRequest(f"clip_norm: must be > 0, or None for no clipping, got {clip_norm}")
            spec = JobSpec(
                world_size=self.world_size,
                tensors=tuple(tensors),
                groups=tuple(groups),
                consistency=mode,
                reduction=reduce if reduce is not None else default.reduction,
                quorum=quorum,
                aggregation=aggregation,
                clip_norm=clip_norm or 0.0,
                nan_policy=nan_policy,
            )
            layout = Layout(spec, len(self._shards.lanes))
            sharing = self._session.prepare_lanes()
            exchange = Exchange(self.rank, self._config.wait_timeout_s, self._session, self._shards, layout, sharing)
            initial(exchange.parameters)
            tensor = exchange.parameters.first_nonfinite()
            if tensor is not None:
                raise NonFiniteGradient(
                    f"worker {self.rank}: the initial value of {tensor!r} holds NaN or infinity", rank=self.rank, tensor=tensor
                )
            if not self._session.declare(spec, exchange.parameters):
                exchange.pull_all()
            self._exchange = exchange

    @property
    def nan_policy(self) -> str:
        """As declared: "refuse", "skip" or "allow"."""
        return self._declared.parameters.layout.spec.nan_policy

    @property
    def is_skipped(self) -> bool:
        """True if the round of the last push has changed nothing on any shard, because a gradient or a norm was not finite.

        Known after the pull that follows the push. Without rounds it is this worker's push that was left out.
        """
        return self._exchange is not None and self._exchange.is_skipped

    def push_flat(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float = 1,
        present: NDArray[np.bool_] | None = None,
        *,
        skip: bool = False,
    ) -> None:
        """Push `gradients`, which must stay as they are until the round has closed: until `pull_flat`, or the next push.

        Args:
            scalars: per group, in the order of the rule's list.
            weight: samples behind the gradients.
            present: (tensors,) which tensors have a gradient; None: all. The views of the others are zeroed.
            skip: the gradients are not finite: skip the round. For jobs with nan_policy="skip".
        """
        with self._operation("push"):
            self._declared.confirm()
            self._declared.push(scalars, weight, present, skip=skip)

    def pull_flat(self) -> None:
        """Pull into `parameters`, whose contents are undefined if it fails."""
        with self._operation("pull"):
            self._declared.pull()

    def push_pull_flat(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float = 1,
        present: NDArray[np.bool_] | None = None,
        *,
        skip: bool = False,
    ) -> None:
        """`push_flat`, then `pull_flat`, in one round trip."""
        with self._operation("push_pull"):
            self._declared.push_pull(scalars, weight, present, skip=skip)

    def push_pull_feed(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float,
        feed: Feed,
        on_received: Callable[[int], None],
        versions_read: Sequence[int] | None = None,
    ) -> None:
        """`push_pull_flat`, in a thread of the caller's, of gradients that are still being computed.

        Once the feed is finished, other calls wait for this one's end.

        Args:
            feed: says which blocks of `gradients` are ready. The shards look for NaN.
            on_received: told the index of each block of `parameters` that has been received, in any thread; again, if it is
                received again.
            versions_read: by block, of the parameters that the gradients were computed from; None: all that were received.
        """
        spec = self.gradients.layout.spec
        if spec.clip_norm and spec.consistency.mode != "sync":
            raise InvalidRequest("overlap: not with clip_norm without rounds, where the whole gradient must be there first")
        with self._operation("push_pull", is_patient=True):
            self._feed = feed
            self.parameters.on_received = on_received
            try:
                self._declared.push_pull(scalars, weight, None, feed=feed, versions_read=versions_read)
            finally:
                self._feed = self.parameters.on_received = None

    @property
    def _declared(self) -> Exchange:
        if self._exchange is None:
            raise NotDeclared("psd: nothing is declared yet: call declare() first")
        return self._exchange

    def _go_back(self, error: RolledBack) -> RolledBack:
        """Join the timeline that begins at a checkpoint; the error that tells the program so."""
        if self._exchange is None:
            return error
        self._exchange.go_back()
        return RolledBack(
            f"the job went back to a checkpoint at step {self.clock}, because a shard had lost what it held; the parameters "
            "are those of that step, and client_state is what this worker had saved for it",
            step=self.clock,
            **error.detail,
        )

    @contextmanager
    def _operation(self, what: str, *, is_patient: bool = False) -> Iterator[None]:
        """One call of the program's. is_patient: if there is another one, it comes after that."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"psd: {what}: connected in process {self._pid}, used in process {os.getpid()}. A connection does not survive "
                "a fork: call psd_client.connect() in the process that uses it"
            )
        if not self._shut_down.alive:
            raise RuntimeError(f"psd: {what}: this ParameterServer is closed")
        feed = self._feed
        if not self._busy.acquire(blocking=is_patient or (feed is not None and feed.is_finished)):
            raise RuntimeError(f"psd: {what}: another thread is using this ParameterServer; each thread needs its own")
        self._last_failed = True
        try:
            with self._reporter.watching(what, self._session.clock):
                yield
            self._last_failed = False
        except Cancelled:
            raise RuntimeError(f"psd: {what}: this ParameterServer was closed by another thread") from None
        except RolledBack as error:
            raise self._go_back(error) from None
        except WaitTimeout as error:
            if "missing" in error.detail or not self._reporter.last_text:
                raise
            # The deadline passed before the shard's own answer came.
            raise WaitTimeout(
                f"{what}: gave up after {self._config.wait_timeout_s:g} s; {self._reporter.last_text}",
                missing=self._reporter.last_missing,
            ) from error
        finally:
            self._busy.release()
