"""accumulate, scaled_copy, first_nonfinite, aligned_empty: numbers, edges, types."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import psd_core

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 3, 255, 256, 257, 1001]

everything = pytest.mark.parametrize("dtype", DTYPES)
every_size = pytest.mark.parametrize("n", SIZES)


def read_only(array):
    return np.frombuffer(array.tobytes(), array.dtype)


@everything
def test_accumulate_adds_the_weighted_gradient(dtype):
    acc = np.array([1, 2, 3], dtype)

    psd_core.accumulate(acc, np.array([10, 20, -30], dtype), 0.5)

    assert acc.tolist() == [6, 12, -12]


@everything
def test_scaled_copy_forgets_what_was_there(dtype):
    out = np.array([np.nan, np.inf, 7], dtype)

    psd_core.scaled_copy(out, np.array([1, -2, 0], dtype), 3)

    assert out.tolist() == [3, -6, 0]


@everything
@every_size
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.0])
def test_sums_when_inputs_are_read_only_match_numpy_bit_by_bit(dtype, n, weight, rng):
    """Two roundings, product and sum, are exactly what NumPy does in the arrays' type."""
    acc, grad = rng.standard_normal((2, n)).astype(dtype)
    expected = acc + dtype(weight) * grad
    out = np.empty_like(acc)

    psd_core.accumulate(acc, read_only(grad), weight)
    psd_core.scaled_copy(out, read_only(grad), weight)

    np.testing.assert_array_equal(acc, expected)
    np.testing.assert_array_equal(out, dtype(weight) * grad)


@everything
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ends", [[], [0], [5], [1, 1, 300, 1001], [0, 7, 1001, 1001]])
def test_segments_have_weights_of_their_own(dtype, add, ends, rng):
    """Each as scaled_copy and accumulate of it alone, to the bit, also in place."""
    n = ends[-1] if ends else 0
    out, grad = rng.standard_normal((2, n)).astype(dtype)
    weights = rng.standard_normal(len(ends))
    expected = out.copy()
    for start, end, weight in zip([0, *ends], ends, weights, strict=False):
        (psd_core.accumulate if add else psd_core.scaled_copy)(expected[start:end], grad[start:end], weight)

    psd_core.weigh_segments(out, read_only(grad), np.array(ends, np.uint32), weights, add=add)
    np.testing.assert_array_equal(out, expected)

    psd_core.weigh_segments(grad, grad, np.array(ends, np.uint32), np.full(len(ends), 2.0), add=False)
    psd_core.weigh_segments(grad, grad, np.array(ends, np.uint32), np.full(len(ends), 0.5), add=False)
    psd_core.weigh_segments(expected, grad, np.array(ends, np.uint32), np.zeros(len(ends)), add=True)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("half", [np.float16, np.uint16])
def test_segments_of_half_precision_are_widened_first(half, rng):
    grad = rng.standard_normal(33).astype(np.float16).view(half)
    ends, weights = np.array([10, 33], np.uint32), np.array([3.0, -0.5])
    out, expected = np.empty(33, np.float32), np.empty(33, np.float32)

    psd_core.weigh_segments(out, grad, ends, weights, add=False)

    psd_core.weigh_segments(expected, psd_core.widened(grad), ends, weights, add=False)
    np.testing.assert_array_equal(out, expected)


@everything
def test_sum_of_a_hundred_gradients_is_within_a_hundred_roundings_of_the_exact_one(dtype, rng):
    grads = rng.standard_normal((100, 999)).astype(dtype)
    acc = np.zeros(999, dtype)

    for grad in grads:
        psd_core.accumulate(acc, grad)

    exact = grads.astype(np.longdouble).sum(0)
    assert np.all(np.abs(acc - exact) <= 100 * np.finfo(dtype).eps * np.abs(grads.astype(np.float64)).sum(0))


def test_accumulate_with_weight_one_takes_the_gradient_as_it_is():
    """Subnormals, the largest number and infinities pass through a weight of 1."""
    grad = np.array([1e-45, 3.4028235e38, np.inf, -np.inf], np.float32)
    acc = np.zeros(4, np.float32)

    psd_core.accumulate(acc, grad)

    assert acc.tobytes() == grad.tobytes()


def test_an_output_may_be_its_own_input():
    x = np.array([1, 2], np.float32)

    psd_core.accumulate(x, x, 2)
    psd_core.scaled_copy(x, x, -1)

    assert x.tolist() == [-3, -6]


@everything
@every_size
def test_first_nonfinite_when_all_are_finite_is_minus_one(dtype, n):
    largest = np.full(n, np.finfo(dtype).max)
    largest[::2] = np.finfo(dtype).smallest_subnormal

    assert psd_core.first_nonfinite(read_only(largest.astype(dtype))) == -1


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@given(data=st.data())
def test_first_nonfinite_finds_the_first(bad, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    x = np.zeros(data.draw(st.integers(1, 2000)), dtype)
    where = data.draw(st.sets(st.integers(0, len(x) - 1), min_size=1, max_size=3))
    x[list(where)] = bad

    assert psd_core.first_nonfinite(x) == min(where)


@given(hnp.arrays(np.float32, st.integers(0, 600), elements=st.floats(width=32)))
def test_first_nonfinite_agrees_with_numpy(x):
    bad = np.flatnonzero(~np.isfinite(x))

    assert psd_core.first_nonfinite(x) == (bad[0] if len(bad) else -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
@every_size
def test_aligned_empty_begins_on_a_cache_line(dtype, n):
    array = psd_core.aligned_empty(n, dtype)

    assert (array.shape, array.dtype) == ((n,), np.dtype(dtype))
    assert n == 0 or array.ctypes.data % 64 == 0  # NumPy does not tell where an empty array begins
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_aligned_empty_when_negative_is_refused():
    with pytest.raises(ValueError, match="n: expected a length >= 0, got -1"):
        psd_core.aligned_empty(-1, np.float32)
