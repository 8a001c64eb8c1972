"""psd-run on several hosts: how they meet, and what becomes of the job when one of them is lost."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import time
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from commands import Process, processes
from free_ports import free_port

import psd
from psd.cli.hosts import rendezvous
from psd.cli.hosts.follower import Follower
from psd.cli.hosts.leader import (
    END_S,
    GATHER_S,
    MISSING_SAID_S,
    STRANGER_S,
    STRANGERS_MAX,
    STRANGERS_MESSAGE_BYTES_MAX,
    Gathering,
    Peer,
)
from psd.cli.hosts.link import NodeLink
from psd.cli.hosts.proof import key_of, proof_of
from psd.cli.job.actions import Name, Send, Start
from psd.cli.job.policy import JobPolicy, Phase
from psd.cli.run import parse
from psd.cli.words.arguments import EXIT_HOST_LOST
from psd.contract.config import ConfigError
from psd.contract.job_records import running_jobs

WORKER = """
import os, signal, sys
names = ("PSD_RANK", "PSD_WORLD_SIZE", "PSD_LOCAL_RANK", "PSD_NODE")
print("worker", *(os.environ[name].rpartition("/")[2] for name in names), flush=True)
if sys.argv[1:] == ["wait"]:
    signal.pause()
"""
"""Says who it is; then ends, or waits to be ended."""


# -- what becomes of the job --------------------------------------------------------------------------------------------


def running(**settings) -> JobPolicy:
    """Shards 0 and 1, workers 0 to 2, all of them at work."""
    policy = JobPolicy(
        state_dirs=["", ""], workers=3, restarts_max=5, shard_restarts_max=5, grace_s=5, has_checkpoints=False, **settings
    )
    policy.on_start(0.0)
    for index in range(2):
        policy.on_ready(Name("shard", index), 1.0)
    assert policy.phase is Phase.RUNNING
    return policy


def test_policy_when_a_host_with_a_shard_is_lost_then_the_job_is_stopped():
    policy = running(on_worker_failure="continue")

    say, *sent = policy.on_lost([Name("shard", 1), Name("worker", 2)], "node 1 is lost", 2.0)

    assert say.text == "node 1 is lost, and with it shard 1, worker 2; stopping the job"
    assert sent == [Send(Name("worker", 0), SIGTERM), Send(Name("worker", 1), SIGTERM)]
    assert policy.status == EXIT_HOST_LOST


@pytest.mark.parametrize(("word", "goes_on"), [("continue", True), ("wait", False), ("end", False)])
def test_policy_when_a_host_with_workers_alone_is_lost_then_the_others_go_on_if_they_may(word, goes_on):
    policy = running(on_worker_failure=word)

    actions = policy.on_lost([Name("worker", 2)], "node 1 is lost", 2.0)

    assert not any(isinstance(action, Start) for action in actions), "there is nowhere to start it"
    assert (policy.phase is Phase.RUNNING) == goes_on
    for rank in range(2):
        policy.on_exit(Name("worker", rank), 0, 3.0)
    for index in range(2):
        policy.on_exit(Name("shard", index), 0, 4.0)
    assert (policy.phase, policy.status) == (Phase.ENDED, 1 if goes_on else EXIT_HOST_LOST)


def test_policy_when_a_host_is_lost_before_the_job_has_begun_then_it_ends():
    policy = JobPolicy(state_dirs=[""], workers=1, restarts_max=0, shard_restarts_max=0, grace_s=5, has_checkpoints=False)

    assert [say.text for say in policy.on_lost([], "nobody came", 600.0)] == ["nobody came; stopping the job"]
    assert (policy.phase, policy.status) == (Phase.ENDED, 1)


# -- how they meet ------------------------------------------------------------------------------------------------------


class Told:
    """What the loop of psd-run is told."""

    def __init__(self) -> None:
        self.words: list[object] = []

    def __getattr__(self, name):
        return lambda *args: self.words.append((name, *args))


class Meeting:
    """Node 0 of a job, and connections to it, all in this process."""

    def __init__(self, *options: str, address: str = "127.0.0.1") -> None:
        argv = ["--nnodes", "3", "--rendezvous", "h:9", "--workers", "3", *options, "true"]
        self.plan = parse(argv, {"PSD_TLS_CA": "ca", "PSD_TOKEN_FILE": "token"})
        self.selector, self.told = selectors.DefaultSelector(), Told()
        self.gathering = Gathering(self.plan, address, lambda run_id: run_id, self.selector, self.told)
        self._sockets: list[socket.socket] = []

    def connect(self, number: int | None = None) -> NodeLink:
        ours, theirs = socket.socketpair()
        self._sockets += [ours, theirs]
        self.gathering.add(Peer(NodeLink(ours.fileno(), ours.fileno()), lambda _: ours.close(), number, "10.0.0.9"))
        return NodeLink(theirs.fileno(), theirs.fileno())

    def say_hello(self, link: NodeLink, key: bytes = b"", **changed: object) -> list[dict]:
        """Join as a node; the answers."""
        link.send({"join": psd.__version__})
        self.handle()
        (answer,) = link.receive()
        hello = {"nonce": "mine", "proof": proof_of(key, "node", answer["nonce"], "mine"), "alike": self.plan.meeting.alike}
        link.send({"hello": {**hello, "node": None, "host": "h", "address": "127.0.0.1", "kept": None, **changed}})
        self.said = self.handle()
        return link.receive() or []

    def handle(self) -> list[object]:
        """Handle what has come; what the loop was told of it."""
        for key, _ in self.selector.select(0):
            key.data()
        words, self.told.words = self.told.words, []
        return words

    def close(self) -> None:
        self.selector.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def meeting():
    met = Meeting()
    yield met
    met.close()


def test_gathering_when_all_nodes_have_come_then_each_is_told_its_number_and_the_run(meeting):
    first, second = meeting.connect(), meeting.connect()

    assert meeting.say_hello(first) == [{"welcome": ""}]
    assert meeting.said == [("say", "node 1 of 3 is h, at 127.0.0.1; waiting for 1 more")]
    assert meeting.say_hello(second, kept="run-7") == [{"welcome": ""}, {"begin": "run-7", "node": 2}]
    assert first.receive() == [{"begin": "run-7", "node": 1}]
    first.send({"ready": True})
    second.send({"ready": True})
    assert meeting.handle() == [("on_nodes_ready", "run-7", "127.0.0.1")]

    meeting.gathering.signal(Name("worker", 2), SIGTERM)
    assert second.receive() == [{"signal": ["worker", 2], "signum": SIGTERM}]
    second.send({"output": ["worker", 2], "data": b"\xff\n".decode("latin-1")})
    second.send({"exit": ["worker", 2], "status": -9})
    assert meeting.handle() == [("on_output", Name("worker", 2), b"\xff\n"), ("on_exit", Name("worker", 2), -9)]
    second.send({"exit": ["worker", 0], "status": 0})
    lost = [Name("worker", 2)]
    assert meeting.handle() == [("on_lost", lost, "node 2 (h) is lost: what it says makes no sense")], "another node's process"


def test_gathering_when_a_node_names_a_run_that_cannot_be_then_it_does_not_join(meeting):
    assert meeting.say_hello(meeting.connect(), kept="../../somewhere/else") == []
    assert meeting.said == []
    assert meeting.gathering._peers == []


def other(**changed: str) -> dict[str, str]:
    return {**Meeting().plan.meeting.alike, **changed}


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"alike": other(nnodes="x")}, "its --nnodes differs from node 0's; all hosts must be given the same"),
        (
            {"alike": other(lease_s="x", command="x")},
            "its --lease, command differs from node 0's; all hosts must be given the same",
        ),
        ({"node": 0}, "its --node-rank is 0, and that is this host, at 127.0.0.1"),
        (
            {"address": "10.0.0.2"},
            "127.0.0.1 and 10.0.0.2 cannot reach each other; name hosts by addresses that the others reach",
        ),
        ({"proof": "0" * 64}, "it has a --token-file, and the other side has none; give it to all hosts or to none"),
    ],
)
def test_gathering_when_a_node_does_not_fit_then_both_are_told_why_and_the_others_wait_on(meeting, changed, refused):
    answers = meeting.say_hello(meeting.connect(), **changed)

    assert answers == [{"refused": refused}]
    assert meeting.said == [("say", f"refused 10.0.0.9: {refused}")]
    assert meeting.say_hello(meeting.connect()) == [{"welcome": ""}]


def test_gathering_when_a_node_has_another_psd_then_both_versions_are_named_and_nothing_that_a_terminal_obeys(meeting):
    link = meeting.connect()

    link.send({"join": "\x1b[2J0.0"})

    refused = f"it has psd \\x1b[2J0.0, and node 0 has {psd.__version__}"
    assert meeting.handle() == [("say", f"refused 10.0.0.9: {refused}")]
    assert link.receive() == [{"refused": refused}]


@pytest.fixture
def token_files(tmp_path):
    """Two lists of the same tokens in another order, and one that has a worker's token alone."""
    lines = [f"{role} {role * 4}" for role in ("worker", "reader", "admin")]
    for name, found in (("ours", lines), ("same", lines[::-1]), ("less", lines[:1])):
        (tmp_path / name).write_text("\n".join(found))
        (tmp_path / name).chmod(0o600)
    return tmp_path


def test_gathering_when_there_are_tokens_then_a_node_must_have_all_of_them_and_the_leader_too(token_files):
    met = Meeting("--token-file", str(token_files / "ours"))
    same = key_of(str(token_files / "same"))

    assert met.say_hello(met.connect()) == [{"refused": "it has no --token-file; all hosts must have the same tokens"}]
    less = met.say_hello(met.connect(), key_of(str(token_files / "less")))
    assert less == [{"refused": "its --token-file has other tokens"}]
    link = met.connect()
    (answer,) = met.say_hello(link, same)
    nonces = [peer.nonce for peer in met.gathering._joined]
    met.close()
    assert answer == {"welcome": proof_of(same, "leader", *nonces, "mine")}


@pytest.mark.parametrize("proof", ["", "0" * 64])
def test_follower_when_the_leader_does_not_have_the_tokens_then_nothing_is_done_for_it(token_files, proof, capsys):
    met = Meeting("--token-file", str(token_files / "ours"))
    link = met.connect()
    follower = Follower(met.plan, None, link, "127.0.0.1")

    for message in ({"begin": "run-7", "node": 1}, {"nonce": "theirs"}, {"start": ["worker", 1], "addresses": []}):
        follower._handle(message)
        assert follower._status is None
    follower._handle({"welcome": proof})

    met.close()
    assert follower._status == 1
    assert "error: the psd-run that leads the job is not to be trusted: it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "where"),
    [("127.0.0.1", r"127\.0.*:\d+, which only this machine reaches,"), ("::1", r"\[::1\]:\d+, which .*,")],
)
def test_gathering_when_node_0_listens_then_it_says_where_and_whether_others_reach_it(host, where, meeting):
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        meeting.gathering.listen(listener, None)

    ((_, text),) = meeting.told.words
    assert re.fullmatch(rf"waiting at {where} for nodes 1, 2 of 3; there are 0 \(this host\)", text)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "has another host --node-rank 0, too?"),
        ("192.0.2.1", "is it an address of this host?"),
        ("[2001:db8::1]", "is it an address of this host?"),
    ],
)
def test_rendezvous_when_node_0_cannot_listen_there_then_it_asks_what_may_be_wrong(host, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"{host}:{taken.getsockname()[1]}"
        plan = parse(["--nnodes", "2", "--node-rank", "0", "--rendezvous", where, "true"], {})

        with pytest.raises(
            ConfigError, match=rf"--rendezvous: node 0 cannot listen at {re.escape(where)}: .*; {re.escape(why)}"
        ):
            rendezvous.run(plan, None)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"begin": "../../somewhere/else", "node": 1},
        {"begin": "run-7", "node": 7},
        {"begin": "run-7", "node": [1]},
        {"signal": ["worker", 1], "signum": 9},
        {"start": ["worker"]},
        {"end": None},
    ],
)
def test_follower_when_the_leader_says_nonsense_then_it_ends_in_order(nonsense, capsys):
    """A run's id becomes the name of a directory, which is removed in the end."""
    ours, theirs = socket.socketpair()
    options = ["--nnodes", "3", "--rendezvous", "h:9", "--workers", "3", "true"]
    follower = Follower(parse(options, {}), None, NodeLink(ours.fileno(), ours.fileno()), "127.0.0.1")
    leader = NodeLink(theirs.fileno(), theirs.fileno())
    with ours, theirs:
        for message in ({"nonce": "x"}, {"welcome": ""}, nonsense):
            leader.send(message)
        follower._receive()

    assert follower._status == 1
    assert "what the psd-run that leads the job says makes no sense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "is_refused"), [((), True), (("--insecure",), False), (("--tls-cert=c", "--tls-key=k"), False)]
)
def test_gathering_when_others_could_reach_the_shards_then_they_must_be_guarded(options, is_refused):
    met = Meeting(*options, address="10.0.0.1")
    (answer,) = met.say_hello(met.connect(), address="10.0.0.2")
    met.close()

    assert ("need a certificate" in answer.get("refused", "")) == is_refused


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"hello": 7}\n',
        b'{"hello": {"nonce": ""}}\n',
        b"[" * 10_000 + b"\n",
        b"x" * (STRANGERS_MESSAGE_BYTES_MAX + 1),
    ],
)
def test_gathering_when_a_stranger_speaks_nonsense_then_nobody_minds(meeting, nonsense):
    link = meeting.connect()
    os.write(link.writer, nonsense)
    for _ in range(4):
        assert meeting.handle() == []
    assert meeting.gathering._peers == []


def test_gathering_when_many_strangers_hold_on_then_the_oldest_go_and_all_of_them_in_time(meeting):
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        meeting.gathering.listen(listener, None)
        meeting.handle()
        for _ in range(STRANGERS_MAX + 2):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            meeting.handle()
        assert len(meeting.gathering._peers) == STRANGERS_MAX

        meeting.gathering.on_time(time.monotonic() + STRANGER_S)
        assert meeting.gathering._peers == []


def test_gathering_when_nodes_are_missing_then_it_says_which_again_and_again_until_it_gives_up(meeting):
    began_at = meeting.gathering._gather_by - GATHER_S
    meeting.say_hello(meeting.connect(), node=2)

    meeting.gathering.on_time(began_at + MISSING_SAID_S + 1)
    meeting.gathering.on_time(began_at + MISSING_SAID_S + 2)
    assert meeting.handle() == [("say", "waiting for node 1 of 3; there are 0 (this host), 2 (h)")]
    meeting.gathering.on_time(began_at + GATHER_S + 1)
    why = "not all have joined within 600 s; missing: node 1 of 3; there are 0 (this host), 2 (h)"
    assert ("on_lost", [], why) in meeting.handle()


def test_gathering_when_its_loop_is_held_up_then_the_nodes_hear_that_it_is_there(meeting, monkeypatch):
    """By a terminal that was stopped, say, or a pager at the end of psd-run's pipe."""
    monkeypatch.setattr("psd.cli.hosts.leader.BEAT_S", 0.01)
    monkeypatch.setattr("psd.cli.hosts.link.BEAT_S", 0.01)
    link = meeting.connect()
    meeting.say_hello(link)
    meeting.gathering.keep_in_touch()
    assert link.wait() == [{}]
    meeting.gathering._is_closed.set()


# -- real processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path):
    """Starts psd-run with the same arguments as often as it is asked to: the first one leads."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    port = free_port()
    started: list[Process] = []

    def begin(*args: str) -> Process:
        options = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--workers", "3", "--grace", "5"]
        started.append(Process("psd.cli.run", *options, str(script), *args))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.mark.process
def test_hosts_when_ssh_hangs_then_ctrl_c_ends_it_at_once():
    with contextlib.closing(
        Process("psd.cli.run", "--hosts", "a:1,b:1", "--ssh", "sh -c 'echo begun >&2; exec sleep 600'", "true")
    ) as started:
        for _ in range(2):
            started.line("begun")

        started.signal(SIGINT)

        assert started.end(timeout_s=END_S / 2) == 130


TALKATIVE = """#!/bin/sh
for last; do :; done
echo 'Welcome, {"what": "a shell prints'
printf 'is none of our business: \\033[2J'
export SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'
"""
"""An ssh to this machine, whose login shell prints something; of the second line it is not the end."""


@pytest.mark.process
def test_hosts_when_a_login_shell_prints_something_then_it_is_passed_over(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "ssh").write_text(TALKATIVE + 'exec sh -c "$last"\n')
    options = ("--hosts", "a:1", "--ssh", f"sh {tmp_path / 'ssh'}", str(tmp_path / "worker.py"))

    with contextlib.closing(Process("psd.cli.run", *options)) as started:
        assert started.end() == 0, started.output
        assert "worker 0 1 0 0" in started.output


@pytest.mark.process
def test_hosts_when_a_login_shell_admits_nobody_then_it_is_quoted(tmp_path):
    (tmp_path / "ssh").write_text(TALKATIVE + "echo; exit 3\n")

    with contextlib.closing(Process("psd.cli.run", "--hosts", "a:1", "--ssh", f"sh {tmp_path / 'ssh'}", "true")) as started:
        assert started.end() == 1
        why = r"ssh has ended with status 3; it printed: .*shell prints; it printed: is none of our business: \\x1b\[2J;"
        assert re.search(rf"node 0 \(a\) has not joined: {why}", started.output), started.output


def run_id_of(leader: Process) -> str:
    return leader.line(r"\[psd-run\] +run (\S+);")[1]


@pytest.mark.process
def test_nodes_when_one_is_sent_ctrl_c_then_all_of_the_job_ends(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("PSD_JOBS_DIR", str(directory := tmp_path / "jobs"))
    leader = nodes("wait")
    leader.line("waiting at 127.0.0.1")
    follower = nodes("wait")
    run_id = run_id_of(leader)
    said = sorted(leader.line(r"worker (\d \d \d \d)")[1] for _ in range(3))
    assert said == ["0 3 0 0", "1 3 1 0", "2 3 0 1"], "rank, number of workers, rank on its host, node"
    assert len(list(directory.iterdir())) == 2, "either would tell psdctl on its own host"
    (record,) = running_jobs()
    assert (record.name, record.workers) == (run_id, 3)

    follower.signal(SIGINT)

    assert (leader.end(), follower.end()) == (130, 130)
    assert "SIGINT: stopping the job" in leader.output
    assert list(directory.iterdir()) == []
    assert processes(run_id) == {}
    assert not list(Path("/dev/shm").glob(f"psd-run-{run_id}*"))


@pytest.mark.process
@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_nodes_when_one_is_killed_then_no_process_is_left_anywhere(nodes, killed):
    leader = nodes("wait")
    leader.line("waiting at 127.0.0.1")
    follower = nodes("wait")
    run_id = run_id_of(leader)
    for _ in range(3):
        leader.line(r"worker \d")

    (leader if killed == "leader" else follower).signal(SIGKILL)

    ends = {"leader": leader.end(), "follower": follower.end()}
    assert sorted(ends.values()) == [-SIGKILL, EXIT_HOST_LOST]
    if killed == "leader":
        assert "the connection to the psd-run that leads the job has ended; ending 1 processes here" in follower.output
    else:
        assert "node 1" in leader.output
        assert "is lost: the connection has ended, and with it worker 2; stopping the job" in leader.output
    assert processes(run_id) == {}
