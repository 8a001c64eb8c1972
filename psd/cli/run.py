"""psd-run: starts a whole job with one command. Reads the flags and builds the plan; psd/cli/hosts/launcher.py carries it out
on machines, psd/cli/kubernetes/job.py and psd/cli/ray/job.py on a cluster.

    run_options.py  flags and help
    run.py          the commands and environments of shards and workers
    job/            plan.py  what to start;  policy.py  what to do about a death, a signal, a deadline;  conductor.py  does it;
                    summary.py  the last lines
    hosts/          launcher.py  the loop: output, deaths, signals;  leader.py leads other hosts, follower.py follows;
                    rendezvous.py, ssh.py, slurm.py  how they find each other
    processes/      child.py  one process;  output.py  its lines;  display.py  the terminal;  log_files.py  --log-dir;
                    state_directories.py  the shards' state;  watchdog.py, left_over.py  no orphans

Knows how a shard is started and what a worker's environment contains, but not what they do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from psd.cli import run_options
from psd.cli.hosts import rendezvous, slurm, ssh
from psd.cli.hosts.launcher import Launcher
from psd.cli.hosts.proof import key_of
from psd.cli.job.plan import HostPlan, JobPlan, Meeting, MeetingTls
from psd.cli.kubernetes import job as kubernetes
from psd.cli.kubernetes.job import Deployment
from psd.cli.processes import malloc
from psd.cli.processes.garbage import end_without_search
from psd.cli.processes.own_arguments import hide_secrets
from psd.cli.processes.state_directories import kept_run_id, private_path, url_file
from psd.cli.ray import job as ray_job
from psd.cli.ray.job import RayPlan
from psd.cli.words.arguments import CREDENTIAL_OPTIONS, EXIT_FAILURE, SECRET_OPTIONS, exit_status, flag_of, values
from psd.cli.words.terminal import prepare_streams, show
from psd.contract.config import SECURITY, ConfigError, Limits, ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.job_records import run_id_of
from psd.contract.launching import python_command
from psd.contract.locations import has_secret, shown
from psd.contract.scalars import tensorboard_module
from psd.contract.settings import settings_of, shared_flags
from psd.contract.tls import client_files, server_files

_OF_EACH_HOST = ("node_rank", "rendezvous", "log_dir", "state_dir", "env", "dashboard", "dashboard_port", "module", "command")
"""Options that may differ between the hosts of a job, or that are compared as the words of a command."""

_FILES_OF_EACH_HOST = ("tls_cert", "tls_key", "token_file")
"""Options that all hosts must have, or none; the paths may differ."""

CREDENTIALS = ("PSD_TLS_CA", "PSD_TLS_CERT", "PSD_TLS_KEY", "PSD_TOKEN_FILE")
"""Variables for shards with certificates or tokens. Shards on one machine only have neither, and serve no other machine."""


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str], run_id: str | None = None, node: int | None = None
) -> HostPlan | Deployment | RayPlan:
    """Make the plan. A wrong option ends the process with status 2 and one line of explanation.

    Args:
        argv: the arguments. environ: the environment of psd-run.
        run_id: id of the run; None: a new id, or that of the run to continue.
        node: number of this host in the job; None: as the arguments say; -1: this host is not in the job.
    """
    parser = run_options.parser()
    args = parser.parse_args(argv)
    try:
        run_options.check(args)
        args.rules = tuple(args.rules)
        shards = _shards(args)
        words = _words(args.module, args.command)
        if args.on == "slurm":
            slurm.fill_in(args, environ)
        places = run_options.places(args)
        args.workers = sum(places.workers)
        shards = dataclasses.replace(shards, limits=Limits(workers_max=max(args.workers, Limits().workers_max)))
        consistency = None if args.consistency is None else str(Consistency.parse(args.consistency))
        run_options.check_consistency(args, consistency)
        directories = {
            name: value and Path(value).absolute() for name, value in values(args, ("log_dir", "tensorboard")).items()
        }
        given = {**values(args, run_options.TRAINING), **directories, "consistency": consistency}
        for_workers = {f"PSD_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        for_all = run_options.environment(args.env, environ)
        unused = [name for name in CREDENTIALS if not (args.token_file if name == "PSD_TOKEN_FILE" else args.tls_cert)]
        handed_on = {name: value for name, value in environ.items() if name not in unused}
        files = {name: {**handed_on, **for_all}.get(f"PSD_{name.upper()}", "") for name in CREDENTIAL_OPTIONS}
        job = JobPlan(
            run_id=run_id or run_id_of(_program(words)),
            words=words,
            places=places,
            shards=shards,
            restarts_max=args.max_restarts,
            shard_restarts_max=run_options.SHARD_RESTARTS if args.max_shard_restarts is None else args.max_shard_restarts,
            shard_environ=for_all,
            for_workers={**malloc.environment(), **for_all, **for_workers},
            files={name: file and str(Path(file).absolute()) for name, file in files.items()},
        )
        if args.on == "kubernetes":
            return kubernetes.deployment(args, job)
        kubernetes.check_absent(args)
        if args.on == "ray":
            return ray_job.ray_plan(args, job, _launched_flags(shards, args))
        if args.tensorboard:
            tensorboard_module()
        return _host_plan(args, job, handed_on, for_workers, run_id, node)
    except InvalidRequest as error:
        parser.error(f"--{error}")
    except ConfigError as error:
        parser.error(str(error))


def _host_plan(
    args: argparse.Namespace,
    job: JobPlan,
    environ: Mapping[str, str],
    for_workers: Mapping[str, str],
    run_id: str | None,
    node: int | None,
) -> HostPlan:
    """The plan for machines that run psd-run. environ: what their processes inherit. for_workers: what options say."""
    words, places, for_all = job.words, job.places, job.shard_environ
    command = _worker_command(words)
    meeting = _meeting(args, node, words, environ, for_all)
    if meeting is None:
        run_options.check_one_host(args)
    if node is None:
        node = -1 if args.hosts else args.node_rank or 0
    state_dirs = [_state_dir(args, job.run_id, number if meeting is not None else None) for number in range(places.nodes)]
    kept = kept_run_id(state_dirs[node]) if node >= 0 else None
    run_id = run_id or kept or job.run_id

    if meeting is not None and node >= 0:
        _check_credentials(args, {**environ, **for_all})
    shared = {"PYTHONUNBUFFERED": "1", **environ, **for_all, "PSD_RUN_ID": run_id}
    if meeting is not None:
        shared["PSD_NODE"] = f"{run_id}/{node}"
    local = len(places.ranks(node)) if node >= 0 else 0
    for_workers = {
        "OMP_NUM_THREADS": str(max(1, _cores() // max(1, local))),
        **malloc.environment(),
        **shared,
        "PSD_WORLD_SIZE": str(args.workers),
        **for_workers,
    }

    hidden = [name for name in SECRET_OPTIONS if has_secret(getattr(args, name))]
    shard_flags = [f"--run-id={run_id}", *_launched_flags(job.shards, args, hidden), f"--rule-dir={_module_dir(words)}"]

    def shard_command(index: int, listen: str, state_dir: Path) -> list[str]:
        which = ["--shard", f"{index}/{places.shards}", "--listen", listen, "--state-dir", str(state_dir)]
        which += [f"{flag_of(name)}=@{state_dir.parent / url_file(name)}" for name in hidden]
        if args.metrics_port is not None:
            which.append(f"--metrics-port={args.metrics_port + index}")
        return [*python_command("psd.cli.server"), *which, *shard_flags]

    dashboard = [*python_command("psd.cli.psdctl"), "dashboard"] if args.dashboard else []
    dashboard += ["--port", str(args.dashboard_port), "--any-port"] if args.dashboard_port is not None else []
    return HostPlan(
        **{**vars(job), "run_id": run_id, "shard_environ": shared, "for_workers": for_workers},
        node=node,
        meeting=meeting,
        log_dir=Path(args.log_dir).absolute() if args.log_dir else None,
        urls={url_file(name): getattr(args, name) for name in hidden},
        state_dirs=state_dirs,
        is_state_private=not args.state_dir,
        kept_run_id=kept,
        shard_command=shard_command,
        worker_command=command,
        dashboard_command=dashboard,
    )


def _shards(args: argparse.Namespace) -> ServerConfig:
    """Settings that all shards share, without those of security, which are different on Kubernetes."""
    names = [name for name, each in settings_of(ServerConfig).items() if each.is_shared and each.group != SECURITY]
    return ServerConfig(0, args.shards, **values(args, [name for name in names if name in args]), exit_when_done=True)


def _launched_flags(shards: ServerConfig, args: argparse.Namespace, hidden: Sequence[str] = ()) -> list[str]:
    """Flags of psd-server for shards that psd-run itself starts. hidden: settings to leave out."""
    # With "end", psd-run ends the job, with the status of the failed worker; until then the others wait.
    failure = "continue" if args.on_worker_failure == "continue" else "wait"
    secured = values(args, ("tls_cert", "tls_key", "token_file", "insecure"))
    launched = dataclasses.replace(shards, on_worker_failure=failure, heeds_launcher=True, **secured)
    return [*shared_flags(launched, but=hidden), f"--log-level={args.log_level}"]


def _check_credentials(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the shards require TLS or tokens for which the workers have no files."""
    for option, needed in (("tls_cert", "PSD_TLS_CA"), ("token_file", "PSD_TOKEN_FILE")):
        if getattr(args, option) and not environ.get(needed):
            raise ConfigError(
                f"{flag_of(option)}: the workers need {needed}, in psd-run's environment on each host or by --env"
            )


def _meeting(
    args: argparse.Namespace, node: int | None, words: Sequence[str], environ: Mapping[str, str], for_all: Mapping[str, str]
) -> Meeting | None:
    """Make the description of how the hosts meet; None if there is only one host."""
    if not args.hosts and (args.nnodes or 1) == 1:
        return None
    told = {name: value for name, value in vars(args).items() if name not in _OF_EACH_HOST}
    told |= {name: bool(told[name]) for name in _FILES_OF_EACH_HOST}
    told |= {name: shown(told[name]) for name in SECRET_OPTIONS}  # a password could be guessed from its digest
    told["command"] = [*words]
    tls = None
    if args.rendezvous and args.tls_cert:
        found = {**environ, **for_all}
        files = (found.get(name, "") for name in ("PSD_TLS_CA", "PSD_TLS_CERT", "PSD_TLS_KEY"))
        tls = MeetingTls(server_files(args.tls_cert, args.tls_key, ""), client_files(*files))
    return Meeting(
        rendezvous=args.rendezvous,
        hosts=ssh.parse_hosts(args.hosts)[0] if args.hosts else (),
        ssh=args.ssh,
        environ=for_all,
        remote_python=args.remote_python,
        node=node if node is not None else args.node_rank,
        alike={name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in told.items()},
        is_guarded=bool(args.insecure or args.tls_cert),
        key=key_of(args.token_file) if args.rendezvous else b"",
        tls=tls,
    )


def _state_dir(args: argparse.Namespace, run_id: str, node: int | None) -> Path:
    """The state directory of a node, or of the only machine. Nodes may share a file system, or be one machine."""
    if args.state_dir:
        return Path(args.state_dir).absolute() / (f"node-{node}" if node is not None else "")
    return private_path(run_id if node is None else f"{run_id}-node-{node}")


def _words(module: Sequence[str] | None, command: Sequence[str]) -> list[str]:
    """The words to run, as given: -m and a module, a script, or a command; then its arguments."""
    if module is not None:
        if not module:
            raise ConfigError("-m: expected the name of a Python module")
        return ["-m", *module]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ConfigError("expected a script, -m and a module, or a command to run, such as: psd-run --workers 2 train.py")
    if command[0].startswith("-"):
        raise ConfigError(f"unknown option {command[0]}; options of psd-run come before the script")
    return list(command)


def _worker_command(words: Sequence[str]) -> list[str]:
    """The command of a worker, checked before anything is started."""
    if words[0] == "-m":
        return [sys.executable, "-u", *words]
    if _is_script(words):
        if not Path(words[0]).is_file():
            raise ConfigError(f"there is no script {words[0]!r}")
        return [sys.executable, "-u", *words]
    if shutil.which(words[0]) is None:
        hint = f"; name what runs it, such as: psd-run -- python {words[0]}" if Path(words[0]).exists() else ""
        raise ConfigError(f"{words[0]!r} is neither a script (.py) nor a command that can be executed{hint}")
    return list(words)


def _program(words: Sequence[str]) -> str:
    """The name of what is to be run: a module, a path or a command."""
    return words[1] if words[0] == "-m" else words[0]


def _is_script(words: Sequence[str]) -> bool:
    """True if what is to be run is a script, which this Python runs."""
    return words[0].endswith(".py")


def _module_dir(words: Sequence[str]) -> Path:
    """The directory that Python puts on sys.path for the worker's program: the script's, or the current one."""
    return Path(words[0]).absolute().parent if _is_script(words) else Path.cwd()


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def plan_again(argv: Sequence[str], run_id: str | None, node: int) -> HostPlan:
    """Make the plan of one node of a job on several hosts, with the run id that all have agreed on."""
    plan = parse(argv, os.environ, run_id, node)
    assert isinstance(plan, HostPlan)
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit status."""
    prepare_streams()
    end_without_search()
    hide_secrets()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before there was anything to end, or when all of it had
        return exit_status(signal.SIGINT)


def _run(argv: Sequence[str]) -> int:
    plan = parse(argv, os.environ)
    if not isinstance(plan, HostPlan):
        return plan.run()
    if plan.meeting is None:
        return Launcher(plan).run()

    replan = functools.partial(plan_again, argv)
    try:
        if plan.meeting.hosts:
            return ssh.run(plan, replan, argv)
        return rendezvous.run(plan, replan)
    except ConfigError as error:
        show(f"psd-run: error: {error}", is_error=True)
        return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
