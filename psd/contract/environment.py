"""The only module that reads PSD_* environment variables: psd-run and Kubernetes set them, clients take defaults from them.

Explicit arguments win over the environment. Also sets one variable of gRPC's, which else prints a line for each fork (notebooks
fork often) and for each failed connection.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Unpack

from psd.contract import arguments
from psd.contract.config import ClientConfig, ConfigError, parse_servers
from psd.contract.consistency import Consistency
from psd.contract.keywords import ConnectKeywords
from psd.contract.launchers import launched

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

NumberT = TypeVar("NumberT", int, float)

VARIABLES = {
    "PSD_SERVERS": "addresses of the shards, in their order, separated by commas; for a reader also those of relays, A|B",
    "PSD_RANK": "this worker's number, from 0; else what torchrun, mpirun, srun, Ray Train or Kubernetes says",
    "PSD_WORLD_SIZE": "number of workers; else what torchrun, mpirun, srun or Ray Train says",
    "PSD_LOCAL_RANK": "this worker's number among those of its machine, from 0: for scripts that choose a GPU by it",
    "PSD_RUN_ID": "name of the job; others are refused",
    "PSD_CONSISTENCY": "sync, async or ssp:S, unless the script says which",
    "PSD_QUORUM": "workers whose gradients close a synchronous round, unless the script says how many",
    "PSD_AGGREGATION": "fast or exact, unless the script says which",
    "PSD_REDUCE": "mean or sum, unless the script says which",
    "PSD_TRANSPORT": "auto, shm, tcp or grpc, unless the script says which",
    "PSD_STREAMS": "TCP connections to each shard that carry gradients and parameters, unless the script says how many",
    "PSD_WAIT_TIMEOUT": "seconds, longest wait for other workers",
    "PSD_RETRY_TIMEOUT": "seconds, how long an unreachable shard is tried again",
    "PSD_STANDALONE": "0: without a cluster do not train alone on a private shard; 1: do so whatever else is set",
    "PSD_LOG_DIR": "directory where workers write the scalars of ps.log, as JSON lines",
    "PSD_TENSORBOARD": "directory where workers write the scalars of ps.log for TensorBoard",
    "PSD_JOBS_DIR": "private directory with a record of each running job, for psdctl (default: one in memory)",
    "PSD_TLS_CA": "PEM file of the authorities that sign the shards' certificates; turns TLS on",
    "PSD_TLS_CERT": "PEM file of this client's own certificate, if the shards require one",
    "PSD_TLS_KEY": "PEM file of its key",
    "PSD_TOKEN_FILE": "file that holds this client's token",
}
"""Variables for users, and their meanings; psd-run --help prints this table."""


_WORDS = "CONSISTENCY QUORUM AGGREGATION REDUCE TRANSPORT STREAMS WAIT_TIMEOUT RETRY_TIMEOUT LOG_DIR TENSORBOARD JOBS_DIR"
_HOW_TO_TRAIN = frozenset(f"PSD_{word}" for word in _WORDS.split())
"""Variables that do not say which job a program belongs to."""


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


def _who(environ: Mapping[str, str], world_size: int | None) -> tuple[int | None, int | None]:
    """Rank and number of workers from the environment: psd's own variables, then the launcher's."""
    rank = _integer(environ, "PSD_RANK")
    if rank is not None:
        return rank, world_size
    said = launched(environ)
    if said is None:
        return None, world_size
    if None not in (world_size, said.world_size) and world_size != said.world_size:
        raise ConfigError(
            f"world_size: it is given as {world_size}, but {said.size_name} is {said.world_size} and {said.rank_name} "
            f"{said.rank}; set PSD_RANK, too, if this process is another launcher's"
        )
    return said.rank, said.world_size if world_size is None else world_size


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    return _number(environ, name, float, "seconds")


def client_config(*, environ: Mapping[str, str] = os.environ, **given: Unpack[ConnectKeywords]) -> ClientConfig:
    """Settings of a client: from the keywords, else from the environment, else defaults.

    Raises:
        ConfigError: a value is wrong, or servers, rank or world_size are missing.
    """

    def setting(name: str, read: Callable[[Mapping[str, str], str], Any] = Mapping.get, usual: Any = None) -> Any:
        """The keyword's value, else the variable's, else the usual one."""
        value: Any = given.get(name)
        if value is None:
            value = read(environ, f"PSD_{name.upper()}")
        return usual if value is None else value

    servers, rank, world_size = setting("servers"), given.get("rank"), setting("world_size", _integer)
    if rank is None:
        rank, world_size = _who(environ, world_size)
    for name, value in (("servers", servers), ("rank", rank), ("world_size", world_size)):
        if value is None:
            why = why_not_alone(environ)
            raise ConfigError(
                f"{name}: not given. Pass {name}= to connect(), set PSD_{name.upper()}, or start the script with psd-run"
                + (f". PSD_STANDALONE=1 trains alone, which is not done by itself because {why}" if why else "")
            )
    assert servers is not None
    seconds = {
        "wait_timeout": setting("wait_timeout", _seconds),
        "retry_timeout": setting("retry_timeout", _seconds),
        "report_after": given.get("report_after"),
    }
    settings: dict[str, Any] = {
        f"{name}_s": arguments.real_number(ConfigError, name, value) for name, value in seconds.items() if value is not None
    }
    for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
        settings[name] = arguments.path(ConfigError, name, setting(name, usual=""))
    return ClientConfig(
        servers=parse_servers(servers, may_choose=True),
        rank=arguments.whole_number(ConfigError, "rank", rank),
        world_size=arguments.whole_number(ConfigError, "world_size", world_size),
        run_id=arguments.word(ConfigError, "run_id", setting("run_id", usual="")),
        transport=setting("transport", usual="auto"),
        streams=arguments.whole_number(ConfigError, "streams", setting("streams", _integer, 1)),
        **settings,
    )


def check_rank_of_learner(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a launcher alone says this process's rank: it numbers the processes of a learner's group."""
    said = None if "PSD_RANK" in environ else launched(environ)
    if said is not None:
        raise ConfigError(
            f"rank: {said.rank_name} is {said.rank}, which with group= is not the learner's number. Pass rank= and "
            "world_size=, which count learners, set PSD_RANK and PSD_WORLD_SIZE, or let psd-run start each learner's launcher: "
            "psd-run --workers LEARNERS -- torchrun --standalone ..."
        )


def why_not_alone(environ: Mapping[str, str] = os.environ) -> str:
    """The reason why a program that names no servers may not train alone, on a private shard; empty if it may.

    It may unless a variable says that it is one of several workers, or belongs to a job: a worker whose settings were lost must
    not train alone, unnoticed.
    """
    wish = environ.get("PSD_STANDALONE", "")
    if wish not in ("", "0", "1"):
        raise ConfigError(f"PSD_STANDALONE: expected 0 or 1, got {wish!r}")
    if wish:
        return "" if wish == "1" else "PSD_STANDALONE is 0"
    ours = (name for name in sorted(environ) if name.startswith("PSD_") or name == "JOB_COMPLETION_INDEX")
    named = next((name for name in ours if name not in _HOW_TO_TRAIN), None)
    if named is not None:
        return f"{named} is set"
    if environ.get("WORLD_SIZE", "1") != "1":
        return f"WORLD_SIZE is {environ['WORLD_SIZE']}"
    said = launched(environ)
    return "" if said is None or said.world_size in (None, 1) else f"{said.size_name} is {said.world_size}"


def worker_environment(servers: str, rank: int, world_size: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a worker of a local cluster: this process's, with other variables for the job."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    inherited = {name: value for name, value in environ.items() if name not in VARIABLES or name in _HOW_TO_TRAIN}
    return {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),
        **inherited,
        "PYTHONUNBUFFERED": "1",
        "PSD_SERVERS": servers,
        "PSD_RANK": str(rank),
        "PSD_WORLD_SIZE": str(world_size),
        "PSD_LOCAL_RANK": str(rank),
    }


def scalar_directories(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The directories for scalars as JSON lines and for TensorBoard; empty: none."""
    return environ.get("PSD_LOG_DIR", ""), environ.get("PSD_TENSORBOARD", "")


def memory_directory() -> Path:
    """The directory for files in memory: /dev/shm if it is writable, else that for temporary files. psd's files are private."""
    shm = Path("/dev/shm")  # noqa: S108
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def jobs_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for records of this user's running jobs: the same in every session of the user on this machine."""
    given = environ.get("PSD_JOBS_DIR")
    return Path(given) if given else memory_directory() / f"psd-jobs-{os.geteuid()}"


def crash_point(environ: Mapping[str, str] = os.environ) -> Callable[[str], None] | None:
    """A function for a shard to call at each crash point; PSD_CRASH_POINT says at which it kills the process. None without that
    variable, because tables have a crash point for each row."""
    pattern, colon, count = environ.get("PSD_CRASH_POINT", "").rpartition(":")
    if not colon or not count.isdigit():
        return None
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
    """Defaults for what a script does not say. quorum: 0 for all workers."""

    consistency: Consistency
    quorum: int
    reduction: str
    aggregation: str

    def consistency_of(self, word: str | None) -> Consistency:
        """The consistency for a script's word; the default for None. InvalidRequest if the word is unknown."""
        return self.consistency if word is None else Consistency.parse(word)


def job_defaults(environ: Mapping[str, str] = os.environ) -> JobDefaults:
    """Defaults from the environment, which psd-run sets from its flags."""
    return JobDefaults(
        consistency=Consistency.parse(environ.get("PSD_CONSISTENCY", "sync")),
        quorum=_integer(environ, "PSD_QUORUM") or 0,
        reduction=environ.get("PSD_REDUCE", "mean"),
        aggregation=environ.get("PSD_AGGREGATION", "fast"),
    )
