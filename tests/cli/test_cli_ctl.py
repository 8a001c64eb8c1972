"""psdctl: options, and what it shows of a live job."""

import functools
import json
import re
import socket
import threading
from pathlib import Path
from signal import SIGINT

import numpy as np
import pytest

import psd_client
from psd.cli import psdctl
from psd.cli.psdctl import main
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer


@pytest.fixture
def servers():
    """Two shards in this process; their addresses as psdctl takes them."""
    shards = [ShardServer(ServerConfig(index, 2, listen="127.0.0.1:0", run_id="live-1")) for index in range(2)]
    for shard in shards:
        shard.start()
    yield ",".join(shard.address for shard in shards)
    for shard in shards:
        shard.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["statsu"], "invalid choice: 'statsu'"),
        (["status"], "--servers: expected the shards' addresses, here or in PSD_SERVERS"),
        (["status", "--servers", "nowhere"], "--servers: expected HOST:PORT"),
        (["status", "--servers", "h:1", "--timeout", "0"], "--timeout: expected more than 0 and at most 3600 seconds, got 0"),
        (["status", "--servers", "h:1", "--watch", "nan"], "--watch: expected more than 0"),
    ],
)
def test_main_when_an_option_is_wrong_then_one_line_says_what_was_expected(options, message, refusal, monkeypatch):
    monkeypatch.delenv("PSD_SERVERS", raising=False)

    assert message in refusal(main, options)


def test_main_when_asked_for_help_then_it_explains(help_of):
    assert "status " in help_of(main)
    assert "exit status:" in help_of(main, "status")


def test_monitoring_when_asked_for_a_file_then_it_is_printed_as_it_is(capsys):
    assert main(["monitoring", "dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["panels"]
    assert main(["monitoring", "alerts"]) == 0
    assert capsys.readouterr().out == (Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml").read_text()


def test_checkpoint_when_a_shard_answers_with_control_characters_then_they_are_escaped(servers, capsys, monkeypatch):
    """What it says of its failure is a peer's text."""
    monkeypatch.setattr("psd.cli.ctl.shard_calls.why_failed", lambda *_: "no\x1b]0;owned\x07\u202e\nroom")

    assert main(["checkpoint", "--servers", servers]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "no\\x1b]0;owned\\x07\\u202e\\nroom" in line


def test_status_when_the_shards_are_fresh_then_it_says_that_nothing_is_declared(servers, capsys, monkeypatch):
    monkeypatch.setenv("PSD_SERVERS", servers)

    assert main(["status"]) == 0

    shown = capsys.readouterr().out
    assert "nothing declared yet" in shown
    assert shown.count("empty") == 2


def test_status_when_a_shard_does_not_answer_then_the_other_is_shown_and_the_status_is_1(servers, capsys):
    first, _ = servers.split(",")

    assert main(["status", "--servers", f"{first},127.0.0.1:1"]) == 1

    shown = capsys.readouterr().out
    assert re.search(rf"^ +0 +empty +{first} ", shown, re.MULTILINE)
    assert "problem: 127.0.0.1:1 did not answer: UNAVAILABLE" in shown


def test_status_when_the_servers_are_in_the_wrong_order_then_the_status_is_1(servers, capsys):
    first, second = servers.split(",")

    assert main(["status", "--servers", f"{second},{first}"]) == 1

    assert f"problem: {second} is shard 1/2, but was given as 0/2" in capsys.readouterr().out


def train(servers, rank, has_stepped, may_end):
    """One step together, then worker 0 goes on and waits in the second round for worker 1."""
    with psd_client.connect(servers=servers, rank=rank, world_size=2) as ps:
        ps.declare({"w": np.zeros(300_000, np.float32)}, optimizer=psd_client.SGD(lr=1.0, momentum=0.9))
        ps.push_pull({"w": np.ones(300_000, np.float32)})
        has_stepped.wait()
        if rank == 1:
            may_end.wait()
        ps.push_pull({"w": np.ones(300_000, np.float32)})


@pytest.mark.process
def test_status_when_a_worker_waits_for_another_then_it_says_so_in_text_and_json(servers, start, capsys):
    has_stepped, may_end = threading.Barrier(2, timeout=30), threading.Event()
    workers = [threading.Thread(target=train, args=(servers, rank, has_stepped, may_end)) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        watch = start("psd.cli.psdctl", "status", "--servers", servers, "--json", "--watch", "0.05")
        awaited = watch.line(r'"waits": \[\{"rank": 0, "kind": "round", "name": "", "clock": 1,')
        picture = json.loads(awaited.string)
        status = main(["status", "--servers", servers])
        watch.signal(SIGINT)
        assert watch.end() == 0
    finally:
        may_end.set()
        for worker in workers:
            worker.join(100)

    assert status == 0
    shown = capsys.readouterr().out
    assert "run live-1: sync, mean, 2 workers, clock 1, 1 tensor, 1.1 MiB parameters, 1.1 MiB slots" in shown
    assert "worker 0 waits in round 1 for worker 1 (last seen" in shown
    assert "at step 1); so far" in shown
    (wait,) = picture["waits"]
    assert (wait["rank"], wait["kind"], wait["clock"]) == (0, "round", 1)
    assert wait["missing"] == [1]
    assert [worker["state"] for worker in picture["workers"]] == ["live", "live"]
    assert [shard["pushes_duplicate"] for shard in picture["shards"]] == [0, 0]
    assert picture["problems"] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status", "0.1 s: no answer yet from {}\n"),
        ("checkpoint", "0.1 s: shard 0 at {} has not told of a complete checkpoint yet"),
    ],
)
def test_psdctl_when_a_shard_says_nothing_then_says_so_meanwhile(command, said, monkeypatch, capsys):
    """However long it is to wait."""
    monkeypatch.setattr(psdctl, "explained", functools.partial(psdctl.explained, after_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"

        assert main([command, "--servers", server, "--timeout", "0.5"]) == 1

    assert capsys.readouterr().err.startswith(f"psdctl: {said.format(server)}")
