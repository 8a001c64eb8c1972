"""Shards that say nothing at the worst moment: a greeting without an answer, a dead connection under a call, memory that is not
let go of. Everything ends, with an error of psd's, and in time."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from client_faults import Thread, until
from scripted_shard import Conversation, Script, ScriptedShard, ToldLane

from psd.contract import frames
from psd.contract.config import ConfigError
from psd.contract.errors import InvalidRequest, Overloaded, ShardUnavailable, WaitTimeout
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.wire import Disconnected, Kind
from psd.v1 import bulk_pb2, data_pb2, job_pb2
from psd_client.lanes import bulk_connection, bulk_opener, silence_deadline
from psd_client.lanes.flat import FlatBuffers, share_memory
from psd_client.lanes.transport import Call, Cancelled, GradientPart, Lane, Scope

SIZE = 4_000_000
"""float32: four blocks, which no buffers of sockets hold."""
LAYOUT = Layout(JobSpec(1, (TensorSpec("w", (SIZE,), "float32", 0),), (GroupSpec("sgd"),)), 1)
LONG = 1000.0

Start = Callable[..., ScriptedShard]
Told = Callable[..., ToldLane]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_connection, "HELLO_S", 0.3)
    for name, seconds in {"PAUSE_S": 0.05, "SILENT_S": 1.5, "CANCEL_S": 0.3}.items():
        monkeypatch.setattr(silence_deadline, name, seconds)


def silent(_: Conversation) -> None:
    """Takes the connection, and that is all."""


def deaf(conversation: Conversation) -> None:
    """Welcomes the worker, and reads nothing after that."""
    conversation.welcome()
    conversation.wait()


def prepare(lane: Lane) -> Any:
    return lane.prepare(job_pb2.Caller(), Call(LONG, Scope()))


def push(lane: Lane, scope: Scope | None = None, timeout_s: float = LONG, buffers: FlatBuffers | None = None) -> Any:
    part = GradientPart(LAYOUT.blocks_of(0), buffers or FlatBuffers(LAYOUT), header=data_pb2.PushHeader())
    return lane.push(part, Call(timeout_s, scope or Scope()))


def pull(lane: Lane, scope: Scope | None = None, timeout_s: float = LONG, buffers: FlatBuffers | None = None) -> None:
    lane.pull(data_pb2.PullRequest(), LAYOUT.blocks_of(0), buffers or FlatBuffers(LAYOUT), Call(timeout_s, scope or Scope()))


CALLS = pytest.mark.parametrize("make_call", [push, pull], ids=["push", "pull"])


# -- greeting ----------------------------------------------------------------------------------------------------------


def test_prepare_when_a_port_does_not_answer_then_it_is_tried_again_and_then_left_to_grpc(scripted: Start, told: Told) -> None:
    """Once the shard may have been suspended; twice, while it answers over gRPC, it is not behind that port."""
    lane = told(scripted(silent).port, transport="auto")

    with pytest.raises(ShardUnavailable, match=r"shard 0 at 127\.0\.0\.1:9: port \d+: accepts connections but does not answer"):
        prepare(lane)

    assert prepare(lane) is None
    assert lane.transport.startswith("grpc (not shm: ")
    assert "accepts connections but does not answer" in lane.transport


def test_prepare_when_a_port_that_is_insisted_on_does_not_answer_then_says_so(scripted: Start, told: Told) -> None:
    """There is no other way that it could take."""
    lane = told(scripted(silent).port)

    with pytest.raises(ShardUnavailable):
        prepare(lane)
    with pytest.raises(ConfigError, match=r"shard 0 at 127\.0\.0\.1:9 cannot be reached by tcp: port \d+: accepts connections"):
        prepare(lane)


def test_prepare_when_a_port_that_is_insisted_on_falls_silent_amid_the_job_then_it_is_unavailable(
    scripted: Start, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What worked is no wrong setting: the program gets the error of a shard that is gone; it goes on once it answers."""
    monkeypatch.setattr(bulk_opener, "STALE_NAME_S", 0.0)
    lane = told(scripted(Conversation.welcome, silent, silent, silent, deaf).port)
    prepare(lane)
    with pytest.raises(ShardUnavailable):
        push(lane)

    with pytest.raises(ShardUnavailable, match="accepts connections but does not answer"):
        prepare(lane)
    for _ in range(2):
        with pytest.raises(ShardUnavailable, match=r"cannot be reached any more by tcp: port \d+: accepts connections"):
            prepare(lane)
    prepare(lane)

    assert lane.transport == "tcp"


def test_prepare_when_it_is_refused_then_keeps_no_connection(scripted: Start, told: Told) -> None:
    """The one before of this rank does not end, for instance: worth another attempt, over another connection."""

    def refuse(conversation: Conversation) -> None:
        conversation.stream.receive()
        conversation.stream.send(Kind.ERROR, bulk_pb2.BulkError(reason="Overloaded", message="no").SerializeToString())
        with pytest.raises(Disconnected):
            conversation.stream.receive()

    with pytest.raises(Overloaded, match="no"):
        prepare(told(scripted(refuse).port))


def test_prepare_when_a_port_answers_after_all_then_takes_it(scripted: Start, told: Told) -> None:
    """What a shard did while it was suspended is not held against it."""
    lane = told(scripted(silent, deaf).port)

    with pytest.raises(ShardUnavailable):
        prepare(lane)
    prepare(lane)

    assert lane.transport == "tcp"


def test_prepare_when_the_shard_on_this_machine_does_not_answer_then_it_is_tried_again(scripted: Start, told: Told) -> None:
    """It is there, since it has the socket; nothing else would answer sooner."""
    lane = told(local_name=scripted(silent, local=True).local_name, transport="auto")

    for _ in range(3):
        with pytest.raises(ShardUnavailable, match="accepts connections on this machine but does not answer"):
            prepare(lane)


def attached(told: Told, shard: ScriptedShard) -> tuple[ToldLane, FlatBuffers, FlatBuffers]:
    """A lane over shared memory, with its gradients and parameters, which the next call attaches."""
    lane = told(local_name=shard.local_name, transport="shm")
    segment = share_memory(LAYOUT)
    gradients, parameters = FlatBuffers(LAYOUT, segment=segment, of_gradients=True), FlatBuffers(LAYOUT, segment=segment)
    prepare(lane)(gradients, [parameters])
    return lane, gradients, parameters


def test_push_when_the_shard_does_not_take_the_memory_then_may_be_called_again(scripted: Start, told: Told) -> None:
    """Neither a greeting nor this is a wait for other workers."""
    lane, gradients, _ = attached(told, scripted(deaf, local=True))

    with pytest.raises(ShardUnavailable, match=r"has not mapped this worker's memory within 0\.3 s"):
        push(lane, buffers=gradients)


def test_prepare_when_cancelled_while_it_waits_for_an_answer_then_ends(
    scripted: Start, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every call does."""
    monkeypatch.setattr(bulk_connection, "HELLO_S", LONG)
    shard, scope = scripted(silent), Scope()
    lane = told(shard.port)
    opening = Thread(lambda: lane.prepare(job_pb2.Caller(), Call(LONG, scope)))
    until(lambda: shard.conversations != [])

    scope.cancel()

    with pytest.raises(Cancelled):
        opening.result()


# -- calls -------------------------------------------------------------------------------------------------------------


@CALLS
def test_call_when_nothing_comes_from_the_shard_then_it_is_unavailable(scripted: Start, told: Told, make_call: Any) -> None:
    """Blocked in a send, or waiting for an answer: a shard that is there would have said so."""
    lane = told(scripted(deaf).port)

    with pytest.raises(ShardUnavailable, match=r"the connection broke: nothing has come for \d+ s"):
        make_call(lane)


@CALLS
def test_call_when_the_shard_says_that_it_is_there_then_waits(scripted: Start, told: Told, make_call: Any) -> None:
    """It waits for whatever the shard waits for, and whether that reads meanwhile or not."""

    def patient(conversation: Conversation) -> None:
        conversation.welcome()
        for _ in range(40):
            conversation.stream.send(Kind.ALIVE)
            conversation.ended.wait(0.05)
        conversation.stream.receive()
        for _ in LAYOUT.blocks_of(0) if make_call is push else ():
            _, _, payload_bytes = conversation.stream.receive()
            conversation.stream.skip(payload_bytes)
        if make_call is pull:
            for block in LAYOUT.blocks_of(0):
                head = data_pb2.PullFrame(block=block.index, version=1).SerializeToString()
                conversation.stream.send(Kind.ANSWER, head, bytes(block.nbytes))
        conversation.stream.send(Kind.REPLY, bulk_pb2.BulkReply().SerializeToString())

    make_call(told(scripted(patient).port))


@CALLS
def test_call_when_its_deadline_passes_then_says_what_has_not_answered(
    scripted: Start, told: Told, make_call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of psd's, not Python's."""
    monkeypatch.setattr(silence_deadline, "SILENT_S", LONG)
    lane = told(scripted(deaf).port)

    with pytest.raises(WaitTimeout, match=r"shard 0 at 127\.0\.0\.1:9: no answer within 0\.3 s"):
        make_call(lane, timeout_s=0.3)


@CALLS
def test_call_when_cancelled_then_ends_whatever_the_shard_does(
    scripted: Start, told: Told, make_call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP nobody but this process touches its memory, and there is nothing to wait for."""
    for name in ("SILENT_S", "CANCEL_S"):
        monkeypatch.setattr(silence_deadline, name, LONG)
    shard, scope = scripted(deaf), Scope()
    lane = told(shard.port)
    calling = Thread(lambda: make_call(lane, scope))
    until(lambda: lane._bulk._open is not None and lane._bulk._open._is_busy)

    scope.cancel()

    with pytest.raises(Cancelled):
        calling.result()


def test_call_when_the_one_before_was_refused_then_goes_over_the_same_connection(scripted: Start, told: Told) -> None:
    """An answer is an answer."""

    def refuse_and_answer(conversation: Conversation) -> None:
        conversation.welcome()
        conversation.stream.receive()
        error = bulk_pb2.BulkError(reason="InvalidRequest", message="no")
        conversation.stream.send(Kind.ERROR, error.SerializeToString())
        conversation.stream.receive()
        conversation.stream.send(Kind.REPLY, bulk_pb2.BulkReply().SerializeToString())

    shard = scripted(refuse_and_answer)
    lane = told(shard.port)
    request = data_pb2.PullRequest(versions_only=True)

    with pytest.raises(InvalidRequest, match="no"):
        lane.pull(request, (), FlatBuffers(LAYOUT), Call(LONG, Scope()))
    lane.pull(request, (), FlatBuffers(LAYOUT), Call(LONG, Scope()))

    assert len(shard.conversations) == 1


# -- shared memory -----------------------------------------------------------------------------------------------------


def lets_go(conversation: Conversation) -> None:
    conversation.welcome()
    conversation.take_memory()
    with pytest.raises(Disconnected):
        while True:
            conversation.stream.receive()
    conversation.stream.close()


def holds_on(conversation: Conversation) -> None:
    conversation.welcome()
    conversation.take_memory()
    conversation.wait()


@pytest.mark.parametrize("script", [lets_go, holds_on])
def test_call_when_cancelled_then_no_shard_reaches_what_the_worker_sees(
    scripted: Start, told: Told, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard that is suspended may go on where it was, later: in memory that the worker no longer sees."""
    shard, scope = scripted(script, local=True), Scope()
    lane, gradients, parameters = attached(told, shard)
    segment = gradients.segment
    assert segment is not None
    gradients.spaces[0][...], parameters.spaces[0][...] = 1, 2
    calling = Thread(lambda: push(lane, scope, buffers=gradients))
    until(lambda: bool(shard.conversations) and shard.conversations[0].memory_fd >= 0)
    until(lambda: lane._bulk._open is not None and lane._bulk._open._attached is not None)

    scope.cancel()

    with pytest.raises(Cancelled):
        calling.result()
    does_hold_on = script is holds_on
    assert segment.is_given_up is does_hold_on
    assert ("has not let go of this worker's memory" in caplog.text) is does_hold_on
    if does_hold_on:
        theirs = np.frombuffer(mmap.mmap(shard.conversations[0].memory_fd, segment.nbytes), np.float32)
        theirs[parameters.starts[0] // 4 :][:SIZE] = 77
        gradients.spaces[0][...] = 88
        assert set(parameters.spaces[0].tolist()) == {2.0}
        assert set(theirs[gradients.starts[0] // 4 :][:SIZE].tolist()) == {1.0}
        assert set(gradients.spaces[0].tolist()) == {88.0}


def test_push_when_memory_was_given_up_then_sends_the_numbers(scripted: Start, told: Told) -> None:
    """Through the local socket, to every shard, also over connections that had the memory."""
    received: list[bytes] = []
    may_read = threading.Event()

    def reads(conversation: Conversation) -> None:
        conversation.welcome()
        if not may_read.is_set():
            conversation.take_memory()
        for _ in range(2):
            conversation.stream.receive()
            for block in LAYOUT.blocks_of(0):
                _, head, payload_bytes = conversation.stream.receive()
                if data_pb2.PushFrame.FromString(head).in_memory:
                    break
                target = bytearray(payload_bytes)
                conversation.stream.read_into(memoryview(target))
                received.append(bytes(target[:4]))
                del block
            conversation.stream.send(Kind.REPLY, bulk_pb2.BulkReply().SerializeToString())

    lane, gradients, parameters = attached(told, scripted(reads, local=True))
    gradients.spaces[0][...] = 1
    push(lane, buffers=gradients)
    assert received == []
    assert gradients.segment is not None

    gradients.segment.give_up(parameters.spaces)
    gradients.spaces[0][...] = 2
    push(lane, buffers=gradients)

    assert received == [np.float32(2).tobytes()] * len(LAYOUT.blocks_of(0))


# -- gRPC's own pings --------------------------------------------------------------------------------------------------


def test_a_peer_behind_a_proxy_that_acknowledges_for_it_is_noticed_as_one_that_has_vanished() -> None:
    """TCP has all its acknowledgements, and only gRPC's ping has none. At a fortieth of the time: half a second, not 60."""
    options = [(name, value // 40) for name, value in frames.KEEPALIVE_OPTIONS]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an HTTP/2 server's greeting, and nothing after it

        def swallow() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(settings)
                while sock.recv(1 << 16):
                    pass

        swallowing = pool.submit(swallow)
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}", options=options) as channel:
            call = channel.unary_unary("/psd.v1.ControlService/Status").future(b"", timeout=40, wait_for_ready=True)

            error = call.exception(45)
        swallowing.result(45)

    assert isinstance(error, grpc.RpcError)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "ping timeout" in error.details() or "keepalive" in error.details()
