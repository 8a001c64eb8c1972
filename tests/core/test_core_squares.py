"""square_sum, product_sum and square_root: the same bits however an array is cut."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import psd_core

DTYPES = [np.float32, np.float64]
everything = pytest.mark.parametrize("dtype", DTYPES)


def wide(rng, n, dtype):
    """Numbers whose squares span most of what the sum has room for."""
    decades = 18 if dtype == np.float32 else 150
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-decades, decades, n)).astype(dtype)


def by_runs(x):
    """The definition: each run of 16 in its tree, in float64; then exactly."""
    total = Fraction(0)
    for start in range(0, len(x), 16):
        q = np.zeros(16)
        q[: len(x[start : start + 16])] = x[start : start + 16].astype(np.float64) ** 2
        for width in (8, 4, 2, 1):
            q = q[:width] + q[width : 2 * width]
        total += Fraction(float(q[0]))
    return total * 2**1074


@everything
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 255, 256, 1000, 5003])
def test_it_is_what_the_definition_says(dtype, n):
    x = wide(np.random.default_rng(n), n, dtype)

    assert psd_core.square_sum(x) == by_runs(x)


@everything
@given(cuts=st.lists(st.integers(0, 250), max_size=6))
def test_cuts_between_runs_change_nothing(dtype, cuts):
    """Any cuts at multiples of 16, the parts in any order."""
    x = wide(np.random.default_rng(3), 4001, dtype)
    parts = np.split(x, sorted(16 * cut for cut in cuts))

    assert sum(psd_core.square_sum(part) for part in reversed(parts)) == psd_core.square_sum(x)


@everything
@pytest.mark.parametrize("dim", [1, 5, 16, 33])
def test_rows_are_each_an_array_of_its_own_in_any_order(dtype, dim):
    """So tables have one norm, however their rows are spread."""
    rows = wide(np.random.default_rng(dim), 40 * dim, dtype).reshape(40, dim)

    total = psd_core.square_sum_of_rows(rows)

    assert total == sum(psd_core.square_sum(row) for row in rows)
    assert total == psd_core.square_sum_of_rows(np.ascontiguousarray(rows[::-1]))
    assert psd_core.square_sum_of_rows(rows[:0]) == 0


@everything
@pytest.mark.parametrize("start", [1, 7, 15, 16, 33, 270])
def test_offset_keeps_a_tensor_on_the_grid(dtype, start):
    """A tensor that begins in the middle of a run, cut between runs: as in one piece."""
    space = wide(np.random.default_rng(start), 1000, dtype)
    whole = psd_core.square_sum(space[start:900], start % 16)
    cut = 400

    assert psd_core.square_sum(space[start:cut], start % 16) + psd_core.square_sum(space[cut:900]) == whole


@everything
@given(data=st.data())
def test_the_root_is_the_norm(dtype, data):
    limit = 2.0**500 if dtype == np.float64 else 2.0**126
    x = data.draw(hnp.arrays(dtype, 40, elements=st.floats(-limit, limit, width=8 * np.dtype(dtype).itemsize)))
    exact = math.sqrt(math.fsum(x.astype(np.float64) ** 2))

    assert psd_core.square_root(psd_core.square_sum(x)) == pytest.approx(exact, rel=1e-15)


@everything
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 300])
def test_no_sum_of_what_is_not_finite(dtype, value, at):
    x = np.ones(301, dtype)
    x[at] = value

    assert psd_core.square_sum(x) is None


def test_squares_that_overflow_have_no_sum_and_sums_that_do_have_no_finite_root():
    assert psd_core.square_sum(np.array([1e200])) is None
    assert psd_core.square_root(2 * psd_core.square_sum(np.array([1.3e154]))) == math.inf


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="offset: expected 0 to 15, got 16"):
        psd_core.square_sum(np.zeros(3), 16)
    with pytest.raises(psd_core.InvalidArray, match="x: expected a 1-D"):
        psd_core.square_sum(np.zeros((3, 3)))


@everything
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1000, 5003])
def test_products_are_added_by_runs_as_squares_are(dtype, n):
    """To the bit, whatever their signs; so cuts between runs change nothing, and a tensor may begin within one."""
    rng = np.random.default_rng(n)
    x, y = wide(rng, n, dtype), wide(rng, n, dtype)
    expected = Fraction(0)
    for start in range(0, n, 16):
        q = np.zeros(16)
        q[: len(x[start : start + 16])] = x[start : start + 16].astype(np.float64) * y[start : start + 16].astype(np.float64)
        for width in (8, 4, 2, 1):
            q = q[:width] + q[width : 2 * width]
        expected += Fraction(float(q[0]))

    total = psd_core.product_sum(x, y)

    assert total == expected * 2**1074
    assert total == sum(psd_core.product_sum(x[a:b], y[a:b]) for a, b in ((0, 32), (32, 96), (96, n)))
    assert psd_core.product_sum(x, -y) == -total
    assert psd_core.product_sum(x, x) == psd_core.square_sum(x)
    assert psd_core.real(total) == float(expected)
    if n > 40:
        cut = psd_core.product_sum(x[5:32], y[5:32], 5) + psd_core.product_sum(x[32:], y[32:])
        assert cut == psd_core.product_sum(x[5:], y[5:], 5)


@everything
def test_products_that_are_not_finite_have_no_sum(dtype):
    """NaN, infinity, and what overflows."""
    ones = np.ones(20, dtype)
    for bad in (np.nan, np.inf, -np.inf):
        x = ones.copy()
        x[17] = bad
        assert psd_core.product_sum(x, ones) is None
        assert psd_core.product_sum(ones, x) is None
    if dtype == np.float64:
        assert psd_core.product_sum(ones * 1e200, ones * -1e200) is None


def test_a_sum_beyond_float64_is_infinite_with_its_sign():
    assert [psd_core.real(sign << 2100) for sign in (1, -1)] == [math.inf, -math.inf]


def test_products_need_two_arrays_of_one_type_and_length():
    one = np.ones(4, np.float32)
    with pytest.raises(psd_core.InvalidArray, match="y: expected length 4, that of x, got 3"):
        psd_core.product_sum(one, one[:3])
    with pytest.raises(psd_core.InvalidArray, match="y: expected a 1-D C-contiguous aligned float32 array"):
        psd_core.product_sum(one, one.astype(np.float64))
    with pytest.raises(ValueError, match="offset: expected 0 to 15, got 16"):
        psd_core.product_sum(one, one, 16)
