"""step_block with `sums`: the same numbers, stored past the caches, and the checksum of their whole pieces in passing."""

import numpy as np
import pytest
from helpers_half import each_kind, gradient
from helpers_rules import cases, make_block
from hypothesis import given
from hypothesis import strategies as st

import psd_core
from psd_core._arena import SUMS_BYTES, Content
from psd_core._kernels import InvalidArray

CASES = cases()
PIECE = 8192


def streamed(block):
    """The same block, with new outputs, and stale sums to be replaced."""
    out = psd_core.aligned_empty(len(block["param_in"]), block["param_in"].dtype)
    slots = tuple(np.full_like(slot, np.nan) for slot in block["slots_out"])
    sums = np.full(SUMS_BYTES, 7, np.uint8)
    return {**block, "param_out": out, "slots_out": slots, "steps_out": np.zeros_like(block["steps_out"]), "sums": sums}


def check_same(plain, other):
    """Both have the same outputs; the sums are of all whole pieces, and go on to the checksum of the whole parameter."""
    assert plain["param_out"].tobytes() == other["param_out"].tobytes()
    for one, two in zip(plain["slots_out"], other["slots_out"], strict=True):
        assert one.tobytes() == two.tobytes()
    assert np.array_equal(plain["steps_out"], other["steps_out"])
    content, whole, data = Content(other["sums"]), Content(), plain["param_out"].view(np.uint8)
    assert content.nbytes == len(data) // PIECE * PIECE
    content.add(data[content.nbytes :])
    whole.add(data)
    assert content.check() == whole.check()


segments = st.lists(
    st.tuples(st.one_of(st.integers(0, 200), st.integers(0, 5000)), st.sampled_from([0, 1]), st.integers(0, 2)), max_size=8
)


@given(
    st.sampled_from(CASES),
    segments,
    st.sampled_from([(True, True), (True, False), (False, True)]),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([np.float32, np.float64]),
)
def test_a_streamed_parameter_is_the_same_and_has_its_sums(case, parts, sources, scale, dtype):
    """For any rule, any cut into segments, touched or not, and every combination of sources."""
    lengths, touched, steps = zip(*parts, strict=True) if parts else ((), (), ())
    plain = make_block(case, lengths, touched, steps, acc=sources[0], grad=sources[1], dtype=dtype) | {"scale": scale}
    other = streamed(plain)

    psd_core.step_block(**plain)
    psd_core.step_block(**other)

    check_same(plain, other)


@each_kind
@pytest.mark.parametrize("acc", [False, True])
def test_half_gradients_are_widened_on_the_way(kind, acc):
    plain = make_block(CASES[0], [3000, 9, 6000], [1, 0, 1], [0, 3, 2], acc=acc) | {"grad": gradient(kind, 9009)}
    other = streamed(plain)

    psd_core.step_block(**plain)
    psd_core.step_block(**other)

    check_same(plain, other)


def test_a_parameter_may_be_streamed_to_where_it_comes_from():
    plain = make_block(CASES[0], [5000, 5000], [1, 0], [0, 0])
    other = streamed(plain)
    other["param_out"][:] = plain["param_in"]
    other["param_in"] = other["param_out"]

    psd_core.step_block(**plain)
    psd_core.step_block(**other)

    check_same(plain, other)


def test_a_parameter_that_does_not_begin_with_a_line_is_stored_plainly():
    """Then nothing of it is in the sums."""
    plain = make_block(CASES[0], [5000], [1], [0])
    other = streamed(plain)
    other["param_out"] = psd_core.aligned_empty(5001, np.float32)[1:]

    psd_core.step_block(**plain)
    psd_core.step_block(**other)

    assert plain["param_out"].tobytes() == other["param_out"].tobytes()
    assert Content(other["sums"]).nbytes == 0


def test_sums_of_another_size_are_refused():
    block = streamed(make_block(CASES[0], [10], [1], [0]))

    with pytest.raises(InvalidArray, match=f"sums: expected {SUMS_BYTES} bytes"):
        psd_core.step_block(**{**block, "sums": np.zeros(SUMS_BYTES + 8, np.uint8)})
    with pytest.raises(ValueError, match=f"sums: expected {SUMS_BYTES} bytes, got 8"):
        Content(np.zeros(8, np.uint8))
