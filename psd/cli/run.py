"""psd-run: a whole job by one command. Reads the flags, builds the plan; psd/cli/launcher.py carries it out on this machine,
psd/cli/kubernetes.py on a cluster.

    run_options.py  flags and help
    run.py          the commands and environments of shards and workers
    launcher.py     the loop: output, deaths, signals
    policy.py       what to do about a death, a signal, a deadline
    processes.py    one child;  output.py  its lines;  display.py  the terminal;  log_files.py  --log-dir
    state.py        the shards' state directories
    summary.py      the last lines
    watchdog.py, sweep.py  no orphans

Knows how a shard is started and what a worker finds in its environment; nothing of what they do.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from psd.cli import kubernetes, malloc, run_options
from psd.cli.arguments import CHECKPOINT_OPTIONS, values
from psd.cli.kubernetes import Deployment
from psd.cli.launcher import Launcher, Plan
from psd.cli.state import kept_run_id, private_path
from psd.contract.config import ConfigError, Limits, ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.launching import python_command
from psd.contract.scalars import tensorboard_module

CREDENTIALS = ("PSD_TLS_CA", "PSD_TLS_CERT", "PSD_TLS_KEY", "PSD_TOKEN_FILE")
"""Variables for shards elsewhere: psd-run's own shards have neither TLS nor tokens, and serve this machine alone."""


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Plan | Deployment:
    """The plan; a wrong option ends the process with status 2 and one line of explanation."""
    parser = run_options.parser()
    args = parser.parse_args(argv)
    try:
        run_options.check(args)
        checkpoints = values(args, CHECKPOINT_OPTIONS)
        ServerConfig(
            0,
            args.shards,
            lease_s=args.lease_s,
            grace_s=args.grace_s,
            rules=tuple(args.rules),
            parameters_only=args.parameters_only,
            **checkpoints,
        )
        consistency = None if args.consistency is None else str(Consistency.parse(args.consistency))
        run_options.check_consistency(args, consistency)
        given = {
            "PSD_CONSISTENCY": consistency,
            "PSD_QUORUM": args.quorum,
            "PSD_AGGREGATION": args.aggregation,
            "PSD_REDUCE": args.reduce,
            "PSD_TRANSPORT": args.transport,
            "PSD_LOG_DIR": args.log_dir and Path(args.log_dir).absolute(),
            "PSD_TENSORBOARD": args.tensorboard and Path(args.tensorboard).absolute(),
        }
        if args.tensorboard:
            tensorboard_module()
        for_workers = {name: str(value) for name, value in given.items() if value is not None}
        for_all = run_options.environment(args.env, environ)
        words = _words(args.module, args.command)
        if args.on == "kubernetes":
            return kubernetes.deployment(args, words, {**malloc.environment(), **for_workers, **for_all})
        kubernetes.check_absent(args)
        command = _worker_command(words)
        run_id = _run_id(command)
        state_dir = Path(args.state_dir).absolute() if args.state_dir else private_path(run_id)
        kept = kept_run_id(state_dir)
    except InvalidRequest as error:
        parser.error(f"--{error}")
    except ConfigError as error:
        parser.error(str(error))

    handed_on = {name: value for name, value in environ.items() if name not in CREDENTIALS}
    run_id = kept or run_id
    shared = {"PYTHONUNBUFFERED": "1", **handed_on, **for_all, "PSD_RUN_ID": run_id}
    for_workers = {
        "OMP_NUM_THREADS": str(max(1, _cores() // args.workers)),
        **malloc.environment(),
        **shared,
        "PSD_WORLD_SIZE": str(args.workers),
        "WORLD_SIZE": str(args.workers),
        **for_workers,
    }

    options = {
        "--run-id": run_id,
        "--lease": args.lease_s,
        # A job that is to end is ended here, with the status of the worker that has failed; the others wait meanwhile.
        "--on-worker-failure": "continue" if args.on_worker_failure == "continue" else "wait",
        "--grace": args.grace_s,
        "--max-workers": max(args.workers, Limits().workers_max),
        "--log-level": args.log_level,
        **{f"--{name.replace('_', '-')}": value for name, value in checkpoints.items()},
    }
    shard_flags = ["--exit-when-done", *(f"{name}={value}" for name, value in options.items())]
    shard_flags += ["--parameters-only"] if args.parameters_only else []
    shard_flags += [f"--rule={rule}" for rule in args.rules] + [f"--rule-dir={_module_dir(command)}"]

    def worker_environ(rank: int, servers: Sequence[str]) -> dict[str, str]:
        who = {"PSD_RANK": str(rank), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return {**for_workers, "PSD_SERVERS": ",".join(servers), **who}

    def shard_command(index: int, listen: str, state_dir: Path) -> list[str]:
        which = ["--shard", f"{index}/{args.shards}", "--listen", listen, "--state-dir", str(state_dir)]
        if args.metrics_port is not None:
            which.append(f"--metrics-port={args.metrics_port + index}")
        return [*python_command("psd.cli.server"), *which, *shard_flags]

    return Plan(
        run_id=run_id,
        shards=args.shards,
        workers=args.workers,
        on_worker_failure=args.on_worker_failure,
        restarts_max=args.max_restarts,
        shard_restarts_max=run_options.SHARD_RESTARTS if args.max_shard_restarts is None else args.max_shard_restarts,
        grace_s=args.grace_s,
        checkpoint_dir=args.checkpoint_dir,
        log_dir=Path(args.log_dir).absolute() if args.log_dir else None,
        state_dir=state_dir,
        is_state_private=not args.state_dir,
        is_continued=kept is not None,
        shard_command=shard_command,
        worker_command=command,
        shard_environ=shared,
        worker_environ=worker_environ,
    )


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


def _worker_command(command: Sequence[str]) -> list[str]:
    """The command of a worker, checked before anything is started."""
    if command[0] == "-m":
        return [sys.executable, "-u", *command]
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise ConfigError(f"there is no script {command[0]!r}")
        return [sys.executable, "-u", *command]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]!r} is neither a script (.py) nor a command that can be executed")
    return list(command)


def _module_dir(command: Sequence[str]) -> Path:
    """The directory with the modules of a worker's program: the script's, as in Python, or the present one."""
    is_script = command[0] == sys.executable and command[2] != "-m"
    return Path(command[2]).absolute().parent if is_script else Path.cwd()


def _run_id(command: Sequence[str]) -> str:
    """A unique name that tells the program."""
    python = command[0] == sys.executable
    what = command[3 if command[2] == "-m" else 2] if python else command[0]
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(what).stem)[:32]
    return f"{stem}-{secrets.token_hex(6)}"


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit status."""
    plan = parse(argv, os.environ)
    return plan.run() if isinstance(plan, Deployment) else Launcher(plan).run()


if __name__ == "__main__":
    sys.exit(main())
