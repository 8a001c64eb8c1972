"""The health service of gRPC, with a limit on endless streams.

psd has its own: that of grpcio-health-checking holds a lock while it waits for its watchers to take a message; if one of them
hangs up, gRPC's only thread for events waits for that lock, and the whole server can stand still. It also keeps every name that
it was ever asked about (tests/rim/test_rim_libraries.py). Must not know when a shard is healthy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psd.rim.pace import Pace
from psd.rim.strangers import CALLS_MAX, Strangers


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Reports the latest status of each service. Thread-safe.

    Args:
        pace: limits how often new watchers may connect. Probes call Check, and never wait.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._statuses: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._wakers: dict[object, threading.Event] = {}  # by watcher
        self._watchers = Strangers(CALLS_MAX)

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        """Set a service's status, and tell its watchers."""
        with self._lock:
            if self._statuses.get(service) == status:
                return
            self._statuses[service] = status
            wakers = list(self._wakers.values())
        for waker in wakers:
            waker.set()

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802, gRPC's name
        """The status of a service now; NOT_FOUND if there is no such service."""
        status = self._statuses.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """Stream the status of a service, now and whenever it changes, until the caller hangs up."""
        self._pace.wait(context)
        watcher, waker, told = object(), threading.Event(), None
        with self._lock:
            self._wakers[watcher] = waker
        self._watchers.enter(watcher, context.cancel)
        try:
            if not context.add_callback(waker.set):
                return
            while context.is_active():
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                else:
                    waker.wait()
                    waker.clear()
        finally:
            self._watchers.leave(watcher)
            with self._lock:
                del self._wakers[watcher]
