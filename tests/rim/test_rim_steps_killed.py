"""A shard killed at any instant while steps come leaves whole pages, and its windows say exactly which pushes they have."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import grpc
import pytest
from free_ports import free_port
from loaded_programs import Program
from raw_steps import Done, StepWorker

from psd.contract.errors import PsdError
from psd.contract.wire import Disconnected
from psd_core.arena import Arena

pytestmark = [pytest.mark.process, pytest.mark.slow]

WORLD = 2
KILLS = int(os.environ.get("PSD_STEP_KILLS", "8")) // 4
POINTS = ["arena.member", "arena.publish.before_header", "arena.publish.before_flip", "arena.publish.after_flip"]


class Killed:
    """A shard of a process of its own.

    Args:
        crash_point: at which it kills itself; empty: at none.
    """

    def __init__(self, directory: Path, crash_point: str = "") -> None:
        address = f"127.0.0.1:{free_port()}"
        command = ["-m", "psd.cli.server", "--shard", "0/1", "--listen", address]
        command += ["--state-dir", str(directory), "--log-level", "error"]
        self.process = Program(command, env=os.environ | {"PSD_CRASH_POINT": crash_point})
        assert "ready at" in self.process.stdout.readline()
        self.address, self.crash_point = address, crash_point

    def end(self) -> None:
        self.process.kill()
        self.process.close()


class Pusher:
    """A worker that pushes as fast as it can until its shard has gone.

    Attributes:
        acknowledged: pushes that were answered. steps: of these, as steps.
    """

    def __init__(self, address: str, rank: int, mode: str, lane: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.worker = StepWorker(self._channel, rank, WORLD, mode=mode, lane=lane)
        self.acknowledged = self.steps = 0

    def push(self, is_fast: threading.Event, have_stepped: threading.Barrier) -> None:
        try:
            while True:
                before = self.worker.offer
                assert isinstance(self.worker.train((1, 2), self.acknowledged), Done)
                is_step = before is not None and before is self.worker.offer
                self.steps += is_step
                self.acknowledged += 1
                if is_step and self.steps == 1:
                    have_stepped.wait(100)
                if self.steps > 20:
                    is_fast.set()
        except (Disconnected, OSError, PsdError, threading.BrokenBarrierError):
            return
        finally:
            have_stepped.abort()
            is_fast.set()

    def close(self) -> None:
        self.worker.close()
        self._channel.close()


class Pushing(Protocol):
    """A worker as Pusher is one."""

    def push(self, is_fast: threading.Event, have_stepped: threading.Barrier) -> None: ...

    def close(self) -> None: ...


def push_until_death(shard: Killed, pushers: Sequence[Pushing], mode: str, after_s: float) -> None:
    """Push until the shard dies, by itself at its crash point, or after some time; then close all. Workers that do not wait for
    each other do so once, after their first steps, since these are so fast that one alone could bring the shard to its end."""
    have_stepped = threading.Barrier(len(pushers) if mode == "async" else 1)
    try:
        with ThreadPoolExecutor(len(pushers)) as pool:
            fast = [threading.Event() for _ in pushers]
            pushing = [pool.submit(pusher.push, event, have_stepped) for pusher, event in zip(pushers, fast, strict=True)]
            if shard.crash_point:
                assert shard.process.wait(100) == -signal.SIGKILL
            else:
                for event in fast:
                    assert event.wait(100)
                threading.Event().wait(after_s)
                shard.process.kill()
            for each in pushing:
                each.result()
    finally:
        shard.end()
        for pusher in pushers:
            pusher.close()


def die(directory: Path, mode: str, lane: str, crash_point: str, after_s: float) -> list[Pusher]:
    """Push until a shard dies; the workers."""
    shard = Killed(directory, crash_point)
    pushers = [Pusher(shard.address, rank, mode, lane) for rank in range(WORLD)]
    push_until_death(shard, pushers, mode, after_s)
    assert all(pusher.steps for pusher in pushers)
    return pushers


def check(directory: Path, mode: str, pushers: list[Pusher]) -> None:
    """Compare what is left with what the workers know."""
    arena = Arena.open(directory)
    assert arena is not None
    try:
        members = [arena.member(rank) for rank in range(WORLD)]
        for block in range(2):
            page = arena.current(block)
            assert page is not None
            counted = [int(clock) for clock in page.clocks]
            for pusher, clock, member in zip(pushers, counted, members, strict=True):
                assert pusher.acknowledged <= clock <= pusher.acknowledged + 1, "nothing that was acknowledged is lost"
                assert member[0] == pusher.worker.session
                assert pusher.acknowledged <= member[1] <= pusher.acknowledged + 1
            assert [int(each) for each in page.sessions] == [pusher.worker.session for pusher in pushers]
            updates = sum(counted) if mode == "async" else counted[0]
            assert page.version == updates
            assert page.parameter.tolist() == [-float(updates) * (block + 1)] * 3, "and each counts once"
            assert mode == "async" or counted[0] == counted[1]
    finally:
        arena.close(remove=False)


@pytest.mark.parametrize(("mode", "lane"), [("async", "memory"), ("sync", "tcp")])
def test_a_shard_killed_at_random_has_each_push_once(tmp_path: Path, mode: str, lane: str) -> None:
    """Nothing that was acknowledged is lost, and nothing counts twice."""
    for life in range(KILLS):
        directory = tmp_path / str(life)
        pushers = die(directory, mode, lane, "", random.uniform(0, 0.2))

        check(directory, mode, pushers)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_shard_killed_between_two_stores_has_each_push_once(tmp_path: Path, mode: str, point: str) -> None:
    """At each store of a publication, and before that of a clock."""
    pushers = die(tmp_path / "state", mode, "tcp", f"{point}:300", 0)

    check(tmp_path / "state", mode, pushers)
