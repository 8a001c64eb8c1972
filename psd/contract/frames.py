"""Frames: protobuf messages whose bulk data is the last field, built and read without copying the data more than once.

A frame on the wire is  [header fields] [padding, field 14] [tag and length of the payload, field 15] [payload].  These are the
bytes that protobuf writes for the same message (a test compares them), so any client with protobuf can use it. `join` makes
one; `split` takes one apart, also if a foreign serializer chose another order; `join_nested` and `split_nested` do so with
messages of frames. The padding lets the payload start on an 8-byte boundary, which the kernels need; without it the payload is
copied once more.

Must not know what the fields mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, InvalidTensor

PADDING_FIELD = 14
PAYLOAD_FIELD = 15
ALIGNMENT = 8  # of float64; bytes objects themselves start on 16-byte boundaries

FRAME_BYTES_MAX = 4 << 20
"""Largest payload of a frame of rows or of vectors, unless one row alone is larger."""

FIELDS_MAX = 64
"""Most fields of one frame, several times what any has. Python looks at each: a message full of tiny ones would keep a shard
busy for seconds."""

WINDOW_BYTES = 4 << 20
"""Bytes that one gRPC stream may send to a side that does not read: a block of the largest size, and more of one that is being
read. The rest waits at the sender. Half of it is sent at once; more only once the other side allows it."""

HTTP2_FRAME_BYTES = 1 << 20
"""Size of HTTP/2's frames. Both ends copy each one separately, which is slow with its default, 16 KiB; longer frames than this
would delay heartbeats."""

WINDOW_OPTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
)
"""Options for both sides' channels: gRPC's own windows grow to tens of megabytes, which a shard that does not read would have
to keep for every worker."""

KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
"""Options for both sides' channels: a peer that vanishes silently is noticed within 20 seconds. gRPC's keepalive timeout is for
bytes that TCP has sent without an acknowledgement; after a ping that a proxy acknowledges, gRPC alone would wait a minute."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types of the protobuf encoding
_PADDING_TAG = PADDING_FIELD << 3 | _LENGTH
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | _LENGTH
# By the number of bytes needed mod 8. A field with content has at least three bytes (protobuf omits an empty one), so one and
# two become nine and ten.
_PADDINGS = tuple(b"" if n == 0 else bytes([_PADDING_TAG, n - 2]) + bytes(n - 2) for n in (0, 9, 10, 3, 4, 5, 6, 7))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


Piece: TypeAlias = bytes | memoryview | NDArray[Any] | None
"""A piece of a payload, C-contiguous; None is an empty one."""


def join(head: bytes, *payload: Piece) -> bytes:
    """The frame made of a serialized message and of its payload, whose pieces are copied once."""
    views, nbytes = _views(payload)
    return b"".join((_front(head, nbytes, 0), *views)) if views else head


def join_nested(parts: Iterable[tuple[int, bytes, Sequence[Piece]]]) -> bytes:
    """A message whose fields are frames. parts: for each field its number, and the arguments of `join`."""
    found: list[bytes | memoryview] = []
    at = 0
    for field, head, payload in parts:
        views, nbytes = _views(payload)
        # The padding depends on the size of the length field. If this guess is wrong, the receiver copies the payload again.
        length_bytes = len(_varint(len(head) + nbytes + 2 * ALIGNMENT))
        front = _front(head, nbytes, at + 1 + length_bytes)
        opening = bytes([field << 3 | _LENGTH]) + _varint(len(front) + nbytes)
        found += (opening, front, *views)
        at += len(opening) + len(front) + nbytes
    return b"".join(found)


def _views(payload: Sequence[Piece]) -> tuple[list[memoryview], int]:
    views = [memoryview(piece).cast("B") for piece in payload if piece is not None and len(piece)]  # type: ignore[arg-type]
    return views, sum([view.nbytes for view in views])


def _front(head: bytes, payload_bytes: int, at: int) -> bytes:
    """The bytes before the payload, for a frame that begins at byte `at` of a message."""
    if not payload_bytes:
        return head
    prefix = bytes([_PAYLOAD_TAG]) + _varint(payload_bytes)
    return b"".join((head, _PADDINGS[-(at + len(head) + len(prefix)) % ALIGNMENT], prefix))


def split(frame: bytes | memoryview, what: str) -> tuple[bytes, memoryview]:
    """Split a frame into the serialized message without the payload, and a view of the payload (empty if there is none).

    Raises:
        InvalidRequest: the bytes are no protobuf message, or have more than FIELDS_MAX fields; `what` names it.
    """
    view, payload = memoryview(frame), memoryview(b"")
    heads: list[memoryview] = []  # the bytes before, between and after payloads
    head_start = 0
    for tag, start, content, end in _fields(view, what, FIELDS_MAX):
        if tag == _PAYLOAD_TAG:
            # A foreign serializer may put fields after the payload. If it is repeated, the last one counts, as in protobuf.
            payload = view[content:end]
            heads.append(view[head_start:start])
            head_start = end
    heads.append(view[head_start:])
    return b"".join(heads), payload


def split_nested(message: bytes, what: str, fields_max: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the fields of a message that are messages themselves: the number of each, and a view of it.

    Raises:
        InvalidRequest: as from `split`, or the message has more fields than `fields_max`.
    """
    view = memoryview(message)
    for tag, _, content, end in _fields(view, what, fields_max):
        if tag & 7 == _LENGTH:
            yield tag >> 3, view[content:end]


def _fields(data: memoryview, what: str, fields_max: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tag, the start, the start of the content, and the end of each field."""
    position, size, count = 0, len(data), 0
    while position < size:
        start, count = position, count + 1
        if count > fields_max:
            raise InvalidRequest(f"{what}: has more than {fields_max} fields, the limit; the sender's psd version may differ")
        tag, position = _read_varint(data, position, what)
        content, wire_type = position, tag & 7
        if wire_type == _LENGTH:
            length, content = _read_varint(data, position, what)
            if length > size - content:
                raise InvalidRequest(f"{what}: truncated: field {tag >> 3} says {length} bytes, {size - content} are there")
            position = content + length
        elif wire_type == _VARINT:
            _, position = _read_varint(data, position, what)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
            if position > size:
                raise InvalidRequest(f"{what}: truncated in field {tag >> 3}")
        else:
            raise InvalidRequest(f"{what}: not a protobuf message: field {tag >> 3} has wire type {wire_type}")
        yield tag, start, content, position


def _read_varint(frame: memoryview, position: int, what: str) -> tuple[int, int]:
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
