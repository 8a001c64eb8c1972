"""psd-run's flags, and the page that --help prints. Checks the flags; psd/cli/run.py makes a plan from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from psd.cli.hosts.ssh import parse_hosts
from psd.cli.job.places import NodePlaces, spread
from psd.cli.job.policy import SHARD_STARTS_MAX
from psd.cli.kubernetes import job as kubernetes
from psd.cli.words import logs
from psd.cli.words.arguments import SERVER_DEFAULTS, Options, Parser, add_options, add_settings, refuse_given, whole_number
from psd.contract.config import CHECKPOINTS, ON_WORKER_FAILURE, TRANSPORTS, ConfigError, ServerConfig, parse_address
from psd.contract.environment import VARIABLES
from psd.contract.settings import Setting, check_count, settings_of
from psd.contract.strands import STREAMS_MAX

SHARDS_MAX = 256
WORKERS_MAX = 4096
NODES_MAX = 1024
RESTARTS_MAX = 1_000_000

SHARD_RESTARTS = 100
"""Default number of restarts: a limit for a shard that dies of every request, about once a second."""

SET_BY_PSD_RUN = ("PSD_SERVERS", "PSD_RANK", "PSD_WORLD_SIZE", "PSD_LOCAL_RANK", "PSD_RUN_ID", "PSD_NODE")
"""Variables that psd-run sets to tell the processes apart."""

_USAGE = """\
psd-run [options] script.py [args ...]
       psd-run [options] -m module [args ...]
       psd-run [options] -- command [args ...]"""

_DESCRIPTION = """\
Run a training job on this machine: start the shards of a parameter server and the workers that train
with them, show all output, each line with the name of its process, and end with the workers' status. A
script.py is run by this Python; anything else is executed as a command. With --nnodes or --hosts, run the
job on several hosts; with --on, on a cluster."""

_EPILOG = """\
examples:
  psd-run --shards 2 --workers 4 train.py --epochs 3
  psd-run --workers 2 --consistency async -m my.package.train
  psd-run --workers 8 --consistency ssp:3 --max-restarts 2 train.py
  psd-run --hosts a:4,b:4 --shards 2 --insecure train.py
  psd-run --on kubernetes --image registry/psd:1 --shards 2 --workers 4 train.py --epochs 3

Each worker finds the defaults of psd_client.connect() and psd.distribute() in its environment,
so that the script needs no addresses and no ranks:
{variables}
psd-run sets the first five, and those for which an option is given. It does not set RANK, WORLD_SIZE and
MASTER_ADDR: trainers take these for a process group of torch, which psd does not need. Unless they are set,
psd-run also sets OMP_NUM_THREADS, so that all workers together have as many threads as there are cores;
PYTHONUNBUFFERED=1; and malloc thresholds that spare fresh memory for each message. All output goes to standard
output, psd-run's own messages to standard error. On a terminal progress bars are redrawn in place, below the
lines, and each process has a colour; a file gets one state a second, and no colours. NO_COLOR=1 turns colours
off. With --log-dir each process's output is in a file of its own as well; runs add to these files, and never
empty them. A full disk ends no job: psd-run says so, and what has no room is lost. When nobody reads the output
any more, as after psd-run ... | head, the job ends; while a pager holds it up, the job waits, and a signal ends
it all the same. Shards and workers read nothing from standard input.

The shards listen on 127.0.0.1 alone, without TLS and tokens: other machines cannot reach them, but all users
of this machine can. PSD_TLS_* and PSD_TOKEN_FILE are for shards elsewhere, and are not passed on to the
workers.

when something dies or is told to end:
  a worker fails       it is restarted with its rank, while --max-restarts lasts; then the others
                       get SIGTERM, and after --grace SIGKILL. Status: the worker's. Until it is back
                       the others wait for it; or, with --on-worker-failure continue, they go on, also
                       when no restarts are left
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

On several hosts:
  --nnodes, --rendezvous  the same command on every host. The one with the rendezvous' address is node 0,
                       which leads and shows all output; ranks are given out host by host, shards go round
  --hosts a:4,b:4      this psd-run starts the others over ssh, which must not have to ask anything, and
                       leads them: 4 workers each. The same directory and Python must be there
  a host is lost       (its connection ends, or is silent for 30 s) its processes end; the job is stopped, or,
                       if there were workers alone, goes on with --on-worker-failure continue. Status: 75 on
                       all hosts that are left, if the job is stopped: the same command may do better
  Ctrl-C on any host   ends the job on all
Shards that other machines reach need --tls-cert and --tls-key (and --token-file, with PSD_TLS_CA and
PSD_TOKEN_FILE for the workers), or --insecure on a network that keeps strangers out. With --rendezvous these
guard the connection between the psd-runs, too: only hosts that have the same tokens take part.

--on slurm: srun starts psd-run once per task, with a worker each. --on ray: shards and workers are actors,
which Ray starts again. docs/launchers.md has a table of what each does when something dies.

The shards keep their state in memory (a private directory under /dev/shm, or, where there is none, among
temporary files); it is removed at the end in any case. With --state-dir it is kept there, and removed only
if all workers end with status 0: otherwise psd-run with the same --state-dir and --shards continues with
the parameters, under the same PSD_RUN_ID, while scripts start over.

--on kubernetes applies the manifests of deploy/ with kubectl, or prints them (--dry-run), and does not wait
for the job. A script.py with a relative path is sent, alone but for modules of --rule that lie beside it; an
absolute path, a module or a command is taken from the image. Shards require certificate and token; where
there are none, openssl makes them. Kubernetes restarts what dies; see deploy/README.md.

exit status:
  0      all workers ended with status 0; or the job is on the cluster
  N      the status of the first worker that failed for good; 128 + N if signal N killed it
  1      a shard died for good, or could not start; or --state-dir is in use or not psd-run's
  2      the options are wrong
  74     all is well, or psd-run got a signal, but the last checkpoint could not be stored
  75     a host of a job on several was lost while it ran; run it again
  128+N  psd-run got signal N: 130 for Ctrl-C, 143 for SIGTERM"""


_OF_SHARDS = settings_of(ServerConfig)

_SIZE: Options = {
    "shards": Setting("N", "server processes", int),
    "workers": Setting("N", "training processes (default: 1)", int),
}

TRAINING: Options = {
    "consistency": Setting("WORD", "sync, async, or ssp:S for at most S steps apart (default: sync)"),
    "quorum": Setting("K", "sync: close a round with K workers' gradients; late ones are dropped (default: all)", int),
    "reduce": Setting(None, "how to combine a round's gradients (default: mean)", choices=("mean", "sum")),
    "aggregation": Setting(
        None,
        "fast: add gradients as they arrive; exact (sync): in the order of the ranks, so that a run ends in the same bits "
        "whatever the timing and whichever shard is killed, but of tables whose rows expire by seconds (default: fast)",
        choices=("fast", "exact"),
    ),
    "transport": Setting(
        None,
        "how gradients and parameters travel: shm, tcp, grpc, or auto, the first of these that works (default: auto)",
        choices=TRANSPORTS,
    ),
    "streams": Setting(
        "N",
        "TCP connections from each worker to each shard that carry gradients and parameters, for long links (default: 1)",
        int,
    ),
}

_FAULTS: Options = {
    "on_worker_failure": Setting(
        None,
        "when a worker fails: wait until it has been restarted, and stop the job when no restarts are left; continue without "
        "it meanwhile, and then; or end the job at once",
        choices=ON_WORKER_FAILURE,
    ),
    "max_restarts": Setting("R", "restart failed workers, R times in all", int),
    "max_shard_restarts": Setting("R", f"restart shards that have died, R times in all (default: {SHARD_RESTARTS})", int),
    "state_dir": Setting(
        "DIR",
        "where the shards keep the parameters, also after a failure of the job (default: a private directory in memory)",
    ),
    "lease_s": _OF_SHARDS["lease_s"],
    "grace_s": Setting(
        "SECONDS", "time between SIGTERM and SIGKILL, for workers and for shards, and for the last checkpoint before", float
    ),
}

_WATCHING: Options = {
    "log_dir": Setting(
        "DIR",
        "also write the output to files there, one for each process, such as DIR/worker-0.log, and the scalars of ps.log as "
        "JSON lines beside it, DIR/worker-0.jsonl (psdctl plot)",
    ),
    "tensorboard": Setting("DIR", "write the scalars of ps.log there for TensorBoard, in DIR/worker-0 and so on"),
    "log_level": Setting(
        None,
        f"least important records of the shards to show (default: {logs.LOG_LEVEL}); workers log as their script says",
        choices=logs.LEVELS,
    ),
    "metrics_port": Setting(
        "BASE",
        "serve each shard's Prometheus metrics at http://127.0.0.1:PORT/metrics, PORT being BASE + its number (default: no "
        "metrics)",
        int,
    ),
}

_HOSTS: Options = {
    "nnodes": Setting(
        "N",
        "run the job on N hosts, with the same command on each of them; --shards and --workers are of all together",
        int,
    ),
    "node_rank": Setting(
        "I",
        "which of them this is, from 0 (default: node 0 is the one with the rendezvous' address; the others as they come)",
        int,
    ),
    "rendezvous": Setting("HOST:PORT", "where node 0 waits for the others, at an address of its own that they can dial"),
    "hosts": Setting("HOST:W,...", "run the job on these hosts, with so many workers on each, over ssh, from here"),
    "ssh": Setting("COMMAND", "how to call ssh, such as 'ssh -p 2222 -i key'"),
    "remote_python": Setting("PATH", "the Python on the other hosts, with psd installed (default: the path of this one)"),
    "tls_cert": Setting("FILE", "PEM certificate of the shards; see psd-server --help"),
    "tls_key": Setting("FILE", "its PEM key"),
    "token_file": Setting("FILE", "the shards' list of tokens, the same on all hosts; workers have theirs from PSD_TOKEN_FILE"),
}

_RAY: Options = {
    "address": Setting("ADDRESS", "Ray: of the cluster"),
    "worker_resources": Setting("NAME=N,...", "Ray: what each worker needs, such as CPU=4,GPU=1"),
}

_DEFAULTS = {
    "address": "auto",
    "worker_resources": "CPU=1",
    "ssh": "ssh",
    "remote_python": "",
    "rendezvous": "",
    "hosts": "",
    "tls_cert": "",
    "tls_key": "",
    "token_file": "",
    "shards": 1,
    "max_restarts": 0,
    "log_level": logs.LOG_LEVEL,
    **SERVER_DEFAULTS,
}


def parser() -> Parser:
    """The parser of psd-run's arguments."""
    variables = "\n".join(f"  {name:20} {meaning}" for name, meaning in VARIABLES.items())
    found = Parser("psd-run", _USAGE, _DESCRIPTION, _EPILOG.format(variables=variables, starts=SHARD_STARTS_MAX))
    add_options(found.add_argument_group("size"), _SIZE, _DEFAULTS)
    training = found.add_argument_group("training (defaults for scripts that do not set these)")
    add_options(training, {**TRAINING, "rules": _OF_SHARDS["rules"]}, _DEFAULTS)
    add_options(found.add_argument_group("faults"), _FAULTS, _DEFAULTS)
    add_settings(found, CHECKPOINTS)
    where = found.add_argument_group("on a cluster")
    where.add_argument(
        "--on",
        choices=("kubernetes", "slurm", "ray"),
        help="who runs the job: Kubernetes, by kubectl; SLURM, whose srun starts psd-run as often as there are tasks; or Ray "
        "(see below)",
    )
    add_options(where, _RAY, _DEFAULTS)
    add_options(found.add_argument_group("on several hosts (see below)"), _HOSTS, _DEFAULTS)
    kubernetes.add_options(found)
    watching = found.add_argument_group("watching")
    add_options(watching, _WATCHING, _DEFAULTS)
    watching.add_argument(
        "--dashboard",
        action="store_true",
        help="show the job in a browser while it runs; the address is printed. Needs the extra ui",
    )
    watching.add_argument(
        "--dashboard-port",
        type=whole_number,
        metavar="PORT",
        help="port of the dashboard, on loopback (default: psdctl dashboard's); another one if it is taken",
    )
    processes = found.add_argument_group("processes")
    processes.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable in the environment of all shards and workers; just NAME takes the value that it has here; may be "
        "given several times",
    )
    what = found.add_argument_group("what to run (everything after it is passed on)")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a Python module, with its arguments, as a script"
    )
    what.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script.py", help="Python script or command, and its arguments"
    )
    found.add_information()
    return found


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError if a number is out of range, or two options contradict each other."""
    check_count(ConfigError, "--shards", args.shards, 1, SHARDS_MAX)
    if args.workers is not None:
        check_count(ConfigError, "--workers", args.workers, 1, WORKERS_MAX)
    if args.streams is not None:
        check_count(ConfigError, "--streams", args.streams, 1, STREAMS_MAX)
        if args.streams > 1 and args.transport in ("shm", "grpc"):
            raise ConfigError(
                f"--streams: are of the tcp lane; expected 1 with --transport {args.transport}, got {args.streams}"
            )
    check_count(ConfigError, "--max-restarts", args.max_restarts, 0, RESTARTS_MAX)
    if args.on_worker_failure == "end" and args.max_restarts:
        raise ConfigError(f"--max-restarts: nothing is restarted with --on-worker-failure end, got {args.max_restarts}")
    if args.max_shard_restarts is not None:
        check_count(ConfigError, "--max-shard-restarts", args.max_shard_restarts, 0, RESTARTS_MAX)
    if args.dashboard_port is not None:
        check_count(ConfigError, "--dashboard-port", args.dashboard_port, 0, 65535)
        if not args.dashboard:
            raise ConfigError("--dashboard-port: is for --dashboard, which was not given")
    if args.dashboard and (args.hosts or args.on):
        raise ConfigError("--dashboard: is for psd-run on the shards' machine; elsewhere run psdctl dashboard")
    if args.metrics_port is not None:
        check_count(ConfigError, "--metrics-port", args.metrics_port, 1, 65536 - args.shards)


def places(args: argparse.Namespace) -> NodePlaces:
    """Numbers of shards and workers, and their nodes. Raises ConfigError if the options for hosts are wrong."""
    if args.hosts:
        why = "is for psd-run on every host; with --hosts it starts them itself"
        refuse_given(args, dict.fromkeys(("nnodes", "node_rank", "rendezvous"), why))
        _, workers = parse_hosts(args.hosts)
        check_count(ConfigError, "--hosts", sum(workers), 1, WORKERS_MAX)
        if args.workers not in (None, sum(workers)):
            raise ConfigError(f"--workers: --hosts has {sum(workers)} workers, got {args.workers}")
        return NodePlaces(args.shards, workers)
    nodes = 1 if args.nnodes is None else args.nnodes
    workers_count = 1 if args.workers is None else args.workers
    check_count(ConfigError, "--nnodes", nodes, 1, NODES_MAX)
    if nodes > 1 and not args.rendezvous:
        raise ConfigError("--rendezvous: not given; --nnodes needs the HOST:PORT at which node 0 waits for the others")
    if nodes == 1 and (args.rendezvous or args.node_rank):
        raise ConfigError("--nnodes: not given; --rendezvous and --node-rank are for several hosts")
    if args.rendezvous:
        host, port = parse_address(args.rendezvous, "--rendezvous")
        if host in ("0.0.0.0", "[::]") or port == 0:  # noqa: S104 - refused
            raise ConfigError(f"--rendezvous: expected an address of node 0 that all others can dial, got {args.rendezvous}")
    if args.node_rank is not None:
        check_count(ConfigError, "--node-rank", args.node_rank, 0, nodes - 1)
    return NodePlaces(args.shards, spread(workers_count, nodes))


def check_one_host(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option is given that is only for jobs on several hosts."""
    why = "is for shards that other machines reach: --nnodes, --hosts, --on kubernetes"
    refuse_given(args, dict.fromkeys(("tls_cert", "tls_key", "token_file", "remote_python", "insecure"), why))


def check_consistency(args: argparse.Namespace, consistency: str | None) -> None:
    """Raise ConfigError if --quorum or --aggregation does not go together with --consistency."""
    if args.quorum is not None:
        check_count(ConfigError, "--quorum", args.quorum, 1, args.workers)
        if consistency not in (None, "sync"):
            raise ConfigError(f"--quorum: is for sync only, where workers wait for each other; --consistency is {consistency}")
    if args.aggregation == "exact" and consistency not in (None, "sync"):
        raise ConfigError(f"--aggregation: exact is for sync only, where there are rounds; --consistency is {consistency}")


def environment(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that --env names. Raises ConfigError if one is set by psd-run itself, or has no value."""
    found = {}
    for word in given:
        name, has_value, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env: expected NAME=VALUE, or the NAME of a variable that is set here, got {word!r}")
        if name in SET_BY_PSD_RUN:
            raise ConfigError(f"--env: {name} is set by psd-run itself")
        if not has_value and name not in environ:
            raise ConfigError(f"--env: {name} has no value: it is not set here; write {name}=VALUE")
        found[name] = value if has_value else environ[name]
    return found
