"""Readers in status, top, JSON and metrics: versions, lag, bytes; by real readers of real shards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import psd_client
from psd.cli.ctl.report import as_text
from psd.cli.psdctl import main
from psd.rim.metrics import Metrics, ShardFamilies
from psd.v1 import control_pb2 as pb
from psd.watch.merging import Answer
from psd.watch.sampler import STUCK_S, Sampler
from psd.watch.snapshot import JobSnapshot
from psd.watch.top.lines import reader_lines

ONES = {"w": np.ones(500_000, np.float32)}


def status(servers: str, capsys: Any) -> dict[str, Any]:
    assert main(["status", "--servers", servers, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_reader_is_shown_with_its_version_its_lag_and_its_bytes(cluster: Callable[..., Any], capsys: Any) -> None:
    running = cluster(2)
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
        psd_client.connect(running.servers, role="reader", wait_timeout=60, transport="tcp") as other,
    ):
        ps.declare({"w": np.zeros(500_000, np.float32)}, psd_client.SGD(lr=1.0))
        assert status(running.servers, capsys)["readers"] == []
        ps.push_pull(ONES)
        reader.name = "evaluation"
        reader.pull()
        ps.push_pull(ONES)
        ps.push_pull(ONES)
        waiting = threading.Thread(target=other.pull, kwargs={"newer_than": 3})
        waiting.start()
        wait_until(lambda: [r["state"] for r in status(running.servers, capsys)["readers"]] == ["idle", "waiting"], "it waits")

        found = status(running.servers, capsys)
        first, second = found["readers"]
        assert (found["version"], found["version_age_s"] >= 0) == (3, True)
        assert (first["name"], first["version"], first["behind"], first["reads"]) == ("evaluation", 1, 2, 1)
        assert 2_000_000 <= first["sent_bytes"] < 2_010_000
        assert first["lag_s"] == first["age_s"] > 0
        assert (second["name"], second["version"], second["behind"], second["reads"]) == (other.name, None, None, 0)
        ps.push_pull(ONES)
        waiting.join(100)
        assert [r["transport"] for r in status(running.servers, capsys)["readers"]] == ["shm", "tcp"]
        assert [(r["version"], r["behind"]) for r in status(running.servers, capsys)["readers"]] == [(1, 3), (4, 0)]

        assert main(["status", "--servers", running.servers]) == 0
        lines = capsys.readouterr().out.splitlines()
        (heading,) = (line for line in lines if line.startswith("READER"))
        assert heading.split()[:5] == ["READER", "STATE", "VERSION", "BEHIND", "LAG"]
        assert next(line for line in lines if line.startswith("evaluation")).split()[:4] == ["evaluation", "idle", "1", "3"]
        metrics = Metrics(ShardFamilies(running.shards[0].shard, lambda: None, dict)).render().decode()
        assert 'psd_readers_seen{shard="0"} 2.0' in metrics
        assert "psd_version_age_seconds{" in metrics
        assert "psd_reader_sent_bytes_total{" in metrics
        assert 'psd_reader_fetch_seconds{shard="0"} 0.0' in metrics


def test_a_limit_on_readers_names_its_flag(cluster: Callable[..., Any]) -> None:
    from psd.contract.config import Limits

    running = cluster(1, limits=Limits(readers_max=1))
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader") as reader,
        psd_client.connect(running.servers, role="reader", retry_timeout=0) as other,
    ):
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        reader.pull()
        with pytest.raises(psd_client.PsdError, match="--max-readers"):
            other.pull(timeout=0.5)
        reader.pull()


class Replying:
    """Shards that answer what a test says."""

    def __init__(self, *replies: pb.StatusReply) -> None:
        self._replies = replies

    def ask(self, _timeout_s: float) -> list[Answer]:
        return [Answer(f"shard-{i}", reply) for i, reply in enumerate(self._replies)]

    def curves(self, _after: int, _timeout_s: float) -> None:
        return None


def reply(index: int, **numbers: float) -> pb.StatusReply:
    own = {"version_min": 9.0, "version_age_s": 3.0 - index}
    reader = pb.ReaderStatus(id=5, name="r", is_fetching=index == 1, numbers=numbers)
    return pb.StatusReply(shard_index=index, shard_count=2, consistency="sync", numbers=own, readers=[reader])


def look(*replies: pb.StatusReply) -> JobSnapshot:
    return Sampler(Replying(*replies), has_curves=False).look()


def test_what_shards_know_of_a_reader_is_put_together() -> None:
    """It has the version that all have sent it; the bytes of all; the slowest transfer."""
    now = look(
        reply(0, version=8, age_s=4, reads=3, sent_bytes=100, fetch_s=1, last_seen_s=2),
        reply(1, version=7, age_s=5, reads=2, sent_bytes=50, fetch_s=2, last_seen_s=1),
    )

    assert (now.version, now.version_age_s) == (9, 2)
    (reader,) = now.readers
    assert reader.state == "fetching"
    kept = ("version", "behind", "lag_s", "reads", "sent_bytes", "fetch_s", "last_seen_s")
    assert [reader.numbers[name] for name in kept] == [7, 2, 4, 3, 150, 2, 1]


def test_a_reader_whose_transfer_does_not_end_is_stuck_and_comes_first() -> None:
    now = look(reply(0, version=8), reply(1, version=8, fetch_s=STUCK_S + 1))
    (reader,) = now.readers
    assert reader.state == "stuck"

    assert now.lagging == ("reader r is stuck: a transfer to it has taken 31 s, and it is 1 version behind",)
    many = tuple(replace(reader, id=f"{n}", name=f"r{n}", state="idle", numbers={"behind": n}) for n in range(9))
    lines = reader_lines(replace(now, readers=(*many, reader)), 100, 3)
    assert [line.split()[0] for line in lines] == ["READER", "r", "r8", "r7", "and", "reader"]
    assert lines[-2] == "and 7 more readers"
    assert lines[-1] == now.lagging[0]


def test_a_reader_that_no_longer_asks_is_behind_and_one_that_waits_is_not() -> None:
    """Whoever waits for every tenth version, or has just asked, is not told of; a relay says whom it takes with it."""
    idle = {"version": 2, "age_s": 400, "fetch_s": 1, "last_seen_s": STUCK_S + 10, "relayed_readers": 31}
    behind = pb.StatusReply(shard_count=1, consistency="sync", numbers={"version_min": 9.0})
    behind.readers.add(id=1, name="relay a:1", numbers=idle)
    behind.readers.add(id=2, name="follower", is_waiting=True, numbers=idle)
    behind.readers.add(id=3, name="evaluation", numbers={**idle, "last_seen_s": STUCK_S - 1})
    behind.readers.add(id=4, name="up to date", numbers={**idle, "version": 9})

    now = look(behind)

    assert [reader.state for reader in now.readers] == ["behind", "waiting", "idle", "idle"]
    assert now.lagging == ("reader relay a:1 is 7 versions behind, and has not asked for 40 s; 31 readers read through it",)
    assert reader_lines(now, 200)[-1] == now.lagging[0]
    assert now.lagging[0] in as_text(now).splitlines()
