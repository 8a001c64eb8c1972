"""Blocks that are lent to their C core: what it counts, what it publishes, and what is left by a process that dies in it."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter

import numpy as np
import pytest

import psd_core
from psd_core import arena as stores
from psd_core._arena_lent import PLACES_KEPT
from psd_core.arena import Arena, BlockShape, StoreClosed, StoreFull, Terms

LENGTH, WORKERS = 40, 3
ENDS = np.array([10, 25, LENGTH], np.uint32)
RULES = {"sgd": ("momentum",), "adam": ("amsgrad",), "rmsprop": (), "adagrad": ()}
SCALARS = {
    "sgd": (0.1, 0.9, 0.0, 0.01),
    "adam": (0.01, 0.9, 0.999, 1e-8, 0.01),
    "rmsprop": (0.01, 0.99, 1e-8, 0.0, 0.0),
    "adagrad": (0.1, 0.0, 0.0, 1e-10),
}
COUNTED, DUPLICATE, LATE, EARLY = range(4)


def lent_of(path, rule="sgd", *, dtype="float32", rounds=True, is_mean=True, quorum=WORKERS, ages=False, **options):
    """An arena of one block, lent, at version 0."""
    flags = RULES[rule]
    slots = len(psd_core.RULES[rule].slots(flags))
    shape = BlockShape(dtype, LENGTH, slots, len(ENDS))
    arena = Arena.create(path, meta=b"", shapes=[shape], workers=WORKERS, **options)
    lent = arena.lend(0, Terms(rule, flags, ENDS, ages, rounds, is_mean, quorum))
    page = arena.spare(0)
    for array in (*page.arrays, page.steps, page.sessions, page.clocks):
        array[:] = 0
    page.parameter[:] = 1
    arena.publish(0, page, 0)
    return arena, lent


def push(lent, rank, clock, values, scalars, *, session=1, weight=1.0, present=None, since=0, read=None):
    """The outcome of a push, with the room that it needs."""
    waited = (1 << WORKERS) - 1
    args = (rank, session, clock, weight, values, present, scalars, since, read, 1.0, True, False, waited)
    while (outcome := lent.core.contribute(*args)) == stores.NEEDS_PAGE:
        lent.extend()
    return outcome


def bytes_of(page):
    return [array.tobytes() for array in (*page.arrays, page.steps, page.sessions, page.clocks)]


class Model:
    """The same block in Python, with psd_core's functions on arrays."""

    def __init__(self, rule, dtype, *, is_mean, quorum):
        slots = len(psd_core.RULES[rule].slots(RULES[rule]))
        self.rule, self.is_mean, self.quorum, self.version = rule, is_mean, quorum, 0
        self.parameter, self.slots = np.ones(LENGTH, dtype), [np.zeros(LENGTH, dtype) for _ in range(slots)]
        self.steps, self.sessions, self.clocks = (np.zeros(n, np.uint64) for n in (len(ENDS), WORKERS, WORKERS))
        self.open()

    def open(self):
        self.sum, self.total, self.voice, self.by, self.touched = None, 0.0, None, {}, np.zeros(len(ENDS), np.uint8)

    def step(self, acc, last, weight, scale, touched, scalars):
        if acc is None and last is None:
            return
        after = [np.empty_like(array) for array in (self.parameter, *self.slots)]
        psd_core.step_block(
            self.rule,
            self.parameter,
            after[0],
            self.slots,
            after[1:],
            acc,
            last,
            weight=weight,
            scale=scale,
            segment_ends=ENDS,
            touched=touched,
            steps_in=self.steps,
            steps_out=self.steps,
            scalars=scalars,
            flags=RULES[self.rule],
        )
        self.parameter, self.slots = after[0], after[1:]

    def push(self, rank, clock, values, scalars, *, session, weight, present, since):
        if self.sessions[rank] == session and self.clocks[rank] > clock:
            return DUPLICATE
        if self.sessions[rank] > session:
            return LATE
        if clock != self.version:
            return EARLY if clock > self.version else LATE
        if rank in self.by:
            return DUPLICATE if self.by[rank] == session else LATE
        values = values if weight else None
        factor = weight if self.is_mean else 1.0
        if values is not None:
            self.touched = np.ones(len(ENDS), np.uint8) if present is None else np.maximum(self.touched, present)
        self.voice = min([(since, rank, scalars)] + [self.voice] * (self.voice is not None))
        self.total += weight
        self.by[rank] = session
        if len(self.by) < self.quorum:
            if values is not None and self.sum is None:
                self.sum = np.empty(LENGTH, self.parameter.dtype)
                psd_core.scaled_copy(self.sum, values, factor)
            elif values is not None:
                psd_core.accumulate(self.sum, values, factor)
            return COUNTED
        scale = 1.0
        if self.is_mean and self.total > 0:
            if self.sum is None and factor == self.total:
                factor = 1.0
            else:
                scale = 1 / self.total
        self.step(self.sum, values, factor, scale, self.touched, self.voice[2])
        for each, known in self.by.items():
            self.sessions[each], self.clocks[each] = known, clock + 1
        self.version += 1
        self.open()
        return COUNTED


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "gradients"), [("float32", "float32"), ("float64", "float64"), ("float32", "float16")])
@pytest.mark.parametrize("is_mean", [True, False])
def test_random_pushes_leave_what_they_leave_in_python(memory_path, rule, dtype, gradients, is_mean):
    """Outcomes and every byte, with repeats, new sessions, quorums, weights of 0, parts of a block and scalars that differ."""
    draw, numbers = random.Random(f"{rule} {dtype} {gradients}"), np.random.default_rng(7)
    quorum = draw.choice([1, 2, 3])
    arena, lent = lent_of(memory_path, rule, dtype=dtype, is_mean=is_mean, quorum=quorum)
    model = Model(rule, dtype, is_mean=is_mean, quorum=quorum)
    outcomes = Counter()
    sessions = [1] * WORKERS
    for _ in range(400):
        rank = draw.randrange(WORKERS)
        sessions[rank] += draw.random() < 0.05
        present = np.array([draw.random() < 0.7 for _ in ENDS], np.uint8) if draw.random() < 0.3 else None
        values = None if present is not None and not present.any() else numbers.normal(size=LENGTH).astype(gradients)
        if present is not None and values is not None:
            values[~np.repeat(present.astype(bool), np.diff(ENDS, prepend=0))] = 0
        scalars = (draw.choice([0.1, 0.05]), *SCALARS[rule][1:])
        named = {"session": sessions[rank] - (draw.random() < 0.05), "weight": draw.choice([0.0, 1.0, 2.5])}
        named |= {"present": present, "since": draw.randrange(2)}
        clock = model.version + draw.choice([0, 0, 0, 0, 0, -1, 1]) if model.version else 0
        outcome = push(lent, rank, clock, values, scalars, **named)
        assert outcome == model.push(rank, clock, values, scalars, **named)
        outcomes[outcome] += 1
        assert lent.core.version == model.version
    page = arena.current(0)
    assert min(outcomes[each] for each in (COUNTED, DUPLICATE, LATE, EARLY)) > 0
    expected = (model.parameter, *model.slots, model.steps, model.sessions, model.clocks)
    assert bytes_of(page) == [array.tobytes() for array in expected]
    arena.close(remove=True)


def test_ages_divide_the_learning_rate_and_are_counted(memory_path):
    arena, lent = lent_of(memory_path, rounds=False, ages=True)
    values = np.ones(LENGTH, np.float32)
    for clock, read in enumerate([0, 0, 0, None]):
        assert push(lent, 0, clock, values, (0.6, 0.0, 0.0, 0.0), read=read) == COUNTED
    assert push(lent, 1, 0, values, (0.6, 0.0, 0.0, 0.0), read=5) == stores.AHEAD
    assert (lent.core.ages, lent.core.age_total, lent.core.version) == ([1, 1, 1], 3, 4)
    assert arena.current(0).parameter[0] == pytest.approx(1 - 0.6 - 0.3 - 0.2 - 0.6)
    arena.close(remove=True)


def test_pages_that_are_read_stay_and_their_places_go_back_to_the_pool(memory_path):
    arena, lent = lent_of(memory_path, rounds=False)
    values, pinned = np.ones(LENGTH, np.float32), []
    for clock in range(20):
        pinned.append((arena.pin(0), bytes_of(arena.current(0))))
        assert push(lent, 0, clock, values, SCALARS["sgd"]) == COUNTED
    assert [page.version for page, _ in pinned] == list(range(20))
    assert all(bytes_of(page) == as_it_was for page, as_it_was in pinned)
    grown = arena.used_bytes
    assert arena.held_bytes == 20 * arena._front.page_sizes[-1]
    for page, _ in pinned:
        arena.unpin(page)
    assert lent.core.free == PLACES_KEPT
    arena.trim()
    assert arena.held_bytes == 0
    assert arena.used_bytes < grown
    for page, _ in pinned:
        with pytest.raises(AssertionError):
            arena.unpin(page)
    arena.close(remove=True)


def test_a_block_without_room_has_what_another_one_does_not_use(memory_path, monkeypatch):
    shape = BlockShape("float32", LENGTH, 1, len(ENDS))
    arena = Arena.create(memory_path, meta=b"", shapes=[shape] * 2, workers=WORKERS)
    both = [arena.lend(slot, Terms("sgd", RULES["sgd"], ENDS, False, False, True, 1)) for slot in range(2)]
    for slot in range(2):
        page = arena.spare(slot)
        for array in (*page.arrays, page.steps, page.sessions, page.clocks):
            array[:] = 0
        arena.publish(slot, page, 0)
    values = np.ones(LENGTH, np.float32)
    push(both[0], 0, 0, values, SCALARS["sgd"])

    def full(_):
        raise StoreFull("no space")

    monkeypatch.setattr(arena._blocks.pool, "take", full)
    assert both[0].core.free == 1
    assert push(both[1], 0, 0, values, SCALARS["sgd"]) == COUNTED
    assert push(both[1], 0, 1, values, SCALARS["sgd"]) == COUNTED
    held = arena.pin(0)
    assert push(both[0], 0, 1, values, SCALARS["sgd"]) == COUNTED
    with pytest.raises(StoreFull):
        push(both[1], 0, 2, values, SCALARS["sgd"])
    assert arena.current(1).version == 2
    arena.unpin(held)
    assert push(both[1], 0, 2, values, SCALARS["sgd"]) == COUNTED
    arena.close(remove=True)


def test_an_update_in_flight_when_the_arena_is_closed_is_not_published_and_gives_its_page_back(memory_path):
    """The directory is somebody else's only then."""
    begun, goes_on, errors = threading.Event(), threading.Event(), []

    def pause(name):
        if name == "arena.publish.before_flip" and threading.current_thread() is thread:
            begun.set()
            assert goes_on.wait(100)

    def run():
        try:
            if push(lent, 0, 0, np.ones(LENGTH, np.float32), SCALARS["sgd"]) == stores.GIVEN_BACK:
                lent.came_too_late()
        except StoreClosed as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    arena, lent = lent_of(memory_path, rounds=False, crash_point=pause)
    thread.start()
    assert begun.wait(100)
    arena.close(remove=False)
    with pytest.raises(stores.ArenaBusy):
        Arena.open(memory_path)
    goes_on.set()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(StoreClosed):
        arena.pin(0)

    again = Arena.open(memory_path)
    assert again.current(0).version == 0
    again.close(remove=True)


@pytest.mark.parametrize("at", ["arena.publish.before_header", "arena.publish.before_flip", "arena.publish.after_flip"])
def test_a_process_that_dies_in_an_update_leaves_one_version_whole(memory_path, at):
    """The one before or the next, with its window: a push that was sent again counts once."""
    child = os.fork()
    if not child:
        seen = []

        def die(name):
            seen.append(name)
            if name == at and seen.count(at) == 4:  # the first version, and then pushes
                os._exit(0)

        _, lent = lent_of(memory_path, rounds=False, crash_point=die)
        for clock in range(5):
            push(lent, 0, clock, np.ones(LENGTH, np.float32), (1.0, 0.0, 0.0, 0.0))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

    arena = Arena.open(memory_path)
    lent = arena.lend(0, Terms("sgd", RULES["sgd"], ENDS, False, False, True, 1))
    lent.core.open(arena.current(0).version)
    ones = np.ones(LENGTH, np.float32)
    reached = [push(lent, 0, clock, ones, (1.0, 0.0, 0.0, 0.0)) for clock in range(5)]
    had = 3 if at == "arena.publish.after_flip" else 2
    assert reached == [DUPLICATE] * had + [COUNTED] * (5 - had)
    assert arena.current(0).parameter.tolist() == [-4.0] * LENGTH
    arena.close(remove=True)


def test_a_page_without_a_body_is_taken_over_and_let_go(memory_path):
    """As a shard's earlier process has left it."""
    shape = BlockShape("float32", 3000, 1, 1)
    arena = Arena.create(memory_path, meta=b"", shapes=[shape], workers=WORKERS)
    page = arena.spare(0)
    for array in (*page.arrays, page.steps, page.sessions, page.clocks):
        array[:] = 0
    arena.publish(0, page, 0)
    page = arena.spare_alike(0)
    for array in (page.steps, page.sessions, page.clocks):
        array[:] = 0
    arena.publish(0, page, 1)
    ends = np.array([3000], np.uint32)
    lent = arena.lend(0, Terms("sgd", RULES["sgd"], ends, False, False, True, 1))
    lent.core.open(1)
    values = np.ones(3000, np.float32)
    for clock in range(4):
        assert push(lent, 0, clock, values, (1.0, 0.0, 0.0, 0.0)) == COUNTED
        arena.unpin(arena.pin(0))
    assert arena.current(0).parameter.tolist() == [-4.0] * 3000
    assert arena.held_bytes == 0
    arena.close(remove=False)
    arena = Arena.open(memory_path)
    assert (arena.current(0).version, arena.current(0).parameter[0]) == (5, -4.0)
    arena.close(remove=True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rank": WORKERS}, IndexError),
        ({"rank": -1}, IndexError),
        ({"values": np.ones(LENGTH + 1, np.float32)}, ValueError),
        ({"values": np.ones(LENGTH, np.float64)}, ValueError),
        ({"values": np.ones((2, LENGTH // 2), np.float32)}, ValueError),
        ({"values": np.ones(2 * LENGTH, np.float32)[::2]}, BufferError),
        ({"present": np.ones(len(ENDS) + 1, np.uint8)}, ValueError),
        ({"present": np.ones(len(ENDS), np.uint32)}, ValueError),
        ({"scalars": (1.0,)}, ValueError),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(memory_path, change, error):
    arena, lent = lent_of(memory_path)
    given = {"rank": 0, "values": np.ones(LENGTH, np.float32), "scalars": SCALARS["sgd"], "present": None} | change
    before = lent.core.round
    with pytest.raises((error, ValueError)):
        push(lent, given["rank"], 0, given["values"], given["scalars"], present=given["present"])
    assert lent.core.round == before
    assert bytes_of(arena.current(0))[-1] == bytes(8 * WORKERS)
    arena.close(remove=True)
