"""The JSON documents: pinned byte for byte, a pure function of the cut, and any change of any byte is found."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from pathlib import Path

import pytest
from helpers_checkpoint import cut_of, files_of, memory_url, parts, small_spec, store, valid_names

import psd
from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.cut import MANIFEST
from psd.checkpoint.manifest import ManifestDocument
from psd.checkpoint.sealing import FORMAT_VERSION, seal, unseal
from psd.contract.errors import CheckpointCorrupt, CheckpointUnsupported
from psd.contract.jobspec import JobSpec, TensorSpec

GOLDEN = Path(__file__).with_name("golden")


pytestmark = pytest.mark.usefixtures("no_fsync")


def test_documents_when_stored_then_they_are_the_golden_ones(tmp_path, monkeypatch):
    """A change of the format needs a new version and a reader for the old one: checkpoints outlive psd's versions.

    The checksums in the documents pin every byte of the chunks. To look at a difference: diff the two directories.
    """
    monkeypatch.setattr(psd, "__version__", "0.1.0")
    directory = CheckpointDirectory(str(tmp_path))

    name = store(directory, cut_of(small_spec(), 2))

    assert name == "timeline-00000-step-000000000007-a1"
    written = {path.name: path.read_bytes() for path in files_of(tmp_path) if path.suffix == ".json"}
    golden = {path.name: path.read_bytes() for path in files_of(GOLDEN)}
    assert written == golden


def test_golden_manifest_when_read_by_any_program_then_it_is_json_with_these_keys():
    document = json.loads((GOLDEN / MANIFEST).read_bytes())

    assert document["format"] == "psd-checkpoint"
    assert document["tensors"][0] == {"name": "embedding.weight", "shape": [301, 33], "dtype": "float32", "group": 0}
    assert document["job"]["consistency"] == "sync"


def test_unseal_when_any_byte_is_flipped_then_the_document_is_refused():
    data = seal({"format": "psd-checkpoint", "format_version": FORMAT_VERSION, "list": [{"a": 1}, {"b": "é"}], "empty": []})

    assert unseal(data, "x")["list"] == [{"a": 1}, {"b": "é"}]
    for place, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        with pytest.raises(CheckpointCorrupt, match="x: is cut off or was changed"):
            unseal(bytes(changed), "x")
    for length in range(len(data)):
        with pytest.raises(CheckpointCorrupt, match="x: is cut off or was changed"):
            unseal(data[:length], "x")


def test_unseal_when_a_later_psd_wrote_it_then_says_which():
    data = seal({"format": "psd-checkpoint", "format_version": FORMAT_VERSION + 1, "psd_version": "9.1"})

    with pytest.raises(
        CheckpointUnsupported,
        match=rf"version {FORMAT_VERSION + 1}, written by psd 9\.1; .*, which reads .* version {FORMAT_VERSION}",
    ):
        unseal(data, "x")


def test_manifest_when_content_is_unexpected_then_it_is_refused_without_a_crash():
    """What cannot be read is damaged; a job that can be read and is none that this psd knows may be a later psd's."""
    head = {"format": "psd-checkpoint", "format_version": FORMAT_VERSION, "psd_version": psd.__version__, "name": "n"}
    identity = {"run_id": "r", "timeline": 0, "step": 0, "created_at": 0.0, "shard_count": 0, "layout_digest": ""}
    rest = {"parts": [], "worker_clocks": {}, "client_states": {}, "spaces": [], "job_spec": ""}

    for document in (
        head,
        {**head, **identity, **rest, "parts": None},
        {**head, **identity, **rest, "parts": [{"file": "x"}]},
        {**head, **identity, **rest, "name": "other"},
        {**head, **identity, **rest, "job_spec": "not base64"},
        {**head, **identity, **rest, "job_spec": "////"},
        {**head, **identity, **rest},  # a job without workers
        {**head, **identity, **rest, "worker_clocks": []},
    ):
        with pytest.raises((CheckpointCorrupt, CheckpointUnsupported), match=r"n/manifest\.json: ") as refused:
            ManifestDocument(seal(document), "n").with_parts([])
    assert refused.type is CheckpointUnsupported


def test_load_when_a_part_does_not_hold_all_blocks_then_it_is_corrupt():
    """Whatever the documents say: the job is there, each element once, or the checkpoint is not used."""
    spec = JobSpec(1, (TensorSpec("w", (50_000,)),))
    directory = CheckpointDirectory(memory_url())
    cut = cut_of(spec, 2)
    store(directory, cut)
    manifest = directory.load(cut.name)
    document = ManifestDocument(_read(directory, cut.name), cut.name)

    for wrong in (manifest.parts[:1], manifest.parts[:1] * 2, manifest.parts[::-1][:1]):
        with pytest.raises(CheckpointCorrupt, match="space 0 from element"):
            document.with_parts(wrong)


def _read(directory: CheckpointDirectory, name: str) -> bytes:
    return directory.storage.read(name, MANIFEST)


def test_complete_when_many_shards_do_it_at_once_then_the_manifest_is_one_and_the_same(tmp_path):
    spec = small_spec()
    contents = set()
    for step in range(10):
        cut = cut_of(spec, 2, step)
        directories = [CheckpointDirectory(str(tmp_path)) for _ in range(6)]
        for index in range(2):
            directories[0].write_part(cut, index, parts(cut, index))
        barrier = threading.Barrier(len(directories))
        answers = []

        def complete(directory, cut=cut, barrier=barrier, answers=answers):
            barrier.wait()
            answers.append(directory.complete(cut))

        threads = [threading.Thread(target=complete, args=(directory,)) for directory in directories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 6
        before = (tmp_path / cut.name / MANIFEST).read_bytes()
        (tmp_path / cut.name / MANIFEST).unlink()
        directories[0].complete(cut)
        assert (tmp_path / cut.name / MANIFEST).read_bytes() == before
        contents.add(before)

    assert len(contents) == 10
    assert len(valid_names(directories[0])) == 10
    assert {path.suffix for path in files_of(tmp_path)} == {".json", ".chunks"}


def test_complete_when_a_part_is_missing_then_says_no_and_writes_nothing(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    cut = cut_of(small_spec(), 2)

    assert not directory.complete(cut)
    directory.write_part(cut, 1, parts(cut, 1))
    assert not directory.complete(cut)
    directory.write_part(cut, 0, parts(cut, 0))
    (tmp_path / cut.name / "shard-00000-of-00002.chunks").unlink()
    assert not directory.complete(cut)

    assert not (tmp_path / cut.name / MANIFEST).exists()
    assert [info.reason for info in directory.checkpoints()] == [
        f"{cut.name}/manifest.json: is missing; 2 of 2 parts are there"
    ]


def test_complete_when_a_part_is_of_another_job_then_it_is_corrupt(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    cut = cut_of(small_spec(), 1)
    directory.write_part(cut, 0, parts(cut, 0))
    other = cut_of(small_spec(world_size=3), 1)
    assert other.name == cut.name

    with pytest.raises(CheckpointCorrupt, match=r"shard-00000-of-00001\.json: belongs to another checkpoint: layout_digest"):
        directory.complete(type(cut)(**{**vars(cut), "layout": cut_of(JobSpec(1, (TensorSpec("other", (1,)),)), 1).layout}))


def test_complete_when_the_manifest_is_damaged_then_it_is_written_again(tmp_path, caplog):
    directory = CheckpointDirectory(str(tmp_path))
    cut = cut_of(small_spec(), 2)
    store(directory, cut)
    path = tmp_path / cut.name / MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole[:100])

    assert directory.complete(cut)

    assert path.read_bytes() == whole
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_write_part_when_it_is_there_already_then_it_stays_as_it_is(tmp_path):
    directory = CheckpointDirectory(str(tmp_path))
    cut = cut_of(small_spec(), 1)
    assert directory.write_part(cut, 0, parts(cut, 0)) == sum(path.stat().st_size for path in files_of(tmp_path))

    assert directory.write_part(cut, 0, iter(())) == 0

    assert directory.complete(cut)
