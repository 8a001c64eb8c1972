"""The end notes of a job's shards: what each holds once nothing changes it any more.

Shards never talk to each other: workers carry what they have to know. At the end there may be no workers left, so each shard
leaves a note where the checkpoints are. When all notes are there, every shard makes the same cut of them, or finds that what
they hold is of different rounds. Must not know blocks in memory, nor how long anybody waits.

    <url>/ends/shard-00000-of-00002.json
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psd
from psd.checkpoint.cut import TIME_S_MAX, Cut, part_file
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, seal, unseal
from psd.checkpoint.storage import FileStore
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd.contract.layout import Layout

DIRECTORY = "ends"

_NUMBER_MAX = 2**63 - 1


@dataclass(frozen=True)
class EndNote:
    """Facts about one shard at its end.

    Attributes:
        nonce: differs from end to end, so that no two ends make a cut of one name.
        run_id, timeline, layout_digest: of the job; the digest as hexadecimal digits.
        step: progress of the job, as this shard knows it. versions: with rounds, those of its trained blocks, each once.
        pushes: without rounds, (rank, session, clock) of each worker's last push that counts here, twice if not all blocks
            have it; but for workers whose leases have run out, of whom what has counted counts.
        order: of the last cut that it knows; see Cut. ended_at: seconds since 1970.
    """

    nonce: str
    run_id: str
    timeline: int
    layout_digest: str
    step: int
    versions: tuple[int, ...]
    pushes: tuple[tuple[int, int, int], ...]
    order: int
    ended_at: float

    def is_of_one_job(self, other: EndNote) -> bool:
        """True if the shards held parts of one job."""
        return dataclasses.replace(self, **_OWN) == dataclasses.replace(other, **_OWN)


_OWN: dict[str, Any] = {"nonce": "", "step": 0, "versions": (), "pushes": (), "order": 0, "ended_at": 0.0}


def note_document(note: EndNote) -> bytes:
    """The text of a note."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "psd_version": psd.__version__}
    return seal({**head, **dataclasses.asdict(note)})


def parse_note(data: bytes, file: str) -> EndNote:
    """Read a note's text; CheckpointCorrupt if it is none."""
    document = unseal(data, file)
    try:
        note = EndNote(**{field.name: document[field.name] for field in dataclasses.fields(EndNote)})
        pushes = tuple((rank, session, clock) for rank, session, clock in note.pushes)
        numbers = [note.timeline, note.step, note.order, *note.versions, *(number for push in pushes for number in push)]
        texts = [note.nonce, note.run_id, note.layout_digest]
        is_whole = all(type(number) is int and 0 <= number <= _NUMBER_MAX for number in numbers)
        if is_whole and all(type(text) is str for text in texts) and 0 <= note.ended_at <= TIME_S_MAX:
            return dataclasses.replace(note, versions=tuple(note.versions), pushes=pushes, ended_at=float(note.ended_at))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{file}: has unexpected contents: {error!r}") from error
    raise CheckpointCorrupt(f"{file}: has unexpected contents: {note}")


def write_note(storage: FileStore, note: EndNote, shard_index: int, shard_count: int) -> None:
    """Store a shard's note, in place of an earlier one."""
    storage.write(DIRECTORY, part_file(shard_index, shard_count), [note_document(note)])


def read_notes(storage: FileStore, own: EndNote, shard_count: int) -> dict[int, EndNote]:
    """The notes of the shards of one's own job that are there, by shard."""
    files = storage.files(DIRECTORY)
    notes = {}
    for index in range(shard_count):
        file = part_file(index, shard_count)
        if file not in files:
            continue
        try:
            note = parse_note(storage.read(DIRECTORY, file), f"{DIRECTORY}/{file}")
        except (FileNotFoundError, CheckpointCorrupt):  # removed, or being written where that shows: as if it was not there
            continue
        if note.is_of_one_job(own):
            notes[index] = note
    return notes


def remove_note(storage: FileStore, shard_index: int, shard_count: int) -> None:
    """Remove a shard's note, if there is one, and the directory with the last."""
    if storage.files(DIRECTORY):
        storage.remove(DIRECTORY, part_file(shard_index, shard_count))
        storage.remove_directory(DIRECTORY)


def common_cut(notes: Mapping[int, EndNote], layout: Layout) -> Cut:
    """The cut that all these shards hold; the same for whoever reads the same notes.

    Raises:
        CheckpointFailed: their blocks are of different rounds, or have counted different pushes of a worker.
    """
    counted: dict[int, set[tuple[int, int]]] = {}
    for note in notes.values():
        for rank, session, clock in note.pushes:
            counted.setdefault(rank, set()).add((session, clock))
    if halves := sorted(rank for rank, pushes in counted.items() if len(pushes) > 1):
        raise CheckpointFailed(f"the shards ended in the middle of pushes: not all have counted the last of workers {halves}")
    versions = sorted({version for note in notes.values() for version in note.versions})
    if len(versions) > 1:
        raise CheckpointFailed(f"the shards ended in the middle of a round: their blocks are at versions {versions}")
    ordered = [notes[index] for index in sorted(notes)]
    counting = [note for note in ordered if note.pushes] or ordered  # a shard that has vectors alone hears late of clocks
    return Cut(
        cut_id="end" + hashlib.sha256("".join(note.nonce for note in ordered).encode()).hexdigest()[:8],
        step=versions[0] if versions else min(note.step for note in counting),
        timeline=ordered[0].timeline,
        run_id=ordered[0].run_id,
        created_at=max(note.ended_at for note in ordered),
        layout=layout,
        order=1 + max(note.order for note in ordered),
    )
