"""Values of a worker in mid-training in its messages, by field, so that random ones get past the first checks."""

from __future__ import annotations

from typing import Any

from fuzzing import messages
from hypothesis import strategies as st
from malformed_target import ID, LENGTH, ME, STATIC, TABLES_BLOCK, TRAINED, WORLD, Target

from psd.v1 import control_pb2, data_pb2, job_pb2, vectors_pb2
from psd_core.vector_operations import KINDS

IDS = ID.to_bytes(8, "little") * 3
ROWS = [
    data_pb2.RowsPart(table=0, rows=1, dtype=job_pb2.DTYPE_FLOAT32),
    data_pb2.RowsPart(table=1, rows=2, dtype=job_pb2.DTYPE_FLOAT16),
]
"""Of so many ids, and of as many bytes as the gradient of the block that is trained."""
VECTORS = [
    {"name": "v", "size": 9000, "dtype": job_pb2.DTYPE_FLOAT64},
    {"name": "m", "size": 9000, "dtype": job_pb2.DTYPE_FLOAT64, "columns": 3},
]
PAYLOADS = [IDS + bytes(4 * LENGTH - len(IDS)), IDS, b""]


OF_VECTORS = {
    "seq": st.integers(1, 9),
    "numbers": st.sampled_from([[0.5], [0.5, 1.0], []]),
    "rows": st.sampled_from([b"", (5).to_bytes(8, "little")]),
}
"""Fields of requests of vectors that have the names of others, of another type or use."""


def known_fields(target: Target) -> dict[str, Any]:
    """Fields of worker ME, now; see `messages`."""
    core = target.shard._core
    is_exact = core.declared().spec.aggregation == "exact"
    session = core.members.worker(ME).session
    spec = core.declared().spec.to_message()
    known = {
        "caller": {"session": session},
        "run_id": core.run_id,
        "incarnation": core.incarnation,
        "rank": ME,
        "session": st.sampled_from([0, session]),
        "shard_index": 0,
        "shard_count": 2,
        "world_size": WORLD,
        "spec": {field.name: value for field, value in spec.ListFields()},
        "layout_digest": target.layout.digest,
        "clock": 0 if is_exact else core.members.worker(ME).clock,
        "round": 0,
        "members": st.sampled_from([b"\3", b"\7", b""]),
        "choice": target.choice,
        "weight": 1.0,
        "block": st.sampled_from([TRAINED, TRAINED, STATIC, TABLES_BLOCK, TABLES_BLOCK]),
        "blocks": st.sampled_from([[TRAINED], [TABLES_BLOCK], []]),
        "rows": st.sampled_from([ROWS, ROWS, []]),
        "more": st.sampled_from([False, False, True]),
        "payload": st.sampled_from([PAYLOADS[0], *PAYLOADS]),
        "present": st.sampled_from([b"", b"\3", b"\1"]),
        "last": True,
        "name": "b",
        "seq": 1,
        "numbers": st.sampled_from([[], [control_pb2.Number(name="x", real=0.5)], [control_pb2.Number(name="x", integer=3)]]),
        "reduction": st.sampled_from([0, 1, 2, 3, 4]),
        "cut": {"id": "c7"},
        "cuts": {"id": "c7"},
        "created_at": 1.0,
        "step": st.sampled_from([2, 3, 5]),
        "scale": 0.5,
        "ratios": [],
        "is_final": True,
        "checkpoint": "",
        "timeline": st.sampled_from([0, 1]),
        "pull": {},
        "held": st.sampled_from([[], [], [1]]),
        "read": {},
        "push": {"scalars": [data_pb2.GroupScalars(values=values) for values in target.scalars], "scale": st.none()},
    }
    known |= {
        "vectors": [vectors_pb2.VectorSpec(**spec) for spec in VECTORS],
        "vector": st.sampled_from([*VECTORS, {"name": "new", "size": 9, "dtype": job_pb2.DTYPE_INT64}]),
        "operator": st.sampled_from([kind.number for kind in KINDS.values()]),
        "function": st.sampled_from(["abs", "add", "clip", "os:remove"]),
        "out": st.sampled_from([0, 0, 1, 7]),
        "x": st.sampled_from([[0], [0, 1], [], [9]]),
        "y": st.sampled_from([[], [1], [0, 0]]),
        "start": st.sampled_from([0, 0, 1, 6000]),
        "count": st.sampled_from([0, 1, 3]),
        "payload_bytes": st.sampled_from([0, 0, 24]),
    }
    known["frames"] = messages(data_pb2.PushFrame, known).map(lambda frame: [frame])
    return known
