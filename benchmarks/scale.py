"""Measures how step time falls with the number of shards when the network is the limit. Linux, root.

    sudo -E env PATH=$PATH python benchmarks/scale.py [--transports tcp,grpc] [--mbit 300] [--megabytes 48] [--quick]

Each shard and each worker is a host of its own: a network namespace, joined to the others by a bridge, whose link has a token
bucket of --mbit in each direction. W workers push a gradient of --megabytes, S shards add up and apply SGD, all pull. The
bound: a shard's link carries the bytes of W workers divided by S, a worker's link all of its own, so that a step cannot take
less than max(1, W / S) x the time of that many bytes over one link, which is measured in the same run: raw TCP, in both
directions at once, between two of the hosts. "of bound" is that bound divided by the step's time.

"most bytes" is what the links of the busiest shard carried, by the kernel's counters, compared with the mean of all shards.
The model should have several blocks of 4 MiB for each shard: with a single one a shard could not send while it receives. With
the defaults a transport takes about 12 minutes, with --quick half of that.
All numbers that are computed are verified, to the bit. Exit status: 1 if psd failed or was wrong, 2 where no
such network can be made; the criteria do not decide.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import _contenders as contenders
import _report as report
from _network import Network, NetworkError
from _processes import ProcessFailed, Refused, cleanly
from _report import Criterion, ratio
from _turns import usable
from peers import work

STEPS_MIN = 15
CRITERIA = ((4, 4, 3.5), (8, 8, 6.5))
"""W, S and the least speed-up over one shard."""


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(__doc__, transports="tcp,grpc", workers="1,2,4,8", shards="1,2,4,8", megabytes=48)
    parser.add_argument("--mbit", type=int, default=300, help="of each link, each way, per second (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS_MIN, help="timed steps (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only those W and S that the criteria are about")
    args = parser.parse_args()
    if max(args.workers) > work.WORKERS_MAX:
        parser.error(f"--workers: at most {work.WORKERS_MAX}, with which float32 arithmetic is still exact")
    for name in ("megabytes", "mbit", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1")
    args.pairs = [(w, s) for w in args.workers for s in args.shards]
    if args.quick:
        args.pairs = [(w, s) for w, most, _ in CRITERIA for s in (1, most)]
    return args


def measure(network: Network, transport: str, workers: int, shards: int, args: Namespace) -> dict[str, Any]:
    """Measure one table row."""
    hosts = [f"s{index}" for index in range(shards)]
    with ExitStack() as stack:
        starter = contenders.psd(transport, workers, shards, f"{args.megabytes}mb", network=network)
        contender = starter(stack)
        contender.take_turn(0, 2)
        contender.seconds.clear()
        before = [network.wire_bytes(host) for host in hosts]
        contender.take_turn(0, args.steps)
        carried = [network.wire_bytes(host) - earlier for host, earlier in zip(hosts, before, strict=True)]
        contender.verify()
    return {
        "transport": transport,
        "workers": workers,
        "shards": shards,
        "step_s_median": statistics.median(contender.seconds),
        "steps_s": contender.seconds,
        "shard_wire_bytes": carried,
        "most_bytes_over_mean": max(carried) / statistics.mean(carried),
    }


def link_s(network: Network, args: Namespace) -> float:
    """Seconds for the model's bytes over one link, in both directions at once."""
    with ExitStack() as stack:
        raw = contenders.reference("raw tcp", "raw_tcp", "duplex", 1, f"{args.megabytes}mb", network=network)(stack)
        raw.take_turn(1, args.steps)
        return statistics.median(raw.seconds)


def rows(results: list[dict[str, Any]], one_link_s: float) -> list[list[str]]:
    """Table rows; adds the speed-ups to the results."""
    alone = {(r["transport"], r["workers"]): r["step_s_median"] for r in results if r["shards"] == 1}
    cells = []
    for r in results:
        r["speed_up"] = ratio(alone.get((r["transport"], r["workers"])), r["step_s_median"])
        r["share_of_bound"] = max(1, r["workers"] / r["shards"]) * one_link_s / r["step_s_median"]
        figures = (1e3 * r["step_s_median"], r["speed_up"], r["share_of_bound"], r["most_bytes_over_mean"])
        cells.append([r["transport"], str(r["workers"]), str(r["shards"]), *map(report.number, figures, (0, 2, 2, 3))])
    return cells


def criteria(results: list[dict[str, Any]], transports: list[str]) -> list[Criterion]:
    """The project's criteria on scale."""
    found = []
    for transport in transports:
        mine = {(r["workers"], r["shards"]): r for r in results if r["transport"] == transport}
        for workers, shards, limit in CRITERIA:
            value = mine[workers, shards]["speed_up"] if (workers, shards) in mine else None
            what = f"{transport}: speed-up from S = 1 to {shards} with W = {workers}"
            found.append(Criterion(7, what, value, limit, at_least=True))
        most = max((r["most_bytes_over_mean"] for r in mine.values()), default=None)
        found.append(Criterion(7, f"{transport}: bytes of the busiest shard / mean", most, 1.05))
    return found


def main() -> int:
    """Print the figures."""
    args = arguments()
    about = report.machine()
    transports, left_out = usable(args.transports)
    results: list[dict[str, Any]] = []
    failed = 0
    hosts = [f"s{index}" for index in range(max(s for _, s in args.pairs))]
    hosts += [f"w{index}" for index in range(max(w for w, _ in args.pairs))]
    with cleanly() as stack:
        try:
            network = Network(stack, hosts, args.mbit)
        except NetworkError as error:
            print(f"scale.py cannot run here: {error}", file=sys.stderr)
            return 2
        one_link_s = link_s(network, args)
        report.progress(f"{args.megabytes} MB over one link, both ways at once: {1e3 * one_link_s:.0f} ms")
        for transport in transports:
            for workers, shards in args.pairs:
                report.progress(f"{transport}: W = {workers}, S = {shards}")
                try:
                    results.append(measure(network, transport, workers, shards, args))
                except ProcessFailed as error:
                    left_out[f"{transport}, W = {workers}, S = {shards}"] = str(error)
                    failed += not isinstance(error, Refused)
    links = f"a link of {args.mbit} Mbit/s each way for every host"
    print(f"{args.megabytes} MB of float32, {links}; medians of {args.steps} steps")
    print(report.machine_line(about))
    print(f"raw tcp of the same bytes over one link, both ways at once: {1e3 * one_link_s:.0f} ms\n")
    print(report.table(["transport", "W", "S", "ms/step", "speed-up", "of bound", "most bytes"], rows(results, one_link_s)))
    checked = criteria(results, transports)
    if args.steps < STEPS_MIN:
        print(f"\nToo few steps to judge by: {args.steps}, should be at least {STEPS_MIN}")
    settings = {name: getattr(args, name) for name in ("megabytes", "mbit", "steps")}
    figures = {"machine": about, **settings, "link_s": one_link_s, "results": results}
    return report.conclude(args.json, figures, checked, left_out, is_failed=bool(failed))


if __name__ == "__main__":
    sys.exit(main())
