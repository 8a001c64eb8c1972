"""Every exit of every state of the life cycle, with a failure in the middle of it: a call of the system that fails, or a
process that dies, each in turn. A shard is in a state then that it can be brought out of by the same call, or by its
workers' next ones; its rows and parameters are those of one moment."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_disk import no_room_at
from shard_driver import Driver, Fuse, Killed, Seat, close_all, end_process_of, tables_spec

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.config import ConfigError, Limits
from psd.contract.consistency import Consistency
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, PsdError, StateLost
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.state.aggregation.block import BlockState
from psd.state.desks.restoration import Restoration
from psd.state.durability.state_directory import Storage
from psd.state.life import TRANSITIONS, Life, LifeCycle
from psd_core.table import CRASH_POINTS

SPEC = tables_spec(1, tables=1, blocks=1)
OTHER = tables_spec(1, tables=1, blocks=1, mode="async")
VECTORS_ALONE = JobSpec(1, (), (), Consistency.parse("async"))
LIMITS = Limits(table_bytes_max=1 << 19, push_ids_max=16, workers_max=1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Two checkpoints of a job whose steps count themselves, in its parameters and in a row: at step 1, and at step 2."""
    place = tmp_path_factory.mktemp("stored")
    directory = CheckpointDirectory(str(place))
    driver = Driver(SPEC, limits=LIMITS, run_id="mine")
    (seat,) = driver.start()
    for step in (1, 2):
        driver.push_rows(seat, step - 1, {0: ([1], 1.0)})
        cut = Cut(f"a{step}", step, 0, "mine", 5.0, driver.layout)
        tables = driver.core.job.tables.snapshots("")
        driver.write_part(directory, cut, tables=tables)
        for table in tables:
            table.close()
        assert directory.complete(cut)
    driver.shard.close(keep=False)
    return place


class ArenaFuse(Fuse):
    """A crash point of the arena's, and of what lies between two tables' transactions. Nothing can be raised in their C code;
    tests/core kills there."""

    def __call__(self, point: str) -> None:
        if point not in CRASH_POINTS:
            super().__call__(point)


class World:
    """One shard with a state directory, and what its one worker and its operator do."""

    def __init__(self, tmp_path: Path, stored: Path) -> None:
        self.path = tmp_path
        self.directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
        self.older, self.name = sorted(path.name for path in stored.iterdir() if path.is_dir())[-2:]
        self.fuse = ArenaFuse()
        self.driver: Driver | None = None
        self.spec = SPEC
        self.seat: Seat | None = None
        self._stored = stored
        self._place: dict[str, int] = {}

    def store(self) -> None:
        """Let there be checkpoints."""
        shutil.copytree(self._stored, self.path / "checkpoints", dirs_exist_ok=True)

    def start(self, spec: JobSpec = SPEC, **place: Any) -> None:
        """A process, in place of the one before; where that does not come up there is none."""
        self.spec, self._place, self.driver = spec, place or self._place, None
        found: dict[str, Any] = {"state_dir": str(self.path / "state"), "checkpoint_dir": self.directory.location}
        found |= {"directory": self.directory, "crash_point": self.fuse, "limits": LIMITS, "run_id": "mine"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("psd.state.shard.Storage", self._noted)
            self.driver = Driver(spec, **found, **self._place)

    def _noted(self, *args: Any) -> Storage:
        self._storage = Storage(*args)
        return self._storage

    def kill(self) -> None:
        """End the process, also one that dies in its first steps."""
        if self.driver is not None:
            self.driver.kill()
            self.driver = None
        else:
            end_process_of(SimpleNamespace(storage=self._storage))

    @property
    def core(self) -> Any:
        return self.driver.core

    def join(self, spec: JobSpec = SPEC) -> None:
        first = self.driver.config.shard_index == 0
        self.seat = self.driver.join(0, session=0 if first else 5)
        self.driver.declare(self.seat, spec)

    def back(self, name: str = "") -> None:
        self.driver.rollback(name or self.name, self.core.timeline + 1)

    def lose(self) -> None:
        """A round is lost for good."""
        assert self.core._on_lost(StateLost("worker 0's"))

    def tick(self) -> None:
        self.driver.advance(1)


def serving(world: World) -> None:
    world.start()
    world.join()
    world.driver.initialize(world.seat)
    world.driver.push_rows(world.seat, 0, {0: ([1], 1.0)})
    world.store()


def unread(world: World) -> None:
    world.start()
    world.join()
    world.driver.initialize(world.seat)
    world.store()


def empty(world: World) -> None:
    world.start()
    world.join()
    world.store()


def damaged(world: World) -> None:
    serving(world)
    world.lose()


@contextlib.contextmanager
def unreadable(error: Exception, times: int = 1000) -> Iterator[None]:
    """Blocks of a checkpoint cannot be read."""
    restore, left = BlockState.restore, [times]

    def fail(self: BlockState, *args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        restore(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockState, "restore", fail)
        yield


@contextlib.contextmanager
def without_store() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise CheckpointFailed("no network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointDirectory, "newest", fail)
        yield


def stranded(world: World) -> None:
    damaged(world)
    with without_store():
        world.tick()


def lost(world: World) -> None:
    serving(world)
    with unreadable(CheckpointFailed("no network")), pytest.raises(CheckpointFailed):
        world.back()


def tentative(world: World) -> None:
    world.store()
    world.start()


def restored(world: World) -> None:
    tentative(world)
    world.back()
    world.seat = world.driver.join(0)


def killed(state: Callable[[World], None]) -> Callable[[World], None]:
    def make(world: World) -> None:
        state(world)
        world.kill()

    return make


def vectors_alone(state: Callable[[World], None]) -> Callable[[World], None]:
    def make(world: World) -> None:
        world.start(VECTORS_ALONE)
        (world.seat,) = world.driver.start()
        state(world)
        world.spec = world.driver.spec = SPEC
        world.driver.layout = Layout(SPEC, 1)

    return make


def second_shard(world: World) -> None:
    """Shard 1 of 2, with the values of an initializer that has died."""
    spec = tables_spec(1, tables=1, blocks=2)
    world.start(spec, shard=1, shards=2)
    world.join(spec)
    world.driver.initialize(world.seat, 1.0, choice=1)


def begun_with_nothing(world: World) -> None:
    with unreadable(CheckpointCorrupt("block 0")):
        world.start()


def begun_with_the_older(world: World) -> None:
    with unreadable(CheckpointCorrupt("block 0"), times=1):
        world.start()


def lost_by_the_way(world: World) -> None:
    with unreadable(CheckpointCorrupt("block 0")), contextlib.suppress(CheckpointCorrupt):
        world.back()


def gives_up(world: World) -> None:
    with without_store():
        world.tick()


def serve(world: World) -> None:
    world.driver.pull_rows(world.seat, 0, 0, [1])


@dataclass
class Exit:
    """A state, and what makes the shard leave it by some of its exits."""

    state: Callable[[World], None]
    leave: Callable[[World], None]
    ways: list[tuple[Life, Life]]
    ends: Life


SOME = 11
"""Steps from one failure to the next, where another exit has the same steps."""
EACH_STEP = ("a job goes back", "values come", "vectors grow", "a process goes on")

L = Life
LOADS = (L.LOADING, L.RESTORED)
RECOVERED = [(L.EMPTY, L.SERVING), (L.EMPTY, L.TENTATIVE), (L.EMPTY, L.RESTORED)]


def went_back(state: Callable[[World], None], life: Life) -> Exit:
    return Exit(state, World.back, [(life, L.LOADING), LOADS], L.RESTORED)


EXITS = {
    "values come": Exit(empty, lambda w: w.driver.initialize(w.seat), [(L.EMPTY, L.UNREAD)], L.UNREAD),
    "a process goes on": Exit(killed(serving), World.start, RECOVERED[:1], L.SERVING),
    "a tentative process goes on": Exit(killed(tentative), World.start, RECOVERED[1:2], L.TENTATIVE),
    "a restored process goes on": Exit(killed(restored), World.start, RECOVERED[2:], L.RESTORED),
    "there is a checkpoint": Exit(World.store, World.start, [(L.EMPTY, L.LOADING), (L.LOADING, L.TENTATIVE)], L.TENTATIVE),
    "there is no older checkpoint": Exit(World.store, begun_with_nothing, [(L.LOADING, L.LOST), (L.LOST, L.EMPTY)], L.EMPTY),
    "there is an older checkpoint": Exit(World.store, begun_with_the_older, [(L.LOST, L.LOADING)], L.TENTATIVE),
    "nothing goes back": went_back(empty, L.EMPTY),
    "values go back": went_back(unread, L.UNREAD),
    "a job goes back": went_back(serving, L.SERVING),
    "a damaged job goes back": went_back(damaged, L.DAMAGED),
    "a stranded job goes back": went_back(stranded, L.STRANDED),
    "what was lost comes back": went_back(lost, L.LOST),
    "a restored job goes back": went_back(restored, L.RESTORED),
    "another checkpoint": Exit(tentative, lambda w: w.back(w.older), [(L.TENTATIVE, L.LOADING)], L.RESTORED),
    "this checkpoint": Exit(tentative, World.back, [(L.TENTATIVE, L.RESTORED)], L.RESTORED),
    "it is lost by the way": Exit(serving, lost_by_the_way, [(L.LOADING, L.LOST)], L.LOST),
    "other values come": Exit(
        second_shard, lambda w: w.driver.initialize(w.seat, 2.0, choice=2), [(L.UNREAD, L.UNREAD)], L.UNREAD
    ),
    "somebody reads": Exit(unread, serve, [(L.UNREAD, L.SERVING)], L.SERVING),
    "vectors grow": Exit(
        vectors_alone(lambda _: None), lambda w: w.driver.declare(w.seat, SPEC), [(L.UNREAD, L.EMPTY)], L.EMPTY
    ),
    "vectors in use grow": Exit(
        vectors_alone(lambda w: w.core.become(L.SERVING)),
        lambda w: w.driver.declare(w.seat, SPEC),
        [(L.SERVING, L.EMPTY)],
        L.EMPTY,
    ),
    "values lose a round": Exit(unread, World.lose, [(L.UNREAD, L.DAMAGED)], L.DAMAGED),
    "a job loses a round": Exit(serving, World.lose, [(L.SERVING, L.DAMAGED)], L.DAMAGED),
    "a restored job loses a round": Exit(restored, World.lose, [(L.RESTORED, L.DAMAGED)], L.DAMAGED),
    "a tick goes back": Exit(damaged, World.tick, [(L.DAMAGED, L.LOADING)], L.TENTATIVE),
    "a tick finds nothing": Exit(damaged, gives_up, [(L.DAMAGED, L.STRANDED)], L.STRANDED),
    "workers come anew": Exit(stranded, lambda w: w.driver.join(0), [(L.STRANDED, L.SERVING)], L.SERVING),
    "it is declared": Exit(restored, lambda w: w.driver.declare(w.seat), [(L.RESTORED, L.SERVING)], L.SERVING),
    "it is declared as another": Exit(
        restored, lambda w: w.driver.declare(w.seat, OTHER), [(L.RESTORED, L.LOADING), LOADS], L.SERVING
    ),
}


def test_every_exit_of_every_state_is_among_them():
    """One that is added to the table is added here."""
    ways = {(state, following) for state, ways in TRANSITIONS.items() for following in ways}

    assert {way for found in EXITS.values() for way in found.ways} == ways


@pytest.fixture
def seen(monkeypatch) -> list[tuple[Life, Life]]:
    """The transitions that are made."""
    made: list[tuple[Life, Life]] = []
    try_to = LifeCycle.try_to

    def noted(self: LifeCycle, following: Life) -> bool:
        before = self.now
        is_made = try_to(self, following)
        if is_made:
            made.append((before, following))
        return is_made

    monkeypatch.setattr(LifeCycle, "try_to", noted)
    monkeypatch.setattr(Restoration, "_begin_incarnation", lambda self: setattr(self._core, "incarnation", 8))
    return made


def assert_goes_on(world: World) -> None:
    """Whatever has happened, the shard can be brought to train, from values of one moment."""
    if world.driver is None:
        world.start(world.spec)
    assert world.core.life.now is not Life.LOADING
    if world.driver.config.shard_count > 1:
        world.driver.initialize(world.driver.join(0, session=6), 3.0, choice=3)
        assert set(world.driver.values(world.driver.layout.blocks_of(1)[0].index)) == {3.0}
        return
    if (world.path / "checkpoints" / world.name).exists():
        world.tick()
        world.back()
        assert (world.core.life.now, world.core.restored_from) == (Life.RESTORED, world.name)
    world.join()
    if not world.core.life.has_values:
        world.driver.initialize(world.seat)
    step = world.driver.version()
    assert step == (2 if world.core.restored_from else 0)
    world.driver.push_rows(world.seat, step, {0: ([1], 1.0)})
    assert world.driver.rows(0, [1]) == [-1.0 * (step + 1)]
    assert not list((world.path / "state").glob("*.new"))


@pytest.mark.parametrize("how", ["a call of the system fails", "the process dies"])
@pytest.mark.parametrize("case", EXITS)
def test_a_shard_is_brought_on_from_a_failure_in_the_middle(tmp_path, stored, monkeypatch, seen, case, how):
    """At steps throughout the exit; without a failure it goes through all that it is to go through."""
    way, failing, has_failed = EXITS[case], 1, True
    stride = 1 if case in EACH_STEP else SOME
    while has_failed:
        world = World(tmp_path / str(failing), stored)
        way.state(world)
        seen.clear()
        world.fuse.steps = failing if how == "the process dies" else 0
        with no_room_at(failing if world.fuse.steps == 0 else 0, monkeypatch, errno.EIO) as calls:
            try:
                way.leave(world)
            except (PsdError, ConfigError):
                pass
            except Killed:
                world.kill()
        has_failed = world.fuse.steps <= 0 < failing if how == "the process dies" else len(calls) >= failing
        if not has_failed:
            assert set(way.ways) <= set(seen)
            assert world.core.life.now is way.ends
        world.fuse.steps = 0
        assert_goes_on(world)
        close_all()
        shutil.rmtree(tmp_path / str(failing))
        failing += stride
