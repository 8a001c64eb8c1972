"""sgd_block: the same arithmetic as sgd, segment by segment, out of place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psd_core

HYPER = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01, "nesterov": False, "maximize": False}
NAMES = ("param_in", "momentum_in", "acc", "grad")


def make_block(lengths, touched, steps, *, acc=True, grad=True, dtype=np.float32, seed=0):
    """Arguments of sgd_block for segments of these lengths; outputs hold NaN until they are written."""
    n, k = sum(lengths), len(lengths)
    values = np.random.default_rng(seed).standard_normal((4, n)).astype(dtype)
    block = dict(zip(NAMES, values, strict=True))
    return {
        "param_in": block["param_in"],
        "param_out": np.full(n, np.nan, dtype),
        "momentum_in": block["momentum_in"],
        "momentum_out": np.full(n, np.nan, dtype),
        "acc": block["acc"] if acc else None,
        "grad": block["grad"] if grad else None,
        "weight": 1.0,
        "scale": 1.0,
        "segment_ends": np.cumsum(lengths, dtype=np.uint32).reshape(k),
        "touched": np.array(touched, np.uint8),
        "steps_in": np.array(steps, np.uint64),
        "steps_out": np.full(k, 99, np.uint64),
        **HYPER,
    }


def reduced_gradient(block):
    dtype = block["param_in"].dtype.type
    total = 0 if block["acc"] is None else block["acc"]
    if block["grad"] is not None:
        total = total + dtype(block["weight"]) * block["grad"]
    return (dtype(block["scale"]) * total).astype(dtype)


def by_segments(block):
    """The result of calling sgd on a copy of each touched segment: param, momentum, steps."""
    param, momentum, steps = block["param_in"].copy(), block["momentum_in"].copy(), block["steps_in"].copy()
    gradient = reduced_gradient(block)
    hyper = {key: block[key] for key in HYPER}
    begin = 0
    for i, end in enumerate(block["segment_ends"].tolist()):
        if block["touched"][i]:
            steps[i] += 1
            psd_core.sgd(param[begin:end], gradient[begin:end], momentum[begin:end], **hyper, step=int(steps[i]))
        begin = end
    return param, momentum, steps


def assert_same(block, expected):
    for name, value in zip(("param_out", "momentum_out", "steps_out"), expected, strict=True):
        np.testing.assert_array_equal(block[name], value, err_msg=name)


segments = st.lists(st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 255]), st.integers(0, 3)), max_size=12)


@given(
    segments,
    st.sampled_from([(True, True), (True, False), (False, True)]),
    st.sampled_from([1.0, 0.25, 3.0]),
    st.sampled_from([1.0, 1 / 3]),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
def test_sgd_block_is_sgd_on_each_touched_segment(parts, sources, weight, scale, dtype, nesterov):
    """Bit for bit, for any cut into segments, any mixture of steps, and every combination of sources."""
    lengths, touched, steps = zip(*parts, strict=True) if parts else ((), (), ())
    block = make_block(lengths, touched, steps, acc=sources[0], grad=sources[1], dtype=dtype)
    block |= {"weight": weight, "scale": scale, "nesterov": nesterov}
    expected = by_segments(block)

    psd_core.sgd_block(**block)

    assert_same(block, expected)


def test_sgd_block_two_contributions_by_hand():
    """g = 0.5 * (2 + 3*4) = 7 for the touched segment; the other is copied with its buffer and its step."""
    block = make_block([1, 1], [1, 0], [0, 5])
    block |= {"acc": np.array([2, 2], np.float32), "grad": np.array([4, 4], np.float32), "weight": 3.0, "scale": 0.5}
    block |= {"param_in": np.array([1, 2], np.float32), "momentum_in": np.array([8, 9], np.float32)}
    block |= {"lr": 1.0, "weight_decay": 0.0}

    psd_core.sgd_block(**block)

    assert block["param_out"].tolist() == [-6, 2]
    assert block["momentum_out"].tolist() == [7, 9]
    assert block["steps_out"].tolist() == [1, 5]


def test_sgd_block_in_place_gives_the_bits_of_out_of_place():
    lengths, touched, steps = [1000, 1, 0, 2000, 77], [1, 0, 1, 1, 0], [0, 0, 3, 7, 2]
    apart, in_place = make_block(lengths, touched, steps), make_block(lengths, touched, steps)
    in_place |= {name + "_out": in_place[name + "_in"] for name in ("param", "momentum", "steps")}

    psd_core.sgd_block(**apart)
    psd_core.sgd_block(**in_place)

    assert_same(in_place, (apart["param_out"], apart["momentum_out"], apart["steps_out"]))


def test_sgd_block_never_modifies_an_input():
    block = make_block([1000, 500], [1, 0], [0, 4]) | {"scale": 0.5}
    inputs = [key for key, value in block.items() if isinstance(value, np.ndarray) and not key.endswith("_out")]
    for name in inputs:
        block[name] = np.frombuffer(block[name].tobytes(), block[name].dtype)  # read-only memory
    before = {name: block[name].tobytes() for name in inputs}

    psd_core.sgd_block(**block)

    assert {name: block[name].tobytes() for name in inputs} == before


def test_sgd_block_lone_contribution_is_used_as_it_is():
    """No 0 + g: a gradient of -0 leaves a buffer of -0."""
    block = make_block([4], [1], [0], acc=False)
    block |= {"grad": np.full(4, -0.0, np.float32), "weight_decay": 0.0}

    psd_core.sgd_block(**block)

    assert np.signbit(block["momentum_out"]).all()


def test_sgd_block_when_there_is_no_momentum_slot():
    block = make_block([300, 5], [1, 0], [2, 2]) | {"momentum": 0.0}
    expected = by_segments(block)
    block |= {"momentum_in": None, "momentum_out": None}

    psd_core.sgd_block(**block)

    np.testing.assert_array_equal(block["param_out"], expected[0])


def test_sgd_block_when_momentum_is_off_keeps_the_slot():
    block = make_block([300, 5], [1, 0], [2, 2]) | {"momentum": 0.0}

    psd_core.sgd_block(**block)

    np.testing.assert_array_equal(block["momentum_out"], block["momentum_in"])


@pytest.mark.parametrize("touched", [[1] * 10_000, [1, 0] * 5_000], ids=["all", "every other"])
def test_sgd_block_of_ten_thousand_segments(touched):
    block = make_block([26] * 10_000, touched, [0, 1, 2, 3] * 2_500)
    expected = by_segments(block)

    psd_core.sgd_block(**block)

    assert_same(block, expected)


def test_sgd_block_when_full_size():
    block = make_block([1 << 18], [1], [1])
    expected = by_segments(block)

    psd_core.sgd_block(**block)

    assert_same(block, expected)
