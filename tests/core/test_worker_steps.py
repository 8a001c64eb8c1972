"""The worker's end of armed steps, over real sockets, against messages that are made here by the header's words alone."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from psd_core._worker_steps import BROKEN, FOREIGN, PENDING, REFUSED, TAKEN, UNSENT, WorkerSteps

PREFIX, HEAD, DONE = struct.Struct("<IIQ"), struct.Struct("<QQQQdII"), struct.Struct("<QII")
STEP, DONE_KIND, AGAIN, ALIVE, ERROR = 12, 13, 14, 11, 10
EPOCH, SESSION, CLOCK, SINCE, WEIGHT = 77, 5, 9, 3, 1.5
SCALARS = [[0.5, 0.25], [0.125]]
ANSWERED = [3, 4]
"""Versions in DONE."""


class Ends:
    """A step of one or several shards, each of two blocks, the first of an odd number of elements, and the peers' ends.

    Attributes:
        looks_out: before it sleeps.
    """

    looks_out = False

    def __init__(self, shards: int = 1, *, travels: bool = True, sends_versions: bool = True, blocks: int = 2) -> None:
        self.versions = array("Q", range(100, 100 + blocks * shards))
        self.gradients = [[np.full(3 + 2 * b, 1 + b, np.float32) for b in range(blocks)] for _ in range(shards)]
        self.parameters = [[np.zeros(3 + 2 * b, np.float32) for b in range(blocks)] for _ in range(shards)]
        looked_at = [gradient for own in self.gradients for gradient in own]
        self.steps = WorkerSteps(
            shards,
            versions=self.versions,
            sends_versions=sends_versions,
            scalars=3,
            looked_at=looked_at,
            looks_out=self.looks_out,
        )
        self.pairs = [socket.socketpair() for _ in range(shards)]
        self.head_bytes = HEAD.size + 8 * (blocks + 3) + 8
        self.sizes = []
        for shard, (own, _) in enumerate(self.pairs):
            indices = array("I", [blocks * shard + b for b in range(blocks)])
            arrays = [self.gradients[shard], self.parameters[shard]] if travels else [[], []]
            self.sizes.append(self.steps.lay_out(shard, indices, self.head_bytes, 2, *arrays))
            self.steps.arm(shard, own.fileno(), EPOCH)
        self.peers = [peer for _, peer in self.pairs]
        self.blocks = blocks

    def run(self, present: list[bytes] | None = None) -> bool | None:
        return self.steps.run(SESSION, CLOCK, SINCE, WEIGHT, SCALARS, present)

    def close(self) -> None:
        for pair in self.pairs:
            for sock in pair:
                sock.close()

    def received(self, shard: int = 0) -> bytes:
        """The whole STEP, which must have come."""
        sock, whole = self.peers[shard], PREFIX.size + self.head_bytes + self.sizes[shard][0]
        found = b""
        while len(found) < whole:
            found += sock.recv(whole - len(found))
        return found

    def done(self, *, clock: int = CLOCK + 1, counted: int | None = None, duplicate: int = 0) -> bytes:
        """A DONE whose parameters are 10, 11 and so on, by block, with rubbish between them."""
        head = DONE.pack(clock, self.blocks if counted is None else counted, duplicate)
        head += struct.pack(f"<{self.blocks}Q", *[3 + b for b in range(self.blocks)])
        payload = b""
        if self.sizes[0][1]:
            for b in range(self.blocks):
                payload += np.full(3 + 2 * b, 10 + b, np.float32).tobytes()
                payload += b"\xff" * (-len(payload) % 8)
        return PREFIX.pack(DONE_KIND, len(head), len(payload)) + head + payload


@pytest.fixture(params=[False, True], ids=["sleeps", "looks out"], autouse=True)
def looks_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps look out for answers, which changes nothing that can be seen."""
    monkeypatch.setattr(Ends, "looks_out", request.param)
    return bool(request.param)


@contextmanager
def ends(*args: Any, **options: Any) -> Iterator[Ends]:
    made = Ends(*args, **options)
    try:
        yield made
    finally:
        made.close()


def message(kind: int, head: bytes = b"") -> bytes:
    return PREFIX.pack(kind, len(head), 0) + head


REFUSAL = message(AGAIN, struct.pack("<II", 1, 0))


@contextmanager
def in_thread(function: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join(100)
        assert not thread.is_alive()


@pytest.mark.parametrize("sends_versions", [True, False])
def test_run_when_all_is_present_then_sends_what_the_header_says_and_receives_in_place(sends_versions: bool) -> None:
    with ends(sends_versions=sends_versions) as step:
        step.peers[0].sendall(step.done())

        assert step.run() is True

        sent = step.received()
        assert PREFIX.unpack_from(sent) == (STEP, step.head_bytes, 16 + 24)
        at = PREFIX.size
        assert HEAD.unpack_from(sent, at) == (EPOCH, SESSION, CLOCK, SINCE, WEIGHT, int(sends_versions), 2)
        at += HEAD.size
        if sends_versions:
            assert struct.unpack_from("<2Q", sent, at) == (100, 101)
        assert struct.unpack_from("<3d", sent, at + 16) == (0.5, 0.25, 0.125)
        payload = sent[PREFIX.size + step.head_bytes :]
        assert payload[:12] == step.gradients[0][0].tobytes()
        assert payload[16:36] == step.gradients[0][1].tobytes()
        assert [values.tolist() for values in step.parameters[0]] == [[10.0] * 3, [11.0] * 5]
        assert step.versions.tolist() == ANSWERED
        assert step.steps.done(0) == (CLOCK + 1, 2, 0)


def test_run_when_a_mask_is_given_then_sends_it_behind_the_scalars() -> None:
    with ends() as step:
        step.peers[0].sendall(step.done())

        assert step.run([b"\1\2" + bytes(6)]) is True

        sent = step.received()
        assert HEAD.unpack_from(sent, PREFIX.size)[5] == 1 | 2
        assert sent[PREFIX.size + step.head_bytes - 8 : PREFIX.size + step.head_bytes] == b"\1\2" + bytes(6)
        step.peers[0].sendall(step.done())
        assert step.run() is True
        assert HEAD.unpack_from(step.received(), PREFIX.size)[5] == 1


def test_run_when_numbers_lie_in_shared_memory_then_sends_heads_alone() -> None:
    with ends(travels=False) as step:
        step.peers[0].sendall(step.done())

        assert step.sizes == [(0, 0)]
        assert step.run() is True
        assert len(step.received()) == PREFIX.size + step.head_bytes
        assert step.versions.tolist() == ANSWERED


def test_run_when_the_answer_comes_byte_by_byte_behind_words_that_the_shard_lives_then_takes_it() -> None:
    with ends() as step:

        def answer() -> None:
            for byte in message(ALIVE) * 3 + step.done():
                step.peers[0].sendall(bytes([byte]))

        with in_thread(answer):
            assert step.run() is True
        assert [values.tolist() for values in step.parameters[0]] == [[10.0] * 3, [11.0] * 5]


def test_run_when_words_that_the_shard_lives_come_with_the_answer_then_takes_it() -> None:
    with ends() as step:
        step.peers[0].sendall(message(ALIVE) * 2 + step.done() + message(ALIVE))

        assert step.run() is True
        assert [values.tolist() for values in step.parameters[0]] == [[10.0] * 3, [11.0] * 5]
        step.peers[0].sendall(step.done())
        assert step.run() is True  # behind the third


@pytest.mark.parametrize(
    ("told", "is_plain"), [({}, True), ({"clock": CLOCK + 2}, False), ({"counted": 1, "duplicate": 1}, False)]
)
def test_run_when_done_says_something_unusual_then_says_so(told: dict[str, int], is_plain: bool) -> None:
    with ends() as step:
        step.peers[0].sendall(step.done(**told))

        assert step.run() is is_plain
        assert step.steps.state(0) == TAKEN
        assert step.steps.done(0) == (told.get("clock", CLOCK + 1), told.get("counted", 2), told.get("duplicate", 0))


@pytest.mark.parametrize("behind", [b"", message(ALIVE), message(ALIVE)[:5]])
@pytest.mark.parametrize("before", [b"", message(ALIVE)])
def test_run_when_the_shard_refuses_then_leaves_what_comes_next(before: bytes, behind: bytes) -> None:
    with ends() as step:
        step.peers[0].sendall(before + REFUSAL + behind)

        assert step.run() is False
        assert step.steps.state(0) == REFUSED
        assert step.steps.unread(0) == behind


@pytest.mark.parametrize(
    "other",
    [
        message(ERROR, b"error" * 20),
        PREFIX.pack(DONE_KIND, DONE.size + 8, 40) + bytes(64),
        PREFIX.pack(DONE_KIND, DONE.size + 16, 48) + bytes(80),
        PREFIX.pack(AGAIN, 8, 8) + bytes(16),
        PREFIX.pack(ALIVE, 0, 1) + bytes(1),
        PREFIX.pack(0xFFFFFFFF, 0xFFFFFFFF, 2**64 - 1),
    ],
)
def test_run_when_another_message_comes_then_leaves_what_was_read_of_it(other: bytes) -> None:
    with ends() as step:
        step.peers[0].sendall(other)

        assert step.run() is False
        assert step.steps.state(0) == FOREIGN
        read = step.steps.unread(0)
        assert other.startswith(read)
        left = other[len(read) :]
        assert not left or step.pairs[0][0].recv(1000) == left


def test_run_when_the_shard_hangs_up_then_it_is_broken() -> None:
    with ends() as step:
        step.peers[0].sendall(step.done()[:-1])
        step.peers[0].shutdown(socket.SHUT_WR)

        assert step.run() is False
        assert (step.steps.state(0), step.steps.error(0)) == (BROKEN, 0)


def test_run_when_the_connection_is_gone_then_says_why() -> None:
    with ends() as step:
        step.peers[0].close()

        assert step.run() is False
        assert step.steps.state(0) == BROKEN
        assert step.steps.error(0) == 32  # EPIPE


def test_advance_when_the_timeout_passed_then_goes_on_where_it_was() -> None:
    with ends() as step:
        step.pairs[0][0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
        whole = step.done()
        for begin, end in ((0, 7), (7, 20), (20, len(whole) - 3)):
            step.peers[0].sendall(whole[begin:end])
            assert (step.run() if begin == 0 else step.steps.advance(0)) is False
            assert step.steps.state(0) == PENDING
        step.peers[0].sendall(whole[-3:])

        assert step.steps.advance(0) is True
        assert step.steps.state(0) == TAKEN
        assert [values.tolist() for values in step.parameters[0]] == [[10.0] * 3, [11.0] * 5]


def test_advance_when_the_shard_reads_late_then_sends_the_rest() -> None:
    with ends(blocks=300) as step:  # more pieces than one system call takes, and more bytes than a small buffer
        own, peer = step.pairs[0]
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 20_000))
        assert step.run() is False
        assert step.steps.state(0) == PENDING
        sent: list[bytes] = []

        def answer() -> None:
            sent.append(step.received())
            peer.sendall(step.done())

        with in_thread(answer):
            while not step.steps.advance(0):
                pass
        assert step.steps.state(0) == TAKEN
        payload, at = sent[0][PREFIX.size + step.head_bytes :], 0
        for gradient in step.gradients[0]:
            assert payload[at : at + gradient.nbytes] == gradient.tobytes()
            at += -(-gradient.nbytes // 8) * 8
        assert [values[0] for values in step.parameters[0]] == [10.0 + b for b in range(300)]
        assert all((values == values[0]).all() for values in step.parameters[0])


def test_run_when_a_gradient_is_not_finite_then_sends_nothing() -> None:
    with ends() as step:
        step.gradients[0][1][4] = np.inf

        assert step.run() is None
        step.peers[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            step.peers[0].recv(1)


@pytest.mark.parametrize("scalars", [[[0.5, 0.25]], [[0.5, 0.25], [0.125, 0.1]], []])
def test_run_when_the_scalars_are_not_as_many_then_sends_nothing(scalars: list[list[float]]) -> None:
    with ends() as step:
        assert step.steps.run(SESSION, CLOCK, SINCE, WEIGHT, scalars, None) is None


def test_run_when_there_are_several_shards_then_all_have_it_before_an_answer_is_awaited() -> None:
    with ends(3) as step:

        def answer() -> None:
            for shard in (2, 1, 0):
                step.received(shard)
                step.peers[shard].sendall(step.done())

        with in_thread(answer):
            assert step.run() is True
        assert step.versions.tolist() == ANSWERED * 3


def test_run_when_one_of_several_shards_refuses_then_says_what_has_become_of_each() -> None:
    with ends(3) as step:
        step.peers[0].sendall(step.done())
        step.peers[1].sendall(REFUSAL)

        assert step.run() is False
        assert [step.steps.state(shard) for shard in range(3)] == [TAKEN, REFUSED, PENDING]
        step.peers[2].sendall(step.done())
        assert step.steps.advance(2) is True
        assert step.steps.state(2) == TAKEN


def test_run_when_a_shard_is_gone_then_the_next_ones_get_nothing() -> None:
    with ends(2) as step:
        step.peers[0].close()

        assert step.run() is False
        assert [step.steps.state(shard) for shard in range(2)] == [BROKEN, UNSENT]


def test_run_when_it_looked_out_in_vain_then_more_and_more_steps_sleep_at_once(looks_out: bool) -> None:
    with ends() as step:
        step.pairs[0][0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
        found = []
        for _ in range(20):
            assert step.run() is False
            found.append(step.steps.doubt)
            step.received()
            step.peers[0].sendall(step.done())
            while not step.steps.advance(0):
                pass

        # One that looks out, then as many that do not as it has come to doubt.
        assert found == ([4] * 5 + [12] * 13 + [28] * 2 if looks_out else [0] * 20)


def test_run_when_answers_are_there_then_goes_on_looking_out() -> None:
    with ends(3) as step:
        for _ in range(20):
            for peer in step.peers:
                peer.sendall(step.done())
            assert step.run() is True
            for shard in range(3):
                step.received(shard)

        assert step.steps.doubt == 0


def test_run_when_answers_come_meanwhile_then_receives_them() -> None:
    """Whether before its thread sleeps, or while it does."""
    with ends(2) as step:

        def answer() -> None:
            for _ in range(200):
                for shard, peer in enumerate(step.peers):
                    step.received(shard)
                    whole = step.done()
                    peer.sendall(whole[:20])
                    peer.sendall(whole[20:])

        with in_thread(answer):
            for _ in range(200):
                step.versions[:] = array("Q", [0] * 4)
                assert step.run() is True
                assert step.versions.tolist() == ANSWERED * 2


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("raises", [True, False])
def test_run_when_a_signal_comes_then_its_handler_runs(raises: bool) -> None:
    with ends() as step:

        def handle(*_: object) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if raises:
                raise Interrupted
            step.peers[0].sendall(step.done())

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            if raises:
                with pytest.raises(Interrupted):
                    step.run()
                assert step.steps.state(0) == PENDING
                step.peers[0].sendall(step.done())
                assert step.steps.advance(0) is True
            else:
                assert step.run() is True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert step.versions.tolist() == ANSWERED


def test_lay_out_when_it_does_not_fit_then_is_refused() -> None:
    def steps() -> WorkerSteps:
        return WorkerSteps(1, versions=array("Q", [0, 0]), sends_versions=True, scalars=1, looked_at=[])

    one = [np.zeros(2, np.float32)]
    size = HEAD.size + 16
    assert steps().lay_out(0, array("I", [1]), size, 0, one, one) == (8, 8)
    for blocks, head_bytes, arrays in (
        ([2], size, one),
        ([], size - 8, []),
        ([1], size - 8, one),
        ([1], size + 4, one),
        ([1], size, [*one, *one]),
        ([1], size, [np.zeros(0, np.float32)]),
    ):
        with pytest.raises(ValueError, match=r"blocks|head_bytes|arrays"):
            steps().lay_out(0, array("I", blocks), head_bytes, 0, arrays, arrays)
    with pytest.raises(IndexError, match="shard: 1 of 1"):
        steps().state(1)
    with pytest.raises(ValueError, match="not armed"):
        steps().run(1, 0, 0, 1.0, [[1.0]], None)
    with pytest.raises(ValueError, match="looked_at"):
        WorkerSteps(1, versions=array("Q", [0]), sends_versions=True, scalars=1, looked_at=[np.zeros(1, np.int32)])
