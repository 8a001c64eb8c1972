"""psd-run on several hosts: who runs what, how they meet, and what becomes of the job when one of them is lost."""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from commands import Process, processes

from psd.cli.gathering import Gathering, Peer
from psd.cli.node_link import MESSAGE_BYTES_MAX, SILENCE_S, NodeLink
from psd.cli.node_places import NodePlaces, spread
from psd.cli.policy import JobPolicy, Name, Phase, Send, Start
from psd.cli.run import parse

WORKER = """
import os, signal, sys
names = ("PSD_RANK", "PSD_WORLD_SIZE", "LOCAL_RANK", "PSD_NODE")
print("worker", *(os.environ[name].rpartition("/")[2] for name in names), flush=True)
if sys.argv[1:] == ["wait"]:
    signal.pause()
"""
"""Says who it is; then ends, or waits to be ended."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- who runs what ------------------------------------------------------------------------------------------------------


def test_places_when_there_are_several_nodes_then_ranks_are_in_a_row_and_shards_go_round():
    places = NodePlaces(3, spread(5, 2))

    assert [[str(name) for name in places.names(node)] for node in range(2)] == [
        ["shard 0", "shard 2", "worker 0", "worker 1", "worker 2"],
        ["shard 1", "worker 3", "worker 4"],
    ]
    assert [places.node_of(Name("worker", rank)) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert spread(1, 3) == (1, 0, 0)


def test_plan_when_it_is_of_a_node_then_its_workers_have_local_ranks_and_its_state_a_place_of_its_own(tmp_path):
    options = ["--nnodes", "2", "--rendezvous", "127.0.0.1:9", "--workers", "4", "--shards", "2", "--state-dir"]
    plan = parse([*options, str(tmp_path), "true"], {"PSD_TOKEN_FILE": "t"}, "run-7", 1)

    environ = plan.worker_environ(3, ["127.0.0.1:7000"])
    assert (environ["PSD_RANK"], environ["LOCAL_RANK"], environ["PSD_WORLD_SIZE"]) == ("3", "1", "4")
    assert (environ["PSD_RUN_ID"], environ["PSD_NODE"]) == ("run-7", "run-7/1")
    assert "PSD_TOKEN_FILE" not in environ
    assert plan.state_dirs == [tmp_path / "node-0", tmp_path / "node-1"]
    assert plan.is_here(Name("worker", 2))
    assert not plan.is_here(Name("shard", 0))


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
    assert policy.status == 1


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
    assert (policy.phase, policy.status) == (Phase.ENDED, 1)


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
        self.argv = ["--nnodes", "3", "--rendezvous", "h:9", "--workers", "3", *options, "true"]
        self.plan = parse(self.argv, {})
        self.selector, self.told = selectors.DefaultSelector(), Told()
        self.gathering = Gathering(self.plan, address, lambda run_id: run_id, self.selector, self.told)
        self._sockets: list[socket.socket] = []

    def connect(self, number: int | None = None) -> NodeLink:
        ours, theirs = socket.socketpair()
        self._sockets += [ours, theirs]
        self.gathering.add(Peer(NodeLink(ours.fileno(), ours.fileno()), lambda: None, number))
        return NodeLink(theirs.fileno(), theirs.fileno())

    def hello(self, **changed: object) -> dict:
        found = {"psd": self._version(), "digest": self.plan.meeting.digest, "node": None, "host": "h", "address": "127.0.0.1"}
        return {"hello": {**found, "kept": None, **changed}}

    def _version(self) -> str:
        import psd

        return psd.__version__

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
    first.send(meeting.hello())
    meeting.handle()
    second.send(meeting.hello(kept="run-7"))
    meeting.handle()

    assert [first.receive(), second.receive()] == [[{"begin": "run-7", "node": 1}], [{"begin": "run-7", "node": 2}]]
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


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"psd": "0.0"}, "it has psd 0.0, not"),
        ({"digest": "x"}, "its psd-run was given other options or another command"),
        ({"node": 0}, "there is a node 0 already, of 3"),
        ({"node": 3}, "there is a node 3 already, of 3"),
        ({"address": "10.0.0.2"}, "127.0.0.1 and 10.0.0.2 cannot reach each other"),
    ],
)
def test_gathering_when_a_node_does_not_fit_then_it_is_told_why_and_the_others_wait_on(meeting, changed, refused):
    link = meeting.connect()
    link.send(meeting.hello(**changed))
    meeting.handle()

    (answer,) = link.receive()
    assert answer["refused"].startswith(refused)
    fitting = meeting.connect()
    fitting.send(meeting.hello())
    assert meeting.handle() == [("say", "node 1 of 3 is h, at 127.0.0.1; waiting for 1 more")]


@pytest.mark.parametrize(
    ("options", "is_refused"), [((), True), (("--insecure",), False), (("--tls-cert=c", "--tls-key=k"), False)]
)
def test_gathering_when_others_could_reach_the_shards_then_they_must_be_guarded(options, is_refused):
    met = Meeting(*options, address="10.0.0.1")
    link = met.connect()
    link.send(met.hello(address="10.0.0.2"))
    met.handle()

    answers = link.receive()
    met.close()
    assert bool(answers) == is_refused
    assert not answers or "need a certificate" in answers[0]["refused"]


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": 7}\n', b"x" * (MESSAGE_BYTES_MAX + 1)])
def test_gathering_when_a_stranger_connects_then_nobody_minds(meeting, nonsense):
    link = meeting.connect()
    sent = 0
    while sent < len(nonsense):
        try:
            sent += os.write(link.writer, nonsense[sent : sent + 4096])
        except BlockingIOError:
            meeting.handle()
        except BrokenPipeError:
            break
    for _ in range(64):
        assert meeting.handle() == []
    assert meeting.gathering._peers == []


def test_link_when_the_other_side_is_silent_then_it_is_lost_but_not_before():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = NodeLink(ours.fileno(), ours.fileno())
        began_at = link._heard_at

        beat_at = link.beat_at()
        link.flush()
        assert link.beat_at() == beat_at, "nothing was sent, so that the other side still waits for a sign of life"
        assert link.beat(beat_at)
        assert NodeLink(theirs.fileno(), theirs.fileno()).receive() == [{}], "a sign of life"
        assert link.beat(began_at + SILENCE_S - 1)
        assert not link.beat(began_at + SILENCE_S)


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


def run_id_of(leader: Process) -> str:
    return leader.line(r"\[psd-run\] +run (\S+);")[1]


@pytest.mark.process
def test_nodes_when_one_is_sent_ctrl_c_then_all_of_the_job_ends(nodes):
    leader = nodes("wait")
    leader.line("waiting at 127.0.0.1")
    follower = nodes("wait")
    run_id = run_id_of(leader)
    said = sorted(leader.line(r"worker (\d \d \d \d)")[1] for _ in range(3))
    assert said == ["0 3 0 0", "1 3 1 0", "2 3 0 1"], "rank, number of workers, rank on its host, node"

    follower.signal(SIGINT)

    assert (leader.end(), follower.end()) == (130, 130)
    assert "SIGINT: stopping the job" in leader.output
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

    leader.end()
    status = follower.end()
    if killed == "leader":
        assert "the connection to the psd-run that leads the job has ended; ending 1 processes here" in follower.output
        assert status == 1
    else:
        assert "node 1" in leader.output
        assert "is lost: the connection has ended, and with it worker 2; stopping the job" in leader.output
    assert processes(run_id) == {}
