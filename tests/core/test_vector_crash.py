"""Vectors after kill -9: a copy of the files at every store of the protocol, and processes killed at random instants."""

import sys
from collections import Counter

import numpy as np
import pytest
import vector_words as ops
from killed_vectors import copy_sparse, state_of
from random_deaths import last_words_of_killed_processes
from vector_model import random_batch

from psd_core.reductions import unpack_answers
from psd_core.vector import CRASH_POINTS, BatchName, VectorSpec, VectorStore
from psd_core.vector_operations import STRIPE


class Killer:
    """Opens a copy of the files at every point, as the next process would."""

    def __init__(self, path):
        self.path, self.store, self.error = path, None, None
        self.seen = Counter()
        self.every = 1
        self.name = None
        self.states = []  # before the commit, and after it
        self.is_committed = False
        self._copy = path.with_name("copy")

    def __call__(self, point):
        """Keep the first error: nothing can be raised through C."""
        self.seen[point] += 1
        if self.store is not None and self.error is None and (self.seen.total() % self.every == 0 or point == "fold"):
            try:
                copy_sparse(self.path, self._copy)
                found = VectorStore.open(self._copy)
                self.states.append((point, self.is_committed, state_of(found, self.name)))
                (check,) = unpack_answers(
                    found.run([ops.fill("alive", 1.0), ops.scale("alive", 3.0), ops.sum("alive")], BatchName(99, 1, sender=1))
                )
                assert check.round() == 3 * 5
                found.close(remove=True)
            except BaseException as error:  # noqa: BLE001 - a failed assertion too
                self.error = error
        self.is_committed |= point == "commit"


N = 3 * STRIPE - 5
STEPS = {
    "staged": [ops.axpy("y", 2.0, "x"), ops.dot("x", "y"), ops.scale("x", 0.5), ops.max("y")],
    "in place": [ops.put("x", STRIPE, np.arange(N - STRIPE - 0.0)), ops.norm2("y")],
    "in place, not asking": [ops.copy("x", "y"), ops.fill("i", 3)],
    "a stripe in part": [ops.put("x", 7, np.arange(N - 7.0)), ops.put("i", 1, np.arange(7))],
    "partly": [
        ops.add_at("y", np.array([1, 1, 2 * STRIPE]), np.array([1.0, 2.0, 3.0])),
        ops.add("y", STRIPE + 3, np.ones(9)),
        ops.sum("y"),
    ],
    "of two sizes": [ops.axpy("i", 3, "i"), ops.axpy("x", 1.0, "y"), ops.sum("i"), ops.gram(["x", "y"])],
    "a user's": [ops.custom("x", lambda y: y * 3, ["y"]), ops.axpy("y", 1.0, "x")],
    "only asking": [ops.dot("x", "y"), ops.max("i")],
}


def test_a_copy_taken_at_every_store_opens_as_old_or_new(memory_path):
    """Batches of every kind, a vector that comes, and one that goes."""
    path = memory_path / "vectors"
    killer = Killer(path)
    store = VectorStore.create(path, shard=0, shards=1, senders=3, crash_point=killer)
    for name, n, dtype in (("x", N, "float64"), ("y", N, "float64"), ("i", STRIPE + 1, "int64"), ("alive", 5, "float64")):
        store.create_vector(VectorSpec(name, n, dtype))
    store.run([ops.random("x", 1), ops.random("y", 2), ops.random("i", 3, 0, 1000)])
    actions = [
        *(lambda name, step=step: store.run(step, name) for step in STEPS.values()),
        lambda name: store.create_vector(VectorSpec("z", 9, "float32"), name),
        lambda name: store.drop_vector("y", name),
    ]
    for number, action in enumerate(actions, 1):
        check(killer, store, BatchName(5, number), action)

    assert set(killer.seen) == set(CRASH_POINTS)
    store.close(remove=True)


def test_a_copy_taken_where_partial_sums_are_added_opens_as_old_or_new(memory_path):
    """A batch over more stripes than are summed at a time."""
    path = memory_path / "vectors"
    killer = Killer(path)
    store = VectorStore.create(path, shard=0, shards=1, senders=2, crash_point=killer)
    for name in ("x", "y", "alive"):
        store.create_vector(VectorSpec(name, 5 if name == "alive" else 140 * STRIPE))
    store.run([ops.random("x", 1), ops.random("y", 2)])
    killer.every = 61
    for number, step in enumerate(
        ([ops.dot("x", "y"), ops.axpy("x", 1.0, "y"), ops.sum("x")], [ops.copy("x", "y"), ops.sum("y")]), 1
    ):
        check(killer, store, BatchName(5, number), lambda name, step=step: store.run(step, name))
    store.close(remove=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_taken_during_random_batches_opens_as_old_or_new(memory_path, seed):
    """Whatever is staged, in place or both; with a snapshot, too, which copies what is about to be written over."""
    rng, path = np.random.default_rng(seed), memory_path / "vectors"
    killer = Killer(path)
    killer.every = 3
    store = VectorStore.create(path, shard=0, shards=1, senders=2, crash_point=killer)
    specs = [
        *(VectorSpec(name, 2 * STRIPE + 9) for name in "abc"),
        *(VectorSpec(name, 2 * STRIPE + 9, "float32") for name in "de"),
        *(VectorSpec(name, STRIPE + 4, "int64", columns=4) for name in "fg"),
    ]
    for spec in (*specs, VectorSpec("alive", 5)):
        store.create_vector(spec)
    store.run([ops.random(spec.name, n, 0, 9) for n, spec in enumerate(specs)])
    for number in range(1, 15):
        with store.snapshot() as snapshot:
            before = {spec.name: store.read(spec.name) for spec in snapshot.specs}
            batch = random_batch(rng, specs)
            check(killer, store, BatchName(5, number), lambda name, batch=batch: store.run(batch, name))
            for piece in snapshot:
                assert piece.values.tobytes() == before[piece.spec.name][piece.start :][: len(piece.values)].tobytes()
    store.close(remove=True)


def check(killer, store, name, action):
    """Run an action, and compare what the copies held with the store before and after it."""
    before = state_of(store, name)
    killer.states.clear()
    killer.store, killer.name, killer.is_committed = store, name, False
    action(name)
    killer.store = None
    after = state_of(store, name)
    if killer.error is not None:
        raise killer.error
    for point, is_committed, state in killer.states:
        # A batch that changes nothing has no commit: it was answered or it was not.
        expected = [after] if is_committed else [before] if before[0] != after[0] else [before, after]
        assert state in expected, (name, point, is_committed)
    assert killer.states


def add_until_killed(path, connection):
    """Add 1 to every element, over and over, and say how many batches are acknowledged."""
    store = VectorStore.open(path)
    done = store.sessions().get(1, 0)
    while True:
        done += 1
        store.run([ops.axpy("x", 1.0, "one"), ops.sum("x")], BatchName(1, done))
        connection.send(done)


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forkserver as on Linux")
def test_death_at_random_instants_leaves_whole_batches(memory_path):
    """Each process goes on with what the one before it left; each answer is that of a whole batch."""
    path = memory_path / "vectors"
    n = 20 * STRIPE + 1
    store = VectorStore.create(path, shard=0, shards=1, senders=2)
    for name in ("x", "one"):
        store.create_vector(VectorSpec(name, n))
    store.run([ops.fill("one", 1.0)])
    store.close(remove=False)
    for acknowledged in last_words_of_killed_processes(add_until_killed, path):
        store = VectorStore.open(path)
        done = store.sessions()[1]
        assert done >= acknowledged
        assert (store.read("x") == done).all()
        (answer,) = unpack_answers(store.answer(BatchName(1, done)) or b"")
        assert answer.round() == done * n
        store.close(remove=False)
