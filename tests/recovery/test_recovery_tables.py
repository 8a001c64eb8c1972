"""Tables and a tensor beside them, trained with integers: whatever dies, each row is the sum of all pushes to it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from chaos import run_disturbed, steps_for
from numpy.typing import NDArray
from proxy import DIRECTIONS
from shard_processes import ShardProcess

import psd_client

pytestmark = pytest.mark.process

DIM = 16
WORLD_SIZE = 3
PER_STEP = 800


def gradient(rows: int, rank: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids from all over the 64 bits, some far more often than others; small integers, whose sums are exact in float32."""
    rng = np.random.default_rng((rank, step))
    numbers = np.where(rng.random(PER_STEP) < 0.25, rng.zipf(1.5, PER_STEP), rng.integers(0, rows, PER_STEP)) % rows
    return ids_of(numbers), rng.integers(-5, 6, (PER_STEP, DIM)).astype(np.float32)


def ids_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers * 0x5851F42D4C957F2D  # odd: no two have the same


@contextmanager
def breaking(barrier: threading.Barrier) -> Iterator[None]:
    """Let nobody wait at a barrier for a worker that fails. How long the others take depends on the machine."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def work(
    servers: str,
    rank: int,
    on_step: Callable[[], bool],
    *,
    transport: str,
    rows: int,
    steps: int,
    pushed: threading.Barrier,
    **options: Any,
) -> tuple[set[float], NDArray[Any]]:
    """Trains and, when all workers have, pulls what there is: the tensor's values, and all rows."""
    with breaking(pushed), psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60) as ps:
        table = psd_client.Table("t", DIM, psd_client.SGD(lr=1.0))
        ps.declare({"w": np.zeros(3)}, psd_client.SGD(lr=1.0), reduce="sum", tables=[table], **options)
        for step in range(steps):
            ids, grads = gradient(rows, rank, step)
            if step % 2:
                ps.push({"w": np.ones(3)}, tables={"t": (ids, grads)})
                grads[:] = 1e6  # it is the program's again
            else:
                ps.tables["t"].pull(ids)
                ps.push_pull({"w": np.ones(3)}, tables={"t": (ids, grads)})
            on_step()
        ps.pull()
        pushed.wait()
        return set(ps.pull()["w"].tolist()), ps.tables["t"].pull(ids_of(np.arange(rows)))


@pytest.mark.parametrize(
    ("transport", "consistency", "rows", "kills", "faults"),
    [
        pytest.param("tcp", "sync", 1000, 2, 3, id="short"),
        pytest.param("tcp", "async", 100_000, 40, 30, id="large", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)]),
    ],
)
def test_when_shards_are_killed_and_connections_break_then_every_row_is_exact(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, consistency: str, rows: int, kills: int, faults: int
) -> None:
    """No gradient of a row is lost, and none is counted twice. Of many rows, too: a table that grows while it is killed."""
    shards, steps = shard_processes(2, "--lease", "60"), steps_for(kills, faults)
    doing = functools.partial(work, rows=rows, steps=steps, pushed=threading.Barrier(WORLD_SIZE), consistency=consistency)

    results = run_disturbed(
        shards, WORLD_SIZE, doing, transport=transport, seed=50, kills=kills, faults=faults, directions=DIRECTIONS
    )

    expected = np.zeros((rows, DIM), np.float32)
    row_of = {number: row for row, number in enumerate(ids_of(np.arange(rows)).tolist())}
    for rank in range(WORLD_SIZE):
        for step in range(steps):
            ids, grads = gradient(rows, rank, step)
            np.subtract.at(expected, [row_of[number] for number in ids.tolist()], grads)
    for of_tensor, of_table in results:
        assert of_tensor == {-1.0 * WORLD_SIZE * steps}
        np.testing.assert_array_equal(of_table, expected)
