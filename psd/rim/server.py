"""The server of one shard: gRPC services, the bulk lane, health, reflection, the lease clock, and an orderly end.

Every call in progress has a thread, also while it waits for other workers. The pool grows with demand up to --max-calls, which
by default follows from --max-workers; further calls are refused instead of queued. So waiting workers never keep others from
being served. Must not know flags, signals or exit statuses: psd/cli/server.py does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.storage import no_crash
from psd.contract.config import ConfigError, Limits, ServerConfig, is_loopback, parse_address
from psd.contract.errors import CheckpointFailed, PsdError
from psd.contract.frames import KEEPALIVE_OPTIONS, WINDOW_OPTIONS
from psd.contract.orders import NEXT_PUSH, asker_of, reason_text
from psd.contract.roster import Roster
from psd.rim.access import Access, AccessInterceptor
from psd.rim.bulk_server import BulkServer
from psd.rim.calls import CallGuard, Unknown
from psd.rim.checkpointer import Checkpointer
from psd.rim.control_service import SERVICE as CONTROL
from psd.rim.control_service import ControlService
from psd.rim.data_plane import DataPlane
from psd.rim.data_service import SERVICE as DATA
from psd.rim.data_service import DataService
from psd.rim.health import HealthService
from psd.rim.last_checkpoint import LastCheckpoint
from psd.rim.metrics_server import PATH, MetricsServer
from psd.rim.pace import Pace
from psd.rim.probes import ProbeServer
from psd.rim.reflection import Reflection
from psd.rim.tls import ServerTls
from psd.rim.vector_gate import VectorGate
from psd.rim.vector_plane import VectorPlane
from psd.rim.vector_service import SERVICE as VECTORS
from psd.rim.vector_service import VectorService
from psd.state.counts import LANES
from psd.state.desks.status import ShardState
from psd.state.shard import Shard
from psd.state.workers.membership import WorkerState, tick_s

logger = logging.getLogger(__name__)

READY = "psd.ready"
"""Name of the health of the shard's part of the job, for readiness probes: SERVING once it can be trained. The other names are
for the process, which also serves while it waits for a job."""

HANDSHAKE_S = 10
"""Seconds until a connection that has not completed the TLS handshake is closed."""
IDLE_S = 300
"""Seconds after which a connection without a call is closed; workers send heartbeats."""
TELL_READERS_S = 0.5
"""Seconds, at the end of a job, in which readers that ask again and again hear that it is over."""
METADATA_BYTES_MAX = 16 << 10
"""Limit of a call's metadata: method, deadline, token."""


def _directory(config: ServerConfig, crash_point: Callable[[str], None] | None) -> CheckpointDirectory:
    try:
        return CheckpointDirectory(config.checkpoint_dir, keep=config.checkpoint_keep, crash_point=crash_point or no_crash)
    except ConfigError as error:
        raise ConfigError(f"--checkpoint-dir: {error}") from error


def grpc_server(
    config: ServerConfig, pool: ThreadPoolExecutor, access: Access | None, pace: Pace, guard: CallGuard
) -> grpc.Server:
    """A gRPC server that strangers may reach: a shard's, or a relay's."""
    return grpc.server(
        pool,
        interceptors=[] if access is None else [AccessInterceptor(access, pace, guard.as_error)],
        maximum_concurrent_rpcs=config.limits.calls_max,
        options=_options(config.limits),
    )


def bind(server: grpc.Server, config: ServerConfig, tls: ServerTls | None) -> tuple[str, int]:
    """Bind a server to --listen; return host and port.

    Raises:
        OSError: the address cannot be bound.
    """
    if tls is None and config.token_file and not is_loopback(config.listen):
        logger.warning("--insecure: tokens cross the network unencrypted, where anybody who listens can take them")
    host, port = parse_address(config.listen, "--listen")
    try:
        if tls is None:
            bound = server.add_insecure_port(config.listen)
        else:
            bound = server.add_secure_port(config.listen, tls.credentials())
    except RuntimeError as error:
        raise OSError(f"--listen: cannot bind {host}:{port}; is the port in use, and is the host this machine's?") from error
    return host, bound


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        *WINDOW_OPTIONS,
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        # To find half-open connections; clients may do the same.
        *KEEPALIVE_OPTIONS,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # A client that sends nothing, or too much at once, must not use up what others need.
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_allowed_incoming_connections", limits.connections_max),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ]


class ShardServer:
    """Serves one shard over gRPC.

    Raises:
        ConfigError: a file with certificates or tokens cannot be read, or makes no sense.

    Attributes:
        shard: the shard's state. address: HOST:PORT, once started.
        done: set when all workers have left.
        metrics_port: the port for metrics, once started, if it serves them.
    """

    def __init__(self, config: ServerConfig, *, crash_point: Callable[[str], None] | None = None) -> None:
        self._tls = ServerTls(config) if config.tls_cert else None
        access = Access(config.token_file) if config.token_file else None
        directory = _directory(config, crash_point) if config.checkpoint_dir else None
        self.shard = Shard(config, directory=directory, crash_point=crash_point)
        if access is not None:
            self.shard.settlement.seal = access.seal
        if self.shard.world_size > config.limits.workers_max:  # of a recovered job: all workers may come back
            config = replace(config, limits=replace(config.limits, workers_max=self.shard.world_size))
        self._gate = VectorGate()
        self._checkpointer: Checkpointer | None = None
        self._last_checkpoint: LastCheckpoint | None = None
        if directory is not None:
            self._checkpointer = Checkpointer(self.shard, config, directory, self._gate)
            self._last_checkpoint = LastCheckpoint(self.shard, config, directory, self._checkpointer, self._has_workers)
        self._was_told_before = False
        self.done = threading.Event()
        self.address = config.listen
        self.metrics_port = 0
        self._config = config
        self._pool = ThreadPoolExecutor(config.limits.calls_max, thread_name_prefix="psd-call")
        pace = Pace()
        guard = CallGuard(self.shard, pace)
        self._server = grpc_server(config, self._pool, access, pace, guard)
        self._health = HealthService(pace)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._probes = ProbeServer(self._health, config) if config.health_port is not None else None
        planes = {lane: DataPlane(self.shard, lane) for lane in LANES}
        data = DataService(self.shard, planes["grpc"], guard)
        vectors = VectorPlane(self.shard, self.shard.readers.fetching, self._gate)
        self._bulk = BulkServer(self.shard, planes, vectors, guard, config, access, self._tls)
        control = ControlService(
            self.shard,
            guard,
            address=lambda: config.advertise or self.address,
            on_leave=self._check_done,
            open_bulk=self._bulk.open,
            open_reads=self._bulk.open_reads,
            checkpointer=self._checkpointer,
        )
        handlers = data.handler(), control.handler(), VectorService(guard, vectors).handler()
        self._server.add_generic_rpc_handlers(handlers)
        shown = Reflection((DATA, CONTROL, VECTORS, health.SERVICE_NAME), pace)
        self._server.add_generic_rpc_handlers(shown.handlers())
        self._server.add_generic_rpc_handlers((Unknown(pace),))
        self._metrics: MetricsServer | None = None
        self._is_ending = False
        self._roster = Roster()
        self._stopping = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="psd-leases", daemon=True)

    @property
    def probe_port(self) -> int | None:
        """Port of --health-port, once started; None without."""
        return None if self._probes is None else self._probes.port

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address cannot be bound. The shard has closed its state, and kept its files.
        """
        try:
            self._start()
        except BaseException:
            self.shard.close(keep=True)
            raise

    def _start(self) -> None:
        host, bound = bind(self._server, self._config, self._tls)
        self.address = f"{host}:{bound}"
        if self.shard.is_recovered:
            job = self.shard.declared()
            logger.info(
                "the shard continues where its earlier process ended",
                extra={
                    "run_id": self.shard.run_id,
                    "version_min": job.version_min,
                    "version_max": job.version_max,
                },
            )
        elif self.shard.restored_from is not None:
            logger.info(
                "the shard starts from a checkpoint",
                extra={"checkpoint": self.shard.restored_from, "run_id": self.shard.run_id},
            )
        if self._config.metrics_port is not None:
            self._metrics = self._metrics_server(host.strip("[]"), self._config.metrics_port)
            self._metrics.start()
            self.metrics_port = self._metrics.port
            logger.info("serving metrics at http://%s:%d%s", host, self.metrics_port, PATH)
        self._bulk.start()
        if self._probes is not None:
            self._probes.start()
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._ticker.start()
        if self._checkpointer is not None and self._last_checkpoint is not None:
            self._last_checkpoint.begin()
            self._checkpointer.start()

    def _metrics_server(self, host: str, port: int) -> MetricsServer:
        from psd.rim.metrics import CONTENT_TYPE, Metrics, ShardFamilies  # only if metrics are asked for

        checkpointer = self._checkpointer
        progress = (lambda: checkpointer.progress) if checkpointer is not None else (lambda: None)
        metrics = Metrics(ShardFamilies(self.shard, progress, self._bulk.connections))
        return MetricsServer(host, port, metrics.render, CONTENT_TYPE)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for service in ("", DATA, CONTROL, VECTORS):
            self._health.set(service, status)
        self._update_readiness()

    def _update_readiness(self) -> None:
        is_ready = self.shard.state is ShardState.SERVING and not self._is_ending
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set(READY, serving if is_ready else not_serving)

    def _tick(self) -> None:
        while not self._stopping.wait(tick_s(self._config.lease_s)):
            try:
                self._tick_once()
            except Exception:  # without this thread no lease would ever run out, and all would wait for dead workers
                logger.exception("a tick failed because of a defect")

    def _tick_once(self) -> None:
        self.shard.tick()
        self._bulk.check_tokens()
        news = self._roster.news(self.shard.absent, self.shard.world_size)
        # A launcher's log needs only one shard's message. But each shard finds for itself that a lease has run out.
        if news and (self._config.shard_index == 0 or self._roster.is_of_silence):
            level = logging.INFO if self._roster.is_usual else logging.WARNING
            logger.log(level, "%s", news, extra={"run_id": self.shard.run_id})
        self._check_done()
        self._update_readiness()

    def _check_done(self) -> None:
        if not self.shard.is_done or self.done.is_set():
            return
        self.done.set()
        if self._last_checkpoint is not None and not (self._config.exit_when_done or self._config.shard_index):
            logger.info("all workers have left; what they have trained is stored when this shard is told to end (SIGTERM)")

    @property
    def has_failed_to_store(self) -> bool:
        """True if the last checkpoint could not be stored. After one was taken because the job ends, a failure counts only if
        all workers have left: then there is another one."""
        if self._checkpointer is None or not self._checkpointer.progress.error:
            return False
        return not self.last_checkpoint or (self.done.is_set() and self.shard.schedule.is_left_in_order)

    def _has_workers(self) -> bool:
        """True if there is a worker that may train. One that was killed still has a lease, but no connection."""
        live = [worker for worker in self.shard.status().workers if worker.state is WorkerState.LIVE]
        return any(w.transport == "grpc" or not self._bulk.has_lost(w.rank, w.session) for w in live)

    @property
    def last_checkpoint(self) -> str:
        """Name of the checkpoint that was taken because the shard ends; empty if there is none so far."""
        return "" if self._last_checkpoint is None else self._last_checkpoint.name

    @property
    def totals(self) -> str:
        """Sentence, without its subject, that counts what this process has done. Its first step is that of the checkpoint with
        which it began; its steps per time are counted once all workers had joined, so without their start."""
        now, vectors = self.shard.status(), self.shard.vectors.status()
        if now.job is None:
            return "has served no job"
        if not now.job.trained_count:  # it gets no pushes, and learns of steps unreliably
            return f"has run {vectors.batches} batches on vectors" if vectors.number else "has held no part of what was trained"
        clock = max((worker.clock for worker in now.workers), default=self.shard.began_at)
        pushes = f"{now.counters.pushes_accepted} pushes, {now.counters.pushes_late} late"
        steps, seconds = self.shard.trained
        pace = f"; {steps} steps in {seconds:.3f} s" if steps and seconds else ""
        order = now.ended_by if now.orders is None or not now.orders.ends_at else now.orders
        is_ordered = order is not None and order.ends_at in (NEXT_PUSH, clock)
        why = f"; ended there, {reason_text(asker_of(order))}" if order is not None and is_ordered else ""
        return f"has counted {pushes}, up to step {clock} from {self.shard.began_at}{pace}{why}"

    def expect_end(self) -> None:
        """Note that `take_last_checkpoint` will be called, so that `drain` need not do so."""
        self._was_told_before = True

    def take_last_checkpoint(self, timeout_s: float) -> None:
        """Take the last checkpoint of a job that is about to end, while its workers train.

        Raises:
            CheckpointFailed: there is nothing to store, or it was not stored in time.
        """
        if self._last_checkpoint is None:
            raise CheckpointFailed("this shard was started without --checkpoint-dir")
        self._last_checkpoint.take(timeout_s)

    def drain(self, grace_s: float, on_stored: Callable[[], None] = lambda: None) -> None:
        """Stop in order. If workers train, take the last checkpoint in the first half of `grace_s` seconds; then refuse new
        work, end waits with Draining, and give calls in progress some of the time left. Last, store what the shards hold,
        unless that checkpoint was taken; call `on_stored` if all that is to be stored is."""
        ends_at = time.monotonic() + grace_s
        self._is_ending = True
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        last = self._last_checkpoint
        if last is not None and self._was_told_before:
            last.give_up()
        elif last is not None and not self.done.is_set():
            try:
                last.take(grace_s / 2)
            except PsdError as error:
                logger.info("no checkpoint was taken while workers train: %s", error)
        self.shard.drain()
        if self.done.is_set() and self.shard.has_readers:
            time.sleep(min(TELL_READERS_S, grace_s))
        left_s = max(0.0, ends_at - time.monotonic())
        self._stop(left_s if last is None or last.name else left_s / 2, ends_at, on_stored)

    def stop(self) -> None:
        """Stop at once; calls in progress are cut off."""
        self.shard.drain()
        self._stop(None, None)

    def _stop(self, grace_s: float | None, ends_at: float | None, on_stored: Callable[[], None] = lambda: None) -> None:
        self._stopping.set()
        if self._ticker.is_alive():
            self._ticker.join()
        stopped = self._server.stop(grace_s)
        self._bulk.stop(grace_s)
        stopped.wait()
        if self._probes is not None:
            self._probes.stop()
        if self._metrics is not None:
            self._metrics.stop()
        self._pool.shutdown(wait=True)
        if self._checkpointer is not None:
            if self.done.is_set() and self.shard.schedule.is_left_in_order:
                self.shard.schedule.announce_final()
            elif self._last_checkpoint is not None and ends_at is not None:
                least_s = self._config.grace_s if self.done.is_set() else 0.0
                self._last_checkpoint.settle(max(least_s, ends_at - time.monotonic()))
            self._checkpointer.stop()
            if not self.has_failed_to_store:
                on_stored()
            if self._last_checkpoint is not None and ends_at is not None:
                self._last_checkpoint.end()
        # Workers have fetched a job that is done, and it is stored if that was asked for; left files would only be mistaken
        # for the next job's.
        self.shard.close(keep=not self.done.is_set() or self.has_failed_to_store)
