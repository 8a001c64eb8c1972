"""Parameters that come as differences: every worker has the bits of the shards' copy, whatever is lost, late or restarted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, until
from numpy.typing import NDArray

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidTensor, RolledBack
from psd_client import SGD, ParameterServer, Table, connect
from psd_client.lanes.held import HeldParameters
from psd_core import codecs

SIZE = 40_000
STEPS = 6
LR = np.float32(0.125)
ALL = 4 * SIZE


def initial() -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(SIZE, np.float32)


def gradient(step: int, rank: int = 0) -> dict[str, NDArray[Any]]:
    """Sums of them are exact, in any order."""
    return {"w": np.random.default_rng([step, rank]).integers(-200, 200, SIZE).astype(np.float32) / 64}


def declare(ps: ParameterServer, codec: str = "int4", **job: Any) -> NDArray[np.float32]:
    found: NDArray[np.float32] = ps.declare({"w": initial()}, SGD(lr=float(LR)), pull=codec, **job)["w"]
    return found


def masters(steps: int = STEPS, workers: int = 1, first: int = 0) -> list[NDArray[np.float32]]:
    """The shards' parameters after each step."""
    values = [initial()]
    for step in range(first, first + steps):
        total = np.zeros(SIZE, np.float32)
        for rank in range(workers):
            total += gradient(step, rank)["w"]
        values.append(values[-1] - LR * (total * np.float32(1 / workers)))
    return values


def shown(codec: str = "int4", steps: int = STEPS, workers: int = 1) -> NDArray[np.float32]:
    """What workers have after these steps. Blocks are multiples of what shares a scale, so that they need not be known."""
    before, *others = masters(steps, workers)
    for values in others:
        after = np.empty(SIZE, np.float32)
        assert codecs.follow(codec, values, before, after) is not None
        before = after
    return before


def received(ps: ParameterServer, call: Callable[[], Any]) -> int:
    before = ps.stats()["received_bytes"]
    call()
    return int(ps.stats()["received_bytes"] - before)


def read(servers: str) -> NDArray[np.float32]:
    with connect(servers, role="reader") as reader:
        found: NDArray[np.float32] = reader.pull()["w"]
    return found


def difference_bytes(ps: ParameterServer, codec: str) -> int:
    blocks = ps._worker.gradients.layout.blocks
    return sum(codecs.encoded_bytes(codec, block.length) for block in blocks)


@pytest.mark.parametrize("codec", codecs.DIFFERENCES)
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("shards", [1, 3])
def test_steps_then_all_workers_on_all_lanes_have_the_same_bits_and_the_shards_keep_all(
    cluster: Callable[..., Any], codec: str, aggregation: str, shards: int
) -> None:
    """Each worker has a lane of its own."""
    servers = cluster(shards).servers

    def work(rank: int, transport: str) -> list[NDArray[Any]]:
        with connect(servers, rank, 3, transport=transport, wait_timeout=120) as ps:
            found = [np.array(declare(ps, codec, aggregation=aggregation))]
            found += [np.array(ps.push_pull(gradient(step, rank))["w"]) for step in range(STEPS)]
            ps.barrier("read")
            return [*found, read(servers)]

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(work, range(3), ("shm", "tcp", "grpc"))

    np.testing.assert_array_equal(first[0], initial())
    np.testing.assert_array_equal(first[-2], shown(codec, workers=3))
    np.testing.assert_array_equal(first[-1], masters(workers=3)[-1])
    for mine, other, another in zip(first, second, third, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(mine, another)


@pytest.mark.parametrize(("codec", "share"), [("int8", 4), ("int4", 8), ("int4log", 8)])
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_step_then_it_receives_as_many_bytes_as_its_difference_has(
    cluster: Callable[..., Any], codec: str, share: int, transport: str
) -> None:
    """All numbers come once; when nothing has changed, none come."""
    with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
        assert received(ps, lambda: declare(ps, codec)) == ALL
        per_step = [received(ps, lambda step=step: ps.push_pull(gradient(step))) for step in range(3)]  # type: ignore[misc]
        again = received(ps, ps.pull)
        found = ps.pull()["w"]

    assert per_step == [difference_bytes(ps, codec)] * 3
    assert per_step[0] < 1.03 * ALL / share
    assert again == 0
    np.testing.assert_array_equal(found, shown(codec, 3))


def test_a_thousand_rounds_then_no_worker_has_drifted(job: Restartable) -> None:
    """With the coarsest codec. A shard is restarted amid them, and a worker begins anew: neither leaves a trace in the bits."""
    codec, rounds, size = "int4", 1000, 3000
    values = np.random.default_rng(3).standard_normal(size, np.float32)

    def step(ps: ParameterServer, number: int) -> NDArray[np.float32]:
        drawn = np.random.default_rng(number).standard_normal(size, np.float32)
        found: NDArray[np.float32] = ps.push_pull({"w": drawn})["w"]
        return found

    def begin(ps: ParameterServer) -> None:
        ps.declare({"w": values}, SGD(lr=0.01), pull=codec)

    with connect(job.servers, 0, 1, transport="tcp") as ps:
        begin(ps)
        for number in range(rounds // 2):
            step(ps, number)
        job.restart(1)
        for number in range(rounds // 2, rounds - 100):
            step(ps, number)
    with connect(job.servers, 0, 1, transport="grpc") as ps:
        begin(ps)
        for number in range(rounds - 100, rounds):
            found = step(ps, number)
        master = read(job.servers)

    expected, before = values.copy(), values.copy()
    for number in range(rounds):
        expected -= np.float32(0.01) * np.random.default_rng(number).standard_normal(size, np.float32)
        after = np.empty(size, np.float32)
        codecs.follow(codec, expected, before, after)
        before = after
    np.testing.assert_array_equal(master, expected)
    np.testing.assert_array_equal(found, before)
    assert np.abs(found - master).max() < 0.01 * 5 / 7  # within a step of one update


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_and_pull_when_a_shard_is_restarted_after_each_then_the_bits_are_the_same(
    job: Restartable, transport: str, aggregation: str
) -> None:
    """The copy is in the page of each version; another process knows no difference, and sends all numbers."""
    with connect(job.servers, 0, 1, transport=transport) as ps:
        declare(ps, aggregation=aggregation)
        for step in range(STEPS):
            ps.push(gradient(step))
            job.restart(step % 2)
            found = ps.pull()["w"]

    np.testing.assert_array_equal(found, shown())


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_pull_when_the_reply_is_lost_then_no_difference_is_added_twice(
    cluster: Callable[..., Any], transport: str
) -> None:
    """The lane has taken the blocks when the reply is lost; the call is made again, and says what it holds."""
    ps, faults = connect_faulty(cluster(2).servers, transport=transport)
    with ps:
        declare(ps)
        for step in range(STEPS):
            faults.lose_reply("push_pull", shard=step % 2)
            found = ps.push_pull(gradient(step))["w"]

    np.testing.assert_array_equal(found, shown())
    faults.assert_all_fired()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_pull_when_the_reply_is_lost_and_the_shard_restarted_then_the_bits_are_the_same(
    job: Restartable, transport: str
) -> None:
    ps, faults = connect_faulty(job.servers, transport=transport)
    with ps:
        declare(ps)
        for step in range(STEPS):
            faults.lose_reply("push_pull", shard=step % 2, after=lambda step=step: job.restart(step % 2))
            found = ps.push_pull(gradient(step))["w"]

    np.testing.assert_array_equal(found, shown())
    faults.assert_all_fired()


def test_worker_when_it_joins_amid_the_job_then_it_gets_all_numbers_and_the_others_bits(cluster: Callable[..., Any]) -> None:
    servers = cluster(2).servers
    with connect(servers, 0, 2, transport="tcp") as first:
        declare(first, quorum=1)
        for step in range(3):
            mine = first.push_pull(gradient(step))["w"]
        with connect(servers, 1, 2, transport="grpc") as late:
            assert received(late, lambda: declare(late, quorum=1)) == ALL
            other = late.pull()["w"]

    np.testing.assert_array_equal(mine, shown(steps=3))
    np.testing.assert_array_equal(other, mine)


def test_worker_when_it_is_more_than_a_round_behind_then_it_gets_all_numbers(cluster: Callable[..., Any]) -> None:
    """The shards keep one difference."""
    servers = cluster(2).servers
    with connect(servers, 0, 2, transport="tcp") as first, connect(servers, 1, 2, transport="tcp") as late:
        declare(first, quorum=1)
        declare(late, quorum=1)
        first.push_pull(gradient(0))
        assert received(late, late.pull) == difference_bytes(late, "int4")  # it was not in the round, but has what was before
        for step in range(1, 3):
            first.push_pull(gradient(step))
        late_bytes = received(late, lambda: late.push_pull(gradient(0, 1)))
        assert late.stats()["blocks_late"] > 0
        found = late.pull()["w"]

    assert late_bytes >= ALL
    np.testing.assert_array_equal(found, shown(steps=3))


def test_job_when_it_goes_back_then_all_begin_with_the_masters_again(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """What workers held was of versions that are not any more."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 5, "lease_s": 60}
    job = cluster(2, **settings)
    with connect(job.servers, 0, 1, transport="tcp") as ps:
        declare(ps)
        for step in range(8):
            ps.push_pull(gradient(step))
        until(lambda: CheckpointDirectory(settings["checkpoint_dir"]).newest() is not None)
        job.shards[1].stop()
        job.shards[1] = cluster(2, only=1, listen=job.shards[1].address, **settings).shards[0]
        with pytest.raises(RolledBack):
            ps.push_pull(gradient(8))
        clock = ps.clock
        before = ps.pull()["w"].copy()
        after = ps.push_pull(gradient(clock))["w"]

    expected = masters(clock)[-1]
    np.testing.assert_array_equal(before, expected)
    following = np.empty(SIZE, np.float32)
    codecs.follow("int4", expected - LR * gradient(clock)["w"], expected, following)
    np.testing.assert_array_equal(after, following)


@pytest.mark.parametrize("codec", ["int8", None])
def test_restore_when_the_shards_and_the_form_are_others_then_it_begins_with_the_masters(
    cluster: Callable[..., Any], tmp_path: Path, codec: str | None
) -> None:
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 3}
    job = cluster(3, **settings)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        for step in range(3):
            ps.push_pull(gradient(step))
    job.finish()

    with connect(cluster(1, **settings).servers, 0, 1) as ps:
        found = ps.declare({"w": initial()}, SGD(lr=float(LR)), pull=codec)["w"].copy()
        assert ps.clock == 3

    np.testing.assert_array_equal(found, masters(3)[-1])


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_parameters_when_they_are_loaded_amid_the_job_then_all_have_them_and_go_on_from_them(
    cluster: Callable[..., Any], transport: str
) -> None:
    """The version stays, and is another one: a difference to it would be added to what was there before."""
    servers = cluster(2).servers

    def work(rank: int) -> list[NDArray[Any]]:
        with connect(servers, rank, 2, transport=transport, wait_timeout=120) as ps:
            declare(ps, "int8")
            ps.push_pull(gradient(0, rank))
            found = [np.array(ps.load_parameters({"w": 2 * initial()})["w"])]
            return found + [np.array(ps.push_pull(gradient(step, rank))["w"]) for step in range(3)]

    with ThreadPoolExecutor(2) as pool:
        mine, other = pool.map(work, range(2))

    before = values = 2 * initial()
    np.testing.assert_array_equal(mine[0], before)
    for step, found in enumerate(mine[1:]):
        total = gradient(step, 0)["w"] + gradient(step, 1)["w"]
        values = values - LR * (total * np.float32(0.5))
        after = np.empty(SIZE, np.float32)
        codecs.follow("int8", values, before, after)
        np.testing.assert_array_equal(found, after)
        before = after
    np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_parameters_when_the_program_changes_them_then_the_next_ones_are_right(
    cluster: Callable[..., Any], transport: str
) -> None:
    """They are lent, and it keeps them: a difference is added to what came, not to what the program has made of it."""
    size, kept = 400_000, []
    with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
        values = np.linspace(-1, 1, size, dtype=np.float32)
        kept.append(ps.declare({"w": values}, SGD(lr=1.0), pull="int8")["w"])
        for _ in range(4):
            kept[-1][:] = 7
            kept.append(ps.push_pull({"w": np.full(size, 0.25, np.float32)})["w"])

    np.testing.assert_allclose(kept[-1], values - 1, atol=0.01)
    assert all((array == 7).all() for array in kept[:-1])


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_parameters_when_they_are_views_of_one_memory_then_differences_go_on(
    cluster: Callable[..., Any], transport: str
) -> None:
    with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": initial()}, SGD(lr=float(LR)), pull="int4", copy=False)
        for step in range(STEPS):
            found = ps.push_pull(gradient(step))["w"]
        np.testing.assert_array_equal(found, shown())
        assert not found.flags.writeable


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_parameters_when_there_are_others_then_differences_are_of_masters_of_float32_alone(
    cluster: Callable[..., Any], transport: str
) -> None:
    """Also of 16-bit tensors. Those of float64, and rows, come as they are."""
    size, ids = 5000, np.arange(30, dtype=np.uint64)
    with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
        values = {"half": np.ones(size, np.float16), "wide": np.ones(size)}
        ps.declare(values, SGD(lr=1.0), pull="int8", tables=[Table("rows", 3, SGD(lr=1.0))])
        few = []
        for _ in range(3):
            grads = {"half": np.full(size, 0.25, np.float16), "wide": np.full(size, 1 / 3)}
            rows = {"rows": (ids, np.full((30, 3), 0.1, np.float32))}
            few.append(received(ps, lambda grads=grads, rows=rows: ps.push_pull(grads, tables=rows)))  # type: ignore[misc]
        found, pulled = ps.pull(), ps.tables["rows"].pull(ids)

    assert max(few) <= codecs.encoded_bytes("int8", size) + 8 * size + 2 * 20
    assert found["half"].dtype == np.float16
    np.testing.assert_allclose(found["half"].astype(np.float32), 0.25, atol=0.002)
    np.testing.assert_allclose(found["wide"], 0, atol=1e-15)
    np.testing.assert_allclose(pulled, -0.3, atol=1e-6)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_parameters_when_they_are_not_finite_then_they_come_as_they_are_and_differences_go_on_later(
    cluster: Callable[..., Any], transport: str
) -> None:
    with connect(cluster(1).servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.full(2000, 3e38, np.float32)}, SGD(lr=1.0), pull="int8")
        assert (ps.push_pull({"w": np.full(2000, -3e38, np.float32)})["w"] == np.inf).all()
        ps.load_parameters({"w": np.zeros(2000, np.float32)})
        for _ in range(2):
            found = ps.push_pull({"w": np.full(2000, -127, np.float32)})["w"]

    np.testing.assert_array_equal(found, np.full(2000, 254, np.float32))


def test_blocks_when_their_difference_is_malformed_then_its_field_is_named_and_nothing_is_held_any_more(
    cluster: Callable[..., Any],
) -> None:
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        declare(ps, "int8")
        places = ps._worker.declared.places
    held, buffers = places.held, places.current
    assert isinstance(held, HeldParameters)
    assert len(buffers.layout.blocks) == 1
    sound = codecs.encode("int8", np.ones(SIZE, np.float32)).tobytes()
    before = buffers.block(0).copy()
    for payload, base, message in (
        (b"\xff\xff" + sound[2:], 1, "block 0: payload in int8: scale: expected 0 or a number from"),
        (sound, 1, "block 0: base: 1 was sent, and 0 is held"),
        (sound[:-1], 0, f"block 0: payload has {len(sound) - 1} bytes"),
        (sound, 0, f"block 0: payload has {len(sound)} bytes"),
    ):
        with pytest.raises(InvalidTensor, match=message):
            buffers.fill(0, memoryview(payload), base, 5)
    np.testing.assert_array_equal(buffers.block(0), before)

    buffers.fill(0, memoryview(before.tobytes()), 0, 5)
    buffers.fill(0, memoryview(sound), 6, 9)
    buffers.fill(0, memoryview(b""), 10, 11)
    np.testing.assert_allclose(buffers.block(0), before + 1, rtol=1e-2, atol=1e-2)
    with pytest.raises(InvalidTensor, match="base: 11 was sent, and 12 is held"):
        buffers.fill(0, memoryview(sound), 11, 12)
