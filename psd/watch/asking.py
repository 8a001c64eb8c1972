"""Asks all shards of a job for their status, in parallel. Must not know what the answers mean."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeAlias

import grpc

from psd.contract.credentials import Credentials
from psd.v1 import control_pb2, control_pb2_grpc
from psd.watch.merging import Answer

StatusCall: TypeAlias = "grpc.CallFuture[control_pb2.StatusReply]"

RECONNECT_MS = 1000
"""Longest time between attempts to reach an absent shard, so that its return is noticed soon."""

_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", RECONNECT_MS))


def dial(server: str, credentials: Credentials) -> grpc.Channel:
    """Open a channel to a shard."""
    pem = credentials.pem()
    if pem is None:
        return grpc.insecure_channel(server, _OPTIONS)
    return grpc.secure_channel(server, grpc.ssl_channel_credentials(pem.ca, pem.key or None, pem.cert or None), _OPTIONS)


def why_failed(server: str, call: grpc.Call, credentials: Credentials) -> str:
    """The reason why a call failed; explains TLS errors, which gRPC words badly."""
    is_tls = call.code() is grpc.StatusCode.UNAVAILABLE
    return (credentials.why_not(server) if is_tls else None) or call.details() or ""


class Asker:
    """Connections to the shards of a job, kept open between calls. Only one call of `ask` at a time.

    Args:
        servers: addresses of the shards, in their order.
    """

    def __init__(self, servers: Sequence[str], credentials: Credentials) -> None:
        self.servers = tuple(servers)
        self._credentials = credentials
        self._pem = credentials.pem()
        self._channels = [dial(server, credentials) for server in servers]
        self._calls: list[StatusCall] = []

    def ask(self, timeout_s: float) -> list[Answer]:
        """Ask all shards in parallel; return their answers, or errors, in the order of `servers`."""
        self._dial_anew_if_changed()
        request, metadata = control_pb2.StatusRequest(), self._credentials.metadata()
        stubs = [control_pb2_grpc.ControlServiceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        self._calls = [stub.Status.future(request, timeout=timeout_s, metadata=metadata) for stub in stubs]
        return [self._answer(server, call) for server, call in zip(self.servers, self._calls, strict=True)]

    def curves(self, after: int, timeout_s: float) -> control_pb2.CurvesReply | None:
        """Ask shard 0 for the scalars that workers have reported after this point; None if the call fails."""
        stub = control_pb2_grpc.ControlServiceStub(self._channels[0])  # type: ignore[no-untyped-call]
        request = control_pb2.CurvesRequest(after=after)
        try:
            reply: control_pb2.CurvesReply = stub.Curves(request, timeout=timeout_s, metadata=self._credentials.metadata())
        except grpc.RpcError:
            return None
        return reply

    def silent(self) -> list[str]:
        """Addresses of shards that have not answered the current `ask` yet. May be called from any thread."""
        return [server for server, call in zip(self.servers, self._calls, strict=False) if not call.done()]

    def _dial_anew_if_changed(self) -> None:
        """Open new channels if the certificates have been replaced: a channel keeps those that it was made with."""
        pem = self._credentials.pem()
        if pem != self._pem:
            self.close()
            self._pem, self._channels = pem, [dial(server, self._credentials) for server in self.servers]

    def _answer(self, server: str, call: StatusCall) -> Answer:
        try:
            return Answer(server, call.result())
        except grpc.RpcError:
            return Answer(server, None, call.code().name, why_failed(server, call, self._credentials))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
