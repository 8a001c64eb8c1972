"""psd-run: a whole job by one command. Reads the flags, builds the plan; psd/cli/launcher.py carries it out on this machine,
psd/cli/kubernetes.py on a cluster.

    run.py        flags, help, the commands and environments of shards and workers
    launcher.py   the loop: output, deaths, signals
    policy.py     what to do about a death, a signal, a deadline
    processes.py  one child;  output.py  its lines;  display.py  the terminal;  state.py  the shards' state directories
    watchdog.py, sweep.py  no orphans

Knows how a shard is started and what a worker finds in its environment; nothing of what they do.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from psd.cli import kubernetes, logs, malloc
from psd.cli.arguments import (
    CHECKPOINT_OPTIONS,
    SERVER_DEFAULTS,
    Option,
    Options,
    Parser,
    add_checkpoint_options,
    add_options,
    add_rule_option,
    seconds,
    values,
    whole_number,
)
from psd.cli.kubernetes import Deployment
from psd.cli.launcher import Launcher, Plan
from psd.cli.policy import SHARD_STARTS_MAX
from psd.cli.state import kept_run_id, private_path
from psd.contract.config import ON_WORKER_FAILURE, TRANSPORTS, ConfigError, Limits, ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.environment import VARIABLES
from psd.contract.errors import InvalidRequest
from psd.contract.launching import python_command

SHARDS_MAX = 256
WORKERS_MAX = 4096
RESTARTS_MAX = 1_000_000

SHARD_RESTARTS = 100
"""Restarts by default: a limit for a shard that dies of each request, about once a second."""

CREDENTIALS = ("PSD_TLS_CA", "PSD_TLS_CERT", "PSD_TLS_KEY", "PSD_TOKEN_FILE")
"""Variables for shards elsewhere: psd-run's own shards have neither TLS nor tokens, and serve this machine alone."""

_USAGE = """\
psd-run [options] script.py [args ...]
       psd-run [options] -m module [args ...]
       psd-run [options] -- command [args ...]"""

_DESCRIPTION = """\
Run a training job on this machine: start the shards of a parameter server and the workers that train
with them, show all output, each line with the name of its process, and end with the workers' status. A
script.py is run by this Python; anything else is executed as a command. With --on kubernetes, run the job
on a cluster."""

_EPILOG = """\
examples:
  psd-run --shards 2 --workers 4 train.py --epochs 3
  psd-run --workers 2 --consistency async -m my.package.train
  psd-run --workers 8 --consistency ssp:3 --max-restarts 2 train.py
  psd-run --on kubernetes --image registry/psd:1 --shards 2 --workers 4 train.py --epochs 3

Each worker finds the defaults of psd_client.connect() and psd.distribute() in its environment,
so that the script needs no addresses and no ranks:
{variables}
psd-run sets the first four, and those for which an option is given. For scripts that read them it sets RANK,
LOCAL_RANK and WORLD_SIZE, too; not MASTER_ADDR and MASTER_PORT, since psd needs no process group of torch: a
script that wants one beside it names them. Unless they are set, psd-run also sets OMP_NUM_THREADS, so that all
workers together have as many threads as there are cores; PYTHONUNBUFFERED=1; and malloc thresholds that spare
fresh memory for each message. All output goes to standard output, psd-run's own messages to standard error.
On a terminal progress bars are redrawn in place, below the lines; a file gets one state a second. NO_COLOR=1
turns colours off.

The shards listen on 127.0.0.1 alone, without TLS and tokens: other machines cannot reach them, but all users
of this machine can. PSD_TLS_* and PSD_TOKEN_FILE are for shards elsewhere, and are not passed on to the
workers.

when something dies or is told to end:
  a worker fails       it is restarted with its rank, while --max-restarts lasts; then the others
                       get SIGTERM, and after --grace SIGKILL. Status: the worker's. Until it is back
                       the others wait for it, for as long as --lease says; or, with
                       --on-worker-failure continue, they go on, also when no restarts are left
  a shard dies         it is restarted at its address and continues where it was: its state directory
                       has its parameters. Workers wait for it and repeat unanswered requests. When
                       --max-shard-restarts are used up, or it could not be started {starts} times in a
                       row, or has never served, the job is stopped in the same way. Status: 1
  Ctrl-C, SIGTERM,     with --checkpoint-dir, a last checkpoint is taken while the workers train, within
  SIGHUP               --grace; a second one skips that. Then the job is stopped in the same way, the
                       shards after the workers; if there was no checkpoint, they store what they hold.
                       Another one kills everything at once. Status: 128 + the signal's number
  psd-run is killed    its watchdog (a small process) ends all others, and removes their state, within
                       seconds
  the watchdog dies    psd-run says so and starts another
  all workers end      the shards end, too, by themselves or, if a worker did not leave, by SIGTERM

The shards keep their state in memory (a private directory under /dev/shm, or, where there is none, among
temporary files); it is removed at the end in any case. With --state-dir it is kept there, and removed only
if all workers end with status 0: otherwise psd-run with the same --state-dir and --shards continues with
the parameters, under the same PSD_RUN_ID, while scripts start over.

--on kubernetes applies the manifests of deploy/ with kubectl, or prints them (--dry-run), and does not wait
for the job. A script.py with a relative path is sent, alone; an absolute path, a module or a command is taken
from the image. Shards require certificate and token; where there are none, openssl makes them. Kubernetes
restarts what dies; see deploy/README.md.

exit status:
  0      all workers ended with status 0; or the job is on the cluster
  N      the status of the first worker that failed for good; 128 + N if signal N killed it
  1      a shard died for good, or could not start; or --state-dir is in use or not psd-run's
  2      the options are wrong
  74     all is well, or psd-run got a signal, but the last checkpoint could not be stored
  128+N  psd-run got signal N: 130 for Ctrl-C, 143 for SIGTERM"""


_SIZE: Options = {
    "shards": Option("N", "server processes", whole_number),
    "workers": Option("N", "training processes", whole_number),
}

_TRAINING: Options = {
    "consistency": Option("WORD", "sync, async, or ssp:S for at most S steps apart (default: sync)"),
    "quorum": Option("K", "sync: close a round with K workers' gradients; late ones are dropped (default: all)", whole_number),
    "reduce": Option(None, "how to combine a round's gradients (default: mean)", choices=("mean", "sum")),
    "aggregation": Option(
        None,
        "fast: add gradients as they arrive; exact (sync): in the order of the ranks, so that a run ends in the same bits "
        "whatever the timing and whichever shard is killed (default: fast)",
        choices=("fast", "exact"),
    ),
    "transport": Option(
        None,
        "how gradients and parameters travel: shm, tcp, grpc, or auto, the first of these that works (default: auto)",
        choices=TRANSPORTS,
    ),
}

_FAULTS: Options = {
    "on_worker_failure": Option(
        None,
        "when a worker fails: wait until it has been restarted, and stop the job when no restarts are left; continue without "
        "it meanwhile, and then; or end the job at once",
        choices=ON_WORKER_FAILURE,
    ),
    "max_restarts": Option("R", "restart failed workers, R times in all", whole_number),
    "max_shard_restarts": Option(
        "R", f"restart shards that have died, R times in all (default: {SHARD_RESTARTS})", whole_number
    ),
    "state_dir": Option(
        "DIR",
        "where the shards keep the parameters, also after a failure of the job (default: a private directory in memory)",
    ),
    "lease_s": Option("SECONDS", "stop waiting for a worker that has been silent for this long", seconds),
    "grace_s": Option(
        "SECONDS", "time between SIGTERM and SIGKILL, for workers and for shards, and for the last checkpoint before", seconds
    ),
}

_WATCHING: Options = {
    "log_level": Option(
        None,
        f"least important records of the shards to show (default: {logs.LOG_LEVEL}); workers log as their script says",
        choices=logs.LEVELS,
    ),
    "metrics_port": Option(
        "BASE",
        "serve each shard's Prometheus metrics at http://127.0.0.1:PORT/metrics, PORT being BASE + its number (default: no "
        "metrics)",
        whole_number,
    ),
}

_DEFAULTS = {"shards": 1, "workers": 1, "max_restarts": 0, "log_level": logs.LOG_LEVEL, **SERVER_DEFAULTS}


def _parser() -> Parser:
    variables = "\n".join(f"  {name:20} {meaning}" for name, meaning in VARIABLES.items())
    parser = Parser("psd-run", _USAGE, _DESCRIPTION, _EPILOG.format(variables=variables, starts=SHARD_STARTS_MAX))
    add_options(parser.add_argument_group("size"), _SIZE, _DEFAULTS)
    training = parser.add_argument_group("training (defaults for scripts that do not set these)")
    add_options(training, _TRAINING, _DEFAULTS)
    add_rule_option(training)
    add_options(parser.add_argument_group("faults"), _FAULTS, _DEFAULTS)
    add_checkpoint_options(parser)
    kubernetes.add_options(parser)
    add_options(parser.add_argument_group("watching"), _WATCHING, _DEFAULTS)
    what = parser.add_argument_group("what to run (everything after it is passed on)")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a Python module, with its arguments, as a script"
    )
    what.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script.py", help="Python script or command, and its arguments"
    )
    parser.add_information()
    return parser


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> Plan | Deployment:
    """The plan; a wrong option ends the process with status 2 and one line of explanation."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check_count("--shards", args.shards, 1, SHARDS_MAX)
        _check_count("--workers", args.workers, 1, WORKERS_MAX)
        _check_count("--max-restarts", args.max_restarts, 0, RESTARTS_MAX)
        _check_on_worker_failure(args.on_worker_failure, args.max_restarts)
        shard_restarts = SHARD_RESTARTS if args.max_shard_restarts is None else args.max_shard_restarts
        _check_count("--max-shard-restarts", shard_restarts, 0, RESTARTS_MAX)
        if args.metrics_port is not None:
            _check_count("--metrics-port", args.metrics_port, 1, 65536 - args.shards)
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
        _check_quorum(args.quorum, args.workers, consistency)
        _check_aggregation(args.aggregation, consistency)
        given = {
            "PSD_CONSISTENCY": consistency,
            "PSD_QUORUM": args.quorum,
            "PSD_AGGREGATION": args.aggregation,
            "PSD_REDUCE": args.reduce,
            "PSD_TRANSPORT": args.transport,
        }
        for_workers = {name: str(value) for name, value in given.items() if value is not None}
        words = _words(args.module, args.command)
        if args.on == "kubernetes":
            return kubernetes.deployment(args, words, {**malloc.environment(), **for_workers})
        kubernetes.check_absent(args)
        command = _worker_command(words)
        run_id = _run_id(command)
        state_dir = Path(args.state_dir).absolute() if args.state_dir else private_path(run_id)
        run_id = kept_run_id(state_dir) or run_id
    except InvalidRequest as error:
        parser.error(f"--{error}")
    except ConfigError as error:
        parser.error(str(error))

    handed_on = {name: value for name, value in environ.items() if name not in CREDENTIALS}
    shared = {**handed_on, "PSD_RUN_ID": run_id, "PYTHONUNBUFFERED": "1"}
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
        shard_restarts_max=shard_restarts,
        grace_s=args.grace_s,
        has_checkpoints=bool(args.checkpoint_dir),
        state_dir=state_dir,
        is_state_private=not args.state_dir,
        shard_command=shard_command,
        worker_command=command,
        shard_environ=shared,
        worker_environ=worker_environ,
    )


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: expected {low} to {high}, got {value}")


def _check_on_worker_failure(word: str, restarts_max: int) -> None:
    if word == "end" and restarts_max:
        raise ConfigError(f"--max-restarts: nothing is restarted with --on-worker-failure end, got {restarts_max}")


def _check_quorum(quorum: int | None, workers: int, consistency: str | None) -> None:
    if quorum is None:
        return
    _check_count("--quorum", quorum, 1, workers)
    if consistency not in (None, "sync"):
        raise ConfigError(f"--quorum: is for sync only, where workers wait for each other; --consistency is {consistency}")


def _check_aggregation(aggregation: str | None, consistency: str | None) -> None:
    if aggregation == "exact" and consistency not in (None, "sync"):
        raise ConfigError(f"--aggregation: exact is for sync only, where there are rounds; --consistency is {consistency}")


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
