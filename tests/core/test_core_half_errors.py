"""Refusals of half precision: beside float64, as anything but a gradient, in the memory of an output, and misshapen."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_half import F32, each_kind, gradient, half_block, typed
from helpers_rules import Case

import psd_core

PLAIN = Case("sgd", (0.1, 0.0, 0.0, 0.0), ())
MOMENTUM = Case("sgd", (0.1, 0.9, 0.2, 0.01), ("momentum",))
SUMS = [(psd_core.accumulate, "acc"), (psd_core.scaled_copy, "out")]
GRADIENT = r"1-D C-contiguous aligned float32, float16 or uint16 \(bfloat16\) array"
ANY = r"1-D C-contiguous aligned float32, float64, float16 or uint16 \(bfloat16\) array"


def other_alignment(kind, n):
    return np.frombuffer(bytearray(2 * n + 1), typed(kind, []).dtype, offset=1)


@each_kind
@pytest.mark.parametrize(("kernel", "name"), SUMS)
def test_beside_float64_half_precision_is_refused(kernel, name, kind):
    out = np.ones(4)

    with pytest.raises(
        psd_core.InvalidArray, match=r"^grad: expected a 1-D C-contiguous aligned float64 array, got ndarray of"
    ):
        kernel(out, gradient(kind, 4))

    assert out.tolist() == [1, 1, 1, 1]


@each_kind
@pytest.mark.parametrize(("kernel", "name"), SUMS)
def test_an_output_in_half_precision_is_refused(kernel, name, kind):
    out = typed(kind, [1, 2, 3, 4])

    for grad in (np.ones(4, F32), out.copy()):
        with pytest.raises(
            psd_core.InvalidArray, match=rf"^{name}: expected a writable .* float32 or float64 array, got ndarray"
        ):
            kernel(out, grad)

    assert out.view(np.uint16).tolist() == [1, 2, 3, 4]


@each_kind
@pytest.mark.parametrize("name", ["param_in", "param_out", "momentum_in", "momentum_out", "acc"])
def test_whatever_is_no_gradient_of_a_block_is_refused_in_half_precision(name, kind):
    block = half_block(MOMENTUM, [4], [1], [0], gradient(kind, 4), acc=True)
    if name.startswith("momentum"):
        block["slots" + name.removeprefix("momentum")] = (gradient(kind, 4),)
    else:
        block[name] = gradient(kind, 4)

    with pytest.raises(
        psd_core.InvalidArray, match=rf"^{name}: expected a .*aligned float32( or float64)? array, got ndarray of"
    ):
        psd_core.step_block(**block)

    assert block["steps_out"].tolist() == [99]


@each_kind
def test_a_block_of_float64_refuses_a_half_gradient(kind):
    block = half_block(PLAIN, [4], [1], [0], gradient(kind, 4), acc=False)
    block |= {"param_in": np.ones(4), "param_out": np.zeros(4)}

    with pytest.raises(
        psd_core.InvalidArray, match=r"^grad: expected a 1-D C-contiguous aligned float64 array, got ndarray of"
    ):
        psd_core.step_block(**block)

    assert block["param_out"].tolist() == [0, 0, 0, 0]


@each_kind
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize(("kernel", "name"), SUMS)
def test_a_half_gradient_in_the_memory_of_its_sum_is_refused(kernel, name, start, kind):
    """It may begin at the same start, too, where a float32 gradient would be the sum itself."""
    memory = np.ones(8, F32)
    half = memory.view(typed(kind, []).dtype)[start : start + 8]

    with pytest.raises(psd_core.InvalidArray, match=f"^{name}: expected memory of its own, got some that overlaps grad"):
        kernel(memory, half)

    assert memory.tolist() == [1] * 8


@each_kind
def test_a_half_gradient_in_the_memory_of_a_block_is_refused(kind):
    block = half_block(PLAIN, [8], [1], [0], None, acc=False)
    block["grad"] = block["param_out"].view(typed(kind, []).dtype)[:8]

    with pytest.raises(psd_core.InvalidArray, match=r"^param_out: expected memory of its own, got some that overlaps grad"):
        psd_core.step_block(**block)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (other_alignment("float16", 4), f"^grad: expected a {GRADIENT}, got ndarray of float16: misaligned memory"),
        (other_alignment("bfloat16", 4), f"^grad: expected a {GRADIENT}, got ndarray of uint16: misaligned memory"),
        (np.zeros(3, np.float16), "^grad: expected length 4, that of (acc|out|param_in), got 3"),
        (np.zeros(8, np.uint16), "^grad: expected length 4, that of (acc|out|param_in), got 8"),
        (np.zeros(4, np.int16), f"^grad: expected a {GRADIENT}, got ndarray of int16: wrong element type"),
        (np.zeros(4, ">f2"), f"^grad: expected a {GRADIENT}, got ndarray of >f2: wrong element type"),
        (np.zeros(4, ">u2"), f"^grad: expected a {GRADIENT}, got ndarray of >u2: wrong element type"),
        (np.zeros((2, 2), np.uint16), f"^grad: expected a {GRADIENT}, got ndarray of uint16: 2 dimensions"),
        (np.zeros(8, np.float16)[::2], f"^grad: expected a {GRADIENT}, got ndarray of float16: .*contiguous"),
    ],
)
def test_a_bad_half_gradient_is_refused(bad, message):
    for kernel in (psd_core.accumulate, psd_core.scaled_copy):
        out = np.ones(4, F32)
        with pytest.raises(psd_core.InvalidArray, match=message):
            kernel(out, bad)
        assert out.tolist() == [1, 1, 1, 1]

    block = half_block(PLAIN, [4], [1], [0], bad, acc=False)
    with pytest.raises(psd_core.InvalidArray, match=message):
        psd_core.step_block(**block)
    assert block["steps_out"].tolist() == [99]


@pytest.mark.parametrize("function", [psd_core.first_nonfinite, psd_core.square_sum, psd_core.widened])
@pytest.mark.parametrize(
    "bad", [np.zeros(4, np.int16), np.zeros((2, 2), np.uint16), other_alignment("float16", 4), [0.5], None]
)
def test_an_array_that_cannot_be_read_is_refused(function, bad):
    with pytest.raises(psd_core.InvalidArray, match=f"^x: expected a {ANY}, got "):
        function(bad)
