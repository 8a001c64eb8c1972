"""The server of a relay: its gRPC services with TLS and tokens, health, and an orderly end.

Every call in progress has a thread, also while it waits for a newer version; further calls than --max-reads are refused. Must
not know flags, signals or exit statuses: psd/cli/relay.py does.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psd.contract.config import ClientConfig, ConfigError, ServerConfig
from psd.relay.following import Following, addresses_of
from psd.relay.holding import Holding
from psd.relay.service import SERVICES, RelayService
from psd.rim.access import Access
from psd.rim.calls import CallGuard, Unknown
from psd.rim.health import HealthService
from psd.rim.metrics_server import PATH, MetricsServer
from psd.rim.pace import Pace
from psd.rim.probes import ProbeServer
from psd.rim.reflection import Reflection
from psd.rim.server import READY, bind, grpc_server
from psd.rim.tls import ServerTls

logger = logging.getLogger(__name__)


class RelayServer:
    """Serves the readers of a job over gRPC, from what it fetches from its shards.

    Args:
        config: address, TLS, tokens and limits, as of the only shard of a job. upstream: what to follow, as a reader.

    Raises:
        ConfigError: a file with certificates or tokens cannot be read, or the relay would follow itself.

    Attributes:
        holding: what it has. service: what it answers. address: HOST:PORT, once started. metrics_port: the port for metrics,
            once started, if it serves them.
    """

    def __init__(self, config: ServerConfig, upstream: ClientConfig) -> None:
        if config.listen in addresses_of(upstream):
            raise ConfigError(f"--relay-of: {config.listen} is this relay's own address (--listen)")
        servers = ",".join(upstream.servers)
        self.address = config.listen
        self.metrics_port = 0
        self.holding = Holding(f"a relay of {servers}", config.limits)
        self._config = config
        self._tls = ServerTls(config) if config.tls_cert else None
        access = Access(config.token_file) if config.token_file else None
        self._following = Following(upstream, self.holding)
        self._pool = ThreadPoolExecutor(config.limits.calls_max, thread_name_prefix="psd-call")
        pace = Pace()
        guard = CallGuard(self.holding, pace)
        self._server = grpc_server(config, self._pool, access, pace, guard)
        self._health = HealthService(pace)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._probes = ProbeServer(self._health, config) if config.health_port is not None else None
        self.service = RelayService(
            self.holding, self._following, guard, pace, servers, lambda: self._config.advertise or self.address
        )
        self._server.add_generic_rpc_handlers(self.service.handlers())
        self._server.add_generic_rpc_handlers(Reflection((*SERVICES, health.SERVICE_NAME), pace).handlers())
        self._server.add_generic_rpc_handlers((Unknown(pace),))
        self.holding.on_first = self._on_first
        self._metrics: MetricsServer | None = None

    def start(self) -> None:
        """Bind, serve, and follow.

        Raises:
            OSError: the address cannot be bound.
        """
        host, bound = bind(self._server, self._config, self._tls)
        self.address = f"{host}:{bound}"
        if self._probes is not None:
            self._probes.start()
        if self._config.metrics_port is not None:
            self._metrics = self._metrics_server(host.strip("[]"), self._config.metrics_port)
            self._metrics.start()
            self.metrics_port = self._metrics.port
            logger.info("serving metrics at http://%s:%d%s", host, self.metrics_port, PATH)
        self._server.start()
        for service in ("", *SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._health.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._following.start(f"relay {self._config.advertise or self.address}")

    def _metrics_server(self, host: str, port: int) -> MetricsServer:
        from psd.relay.metrics import RelayFamilies  # only if metrics are asked for
        from psd.rim.metrics import CONTENT_TYPE, Metrics

        metrics = Metrics(RelayFamilies(self.holding, self._following, self.service.started))
        return MetricsServer(host, port, metrics.render, CONTENT_TYPE)

    def _on_first(self) -> None:
        if not self.holding.is_draining:
            self._health.set(READY, health_pb2.HealthCheckResponse.SERVING)

    @property
    def totals(self) -> str:
        """Clauses that say what the relay has done, without their subject."""
        return self._following.totals

    def drain(self, grace_s: float) -> None:
        """Refuse new calls, end waits, and give transfers in progress so many seconds; then stop."""
        self.holding.drain()
        for service in ("", *SERVICES, READY):
            self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._stop(grace_s)

    def stop(self) -> None:
        """Stop at once; calls in progress are cut off."""
        self.holding.drain()
        self._stop(None)

    def _stop(self, grace_s: float | None) -> None:
        self._following.stop()
        self._server.stop(grace_s).wait()
        if self._probes is not None:
            self._probes.stop()
        if self._metrics is not None:
            self._metrics.stop()
        self._pool.shutdown(wait=True)
