"""Retries of a call: exponential back-off with full jitter, until the retry timeout.

Only errors after which the same call may succeed are retried. That is safe for every call of psd: a push is named by
(rank, session, clock) and counted once however often it is sent, a barrier by its number, and the others only read or state.
Clock and randomness are passed in; the sleep is the scope's. Must not know what the calls do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from psd.contract.errors import Draining, Overloaded, PsdError, ShardUnavailable

RETRIED: tuple[type[PsdError], ...] = (ShardUnavailable, Overloaded, Draining)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retries.

    Attributes:
        timeout_s: how long a shard may fail; 0: no second attempt.
        clock: seconds, monotonic. uniform: a number from [0, 1).
    """

    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = random.random

    def run(
        self,
        attempt: Callable[[], ResultT],
        *,
        shard: int,
        address: str,
        sleep: Callable[[float], None],
        on_failure: Callable[[PsdError], None] | None = None,
    ) -> ResultT:
        """The first result of `attempt`.

        Raises:
            ShardUnavailable: every attempt failed, for `timeout_s`. Other errors of `attempt` pass.
        """
        failing_since: float | None = None
        failures = 0
        while True:
            began = self.clock()
            try:
                return attempt()
            except RETRIED as error:
                now = self.clock()
                # An attempt that ran for longer than the timeout was being served, and is a new failure.
                if failing_since is None or now - began > self.timeout_s:
                    failing_since, failures = now, 0
                if on_failure is not None:
                    on_failure(error)
                pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures, 10)) * self.uniform()
                if now - failing_since + pause >= self.timeout_s:
                    raise ShardUnavailable(
                        f"shard {shard} at {address} could not be reached for {now - failing_since:.0f} s, "
                        f"in {failures + 1} attempts; the last one said: {error}",
                        shard=shard,
                        address=address,
                    ) from error
                failures += 1
            sleep(pause)
