"""A copy that follows an array by encoded differences: its bits, and that it never drifts away."""

from __future__ import annotations

from typing import Any

import codec_model as model
import numpy as np
import pytest
from codec_model import F32

from psd_core import InvalidArray, codecs

VALUES = np.array([1, -0.75, 0.3, -0.1, 0.02, 0, -3e-5, 2.5, -2], F32)
BEFORE = np.array([0.5, -0.5, 0.25, -0.125, 0, 0, 0, 2, -2.5], F32)
STEPS_OF = {"int8": 127 * 2, "int4": 7 * 2, "int4log": 4}
"""The largest magnitude of a block over the most that is lost of any element of it."""


def followed(codec: str, values: Any, before: Any) -> tuple[Any, Any]:
    after = np.full_like(before, np.nan)
    return codecs.follow(codec, values, before, after), after


@pytest.mark.parametrize("codec", codecs.DIFFERENCES)
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1001, 70_000])
def test_a_difference_is_that_of_the_model_and_who_adds_it_has_the_same_copy(codec: str, n: int, rng: Any) -> None:
    """Whole blocks and a part of one."""
    values, before = (rng.standard_normal(n).astype(F32) * F32(scale) for scale in (1, 3))
    kept = before.copy()

    data, after = followed(codec, values, before)
    codecs.accumulate(codec, data, kept)

    assert data.tobytes() == model.encode(codec, values - before)[0]
    assert kept.tobytes() == after.tobytes()


@pytest.mark.parametrize("codec", codecs.DIFFERENCES)
def test_after_a_thousand_updates_the_copy_is_within_a_step_of_the_last(codec: str, rng: Any) -> None:
    """What one difference lacks is in the next one: so it does not add up."""
    n = 1000
    values = rng.standard_normal(n).astype(F32)
    before, worker = values.copy(), values.copy()
    for _ in range(1000):
        values = values + F32(0.01) * rng.standard_normal(n).astype(F32)
        data, after = followed(codec, values, before)
        codecs.accumulate(codec, data, worker)
        for begin in range(0, n, codecs.BLOCK):
            at = slice(begin, begin + codecs.BLOCK)
            step = np.abs(values[at] - before[at]).max() / STEPS_OF[codec]
            assert np.abs(values[at] - after[at]).max() <= 1.01 * step + 1e-6  # a scale is rounded up, and a sum rounded
        before = after

    assert worker.tobytes() == before.tobytes()


@pytest.mark.parametrize("codec", codecs.DIFFERENCES)
def test_a_copy_of_what_does_not_change_any_more_becomes_equal_but_for_rounding(codec: str, rng: Any) -> None:
    values = rng.standard_normal(600).astype(F32)
    before = np.zeros(600, F32)
    for _ in range(40):
        _, before = followed(codec, values, before)

    np.testing.assert_allclose(before, values, rtol=3e-7, atol=1e-30)


@pytest.mark.parametrize(("values", "before"), [(np.nan, 0), (np.inf, 0), (0, -np.inf), (3e38, -3e38)])
@pytest.mark.parametrize("at", [0, 299])
def test_a_difference_that_is_not_finite_has_no_form(values: float, before: float, at: int) -> None:
    new, old = np.ones(300, F32), np.zeros(300, F32)
    new[at], old[at] = values, before

    assert codecs.follow("int8", new, old, np.empty(300, F32)) is None


def test_wrong_arguments_are_named() -> None:
    array, other = np.zeros(8, F32), np.zeros(8, F32)
    with pytest.raises(ValueError, match="codec: expected one of int8, int4, int4log, got 'sign'"):
        codecs.follow("sign", array, other, np.zeros(8, F32))
    for arguments, message in (
        ((array[::2], other, np.zeros(4, F32)), "values: expected a C-contiguous"),
        ((array, np.zeros(7, F32), np.zeros(8, F32)), "before: expected length 8"),
        ((array, other, np.zeros(7, F32)), "after: expected length 8"),
        ((array, other, np.zeros(8)), "after: expected a 1-D float32 array"),
        ((array, other, array), "after: expected memory of its own, got some that overlaps values"),
        ((array, other, other), "after: expected memory of its own, got some that overlaps before"),
    ):
        with pytest.raises(InvalidArray, match=message):
            codecs.follow("int4", *arguments)
