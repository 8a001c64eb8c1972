"""Server-side vectors in checkpoints: stored by any number of shards, read by any number, of one moment or refused."""

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
from helpers_checkpoint import cut_of, parts, small_spec

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.cut import MANIFEST
from psd.checkpoint.manifest import ManifestDocument
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd_core.vector import BatchName, VectorSpec, VectorStore
from psd_core.vector_operations import STRIPE, Operations

SPECS = (
    VectorSpec("x", 300 * STRIPE + 5),
    VectorSpec("counts", 7, "int64"),
    VectorSpec("m", 2 * STRIPE, "float32", columns=64),
)


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


@contextmanager
def shards_with_vectors(path, count):
    """Stores that have all run one batch, number 4 of session 9; and the vectors as a whole."""
    stores = [VectorStore.create(path / f"store-{k}", shard=k, shards=count) for k in range(count)]
    for store in stores:
        for spec in SPECS:
            store.create_vector(spec)
        store.run([Operations.random(spec.name, 1, -100, 100) for spec in SPECS], BatchName(9, 4))
    yield stores, {spec.name: np.concatenate([store.read(spec.name) for store in stores]) for spec in SPECS}
    for store in stores:
        store.close(remove=True)


def write(directory, cut, stores):
    for index, store in enumerate(stores):
        with store.snapshot() as snapshot:
            directory.write_part(cut, index, parts(cut, index), vectors=snapshot)


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_any_number_of_shards_reads_what_any_number_has_stored(stored, directory, tmp_path):
    cut = cut_of(small_spec(), stored)
    with shards_with_vectors(tmp_path, stored) as (stores, whole):
        write(directory, cut, stores)
    assert directory.complete(cut)
    manifest = directory.load(cut.name)

    assert manifest.vectors == tuple(sorted(SPECS))
    assert directory.verify(cut.name) == []
    for count in (1, 2, 5):
        found = {spec.name: [] for spec in SPECS}
        for index in range(count):
            for spec, start, values in directory.read_vectors(manifest, index, count):
                assert start == sum(map(len, found[spec.name]))
                found[spec.name].append(values)
        assert all(np.array_equal(np.concatenate(found[name]), whole[name]) for name in whole)


def test_a_checkpoint_of_different_moments_does_not_come_to_be(directory, tmp_path):
    """One shard has run a batch that the other lacks, or has a vector that the other lacks."""
    for number, change in enumerate(
        (lambda store: store.run([], BatchName(9, 5)), lambda store: store.create_vector(VectorSpec("more", 3)))
    ):
        cut = cut_of(small_spec(), 2, cut_id=f"a{number}")
        with shards_with_vectors(tmp_path, 2) as (stores, _):
            change(stores[1])
            write(directory, cut, stores)

        with pytest.raises(CheckpointFailed, match="batches on vectors were under way at the cut: shard 1 has"):
            directory.complete(cut)


def test_parts_that_do_not_hold_each_element_once_are_no_checkpoint(directory, tmp_path):
    """Whatever their documents say."""
    cut = cut_of(small_spec(), 2)
    with shards_with_vectors(tmp_path, 2) as (stores, _):
        write(directory, cut, stores)
    directory.complete(cut)
    first, second = directory.load(cut.name).parts
    document = ManifestDocument(directory.storage.read(cut.name, MANIFEST), cut.name)
    without = dataclasses.replace(second, chunks=tuple(c for c in second.chunks if c.kind != "elements"))
    twice = dataclasses.replace(second, chunks=(*second.chunks, *(c for c in first.chunks if c.kind == "elements")))

    for wrong in (without, twice):
        with pytest.raises(CheckpointCorrupt, match=r"the parts do not hold vector . from element"):
            document.with_parts([first, wrong])


def test_every_byte_counts(directory, tmp_path):
    """A changed element is found when it is read, and a file that is too short before."""
    cut = cut_of(small_spec(), 2)
    with shards_with_vectors(tmp_path, 2) as (stores, _):
        write(directory, cut, stores)
    directory.complete(cut)
    (file,) = (tmp_path / "checkpoints" / cut.name).glob("shard-00001-*.chunks")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    (problem,) = directory.verify(cut.name)

    assert "the checksum of elements of vector 2 from " in problem
    with pytest.raises(CheckpointCorrupt, match="elements of vector 2"):
        list(directory.read_vectors(directory.load(cut.name)))
    file.write_bytes(data[:-8])
    with pytest.raises(CheckpointCorrupt, match="bytes instead of"):
        directory.load(cut.name)
