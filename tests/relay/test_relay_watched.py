"""What operators see of relays: their metrics, their readers, and at the shards, how far they lag and whom they serve."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from relayed_job import StartRelay, declare, step
from waiting import wait_until

import psd_client
from psd.cli.psdctl import main as psdctl
from psd.contract import facts
from psd.relay.server import RelayServer

WAIT_S = 100.0


def reading(servers: str) -> psd_client.Reader:
    return psd_client.connect(servers, role="reader", wait_timeout=WAIT_S)


def scrape(relay: RelayServer) -> dict[str, float]:
    """The samples by name, with the values of their labels after the first."""
    with urllib.request.urlopen(f"http://127.0.0.1:{relay.metrics_port}/metrics", timeout=WAIT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        " ".join([sample.name, *[value for label, value in sample.labels.items() if label != "shard"]]): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("shard", "relay") == "relay"
    }


def status(servers: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert psdctl(["status", "--json", "--servers", servers]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_metrics_of_a_relay_are_those_of_the_catalogue(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """As a shard has them, under the shard "relay"; and its own."""
    servers = cluster(2).servers
    server = relay(servers, metrics_port=0)
    before = scrape(server)
    assert (before["psd_relay_versions_total"], before["psd_readers_seen"]) == (0, 0)
    assert "psd_version_max" not in before
    with psd_client.connect(servers, 0, 1) as ps:
        declare(ps)
        with reading(server.address) as reader:
            for version in range(1, 3):
                step(ps)
                reader.pull(newer_than=version - 1)
            with pytest.raises(psd_client.WaitTimeout):
                reader.pull(newer_than=2, timeout=0.1)
            wait_until(lambda: server.holding.readers.calls == 0, "the readers' calls are over")
            refused = "psd_request_errors_total DEADLINE_EXCEEDED WaitTimeout"
            wait_until(lambda: refused in scrape(server), "the error is counted")
            found = scrape(server)

    assert found["psd_version_max"] == 2
    assert found["psd_parameter_bytes"] > 2_000_000
    assert found["psd_readers_seen"] == 1
    assert found["psd_received_bytes_total grpc"] >= 2_000_000
    assert 2_000_000 <= found["psd_reader_sent_bytes_total"] == found["psd_sent_bytes_total grpc"]
    assert found["psd_relay_behind"] == found["psd_relay_readers"] == 0
    assert found["psd_relay_versions_total"] >= 1
    assert found["psd_relay_age_seconds"] >= 0
    assert found["psd_relay_heard_seconds"] >= 0
    assert {fact.metric_name for fact in facts.RELAY if fact.metric} <= {name.split()[0] for name in found}
    assert found["process_resident_memory_bytes"] > 0


def test_readers_of_a_relay_are_shown_there_and_counted_at_the_shards(
    cluster: Callable[..., Any], relay: StartRelay, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a chain, too: at the shards a relay stands for all readers below it."""
    servers = cluster(1).servers
    with psd_client.connect(servers, 0, 1) as ps:
        declare(ps)
        upper = relay(servers)
        lower = relay(upper.address, advertise="rollouts-0:7100")
        with reading(lower.address) as reader, reading(lower.address) as other, reading(upper.address) as third:
            reader.name, other.name, third.name = "engine-0", "engine-1", "engine-2"
            for each in (reader, other, third):
                each.pull()
            step(ps)
            waiting = threading.Thread(target=reader.pull, kwargs={"newer_than": 1})
            third.pull(newer_than=0)
            waiting.start()
            wait_until(lambda: lower.holding.readers.calls == 1, "a reader waits")

            found = {each["name"]: each for each in status(lower.address, capsys)["readers"]}
            assert (found["engine-0"]["state"], found["engine-1"]["state"]) == ("waiting", "idle")
            assert (found["engine-1"]["version"], found["engine-1"]["behind"]) == (0, 1)
            assert found["engine-1"]["relayed_readers"] is None

            name = f"relay {upper.address}"

            def served() -> list[int]:
                return [each["relayed_readers"] for each in status(servers, capsys)["readers"] if each["name"] == name]

            step(ps)
            waiting.join(WAIT_S)
            for _ in range(4):  # a relay says how many it has when it asks for the next version
                step(ps)
            wait_until(lambda: served() == [3], "the shard knows of three readers")
            (at_upper,) = (r for r in status(upper.address, capsys)["readers"] if r["name"] == "relay rollouts-0:7100")
            assert at_upper["relayed_readers"] == 2

        assert psdctl(["status", "--servers", servers]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "RELAYED" in next(line for line in lines if line.startswith("READER")).split()
        assert any(line.startswith(name) for line in lines)
