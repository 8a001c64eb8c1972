"""The error table: what a shard raises is what the worker gets, and a status without a reason has one meaning."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

import psd_client
from psd.contract.errors import (
    DETAIL_KEY,
    REASON_KEY,
    InternalError,
    InvalidRequest,
    Overloaded,
    PsdError,
    ShardUnavailable,
    WaitTimeout,
    reasons,
)
from psd.rim.calls import abort
from psd_client.lanes.grpc_errors import psd_error


class FakeCall:
    """A failed grpc.Call."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: tuple[tuple[str, Any], ...] | None = ()) -> None:
        self._fields = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._fields[0]

    def details(self) -> str | None:
        return self._fields[1]

    def trailing_metadata(self) -> tuple[tuple[str, Any], ...] | None:
        return self._fields[2]


class FakeContext:
    """A grpc.ServicerContext that keeps what `abort` is given."""

    metadata: tuple[tuple[str, Any], ...]

    def set_trailing_metadata(self, metadata: tuple[tuple[str, Any], ...]) -> None:
        self.metadata = metadata

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.call = FakeCall(code, details, self.metadata)
        raise StopIteration


@pytest.mark.parametrize("reason", sorted(reasons()))
def test_psd_error_when_a_shard_raised_it_then_is_the_same_class_message_and_detail(reason: str) -> None:
    """Every error of the contract survives the way through the shard's rim and gRPC to the worker."""
    context: Any = FakeContext()
    with pytest.raises(StopIteration):
        abort(context, reasons()[reason]("the text", cause="expired", ranks=[1, 2]))

    error = psd_error(context.call, 2, "h:1", is_wait=True)

    assert type(error) is reasons()[reason]
    assert str(error) == "the text"
    assert error.detail == {"shard": 2, "cause": "expired", "ranks": [1, 2]}
    assert context.call.code() is grpc.StatusCode[error.code]


@pytest.mark.parametrize("reason", sorted(name for name in reasons() if not name.startswith("_")))
def test_package_when_an_error_can_reach_the_user_then_exports_it(reason: str) -> None:
    """`except psd_client.X` works for every error of the contract."""
    if reasons()[reason].__module__ == "psd.contract.errors":
        assert getattr(psd_client, reason) is reasons()[reason]


@pytest.mark.parametrize(
    ("code", "text", "is_wait", "expected"),
    [
        ("UNAVAILABLE", "failed to connect", False, ShardUnavailable),
        ("CANCELLED", "stream cancelled", True, ShardUnavailable),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", False, ShardUnavailable),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", True, WaitTimeout),
        ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", True, Overloaded),
        ("RESOURCE_EXHAUSTED", "Sent message larger than max (40 vs. 30)", True, InvalidRequest),
        ("UNKNOWN", "Stream removed", True, ShardUnavailable),
        ("INTERNAL", "Received RST_STREAM with error code 2", True, ShardUnavailable),
        ("INTERNAL", "Exception deserializing response!", True, InternalError),
        ("UNIMPLEMENTED", "Method not found!", False, PsdError),
    ],
)
def test_psd_error_when_there_is_no_reason_then_the_status_says_what(
    code: str, text: str, is_wait: bool, expected: type[PsdError]
) -> None:
    """gRPC's own failures, among them a broken connection in all its disguises; the message names the shard."""
    call: Any = FakeCall(grpc.StatusCode[code], text)

    error = psd_error(call, 2, "h:1", is_wait=is_wait)

    assert type(error) is expected
    assert str(error) == f"shard 2 at h:1: {text} ({code})"


@pytest.mark.parametrize("detail", [b"", b"\xff", b"[1]", b"{", None])
def test_psd_error_when_the_detail_is_garbled_then_the_class_still_counts(detail: bytes | None) -> None:
    """A peer cannot break the decoding."""
    metadata = ((REASON_KEY, "Draining"),) + (((DETAIL_KEY, detail),) if detail is not None else ())
    call: Any = FakeCall(grpc.StatusCode.UNAVAILABLE, None, metadata)

    assert type(psd_error(call, 0, "h:1", is_wait=False)) is psd_client.Draining


def test_psd_error_when_the_reason_is_of_a_newer_shard_then_is_a_plain_error() -> None:
    """An unknown reason does not hide the message."""
    metadata = ((REASON_KEY, "FromTheFuture"), (DETAIL_KEY, json.dumps({"x": 1}).encode()))
    call: Any = FakeCall(grpc.StatusCode.ABORTED, "text", metadata)

    error = psd_error(call, 0, "h:1", is_wait=False)

    assert type(error) is PsdError
    assert error.detail["x"] == 1
