"""The metrics of a shard, as a scraper, a dashboard and an alert see them; and the server that shows them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from raw_client import RawWorker, failure, spec

import psd_client
from psd.contract import facts
from psd.rim import metrics_server
from psd.rim.metrics import WORKERS_MAX
from psd.rim.metrics_server import CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricsServer
from psd.state.counts import LANES
from psd.v1 import control_pb2, control_pb2_grpc

DEPLOY = Path(__file__).parents[2] / "deploy"

UNITS = ("_seconds", "_bytes", "_updates", "_info")
COUNTED = (
    *("psd_shard_state", "psd_timeline", "psd_waits", "psd_workers", "psd_worker_clock", "psd_open_rounds", "psd_readers_seen"),
    *("psd_version_min", "psd_version_max", "psd_bulk_connections", "psd_vectors"),
)
"""Gauges of things that are counted, and so have no unit."""


def scrape(port: int) -> dict[str, Metric]:
    """All metrics by name, as a scraper gets them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {family.name: family for family in families}
    assert len(found) == len(families), "a metric is exported twice"
    return found


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    samples = [s for family in metrics.values() for s in family.samples if s.name == name]
    assert samples, f"there is no {name}"
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


@pytest.fixture
def trained(cluster: Callable[..., Any], dial: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """A shard after eight rounds of two workers, a duplicate push, a refused one, a checkpoint and a barrier."""
    shard = cluster(1, metrics_port=0, checkpoint_dir=str(tmp_path), checkpoint_steps=8).shards[0]
    workers = [RawWorker(dial(shard.address), rank) for rank in range(2)]
    job = spec()
    declaring = threading.Thread(target=workers[1].declare, args=(job,))
    declaring.start()
    workers[0].declare(job)
    declaring.join()
    for clock in range(8):
        for worker in workers:
            worker.push(clock, [[1.0] * 3])
    workers[1].push(7, [[1.0] * 3])
    failure(workers[0].push, 9999, [[1.0] * 3])
    workers[0].pull(8)
    waiting = threading.Thread(target=workers[0].control.Barrier, args=(workers[0].barrier_request("b"),))
    waiting.start()
    workers[1].control.Barrier(workers[1].barrier_request("b"), timeout=100)
    waiting.join()
    return shard


def test_a_scrape_says_what_status_says(trained: Any, dial: Callable[..., Any], eventually: Callable[..., None]) -> None:
    """Both are read from the same counts; what status does not have follows from the calls that were made."""
    control = control_pb2_grpc.ControlServiceStub(dial(trained.address))
    eventually(lambda: value(scrape(trained.metrics_port), "psd_checkpoints_total") > 0, "a checkpoint is stored")

    metrics = scrape(trained.metrics_port)
    status = control.Status(control_pb2.StatusRequest(), timeout=100)

    status = facts.read(status, facts.SHARD)
    counted = {
        "psd_pushes_total": status["pushes_accepted"] + status["pushes_duplicate"] + status["pushes_late"],
        "psd_pulls_total": status["pulls"],
        "psd_request_errors_total": status["requests_refused"],
        "psd_received_bytes_total": status["received_bytes"],
        "psd_sent_bytes_total": status["sent_bytes"],
        "psd_saved_bytes_total": status["saved_bytes"],
        "psd_updates_total": status["updates"],
        "psd_version_max": status["version_max"],
        "psd_arena_used_bytes": status["arena_used_bytes"],
        "psd_parameter_bytes": status["parameter_bytes"],
        "psd_checkpoint_bytes": status["checkpoint_bytes"],
    }
    assert {name: value(metrics, name) for name in counted} == counted
    assert value(metrics, "psd_pushes_total", result="duplicate") == 1
    assert value(metrics, "psd_request_errors_total", reason="InvalidRequest", code="INVALID_ARGUMENT") == 1
    assert value(metrics, "psd_call_seconds_count", transport="grpc", call="push") == 17
    assert value(metrics, "psd_call_seconds_count", transport="grpc", call="pull") == 1
    assert value(metrics, "psd_call_seconds_count") == 18
    assert value(metrics, "psd_round_seconds_count") == 8
    assert (value(metrics, "psd_barrier_seconds_count"), value(metrics, "psd_barriers_opened_total")) == (2, 1)
    assert value(metrics, "psd_workers", state="live") == value(metrics, "psd_worker_sessions_total") == 2
    assert value(metrics, "psd_worker_clock", rank="1") == 8
    assert value(metrics, "psd_worker_awaited_seconds_total", rank="1") > 0
    assert value(metrics, "psd_shard_state", state="serving") == value(metrics, "psd_shard_state") == 1
    assert value(metrics, "process_resident_memory_bytes") > 1 << 20


def test_a_wait_for_another_worker_is_counted_with_exact_aggregation_too(
    cluster: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    """It is not the push or the pull that waits there, but the commit at shard 0."""
    servers = cluster(1, metrics_port=0)
    shard = servers.shards[0].shard

    def train(rank: int) -> None:
        with psd_client.connect(servers.servers, rank, 2) as ps:
            ps.declare({"w": np.zeros(9, np.float32)}, psd_client.SGD(lr=0.1), clip_norm=1.0)
            if rank == 1:
                eventually(lambda: any(shard.age_s(wait.since) > 0.2 for wait in shard.status().waits), "worker 0 waits")
            ps.push_pull({"w": np.ones(9, np.float32)})

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    metrics = scrape(servers.shards[0].metrics_port)
    assert value(metrics, "psd_call_seconds_sum", call="commit") > 0.2
    assert value(metrics, "psd_call_seconds_count", call="commit", transport="grpc") >= 2
    assert value(metrics, "psd_call_seconds_count", call="measure", transport="grpc") >= 1


def test_every_metric_obeys_the_conventions(trained: Any, eventually: Callable[..., None]) -> None:
    """Names, units, types, help and bounded labels, as promtool would have them."""
    eventually(lambda: value(scrape(trained.metrics_port), "psd_checkpoints_total") > 0, "a checkpoint is stored")
    metrics = scrape(trained.metrics_port)

    assert len(metrics) > 40
    for name, family in metrics.items():
        assert re.fullmatch(r"(psd|process)(_[a-z]+)+", name), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert family.documentation.endswith("."), name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|megabytes|total|count|sum|bucket)$", name), name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
            assert name.startswith("process_") or name == "psd_build_info" or sample.labels["shard"] == "0", sample
            assert all(re.fullmatch(r"[a-zA-Z0-9_.+-]{1,64}", text) for text in sample.labels.values()), sample
        if name.startswith("psd_") and family.type != "counter":
            assert name.endswith(UNITS) or name in COUNTED, f"{name} has no unit"
        if family.type == "histogram":
            assert {s.labels["le"] for s in family.samples if s.name.endswith("_bucket")} >= {"+Inf", "1.0"}, name
    assert {s.labels["transport"] for s in metrics["psd_call_seconds"].samples} == set(LANES)


def expressions() -> dict[str, str]:
    """Every PromQL expression that is shipped, by where it stands."""
    board = json.loads((DEPLOY / "grafana/psd-dashboard.json").read_text())
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in board["panels"] for t in p.get("targets", ())}
    alerts = (DEPLOY / "prometheus/alerts.yaml").read_text()
    rules = re.findall(r"alert: (\w+)\n +expr: (?:\|\n)?((?:(?! +(?:for|labels):).*\n)+)", alerts)
    assert len(rules) == alerts.count("alert:")
    return found | dict(rules)


def scrape_of_a_table(cluster: Callable[..., Any]) -> dict[str, Metric]:
    """What a shard has beside that when its job has a table."""
    shard = cluster(1, metrics_port=0).shards[0]
    with psd_client.connect(shard.address, 0, 1) as ps:
        ps.declare({}, tables=[psd_client.Table("user", 3, psd_client.SGD(lr=1.0))])
        ps.tables["user"].push([1, 2], np.ones((2, 3), np.float32))
    found = {name: family for name, family in scrape(shard.metrics_port).items() if name.startswith("psd_table")}
    assert value(found, "psd_table_rows", table="user") == 2
    return found


def test_what_dashboard_and_alerts_ask_for_is_there(
    trained: Any, cluster: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    """Every metric and label of every shipped expression exists in a scrape; and what is exported is shown somewhere."""
    eventually(lambda: value(scrape(trained.metrics_port), "psd_checkpoints_total") > 0, "a checkpoint is stored")
    metrics = scrape(trained.metrics_port) | scrape_of_a_table(cluster)
    labels: dict[str, set[str]] = {}
    for family in metrics.values():
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    labels["psd_request_errors_total"] = {"instance", "shard", "reason", "code"}

    for where, expression in expressions().items():
        names = re.findall(r"\b(?:psd|process)_\w+", expression)
        assert names, where
        assert [name for name in names if name not in labels] == [], where
        known = set.union(*(labels[name] for name in names))
        asked = re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression) + re.findall(r"(\w+)=~?\"", expression)
        assert {word.strip() for words in asked for word in words.split(",")} - {""} <= known, where
        assert expression.count("(") == expression.count(")"), where
    shown = " ".join(expressions().values())
    hidden = {name for name in metrics if name.startswith("psd_") and name not in shown}
    assert hidden == {"psd_build_info", "psd_version_max"}


def test_a_dashboard_has_what_grafana_needs() -> None:
    """Numbers of panels differ, none overlaps another, and each names its data source by the variable."""
    board = json.loads((DEPLOY / "grafana/psd-dashboard.json").read_text())
    panels = board["panels"]

    assert len({p["id"] for p in panels}) == len(panels)
    grids = [p["gridPos"] for p in panels]
    places = [(x, y) for g in grids for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    assert all(p["datasource"]["uid"] == "${datasource}" for p in panels if p["type"] != "row")
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "shard"}


def test_the_workers_beyond_a_number_share_a_series(cluster: Callable[..., Any], dial: Callable[..., Any]) -> None:
    """However many workers a job has, the labels are bounded."""
    shard = cluster(1, metrics_port=0).shards[0]
    channel = dial(shard.address)
    world = WORKERS_MAX + 5
    for rank in (0, WORKERS_MAX, WORKERS_MAX + 1):
        RawWorker(channel, rank, world)
    members = shard.shard._core.membership
    for worker in members.workers:
        worker.awaited_s = 2.0

    metrics = scrape(shard.metrics_port)

    assert len(metrics["psd_worker_awaited_seconds"].samples) == WORKERS_MAX + 1
    assert value(metrics, "psd_worker_awaited_seconds_total", rank="other") == 10
    assert {s.labels["rank"] for s in metrics["psd_worker_clock"].samples} == {"0", "other"}
    assert value(metrics, "psd_workers", state="absent") == world - 3


def test_a_shard_without_blocks_says_nothing_of_steps(cluster: Callable[..., Any]) -> None:
    """It is sent no pushes, and zeros would tell a dashboard that the job stands still."""
    small = cluster(2, metrics_port=0)
    with psd_client.connect(small.servers, rank=0, world_size=1) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(3, np.float32)})
        told, blank = (scrape(shard.metrics_port) for shard in small.shards)

    assert (value(told, "psd_worker_clock"), value(told, "psd_version_min")) == (1, 1)
    assert "psd_worker_clock" not in blank
    assert {"psd_version_min", "psd_version_max"} & set(blank) == set()


def test_calls_that_a_token_does_not_allow_are_counted(
    cluster: Callable[..., Any], dial: Callable[..., Any], tmp_path: Path
) -> None:
    """They are errors like others, with reasons of their own; so an operator sees somebody trying."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("reader 0123456789abcdef\n")
    shard = cluster(1, metrics_port=0, token_file=str(tokens)).shards[0]
    control = control_pb2_grpc.ControlServiceStub(dial(shard.address))

    for metadata in ((), (("authorization", "Bearer 0123456789abcdef"),)):
        failure(control.Join, control_pb2.JoinRequest(), timeout=100, metadata=metadata)

    metrics = scrape(shard.metrics_port)
    assert value(metrics, "psd_request_errors_total", reason="Unauthenticated", code="UNAUTHENTICATED") == 1
    assert value(metrics, "psd_request_errors_total", reason="PermissionDenied", code="PERMISSION_DENIED") == 1


# -- the server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """One that serves a page of its own."""
    pages = iter(range(1_000_000))
    found = MetricsServer("127.0.0.1", 0, lambda: b"page %d" % next(pages), "text/plain")
    found.start()
    yield found
    found.stop()


def ask(port: int, sent: bytes) -> bytes:
    """All that the server answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=100) as sock:
        sock.sendall(sent)
        answer = b""
        while data := sock.recv(4096):
            answer += data
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics?name=psd HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405 Method Not Allowed"),
        (b"PRI * HTTP/2.0\r\n\r\n", b"400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x" * HEAD_BYTES_MAX, b"400 Bad Request"),
    ],
)
def test_only_the_page_is_served(server: MetricsServer, sent: bytes, status: bytes) -> None:
    """Another path, method or protocol gets an error, and each connection one answer."""
    answer = ask(server.port, sent)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert (body == b"page 0") == (status == b"200 OK")


@pytest.mark.parametrize("head", [b"GET /metrics HTTP/1.1", b"POST /metrics HTTP/1.1"])
def test_a_request_with_a_body_gets_the_whole_answer(head: bytes) -> None:
    """A connection that is closed while it has unread bytes is reset, and the end of what was sent lost."""
    page = b"x" * (4 << 20)
    server = MetricsServer("127.0.0.1", 0, lambda: page, "text/plain")
    server.start()
    try:
        answer = ask(server.port, head + b"\r\nContent-Length: 65536\r\n\r\n" + b"y" * 65536)
    finally:
        server.stop()

    said, _, body = answer.partition(b"\r\n\r\n")
    assert body == (page if head.startswith(b"GET") else b"only GET\n"), said


def test_a_request_whose_body_does_not_end_is_cut_off(server: MetricsServer) -> None:
    """So that it keeps the server's one thread busy for no longer than others do."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=100) as sock,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        while True:
            sock.sendall(b"y" * 65536)


def test_half_open_connections_make_room_for_a_scraper(server: MetricsServer) -> None:
    """More connections than the server keeps, none of which asks, and a scrape all the same; the oldest ones were closed."""
    socks = [socket.create_connection(("127.0.0.1", server.port), timeout=100) for _ in range(3 * CONNECTIONS_MAX)]
    try:
        assert ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n").endswith(b"page 0")
        assert socks[0].recv(1) == b""
        assert len(server._connections) <= CONNECTIONS_MAX
    finally:
        for sock in socks:
            sock.close()


def test_a_connection_that_asks_too_slowly_is_closed(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is that of the whole connection, whether it has asked something by then or not."""
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=100) as sock,
        contextlib.suppress(ConnectionResetError),  # it was closed before what is sent here was read
    ):
        sock.sendall(b"GET /met")

        assert sock.recv(1) == b""


def test_many_questions_at_once_are_answered_with_one_page(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of scrapes does not make the shard collect as often."""
    monkeypatch.setattr(metrics_server, "CACHE_S", 3600.0)

    answers = {ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(20)}

    assert len(answers) == 1


def test_a_page_that_cannot_be_made_is_an_error_and_the_next_one_comes() -> None:
    """A defect of the collector ends neither the server nor the shard."""
    pages = iter([None, b"page"])
    server = MetricsServer("127.0.0.1", 0, lambda: memoryview(next(pages)), "text/plain")  # type: ignore[arg-type]
    server.start()
    try:
        first = ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")
        second = ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")
    finally:
        server.stop()

    assert first.startswith(b"HTTP/1.1 500 ")
    assert second.endswith(b"page")


def test_the_server_ends_with_the_shard(cluster: Callable[..., Any]) -> None:
    """Its port is free again, and without the flag there is none."""
    shard = cluster(1, metrics_port=0).shards[0]
    assert scrape(shard.metrics_port)["psd_shard_state"]

    shard.stop()

    with pytest.raises(urllib.error.URLError):
        scrape(shard.metrics_port)
    assert cluster(1).shards[0].metrics_port == 0


def test_a_port_that_is_taken_is_named(cluster: Callable[..., Any]) -> None:
    """The error says which flag is to be changed."""
    port = cluster(1, metrics_port=0).shards[0].metrics_port

    with pytest.raises(OSError, match=f"--metrics-port: cannot bind 127.0.0.1:{port}"):
        cluster(1, metrics_port=port)
