"""Simulates the goodput of jobs of up to a million chips that fail: a shard's real state in virtual time, learners as events.

    python benchmarks/simulated_goodput.py [--chips 10000,100000,1000000] [--picture goodput.png] [--json FILE]

Each chip fails by an exponential law of mean --years. The learner that it belongs to then stands still for --away seconds,
until it goes on without the chip's slice of --slice chips, which is back after --repair seconds. Rounds, quorum, grace and
leases are decided by the classes that psd-server runs. Goodput is the share of the tokens that merges have counted, of those
from which chips that never fail would have learned. Elastic data parallelism is one program: all of it stands still after each
failure.
docs/far-apart.md has the figures, beside those of Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _report
from _simulated_job import Failures, SimulatedJob, Way

YEAR_S = 365.25 * 86400
LEASE_MAX_S = 86400.0

WAYS: Mapping[str, Way] = {
    "elastic data parallel": Way(8, 1, lease_s=LEASE_MAX_S),
    "data parallel, 8 workers": Way(8, 1),
    "DiLoCo, 8 learners": Way(8, 50),
    "decoupled, 8 learners": Way(8, 50, fragments=8, delay=5, quorum=4),
    "decoupled, 16 learners": Way(16, 50, fragments=8, delay=5, quorum=8),
    "decoupled, 8, that begin anew": Way(8, 50, fragments=8, delay=5, quorum=4, keeps=False),
}
"""The lease of all but the first is the default of psd-server: whoever waits goes on without a silent learner after that."""


def simulate(name: str, chips: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way to train on so many chips."""
    way = WAYS[name]
    if way.is_decoupled:
        way = dataclasses.replace(way, transfer_s=args.transfer)
    parts = max(1, round(chips / (way.learners * args.slice)))
    failures = Failures(parts, args.years * YEAR_S / args.slice, args.away, args.repair)
    between_s = failures.part_mtbf_s / (parts * way.learners)
    seconds = min(args.failures * between_s, args.hours * 3600)
    job = SimulatedJob(way, args.step, failures, args.seed)
    try:
        found = job.run(seconds, warm_up=2 * args.repair)
    finally:
        job.close()
    possible = way.learners * seconds / args.step
    return {
        "way": name,
        "chips": chips,
        "goodput": found.merged / possible,
        "made": found.made / possible,
        "steps": found.steps / possible,
        "idle": found.idle_s / (way.learners * seconds),
        "failures": found.failures,
        "seconds": seconds,
        "rounds": found.rounds,
        "members": found.members / max(1, found.rounds),
    }


def text(results: list[dict[str, Any]]) -> str:
    """A table: a row for each way, a column for each number of chips."""
    chips = list(dict.fromkeys(result["chips"] for result in results))
    of = {(result["way"], result["chips"]): f"{result['goodput']:.1%}" for result in results}
    rows = [(way, *(of[way, number] for number in chips)) for way in dict.fromkeys(result["way"] for result in results)]
    return _report.table(("goodput", *(f"{number:,}" for number in chips)), rows)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Save a picture of goodput by chips."""
    import matplotlib.pyplot as plt

    figure, place = plt.subplots(figsize=(7, 4), layout="constrained")
    for way in dict.fromkeys(result["way"] for result in results):
        own = [result for result in results if result["way"] == way]
        place.plot([result["chips"] for result in own], [100 * result["goodput"] for result in own], marker="o", label=way)
    place.set(xscale="log", xlabel="chips", ylabel="goodput, %", ylim=(0, 101))
    place.grid(alpha=0.3)
    place.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = _report.parser(__doc__)
    chips = "10000,30000,100000,300000,600000,1000000,1200000"
    parser.add_argument("--chips", type=_report.whole_numbers, default=chips, help="default: %(default)s")
    parser.add_argument("--ways", type=_report.words, default=[], help="those that have one of these in their names")
    parser.add_argument("--years", type=float, default=1.0, help="between two failures of a chip (default: %(default)s)")
    parser.add_argument("--slice", type=int, default=256, help="chips that are gone with one (default: %(default)s)")
    parser.add_argument("--away", type=float, default=25.0, help="seconds until its learner goes on (default: %(default)s)")
    parser.add_argument("--repair", type=float, default=1800.0, help="seconds until a slice is back (default: %(default)s)")
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a local step (default: %(default)s)")
    parser.add_argument(
        "--transfer",
        type=float,
        default=1.0,
        help="seconds to push a fragment, or to fetch it, decoupled (default: %(default)s)",
    )
    parser.add_argument("--failures", type=int, default=300, help="to simulate, about (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=6.0, help="to simulate at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the failures (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="where a picture is saved")
    return parser.parse_args()


def main() -> None:
    """Print the figures."""
    args = arguments()
    results = []
    for way in [way for way in WAYS if not args.ways or any(word in way for word in args.ways)]:
        for chips in args.chips:
            results.append(simulate(way, chips, args))
            _report.progress(
                "{way}, {chips:,} chips: {goodput:.1%}, {failures} failures in {seconds:,.0f} s".format(**results[-1])
            )
    print(text(results))
    if args.picture is not None:
        draw(results, args.picture)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "picture")}
    _report.write_json(args.json, {"settings": settings, "results": results}, [])


if __name__ == "__main__":
    main()
