"""Limits on what somebody can hold of a shard without having sent anything: connections, calls and bytes."""

from __future__ import annotations

import itertools
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

import psd_client
from psd.contract import wire
from psd.contract.config import Limits
from psd.contract.wire import PREFIX, Kind, Stream
from psd.rim import bulk_server
from psd.rim.bulk_connection import HELLO_BYTES_MAX
from psd.rim.bulk_server import STRANGERS_MAX
from psd.rim.health import HealthService
from psd.rim.pace import Pace
from psd.rim.strangers import CALLS_MAX, Strangers
from psd.v1 import bulk_pb2, control_pb2, data_pb2

CONNECTIONS = 4 * CALLS_MAX // Limits().streams_max
READY = health_pb2.HealthCheckRequest(service="psd.ready")


def test_the_oldest_gives_way_and_those_who_have_shown_themselves_do_not() -> None:
    """A bound of two: the third turns the first away, unless that one has left."""
    found, gone = Strangers(2), []

    assert found.enter("a", lambda: gone.append("a"))
    assert found.enter("b", lambda: gone.append("b"))
    found.leave("a")
    assert found.enter("c", lambda: gone.append("c"))
    assert not found.enter("d", lambda: gone.append("d"))

    assert gone == ["b"]
    assert len(found) == 2


def test_only_the_first_item_is_awaited_among_strangers() -> None:
    """A stream that has begun is none any more, and one that ends without an item leaves no trace."""
    found = Strangers(1)
    items = found.first_of(iter("xy"), lambda: pytest.fail("it has shown itself"))

    assert next(items) == "x"
    assert len(found) == 0
    assert list(items) == ["y"]
    assert list(found.first_of(iter(""), int)) == []
    assert len(found) == 0


@pytest.fixture
def silent() -> Iterator[Callable[[], Iterator[bytes]]]:
    """Makes requests of which nothing comes until the test is over."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        over.wait()
        yield from ()

    yield requests
    over.set()


def ends(calls: list[Any], count: int) -> set[Any]:
    """The ends of the first so many of these calls, whichever they are."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for call in calls:
        threading.Thread(target=lambda call=call: ended.put(failure(list, call).code()), daemon=True).start()
    return {ended.get(timeout=TIMEOUT_S) for _ in range(count)}


@pytest.mark.parametrize("method", ["Push", "PushPull", "Initialize"])
def test_calls_of_which_nothing_comes_give_way_to_a_worker(
    cluster: Callable[..., Any], dial: Callable[..., Any], silent: Callable[..., Any], method: str
) -> None:
    """Twice as many as the limit, from several connections: the oldest are cancelled, and a worker trains."""
    shard = cluster(1).shards[0]
    channels = [dial(shard.address) for _ in range(CONNECTIONS)]
    calls = [
        channels[i % CONNECTIONS].stream_stream(f"/psd.v1.DataService/{method}")(silent(), timeout=120)
        for i in range(2 * CALLS_MAX)
    ]
    assert ends(calls, CALLS_MAX) == {grpc.StatusCode.CANCELLED}

    worker = RawWorker(dial(shard.address), 0, 1)
    worker.declare(spec(1))
    worker.push(0, [[1.0] * 3])

    assert worker.pull(1) == {0: [-1.0] * 3}
    for call in calls:
        call.cancel()


def test_watchers_and_reflections_are_bounded(
    cluster: Callable[..., Any], dial: Callable[..., Any], silent: Callable[..., Any]
) -> None:
    """One of too many is cancelled; a probe is answered all the same."""
    shard = cluster(1).shards[0]
    channels = [dial(shard.address) for _ in range(CONNECTIONS)]
    name = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    watches, reflections = [], []
    for i in range(CALLS_MAX + 1):
        channel = channels[i % CONNECTIONS]
        watches.append(health_pb2_grpc.HealthStub(channel).Watch(READY, timeout=120))
        reflections.append(channel.stream_stream(name)(silent(), timeout=120))

    assert ends(watches, 1) == ends(reflections, 1) == {grpc.StatusCode.CANCELLED}
    assert (
        health_pb2_grpc.HealthStub(dial(shard.address)).Check(READY, timeout=TIMEOUT_S).status
        == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    for call in (*watches, *reflections):
        call.cancel()


def test_a_status_that_changes_while_watchers_hang_up_stops_nobody(
    cluster: Callable[..., Any], dial: Callable[..., Any]
) -> None:
    """gRPC's own health service could then hold its lock and wait for the thread that waited for the lock: no call ended
    any more, of whatever service, and the leases' clock stood still."""
    shard = cluster(1).shards[0]
    stub = health_pb2_grpc.HealthStub(dial(shard.address))
    over = threading.Event()

    def flicker() -> None:
        statuses = itertools.cycle([health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING])
        while not over.is_set():
            shard._health.set("psd.ready", next(statuses))

    thread = threading.Thread(target=flicker)
    thread.start()
    for _ in range(100):
        watch = stub.Watch(READY, timeout=TIMEOUT_S)
        next(watch)
        watch.cancel()
    over.set()
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()
    assert stub.Check(READY, timeout=TIMEOUT_S).status


def test_a_watcher_is_told_what_changes_and_a_service_that_is_none_is_unknown() -> None:
    """As gRPC's health protocol has it; names that somebody made up are not kept."""
    found, context = HealthService(Pace()), Context()
    found.set("a", health_pb2.HealthCheckResponse.SERVING)
    watch, unknown = (found.Watch(health_pb2.HealthCheckRequest(service=name), context) for name in ("a", "b"))

    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    found.set("a", health_pb2.HealthCheckResponse.SERVING)
    found.set("a", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    context.hang_up()

    assert list(watch) == list(unknown) == []
    assert list(found._statuses) == ["a"]
    assert len(found._watchers) == 0


class Context:
    """A caller who hangs up when told to."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._is_active = True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def is_active(self) -> bool:
        return self._is_active

    def cancel(self) -> None:
        raise AssertionError("nobody is turned away here")

    def hang_up(self) -> None:
        self._is_active = False
        for callback in self._callbacks:
            callback()


@pytest.fixture
def knock(cluster: Callable[..., Any]) -> Iterator[Callable[..., socket.socket]]:
    """knock(local) -> a connection to the bulk lane of one shard, which is knock.shard."""
    shard = cluster(1).shards[0]
    socks: list[socket.socket] = []

    def connect(local: bool) -> socket.socket:
        if local:
            socks.append(socket.socket(socket.AF_UNIX))
            socks[-1].settimeout(TIMEOUT_S)
            socks[-1].connect(f"\0{shard._bulk.local_name}")
        else:
            socks.append(socket.create_connection(("127.0.0.1", shard._bulk.tcp_port), timeout=TIMEOUT_S))
        return socks[-1]

    connect.shard = shard  # type: ignore[attr-defined]
    yield connect
    for sock in socks:
        sock.close()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first ones would be turned away, as those who say nothing, before the last one has come."""
    monkeypatch.setattr(bulk_server, "HELLO_S", 100.0)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_connections_without_a_ticket_are_bounded(
    knock: Callable[..., Any], eventually: Callable[..., None], local: bool
) -> None:
    """However many there are, the shard keeps a number of them, the newest, and counts the others."""
    bulk = knock.shard._bulk
    lane = "shm" if local else "tcp"
    socks = [knock(local) for _ in range(STRANGERS_MAX + 10)]

    assert socks[0].recv(1) == b""
    eventually(lambda: bulk.connections()[lane].refused == 10, "ten have been turned away")
    assert bulk.connections()[lane].open == STRANGERS_MAX
    assert len(bulk._threads) == STRANGERS_MAX


@pytest.mark.usefixtures("_patient")
def test_a_crowd_waits_until_somebody_with_a_ticket_is_expected(
    knock: Callable[..., Any], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers beyond the bound are not even accepted for long, but for the sake of a worker behind them they are, at once."""
    monkeypatch.setattr(bulk_server, "CROWDED_PAUSE_S", 10 * TIMEOUT_S)
    bulk = knock.shard._bulk
    for _ in range(STRANGERS_MAX + 20):
        knock(False)
    eventually(lambda: bulk.connections()["tcp"].refused == 1, "the first one too many has displaced another one")

    with psd_client.connect(knock.shard.address, 0, 1, transport="tcp") as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))

        assert ps.push_pull({"w": np.ones(3, np.float32)})["w"].tolist() == [-1.0] * 3
        eventually(lambda: bulk.connections()["tcp"].refused >= 20, "twenty have been turned away")


def test_a_byte_at_a_time_does_not_prolong_the_welcome(knock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ticket must have come after a time, not the next byte."""
    times = iter([0.0, *(100.0 for _ in range(1000))])
    sock = knock(False)
    sock.close()
    mine, theirs = socket.socketpair()
    stream = Stream(theirs, HELLO_BYTES_MAX)
    monkeypatch.setattr(wire.time, "monotonic", lambda: next(times))
    stream.set_deadline(bulk_server.HELLO_S)
    monkeypatch.undo()
    mine.sendall(b"x")
    try:
        with pytest.raises(TimeoutError):
            stream.receive()
    finally:
        mine.close()
        stream.close()


def test_before_the_ticket_a_head_is_small(knock: Callable[..., Any]) -> None:
    """Whoever announces more is told so and closed; nothing was kept for it."""
    stream = Stream(knock(False), 1 << 20)
    stream.socket.sendall(PREFIX.pack(Kind.HELLO, HELLO_BYTES_MAX + 1, 0))

    kind, head, _ = stream.receive()

    assert kind is Kind.ERROR
    assert (
        bulk_pb2.BulkError.FromString(head).message == f"head: has {HELLO_BYTES_MAX + 1} bytes, the limit is {HELLO_BYTES_MAX}"
    )


def test_a_head_that_does_not_come_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made as the bytes come, not as they are announced."""
    made: list[int] = []
    mine, theirs = socket.socketpair()
    stream = Stream(theirs, 1 << 30)
    monkeypatch.setattr(wire, "bytearray", lambda size=0: made.append(size) or bytearray(size), raising=False)
    mine.sendall(PREFIX.pack(Kind.CALL, 1 << 30, 0) + bytes(50_000))
    mine.close()
    try:
        with pytest.raises(wire.Disconnected):
            stream.receive()
    finally:
        stream.close()

    assert sum(made) < 200_000


def test_a_push_that_does_not_end_is_refused(cluster: Callable[..., Any], dial: Callable[..., Any]) -> None:
    """The same block again and again, or frames without one: an error, and the job goes on."""
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(spec(1, blocks=2))
    first = worker.frames(0, [[1.0] * 3, [1.0] * 3])[0]
    again = data_pb2.PushFrame(block=0, payload=np.ones(3, np.float32).tobytes())

    def endless(frame: data_pb2.PushFrame) -> Iterator[data_pb2.PushFrame]:
        yield first
        while True:
            yield frame

    for frame, match in ((again, "more than 4 blocks"), (data_pb2.PushFrame(), "block: absent from a frame")):
        error = failure(worker.data.Push, endless(frame), timeout=TIMEOUT_S)
        assert (reason(error), match in error.details()) == ("InvalidRequest", True)
    worker.push(0, [[1.0] * 3, [1.0] * 3])

    assert worker.pull(1) == {0: [-1.0] * 3, 1: [-1.0] * 3}
    status = worker.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)
    assert status.numbers["requests_refused"] == 2


def test_a_client_that_has_gone_before_tls_begins_is_counted_and_no_more(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """OpenSSL's socket cannot be made then; that was a traceback on the log, and a pause for all who came after."""
    files = Authority("a").issue("127.0.0.1").write(tmp_path, "shard")
    bulk = cluster(1, **files).shards[0]._bulk
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # by a reset

        assert bulk._begin(accepted)

    assert accepted.fileno() == -1
    assert bulk.connections()["tcp"].refused == 1
