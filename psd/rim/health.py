"""gRPC's health and reflection services, with a bound on those who look on without end.

The health service is our own: that of grpcio-health-checking tells watchers under its lock, waits there for what they have been
sent, and keeps gRPC's one thread for events waiting for that lock when one of them hangs up, so that the whole server can stand
still. It also keeps every name that it was ever asked about. Must not know when a shard is healthy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from psd.rim.strangers import CALLS_MAX, Strangers


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Says of each service what it was told last. Thread-safe."""

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus.ValueType] = {}
        self._changed = threading.Condition()
        self._watchers = Strangers(CALLS_MAX)

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        """Tell whoever asks, and whoever watches."""
        with self._changed:
            if self._statuses.get(service) != status:
                self._statuses[service] = status
                self._changed.notify_all()

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802, gRPC's name
        """The status of a service now; NOT_FOUND if there is none of that name."""
        status = self._statuses.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """The status of a service now, and whenever it changes, until the caller hangs up."""
        watcher = object()
        self._watchers.enter(watcher, context.cancel)
        status = None
        try:
            if not context.add_callback(self._wake):
                return
            while (status := self._other_than(status, request.service, context)) is not None:
                yield health_pb2.HealthCheckResponse(status=status)
        finally:
            self._watchers.leave(watcher)

    def _other_than(self, told: Any, service: str, context: grpc.ServicerContext) -> Any:
        """Wait for another status; None when the caller hangs up."""
        with self._changed:
            self._changed.wait_for(lambda: not context.is_active() or self._status(service) != told)
            return self._status(service) if context.is_active() else None

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        return self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Reflection(reflection.ReflectionServicer):
    """gRPC's reflection service, with a bound on its streams."""

    def __init__(self, service_names: tuple[str, ...]) -> None:
        super().__init__(service_names)
        self._streams = Strangers(CALLS_MAX)

    def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802, gRPC's name
        """See gRPC's reflection protocol."""
        answers: Any = super().ServerReflectionInfo(request_iterator, context)
        stranger = object()
        self._streams.enter(stranger, context.cancel)
        try:
            yield from answers
        except grpc.RpcError:
            return
        finally:
            self._streams.leave(stranger)
