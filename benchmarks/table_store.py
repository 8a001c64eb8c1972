"""Measures the store of a sparse table's partition on one thread, against reads and updates at known places.

    python benchmarks/table_store.py [--rows 1000000] [--dim 64] [--ids 10000] [--steps 40] [--rounds 5]
                                     [--recover ROWS] [--directory /dev/shm] [--json FILE]

read, update   one step's ids: a draw of --ids from Zipf's law, each distinct id once, as a worker sends them; Adagrad
reference      the same rows, at places that are known, by a loop in C that prefetches: no index, and, for updates, in place,
               so that a kill would leave them torn; its memory is mapped from the same directory. `share` is the store's share
               of the reference's bandwidth, by bytes of rows
growth         new rows, --ids at a time, while another thread reads 64 ids over and over: how long these
               reads take by the clock, and the pushes, for which other pushes wait, in processor time
worker         what a worker does with 10,000 ids of a step (--ids) beside sending: sort them out for 4 shards, sum their
               gradients, spread the rows that come back; NumPy's unique and take are the reference
catching up    a read of rows that have missed 100 steps of Adam: per row and step
memory         of the table of the first part. Spare places are as many as the largest push had rows
recovery       opening a partition of rows of dim 8 after the process that filled it has ended without a word

The quickest of some rounds counts, in processor time, and all are measured in turns, so that ratios hold on a busy machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _loops
import _report
import numpy as np
from numpy.typing import NDArray
from peers.rows import draw

from psd_core._table_snapshot import HEAD
from psd_core.distinct import distinct
from psd_core.initial import Normal, Zeros
from psd_core.table import TableSpec, TableStore

SCALARS = {"lr": 0.05, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10}

Array = NDArray[Any]


def address(array: Array) -> ctypes.c_void_p:
    """An array as C takes it."""
    return ctypes.c_void_p(array.ctypes.data)


def measure_speed(args: Any, directory: Path) -> list[dict[str, Any]]:
    """Measure reads and updates beside the reference."""
    rows, dim = args.rows, args.dim
    spec = TableSpec("speed", dim, "adagrad", init=Zeros(), max_rows=2 * rows)
    store = TableStore.create(directory / "speed", spec)
    grads = np.random.default_rng(2).standard_normal((args.ids, dim)).astype(np.float32)
    for start in range(0, rows, args.ids):
        ids = np.arange(start, min(start + args.ids, rows))
        store.push(ids, grads[: len(ids)], SCALARS, distinct=True)
    with (directory / "reference").open("w+b") as file:
        file.truncate(rows * 8 * dim)
        mapping = mmap.mmap(file.fileno(), rows * 8 * dim)
    plain = np.frombuffer(mapping, np.float32)
    plain[:] = 1
    library, out = ctypes.CDLL(str(_loops.build("gather", directory))), np.empty((args.ids, dim), np.float32)
    figures = []
    for name, exponent in (("zipf 1.05", 1.05), ("zipf 1.2", 1.2), ("uniform", 0.0)):
        _report.progress(name)
        steps = [batch.ids for batch in draw(rows, args.ids, args.steps, exponent)]
        count = sum(map(len, steps))
        clock = iter(range(1 << 31))

        def read(steps: list[Array] = steps, clock: Any = clock) -> None:
            now = next(clock)
            for ids in steps:
                store.read(ids, out[: len(ids)], clock=now)

        def update(steps: list[Array] = steps) -> None:
            for ids in steps:
                store.push(ids, grads[: len(ids)], SCALARS, distinct=True)

        def sorted_out(steps: list[Array] = steps) -> None:
            for ids in steps:
                store.push(ids, grads[: len(ids)], SCALARS)

        def gather(steps: list[Array] = steps) -> None:
            for ids in steps:
                library.gather(address(plain), address(ids), len(ids), dim, address(out))

        def adagrad(steps: list[Array] = steps) -> None:
            for ids in steps:
                library.adagrad(address(plain), address(ids), len(ids), dim, address(grads))

        works = {"read": read, "gather": gather, "update": update, "update, ids sorted out": sorted_out, "adagrad": adagrad}
        seconds = _report.in_turns(works, rounds=args.rounds)
        for work, against, nbytes in (
            ("read", "gather", 4 * dim),
            ("update", "adagrad", 16 * dim),
            ("update, ids sorted out", "adagrad", 16 * dim),
        ):
            figures.append(
                {
                    "ids": name,
                    "work": work,
                    "rows_per_step": count / len(steps),
                    "rows_per_s": count / seconds[work],
                    "bytes_per_s": nbytes * count / seconds[work],
                    "reference_bytes_per_s": nbytes * count / seconds[against],
                    "share": seconds[against] / seconds[work],
                }
            )
    spare_bytes = store.counters()["spares"] * (8 * dim + HEAD.itemsize)
    figures[0]["bytes_beside_values_and_slots"] = (store.used_bytes - spare_bytes) / rows - 8 * dim
    figures[0]["spare_bytes_per_row"] = spare_bytes / rows
    store.close(remove=True)
    (directory / "reference").unlink()
    return figures


def measure_worker(args: Any) -> dict[str, Any]:
    """Measure sorting out ids, sums and spreading, beside NumPy."""
    rng = np.random.default_rng(4)
    ids = (rng.zipf(1.2, args.ids) % args.rows).astype(np.int64)
    grads = rng.standard_normal((args.ids, args.dim)).astype(np.float32)
    out, found = np.empty_like(grads), distinct(ids, 4)
    sums = found.sum(grads)
    works: dict[str, Any] = {
        "distinct": lambda: distinct(ids, 4),
        "unique": lambda: np.unique(ids, return_inverse=True),
        "sum": lambda: found.sum(grads),
        "expand": lambda: found.expand(sums, out),
        "take": lambda: np.take(sums, found.inverse, axis=0, out=out, mode="clip"),
    }
    seconds = _report.in_turns(works, rounds=20 * args.rounds)
    return {"distinct_ids": len(found.ids), **{f"{work}_us": 1e6 * time for work, time in seconds.items()}}


def measure_catching_up(args: Any, directory: Path) -> dict[str, Any]:
    """Measure a read of rows that have missed steps."""
    rows, steps = 10_000, 100
    spec = TableSpec("late", args.dim, "adam", init=Normal(0.01), updates="catch_up")
    store = TableStore.create(directory / "late", spec)
    scalars = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    ids, grads = np.arange(rows), np.ones((rows, args.dim), np.float32)
    for step in range(1 + steps):
        store.push(ids[: 0 if step else rows], grads[: 0 if step else rows], scalars)
    seconds = _report.in_turns({"read": lambda: store.read(ids)}, rounds=args.rounds)
    store.close(remove=True)
    return {"ns_per_row_and_step": 1e9 * seconds["read"] / rows / steps}


def measure_growth(args: Any, directory: Path) -> dict[str, Any]:
    """Measure reads of others while a table grows."""
    spec = TableSpec("growth", 8, "adagrad", init=Normal(0.01), max_rows=9_000_000)
    store = TableStore.create(directory / "growth", spec)
    grads = np.ones((args.ids, 8), np.float32)
    times, is_over = [], threading.Event()

    def read() -> None:
        ids = np.arange(64)
        while not (is_over.is_set() and times):
            begun = time.perf_counter()
            store.read(ids)
            times.append(time.perf_counter() - begun)

    reader = threading.Thread(target=read)
    reader.start()
    pushes = []
    for start in range(0, 2 * args.rows, args.ids):
        begun = time.thread_time()
        store.push(np.arange(start, start + args.ids), grads, SCALARS, distinct=True)
        pushes.append(time.thread_time() - begun)
    is_over.set()
    reader.join()
    store.close(remove=True)
    return {
        "rows": 2 * args.rows,
        "read_wall_ms_p999": 1e3 * _report.quantile(times, 0.999),
        "push_cpu_ms_max": 1e3 * max(pushes),
        "push_cpu_ms_median": 1e3 * (_report.median(pushes) or 0),
    }


def fill(path: str, rows: int) -> None:
    """Fill a partition, in a process that ends without closing it."""
    store = TableStore.create(path, TableSpec("recovery", 8, "adagrad", init=Normal(0.01), max_rows=2 * rows + (1 << 21)))
    grads = np.ones((100_000, 8), np.float32)
    for start in range(0, rows, len(grads)):
        store.push(np.arange(start, start + len(grads)), grads, SCALARS, distinct=True)
    os._exit(0)


def measure_recovery(rows: int, directory: Path) -> dict[str, Any]:
    """Measure how long opening takes, and the first reads of all over it."""
    path = directory / "recovery"
    subprocess.run([sys.executable, __file__, "--fill", str(path), "--recover", str(rows)], check=True)
    begun = time.perf_counter()
    store = TableStore.open(path)
    opened = time.perf_counter() - begun
    ids = np.random.default_rng(3).integers(0, rows, 10_000)
    store.read(ids)
    first_read = time.perf_counter() - begun - opened
    used = store.used_bytes
    assert store.counters()["rows"] == rows
    store.close(remove=True)
    return {"rows": rows, "open_s": opened, "first_read_s": first_read, "bytes_per_row": used / rows, "gigabytes": used / 1e9}


def criteria(speed: list[dict[str, Any]], growth: dict[str, Any], recovery: dict[str, Any]) -> list[_report.Criterion]:
    """Criteria of the bare store."""
    of = {(row["ids"], row["work"]): row["rows_per_s"] / 1e6 for row in speed}
    return [
        _report.Criterion(3, "zipf 1.05: million rows read per second", of["zipf 1.05", "read"], 8, at_least=True),
        _report.Criterion(3, "zipf 1.05: million rows updated per second", of["zipf 1.05", "update"], 4, at_least=True),
        _report.Criterion(3, "growth: longest push, for which others wait, ms", growth["push_cpu_ms_max"], 20),
        _report.Criterion(4, "bytes a row beside value and slots", speed[0]["bytes_beside_values_and_slots"], 32),
        _report.Criterion(4, "recovery: seconds", recovery["open_s"], 3),
    ]


def text(speed: list[dict[str, Any]], tables: dict[str, dict[str, Any]]) -> str:
    """Tables of the figures."""
    rows = [
        (
            row["ids"],
            row["work"],
            f"{row['rows_per_step']:.0f}",
            f"{row['rows_per_s'] / 1e6:.1f}",
            f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['reference_bytes_per_s'] / 1e9:.1f}",
            f"{row['share']:.2f}",
        )
        for row in speed
    ]
    memory = {name: speed[0][name] for name in ("bytes_beside_values_and_slots", "spare_bytes_per_row")}
    others = [
        (f"{table}: {name}", f"{value:.3f}") for table, of in {"memory": memory, **tables}.items() for name, value in of.items()
    ]
    return "\n\n".join(
        [
            _report.table(("ids", "work", "rows a step", "M rows/s", "GB/s", "reference GB/s", "share"), rows, words=2),
            _report.table(("", ""), others),
        ]
    )


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__, rows=1_000_000, dim=64, ids=10_000)
    parser.add_argument("--steps", type=int, default=40, help="of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the quickest counts (default %(default)s)")
    parser.add_argument("--recover", type=int, default=2_000_000, help="rows of the partition to recover (default %(default)s)")
    parser.add_argument("--directory", default="/dev/shm", help="where files lie (default %(default)s)")
    parser.add_argument("--fill", help="for this program's own use")
    args = parser.parse_args()
    if args.fill:
        fill(args.fill, args.recover)
    with tempfile.TemporaryDirectory(dir=args.directory) as made:
        directory = Path(made)
        speed = measure_speed(args, directory)
        _report.progress("worker, catching up")
        worker, late = measure_worker(args), measure_catching_up(args, directory)
        _report.progress("growth")
        # The quickest of some: a pause of the store's own is there each time.
        growth = min((measure_growth(args, directory) for _ in range(3)), key=lambda row: row["push_cpu_ms_max"])
        _report.progress("recovery")
        recovery = measure_recovery(args.recover, directory)
    checked = criteria(speed, growth, recovery)
    tables = {"worker": worker, "catching up": late, "growth": growth, "recovery": recovery}
    print(text(speed, tables) + "\n\n" + _report.criteria_table(checked))
    _report.write_json(args.json, {"speed": speed, **tables}, checked)


if __name__ == "__main__":
    main()
