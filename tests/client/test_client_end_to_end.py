"""A client and real shards: what a user does, and what he gets."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, connect_faulty, in_threads, until

import psd_client
from psd.contract.errors import (
    BarrierTimeout,
    InvalidRequest,
    InvalidTensor,
    NonFiniteGradient,
    NotDeclared,
    ScalarsDisagree,
    ShardUnavailable,
    SpecMismatch,
    WaitTimeout,
    WrongShard,
)
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd_client import SGD, ParameterServer, connect

Start = Callable[..., Any]


def declared(servers: str, rank: int = 0, world_size: int = 1, size: int = 20_000, **options: Any) -> ParameterServer:
    """A worker whose job has a vector `w` of zeros, over all shards, and a scalar `s` of zero."""
    ps = connect(servers, rank, world_size)
    ps.declare({"w": np.zeros(size, np.float32), "s": np.float32(0)}, SGD(lr=1.0), **options)
    return ps


def ones(size: int = 20_000, factor: float = 1) -> dict[str, Any]:
    return {"w": np.full(size, factor, np.float32), "s": np.float32(factor)}


@pytest.mark.parametrize("shard_count", [1, 2, 3])
def test_push_pull_when_all_workers_take_part_then_all_get_the_mean(cluster: Start, shard_count: int) -> None:
    """Synchronous: the update is the mean weighted by samples, and everybody sees the same parameters."""
    servers = cluster(shard_count).servers

    def work(rank: int) -> dict[str, Any]:
        with declared(servers, rank, 2) as ps:
            for _ in range(3):
                params = ps.push_pull(ones(factor=rank), weight=1 + 2 * rank)
            assert ps.clock == 3
            return params

    for params in in_threads(lambda: work(0), lambda: work(1)):
        np.testing.assert_allclose(params["w"], np.full(20_000, -3 * 0.75, np.float32))
        assert params["s"] == np.float32(-2.25)


def test_push_then_pull_when_synchronous_then_equals_push_pull(cluster: Start) -> None:
    """Two round trips instead of one; the same clock, the same parameters."""
    with declared(cluster(2).servers) as ps:
        ps.push(ones())
        assert ps.clock == 1
        first = ps.pull()
        second = ps.push_pull(ones())

    assert first["w"][0] == -1
    assert second["w"][-1] == -2


@pytest.mark.parametrize("consistency", ["async", "ssp:1"])
def test_push_pull_when_asynchronous_then_every_push_counts(cluster: Start, consistency: str) -> None:
    """Integer gradients and lr 1: the sum is exact for any interleaving."""
    servers = cluster(2).servers

    def work(rank: int) -> dict[str, Any]:
        with declared(servers, rank, 3, consistency=consistency, reduce="sum") as ps:
            for _ in range(10):
                ps.push_pull(ones())
            ps.barrier("done")
            return ps.pull()

    for params in in_threads(*[lambda rank=rank: work(rank) for rank in range(3)]):
        assert set(params["w"].tolist()) == {-30.0}


def test_declare_when_values_differ_then_the_first_ones_hold(cluster: Start) -> None:
    """Everybody gets the initializer's values, in all dtypes, on all shards; a later joiner gets the current ones."""
    servers = cluster(3).servers
    shapes = {"a": (300, 70), "b": (), "c": (0, 2), "d": (5,)}
    dtypes = {"a": np.float32, "b": np.float64, "c": np.float16, "d": np.float16}

    def work(rank: int) -> dict[str, Any]:
        values = {name: np.full(shape, rank + 1, dtypes[name]) for name, shape in shapes.items()}
        with connect(servers, rank, 3) as ps:
            return ps.declare(values, SGD(lr=1))

    results = in_threads(*[lambda rank=rank: work(rank) for rank in range(2)])
    results.append(work(2))

    initializer = results[0]["b"]
    for params in results:
        for name, array in params.items():
            assert (array.shape, array.dtype) == (shapes[name], dtypes[name])
            assert (array == initializer).all()


def test_declare_without_copies_when_parameters_are_pulled_then_the_same_arrays_change(cluster: Start) -> None:
    """They cannot be written to, and outlive the connection; float16, of which psd holds a float32 master, is copied."""
    values = {"w": np.ones((3, 5), np.float32), "h": np.ones(4, np.float16)}
    with connect(cluster(2).servers, 0, 1) as ps:
        declared = ps.declare(values, SGD(lr=1), copy=False)
        assert [params.tolist() for params in declared.values()] == [value.tolist() for value in values.values()]
        pulled = ps.push_pull({"w": values["w"], "h": values["h"]})

        assert np.shares_memory(declared["w"], pulled["w"])
        assert (declared["w"] == 0).all()
        assert (declared["h"].dtype, declared["h"][0], pulled["h"][0]) == (np.float16, 1, 0)
        with pytest.raises(ValueError, match="read-only"):
            pulled["w"][...] = 1
    assert (pulled["w"] == 0).all()


@pytest.mark.parametrize(("copy", "models"), [(False, 2), (True, 3)])
def test_memory_when_a_model_is_declared_and_pushed_then_there_are_so_many_of_it(
    cluster: Start, copy: bool, models: int
) -> None:
    """Besides the program's gradients: those that are sent, the parameters that it has, and those that it gets."""
    running = cluster(1)
    nbytes = 16 << 20
    values = {"w": np.ones(nbytes // 4, np.float32)}
    with connect(running.servers, 0, 1, transport="tcp") as ps:
        tracemalloc.start()
        try:
            params = ps.declare(values, SGD(lr=1), copy=copy)
            params = ps.push_pull(values)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert (params["w"] == 0).all()
    assert models * nbytes <= peak < (models + 0.9) * nbytes  # the shard's two scratch blocks are in this process, too


def test_push_when_a_gradient_is_absent_then_the_parameter_stays(cluster: Start) -> None:
    """Also where a former push has left numbers in the buffer."""
    with declared(cluster(2).servers) as ps:
        ps.push(ones())
        params = ps.push_pull({"s": np.float32(5)})
        assert (params["w"][0], params["s"]) == (-1, -6)
        params = ps.push_pull({})

    assert (params["w"][0], params["s"]) == (-1, -6)


def test_param_groups_when_lr_changes_then_takes_effect_at_the_next_push(cluster: Start) -> None:
    """As with torch's param_groups."""
    with connect(cluster(1).servers, 0, 1) as ps:
        ps.declare({"a": np.zeros(1), "b": np.zeros(1)}, SGD(lr=1.0), groups=[{"params": ["a"]}, {"params": ["b"], "lr": 10.0}])
        ps.push({"a": [1.0], "b": [1.0]})
        ps.param_groups[0]["lr"] = 0.5
        params = ps.push_pull({"a": np.ones(1), "b": np.ones(1)})

    assert (params["a"][0], params["b"][0]) == (-1.5, -20)


def test_barrier_when_workers_come_one_by_one_then_opens_for_all(cluster: Start) -> None:
    """The same name may be used again; before a declaration, too."""
    servers = cluster(2).servers

    def work(rank: int) -> int:
        with connect(servers, rank, 4) as ps:
            for _ in range(3):
                ps.barrier("epoch")
            return rank

    assert in_threads(*[lambda rank=rank: work(rank) for rank in range(4)]) == [0, 1, 2, 3]


def test_barrier_when_a_worker_stays_away_then_names_it(cluster: Start, impatient: Any) -> None:
    """The time-out says who is missing."""
    with connect(cluster(1).servers, 0, 2) as ps, impatient(), pytest.raises(BarrierTimeout, match="worker 1") as caught:
        ps.barrier("epoch")

    assert caught.value.detail["missing"] == [1]


def test_pull_when_a_round_stays_open_then_names_who_is_missing(cluster: Start, impatient: Any) -> None:
    """Never a silent hang: the wait ends at its deadline, with names; then the same call may be made again."""
    servers = cluster(2).servers
    other = Thread(lambda: declared(servers, 1, 2))
    with connect(servers, 0, 2) as ps:
        ps.declare({"w": np.zeros(20_000, np.float32), "s": np.float32(0)}, SGD(lr=1.0))
        ps.push(ones())
        with impatient(), pytest.raises(WaitTimeout, match="worker 1") as caught:
            ps.pull()
        assert caught.value.detail["missing"] == [1]

        with other.result() as peer:
            peer.push(ones())
            assert ps.pull()["w"][0] == -1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_push_when_a_gradient_is_not_finite_then_nothing_is_sent(cluster: Start, value: float) -> None:
    """Refused before the first byte; worker, tensor and step are named; training goes on."""
    with declared(cluster(2).servers) as ps:
        ps.push_pull(ones())
        before = ps.stats()
        with pytest.raises(NonFiniteGradient, match=r"worker 0: the gradient of 's' at step 1 holds NaN") as caught:
            ps.push_pull({"w": np.ones(20_000, np.float32), "s": np.float32(value)})
        assert caught.value.detail == {"rank": 0, "tensor": "s", "clock": 1}
        assert (ps.stats(), ps.clock) == (before, 1)
        params = ps.push_pull({"w": np.ones(20_000, np.float32)})  # without s, whose NaN still lies in the buffer

    assert (params["w"][0], params["s"]) == (-2, -1)


def test_declare_when_a_value_is_not_finite_then_refuses(cluster: Start) -> None:
    with connect(cluster(1).servers, 0, 1) as ps, pytest.raises(NonFiniteGradient, match="initial value of 'w'"):
        ps.declare({"w": np.array([1, np.nan])}, SGD(lr=1))


def test_declare_when_another_job_was_declared_then_names_the_difference(cluster: Start) -> None:
    servers = cluster(2).servers
    with declared(servers, 0, 2), connect(servers, 1, 2) as ps:
        with pytest.raises(
            SpecMismatch,
            match=r"parameter .* in the job, .* All workers of a job declare the same; to begin another job, start other",
        ):
            ps.declare({"w": np.zeros(7)}, SGD(lr=1))
        with pytest.raises(SpecMismatch, match="consistency"):
            ps.declare({"w": np.zeros(7)}, SGD(lr=1), consistency="async")


def test_push_when_workers_use_different_rates_then_one_is_told(cluster: Start) -> None:
    """One update cannot have two learning rates."""
    servers = cluster(1).servers

    def work(rank: int) -> str:
        with declared(servers, rank, 2) as ps:
            ps.param_groups[0]["lr"] = 1.0 + rank
            try:
                ps.push(ones())
            except ScalarsDisagree:
                return "told"
            return "counted"

    assert sorted(in_threads(lambda: work(0), lambda: work(1))) == ["counted", "told"]


def test_connect_when_servers_are_in_the_wrong_order_then_says_so(cluster: Start) -> None:
    servers = cluster(2).servers.split(",")
    with pytest.raises(WrongShard):
        connect(",".join(reversed(servers)), 0, 1)


def test_connect_when_nobody_listens_then_names_shard_and_address() -> None:
    """After the retry timeout, not after minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening: nobody answers, and nobody else gets the port
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ShardUnavailable, match=rf"shard 0 at {re.escape(address)} could not be reached") as caught:
            connect(address, 0, 1, retry_timeout=0.2)

    assert caught.value.detail == {"shard": 0, "address": address}


def test_calls_when_out_of_order_then_say_what_is_missing(cluster: Start) -> None:
    """Not declared, declared twice, closed."""
    ps = connect(cluster(1).servers, 0, 1)
    for call in (lambda: ps.push({}), ps.pull, lambda: ps.param_groups, ps._worker.pull_flat, lambda: ps._worker.gradients):
        with pytest.raises(NotDeclared, match="declare"):
            call()
    with pytest.raises(InvalidTensor, match="params: is empty; there must be at least one"):
        ps.declare({}, SGD(lr=1))  # and leaves the job as it is
    ps.declare({"w": np.zeros(1)}, SGD(lr=1))
    with pytest.raises(InvalidRequest, match="declared its job already"):
        ps.declare({"w": np.zeros(1)}, SGD(lr=1))
    with pytest.raises(InvalidTensor, match="no parameter 'x'"):
        ps.push({"x": 1.0})

    ps.close()
    ps.close()

    for call in (ps.pull, lambda: ps.barrier("b")):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_calls_when_two_threads_use_one_worker_then_the_second_is_told(cluster: Start) -> None:
    """Interleaved frames would be the alternative."""
    c = cluster(1)
    ps = connect(c.servers, 0, 2)
    waiting = Thread(lambda: ps.barrier("b"))
    until(lambda: bool(c.shards[0].shard._core.waiting.open()))

    with pytest.raises(RuntimeError, match="another thread is using"):
        ps.barrier("c")

    ps.close()
    with pytest.raises(RuntimeError, match=r"closed by another thread|has ended"):
        waiting.result()


def test_calls_when_in_a_forked_child_then_say_so(cluster: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not survive a fork; the child's end is not the worker's."""
    ps = declared(cluster(1).servers)
    lane = ps._worker._shards.lanes[0]

    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match=r"does not survive a fork: call psd_client.connect\(\)"):
            ps.pull()
        with pytest.raises(RuntimeError, match="does not survive a fork"):
            lane.begin_heartbeat(Any, 1)  # type: ignore[arg-type]

    assert ps.pull()["w"][0] == 0
    ps.close()


def test_pull_when_one_shard_fails_then_the_others_are_given_up(cluster: Start) -> None:
    """An error at one shard ends the waits at the others at once."""
    ps, faults = connect_faulty(cluster(3).servers, 0, 2)
    with ps:
        ps.declare({"w": np.zeros(50_000, np.float32)}, SGD(lr=1.0))
        ps.push({"w": np.ones(50_000, np.float32)})
        faults.fail("pull", shard=2, error=InvalidTensor("something is wrong"))  # the round is open: 0 and 1 would wait
        with pytest.raises(InvalidTensor, match="something is wrong"):
            ps.pull()
    faults.assert_all_fired()


@pytest.mark.parametrize("shard_count", [1, 3])
def test_pull_when_interrupted_then_ends_at_once(cluster: Start, shard_count: int) -> None:
    """Ctrl-C reaches a worker that waits, and leaves no call behind."""
    c = cluster(shard_count)
    with declared(c.servers, 0, 2, size=50_000) as ps:
        ps.push(ones(50_000))
        main = threading.main_thread().ident
        assert main is not None
        waits = [shard.shard._core.waiting for shard in c.shards]

        def interrupt() -> None:
            until(lambda: all(wait.open() for wait in waits))
            signal.pthread_kill(main, signal.SIGINT)

        thread = Thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ps.pull()
        thread.result()

        until(lambda: not any(wait.open() for wait in waits))


def test_wait_when_long_then_is_explained_on_the_log(cluster: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeat asks the shards in time, although nobody polls."""
    servers = cluster(2).servers
    ps = connect(servers, 0, 2, report_after=0.05)
    with ps:
        ps.declare({"w": np.zeros(20_000, np.float32)}, SGD(lr=1.0))
        ps.push({"w": np.ones(20_000, np.float32)})
        waiting = Thread(ps.pull)
        expected = "psd: worker 0: step 0: waiting for worker 1, which has not joined yet"
        until(lambda: expected in caplog.messages)  # on a busy machine the declaration has been explained before
        with connect(servers, 1, 2) as peer:
            peer.declare({"w": np.zeros(20_000, np.float32)}, SGD(lr=1.0))
            peer.push({"w": np.ones(20_000, np.float32)})
            waiting.result()


@pytest.mark.parametrize("static", [0, 1])
def test_declare_tensors_when_groups_are_static_then_values_are_shared_and_stay(cluster: Start, static: int) -> None:
    """The lower level: flat buffers, scalars per group, static tensors that nothing is pushed to. What a worker saves is kept
    also if shard 0 trains nothing."""
    servers = cluster(2).servers
    trained, groups = 1 - static, [GroupSpec("sgd"), GroupSpec("sgd")]
    groups[static] = GroupSpec("static")
    scalars: list[list[float]] = [[1.0, 0, 0, 0], [1.0, 0, 0, 0]]
    scalars[static] = []
    specs = [TensorSpec("w", (9000 if static else 3,), "float32", trained), TensorSpec("mean", (3,), "float32", static)]

    def work(rank: int) -> tuple[float, float, bytes]:
        def initial(buffers: psd_client.lanes.flat.FlatBuffers) -> None:
            for view in buffers.views:
                view[...] = 4

        with connect(servers, rank, 2) as ps:
            ps._worker.declare_tensors(specs, groups, initial=initial)
            for _ in range(2):
                ps._worker.gradients.views[0][:] = 1
                ps.save_client_state(b"state of %d" % rank)
                ps._worker.push_pull_flat(scalars, 1.0, np.array([True, False]))
            ps._worker.push_pull_flat(scalars)
            ps._worker.pull_flat()
            ps.barrier("done")
            ps._worker._session.begin_anew()
            return float(ps._worker.parameters.views[0][-1]), float(ps._worker.parameters.views[1][0]), ps.client_state

    assert in_threads(lambda: work(0), lambda: work(1)) == [(1, 4, b"state of 0"), (1, 4, b"state of 1")]


def test_push_when_there_is_nothing_to_train_then_the_clock_still_moves(cluster: Start) -> None:
    """A job of empty tensors is legal."""
    with connect(cluster(2).servers, 0, 1) as ps:
        params = ps.declare({"e": np.zeros((0, 3))}, SGD(lr=1))
        ps.push(params)
        assert ps.push_pull({})["e"].shape == (0, 3)
        assert ps.clock == 2


def test_a_learning_rate_finder_leaves_nothing_behind(cluster):
    """Parameters that were kept are set again, and momentum begins anew, of tensors and of rows; rows and the clock stay."""
    table = psd_client.Table("user", 2, SGD(lr=1.0, momentum=0.5), init=psd_client.Zeros(), updates="catch_up")

    def worker(rank):
        ids, ones = np.array([1, 2]), np.ones((2, 2), np.float32)
        with connect(servers, rank, 2) as ps:
            kept = ps.declare({"w": np.full(3, 5.0)}, SGD(lr=1.0, momentum=0.5), tables=[table])
            kept = {name: value.copy() for name, value in kept.items()}
            for _ in range(2):
                ps.push_pull({"w": np.ones(3)}, tables={"user": (ids, ones)})
            for params, text in (
                ({}, "is missing"),
                (kept | {"x": 0}, "no parameter 'x'"),
                ({"w": np.ones(2)}, "shape must be"),
            ):
                with pytest.raises(InvalidTensor, match=text):
                    ps.load_parameters(params)
            assert (ps.load_parameters(kept)["w"] == 5).all()
            ps.reset_slots()
            swept = ps.tables["user"].pull(ids)
            after = ps.push_pull({"w": np.ones(3)}, tables={"user": (ids, ones)})
            return after["w"], ps.tables["user"].pull(ids) - swept, swept, ps.clock

    servers = cluster(2).servers
    for w, moved, swept, clock in in_threads(lambda: worker(0), lambda: worker(1)):
        assert (w == 4).all()
        assert (moved == -1).all()
        assert (swept == -2.5).all()
        assert clock == 3
