"""Memory for rows that shards on the same machine see: who has it, when it is free again, and what travels if it is not."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, until
from scripted_shard import Conversation, ScriptedShard, ToldLane

from psd.contract.jobspec import GroupSpec, JobSpec
from psd.contract.layout import Layout
from psd.contract.rows import TableRows
from psd.contract.tables import SparseTableSpec
from psd.v1 import data_pb2, job_pb2
from psd_client import SGD, Table, connect
from psd_client.client import worker_of
from psd_client.lanes import rows_memory, silence_deadline
from psd_client.lanes.flat import FlatBuffers, share_memory
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.lanes.segment import Segment
from psd_client.lanes.transport import Call, Cancelled, GradientPart, RowsAhead, Scope

F32 = np.dtype(np.float32)
LAYOUT = Layout(JobSpec(1, (), (GroupSpec("sgd"),), tables=(SparseTableSpec("a", 3),)), 1)
Start = Callable[..., Any]


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Segment:
    monkeypatch.setattr(rows_memory, "ROWS_BYTES", 4096)
    return Segment(2 * 4096)


def test_memory_is_lent_until_all_that_was_made_of_it_is_let_go(segment: Segment) -> None:
    memory, other = RowsMemory(segment), RowsMemory(segment)
    first, second = memory.arrays([(3, 5), (0, 2)], [F32, np.dtype(np.uint16)])
    assert segment.where([first, second, first[2:]]) == [4096, 4096 + 64, 4096 + 40]
    assert segment.where(other.arrays([(1, 1)], [F32])) == [8192]
    kept = first[1:].reshape(-1).view(np.uint8)

    del first, second
    (elsewhere,) = memory.arrays([(3, 5)], [F32])
    assert segment.where([kept, elsewhere]) == []
    del kept
    (again,) = memory.arrays([(3, 5)], [F32])
    assert segment.where([again]) == [4096]


def test_memory_that_is_too_small_or_given_up_is_ordinary(segment: Segment) -> None:
    memory = RowsMemory(segment)

    assert segment.where(memory.arrays([(65, 16)], [F32])) == []
    (array,) = memory.arrays([(64, 16)], [F32])
    assert segment.where([array]) == [4096]
    array[:] = 3
    segment.give_up([array])
    assert (array == 3).all()
    assert segment.where([array]) == []
    del array
    assert segment.where(memory.arrays([(1, 1)], [F32])) == []


@pytest.mark.parametrize("room", [rows_memory.ROWS_BYTES, 4096], ids=["in memory", "too many"])
def test_rows_are_the_same_whether_they_fit_or_travel(cluster: Start, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Several tables, dtypes and shards; ids that come twice, and a program that reuses its arrays at once."""
    monkeypatch.setattr(rows_memory, "ROWS_BYTES", room)
    ids, grads = np.arange(300) % 200, np.ones((300, 6), np.float32)
    with connect(cluster(2).servers, 0, 1, transport="shm") as ps:
        ps.declare({}, tables=[Table(kind, 6, SGD(lr=1.0), dtype=kind) for kind in ("float32", "bfloat16")])
        for step in range(3):
            grads[:] = 1 << step
            ps.push({}, tables={"float32": (ids, grads), "bfloat16": (ids[:7], grads[:7].astype(np.float16))})
            grads[:] = np.nan
        exact, rounded = worker_of(ps).pull_rows({0: ids, 1: ids}).values()

    assert exact[:, 0].tolist() == [-14.0 if i < 100 else -7.0 for i in ids]
    assert rounded[:, 5].tolist() == [-7.0 if i < 7 else 0.0 for i in ids]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["pull", "push_pull"])
def test_call_when_cancelled_then_a_shard_that_holds_on_writes_no_rows_that_the_worker_sees(
    scripted: Callable[..., ScriptedShard], told: Callable[..., ToldLane], monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """It may be suspended, and go on later where it was."""
    monkeypatch.setattr(silence_deadline, "PAUSE_S", 0.05)
    monkeypatch.setattr(silence_deadline, "CANCEL_S", 0.1)

    def holds_on(conversation: Conversation) -> None:
        conversation.welcome()
        conversation.take_memory()
        conversation.wait()

    shard, scope = scripted(holds_on, local=True), Scope()
    lane, segment = told(local_name=shard.local_name, transport="shm"), share_memory(LAYOUT)
    assert segment is not None
    gradients, parameters = FlatBuffers(LAYOUT, segment=segment, of_gradients=True), FlatBuffers(LAYOUT, segment=segment)
    share = lane.prepare(job_pb2.Caller(), Call(30.0, scope))
    assert share is not None
    share(gradients, [parameters])
    (values,) = RowsMemory(segment).arrays([(3000, 3)], [F32])
    values[:] = 1
    wanted = [TableRows(0, np.arange(3000, dtype=np.uint64), values)]

    def call() -> None:
        if is_ahead:
            part = GradientPart((), gradients, tables_block=0, header=data_pb2.PushHeader())
            lane.push_pull(part, parameters, Call(30.0, scope), RowsAhead(wanted))
        else:
            lane.pull_rows(data_pb2.PullRequest(), wanted, Call(30.0, scope))

    (start,) = segment.where([values])
    assert start is not None
    calling = Thread(call)
    until(lambda: lane._bulk._open is not None and lane._bulk._open._wanted is not None)
    scope.cancel()

    with pytest.raises(Cancelled):
        calling.result()
    assert segment.is_given_up
    theirs = np.frombuffer(mmap.mmap(shard.conversations[0].memory_fd, segment.nbytes), np.float32)
    theirs[start // 4 :][: values.size] = 77
    assert (values == 1).all()
