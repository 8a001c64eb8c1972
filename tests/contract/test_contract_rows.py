"""Rows in frames: cut by size, described, and found again."""

import numpy as np
import pytest

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.frames import FRAME_BYTES_MAX
from psd.contract.rows import TableRows, in_frames, parts_of, rows_in
from psd.v1 import data_pb2, job_pb2

DIMS = [64, 3, 5000]


def rows(table, count, dtype=np.float32, start=0):
    ids = np.arange(start, start + count, dtype=np.uint64)
    return TableRows(table, ids, (np.arange(count * DIMS[table]) % 1000).astype(dtype).reshape(count, DIMS[table]))


def payload_of(frame):
    return memoryview(b"".join([t.ids.tobytes() for t in frame] + [t.values.tobytes() for t in frame]))


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 1), (40_000, 7, 500), (15_420, 1, 0)])
def test_rows_come_back_in_order(counts):
    """Rows that were cut into frames come back in order, and no frame is above the limit."""
    sent = [rows(0, counts[0]), rows(1, counts[1], np.float16), rows(2, counts[2], np.uint16)]

    received = [[], [], []]
    for frame in in_frames(sent):
        payload = payload_of(frame)
        assert payload.nbytes <= FRAME_BYTES_MAX
        for got in rows_in(parts_of(frame), payload, DIMS, has_values=True):
            received[got.table].append(got)

    for table, whole in enumerate(sent):
        if len(whole.ids):
            np.testing.assert_array_equal(np.concatenate([r.ids for r in received[table]]), whole.ids)
            np.testing.assert_array_equal(np.concatenate([r.values for r in received[table]]), whole.values)
        else:
            assert not received[table]


def test_ids_alone_make_room_for_values():
    """Where ids alone are sent, there is room for the values."""
    frame = [rows(1, 4)]

    (got,) = rows_in(parts_of(frame), memoryview(frame[0].ids.tobytes()), DIMS, has_values=False)

    assert (got.table, got.ids.tolist(), got.values.shape) == (1, [0, 1, 2, 3], (4, 3))


@pytest.mark.parametrize(
    ("part", "nbytes", "error"),
    [
        ({"table": 3, "rows": 0, "dtype": 1}, 0, "rows.table: 3 is not below 3"),
        ({"table": 1, "rows": 1, "dtype": 2}, 20, "rows.dtype: expected float32, float16 or bfloat16, got number 2"),
        ({"table": 1, "rows": 1, "dtype": 1}, 19, "payload: has 19 bytes, expected 20"),
        ({"table": 1, "rows": 2**32 - 1, "dtype": 1}, 20, "are above 4194304 bytes in one frame"),
    ],
)
def test_wrong_parts_are_named(part, nbytes, error):
    """A part that does not fit the job or the payload is refused by name."""
    assert job_pb2.DTYPE_FLOAT64 == 2
    with pytest.raises((InvalidRequest, InvalidTensor), match=error):
        rows_in([data_pb2.RowsPart(**part)], memoryview(bytes(nbytes)), DIMS, has_values=True)
