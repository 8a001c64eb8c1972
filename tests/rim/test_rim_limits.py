"""Limits of a shard on what peers send: each that no other test meets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.contract.config import Limits, ServerConfig
from psd.contract.jobspec import GROUP_ENTRIES_MAX
from psd.rim.server import ShardServer
from psd.v1 import control_pb2, data_pb2, job_pb2


def test_names_have_the_length_that_the_shard_accepts(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> None:
    """Of tensors and of barriers, in UTF-8; a longer limit than the default lets longer ones pass."""
    worker = RawWorker(dial(cluster(1, limits=Limits(name_bytes_max=300)).servers), world_size=1)
    job = spec(1)

    job.tensors[0].name = "ü" * 151
    too_long = failure(worker.declare, job)
    job.tensors[0].name = "ü" * 150
    worker.declare(job)
    barrier = failure(worker.control.Barrier, worker.barrier_request("b" * 301), timeout=TIMEOUT_S)
    worker.control.Barrier(worker.barrier_request("b" * 300), timeout=TIMEOUT_S)

    assert reason(too_long) == "InvalidTensor"
    assert "tensors.name: has 302 bytes, the shard's --max-name-bytes is 300" in too_long.details()
    assert "name: a barrier's name must have 1 to 300 bytes" in barrier.details()


def test_all_workers_of_a_job_may_come_back_to_a_shard_for_fewer(tmp_path: Path) -> None:
    """Calls and connections follow from how many there are, where that is more than the flag says."""
    config = ServerConfig(0, 1, listen="127.0.0.1:0", state_dir=str(tmp_path / "state"), limits=Limits(workers_max=40))
    first = ShardServer(config)
    first.start()
    with grpc.insecure_channel(first.address) as channel:
        worker = RawWorker(channel, world_size=40)
        worker.declare(spec(40))
        first.stop()

    second = ShardServer(replace(config, limits=Limits(workers_max=1)))
    try:
        assert second.shard.is_recovered
        assert second._config.limits.connections_max == config.limits.connections_max
        assert second._config.limits.calls_max == config.limits.calls_max
    finally:
        second.shard.close(keep=False)


@pytest.mark.parametrize("field", ["flags", "constants", "slots", "scalars"])
def test_groups_have_few_entries(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], field: str) -> None:
    """A list in a group is counted before anything is made of it."""
    worker = RawWorker(dial(cluster(1).servers), world_size=1)
    job = spec(1)
    getattr(job.groups[0], field).extend([0.5 if field == "constants" else "x"] * (GROUP_ENTRIES_MAX + 1))

    error = failure(worker.declare, job)

    assert f"groups.{field}: 65 are above the limit of 64" in error.details()


def test_decisions_name_no_more_workers_than_there_are(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> None:
    """Members are as many bits as the job has workers, rounded up to bytes, also if all others are zero."""
    worker = RawWorker(dial(cluster(1).servers), world_size=1)
    worker.declare(spec(1))
    request = worker.pull_request(0)
    request.decisions.add(members=bytes(2))

    error = failure(worker.data.Pull, request, timeout=TIMEOUT_S)

    assert "decisions.members: has 2 bytes, 1 are enough" in error.details()


def test_readers_are_few_at_a_time(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], eventually: Callable[..., None]
) -> None:
    """One more is refused and may come again; who waits for a distant cut and hangs up leaves nothing behind."""
    shard = cluster(1, limits=Limits(reads_max=2)).shards[0]
    worker = RawWorker(dial(shard.address), world_size=1)
    worker.declare(spec(1))
    block = shard.shard._core.job.blocks[0]

    def read(name: str) -> Any:
        request = data_pb2.ReadRequest(layout_digest=worker.digest, cut=data_pb2.Cut(id=name, step=1_000_000))
        return worker.data.Read(request, timeout=TIMEOUT_S)

    waiting = [read("a"), read("b")]
    eventually(lambda: len(block._waits._takes.get(1_000_000, ())) == 2, "two readers wait for the block")
    refused = failure(lambda: read("c"))
    for call in waiting:
        call.cancel()
    eventually(lambda: not block._waits._takes, "nothing is left of the readers that hung up")
    again = read("d")
    eventually(lambda: len(block._waits._takes) == 1, "there is room for another one")
    again.cancel()

    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason(refused) == "Overloaded"
    assert "--max-reads" in refused.details()


def test_connections_are_few_at_a_time(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> None:
    """One more finds no answer; the others go on."""
    address = cluster(1, limits=Limits(connections=2)).servers
    first, second, third = (RawStatus(dial(address)) for _ in range(3))

    assert [first.code(), second.code()] == [grpc.StatusCode.OK] * 2
    assert third.code(timeout=0.5) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert [first.code(), second.code()] == [grpc.StatusCode.OK] * 2


def test_calls_are_few_at_a_time(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], eventually: Callable[..., None]
) -> None:
    """One more is refused instead of queued. On another connection: on the same one gRPC would let it wait."""
    shard = cluster(1, limits=Limits(calls=2)).shards[0]
    workers = [RawWorker(dial(shard.address), rank, 3) for rank in range(2)]
    calls = shard.shard._core.waiting.open
    waiting: list[grpc.Future] = []

    def one_more_waits() -> bool:
        """An ended call takes room for a moment after its answer, so that the next may be refused."""
        if waiting[-1].done():
            waiting[-1] = worker.control.Barrier.future(request, timeout=TIMEOUT_S)
        return len(calls()) == len(waiting)

    for worker in workers:
        request = worker.barrier_request("b")
        waiting.append(worker.control.Barrier.future(request, timeout=TIMEOUT_S))
        eventually(one_more_waits, f"{len(waiting)} calls wait")

    assert RawStatus(dial(shard.address)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in waiting:
        call.cancel()


def test_metadata_is_small(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> None:
    """What comes before a call's first message is bounded, too."""
    status = RawStatus(dial(cluster(1).servers, max_metadata_size=1 << 20))

    assert status.code(metadata=(("x", "y" * 20_000),)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.code(metadata=(("x", "y" * 8_000),)) is grpc.StatusCode.OK


class RawStatus:
    """Asks for a shard's status. `code`: what came of it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._call = channel.unary_unary(
            "/psd.v1.ControlService/Status", control_pb2.StatusRequest.SerializeToString, control_pb2.StatusReply.FromString
        )

    def code(self, timeout: float = TIMEOUT_S, metadata: Any = None) -> grpc.StatusCode:
        try:
            self._call(control_pb2.StatusRequest(), timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_a_declaration_of_many_things_is_counted_before_it_is_read(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]
) -> None:
    """A tensor takes two bytes on the wire and hundreds in the shard."""
    worker = RawWorker(dial(cluster(1, limits=Limits(tensors_max=3)).servers), world_size=1)
    job = spec(1)
    job.tensors.extend([job_pb2.TensorSpec()] * 60_000)

    error = failure(worker.declare, job)

    assert "tensors: 60001 are above the shard's --max-tensors 3" in error.details()
