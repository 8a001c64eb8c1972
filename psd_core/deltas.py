"""Deltas: what differs between two versions of an array, exactly, in fewer bytes than the newer one has.

This module owns their form (docs/design/deltas.md, byte by byte), what is refused, and the entries to the C kernels
(``csrc/delta.c``). Must not know messages, blocks, or who has which version.

Each chunk of 4096 elements is told in the shortest of four ways: as unchanged; by a bit for each element and the values of
those that have changed; by the bytes of old xor new, in planes of which the upper ones are mostly zero where values changed a
little; or whole.

Invariants:
  * Applied to the array that it was made from, a delta gives the bits of the other, NaN's payloads and signs of zero included.
  * What a peer has sent is looked at before anything is written: InvalidEncoding names the field and the limit. A delta that is
    sound but was made from another array gives wrong values: who has which version is for the caller to know.
  * Each kernel runs without the GIL, on one thread. None keeps anything.

>>> import numpy as np
>>> old = np.arange(6, dtype=np.float32)
>>> new = old.copy()
>>> new[4] = -1
>>> delta = encode(old, new)
>>> delta.tobytes().hex()
'0110000080bf'
>>> apply(delta, old)
>>> bool(np.array_equal(old, new))
True
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _deltas
from psd_core._arena import Content
from psd_core._kernels import InvalidArray
from psd_core.codecs import Data, InvalidEncoding

CHUNK: int = _deltas.CHUNK
"""Elements that are told together."""
SIZES = (1, 2, 4, 8)
"""Bytes that an element may have."""

_UINT8 = np.dtype(np.uint8)


def encode(old: NDArray[Any], new: NDArray[Any], most: int | None = None) -> NDArray[np.uint8] | None:
    """Return the delta from one array to another, or None if it is longer than it may be.

    Args:
        old, new: (n,) of the same dtype, whose elements have 1, 2, 4 or 8 bytes. Never modified.
        most: the longest delta that is worth its while, in bytes. Default: the bytes of `new`.

    Raises:
        InvalidArray: naming the argument.

    Cost: O(n), GIL released; up to `most` bytes are allocated.
    """
    before = _bytes_of("old", old)
    after = _bytes_of("new", new)
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        raise InvalidArray(f"new: expected {len(old)} {old.dtype}, as old has, got {len(new)} {new.dtype}")
    out = np.empty(min(after.nbytes if most is None else max(0, most), _longest(after.nbytes, old.dtype.itemsize)), _UINT8)
    nbytes = _deltas.encode(before, after, old.dtype.itemsize, out)
    return None if nbytes < 0 else out[:nbytes]


def apply(delta: Data, values: NDArray[Any]) -> None:
    """Change an array in place into the newer one.

    Args:
        delta: what `encode` returned, at any address.
        values: (n,), the array that the delta was made from. Writable; must not overlap `delta`.

    Raises:
        InvalidEncoding: naming the field of the delta that is wrong; `values` are untouched.
        InvalidArray: naming the argument.

    Cost: O(n), GIL released, no allocation.
    """
    to, size = _bytes_of("values", values, writable=True), values.dtype.itemsize
    try:
        found = np.frombuffer(delta, _UINT8)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidArray(f"delta: expected contiguous bytes, got {type(delta).__name__}: {error}") from None
    if np.may_share_memory(found, to):
        raise InvalidArray("values: expected memory of their own, got some that overlaps delta")
    field, chunk = _deltas.fault(found, to.nbytes, size)
    if field:
        raise InvalidEncoding(_FLAWS[field].format(chunk=chunk, n=len(values)))
    _deltas.apply(found, to, size)


def unchanged(n: int) -> NDArray[np.uint8]:
    """Return the delta of n elements of which none has changed."""
    return np.zeros(-(-n // CHUNK), _UINT8)


def check(values: NDArray[Any]) -> int:
    """Return a checksum of an array (n,), by which who has applied a delta can tell that it has the right values; never 0.

    Against a delta that was made from another array, and against decay, not forgery: see csrc/content.h. Raises InvalidArray.
    """
    content = Content()
    content.add(_bytes_of("values", values))
    return int(content.check())


_FLAWS = {
    1: "form: expected a number from 0 to 3 in chunk {chunk}",
    2: "plane: expected a number from 0 to 2 in chunk {chunk}",
    3: "bitmap: expected 0 in the bits behind the last element in chunk {chunk}",
    4: "delta: expected all chunks of {n} elements; it ends in chunk {chunk}",
    5: "delta: expected its end behind the {chunk} chunks of {n} elements",
}
"""The fields of psd_delta_field, in words."""


def _longest(nbytes: int, size: int) -> int:
    return nbytes + -(-nbytes // (size * CHUNK))


def _bytes_of(name: str, array: NDArray[Any], *, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of an array that the kernels can take."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.itemsize not in SIZES or array.dtype.hasobject:
        got = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidArray(f"{name}: expected a 1-D array of elements of 1, 2, 4 or 8 bytes, got {got}")
    if not array.flags.c_contiguous or (writable and not array.flags.writeable):
        problem = "strided" if not array.flags.c_contiguous else "read-only"
        raise InvalidArray(f"{name}: expected a {'writable ' * writable}C-contiguous array, got a {problem} one")
    return array.view(_UINT8)
