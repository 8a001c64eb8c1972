"""Bounds what costs a shard something before it has shown what it is for: connections, and calls of which nothing has come.

Where more come than a limit, the oldest one is turned away: whoever has something to say says it at once, so that this is
somebody who only holds on. Must not know what the strangers are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

ItemT = TypeVar("ItemT")

UNKNOWN_SERVICE = "unknown"
"""Stands for every service that there is none of, because gRPC's health service keeps each name that it was asked about."""

CALLS_MAX = 64
"""Calls whose first message has not come, or that look on without end; of each kind."""


class Strangers:
    """Those that are there and have not shown themselves. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._turn_away: dict[Hashable, Callable[[], object]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._turn_away)

    def enter(self, stranger: Hashable, turn_away: Callable[[], object]) -> bool:
        """Let one more in; False if another one was turned away for it."""
        displaced = None
        with self._lock:
            if len(self._turn_away) >= self._limit:
                displaced = self._turn_away.pop(next(iter(self._turn_away)))
            self._turn_away[stranger] = turn_away
        if displaced is not None:
            displaced()
        return displaced is None

    def leave(self, stranger: Hashable) -> None:
        """It has shown itself, or has gone. Again changes nothing."""
        with self._lock:
            self._turn_away.pop(stranger, None)

    def first_of(self, items: Iterator[ItemT], turn_away: Callable[[], object]) -> Iterator[ItemT]:
        """The items; whose first one is awaited among the strangers."""
        stranger = object()
        self.enter(stranger, turn_away)
        try:
            for item in items:
                self.leave(stranger)
                yield item
        finally:
            self.leave(stranger)


class Health(health.HealthServicer):
    """gRPC's health service, with a bound on who watches, and on what: only services that there are."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers = Strangers(CALLS_MAX)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext, *callback: Any) -> Any:  # noqa: N802, gRPC's name
        """See gRPC's health protocol."""
        if request.service not in self._server_status:
            request = health_pb2.HealthCheckRequest(service=UNKNOWN_SERVICE)
        stranger = object()
        self._watchers.enter(stranger, context.cancel)
        if not context.add_callback(lambda: self._watchers.leave(stranger)):
            self._watchers.leave(stranger)
        return super().Watch(request, context, *callback)


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
