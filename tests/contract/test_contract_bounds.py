"""Messages of very many parts are refused before anything is made of them, at whatever depth the parts are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psd.contract import bounds
from psd.contract.bounds import NUMBER_BYTES_PER_PART, PARTS_MAX, TAGS_PER_PART, UNCOUNTED_BYTES, check_parts
from psd.contract.config import Limits, ServerConfig
from psd.contract.errors import InvalidRequest
from psd.rim.calls import CallGuard, Frame, frame_parser, message_parser
from psd.rim.control_service import ControlService
from psd.rim.pace import Pace
from psd.state.shard import Shard
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2, vectors_pb2


def nested(kind, *path, times=PARTS_MAX + 1):
    """The bytes of a message with so many empty things in the last field of a path; also the names of the fields before
    it are those of messages."""
    fields = []
    for name in path:
        fields.append(kind.DESCRIPTOR.fields_by_name[name])
        if fields[-1].message_type is not None:
            kind = fields[-1].message_type._concrete_class
    data = bytes([fields[-1].number << 3 | 2, 0]) * times
    for field in reversed(fields[:-1]):
        data = bytes([field.number << 3 | 2]) + _varint(len(data)) + data
    return data


def _varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (control_pb2.HeartbeatRequest, ["cuts"]),
        (control_pb2.CommitRequest, ["measures"]),
        (control_pb2.CommitRequest, ["measures", "squares"]),
        (control_pb2.LogRequest, ["names"]),
        (control_pb2.DeclareRequest, ["spec", "tensors"]),
        (control_pb2.DeclareRequest, ["spec", "tensors", "aliases"]),
        (control_pb2.DeclareRequest, ["spec", "groups", "flags"]),
        (data_pb2.PullRequest, ["decisions"]),
        (data_pb2.BuffersRequest, ["buffers"]),
        (data_pb2.ParametersRequest, ["parameters"]),
        (data_pb2.PushFrame, ["in_memory_present"]),
        (data_pb2.PushFrame, ["push", "scalars"]),
        (bulk_pb2.BulkCall, ["pull", "decisions"]),
        (vectors_pb2.VectorBatch, ["operations"]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, list) else value.DESCRIPTOR.name,
)
def test_a_message_of_too_many_parts_is_refused_by_name(kind, path):
    """One less is parsed; whoever handles it has limits of its own."""
    data = nested(kind, *path)

    refused = message_parser(kind)(data)
    assert isinstance(refused, InvalidRequest)
    assert f"{kind.DESCRIPTOR.name}: has more than {PARTS_MAX} parts in its lists" in str(refused)
    assert isinstance(message_parser(kind, PARTS_MAX + len(path))(data), kind)


def test_a_frame_of_too_many_parts_is_refused_whatever_its_payload():
    """What is not looked through is the payload, of which nothing is made."""
    head = data_pb2.PushFrame(push=data_pb2.PushHeader.FromString(nested(data_pb2.PushHeader, "scalars")))
    tag = bytes([data_pb2.PushFrame.DESCRIPTOR.fields_by_name["payload"].number << 3 | 2])

    refused = frame_parser(data_pb2.PushFrame)(head.SerializeToString())
    passed = frame_parser(data_pb2.PushFrame)(tag + _varint(1 << 20) + bytes(1 << 20))

    assert "PushFrame: has more than" in str(refused)
    assert isinstance(passed, Frame)


def test_fields_that_are_no_parts_are_bounded_too():
    """A number that stands there again takes no memory, and time."""
    number = control_pb2.HeartbeatRequest.DESCRIPTOR.fields_by_name["clock"].number
    data = bytes([number << 3, 1]) * (3 * TAGS_PER_PART + 1)

    with pytest.raises(InvalidRequest, match=f"HeartbeatRequest: has more than {3 * TAGS_PER_PART} fields"):
        bounds._Count("HeartbeatRequest", 3).add(memoryview(data), {})


def test_a_large_declaration_passes():
    """As many tensors as a shard takes by default, each with an alias."""
    job = job_pb2.JobSpec(tensors=[job_pb2.TensorSpec(name="layer", aliases=["tied"])] * (PARTS_MAX // 2 + 1))
    data = control_pb2.DeclareRequest(spec=job).SerializeToString()
    assert len(data) > UNCOUNTED_BYTES

    check_parts(data, control_pb2.DeclareRequest.DESCRIPTOR, PARTS_MAX + 2)
    with pytest.raises(InvalidRequest):
        check_parts(data, control_pb2.DeclareRequest.DESCRIPTOR, PARTS_MAX + 1)


@pytest.mark.parametrize("tensors_max", [40_000, 100])
def test_the_measures_of_as_many_tensors_as_a_shard_takes_pass(tensors_max):
    """A layer-wise rule has two sums for each, from each of the shards."""
    shard = Shard(ServerConfig(0, 3, limits=Limits(tensors_max=tensors_max)))
    handler = ControlService(
        shard, CallGuard(shard, Pace()), address=str, on_leave=str, open_bulk=None, open_reads=None
    ).handler()
    call = SimpleNamespace(method="/psd.v1.ControlService/Commit", invocation_metadata=())
    squares = [job_pb2.Measure(is_finite=True, squares=[b"\1"] * 2 * tensors_max)] * 3
    parse = handler.service(call).request_deserializer

    assert isinstance(parse(control_pb2.CommitRequest(measures=squares).SerializeToString()), control_pb2.CommitRequest)
    beyond = parse(nested(control_pb2.CommitRequest, "measures", "squares", times=7 * tensors_max + PARTS_MAX))
    assert isinstance(beyond, InvalidRequest)
    shard.close(keep=False)


def test_parts_are_counted_in_every_request():
    """Also of services to come: whatever has a list of messages or texts is looked through for it."""
    for service in (control_pb2, data_pb2, vectors_pb2, bulk_pb2):
        for kind in service.DESCRIPTOR.message_types_by_name.values():
            lists = {
                field.number
                for field in kind.fields
                if field.is_repeated and field.type in (field.TYPE_MESSAGE, field.TYPE_STRING, field.TYPE_BYTES)
            }
            numbers = {field.number for field in kind.fields if field.is_repeated} - lists
            found = bounds._shape(kind).items()
            assert lists == {number for number, (how, _) in found if how == bounds._IS_PART}
            assert numbers == {number for number, (how, _) in found if how == bounds._IS_NUMBERS}


@pytest.mark.parametrize("depth", [0, 1])
def test_numbers_in_lists_are_bounded_too(depth):
    """By their bytes, of which each can be a number that takes eight."""
    most = PARTS_MAX * NUMBER_BYTES_PER_PART
    numbers = bytes([data_pb2.PushHeader.DESCRIPTOR.fields_by_name["versions"].number << 3 | 2])
    data = numbers + _varint(most + 1) + bytes(most + 1)
    if depth:
        data = bytes([data_pb2.PushFrame.DESCRIPTOR.fields_by_name["push"].number << 3 | 2]) + _varint(len(data)) + data
    kind = data_pb2.PushFrame if depth else data_pb2.PushHeader

    refused = message_parser(kind)(data)

    assert f"{kind.DESCRIPTOR.name}: has more than {most} bytes of numbers in its lists" in str(refused)
    assert isinstance(message_parser(kind, PARTS_MAX + 1)(data), kind)
