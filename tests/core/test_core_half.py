"""Gradients in half precision: every kernel that takes them gives the bits of widening first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_half import EXPONENTS, F32, PATTERNS, each_kind, finite, gradient, half_block, reference, typed
from helpers_rules import Case, cases, over

import psd_core

LENGTHS = [0, 1, 15, 255, 256, 257, 1000, 5000]


def same_bits(a, b):
    """Compare bits, but for which NaN a NaN is."""
    assert a.dtype == b.dtype == F32
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.where(np.isnan(a), 0, a.view(np.uint32)), np.where(np.isnan(b), 0, b.view(np.uint32)))


# -- widening


@each_kind
@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_pattern_widens_exactly(kind):
    """Subnormal numbers, zeros of both signs and infinities bit by bit; what is NaN stays NaN, of the same sign."""
    half = typed(kind, PATTERNS)

    wide = psd_core.widened(half)

    same_bits(wide, reference(half))
    np.testing.assert_array_equal(np.signbit(wide), PATTERNS >= 0x8000)
    assert np.isnan(wide).sum() == {"float16": 2 * (2**10 - 1), "bfloat16": 2 * (2**7 - 1)}[kind]


def test_bfloat16_keeps_the_bits_of_every_nan():
    assert psd_core.widened(PATTERNS).tobytes() == reference(PATTERNS).tobytes()


@each_kind
@pytest.mark.parametrize("n", LENGTHS)
def test_widened_is_a_new_aligned_array_of_any_length(kind, n):
    half = gradient(kind, n)

    wide = psd_core.widened(np.frombuffer(half.tobytes(), half.dtype))  # read-only memory

    same_bits(wide, reference(half))
    assert n == 0 or wide.ctypes.data % 64 == 0
    assert wide.flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_wide_already_is_returned_as_it_is(dtype):
    x = np.ones(3, dtype)

    assert psd_core.widened(x) is x


# -- sums


@each_kind
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.0])
def test_sums_have_the_bits_of_widening_first(kind, n, weight):
    half = gradient(kind, n)
    acc, expected_acc = np.random.default_rng(n).standard_normal((1, n)).astype(F32).repeat(2, axis=0)
    out, expected_out = np.full((2, n), np.nan, F32)

    psd_core.accumulate(acc, half, weight)
    psd_core.accumulate(expected_acc, reference(half), weight)
    psd_core.scaled_copy(out, half, weight)
    psd_core.scaled_copy(expected_out, reference(half), weight)

    same_bits(acc, expected_acc)
    same_bits(out, expected_out)


@each_kind
@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_sums_of_every_pattern_have_the_bits_of_widening_first(kind, weight):
    """What is not finite, too; a weight of 1 copies every number exactly."""
    half = typed(kind, PATTERNS)
    acc, expected = np.full((2, len(half)), 0.125, F32)
    out = np.empty(len(half), F32)

    psd_core.accumulate(acc, half, weight)
    psd_core.accumulate(expected, reference(half), weight)
    psd_core.scaled_copy(out, half, 1.0)

    same_bits(acc, expected)
    same_bits(out, reference(half))


@each_kind
def test_a_gradient_may_begin_anywhere_that_its_type_allows(kind):
    """Two bytes from an address that suits float32."""
    half = gradient(kind, 1001)[1:]
    acc, expected = np.zeros((2, 1000), F32)

    psd_core.accumulate(acc, half, 0.5)
    psd_core.accumulate(expected, reference(half), 0.5)

    assert half.ctypes.data % 4 == 2
    same_bits(acc, expected)


# -- the finite check


@each_kind
@pytest.mark.parametrize("n", LENGTHS)
def test_extremes_are_finite(kind, n):
    """The largest number, the smallest, and zeros, of both signs."""
    largest = EXPONENTS[kind] - 1
    extremes = np.resize(np.array([largest, largest | 0x8000, 1, 0x8001, 0, 0x8000], np.uint16), n)

    assert psd_core.first_nonfinite(typed(kind, extremes)) == -1


@each_kind
@over("mantissa", [0, 1, 0x40])
@over("sign", [0, 0x8000])
@over("at", [0, 1, 511, 512, 513, 1500, 1999])
def test_first_nonfinite_finds_the_first(kind, mantissa, sign, at):
    bits = np.full(2000, EXPONENTS[kind] - 1, np.uint16)
    bits[[at, -1]] = EXPONENTS[kind] | mantissa | sign

    assert psd_core.first_nonfinite(typed(kind, bits)) == at


@each_kind
def test_every_pattern_is_judged_as_numpy_does(kind):
    half = typed(kind, PATTERNS)

    found = [psd_core.first_nonfinite(half[i : i + 1]) == 0 for i in range(len(half))]

    np.testing.assert_array_equal(found, ~np.isfinite(reference(half)))


# -- sums of squares


@each_kind
@pytest.mark.parametrize("offset", range(16))
def test_square_sum_is_the_integer_of_the_widened_array(kind, offset):
    """Whatever the length, and where tiles of 1024 end before a run does."""
    for n in (0, 1, 15, 16, 17, 1000, 1008, 1009, 1023, 1024, 1025, 3000):
        half = gradient(kind, n, seed=n)

        total = psd_core.square_sum(half, offset)

        assert total == psd_core.square_sum(reference(half), offset), n
        assert n < 15 or total > 0


@each_kind
@pytest.mark.parametrize("at", [0, 17, 1023, 1024, 2999])
def test_no_sum_of_squares_of_what_is_not_finite(kind, at):
    bits = np.ones(3000, np.uint16)
    bits[at] = EXPONENTS[kind]

    assert psd_core.square_sum(typed(kind, bits)) is None


# -- updates of a block


def assert_as_widened(case, lengths, touched, steps, half, **sources):
    """Step a block with a half gradient, and one with the widened gradient: the same bits."""
    block = half_block(case, lengths, touched, steps, half, **sources)
    wide = half_block(case, lengths, touched, steps, reference(half), **sources)

    psd_core.step_block(**block)
    psd_core.step_block(**wide)

    for ours, theirs in zip((block["param_out"], *block["slots_out"]), (wide["param_out"], *wide["slots_out"]), strict=True):
        same_bits(ours, theirs)
    np.testing.assert_array_equal(block["steps_out"], wide["steps_out"])
    assert not np.isnan(block["param_out"]).all() or not len(half)


SGD = Case("sgd", (0.1, 0.9, 0.2, 0.01), ("momentum",))
PLAIN = Case("sgd", (0.1, 0.0, 0.0, 0.0), ())
ADAM = Case("adam", (0.1, 0.9, 0.99, 1e-8, 0.01), ("amsgrad",))
SOURCES = list(itertools.product([False, True], [1.0, 0.3], [1.0, 1 / 3]))


@each_kind
@over("n", LENGTHS)
@over("case", [PLAIN, SGD, ADAM])
def test_a_block_of_any_length_is_stepped_as_by_the_widened_gradient(kind, case, n):
    """With and without an accumulator, with factors that are 1 and that are not."""
    for acc, weight, scale in SOURCES:
        assert_as_widened(case, [n], [1], [3], gradient(kind, n), acc=acc, weight=weight, scale=scale)


@each_kind
@over("case", cases() + cases("lamb"))
def test_every_rule_steps_segments_as_by_the_widened_gradient(kind, case):
    """Touched and untouched ones, at different steps, which end off the grid of tiles."""
    lengths, touched, steps = [300, 7, 0, 205, 256, 1, 300], [1, 0, 1, 1, 1, 0, 1], [0, 4, 2, 9, 9, 0, 1]
    half = gradient(kind, sum(lengths))

    for acc, weight, scale in SOURCES:
        assert_as_widened(case, lengths, touched, steps, half, acc=acc, weight=weight, scale=scale)


@each_kind
def test_a_lone_contribution_is_used_as_it_is(kind):
    """The buffer of a first step becomes the widened gradient, every finite number with its sign."""
    half = typed(kind, finite(kind))
    block = half_block(SGD, [len(half)], [1], [0], half, acc=False) | {"scalars": (0.1, 0.9, 0.2, 0.0)}

    psd_core.step_block(**block)

    same_bits(block["slots_out"][0], reference(half))


@each_kind
def test_in_place_gives_the_bits_of_out_of_place(kind):
    half = gradient(kind, 1333)
    apart, in_place = (half_block(ADAM, [1000, 333], [1, 0], [4, 4], half, acc=True, scale=0.5) for _ in range(2))
    in_place |= {name + "_out": in_place[name + "_in"] for name in ("param", "slots", "steps")}

    psd_core.step_block(**apart)
    psd_core.step_block(**in_place)

    for ours, theirs in zip(
        (apart["param_out"], *apart["slots_out"]), (in_place["param_out"], *in_place["slots_out"]), strict=True
    ):
        same_bits(ours, theirs)
