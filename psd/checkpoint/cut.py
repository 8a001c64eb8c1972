"""Names: of one consistent cut of a job, of its files, and of a checkpoint's properties in listings.

A cut is decided in one place and told to all shards, so everything here is the same on all of them. Must not know how files are
written.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout

MANIFEST = "manifest.json"

WHOLE_KEPT = 2
"""Number of the newest checkpoints with tables that build on no other and are kept: the next one builds on one of them."""

TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999, and so the latest time of a cut."""

FINAL_ID = "final"
"""Id of the cut taken when all workers have left."""

ORDER_MAX = 10**12
"""Largest order of a cut."""

_NAME = re.compile(r"timeline-(\d{5,})(?:-cut-(\d{9,}))?-step-(\d{12,})-([0-9A-Za-z]{1,64})")

STEP_MAX = (1 << 56) - 1
"""Largest step of a checkpoint from which a job can go on: shards keep a worker's clock in 56 bits."""


def name_of(timeline: int, step: int, cut_id: str, order: int = 0) -> str:
    """Name of the directory of a cut's checkpoint."""
    cut = f"-cut-{order:09}" if order else ""
    return f"timeline-{timeline:05}{cut}-step-{step:012}-{cut_id}"


@dataclass(frozen=True, eq=False)
class Cut:
    """A point at which a job is stored.

    Attributes:
        cut_id: a name that no other cut has: 1 to 64 ASCII letters and digits.
        step: under sync the version of all trained blocks; else some measure of progress, such as min_clock.
        timeline: number that grows whenever the job goes back to an older state, so that later cuts count as newer.
        run_id: the run's name. created_at: seconds since 1970, UTC.
        layout: the job's, for its number of shards.
        order: greater than that of an earlier cut of the timeline, if the steps do not show which is later: workers may come
            and go, so that the slowest clock is lower than before.
    """

    cut_id: str
    step: int
    timeline: int
    run_id: str
    created_at: float
    layout: Layout
    order: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Za-z]{1,64}", self.cut_id):
            raise ValueError(f"cut_id: expected 1 to 64 ASCII letters and digits, got {self.cut_id!r}")
        if self.step < 0 or self.timeline < 0 or self.order < 0:
            numbers = f"{self.step}, {self.timeline} and {self.order}"
            raise ValueError(f"step, timeline and order: must not be negative, got {numbers}")

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
        """Name of the checkpoint's directory; see CutName."""
        return name_of(self.timeline, self.step, self.cut_id, self.order)


class CutName(NamedTuple):
    """The parts of a checkpoint's name. Later ones compare as greater: by timeline, then by order, then by step.

    The checkpoint that is stored when all workers have left is the last of its timeline.
    """

    timeline: int
    is_final: bool
    order: int
    step: int
    cut_id: str

    @classmethod
    def of(cls, name: str) -> CutName | None:
        """Parse a name; None if it is not a checkpoint's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), match[4] == FINAL_ID, int(match[2] or 0), int(match[3]), match[4])


class CheckpointState(str, enum.Enum):
    """The condition of a checkpoint."""

    VALID = "valid"
    INCOMPLETE = "incomplete"
    """No manifest: it is being written, its writer has died, or its deletion was interrupted."""
    DAMAGED = "damaged"
    """The files do not match the manifest."""
    UNSUPPORTED = "unsupported"
    """Whole, but from a version of psd whose checkpoints this one cannot read. It is left alone."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint in a listing.

    Attributes:
        created_at, shard_count: None unless it is valid.
        nbytes: size of all its files. reason: why it is not valid.
        rows: number of rows of all its tables; None without tables, or if it is not valid.
        base: name of the checkpoint on which it builds; empty: none.
        learning_rate_scale: the scale of the learning rate for a job that goes on from there; 1 if it is not valid.
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
    """Name of the file with all values of a part."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.chunks"


def part_file(shard_index: int, shard_count: int) -> str:
    """Name of a part's document, which is written after its values."""
    return f"shard-{shard_index:05}-of-{shard_count:05}.json"
