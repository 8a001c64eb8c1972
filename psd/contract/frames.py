"""Frames: protobuf messages whose bulk data is the last field, built and read without copying the data more than once.

A frame on the wire is  [header fields] [padding, field 14] [tag and length of the payload, field 15] [payload].  It is the
very bytes that protobuf would write for the same message (a test compares them), so any stock client can speak it. `join`
makes one; `split` takes one apart whatever order a foreign serializer chose. The padding lets the payload start on an 8-byte
boundary, which the kernels need; a frame without it costs a copy, nothing else.

Must not know what the fields mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, InvalidTensor

PADDING_FIELD = 14
PAYLOAD_FIELD = 15
ALIGNMENT = 8  # of float64; bytes objects themselves start on 16-byte boundaries

FRAME_BYTES_MAX = 4 << 20
"""Largest payload of a frame of rows or of vectors, unless one row alone is larger."""

FIELDS_MAX = 64
"""Fields of one frame, several times what any has. Each is looked at in Python: a message full of tiny ones would keep a shard
busy for seconds."""

WINDOW_BYTES = 2 << 20
"""Frames that one gRPC stream may have under way to a side that does not read: half a block of the largest size, and more of
one that is being read. The rest waits at the sender."""

WINDOW_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
"""Options for both sides' channels: gRPC's own windows grow to tens of megabytes each, which a shard that is held back would
have to keep for every worker."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types of the protobuf encoding
_PADDING_TAG = PADDING_FIELD << 3 | _LENGTH
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | _LENGTH
# By the number of bytes needed mod 8. A field with content has three bytes at least (protobuf leaves out an empty one), so one
# and two become nine and ten.
_PADDINGS = tuple(b"" if n == 0 else bytes([_PADDING_TAG, n - 2]) + bytes(n - 2) for n in (0, 9, 10, 3, 4, 5, 6, 7))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def join(head: bytes, *payload: bytes | memoryview | NDArray[Any] | None) -> bytes:
    """The frame of a serialized message without its payload, and of the payload: C-contiguous pieces, each copied once."""
    views = [memoryview(piece).cast("B") for piece in payload if piece is not None and len(piece)]  # type: ignore[arg-type]
    if not views:
        return head
    prefix = bytes([_PAYLOAD_TAG]) + _varint(sum(view.nbytes for view in views))
    padding = _PADDINGS[-(len(head) + len(prefix)) % ALIGNMENT]
    return b"".join((head, padding, prefix, *views))


def split(frame: bytes, what: str) -> tuple[bytes, memoryview]:
    """Split a frame into the serialized message without the payload, and a view of the payload (empty if there is none).

    Raises:
        InvalidRequest: the bytes are no protobuf message, or have more than FIELDS_MAX fields; `what` names it.
    """
    view, payload = memoryview(frame), memoryview(b"")
    heads: list[bytes] = []  # what stands before, between and behind payloads
    position, end = 0, len(frame)
    head_start = fields = 0
    while position < end:
        start, fields = position, fields + 1
        if fields > FIELDS_MAX:
            raise InvalidRequest(f"{what}: has more than {FIELDS_MAX} fields")
        tag, position = _read_varint(frame, position, what)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, position = _read_varint(frame, position, what)
            if length > end - position:
                raise InvalidRequest(f"{what}: truncated: field {tag >> 3} says {length} bytes, {end - position} are there")
            if tag == _PAYLOAD_TAG:
                # A foreign serializer may put fields behind it. If it stands there again, the last one counts, as everywhere
                # in protobuf.
                payload = view[position : position + length]
                heads.append(frame[head_start:start])
                head_start = position + length
            position += length
        elif wire_type == _VARINT:
            _, position = _read_varint(frame, position, what)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
            if position > end:
                raise InvalidRequest(f"{what}: truncated in field {tag >> 3}")
        else:
            raise InvalidRequest(f"{what}: not a protobuf message: field {tag >> 3} has wire type {wire_type}")
    heads.append(frame[head_start:])
    return b"".join(heads), payload


def _read_varint(frame: bytes, position: int, what: str) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(frame):
            raise InvalidRequest(f"{what}: truncated in a varint at byte {position}")
        if shift > 63:
            raise InvalidRequest(f"{what}: not a protobuf message: a varint at byte {position} is too long")
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def numbers(payload: memoryview, dtype: np.dtype[Any], length: int, what: str) -> NDArray[Any]:
    """The payload as an aligned, read-only (length,) array of `dtype`; copied only if it is not aligned.

    Raises:
        InvalidTensor: the payload has another number of bytes; `what` names it.
    """
    expected = length * dtype.itemsize
    if payload.nbytes != expected:
        raise InvalidTensor(f"{what}: payload has {payload.nbytes} bytes, expected {length} x {dtype.itemsize} = {expected}")
    array: NDArray[Any] = np.frombuffer(payload, dtype=dtype)
    return array if array.flags.aligned else array.copy()


def present_bits(mask: NDArray[Any]) -> bytes:
    """PushFrame.present from a (k,) array of truth values; empty if all are true."""
    return b"" if mask.all() else np.packbits(mask, bitorder="little").tobytes()


def present_mask(bits: bytes, segment_count: int) -> NDArray[np.uint8] | None:
    """PushFrame.present as a (segment_count,) array of 0 and 1, or None for all ones.

    Raises:
        InvalidRequest: the bitmap has another length.
    """
    if not bits:
        return None
    expected = (segment_count + 7) // 8
    if len(bits) != expected:
        raise InvalidRequest(f"present: bitmap has {len(bits)} bytes, expected {expected} for {segment_count} segments")
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=segment_count, bitorder="little")
