"""A black-box harness: it breaks real jobs in every way that it knows, and then asks the parameters what has counted.

    make jepsen SECONDS=600 SEED=1          # trials for so long; each has the seed after that of the one before
    make jepsen SECONDS=0 SEED=17           # the trial of seed 17 alone
    make jepsen JEPSEN_FLAGS="--kills 200"  # 1000 publications under so many kills, in SECONDS at most
    python tests/jepsen/run_jepsen.py --replay FAILURE/plan.json
    python tests/jepsen/run_jepsen.py --judge FAILURE   # the checks alone
    python tests/jepsen/run_jepsen.py --plant twice     # trials of learners that have a defect: what can show it must fail

A trial is a job of 1 to 3 workers and 1 to 3 shards, all of them processes, and a schedule of faults. The parts, in order:

plan.py        what a trial is: job, programs, faults; drawn by a seed
cells.py       gradients that can be told apart in the parameters, so that these say how often each has counted, block by block
row_cells.py   the same for rows of tables
lossy_cells.py    the same for a tensor that travels compressed
learner_cells.py  the same for local steps of learners
batches.py     batches on vectors: a matrix in which each life of a worker counts its own
program.py     the worker: calls the public API, goes on after errors in one of several ways, writes its history
links.py       a proxy per worker and shard, for control and bulk apart: refuse, reset, delay, truncate, half-open, black hole
processes.py   shards and workers, killed and started again; children.py is what each does first
damage.py      which bytes of a shard's files may be changed, so that it must find that
course.py      what is due, shards, links, and the faults that strike these, for trial.py and published_trial.py
trial.py       runs a plan, and leaves histories, logs, a timeline and the parameters of the end
learner.py     the worker as a learner: its difference to what it has received is what counts
planted_in_learners.py  defects of learners, by which to prove that they would be found
launched.py    the same under psd-run, which is told to end, or killed; launched_worker.py is the script of its workers
stepping_plan.py  plans in which most calls are armed steps
stepping.py    counts these in workers, and revokes them in shards, again and again
published_plan.py     plans of publications
published_program.py  publishers and readers; published_values.py what a put sets, so that a torn version is seen
published_trial.py    runs a plan of publications, with relays; published_counts.py judges it
outcome.py     what is left of it
restores.py    restores every checkpoint that it has left, on another number of shards
history.py     reads all that
counting.py    the model: what each gradient's program was told, and how often it then must count
prefixes.py    each checkpoint is a cut: what counts in it is a prefix of each worker's gradients, and so is its client state
residual_counts.py  what compressed gradients have brought follows from which of them count
learner_counts.py  each local step counts once, or its learner knows
merge_replay.py  learners merged by rda or heloco: what their steps must have come to, by a replay of all merges
batch_counts.py  each batch has run once, in the end and in each checkpoint
conduct.py     which errors are allowed, how long things take, what is said, how processes end
busyness.py    by how much bounds of time are stretched, because others use the machine
verdict.py     one trial, judged; a failing one again with fewer faults

A failing trial is kept with its plan, timeline, histories and logs, and made smaller. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from outcome import Outcome
from plan import Plan
from planted_in_learners import PLANTS
from processes import may_mount
from published_plan import draw_any, publications_under_kills
from verdict import Verdict, judge, shrink, try_plan

from psd.contract.environment import memory_directory

SHRINK_RUNS = 10
SHRINK_S = 240.0


def main() -> int:
    args = _arguments()
    if args.judge is not None:
        verdict = judge(Outcome.load(args.judge))
        say(verdict.report())
        return 1 if verdict.failures else 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and so by children, too
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise under nohup; children do not inherit a handler
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running, or in memory
    logging.getLogger("psd").addHandler(logging.NullHandler())  # what is wrong with checkpoints is for the shards to say
    begun = time.monotonic()
    total: Counter[str] = Counter()
    shrunk: set[frozenset[str]] = set()
    work = Path(tempfile.mkdtemp(prefix="jepsen-", dir=memory_directory()))
    try:
        for number, plan in enumerate(_plans(args)):
            if number and time.monotonic() - begun > args.seconds:
                break
            verdict = try_plan(plan, work / f"seed-{plan.seed}")
            total += verdict.counts
            total["failures"] += bool(verdict.failures)
            words = ", ".join(sorted(verdict.kinds)) or "ok"
            say(f"{time.monotonic() - begun:6.0f} s  {plan}; x{verdict.factor:.1f}: {words}")
            if verdict.failures:
                kinds = frozenset(verdict.kinds)
                _on_failure(verdict, args, is_new=kinds not in shrunk)
                shrunk.add(kinds)
            shutil.rmtree(verdict.directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        say(f"{time.monotonic() - begun:6.0f} s  " + ", ".join(f"{count} {name}" for name, count in sorted(total.items())))
    return 1 if total["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break psd's jobs, and look what counts.")
    parser.add_argument("--seconds", type=float, default=600, help="begin no trial after that (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="of the first trial (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/jepsen"), help="where failures are kept (default: build/jepsen)"
    )
    parser.add_argument("--replay", type=Path, help="run this plan, a plan.json, again and again, instead of drawing plans")
    parser.add_argument("--judge", type=Path, help="run nothing; look again at a trial whose directory was kept")
    parser.add_argument("--modes", default="", help="draw only plans of these modes, separated by commas")
    parser.add_argument("--lanes", default="", help="likewise lanes")
    parser.add_argument("--tables", action="store_true", help="draw only plans with tables")
    parser.add_argument("--vectors", action="store_true", help="likewise with vectors")
    parser.add_argument("--compressed", action="store_true", help="likewise with compressed gradients")
    parser.add_argument("--learners", action="store_true", help="likewise of learners")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="likewise of learners that have this defect")
    parser.add_argument("--publications", action="store_true", help="likewise of publications")
    parser.add_argument("--steps", action="store_true", help="likewise of armed steps, most of them revoked again and again")
    parser.add_argument(
        "--kills", type=int, default=0, help="one trial alone: publications under so many kills, for --seconds at most"
    )
    parser.add_argument("--checkpoints", action="store_true", help="likewise with checkpoints")
    parser.add_argument("--no-shrink", action="store_true", help="keep failing plans as they are")
    return parser.parse_args()


def _plans(args: argparse.Namespace) -> Iterator[Plan]:
    if args.replay is not None:
        yield from itertools.repeat(Plan.from_json(args.replay.read_text()))
    if args.kills:
        yield publications_under_kills(args.seed, args.kills, args.seconds)
        return
    for seed in itertools.count(args.seed):
        plan = draw_any(seed, may_mount=may_mount(), may_learn=importlib.util.find_spec("torch") is not None)
        is_wanted = plan.mode in (args.modes or plan.mode).split(",") and plan.lane in (args.lanes or plan.lane).split(",")
        is_wanted = is_wanted and (plan.has_tables or not args.tables) and (plan.has_vectors or not args.vectors)
        is_wanted = is_wanted and (bool(plan.codec) or not args.compressed)
        is_wanted = is_wanted and (plan.learning is not None or not (args.learners or args.plant))
        is_wanted = is_wanted and (plan.publishing is not None or not args.publications)
        is_wanted = is_wanted and (plan.is_stepping or not args.steps)
        if is_wanted and (plan.checkpoint_steps or not args.checkpoints):
            yield replace(plan, plant=args.plant, learning=replace(plan.learning, ranks=1)) if args.plant else plan


def _on_failure(verdict: Verdict, args: argparse.Namespace, *, is_new: bool) -> None:
    """Keep it, and make it smaller, unless one like it has been."""
    say(verdict.report())
    kept = args.out / verdict.directory.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(verdict.directory, kept)
    say(f"  kept in {kept}; again: python tests/jepsen/run_jepsen.py --replay {kept}/plan.json")
    if args.no_shrink or not is_new or args.replay is not None:
        return
    smaller = shrink(verdict, verdict.directory.parent / "shrinking", runs=SHRINK_RUNS, seconds=SHRINK_S, say=say)
    if smaller is not verdict:
        shutil.rmtree(kept / "smaller", ignore_errors=True)
        shutil.copytree(smaller.directory, kept / "smaller")
        say(f"  smaller, in {kept}/smaller:\n{smaller.report()}")
    shutil.rmtree(verdict.directory.parent / "shrinking", ignore_errors=True)


def say(text: str) -> None:
    """On standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
