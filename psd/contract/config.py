"""Settings of a shard and of a client: frozen, validated on construction, units last in their names.

Values come from flags and the environment (psd/contract/environment.py, psd/cli); nothing below those reads either. A wrong
value raises ConfigError, whose message says what was expected.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from psd.contract.arguments import refuse
from psd.contract.locations import shown
from psd.contract.printable import is_printable, utf8_size
from psd.contract.waits import REPORT_AFTER_S
from psd_core.vector_operations import OPERATIONS_MAX, VECTORS_MAX

TRANSPORTS = ("auto", "shm", "tcp", "grpc")

RUN_ID_BYTES_MAX = 128

CLIENT_STATE_BYTES_MAX = 1 << 20

CUTS_MAX = 8
"""Cuts that one message may name."""

SAFETENSORS_SUFFIX = ".safetensors"


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what was expected."""


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Parse HOST:PORT or [IPV6]:PORT as (host, port); ConfigError names `what`."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:\s/]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"{what}: expected HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:7000, got {text!r}")
    return match[1], int(match[2])


def join_address(host: str, port: int | str) -> str:
    """Join them as HOST:PORT, or [IPV6]:PORT, as parse_address takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """True if only this machine reaches HOST:PORT; names other than localhost are not looked up, and count as reachable."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def parse_shard(text: str) -> tuple[int, int]:
    """Parse INDEX/COUNT, such as 0/4, as (index, count)."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard: expected INDEX/COUNT with INDEX below COUNT, such as 0/4, got {text!r}")
    return int(match[1]), int(match[2])


def parse_servers(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse addresses HOST:PORT in the order of the shards: one string, separated by commas, or one string each."""
    if isinstance(given, str):
        servers = tuple(part.strip() for part in given.split(",") if part.strip())
    elif isinstance(given, (list, tuple)) and all(isinstance(server, str) for server in given):
        servers = tuple(given)
    else:
        expected = 'the shards\' addresses, such as "127.0.0.1:7000,127.0.0.1:7001", or a list of them'
        refuse(ConfigError, "servers", expected, given)
    if not servers:
        raise ConfigError("servers: expected the shards' addresses, such as 127.0.0.1:7000,127.0.0.1:7001, got an empty list")
    for server in servers:
        _, port = parse_address(server, "servers")
        if port == 0:
            raise ConfigError(f"servers: {server!r} has port 0; expected the port that the shard listens on")
    if len(set(servers)) != len(servers):
        raise ConfigError(f"servers: an address is given twice in {given!r}; each shard has its own")
    return servers


def is_rule_path(text: str) -> bool:
    """True for the import path of a class, such as my_package.my_module:MyRule."""
    return len(text) <= 256 and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text, re.ASCII) is not None


def _check_seconds(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name}: expected {low:g} to {high:g} seconds, got {value:g}")


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: expected {low} to {high}, got {value}")


def _check_pair(name: str, value: str, other_name: str, other: str) -> None:
    for has, lacks, is_wrong in ((name, other_name, value and not other), (other_name, name, other and not value)):
        if is_wrong:
            raise ConfigError(f"{lacks}: not given; a certificate and its key belong together, and {has} is given")


def check_client_tls(ca: str, cert: str, key: str) -> None:
    """Raise ConfigError if a client's TLS files do not belong together."""
    _check_pair("tls_cert", cert, "tls_key", key)
    if cert and not ca:
        raise ConfigError("tls_ca: not given; a client's certificate is shown over TLS only, which needs the shards' CA")


ON_WORKER_FAILURE = ("wait", "continue", "end")
"""Words for what becomes of a job one of whose workers fails; docs/operations.md says what each means."""


@dataclass(frozen=True)
class Limits:
    """Limits of a shard on what it accepts from peers. Each has a flag of psd-server.

    Attributes:
        workers_max: ranks of one job. A waiting worker costs a thread (about 50 KiB resident), hence a limit at all.
        tensors_max: tensors of one job.
        elements_max: parameters of one job over all shards.
        message_bytes_max: one gRPC message. Frames need 4 MiB and a header; a declaration about 64 bytes a tensor.
        name_bytes_max: the name of a tensor or a barrier, in UTF-8.
        tables_max: sparse tables of one job. table_dim_max: numbers of a row.
        table_bytes_max: memory for the files of all tables on this shard; 0: half of what is free where its state lies.
        table_rows_max: rows of one table on this shard.
        push_ids_max: ids, of all tables, in one push or one pull of rows at this shard.
        push_bytes_max: ids and gradients of rows in one push, which the shard holds until its last frame has come.
        vectors_max: server-side vectors of one job.
        vector_bytes_max: memory for this shard's part of all vectors; 0: as much as there is where its state lies.
        batch_operations_max: operations on vectors in one batch.
        batch_bytes_max: numbers that one batch brings to this shard; held meanwhile.
        reads_max: readers' Read calls at a time. Each may keep another version of the shard's parameters.
        calls: gRPC calls at a time, each of which has a thread; 0: as many as `calls_max` says.
        connections: gRPC connections at a time; 0: as many as `connections_max` says.
        streams_max: gRPC calls at a time on one connection; further ones wait where they are made, or are refused, because gRPC
            counts one that has ended until its thread has. A worker of psd_client has its own connection, and up to 4 calls.
    """

    workers_max: int = 1024
    tensors_max: int = 100_000
    elements_max: int = 1 << 40
    message_bytes_max: int = 32 << 20
    name_bytes_max: int = 256
    tables_max: int = 1024
    table_dim_max: int = 4096
    table_bytes_max: int = 0
    table_rows_max: int = 1 << 31
    push_ids_max: int = 1 << 20
    push_bytes_max: int = 1 << 30
    vectors_max: int = 1024
    vector_bytes_max: int = 0
    batch_operations_max: int = 1024
    batch_bytes_max: int = 1 << 30
    reads_max: int = 16
    calls: int = 0
    connections: int = 0
    streams_max: int = 32

    @property
    def calls_max(self) -> int:
        """Calls at a time; a worker has up to 4: a push or pull, a barrier or declaration, a heartbeat, and a retry of one
        of them. The others are as many as strangers may hold (psd/rim/strangers.py, pace.py), and 64 for status, health,
        readers."""
        return self.calls or 4 * self.workers_max + 576

    @property
    def connections_max(self) -> int:
        """Connections at a time; a worker has one, and two while it comes back."""
        return self.connections or 2 * self.workers_max + 64

    def __post_init__(self) -> None:
        _check_count("--max-workers", self.workers_max, 1, 100_000)
        _check_count("--max-tensors", self.tensors_max, 1, 10_000_000)
        _check_count("--max-elements", self.elements_max, 1, 1 << 48)
        _check_count("--max-message-bytes", self.message_bytes_max, 5 << 20, 1 << 30)
        _check_count("--max-name-bytes", self.name_bytes_max, 1, 4096)
        _check_count("--max-tables", self.tables_max, 0, 10_000)
        _check_count("--max-table-dim", self.table_dim_max, 1, 1 << 16)
        _check_count("--max-table-bytes", self.table_bytes_max, 0, 1 << 48)
        _check_count("--max-table-rows", self.table_rows_max, 1, 1 << 31)
        _check_count("--max-push-ids", self.push_ids_max, 1, 1 << 20)
        _check_count("--max-push-bytes", self.push_bytes_max, 1, 1 << 40)
        _check_count("--max-vectors", self.vectors_max, 0, VECTORS_MAX)
        _check_count("--max-vector-bytes", self.vector_bytes_max, 0, 1 << 48)
        _check_count("--max-batch-operations", self.batch_operations_max, 1, OPERATIONS_MAX)
        _check_count("--max-batch-bytes", self.batch_bytes_max, 1 << 20, 1 << 40)
        _check_count("--max-reads", self.reads_max, 1, 10_000)
        _check_count("--max-calls", self.calls, 0, 1_000_000)
        _check_count("--max-connections", self.connections, 0, 1_000_000)
        _check_count("--max-streams", self.streams_max, 8, 1_000_000)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one psd-server process.

    Attributes:
        shard_index, shard_count: which part of the parameters.
        listen: HOST:PORT to bind; port 0 takes a free one.
        advertise: HOST:PORT that clients should dial, if that is another one; shown in status.
        health_port: port of a server of its own, on the same host, that answers gRPC health checks alone; None: there is none.
        bulk_port: TCP port of the bulk lane, on the same host; 0: a free one; None: no TCP.
        metrics_port: TCP port on which metrics are served, on the same host; 0: a free one; None: they are not.
        run_id: name of the only run that may join; empty: the first one that does.
        lease_s: silence after which a worker is no longer waited for.
        on_worker_failure: a worker whose program has failed is waited for until its lease runs out, as one that was killed
            ("wait"), or no longer ("continue"), or ends everybody's session, as one whose lease runs out does then ("end").
        grace_s: time for requests in progress after SIGTERM.
        exit_when_done: end with status 0 when all workers have left. exit_on_eof: when standard input ends.
        heeds_launcher: standard input tells which workers are started again.
        state_dir: where the arena lies, so that a killed shard goes on when it is started again; empty: a private directory in
            memory, which ends with the process.
        checkpoint_dir: URL of the checkpoints, the same for all shards; empty: none are taken.
        checkpoint_secs, checkpoint_steps: how often; 0: not by time, or not by steps.
        checkpoint_keep: how many valid ones are kept.
        from_checkpoint: URL of a checkpoint, or of a directory of them, that a new job begins with if neither state_dir nor
            checkpoint_dir has it; or, with parameters_only, of a plain safetensors file.
        parameters_only: take the values of its parameters, by name, and nothing else: the job may have other rules and groups.
        rules: import paths of the users' update rules that jobs may name; rule_dir: where their modules are looked for, too.
        tls_cert, tls_key: PEM files, for TLS on every port; empty: none. Read again when they change.
        tls_client_ca: PEM file: clients must show a certificate that one of these has signed; empty: they need none.
        token_file: who may do what, see psd/contract/credentials.py; empty: everybody may do everything.
        insecure: listen beyond this machine without TLS.
    """

    shard_index: int
    shard_count: int
    listen: str = "127.0.0.1:7000"
    advertise: str = ""
    health_port: int | None = None
    bulk_port: int | None = 0
    metrics_port: int | None = None
    run_id: str = ""
    lease_s: float = 10.0
    on_worker_failure: str = "wait"
    grace_s: float = 10.0
    exit_when_done: bool = False
    exit_on_eof: bool = False
    heeds_launcher: bool = False
    state_dir: str = ""
    checkpoint_dir: str = field(default="", repr=False)
    checkpoint_secs: float = 0.0
    checkpoint_steps: int = 0
    checkpoint_keep: int = 3
    from_checkpoint: str = field(default="", repr=False)
    parameters_only: bool = False
    rules: tuple[str, ...] = ()
    rule_dir: str = "."
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""
    insecure: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _check_count("--shard", self.shard_count, 1, 10_000)
        _check_count("--shard", self.shard_index, 0, self.shard_count - 1)
        parse_address(self.listen, "--listen")
        if self.advertise:
            parse_address(self.advertise, "--advertise")
        if self.health_port is not None:
            _check_count("--health-port", self.health_port, 0, 65535)
        if self.bulk_port is not None:
            _check_count("--bulk-port", self.bulk_port, 0, 65535)
        _check_pair("--tls-cert", self.tls_cert, "--tls-key", self.tls_key)
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError(
                "--tls-client-ca: asks clients for certificates, which needs TLS: give --tls-cert and --tls-key, too"
            )
        if not (self.tls_cert or self.insecure or is_loopback(self.listen)):
            raise ConfigError(
                f"--listen: {self.listen} is reachable from other machines, and without TLS anybody on the network path can "
                "read and change everything. Give --tls-cert and --tls-key, or --insecure if the network keeps strangers out"
            )
        if self.metrics_port is not None:
            _check_count("--metrics-port", self.metrics_port, 0, 65535)
        if utf8_size(self.run_id) > RUN_ID_BYTES_MAX:
            raise ConfigError(f"--run-id: expected at most {RUN_ID_BYTES_MAX} bytes")
        if not is_printable(self.run_id):
            raise ConfigError(f"--run-id: {self.run_id!r} has control characters")
        if (self.checkpoint_secs or self.checkpoint_steps) and not self.checkpoint_dir:
            raise ConfigError("--checkpoint-dir: not given; --checkpoint-secs and --checkpoint-steps need a place to store to")
        if self.parameters_only and not self.from_checkpoint:
            raise ConfigError("--from-checkpoint: not given; --parameters-only says what to take from it")
        if self.from_checkpoint.endswith(SAFETENSORS_SUFFIX) and not self.parameters_only:
            raise ConfigError(
                f"--from-checkpoint: {shown(self.from_checkpoint)} holds parameters alone, without the optimizer's state; give "
                "--parameters-only, too"
            )
        _check_seconds("--checkpoint-secs", self.checkpoint_secs, 0, 30 * 86_400)
        _check_count("--checkpoint-steps", self.checkpoint_steps, 0, 1 << 40)
        _check_count("--checkpoint-keep", self.checkpoint_keep, 1, 1_000_000)
        for rule in self.rules:
            if not is_rule_path(rule):
                raise ConfigError(
                    f"--rule: expected the import path of a class, such as my_package.my_module:MyRule, got {rule!r}"
                )
        _check_seconds("--lease", self.lease_s, 0.1, 86_400)
        if self.on_worker_failure not in ON_WORKER_FAILURE:
            expected = ", ".join(ON_WORKER_FAILURE)
            raise ConfigError(f"--on-worker-failure: expected one of {expected}, got {self.on_worker_failure!r}")
        _check_seconds("--grace", self.grace_s, 0, 3_600)


@dataclass(frozen=True)
class ClientConfig:
    """Settings of one worker's connection.

    Attributes:
        servers: addresses in the order of the shards.
        rank, world_size: this worker's number, and how many there are.
        run_id: the job's name; empty: whatever the shards serve.
        transport: "auto" takes the best lane that works; a name forces one.
        wait_timeout_s: longest wait for other workers (a round, a barrier, the staleness bound, initial values).
        retry_timeout_s: how long an unreachable shard is tried again.
        report_after_s: a wait longer than this is explained on the log, and again each time it has doubled.
        tls_ca: PEM file: TLS, with shards whose certificates one of these has signed; empty: no TLS.
        tls_cert, tls_key: PEM files with this client's own certificate, if shards require one.
        token_file: holds this client's token; empty: none.
    """

    servers: tuple[str, ...]
    rank: int
    world_size: int
    run_id: str = ""
    transport: str = "auto"
    wait_timeout_s: float = 600.0
    retry_timeout_s: float = 30.0
    report_after_s: float = REPORT_AFTER_S
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        parse_servers(self.servers)
        if self.world_size < 1:
            raise ConfigError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: expected 0 to {self.world_size - 1} (world_size - 1), got {self.rank}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        _check_seconds("wait_timeout", self.wait_timeout_s, 0.1, 30 * 86_400)
        _check_seconds("retry_timeout", self.retry_timeout_s, 0, 86_400)
        _check_seconds("report_after", self.report_after_s, 0.05, 86_400)
        check_client_tls(self.tls_ca, self.tls_cert, self.tls_key)
