"""psd-server --relay-of as a process: options, the ready line, kills, the end; psdctl status of one."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from commands import Process

import psd_client
from psd.cli.psdctl import main as psdctl
from psd.cli.relay import parse
from psd.cli.server import main

READY = r"psd-server: relay of (\S+) ready at (\S+)"
ONES = {"w": np.ones(50_000, np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--relay-of"], "argument --relay-of: expected one argument"),
        (["--relay-of", "nowhere"], "--relay-of: expected HOST:PORT with a port from 0 to 65535"),
        (["--relay-of=127.0.0.1:0"], "--relay-of: '127.0.0.1:0' has port 0"),
        (["--relay-of=a:1,b:2,a:1"], "--relay-of: an address is given twice"),
        (
            ["--relay-of=a:1", "--shard", "0/1"],
            "--shard: a relay has the blocks of all shards; give either --shard or --relay-of",
        ),
        (["--relay-of=a:1", "--state-dir", "d"], "unrecognized arguments: --state-dir d"),
        (["--relay-of=a:1", "--max-reads", "0"], "--max-reads: expected 1 to 10000, got 0"),
        (["--relay-of=a:1", "--listen", "0.0.0.0:1"], "--listen: 0.0.0.0:1 is reachable from other machines"),
        (["--relay-of=a:1", "--upstream-tls-cert", "c"], "tls_key: not given"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal(main, options)


def test_help_is_of_a_relay(help_of: Callable[..., str]) -> None:
    text = help_of(main, "--relay-of=a:1")

    assert "psd-server --relay-of SERVERS" in text
    assert "exit status:" in text
    assert "--state-dir" not in text


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it shows its servers comes from the environment, too, as a reader's."""
    monkeypatch.setenv("PSD_TOKEN_FILE", "mine")
    options = "--relay-of a:1|b:2 --listen 127.0.0.1:0 --max-reads 7 --token-file t --grace 3 --run-id r --upstream-tls-ca ca"

    config, upstream, log = parse(options.split())

    assert (config.limits.reads_max, config.token_file, config.grace_s, config.run_id) == (7, "t", 3, "r")
    assert (upstream.servers, upstream.token_file, upstream.tls_ca, upstream.run_id) == (("a:1|b:2",), "mine", "ca", "r")
    assert (log.level, log.is_json) == ("info", False)


def relay_process(start: Callable[..., Process], servers: str, *options: str) -> tuple[Process, str]:
    """A relay on a free port, and its address."""
    process = start("psd.cli.server", "--relay-of", servers, "--listen", "127.0.0.1:0", *options)
    return process, process.line(READY)[2]


def pull_into(found: list[Any], reader: psd_client.Reader, newer_than: int) -> None:
    found.append(reader.pull(newer_than=newer_than))


@pytest.mark.process
def test_a_relay_that_is_killed_costs_its_readers_a_reconnect(
    start: Callable[..., Process], cluster: Callable[..., Any]
) -> None:
    """In the midst of a wait: the next relay answers with the next version. Both are killed in turn, and come back."""
    servers = cluster(2).servers
    relays = dict(address[::-1] for address in (relay_process(start, servers) for _ in range(2)))
    addresses = list(relays)
    with (
        psd_client.connect(servers, 0, 1) as ps,
        psd_client.connect("|".join(addresses), role="reader", wait_timeout=100) as reader,
    ):
        ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1.0))
        assert reader.pull()["w"].tolist() == [0.0] * 50_000
        for version, address in enumerate([addresses[0], addresses[1], addresses[0]], 1):
            found: list[Any] = []
            waiting = threading.Thread(target=pull_into, args=(found, reader, version - 1), daemon=True)
            waiting.start()
            relays[address].signal(signal.SIGKILL)
            assert relays[address].end() == -signal.SIGKILL
            ps.push_pull(ONES)
            waiting.join(100)
            assert found[0]["w"].tolist() == [-float(version)] * 50_000
            assert found[0].version == version
            relays[address] = start("psd.cli.server", "--relay-of", servers, "--listen", address)
            relays[address].line(READY)


@pytest.mark.process
def test_a_relay_says_what_it_does(
    start: Callable[..., Process], cluster: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """On its log, to psdctl status, and at its end."""
    servers = cluster(1, run_id="mine").servers
    process, address = relay_process(start, servers)
    assert f"INFO following {servers}" in process.output
    assert psdctl(["status", "--servers", address]) == 0
    assert f"relay {address} of {servers}: no version yet" in capsys.readouterr().out
    with (
        psd_client.connect(servers, 0, 1) as ps,
        psd_client.connect(address, role="reader", wait_timeout=100) as reader,
    ):
        ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1.0))
        reader.pull()
        process.line("has version 0")
        ps.push_pull(ONES)
        reader.pull(newer_than=0)
        assert psdctl(["status", "--servers", address]) == 0
        assert f"relay {address} of {servers}: version 1, 0 behind, for " in capsys.readouterr().out
        assert psdctl(["status", "--servers", address, "--json"]) == 0
        (shard,) = json.loads(capsys.readouterr().out)["shards"]
        assert (shard["relay"]["of"], shard["relay"]["version"], shard["relay"]["versions"]) == (servers, 1, 2)
        assert shard["sent_bytes"] > 400_000

    process.signal(signal.SIGTERM)
    assert process.end() == 0
    assert "got SIGTERM: ending within 10 s" in process.output
    assert f"has fetched 2 versions of mine from {servers}, " in process.output
    assert " bytes, and sent 400" in process.output


@pytest.mark.process
def test_a_relay_on_a_port_that_is_taken_does_not_start(start: Callable[..., Process], cluster: Callable[..., Any]) -> None:
    servers = cluster(1).servers
    process = start("psd.cli.server", "--relay-of", "127.0.0.1:1", "--listen", servers)

    assert process.end() == 1
    assert f"error: --listen: cannot bind {servers}" in process.output
