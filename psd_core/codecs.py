"""Compressed forms of arrays of float32: fewer bytes for what travels, with what is lost kept for the next time.

This module owns the codecs by their names: how many bytes an array has in each, what is refused, and the entries to the C
kernels (``csrc/codec*.c``). Must not know messages, jobs, tensors or who keeps a residual. docs/design/codecs.md has every form
byte by byte.

=============  ==========================================================================================================
``bf16``       the upper half of a float32
``fp16``       IEEE binary16
``int8``       whole numbers from -127 to 127 times a scale for each 256 elements: the largest magnitude / 127
``int4``       whole numbers from -7 to 7, likewise
``int4log``    0, or a sign and 2**e times a scale, e from -6 to 0: E3M0, for differences of parameters
``sign``       a bit for each element, and the mean magnitude of each 256
``topk:0.01``  this share of the elements, those of largest magnitude, exactly; others are 0
=============  ==========================================================================================================

Invariants:
  * The bytes are the same on every processor for the same values, residual, seed and rounding: nothing depends on the width of
    vectors, and random numbers follow from the seed and the element's index alone.
  * What a peer has sent is looked at before anything is written: InvalidEncoding names the field and the limit.
  * NaN and infinity are refused, in both directions.
  * Each kernel runs without the GIL, on one thread. None keeps anything.

>>> import numpy as np
>>> values, residual = np.array([1.0, -0.25, 0.1], np.float32), np.zeros(3, np.float32)
>>> data = encode("int4", values, residual)
>>> data.tobytes().hex()
'133e170e'
>>> out = np.empty(3, np.float32)
>>> decode("int4", data, out)
>>> out.tolist()
[1.0048828125, -0.287109375, 0.1435546875]
>>> bool(np.all(out + residual == values))
True
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd_core import _codecs
from psd_core._kernels import InvalidArray

FloatArray: TypeAlias = NDArray[np.float32]
Data: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Rounding: TypeAlias = Literal["nearest", "stochastic"]

BLOCK: int = _codecs.BLOCK
"""Elements that share a scale."""
CHUNK: int = _codecs.CHUNK
"""Elements of a chunk of topk, in which an entry's place has 16 bits."""
ELEMENTS_MAX = (1 << 32) - 1
"""Largest number of elements of an array."""

DIFFERENCES = ("int8", "int4", "int4log")
"""Codecs by which a copy can `follow` an array: they have the largest difference of each block but for a part of a step."""

_SEEDS = 1 << 64
_FLOAT32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)


class InvalidEncoding(ValueError):
    """Encoded data is not what the codec writes: the message names the field, what was expected and what came."""


@dataclass(frozen=True)
class _Codec:
    """A codec: its number in csrc/codec.h, how many elements a byte has, and which scales beside 0 it may have."""

    name: str
    number: int = -1
    per_byte: int = 0  # 0: an element has two bytes
    scales: tuple[float, float] | None = None
    rounds: bool = True
    share: Fraction | None = None  # of the elements, in topk

    def kept(self, n: int) -> int:
        """The number of elements that topk sends."""
        assert self.share is not None
        return -(-n * self.share.numerator // self.share.denominator)

    def codes_at(self, n: int) -> int:
        """The place of the codes in the data: behind the scales."""
        return 2 * -(-n // BLOCK) if self.per_byte else 0

    def nbytes(self, n: int) -> int:
        """The length of the data of n elements."""
        if self.share is not None:
            return 4 * -(-n // CHUNK) + 6 * self.kept(n)
        # A block's codes begin with a byte of their own, which a whole block fills up anyway.
        return self.codes_at(n) + -(-n // self.per_byte) if self.per_byte else 2 * n


_CODECS = {
    codec.name: codec
    for codec in (
        _Codec("bf16", 0),
        _Codec("fp16", 1),
        _Codec("int8", 2, 1, (2.0**-126, 255 * 2.0**113)),
        _Codec("int4", 3, 2, (2.0**-126, 255 * 2.0**117)),
        _Codec("int4log", 4, 2, (2.0**-120, 2.0**126)),
        _Codec("sign", 5, 8, (2.0**-126, 255 * 2.0**120), rounds=False),
    )
}

NAMES = (*_CODECS, "topk:SHARE")
"""All codecs, as a message would list them."""


@functools.lru_cache(maxsize=64)
def _codec(name: str) -> _Codec:
    if name in _CODECS:
        return _CODECS[name]
    found = re.fullmatch(r"topk:([0-9]{0,9}\.?[0-9]{0,9})", name) if isinstance(name, str) else None
    share = Fraction(found[1]) if found and re.search("[0-9]", found[1]) else Fraction(0)
    if found and 0 < share <= 1:
        return _Codec(name, rounds=False, share=share)
    if isinstance(name, str) and name.startswith("topk"):
        raise ValueError(f"codec: expected topk:SHARE with 0 < SHARE <= 1, such as topk:0.01, got {name!r}")
    raise ValueError(f"codec: expected one of {', '.join(NAMES)}, got {name!r}")


def encoded_bytes(codec: str, n: int) -> int:
    """Return how many bytes an array has in a codec: exactly, whatever its values.

    Args:
        codec: its name.
        n: elements, from 0 to ELEMENTS_MAX.

    Raises:
        ValueError: naming `codec` or `n`.
    """
    if not 0 <= n <= ELEMENTS_MAX:
        raise ValueError(f"n: expected a number of elements from 0 to {ELEMENTS_MAX}, got {n}")
    return _codec(codec).nbytes(n)


def rounds(codec: str) -> bool:
    """Return whether a codec rounds numbers, so that it can do so at random. ValueError names `codec`."""
    return _codec(codec).rounds


def encode(
    codec: str,
    values: FloatArray,
    residual: FloatArray | None = None,
    seed: int | None = None,
    rounding: Rounding = "nearest",
    out: NDArray[np.uint8] | None = None,
    *,
    is_finite: bool = False,
) -> NDArray[np.uint8]:
    """Return an array in a codec, with error feedback if there is a residual.

    Args:
        codec: its name.
        values: (n,) float32, n <= ELEMENTS_MAX. Never modified.
        residual: (n,) float32, writable. It is added to the values, and what the data lack of the sum is written into it. None:
            nothing is added, and what is lost is gone. Must not overlap `values`.
        seed: of stochastic rounding, from 0 to 2**64 - 1. The same seed gives the same bytes; one push should have another than
            the next, and each of its arrays one of its own.
        rounding: "nearest"; or "stochastic": up or down, with probabilities by which the mean is the number itself, but for
            2**-17 of a step. "sign" and "topk" round nothing, and refuse "stochastic".
        out: (encoded_bytes(codec, n),) uint8, overwritten; a new array by default. Undefined after an error.
        is_finite: True if all values are known to be finite: then they are not read once more before, for the residual's sake.
            If a sum with the residual is infinite nevertheless, the residual is undefined.

    Returns:
        `out`.

    Raises:
        InvalidArray: naming the argument. The first value, or sum with the residual, that is NaN or infinite is named by its
            index. The residual is then as it was.
        ValueError: naming `codec`, `seed` or `rounding`.

    What is larger than the largest number of a codec (65,504 in fp16) becomes that number; the rest is in the residual.

    Cost: O(n), GIL released.
    """
    form = _codec(codec)
    n = _checked("values", values)
    if n > ELEMENTS_MAX:
        raise InvalidArray(f"values: expected at most {ELEMENTS_MAX} elements, got {n}")
    if residual is not None:
        _checked("residual", residual, n, writable=True)
        _check_apart("residual", residual, "values", values)
    key = _checked_seed(form, seed, rounding)
    if out is None:
        out = np.empty(form.nbytes(n), _UINT8)
    else:
        _check_out(out, form.nbytes(n))
        _check_apart("out", out, "values", values)
        if residual is not None:
            _check_apart("out", out, "residual", residual)
    if form.share is not None:
        wrong = _codecs.topk_encode(values, residual, form.kept(n), out)
    else:
        wrong = _codecs.encode(form.number, values, residual, key, rounding == "stochastic", form.codes_at(n), out, is_finite)
    if wrong >= 0:
        value = values[wrong]
        if residual is None or not np.isfinite(value):
            raise InvalidArray(f"values: expected finite numbers, got {value} at element {wrong}")
        raise InvalidArray(f"residual: expected finite sums with values, got {value} + {residual[wrong]} at element {wrong}")
    return out


def encoded_if_finite(codec: str, values: FloatArray) -> NDArray[Any]:
    """Return (n,) float32 values in a codec, or as they are if one of them is NaN or infinite, which has no form in it."""
    try:
        return encode(codec, values)
    except InvalidArray:
        return values


class Encoded:
    """Encoded data that were looked at once, and are sound for so many elements. They are read where they lie.

    Args:
        codec: its name.
        data: encoded_bytes(codec, n) bytes, at any address.
        n: elements.

    Raises:
        InvalidEncoding: naming the field of the data that is wrong.
        InvalidArray: `data` are no contiguous bytes.
        ValueError: naming `codec`.

    Attributes:
        size: elements. nbytes: of the data.
    """

    __slots__ = ("_codec", "_data", "size")

    def __init__(self, codec: str, data: Data, n: int) -> None:
        form = _codec(codec)
        found = _bytes_of(data)
        if len(found) != form.nbytes(n):
            raise InvalidEncoding(f"data: expected {form.nbytes(n)} bytes, those of {n} elements in {codec}, got {len(found)}")
        if form.share is not None:
            problem = _topk_problem(found, n, form.kept(n))
        else:
            problem = _problem(form, found, n)
        if problem:
            raise InvalidEncoding(problem)
        self._codec = form
        self._data = found
        self.size = n

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self._data.nbytes

    def decode(self, out: FloatArray) -> None:
        """Set `out`, (size,) float32 and writable, to the numbers. InvalidArray names what is wrong.

        Cost: O(n), GIL released, no allocation.
        """
        self._check("out", out)
        form = self._codec
        if form.share is not None:
            _codecs.topk_decode(self._data, form.kept(self.size), out)
        else:
            _codecs.decode(form.number, self._data, form.codes_at(self.size), out)

    def accumulate(self, accumulator: FloatArray, weight: float = 1.0) -> None:
        """Add ``weight`` times the numbers to `accumulator`, (size,) float32 and writable. InvalidArray names what is wrong.

        The bits are those of decode followed by psd_core.accumulate, but for elements that topk does not have: those are not
        touched, where a sum with 0 would make 0 of -0.

        Cost: O(n), for topk O(share * n); GIL released, no allocation.
        """
        self._check("accumulator", accumulator)
        form = self._codec
        if form.share is not None:
            _codecs.topk_accumulate(self._data, form.kept(self.size), accumulator, weight)
        else:
            _codecs.accumulate(form.number, self._data, form.codes_at(self.size), accumulator, weight)

    def _check(self, name: str, to: FloatArray) -> None:
        n = _checked(name, to, writable=True)
        if n != self.size:
            raise InvalidArray(f"{name}: expected length {self.size}, that of the data, got {n}")
        _check_apart(name, to, "data", self._data)


def decode(codec: str, data: Data, out: FloatArray) -> None:
    """Set `out` to the numbers that encoded data stand for.

    Args:
        codec: its name.
        data: encoded_bytes(codec, n) bytes, at any address.
        out: (n,) float32, writable. Overwritten. Must not overlap `data`.

    Raises:
        InvalidEncoding: naming the field of the data that is wrong; `out` is untouched.
        InvalidArray: naming the argument.
        ValueError: naming `codec`.

    Cost: O(n), GIL released, no allocation.
    """
    _encoded_for(codec, data, "out", out).decode(out)


def accumulate(codec: str, data: Data, accumulator: FloatArray, weight: float = 1.0) -> None:
    """Add ``weight`` times the numbers that encoded data stand for to `accumulator`, in place; see Encoded.accumulate.

    Args:
        codec: its name.
        data: encoded_bytes(codec, n) bytes, at any address.
        accumulator: (n,) float32, writable. Updated. Must not overlap `data`.
        weight: rounded to float32.

    Raises:
        InvalidEncoding: naming the field of the data that is wrong; `accumulator` is untouched.
        InvalidArray: naming the argument.
        ValueError: naming `codec`.
    """
    _encoded_for(codec, data, "accumulator", accumulator).accumulate(accumulator, weight)


def follow(codec: str, values: FloatArray, before: FloatArray, after: FloatArray) -> NDArray[np.uint8] | None:
    """Return the difference from a copy of an array to the array in a codec, and write the copy with this difference added.

    What the codec loses of a difference is in the next one, if `after` is the next call's `before`: however many there are,
    the copy is as near to the array as one of them is encoded. Who adds the data to `before` by `accumulate` has the bits of
    `after`.

    Args:
        codec: one of DIFFERENCES.
        values: (n,) float32, n <= ELEMENTS_MAX. before: the copy, likewise. Never modified.
        after: (n,) float32, writable. Overwritten. Must overlap neither.

    Returns:
        (encoded_bytes(codec, n),) uint8; None if some difference is NaN or infinite: `after` is then undefined.

    Raises:
        InvalidArray: naming the argument. ValueError: naming `codec`.

    Cost: O(n), GIL released.
    """
    if codec not in DIFFERENCES:
        raise ValueError(f"codec: expected one of {', '.join(DIFFERENCES)}, got {codec!r}")
    n = _checked("values", values)
    if n > ELEMENTS_MAX:
        raise InvalidArray(f"values: expected at most {ELEMENTS_MAX} elements, got {n}")
    _checked("before", before, n)
    _checked("after", after, n, writable=True)
    _check_apart("after", after, "values", values)
    _check_apart("after", after, "before", before)
    form = _codec(codec)
    out = np.empty(form.nbytes(n), _UINT8)
    return out if _codecs.follow(form.number, values, before, after, form.codes_at(n), out) else None


def _encoded_for(codec: str, data: Data, name: str, to: FloatArray) -> Encoded:
    n, found = _checked(name, to, writable=True), _bytes_of(data)
    _check_apart(name, to, "data", found)
    return Encoded(codec, found, n)


def _bytes_of(data: Data) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(data, _UINT8)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidArray(f"data: expected contiguous bytes, got {type(data).__name__}: {error}") from None


def _checked(name: str, array: FloatArray, n: int | None = None, *, writable: bool = False) -> int:
    """Return the length of an array that the kernels can take."""
    if not isinstance(array, np.ndarray) or array.dtype != _FLOAT32 or array.ndim != 1:
        got = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidArray(f"{name}: expected a 1-D float32 array, got {got}")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not writable)):
        problem = "read-only" if writable and not flags.writeable else "strided or misaligned"
        raise InvalidArray(f"{name}: expected a {'writable ' * writable}C-contiguous aligned array, got a {problem} one")
    if n is not None and len(array) != n:
        raise InvalidArray(f"{name}: expected length {n}, that of values, got {len(array)}")
    return len(array)


def _check_out(out: NDArray[np.uint8], nbytes: int) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != _UINT8 or out.shape != (nbytes,):
        got = f"{out.shape} of {out.dtype}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidArray(f"out: expected an array of {nbytes} uint8, got {got}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidArray("out: expected a writable C-contiguous array")


def _check_apart(name: str, array: NDArray[Any], other_name: str, other: NDArray[Any]) -> None:
    if np.may_share_memory(array, other):  # by their bounds, which is exact for contiguous arrays
        raise InvalidArray(f"{name}: expected memory of its own, got some that overlaps {other_name}")


def _checked_seed(form: _Codec, seed: int | None, rounding: str) -> int:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding: expected nearest or stochastic, got {rounding!r}")
    if rounding == "stochastic" and not form.rounds:
        raise ValueError(f"rounding: expected nearest, since {form.name} rounds nothing, got {rounding!r}")
    if seed is None:
        if rounding == "stochastic":
            raise ValueError("seed: expected a whole number for stochastic rounding, got None")
        return 0
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed: expected a whole number from 0 to {_SEEDS - 1}, got {seed}")
    return seed


def _problem(form: _Codec, data: NDArray[np.uint8], n: int) -> str | None:
    """The first flaw of data that have a code for each element, in words."""
    codes_at = form.codes_at(n)
    field, at = _codecs.fault(form.number, data, codes_at, n)
    if field == 1:
        assert form.scales is not None
        least, most = form.scales
        return f"scale: expected 0 or a number from {least:g} to {most:g}, got {_bfloat16(data, at):g} in block {at}"
    if field == 2:
        return f"codes: expected 0 in the bits behind the last element, got byte {data[codes_at + at]:#04x} at {at}"
    if field == 3:
        value = _bfloat16(data, at) if form.name == "bf16" else float(data[2 * at : 2 * at + 2].view(np.float16)[0])
        return f"value: expected a finite number, got {value} at element {at}"
    return None


def _bfloat16(data: NDArray[np.uint8], at: int) -> float:
    return float((data[2 * at : 2 * at + 2].view(np.uint16).astype(np.uint32) << 16).view(_FLOAT32)[0])


def _topk_problem(data: NDArray[np.uint8], n: int, k: int) -> str | None:
    """The first flaw of data of topk, in words."""
    field, at = _codecs.topk_fault(data, n, k)
    if field == 0:
        return None
    values_at = 4 * -(-n // CHUNK)
    if field == 1:
        count = int.from_bytes(data[4 * at : 4 * at + 4].tobytes(), "little")
        return f"count: expected at most {min(CHUNK, n - at * CHUNK)}, the elements of chunk {at}, got {count}"
    if field == 2:
        return f"count: expected {k} entries in all chunks, got {at}"
    if field == 5:
        value = data[values_at + 4 * at : values_at + 4 * at + 4].view(_FLOAT32)[0]
        return f"value: expected a finite number, got {value} in entry {at}"
    offsets_at = values_at + 4 * k + 2 * at
    offset = int.from_bytes(data[offsets_at : offsets_at + 2].tobytes(), "little")
    if field == 3:
        return f"offset: expected at most {(n - 1) % CHUNK}, the last one of the last chunk, got {offset} in entry {at}"
    return f"offset: expected more than that of the entry before, got {offset} in entry {at}"
