"""A shard's part of a cut while it is collected, and the names of cuts. Must not know how pages come."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

from psd.checkpoint.cut import ORDER_MAX, TIME_S_MAX, CutName
from psd.contract.config import CUTS_MAX
from psd.contract.errors import InvalidRequest
from psd.contract.integers import INTEGER_MAX
from psd.state.cuts.positions import Positions
from psd.state.job import Job
from psd.v1 import data_pb2, job_pb2
from psd_core.arena import Page
from psd_core.table import TableSnapshot

_ID = re.compile(r"[0-9A-Za-z]{1,64}")


def new_id() -> str:
    """A new id for a cut."""
    return secrets.token_hex(4)


def check_cuts(cuts: Sequence[data_pb2.Cut]) -> None:
    """Raise InvalidRequest if there are too many cuts, or one has an invalid id, time, order, step, position or base."""
    if len(cuts) > CUTS_MAX:
        raise InvalidRequest(f"cuts: {len(cuts)} are above the limit of {CUTS_MAX}")
    for cut in cuts:
        if not _ID.fullmatch(cut.id):
            raise InvalidRequest(f"cuts.id: expected 1 to 64 letters and digits, got {cut.id[:80]!r}")
        if not 0 <= cut.created_at <= TIME_S_MAX:  # also refuses NaN, which a manifest could not be compared by
            raise InvalidRequest(f"cuts.created_at: expected seconds from 0 to {TIME_S_MAX:g}, got {cut.created_at}")
        if cut.order > ORDER_MAX:
            raise InvalidRequest(f"cuts.order: {cut.order} is above the limit of {ORDER_MAX}")
        if max(cut.step, cut.position) > INTEGER_MAX:
            raise InvalidRequest(f"cuts.step, position: {cut.step} and {cut.position} are not both up to {INTEGER_MAX}")
        if cut.base and CutName.of(cut.base) is None:
            raise InvalidRequest(f"cuts.base: expected the name of a checkpoint, got {cut.base[:80]!r}")


@dataclass(eq=False)
class Snapshot:
    """This shard's part of a cut.

    Attributes:
        job, timeline: those that it belongs to; the shard may have gone back to a checkpoint meanwhile.
        done: queue into which the snapshot is put, once, when all pages are there or cannot be had.
        why_missed: why they cannot be had; empty if they are there.
        pages: pinned pages by block; the one that takes the snapshot unpins them. is_complete: all pages were there.
        tables: for a cut to be stored: a snapshot of each table, begun; given back with the pages.
        awaits_tables: these are not begun yet. lacks_tables: they cannot be, because those of an earlier cut are being written.
        worker_clocks, client_states: by rank. learning_rates: scales of the learning rate, on shard 0.
        awaits_buffers: buffers were not stored yet, and no round tells when they are. since: when that was noticed.
        is_final: nothing changes the job any more.
        positions: the workers' positions, in a job without rounds.
    """

    cut: data_pb2.Cut
    job: Job
    done: Done
    why_missed: str = ""
    awaits_buffers: bool = False
    since: float | None = None
    is_final: bool = False
    positions: Positions | None = None
    timeline: int = 0
    pages: dict[int, Page] = field(default_factory=dict)
    tables: list[TableSnapshot] = field(default_factory=list)
    awaits_tables: bool = False
    lacks_tables: bool = False
    is_complete: bool = False
    worker_clocks: dict[int, int] = field(default_factory=dict)
    client_states: dict[int, bytes] = field(default_factory=dict)
    learning_rates: list[job_pb2.LearningRateScale] = field(default_factory=list)

    @property
    def awaits_positions(self) -> bool:
        """True if pushes may have to be held for this cut."""
        return self.positions is not None and not self.positions.is_taken


Done: TypeAlias = "SimpleQueue[Snapshot | None]"
"""Snapshots that are complete or missed; None comes from the waiting threads themselves, to wake up."""


def told(cut: data_pb2.Cut, **news: Any) -> data_pb2.Cut:
    """A copy of a cut with changed fields: a message that replies contain is never changed itself."""
    told = data_pb2.Cut()
    told.CopyFrom(cut)
    for name, value in news.items():
        setattr(told, name, value)
    return told
