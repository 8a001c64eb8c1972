"""Publishers and shards that are killed while versions are put: each version is whole or not at all, and keeps its number."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_programs import Program
from publisher import parts_of, state_of
from shard_processes import ShardProcess, servers_of

import psd_client
from psd_client.worker.exchange.value_exchange import ValueExchange

pytestmark = pytest.mark.process

READ_EVERY_S = 0.01
PATIENT = {"retry_timeout": 100, "wait_timeout": 100}


@contextmanager
def publisher(servers: str, first: int, count: int, *more: str) -> Iterator[Program]:
    """A publisher's process; killed in the end."""
    program = str(Path(__file__).with_name("publisher.py"))
    arguments = [program, servers, f"{first}", f"{count}", *(more or ("none",))]
    with Program(arguments) as process:
        yield process
        process.kill()


def number_in(weights: psd_client.Weights) -> int:
    """The number of which all tensors and the meta are made."""
    numbers = {float(number) for value in weights.values() for number in np.unique(value)}
    assert numbers == {weights.meta["number"]}, f"version {weights.version} is torn"
    number: int = weights.meta["number"]
    return number


def put_and_die(servers: str, death: str) -> None:
    """Put number 1 as version 1; and 2, in the midst of which the publisher dies."""
    with publisher(servers, 1, 2, death) as process:
        assert process.stdout.read() == "1 1\n"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_put_whose_publisher_dies_before_all_shards_have_it_leaves_no_trace(
    shard_processes: Callable[..., list[ShardProcess]], shards: int
) -> None:
    """The version before stays; the next publisher's put takes the number."""
    running = shard_processes(shards, "--lease", "60")
    servers = servers_of(running)
    with psd_client.connect(servers, role="reader", **PATIENT) as reader:
        put_and_die(servers, "push")
        found = reader.pull()
        assert (found.version, number_in(found)) == (1, 1)
        with psd_client.publish(servers, **PATIENT) as store:
            assert store.put(state_of(3), {"number": 3}) == 2
            found = reader.pull()
            assert (found.version, number_in(found)) == (2, 3)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_put_that_all_shards_have_is_there_when_the_next_publisher_comes(
    shard_processes: Callable[..., list[ShardProcess]], shards: int
) -> None:
    """Though nobody has told all of them that it counts."""
    running = shard_processes(shards, "--lease", "60")
    servers = servers_of(running)
    with psd_client.connect(servers, role="reader", **PATIENT) as reader:
        put_and_die(servers, "commit")
        with psd_client.publish(servers, like=state_of(0), **PATIENT) as store:
            assert store.version == 2
            found = reader.pull()
            assert (found.version, number_in(found)) == (2, 2)
            assert store.put(state_of(3), {"number": 3}) == 3


def test_a_put_that_is_committed_is_read_though_no_publisher_comes(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0 alone knows that it counts. Readers tell the others, whose token lets them change nothing of their own."""
    files = [tmp_path / role for role in ("publisher", "reader")]
    for file in files:
        file.write_text(f"token-of-a-{file.name}")
    (tmp_path / "tokens").write_text("".join(f"{file.name} {file.read_text()}\n" for file in files))
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    monkeypatch.setenv("PSD_TOKEN_FILE", str(files[0]))
    running = shard_processes(3, "--lease", "60", "--token-file", str(tmp_path / "tokens"))
    servers = servers_of(running)
    with psd_client.connect(servers, role="reader", token_file=str(files[1]), **PATIENT) as reader:
        put_and_die(servers, "commit")
        found = reader.pull(newer_than=1, timeout=60)
        assert (found.version, number_in(found)) == (2, 2)


def test_a_put_that_is_lost_by_two_deaths_is_read_by_nobody(shard_processes: Callable[..., list[ShardProcess]]) -> None:
    """Shard 0 has it; another shard was killed with it, before it was told, and nobody can send it again."""
    running = shard_processes(3, "--lease", "60")
    servers = servers_of(running)
    with psd_client.connect(servers, role="reader", **PATIENT) as reader:
        put_and_die(servers, "commit")
        running[1].kill()
        running[1].start()
        with psd_client.publish(servers, like=state_of(0), **PATIENT) as store:
            with pytest.raises((psd_client.WaitTimeout, psd_client.CutMissed)):
                reader.pull(timeout=0.1)
            assert store.put(state_of(3), {"number": 3}) == 3
            found = reader.pull()
            assert (found.version, number_in(found)) == (3, 3)
            running[1].kill()
            running[1].start()
            assert store.put(state_of(4), {"number": 4}) == 4
            found = reader.pull()
            assert (found.version, number_in(found)) == (4, 4)


def test_a_part_of_a_lost_version_is_put_again(
    shard_processes: Callable[..., list[ShardProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that lives learns that its version is lost, by the deaths of the other rank and of a shard."""
    running = shard_processes(2, "--lease", "60")
    servers = servers_of(running)
    is_lost = threading.Event()
    fetch = ValueExchange._fetch

    def fetch_late(self: ValueExchange, *arguments: Any, **options: Any) -> None:
        """As if this process were slow to hear of the decision."""
        if self.is_unconfirmed:
            assert is_lost.wait(100)
        fetch(self, *arguments, **options)

    def opened(rank: int) -> psd_client.Store:
        return psd_client.publish(servers, parts=parts_of(0), rank=rank, **PATIENT)

    with (
        ThreadPoolExecutor(2) as pool,
        publisher(servers, 1, 1, "commit", "parts") as process,
        opened(1) as store,
        psd_client.connect(servers, role="reader", **PATIENT) as reader,
    ):
        monkeypatch.setattr(ValueExchange, "_fetch", fetch_late)
        putting = pool.submit(store.put, parts_of(1)[1], {"number": 1})
        process.wait(100)
        running[1].kill()
        running[1].start()
        is_lost.set()
        with opened(0) as other:
            assert other.put(parts_of(1)[0], {"number": 1}) == putting.result(100) == 2
            found = reader.pull()
            assert (found.version, number_in(found)) == (2, 1)


def test_a_put_goes_on_after_a_shard_has_lost_what_it_held(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path
) -> None:
    """All shards go back to a checkpoint; its tensors, and what is put then, are later versions than any that was read."""
    running = shard_processes(2, "--lease", "60", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    servers = servers_of(running)
    with (
        ThreadPoolExecutor(1) as pool,
        psd_client.publish(servers, **PATIENT) as store,
        psd_client.connect(servers, role="reader", **PATIENT) as reader,
    ):
        number = 1
        store.put(state_of(number), {"number": number})
        storing = pool.submit(running[0].checkpoint)
        while not storing.done():
            number += 1
            store.put(state_of(number), {"number": number})
        storing.result()
        latest = store.put(state_of(number + 1), {"number": number + 1})
        assert number_in(reader.pull()) == number + 1
        running[1].kill()
        running[1].lose_state()
        running[1].start()

        version = store.put(state_of(number + 2), {"number": number + 2})

        found = reader.pull(newer_than=latest)
        assert (found.version, number_in(found)) == (version, number + 2)
        assert version > latest + 2  # one number was the checkpoint's


def read_on(servers: str, stop: threading.Event, on_read: Callable[[], object]) -> dict[int, int]:
    """What a reader gets, version for version: whole, and none older than the one before."""
    seen: dict[int, int] = {}
    with psd_client.connect(servers, role="reader", **PATIENT) as reader:
        latest = 0
        while not stop.wait(READ_EVERY_S):
            try:
                found = reader.pull(timeout=2)
            except (psd_client.WaitTimeout, psd_client.CutMissed, psd_client.NotDeclared):
                continue
            number = number_in(found)
            assert found.version >= latest, f"{found.version} after {latest}"
            assert seen.setdefault(found.version, number) == number
            latest = found.version
            on_read()
    return seen


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(2, 6))])
def test_versions_never_lie_while_shards_and_publishers_are_killed(
    shard_processes: Callable[..., list[ShardProcess]], seed: int
) -> None:
    """At random instants, one alone, or a shard together with the publisher. What put has returned is there, by its number."""
    chance = random.Random(seed)
    running = shard_processes(3, "--lease", "60")
    servers = servers_of(running)
    acknowledged: dict[int, int] = {}
    stop, has_read = threading.Event(), threading.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read_on, servers, stop, has_read.release) for _ in range(2)]
        try:
            for life in range(4):
                with publisher(servers, 1 + 10_000 * life, 10_000) as process:
                    for _ in range(chance.randint(3, 8)):
                        version, number = map(int, process.stdout.readline().split())
                        acknowledged[version] = number
                    assert has_read.acquire(timeout=100)
                    threading.Event().wait(chance.uniform(0, 0.03))
                    victim = chance.choice(running)
                    if chance.random() < 0.5:
                        process.kill()
                    victim.kill()
                    victim.start()
                    process.kill()
                    for line in process.stdout.read().splitlines():
                        version, number = map(int, line.split())
                        acknowledged[version] = number
            with psd_client.publish(servers, like=state_of(0), **PATIENT) as store:
                last = store.put(state_of(7), {"number": 7})
                acknowledged[last] = 7
                with psd_client.connect(servers, role="reader", **PATIENT) as reader:
                    found = reader.pull()
                stop.set()
                seen = [job.result(100) for job in reading]
        finally:
            stop.set()

    assert list(acknowledged) == sorted(acknowledged)
    assert (found.version, number_in(found)) == (last, 7)
    for mine in seen:
        assert mine
        assert all(acknowledged.get(version, number) == number for version, number in mine.items())
    assert {version: number for version, number in seen[0].items() if version in seen[1]} == {
        version: number for version, number in seen[1].items() if version in seen[0]
    }
