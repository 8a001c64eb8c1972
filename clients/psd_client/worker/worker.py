"""One worker's connection: the order of calls (connect, declare, close), one thread at a time, and the end.

However a worker ends, it tells the shards: on close(), when the program drops the object, and when the interpreter exits
(ending.py). Programs hold a ParameterServer, which has a worker; flat_calls.py adds the calls on flat buffers, on which all
faces build. Other modules do the work: session.py (membership) and exchange.py (bytes).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from psd.contract import arguments
from psd.contract.config import CLIENT_STATE_BYTES_MAX, ClientConfig
from psd.contract.environment import scalar_directories
from psd.contract.errors import InvalidRequest, NotDeclared, PsdError, RolledBack, SessionFenced, SpecMismatch, WaitTimeout
from psd.v1 import control_pb2
from psd_client.lanes.daemon_threads import Crew
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import RetryPolicy, Shards
from psd_client.lanes.transport import Bracket, Cancelled, Lane
from psd_client.lanes.waiting import ShardHealth, WaitReporter
from psd_client.worker import ending
from psd_client.worker.exchange.exchange import ParameterExchange
from psd_client.worker.reduction import ALL_REDUCE, Reduced, numbers_of, reduction_of
from psd_client.worker.scalars.scalar_files import ScalarFiles
from psd_client.worker.scalars.scalar_log import ScalarLog
from psd_client.worker.session.barriers import BarrierCalls
from psd_client.worker.session.heartbeat import Heartbeats
from psd_client.worker.session.orders import Drained
from psd_client.worker.session.session import Session

logger = logging.getLogger("psd_client")

ONE_JOB = (
    "A process is one worker of one job, and what a job trains is fixed. To train two models, declare them together: in torch "
    "by one call, distribute({'a': a, 'b': b}, {'a': optimizer_of_a, 'b': optimizer_of_b})"
)
"""Advice for a program that declares a second time."""


class Turn(Protocol):
    """A call that another thread makes, and that comes before the program's later calls.

    Attributes:
        is_finished: True once it waits for nothing that the program does. in_background: the program does not wait for it.
        ended: set when the call has ended, with or without an error.
        before: the turn before this one, while its call may not have ended: this call comes after it.
    """

    is_finished: bool
    in_background: bool
    ended: threading.Event
    before: Turn | None

    def abort(self) -> None:
        """Give the call up, unless it ends with the connection."""


class WorkerConnection:
    """One worker of a job, over flat buffers.

    Args:
        config: settings. lanes: one to each shard, in the shards' order; closed with the connection.
        on_end: called when the connection has ended, however it did.

    Attributes:
        rank: this worker's number, from 0. world_size: number of workers of the job.
        background: threads for calls during which the program goes on. They stay: to start one at each exchange of a learner
            would cost as much as the rest of what the program waits for.
    """

    def __init__(self, config: ClientConfig, lanes: Sequence[Lane], on_end: Callable[[], None] = lambda: None) -> None:
        self.rank, self.world_size = config.rank, config.world_size
        self._on_end = on_end
        self.background = Crew("psd-background")
        self._ended = threading.Lock()  # taken once, and for good, by close()
        self._config = config
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._exchange: ParameterExchange | None = None
        self._turn: Turn | None = None
        self._untold: Exception | None = None  # error of a push for which the program did not wait
        self._last_failed = False
        health = ShardHealth([lane.address for lane in lanes])
        self._reporter = WaitReporter(config.rank, config.report_after_s)
        self._shards = Shards(lanes, RetryPolicy(config.retry_timeout_s), health)
        session = self._session = Session(config, self._shards)
        self._barriers = BarrierCalls(self._session, self._shards, config.wait_timeout_s)
        self._heartbeats = Heartbeats(config.rank, self._session, lanes, health, self._reporter)
        files = ScalarFiles(config.rank, *scalar_directories())
        self._scalars = ScalarLog(config.rank, self._session.log, files, lambda: session.run_id)
        ending.remember(self)
        self._heartbeats.start()
        try:
            with self.operation("connect"):
                self._session.join()
        except BaseException as error:
            self.close(error)
            raise
        self._heartbeats.wake()

    @property
    def clock(self) -> int:
        """Number of steps that this worker has finished."""
        return self._session.clock

    def barrier(self, name: str) -> None:
        """Wait until all workers have called this with the same name."""
        arguments.word(InvalidRequest, "name", name)
        with self.operation(f"barrier {name!r}"):
            self._meet(name)

    def all_reduce(self, values: Mapping[str, Any], op: str) -> Reduced:
        """Reduce numbers over all workers, who call this with the same names."""
        numbers, reduction = numbers_of(values), reduction_of(op)
        with self.operation(ALL_REDUCE):
            return Reduced(self._meet(ALL_REDUCE, numbers, reduction), values)

    def _meet(self, name: str, numbers: Sequence[control_pb2.Number] = (), reduction: int = 0) -> control_pb2.BarrierReply:
        exchange = self._exchange
        if exchange is not None:
            exchange.resolve()
        keep = exchange.keep if exchange is not None and exchange.is_unconfirmed else None
        return self._barriers.arrive(name, keep, numbers, reduction)

    def stop(self) -> int:
        """Ask for the end of the job, for all workers; return the step at which it ends."""
        exchange = self._exchange
        with self.operation("stop"):
            if exchange is not None:
                exchange.resolve()
            self._session.stop()
            end = self._session.orders.end(self.clock)
            assert end is not None
            return end

    @property
    def is_over(self) -> bool:
        """True if the job ends at this worker's clock: the next push raises Drained."""
        return self._session.orders.end(self.clock) == self.clock

    def log(self, step: int, scalars: Mapping[str, Any], total: int | None) -> None:
        """Report scalars of a step, and the clock at which the job ends; returns at once."""
        self._check_usable("log")
        self._scalars.add(step, scalars, total)

    def stats(self) -> dict[str, int]:
        """Counts of this worker so far, by name."""
        counts = dict(self._exchange.counts) if self._exchange is not None else {}
        lanes = self._shards.lanes
        return counts | {
            "rejoins": self._session.rejoins,
            "sent_bytes": sum(lane.traffic.sent_bytes for lane in lanes),
            "received_bytes": sum(lane.traffic.received_bytes for lane in lanes),
        }

    @property
    def transports(self) -> list[str]:
        """Transports of bulk data, per shard."""
        return [lane.transport for lane in self._shards.lanes]

    def save_client_state(self, state: bytes) -> None:
        """Give the next push a state to store. Raises InvalidRequest."""
        if not isinstance(state, (bytes, bytearray, memoryview)):
            arguments.refuse(InvalidRequest, "client state", "bytes", state)
        if len(state) > CLIENT_STATE_BYTES_MAX:
            raise InvalidRequest(f"client state: has {len(state)} bytes, the limit is {CLIENT_STATE_BYTES_MAX}")
        self.declared.client_state.state = bytes(state)

    @property
    def unsent_state(self) -> bytes:
        """The state that the next push is to store; empty: nothing new."""
        return self.declared.client_state.state

    @property
    def client_state(self) -> bytes:
        """The state that a worker of this rank saved with its last push that counts."""
        return self._session.stored_state

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job: as finished, or as failed if there is an `error`. Idempotent."""
        if os.getpid() != self._pid:  # a forked child ends: it has none of the threads
            self._ended.acquire(blocking=False)
            return
        is_success = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            self._end_turn(is_success)
            untold, self._untold = self._untold, None
            if untold is not None and is_success:
                is_success = False
                logger.error("psd: worker %d: its last push failed, and the program has not been told: %s", self.rank, untold)
            if is_success and self._exchange is not None:
                self._confirm_last(self._exchange)
                self._store_last(self._exchange)
        except BaseException:  # Ctrl-C
            is_success = False
            raise
        finally:
            if self._ended.acquire(blocking=False):
                self._session.has_failed = not is_success
                self._leave()

    def _leave(self) -> None:
        self._scalars.close()
        self._heartbeats.stop()
        self._session.leave()
        self._shards.close()
        self.background.close()
        self._heartbeats.join()
        self._on_end()

    def __del__(self) -> None:
        if not self._ended.locked() and os.getpid() == self._pid:
            ending.close_in_thread(self)

    def abort_turn(self) -> None:
        """Release, at the end of the program, the threads of a push that is still being computed: nobody will complete it.

        Wait for a push that is computed, unless the program has failed: it may need new threads, which cannot be started later.
        """
        if os.getpid() == self._pid:
            self._end_turn(is_success=getattr(sys, "last_value", None) is None)

    def _end_turn(self, is_success: bool) -> None:
        turn = self._turn
        while turn is not None:
            if turn.in_background and turn.is_finished and is_success:
                turn.ended.wait()
            else:
                turn.abort()
            turn = turn.before

    def _confirm_last(self, exchange: ParameterExchange) -> None:
        """Wait until the round of the last push has closed; not after a failure, or if another thread uses the connection."""
        is_usable = not self._ended.locked() and not self._busy.locked()
        if not is_usable or not exchange.is_unconfirmed:
            return
        if self._last_failed:
            self._warn_unconfirmed("the program's last call has failed")
            return
        self._session.is_leaving = True
        try:
            with self.operation("close"):
                exchange.confirm()
        except (PsdError, RuntimeError) as error:
            self._warn_unconfirmed(str(error))

    def _store_last(self, exchange: ParameterExchange) -> None:
        """Send the buffers of the last step, for the job's last checkpoint."""
        if self._ended.locked() or self._busy.locked() or self._last_failed:
            return
        try:
            with self.operation("close"):
                exchange.buffers.before_leaving()
        except (PsdError, RuntimeError) as error:
            logger.warning("psd: worker %d: the buffers of its last steps could not be stored: %s", self.rank, error)

    def _warn_unconfirmed(self, why: str) -> None:
        logger.warning(
            "psd: worker %d: ends without knowing whether its last push was applied; if a shard is killed now, that "
            "gradient is lost: %s",
            self.rank,
            why,
        )

    @property
    def gradients(self) -> FlatBuffers:
        """The buffers for the gradients of the next push."""
        return self.declared.gradients

    @property
    def parameters(self) -> FlatBuffers:
        """The buffers that pulls write the parameters to."""
        return self.declared.parameters

    @property
    def receiving(self) -> FlatBuffers:
        """The buffers into which a pull is under way, or will be."""
        return self.declared.places.current

    @property
    def declared(self) -> ParameterExchange:
        """The data plane of the declared job.

        Raises:
            NotDeclared: no job is declared yet.
        """
        if self._exchange is None:
            raise NotDeclared("psd: nothing is declared yet: call declare() first")
        return self._exchange

    def _go_back(self, error: RolledBack) -> RolledBack:
        """Follow the job back to a checkpoint; return the error that tells the program about it."""
        if self._exchange is not None:
            self._exchange.go_back()
        elif self._session.is_declared:  # a job of vectors alone
            self._session.go_back(lambda: None)
        else:
            return error
        return RolledBack(
            f"the job went back to a checkpoint at step {self.clock}, because a shard had lost what it held; parameters and "
            "vectors are those of that step, and client_state is what this worker had saved for it",
            **(error.detail | {"timeline": self._session.memberships.held.timeline, "step": self.clock}),
        )

    @property
    def seat(self) -> tuple[tuple[str, ...], int] | None:
        """The shards' addresses and the rank; None once the connection has ended."""
        return None if self._ended.locked() else (self._config.servers, self.rank)

    def operation(self, what: str, *, turn: Turn | None = None) -> Bracket[tuple[str, Turn | None]]:
        """Bracket one call of the program. turn: the call's turn, if another thread makes it: calls after that wait for it."""
        return Bracket((what, turn), self._begin_operation, self._end_operation)

    def _begin_operation(self, what_and_turn: tuple[str, Turn | None]) -> None:
        what, turn = what_and_turn
        self._check_usable(what)
        before = self._turn if turn is None else turn.before
        if before is not None and before.is_finished:
            before.ended.wait()
        if turn is not None:
            turn.before = None
        if not self._busy.acquire(blocking=turn is not None):
            raise RuntimeError(f"psd: {what}: another thread is using this ParameterServer; each thread needs its own")
        self._last_failed = True
        self._reporter.begin(what, self._session.clock)

    def _end_operation(self, what_and_turn: tuple[str, Turn | None], error: BaseException | None) -> None:
        try:
            if error is None or isinstance(error, Drained):
                self._last_failed = False
            elif isinstance(error, (RolledBack, SessionFenced, SpecMismatch, Cancelled, WaitTimeout)):
                self._fail(what_and_turn[0], error)
        finally:
            self._reporter.end()
            self._busy.release()

    def _fail(self, what: str, error: BaseException) -> NoReturn:
        """Raise the error that the program gets in place of this one."""
        try:
            if isinstance(error, RolledBack):
                raise self._go_back(error) from None
            raise error
        except (SessionFenced, SpecMismatch) as error:
            if [worker.seat for worker in ending.remembered()].count(self.seat) < 2:
                raise
            twice = f"This process has connected twice as worker {self.rank}, and the later connection holds"
            raise type(error)(f"{error}. {twice}. {ONE_JOB}", **error.detail) from None
        except Cancelled:
            raise RuntimeError(f"psd: {what}: this ParameterServer was closed by another thread") from None
        except WaitTimeout as error:
            if "missing" in error.detail or not self._reporter.last_text:
                raise
            # The deadline passed before the shard's own answer came.
            raise WaitTimeout(
                f"{what}: gave up after {self._config.wait_timeout_s:g} s; {self._reporter.last_text}",
                missing=self._reporter.last_missing,
            ) from error

    def _check_usable(self, what: str) -> None:
        """Raise RuntimeError if the connection has ended, or belongs to another process."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"psd: {what}: connected in process {self._pid}, used in process {os.getpid()}. A connection does not survive "
                "a fork: call psd_client.connect() in the process that uses it"
            )
        if self._ended.locked():
            raise RuntimeError(f"psd: {what}: this ParameterServer is closed")
