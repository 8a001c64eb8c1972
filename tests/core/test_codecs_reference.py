"""Every codec has the bytes, the numbers and the residual that NumPy finds by the page of formats, to the bit."""

from __future__ import annotations

import doctest

import codec_model as model
import numpy as np
import pytest
from codec_model import CODECS, F32, ROUNDING
from hypothesis import assume, example, given
from hypothesis import strategies as st

import psd_core
from psd_core import codecs

SIZES = [0, 1, 2, 3, 7, 8, 9, 127, 255, 256, 257, 258, 263, 500, 511, 512, 513, 1025]
TINY, LARGEST = np.finfo(F32).smallest_subnormal, np.finfo(F32).max


def normal(rng, n):
    return rng.standard_normal(n).astype(F32)


def wild(rng, n):
    """Of every magnitude that a float has."""
    return np.ldexp(rng.standard_normal(n), rng.integers(-150, 125, n)).astype(F32)


def subnormal(rng, n):
    return (rng.integers(-(1 << 23), 1 << 23, n) * float(TINY)).astype(F32)


def zeros(rng, n):
    """Of both signs."""
    return np.copysign(F32(0), rng.standard_normal(n)).astype(F32)


def one_huge(rng, n):
    values = normal(rng, n)
    if n:
        values[rng.integers(n)] = LARGEST
    return values


def few(rng, n):
    """Many of the same magnitude."""
    return rng.choice(np.array([-2, -1, -0.5, 0, 0.5, 1, 2, 7, 127], F32), n)


def halves(rng, n):
    """Numbers halfway between levels."""
    return (rng.integers(-14, 15, n) / 2 * 2.0 ** float(rng.integers(-130, 100))).astype(F32)


KINDS = [normal, wild, subnormal, zeros, one_huge, few, halves]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def arrays(draw, n):
    """An array of one of the kinds, or of numbers that are drawn one by one."""
    if n <= 9 and draw(st.booleans()):
        return np.array(draw(st.lists(finite, min_size=n, max_size=n)), F32)
    return draw(st.sampled_from(KINDS))(np.random.default_rng(draw(st.integers(0, 1 << 32))), n)


@st.composite
def pushes(draw):
    """Values, and a residual or none, whose sums are finite."""
    n = draw(st.sampled_from(SIZES))
    values, residual = draw(arrays(n)), draw(st.none() | arrays(n))
    with np.errstate(over="ignore"):
        assume(residual is None or np.isfinite(values + residual).all())
    return values, residual


def same_bits(a, b):
    assert a.dtype == b.dtype == F32
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def check(codec, values, residual, seed=None):
    """Compare data and residual, then the numbers of the data and their sums."""
    random = None if seed is None else model.noise(seed, len(values))
    expected, lost = model.encode(codec, values, residual, random)
    kept, before = None if residual is None else residual.copy(), values.copy()

    data = codecs.encode(codec, values, kept, seed, "nearest" if seed is None else "stochastic")

    assert data.tobytes() == expected
    assert len(expected) == codecs.encoded_bytes(codec, len(values))
    same_bits(values, before)
    if kept is not None:
        same_bits(kept, lost)
    check_decoding(codec, expected, len(values))


def check_decoding(codec, data, n):
    numbers = model.decode(codec, data, n)
    out = np.full(n, np.nan, F32)
    sums = np.linspace(-1, 1, n).astype(F32)
    expected = sums.copy()

    codecs.decode(codec, data, out)
    codecs.accumulate(codec, data, sums, 0.3)

    same_bits(out, numbers)
    psd_core.accumulate(expected, numbers, 0.3)
    same_bits(sums, expected)


@pytest.mark.parametrize("codec", CODECS)
@given(push=pushes())
@example(push=(np.full(300, LARGEST, F32), None))
@example(push=(np.full(300, TINY, F32), np.full(300, -TINY, F32)))
@example(push=(np.full(300, -0.0, F32), np.full(300, -0.0, F32)))
def test_every_bit_is_that_of_the_reference(codec, push):
    check(codec, *push)


@pytest.mark.parametrize("codec", ROUNDING)
@given(push=pushes(), seed=st.integers(0, 2**64 - 1))
@example(push=(np.full(300, LARGEST, F32), None), seed=0)
@example(push=(np.full(300, TINY, F32), None), seed=2**64 - 1)
def test_every_bit_of_stochastic_rounding_is_that_of_the_reference(codec, push, seed):
    check(codec, *push, seed)


@pytest.mark.parametrize("codec", CODECS)
def test_data_lie_at_any_address(codec, rng):
    values = normal(rng, 1000)
    memory = np.zeros(codecs.encoded_bytes(codec, 1000) + 3, np.uint8)

    for start in range(3):
        place = memory[start : len(memory) - 3 + start]
        assert codecs.encode(codec, values, out=place) is place
        assert place.tobytes() == model.encode(codec, values)[0]
        check_decoding(codec, place.tobytes(), 1000)
        out = np.empty(1000, F32)
        codecs.decode(codec, place, out)
        same_bits(out, model.decode(codec, place.tobytes(), 1000))


@pytest.mark.parametrize("codec", CODECS)
def test_any_buffer_of_bytes_is_data(codec, rng):
    data = codecs.encode(codec, normal(rng, 300))
    outs = np.zeros((4, 300), F32)

    for form, out in zip((data, data.tobytes(), bytearray(data.tobytes()), memoryview(data)), outs, strict=True):
        codecs.decode(codec, form, out)

    assert (outs == outs[0]).all()
    assert outs.any()


# -- the search for the largest


def test_ties_go_to_the_first_elements():
    values = np.array([1, -2, 2, 0.5, -2, 2], F32)

    data = codecs.encode("topk:0.5", values)

    out = np.empty(6, F32)
    codecs.decode("topk:0.5", data, out)
    assert out.tolist() == [0, -2, 2, 0, -2, 0]


def sampled_places(n):
    """The places at which the kernel looks first; what it finds must not depend on them."""
    return ((model.mixed(np.arange(1 << 16)) >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)


def mostly_zeros(rng, n):
    values = np.zeros(n, F32)
    values[:: n // 100] = 1
    return values


def large_where_sampled(rng, n):
    """A bound from these samples has fewer elements above it than are wanted."""
    values = normal(rng, n)
    values[sampled_places(n)[: n // 200]] = 100
    return values


def small_where_sampled(rng, n):
    """A bound from these samples has more elements above it than there is room for."""
    values = normal(rng, n) + F32(10)
    values[sampled_places(n)] = 1e-3
    return values


def ascending(rng, n):
    return np.arange(n, dtype=F32)


@pytest.mark.parametrize(
    "numbers", [normal, wild, zeros, few, mostly_zeros, large_where_sampled, small_where_sampled, ascending]
)
@pytest.mark.parametrize("share", ["0.0001", "0.01", "0.4", "0.9"])
def test_the_largest_are_found_in_long_arrays(numbers, share, rng):
    """Of several chunks, by sampling or, where samples mislead, by counting."""
    check(f"topk:{share}", numbers(rng, 300_007), None)


@pytest.mark.parametrize("numbers", [normal, mostly_zeros, large_where_sampled])
def test_the_largest_sums_with_a_residual_are_found_in_long_arrays(numbers, rng):
    check("topk:0.01", numbers(rng, 200_001), normal(rng, 200_001))


@pytest.mark.parametrize("n", [65535, 65536, 65537, 131072])
def test_chunks_end_where_the_array_does(n, rng):
    values = normal(rng, n)
    values[-1] = 1000

    check("topk:0.001", values, None)


# -- promises


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(codecs)

    assert results.attempted > 0
    assert results.failed == 0
