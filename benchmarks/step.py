"""Measures the dense step: W workers push a gradient, S shards add them up and apply SGD, all workers pull the parameters.

    python benchmarks/step.py [--transports grpc,tcp,shm] [--workers 1,2] [--shards 1,2] [--model convnet] [--json FILE]

psd over each transport runs against other systems that do the same step, and against what memory and wires alone allow:

    by hand            the step in memory that a server and its workers share, with psd's kernel, and a byte each way
    memcpy             of the parameters, on one core
    sgd kernel         psd's own, from one copy of the parameters to another, on one core
    raw tcp duplex     the same bytes over loopback, block by block, in both directions at once, no arithmetic
    raw tcp in turns   the same bytes over loopback, first all gradients, then all parameters
    grpc stream        Python gRPC, 1 MiB messages both ways at once, no arithmetic; with psd's malloc settings
    grpc unary         the same as one message each way (not with --quick)
    gloo all-reduce    torch.distributed, then SGD on each worker; no server (from W = 2)
    torch rpc          a synchronous parameter server by torch.distributed.rpc, over TCP
    ray                a synchronous parameter server of Ray actors, over Ray's shared memory
    tensorflow         variables on a tf.distribute.Server, over TensorFlow's gRPC; workers do not wait for each other

All systems of one W take turns in one run, a few steps each, so that a noisy machine hurts all alike; times are medians. Those
whose turn it is not are idle; all together they then use less than a tenth of a core, most of it Ray's daemons. Ray
and TensorFlow are used if this interpreter has them, or name one that does: python -m venv ray; ray/bin/pip install ray;
python benchmarks/step.py --ray-python ray/bin/python. What each system has computed is verified, to the bit.

ms/step is the time from the last worker's begin to the last worker's end. GB/s counts numbers pushed and pulled by all workers.
CPU s/GB is what the server processes used for that, CPU ms/step what all processes of a system used for a step. The ratios are
the figures to compare; milliseconds are this machine's.
Exit status: 1 if psd failed or was wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import _contenders as contenders
import _report as report
from _contenders import Contender, Starter
from _processes import cleanly
from _report import Criterion, ratio
from _turns import Match, usable
from peers import work

STEPS_MIN = 15
REFERENCES = {
    "by hand": "hand",
    "memcpy": "memcpy",
    "sgd kernel": "sgd",
    "raw tcp duplex": "tcp2",
    "raw tcp in turns": "tcp1",
    "grpc stream": "stream",
    "grpc unary": "unary",
    "gloo all-reduce": "gloo",
    "torch rpc": "rpc",
    "ray": "ray",
    "tensorflow": "tf",
}
"""Contenders in the order of the table, with short names for the columns of ratios."""


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(__doc__, transports="grpc,tcp,shm", workers="1,2", shards="1", rounds=5, steps=4, interpreters=True)
    parser.add_argument(
        "--model", choices=[m for m in work.MODELS if m != "1kb"], default="resnet50", help="shapes (default: %(default)s)"
    )
    parser.add_argument("--consistency", choices=("sync", "async"), default="sync", help="of psd (default: %(default)s)")
    parser.add_argument("--half", action="store_true", help="psd also with float16 parameters: gradients of 16 bits")
    parser.add_argument(
        "--without", type=report.some_of(REFERENCES), default="", metavar="NAMES", help="those that are left out"
    )
    parser.add_argument("--quick", action="store_true", help=f"{STEPS_MIN} timed steps in 3 turns; no grpc unary")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.without = 3, 5, [*args.without, "grpc unary"]
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds, --steps: expected at least 1")
    if max(args.workers) > work.WORKERS_MAX:
        parser.error(f"--workers: at most {work.WORKERS_MAX}, with which float32 arithmetic is still exact")
    return args


def references(args: Namespace, workers: int) -> dict[str, Starter]:
    """References that can run here, by name."""
    model = args.model
    starters = {
        "memcpy": contenders.memory("memcpy", "memcpy", model),
        "sgd kernel": contenders.memory("sgd kernel", "sgd", model),
        "raw tcp duplex": contenders.reference("raw tcp duplex", "raw_tcp", "duplex", workers, model),
        "raw tcp in turns": contenders.reference("raw tcp in turns", "raw_tcp", "turns", workers, model),
        "grpc stream": contenders.reference("grpc stream", "bare_grpc", "stream", workers, model),
        "grpc unary": contenders.reference("grpc unary", "bare_grpc", "unary", workers, model),
    }
    if Path("/dev/shm").is_dir():
        starters["by hand"] = contenders.by_hand(workers, model)
    if contenders.interpreter_with("torch", None) is not None:
        starters["torch rpc"] = contenders.torch_rpc(workers, model)
        if workers > 1:
            starters["gloo all-reduce"] = contenders.gloo(workers, model)
    ray = contenders.interpreter_with("ray", args.ray_python)
    if ray is not None:
        starters["ray"] = contenders.ray(ray, workers, model)
    tensorflow = contenders.interpreter_with("tensorflow", args.tensorflow_python)
    if tensorflow is not None:
        starters["tensorflow"] = contenders.tensorflow(tensorflow, workers, model)
    return {name: starters[name] for name in REFERENCES if name in starters and name not in args.without}


def measure(args: Namespace, workers: int, transports: list[str], match: Match) -> list[Contender]:
    """Measure all systems for one W."""
    report.progress(f"W = {workers}: starting")
    for transport in transports:
        for shards in args.shards:
            for half in (False, True) if args.half else (False,):
                name = f"psd {transport}{' half' if half else ''}"
                told = {"consistency": args.consistency, "half": half}
                match.add(name, contenders.psd(transport, workers, shards, args.model, **told))
    if workers == 2 and "grpc" in transports:  # to compare goodputs within one run
        match.add("psd grpc", contenders.psd("grpc", 1, 1, args.model, consistency=args.consistency))
    for name, starter in references(args, workers).items():
        match.add(name, starter)
    return match.run(args.rounds, args.steps)


def facts(contender: Contender) -> dict[str, Any]:
    """The figures of one contender."""
    median_s = report.median(contender.seconds)
    assert median_s is not None
    moved = contender.bytes_per_step if contender.moves else None
    gigabytes = moved * contender.all_steps / 1e9 if moved and contender.server_pids else None
    return {
        "system": contender.name,
        "workers": contender.workers,
        "shards": contender.shards,
        "step_s_median": median_s,
        "step_s_fastest": min(contender.seconds),
        "step_s_p90": report.quantile(contender.seconds, 0.9),
        "goodput_gb_per_s": moved / median_s / 1e9 if moved else None,
        "server_cpu_s_per_gb": contender.server_cpu_s / gigabytes if gigabytes else None,
        "cpu_s_per_step": (contender.server_cpu_s + contender.worker_cpu_s) / contender.all_steps,
        "steps_s": contender.seconds,
    }


def print_tables(workers: int, results: list[dict[str, Any]]) -> None:
    """Print the tables for one W."""
    rows = [
        [
            r["system"],
            str(r["workers"]),
            str(r["shards"] or "-"),
            *(report.number(1e3 * r[f"step_s_{which}"], 1) for which in ("median", "fastest", "p90")),
            report.number(r["goodput_gb_per_s"]),
            report.number(r["server_cpu_s_per_gb"], 3),
            report.number(1e3 * r["cpu_s_per_step"], 1),
        ]
        for r in results
    ]
    print(f"\nW = {workers}\n")
    print(report.table(["system", "W", "S", "ms/step", "fastest", "p90", "GB/s", "server CPU s/GB", "CPU ms/step"], rows))
    others = {r["system"]: r["step_s_median"] for r in results if r["shards"] == 0}
    rows = [
        [f"{r['system']}, S = {r['shards']}", *(report.number(r["step_s_median"] / seconds) for seconds in others.values())]
        for r in results
        if r["shards"] and r["workers"] == workers
    ]
    if rows and others:
        print("\nstep time as a multiple of\n")
        print(report.table(["", *(REFERENCES[name] for name in others)], rows))


def criteria(by_workers: dict[int, list[dict[str, Any]]]) -> list[Criterion]:
    """The project's criteria on steps, with one shard."""

    def time_of(system: str, workers: int, of: int | None = None, what: str = "step_s_median") -> float | None:
        """The time of a contender in the run with that many workers; of a system with another number, if that is given."""
        for r in by_workers.get(workers, []):
            if r["system"] == system and r["shards"] <= 1 and r["workers"] == (of or workers):
                return float(r[what])
        return None

    sgd, memcpy = time_of("sgd kernel", 1), time_of("memcpy", 1)
    traffic = sgd + memcpy if sgd is not None and memcpy is not None else None
    found = [
        Criterion(1, "shm, W = 1: step / (sgd kernel + memcpy)", ratio(time_of("psd shm", 1), traffic), 1.6),
        Criterion(1, "shm, W = 2: step / gloo", ratio(time_of("psd shm", 2), time_of("gloo all-reduce", 2)), 0.67),
        Criterion(1, "shm, W = 2: step / ray", ratio(time_of("psd shm", 2), time_of("ray", 2)), 0.7),
        Criterion(1, "shm, W = 2: step / raw tcp in turns", ratio(time_of("psd shm", 2), time_of("raw tcp in turns", 2)), 0.45),
    ]
    for workers, limit in ((1, 1.25), (2, 1.2)):
        times = ratio(time_of("psd shm", workers), time_of("by hand", workers))
        found.append(Criterion(1, f"shm, W = {workers}: step / by hand", times, limit))
        used = [time_of(system, workers, what="cpu_s_per_step") for system in ("psd shm", "by hand")]
        found.append(Criterion(1, f"shm, W = {workers}: CPU of a step / by hand", ratio(*used), 1.5))
    for system, reference, index, limit in (
        ("tcp", "raw tcp duplex", 2, 1.2),
        ("tcp", "torch rpc", 2, 0.75),
        ("grpc", "tensorflow", 3, 0.75),
    ):
        for workers in (1, 2):
            value = ratio(time_of(f"psd {system}", workers), time_of(reference, workers))
            found.append(Criterion(index, f"{system}, W = {workers}: step / {reference}", value, limit))
    # Twice the bytes in a step: the goodputs' ratio is twice the inverse of the times'.
    alone, both = time_of("psd grpc", 2, of=1), time_of("psd grpc", 2)
    goodput = ratio(alone, both)
    text = "grpc: goodput with W = 2 / with W = 1"
    return [*found, Criterion(3, text, None if goodput is None else 2 * goodput, 1.0, at_least=True)]


def main() -> int:
    """Print the figures."""
    args = arguments()
    about = report.machine()
    transports, left_out = usable(args.transports)
    by_workers: dict[int, list[dict[str, Any]]] = {}
    failed: list[str] = []
    with cleanly() as stack:
        for workers in args.workers:
            match = Match(stack)
            by_workers[workers] = [facts(contender) for contender in measure(args, workers, transports, match)]
            match.close()
            failed += match.failed
            left_out |= {f"{name}, W = {workers}": why for name, why in match.left_out.items()}
    size = work.size_of(args.model)
    tensors = len(work.shapes_of(args.model))
    about_steps = f"psd {args.consistency}; medians of {args.rounds * args.steps} steps"
    print(f"{args.model}: {size / 1e6:.1f} M float32 in {tensors} tensors; {about_steps}")
    print(report.machine_line(about))
    for workers, results in by_workers.items():
        print_tables(workers, results)
    checked = criteria(by_workers) if args.model == "resnet50" and args.consistency == "sync" else []
    if args.rounds * args.steps < STEPS_MIN:
        print(f"\nToo few steps to judge by: {args.rounds * args.steps}, should be at least {STEPS_MIN}")
    figures = {"machine": about, "model": args.model, "consistency": args.consistency}
    figures["results"] = [r for rows in by_workers.values() for r in rows]
    return report.conclude(args.json, figures, checked, left_out, is_failed=any(name.startswith("psd") for name in failed))


if __name__ == "__main__":
    sys.exit(main())
