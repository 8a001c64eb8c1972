"""A byte that has changed in what was last committed of a partition is found when it is opened, however the process ended."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_rules import Case
from killed_vectors import change, copy_sparse_file
from table_model import SGD, check_places, rows_of, spec_of

from psd_core._store_format import ArenaCorrupt
from psd_core.table import TableStore

CONTROL, RECORD, INDEX, OTHER_INDEX, SIGHTINGS, HEADS, ROWS, SPARES, REMOVALS, LOG = range(10)
HEAD_BYTES, USED = 32, range(8, 16)
LOG_MAX = 16384
SAMPLES = 60
"""Bytes of each part that are changed in turn."""

NAMED = {
    "root": "root",
    "heads": "row of place",
    "rows": "row of place",
    "removals": "removals",
    "log": "log",
    "record": "record",
}
"""What the refusal names for sure. A place that index or spares do not name may be named itself."""

ADAM = Case("adam", (0.1, 0.9, 0.99, 1e-8, 0.0), ("amsgrad",))
DECAYING = Case("adagrad", (0.5, 0.0, 0.125, 1e-8), ())


@dataclass
class Left:
    """What a process has left: its file, and the bytes of it that count, by what they are."""

    path: Path
    case: Case
    kept: Path
    parts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def data(self) -> bytes:
        return self.kept.read_bytes()

    def opened(self, place: int = 0, bits: int = 0) -> TableStore:
        """The store, some bits of whose byte at a place have changed."""
        copy_sparse_file(self.kept, self.path)
        if bits:
            change(self.path, place, bits)
        return TableStore.open(self.path)

    def state(self, store: TableStore) -> list[object]:
        """All that a caller can see of a partition but marks of use, and what it does with the next step."""
        check_places(store)
        rows = rows_of(store)
        seen: list[object] = [rows, store.notes().tolist()]
        seen.append({name: value for name, value in store.counters().items() if name not in ("reads", "hits")})
        with store.snapshot(None) as snapshot:
            seen.append(snapshot.history.tobytes())
        first, end = store._partition.removals()
        removed = np.empty(end - first, np.uint64)
        store._partition.removed(first, removed)
        seen.append(removed.tolist())
        some = np.array(heapq.nsmallest(50, rows), np.uint64)
        store.push(some, np.ones((len(some), store.spec.dim), np.float32), self.case.named)
        seen.append(rows_of(store))
        return seen


def words(data, region):
    start, size = region
    return start, np.frombuffer(data, np.uint64, size // 8, start)


def parts_of(store, data, is_applied):
    """The places in the file of what was committed."""
    regions, places = store._partition.regions, store._partition.places()
    control, half = regions[CONTROL][0], (regions[CONTROL][1] - 128) // 2
    (commit,) = np.frombuffer(data, np.uint64, 1, control)
    root = control + 128 + int(commit) % 2 * half
    row_bytes = 4 * store.spec.layout.width - (2 * (store.spec.dim // 2 * 2) if store.spec.dtype == "bfloat16" else 0)
    first, removals = store._partition.removals()
    length, entry_bytes = regions[REMOVALS][1] // 8, regions[LOG][1] // (2 * LOG_MAX)
    watched, rows = np.setdiff1d(np.arange(HEAD_BYTES), USED), np.array(places["rows"])
    parts = {
        "superblock": [at for at in range(4096) if data[at]],
        "commit": [control],
        "root": range(root, root + half),
        "heads": (regions[HEADS][0] + HEAD_BYTES * rows[:, None] + watched).ravel(),
        "rows": (regions[ROWS][0] + row_bytes * rows[:, None] + np.arange(row_bytes)).ravel(),
        "removals": [regions[REMOVALS][0] + number % length * 8 + at for number in range(first, removals) for at in range(8)],
        "log": range(regions[LOG][0], regions[LOG][0] + entry_bytes * store._partition.logged),
    }
    if is_applied:  # else it is stored again
        parts["spares"] = range(regions[SPARES][0], regions[SPARES][0] + 4 * len(places["spares"]))
    else:
        start = regions[RECORD][0]
        flips, backs = np.frombuffer(data, np.uint64, 2, start).tolist()
        parts["record"] = range(start, start + 24 + 16 * flips + 4 * backs)
    if is_applied and not store._partition.is_moving:
        for region in (INDEX, OTHER_INDEX):
            start, entries = words(data, regions[region])
            numbers = np.flatnonzero((entries & 0xFFFFFFFF != 0) & (entries & 0xFFFFFFFF != 0xFFFFFFFF))
            parts.setdefault("index", []).extend((start + 8 * numbers[:, None] + np.arange(8)).ravel().tolist())
    return {name: found for name, found in parts.items() if len(found)}


def trained(path, case, *, dies_in=None, rows_max=250, new=35, pushes=14, **options):
    """The file after pushes that grow the index and evict, removals, expiry; or as a death between a push's commit and its end
    leaves it."""
    kept = path.with_name("kept")

    def crash_point(point):
        if point == "backs" and number == dies_in and not kept.exists():
            copy_sparse_file(path, kept)

    options |= {"notes": 2, "push_max": 4096}
    spec = spec_of(case, max_rows=rows_max, **options)
    rng, number = np.random.default_rng(5), 0
    store = TableStore.create(path, spec, crash_point=crash_point)
    for number in range(1, pushes):
        ids = np.concatenate([rng.integers(0, rows_max, 20), 10_000 + new * number + np.arange(new)])
        grads = rng.standard_normal((len(ids), spec.dim)).astype(np.float32)
        scalars = case.named | {"lr": 0.5 ** (number % 7)}
        store.push(ids, grads, scalars, clock=number, notes=np.array([number, 1 << 63], np.uint64))
        if kept.exists():
            break
    if is_applied := not kept.exists():
        store.remove(np.arange(0, rows_max, 7))
        store.write(np.arange(20), np.ones((20, spec.layout.width), np.float32), clock=pushes)
        store.expire(pushes, 6)
        store.read(np.arange(rows_max), clock=pushes)
    store.close(remove=False)  # as death leaves it
    if is_applied:
        copy_sparse_file(path, kept)
    return seen(Left(path, case, kept), is_applied=is_applied)


def seen(left, *, is_applied=True):
    """What a process has left, with its parts."""
    found = left.opened()
    left.parts = parts_of(found, left.data, is_applied)
    found.close(remove=False)
    return left


def growing(path):
    """A partition whose rows are partly in its next index."""
    spec = spec_of(SGD, dim=1, push_max=16384, max_rows=85_000)
    store = TableStore.create(path, spec)
    start, count = 0, 13_000
    while not store._partition.is_moving:
        store.push(np.arange(start, start + count), np.ones((count, 1), np.float32), SGD.named, distinct=True)
        start, count = start + count, 32
    store.close(remove=False)
    kept = path.with_name("kept")
    copy_sparse_file(path, kept)
    left = seen(Left(path, SGD, kept))
    assert "index" not in left.parts  # it is moving
    return left


LEFT = {
    "Adam in bfloat16": lambda path: trained(path, ADAM, dtype="bfloat16"),
    "rows that catch up": lambda path: trained(path, DECAYING, updates="catch_up"),
    "a ring of removals that has gone around": lambda path: trained(path, SGD, rows_max=900, new=800, pushes=12),
    "a commit that was not applied": lambda path: trained(path, ADAM, dies_in=5),
    "an index that grows": growing,
}


@pytest.fixture(params=LEFT)
def left(request, memory_path):
    return LEFT[request.param](memory_path / "table")


def test_every_byte_of_what_was_committed_is_watched(left):
    """Root, index, heads, rows, spares, removals, log, and the record of a commit that was not applied."""
    rng = random.Random(11)
    assert {"superblock", "commit", "root", "heads", "rows"} <= set(left.parts)
    for part, places in left.parts.items():
        for number in sorted(rng.sample(range(len(places)), min(SAMPLES, len(places)))):
            place = int(places[number])
            with pytest.raises(ArenaCorrupt) as refused:
                left.opened(place, rng.randrange(1, 256)).close(remove=False)
            assert str(refused.value).startswith(f"{left.path}: {NAMED.get(part, '')}"), (part, place)


def test_a_change_of_any_other_byte_changes_no_row(left):
    """Marks of use, places that are spare, what lies behind the last entry: it is refused, or everything is as it was."""
    rng = random.Random(12)
    store = left.opened()
    regions, expected = store._partition.regions, left.state(store)
    store.close(remove=False)
    refused = 0
    for start, size in [(0, len(left.data)), *regions]:
        data = np.frombuffer(left.data, np.uint8, size, start)
        used = start + np.flatnonzero(data)
        candidates = used if len(used) else [start]
        for place in [rng.choice(candidates) for _ in range(15)] + [start + rng.randrange(max(1, size)) for _ in range(5)]:
            try:
                store = left.opened(min(place, len(left.data) - 1), 1 << rng.randrange(8))
            except ArenaCorrupt:
                refused += 1
                continue
            assert left.state(store) == expected, place
            store.close(remove=False)
    assert refused > 40


def test_a_mark_of_use_that_has_changed_is_believed(memory_path):
    """It is stored in place, by whoever reads, and decides no more than which row goes."""
    left = LEFT["Adam in bfloat16"](memory_path / "table")
    store = left.opened()
    start, place = store._partition.regions[HEADS][0], store._partition.places()["rows"][3]
    expected = left.state(store)
    store.close(remove=False)

    store = left.opened(start + HEAD_BYTES * place + USED[0], 0x40)

    assert left.state(store) == expected
    store.close(remove=True)


def test_a_page_of_zeros_is_found_in_rows_heads_and_index(memory_path):
    """Damage is seldom one byte."""
    left = LEFT["Adam in bfloat16"](memory_path / "table")
    whole = left.data
    for part in ("heads", "rows", "index", "spares"):
        start = left.parts[part][len(left.parts[part]) // 2] // 64 * 64
        left.kept.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
        with pytest.raises(ArenaCorrupt):
            left.opened()
