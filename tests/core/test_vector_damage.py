"""Bytes that change in the files of vectors while nobody has them open: found when the store is opened, or without effect."""

import re
import shutil
from collections import Counter

import numpy as np
import pytest
import vector_words as ops
from killed_vectors import change, copy_sparse, places_to_change, state_of

from psd_core.arena import ArenaCorrupt
from psd_core.vector import BatchName, VectorSpec, VectorStore
from psd_core.vector_operations import STRIPE

SPECS = [
    VectorSpec("double", 3 * STRIPE + 5),
    VectorSpec("other", 3 * STRIPE + 5),
    VectorSpec("matrix", 2 * STRIPE, columns=16),
    VectorSpec("single", STRIPE + 3, "float32"),
    VectorSpec("whole", STRIPE + 1, "int64"),
    VectorSpec("small", 3),
    VectorSpec("zeros", 2 * STRIPE),
]
BATCHES = [
    [ops.random("double", 1), ops.random("other", 2), ops.random("single", 3), ops.random("whole", 4, 0, 1 << 40)],
    [ops.axpy("double", 2.0, "other"), ops.dot("double", "other"), ops.max("whole")],
    [ops.add_rows("matrix", np.array([3, 500]), np.ones((2, 16))), ops.put("small", 1, np.ones(2)), ops.sum("small")],
    [ops.put("double", 7, np.arange(9000.0)), ops.copy("other", "double"), ops.gram(["double", "other"])],
    [ops.scale("single", 0.5), ops.sum("single"), ops.min("whole")],
    [ops.custom("matrix", lambda x: x + 1, ["matrix"])],
]
NAMES = [BatchName(70, number, sender) for number in range(1, len(BATCHES) + 1) for sender in (0, 2)]
FLIPS = 120


def made(path, crash_point=None):
    """A store, after batches of two senders."""
    store = VectorStore.create(path, shard=0, shards=1, senders=3, crash_point=crash_point)
    for spec in SPECS:
        store.create_vector(spec)
    for name in NAMES:
        store.run(BATCHES[name.sequence - 1], name)
    return store


@pytest.fixture
def left(memory_path):
    """A directory as a killed process leaves it between two batches, and what the store held."""
    store, path = made(memory_path / "vectors"), memory_path / "left"
    copy_sparse(memory_path / "vectors", path)
    held = state_of(store, *NAMES)
    store.close(remove=True)
    return path, held


def opened(path):
    """What a store holds that opens a directory."""
    store = VectorStore.open(path)
    try:
        return state_of(store, *NAMES)
    finally:
        store.close(remove=False)


def test_any_byte_that_changes_is_found_or_changes_nothing(left):
    path, held = left
    rng, found = np.random.default_rng(1), Counter()
    assert opened(path) == held

    for file in sorted(path.iterdir()):
        for place in places_to_change(file, rng, FLIPS):
            by = int(rng.integers(1, 256))
            change(file, place, by)
            try:
                assert opened(path) == held, (file.name, place)
            except ArenaCorrupt:
                found[file.name] += 1
            change(file, place, by)
    assert opened(path) == held
    assert set(found) == {file.name for file in path.iterdir()} - {"record"}
    assert found["vector-0"] > FLIPS * 0.9


def test_the_vector_and_the_elements_are_named(left):
    """Also those of one that nobody has ever written to."""
    path, held = left
    names = list(held[0])
    for name, element, first, end in (
        ("double", 3 * STRIPE + 1, 3 * STRIPE, 3 * STRIPE + 5),
        ("single", 5, 0, STRIPE),
        ("zeros", STRIPE, STRIPE, 2 * STRIPE),
    ):
        file, place = f"vector-{names.index(name)}", element * held[0][name][0].itemsize
        change(path / file, place, 64)
        with pytest.raises(ArenaCorrupt, match=rf"{path}: {file}: the elements {first} to {end} of '{name}' have changed"):
            VectorStore.open(path)
        change(path / file, place, 64)


def test_stripes_files_and_answers_that_change_places_are_found(left):
    """Each is whole where it does not belong."""
    path, held = left
    stripe = STRIPE * 8
    file = path / "vector-1"
    whole = file.read_bytes()
    file.write_bytes(whole[stripe : 2 * stripe] + whole[:stripe] + whole[2 * stripe :])
    with pytest.raises(ArenaCorrupt, match="the elements 0 to 4096 of 'other'"):
        VectorStore.open(path)
    file.write_bytes((path / "vector-0").read_bytes())
    with pytest.raises(ArenaCorrupt, match="the elements 0 to 4096 of 'other'"):
        VectorStore.open(path)
    file.write_bytes(whole)
    assert opened(path) == held


def test_a_page_of_zeros_is_found(left):
    """Wherever it comes to lie: what never reached the memory may look like that."""
    path, held = left
    for file in path.glob("vector-*"):
        whole = file.read_bytes()
        for at in range(0, len(whole), 4096):
            if any(whole[at : at + 4096]):
                file.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
                with pytest.raises(ArenaCorrupt, match=re.escape(file.name)):
                    VectorStore.open(path)
        file.write_bytes(whole)
    assert opened(path) == held


class Copier:
    """Copies the files at some of the stores of a batch."""

    def __init__(self, path, every):
        self.path, self.every, self.copies, self.seen, self.is_copying = path, every, [], 0, False

    def __call__(self, point):
        self.seen += self.is_copying
        if self.is_copying and self.seen % self.every == 0:
            self.copies.append(self.path.with_name(f"copy-{len(self.copies)}"))
            copy_sparse(self.path, self.copies[-1])


@pytest.mark.parametrize("batch", range(1, 6))
def test_any_byte_that_changes_after_a_death_in_the_middle_of_a_batch_is_found_or_changes_nothing(memory_path, batch):
    """What is staged, sums so far, and what the record brings; nothing of the batch is done if it is damaged."""
    path, rng = memory_path / "vectors", np.random.default_rng(batch)
    copier = Copier(path, every=3)
    store = made(path, copier)
    name = BatchName(71, 1, 0)
    copier.is_copying = True
    store.run(BATCHES[batch], name)
    copier.is_copying = False
    store.close(remove=True)
    damaged, found = memory_path / "damaged", Counter()

    def held(copy, file=None, place=0):
        """What the next process finds in a copy, one byte of which has changed."""
        copy_sparse(copy, damaged)
        if file is not None:
            change(damaged / file, place, 1 << int(rng.integers(8)))
        try:
            store = VectorStore.open(damaged)
            state = state_of(store, name)
            store.close(remove=True)
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
        return state

    for copy in copier.copies:
        whole = held(copy)
        for file in sorted(path.name for path in copy.iterdir()):
            for place in places_to_change(copy / file, rng, 5):
                if file == "record":  # what is behind its end is of earlier ones
                    place %= int(np.fromfile(copy / file, np.uint64, 3)[2])
                try:
                    assert held(copy, file, place) == whole, (copy.name, file, place)
                except ArenaCorrupt:
                    found[file] += 1
    assert {"log", "record", "vector-0"} <= set(found)
