"""Libraries that some parts of the rim could use instead, and where they fail.

When one of these tests fails, look again whether its library serves now.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2
from prometheus_client import CollectorRegistry, start_http_server
from raw_client import TIMEOUT_S

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


COUNT = 5
"""Connections that the system takes at once for a listener with socketserver's backlog."""


def test_prometheus_clients_server_keeps_a_thread_for_each_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and for as long as they like. Ours: test_rim_metrics.py."""
    server, _ = start_http_server(0, "127.0.0.1", CollectorRegistry())
    in_thread = threading.Semaphore(0)
    serve = server.process_request_thread  # type: ignore[attr-defined]  # of its mixin

    def counted(*args: Any) -> None:
        in_thread.release()
        serve(*args)

    monkeypatch.setattr(server, "process_request_thread", counted)
    with ExitStack() as connections:
        connections.callback(server.server_close)
        connections.callback(server.shutdown)
        for _ in range(COUNT):
            connections.enter_context(socket.create_connection(server.server_address[:2])).sendall(b"GET /metrics HTTP/1.1\r\n")  # type: ignore[arg-type]

        assert all(in_thread.acquire(timeout=TIMEOUT_S) for _ in range(COUNT))
        assert server.RequestHandlerClass.timeout is None


def test_grpcs_health_service_waits_for_watchers_under_its_lock() -> None:
    """A watcher that does not read holds up every check. Ours tells a watcher in the watcher's own thread."""
    servicer = health.HealthServicer()
    request = health_pb2.HealthCheckRequest(service="")
    is_told, reads = threading.Event(), threading.Event()

    def tell(response: health_pb2.HealthCheckResponse) -> None:
        if response.status == NOT_SERVING:
            is_told.set()
            assert reads.wait(TIMEOUT_S)

    servicer.Watch(request, SimpleNamespace(add_callback=lambda _: True), tell)
    setting = threading.Thread(target=servicer.set, args=("", NOT_SERVING))
    setting.start()
    try:
        assert is_told.wait(TIMEOUT_S)
        assert not servicer._lock.acquire(blocking=False)
    finally:
        reads.set()
        setting.join()


def test_grpcs_health_service_keeps_every_name_that_it_was_asked_about() -> None:
    """Also when the watchers have gone; anybody may send names without end. Ours keeps watchers alone."""
    servicer = health.HealthServicer()
    hang_up: list[Callable[[], None]] = []
    for index in range(COUNT):
        request = health_pb2.HealthCheckRequest(service=f"no such service {index}")
        servicer.Watch(request, SimpleNamespace(add_callback=hang_up.append), lambda _: None)
    for each in hang_up:
        each()

    assert len(servicer._send_response_callbacks) == COUNT


def test_grpcs_bound_on_calls_keeps_those_that_say_nothing_and_refuses_those_that_come() -> None:
    """Ours turns away the one that has said nothing for the longest; see strangers.py."""
    is_in, ends = threading.Semaphore(0), threading.Event()

    def count(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        is_in.release()
        return b"%d" % sum(1 for _ in requests)

    def silent() -> Iterator[bytes]:
        assert ends.wait(TIMEOUT_S)
        yield from ()

    server = grpc.server(ThreadPoolExecutor(4), maximum_concurrent_rpcs=2)
    handler = grpc.stream_unary_rpc_method_handler(count)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Count": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary("/test/Count")
        try:
            held = [call.future(silent(), timeout=TIMEOUT_S) for _ in range(2)]
            assert all(is_in.acquire(timeout=TIMEOUT_S) for _ in held)

            with pytest.raises(grpc.RpcError) as caught:
                call(iter([b"x"]), timeout=TIMEOUT_S)

            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            ends.set()
            server.stop(None).wait()
