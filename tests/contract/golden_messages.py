"""The messages whose bytes are kept in tests/golden.

`python tests/contract/golden_messages.py` writes those that are missing. The bytes of a released version never change.
"""

from __future__ import annotations

import struct
from pathlib import Path

from google.protobuf.message import Message

from psd.contract import frames
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2

GOLDEN = Path(__file__).parents[1] / "golden"

CALLER = job_pb2.Caller(run_id="run-1", incarnation=0x0123456789ABCDEF, rank=3, session=1_700_000_000_000_000)
DIGEST = bytes(range(16))
PAYLOAD = struct.pack("<6f", 0.0, -0.0, 1.5, -2.25, 3.4028234663852886e38, 1e-45)

PUSH_HEADER = data_pb2.PushHeader(
    caller=CALLER,
    clock=41,
    weight=128.0,
    layout_digest=DIGEST,
    scalars=[data_pb2.GroupScalars(values=[0.1, 0.9, 0.0, 1e-4]), data_pb2.GroupScalars()],
)
SPEC = job_pb2.JobSpec(
    world_size=4,
    quorum=3,
    mode=job_pb2.CONSISTENCY_MODE_SYNC,
    reduction=job_pb2.REDUCTION_MEAN,
    groups=[job_pb2.GroupSpec(rule="sgd", flags=["momentum", "nesterov"]), job_pb2.GroupSpec(rule="static")],
    tensors=[
        job_pb2.TensorSpec(name="conv.weight", shape=[3, 3, 3], dtype=job_pb2.DTYPE_FLOAT32),
        job_pb2.TensorSpec(name="mean", dtype=job_pb2.DTYPE_FLOAT64, group=1),
    ],
)

NUMBERS_BY_NAME = [control_pb2.Number(name="count", integer=-3), control_pb2.Number(name="loss", real=0.25)]

# Name -> the message without its payload, and the payload (None for messages that have none).
MESSAGES: dict[str, tuple[Message, bytes | None]] = {
    "push_frame_first": (data_pb2.PushFrame(push=PUSH_HEADER, block=7), PAYLOAD),
    "push_frame_last": (data_pb2.PushFrame(block=11, present=b"\x05", last=True), PAYLOAD),
    "push_frame_empty": (data_pb2.PushFrame(push=PUSH_HEADER, last=True), b""),
    "pull_frame": (data_pb2.PullFrame(block=7, version=1 << 40), PAYLOAD),
    "pull_frame_reply": (
        data_pb2.PullFrame(push=data_pb2.PushReply(clock=42, blocks_counted=2, blocks_duplicate=1, blocks_late=3)),
        b"",
    ),
    "initialize_frame": (data_pb2.InitializeFrame(caller=CALLER, layout_digest=DIGEST, block=0), PAYLOAD),
    "pull_request": (data_pb2.PullRequest(caller=CALLER, clock=42, layout_digest=DIGEST, blocks=[7, 11, 300]), None),
    "join_request": (
        control_pb2.JoinRequest(run_id="run-1", shard_index=1, shard_count=4, rank=3, world_size=4, session=9, host="h", pid=7),
        None,
    ),
    "declare_request": (control_pb2.DeclareRequest(caller=CALLER, spec=SPEC), None),
    "barrier_request": (control_pb2.BarrierRequest(caller=CALLER, name="epoch-1", seq=2), None),
    "barrier_request_numbers": (
        control_pb2.BarrierRequest(caller=CALLER, name="all_reduce", seq=3, numbers=NUMBERS_BY_NAME, reduction=1),
        None,
    ),
    "barrier_reply_numbers": (control_pb2.BarrierReply(generation=2, numbers=NUMBERS_BY_NAME, workers=4), None),
    "stop_reply": (control_pb2.StopReply(orders=job_pb2.JobOrders(ends_at=43, asked_by=0)), None),
}

DECISION = job_pb2.Decision(round=41, members=b"\x0d")
VERDICT = job_pb2.Verdict(round=41, scale=0.25, ratios=[1.0, 0.5], is_final=True)
MEASURE = job_pb2.Measure(is_finite=True, squares=[bytes(100) + b"\x01", b""])
MESSAGES |= {
    "commit_request": (
        control_pb2.CommitRequest(
            caller=CALLER, clock=41, without_waiting=True, skip=True, measures=[MEASURE], verdict=job_pb2.Verdict(round=41)
        ),
        None,
    ),
    "commit_reply": (control_pb2.CommitReply(decisions=[DECISION], clock=42, verdict=VERDICT), None),
    "measure_request": (
        control_pb2.MeasureRequest(caller=CALLER, clock=42, decisions=[DECISION], round=41, verdict=job_pb2.Verdict(scale=1.0)),
        None,
    ),
    "measure_reply": (control_pb2.MeasureReply(is_closed=True, measure=MEASURE), None),
    "pull_request_verdict": (data_pb2.PullRequest(caller=CALLER, clock=42, layout_digest=DIGEST, verdict=VERDICT), None),
}


HELD = [42, 0, 300]
MESSAGES |= {
    "pull_request_held": (data_pb2.PullRequest(caller=CALLER, clock=42, layout_digest=DIGEST, held=HELD), None),
    "push_frame_held": (data_pb2.PushFrame(push=data_pb2.PushHeader(caller=CALLER, clock=41, held=HELD), block=7), PAYLOAD),
    "pull_frame_difference": (data_pb2.PullFrame(block=7, version=42, base=42), bytes.fromhex("803c7f81000102")),
    "pull_frame_same": (data_pb2.PullFrame(block=7, version=44, base=43), b""),
}

ROWS = [data_pb2.RowsPart(table=1, rows=2, dtype=job_pb2.DTYPE_FLOAT16), data_pb2.RowsPart(rows=1, dtype=job_pb2.DTYPE_FLOAT32)]
IDS = struct.pack("<3Q", 0, 2**64 - 1, 7)
NUMBERS = struct.pack("<2e1f", 1.5, -2.0, 3.25)
PULL = data_pb2.PullRequest(caller=CALLER, clock=42, layout_digest=DIGEST)
MESSAGES |= {
    "push_frame_rows": (data_pb2.PushFrame(block=12, rows=ROWS, more=True), IDS + NUMBERS),
    "push_frame_no_rows": (data_pb2.PushFrame(push=PUSH_HEADER, block=12, last=True), b""),
    "rows_request": (data_pb2.RowsRequest(pull=PULL, rows=ROWS, counts_no_use=True, last=True), IDS),
    "rows_request_read": (
        data_pb2.RowsRequest(read=data_pb2.ReadRequest(run_id="run-1", layout_digest=DIGEST), rows=ROWS),
        IDS,
    ),
    "rows_frame": (data_pb2.RowsFrame(rows=ROWS, version=1 << 40), NUMBERS),
    "push_frame_in_memory": (
        data_pb2.PushFrame(push=PUSH_HEADER, in_memory=[7, 300], in_memory_present=[b"\x05", b""], last=True),
        None,
    ),
    "push_frame_rows_in_memory": (data_pb2.PushFrame(block=12, rows=ROWS, rows_at=[64, 1 << 33], last=True), IDS),
    "bulk_call_rows": (bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PULL_ROWS, timeout_s=60.0), None),
}


def wire_bytes(head: Message, payload: bytes | None) -> bytes:
    """The message as psd writes it."""
    data = head.SerializeToString(deterministic=True)
    return data if payload is None else frames.join(data, payload)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, (head, payload) in MESSAGES.items():
        path = GOLDEN / f"{name}.bin"
        if not path.exists():
            path.write_bytes(wire_bytes(head, payload))
