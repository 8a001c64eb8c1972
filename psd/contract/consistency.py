"""The consistency word: "sync", "async", "ssp:3". Parses and prints it.

psd/state/aggregation/consistency.py acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from psd.contract import arguments
from psd.contract.errors import InvalidRequest
from psd.v1 import job_pb2

STALENESS_BOUND_MAX = 1_000_000
"""Largest bound, in steps. With a larger one a worker may as well be asynchronous."""

_EXPECTED = 'expected "sync", "async" or "ssp:S" with S a whole number of steps, such as "ssp:3"'


@dataclass(frozen=True)
class Consistency:
    """The consistency of a job: how far its workers may be apart.

    Attributes:
        mode: "sync" (bulk-synchronous, BSP), "async" (ASP) or "ssp" (stale synchronous parallel, Ho et al. 2013).
        staleness_bound: for "ssp", the steps by which a worker may be ahead of the slowest one when it reads.
    """

    mode: str
    staleness_bound: int = 0

    @property
    def has_rounds(self) -> bool:
        """True if the gradients of a round make one update; False if each is applied as it arrives."""
        return self.mode == "sync"

    @classmethod
    def parse(cls, word: str) -> Consistency:
        """Parse the word; InvalidRequest says what was expected."""
        mode, colon, bound = arguments.word(InvalidRequest, "consistency", word).partition(":")
        if mode in ("sync", "async") and not colon:
            return cls(mode)
        if mode == "ssp" and bound.isascii() and bound.isdigit():
            staleness_bound = int(bound)
            if staleness_bound > STALENESS_BOUND_MAX:
                raise InvalidRequest(f"consistency: staleness bound {staleness_bound} is above {STALENESS_BOUND_MAX}")
            return cls(mode, staleness_bound)
        raise InvalidRequest(f"consistency: got {word!r}; {_EXPECTED}")

    def __str__(self) -> str:
        return f"ssp:{self.staleness_bound}" if self.mode == "ssp" else self.mode

    @classmethod
    def from_message(cls, spec: job_pb2.JobSpec) -> Consistency:
        """Read a JobSpec message; InvalidRequest names the field."""
        name = next((name for name, number in _MODES.items() if number == spec.mode), None)
        if name is None:
            raise InvalidRequest(f"mode: must be sync, async or ssp, got {spec.mode}")
        if name != "ssp" and spec.staleness_bound:
            raise InvalidRequest(f"staleness_bound: is {spec.staleness_bound}, but only ssp has one; the mode is {name}")
        if spec.staleness_bound > STALENESS_BOUND_MAX:
            raise InvalidRequest(f"staleness_bound: {spec.staleness_bound} is above {STALENESS_BOUND_MAX}")
        return cls(name, spec.staleness_bound)

    def fill(self, spec: job_pb2.JobSpec) -> None:
        """Write into a JobSpec message."""
        spec.mode = _MODES[self.mode]
        spec.staleness_bound = self.staleness_bound


SYNC = Consistency("sync")

_MODES = {
    "sync": job_pb2.CONSISTENCY_MODE_SYNC,
    "async": job_pb2.CONSISTENCY_MODE_ASYNC,
    "ssp": job_pb2.CONSISTENCY_MODE_SSP,
}
