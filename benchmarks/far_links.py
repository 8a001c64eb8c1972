"""Measures how soon learners behind slow links learn: training in step, uncompressed, beside local steps with fewer bits.

    sudo -E env PATH=$PATH python benchmarks/far_links.py [--mbit 100,10] [--learners 2] [--json FILE]

Each learner and each shard is a host of its own: a network namespace, joined to the others by a bridge, whose link carries so
many Mbit/s each way; 0 is loopback without a limit, which needs no root. All train the transformer of examples/characters.py,
of some MB of parameters. Training in step makes --steps steps over the first link, and its loss there is the goal of all: a
learner's own, on a text that nobody has learned from. Over other links it makes --probe steps, and its time is that of as many
steps as over the first. Evaluations are not counted. "CPU ms" is the learner's own processor time of a step, which takes longer
on a busy machine. What the client has logged of its waits is printed.
Exit status: 2 where no such network can be made; the criterion does not decide.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _report as report
import torch
from _network import Network, NetworkError, shards_on
from _processes import START_S, Process, cleanly, environment, start_all
from _report import Criterion, ratio

import psd_client
import psd_client.torch as psd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import characters

NESTEROV = psd_client.SGD(lr=0.7, momentum=0.8, nesterov=True)
BASE = "in step, float32"
WAYS: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "DiLoCo, int8": {"local": psd.Local(50, NESTEROV), "compress": "int8", "pull": "int8"},
    "Streaming, int4": {"local": psd.Local(50, NESTEROV, fragments=8, delay=5), "compress": "int4", "pull": "int8"},
    "decoupled, int4": {
        "local": psd.Local(50, NESTEROV, fragments=8, delay=5, merge="rda"),
        "quorum": 1,
        "grace": "auto",
        "compress": "int4",
        "pull": "int8",
    },
}
"""Ways to train, and the options of psd.distribute for them."""
TURN_S = 1800.0


def tell(what: Mapping[str, Any]) -> None:
    """Print a line for the benchmark, at once, since another thread prints, too."""
    os.write(1, (json.dumps(what) + "\n").encode())


class Says(logging.Handler):
    """Prints what the client logs, for the benchmark."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        tell({"said": record.getMessage()})


def learn(task: Mapping[str, Any]) -> None:
    """Train as one learner, until killed; print the steps that were made, in which time, and the loss, now and then."""
    torch.set_num_threads(1)
    logging.getLogger("psd_client").addHandler(Says())
    text = characters.read(None, words=20)
    torch.manual_seed(1)
    model = characters.Transformer(len(text.alphabet), context=16, dim=task["dim"])
    inner, rank = torch.optim.AdamW(model.parameters(), task["lr"]), task["rank"]
    servers, size = task["servers"], task["learners"]
    optimizer = psd.distribute(model, inner, servers=servers, rank=rank, world_size=size, **WAYS[task["way"]])
    optimizer.ps.barrier("begin")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before, spent, used, step = optimizer.ps.stats(), 0.0, 0.0, 0
    while True:
        begun, used_before = time.perf_counter(), time.process_time()
        batch = characters.pieces(text.train, task["batch_size"], model.context, 1000 * step + rank)
        optimizer.zero_grad()
        characters.loss_of(model, batch).backward()
        optimizer.step()
        spent += time.perf_counter() - begun
        used += time.process_time() - used_before
        step += 1
        if step % task["evaluate"] == 0:
            stats = optimizer.ps.stats()
            moved = sum(stats[name] - before[name] for name in ("sent_bytes", "received_bytes"))
            loss = characters.validation_loss(model, text, 128)  # by all, since no learner is to get ahead by it
            found = {"step": step, "seconds": spent, "cpu_s": used, "loss": loss, "bytes": moved, "parameters": parameters}
            if rank == 0:
                tell(found)


def train(network: Network | None, way: str, steps_max: int, goal: float, args: Namespace) -> dict[str, Any]:
    """Train until rank 0 has made so many steps, or has a loss of the goal; the curve, and what its client has said."""

    def on(host: str) -> list[str]:
        return [] if network is None else network.prefix(host)

    with ExitStack() as stack:
        shards = shards_on(network, args.shards)
        for shard in shards:
            stack.callback(shard.kill)
        start_all(stack, shards)
        task = {
            "way": way,
            "servers": ",".join(shard.address for shard in shards),
            **{name: getattr(args, name) for name in ("learners", "dim", "lr", "batch_size", "evaluate")},
        }
        processes = []
        for rank in range(args.learners):
            command = [*on(f"w{rank}"), sys.executable, __file__, "--learner", json.dumps({**task, "rank": rank})]
            processes.append(Process(f"learner {rank}", command, environment(1), signal.SIGKILL))
            stack.callback(processes[-1].end, 0)
        curve: list[dict[str, Any]] = []
        said: list[str] = []
        while not curve or (curve[-1]["step"] < steps_max and curve[-1]["loss"] > goal):
            line = json.loads(processes[0].read_line(TURN_S if curve else START_S + TURN_S))
            if "said" in line:
                said.append(line["said"])
            else:
                curve.append(line)
        return {"curve": curve, "said": said}


def measure(network: Network | None, mbit: int, base: dict[str, Any] | None, args: Namespace) -> list[dict[str, Any]]:
    """Measure all ways over one link. base: training in step, over the first link; None: this is the first."""
    results: list[dict[str, Any]] = []
    for way in [BASE, *[way for way in WAYS if way != BASE and (not args.ways or any(word in way for word in args.ways))]]:
        goal = base["loss"] if base is not None else -1.0
        steps_max = args.steps_max if way != BASE else args.steps if base is None else args.probe
        found = train(network, way, steps_max, goal, args)
        last = found["curve"][-1]
        per_step = last["seconds"] / last["step"]
        steps = base["steps"] if way == BASE and base is not None else last["step"]
        result = {
            "mbit": mbit,
            "way": way,
            "steps": steps,
            "is_estimated": way == BASE and base is not None,
            "reached": way == BASE or last["loss"] <= goal,
            "seconds": per_step * steps,
            "loss": last["loss"],
            "cpu_s_per_step": last["cpu_s"] / last["step"],
            "bytes_per_step": last["bytes"] / last["step"],
            **found,
        }
        if way == BASE:
            own = result
        base = result if base is None else base
        result["times_as_fast"] = ratio(own["seconds"], result["seconds"]) if result["reached"] else None
        results.append(result)
        report.progress(f"{mbit or 'no'} Mbit/s, {way}: {result['seconds']:.1f} s, {steps} steps, loss {last['loss']:.3f}")
        for text in found["said"][:5]:
            report.progress(f"    {text}")
    return results


def row(r: dict[str, Any]) -> list[str]:
    """Table row."""
    link = f"{r['mbit']} Mbit/s" if r["mbit"] else "loopback"
    about = "about " if r["is_estimated"] else ""
    seconds = f"{about}{r['seconds']:.0f}" if r["reached"] else f"not in {r['seconds']:.0f}"
    per_step = 1e3 * r["seconds"] / r["steps"]
    figures = f"{per_step:.0f}", f"{1e3 * r['cpu_s_per_step']:.0f}", f"{r['bytes_per_step'] / 1e3:,.0f}"
    return [link, r["way"], seconds, str(r["steps"]), *figures, report.number(r["times_as_fast"], 1)]


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(__doc__, shards=2)
    parser.add_argument("--mbit", type=lambda text: [int(word) for word in report.words(text)], default="100,10", metavar="M,M")
    parser.add_argument("--ways", type=report.words, default=[], help="those that have one of these in their names")
    parser.add_argument("--learners", type=int, default=2, help="of the job (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=256, help="of the transformer (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="pieces of the text (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="in step, over the first link (default: %(default)s)")
    parser.add_argument("--probe", type=int, default=10, help="in step, over other links (default: %(default)s)")
    parser.add_argument("--steps-max", type=int, default=2000, help="of other ways (default: %(default)s)")
    parser.add_argument("--evaluate", type=int, default=10, help="steps between two evaluations (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Print the figures."""
    if sys.argv[1:2] == ["--learner"]:
        learn(json.loads(sys.argv[2]))
    args = arguments()
    about = report.machine()
    results: list[dict[str, Any]] = []
    hosts = [f"s{index}" for index in range(args.shards)] + [f"w{index}" for index in range(args.learners)]
    with cleanly():
        for mbit in args.mbit:
            try:
                with ExitStack() as own:
                    network = Network(own, hosts, mbit) if mbit else None
                    results += measure(network, mbit, results[0] if results else None, args)
            except NetworkError as error:
                print(f"far_links.py cannot run here: {error}", file=sys.stderr)
                return 2
    parameters = results[0]["curve"][-1]["parameters"]
    print(f"{args.learners} learners, {args.shards} shards, {4 * parameters / 1e6:.1f} MB of parameters")
    print(report.machine_line(about))
    headers = ["link", "way", "s to the loss", "steps", "ms/step", "CPU ms", "KB/step", "times as fast"]
    print(report.table(headers, [row(r) for r in results], words=2))
    found = [r for r in results if r["way"] != BASE and r["mbit"] == 100]
    checked = [Criterion(4, f"100 Mbit/s: {r['way']} / {BASE}", r["times_as_fast"], 20, at_least=True) for r in found]
    figures = {"machine": about, "settings": {**vars(args), "json": None}, "results": results}
    return report.conclude(args.json, figures, checked, {}, is_failed=False)


if __name__ == "__main__":
    sys.exit(main())
