"""psdctl top, the dashboard, psdctl status and Prometheus, of one job: they agree on every number that they share."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_watch_dashboard import dashboard

import psd_client
from psd.cli.ctl import main
from psd.contract.config import parse_servers
from psd.contract.credentials import Credentials
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler

PARAMS = {"a": np.zeros(300, np.float32), "b": np.zeros(200, np.float32)}
TABLE = psd_client.Table("items", dim=4, optimizer=psd_client.RowwiseAdagrad(lr=0.1))

OF_SHARDS = {
    "parameter_bytes": "psd_parameter_bytes",
    "slot_bytes": "psd_slot_bytes",
    "pushes_accepted": ("psd_pushes_total", "accepted"),
    "pushes_late": ("psd_pushes_total", "late"),
    "pushes_duplicate": ("psd_pushes_total", "duplicate"),
    "requests_refused": "psd_request_errors_total",
    "pulls": "psd_pulls_total",
    "bytes_received": "psd_received_bytes_total",
    "bytes_sent": "psd_sent_bytes_total",
    "restarts": "psd_shard_restarts_total",
    "updates": "psd_block_updates_total",
    "rounds": "psd_version_max",
}
"""Numbers of a shard, as a look has them -> the metric, and the label's value if there are several."""

IN_STATUS = {"updates": "rounds", "rounds": "version_max"}
"""Those that psdctl status has by another name."""

OF_CALLS = {"barrier": "psd_barrier_seconds_count"}
"""Kinds of calls that have a metric of their own."""

LOGGED = 12
"""Losses that `train` logs; a thread of each worker sends them when it can."""

OF_TABLES = ("rows", "bytes", "reads", "hits")


class Scrape:
    """One shard's metrics."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self._known = {family.name for family in families}
        self._samples = [sample for family in families for sample in family.samples]

    def number(self, name: str, label: str = "") -> float:
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and label in ("", *(value for key, value in sample.labels.items() if key != "shard"))
        ]
        assert name.removesuffix("_total").removesuffix("_count") in self._known, f"there is no {name}"
        return sum(found)


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


def of_looks(now: dict[str, Any]) -> dict[str, Any]:
    """Numbers that psdctl top and the dashboard share."""
    shards = [
        {name: shard[name] for name in OF_SHARDS} | {"calls": {call["call"]: call["count"] for call in shard["calls"]}}
        for shard in now["shards"]
    ]
    workers = {worker["rank"]: (worker["state"], worker["clock"], round(worker["awaited_s"], 9)) for worker in now["workers"]}
    tables = {table["name"]: [table[name] for name in OF_TABLES] for table in now["tables"]}
    return {"clock": now["clock"], "shards": shards, "workers": workers, "tables": tables}


def of_status(found: dict[str, Any]) -> dict[str, Any]:
    statuses = [shard["status"] for shard in found["shards"]]
    shards = [
        {name: status[IN_STATUS.get(name, name)] for name in OF_SHARDS}
        | {"calls": {call["call"]: call["count"] for call in status["calls"]}}
        for status in statuses
    ]
    workers = {
        worker["rank"]: (worker["state"].removeprefix("WORKER_STATE_").lower(), worker["clock"], round(worker["awaited_s"], 9))
        for worker in found["workers"]
    }
    tables: dict[str, list[int]] = {}
    for table in (table for status in statuses for table in status["tables"]):
        before = tables.get(table["name"], [0] * len(OF_TABLES))
        tables[table["name"]] = [total + table[name] for total, name in zip(before, OF_TABLES, strict=True)]
    return {"clock": found["clock"], "shards": shards, "workers": workers, "tables": tables}


def of_metrics(scrapes: list[Scrape], ranks: int, calls: list[dict[str, int]]) -> dict[str, Any]:
    def number(scrape: Scrape, metric: str | tuple[str, str]) -> float:
        return scrape.number(metric) if isinstance(metric, str) else scrape.number(*metric)

    shards = [
        {name: number(scrape, metric) for name, metric in OF_SHARDS.items()}
        | {"calls": {call: number(scrape, OF_CALLS.get(call, ("psd_call_seconds_count", call))) for call in kinds}}
        for scrape, kinds in zip(scrapes, calls, strict=True)
    ]
    steps = [max(scrape.number("psd_worker_step", str(rank)) for scrape in scrapes) for rank in range(ranks)]
    awaited = [
        max(round(scrape.number("psd_worker_awaited_seconds_total", str(rank)), 9) for scrape in scrapes)
        for rank in range(ranks)
    ]
    assert {scrape.number("psd_workers", "live") for scrape in scrapes} == {ranks}
    rows, size = (sum(scrape.number(f"psd_table_{name}", "items") for scrape in scrapes) for name in ("rows", "bytes"))
    hits, misses = (sum(scrape.number("psd_table_reads_total", result) for scrape in scrapes) for result in ("hit", "miss"))
    return {
        "clock": min(steps),
        "shards": shards,
        "workers": {rank: ("live", steps[rank], awaited[rank]) for rank in range(ranks)},
        "tables": {"items": [rows, size, hits + misses, hits]},
    }


def table_in(text: str) -> list[dict[str, str]]:
    """The rows of the shards in a text, by the titles of their columns, which two blanks divide at least."""
    titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in text[text.index("SHARD ") :].split("\n\n")[0].splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_all_four_say_the_same_of_one_job(
    cluster: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every total; rates, ages and sizes of processes change from one question to the next."""
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0.0)
    started = cluster(2, metrics_port=0, lease_s=60.0)
    workers = train(started.servers)
    where = ("--servers", started.servers)

    async def ask_dashboard() -> dict[str, Any]:
        class Job:
            sampler = Sampler(Asker(parse_servers(started.servers), Credentials()))

        async with dashboard(Job) as address, aiohttp.ClientSession() as session:
            found: dict[str, Any] = {"now": None, "curves": {}}
            while found["now"] is None or len(found["curves"].get("loss", ())) < LOGGED:
                async with session.get(f"{address}/api/job") as reply:
                    found = await reply.json()
            return found

    def printed(command: str) -> dict[str, Any]:
        assert main([command, "--json", *where]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    shown = asyncio.run(ask_dashboard())
    top, status = printed("top"), of_status(printed("status"))
    scrapes = [Scrape(shard.metrics_port) for shard in started.shards]
    metrics = of_metrics(scrapes, 2, [shard["calls"] for shard in status["shards"]])

    assert status["clock"] == 6
    assert sum(shard["pushes_accepted"] for shard in status["shards"]) == 24
    assert status["tables"]["items"][0] > 0
    assert status["shards"][0]["requests_refused"] == 1
    assert of_looks(top) == status
    assert of_looks(shown["now"]) == status
    assert metrics == status
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--once", *where]) == 0
    in_top = table_in(capsys.readouterr().out)
    assert main(["status", *where]) == 0
    in_status = table_in(capsys.readouterr().out)
    for title in ("SHARD", "PARAMETERS", "SLOTS", "ADDRESS"):
        shown_in_both = [[row[title].partition("/")[0] for row in each] for each in (in_top, in_status)]
        assert shown_in_both[0] == shown_in_both[1], title
    assert main(["top", "--once", *where]) == 0
    rows = capsys.readouterr().out.partition("RANK")[2].splitlines()[1:3]
    assert [row.split()[:3] for row in rows] == [["0", "live", "6"], ["1", "live", "6"]]
    last = {point[0]: point[2] for point in shown["curves"]["loss"]}
    assert last[top["curves"]["loss"]["rank"]] == top["curves"]["loss"]["value"] == pytest.approx(1 / 6, abs=1e-5)
    for ps in workers:
        ps.close()
