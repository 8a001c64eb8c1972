"""Settings of a shard and of a client: frozen, checked when made, with units last in their names.

Values come from flags and the environment (psd/contract/environment.py, psd/cli); no other module reads these. A wrong value
raises ConfigError, whose message says what was expected.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psd.contract.arguments import refuse
from psd.contract.locations import shown
from psd.contract.printable import is_printable, utf8_size
from psd.contract.settings import PORT, SECRET_LOCATION, check, check_count, check_seconds, setting
from psd.contract.strands import STREAMS_MAX
from psd.contract.waits import REPORT_AFTER_S
from psd_core.vector_operations import OPERATIONS_MAX, VECTORS_MAX

TRANSPORTS = ("auto", "shm", "tcp", "grpc")

RUN_ID_BYTES_MAX = 128

SHARDS_MAX = 10_000
"""Most shards of a job."""

CLIENT_STATE_BYTES_MAX = 1 << 20

CUTS_MAX = 8
"""Most cuts that one message may name."""

SAFETENSORS_SUFFIX = ".safetensors"


class ConfigError(ValueError):
    """Raised if a setting is wrong; the message names it and says what was expected."""


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Parse HOST:PORT or [IPV6]:PORT as (host, port); ConfigError names `what`."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:\s/]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"{what}: expected HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:7000, got {text!r}")
    return match[1], int(match[2])


def join_address(host: str, port: int | str) -> str:
    """Join host and port as HOST:PORT or [IPV6]:PORT, for parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """True if only this machine can reach HOST:PORT. A name other than localhost is not looked up, and counts as reachable."""
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


def alternatives(server: str) -> tuple[str, ...]:
    """The addresses A and B of "A|B", which a reader may dial instead of each other."""
    return tuple(address.strip() for address in server.split("|"))


def parse_servers(given: str | Sequence[str], *, may_choose: bool = False) -> tuple[str, ...]:
    """Parse addresses HOST:PORT in the order of the shards: one string, separated by commas, or one string each.

    Args:
        may_choose: "A|B" is allowed in place of an address.
    """
    if isinstance(given, str):
        servers = tuple(part.strip() for part in given.split(",") if part.strip())
    elif isinstance(given, (list, tuple)) and all(isinstance(server, str) for server in given):
        servers = tuple(given)
    else:
        expected = 'the shards\' addresses, such as "127.0.0.1:7000,127.0.0.1:7001", or a list of them'
        refuse(ConfigError, "servers", expected, given)
    if not servers:
        raise ConfigError("servers: expected the shards' addresses, such as 127.0.0.1:7000,127.0.0.1:7001, got an empty list")
    addresses = [address for server in servers for address in (alternatives(server) if may_choose else (server,))]
    for address in addresses:
        _, port = parse_address(address, "servers")
        if port == 0:
            raise ConfigError(f"servers: {address!r} has port 0; expected the port that the shard listens on")
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"servers: an address is given twice in {given!r}; each shard has its own")
    return servers


def is_rule_path(text: str) -> bool:
    """True for the import path of a class, such as my_package.my_module:MyRule."""
    return len(text) <= 256 and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text, re.ASCII) is not None


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
"""Words for the fate of a job when a worker fails; docs/operations.md says what each word means."""


# Groups of psd-server's help.
PLACE = "which shard, and where"
JOB = "the job"
CHECKPOINTS = "checkpoints (use the same for all shards; see also psdctl checkpoints)"
END = "the end"
SECURITY = "security (files are read again when they change)"
LIMITS = "limits (requests beyond them are refused)"
WATCHING = "watching"


def _limit(default: int, low: int, high: int, text: str) -> Any:
    """A limit, set by psd-server --max-... N."""
    return setting(default, "N", text, low=low, high=high, group=LIMITS, prefix="--max-", is_shared=True)


@dataclass(frozen=True)
class Limits:
    """The limits on what a shard accepts from peers."""

    workers_max: int = _limit(1024, 1, 100_000, "workers of the job")  # a worker that waits costs a thread, about 50 KiB
    tensors_max: int = _limit(100_000, 1, 10_000_000, "tensors of the job")
    elements_max: int = _limit(1 << 40, 1, 1 << 48, "parameters of the job, all shards together")
    # A frame needs 4 MiB and a header; a declaration about 64 bytes for each tensor.
    message_bytes_max: int = _limit(32 << 20, 5 << 20, 1 << 30, "one gRPC message; large declarations may need more")
    name_bytes_max: int = _limit(256, 1, 4096, "the name of a tensor or a barrier")  # in UTF-8
    reduced_numbers_max: int = _limit(
        256, 0, 1 << 14, "numbers that workers bring to one all_reduce"
    )  # shard 0 has those of all
    tables_max: int = _limit(1024, 0, 10_000, "sparse tables of the job")
    table_dim_max: int = _limit(4096, 1, 1 << 16, "numbers of a table's row")
    table_bytes_max: int = _limit(
        0, 0, 1 << 48, "memory for the files of all tables on this shard (default: half of what is free where its state lies)"
    )
    table_rows_max: int = _limit(1 << 31, 1, 1 << 31, "rows of one table on this shard")
    push_ids_max: int = _limit(1 << 20, 1, 1 << 20, "ids of rows in one push, or one pull, at this shard")
    # The shard holds them until it has the push's last frame.
    push_bytes_max: int = _limit(1 << 30, 1, 1 << 40, "ids and gradients of rows in one push at this shard")
    vectors_max: int = _limit(1024, 0, VECTORS_MAX, "server-side vectors of the job")
    vector_bytes_max: int = _limit(
        0, 0, 1 << 48, "memory for this shard's part of all vectors (default: as much as there is where its state lies)"
    )
    batch_operations_max: int = _limit(1024, 1, OPERATIONS_MAX, "operations on vectors in one batch")
    batch_bytes_max: int = _limit(1 << 30, 1 << 20, 1 << 40, "numbers that one batch brings to this shard")  # held meanwhile
    reads_max: int = _limit(
        16, 1, 10_000, "readers that are fetching parameters at a time; each may keep another version of them in memory"
    )
    readers_max: int = _limit(1024, 1, 100_000, "readers that have asked for parameters lately; each costs a few hundred bytes")
    keep_versions: int = setting(
        2,
        "N",
        "versions that readers have, to tell them newer ones by what has changed; each costs the memory of the parameters",
        low=0,
        high=1000,
        group=LIMITS,
        prefix="--",
        is_shared=True,
    )
    calls: int = _limit(0, 0, 1_000_000, "gRPC calls at a time; each has a thread (default: 4 x --max-workers + 576)")
    connections: int = _limit(0, 0, 1_000_000, "gRPC connections at a time (default: 2 x --max-workers + 64)")
    # Further ones wait where they are made, or are refused, because gRPC counts one that has ended until its thread has. A
    # worker of psd_client has its own connection, and up to 4 calls.
    streams_max: int = _limit(32, 8, 1_000_000, "gRPC calls at a time on one connection; 8 for each worker if they share one")

    @property
    def calls_max(self) -> int:
        """Most calls at a time. A worker makes up to 4: a push or pull, a barrier or declaration, a heartbeat, and a retry of
        one. The others are those of strangers (psd/rim/strangers.py, pace.py), and 64 for status, health and readers."""
        return self.calls or 4 * self.workers_max + 576

    @property
    def connections_max(self) -> int:
        """Most connections at a time. A worker has one, and two while it reconnects."""
        return self.connections or 2 * self.workers_max + 64

    def __post_init__(self) -> None:
        check(ConfigError, self)


_place = functools.partial(setting, group=PLACE)
_job = functools.partial(setting, group=JOB, is_shared=True)
_checkpoints = functools.partial(setting, group=CHECKPOINTS, is_shared=True)
_end = functools.partial(setting, group=END, is_shared=True)
_security = functools.partial(setting, group=SECURITY, is_shared=True)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one psd-server process: shard_index and shard_count, and those that its help explains."""

    shard_index: int
    shard_count: int

    listen: str = _place("127.0.0.1:7000", "HOST:PORT", "address to bind; 0.0.0.0 for all interfaces, port 0 for a free one")
    advertise: str = _place("", "HOST:PORT", "address for workers to dial, if different; shown by psdctl status")
    bulk_port: int | None = _place(
        0,
        "PORT",
        "TCP port of the bulk lane, which is faster than gRPC, on the same host; 0 for a free one, off for none",
        kind=PORT,
        high=65535,
    )
    health_port: int | None = _place(
        None,
        "PORT",
        "answer gRPC health checks, and nothing else, on this port too, on the same host and unencrypted, as Kubernetes' "
        "probes need (default: only on the port of --listen)",
        kind=int,
        high=65535,
    )
    state_dir: str = _place(
        "",
        "DIR",
        "where to keep the parameters; a killed shard that is restarted with it continues where it was (default: a private "
        "directory in memory, which ends with the process)",
    )

    run_id: str = _job("", "NAME", "serve only the job of this name (default: the first that joins)", is_shared=False)
    lease_s: float = _job(10.0, "SECONDS", "stop waiting for a worker that has been silent for this long", low=0.1, high=86_400)
    on_worker_failure: str = _job(
        "wait",
        None,
        "when a worker's program ends by an error: wait for its rank's next process until the lease has run out; continue "
        "without it at once; or end all workers' sessions, also when a lease has run out",
        choices=ON_WORKER_FAILURE,
    )
    rules: tuple[str, ...] = _job(
        (),
        "MODULE:CLASS",
        "let jobs name this update rule, a Python class, such as my_package.my_module:MyRule; may be given several times. "
        "The shards run its code",
        flag="--rule",
    )
    rule_dir: str = _job(
        ".",
        "DIR",
        "where to look for the modules of --rule, after Python's own places (default: the working directory)",
        is_shared=False,
    )

    checkpoint_dir: str = _checkpoints(
        "",
        "URL",
        "where checkpoints are stored, and looked for at the start: a path, any URL that fsspec knows, or @FILE, a file that "
        "holds the URL, if that has a password (default: no checkpoints)",
        kind=SECRET_LOCATION,
    )
    checkpoint_secs: float = _checkpoints(0.0, "S", "take one every S seconds; 0: not by time", high=30 * 86_400)
    checkpoint_steps: int = _checkpoints(0, "N", "take one every N steps; 0: not by steps", high=1 << 40)
    checkpoint_keep: int = _checkpoints(3, "K", "remove all but the K newest", low=1, high=1_000_000)
    from_checkpoint: str = _checkpoints(
        "",
        "URL",
        "begin with this checkpoint, or the newest in this directory, if there is nothing to continue with: neither a state "
        "directory nor a checkpoint in --checkpoint-dir. With --parameters-only also a plain .safetensors file",
        kind=SECRET_LOCATION,
    )
    parameters_only: bool = _checkpoints(
        False,
        None,
        "take from --from-checkpoint the parameters alone, by name and shape; the optimizer, groups and all else may be "
        "others, and the clock begins at 0",
    )

    never_armed: bool = _job(
        False,
        None,
        "take no push in C alone, but all of them the long way: for tests, and to measure what is gained",
        is_shared=False,
    )

    grace_s: float = _end(10.0, "SECONDS", "time for running requests to finish after SIGTERM", high=3_600)
    exit_when_done: bool = _end(
        False,
        None,
        "exit, with status 0, when all workers have left, and store the last checkpoint then (without this: at SIGTERM)",
    )
    exit_on_eof: bool = _end(
        False,
        None,
        "exit, with status 0 and at once, when standard input ends: with the program that started this shard for itself",
        is_shared=False,
    )
    heeds_launcher: bool = _end(
        False,
        None,
        "read from standard input which workers a launcher is starting again, so that their leases do not run out "
        "meanwhile: lines such as 'starting 3', and 'gone 3' if it is not to come",
        flag="--heed-launcher",
    )

    tls_cert: str = _security("", "FILE", "PEM certificate with its chain; turns TLS on")
    tls_key: str = _security("", "FILE", "its PEM key, without a password")
    tls_client_ca: str = _security(
        "", "FILE", "PEM certificates: admit only clients with a certificate signed by one of these", is_shared=False
    )
    token_file: str = _security(
        "", "FILE", "admit only clients with a token; lines: ROLE TOKEN, roles: worker, publisher, reader, admin"
    )
    insecure: bool = _security(False, None, "listen beyond this machine without TLS, on a network that keeps strangers out")

    limits: Limits = field(default_factory=Limits)

    metrics_port: int | None = setting(
        None,
        "PORT",
        "serve Prometheus metrics at http://HOST:PORT/metrics, on the host of --listen; 0 for a free port, which the log "
        "names. Plain HTTP without authentication, even if gRPC has TLS (default: no metrics)",
        kind=int,
        high=65535,
        group=WATCHING,
    )

    def __post_init__(self) -> None:
        check_count(ConfigError, "--shard", self.shard_count, 1, SHARDS_MAX)
        check_count(ConfigError, "--shard", self.shard_index, 0, self.shard_count - 1)
        parse_address(self.listen, "--listen")
        if self.advertise:
            parse_address(self.advertise, "--advertise")
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
        for rule in self.rules:
            if not is_rule_path(rule):
                raise ConfigError(
                    f"--rule: expected the import path of a class, such as my_package.my_module:MyRule, got {rule!r}"
                )
        check(ConfigError, self)


@dataclass(frozen=True)
class ClientConfig:
    """Settings of one worker's connection: what ConnectKeywords say, or the environment. Empty words stand for nothing."""

    servers: tuple[str, ...]
    rank: int
    world_size: int
    run_id: str = ""
    transport: str = "auto"
    streams: int = 1
    wait_timeout_s: float = 600.0
    retry_timeout_s: float = 30.0
    report_after_s: float = REPORT_AFTER_S
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        parse_servers(self.servers, may_choose=True)
        if self.world_size < 1:
            raise ConfigError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: expected 0 to {self.world_size - 1} (world_size - 1), got {self.rank}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        check_count(ConfigError, "streams", self.streams, 1, STREAMS_MAX)
        if self.streams > 1 and self.transport in ("shm", "grpc"):
            raise ConfigError(f"streams: are of the tcp lane; expected 1 with transport={self.transport!r}, got {self.streams}")
        check_seconds(ConfigError, "wait_timeout", self.wait_timeout_s, 0.1, 30 * 86_400)
        check_seconds(ConfigError, "retry_timeout", self.retry_timeout_s, 0, 86_400)
        check_seconds(ConfigError, "report_after", self.report_after_s, 0.05, 86_400)
        check_client_tls(self.tls_ca, self.tls_cert, self.tls_key)
