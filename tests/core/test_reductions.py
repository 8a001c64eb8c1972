"""Exact sums and extremes: the same bits for any order and any cut."""

import itertools
import math

import numpy as np
import pytest
import vector_words as ops

from psd_core.reductions import ExactSum, Extreme, unpack_answers
from psd_core.vector import VectorSpec, VectorStore


@pytest.mark.parametrize("spread", [0, 30, 1000])
def test_a_sum_is_that_of_fsum(spread, rng):
    """Numbers of every magnitude, subnormal ones too, added in any order and in parts."""
    for _ in range(200):
        x = np.ldexp(rng.standard_normal(50), rng.integers(-spread - 1, spread + 1, 50) - 60 * (spread == 1000))
        cut = int(rng.integers(50))
        parts = [ExactSum().add(x[:cut]), ExactSum().add(x[:cut:-1]), ExactSum().add([float(x[cut])])]

        results = {(a.merge(b).merge(c)).round() for a, b, c in itertools.permutations(parts)}

        assert results == {math.fsum(x)}


def test_a_sum_beyond_the_range_is_infinite_and_one_within_is_not():
    largest = np.finfo(np.float64).max

    assert ExactSum().add([largest, largest, -largest]).round() == largest
    assert ExactSum().add([largest, largest]).round() == math.inf
    assert ExactSum().add([-largest, -largest]).round() == -math.inf
    assert ExactSum().add([1.0, math.inf]).merge(ExactSum().add([2.0])).round() == math.inf
    assert math.isnan(ExactSum().add([math.inf]).merge(ExactSum().add([-math.inf])).round())
    assert math.isnan(ExactSum().add([math.nan]).round())
    assert ExactSum().add([5e-324] * 3).round() == 1.5e-323
    assert ExactSum().add([9.0, 16.0]).root() == 5.0


def test_an_array_is_summed_as_its_numbers_are(rng):
    """C and Python agree, and so do float32 and integers with float64."""
    x = np.ldexp(rng.standard_normal(5000), rng.integers(-1074, 1000, 5000))

    assert ExactSum().add(x) == ExactSum().add(x.tolist())
    assert ExactSum().add(np.float32([0.1, 0.2])).round() == float(np.float32(0.1)) + float(np.float32(0.2))
    assert ExactSum().add(np.array([1, 2**62, 2**62])).whole() == 2**63 + 1
    assert ExactSum().add(np.array([np.inf, 1.0])).round() == np.inf


def test_whole_numbers_are_exact_beyond_their_type(memory_path, rng):
    """Sums of products of the largest int64, and of the least."""
    store = VectorStore.create(memory_path / "vectors", shard=0, shards=1, senders=1)
    n = 9000
    for name in "xyz":
        store.create_vector(VectorSpec(name, n, "int64"))
    low, high = -(1 << 63), (1 << 63) - 1
    x, z = np.full(n, low), rng.integers(low, high, n)
    store.run([ops.put("x", 0, x), ops.put("y", 0, np.full(n, high)), ops.put("z", 0, z)])

    blob = store.run(
        [ops.dot("x", "x"), ops.dot("x", "y"), ops.dot("z", "y"), ops.sum("x"), ops.sum("z"), ops.min("z"), ops.max("x")]
    )
    answers = unpack_answers(blob)

    assert [answer.whole() for answer in answers[:5]] == [
        n * low**2, n * low * high, sum(map(int, z)) * high, n * low, sum(map(int, z)),
    ]  # fmt: skip
    assert answers[5:] == [Extreme(int(z.min()), int(z.argmin()), False), Extreme(low, 0, True)]
    with pytest.raises(ValueError, match="end in the middle of one"):
        unpack_answers(blob[:-3])
    with pytest.raises(ValueError, match="answers: a kind 7 at byte 0"):
        unpack_answers(b"\7\0\0\0")
    store.close(remove=True)


def test_the_first_of_equal_extremes_wins_and_nan_before_all():
    nothing = Extreme(0.0, -1, True)
    parts = [Extreme(3.0, 5, True), Extreme(4.0, 9, True), Extreme(4.0, 12, True), nothing, Extreme(math.nan, 20, True)]

    for some, index in ((parts[:4], 9), (parts, 20), ([nothing, nothing], -1)):
        for order in itertools.permutations(some):
            merged = order[0]
            for other in order[1:]:
                merged = merged.merge(other)
            assert merged.index == index
    assert Extreme(3.0, 5, False).merge(Extreme(4.0, 2, False)) == Extreme(3.0, 5, False)
