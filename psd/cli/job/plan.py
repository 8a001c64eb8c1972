"""The plan of a job on machines that run psd-run: what to start, where, with which environment, and what to do if it dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psd.cli.job.places import NodePlaces
from psd.cli.job.policy import Name
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
class Plan:
    """A job to run.

    Attributes:
        run_id: unique id of this run, by which its processes are found.
        words: what to run, as it was given.
        places: numbers of shards and workers, and their nodes. node: number of this node; -1: this machine is none of them.
        meeting: how this host meets the others; None: this machine runs all processes.
        on_worker_failure, restarts_max, shard_restarts_max, grace_s: see psd-run --help.
        checkpoint_dir: where the shards store checkpoints; empty: nowhere.
        log_dir: directory for a log file of each process; None: no files.
        urls: URLs with a secret, by the name of the file in the state directory from which the shards read them.
        state_dirs: directory of each node in which its shards' state directories are made.
        is_state_private: True if the state is removed in any case.
        kept_run_id: id of the run that has left its state there; None if none has.
        shard_command: the command of a shard, by index, address to listen at, and state directory.
        worker_command: the command of every worker.
        dashboard_command: the command of the dashboard; empty: there is none.
        shard_environ: the environment of the shards.
        worker_environ: the environment of a worker, by rank and the shards' addresses.
    """

    run_id: str
    words: Sequence[str]
    places: NodePlaces
    node: int
    meeting: Meeting | None
    on_worker_failure: str
    restarts_max: int
    shard_restarts_max: int
    grace_s: float
    checkpoint_dir: str = field(repr=False)
    log_dir: Path | None
    urls: Mapping[str, str] = field(repr=False)
    state_dirs: Sequence[Path]
    is_state_private: bool
    kept_run_id: str | None
    shard_command: Callable[[int, str, Path], Sequence[str]]
    worker_command: Sequence[str]
    dashboard_command: Sequence[str]
    shard_environ: Mapping[str, str]
    worker_environ: Callable[[int, Sequence[str]], Mapping[str, str]]

    def is_here(self, name: Name) -> bool:
        """True if this node runs the process."""
        return self.places.node_of(name) == self.node

    def record(self, servers: Sequence[str]) -> JobRecord:
        """The record of this job, once the shards have these addresses."""
        files = {
            name: self.shard_environ.get(f"PSD_{name.upper()}", "") for name in ("tls_ca", "tls_cert", "tls_key", "token_file")
        }
        return new_record(
            self.run_id,
            tuple(servers),
            sum(self.places.workers),
            tuple(self.words),
            log_dir=str(self.log_dir or ""),
            **{name: file and str(Path(file).absolute()) for name, file in files.items()},
        )

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
