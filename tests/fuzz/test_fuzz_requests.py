"""Requests of every RPC, of any content, through a shard's own parsers and handlers: a status of psd's, never a defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fuzzing import ends_in, fuzzed, messages
from google.protobuf import message_factory
from hypothesis import given
from hypothesis import strategies as st
from known_fields import OF_VECTORS, known_fields
from malformed_target import LIMITS, SPEC, WORLD, Aborted, Request, Target

from psd.contract.errors import PsdError
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.spec_limits import check_counts, check_limits
from psd.contract.verdicts import Verdict, judged
from psd.v1 import control_pb2, data_pb2, job_pb2, vectors_pb2

METHODS = [
    method
    for file in (control_pb2, data_pb2, vectors_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED}

specs = messages(
    job_pb2.JobSpec, {"world_size": WORLD, "mode": 1, "reduction": 1, "dtype": 1, "group": 0, "groups": [{"rule": "sgd"}]}
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@fuzzed
@given(data=st.data(), is_exact=st.booleans())
def test_requests(method: Any, target: Callable[..., Target], data: st.DataObject, is_exact: bool) -> None:
    """Whatever a message says, or whatever bytes stand in its place; in a job of either aggregation."""
    shard = target(is_exact)
    kind = message_factory.GetMessageClass(method.input_type)
    known = known_fields(shard) | (OF_VECTORS if method.containing_service.name == "VectorService" else {})
    made = messages(kind, known).map(lambda message: message.SerializeToString())
    one = st.one_of(*[made] * 7, st.binary(max_size=60))
    sent = data.draw(st.lists(one, max_size=3) if method.client_streaming else st.tuples(one).map(list))

    assert code(shard, Request(f"/{method.containing_service.full_name}/{method.name}", sent)) not in DEFECTS


def code(target: Target, request: Request) -> grpc.StatusCode:
    """In which a call ends."""
    try:
        target.call(request)
    except Aborted as error:
        return error.code
    return grpc.StatusCode.OK


@fuzzed
@given(specs)
def test_job_specs(message: job_pb2.JobSpec) -> None:
    """A spec that is accepted can be laid out, and says of itself what it was made from."""

    def read() -> JobSpec:
        check_counts(message, LIMITS)
        spec = JobSpec.from_message(message)
        check_limits(spec, LIMITS)
        return spec

    spec = ends_in(PsdError, read)
    if spec is not None:
        assert JobSpec.from_message(spec.to_message()) == spec
        assert Layout(spec, 3).digest == Layout(spec, 3).digest


CLIPPED = JobSpec(WORLD, SPEC.tensors, SPEC.groups, aggregation="exact", clip_norm=1.0)


@fuzzed
@given(messages(job_pb2.Verdict, {"scale": 0.5}), st.lists(messages(job_pb2.Measure, {"is_finite": True}), max_size=3))
def test_verdicts(message: job_pb2.Verdict, measures: list[job_pb2.Measure]) -> None:
    """What a worker brings from other shards is a verdict, or measures of which one follows, or is refused."""
    verdict = ends_in(PsdError, lambda: Verdict.from_message(message, CLIPPED))
    found = ends_in(PsdError, lambda: judged(CLIPPED, 1, verdict, measures))

    for made in (verdict, found):
        assert made is None or 0 <= made.scale <= 1
