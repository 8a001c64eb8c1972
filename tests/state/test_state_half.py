"""Gradients of 16 bits: what becomes of them is what becomes of the same numbers in 32, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidTensor, NonFiniteGradient
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec

HALVES = ("float16", "bfloat16")
VALUES = (0.10009765625, 0.69921875, -5.96875)
"""That both kinds can hold, and whose sums neither can."""


def trained(dtype: str, *, lent: int = 0, weights: tuple[float, ...] = (1.0, 1.0, 1.0), **spec: Any) -> list[float]:
    """The parameters after a round of three workers, of whom the first `lent` have their gradients in shared memory."""
    driver = Driver(job_spec(3, dtype=dtype, **spec))
    for seat, value, weight in zip(driver.start(), VALUES, weights, strict=True):
        if seat.rank < lent:
            push = driver.begin_push(seat, 0, weight=weight)
            driver.lend_block(push, 0, value)
        else:
            driver.push(seat, 0, value, weight=weight)
    driver.core.declared().settle()  # a round whose last gradient is lent is left to the next one who asks
    return driver.values()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lent", [0, 1, 2, 3])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 0.5, 2.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_round_sums_them_as_if_they_were_wide(dtype, lent, weights, reduction):
    """Wherever they lie, and whatever they weigh."""
    found = trained(dtype, lent=lent, weights=weights, reduction=reduction)

    assert found == trained("float32", weights=weights, reduction=reduction)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("flags", [(), ("momentum",)])
def test_without_rounds_each_is_an_update(dtype, flags):
    """As the same gradients of 32 bits."""
    found = [trained(kind, mode="async", flags=flags) for kind in (dtype, "float32")]

    assert found[0] == found[1]
    assert found[0] != [0.0] * 3


@pytest.mark.parametrize("dtype", HALVES)
def test_what_was_lent_is_widened_before_its_memory_changes(dtype):
    """The sum has the numbers that were there when they were pushed."""
    driver = Driver(job_spec(2, dtype=dtype))
    a, b = driver.start()
    push = driver.begin_push(a, 0)
    memory = driver.lend_block(push, 0, VALUES[0])

    push.loan.end()
    memory.fill(0)
    driver.push(b, 0, VALUES[1])

    assert driver.values() == [float(-np.float32(0.5) * (np.float32(VALUES[0]) + np.float32(VALUES[1])))] * 3


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_that_is_not_finite_is_refused_by_its_value(dtype, value):
    """The message has the number, not its bits."""
    driver = Driver(job_spec(1, dtype=dtype))
    (seat,) = driver.start()

    with pytest.raises(NonFiniteGradient, match=rf"has {value} in tensor 't0' \(block 0, element 0\)"):
        driver.push(seat, 0, value)

    assert driver.version() == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_the_size_on_the_wire_is_theirs(dtype):
    """A frame of float32 is refused."""
    driver = Driver(job_spec(1, dtype=dtype))
    (seat,) = driver.start()
    push = driver.begin_push(seat, 0)

    with pytest.raises(InvalidTensor, match="payload has 12 bytes, expected 3 x 2 = 6"):
        driver.shard.exchange.push_block(push, 0, b"", memoryview(bytes(12)))


@pytest.mark.parametrize("dtype", HALVES)
def test_where_nothing_is_present_both_zeros_are_nothing(dtype):
    """Of two tensors in one block only the second has a gradient; anything but zeros in the first is refused."""
    spec = JobSpec(1, (TensorSpec("a", (2,), dtype), TensorSpec("b", (1,), dtype)), (GroupSpec("sgd"),))
    driver = Driver(spec)
    (seat,) = driver.start()
    gradient = driver.gradient(0, -0.0)
    gradient[2] = driver.gradient(0, 2.0)[0]
    push = driver.begin_push(seat, 0)

    gradient[1] = gradient[2]
    with pytest.raises(InvalidTensor, match="must be zero where present is 0"):
        driver.shard.exchange.push_block(push, 0, b"\2", memoryview(gradient.tobytes()))
    gradient[1] = gradient[0]
    assert driver.shard.exchange.push_block(push, 0, b"\2", memoryview(gradient.tobytes())) is None

    assert driver.values() == [0.0, 0.0, -2.0]
