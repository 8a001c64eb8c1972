"""Checkpoints of jobs whose pushes are armed steps: of the same steps, and the same bytes, as those of jobs without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.storage import LocalStorage
from psd.contract.layout import Layout
from psd_client import SGD, Adagrad, Adam, Table, connect
from psd_client.lanes.steps import SteppingLanes

Start = Callable[..., Any]

SHAPES = {"w": (5, 7), "h": (11,), "v": (2,)}
GROUPS = [{"params": ["w"], "lr": 0.5}, {"params": ["h"]}, {"params": ["v"], "momentum": 0.5}]
EVERY = 7
STEPS = 40
BREAK = 15
RUN = SteppingLanes.run


@pytest.fixture(autouse=True)
def took(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What has become of each step: True: taken."""
    found: list[bool | None] = []

    def run(steps: SteppingLanes, *args: Any) -> bool | None:
        found.append(RUN(steps, *args))
        return found[-1]

    monkeypatch.setattr(SteppingLanes, "run", run)
    return found


def gradient(rank: int, step: int) -> dict[str, Any]:
    """Whole numbers, whose sums are the same in any order."""
    random = np.random.default_rng([rank, step])
    return {name: random.integers(-8, 8, shape).astype(np.float32) for name, shape in SHAPES.items()}


class Job:
    """A job whose checkpoints lie in `directory`. Attributes: running: its shards; params: at its end, by rank."""

    def __init__(self, cluster: Start, directory: Path, shards: int = 1, **config: Any) -> None:
        self.running = cluster(shards, checkpoint_dir=str(directory), checkpoint_keep=100, **config)
        self._directory = CheckpointDirectory(str(directory))
        self.params: list[dict[str, Any]] = []

    def settle(self) -> None:
        """Wait until all that was taken is written, so that no cut is left out because the store is slow."""
        until(lambda: not any(shard.shard.cuts.is_storing for shard in self.running.shards))

    def train(
        self, consistency: str, world: int, *, end: int = STEPS, before: Callable[[int, int], object] = lambda *_: None
    ) -> None:
        """Train up to a step; `before` is called with rank and step."""

        def work(rank: int) -> dict[str, Any]:
            with connect(self.running.servers, rank, world, transport="tcp" if rank else "shm", wait_timeout=100) as ps:
                values = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
                ps.declare(values, SGD(lr=1.0), groups=GROUPS, reduce="sum", consistency=consistency)
                ps.barrier("begin")  # who comes later begins later
                while ps.clock < end:
                    self.settle()
                    before(rank, ps.clock)
                    params = ps.push_pull(gradient(rank, ps.clock))
                ps.barrier("end")
                return ps.pull() if consistency != "sync" else params

        self.params = in_threads(*(lambda rank=rank: work(rank) for rank in range(world)))
        self.settle()

    @property
    def stored(self) -> list[tuple[int, dict[int, int], list[Any]]]:
        """Of each checkpoint: its step, the workers' clocks, and of each block the version, and all that it has, as bytes."""
        found = []
        for info in self._directory.checkpoints():
            assert info.reason == ""
            manifest = self._directory.load(info.name)
            blocks = self._directory.read_blocks(manifest, Layout(manifest.spec, 1), 0)
            contents = [
                (b.version, [array.tobytes() for array in (b.parameter, *b.slots.values(), b.steps, b.clocks)]) for b in blocks
            ]
            found.append((manifest.step, dict(manifest.worker_clocks), contents))
        return sorted(found)

    @property
    def stored_rows(self) -> list[list[Any]]:
        """Of each checkpoint, in their order: all rows of all tables, with their slots, and when they were used."""
        found = []
        for info in sorted(self._directory.checkpoints(), key=lambda info: info.step):
            manifest = self._directory.load(info.name)
            layout, rows = Layout(manifest.spec, 1), []
            for table in range(len(manifest.spec.tables)):
                for batch in self._directory.read_table(manifest, layout, 0, table):
                    of_batch = zip(batch.ids.tolist(), batch.used.tolist(), batch.rows, strict=True)
                    rows += [(table, id_, used, row.tobytes()) for id_, used, row in of_batch]
            found.append(sorted(rows))
        return found

    @property
    def names(self) -> list[str]:
        """Of the checkpoints that are whole: a cut is missed while two are being written."""
        return [info.name for info in self._directory.checkpoints() if not info.reason]

    def parameters_of(self, name: str) -> tuple[dict[int, int], dict[str, Any]]:
        """The clocks and parameters of a checkpoint."""
        manifest = self._directory.load(name)
        layout = Layout(manifest.spec, 1)
        blocks = {b.block.index: b.parameter for b in self._directory.read_blocks(manifest, layout, 0)}
        found = {}
        for index, tensor in enumerate(manifest.spec.tensors):
            (own,) = [b for b in layout.blocks if index in b.segment_tensors]
            (segment,) = np.flatnonzero(own.segment_tensors == index)
            begin = 0 if segment == 0 else own.segment_ends[segment - 1]
            found[tensor.name] = blocks[own.index][begin : own.segment_ends[segment]]
        return dict(manifest.worker_clocks), found


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("consistency", "world"), [("sync", 1), ("sync", 2), ("async", 1), ("ssp:2", 1)])
def test_checkpoints_by_steps_are_those_of_the_long_way(
    cluster: Start, tmp_path: Path, took: list[bool | None], consistency: str, world: int, shards: int
) -> None:
    """Of the same steps, to the bit; and most pushes are steps all the same."""
    found = []
    for never_armed in (True, False):
        job = Job(cluster, tmp_path / str(never_armed), shards, checkpoint_steps=EVERY, never_armed=never_armed)
        job.train(consistency, world)
        found.append((job.stored, job.params))
        assert (took.count(True) > STEPS * world / 3) is not never_armed

    (stored, params), (armed, armed_params) = found
    assert [step for step, _, _ in armed] == [step for step, _, _ in stored]
    assert [step for step, _, _ in armed if step % EVERY == 0] == [*range(EVERY, STEPS + 1, EVERY)]
    assert armed == stored
    assert str(armed_params) == str(params)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:2"])
def test_a_checkpoint_on_request_among_those_by_steps_has_each_push_before_it(
    cluster: Start, tmp_path: Path, took: list[bool | None], consistency: str, shards: int
) -> None:
    """And none after it; and when it is taken, steps go on."""
    job = Job(cluster, tmp_path, shards, checkpoint_steps=EVERY)
    schedule = job.running.shards[0].shard.schedule

    def before(rank: int, step: int) -> None:
        if rank == 0 and step in (10, 30):
            schedule.announce(f"asked{step}")

    job.train(consistency, 2, end=2 * STEPS, before=before)

    assert True in took[len(took) // 2 :]
    assert len(job.names) > 2  # without rounds, a cut for which a slow machine holds pushes too long is given up
    asked = [name for name in job.names if "asked" in name]
    assert len(asked) == 2 or consistency != "sync"
    for checkpoint in job.names:
        clocks, params = job.parameters_of(checkpoint)
        for name, rate in (("w", 0.5), ("h", 1.0)):
            total = sum(gradient(rank, each)[name] for rank, clock in clocks.items() for each in range(clock))
            assert params[name].tolist() == (-rate * total).ravel().tolist(), (checkpoint, clocks)


def test_steps_go_on_after_a_checkpoint(cluster: Start, tmp_path: Path, took: list[bool | None]) -> None:
    """Each reply goes on naming it, which all shards have heard by then."""
    job = Job(cluster, tmp_path, 2)
    job.train("sync", 1, before=lambda _, step: job.running.shards[0].shard.schedule.announce("c") if step == 10 else None)

    assert [step for step, _, _ in job.stored] == [13]
    assert took.count(True) > STEPS / 2


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_job_that_goes_on_from_a_checkpoint_makes_steps(
    cluster: Start, tmp_path: Path, took: list[bool | None], consistency: str
) -> None:
    """Its workers have not been there from the start; its checkpoints are those of the job that went through."""
    whole = Job(cluster, tmp_path / "whole", checkpoint_steps=EVERY, never_armed=True)
    whole.train(consistency, 2 if consistency == "sync" else 1)
    first = Job(cluster, tmp_path / "parts", checkpoint_steps=EVERY, on_worker_failure="wait")
    first.train(consistency, 2 if consistency == "sync" else 1, end=BREAK)
    first.running.finish()
    took.clear()

    second = Job(cluster, tmp_path / "parts", checkpoint_steps=EVERY)
    second.train(consistency, 2 if consistency == "sync" else 1)

    assert took.count(True) > STEPS / 5
    by_steps = [one for one in second.stored if one[0] % EVERY == 0]
    assert by_steps == whole.stored[: len(by_steps)]
    assert len(by_steps) == STEPS // EVERY
    assert str(second.params) == str(whole.params)


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_shards_to_which_nobody_pushes_are_in_the_checkpoints_of_steps(
    cluster: Start, tmp_path: Path, took: list[bool | None], consistency: str
) -> None:
    """A small job on many shards: the worker tells them of a cut before the push that reaches it."""
    running = cluster(3, checkpoint_dir=str(tmp_path), checkpoint_steps=EVERY, checkpoint_keep=100)
    with connect(running.servers, 0, 1, wait_timeout=100) as ps:
        ps.declare({"w": np.zeros(2, np.float32)}, SGD(lr=1.0), consistency=consistency)
        while ps.clock < STEPS:
            until(lambda: not any(shard.shard.cuts.is_storing for shard in running.shards))
            ps.push_pull({"w": np.ones(2, np.float32)})
    running.finish()

    infos = CheckpointDirectory(str(tmp_path)).checkpoints()
    assert [info.reason for info in infos] == [""] * len(infos)
    assert {info.step for info in infos} >= set(range(EVERY, STEPS, EVERY))
    assert took.count(True) > STEPS / 3


def test_two_shards_that_write_one_part_write_the_same(cluster: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first shard writes the parts of those without blocks, which may do so at the same moment, before either has seen the
    other's. Such a checkpoint was damaged: its manifest was of one of the two, and the file was the other."""
    written, write = defaultdict(list), LocalStorage.write

    def kept(storage: LocalStorage, directory: str, file: str, chunks: Iterable[bytes]) -> None:
        content = b"".join(chunks)
        written[f"{directory}/{file}"].append(content)
        write(storage, directory, file, [content])

    monkeypatch.setattr(LocalStorage, "write", kept)
    monkeypatch.setattr("psd.checkpoint.writing.is_written", lambda *_: False)
    running = cluster(2, checkpoint_dir=str(tmp_path), checkpoint_steps=EVERY, checkpoint_keep=100)
    with connect(running.servers, 0, 1, wait_timeout=100) as ps:
        ps.declare({"w": np.zeros(2, np.float32)}, SGD(lr=1.0), consistency="async")
        while ps.clock < 3 * EVERY:
            until(lambda: not any(shard.shard.cuts.is_storing for shard in running.shards))
            ps.push_pull({"w": np.ones(2, np.float32)})
    running.finish()

    twice = {name: contents for name, contents in written.items() if len(contents) > 1 and "shard" in name}
    assert len(twice) >= 2, "nothing was written by both"
    assert {name: len(set(contents)) for name, contents in twice.items()} == dict.fromkeys(twice, 1)


@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:2"])
def test_checkpoints_of_rows_are_those_of_the_long_way(
    cluster: Start, tmp_path: Path, took: list[bool | None], consistency: str
) -> None:
    """Rows that steps have changed are among those that have changed since the checkpoint before."""
    found = []
    for never_armed in (True, False):
        job = Job(cluster, tmp_path / str(never_armed), 2, checkpoint_steps=EVERY, never_armed=never_armed)
        with connect(job.running.servers, 0, 1, transport="shm", wait_timeout=100) as ps:
            tables = [Table("a", 3, Adagrad(lr=0.5)), Table("b", 2, Adam(lr=0.25))]
            ps.declare({"h": np.zeros(11, np.float32)}, SGD(lr=1.0), tables=tables, consistency=consistency)
            while ps.clock < STEPS:
                job.settle()
                random = np.random.default_rng(ps.clock)
                ids = np.flatnonzero(random.random(30) < 0.3) if ps.clock else np.arange(30)
                rows = {table.name: (ids, random.normal(size=(len(ids), table.dim)).astype(np.float32)) for table in tables}
                ps.push_pull({"h": random.normal(size=11).astype(np.float32)}, tables=rows)
        job.settle()
        found.append((job.stored, job.stored_rows))
        assert (took.count(True) > STEPS / 3) is not never_armed

    assert [step for step, _, _ in found[1][0] if step % EVERY == 0] == [*range(EVERY, STEPS + 1, EVERY)]
    assert found[1] == found[0]
    assert all(len(rows) == 60 for rows in found[1][1])
