"""A job on one shard over several lives of its state directory, each with flags of its own, and what must count in it.

Driven in-process, with injected time; no server. Each gradient is a 1 everywhere, under SGD(lr=1) from zeros, so all numbers
say how often gradients have counted. Draws nothing.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from life_checkpoints import LifeCheckpoints
from settling import bring, commit
from shard_driver import Driver, Seat, tables_spec

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.cli import server
from psd.contract.config import ServerConfig
from psd.contract.errors import PsdError
from psd.contract.jobspec import JobSpec
from psd.state.cuts.snapshots import new_id
from psd.state.durability import leftovers, notes
from psd.v1 import job_pb2, storage_pb2, vectors_pb2
from psd_core.table import STEP_MAX
from psd_core.vector_operations import KINDS

SIZE = 8
VECTOR = vectors_pb2.VectorSpec(name="v", size=SIZE, dtype=job_pb2.DTYPE_FLOAT64)
HOT = (1, 2**63 + 1)
"""Ids that every gradient has."""

_ROWS, _TABLE_BYTES = 10_000, 1 << 30
"""Limits above these let no gradient for a row be dropped."""

_KEPT = 8
"""Batches of each worker that are answered when they come again."""

_MANY = 1000
"""More steps than a job makes here."""

_ID_BYTES = 8 + 3 * 4
"""Of an id and its row in a push."""


def config_of(argv: list[str], directory: str) -> ServerConfig | None:
    """The configuration that psd-server makes of its flags, for a job that lies in a directory; None if it refuses them."""
    try:
        words = ["--shard", "0/1", "--state-dir", f"{directory}/state", "--checkpoint-dir", f"{directory}/checkpoints", *argv]
        return server.parse(words)[0]
    except SystemExit:
        return None


def _flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class _AtStep:
    """A snapshot of a table, as if it were of another step."""

    def __init__(self, snapshot: Any, step: int) -> None:
        self._snapshot, self.step = snapshot, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._snapshot)


def _checkpoint_at(step: int, spec: JobSpec, made: CheckpointDirectory) -> str:
    """The name of a checkpoint of a job that has made so many steps, in none of which a gradient came."""
    driver = Driver(spec)
    driver.start()
    job = driver.core.declared()
    pages = [(block.plan, block._page) for block in job.blocks.values()]
    parts = [
        BlockPart(plan.space, plan.offset, plan.length, step, page.parameter, {}, page.steps, page.sessions, page.clocks)
        for plan, page in pages
    ]
    with ExitStack() as stack:
        snapshots = [stack.enter_context(closing(partition.store.snapshot())) for partition in job.tables.partitions]
        cut = Cut("a1", step, 0, driver.core.run_id, 5.0, driver.layout)
        tables = [_AtStep(snapshot, min(step, STEP_MAX - _MANY)) for snapshot in snapshots]
        made.write_part(cut, 0, parts, worker_clocks=dict.fromkeys(range(spec.world_size), step), tables=tables)
    made.complete(cut)
    driver.shard.close(keep=False)
    return cut.name


class JobLives:
    """The job. mode: see Consistency; or "exact". table: fields of its tables. step: at which it begins.

    Attributes:
        pushed, run: how many gradients, and batches on the vector, must count. has_begun: there has been a life.
    """

    def __init__(self, directory: Path, mode: str, workers: int, table: dict[str, Any], step: int) -> None:
        self._directory = directory / "state"
        how = {"aggregation": "exact"} if mode == "exact" else {"mode": mode}
        self._spec = tables_spec(workers, tables=2, blocks=1, reduction="sum", table=tuple(table.items()), **how)
        self._driver: Driver | None = None
        self._config: ServerConfig | None = None
        self._seats: list[Seat] = []
        self._clocks = [step] * workers
        self._checkpoints = LifeCheckpoints(directory / "checkpoints")
        if step:
            self._checkpoints.counts[_checkpoint_at(step, self._spec, self._checkpoints.directory)] = 0, 0, True
        self._counted: list[int] = []  # clocks of the gradients that count
        self._batches: list[tuple[int, int] | None] = [None] * workers  # session and number of the last one
        self._begun_at = [0] * workers  # number of the first batch in that session
        self._ids = itertools.count(1000)
        self._last: dict[int, Any] = {}
        self.pushed = self.run = 0
        self._has_room = True
        self._is_lost = False
        self._timeline = 0
        self.has_vectors = False

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def has_begun(self) -> bool:
        return self._config is not None

    # -- lives ---------------------------------------------------------------------------------------------------------

    def begin(self, config: ServerConfig) -> bool:
        """The first life; False if its flags do not allow the job."""
        flags = {name: value for name, value in vars(config).items() if name not in _OWN}
        try:
            self._driver = Driver(self._spec, directory=self._checkpoints.directory, **flags)
        except (PsdError, server.ConfigError):
            return False  # the checkpoint is another run's
        return self._enter(config)

    def _enter(self, config: ServerConfig) -> bool:
        """All workers come, to a shard that holds nothing, or a checkpoint alone; False if they are refused."""
        self._config = config
        name = self._checkpoints.newest
        try:
            if name:
                self._timeline += 1
                self.driver.rollback(name, self._timeline, run_id=self.driver.core.run_id)
            self._seats = [self._join(rank) for rank in range(self._spec.world_size)]
            for seat in self._seats:
                self.driver.declare(seat)
            if not name:
                assert self.driver.initialize(self._seats[0])
        except PsdError:
            self.end(is_killed=False)
            return False
        self._first_config = config
        limits = config.limits  # how many rows a table may have is settled when it is made
        self.pushed, self.run, had_room = self._checkpoints.counts.get(name, (0, 0, True))
        self._has_room = had_room and limits.table_rows_max >= _ROWS and not 0 < limits.table_bytes_max < _TABLE_BYTES
        self._counted = sorted(self._counted)[: self.pushed]
        self._clocks = [self.driver.worker(rank).clock for rank in range(self._spec.world_size)]
        self._last, self._batches = {}, [None] * self._spec.world_size
        try:
            self.driver.shard.vectors.create(self._change(self._seats[0]))
            self.has_vectors = True
        except PsdError:
            self.has_vectors = False  # --max-vectors, or --max-vector-bytes
        self._checkpoints.begin(self.driver)
        return True

    def _join(self, rank: int) -> Seat:
        assert self._config is not None
        return self.driver.join(rank, run_id=self._config.run_id)

    def end(self, *, is_killed: bool) -> None:
        """The end of a life: as by kill -9, or in order."""
        if is_killed:
            self.driver.kill()
        else:
            self.driver.shard.close(keep=True)
        self._driver_before, self._driver = self.driver, None

    def go_on(self, config: ServerConfig) -> bool:
        """The next life; False if it is refused, which changes nothing: the flags of the one before serve again."""
        # What is restored is made anew, which the flags of a life that only went on may refuse.
        before, driver = self._first_config if self._is_lost else self._config, self._driver_before
        assert before is not None
        for flags in (config, before):
            driver.config, driver.incarnation = flags, driver.incarnation + 1
            self._config = flags
            try:
                driver._start(directory=self._checkpoints.directory)
            except (PsdError, server.ConfigError):
                if flags is before:
                    raise  # refused with the very flags of its earlier life
                continue
            self._driver = driver
            if self._is_lost:
                assert driver.shard.restored_from == self._checkpoints.newest
                if self._enter(flags):
                    self._is_lost = False
                    return flags is config
                assert flags is not before, "it goes on with the flags of its earlier life"
                continue
            assert driver.shard.is_recovered, "it has begun anew, beside a job that was there"
            try:
                for seat in self._seats:
                    driver.resume(seat, timeline=self._timeline)
            except PsdError:
                if flags is before:
                    raise
                self.end(is_killed=False)
                continue
            self._checkpoints.begin(driver)
            return flags is config
        raise AssertionError("unreachable")

    def lose(self) -> None:
        """After the end of a life: all files go, if there is a checkpoint."""
        if self._checkpoints.newest:
            shutil.rmtree(self._directory)
            self._is_lost = True

    def damage(self, where: float) -> None:
        """After a life that has ended in order: a byte changes that counts. The next shard finds it, and goes back, or does not
        start."""
        files = storage_pb2.StoredBoot.FromString(notes.read(self._directory / leftovers.BOOT_NAME)).files
        runs = [(file.name, run) for file in files for run in file.runs]
        name, run = runs[int(where * len(runs))]
        path, at = self._directory / name, run.start + int((where * len(runs) % 1) * run.nbytes)
        _flip(path, at)
        if self._checkpoints.newest:
            self._is_lost = True
            return
        driver = self._driver_before
        with pytest.raises(server.ConfigError, match=re.escape(f"{path}: ")):
            driver._start(directory=self._checkpoints.directory)
        _flip(path, at)

    def damage_killed(self, where: float) -> None:
        """After a kill: any byte changes. What is not checked is believed; the shard refuses it or goes on, and so do calls."""
        files = sorted(path for path in self._directory.rglob("*") if path.is_file() and path.stat().st_size)
        path = files[int(where * len(files))]
        _flip(path, int((where * len(files) % 1) * path.stat().st_size))
        driver = self._driver_before
        driver.incarnation += 1
        try:
            driver._start(directory=self._checkpoints.directory)
            self._driver = driver
            for seat in self._seats:
                driver.resume(seat, timeline=self._timeline)
            for rank in range(len(self._seats)):
                self.step(rank, 3)
                self.batch(rank)
            driver.rows(0, HOT)
        except (PsdError, server.ConfigError):
            pass

    def close(self) -> None:
        if self._driver is not None:
            self._driver.shard.close(keep=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- what workers do -----------------------------------------------------------------------------------------------

    def step(self, rank: int, new_ids: int) -> None:
        """A gradient of one worker, or in a synchronous job of each, in a new round; with rows for so many new ids."""
        everybody = range(len(self._seats)) if self._has_rounds else [rank]
        ids = [*HOT, *itertools.islice(self._ids, new_ids)]
        at = max(self._clocks[each] for each in everybody)
        for each in everybody:
            session = self._seats[each].session
            if self._push(each, at, ids, session):
                self.pushed += 1
                self._counted.append(at)
                self._clocks[each], self._last[each] = at + 1, (at, ids, session)
        if self._spec.aggregation == "exact" and self._last.get(rank, (-1,))[0] == at:
            for seat in self._seats:
                commit(self.driver, seat, at)
            decisions = self.driver.shard.settlement.commit_reply(0, at).decisions
            bring(self.driver, self._seats[0], at + 1, decisions=decisions)

    def again(self, rank: int) -> None:
        """The last push comes once more, under the name that it had, and counts no more."""
        if rank in self._last:
            self._push(rank, *self._last[rank])

    def _push(self, rank: int, clock: int, ids: list[int], session: int) -> bool:
        """False if it must wait for a slower worker, or is larger than the flags allow."""
        driver, seat = self.driver, self._seats[rank]
        limits = driver.config.limits
        if len(ids) * 2 > driver.core.push_ids_max or 2 * len(ids) * _ID_BYTES > limits.push_bytes_max:
            return False
        push = driver.begin_push(seat, clock, session=session)
        if driver.shard.exchange.gate(push, clock) is not None:
            return False
        for plan in driver.layout.blocks_of(0):
            assert driver.push_block(push, plan.index, 1.0) is None
        assert driver.push_tables(push, dict.fromkeys(range(2), (ids, 1.0))) is None
        driver.shard.exchange.end_push(push)
        return True

    def cut(self, _: int) -> None:
        """An operator asks for a checkpoint."""
        self.driver.shard.schedule.announce(new_id())

    def store(self) -> None:
        """Store the cuts that have come about."""
        self._checkpoints.settle(self._before, self.run, self._has_room)

    def _before(self, step: int | None) -> int:
        return self.pushed if step is None else sum(clock < step for clock in self._counted)

    def rejoin(self, rank: int) -> None:
        """A worker comes back, with a new session. If the flags do not allow its job any more, with those of the first life."""
        try:
            self._seats[rank] = self._join(rank)
            self.driver.declare(self._seats[rank])
        except PsdError:
            if self._config is self._first_config:
                raise
            self.end(is_killed=True)
            assert self.go_on(self._first_config)
            self.rejoin(rank)
        self._clocks[rank] = self._seats[rank].clock
        if rank in self._last and self._last[rank][0] >= self._clocks[rank]:
            del self._last[rank]  # it is another program, which begins with the slowest worker

    def rest(self, seconds: float) -> None:
        """Time passes, in which everybody is heard of."""
        self.driver.time.value += seconds
        for seat, clock in zip(self._seats, self._clocks, strict=True):
            self.driver.heartbeat(seat, clock)

    def leap(self, rank: int, steps: int) -> None:
        """A worker has made so many steps without gradients; in a synchronous job all have, or rounds would wait. With exact
        aggregation nobody does: each round is decided."""
        if self._spec.aggregation == "exact":
            return
        everybody = range(len(self._seats)) if self._has_rounds else [rank]
        clock = max(self._clocks[each] for each in everybody) + steps
        for each in everybody:
            self.driver.heartbeat(self._seats[each], clock)
            self._clocks[each] = clock
            self._last.pop(each, None)

    def batch(self, rank: int) -> None:
        """A new batch on the vector."""
        if self.has_vectors:
            number = 2 if self._batches[rank] is None else self._batches[rank][1] + 1
            session = self._seats[rank].session
            if self._batches[rank] is None or self._batches[rank][0] != session:
                self._begun_at[rank] = number
            self._batches[rank] = session, number
            self.run += 1
            self.batch_again(rank)

    def batches(self, rank: int, count: int) -> None:
        """Some new batches, one after the other."""
        for _ in range(count):
            self.batch(rank)

    def late(self, rank: int, ago: int) -> None:
        """An earlier batch comes once more: it is answered, or so old that it is refused, and does not run."""
        if self._batches[rank] is None or self._batches[rank][1] - ago < self._begun_at[rank]:
            return
        try:
            self.batch_again(rank, ago)
        except PsdError:
            assert ago >= _KEPT

    def batch_again(self, rank: int, ago: int = 0) -> None:
        """The last batch, or one of those before, comes, perhaps once more, under the name that it had."""
        if self._batches[rank] is None:
            return
        session, number = self._batches[rank][0], self._batches[rank][1] - ago
        add = vectors_pb2.VectorOperation(operator=KINDS["add"].number, out=0, count=SIZE)
        request = vectors_pb2.VectorBatch(
            caller=self._seats[rank].caller, session=session, seq=number, vectors=[VECTOR], operations=[add]
        )
        self.driver.shard.vectors.run(request, memoryview(np.ones(SIZE).tobytes()))

    @property
    def _has_rounds(self) -> bool:
        return self._spec.consistency.has_rounds

    def _change(self, seat: Seat) -> vectors_pb2.VectorChange:
        return vectors_pb2.VectorChange(caller=seat.caller, seq=1, vector=VECTOR)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each gradient counts once: in the block, in the rows that all have, and each batch in the vector."""
        assert self.driver.values() == [-float(self.pushed)] * 3
        for table in range(2):
            counted = self.driver.rows(table, HOT)
            if self._has_room:
                assert counted == [-float(self.pushed)] * 2, f"table {table}"
            assert all(-self.pushed <= count <= 0 for count in counted)
            store = self.driver.core.declared().tables.partitions[table].store
            with closing(store.snapshot()) as snapshot:
                assert sum(len(batch[0]) for batch in snapshot) == store.counters()["rows"], f"table {table}, stored whole"
        if self.has_vectors:
            asked = vectors_pb2.VectorFetch(run_id=self.driver.core.run_id, vector=VECTOR, stop=SIZE)
            assert self.driver.shard.vectors.fetch(asked).tolist() == [float(self.run)] * SIZE


_OWN = ("shard_index", "shard_count")
