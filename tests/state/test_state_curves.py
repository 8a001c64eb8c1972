"""Curves: the points that shard 0 keeps of what workers report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from shard_driver import Driver

from psd.contract.errors import InvalidRequest, SessionFenced, WrongShard
from psd.state import curves
from psd.state.curves import Curves, PointBatch
from psd.v1 import control_pb2


def batch(values: Sequence[float], *, first: int = 0, name: str = "loss", step: int = 0, ago_s: float = 0.0) -> PointBatch:
    count = len(values)
    return PointBatch(first, [name], [0] * count, list(range(step, step + count)), values, [ago_s] * count)


def kept(found: Curves, after: int = 0) -> dict[tuple[int, str], list[float]]:
    """All values after a number, page by page."""
    values: dict[tuple[int, str], list[float]] = {}
    more = True
    while more:
        after, more, parts = found.read(after)
        for part in parts:
            values.setdefault((part.rank, part.name), []).extend(part.values)
    return values


def test_points_are_kept_by_worker_and_series_and_read_from_where_one_has_stopped():
    """The shard counts all points, so that a reader asks for what is new."""
    found = Curves(lambda: 100.0, 256)
    found.add(1, 5, batch([0.5, math.inf], ago_s=3.0))
    latest, more, (part,) = found.read(0)
    assert (latest, more, part.rank, part.name, list(part.steps), list(part.ago_s)) == (2, False, 1, "loss", [0, 1], [3.0, 3.0])

    found.add(0, 6, batch([0.1]))
    found.add(1, 5, batch([0.25], first=2, step=2))

    assert kept(found, latest) == {(0, "loss"): [0.1], (1, "loss"): [0.25]}
    assert found.read(4) == (4, False, [])


def test_what_a_connection_sends_again_is_not_kept_twice():
    """The answer was lost, and the worker sends the same points, and further ones. Another process of the rank begins at 0."""
    found = Curves(lambda: 0.0, 256)
    found.add(0, 5, batch([1.0, 2.0]))
    found.add(0, 5, batch([1.0, 2.0, 3.0]))
    found.add(0, 5, batch([2.0], first=1))
    found.add(0, 5, batch([4.0], first=3))
    found.add(0, 8, batch([5.0]))

    assert kept(found) == {(0, "loss"): [1.0, 2.0, 3.0, 4.0, 5.0]}


def test_memory_is_bounded_for_one_series_and_for_very_many(monkeypatch: pytest.MonkeyPatch):
    """The last points stay; of each series the fewer, the more series there are, also of those that have ended."""
    monkeypatch.setattr(curves, "POINTS_MAX", 100)
    monkeypatch.setattr(curves, "ALL_POINTS_MAX", 400)
    monkeypatch.setattr(curves, "READ_POINTS_MAX", 50)
    found = Curves(lambda: 0.0, 256)
    for value in range(1000):
        found.add(0, 5, batch([float(value)], first=value))
    (values,) = kept(found).values()
    assert values == [float(value) for value in range(1000 - len(values), 1000)]
    assert 100 <= len(values) <= 125

    for rank in range(1, 20):
        for first in (0, 50, 100):
            found.add(rank, 5, batch([0.0] * 50, first=first))
    assert sum(map(len, kept(found).values())) < 1.25 * 1.125 * 400


def test_the_job_ends_where_the_last_of_its_workers_says():
    """What a worker has said last holds for it; a request that says nothing of it changes nothing."""
    found = Curves(lambda: 0.0, 256)
    assert found.total == 0
    found.add(0, 5, batch([1.0])._replace(total=100))
    found.add(1, 6, batch([])._replace(total=80))
    found.add(0, 5, batch([2.0], first=1))
    assert found.total == 100

    found.add(0, 5, batch([3.0], first=2)._replace(total=50))

    assert found.total == 80


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (PointBatch(0, ["a"], [0], [1], [], [0.0]), "columns of one length"),
        (batch([0.0] * 4097), "4097 points, the limit is 4096"),
        (PointBatch(0, ["a"], [1], [1], [0.0], [0.0]), "series: 1 is not below the number of names, 1"),
        (PointBatch(0, ["a"], [0], [1 << 53], [0.0], [0.0]), "steps: 9007199254740992 is above the limit"),
        (PointBatch(0, ["a\n"], [0], [1], [0.0], [0.0]), "control characters"),
        (PointBatch(0, [""], [0], [1], [0.0], [0.0]), "1 to 256 bytes"),
        (PointBatch(0, [f"s{i}" for i in range(64)], [], [], [], []), "more than 64 series"),
        (batch([0.0])._replace(total=1 << 53), "total: 9007199254740992 is above the limit"),
    ],
)
def test_what_does_not_fit_is_refused_whole(bad: PointBatch, match: str):
    """A worker of another kind may send anything."""
    found = Curves(lambda: 0.0, 256)
    found.add(0, 5, batch([1.0]))

    with pytest.raises(InvalidRequest, match=match):
        found.add(0, 5, bad)

    assert (kept(found), found.total) == ({(0, "loss"): [1.0]}, 0)


def test_only_workers_of_the_job_report_and_only_to_shard_0():
    """A session that has ended does not speak for its rank any more."""
    driver = Driver()
    a, _ = driver.start()
    request = control_pb2.LogRequest(caller=a.caller, names=["loss"], series=[0], steps=[3], values=[0.5], ago_s=[0.0])
    driver.shard.log(request)
    reply = driver.shard.curves(0)
    assert [(curve.rank, curve.name, list(curve.values)) for curve in reply.curves] == [(0, "loss", [0.5])]
    assert reply.incarnation == driver.core.incarnation

    driver.join(0)
    with pytest.raises(SessionFenced):
        driver.shard.log(request)
    with pytest.raises(WrongShard, match="kept by shard 0"):
        Driver(shard=1, shards=2).shard.curves(0)
