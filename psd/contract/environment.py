"""The one place that reads PSD_* environment variables; psd-run and Kubernetes set them, clients take defaults from them.

Explicit arguments win over the environment. Everything below receives frozen values.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from psd.contract.config import ClientConfig, ConfigError, parse_servers
from psd.contract.consistency import Consistency

NumberT = TypeVar("NumberT", int, float)

VARIABLES = {
    "PSD_SERVERS": "addresses of the shards, in their order, separated by commas",
    "PSD_RANK": "this worker's number, from 0 (on Kubernetes JOB_COMPLETION_INDEX serves as well)",
    "PSD_WORLD_SIZE": "number of workers",
    "PSD_RUN_ID": "name of the job; others are refused",
    "PSD_CONSISTENCY": "sync, async or ssp:S, unless the script says which",
    "PSD_QUORUM": "workers whose gradients close a synchronous round, unless the script says how many",
    "PSD_AGGREGATION": "fast or exact, unless the script says which",
    "PSD_REDUCE": "mean or sum, unless the script says which",
    "PSD_TRANSPORT": "auto, shm, tcp or grpc, unless the script says which",
    "PSD_WAIT_TIMEOUT": "seconds, longest wait for other workers",
    "PSD_RETRY_TIMEOUT": "seconds, how long an unreachable shard is tried again",
    "PSD_TLS_CA": "PEM file of the authorities that sign the shards' certificates; turns TLS on",
    "PSD_TLS_CERT": "PEM file of this client's own certificate, if the shards require one",
    "PSD_TLS_KEY": "PEM file of its key",
    "PSD_TOKEN_FILE": "file that holds this client's token",
}
"""Variables for users, and their meanings; psd-run --help prints this table."""


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], NumberT], expected: str) -> NumberT | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}: expected {expected}, got {text!r}") from None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name, int, "a whole number")


def _rank(environ: Mapping[str, str]) -> int | None:
    return _integer(environ, "PSD_RANK" if "PSD_RANK" in environ else "JOB_COMPLETION_INDEX")


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    return _number(environ, name, float, "seconds")


def client_config(
    *,
    servers: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    transport: str | None = None,
    wait_timeout: float | None = None,
    retry_timeout: float | None = None,
    report_after: float | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClientConfig:
    """Settings of a client: arguments first, then the environment, then defaults.

    Raises:
        ConfigError: a value is wrong, or servers, rank or world_size are given nowhere.
    """
    servers = servers if servers is not None else environ.get("PSD_SERVERS")
    rank = rank if rank is not None else _rank(environ)
    world_size = world_size if world_size is not None else _integer(environ, "PSD_WORLD_SIZE")
    for name, value in (("servers", servers), ("rank", rank), ("world_size", world_size)):
        if value is None:
            raise ConfigError(
                f"{name}: not given. Pass {name}= to connect(), set PSD_{name.upper()}, or start the script with psd-run"
            )
    assert servers is not None
    assert rank is not None
    assert world_size is not None
    seconds = {
        "wait_timeout_s": wait_timeout if wait_timeout is not None else _seconds(environ, "PSD_WAIT_TIMEOUT"),
        "retry_timeout_s": retry_timeout if retry_timeout is not None else _seconds(environ, "PSD_RETRY_TIMEOUT"),
        "report_after_s": report_after,
    }
    return ClientConfig(
        servers=parse_servers(servers),
        rank=rank,
        world_size=world_size,
        run_id=run_id if run_id is not None else environ.get("PSD_RUN_ID", ""),
        transport=transport or environ.get("PSD_TRANSPORT", "auto"),
        tls_ca=tls_ca if tls_ca is not None else environ.get("PSD_TLS_CA", ""),
        tls_cert=tls_cert if tls_cert is not None else environ.get("PSD_TLS_CERT", ""),
        tls_key=tls_key if tls_key is not None else environ.get("PSD_TLS_KEY", ""),
        token_file=token_file if token_file is not None else environ.get("PSD_TOKEN_FILE", ""),
        **{name: value for name, value in seconds.items() if value is not None},
    )


def memory_directory() -> Path:
    """The directory for files in memory: /dev/shm if it exists, else the one for temporary files. Ours in it are private."""
    shm = Path("/dev/shm")  # noqa: S108
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def crash_point(environ: Mapping[str, str] = os.environ) -> Callable[[str], None]:
    """The function to call at each named step at which a shard may die: it does nothing, unless PSD_CRASH_POINT tells it to
    kill the process there."""
    pattern, colon, count = environ.get("PSD_CRASH_POINT", "").rpartition(":")
    if not colon or not count.isdigit():
        return lambda _: None
    left = int(count)

    def hook(point: str) -> None:
        nonlocal left
        if fnmatchcase(point, pattern):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


@dataclass(frozen=True)
class JobDefaults:
    """Defaults for a script that does not say. quorum: 0 for all workers."""

    consistency: Consistency
    quorum: int
    reduction: str
    aggregation: str

    def consistency_of(self, word: str | None) -> Consistency:
        """The consistency that a script asks for by a word; None: it does not. InvalidRequest if it is none of the words."""
        return self.consistency if word is None else Consistency.parse(word)


def job_defaults(environ: Mapping[str, str] = os.environ) -> JobDefaults:
    """Defaults from the environment, which psd-run sets from its flags."""
    return JobDefaults(
        consistency=Consistency.parse(environ.get("PSD_CONSISTENCY", "sync")),
        quorum=_integer(environ, "PSD_QUORUM") or 0,
        reduction=environ.get("PSD_REDUCE", "mean"),
        aggregation=environ.get("PSD_AGGREGATION", "fast"),
    )
