"""Calls to single shards, for those commands of psdctl that change something. Must not know the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from psd.cli.words.arguments import CommandFailed
from psd.contract.credentials import Credentials
from psd.contract.printable import printable
from psd.v1 import control_pb2_grpc
from psd.watch.asking import dial, why_failed

_HINTS = {
    "UNAVAILABLE": "is the job running, and is this its address? psdctl status shows which shards answer",
    "DEADLINE_EXCEEDED": "psdctl status shows what it is doing; --timeout waits longer",
    "UNAUTHENTICATED": "name a file with a token by --token-file",
    "PERMISSION_DENIED": "name a file with an admin's token by --token-file",
    "FAILED_PRECONDITION": "psdctl status shows how far the job is",
    "UNIMPLEMENTED": "its version of psd is older than this psdctl; psdctl status --json has it",
}
"""Advice on what to do next, by the error's gRPC code."""


class CallFailed(CommandFailed):
    """A shard did not do what it was asked to do; the text says why, and what to do next."""


def call_shard(
    index: int, server: str, credentials: Credentials, timeout_s: float, make: Callable[[Any], Callable[..., Any]], request: Any
) -> Any:
    """Call one shard; return its reply.

    Args:
        make: selects the method of a stub, such as `lambda stub: stub.Drain`.

    Raises:
        CallFailed: the shard has not replied, or has refused.
    """
    with dial(server, credentials) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return make(stub)(request, timeout=timeout_s, metadata=credentials.metadata())
        except grpc.RpcError as error:
            call: grpc.Call = error  # type: ignore[assignment]  # which it is, too
            hint = _HINTS.get(call.code().name, "")
            why = printable(why_failed(server, call, credentials))
            raise CallFailed(f"shard {index} at {server}: {why}" + (f" ({hint})" if hint else "")) from None
