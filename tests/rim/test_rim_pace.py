"""Whoever asks without end waits for his turn, and keeps nobody else waiting."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.contract.config import Limits
from psd.rim import pace
from psd.rim.pace import BURST, PER_S, WAIT_S, WAITING_MAX, Pace
from psd.v1 import control_pb2

JOIN, STATUS = "/psd.v1.ControlService/Join", "/psd.v1.ControlService/Status"


class Asker:
    """A caller who hangs up at once, so that no test waits."""

    def __init__(self, remaining: float | None = None) -> None:
        self._remaining = remaining

    def add_callback(self, callback: Callable[[], None]) -> bool:
        callback()
        return True

    def time_remaining(self) -> float | None:
        return self._remaining


@pytest.fixture
def clock() -> list[float]:
    """The time, to be set by the test."""
    return [1000.0]


@pytest.fixture
def paced(clock: list[float]) -> Pace:
    return Pace(lambda: clock[0])


def turn(paced: Pace) -> float:
    """Seconds that one more would have to wait, who then does not."""
    wait_s = paced._take_turn()
    paced._waiting = 0
    return wait_s


def test_many_at_once_do_not_wait_and_those_after_them_come_at_a_rate(paced: Pace, clock: list[float]) -> None:
    """A burst is free; then one after the other; and after a while of peace a burst is free again."""
    assert [turn(paced) for _ in range(BURST)] == [0.0] * BURST
    assert [turn(paced) for _ in range(3)] == pytest.approx([k / PER_S for k in (1, 2, 3)])
    clock[0] += 3 / PER_S
    assert turn(paced) == pytest.approx(1 / PER_S)
    clock[0] += 1 / PER_S + BURST / PER_S
    assert [turn(paced) for _ in range(BURST)] == [0.0] * BURST
    assert turn(paced) > 0


def test_nobody_waits_for_longer_than_a_second(paced: Pace, clock: list[float]) -> None:
    """However many have come, and those who come later do not pay for them."""
    waits = [turn(paced) for _ in range(BURST + 10 * int(PER_S))]

    assert max(waits) == pytest.approx(WAIT_S)
    clock[0] += WAIT_S
    assert turn(paced) == pytest.approx(1 / PER_S)


def test_only_so_many_wait(paced: Pace) -> None:
    """Each has a thread. Whoever finds them all there is answered at once, and takes no turn."""
    for _ in range(BURST):
        paced.wait(Asker())
    waits = [paced._take_turn() for _ in range(WAITING_MAX + 5)]

    assert [wait_s == 0 for wait_s in waits] == [False] * WAITING_MAX + [True] * 5


def test_whoever_hangs_up_or_has_no_time_waits_no_longer(paced: Pace) -> None:
    """And makes room for another one."""
    for _ in range(BURST + 2 * WAITING_MAX):
        paced.wait(Asker(remaining=0.0))
        paced.wait(Asker())

    assert paced._waiting == 0


@pytest.fixture
def flood(dial: Callable[..., grpc.Channel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """flood(address, method, message): somebody who calls that again and again, until the test ends; returns when he waits."""
    monkeypatch.setattr(pace, "BURST", 5)
    over = threading.Event()

    def call(method: Any, message: bytes, began: threading.Event) -> None:
        for count in range(1_000_000):
            if over.is_set():
                return
            if count > 6:
                began.set()
            try:
                method(message, timeout=TIMEOUT_S)
            except grpc.RpcError:
                continue

    with ThreadPoolExecutor() as pool:

        def start(address: str, method: str, message: bytes = b"") -> None:
            began = threading.Event()
            pool.submit(call, dial(address).unary_unary(method), message, began)
            assert began.wait(TIMEOUT_S)

        yield start
        over.set()


@pytest.mark.parametrize(("method", "message"), [(STATUS, b""), (JOIN, b"\xff"), ("/nothing/Nothing", b"")])
def test_a_flood_is_slow_and_workers_and_probes_are_not(
    cluster: Callable[..., Any],
    dial: Callable[..., grpc.Channel],
    flood: Callable[..., None],
    method: str,
    message: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is called in vain: who calls it is held up for a second, and all others go on."""
    shard = cluster(1).shards[0]
    worker = RawWorker(dial(shard.address), 0, 1)
    worker.declare(spec(1))
    monkeypatch.setattr(pace, "PER_S", 1.0)
    held_up: set[str] = set()
    wait = Pace.wait
    monkeypatch.setattr(Pace, "wait", lambda self, caller: (held_up.add(caller.peer()), wait(self, caller)))
    began = time.monotonic()
    flood(shard.address, method, message)

    assert time.monotonic() - began > WAIT_S
    for clock in range(20):
        worker.push(clock, [[1.0] * 3])
        assert worker.pull(clock + 1) == {0: [-1.0 - clock] * 3}
        worker.heartbeat()
        check = health_pb2_grpc.HealthStub(worker.channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
    assert len(held_up) == 1
    assert worker.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S).run_id


def test_a_wait_that_ends_in_vain_is_told_at_once(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], impatient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd of workers may wait in slices, and has waited long enough."""
    monkeypatch.setattr(Pace, "wait", lambda *_: pytest.fail("this one must not wait"))
    worker = RawWorker(dial(cluster(1).servers), 0, 2)

    with impatient():
        error = failure(worker.control.Barrier, worker.barrier_request("b"), timeout=TIMEOUT_S)

    assert reason(error) == "BarrierTimeout"


def test_a_method_that_there_is_not_is_unimplemented(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> None:
    """As gRPC has it, whatever kind of method the caller takes it for."""
    channel = dial(cluster(1).servers)

    for call, sent in (
        (channel.unary_unary("/nothing/Nothing"), b""),
        (channel.stream_stream("/psd.v1.DataService/Nothing"), iter([b"", b""])),
    ):
        error = failure(call, sent, timeout=TIMEOUT_S)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def test_one_connection_has_few_calls_at_a_time(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], eventually: Callable[..., None]
) -> None:
    """The others wait where they are made, and take nothing of the shard; another connection is served."""
    shard = cluster(1, limits=Limits(streams_max=8), lease_s=600.0).shards[0]
    workers = [RawWorker(dial(shard.address), rank, 20) for rank in range(20)]
    barrier = dial(shard.address).unary_unary(
        "/psd.v1.ControlService/Barrier", control_pb2.BarrierRequest.SerializeToString, control_pb2.BarrierReply.FromString
    )
    waiting = [barrier.future(worker.barrier_request("b"), timeout=TIMEOUT_S) for worker in workers[:19]]
    eventually(lambda: len(shard.shard._core.waiting.open()) == 8, "eight calls wait at the shard")

    workers[19].heartbeat()
    assert len(shard.shard._core.waiting.open()) == 8
    for call in waiting:
        call.cancel()


def test_a_refused_call_is_forgotten_at_once(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the help of the collector: gRPC counts a call against the connection's few until it is, and refuses others."""
    monkeypatch.setattr(pace, "BURST", 1000)
    channel = dial(cluster(1).servers)
    calls = [
        lambda: failure(channel.unary_unary(JOIN), b"\xff", timeout=TIMEOUT_S),
        lambda: failure(channel.unary_unary(JOIN), b"", timeout=TIMEOUT_S),
        lambda: failure(channel.stream_stream("/psd.v1.DataService/PushPull"), iter([b"\xff"]), timeout=TIMEOUT_S),
    ]
    gc.disable()
    try:
        reasons = {reason(call()) for _ in range(2 * Limits().streams_max) for call in calls}
    finally:
        gc.enable()

    assert reasons == {"InvalidRequest", "WrongShard"}
