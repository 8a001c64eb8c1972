"""Tables in the simulated world: what workers push of rows, shards that die between the transactions of two tables, the oracle.

On each shard a push has its value in a row that all pushes have, and in one of its rank alone: a row's sum says what is in it.
The oracle follows each table's part on each shard by itself, since after a death one may be a version ahead of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from shard_driver import Fuse, Killed
from simulated_settlement import Counted, Sent

from psd.contract.rows import TableRows, parts_of
from psd.state.shard import Shard
from psd.v1 import data_pb2
from psd_core.distinct import shard_of
from psd_core.table import CRASH_POINTS, TableStore

if TYPE_CHECKING:
    from simulation import Simulation


class ArenaFuse(Fuse):
    """A crash point of the arena's, and of what lies between two tables' transactions. Nothing can be raised in their C code;
    tests/core kills there."""

    def __call__(self, point: str) -> None:
        if point not in CRASH_POINTS:
            super().__call__(point)


class MortalStore:
    """A table's store whose process may die before and after each of its transactions."""

    def __init__(self, store: TableStore, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self) -> None:
        self._fuse("table.before")
        self._store.commit()
        self._fuse("table.after")


class SimulatedTables:
    """The tables' part of one world, and of its oracle.

    Attributes:
        ids: by shard, the row of all ranks, and then each rank's.
    """

    def __init__(self, world: Simulation) -> None:
        self.world = world
        candidates = np.arange(1000, dtype=np.uint64)
        owners = shard_of(candidates, len(world.shards))
        self.ids = [candidates[owners == shard][: 1 + world.spec.world_size] for shard in range(len(world.shards))]
        self.counted: dict[tuple[int, int], list[Counted]] = defaultdict(list)  # by shard and table
        self.floors: dict[tuple[int, int], int] = defaultdict(int)  # rounds below them were there when the shard came back
        self.in_flight: dict[int, Counted] = {}  # by shard, what its tables' block was doing when it died
        self.reads = self.apart = 0

    # -- what workers do --

    def frame(self, shard: int, rank: int, sent: Sent) -> tuple[list[data_pb2.RowsPart], memoryview]:
        """A push's rows of a shard. Its rank's own row comes twice, each time with a half."""
        index = self.world.layout.tables_block(shard)
        assert index is not None
        keys = self.ids[shard][[1 + rank, 0, 1 + rank]]
        rows = []
        for table, spec in enumerate(self.world.spec.tables):
            values = np.full((3, spec.dim), sent.value + index + table, np.float32)
            values[[0, 2]] /= 2
            rows.append(TableRows(table, keys, values))
        payload = b"".join([each.ids.tobytes() for each in rows] + [each.values.tobytes() for each in rows])
        return parts_of(rows), memoryview(payload)

    def make_mortal(self, index: int, shard: Shard) -> None:
        """From now on the shard may die between its tables' transactions."""
        tables = shard._core.declared().tables
        assert tables is not None
        for partition in tables.partitions:
            if not isinstance(partition.store, MortalStore):
                partition.store = MortalStore(partition.store, self.world.fuses[index])  # type: ignore[assignment]

    @contextmanager
    def counting(self, index: int, part: Counted) -> Iterator[Counted]:
        """A shard's tables are being offered a gradient; if it dies meanwhile, `on_restart` finds out where it was counted."""
        try:
            yield part
        except Killed:
            self.in_flight[index] = part
            raise
        if part.is_counted:
            for table, _ in enumerate(self.world.spec.tables):
                self._count(index, table, part)

    def _count(self, index: int, table: int, part: Counted) -> None:
        known = self.counted[index, table]
        if self.world.has_rounds:
            if part.clock < self.floors[index, table]:
                return  # that table is ahead
            same = [c for c in known if (c.rank, c.clock) == (part.rank, part.clock)]
            assert not same, f"shard {index}, table {table}: worker {part.rank} counted twice in round {part.clock}"
        elif any((c.rank, c.session, c.clock) == (part.rank, part.session, part.clock) for c in known):
            return
        known.append(part)

    def on_restart(self, index: int, shard: Shard) -> None:
        """The shard is back: what each table's transactions have brought counts, what was in the open round does not."""
        part = self.in_flight.pop(index, None)
        tables = shard._core.declared().tables
        assert tables is not None
        self.apart += len({partition.version for partition in tables.partitions}) > 1
        for table, partition in enumerate(tables.partitions):
            key = index, table
            if part is not None and partition.counted(part.rank) == (part.session, part.clock + 1):
                known = {(c.rank, c.session, c.clock) for c in self.counted[key]}
                if (part.rank, part.session, part.clock) not in known:
                    self.counted[key].append(part)
            assert partition.version >= self.floors[key], f"shard {index}, table {table}: version went back over a restart"
            if self.world.has_rounds:
                self.floors[key] = partition.version
                self.counted[key] = [c for c in self.counted[key] if c.clock < partition.version]

    # -- what must be --

    def check_rows(self, index: int, shard: Shard, clock: int, version: int) -> None:
        """All rows of a shard are those of what its tables have counted, after a worker has waited for its clock."""
        tables = shard._core.declared().tables
        assert tables is not None
        self.reads += 1
        if self.world.has_rounds:
            assert version >= clock, f"shard {index}: a worker at clock {clock} read rows of version {version}"
        for table, partition in enumerate(tables.partitions):
            assert partition.version >= version, f"shard {index}: table {table} is behind the tables' block"
            found = partition.store.read(self.ids[index])
            expected = self._expected(index, table, partition.version)
            assert np.allclose(found, expected[:, None], rtol=1e-4, atol=1e-3), (
                f"shard {index}, table {table}, version {partition.version}: {found[:, 0]}, not {expected}"
            )

    def _expected(self, index: int, table: int, version: int) -> NDArray[np.float64]:
        world, values = self.world, np.zeros(len(self.ids[index]))
        is_mean = world.spec.reduction == "mean" and world.has_rounds
        for parts, scale in self._updates(index, table, version):
            total = sum(weight for _, weight, _ in parts) if is_mean else 1.0
            for rank, weight, value in parts:
                values[[0, 1 + rank]] -= scale * value * (weight if is_mean else 1.0) / total
        return values

    def _updates(self, index: int, table: int, version: int) -> Iterator[tuple[list[tuple[int, float, float]], float]]:
        """Of each update rank, weight and value of its gradients, and what it is multiplied by."""
        world, oracle, counted = self.world, self.world.oracle, self.counted[index, table]
        block = world.layout.tables_block(index)
        assert block is not None
        if world.is_exact:
            world.learn_decisions()
            for round_ in range(version):
                assert round_ in oracle.decided, f"shard {index}, table {table} closed round {round_}, which nobody has decided"
                members = oracle.members(round_)
                yield [(r, m.weight, m.value + block + table) for r, m in members if m.weight], oracle.scale(round_)
        elif world.has_rounds:
            for round_ in range(version):
                yield [(c.rank, c.weight, c.value + table) for c in counted if c.clock == round_ and c.weight], 1.0
        else:
            assert version == len(counted), f"shard {index}, table {table}: version {version}, and {len(counted)} pushes"
            yield [(c.rank, c.weight, c.value + table) for c in counted if c.weight], 1.0

    def squares(self, members: list[tuple[int, Sent]]) -> Fraction:
        """Of a round's gradient, over all rows: exact, but for the rounding of each row's."""
        world, found = self.world, Fraction(0)
        is_mean = world.spec.reduction == "mean"
        parts = [(rank, sent.weight if is_mean else 1.0, sent.value) for rank, sent in members if sent.weight]
        total = sum(weight for _, weight, _ in parts) if is_mean else 1.0
        for index in range(len(world.shards)):
            block = world.layout.tables_block(index)
            assert block is not None
            for table, spec in enumerate(world.spec.tables):
                of_ranks = [weight * (value + block + table) / total for _, weight, value in parts]
                found += spec.dim * sum(Fraction(value) ** 2 for value in [*of_ranks, sum(of_ranks)])
        return found

    def check_end(self, everything: set[tuple[int, int]] | None) -> None:
        """What is left when everybody has left. everything: rank and clock of all pushes, if all must count."""
        world = self.world
        for index, shard in enumerate(world.shards):
            assert shard is not None
            tables = shard._core.declared().tables
            assert tables is not None
            self.check_rows(index, shard, 0, tables.version)
            for table, _ in enumerate(tables.partitions):
                found = {(c.rank, c.session, c.clock) for c in self.counted[index, table]}
                if not world.has_rounds:
                    assert world.oracle.acknowledged <= found, f"shard {index}, table {table}: a push was acknowledged and lost"
                if everything is not None and not world.is_exact:
                    assert {(r, c) for r, _, c in found} == everything, f"shard {index}, table {table}: gradients were lost"
