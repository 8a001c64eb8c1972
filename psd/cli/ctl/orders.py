"""`psdctl set-lr`, `drain` and `kick`: an operator's orders to a running job. This module sends them; the shards carry them
out.

Each command may be repeated, after a failure or by mistake: nothing is done twice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from psd.cli.ctl.job_arguments import add_where, check
from psd.cli.ctl.shard_calls import CallFailed, call_shard
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, Commands, Parser, whole_number
from psd.cli.words.terminal import show
from psd.contract.orders import NEXT_PUSH, end_text, scale_text
from psd.v1 import control_pb2
from psd.watch.asking import Asker
from psd.watch.merging import Answer, merged_workers, misfits

_EXIT = """
--json prints "message", what is said here; for set-lr "scale", for drain and set-lr "step" (null: each worker's next
push), for kick "rank" and "has_ended" (false: before).

exit status:
  0     done, or done before
  1     a shard did not do it; the message says why, and what to type next. With --token-file only admins may
  2     the options are wrong"""

_SET_LR_DESCRIPTION = """\
Scale the learning rate of a running job: every worker multiplies it by SCALE, whatever its schedule says, from
one step on, which is printed. All workers and shards begin at the same step; without rounds (async, ssp) each
worker begins with its next push."""

_SET_LR_EPILOG = f"""\
examples:
  psdctl set-lr 0.1 --servers 127.0.0.1:7000        a tenth of what the program says
  psdctl set-lr 1                                   as the program says again

A new SCALE replaces the one before; they do not multiply. It is written to the log of shard 0 and shown by
psdctl status. Checkpoints have it, too: a job that goes on from one has the scale that it had there. The rule
must have a number of the name "lr", as all of psd's do.
{_EXIT}"""

_DRAIN_DESCRIPTION = """\
End a running job in order: all workers end before the same step, which is printed, as if their programs had
come to their ends. With --checkpoint-dir the shards then store the last checkpoint; without --exit-when-done
only when they are told to end, by SIGTERM."""

_DRAIN_EPILOG = f"""\
examples:
  psdctl drain --job train-3f
  psdctl drain --servers 127.0.0.1:7000,127.0.0.1:7001

The next push of each program raises psd_client.Drained, a SystemExit with status 0; a program that has to do
something else at its end catches it, or looks at ps.is_over. A worker that waits for others ends when they go on;
without rounds each ends at its next push. Keras's fit ends by itself; inside jax.jit it becomes an error of JAX's.
{_EXIT}"""

_KICK_DESCRIPTION = """\
End one worker of a running job, such as one that hangs or has bad data: nobody waits for it any more, and its
process gets an error with its next call. Another process of that rank may join."""

_KICK_EPILOG = f"""\
examples:
  psdctl workers                 who is slow, or silent
  psdctl kick 3

What its launcher does then is as for any worker that fails: psd-run starts it again while --max-restarts lasts,
and otherwise ends the job, unless --on-worker-failure is continue. If a shard does not answer, the worker goes on
there until its lease runs out; type the command again when it is back.
{_EXIT}"""


def add_commands(commands: Commands) -> None:
    """Add the three commands to psdctl."""
    parser = arguments.add_command(commands, "set-lr", "SCALE [options]", _SET_LR_DESCRIPTION, _SET_LR_EPILOG)
    parser.add_argument_group("what").add_argument(
        "scale", type=_number, metavar="SCALE", help="factor of the learning rate, above 0 and at most 1e6"
    )
    _finish(parser, _run_set_lr)
    parser = arguments.add_command(commands, "drain", "[options]", _DRAIN_DESCRIPTION, _DRAIN_EPILOG)
    _finish(parser, _run_drain)
    parser = arguments.add_command(commands, "kick", "RANK [options]", _KICK_DESCRIPTION, _KICK_EPILOG)
    parser.add_argument_group("what").add_argument("rank", type=whole_number, metavar="RANK", help="of the worker")
    _finish(parser, _run_kick)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, such as 0.1, got {text!r}") from None


def _finish(parser: Parser, run: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    add_where(parser, 10.0, "how long to wait for each shard")
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="what was done as one JSON object, on one line")

    def ordered(args: argparse.Namespace) -> int:
        check(args)
        done = run(args)
        show(json.dumps(done) if args.json else done["message"])
        return EXIT_OK

    parser.finish(ordered)


def _run_set_lr(args: argparse.Namespace) -> dict[str, Any]:
    request = control_pb2.SetLearningRateRequest(scale=args.scale)
    found = _call(args, 0, lambda stub: stub.SetLearningRate, request).learning_rate
    return {"scale": found.scale, "step": _step(found.clock), "message": scale_text(found)}


def _run_drain(args: argparse.Namespace) -> dict[str, Any]:
    ends_at = _call(args, 0, lambda stub: stub.Drain, control_pb2.DrainRequest()).ends_at
    return {"step": _step(ends_at), "message": f"{end_text(ends_at)}; psdctl workers shows who has finished"}


def _step(clock: int) -> int | None:
    """The step at which an order takes effect; None if it does with each worker's next push."""
    return clock if clock > NEXT_PUSH else None


def _run_kick(args: argparse.Namespace) -> dict[str, Any]:
    with Asker(args.servers, args.credentials) as asker:
        answers = asker.ask(args.timeout)
    if wrong := misfits(answers):  # nobody may be told that a worker has ended who goes on at shards that were not named
        raise CallFailed(f"{'; '.join(wrong)}; name all shards of the job in their order, as psd-run prints them")
    worker = next((w for w in merged_workers([a.reply for a in answers if a.reply is not None]) if w.rank == args.rank), None)
    if worker is None:
        _raise_unknown(args.rank, answers)
    if worker.state == control_pb2.WORKER_STATE_ABSENT:
        raise CallFailed(f"worker {args.rank} has not joined, so there is nothing to end (psdctl workers shows who has)")
    has_ended, failures = False, []
    for index in range(len(args.servers)):
        request = control_pb2.KickRequest(rank=args.rank, session=worker.session)
        try:
            has_ended |= _call(args, index, lambda stub: stub.Kick, request).has_ended
        except CallFailed as error:
            failures.append(str(error))
    if failures:
        raise CallFailed("; ".join(failures))
    what = "has been ended; nobody waits for it" if has_ended else "had ended already"
    return {"rank": args.rank, "has_ended": has_ended, "message": f"worker {args.rank} of {worker.host or '-'} {what}"}


def _raise_unknown(rank: int, answers: list[Answer]) -> NoReturn:
    silent = [answer.server for answer in answers if answer.reply is None]
    if silent:
        raise CallFailed(f"no shard knows worker {rank}, and {', '.join(silent)} did not answer (psdctl status says why)")
    raise CallFailed(f"there is no worker {rank} in the job (psdctl workers lists them)")


def _call(args: argparse.Namespace, index: int, make: Callable[[Any], Callable[..., Any]], request: Any) -> Any:
    return call_shard(index, args.servers[index], args.credentials, args.timeout, make, request)
