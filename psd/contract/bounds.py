"""Counts the parts of a protobuf message in its bytes, before objects are made from them.

A part, such as an empty message in a list, takes two bytes on the wire, some fifty in memory, and microseconds to look at:
30 MiB of them kept a shard busy for a minute. A number in a list takes one byte, eight, and less time. So a long message is
counted first. A short one is not: all that it can hold costs less than counting. Must not know what the fields mean.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

from psd.contract.errors import InvalidRequest

UNCOUNTED_BYTES = 64 << 10
"""Length up to which a message is not counted; a push for 1024 groups of parameters is shorter."""

PARTS_MAX = 1 << 16
"""Most messages, strings and byte strings in the lists of one message, at all depths: one for each block of 64 GiB."""

TAGS_PER_PART = 16
"""Fields of any kind that a message may have for each part that it may have: a bound on the counting itself."""

NUMBER_BYTES_PER_PART = 32
"""Bytes of numbers in lists, at all depths, that a message may have for each part that it may have."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types of the protobuf encoding

_Descriptor: TypeAlias = Any  # of a message; there are two unrelated classes

_Shape: TypeAlias = "dict[int, tuple[int, _Shape | None]]"
"""The counted fields by number: how each counts, and the shape of its messages."""

_IS_NO_LIST, _IS_PART, _IS_NUMBERS = range(3)

_shapes: dict[str, _Shape] = {}


def check_parts(data: bytes | memoryview, kind: _Descriptor, parts_max: int = PARTS_MAX) -> None:
    """Raise InvalidRequest for a message with too many parts. Bytes that are no message pass: parsing them raises the error."""
    if len(data) > UNCOUNTED_BYTES:
        _Count(kind.name, parts_max).add(memoryview(data), _shape(kind))


def _shape(kind: _Descriptor) -> _Shape:
    found = _shapes.get(kind.full_name)
    if found is None:
        found = {}
        for field in kind.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                found[field.number] = (_IS_PART if field.is_repeated else _IS_NO_LIST, _shape(field.message_type))
            elif field.is_repeated:
                is_part = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
                found[field.number] = (_IS_PART if is_part else _IS_NUMBERS, None)
        _shapes[kind.full_name] = found
    return found


class _Count:
    """The number of parts and fields that a message may still have."""

    def __init__(self, name: str, parts_max: int) -> None:
        self._name = name
        self._parts_max = parts_max
        self._parts = parts_max
        self._number_bytes = parts_max * NUMBER_BYTES_PER_PART
        self._tags = parts_max * TAGS_PER_PART

    def add(self, data: memoryview, shape: _Shape) -> None:
        """Count the parts of a message, and of the messages in it that can have parts."""
        at, size = 0, len(data)
        while at < size:
            tag, at = _varint(data, at, size)
            self._tags -= 1
            if self._tags < 0:
                raise InvalidRequest(
                    f"{self._name}: has more than {self._parts_max * TAGS_PER_PART} fields, all depths together"
                )
            wire_type = tag & 7
            if wire_type == _LENGTH:
                length, at = _varint(data, at, size)
                place = shape.get(tag >> 3)
                if place is not None:
                    self._count(place[0], length, tag >> 3)
                    if place[1] and length:
                        self.add(data[at : at + length], place[1])
                at += length
            elif wire_type == _VARINT:
                _, at = _varint(data, at, size)
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
            else:
                return

    def _count(self, how: int, length: int, field: int) -> None:
        if how == _IS_PART:
            self._parts -= 1
        elif how == _IS_NUMBERS:
            self._number_bytes -= length
        if self._parts < 0:
            raise InvalidRequest(f"{self._name}: has more than {self._parts_max} parts in its lists, the last in field {field}")
        if self._number_bytes < 0:
            most = self._parts_max * NUMBER_BYTES_PER_PART
            raise InvalidRequest(f"{self._name}: has more than {most} bytes of numbers in its lists, the last in field {field}")


def _varint(data: memoryview, at: int, size: int) -> tuple[int, int]:
    """A number, and the position behind it; the end of the bytes if the number is cut off or too long."""
    value = shift = 0
    while at < size and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, size
