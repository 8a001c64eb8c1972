"""Damaged steps with rows: whatever comes counts once, or is answered AGAIN, or ends the connection; and the shard goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import SGD
from raw_row_steps import ROWS, RowsDone, RowStepWorker
from raw_steps import CASE, Again
from test_rim_row_steps_killed import job_of

from psd.contract.errors import PsdError
from psd.contract.wire import PREFIX, Disconnected, Kind

ROUNDS = int(os.environ.get("PSD_DAMAGED_STEPS", "300"))
IDS = np.arange(5, dtype=np.uint64)
PUSHED: Any = dict.fromkeys(range(2), (IDS, np.ones((5, 2), np.float32)))
PULLED: Any = dict.fromkeys(range(2), IDS[:3])
FAR = 1 << 40


@pytest.fixture
def start(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Callable[[str], RowStepWorker]:
    """start(lane) -> a worker that is armed, of a shard of its own."""

    def started(lane: str) -> RowStepWorker:
        worker = RowStepWorker(dial(cluster(1).shards[0].address), lane=lane, job=job_of("async", 1))
        worker.scalars = [SGD, SGD]
        while worker.offer is None:
            worker.push_rows((1,), worker.clock, PUSHED, PULLED)
            worker.clock += 1
        return worker

    return started


def rearm(worker: RowStepWorker) -> None:
    while worker.offer is None:
        worker.push_rows((1,), worker.clock, PUSHED, PULLED)
        worker.clock += 1


@pytest.mark.parametrize(
    "head",
    [
        [5, 3, 64, 64, 2],
        [5, 3, 63, 64, 1],
        [5, 3, 66, 64, 1],
        [5, 3, FAR, 64, 1],
        [5, 3, 64, FAR, 1],
        [5, 3, 64, (1 << 64) - 4, 1],
    ],
    ids=["flags", "too early", "not aligned", "gradients beyond the end", "rows beyond the end", "overflow"],
)
def test_rows_elsewhere_than_in_memory_are_no_step(start: Callable[[str], RowStepWorker], head: list[int]) -> None:
    """Nothing is read or written there, and nothing counts."""
    worker = start("memory")
    found = worker.receive_rows(worker.send_rows((1,), worker.clock, PUSHED, PULLED, head={0: head}))
    assert found == Again(CASE)
    assert worker.push_rows((1,), worker.clock, PUSHED, PULLED).counted == 2
    worker.close()


@pytest.mark.parametrize("head", [[6, 3, 0, 0, 1], [5, FAR, 0, 0, 1], [FAR, 3, 0, 0, 1], [(1 << 64) - 1, 3, 0, 0, 1]])
def test_other_numbers_of_rows_than_come_end_the_connection(start: Callable[[str], RowStepWorker], head: list[int]) -> None:
    """For nobody knows any more where the next message begins."""
    worker = start("tcp")
    with pytest.raises(PsdError, match="another size"):
        worker.receive_rows(worker.send_rows((1,), worker.clock, PUSHED, PULLED, head={0: head}))
    worker.stream.close()
    worker.open()
    assert worker.push_rows((1,), worker.clock, PUSHED, PULLED).counted == 2
    worker.close()


@pytest.mark.parametrize("lane", ["tcp", "memory"])
def test_damaged_steps_with_rows_do_no_harm(start: Callable[[str], RowStepWorker], lane: str) -> None:
    """Versions are those of the pushes that were answered."""
    choice = random.Random(lane)
    worker, dones, agains, ends = start(lane), 0, 0, 0
    for _ in range(ROUNDS):
        rearm(worker)
        message = bytearray()
        with pytest.MonkeyPatch.context() as patch:

            def keep(kind: Kind, head: bytes = b"", *payload: bytes, into: bytearray = message) -> None:
                into.extend(PREFIX.pack(kind, len(head), sum(map(len, payload))) + head + b"".join(payload))

            patch.setattr(worker.stream, "send", keep)
            sent = worker.send_rows((1,), worker.clock, PUSHED, PULLED)
        assert worker.offer is not None
        rows_at = PREFIX.size + worker.offer.head_bytes - 2 * ROWS.size
        for _ in range(choice.randint(1, 3)):
            at = choice.choice(
                [choice.randrange(16), rows_at + choice.randrange(2 * ROWS.size), choice.randrange(len(message))]
            )
            message[at] = choice.choice([0, 1, 0x7F, 0x80, 0xFF, message[at] ^ 1 << choice.randrange(8)])
        try:
            worker.stream.socket.sendall(message)
            worker.stream.socket.shutdown(1)  # what was to follow never comes
            found = worker.receive_rows(sent)
        except (PsdError, Disconnected, OSError, AssertionError, ValueError):
            ends += 1
        else:
            dones, agains = dones + isinstance(found, RowsDone), agains + isinstance(found, Again)
            if isinstance(found, RowsDone):
                worker.clock = found.clock
        worker.stream.close()
        worker.open()
    rearm(worker)
    found = worker.receive_rows(worker.send_rows((1,), worker.clock, PUSHED, PULLED))
    assert isinstance(found, RowsDone)
    assert agains
    assert ends
    worker.close()
