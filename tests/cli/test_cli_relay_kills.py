"""Relays of processes that are killed, suspended and started again, all the time: no reader sees what it must not."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from commands import Process
from free_ports import claimed_port

import psd_client

SIZE = 400_000  # blocks of several shards
READERS = 6
WAIT_S = 300.0


class Tree:
    """Two shards, two relays of theirs, and one of these; each is started again at its address when it has died."""

    def __init__(self, start: Callable[..., Process], ports: list[int], state_dir: str) -> None:
        shards, relays = [f"127.0.0.1:{port}" for port in ports[:2]], [f"127.0.0.1:{port}" for port in ports[2:]]
        self.servers = ",".join(shards)
        self.below = "|".join(relays[:2])
        self.choices = [self.below, f"{relays[1]}|{relays[0]}", f"{relays[2]}|{relays[0]}"]
        self._start = start
        self._commands = [
            *(
                ["--shard", f"{index}/2", "--listen", address, "--state-dir", f"{state_dir}/{index}", "--run-id", "mine"]
                for index, address in enumerate(shards)
            ),
            *(["--relay-of", self.servers, "--listen", address] for address in relays[:2]),
            ["--relay-of", self.below, "--listen", relays[2]],
        ]
        self._processes = [self._begin(index) for index in range(len(self._commands))]

    def _begin(self, index: int) -> Process:
        process = self._start("psd.cli.server", *self._commands[index])
        process.line(r"ready at (\S+)")
        return process

    def strike(self, chance: random.Random) -> None:
        """Kill one of them, or suspend it for a moment."""
        index = chance.randrange(len(self._processes))
        process = self._processes[index]
        if chance.random() < 0.3:
            process.signal(signal.SIGSTOP)
            threading.Event().wait(chance.random())
            process.signal(signal.SIGCONT)
            return
        process.signal(signal.SIGKILL)
        process.end()
        self._processes[index] = self._begin(index)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    claims = [claimed_port() for _ in range(5)]
    yield [port for port, _ in claims]
    for _, claim in claims:
        claim.close()


def follow(servers: str, last: int) -> tuple[list[int], list[str]]:
    """The versions that a reader has had until it has the last, and what was wrong with them."""
    versions: list[int] = []
    wrong: list[str] = []
    with psd_client.connect(servers, role="reader", wait_timeout=WAIT_S, retry_timeout=WAIT_S) as reader:
        while not versions or versions[-1] < last:
            weights = reader.pull(newer_than=versions[-1] if versions else None)
            if not (weights["w"] == -float(weights.version)).all():
                wrong.append(f"version {weights.version} has {np.unique(weights['w'])}")
            versions.append(weights.version)
    return versions, wrong


@pytest.mark.process
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("versions", "strikes"),
    [pytest.param(40, 8, id="short"), pytest.param(1000, 200, id="long", marks=pytest.mark.chaos)],
)
def test_no_reader_sees_a_torn_an_older_or_a_mislabelled_version(
    start: Callable[..., Process], ports: list[int], tmp_path: Any, versions: int, strikes: int
) -> None:
    """Whatever is killed; and in the end each has the last one."""
    tree = Tree(start, ports, str(tmp_path))
    chance = random.Random(versions)
    found: dict[int, tuple[list[int], list[str]]] = {}
    struck = threading.Event()

    def read(reader: int) -> None:
        found[reader] = follow(tree.choices[reader % len(tree.choices)], versions)

    def train() -> None:
        with psd_client.connect(tree.servers, 0, 1, run_id="mine", wait_timeout=WAIT_S, retry_timeout=WAIT_S) as ps:
            ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
            for _ in range(versions):
                ps.push_pull({"w": np.ones(SIZE, np.float32)})
                if not struck.is_set():
                    struck.wait(0.02)
            ended.wait(WAIT_S)

    ended = threading.Event()
    threads = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in range(READERS)]
    trainer = threading.Thread(target=train, daemon=True)
    for thread in (trainer, *threads):
        thread.start()
    for _ in range(strikes):
        tree.strike(chance)
    struck.set()
    for thread in threads:
        thread.join(WAIT_S)
    ended.set()
    trainer.join(WAIT_S)

    assert sorted(found) == list(range(READERS))
    assert [wrong for _, wrong in found.values() if wrong] == []
    for had, _ in found.values():
        assert had == sorted(set(had))
        assert had[-1] == versions
