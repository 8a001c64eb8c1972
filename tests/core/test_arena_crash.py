"""The arena after kill -9 at every numbered step, and at random instants."""

import multiprocessing
import random
import signal
import sys
from collections import Counter

import pytest
from arena_workload import (
    SHAPES,
    CrashAt,
    Journal,
    check,
    main_in_planes_until_killed,
    main_until_crash,
    main_until_killed,
    open_or_create,
    run,
    versions,
)
from killed_vectors import copy_sparse_file
from random_deaths import last_word_of_a_killed_process

from psd_core.arena import CRASH_POINTS, Arena

ROUNDS = 20
COPIED_ROUNDS = 13  # snapshots are given back twice, and every body is followed by all that build on it

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="holes and forkserver as on Linux"),
]


@pytest.fixture(scope="module")
def processes():
    """Start processes as forks of a clean server: fast, and free of this process's threads and descriptors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "psd_core.arena"])
    return context


@pytest.fixture(scope="module")
def occurrences(tmp_path_factory):
    """Numbers of times that the undisturbed sequence comes by each point."""
    path = tmp_path_factory.mktemp("count")
    counter = CrashAt()
    arena = open_or_create(path / "state", counter)
    run(arena, Journal(path / "journal"), ROUNDS)
    arena.close(remove=True)
    return counter.counts


def test_the_sequence_comes_by_every_point(occurrences):
    assert set(occurrences) == set(CRASH_POINTS)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", CRASH_POINTS)
def test_death_at_a_point_leaves_old_or_new_and_the_next_process_goes_on(name, share, occurrences, processes, memory_path):
    occurrence = 1 + round(share * (occurrences[name] - 1))
    process = processes.Process(target=main_until_crash, args=(memory_path, name, occurrence, ROUNDS))

    process.start()
    process.join()

    assert process.exitcode == -signal.SIGKILL
    journal = Journal(memory_path / "journal")
    arena = Arena.open(memory_path / "state")
    if arena is None:
        assert journal.begun == 0
        arena = open_or_create(memory_path / "state", CrashAt())
    journal.settle(check(arena, journal))
    run(arena, journal, ROUNDS)
    assert versions(arena) == [ROUNDS] * len(SHAPES)
    check(arena, journal)
    arena.close(remove=True)
    assert not (memory_path / "state").exists()


@pytest.mark.parametrize("has_planes", [False, True])
def test_a_copy_taken_at_every_step_opens(has_planes, memory_path):
    """What the file holds at a step is what death there would leave: so every occurrence of every point, without processes."""
    journal = Journal(memory_path / "journal")
    copies = memory_path / "copy"
    copies.mkdir()
    seen = Counter()

    def open_a_copy(name):
        seen[name] += 1
        if not (memory_path / "state" / "arena").exists():
            return
        for path in (memory_path / "state").glob("[ap]*"):  # the arena, and its planes
            copy_sparse_file(path, copies / path.name)
        arena = Arena.open(copies)
        check(arena, journal)
        arena.close(remove=True)

    arena = open_or_create(memory_path / "state", open_a_copy, has_planes=has_planes)
    run(arena, journal, COPIED_ROUNDS)

    assert set(seen) == set(CRASH_POINTS)
    arena.close(remove=True)


@pytest.mark.parametrize("main", [main_until_killed, main_in_planes_until_killed])
def test_death_at_random_instants_thirty_times_over(main, processes, memory_path):
    """One arena; each process goes on with what the one before it left."""
    random_ = random.Random(20240229)
    journal = Journal(memory_path / "journal")
    for _ in range(30):
        last_word_of_a_killed_process(processes, main, memory_path, random_, 12)

        arena = Arena.open(memory_path / "state")
        assert arena is not None
        journal.settle(check(arena, journal))
        arena.close(remove=False)

    arena = Arena.open(memory_path / "state")
    target = max(versions(arena)) + 3
    run(arena, journal, target)
    assert versions(arena) == [target] * len(SHAPES)
    check(arena, journal)
    arena.close(remove=True)
