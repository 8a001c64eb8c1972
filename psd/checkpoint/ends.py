"""Notes of a job's shards on their lives: when each began and, once nothing changes it any more, what it holds.

Shards never talk to each other: workers carry what they have to know. At the end there may be no workers left, so each shard
leaves a note where the checkpoints are. When all notes are there, every shard makes the same cut of them, or finds that what
they hold is of different rounds. With exact aggregation the note of shard 0 also has what workers may not have carried: those
who are behind close their rounds by it, and leave another note. A checkpoint that a shard announced because it ended is not
that of the job's end if the shard has begun anew since. Must not know blocks in memory, nor how long anybody waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from psd.checkpoint.cut import ORDER_MAX, STEP_MAX, TIME_S_MAX, Cut
from psd.checkpoint.notes import ShardNotes
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd.contract.layout import Layout
from psd.v1 import data_pb2

DIRECTORY, _END, _LIFE = "ends", "end", "life"


@dataclass(frozen=True)
class EndNote:
    """Facts about one shard at its end.

    Attributes:
        run_id, timeline, layout_digest: the job's; the digest as hexadecimal digits.
        step: progress of the job, as this shard knows it.
        counted: what its trained blocks count, in words, which must be one and the same on all shards: with rounds, their
            versions; without, the last push of each worker, but for those whose leases have run out, of whom what has counted
            counts.
        order: of the last cut that it knows; see Cut. ended_at: seconds since 1970.
        settled: exact aggregation, shard 0: the decisions and the verdict on the latest rounds, as hexadecimal digits of the
            PullRequest that would bring them.
        reached: the step up to which it has tried to close rounds by what shard 0 has settled.
    """

    run_id: str
    timeline: int
    layout_digest: str
    step: int
    counted: Mapping[str, list[str]]
    order: int
    ended_at: float
    settled: str = ""
    reached: int = 0

    @property
    def brings(self) -> data_pb2.PullRequest:
        """The message that `settled` is."""
        return data_pb2.PullRequest.FromString(bytes.fromhex(self.settled))

    @property
    def job(self) -> tuple[str, int, str]:
        """The job, and its timeline."""
        return self.run_id, self.timeline, self.layout_digest

    @classmethod
    def parse(cls, facts: Any) -> EndNote:
        """Read a note; CheckpointCorrupt if the facts are not those of a note."""
        try:
            note = cls(**facts)
            counted = {str(what): [*map(str, found)] for what, found in note.counted.items()}
            is_whole = type(note.step) is type(note.order) is int and 0 <= note.step <= STEP_MAX and 0 <= note.order < ORDER_MAX
            if is_whole and type(note.reached) is int and 0 <= note.ended_at <= TIME_S_MAX:
                _ = note.brings  # can be read
                return dataclasses.replace(note, counted=counted, ended_at=float(note.ended_at))
        except (ArithmeticError, AttributeError, DecodeError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"an end note has unexpected contents: {error!r}") from error
        raise CheckpointCorrupt(f"an end note has unexpected contents: {note}")


def write_life(notes: ShardNotes, began_at: float, shard_index: int, shard_count: int) -> None:
    """Note when a shard's process began, in seconds since 1970, in place of an earlier one's note."""
    notes.write(DIRECTORY, _LIFE, shard_index, shard_count, {"began_at": began_at})


def read_lives(notes: ShardNotes, shard_count: int) -> dict[int, float]:
    """Times at which the latest processes of the shards began, by shard; without those that have ended."""
    found = {index: facts.get("began_at") for index, facts in notes.read(DIRECTORY, _LIFE, shard_count).items()}
    return {index: began_at for index, began_at in found.items() if isinstance(began_at, float)}


def write_end(notes: ShardNotes, note: EndNote, shard_index: int, shard_count: int) -> None:
    """Store a shard's note, in place of an earlier one."""
    notes.write(DIRECTORY, _END, shard_index, shard_count, dataclasses.asdict(note))


def read_ends(notes: ShardNotes, own: EndNote, shard_count: int) -> dict[int, EndNote]:
    """The notes so far of the shards of the job in `own`, by shard."""
    found = {}
    for index, facts in notes.read(DIRECTORY, _END, shard_count).items():
        with contextlib.suppress(CheckpointCorrupt):
            note = EndNote.parse(facts)
            if note.job == own.job:
                found[index] = note
    return found


def to_settle(notes: Mapping[int, EndNote]) -> tuple[int, set[int]]:
    """The furthest step of any of these shards, and which of them have not tried yet to reach it by what shard 0 has settled.

    For shards that have no common cut. There are none without exact aggregation.
    """
    step = max(note.step for note in _counting(notes))
    return step, {index for index, note in notes.items() if notes[0].settled and note.reached < step}


def _counting(notes: Mapping[int, EndNote]) -> list[EndNote]:
    """The notes whose steps hold: a shard that has vectors alone hears late of clocks."""
    return [note for note in notes.values() if note.counted] or [*notes.values()]


def common_cut(notes: Mapping[int, EndNote], layout: Layout) -> Cut:
    """The cut that all these shards hold. It depends only on the notes.

    Raises:
        CheckpointFailed: their blocks are of different rounds, or have counted different pushes of a worker.
    """
    ordered = [notes[index] for index in sorted(notes)]
    counted: dict[str, set[str]] = {}
    for note in ordered:
        for what, found in note.counted.items():
            counted.setdefault(what, set()).update(found)
    for what, different in sorted(counted.items()):
        if len(different) > 1:
            raise CheckpointFailed(f"the shards ended in the middle of {what}: they are at {', '.join(sorted(different))}")
    return Cut(
        # The times differ from end to end, so no two ends make the same name.
        cut_id="end" + hashlib.sha256(repr([note.ended_at for note in ordered]).encode()).hexdigest()[:8],
        step=min(note.step for note in _counting(notes)),
        timeline=ordered[0].timeline,
        run_id=ordered[0].run_id,
        created_at=max(note.ended_at for note in ordered),
        layout=layout,
        order=1 + max(note.order for note in ordered),
    )
