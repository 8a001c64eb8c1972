"""Publications: jobs that train nothing, in which each round sets all tensors; what must hold of them, and their meta.

What a program says about a version (its meta) is a tensor of bytes like the others, in a group of its own, which rank 0
publishes. So it is of the same version as they are by construction: for readers, in checkpoints, and whatever is killed.

    1 byte     its kind: 0 none, 1 bytes, 2 JSON
    4 bytes    length, little-endian
    content    then zeros

Must not know how tensors travel, or who puts them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse, whole_number
from psd.contract.errors import InternalError, InvalidRequest

META_TENSOR = "psd.meta"
"""Name of the tensor with the meta."""

META_BYTES = 4096
META_BYTES_MAX = 64 << 10
"""Bytes that a meta may have, unless the store is declared for more, and the most for which it may be."""

Meta: TypeAlias = "Mapping[str, Any] | bytes | None"

_HEAD = struct.Struct("<BI")
_NONE, _BYTES, _JSON = range(3)


def check_terms(spec: Any) -> None:
    """Raise InvalidRequest unless the rounds of a JobSpec set all tensors together, and do nothing else."""
    if not all(group.is_published for group in spec.groups):
        raise InvalidRequest("groups.rule: published is for jobs that train nothing, in which all groups have it")
    terms = {
        "tables": (len(spec.tables), 0),
        "mode": (str(spec.consistency), "sync"),
        "aggregation": (spec.aggregation, "exact"),
        "reduction": (spec.reduction, "sum"),
        "quorum": (spec.quorum, spec.world_size),
        "grace": (spec.grace, 0.0),
        "clip_norm": (spec.clip_norm, 0.0),
        "compression": (str(spec.compression), ""),
    }
    for field, (value, needed) in terms.items():
        if value != needed:
            raise InvalidRequest(f"{field}: must be {needed or 'none'} where tensors are published, got {value}")
    if spec.nan_policy == "skip":
        raise InvalidRequest("nan_policy: must be refuse or allow where tensors are published, got skip")


def meta_size(meta_bytes: Any) -> int:
    """Elements of the tensor for a meta of so many bytes. Raises InvalidRequest unless they are 0 to META_BYTES_MAX."""
    count = whole_number(InvalidRequest, "meta_bytes", meta_bytes)
    if not 0 <= count <= META_BYTES_MAX:
        raise InvalidRequest(f"meta_bytes: must be 0 to {META_BYTES_MAX}, got {count}")
    return _HEAD.size + count


def encode_meta(meta: Meta, size: int) -> NDArray[np.uint8]:
    """The tensor for a meta: (size,) uint8.

    Raises:
        InvalidRequest: it is neither bytes, nor a dict that JSON can hold, nor None; or it has too many bytes.
    """
    if meta is None:
        kind, content = _NONE, b""
    elif isinstance(meta, (bytes, bytearray, memoryview)):
        kind, content = _BYTES, bytes(meta)
    elif isinstance(meta, Mapping):
        try:
            kind, content = _JSON, json.dumps(dict(meta), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"meta: JSON cannot hold it: {error}") from None
    else:
        refuse(InvalidRequest, "meta", "a dict for JSON, bytes or None", meta)
    limit = size - _HEAD.size
    if len(content) > limit:
        raise InvalidRequest(
            f"meta: has {len(content)} bytes, the limit of this store is {limit}; publish(meta_bytes=...) declares another, up "
            f"to {META_BYTES_MAX}"
        )
    values = np.zeros(size, np.uint8)
    values[: _HEAD.size + len(content)] = np.frombuffer(_HEAD.pack(kind, len(content)) + content, np.uint8)
    return values


def decode_meta(values: NDArray[np.uint8]) -> Any:
    """The meta in a tensor. Raises InternalError if it holds none, which no shard has taken from `encode_meta`."""
    data = values.tobytes()
    try:
        kind, length = _HEAD.unpack_from(data)
        content = data[_HEAD.size : _HEAD.size + length]
        if len(content) == length and kind == _JSON:
            return json.loads(content)
    except (struct.error, ValueError) as error:
        raise InternalError(f"{META_TENSOR}: cannot be read: {error}") from None
    if len(content) < length or kind not in (_NONE, _BYTES):
        raise InternalError(f"{META_TENSOR}: cannot be read: kind {kind}, {length} of {len(data)} bytes")
    return content if kind == _BYTES else None
