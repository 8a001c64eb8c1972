"""Errors of gRPC calls as psd's errors: the class that the shard raised, or else the meaning of the status.

One table, and the only place in the client that looks at gRPC statuses. What is worth sending again is shards.py's to say.
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
    grpc.StatusCode.DEADLINE_EXCEEDED: ShardUnavailable,  # of a call that waits for nobody; see `psd_error`
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,  # grpc's own limit on concurrent calls
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
"""Meanings of statuses that come from gRPC itself, without a reason of psd's. Others are a plain PsdError."""

_BROKEN_CONNECTION = ("RST_STREAM", "Stream removed", "Connection reset", "Socket closed", "GOAWAY")
"""Words of gRPC's messages for broken connections that it reports as INTERNAL or UNKNOWN."""


_NO_CONNECTION = "failed to connect"
_TLS = ("handshake", "Verification", "Socket closed")
"""Words of gRPC's messages that may mean trouble with TLS, or the lack of it."""


def may_be_tls(error: PsdError) -> bool:
    """True if it is worth asking why there is no connection."""
    text = str(error)
    return isinstance(error, ShardUnavailable) and _NO_CONNECTION in text and any(mark in text for mark in _TLS)


def psd_error(call: grpc.Call, shard: int, address: str, *, is_wait: bool) -> PsdError:
    """The error of a call that has failed.

    Args:
        call: the failed call.
        is_wait: the call waits for other workers, so that its deadline, if it passes, is theirs and not the shard's.
    """
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
    """The facts that travel with an error; empty where they make no sense."""
    if value is None:
        return {}
    try:
        detail = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return detail if isinstance(detail, dict) else {}
