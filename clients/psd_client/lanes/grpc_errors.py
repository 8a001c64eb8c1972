"""Turns errors of gRPC calls into psd's errors: the class that the shard raised, else one for the status.

The only module of the client that looks at gRPC statuses. shards.py decides which calls are sent again.
"""

from __future__ import annotations

import json
from typing import Any

import grpc

from psd.contract.errors import (
    DETAIL_KEY,
    REASON_KEY,
    InternalError,
    InvalidRequest,
    Overloaded,
    PsdError,
    ShardUnavailable,
    WaitTimeout,
    error_from,
)

WITHOUT_REASON: dict[grpc.StatusCode, type[PsdError]] = {
    grpc.StatusCode.UNAVAILABLE: ShardUnavailable,  # no connection, or it broke
    grpc.StatusCode.CANCELLED: ShardUnavailable,  # the peer gave the stream up, as a server that is killed does
    grpc.StatusCode.DEADLINE_EXCEEDED: ShardUnavailable,  # unless the call waits for workers; see `psd_error`
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,  # grpc's own limit on concurrent calls
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
"""Errors for statuses that come from gRPC itself, without a reason of psd's; for other statuses, PsdError."""

_BROKEN_CONNECTION = ("RST_STREAM", "Stream removed", "Connection reset", "Socket closed", "GOAWAY")
"""Words in gRPC's messages about broken connections that it reports as INTERNAL or UNKNOWN."""


_NO_CONNECTION = "failed to connect"
_TLS = ("handshake", "Verification", "Socket closed")
"""Words in gRPC's messages that may mean that TLS fails, or that one side lacks it."""


def may_be_tls(error: PsdError) -> bool:
    """True if TLS, or its absence, may be why there is no connection."""
    text = str(error)
    return isinstance(error, ShardUnavailable) and _NO_CONNECTION in text and any(mark in text for mark in _TLS)


def psd_error(call: grpc.Call, shard: int, address: str, *, is_wait: bool) -> PsdError:
    """The error of a failed call. is_wait: True if it waits for other workers, who are late if its deadline passes."""
    text = call.details() or "no details"
    metadata = dict(call.trailing_metadata() or ())
    reason = metadata.get(REASON_KEY)
    if reason is not None:
        return error_from(_text(reason), text, {"shard": shard} | detail_of(metadata.get(DETAIL_KEY)))
    code = call.code()
    error = WITHOUT_REASON.get(code, PsdError)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and is_wait:
        error = WaitTimeout
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        error = InvalidRequest
    elif error is InternalError and any(mark in text for mark in _BROKEN_CONNECTION):
        error = ShardUnavailable
    return error(f"shard {shard} at {address}: {text} ({code.name})", shard=shard, address=address)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def detail_of(value: str | bytes | None) -> dict[str, Any]:
    """The facts that are sent with an error; empty if they cannot be parsed."""
    if value is None:
        return {}
    try:
        detail = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return detail if isinstance(detail, dict) else {}
