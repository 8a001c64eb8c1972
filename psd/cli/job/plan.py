"""The plan of a job on machines that run psd-run: what to start, where, with which environment, and what to do if it dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psd.cli.job.places import NodePlaces
from psd.cli.job.policy import Name
from psd.contract.tls import TlsFiles


@dataclass(frozen=True)
class MeetingTls:
    """PEM files for the connections between the psd-runs.

    Attributes:
        leader: what the shards have, too. node: what workers have, too.
    """

    leader: TlsFiles
    node: TlsFiles


@dataclass(frozen=True)
class Meeting:
    """Ways in which the psd-runs of several hosts find each other.

    Attributes:
        rendezvous: HOST:PORT at which node 0 listens; empty: one psd-run starts the others over ssh.
        hosts: for ssh, as ssh takes them. ssh: the command for it. remote_python: the interpreter there; empty: as here.
        environ: the variables that --env names.
        node: the number that this node asks for; None: any.
        alike: what all hosts must be told alike: digests of values, by the options' names.
        is_guarded: shards may listen beyond their machine.
        key: of psd/cli/hosts/proof.py. tls: with a rendezvous; None: without.
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
        run_id: of this run only; processes are found by it.
        places: how many shards and workers there are, and on which node. node: this one; -1: none of them.
        meeting: with other hosts; None: this machine runs all.
        on_worker_failure, restarts_max, shard_restarts_max, grace_s: see psd-run --help.
        checkpoint_dir: where the shards store checkpoints; empty: nowhere.
        log_dir: for a file of each process; None: no files.
        urls: those with a secret, which the shards read from files of these names in the state directory.
        state_dirs: where each node's shards' state directories are made.
        is_state_private: they are removed in any case.
        kept_run_id: of the run that has left its state there; None: none has.
        shard_command: the command of a shard, by index, address to listen at, and state directory.
        worker_command: the command of every worker.
        dashboard_command: the command of the dashboard; empty: there is none.
        shard_environ: the environment of the shards.
        worker_environ: the environment of a worker, by rank and the shards' addresses.
    """

    run_id: str
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
        """True if this node runs a process."""
        return self.places.node_of(name) == self.node

    @property
    def node_mark(self) -> str:
        """Value of PSD_NODE in the environment of this node's processes; empty if this machine runs all."""
        return f"{self.run_id}/{self.node}" if self.meeting is not None else ""
