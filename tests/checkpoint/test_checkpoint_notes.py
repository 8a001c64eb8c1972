"""Notes that shards leave for each other, and the cut that they make of those at the end of a job."""

from __future__ import annotations

import dataclasses

import pytest
from helpers_checkpoint import memory_url, small_spec

from psd.checkpoint import CheckpointDirectory, EndNote, common_cut, read_ends, to_settle, write_end
from psd.checkpoint.ends import DIRECTORY
from psd.contract.errors import CheckpointFailed
from psd.contract.layout import Layout
from psd.v1 import data_pb2

LAYOUT = Layout(small_spec(), 2)
NOTE = EndNote("run-1", 3, LAYOUT.digest.hex(), 7, {"a round": ["version 7"]}, 2, 1_700_000_000.25)


def test_all_shards_make_the_same_cut_of_their_notes():
    """The later of two ends at one step has another name; a shard that counts no rounds has nothing to say about the step."""
    directory = CheckpointDirectory(memory_url())
    other = dataclasses.replace(NOTE, step=5, counted={}, order=4, ended_at=NOTE.ended_at + 1)
    write_end(directory.notes, NOTE, 0, 2)
    write_end(directory.notes, other, 1, 2)

    cuts = [common_cut(read_ends(CheckpointDirectory(directory.location).notes, own, 2), LAYOUT) for own in (NOTE, other)]

    assert len({cut.name for cut in cuts}) == 1
    assert (cuts[0].step, cuts[0].timeline, cuts[0].order, cuts[0].created_at) == (7, 3, 5, other.ended_at)
    later = {0: dataclasses.replace(NOTE, ended_at=NOTE.ended_at + 60), 1: other}
    assert common_cut(later, LAYOUT).cut_id != cuts[0].cut_id


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ({"a round": ["version 8"]}, "in the middle of a round: they are at version 7, version 8"),
        ({"a round": ["version 7", "version 8"]}, "in the middle of a round: they are at version 7, version 8"),
        ({"a push of worker 1": ["step 4 of session 9", "step 5 of session 9"]}, "in the middle of a push of worker 1: they"),
    ],
)
def test_what_the_shards_do_not_hold_alike_is_no_cut(counted, words):
    """One lacks a gradient that the other has, or some of its own blocks do."""
    with pytest.raises(CheckpointFailed, match=words):
        common_cut({0: NOTE, 1: dataclasses.replace(NOTE, counted=counted)}, LAYOUT)


def test_shards_that_are_behind_have_to_try_what_shard_0_has_settled_before_there_is_no_cut():
    """Only with exact aggregation, in which shard 0 settles anything."""
    behind = dataclasses.replace(NOTE, step=6, counted={"a round": ["version 6"]})
    first = dataclasses.replace(NOTE, settled=data_pb2.PullRequest(decisions=[{"round": 6}]).SerializeToString().hex())

    assert to_settle({0: NOTE, 1: behind}) == (7, set())
    assert to_settle({0: first, 1: behind}) == (7, {0, 1})
    assert to_settle({0: first, 1: dataclasses.replace(behind, reached=7)}) == (7, {0})
    assert to_settle({0: dataclasses.replace(first, reached=7), 1: dataclasses.replace(behind, reached=7)}) == (7, set())
    assert [decision.round for decision in first.brings.decisions] == [6]


def test_notes_of_another_job_or_number_of_shards_and_what_is_no_note_are_passed_over():
    """They lie where an earlier job was killed."""
    directory = CheckpointDirectory(memory_url())
    write_end(directory.notes, NOTE, 1, 3)
    write_end(directory.notes, dataclasses.replace(NOTE, run_id="run-2"), 1, 2)
    assert read_ends(directory.notes, NOTE, 2) == {}
    directory.notes.write(DIRECTORY, "end", 1, 2, {"step": "none"})
    assert read_ends(directory.notes, NOTE, 2) == {}
    for unreadable in ({"settled": "0"}, {"settled": "ff"}, {"settled": 5}, {"reached": "7"}):
        directory.notes.write(DIRECTORY, "end", 1, 2, {**dataclasses.asdict(NOTE), **unreadable})
        assert read_ends(directory.notes, NOTE, 2) == {}
    directory.storage.write(DIRECTORY, "shard-00001-of-00002.end.note", [b"half"])
    assert read_ends(directory.notes, NOTE, 2) == {}
    write_end(directory.notes, NOTE, 0, 2)

    directory.notes.remove(DIRECTORY, 1)

    assert list(read_ends(directory.notes, NOTE, 2)) == [0]
    directory.notes.remove(DIRECTORY)
    assert directory.storage.files(DIRECTORY) == {}
