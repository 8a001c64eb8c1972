"""Damaged steps: whatever comes, it counts once, or is answered AGAIN, or ends the connection; and the shard goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from raw_steps import Again, Done, StepWorker

from psd.contract.errors import PsdError
from psd.contract.wire import PREFIX, Disconnected, Kind

ROUNDS = int(os.environ.get("PSD_DAMAGED_STEPS", "300"))
FRONT = PREFIX.size + 48
"""Bytes of prefix and fixed head, in which most of the damage is done."""


def whole(worker: StepWorker, clock: int) -> bytearray:
    """The bytes of a sound step."""
    return bytearray(worker.packed((1, 2), clock, present=(b"\1", b"\1") if clock % 3 else ()))


def damage(message: bytearray, choice: random.Random) -> bytearray:
    for _ in range(choice.randint(1, 3)):
        kind = choice.random()
        at = choice.randrange(FRONT if choice.random() < 0.7 else len(message))
        if kind < 0.5:
            message[at] ^= 1 << choice.randrange(8)
        elif kind < 0.8:
            message[at] = choice.choice([0, 1, 0x7F, 0x80, 0xFF])
        else:
            at -= at % 8
            message[at : at + 8] = choice.randbytes(len(message[at : at + 8]))
    return message


@pytest.mark.parametrize(
    ("mode", "lane"), [("async", "tcp"), ("async", "memory"), ("sync", "tcp"), ("sync", "memory"), ("ssp", "local")]
)
def test_damaged_steps_do_no_harm(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], mode: str, lane: str) -> None:
    """Versions and counts are those of the pushes that were answered."""
    choice = random.Random(f"{mode} {lane}")
    server = cluster(1).shards[0]
    worker = StepWorker(dial(server.address), mode=mode, lane=lane)
    clock, ends, agains, dones = 0, 0, 0, 0
    for _ in range(ROUNDS):
        while worker.offer is None:
            assert worker.push_pull((1, 2), clock).counted == 2
            clock += 1
        message = damage(whole(worker, clock), choice)
        kind, head_bytes, payload_bytes = PREFIX.unpack_from(message)
        is_whole = PREFIX.size + head_bytes + payload_bytes <= len(message)
        try:
            worker.stream.socket.sendall(message)
            if not is_whole and kind != Kind.STEP:
                worker.stream.close()  # the shard waits for the rest
            found = worker.end_step()
        except (Disconnected, PsdError, OSError):
            ends += 1
            worker.stream.close()
            worker.open()
            continue
        if isinstance(found, Again):
            agains += 1
            continue
        assert isinstance(found, Done)
        dones += 1
        assert found.counted in (0, 2)
        clock += found.counted == 2
    worker.close()

    assert min(ends, agains, dones) > 0
    assert set(server.shard.job.trained_versions) == {clock}
    assert server.shard.status().counters.pushes_accepted == clock
