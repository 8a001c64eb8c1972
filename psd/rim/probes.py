"""A small gRPC server beside the shard's own that answers only health checks, without TLS.

Kubernetes' probes use gRPC but no TLS. The answer is no secret: the other port gives it without credentials, too. Must not know
the shard.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME

from psd.contract.config import ServerConfig, parse_address
from psd.rim.health import HealthService

CALLS_MAX = 4
"""Most calls at a time: a probe or two. More are refused, which costs nothing."""

CONNECTIONS_MAX = 64
IDLE_S = 30
"""Seconds after which a connection without a call is closed; the kubelet makes one for each probe."""

MESSAGE_BYTES_MAX = 4096


class ProbeServer:
    """Serves `health` on --health-port.

    Attributes:
        port: the bound port, once started.
    """

    def __init__(self, servicer: HealthService, config: ServerConfig) -> None:
        self.port = 0
        self._pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="psd-probe")
        self._server = grpc.server(
            self._pool,
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_metadata_size", MESSAGE_BYTES_MAX),
                ("grpc.absolute_max_metadata_size", MESSAGE_BYTES_MAX),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
                ("grpc.max_connection_idle_ms", IDLE_S * 1000),
                ("grpc.so_reuseport", 0),
            ],
        )
        check = grpc.unary_unary_rpc_method_handler(
            servicer.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        # Not Watch: each watcher would keep a thread, and four of them would keep the probes out.
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Check": check}),))
        self._host, _ = parse_address(config.listen, "--listen")
        self._wanted = config.health_port

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port cannot be bound.
        """
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{self._wanted}")
        except RuntimeError as error:
            raise OSError(f"--health-port: cannot bind {self._host}:{self._wanted}; is the port in use?") from error
        self._server.start()

    def stop(self) -> None:
        """Stop at once."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=True)
