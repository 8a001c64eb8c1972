"""psdctl top, the dashboard, psdctl status and Prometheus, of one job: they agree on every number that they share."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_watch_dashboard import dashboard

import psd_client
from psd.cli.psdctl import main
from psd.contract import facts
from psd.contract.config import parse_servers
from psd.contract.credentials import Credentials
from psd.contract.fact import Fact
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler

PARAMS = {"a": np.zeros(300, np.float32), "b": np.zeros(200, np.float32)}
TABLE = psd_client.Table("items", dim=4, optimizer=psd_client.RowwiseAdagrad(lr=0.1))

VOLATILE = {"at", "uptime_s", "cpu_s", "cpu_share", "memory_bytes", "last_seen_s", "checkpoint_age_s", "version_age_s"}
"""What changes from one question to the next, also while a job rests."""

OF_TWO_LOOKS = {"has_rates", "state", "headline", "limit"}
"""What is known of a whole job after two looks alone, as rates are; psdctl status has one."""

LOGGED = 12
"""Losses that `train` logs; a thread of each worker sends them when it can."""


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """A shard's metrics: the samples by their names and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if key != "shard")): sample.value
        for family in families
        for sample in family.samples
    }


def train(servers: str) -> list[Any]:
    """Six steps of two workers, one of which is refused once; both stay."""

    def work(rank: int) -> Any:
        ps = psd_client.connect(servers, rank, 2, transport="tcp")
        ps.declare(PARAMS, psd_client.Adam(lr=0.1), tables=[TABLE])
        for step in range(6):
            ids = np.arange(step, step + 3) + 2 * rank
            rows = ps.tables["items"].pull(ids)
            ps.push_pull(PARAMS, tables={"items": (ids, np.ones_like(rows))})
            ps.log(ps.clock, loss=1 / ps.clock)
        ps.barrier("trained")
        return ps

    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(work, range(2)))
    with pytest.raises(psd_client.SpecMismatch):
        psd_client.connect(servers, 0, 3)
    return workers


def at_rest(value: Any) -> Any:
    """The same without what changes while the job rests."""
    if isinstance(value, dict):
        return {name: at_rest(item) for name, item in value.items() if name not in VOLATILE}
    return [at_rest(item) for item in value] if isinstance(value, list) else value


def names(value: Any) -> Any:
    """The names of a JSON, as deep as it goes."""
    if isinstance(value, dict):
        return {name: names(item) for name, item in value.items()}
    return [names(item) for item in value] if isinstance(value, list) else None


def of_one_look(value: Any, like: Any) -> Any:
    """A JSON of two looks as one look would have it: where that does not know a number, null."""
    if isinstance(value, dict):
        return {name: of_one_look(item, like[name]) for name, item in value.items()}
    if isinstance(value, list) and isinstance(like, list):
        return [of_one_look(item, other) for item, other in zip(value, like, strict=True)]
    return None if like is None else value


def wrong_metrics(shards: list[dict[str, Any]], scrapes: list[Any], workers: list[dict[str, Any]]) -> list[str]:
    """Numbers of the catalogue whose metrics say something else, or are not there."""
    wrong = []

    def compare(fact: Fact, said: float, labels: dict[str, str], of: list[Any], merge: Any) -> None:
        known = {**fact.labels, **labels}
        series = [
            [v for (name, own), v in scrape.items() if name == fact.metric_name and own >= {*known.items()}] for scrape in of
        ]
        found = merge([sum(values) for values in series if values] or [0])
        if not any(series) or found != pytest.approx(said):
            wrong.append(f"{fact.name}: {said}, {fact.metric} {known}: {found}")

    def shown(rows: Any) -> list[Fact]:
        return [fact for fact in rows if fact.metric and fact.name not in VOLATILE]

    for shard, scrape in zip(shards, scrapes, strict=True):
        for fact in shown(facts.SHARD):
            if shard[fact.name] is not None:
                labels = {key: value for key, value in fact.labels.items() if value}
                compare(replace(fact, metric=fact.metric_name), shard[fact.name], labels, [scrape], sum)
    for worker in workers:
        for fact in (fact for fact in shown(facts.WORKER) if worker[fact.name] is not None):
            compare(fact, worker[fact.name], {"rank": str(worker["rank"])}, scrapes, max)
    return wrong


def table_in(text: str) -> list[dict[str, str]]:
    """The rows of the shards in a text, by the titles of their columns, which two blanks divide at least."""
    titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in text[text.index("SHARD ") :].split("\n\n")[0].splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_all_four_say_the_same_of_one_job(
    cluster: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every total; rates, ages and sizes of processes change from one question to the next."""
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0.0)
    started = cluster(2, metrics_port=0, lease_s=60.0, checkpoint_dir=str(tmp_path), checkpoint_steps=6)
    workers = train(started.servers)
    stored = ("psd_checkpoints_total", frozenset())
    while not all(scraped(shard.metrics_port)[stored] for shard in started.shards):
        pass  # the last checkpoint is being written
    where = ("--servers", started.servers)

    async def ask_dashboard() -> dict[str, Any]:
        class Job:
            sampler = Sampler(Asker(parse_servers(started.servers), Credentials()))

        async with dashboard(Job) as address, aiohttp.ClientSession() as session:
            found: dict[str, Any] = {"now": None, "curves": {}}
            while not (found["now"] or {}).get("has_rates") or len(found["curves"].get("loss", ())) < LOGGED:
                async with session.get(f"{address}/api/job") as reply:
                    found = await reply.json()
            return found

    def printed(command: str) -> dict[str, Any]:
        assert main([command, "--json", *where]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    shown = asyncio.run(ask_dashboard())
    status, top = printed("status"), printed("top")
    only_top = {name: top.pop(name) for name in ("curves", "events")}
    scrapes = [scraped(shard.metrics_port) for shard in started.shards]

    assert names(status) == names(top) == names(shown["now"])
    assert at_rest(shown["now"]) == at_rest(top)
    for one_look in (status, top):
        for name in OF_TWO_LOOKS:
            one_look.pop(name)
    assert at_rest(status) == at_rest(of_one_look(top, status))
    assert (status["clock"], sum(shard["pushes_accepted"] for shard in status["shards"])) == (6, 24)
    assert status["tables"][0]["rows"] > 0
    assert status["shards"][0]["requests_refused"] == 1
    assert {fact.name for fact in facts.SHARD if fact.source and status["shards"][0][fact.name] is None} == set()
    assert wrong_metrics(status["shards"], scrapes, status["workers"]) == []
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--once", *where]) == 0
    in_top = table_in(capsys.readouterr().out)
    assert main(["status", *where]) == 0
    in_status = table_in(capsys.readouterr().out)
    for title in ("SHARD", "PARAMETERS", "SLOTS", "VERSION", "ADDRESS"):
        assert [row[title] for row in in_top] == [row[title] for row in in_status], title
    assert main(["top", "--once", *where]) == 0
    rows = capsys.readouterr().out.partition("RANK")[2].splitlines()[1:3]
    assert [row.split()[:3] for row in rows] == [["0", "live", "6"], ["1", "live", "6"]]
    last = {point[0]: point[2] for point in shown["curves"]["loss"]}
    assert last[only_top["curves"]["loss"]["rank"]] == only_top["curves"]["loss"]["value"] == pytest.approx(1 / 6, abs=1e-5)
    for ps in workers:
        ps.close()
