"""Scalars that the program reports, such as its loss, on their way to shard 0 and to files.

The program's thread only notes them. A thread of their own, which the first scalar starts, sends and writes them twice a
second. If shard 0 does not answer, they are sent again; if there are too many, the oldest are given up. A killed program loses
those that were not sent yet. Must not know gradients; never waits for the program, nor the program for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest, PsdError
from psd.contract.scalars import (
    BATCH_POINTS_MAX,
    SERIES_MAX,
    LoggedScalars,
    check_name,
    checked_step,
    checked_total,
    checked_value,
)
from psd.v1 import control_pb2
from psd_client.lanes.transport import Cancelled
from psd_client.worker.scalars.scalar_files import ScalarFiles

logger = logging.getLogger("psd_client")

FLUSH_S = 0.5
SEND_TIMEOUT_S = 2.0
"""Seconds for one request, and for all of one flush."""
CLOSE_TIMEOUT_S = 30.0
"""Longest wait for the files, at the end of the program; TensorBoard's writer alone takes seconds to be imported."""
UNSENT_MAX = 1 << 16
"""Most points that are kept while shard 0 does not answer."""


class _Point(NamedTuple):
    number: int
    made_at: float
    step: int
    name: str
    value: float


class ScalarLog:
    """The scalars of one worker.

    Args:
        send: sends a request, which lacks its caller, to shard 0 within so many seconds; raises PsdError or Cancelled.
        files: the files to which they are written, too.
        run: returns the name of the run.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[control_pb2.LogRequest, float], None],
        files: ScalarFiles,
        run: Callable[[], str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._send = send
        self._files = files
        self._run_id = run
        self._now = now
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._count = 0
        self._total = 0
        self._total_sent = 0
        self._unsent: deque[_Point] = deque(maxlen=UNSENT_MAX)
        self._unwritten: deque[LoggedScalars] = deque(maxlen=UNSENT_MAX)
        self._has_work = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, step: Any, scalars: Mapping[str, Any], total: Any = None) -> None:
        """Note scalars, and the clock at which the job ends; see ParameterServer.log."""
        step = checked_step(step)
        end = self._total if total is None else checked_total(total)
        if not scalars and total is None:
            refuse(InvalidRequest, "scalars", "at least one, such as loss=0.5", scalars)
        values = {name: checked_value(name, value) for name, value in scalars.items()}
        with self._lock:
            fresh = values.keys() - self._names
            for name in fresh:
                check_name(name)
            if len(self._names) + len(fresh) > SERIES_MAX:
                raise InvalidRequest(f"{min(fresh)}: a worker has at most {SERIES_MAX} series of scalars")
            self._names |= fresh
            self._total = end
            made_at = self._now()
            for name, value in values.items():
                self._unsent.append(_Point(self._count, made_at, step, name, value))
                self._count += 1
            if values:
                self._unwritten.append(LoggedScalars(time.time(), self._run_id(), self._rank, step, values))
            self._start()
        self._has_work.set()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"psd-scalars-{self._rank}", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                thread.start()
                self._thread = thread

    def flush(self) -> None:
        """Write and send all scalars noted so far, as far as that succeeds now."""
        with self._lock:
            records, self._unwritten = self._unwritten, deque(maxlen=UNSENT_MAX)
        self._files.write(records)
        until = self._now() + SEND_TIMEOUT_S
        while self._now() < until and (batch := self._next_batch()) is not None:
            request = self._request(batch)
            try:
                self._send(request, SEND_TIMEOUT_S)
            except InvalidRequest as error:
                logger.warning("psd: worker %d: shard 0 does not keep %d scalars: %s", self._rank, len(batch), error)
            except (PsdError, Cancelled):  # heartbeats tell of what is wrong with the shard
                return
            self._total_sent = request.total
            if batch:
                self._forget(batch[-1].number)

    def _next_batch(self) -> Sequence[_Point] | None:
        """The next points to send: none if there is only news of the job's end; None if there is nothing to send."""
        with self._lock:
            points = list(islice(self._unsent, BATCH_POINTS_MAX))
            if points or self._total != self._total_sent:
                return points
            self._has_work.clear()
            if self._stopped.is_set():  # close() may have set both a moment ago
                self._has_work.set()
            return None

    def _forget(self, number: int) -> None:
        with self._lock:
            while self._unsent and self._unsent[0].number <= number:
                self._unsent.popleft()

    def _request(self, points: Sequence[_Point]) -> control_pb2.LogRequest:
        names = {name: index for index, name in enumerate(dict.fromkeys(point.name for point in points))}
        now = self._now()
        return control_pb2.LogRequest(
            first=points[0].number if points else self._count,
            names=list(names),
            series=[names[point.name] for point in points],
            steps=[point.step for point in points],
            values=[point.value for point in points],
            ago_s=[now - point.made_at for point in points],
            total=self._total,
        )

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._has_work.wait()
            is_last = self._stopped.wait(FLUSH_S)
            self.flush()
        self._files.close()

    def close(self) -> None:
        """Write the rest, and send it if shard 0 takes it at once. Idempotent."""
        self._stopped.set()
        self._has_work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
