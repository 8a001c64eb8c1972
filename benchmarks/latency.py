"""Measures how long one small push_pull takes: 1 KB of gradients there, 1 KB of parameters back; one worker, one shard.

    python benchmarks/latency.py [--transports grpc,tcp,shm] [--calls 2500] [--json FILE]

psd over each transport, by the push_pull that NumPy programs call, runs against

    raw tcp       ping-pong of the same bytes over loopback
    bare python   the tcp lane's messages and psd's kernel, in Python, with neither shard nor client around
    grpc unary    Python gRPC, ping-pong of the same bytes, no arithmetic
    torch rpc     a parameter server by torch.distributed.rpc, over TCP, if torch is installed
    ray           a parameter server of Ray actors           (if this interpreter has them, or name one
    tensorflow    variables on a tf.distribute.Server         that does, see step.py --help)

All take turns in one run, some hundred calls each, so that a noisy machine hurts all alike. The ratios are the figures to
compare; milliseconds are this machine's. What each system has computed is verified, to the bit. Exit status: 1 if psd failed or
was wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
from typing import Any

import _contenders as contenders
import _report as report
from _processes import cleanly
from _report import Criterion, ratio
from _turns import Match, usable
from peers import work

CALLS_MIN = 2000
MODEL = "1kb"
ROUNDS = 10


def criteria(median_s: dict[str, float]) -> list[Criterion]:
    """The project's criteria on latency."""
    pairs = (("psd grpc", "grpc unary", 1.2), ("psd tcp", "raw tcp", 2.5), ("psd shm", "psd tcp", 1.0))
    return [Criterion(4, f"{a} / {b}", ratio(median_s.get(a), median_s.get(b)), limit) for a, b, limit in pairs]


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="grpc,tcp,shm", interpreters=True)
    parser.add_argument("--calls", type=int, default=2500, help="timed ones of each system (default: %(default)s)")
    args = parser.parse_args()
    if not ROUNDS <= args.calls <= work.STEPS_MAX - 100:
        parser.error(f"--calls: expected {ROUNDS} to {work.STEPS_MAX - 100}, got {args.calls}")
    about = report.machine()
    transports, left_out = usable(args.transports)
    with cleanly() as stack:
        match = Match(stack)
        for transport in transports:
            match.add(f"psd {transport}", contenders.psd(transport, 1, 1, MODEL, call="named"))
        match.add("raw tcp", contenders.reference("raw tcp", "raw_tcp", "turns", 1, MODEL))
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
        found = match.run(ROUNDS, args.calls // ROUNDS)
        match.close()
    left_out |= match.left_out
    results: list[dict[str, Any]] = []
    for contender in found:
        seconds = contender.seconds
        results.append(
            {
                "system": contender.name,
                "calls": len(seconds),
                **{f"p{share:g}_s": report.quantile(seconds, share / 100) for share in (1, 50, 99)},
                "server_cpu_s_per_call": contender.server_cpu_s / contender.all_steps,
            }
        )
    median_s = {r["system"]: r["p50_s"] for r in results}
    print(f"push_pull of 1 KB each way, W = 1, S = 1; {args.calls} calls of each")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            r["system"],
            *(report.number(1e3 * r[name], 3) for name in ("p50_s", "p99_s", "p1_s", "server_cpu_s_per_call")),
            report.number(ratio(r["p50_s"], median_s.get("raw tcp"))),
            report.number(ratio(r["p50_s"], median_s.get("grpc unary"))),
        ]
        for r in results
    ]
    print(report.table(["system", "median ms", "p99 ms", "p1 ms", "server CPU ms", "x raw tcp", "x grpc unary"], rows))
    checked = criteria(median_s)
    if args.calls < CALLS_MIN:
        print(f"\nToo few calls to judge by: {args.calls}, should be at least {CALLS_MIN}")
    is_failed = any(name.startswith("psd") for name in match.failed)
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=is_failed)


if __name__ == "__main__":
    sys.exit(main())
