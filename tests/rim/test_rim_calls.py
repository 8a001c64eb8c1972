"""Calls over real sockets with stock stubs: waits, deadlines, hang-ups, draining, errors, health, reflection."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from raw_client import TIMEOUT_S, RawWorker, detail, failure, reason, spec

from psd.rim.calls import wait_s
from psd.v1 import control_pb2, control_pb2_grpc, data_pb2


def two_workers(shard, dial, job=None):
    """A declared and initialized job with two workers on one channel."""
    job = job if job is not None else spec()
    channel = dial(shard.address)
    workers = [RawWorker(channel, rank, job.world_size) for rank in range(2)]
    workers[0].declare(job)
    workers[1].declare(job)
    return workers


def test_push_pull_of_several_steps_on_one_stream(cluster, dial):
    """Several pushes follow each other on one stream; each is answered in full, and the last frame of each answer says so."""
    shard = cluster(1).shards[0].address
    job = spec(1, blocks=3)
    worker = RawWorker(dial(shard), 0, 1)
    worker.declare(job)
    frames = [f for clock in range(4) for f in worker.frames(clock, [[1.0] * 3, [2.0] * 3, [3.0] * 3])]

    answer = list(worker.data.PushPull(iter(frames), timeout=TIMEOUT_S))

    assert [f.HasField("push") for f in answer] == [False, False, False, True] * 4
    assert [f.push.clock for f in answer if f.HasField("push")] == [1, 2, 3, 4]
    assert [(f.block, f.version) for f in answer[-4:-1]] == [(0, 4), (1, 4), (2, 4)]
    assert np.frombuffer(answer[-2].payload, np.float32).tolist() == [-12.0] * 3


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_push_pull_reads_its_own_gradient_in_every_block(cluster, dial, mode):
    """Without rounds, too, an answer contains the push that it answers, however early it leaves."""
    job = spec(1, blocks=4, mode=mode, bound=1 if mode == "ssp" else 0)
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(job)

    for clock in range(3):
        frames = worker.frames(clock, [[1.0] * 3] * 4)
        answer = list(worker.data.PushPull(iter(frames), timeout=TIMEOUT_S))[:-1]
        assert sorted(f.block for f in answer) == [0, 1, 2, 3]
        for frame in answer:
            assert np.frombuffer(frame.payload, np.float32).tolist() == [-1.0 - clock] * 3, f"block {frame.block}"


def test_blocks_may_come_in_any_order(cluster, dial):
    """A client may send blocks as back-propagation yields them, and is answered as they are covered."""
    job = spec(1, blocks=3)
    worker = RawWorker(dial(cluster(1).shards[0].address), 0, 1)
    worker.declare(job)
    frames = worker.frames(0, [[1.0] * 3, [2.0] * 3, [3.0] * 3])
    frames[0].block, frames[2].block = 2, 0

    answer = list(worker.data.PushPull(iter(frames), timeout=TIMEOUT_S))

    assert [f.block for f in answer[:-1]] == [2, 1, 0]
    assert worker.pull(1) == {0: [-3.0] * 3, 1: [-2.0] * 3, 2: [-1.0] * 3}


def test_a_deadline_ends_a_wait_with_the_missing_workers_name(cluster, dial, impatient):
    """A pull, an early push, a barrier and a declaration that wait end at their deadline and name whom they lack."""
    shard = cluster(1).shards[0]
    a, _b = two_workers(shard, dial)
    a.push(0, [[1.0] * 3])

    with impatient():
        pull = failure(a.pull, 1)
        push = failure(a.push, 1, [[1.0] * 3])
        barrier = failure(a.control.Barrier, a.barrier_request("epoch-1"), timeout=TIMEOUT_S)

    for error, name, words in (
        (pull, "WaitTimeout", "step 0: waiting for worker 1, last seen"),
        (push, "WaitTimeout", "step 1: step 0 is not complete; waiting for worker 1"),
        (barrier, "BarrierTimeout", "barrier 'epoch-1': waiting for worker 1"),
    ):
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(error) == name, error.details()
        assert words in error.details()
        assert detail(error) == {"missing": [1]}
    assert shard.shard._core.waiting.open() == []
    assert shard.shard._core.barriers._barriers["epoch-1"].arrived == {}


@pytest.mark.parametrize(("remaining", "waits"), [(None, 3600), (1e9, 3600), (100, 99), (0.5, 0.45), (-1, 0)])
def test_a_wait_ends_in_time_for_the_answer(remaining, waits):
    """A tenth of the caller's time is left for it, a second at most."""
    assert wait_s(SimpleNamespace(time_remaining=lambda: remaining)) == pytest.approx(waits)


def test_a_declaration_that_waits_names_the_initializer(cluster, dial, impatient):
    """A worker that waits for initial values learns at its deadline from whom."""
    channel = dial(cluster(1).shards[0].address)
    a, b = RawWorker(channel, 0), RawWorker(channel, 1)
    a.control.Declare(control_pb2.DeclareRequest(caller=a.caller, spec=spec()), timeout=TIMEOUT_S)

    with impatient():
        error = failure(b.control.Declare, control_pb2.DeclareRequest(caller=b.caller, spec=spec()), timeout=TIMEOUT_S)

    assert reason(error) == "WaitTimeout"
    assert "initial values from worker 0" in error.details()


def test_a_call_without_a_deadline_waits(cluster, dial, eventually):
    """No deadline is no error: the call ends when what it waits for has come."""
    shard = cluster(1).shards[0]
    a, b = two_workers(shard, dial)
    call = a.control.Barrier.future(a.barrier_request("x"))
    eventually(lambda: len(shard.shard._core.waiting.open()) == 1, "the call waits")

    b.control.Barrier(b.barrier_request("x"), timeout=TIMEOUT_S)

    assert call.result(TIMEOUT_S).generation == 0


@pytest.mark.parametrize("kind", ["pull", "push", "push_pull", "barrier", "declare"])
def test_a_caller_that_hangs_up_frees_its_ticket(cluster, dial, eventually, kind):
    """A cancelled call leaves no open wait and no arrival behind, and the shard serves on."""
    shard = cluster(1).shards[0]
    waiting = shard.shard._core.waiting
    if kind == "declare":
        channel = dial(shard.address)
        a, b = RawWorker(channel, 0), RawWorker(channel, 1)
        a.control.Declare(control_pb2.DeclareRequest(caller=a.caller, spec=spec()), timeout=TIMEOUT_S)
        call = b.control.Declare.future(control_pb2.DeclareRequest(caller=b.caller, spec=spec()), timeout=TIMEOUT_S)
    else:
        a, b = two_workers(shard, dial)
        a.push(0, [[1.0] * 3])
        early = iter(a.frames(1, [[1.0] * 3]))
        call = {
            "pull": lambda: a.data.Pull(a.pull_request(1), timeout=TIMEOUT_S),
            "push": lambda: a.data.Push.future(early, timeout=TIMEOUT_S),
            "push_pull": lambda: a.data.PushPull(early, timeout=TIMEOUT_S),
            "barrier": lambda: a.control.Barrier.future(a.barrier_request("x"), timeout=TIMEOUT_S),
        }[kind]()
    eventually(lambda: len(waiting.open()) == 1, "the call waits")

    call.cancel()

    eventually(lambda: waiting.open() == [], "the wait has ended")
    eventually(lambda: not any(x.arrived for x in shard.shard._core.barriers._barriers.values()), "nobody has arrived")
    assert a.heartbeat().waits == []


def begin_pull(shard, a, eventually):
    """A pull of a's own update, which waits for the other worker."""
    a.push(0, [[1.0] * 3])
    call = a.data.Pull(a.pull_request(1), timeout=TIMEOUT_S)
    eventually(lambda: len(shard.shard._core.waiting.open()) == 1, "the call waits")
    return call


def test_a_heartbeat_says_what_its_worker_waits_for(cluster, dial, eventually):
    """While a pull waits, the worker's heartbeat and everybody's status name the wait and the one that it lacks."""
    shard = cluster(1).shards[0]
    a, b = two_workers(shard, dial)
    call = begin_pull(shard, a, eventually)

    (wait,) = a.heartbeat(1).waits
    status = a.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)

    assert (wait.rank, wait.kind, wait.clock) == (0, control_pb2.WAIT_KIND_ROUND, 0)
    assert [(m.rank, m.host) for m in wait.missing] == [(1, "raw")]
    assert [w.rank for w in status.waits] == [0]
    assert b.heartbeat().waits == []
    b.push(0, [[3.0] * 3])
    assert [np.frombuffer(f.payload, np.float32).tolist() for f in call] == [[-2.0] * 3]


def test_status_when_the_name_of_a_directory_is_no_text_then_it_is_escaped(cluster, dial, tmp_path):
    """A file system takes any bytes, a message does not."""
    shard = cluster(1, checkpoint_dir=f"{tmp_path}/\udcff").shards[0]

    status = control_pb2_grpc.ControlServiceStub(dial(shard.address)).Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)

    assert status.checkpoint_dir == f"{tmp_path}/\\udcff"


def test_status_counts_what_happened(cluster, dial):
    """Numbers in the status are those of the calls that were made."""
    shard = cluster(1).shards[0]
    a, b = two_workers(shard, dial)
    for clock in range(3):
        a.push(clock, [[1.0] * 3])
        b.push(clock, [[1.0] * 3])
    b.push(2, [[1.0] * 3])
    a.pull(3)
    failure(a.push, 9999, [[1.0] * 3])

    status = a.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)

    assert status.state == control_pb2.SHARD_STATE_SERVING
    counted = {
        "pushes_accepted": 6,
        "pushes_duplicate": 1,
        "pushes_late": 0,
        "pulls": 1,
        "updates": 3,
        "requests_refused": 1,
        "version_min": 3,
        "version_max": 3,
        "min_clock": 3,
        "parameter_bytes": 12,
        "slot_bytes": 0,
        "blocks": 1,
        "tensors": 1,
        "received_bytes": 8 * 12,
        "sent_bytes": 12,
    }
    assert {name: status.numbers[name] for name in counted} == counted
    assert (status.consistency, status.world_size, status.quorum) == ("sync", 2, 2)
    assert [w.clock for w in status.workers] == [3, 3]


def test_draining_ends_waits_and_refuses_new_work_but_hears_goodbyes(cluster, dial, eventually):
    """A shard that drains fails its waits, refuses pushes, pulls and barriers as Draining, and still takes leave and status."""
    shard = cluster(1).shards[0]
    a, b = two_workers(shard, dial)
    pull = begin_pull(shard, a, eventually)

    shard.shard.drain()

    for error in (
        failure(list, pull),
        failure(b.push, 0, [[1.0] * 3]),
        failure(b.pull, 0),
        failure(b.control.Barrier, b.barrier_request("x"), timeout=TIMEOUT_S),
    ):
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "Draining")
    assert b.heartbeat().waits == []
    assert a.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S).state == control_pb2.SHARD_STATE_DRAINING
    a.leave()


def test_drain_stops_within_its_grace_while_streams_are_open(cluster, dial):
    """An idle PushPull stream does not keep a draining shard longer than its grace; health says NOT_SERVING before."""
    shard = cluster(1).shards[0]
    a, _b = two_workers(shard, dial)
    release = threading.Event()

    def frames():
        yield from a.frames(0, [[1.0] * 3])
        release.wait(TIMEOUT_S)

    stream = a.data.PushPull(frames(), timeout=TIMEOUT_S)
    watch = health_pb2_grpc.HealthStub(dial(shard.address)).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING

    shard.drain(0.2)
    release.set()

    assert failure(list, stream).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_push_after_draining_began_is_refused_on_an_open_stream(cluster, dial):
    """A stream that was open before ends, with Draining, at its next push."""
    shard = cluster(1).shards[0]
    worker = RawWorker(dial(shard.address), 0, 1)
    worker.declare(spec(1))
    go_on = threading.Event()

    def frames():
        yield from worker.frames(0, [[1.0] * 3])
        go_on.wait(TIMEOUT_S)
        yield from worker.frames(1, [[1.0] * 3])

    stream = worker.data.PushPull(frames(), timeout=TIMEOUT_S)
    first = [next(stream), next(stream)]
    shard.shard.drain()
    go_on.set()

    assert first[1].push.blocks_counted == 1
    assert reason(failure(list, stream)) == "Draining"


def test_health_is_serving_for_the_server_and_each_service(cluster, dial):
    """The standard health service knows the server and both services, and answers NOT_FOUND for others."""
    stub = health_pb2_grpc.HealthStub(dial(cluster(1).shards[0].address))

    for service in ("", "psd.v1.DataService", "psd.v1.ControlService"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    error = failure(stub.Check, health_pb2.HealthCheckRequest(service="other"), timeout=TIMEOUT_S)
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services_and_gives_their_descriptors(cluster, dial, version):
    """A stranger with grpcurl, of any age, finds the services and the messages."""
    service = f"grpc.reflection.{version}.ServerReflection"
    ask = dial(cluster(1).shards[0].address).stream_stream(
        f"/{service}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="psd.v1.DataService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
        reflection_pb2.ServerReflectionRequest(file_by_filename=f"grpc_reflection/{version}/reflection.proto"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="psd.v1.Nothing"),
    ]

    services, files, own, by_name, none = list(ask(iter(requests), timeout=TIMEOUT_S))

    assert {"psd.v1.DataService", "psd.v1.ControlService", "grpc.health.v1.Health", service} <= {
        s.name for s in services.list_services_response.service
    }
    names = [
        descriptor_pb2.FileDescriptorProto.FromString(f).name for f in files.file_descriptor_response.file_descriptor_proto
    ]
    assert "psd/v1/data.proto" in names
    (file,) = own.file_descriptor_response.file_descriptor_proto
    assert descriptor_pb2.FileDescriptorProto.FromString(file).package == f"grpc.reflection.{version}"
    assert [file] == list(by_name.file_descriptor_response.file_descriptor_proto)
    assert none.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_errors_carry_status_reason_and_detail(cluster, dial):
    """An error arrives as a gRPC status, its reason and its facts, and its message fits into a header whatever is in it."""
    shard = cluster(1).shards[0]
    a, b = two_workers(shard, dial)
    a.push(0, [[1.0] * 3])

    nan = failure(b.push, 0, [[1.0, np.nan, 1.0]])
    job = spec()
    job.groups[0].flags.extend(["\N{GRINNING FACE}" * 1000] * 5)
    long = failure(b.control.Declare, control_pb2.DeclareRequest(caller=b.caller, spec=job), timeout=TIMEOUT_S)

    assert (nan.code(), reason(nan)) == (grpc.StatusCode.INVALID_ARGUMENT, "NonFiniteGradient")
    assert detail(nan) == {"rank": 1, "tensor": "t0", "clock": 0}
    assert "tensor 't0'" in nan.details()
    assert (long.code(), reason(long)) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
    assert "groups.flags" in long.details()
    assert len(long.details().encode()) <= 1500


def test_a_defect_is_internal_logged_once_and_says_nothing(cluster, dial, caplog):
    """An exception that is nobody's error becomes INTERNAL with a generic message; the traceback goes to the log."""
    shard = cluster(1).shards[0]
    a, _b = two_workers(shard, dial)

    def broken(*_args, **_kwargs):
        raise KeyError("secret")

    shard.shard.exchange.begin_pull = broken
    error = failure(a.pull, 0)

    assert (error.code(), reason(error)) == (grpc.StatusCode.INTERNAL, "InternalError")
    assert "secret" not in error.details()
    assert len([r for r in caplog.records if r.name == "psd.rim.calls"]) == 1


def test_a_message_above_the_limit_is_refused_by_grpc(cluster, dial):
    """A message that is larger than --max-message-bytes ends in RESOURCE_EXHAUSTED and is never parsed."""
    shard = cluster(1).shards[0]
    channel = dial(shard.address, max_send_message_length=-1)
    worker = RawWorker(channel, 0, 1)
    worker.declare(spec(1))

    error = failure(worker.push, 0, [np.zeros(9 << 20, np.float32)])

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert worker.push(0, [[1.0] * 3]).blocks_counted == 1


def test_a_push_refused_in_its_second_block_leaves_the_first_counted(cluster, dial):
    """Refusal is block by block, as data.proto says: what was counted before the bad frame stays, and the same push sent again
    without the fault completes it, once."""
    shard = cluster(1).shards[0]
    worker = RawWorker(dial(shard.address), 0, 1)
    worker.declare(spec(1, blocks=3))

    error = failure(worker.push, 0, [[1.0] * 3, [np.inf] * 3, [1.0] * 3])
    assert reason(error) == "NonFiniteGradient"
    assert [b.version for b in shard.shard._core.job.blocks.values()] == [1, 0, 0]
    reply = worker.push(0, [[9.0] * 3, [2.0] * 3, [3.0] * 3])

    assert (reply.blocks_counted, reply.blocks_duplicate) == (2, 1)
    assert worker.pull(1) == {0: [-1.0] * 3, 1: [-2.0] * 3, 2: [-3.0] * 3}


def test_many_threads_on_one_channel_train_synchronously(cluster, dial):
    """Sixteen workers on one connection push and pull 10 rounds of several blocks: the sums are exact."""
    address = cluster(1).shards[0].address
    job = spec(16, blocks=5, size=1000)
    channel = dial(address)
    workers = [RawWorker(channel, rank, 16) for rank in range(16)]

    def train(worker):
        worker.declare(job)
        for clock in range(10):
            frames = worker.frames(clock, [[float(worker.caller.rank)] * 1000] * 5)
            answer = list(worker.data.PushPull(iter(frames), timeout=TIMEOUT_S))
            assert [f.version for f in answer[:-1]] == [clock + 1] * 5
        return worker.pull(10)

    with ThreadPoolExecutor(16) as pool:
        pulled = list(pool.map(train, workers))

    assert all(p == {b: [-75.0] * 1000 for b in range(5)} for p in pulled)


def test_a_shard_without_blocks_takes_a_push_of_one_empty_frame(cluster, dial):
    """With more shards than blocks, the others answer a push that has only a header, and keep the worker's clock."""
    shards = cluster(2).shards
    job = spec(1)
    first = RawWorker(dial(shards[0].address), 0, 1, shards=2)
    other = RawWorker(dial(shards[1].address), 0, 1, shard=1, shards=2, session=first.session)
    choice = first.control.Declare(control_pb2.DeclareRequest(caller=first.caller, spec=job), timeout=TIMEOUT_S).choice
    digest = other.control.Declare(control_pb2.DeclareRequest(caller=other.caller, spec=job), timeout=TIMEOUT_S).layout_digest
    init = data_pb2.InitializeFrame(caller=other.caller, layout_digest=digest, choice=choice)
    assert other.data.Initialize(iter([init]), timeout=TIMEOUT_S).accepted
    other.digest = digest
    frame = other.frames(0, [[0.0]])[0]
    frame.ClearField("block")
    frame.ClearField("payload")

    reply = other.data.Push(iter([frame]), timeout=TIMEOUT_S)

    assert (reply.clock, reply.blocks_counted) == (1, 0)
    assert other.pull(1) == {}
