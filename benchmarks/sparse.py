"""Measures a step on a sparse table: workers pull the rows of a batch's ids, and push a gradient for each; the rule is Adagrad.

    python benchmarks/sparse.py [--transports shm,tcp,grpc] [--workers 1,2] [--rows 1000000] [--dim 64] [--ids 10000]
        [--never-armed]

psd over each transport, synchronous, runs against other systems that do the same step:

    gather/scatter     loops in C over memory that the workers share: no server, no index, nothing that survives a kill
    raw tcp            the same bytes over loopback, and no rows
    bare grpc          the same bytes in one call of Python's gRPC, and no rows
    torch rpc          a server by torch.distributed.rpc, over TCP
    ray                a server actor, over Ray's own RPC
    tensorflow         a variable on a tf.distribute.Server, over TensorFlow's gRPC

Ids are drawn by Zipf's law from rows that all exist. psd gets them as they are drawn, with repetitions, and sorts them out;
the others get each distinct id once, and their workers do not wait for each other. A worker of psd fetches the next step's rows
in the round trip of its push (`prefetch`); with --two-round-trips it does not. Ray and TensorFlow are used if this
interpreter has them, or name one that does with --ray-python, --tensorflow-python. With --never-armed each psd on the bulk lane
also runs with shards that take no steps in C: what these gain, in time and processor time, are criteria, too.
What each system has computed is verified.

ms/step is the time from the last worker's begin to the last worker's end. CPU is a worker's, and that of all servers together,
for a step. Then, over the first transport of psd that is measured: many small tables in one step against one table of the same
rows, and how evenly the bytes of a step with hot ids are spread over four shards.
Exit status: 1 if psd failed or was wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _loops
import _report as report
import _row_contenders as contenders
from _contenders import Contender, interpreter_with
from _processes import Shard, cleanly, start_all
from _report import Criterion, ratio
from _row_contenders import psd
from _turns import Match, usable
from peers.rows import Shape

LIMITS_MS = {("psd shm", 1): 2.0, ("psd tcp", 1): 4.0, ("psd grpc", 1): 6.0, ("psd shm", 2): 3.0}
SKEW_SHARDS = 4

NEVER_ARMED = " never armed"
"""Behind the name of a contender whose shards take no steps in C."""

STEPS_MAX = 0.7
"""Most of the time, and of the processors' time, of a step that is taken in C, over one that is not."""


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(
        __doc__,
        transports="shm,tcp,grpc",
        workers="1,2",
        shards=1,
        rows=1_000_000,
        dim=64,
        ids=10_000,
        rounds=5,
        steps=20,
        interpreters=True,
    )
    parser.add_argument("--consistency", choices=("sync", "async"), default="sync", help="of psd (default: %(default)s)")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of Zipf's law (default: %(default)s)")
    parser.add_argument("--without", type=report.words, default="", metavar="NAMES", help="references that are left out")
    parser.add_argument("--distinct", action="store_true", help="psd, too, gets each distinct id once")
    parser.add_argument("--two-round-trips", action="store_true", help="psd fetches rows in calls of their own")
    parser.add_argument("--never-armed", action="store_true", help="also run psd with shards that take no steps in C")
    return parser.parse_args()


def references(args: Namespace, workers: int, shape: Shape, library: Path) -> dict[str, contenders.Starter]:
    """References that can run here, by name."""
    starters = {
        "gather/scatter": contenders.shared_memory(workers, shape, library),
        "raw tcp": contenders.raw_tcp(workers, shape),
        "bare grpc": contenders.bare_grpc(workers, shape),
    }
    if interpreter_with("torch", None) is not None:
        starters["torch rpc"] = contenders.torch_rpc(workers, shape)
    for name, python in (("ray", args.ray_python), ("tensorflow", args.tensorflow_python)):
        interpreter = interpreter_with(name, python)
        if interpreter is not None:
            starters[name] = getattr(contenders, name)(interpreter, workers, shape)
    return {name: starter for name, starter in starters.items() if name not in args.without}


def facts(contender: Contender) -> dict[str, Any]:
    """The figures of one contender."""
    return {
        "system": contender.name,
        "workers": contender.workers,
        "step_s_median": report.median(contender.seconds),
        "step_s_fastest": min(contender.seconds),
        "step_s_p90": report.quantile(contender.seconds, 0.9),
        "worker_cpu_s_per_step": contender.worker_cpu_s / contender.all_steps / contender.workers,
        "server_cpu_s_per_step": contender.server_cpu_s / contender.all_steps if contender.server_pids else None,
        "steps_s": contender.seconds,
    }


def run(match: Match, args: Namespace) -> list[dict[str, Any]]:
    """Let all take turns; returns their figures."""
    results = [facts(contender) for contender in match.run(args.rounds, args.steps)]
    match.close()
    return results


def measure_tables(args: Namespace, transport: str, stack: ExitStack) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure 26 tables, of dim 16 and 2,048 ids each, against one table of the same rows; returns also what has failed."""
    shape = Shape(26, max(1, args.rows // 26), 16, max(1, args.ids * 2048 // 10_000), args.zipf)
    match = Match(stack)
    for name, in_one in (("26 tables", False), ("1 table", True)):
        how = {"is_distinct": True, "in_one": in_one, "fetches_ahead": not args.two_round_trips}
        match.add(name, psd(name, transport, 1, args.shards, shape, "sync", **how))
    return run(match, args), match.failed


def measure_skew(args: Namespace, transport: str) -> list[int]:
    """Bytes that each of four shards has received and sent, of steps with ids by Zipf's law of exponent 1.2."""
    with ExitStack() as stack:
        shards = [Shard("--lease", "120", "--insecure", index=i, count=SKEW_SHARDS) for i in range(SKEW_SHARDS)]
        start_all(stack, shards)
        shape = Shape(1, args.rows, args.dim, args.ids, 1.2)
        contender = contenders.join(stack, "skew", transport, 1, shards, shape, "sync")

        def moved() -> list[int]:
            found = [shard.status().numbers for shard in shards]
            return [int(numbers["received_bytes"] + numbers["sent_bytes"]) for numbers in found]

        before = moved()  # the rows of all ids, which are made first, are no measure
        contender.take_turn(0, args.steps)
        return [after - start for after, start in zip(moved(), before, strict=True)]


def print_table(results: list[dict[str, Any]], title: str) -> None:
    """Print one table of figures."""
    rows = [
        [
            r["system"],
            *(report.number(1e3 * r[f"step_s_{which}"]) for which in ("median", "fastest", "p90")),
            report.number(1e3 * r["worker_cpu_s_per_step"]),
            report.number(None if r["server_cpu_s_per_step"] is None else 1e3 * r["server_cpu_s_per_step"]),
        ]
        for r in results
    ]
    print(f"\n{title}\n")
    print(report.table(["system", "ms/step", "fastest", "p90", "worker CPU ms", "server CPU ms"], rows))


def criteria(by_workers: dict[int, list[dict[str, Any]]], tables: list[dict[str, Any]], skew: list[int]) -> list[Criterion]:
    """The project's criteria, and ratios to the references."""
    time_of = {(r["system"], workers): 1e3 * r["step_s_median"] for workers, rows in by_workers.items() for r in rows}
    found = []
    for (system, workers), limit in LIMITS_MS.items():
        if workers in by_workers:
            found.append(Criterion(3, f"{system}, W = {workers}: ms/step", time_of.get((system, workers)), limit))
    wires = {"raw tcp": 2.0, "bare grpc": 2.0}  # bounds that nobody reaches; of torch's server, no more than it takes
    pairs = [(system, "torch rpc") for system in ("shm", "tcp", "grpc")]
    for system, reference in (*pairs, ("tcp", "raw tcp"), ("grpc", "bare grpc")):
        for workers in by_workers:
            value = ratio(time_of.get((f"psd {system}", workers)), time_of.get((reference, workers)))
            limit = wires.get(reference, 1.0)
            found.append(Criterion(3, f"{system}, W = {workers}: step / {reference}", value, limit))
    for workers, rows in by_workers.items():
        found += criteria_of_steps({r["system"]: r for r in rows}, workers)
    of = {r["system"]: r["step_s_median"] for r in tables}
    found.append(Criterion(3, "26 tables / 1 table of the same rows", ratio(of.get("26 tables"), of.get("1 table")), 1.5))
    busiest = max(skew) / (sum(skew) / len(skew)) if skew else None
    found.append(Criterion(3, "Zipf 1.2, 4 shards: busiest shard's bytes / mean", busiest, 1.15))
    return found


def criteria_of_steps(of: dict[str, dict[str, Any]], workers: int) -> list[Criterion]:
    """The project's criteria on what is gained by steps, in C, over the same without."""
    found = []
    for name, r in of.items():
        if (other := of.get(name + NEVER_ARMED)) is not None:
            cpu, without = ((f["worker_cpu_s_per_step"] * workers + f["server_cpu_s_per_step"]) for f in (r, other))
            pairs = {"step": (r["step_s_median"], other["step_s_median"]), "CPU of worker and shard": (cpu, without)}
            for what, (own, its) in pairs.items():
                found.append(Criterion(5, f"{name}, W = {workers}: {what} / never armed", ratio(own, its), STEPS_MAX))
    return found


def main() -> int:
    """Print the figures."""
    args = arguments()
    about = report.machine()
    transports, left_out = usable(args.transports)
    shape = Shape(1, args.rows, args.dim, args.ids, args.zipf)
    by_workers: dict[int, list[dict[str, Any]]] = {}
    failed: list[str] = []
    with cleanly() as stack:
        library = _loops.build("gather", Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))))
        for workers in args.workers:
            report.progress(f"W = {workers}: starting")
            match = Match(stack)
            for transport in transports:
                name, told = f"psd {transport}", (transport, workers, args.shards, shape, args.consistency)
                how = {"is_distinct": args.distinct, "fetches_ahead": not args.two_round_trips}
                match.add(name, psd(name, *told, **how))
                if args.never_armed and transport != "grpc":
                    match.add(name + NEVER_ARMED, psd(name + NEVER_ARMED, *told, ["--never-armed"], **how))
            for name, starter in references(args, workers, shape, library).items():
                match.add(name, starter)
            by_workers[workers] = run(match, args)
            failed += match.failed
            left_out |= {f"{name}, W = {workers}": why for name, why in match.left_out.items()}
        tables, skew = [], []
        if transports:
            report.progress("26 tables")
            tables, more = measure_tables(args, transports[0], stack)
            failed += [f"psd: {name}" for name in more]
            report.progress("skew")
            skew = measure_skew(args, transports[0])
    sizes = f"{args.rows} rows of {args.dim} float32, {args.ids} ids a step by Zipf's law of exponent {args.zipf}"
    print(f"{sizes}; psd {args.consistency}; medians of {args.rounds * args.steps} steps")
    print(report.machine_line(about))
    for workers, results in by_workers.items():
        print_table(results, f"W = {workers}")
    print_table(tables, f"many tables, psd {transports[0] if transports else '-'}, W = 1")
    figures = {"machine": about, "shape": shape._asdict(), "consistency": args.consistency, "tables": tables, "skew": skew}
    figures["results"] = [r for rows in by_workers.values() for r in rows]
    is_failed = any(name.startswith("psd") for name in failed)
    return report.conclude(args.json, figures, criteria(by_workers, tables, skew), left_out, is_failed=is_failed)


if __name__ == "__main__":
    sys.exit(main())
