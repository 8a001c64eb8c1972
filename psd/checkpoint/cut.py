"""The names of things: one consistent cut of a job, the files that hold it, and what a directory says of each checkpoint.

A cut is decided in one place and made known to all shards, so everything here is the same on all of them. Must not know how
files are written.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout

MANIFEST = "manifest.json"

WHOLE_KEPT = 2
"""Newest checkpoints of tables that build on no other, which are not removed: what is being written builds on one of them."""

TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999: no cut is of a later one."""

_NAME = re.compile(r"timeline-(\d{5,})-step-(\d{12,})-([0-9A-Za-z]{1,64})")


def name_of(timeline: int, step: int, cut_id: str) -> str:
    """Name of the directory of a cut's checkpoint."""
    return f"timeline-{timeline:05}-step-{step:012}-{cut_id}"


@dataclass(frozen=True, eq=False)
class Cut:
    """A point at which a job is stored.

    Attributes:
        cut_id: a name that no other cut has: 1 to 64 ASCII letters and digits.
        step: under sync the version of all trained blocks; else some measure of progress, such as min_clock.
        timeline: grows whenever the job goes back to an older state, so that what came after counts as newer.
        run_id: the run's name. created_at: seconds since 1970, UTC.
        layout: of the job, for its number of shards.
    """

    cut_id: str
    step: int
    timeline: int
    run_id: str
    created_at: float
    layout: Layout

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Za-z]{1,64}", self.cut_id):
            raise ValueError(f"cut_id: expected 1 to 64 ASCII letters and digits, got {self.cut_id!r}")
        if self.step < 0 or self.timeline < 0:
            raise ValueError(f"step and timeline: must not be negative, got {self.step} and {self.timeline}")

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self.layout.spec

    @property
    def shard_count(self) -> int:
        """The number of parts."""
        return self.layout.shard_count

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory; names sort by timeline, then by step."""
        return name_of(self.timeline, self.step, self.cut_id)


class CutName(tuple[int, int, str]):
    """The timeline, step and cut id in a checkpoint's name. Later ones compare as greater."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> CutName | None:
        """Parse a name; None if it is not a checkpoint's."""
        match = _NAME.fullmatch(name)
        return cls((int(match[1]), int(match[2]), match[3])) if match else None


class CheckpointState(str, enum.Enum):
    """The condition of a checkpoint."""

    VALID = "valid"
    INCOMPLETE = "incomplete"
    """No manifest: it is being written, its writer has died, or its deletion was interrupted."""
    DAMAGED = "damaged"
    """The files do not match the manifest."""
    UNSUPPORTED = "unsupported"
    """Whole, but of a version of psd whose checkpoints this one does not read. It is left alone."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a listing.

    Attributes:
        created_at, shard_count: None unless it is valid.
        nbytes: of all its files. reason: why it is not valid.
        rows: of all its tables; None where there are none, or unless it is valid.
        base: name of the checkpoint that it builds on; empty: it is whole by itself.
        learning_rate_scale: that a job has which goes on from there; 1 if it is not valid.
    """

    name: str
    timeline: int
    step: int
    state: CheckpointState
    nbytes: int
    created_at: float | None = None
    shard_count: int | None = None
    reason: str = ""
    rows: int | None = None
    base: str = ""
    learning_rate_scale: float = 1.0


def data_file(shard_index: int, shard_count: int) -> str:
    """A part's numbers."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.safetensors"


def rows_file(shard_index: int, shard_count: int) -> str:
    """A part's rows of tables; only in jobs that have some."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.rows"


def vectors_file(shard_index: int, shard_count: int) -> str:
    """A part's elements of server-side vectors; only where there are some."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.vectors"


def part_file(shard_index: int, shard_count: int) -> str:
    """A part's own manifest, written after its numbers."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.json"
