"""The thread that looks after bulk connections: who hears that the shard is there, and whose connection it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from raw_bulk import BulkWorker, answer, push

from psd.contract.wire import Disconnected, Kind
from psd.rim.bulk_watch import Watch
from psd.v1 import bulk_pb2, control_pb2


class FakeConnection:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.words = 0
        self.ends = 0

    def say_alive(self) -> None:
        self.words += 1

    def hang_up(self) -> None:
        self.ends += 1


def test_every_connection_is_told_at_each_look() -> None:
    """Whether there is something to be said is the connection's to know."""
    connections: Any = {3: FakeConnection(), 4: FakeConnection()}
    watch = Watch(connections, lambda _: True)

    for _ in range(3):
        watch.look()

    assert [(each.words, each.ends) for each in connections.values()] == [(3, 0), (3, 0)]
    watch.stop()


def test_a_connection_whose_worker_has_gone_is_ended_at_the_second_look() -> None:
    """What it has under way ends by itself in between, as a rule; one whose worker is back by then is left alone."""
    connections: Any = {3: FakeConnection(), 4: FakeConnection()}
    gone = {connections[3], connections[4]}
    watch = Watch(connections, lambda each: each not in gone)

    watch.look()
    gone.discard(connections[4])
    watch.look()

    assert [each.ends for each in connections.values()] == [1, 0]
    watch.stop()


@pytest.fixture
def server(cluster: Callable[..., Any]) -> Any:
    return cluster(1).shards[0]


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_a_call_that_waits_over_tcp_hears_that_the_shard_is_there(
    server: Any, dial: Callable[..., grpc.Channel], eventually: Callable[..., None], local: bool
) -> None:
    """Not on this machine, where a shard does not vanish unnoticed, and not between calls."""
    workers = [BulkWorker(dial(server.address), rank, 2) for rank in range(2)]
    stream = workers[0].connect(local=local)
    server._bulk._watch.look()
    push(stream, workers[0], bulk_pb2.BULK_METHOD_PUSH_PULL, 0, (1, 2))
    status = control_pb2.StatusRequest()
    eventually(lambda: len(workers[0].control.Status(status).waits) == 1, "the worker waits for the round")

    server._bulk._watch.look()
    workers[1].push(0, [[1, 1, 1], [2, 2, 2]])

    words = 0
    while (kind := stream.receive())[0] is Kind.ALIVE:
        words += 1
    assert words == (0 if local else 1)
    assert kind[0] is Kind.ANSWER
    stream.close()


@pytest.mark.parametrize("reason", ["expired", "superseded"])
def test_the_connection_of_a_worker_that_has_gone_is_ended(
    server: Any, dial: Callable[..., grpc.Channel], eventually: Callable[..., None], reason: str
) -> None:
    """Its lease ran out, or its rank has joined again; its machine may have vanished. The successor's is left alone."""
    worker = BulkWorker(dial(server.address), 0, 1)
    stream = worker.connect()
    if reason == "expired":
        with server.shard._core.lock:
            server.shard._core.members.worker(0).last_seen -= 1000
        server.shard.tick()
    else:
        BulkWorker(dial(server.address), 0, 1)

    server._bulk._watch.look()
    assert len(server._bulk._threads) == 1
    server._bulk._watch.look()

    with pytest.raises(Disconnected):
        stream.receive()
    eventually(lambda: not server._bulk._threads, "its thread has ended")
    stream.close()


def test_the_connection_of_a_rank_that_there_is_not_any_more_is_ended(
    server: Any, dial: Callable[..., grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that has begun meanwhile has fewer workers."""
    worker = BulkWorker(dial(server.address), 0, 1)
    stream = worker.connect()
    monkeypatch.setattr(server.shard._core.members, "workers", [])

    server._bulk._watch.look()
    server._bulk._watch.look()

    with pytest.raises(Disconnected):
        stream.receive()
    stream.close()


def test_a_worker_that_goes_on_as_another_session_keeps_its_connection(server: Any, dial: Callable[..., grpc.Channel]) -> None:
    """It was fenced, has joined again, and calls."""
    before = BulkWorker(dial(server.address), 0, 1)
    stream = before.connect()
    after = BulkWorker(dial(server.address), 0, 1)
    server._bulk._watch.look()

    stream.send(Kind.CALL, after.call(bulk_pb2.BULK_METHOD_PULL))
    for _ in range(2):
        answer(stream, Kind.ANSWER)
    answer(stream, Kind.REPLY)
    server._bulk._watch.look()
    server._bulk._watch.look()

    stream.send(Kind.CALL, after.call(bulk_pb2.BULK_METHOD_PULL))
    answer(stream, Kind.ANSWER)
    stream.close()
