"""Checkpoints of running jobs with tables: they go on from the last one, on any number of shards, with all rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState

IDS = np.arange(4000)
TABLES = [
    psd_client.Table("user", 3, psd_client.Adam(lr=0.1), init=psd_client.Normal(0.1), seed=5),
    psd_client.Table("item", 2, psd_client.SGD(lr=0.1, momentum=0.9), updates="catch_up"),
]


def declare(ps: Any, **arguments: Any) -> Any:
    return ps.declare({"w": np.zeros(5, np.float32)}, psd_client.SGD(lr=0.5), tables=TABLES, **arguments)


def step(ps: Any) -> None:
    """Few rows of "user", others in each step, all of them in the first two; and some of "item", which catch up."""
    rng = np.random.default_rng(ps.clock)
    users = IDS if ps.clock < 2 else rng.integers(0, len(IDS), 40)
    grads = rng.standard_normal((len(users), 3)).astype(np.float32)
    items = np.arange(7)[ps.clock % 5 :]
    of_items = np.full((len(items), 2), ps.clock, np.float32)
    ps.push_pull({"w": np.ones(5, np.float32)}, tables={"user": (users, grads), "item": (items, of_items)})


def rows(ps: Any) -> list[bytes]:
    return [ps.tables["user"].pull(IDS, counts_no_use=True).tobytes(), ps.tables["item"].pull(np.arange(9)).tobytes()]


def train(servers: str, until: int, **arguments: Any) -> list[bytes]:
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps:
        declare(ps, **arguments)
        while ps.clock < until:
            step(ps)
        return rows(ps)


@pytest.fixture(scope="module")
def undisturbed(module_cluster: Callable[..., Any]) -> list[bytes]:
    """The rows after 16 steps in one go."""
    return train(module_cluster(2).servers, 16)


@pytest.mark.parametrize(("stored_on", "restored_on"), [(1, 3), (3, 2), (2, 2)])
def test_tables_go_on_from_a_checkpoint_on_any_number_of_shards(
    cluster: Callable[..., Any], tmp_path: Path, undisturbed: list[bytes], stored_on: int, restored_on: int
) -> None:
    """8 steps, a checkpoint at the end, 8 more steps elsewhere: the same bits as 16 in one go, slots and steps included.

    An export has what a worker would read, also of rows that have not caught up.
    """
    url = str(tmp_path / "checkpoints")
    first = cluster(stored_on, checkpoint_dir=url)
    after_8 = train(first.servers, 8)[1][: 7 * 2 * 4]
    first.finish()

    directory = CheckpointDirectory(url)
    directory.export(directory.newest(), str(tmp_path / "model.safetensors"))
    assert train(cluster(restored_on, checkpoint_dir=url).servers, 16) == undisturbed
    exported = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert exported["item.rows"][np.argsort(exported["item.ids"])].tobytes() == after_8


def test_all_roll_back_to_a_checkpoint_that_builds_on_another(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """A shard has lost its memory; the checkpoint has the rows that have changed since the one that is whole."""
    url = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 4, "checkpoint_keep": 1}
    running = cluster(2, **settings)
    gone_back = []

    def is_settled(shard: Any) -> bool:
        return not shard.shard.cuts.unwritten and shard._checkpointer._bases._latest is None

    def valid() -> list[Any]:
        return [info for info in CheckpointDirectory(url).checkpoints() if info.state is CheckpointState.VALID]

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        declare(ps)
        while not any(info.base for info in valid()):
            step(ps)
            while not all(map(is_settled, running.shards)):
                ps.barrier("until it is stored, and known to be valid")
        changed, *whole_ones = valid()
        whole = next(info for info in whole_ones if info.name == changed.base)
        assert [info.base for info in whole_ones] == [""] * len(whole_ones)
        assert changed.nbytes < whole.nbytes / 2
        until = ps.clock + 6
        running.shards[1].stop()
        cluster(2, only=1, listen=running.shards[1].address, **settings)
        while ps.clock < until:
            try:
                step(ps)
            except psd_client.RolledBack as error:
                gone_back.append(error.detail["step"])
        found = rows(ps)

    assert gone_back == [changed.step]
    assert found == train(cluster(2).servers, until)


def test_a_push_that_meets_the_return_counts_once_when_it_comes_again(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Without rounds. A restored job has no dedup window of tables, nor of blocks: no session goes on, and the push is new."""
    url = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 4, "lease_s": 60}
    running = cluster(2, **settings)
    rows = {"count": (IDS, np.ones((len(IDS), 2), np.float32))}
    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        ps.declare({}, consistency="async", tables=[psd_client.Table("count", 2, psd_client.SGD(lr=1.0))])
        while not CheckpointDirectory(url).newest():
            ps.push_pull({}, tables=rows)
            ps.barrier("perhaps a checkpoint")
        running.shards[1].stop()
        cluster(2, only=1, listen=running.shards[1].address, **settings)
        with pytest.raises(psd_client.RolledBack) as back:
            while True:
                ps.push_pull({}, tables=rows)
        ps.push_pull({}, tables=rows)

        assert ps.clock == back.value.detail["step"] + 1
        assert (ps.tables["count"].pull(IDS) == -ps.clock).all()


def test_a_job_begins_with_the_rows_of_a_file_and_slots_anew(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """By --parameters-only: rows that are not in the file begin as the table says."""
    file = tmp_path / "start.safetensors"
    values = np.random.default_rng(1).standard_normal((3000, 3)).astype(np.float32)
    none = {"item.ids": np.empty(0, np.int64), "item.rows": np.empty((0, 2), np.float32), "w": np.ones(5, np.float32)}
    safetensors.numpy.save_file({"user.ids": IDS[:3000], "user.rows": values, **none}, file)
    plain = cluster(1)
    with psd_client.connect(plain.servers, 0, 1) as ps:
        declare(ps)
        fresh = ps.tables["user"].pull(IDS)

    with psd_client.connect(cluster(3, from_checkpoint=str(file), parameters_only=True).servers, 0, 1) as ps:
        declare(ps)
        begun = ps.tables["user"].pull(IDS)
        step(ps)
        stepped = ps.tables["user"].pull(IDS)

    np.testing.assert_array_equal(begun[:3000], values)
    np.testing.assert_array_equal(begun[3000:], fresh[3000:])
    np.testing.assert_allclose(np.abs(stepped - begun), 0.1, rtol=1e-3)  # Adam's first step


def test_tables_that_are_not_the_checkpoints_are_refused(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """The message names the table and the first difference."""
    url = str(tmp_path / "checkpoints")
    first = cluster(1, checkpoint_dir=url)
    train(first.servers, 1)
    first.finish()

    with (
        psd_client.connect(cluster(1, checkpoint_dir=url).servers, 0, 1) as ps,
        pytest.raises(psd_client.SpecMismatch, match=r"seed of table 'user': 5 in checkpoint .*, 6 in this worker's"),
    ):
        other = psd_client.Table("user", 3, psd_client.Adam(lr=0.1), init=psd_client.Normal(0.1), seed=6)
        ps.declare({"w": np.zeros(5, np.float32)}, psd_client.SGD(lr=0.5), tables=[other, TABLES[1]])
