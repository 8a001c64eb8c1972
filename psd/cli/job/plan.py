"""The plan of a job: what to start, with which environment, and what to do if it dies. It is the same wherever the job runs.
What only one place needs is added by `HostPlan` (machines that run psd-run), psd/cli/ray/job.py and psd/cli/kubernetes/job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from psd.cli.job.actions import Name
from psd.cli.job.places import NodePlaces
from psd.contract.config import ServerConfig
from psd.contract.job_records import JobRecord, new_record
from psd.contract.tls import TlsFiles


@dataclass(frozen=True)
class MeetingTls:
    """PEM files for the connections between the psd-runs.

    Attributes:
        leader: files of node 0, the same as the shards'. node: files of the other nodes, the same as the workers'.
    """

    leader: TlsFiles
    node: TlsFiles


@dataclass(frozen=True)
class Meeting:
    """Ways in which the psd-runs of several hosts find each other.

    Attributes:
        rendezvous: HOST:PORT at which node 0 listens; empty if one psd-run starts the others over ssh.
        hosts: the hosts, in the form that ssh takes. ssh: the ssh command. remote_python: the interpreter on the hosts; empty:
            the same path as here.
        environ: the variables that --env names.
        node: the number that this node asks for; None: any.
        alike: digests of the values that must be the same on all hosts, by name of the option.
        is_guarded: True if shards may listen beyond their machine.
        key: the key of psd/cli/hosts/proof.py. tls: files for TLS at the rendezvous; None: no TLS.
    """

    rendezvous: str
    hosts: tuple[str, ...]
    ssh: str
    remote_python: str
    environ: Mapping[str, str]
    node: int | None
    alike: Mapping[str, str]
    is_guarded: bool
    key: bytes = field(default=b"", repr=False)
    tls: MeetingTls | None = None


@dataclass(frozen=True)
class JobPlan:
    """A job to run.

    Attributes:
        run_id: unique id of this run, by which its processes are found.
        words: what to run, as it was given.
        places: numbers of shards and workers, and their nodes.
        shards: the settings of all shards, without those of security.
        restarts_max: see psd-run --help. shard_restarts_max: likewise; None: it is not psd-run that starts shards again.
        shard_environ: variables of the shards. for_workers: variables of every worker.
        files: a client's files for the shards, by name of the field of JobRecord.
    """

    run_id: str
    words: Sequence[str]
    places: NodePlaces
    shards: ServerConfig = field(repr=False)
    restarts_max: int
    shard_restarts_max: int | None
    shard_environ: Mapping[str, str]
    for_workers: Mapping[str, str]
    files: Mapping[str, str]

    def worker_environ(self, rank: int, servers: Sequence[str]) -> dict[str, str]:
        """The environment of a worker that is the only one on its host, or seems to be; servers: the shards' addresses."""
        return {**self.for_workers, "PSD_SERVERS": ",".join(servers), "PSD_RANK": str(rank), "PSD_LOCAL_RANK": "0"}

    def record(self, servers: Sequence[str]) -> JobRecord:
        """The record of this job, once the shards have these addresses."""
        return new_record(self.run_id, tuple(servers), sum(self.places.workers), tuple(self.words), **self.files)


@dataclass(frozen=True)
class HostPlan(JobPlan):
    """A job on machines that run psd-run.

    Attributes:
        node: number of this node; -1: this machine is none of them.
        meeting: how this host meets the others; None: this machine runs all processes.
        log_dir: directory for a log file of each process; None: no files.
        urls: URLs with a secret, by the name of the file in the state directory from which the shards read them.
        state_dirs: directory of each node in which its shards' state directories are made.
        is_state_private: True if the state is removed in any case.
        kept_run_id: id of the run that has left its state there; None if none has.
        shard_command: the command of a shard, by index, address to listen at, and state directory.
        worker_command: the command of every worker.
        dashboard_command: the command of the dashboard; empty: there is none.
    """

    node: int
    meeting: Meeting | None
    log_dir: Path | None
    urls: Mapping[str, str] = field(repr=False)
    state_dirs: Sequence[Path]
    is_state_private: bool
    kept_run_id: str | None
    shard_command: Callable[[int, str, Path], Sequence[str]]
    worker_command: Sequence[str]
    dashboard_command: Sequence[str]

    @override
    def worker_environ(self, rank: int, servers: Sequence[str]) -> dict[str, str]:
        first = self.places.ranks(self.node).start
        return {**super().worker_environ(rank, servers), "PSD_LOCAL_RANK": str(rank - first)}

    def is_here(self, name: Name) -> bool:
        """True if this node runs the process."""
        return self.places.node_of(name) == self.node

    @override
    def record(self, servers: Sequence[str]) -> JobRecord:
        return replace(super().record(servers), log_dir=str(self.log_dir or ""))

    @property
    def remark(self) -> str:
        """Words about `psd-run train.py --workers 2`, which starts one worker; empty where nothing is odd."""
        if sum(self.places.workers) > 1 or "--workers" not in self.words[1:]:
            return ""
        return "one worker: --workers stands behind the program, which gets it; psd-run's own options come before the program"

    @property
    def node_mark(self) -> str:
        """Value of PSD_NODE in the environment of this node's processes; empty if this machine runs all processes."""
        return f"{self.run_id}/{self.node}" if self.meeting is not None else ""
