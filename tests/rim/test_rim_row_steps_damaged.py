"""Damaged steps with rows: whatever comes counts once, or is answered AGAIN, or ends the connection; and the shard goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import SGD
from raw_row_steps import ROWS, RowsDone, RowStepWorker
from raw_steps import CASE, REVOKED, Again
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

    return lambda lane: armed(cluster(1).shards[0], dial, lane)


def armed(server: Any, dial: Callable[..., grpc.Channel], lane: str) -> RowStepWorker:
    worker = RowStepWorker(dial(server.address), lane=lane, job=job_of("async", 1))
    worker.scalars = [SGD, SGD]
    rearm(worker)
    return worker


def kept(worker: RowStepWorker, message: bytearray) -> list[Any]:
    """Write the worker's next step there, in place of sending it; what `receive_rows` needs."""
    with pytest.MonkeyPatch.context() as patch:

        def keep(kind: Kind, head: bytes = b"", *payload: bytes) -> None:
            message.extend(PREFIX.pack(kind, len(head), sum(map(len, payload))) + head + b"".join(payload))

        patch.setattr(worker.stream, "send", keep)
        return worker.send_rows((1,), worker.clock, PUSHED, PULLED)


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
def test_a_step_with_rows_that_comes_after_its_tables_were_closed_is_none(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], lane: str
) -> None:
    """As when a job goes back to a checkpoint. A build with a sanitizer tells if it looks at what is gone."""
    server = cluster(1).shards[0]
    worker = armed(server, dial, lane)
    server.shard._core.revoke()
    for partition in server.shard.job.tables.partitions:
        partition.store.close(remove=False)
    found = worker.receive_rows(worker.send_rows((1,), worker.clock, PUSHED, PULLED))
    assert found == Again(REVOKED)
    worker.close()


@pytest.mark.parametrize("lane", ["tcp", "memory"])
def test_damaged_steps_with_rows_do_no_harm(start: Callable[[str], RowStepWorker], lane: str) -> None:
    """Versions are those of the pushes that were answered."""
    choice = random.Random(lane)
    worker, dones, agains, ends = start(lane), 0, 0, 0
    for _ in range(ROUNDS):
        rearm(worker)
        message = bytearray()
        sent = kept(worker, message)
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


def test_damaged_steps_do_no_harm_to_the_rounds_of_others(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]
) -> None:
    """What a step has brought, damaged or not, is its worker's gradient in the round, once; rounds go on."""
    choice, shard = random.Random(3), cluster(1).shards[0]
    good, bad = (RowStepWorker(dial(shard.address), rank, 2, job=job_of("sync", 2), lane="tcp") for rank in range(2))
    for worker in (good, bad):
        worker.scalars = [SGD, SGD]
    steps = damaged = 0
    with ThreadPoolExecutor(1) as pool:
        for clock in range(ROUNDS // 2):
            its = pool.submit(good.train_rows, (1,), clock, PUSHED, PULLED)
            if bad.offer is not None:
                damaged += 1
                message, bad.clock = bytearray(), clock
                sent = kept(bad, message)
                rows_at = PREFIX.size + bad.offer.head_bytes - 2 * ROWS.size
                for _ in range(choice.randint(1, 3)):
                    at = choice.choice([choice.randrange(16), choice.randrange(rows_at, len(message))])
                    message[at] = choice.choice([0, 1, 0x7F, 0x80, 0xFF, message[at] ^ 1 << choice.randrange(8)])
                try:
                    bad.stream.socket.sendall(message)
                    bad.stream.socket.shutdown(1)
                    bad.receive_rows(sent)
                except (PsdError, Disconnected, OSError, AssertionError, ValueError):
                    pass
                bad.stream.close()
                bad.open()
            assert bad.push_rows((1,), clock, PUSHED, PULLED).clock == clock + 1
            found, is_step = its.result(100)
            assert (found.clock, found.counted + found.duplicate) == (clock + 1, 2)
            steps += is_step
    notes = {tuple(partition.store.notes().tolist()) for partition in shard.shard.job.tables.partitions}
    assert notes == {(clock + 1, good.session, bad.session, clock + 1, clock + 1)}
    assert steps > 0
    assert damaged > 0
    good.close()
    bad.close()
