"""Measures the codecs of psd_core on one thread, against a copy of the float32 numbers in the same run.

    python benchmarks/codecs.py [--elements 25000000] [--rounds 10] [--codecs int8,topk:0.01] [--json FILE]

encode      of values to bytes, to nearest
stochastic  the same, rounded up or down at random
feedback    the same to nearest, with a residual, which is added, and gets what is lost; before that, values and residual are
            read once, so that a number that is not finite leaves the residual as it is
decode      of bytes to numbers
accumulate  decoding fused with a weighted sum, which is what a shard does with a push

`ratio` is the speed beside the copy's: how many times as many elements per second. `bound` is the share of the bandwidth of the
copy, by bytes that must be read and written. `error` is the norm of what is lost beside that of the values, which are normal.
The quickest of some rounds counts, in processor time, and all of a codec are measured in turns with the copy, so that ratios
hold on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import _report
import numpy as np
from numpy.typing import NDArray

import psd_core
from psd_core import codecs

CODECS = ("bf16", "fp16", "int8", "int4", "int4log", "sign", "topk:0.01")
ROUND_NOTHING = ("sign", "topk")

ERRORS = {"bf16": 0.003, "fp16": 0.0003, "int8": 0.01, "int4": 0.16, "int4log": 0.2, "sign": 0.61, "topk:0.01": 0.97}
"""Largest errors: a codec that is quick and wrong is not measured."""

TOPK_S = 0.06
"""Longest time for the largest hundredth of 25 million elements."""

Array = NDArray[np.float32]


def works_of(codec: str, values: Array, residual: Array, out: Array) -> dict[str, tuple[int, Callable[[], object]]]:
    """The works on a codec: bytes that each must move, and the call."""
    data = codecs.encode(codec, values)
    made = np.empty_like(data)
    numbers, nbytes = values.nbytes, data.nbytes
    residual[:] = 0
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "encode": (numbers + nbytes, lambda: codecs.encode(codec, values, out=made)),
        "stochastic": (numbers + nbytes, lambda: codecs.encode(codec, values, seed=1, rounding="stochastic", out=made)),
        "feedback": (3 * numbers + nbytes, lambda: codecs.encode(codec, values, residual, out=made)),
        "decode": (nbytes + numbers, lambda: codecs.decode(codec, data, out)),
        "accumulate": (nbytes + 2 * numbers, lambda: codecs.accumulate(codec, data, out, 0.5)),
    }
    if codec.startswith(ROUND_NOTHING):
        del works["stochastic"]
    if codec.startswith("topk"):  # reads and writes only what the data have, 6 bytes for each
        works["accumulate"] = (nbytes + 8 * (nbytes // 6), works["accumulate"][1])
    return works


def measure(codec: str, values: Array, rounds: int) -> dict[str, Any]:
    """Measure one codec, and look at its numbers.

    Raises:
        SystemExit: these are not near the values.
    """
    residual, out, copied = (psd_core.aligned_zeros(len(values), np.float32) for _ in range(3))
    codecs.decode(codec, codecs.encode(codec, values), out)
    error = float(np.linalg.norm(out - values) / np.linalg.norm(values))
    if not error <= ERRORS.get(codec, 1):
        raise SystemExit(f"{codec} is wrong: an error of {error:.4f} beside the values, where {ERRORS[codec]} is the most")
    works = works_of(codec, values, residual, out)
    calls: dict[str, Callable[[], object]] = {name: call for name, (_, call) in works.items()}
    seconds = _report.in_turns({**calls, "copy": lambda: np.copyto(copied, values)}, rounds=rounds)
    copy_bytes_per_s = 2 * values.nbytes / seconds["copy"]
    return {
        "codec": codec,
        "times_fewer_bytes": values.nbytes / codecs.encoded_bytes(codec, len(values)),
        "error": error,
        "copy_s": seconds["copy"],
        "works": {
            name: {
                "s": seconds[name],
                "ratio": seconds["copy"] / seconds[name],
                "bound": nbytes / seconds[name] / copy_bytes_per_s,
            }
            for name, (nbytes, _) in works.items()
        },
    }


def criteria(results: Sequence[dict[str, Any]], elements: int) -> list[_report.Criterion]:
    """Criteria for what must keep up with a copy of memory."""
    found = {row["codec"]: row["works"] for row in results}
    checked = [
        _report.Criterion(4, f"int8, {work}: bandwidth / of a copy", found["int8"][work]["bound"], 0.7, at_least=True)
        for work in ("encode", "accumulate")
        if "int8" in found
    ]
    if "topk:0.01" in found:
        share = found["topk:0.01"]["encode"]["s"] / (TOPK_S * elements / 25e6)
        checked.append(_report.Criterion(4, "top 1 % of 25 M elements / 60 ms", share, 1.0))
    return checked


def text(results: Sequence[dict[str, Any]]) -> str:
    """Tables of the figures."""
    rows = [
        (row["codec"], name, f"{work['s'] * 1e3:.1f}", f"{work['ratio']:.2f}", f"{work['bound']:.2f}")
        for row in results
        for name, work in row["works"].items()
    ]
    sizes = [
        (row["codec"], f"{row['times_fewer_bytes']:.2f}", f"{row['error']:.4f}", f"{row['copy_s'] * 1e3:.1f}")
        for row in results
    ]
    return "\n\n".join(
        [
            _report.table(("codec", "times fewer bytes", "error", "copy ms"), sizes),
            _report.table(("codec", "work", "ms", "ratio", "bound"), rows, words=2),
        ]
    )


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000, help="of an array (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of which the quickest counts (default %(default)s)")
    parser.add_argument("--codecs", type=_report.words, default=list(CODECS), help="(default: all)")
    args = parser.parse_args()
    values = psd_core.aligned_empty(args.elements, np.float32)
    np.random.default_rng(1).standard_normal(out=values, dtype=np.float32)
    facts = _report.machine()
    print(_report.machine_line(facts) + "\n")
    results = [measure(codec, values, args.rounds) for codec in args.codecs]
    checked = criteria(results, args.elements)
    print(text(results) + "\n\n" + _report.criteria_table(checked))
    _report.write_json(args.json, {"machine": facts, "elements": args.elements, "results": results}, checked)


if __name__ == "__main__":
    main()
