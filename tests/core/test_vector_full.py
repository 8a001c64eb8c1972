"""The store of vectors on a full disk: what finds no room is refused by name, and is either done or not, also after a kill."""

import shutil

import numpy as np
import pytest
import vector_words as ops
from full_disk import no_room_at

from psd_core.arena import ArenaCorrupt, StoreFull
from psd_core.vector import BatchName, VectorSpec, VectorStore

BEFORE, NAME = BatchName(1, 1), BatchName(1, 2)
CALLS = {
    "create": lambda store: store.create_vector(VectorSpec("y", 7000), NAME),
    "drop": lambda store: store.drop_vector("x", NAME),
    "run": lambda store: store.run([ops.put("x", 0, np.full(5000, 4.0))] * 40, NAME),
}
"""What needs room: for a vector's file, the catalog, the record or the answers."""


def made(path):
    """A store with one vector, of threes."""
    store = VectorStore.create(path, shard=0, shards=1, senders=2)
    store.create_vector(VectorSpec("x", 5000))
    store.run([ops.fill("x", 3.0)], BEFORE)
    return store


def held(store):
    """The first element of each vector."""
    return {name: store.read(name)[0] for name in store.vectors()}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_finds_no_room_at_any_step_is_done_or_not_and_can_be_made_again(memory_path, monkeypatch, call):
    """Whichever call of the system says so; the next process finds what this one has."""
    whole = made(memory_path / "whole")
    old = held(whole)
    CALLS[call](whole)
    new, failing, refused = held(whole), 1, True
    whole.close(remove=True)

    while refused:
        path, copy = memory_path / f"{call}-{failing}", memory_path / f"{call}-{failing}-copy"
        store = made(path)
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        with no_room_at(failing, monkeypatch) as calls:
            try:
                CALLS[call](store)
            except StoreFull:
                pass
            else:
                refused = False
        shutil.copytree(path, copy)
        twin = VectorStore.open(copy)
        found = held(twin)
        assert found in (old, new), calls[-1]
        assert twin.answer(BEFORE) == b""
        twin.close(remove=True)
        if found == old:
            assert {file.name: file.stat().st_size for file in path.iterdir()} == sizes, "no space was left taken"
        assert held(store) == found, calls[-1]
        if store.answer(NAME) is None:
            CALLS[call](store)
        assert held(store) == new
        store.close(remove=True)
        failing += 1
    assert failing > 3


def test_a_store_without_one_of_its_files_is_damaged_and_not_none(memory_path):
    """Else the shard would go on as if there had never been any vector."""
    for name in ("vector-0", "catalog", "log"):
        store = made(memory_path / name)
        store.close(remove=False)
        (memory_path / name / name).unlink()

        with pytest.raises(ArenaCorrupt, match=f"{name}: it is missing"):
            VectorStore.open(memory_path / name)
    with pytest.raises(FileNotFoundError):
        VectorStore.open(memory_path / "nothing")
