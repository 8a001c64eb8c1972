"""Access control: every method that a shard serves, with every role and with none; and the bulk lane's ports."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from raw_bulk import BLOCKS, BulkWorker, answer, open_stream
from raw_client import failure, reason, spec

from psd.contract.errors import PsdError, error_from
from psd.contract.wire import PREFIX, Disconnected, Kind, Stream
from psd.rim import access, bulk_server
from psd.rim.pace import Pace
from psd.v1 import bulk_pb2, control_pb2, control_pb2_grpc, data_pb2, job_pb2

TOKENS = {role: f"{role}-" + role * 4 for role in ("worker", "publisher", "reader", "admin")}

OPEN = {"grpc.health.v1.Health/Check"}
ALL = {"worker", "publisher", "reader", "admin"}
TRAINS = {"worker", "admin"}
PUSHES = {"worker", "publisher", "admin"}
MAY = {
    "grpc.health.v1.Health/Watch": ALL,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ALL,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ALL,
    "psd.v1.ControlService/Describe": ALL,
    "psd.v1.ControlService/Status": ALL,
    "psd.v1.ControlService/Curves": ALL,
    "psd.v1.ControlService/OpenReads": ALL,
    "psd.v1.DataService/Read": ALL,
    "psd.v1.DataService/ReadRows": ALL,
    "psd.v1.VectorService/List": ALL,
    "psd.v1.VectorService/Fetch": ALL,
    "psd.v1.ControlService/Join": PUSHES,
    "psd.v1.ControlService/Declare": PUSHES,
    "psd.v1.ControlService/Heartbeat": PUSHES,
    "psd.v1.ControlService/Leave": PUSHES,
    "psd.v1.ControlService/Commit": PUSHES,
    "psd.v1.ControlService/Measure": PUSHES,
    "psd.v1.ControlService/Counted": PUSHES,
    "psd.v1.ControlService/Barrier": PUSHES,
    "psd.v1.ControlService/Log": TRAINS,
    "psd.v1.ControlService/Stop": TRAINS,
    "psd.v1.ControlService/Load": PUSHES,
    "psd.v1.ControlService/Rollback": PUSHES,
    "psd.v1.ControlService/OpenBulk": PUSHES,
    "psd.v1.DataService/Push": PUSHES,
    "psd.v1.DataService/Pull": PUSHES,
    "psd.v1.DataService/PushPull": PUSHES,
    "psd.v1.DataService/PullRows": PUSHES,
    "psd.v1.DataService/PushPullSmall": PUSHES,
    "psd.v1.DataService/Initialize": PUSHES,
    "psd.v1.DataService/StoreBuffers": PUSHES,
    "psd.v1.DataService/SetParameters": PUSHES,
    "psd.v1.VectorService/Run": TRAINS,
    "psd.v1.VectorService/RunFrames": TRAINS,
    "psd.v1.VectorService/Create": TRAINS,
    "psd.v1.VectorService/Drop": TRAINS,
    "psd.v1.ControlService/Checkpoint": {"admin"},
    "psd.v1.ControlService/Kick": {"admin"},
    "psd.v1.ControlService/SetLearningRate": {"admin"},
    "psd.v1.ControlService/Drain": {"admin"},
}
"""Written down a second time on purpose: a change of the table is a decision."""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("# role token\n\n" + "".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    return path


@pytest.fixture
def guarded(cluster: Callable[..., Any], token_file: Path) -> Any:
    """A shard that asks for tokens."""
    return cluster(1, token_file=str(token_file)).shards[0]


def call(channel: grpc.Channel, method: Any, metadata: Any) -> grpc.StatusCode:
    """Make a call with an empty request; its status."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    start = kinds[method.client_streaming, method.server_streaming](
        f"/{method.containing_service.full_name}/{method.name}", request_serializer=lambda message: message.SerializeToString()
    )
    empty = message_factory.GetMessageClass(method.input_type)()
    request = iter([empty]) if method.client_streaming else empty
    try:
        answer = start(request, timeout=100, metadata=metadata)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def served(channel: grpc.Channel) -> dict[str, Any]:
    """The methods of all services that the shard itself names, by full name."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([question]), timeout=100, metadata=bearer(TOKENS["reader"]))
    names = [service.name for service in answer.list_services_response.service]
    questions = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
    pool = descriptor_pool.DescriptorPool()
    for answer in stub.ServerReflectionInfo(iter(questions), timeout=100, metadata=bearer(TOKENS["reader"])):
        for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
            pool.AddSerializedFile(file)
    services = [pool.FindServiceByName(name) for name in names]
    return {f"{service.full_name}/{method.name}": method for service in services for method in service.methods}


def test_every_method_is_for_the_roles_that_the_table_names(guarded: Any, dial: Callable[..., grpc.Channel]) -> None:
    """For each method that is served: nobody without a token, except health; each role as the table says; and the table names
    neither more nor less than what is served."""
    channel = dial(guarded.address)
    methods = served(channel)
    refusals = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED

    assert set(methods) == set(MAY) | OPEN
    assert {name[1:]: {role.value for role in roles} for name, roles in access.ROLES.items()} == MAY
    for name, method in methods.items():
        without = call(channel, method, None)
        assert without is (grpc.StatusCode.OK if name in OPEN else grpc.StatusCode.UNAUTHENTICATED), name
        for role, token in TOKENS.items():
            code = call(channel, method, bearer(token))
            if name in OPEN or role in MAY[name]:
                assert code not in refusals, f"{role}: {name}: {code}"
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, f"{role}: {name}: {code}"


def test_a_method_that_the_table_does_not_name_is_refused_to_everybody(guarded: Any, dial: Callable[..., grpc.Channel]) -> None:
    """Whoever adds an RPC and forgets the table has added nothing."""
    forgotten = dial(guarded.address).unary_unary("/psd.v1.ControlService/Forgotten")

    error = failure(forgotten, b"", timeout=100, metadata=bearer(TOKENS["admin"]))

    assert reason(error) == "PermissionDenied"
    assert "Forgotten: is for nobody" in error.details()


@pytest.mark.parametrize(
    "metadata",
    [
        bearer("worker-workerworkerworkerworkes"),
        bearer(""),
        bearer(TOKENS["admin"]) * 2,
        (("authorization", TOKENS["admin"]),),
        (("authorization", f"Basic {TOKENS['admin']}"),),
        (("authorization-bin", f"Bearer {TOKENS['admin']}".encode()),),
        bearer("x" * 8000),
    ],
    ids=["unknown", "empty", "twice", "no scheme", "another scheme", "binary", "long"],
)
def test_a_call_whose_token_is_none_is_not_authenticated(
    guarded: Any, dial: Callable[..., grpc.Channel], metadata: Any
) -> None:
    """Whatever it is that stands in a token's place."""
    stub = control_pb2_grpc.ControlServiceStub(dial(guarded.address))

    error = failure(stub.Status, control_pb2.StatusRequest(), timeout=100, metadata=metadata)

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reason(error) == "Unauthenticated"


def test_a_call_without_a_token_that_says_nothing_is_cut_off(
    guarded: Any, dial: Callable[..., grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is open; whoever opens a call of it and sends no message keeps its thread for a moment only."""
    monkeypatch.setattr(access, "OPEN_CALL_S", 0.1)
    check = dial(guarded.address).stream_unary("/grpc.health.v1.Health/Check")

    end = threading.Event()

    def silent() -> Any:
        end.wait(100)
        yield b""

    code = check.future(silent(), timeout=100).code()
    end.set()

    assert code is grpc.StatusCode.CANCELLED


def test_calls_without_a_token_are_few_at_a_time(token_file: Path) -> None:
    """Those beyond the limit are refused, and leave the threads to the workers."""
    interceptor = access.AccessInterceptor(access.Access(str(token_file)), Pace())
    stock = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    details = SimpleNamespace(method="/grpc.health.v1.Health/Check", invocation_metadata=())

    def begin() -> Any:
        answers = interceptor.intercept_service(lambda _: stock, details).stream_stream(iter(["?"]), Context())
        assert next(answers) == "?"
        return answers

    under_way = [begin() for _ in range(access.OPEN_CALLS_MAX)]
    with pytest.raises(ConnectionError, match="RESOURCE_EXHAUSTED: more than 16 calls without a token"):
        begin()
    under_way.pop().close()
    under_way.append(begin())

    for answers in under_way:
        answers.close()


class Context:
    """The context of a call, as far as an open one needs it."""

    def cancel(self) -> None:
        raise AssertionError

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise ConnectionError(f"{code.name}: {text}")


def join(channel: grpc.Channel, token: str) -> control_pb2.OpenBulkReply:
    """Join and declare, and ask for a ticket."""
    stub = control_pb2_grpc.ControlServiceStub(channel)
    given = {"timeout": 20, "metadata": bearer(token)}
    joined = stub.Join(control_pb2.JoinRequest(shard_count=1, world_size=1), **given)
    caller = job_pb2.Caller(run_id=joined.run_id, incarnation=joined.incarnation, session=joined.session)
    stub.Declare(control_pb2.DeclareRequest(caller=caller, spec=spec(1)), **given)
    return stub.OpenBulk(control_pb2.OpenBulkRequest(caller=caller), **given)


def outcome(stream: Stream) -> PsdError | None:
    """The error with which the shard ends a connection; None if it only closes it."""
    try:
        kind, head, _ = stream.receive()
        assert kind is Kind.ERROR
        message = bulk_pb2.BulkError.FromString(head)
        with pytest.raises(Disconnected):
            stream.receive()
        return error_from(message.reason, message.message, {})
    except Disconnected:
        return None
    finally:
        stream.close()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_the_bulk_lanes_ports_give_nothing_without_a_ticket(
    guarded: Any, dial: Callable[..., grpc.Channel], local: bool
) -> None:
    """No ticket, another one, a used one, or another message than HELLO: an error or the end, and no byte of the job."""
    reply = join(dial(guarded.address), TOKENS["worker"])
    hello = bulk_pb2.BulkHello(ticket=reply.ticket).SerializeToString()
    used = open_stream(reply, local=local)
    used.send(Kind.HELLO, hello)
    assert used.receive()[0] is Kind.WELCOME
    messages = [
        (Kind.HELLO, b"", "ticket"),
        (Kind.HELLO, bulk_pb2.BulkHello(ticket=bytes(32)).SerializeToString(), "ticket"),
        (Kind.HELLO, hello, "ticket"),
        (Kind.HELLO, b"\xff" * 20, "not a valid message"),
        (Kind.HELLO, bytes(2000), "head: has 2000 bytes, the limit is 1024"),
        (Kind.CALL, bulk_pb2.BulkCall(method=2).SerializeToString(), "begins with HELLO"),
        (Kind.ATTACH, b"", "begins with HELLO"),
        (Kind.FRAME, data_pb2.PushFrame(last=True).SerializeToString(), "begins with HELLO"),
    ]

    for kind, head, words in messages:
        stream = open_stream(reply, local=local)
        stream.send(kind, head)
        error = outcome(stream)
        assert error is not None
        assert words in str(error), kind
    used.close()


def test_a_connection_that_shows_no_ticket_in_time_is_closed_however_it_dawdles(
    guarded: Any, dial: Callable[..., grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, and one that says a byte now and then: the limit is on the whole, not on each wait."""
    monkeypatch.setattr(bulk_server, "HELLO_S", 0.3)
    reply = join(dial(guarded.address), TOKENS["worker"])
    silent = open_stream(reply, local=False)
    slow = socket.create_connection(("127.0.0.1", reply.tcp_port))
    slow.settimeout(20)

    assert outcome(silent) is None
    is_closed = False
    for byte in PREFIX.pack(Kind.HELLO, 1000, 0) + bytes(100):
        try:
            slow.send(bytes([byte]))
        except OSError:
            is_closed = True
            break
        select.select([], [], [], 0.05)

    assert is_closed
    slow.close()


def test_a_connection_whose_token_is_listed_no_more_is_closed_at_its_next_call(
    guarded: Any, dial: Callable[..., grpc.Channel], token_file: Path
) -> None:
    """What a worker has opened does not outlive its being one."""
    reply = join(dial(guarded.address), TOKENS["worker"])
    stream = open_stream(reply, local=False)
    stream.send(Kind.HELLO, bulk_pb2.BulkHello(ticket=reply.ticket).SerializeToString())
    assert stream.receive()[0] is Kind.WELCOME
    call = bulk_pb2.BulkCall(method=2, timeout_s=5).SerializeToString()

    stream.send(Kind.CALL, call)
    allowed, _, _ = stream.receive()
    token_file.write_text(f"admin {TOKENS['admin']}\n")
    stream.send(Kind.CALL, call)

    assert allowed is Kind.ERROR  # there is no such run; but it was heard
    assert outcome(stream) is None


def test_a_token_file_that_is_wrong_leaves_what_was_there_before(
    guarded: Any, dial: Callable[..., grpc.Channel], token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written file locks nobody out and lets nobody in; a later right one counts."""
    stub = control_pb2_grpc.ControlServiceStub(dial(guarded.address))
    fresh = "fresh-fresh-fresh-fresh"

    token_file.write_text(f"operator {fresh}\n")
    stub.Status(control_pb2.StatusRequest(), timeout=100, metadata=bearer(TOKENS["reader"]))
    refused = failure(stub.Status, control_pb2.StatusRequest(), timeout=100, metadata=bearer(fresh))
    token_file.write_text(f"reader {fresh}\n")
    stub.Status(control_pb2.StatusRequest(), timeout=100, metadata=bearer(fresh))
    late = failure(stub.Status, control_pb2.StatusRequest(), timeout=100, metadata=bearer(TOKENS["reader"]))

    assert refused.code() is late.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [
        str(token_file) in r.getMessage() and fresh not in r.getMessage() for r in caplog.records if "earlier contents" in r.msg
    ] == [True]


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):
    """Shows a token with each call."""

    def __init__(self, token: str) -> None:
        self._metadata = bearer(token)

    def _call(self, start: Any, details: Any, request: Any) -> Any:
        given = SimpleNamespace(
            method=details.method,
            timeout=details.timeout,
            metadata=self._metadata,
            credentials=None,
            wait_for_ready=None,
            compression=None,
        )
        return start(given, request)

    intercept_unary_unary = intercept_stream_unary = _call


def read(digest: bytes, run_id: str) -> bytes:
    """A call for all of the job's parameters."""
    cut = data_pb2.Cut(id="a", step=0)
    request = data_pb2.ReadRequest(run_id=run_id, layout_digest=digest, cut=cut)
    return bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_READ, timeout_s=5, read=request).SerializeToString()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_a_readers_connection_reads_and_does_nothing_else(
    guarded: Any, dial: Callable[..., grpc.Channel], token_file: Path, local: bool
) -> None:
    """Its token opens no worker's connection, and its connection ends when the token is listed no more."""
    channel = dial(guarded.address)
    stub = control_pb2_grpc.ControlServiceStub(channel)
    worker = BulkWorker(grpc.intercept_channel(channel, Bearer(TOKENS["worker"])))
    given = {"timeout": 20, "metadata": bearer(TOKENS["reader"])}
    with pytest.raises(grpc.RpcError, match="is for admin, publisher, worker; this token is a reader's"):
        stub.OpenBulk(control_pb2.OpenBulkRequest(caller=worker.caller), **given)
    with pytest.raises(grpc.RpcError, match="reader: absent, but a connection is for one reader"):
        stub.OpenReads(control_pb2.OpenReadsRequest(), **given)
    reply = stub.OpenReads(control_pb2.OpenReadsRequest(reader=data_pb2.ReaderNote(id=5)), **given)
    stream = open_stream(reply, local=local)
    stream.send(Kind.HELLO, bulk_pb2.BulkHello(ticket=reply.ticket).SerializeToString())
    assert stream.receive()[0] is Kind.WELCOME

    for method in (bulk_pb2.BULK_METHOD_PULL, bulk_pb2.BULK_METHOD_FETCH_VECTOR):
        stream.send(Kind.CALL, worker.call(method))
        with pytest.raises(PsdError, match=r"is not one of a reader's|this connection is"):
            answer(stream, Kind.REPLY)
    for _ in range(2):
        stream.send(Kind.CALL, read(worker.digest, worker.caller.run_id))
        blocks = [data_pb2.PullFrame.FromString(answer(stream, Kind.ANSWER)).block for _ in range(BLOCKS)]
        assert blocks == [0, 1]
        answer(stream, Kind.REPLY)
    own = worker.connect(local=local)
    own.send(Kind.CALL, read(worker.digest, worker.caller.run_id))
    with pytest.raises(PsdError, match="60 is not one of a worker's"):
        answer(own, Kind.REPLY)
    token_file.write_text(f"admin {TOKENS['admin']}\n")
    stream.send(Kind.CALL, read(worker.digest, worker.caller.run_id))
    assert outcome(stream) is None
    own.close()
