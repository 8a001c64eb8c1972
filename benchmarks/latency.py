"""Measures small calls: push_pull, as NumPy programs call it, of 1 KB of gradients there and 1 KB of parameters back.

    python benchmarks/latency.py [--parts calls,load,busy] [--transports grpc,tcp,shm] [--consistency async,sync] [--json FILE]
        [--never-armed] [--checkpoint-steps N]
    python benchmarks/latency.py --parts calls --cores one --workers 1,2,4 --shards 1 --calls 2500

calls   how long a call takes, and how much processor time on either side, for each number of workers and of shards; with
        several shards it is 8 KB, of which each has a part, and also measured at one. With --cores one all processes of a
        contender share a core, with two workers have one and servers another; free: as the system places them, which mixes
        both. psd runs against

            raw tcp        ping-pong of the same bytes over loopback, in C: what a call costs where no interpreter is
            bare python    the tcp lane's messages and psd's kernel, in Python, with neither shard nor client around
            grpc unary     Python gRPC, ping-pong of the same bytes, no arithmetic
            torch rpc      a parameter server by torch.distributed.rpc, over TCP, if torch is installed
            ray            a parameter server of Ray actors           (if this interpreter has them, or name one
            tensorflow     variables on a tf.distribute.Server         that does, see step.py --help)

        of which all but raw tcp have one worker, and free cores.
load    pushes a second of one shard with --connections workers. They are loops in C that make armed steps, or send psd's
        recorded messages again, each with its clock, so that the shard alone limits them; and the same number of ping-pongs.
        On all cores.
busy    calls of an async job, of 256 tensors, while its shard takes checkpoints, and while 50 workers join and leave, for
        --seconds at least; to calls of the same job in between.

With --never-armed each psd on the bulk lane also runs with shards that take no steps in C: what these gain, in processor time
and pushes a second, is the ratio. With --checkpoint-steps each psd of the part calls also runs with shards that store a
checkpoint every so many steps.

All of a part take turns in one run, so that a noisy machine hurts all alike. The ratios are the figures to compare; times are
this machine's. CPU is a call's share of all that worker or servers used, heartbeats included. What each system has computed is
verified, to the bit. Exit status: 1 if psd failed or was wrong; the criteria do not decide.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _contenders as contenders
import _loops
import _report as report
import _small_calls as small_calls
from _contenders import CORES, Contender
from _processes import ProcessFailed, cleanly
from _report import Criterion, ratio
from _turns import Match, usable
from peers import work

CALLS_MIN = 2000
MODEL = "1kb"
MODEL_OF_SHARDS = "8kb"
SHARDS_MAX = 4
"""Shards that each have a part of it."""
PARTS = ("calls", "load", "busy")
CONSISTENCIES = ("async", "sync")
PLACES = ("one", "two", "free")
STEPS_MAX = work.STEPS_MAX - 100
LIMITS = {("two", "tcp"): 2.0, ("two", "shm"): 1.5, ("one", "tcp"): 2.5, ("one", "shm"): 2.0}
"""Largest ratio to raw tcp, with one worker and one shard."""
LIMIT_SHARDS = 1.6
LIMITS_BUSY = {"p50_s": 1.3, "p99_s": 3.0}
NEVER_ARMED = " never armed"
"""Behind the name of a contender whose shards take no steps in C."""
CHECKPOINTS = " checkpoints"
"""Behind the name of one whose shards take checkpoints by steps."""
LIMITS_ARMED = {"server_cpu_s_per_call": 1 / 6, "worker_cpu_s_per_call": 1 / 3}
"""Largest ratios to a contender that is never armed, with one worker and one shard;"""
LIMITS_LOAD = {"async": 1 / 5, "sync": 1 / 3}
"""and of its pushes a second to the others', with 8 connections."""


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(
        __doc__, transports="grpc,tcp,shm", workers="1", shards="1,4", rounds=10, seconds=3.0, interpreters=True
    )
    for option, known in (("parts", PARTS), ("consistency", CONSISTENCIES), ("cores", PLACES)):
        default = ",".join(known)
        parser.add_argument(f"--{option}", type=report.some_of(known), default=default, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=2500, help="timed ones of each system (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="that push at once, for load (default: %(default)s)")
    parser.add_argument("--pushes", type=int, default=4000, help="of each of them, in all turns (default: %(default)s)")
    parser.add_argument("--never-armed", action="store_true", help="also run psd with shards that take no steps in C")
    parser.add_argument("--checkpoint-steps", type=int, default=0, metavar="N", help="also run psd with checkpoints")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse what cannot be measured, or not verified."""
    for option in ("calls", "pushes"):
        if not args.rounds <= getattr(args, option) <= STEPS_MAX:
            parser.error(f"--{option}: expected {args.rounds} (--rounds) to {STEPS_MAX}, got {getattr(args, option)}")
    for option, numbers in (("workers", args.workers), ("connections", [args.connections])):
        if not all(1 <= number <= work.WORKERS_MAX for number in numbers):
            parser.error(f"--{option}: expected 1 to {work.WORKERS_MAX}, got {','.join(map(str, numbers))}")
    if max(args.shards) > SHARDS_MAX:
        parser.error(f"--shards: expected 1 to {SHARDS_MAX}, got {max(args.shards)}: 8 KB are not cut any finer")
    if args.checkpoint_steps < 0:
        parser.error(f"--checkpoint-steps: expected 0 or more, got {args.checkpoint_steps}")
    if "two" in args.cores and CORES < 2:
        parser.error(f"--cores: two: this process may use {CORES} core")


def add_references(match: Match, args: Namespace) -> None:
    """Add those of one worker."""
    match.add("bare python", contenders.reference("bare python", "bare_bulk", "turns", 1, MODEL))
    match.add("grpc unary", contenders.reference("grpc unary", "bare_grpc", "unary", 1, MODEL))
    ray = contenders.interpreter_with("ray", args.ray_python)
    tensorflow = contenders.interpreter_with("tensorflow", args.tensorflow_python)
    if contenders.interpreter_with("torch", None) is not None:
        match.add("torch rpc", contenders.torch_rpc(1, MODEL))
    if ray is not None:
        match.add("ray", contenders.ray(ray, 1, MODEL))
    if tensorflow is not None:
        match.add("tensorflow", contenders.tensorflow(tensorflow, 1, MODEL))


def ways(args: Namespace, transport: str, consistency: str) -> list[tuple[str, list[str]]]:
    """Names and shards' flags of the contenders of psd by this transport."""
    name = f"psd {transport} {consistency}"
    never = [(name + NEVER_ARMED, ["--never-armed"])] if args.never_armed and transport != "grpc" else []
    return [(name, []), *never]


def storing_ways(args: Namespace, name: str, directory: Path) -> list[tuple[str, list[str]]]:
    """The contender of this name whose shards store checkpoints, in a directory of its own, if one is asked for."""
    if not args.checkpoint_steps:
        return []
    kept = ["--checkpoint-dir", tempfile.mkdtemp(dir=directory), "--checkpoint-keep", "1"]
    return [(name + CHECKPOINTS, [*kept, "--checkpoint-steps", str(args.checkpoint_steps)])]


def measure_calls(
    match: Match, args: Namespace, cores: str, transports: Sequence[str], library: str, directory: Path
) -> list[dict[str, Any]]:
    """Measure the part `calls` on these cores."""
    several = [number for number in args.shards if number > 1]
    sizes = [(MODEL, 1)] * (1 in args.shards) + [(MODEL_OF_SHARDS, number) for number in (1, *several) if several]
    for transport, consistency, workers, (model, shards) in itertools.product(
        transports, args.consistency, args.workers, sizes
    ):
        plain = ways(args, transport, consistency)
        for name, flags in [*plain, *storing_ways(args, plain[0][0], directory)]:
            starter = contenders.psd(transport, workers, shards, model, consistency=consistency, call="named", flags=flags)
            label = f"{name}, {model}, W = {workers}, S = {shards}"
            match.add(label, small_calls.on_cores(cores, small_calls.named(name, starter)))
    for workers in args.workers:
        match.add("raw tcp", small_calls.on_cores(cores, small_calls.raw_tcp(workers, library)))
    if cores == "free" and 1 in args.workers:
        add_references(match, args)

    def facts(contender: Contender) -> dict[str, Any]:
        calls = contender.all_steps * contender.workers
        return {
            "system": contender.name,
            "cores": cores,
            "workers": contender.workers,
            "shards": contender.shards,
            "kb": work.size_of(contender.model) // 256,
            "calls": len(contender.own_seconds),
            **quantiles(contender.own_seconds),
            "worker_cpu_s_per_call": contender.worker_cpu_s / calls,
            "server_cpu_s_per_call": contender.server_cpu_s / calls,
        }

    return [facts(contender) for contender in match.run(args.rounds, args.calls // args.rounds)]


def measure_load(match: Match, args: Namespace, transports: Sequence[str], library: str) -> list[dict[str, Any]]:
    """Measure the part `load`."""
    for transport, consistency in itertools.product(transports, args.consistency):
        for name, flags in ways(args, transport, consistency):
            match.add(name, small_calls.load(name, transport, consistency, args.connections, library, flags))
    match.add("raw tcp", small_calls.raw_load(args.connections, library))
    return [
        {
            "system": load.name,
            "connections": load.workers,
            "pushes": load.workers * load.all_steps,
            "pushes_per_s": load.workers * load.all_steps / sum(load.seconds),
            "server_cpu_s_per_push": load.server_cpu_s / (load.workers * load.all_steps),
        }
        for load in match.run(args.rounds, args.pushes // args.rounds)
    ]


def measure_busy(args: Namespace, transport: str) -> list[dict[str, Any]]:
    """Measure the part `busy` over one transport."""
    with ExitStack() as stack:
        rounds = max(1, args.rounds // 5)
        found = small_calls.busy(stack, transport, max(1, args.calls // rounds), rounds, args.seconds)
    return [
        {"system": f"psd {transport} async", "while": name, "events": found["events"].get(name), **quantiles(found[name])}
        for name in ("idle", "checkpoints", "joins")
    ]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Quantiles of times of calls."""
    return {f"p{share}_s": report.quantile(seconds, share / 100) for share in (1, 50, 99)}


def print_calls(results: list[dict[str, Any]], cores: str) -> None:
    """Print the table of one way to use cores."""
    raw = {r["workers"]: r["p50_s"] for r in results if r["system"] == "raw tcp"}
    rows = [
        [
            r["system"],
            r["workers"],
            r["shards"] or "-",
            r["kb"],
            *(report.number(1e6 * r[what], 0) for what in ("p50_s", "p99_s", "p1_s")),
            *(report.number(1e6 * r[f"{side}_cpu_s_per_call"], 0) for side in ("worker", "server")),
            report.number(ratio(r["p50_s"], raw.get(r["workers"]))),
        ]
        for r in results
    ]
    heads = ["system", "W", "S", "KB", "median us", "p99 us", "p1 us", "worker CPU us", "server CPU us", "x raw tcp"]
    print(f"\npush_pull, cores: {cores}\n\n{report.table(heads, rows)}")


def print_load(results: list[dict[str, Any]], connections: int) -> None:
    """Print the table of loads."""
    rows = [[r["system"], f"{r['pushes_per_s']:,.0f}", report.number(1e6 * r["server_cpu_s_per_push"], 0)] for r in results]
    print(f"\none shard, {connections} connections\n\n{report.table(['system', 'pushes/s', 'server CPU us'], rows)}")


def print_busy(results: list[dict[str, Any]]) -> None:
    """Print the table of a shard that is busy."""
    idle = {r["system"]: r for r in results if r["while"] == "idle"}
    rows = [
        [
            r["system"],
            r["while"] if r["events"] is None else f"{r['events']} {r['while']}",
            *(report.number(1e6 * r[name], 0) for name in LIMITS_BUSY),
            *(report.number(r[name] / idle[r["system"]][name]) for name in LIMITS_BUSY),
        ]
        for r in results
    ]
    heads = ["system", "while", "median us", "p99 us", "x idle", "p99 x idle"]
    print(f"\npush_pull of 1 KB in 256 tensors\n\n{report.table(heads, rows, words=2)}")


def criteria_of_steps(calls: list[dict[str, Any]], loads: list[dict[str, Any]]) -> list[Criterion]:
    """The project's criteria on what is gained by steps, in C, over the same without."""
    found = []
    ones = {(r["cores"], r["system"]): r for r in calls if (r["workers"], r["shards"], r["kb"]) == (1, 1, 1)}
    for (cores, name), r in ones.items():
        if (other := ones.get((cores, name + NEVER_ARMED))) is not None:
            for what, limit in LIMITS_ARMED.items():
                side = "shard's CPU" if what.startswith("server") else "worker's CPU"
                found.append(Criterion(4, f"{name}: {side} / never armed, cores: {cores}", ratio(r[what], other[what]), limit))
    pushes = {r["system"]: r["pushes_per_s"] for r in loads}
    for name, own in pushes.items():
        if name + NEVER_ARMED in pushes:
            limit = LIMITS_LOAD[name.split()[2]]
            found.append(Criterion(4, f"{name}: pushes/s, never armed / armed", ratio(pushes[name + NEVER_ARMED], own), limit))
    return found


def criteria(calls: list[dict[str, Any]], busy: list[dict[str, Any]]) -> list[Criterion]:
    """The project's criteria on small calls, of what was measured."""
    of = {(r["cores"], r["system"], r["workers"], r["shards"], r["kb"]): r["p50_s"] for r in calls}
    found = []
    for (cores, transport), limit in LIMITS.items():
        for consistency in CONSISTENCIES:
            if (own := of.get((cores, f"psd {transport} {consistency}", 1, 1, 1))) is not None:
                what = f"{transport} {consistency} / raw tcp, cores: {cores}"
                found.append(Criterion(4, what, ratio(own, of.get((cores, "raw tcp", 1, 0, 1))), limit))
    for cores in PLACES:
        pairs = [
            (ratio(own, of.get((cores, name, 1, 1, kb))) or 0, name)
            for (on, name, workers, shards, kb), own in of.items()
            if (on, workers, shards) == (cores, 1, SHARDS_MAX) and not name.endswith((NEVER_ARMED, CHECKPOINTS))
        ]
        if pairs:
            worst, name = max(pairs)
            found.append(Criterion(4, f"{SHARDS_MAX} shards / 1, cores: {cores}, at worst: {name}", worst, LIMIT_SHARDS))
    for a, b, s, limit in (("psd grpc sync", "grpc unary", 0, 1.2), ("psd shm sync", "psd tcp sync", 1, 1.0)):
        if (value := ratio(of.get(("free", a, 1, 1, 1)), of.get(("free", b, 1, s, 1)))) is not None:
            found.append(Criterion(4, f"{a} / {b}, cores: free", value, limit))
    idle = {r["system"]: r for r in busy if r["while"] == "idle"}
    for r in busy:
        if r["while"] != "idle":
            for name, limit in LIMITS_BUSY.items():
                what = f"{r['system']}: {name[:3]} during {r['while']} / idle"
                found.append(Criterion(4, what, ratio(r[name], idle[r["system"]][name]), limit))
    return found


def main() -> int:
    """Print the figures."""
    args = arguments()
    about = report.machine()
    transports, left_out = usable(args.transports)
    lanes = [transport for transport in transports if transport != "grpc"]
    calls, loads, busy, failed = [], [], [], []
    print(report.machine_line(about))
    with cleanly() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-")))
        library = str(_loops.build("calls", directory))
        matches = [f"calls, cores: {cores}" for cores in args.cores if "calls" in args.parts] + ["load"] * (
            "load" in args.parts
        )
        for name in matches:
            report.progress(name)
            match = Match(stack)
            if name == "load":
                loads = measure_load(match, args, lanes, library)
                print_load(loads, args.connections)
            else:
                cores = name.rsplit(" ", 1)[1]
                results = measure_calls(match, args, cores, transports, library, directory)
                print_calls(results, cores)
                calls += results
            match.close()
            left_out |= {f"{name}: {who}": why for who, why in match.left_out.items()}
            failed += match.failed
        for transport in lanes if "busy" in args.parts else ():
            report.progress(f"busy, {transport}")
            try:
                busy += measure_busy(args, transport)
            except ProcessFailed as error:
                left_out[f"busy: psd {transport}"] = str(error)
                failed.append(f"psd {transport}")
        if busy:
            print_busy(busy)
    if calls and args.calls < CALLS_MIN:
        print(f"\nToo few calls to judge by: {args.calls}, should be at least {CALLS_MIN}")
    figures = {"machine": about, "results": calls, "load": loads, "busy": busy}
    is_failed = any(name.startswith("psd") for name in failed)
    found = criteria(calls, busy) + criteria_of_steps(calls, loads)
    return report.conclude(args.json, figures, found, left_out, is_failed=is_failed)


if __name__ == "__main__":
    sys.exit(main())
