"""step_block: what a rule does to each segment alone, out of place."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_rules import Case, cases, make_block, over
from hypothesis import given
from hypothesis import strategies as st

import psd_core

CASES = cases()
SGD = Case("sgd", (0.1, 0.9, 0.2, 0.01), ("momentum",))
ADAM = Case("adam", (0.1, 0.9, 0.99, 1e-8, 0.01), ())


def reduced_gradient(block):
    dtype = block["param_in"].dtype.type
    total = 0 if block["acc"] is None else block["acc"]
    if block["grad"] is not None:
        total = total + dtype(block["weight"]) * block["grad"]
    return (dtype(block["scale"]) * total).astype(dtype)


def by_segments(case, block):
    """The result of stepping a copy of each touched segment by itself, in place: param, slots, steps."""
    param, steps = block["param_in"].copy(), block["steps_in"].copy()
    slots = [slot.copy() for slot in block["slots_in"]]
    gradient = reduced_gradient(block)
    begin = 0
    for i, end in enumerate(block["segment_ends"].tolist()):
        if block["touched"][i]:
            steps[i] += 1
            case.update(param[begin:end], gradient[begin:end], [slot[begin:end] for slot in slots], int(steps[i]))
        begin = end
    return param, slots, steps


def outputs(block):
    return block["param_out"], block["slots_out"], block["steps_out"]


def assert_same(block, expected):
    for actual, value in zip(outputs(block), expected, strict=True):
        np.testing.assert_array_equal(actual, value)


segments = st.lists(st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 255]), st.integers(0, 3)), max_size=12)


@given(
    st.sampled_from(CASES),
    segments,
    st.sampled_from([(True, True), (True, False), (False, True)]),
    st.sampled_from([1.0, 0.25, 3.0]),
    st.sampled_from([1.0, 1 / 3]),
    st.sampled_from([np.float32, np.float64]),
)
def test_a_block_is_the_rule_on_each_touched_segment(case, parts, sources, weight, scale, dtype):
    """Bit for bit, for any cut into segments, any mixture of steps, and every combination of sources."""
    lengths, touched, steps = zip(*parts, strict=True) if parts else ((), (), ())
    block = make_block(case, lengths, touched, steps, acc=sources[0], grad=sources[1], dtype=dtype)
    block |= {"weight": weight, "scale": scale}
    expected = by_segments(case, block)

    psd_core.step_block(**block)

    assert_same(block, expected)


@over("case", CASES)
def test_a_block_of_every_case_with_untouched_segments_and_different_steps(case):
    """Each segment has the bias correction of its own step; untouched ones keep parameter, slots and step."""
    block = make_block(case, [300, 7, 300, 1, 300], [1, 0, 1, 1, 0], [0, 4, 9, 9, 0])
    expected = by_segments(case, block)

    psd_core.step_block(**block)

    assert_same(block, expected)
    for old, new in zip((block["param_in"], *block["slots_in"]), (block["param_out"], *block["slots_out"]), strict=True):
        np.testing.assert_array_equal(new[300:307], old[300:307])
        np.testing.assert_array_equal(new[608:], old[608:])
    assert block["steps_out"].tolist() == [1, 4, 10, 10, 0]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.rule in ("sgd", "rmsprop") and "momentum" not in case.flags], ids=str
)
def test_momentum_that_has_become_zero_keeps_the_slot(case):
    """A schedule may turn momentum off for a while."""
    on = Case(case.rule, case.scalars, tuple(sorted({*case.flags, "momentum"})))
    block = make_block(on, [300, 5], [1, 0], [2, 2])

    psd_core.step_block(**block)

    np.testing.assert_array_equal(block["slots_out"][-1], block["slots_in"][-1])


def test_two_contributions_by_hand():
    """g = 0.5 * (2 + 3*4) = 7 for the touched segment; the other is copied with its buffer and its step."""
    block = make_block(SGD, [1, 1], [1, 0], [0, 5])
    block |= {"acc": np.array([2, 2], np.float32), "grad": np.array([4, 4], np.float32), "weight": 3.0, "scale": 0.5}
    block |= {"param_in": np.array([1, 2], np.float32), "slots_in": [np.array([8, 9], np.float32)]}
    block |= {"scalars": (1.0, 0.9, 0.2, 0.0)}

    psd_core.step_block(**block)

    assert block["param_out"].tolist() == [-6, 2]
    assert block["slots_out"][0].tolist() == [7, 9]
    assert block["steps_out"].tolist() == [1, 5]


@over("case", CASES)
def test_in_place_gives_the_bits_of_out_of_place(case):
    lengths, touched, steps = [1000, 1, 0, 2000, 77], [1, 0, 1, 1, 0], [0, 0, 3, 7, 2]
    apart, in_place = make_block(case, lengths, touched, steps), make_block(case, lengths, touched, steps)
    in_place |= {name + "_out": in_place[name + "_in"] for name in ("param", "slots", "steps")}

    psd_core.step_block(**apart)
    psd_core.step_block(**in_place)

    assert_same(in_place, outputs(apart))


@over("case", CASES)
def test_no_input_is_modified(case):
    def frozen(array):
        return np.frombuffer(array.tobytes(), array.dtype)  # read-only memory

    block = make_block(case, [1000, 500], [1, 0], [0, 4]) | {"scale": 0.5}
    inputs = [key for key, value in block.items() if isinstance(value, np.ndarray) and not key.endswith("_out")]
    block |= {name: frozen(block[name]) for name in inputs}
    block["slots_in"] = tuple(frozen(slot) for slot in block["slots_in"])
    before = {name: block[name].tobytes() for name in inputs}, [slot.tobytes() for slot in block["slots_in"]]

    psd_core.step_block(**block)

    assert ({name: block[name].tobytes() for name in inputs}, [slot.tobytes() for slot in block["slots_in"]]) == before


def test_lone_contribution_is_used_as_it_is():
    """No 0 + g: a gradient of -0 leaves a buffer of -0."""
    block = make_block(SGD, [4], [1], [0], acc=False)
    block |= {"grad": np.full(4, -0.0, np.float32), "scalars": (0.1, 0.9, 0.2, 0.0)}

    psd_core.step_block(**block)

    assert np.signbit(block["slots_out"][0]).all()


@pytest.mark.parametrize("case", [SGD, ADAM], ids=str)
@pytest.mark.parametrize("touched", [[1] * 10_000, [1, 0] * 5_000], ids=["all", "every other"])
def test_ten_thousand_segments(case, touched):
    block = make_block(case, [26] * 10_000, touched, [0, 1, 2, 3] * 2_500)
    expected = by_segments(case, block)

    psd_core.step_block(**block)

    assert_same(block, expected)


@pytest.mark.parametrize("case", [SGD, ADAM], ids=str)
def test_a_block_of_full_size(case):
    block = make_block(case, [1 << 18], [1], [1])
    expected = by_segments(case, block)

    psd_core.step_block(**block)

    assert_same(block, expected)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rule": "adam2"}, ValueError, "^rule: expected one of adadelta, .*got 'adam2'"),
        ({"flags": ("amsgrat",)}, ValueError, "^flags: expected some of amsgrad, maximize, .*got 'amsgrat'"),
        ({"flags": ("amsgrad",)}, psd_core.InvalidArray, "^slots_in: expected 3 arrays .*max_exp_avg_sq.*got 2"),
        ({"slots_out": ()}, psd_core.InvalidArray, "^slots_out: expected 2 arrays .*got 0"),
        ({"slots_in": (None, None)}, psd_core.InvalidArray, "^exp_avg_in: expected an array, got None"),
        ({"slots_out": (None, None)}, psd_core.InvalidArray, "^exp_avg_out: expected an array, got None"),
        ({"scalars": (0.1,)}, ValueError, "^scalars: expected 5 .lr, beta1, .*got 1"),
        ({"rule": "sgd", "slots_in": (), "slots_out": (), "scalars": (0.1, 0.9, 0, 0)}, ValueError, "momentum to be 0"),
    ],
)
def test_what_does_not_fit_the_rule_is_refused(change, error, match):
    block = make_block(ADAM, [3], [1], [0]) | change

    with pytest.raises(error, match=match):
        psd_core.step_block(**block)

    assert np.isnan(block["param_out"]).all()
    assert block["steps_out"].tolist() == [99]
