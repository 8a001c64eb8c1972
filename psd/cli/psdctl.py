"""psdctl: inspects and controls a job from outside. `status` and `checkpoint` are here; every other command has its own module.

A subcommand is a function that adds its parser and sets `run`, a function from the parsed flags to the exit status. psd/watch
combines the answers of the shards, and psd/cli/ctl/report.py shows them for status.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is loaded: what goes wrong is said once, by psdctl

from psd.cli.ctl import checkpoints, completion, dashboard, follow, job_logs, jobs, monitoring, orders, plot, top, workers
from psd.cli.ctl.job_arguments import USAGE, add_where, check, check_seconds
from psd.cli.ctl.report import as_text
from psd.cli.ctl.shard_calls import call_shard
from psd.cli.kubernetes import credentials
from psd.cli.processes.garbage import end_without_search
from psd.cli.processes.own_arguments import hide_secrets
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, CommandFailed, Commands, Parser, add_command, seconds
from psd.cli.words.terminal import NO_ROOM, discard, prepare_streams, show
from psd.contract.config import ConfigError
from psd.contract.errors import PsdError
from psd.contract.printable import printable
from psd.contract.waits import explained
from psd.v1 import control_pb2
from psd.watch.asking import Asker
from psd.watch.merging import problems
from psd.watch.sampler import Sampler
from psd.watch.snapshot import as_json

_USAGE = "psdctl COMMAND [options]"

_DESCRIPTION = """\
Look at a job of psd from outside, and steer it. It takes no part in the job: run it at any time, from any
machine that reaches the shards, or the checkpoints."""

_EPILOG = """\
commands that look at a running job:
  jobs          those that run on this machine
  status        the shards, the workers, who waits for whom, counters
  top           the same live, with rates, curves and events
  dashboard     the same in a browser
  workers       each worker: how far, how fast, who waits for it
  logs          what its processes have written, from psd-run --log-dir
  plot          draw what workers have logged, and compare runs
  follow        write each new version as a directory, and run a command for it

commands that change a running job:
  checkpoint    take a checkpoint now
  set-lr        scale its learning rate
  kick          end one worker
  drain         end the job in order

commands for checkpoints:
  checkpoints   list those in a directory
  verify        read every byte and compare it with the checksums
  export        write the parameters as a plain safetensors file
  import        make a file to begin a job with of the ids and rows of a table

others:
  credentials   make a certificate and tokens for a job on Kubernetes
  monitoring    print a Grafana dashboard, or alert rules for Prometheus
  completion    print a script that completes words in bash, zsh or fish

Which job: without --servers and PSD_SERVERS your only one on this machine, or that of --job, or you are asked.

psdctl COMMAND --help explains each."""

_STATUS_DESCRIPTION = """\
Ask all shards at once for their status, and show it as one picture: the job, the shards, the workers,
who waits for whom, and counters. A shard that does not answer is shown as such beside the others."""

_STATUS_EPILOG = """\
examples:
  psdctl status                                    your only job on this machine
  psdctl status --servers 127.0.0.1:7000,127.0.0.1:7001
  PSD_SERVERS=127.0.0.1:7000 psdctl status --watch 2
  psdctl status --json | jq '.workers[] | select(.state == "expired") | .rank'

CLOCK, of a worker, is the number of steps that it has finished, by the shard that knows of most; the job's,
in the first line, that of its slowest live worker. docs/reference/numbers.md says what each number is.

Each worker is shown once. Where the shards disagree about it, the worst is shown: the state that
needs most attention, the longest silence.
  live       renews its lease             finished   has left; nobody waits for it
  absent     has not joined yet           expired    its lease ran out; nobody waits for it
  failed     its program ended by an error

AGE, in async and ssp: how many gradients, block by block, were applied that many updates after their worker
had read the parameters ("ages": 0, 1, 2, 3 to 4, 5 to 8, and so on).

--json prints one object, the same as psdctl top and the dashboard:
  shards, workers, tables   what each is, and its numbers by their names
  waits                     of each worker that waits: kind, clock, the ranks "missing", and the same in words
  problems                  what is wrong, in words; empty if all is well
  clock, world_size, ...    numbers of the whole job
A number that is not known is null; so are all rates, since they need two looks: with --watch from the second
object on, or by psdctl top --json. "incarnation" and "session" are 64-bit names, in hexadecimal.

exit status:
  0     all shards answered, and belong to one job
  1     a shard did not answer, or the addresses are not those of one job's shards in their order
  2     the options are wrong
Ctrl-C ends a watch with the status of its last picture."""


_CHECKPOINT_WAIT = """\
psdctl: {waited_s:g} s: shard 0 at {server} has not told of a complete checkpoint yet; a synchronous job takes it a few
steps later, so its workers must train (psdctl status)"""

_CHECKPOINT_DESCRIPTION = """\
Take a checkpoint of a running job now, and print its name when it is complete on all shards. The shards must
have been started with --checkpoint-dir. A synchronous job is stored a few steps later, so it must keep
training; training is not stopped."""

_CHECKPOINT_EPILOG = """\
examples:
  psdctl checkpoint --servers 127.0.0.1:7000,127.0.0.1:7001

exit status:
  0     the checkpoint is complete; its name is printed
  1     it was not taken, or not completed in time; the message says why. With --token-file only admins may
  2     the options are wrong"""


def _run_status(args: argparse.Namespace) -> int:
    check(args)
    check_seconds(args.parser, "watch", args.watch)
    with Asker(args.servers, args.credentials) as asker:
        sampler = Sampler(asker, answer_s=args.timeout, has_curves=False)
        status = EXIT_OK
        try:
            while True:
                status = _show_status(args, asker, sampler)
                if args.watch is None:
                    return status
                time.sleep(args.watch)
        except KeyboardInterrupt:
            if args.watch is None:
                raise
            return status  # how a watch ends


def _show_status(args: argparse.Namespace, asker: Asker, sampler: Sampler) -> int:
    def explain(waited_s: float) -> None:
        show(f"psdctl: {waited_s:g} s: no answer yet from {', '.join(asker.silent())}", is_error=True)

    with explained(explain):
        now = sampler.look()
    if args.json:
        print(json.dumps(as_json(now)), flush=True)
    else:
        if args.watch is not None and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        show(as_text(now))
    return EXIT_FAILURE if problems(sampler.answers) else EXIT_OK


def _run_checkpoint(args: argparse.Namespace) -> int:
    check(args)
    server = args.servers[0]

    def explain(waited_s: float) -> None:
        show(_CHECKPOINT_WAIT.format(waited_s=waited_s, server=server), is_error=True)

    with explained(explain):
        request = control_pb2.CheckpointRequest()
        reply = call_shard(0, server, args.credentials, args.timeout, lambda stub: stub.Checkpoint, request)
    show(json.dumps({"name": reply.name}) if args.json else printable(reply.name))
    return EXIT_OK


def _add_checkpoint(commands: Commands) -> None:
    parser = add_command(commands, "checkpoint", USAGE, _CHECKPOINT_DESCRIPTION, _CHECKPOINT_EPILOG)
    add_where(parser, 300.0, "how long to wait until it is complete")
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help='the name in one JSON object, {"name": ...}')
    parser.finish(_run_checkpoint)


def _add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", USAGE, _STATUS_DESCRIPTION, _STATUS_EPILOG)
    add_where(parser, 5.0, "how long to wait for each shard")
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of tables")
    how.add_argument("--watch", type=seconds, metavar="SECONDS", help="repeat at this interval until Ctrl-C")
    parser.finish(_run_status)


def _other_parsers() -> dict[str, Parser]:
    from psd.cli import run_options, server  # which nothing else of psdctl needs

    return {"psd-run": run_options.parser(), "psd-server": server.parser()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    prepare_streams()
    end_without_search()
    hide_secrets()
    parser = Parser("psdctl", _USAGE, _DESCRIPTION, _EPILOG)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS, title=argparse.SUPPRESS)
    _add_status(commands)
    _add_checkpoint(commands)
    checkpoints.add_commands(commands)
    credentials.add_command(commands)
    monitoring.add_command(commands)
    plot.add_command(commands)
    jobs.add_command(commands)
    top.add_command(commands)
    workers.add_command(commands)
    follow.add_command(commands)
    orders.add_commands(commands)
    job_logs.add_command(commands)
    completion.add_command(commands, _other_parsers)
    dashboard.add_command(commands)
    parser.add_information()
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
    except ConfigError as error:
        args.parser.error(str(error))
    except (PsdError, CommandFailed) as error:
        show(f"{args.parser.prog}: error: {error}", is_error=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # psdctl | head
        discard(sys.stdout)
        return EXIT_FAILURE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        show(f"psdctl: error: cannot write the output: {error.strerror}", is_error=True)
        discard(sys.stdout)
        return EXIT_FAILURE
    assert isinstance(status, int)
    return status


if __name__ == "__main__":
    sys.exit(main())
