"""Measures learners that are far apart: the quality of what they learn together for the bytes that they send, and the steps
that are made although learners die.

    python benchmarks/far_apart.py [--parts quality,goodput,many,synchronizer] [--steps 1200] [--seeds 3] [--json FILE]

Quality: a small transformer of the kind of examples/diloco.py, trained by data parallelism, DiLoCo and Streaming DiLoCo from
equally many tokens. Loss is of the job's parameters on a text that nobody has learned from; bytes are those that a learner has
sent; idle is the share of its time that a learner waits in optimizer.step(), other than in its own optimizer, and copying that
for which it computes there; that others had the processors meanwhile is in neither. Progress has them by learner.
In the last three ways learner 1 is four times slower, and steps are of --step-ms or more. In the first of these the last one is
killed --death seconds after it has joined, and started again: the tokens that it had not sent are lost, and count.

Goodput: learners of which one is killed every --every seconds and is back --away seconds later. A step takes --step-ms,
whatever the machine. The share is of the steps that learners could have made while they were there. Also by gloo, without psd,
where who is left meets anew. docs/far-apart.md has the figures.

Many: --sites learners of a tiny model, of which --sample take part in a round, in a few processes; every step is counted.

Synchronizer: the shard's processor time for an exchange of --megabytes of parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import _goodput
import _many_learners
import _report
import _synchronizer
import torch
from _goodput import BASE, BY_GLOO, GOODPUT, NESTEROV, options_of
from _idle import Meter, Spent
from _processes import FORKS, START_S, ProcessFailed, Shard, cleanly, end_with_benchmark

import psd_client
import psd_client.torch as psd
from psd.contract.environment import memory_directory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import characters

PARTS = ("quality", "goodput", "many", "synchronizer")
DISTURBED = "decoupled, int4, one slow, one dying"
ASYNC, CORRECTED = "asynchronous, one slow", "asynchronous, one slow, HeLoCo"
UNEVEN = (DISTURBED, ASYNC, CORRECTED)
"""Ways in which one learner is slow."""
ONE_BY_ONE = psd_client.SGD(lr=0.125, momentum=0.5, nesterov=True)
"""Each of four learners' differences moves the parameters by itself: a quarter of its length, with what the momentum adds."""
SPENT = tuple(field.name for field in fields(Spent))
SLOW, SLOWNESS = 1, 4.0
"""The rank of the slow learner, and how many times as long as others' its steps take."""

QUALITY: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "DiLoCo": {"local": psd.Local(50, NESTEROV)},
    "DiLoCo, int8": {"local": psd.Local(50, NESTEROV), "compress": "int8", "pull": "bf16"},
    "Streaming, 8 fragments": {"local": psd.Local(50, NESTEROV, fragments=8, delay=5)},
    "int4 in 8 fragments": {"local": psd.Local(50, NESTEROV, fragments=8, delay=5), "compress": "int4", "pull": "bf16"},
    "decoupled, int4": {
        "local": psd.Local(50, NESTEROV, fragments=8, delay=5, merge="rda"),
        "quorum": 0.75,
        "grace": "auto",
        "compress": "int4",
        "pull": "bf16",
    },
    DISTURBED: {
        "local": psd.Local("auto:50", NESTEROV, fragments=8, delay=5, merge="rda"),
        "quorum": 0.5,
        "grace": "auto",
        "compress": "int4",
        "pull": "bf16",
    },
    ASYNC: {"local": psd.Local(50, ONE_BY_ONE), "quorum": 0.25, "aggregation": "exact"},
    CORRECTED: {"local": psd.Local(50, ONE_BY_ONE, merge="heloco"), "quorum": 0.25},
}
"""Ways to train, and the options of psd.distribute for them."""


@functools.cache
def _text(path: Path | None) -> characters.Text:
    """Text that is learned from; made once in each process."""
    return characters.read(path, words=20)


def train(
    way: str,
    seed: int,
    servers: str,
    rank: int,
    args: argparse.Namespace,
    end: Path,
    steps: Path | None = None,
    joined: Event | None = None,
) -> dict[str, float]:
    """Train one learner, in its own process; its loss at the end, what it has sent, and where its time went.

    end: a file that is there when all others have ended, for the first one.
    steps: of an uneven run, a file with a byte for each step that any learner has made; it begins when the file is there.
    joined: set when this one has joined.
    """
    torch.set_num_threads(1)
    text = _text(args.data)
    torch.manual_seed(seed)
    model = characters.Transformer(len(text.alphabet), context=16, dim=32)
    inner = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    options = options_of(QUALITY, way, args.learners)
    optimizer = psd.distribute(model, inner, servers=servers, rank=rank, world_size=args.learners, **options)
    if joined is not None:
        joined.set()
    if steps is not None:
        _wait_for(steps)
    before = optimizer.ps.stats()["sent_bytes"]
    meter = Meter(inner)

    def step_on(number: int) -> None:
        batch = characters.pieces(text.train, args.batch_size, model.context, 1_000_000 * seed + 1000 * number + rank)
        optimizer.zero_grad()
        characters.loss_of(model, batch).backward()

    if steps is None:
        schedule = psd.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, args.steps))
        for step in range(args.steps):
            step_on(step)
            meter.step(optimizer)
            schedule.step()
    else:
        pause, total, slowness = threading.Event(), args.learners * args.steps, SLOWNESS if rank == SLOW else 1.0
        while (done := steps.stat().st_size) < total:
            begun = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = args.lr * max(1e-3, 1 - done / total)
            step_on(done)
            own_s = max(args.step_ms / 1000, time.perf_counter() - begun)
            pause.wait(begun + slowness * own_s - time.perf_counter())
            meter.step(optimizer)
            with steps.open("ab") as file:
                file.write(b".")
    spent, loss = meter.shares, 0.0
    if rank == 0:
        while "quorum" in options and not end.exists():
            optimizer.zero_grad()  # it learns no more, but is in the rounds: others' exchanges may need it for their quorum
            optimizer.step(tokens=0)
            time.sleep(args.step_ms / 1000)
        _wait_for(end)
        optimizer.pull()
        loss = characters.validation_loss(model, text, 512)
    optimizer.close()
    return {"loss": loss, "sent_bytes": optimizer.ps.stats()["sent_bytes"] - before, **asdict(spent)}


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _train_into(path: Path, *task: Any) -> None:
    end_with_benchmark()
    path.write_text(json.dumps(train(*task)))


def uneven(way: str, seed: int, servers: str, args: argparse.Namespace, directory: Path) -> tuple[list[dict[str, float]], int]:
    """Train learners of which one is slow, and one may be killed again and again; what they have found, and the kills."""
    steps = directory / "steps"

    def begin(rank: int) -> tuple[Any, Event]:
        joined = FORKS.Event()
        task = directory / f"learner-{rank}", way, seed, servers, rank, args, directory / "end", steps, joined
        process = FORKS.Process(target=_train_into, args=task, daemon=True)
        process.start()
        return process, joined

    learners, kills = [begin(rank) for rank in range(args.learners)], 0
    for _, joined in learners:
        joined.wait(START_S)
    steps.touch()
    while way == DISTURBED:
        dying, joined = learners[-1]
        joined.wait(START_S)
        dying.join(args.death)
        if steps.stat().st_size >= args.learners * args.steps or not dying.is_alive():
            break
        dying.kill()
        learners[-1] = begin(args.learners - 1)
        kills += 1
    for rank, (learner, _) in reversed([*enumerate(learners)]):
        if rank == 0:
            (directory / "end").touch()
        learner.join()
        if learner.exitcode:
            raise ProcessFailed(f"learner {rank} has ended with status {learner.exitcode}")
    return [json.loads((directory / f"learner-{rank}").read_text()) for rank in range(args.learners)], kills


def _chosen(ways: Iterable[str], args: argparse.Namespace) -> list[str]:
    """The ways that are wanted."""
    return [way for way in ways if not args.ways or any(word in way for word in args.ways)]


def measure(way: str, seed: int, pool: ProcessPoolExecutor, memory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    shard, kills = Shard("--state-dir", str(memory / "state")), 0
    shard.start()
    shard.wait_ready()
    calm = list(range(args.learners))
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        if way in UNEVEN:
            calm = [rank for rank in (calm[:-1] if way == DISTURBED else calm) if rank != SLOW]
            found, kills = uneven(way, seed, shard.address, args, Path(directory))
        else:
            end = Path(directory) / "end"
            first, *others = [pool.submit(train, way, seed, shard.address, rank, args, end) for rank in range(args.learners)]
            found = [job.result() for job in others]
            end.touch()
            found.insert(0, first.result())
    shard.end()
    return {
        "way": way,
        "seed": seed,
        "loss": found[0]["loss"],
        "sent_bytes": statistics.mean(one["sent_bytes"] for one in found),
        **{name: max(found[rank][name] for rank in calm) for name in SPENT},
        "by_rank": {name: [one[name] for one in found] for name in SPENT},
        "kills": kills,
    }


def quality(args: argparse.Namespace, memory: Path) -> list[dict[str, Any]]:
    """All runs, seed by seed."""
    runs = []
    with ProcessPoolExecutor(args.learners, FORKS, end_with_benchmark) as pool:
        for seed in range(1, args.seeds + 1):
            for way in dict.fromkeys([BASE, *_chosen(QUALITY, args)]):  # with the first the others are compared
                runs.append(measure(way, seed, pool, memory, args))
                _report.progress(
                    "{way}, seed {seed}: loss {loss:.4f}, {sent_bytes:,.0f} bytes, {kills} kills".format(**runs[-1])
                )
                for name, shares in runs[-1]["by_rank"].items():
                    _report.progress(f"    {name} by learner: " + ", ".join(f"{share:.2%}" for share in shares))
    return runs


def quality_text(runs: list[dict[str, Any]]) -> str:
    """A table with a row per way: means over the seeds, and the differences to data parallelism of the same seed."""
    of_base = {run["seed"]: run for run in runs if run["way"] == BASE}
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        own = [run for run in runs if run["way"] == way]
        more = [run["loss"] / of_base[run["seed"]]["loss"] - 1 for run in own]
        fewer = statistics.mean(of_base[run["seed"]]["sent_bytes"] / run["sent_bytes"] for run in own)
        loss, sent = (statistics.mean(run[name] for run in own) for name in ("loss", "sent_bytes"))
        cells = f"{loss:.4f}", f"{statistics.mean(more):+.1%}", f"{max(more):+.1%}", f"{sent / 1e6:.2f}", f"1/{fewer:.0f}"
        rows.append((way, *cells, *(f"{max(run[name] for run in own):.1%}" for name in ("idle", "computing"))))
    names = "way", "loss", "more", "worst seed", "MB sent by each", "of the bytes", "idle at most", "copying at most"
    return _report.table(names, rows)


def many(args: argparse.Namespace, memory: Path) -> dict[str, Any]:
    """One run of many small sites."""
    task = {"sites": args.sites, "sample": args.sample, "local_steps": 10, "elements": 1000}
    with cleanly() as stack:
        shards = [Shard("--state-dir", str(memory / f"many-{index}"), index=index, count=2) for index in range(2)]
        for shard in shards:
            shard.start()
            stack.callback(shard.kill)
        for shard in shards:
            shard.wait_ready()
        task |= {"servers": ",".join(s.address for s in shards), "seconds": args.seconds, "step_s": args.step_ms / 1000}
        return {**task, **_many_learners.measure(task, shards)}


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__)
    parser.add_argument("--parts", type=_report.some_of(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--ways", type=_report.words, default=[], help="those that have one of these in their names")
    parser.add_argument("--learners", type=int, default=4, help="how many of them (default %(default)s)")
    parser.add_argument("--data", type=Path, help="a text file; without it, a text is generated")
    parser.add_argument("--steps", type=int, default=1200, help="of each learner, for quality (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way, for quality (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of the text (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="of AdamW; it falls to 0 (default %(default)s)")
    parser.add_argument(
        "--death", type=float, default=60, help="seconds from death to death, for quality (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=40, help="of each run, for goodput (default %(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two failures (default %(default)s)")
    parser.add_argument("--away", type=float, default=10, help="seconds until a learner is back (default %(default)s)")
    parser.add_argument("--only-failures", action="store_true", help="for goodput, no run in which nobody dies")
    parser.add_argument("--sites", type=int, default=100, help="learners, for many (default %(default)s)")
    parser.add_argument("--sample", type=float, default=0.1, help="share of them in a round (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=256, help="for synchronizer (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=50, help="a learner's own time per step (default %(default)s)")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": _report.machine(), "settings": {**vars(args), "json": None, "data": str(args.data)}}
    print(_report.machine_line(figures["machine"]))
    with tempfile.TemporaryDirectory(dir=memory_directory(), prefix="psd-benchmark-") as memory:
        if "quality" in args.parts:
            figures["quality"] = quality(args, Path(memory))
            print("\n" + quality_text(figures["quality"]))
        if "goodput" in args.parts:
            figures["goodput"] = _goodput.measure(_chosen((*GOODPUT, *BY_GLOO), args), args, Path(memory))
            print("\n" + _goodput.text(figures["goodput"]))
        if "many" in args.parts:
            figures["many"] = many(args, Path(memory))
            print("\n" + _many_learners.text(figures["many"]))
        if "synchronizer" in args.parts:
            figures["synchronizer"] = _synchronizer.measure(args.megabytes, args.learners, 4, Path(memory))
            print("\n" + _synchronizer.text(figures["synchronizer"]))
    _report.write_json(args.json, figures, [])


if __name__ == "__main__":
    main()
