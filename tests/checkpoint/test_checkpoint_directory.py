"""Which checkpoint is the newest, what is deleted, and that no damage goes unnoticed."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging

import pytest
from helpers_checkpoint import (
    CREATED_AT,
    check_restored,
    cut_of,
    files_of,
    memory_url,
    parts,
    small_spec,
    store,
    valid_names,
)

from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.checkpoint.cut import FINAL_ID, MANIFEST, CutName, name_of
from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd.contract.layout import Layout

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def two(tmp_path):
    """A directory with two checkpoints of two shards, the older and the newer cut."""
    directory = CheckpointDirectory(str(tmp_path))
    older, newer = cut_of(small_spec(), 2, 7), cut_of(small_spec(), 2, 8, cut_id="b2")
    store(directory, older)
    store(directory, newer)
    return directory, older, newer


@pytest.mark.parametrize("url", ["/nowhere/at/all", "memory://nowhere"])
def test_directory_when_it_does_not_exist_then_it_is_empty(url):
    directory = CheckpointDirectory(url)

    assert directory.checkpoints() == []
    assert directory.newest() is None
    assert directory.collect_garbage() == []
    assert directory.verify("timeline-00000-step-000000000007-a1") == [
        f"there is no checkpoint 'timeline-00000-step-000000000007-a1' in {directory.location}"
    ]


def test_directory_when_the_url_is_none_that_can_be_used_then_says_why():
    with pytest.raises(ConfigError, match="got an empty string"):
        CheckpointDirectory("")
    with pytest.raises(ConfigError, match="Protocol not known: nosuch"):
        CheckpointDirectory("nosuch://user:secret@host/x")
    with pytest.raises(ConfigError) as raised:
        CheckpointDirectory("nosuch://user:secret@host/x")
    assert "secret" not in str(raised.value)


def test_directory_when_its_path_has_odd_characters_then_it_is_the_one_that_was_named(tmp_path):
    for name in ("run::1", "run::2", "a b", "#?*[1]", "50%20", "ü", "a:b", "a@b", "-x"):
        CheckpointDirectory(f"{tmp_path}/{name}").storage.write("there", "file", [name.encode()])

        assert (tmp_path / name / "there" / "file").read_text() == name


@pytest.mark.parametrize("url", ["{}/made/anew", "memory://checked"])
def test_check_when_the_place_takes_files_then_nothing_is_left_of_it(tmp_path, url):
    directory = CheckpointDirectory(url.format(tmp_path))

    directory.check()

    assert directory.storage.files("") == {}


@pytest.mark.parametrize("step", ["create", "fsync", "rename", "remove"])
def test_check_when_the_place_refuses_anything_then_says_what_and_why(tmp_path, step):
    def refuse(at: str) -> None:
        if at.startswith(step):
            raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(CheckpointFailed, match=rf"^cannot \w+ {tmp_path}/\S+: Read-only file system"):
        CheckpointDirectory(str(tmp_path), crash_point=refuse).check()


def test_check_when_a_file_is_not_read_back_then_says_so(tmp_path, monkeypatch):
    directory = CheckpointDirectory(str(tmp_path))
    monkeypatch.setattr(directory.storage, "read", lambda *_: b"")

    with pytest.raises(CheckpointFailed, match="is not read back as it was"):
        directory.check()


def test_checkpoints_when_several_are_there_then_the_newest_is_first(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    cuts = [cut_of(small_spec(), 1, step, timeline) for step, timeline in ((5, 0), (900, 0), (1000, 0), (950, 1), (2, 100_000))]
    for cut in cuts:
        store(directory, cut)
    (tmp_path / "notes").mkdir()
    (tmp_path / "timeline-1-step-2-x").mkdir()
    (tmp_path / "readme.txt").write_text("mine")

    assert [(info.timeline, info.step) for info in directory.checkpoints()] == [
        (100_000, 2),
        (1, 950),
        (0, 1000),
        (0, 900),
        (0, 5),
    ]
    assert directory.newest().name == cuts[-1].name
    assert directory.newest(before=cuts[3].name).name == cuts[2].name
    assert directory.newest(before=cuts[0].name) is None


# -- damage ------------------------------------------------------------------------------------------------------------


def _flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_names_when_they_say_more_than_the_step_then_they_go_by_the_order_and_what_is_final_comes_last():
    cuts = [(0, 9, "b", 0), (0, 7, "c", 1), (0, 7, "a", 2), (0, 3, "ff", 3), (0, 2, "final", 0), (1, 0, "a", 0)]

    found = [CutName.of(name_of(*cut)) for cut in cuts]

    assert sorted(found) == found
    assert [(its.timeline, its.step, its.cut_id, its.order) for its in found] == cuts


def test_newest_when_any_byte_of_a_document_is_flipped_then_goes_back_loudly_and_names_the_file(two, tmp_path, caplog):
    directory, older, newer = two
    for path in (tmp_path / newer.name).glob("*.json"):
        whole = path.read_bytes()
        for place in range(0, len(whole), 41):
            caplog.clear()
            _flip(path, place)
            assert directory.newest().name == older.name
            (record,) = caplog.records
            assert record.levelno == logging.ERROR
            assert f"{newer.name}/{path.name}" in record.getMessage()
            path.write_bytes(whole)
    assert directory.newest().name == newer.name


@pytest.mark.parametrize("file", ["manifest.json", "shard-00000-of-00002.json", "shard-00001-of-00002.chunks"])
@pytest.mark.parametrize("damage", ["removed", "truncated", "emptied", "lengthened"])
def test_newest_when_a_file_is_damaged_then_the_one_before_is_used(two, tmp_path, caplog, file, damage):
    directory, older, newer = two
    path = tmp_path / newer.name / file
    whole = path.read_bytes()
    path.unlink()
    if damage != "removed":
        path.write_bytes({"truncated": whole[:-1], "emptied": b"", "lengthened": whole + b"\0"}[damage])

    assert directory.newest().name == older.name

    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert file in record.getMessage()
    assert any(file in problem for problem in directory.verify(newer.name))
    state = CheckpointState.INCOMPLETE if (file, damage) == (MANIFEST, "removed") else CheckpointState.DAMAGED
    assert directory.checkpoints()[0].state is state
    with pytest.raises(CheckpointCorrupt, match=file):
        directory.load(newer.name)
    check_restored(directory, older, Layout(older.spec, 3))


def test_verify_when_any_byte_of_the_numbers_is_flipped_then_names_the_file_and_restoring_stops(two, tmp_path):
    directory, _, newer = two
    manifest = directory.newest()
    assert directory.verify(newer.name) == []
    for path in (tmp_path / newer.name).glob("*.chunks"):
        for place in range(0, path.stat().st_size, 997):
            _flip(path, place)
            (problem,) = directory.verify(newer.name)
            assert path.name in problem
            if "header" not in problem:  # which restoring does not read
                with pytest.raises(CheckpointCorrupt, match=path.name):
                    list(directory.read_blocks(manifest, Layout(newer.spec, 1), 0))
            _flip(path, place)
    assert directory.verify(newer.name) == []


def test_export_when_a_byte_was_flipped_then_no_file_appears_and_an_older_one_stays(two, tmp_path):
    directory, _, newer = two
    target = tmp_path / "model.safetensors"
    target.write_text("old")
    _flip(tmp_path / newer.name / "shard-00000-of-00002.chunks", 20_000)

    with pytest.raises(CheckpointCorrupt, match="shard-00000-of-00002"):
        directory.export(directory.newest(), str(target))

    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


def test_read_blocks_when_abandoned_then_its_threads_end(two):
    directory, older, _ = two
    blocks = directory.read_blocks(directory.load(older.name), Layout(older.spec, 1), 0)
    next(blocks)

    blocks.close()  # would hang, or leave threads to be warned of


def test_final_checkpoint_when_an_earlier_run_has_left_parts_of_that_name_then_each_shard_replaces_its_own_first(tmp_path):
    """A run that was killed before the manifest, and run again, ends at the same step: its shards met each other's old parts,
    and failed; one of them removed what the others had written."""
    directory = CheckpointDirectory(str(tmp_path))
    old = cut_of(small_spec(), 2, cut_id=FINAL_ID)
    for index in range(2):
        directory.write_part(old, index, parts(old, index))
    new = dataclasses.replace(old, run_id="run-2")

    directory.write_part(new, 1, parts(new, 1))
    assert not directory.complete(new)
    directory.write_part(new, 0, parts(new, 0))
    assert directory.complete(new)

    assert directory.load(new.name).run_id == "run-2"
    check_restored(directory, new, Layout(new.spec, 3))


# -- deletion ----------------------------------------------------------------------------------------------------------


STATES = [
    *((keep, states) for keep in (1, 2) for states in itertools.product("vid", repeat=3)),
    *((2, states) for states in itertools.product("vid", repeat=4) if states.count("v") >= 3),
]
"""Checkpoints, valid, interrupted and damaged, each before, between and behind as many valid ones as are kept, and one more."""


@pytest.mark.parametrize(("keep", "states"), STATES, ids=lambda value: value if isinstance(value, int) else "".join(value))
def test_collect_garbage_when_checkpoints_are_in_any_state_then_the_newest_valid_ones_stay(states, keep):
    directory = CheckpointDirectory(memory_url(), keep=keep)
    names = []
    for step, state in enumerate(states):
        cut = cut_of(small_spec(), 1, step)
        names.append(cut.name)
        directory.write_part(cut, 0, parts(cut, 0))
        if state != "i":
            directory.complete(cut)
        if state == "d":
            directory.storage.remove(cut.name, "shard-00000-of-00001.json")
    valid = [name for name, state in zip(names, states, strict=True) if state == "v"]

    removed = directory.collect_garbage()

    left = [info.name for info in directory.checkpoints()]
    assert set(removed) | set(left) == set(names)
    assert sorted(valid_names(directory)) == valid[-keep:]
    newer = names[names.index(valid[-1]) :] if valid else names
    assert set(newer) <= set(left)
    unfinished = {name for name, state in zip(names, states, strict=True) if state == "i"}
    assert unfinished & set(left) == unfinished & set(newer)
    damaged = {name for name, state in zip(names, states, strict=True) if state == "d"}
    assert damaged & set(left) == {name for name in damaged if len(valid) < keep or name > valid[-keep]}


def test_stored_when_the_last_cut_of_a_timeline_is_asked_for_then_it_is_found_by_its_id_alone(tmp_path):
    """Who asks may have heard of a worker's end at another step, and at another time."""
    directory = CheckpointDirectory(str(tmp_path))
    for timeline, step in ((0, 5), (1, 7)):
        cut = cut_of(small_spec(), 2, step, timeline, FINAL_ID)
        directory.write_part(cut, 1, parts(cut, 1))

    for timeline, step in ((0, 5), (1, 7), (2, None)):
        asked = dataclasses.replace(cut_of(small_spec(), 2, 3, timeline, FINAL_ID), created_at=1.0)
        found = directory.stored(asked, 1)
        assert (found and (found.timeline, found.step, found.created_at)) == (step and (timeline, step, CREATED_AT))
        assert directory.stored(asked, 0) is None


def test_collect_garbage_when_deleting_then_the_manifest_goes_first_and_durably(two, tmp_path):
    _, older, newer = two
    steps = []

    assert CheckpointDirectory(str(tmp_path), keep=1, crash_point=steps.append).collect_garbage() == [older.name]

    assert steps == [
        f"fsync directory {newer.name}",
        f"fsync directory {tmp_path.name}",
        "remove manifest.json",
        f"fsync directory {older.name}",
        f"fsync directory {tmp_path.name}",
        "remove shard-00000-of-00002.chunks",
        "remove shard-00000-of-00002.json",
        "remove shard-00001-of-00002.chunks",
        "remove shard-00001-of-00002.json",
        f"remove directory {older.name}",
    ]
    assert [path.name for path in tmp_path.iterdir()] == [newer.name]


def test_collect_garbage_when_another_shard_does_so_at_the_same_time_then_neither_complains(two, tmp_path):
    """It has seen a newer checkpoint, and removes what this one would keep."""
    _, older, middle = two
    newest, others = cut_of(small_spec(), 2, 9, cut_id="c3"), CheckpointDirectory(str(tmp_path), keep=1)

    def crash_point(step):
        if step == f"fsync directory {middle.name}" and older.name in valid_names(others):
            store(others, newest)
            others.collect_garbage()

    store(others, first := cut_of(small_spec(), 2, 6, cut_id="a0"))

    removed = CheckpointDirectory(str(tmp_path), keep=2, crash_point=crash_point).collect_garbage()

    assert removed == [first.name]
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]


def test_collect_garbage_when_somebody_died_in_the_middle_then_temporary_files_go_too(two, tmp_path):
    _, older, newer = two
    (tmp_path / older.name / ".shard-00000-of-00002.chunks.17-ab.tmp").write_bytes(b"half")

    CheckpointDirectory(str(tmp_path), keep=1).collect_garbage()

    assert {path.parent.name for path in files_of(tmp_path)} == {newer.name}


def test_discard_when_a_cut_failed_then_its_files_go_but_never_those_of_a_valid_one(two, tmp_path):
    directory, _, newer = two
    failed = cut_of(small_spec(), 2, 9)
    directory.write_part(failed, 0, parts(failed, 0))

    assert directory.discard(failed)
    assert not directory.discard(newer)
    assert directory.discard(failed)  # nothing is left of it

    assert not (tmp_path / failed.name).exists()
    assert directory.newest().name == newer.name


def test_discard_when_another_shard_completes_the_checkpoint_meanwhile_then_it_stays(tmp_path):
    """That one may have removed the older ones already."""
    cut = cut_of(small_spec(), 2, 7)
    other = CheckpointDirectory(str(tmp_path), keep=1)
    for index in range(2):
        other.write_part(cut, index, parts(cut, index))

    def complete_first(step):
        if step.startswith("remove "):
            assert other.complete(cut)
            other.collect_garbage()

    assert not CheckpointDirectory(str(tmp_path), crash_point=complete_first).discard(cut)
    assert other.newest().name == cut.name
    assert other.verify(cut.name) == []


# -- the cut -----------------------------------------------------------------------------------------------------------


def test_write_part_when_blocks_are_not_of_one_version_then_it_is_refused_under_sync(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    cut = cut_of(small_spec(), 1, 7)
    torn = (part._replace(version=part.version + (part.space == 2)) for part in parts(cut, 0))

    with pytest.raises(CheckpointFailed, match="block 2 is at version 8, the cut at 7"):
        directory.write_part(cut, 0, torn)

    assert files_of(tmp_path) == []


def test_cut_when_its_fields_are_wrong_then_it_is_refused():
    with pytest.raises(ValueError, match="cut_id"):
        cut_of(small_spec(), 1, cut_id="../x")
    with pytest.raises(ValueError, match="negative"):
        cut_of(small_spec(), 1, step=-1)
    with pytest.raises(ValueError, match="keep"):
        CheckpointDirectory("/tmp/x", keep=0)
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        CheckpointDirectory("/tmp").newest(before="x")
