"""Rows of tables in checkpoints: on any number of shards, whole or as what has changed since another checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers_checkpoint import cut_of, files_of, memory_url, parts, valid_names
from helpers_tables import ShardTables, stored, tables_spec

import psd
from psd.checkpoint import CheckpointDirectory
from psd.checkpoint import tables as stored_tables
from psd.checkpoint.manifest import ManifestDocument, parse_part
from psd.checkpoint.parquet import ParquetTable
from psd.checkpoint.plain import PlainFile
from psd.checkpoint.sealing import seal, unseal
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, SpecMismatch
from psd.contract.layout import Layout

pytestmark = pytest.mark.usefixtures("no_fsync")

GOLDEN = Path(__file__).with_name("golden_tables")

IDS = np.random.default_rng(0).integers(0, 1 << 63, 3001)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks of a few rows."""
    monkeypatch.setattr(stored_tables, "CHUNK_BYTES", 1 << 13)
    monkeypatch.setattr("psd_core._table_snapshot.BATCH_ROWS", 512)


@pytest.fixture
def tables(tmp_path):
    """Tables on 3 shards, filled."""
    made = ShardTables(tmp_path / "stores", 3)
    made.write(0, IDS, 0.5)
    made.write(0, IDS[:700], 1.5)
    made.write(1, np.arange(900), 2.5)
    return made


@pytest.mark.parametrize("shard_count", [1, 2, 3, 5])
def test_rows_are_as_they_were_on_any_number_of_shards(tables, shard_count):
    """Full, then what has changed since: rows that came, changed, went, and went and came back."""
    directory = CheckpointDirectory(memory_url())
    full, marks = tables.store(directory, 7)
    before = tables.contents(0)
    tables.write(0, IDS[500:800], 3.5)
    tables.write(0, np.arange(100), 4.5)
    tables.remove(0, IDS[700:1000])
    tables.write(0, IDS[900:950], 5.5)
    changed, _ = tables.store(directory, 8, base=full.name, since=marks)

    assert stored(directory, full.name, shard_count, 0) == before
    for table in range(2):
        assert stored(directory, changed.name, shard_count, table) == tables.contents(table)
    assert directory.verify(changed.name) == []
    first, last = directory.checkpoints()[::-1]
    assert (first.base, last.base) == ("", full.name)
    assert last.rows == sum(len(tables.contents(table)) for table in range(2))
    assert last.nbytes < first.nbytes / 2
    table = directory.read_table(directory.load(changed.name), Layout(tables.spec, 2), 0, 0)
    assert (table.step, table.width) == (tables.step, 6)


@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
def test_an_export_of_rows_that_have_all_changed_since_the_other_checkpoint_has_each_once(tables, tmp_path, suffix):
    """Nothing is left then of whole chunks of the checkpoint that it builds on."""
    directory = CheckpointDirectory(memory_url())
    full, marks = tables.store(directory, 7)
    tables.write(1, np.arange(900), 3.5)
    tables.remove(0, IDS)
    changed, _ = tables.store(directory, 8, base=full.name, since=marks)

    for name, count in (("item", 900), ("user", 0)):
        directory.export(directory.load(changed.name), str(tmp_path / f"{name}.{suffix}"), table=name)

        file = str(tmp_path / f"{name}.{suffix}")
        table = ParquetTable(file, "id", "row") if suffix == "parquet" else PlainFile(file).table(name)
        rows = {int(key): row.tolist() for ids, values in table.rows() for key, row in zip(ids, values, strict=True)}
        assert rows == {key: [3.5 + key] for key in range(count)}


def test_a_table_that_is_full_stands_beside_one_that_is_not(tables):
    """More of "item" went than is remembered, or a shard has been started anew: then it writes all."""
    directory = CheckpointDirectory(memory_url())
    full, marks = tables.store(directory, 7)
    tables.write(1, np.arange(800, 1000), 9.5)
    marks[1] = [None, None]

    changed, _ = tables.store(directory, 8, base=full.name, since=marks)

    assert [[record.is_full for record in part.tables] for part in directory.load(changed.name).parts] == [
        [False, False],
        [True, True],
        [False, False],
    ]
    assert stored(directory, changed.name, 2, 1) == tables.contents(1)


def test_any_byte_that_changes_is_found_in_a_checkpoint_and_in_what_it_builds_on(tables, tmp_path):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    full, marks = tables.store(directory, 7)
    tables.write(0, IDS[:10], 3.5)
    changed, _ = tables.store(directory, 8, base=full.name, since=marks)

    parts = directory.load(full.name).parts
    for path in files_of(tmp_path / "checkpoints"):
        whole = path.read_bytes()
        of_base = parts[int(path.name[6:11])].chunks if path.match(f"{full.name}/*.chunks") else ()
        for place in (0, len(whole) // 2, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place : place + 1] = bytes([damaged[place] ^ 1]) if whole else b"x"
            path.write_bytes(damaged)
            is_block_of_base = any(c.kind == "block" and c.start <= place < c.start + c.nbytes for c in of_base)
            assert bool(directory.verify(changed.name)) != is_block_of_base, (path, place)
        path.write_bytes(whole)
    assert directory.verify(changed.name) == []


def test_a_damaged_chunk_is_never_used(tables, tmp_path):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    cut, _ = tables.store(directory, 7)
    path = tmp_path / "checkpoints" / cut.name / "shard-00001-of-00003.chunks"
    damaged = bytearray(path.read_bytes())
    damaged[-9000] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(CheckpointCorrupt, match=r"shard-00001-of-00003\.chunks: the bytes .* the checksum of rows of table 0"):
        stored(directory, cut.name, 2, 0)


def test_what_a_checkpoint_builds_on_is_kept_as_long_as_it(tables, tmp_path):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), keep=2)
    full, marks = tables.store(directory, 7)
    for step in (8, 9, 10):
        tables.write(0, IDS[:10], step)
        tables.store(directory, step, base=full.name, since=marks)
    assert [name[-2:] for name in directory.collect_garbage()] == ["a8"]
    assert len(valid_names(directory)) == 3

    newer = [tables.store(directory, step)[0].name for step in (11, 12)]
    removed = directory.collect_garbage()

    assert len(removed) == 3
    assert valid_names(directory) == newer[::-1]


def test_a_checkpoint_without_what_it_builds_on_is_not_valid(tables, tmp_path):
    """It was deleted by hand, or is another one of that name."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    full, marks = tables.store(directory, 7)
    changed, _ = tables.store(directory, 8, base=full.name, since=marks)
    manifest = tmp_path / "checkpoints" / full.name / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()

    with pytest.raises(CheckpointCorrupt, match=r"a8/manifest\.json: builds on another .*: .*a7/manifest\.json: is missing"):
        directory.load(changed.name)
    with pytest.raises(CheckpointFailed, match="builds on another checkpoint, which cannot be used"):
        tables.store(directory, 9, base=full.name, since=marks)
    manifest.write_bytes(kept)
    assert directory.newest().name == changed.name


def test_a_job_whose_tables_differ_is_refused(tables):
    directory = CheckpointDirectory(memory_url())
    cut, _ = tables.store(directory, 7)
    spec = tables_spec()
    other = dataclasses.replace(spec, tables=(dataclasses.replace(spec.tables[0], dim=4), spec.tables[1]))

    with pytest.raises(SpecMismatch, match=r"^dim of table 'user': 3 in checkpoint .*, 4 in this worker's declaration"):
        directory.read_table(directory.load(cut.name), Layout(other, 3), 0, 0)


def test_a_checkpoint_is_the_golden_one(tmp_path, monkeypatch):
    """A change of the format needs a new version and a reader for the old one. This one builds on another."""
    monkeypatch.setattr(psd, "__version__", "0.1.0")
    tables = ShardTables(tmp_path / "stores", 1)
    directory = CheckpointDirectory(str(tmp_path / "run"))
    tables.write(0, [5], 0.5)  # of several rows the order is each store's own
    full, marks = tables.store(directory, 7)
    tables.write(0, [2**64 - 1], 1.5)
    tables.remove(0, [5])
    changed, _ = tables.store(directory, 8, base=full.name, since=marks)

    written = {path.name: path.read_bytes() for path in files_of(tmp_path / "run" / changed.name)}
    golden = {path.name: path.read_bytes() for path in files_of(GOLDEN)}

    del written["shard-00000-of-00001.chunks"]  # pinned by the checksums in the documents
    assert written == golden


@pytest.mark.parametrize("name", ["../elsewhere", "timeline-00000-step-000000000008-a8"])
def test_a_checkpoint_that_builds_on_itself_or_on_no_checkpoint_is_corrupt(tmp_path, name):
    """As nobody has written it: the name leads out of the directory, or in a circle."""
    document = unseal((GOLDEN / "manifest.json").read_bytes(), "x")
    here = tmp_path / document["name"]
    shutil.copytree(GOLDEN, here)
    chunks = unseal((GOLDEN / "shard-00000-of-00001.json").read_bytes(), "x")["chunks"]
    (here / "shard-00000-of-00001.chunks").write_bytes(bytes(sum(chunk["nbytes"] for chunk in chunks)))
    document["base"]["name"] = name
    (here / "manifest.json").write_bytes(seal(document))

    with pytest.raises(CheckpointCorrupt, match="builds on another checkpoint, which cannot be used"):
        CheckpointDirectory(str(tmp_path)).load(document["name"])


@pytest.mark.parametrize(("name", "value"), [("step", (1 << 53) + 1), ("clock", 1 << 63)])
def test_a_table_that_is_further_than_any_can_be_is_refused_by_name(name, value):
    """A shard would fail with no word that helps, at each start."""
    manifest = ManifestDocument((GOLDEN / "manifest.json").read_bytes(), "timeline-00000-step-000000000008-a8")
    changed = unseal((GOLDEN / "shard-00000-of-00001.json").read_bytes(), "x")
    changed["tables"][1][name] = value

    with pytest.raises(CheckpointCorrupt, match=rf"part 0 has table 1 at .*{name} {value}.*, from which no table goes on"):
        manifest.with_parts([parse_part(seal(changed), "p", manifest.identity, 0)])


def test_a_part_that_lacks_a_table_is_not_written(tables):
    cut = cut_of(tables.spec, 1)

    with pytest.raises(CheckpointFailed, match="shard 0 has 0 tables of 2"):
        CheckpointDirectory(memory_url()).write_part(cut, 0, parts(cut, 0))
