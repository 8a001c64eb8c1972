"""Deltas between versions of an array: exact, of the bytes that docs/design/deltas.md has, refused by field when malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psd_core import InvalidArray, deltas
from psd_core.codecs import InvalidEncoding
from psd_core.deltas import CHUNK

WIDTHS = ("u1", "u2", "u4", "u8")
LENGTHS = (0, 1, 7, 8, 9, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 13)


def delta_of(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    delta = deltas.encode(old, new, 2 * new.nbytes + 16)
    assert delta is not None
    return delta.tobytes()


def changed(old: NDArray[Any], share: float, most: int, seed: int) -> NDArray[Any]:
    """A copy in which a share of the elements differs, in bits up to that of `most`."""
    random = np.random.default_rng(seed)
    flips = random.integers(0, most, len(old), dtype=np.uint64, endpoint=True).astype(old.dtype)
    return np.where(random.random(len(old)) < share, old ^ flips, old)


@given(
    width=st.sampled_from(WIDTHS),
    n=st.sampled_from(LENGTHS),
    share=st.sampled_from([0, 0.001, 0.02, 0.5, 1]),
    bits=st.integers(1, 64),
    seed=st.integers(0, 999),
)
def test_an_applied_delta_gives_the_bits_of_the_newer_array(width, n, share, bits, seed):
    old = np.random.default_rng(seed).integers(0, 256, n * np.dtype(width).itemsize, np.uint8).view(width)
    new = changed(old, share, min(2**bits - 1, int(np.iinfo(width).max)), seed + 1)

    delta = delta_of(old, new)
    deltas.apply(memoryview(b"x" + delta)[1:], old)  # at an odd address

    assert old.tobytes() == new.tobytes()
    assert len(delta) <= new.nbytes + -(-n // CHUNK)


def test_nan_and_the_sign_of_zero_are_values_like_others():
    old = np.array([0.0, np.nan, 1.0, -np.inf], np.float32)
    new = np.array([-0.0, np.inf, 1.0, np.nan], np.float32)
    new.view(np.uint32)[3] |= 0x1234  # a payload

    deltas.apply(delta_of(old, new), old)

    assert old.tobytes() == new.tobytes()


SPARSE = np.zeros(CHUNK, np.uint32)
SPARSE[9] = 0x01020304
LOW = np.arange(CHUNK, dtype=np.uint32) % 256 | 1
LOW[3] |= 0x500
HIGH = np.arange(CHUNK, dtype=np.uint32) * 0x9E3779B1 | 0x01010101


@pytest.mark.parametrize(
    ("new", "delta"),
    [
        (np.zeros(CHUNK, np.uint32), b"\x00"),
        (SPARSE, b"\x01\x00\x02" + bytes(510) + b"\x04\x03\x02\x01"),
        (LOW, b"\x02\x02" + LOW.astype(np.uint8).tobytes() + b"\x01\x08" + bytes(511) + b"\x05\x00\x00"),
        (HIGH, b"\x03" + HIGH.tobytes()),
    ],
    ids=["same", "changed", "planes", "whole"],
)
def test_each_form_has_the_bytes_of_the_page(new, delta):
    old = np.zeros(CHUNK, np.uint32)

    assert delta_of(old, new) == delta
    deltas.apply(delta, old)
    assert old.tobytes() == new.tobytes()


def test_the_last_chunk_is_as_short_as_it_is():
    old = np.zeros(CHUNK + 3, np.uint16)
    new = old.copy()
    new[-1] = 7

    assert delta_of(old, new) == b"\x00\x01\x04\x07\x00"


def test_a_delta_is_made_only_if_it_is_short_enough():
    old = np.zeros(1000, np.float32)
    new = old.copy()
    new[::10] = 1
    nbytes = len(delta_of(old, new))

    assert deltas.encode(old, new, nbytes - 1) is None
    assert deltas.encode(old, new, 0) is None
    assert len(deltas.encode(old, new, nbytes)) == nbytes
    assert deltas.encode(old, np.random.default_rng(0).normal(size=1000).astype(np.float32)) is None  # nothing is saved


@pytest.mark.parametrize(
    ("n", "delta", "message"),
    [
        (8, b"", r"^delta: expected all chunks of 8 elements; it ends in chunk 0$"),
        (8, b"\x00\x00", r"^delta: expected its end behind the 1 chunks of 8 elements$"),
        (0, b"\x00", r"^delta: expected its end behind the 0 chunks of 0 elements$"),
        (8, b"\x04", r"^form: expected a number from 0 to 3 in chunk 0$"),
        (CHUNK + 1, b"\x00\xff", r"^form: expected a number from 0 to 3 in chunk 1$"),
        (8, b"\x01", r"it ends in chunk 0$"),
        (8, b"\x01\x01\x00\x00\x00", r"it ends in chunk 0$"),
        (7, b"\x01\x80\x00\x00\x00\x00", r"^bitmap: expected 0 in the bits behind the last element in chunk 0$"),
        (8, b"\x02\x00\x00\x00", r"it ends in chunk 0$"),
        (8, b"\x02\x00\x03\x00\x00", r"^plane: expected a number from 0 to 2 in chunk 0$"),
        (8, b"\x02\x02\x00\x00", r"it ends in chunk 0$"),
        (8, b"\x02\x01\x03\x00", r"it ends in chunk 0$"),
        (7, b"\x02\x01\x80\x01\x00\x00\x00", r"^bitmap: expected 0 in the bits"),
        (2, b"\x03" + bytes(7), r"it ends in chunk 0$"),
        (2, b"\x03" + bytes(9), r"^delta: expected its end behind the 1 chunks of 2 elements$"),
    ],
)
def test_a_malformed_delta_is_refused_by_field_and_changes_nothing(n, delta, message):
    values = np.arange(n, dtype=np.float32)

    with pytest.raises(InvalidEncoding, match=message):
        deltas.apply(delta, values)
    assert values.tolist() == list(range(n))


@given(data=st.binary(max_size=64), n=st.integers(0, 40), width=st.sampled_from(WIDTHS))
def test_any_bytes_are_applied_or_refused(data, n, width):
    values = np.zeros(n, width)

    try:
        deltas.apply(data, values)
    except InvalidEncoding:
        assert not values.any()


@given(seed=st.integers(0, 10_000))
def test_a_sound_delta_with_one_other_byte_is_applied_or_refused(seed):
    random = np.random.default_rng(seed)
    old = random.normal(size=CHUNK + 50).astype(np.float32)
    new = np.where(random.random(len(old)) < random.random(), old, old * np.float32(1.0001))
    delta = bytearray(delta_of(old, new))
    delta[random.integers(len(delta))] ^= int(random.integers(1, 256))

    values = old.copy()
    try:
        deltas.apply(bytes(delta), values)
    except InvalidEncoding:
        assert values.tobytes() == old.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", [256, 1200, 2048, 8192, 16384, 65536, 100_000])
def test_arrays_of_one_number_have_checksums_of_their_own(width: str, nbytes: int) -> None:
    """What a layer begins with, or a mask, is often the same number throughout; a reader has the one or the other by it."""
    length = nbytes // np.dtype(width).itemsize
    numbers = [*range(256), *(1 << bit for bit in range(8, 8 * np.dtype(width).itemsize))]
    numbers += [int(np.float32(2.0**n).view(np.uint32)) for n in range(-8, 8)] if width == "u4" else []

    checks = {number: deltas.check(np.full(length, number, width)) for number in numbers}

    assert len(set(checks.values())) == len(checks)


ODD = np.zeros(3, "V3")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (None, np.zeros(1), "^old: expected a 1-D array of elements of 1, 2, 4 or 8 bytes, got NoneType$"),
        (np.zeros((2, 2)), np.zeros((2, 2)), "^old: expected a 1-D array .*, got 2-D float64$"),
        (ODD, ODD, "^old: expected a 1-D array of elements of 1, 2, 4 or 8 bytes, got 1-D"),
        (np.zeros(8)[::2], np.zeros(4), "^old: expected a C-contiguous array, got a strided one$"),
        (np.zeros(4), np.zeros(3), "^new: expected 4 float64, as old has, got 3 float64$"),
        (np.zeros(4), np.zeros(4, np.int64), "^new: expected 4 float64, as old has, got 4 int64$"),
    ],
)
def test_arrays_that_have_no_delta_are_refused(old, new, message):
    with pytest.raises(InvalidArray, match=message):
        deltas.encode(old, new)


def test_what_cannot_be_changed_is_refused():
    values = np.zeros(4, np.float32)
    delta = delta_of(values, values)
    frozen = values.copy()
    frozen.flags.writeable = False

    with pytest.raises(InvalidArray, match=r"^values: expected a writable C-contiguous array, got a read-only one$"):
        deltas.apply(delta, frozen)
    with pytest.raises(InvalidArray, match=r"^delta: expected contiguous bytes, got str"):
        deltas.apply("delta", values)
    with pytest.raises(InvalidArray, match=r"^values: expected memory of their own, got some that overlaps delta$"):
        deltas.apply(values.view(np.uint8), values)
