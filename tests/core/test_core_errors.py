"""Every refusal is an InvalidArray that names the argument, and leaves the outputs as they were. A checkout that was not built
refuses to be imported, and says what to do."""

import subprocess
import sys

import numpy as np
import pytest
from source_tree import copy_tracked

import psd_core

F32 = np.float32


def misaligned(n, dtype=F32):
    return np.frombuffer(bytearray(n * np.dtype(dtype).itemsize + 1), dtype, offset=1)


def read_only(n):
    return np.frombuffer(bytes(4 * n), F32)


GRADIENT = r"float32, float16 or uint16 \(bfloat16\) array"
BAD_GRADIENTS = {
    "other float": (np.zeros(4, np.float64), f"1-D C-contiguous aligned {GRADIENT}, got ndarray of float64"),
    "integers": (np.zeros(4, np.int32), f"{GRADIENT}, got ndarray of int32"),
    "byte order": (np.zeros(4, ">f4"), "got ndarray of >f4"),
    "no bytes": (np.zeros(4, "V0"), GRADIENT),
    "strided": (np.zeros(8, F32)[::2], "contiguous"),
    "reversed": (np.zeros(4, F32)[::-1], "contiguous"),
    "2-D": (np.zeros((2, 2), F32), "2 dimensions"),
    "0-D": (np.zeros((), F32), "0 dimensions"),
    "misaligned": (misaligned(4), "misaligned memory"),
    "short": (np.zeros(3, F32), "expected length 4, that of [a-z_]+, got 3"),
    "long": (np.zeros(5, F32), "expected length 4, that of [a-z_]+, got 5"),
    "no buffer": ([0.0] * 4, "got list"),
    "raw bytes": (bytes(16), "got bytes"),
    "None": (None, "got None"),
}
BAD_INPUTS = BAD_GRADIENTS | {
    "other float": (np.zeros(4, np.float64), "1-D C-contiguous aligned float32 array, got ndarray of float64"),
    "half floats": (np.zeros(4, np.float16), "float32 array, got ndarray of float16"),
    "half floats' bits": (np.zeros(4, np.uint16), "float32 array, got ndarray of uint16"),
    "integers": (np.zeros(4, np.int32), "float32 array, got ndarray of int32"),
    "no bytes": (np.zeros(4, "V0"), "float32 array"),
}
BAD_OUTPUTS = BAD_INPUTS | {"read-only": (read_only(4), "expected a writable")}


def cases(table, *names):
    return [pytest.param(name, *case, id=f"{name}-{title}") for name in names for title, case in table.items()]


def block(**changes):
    """Valid arguments of step_block, four numbers in two segments, with some of them replaced."""
    arrays = {name: np.zeros(4, F32) for name in ("param_in", "param_out", "momentum_in", "momentum_out", "acc", "grad")}
    rule = {"rule": "sgd", "scalars": (0.1, 0.9, 0.0, 0.0), "flags": ("momentum",)}
    counts = {"touched": np.ones(2, np.uint8), "steps_in": np.zeros(2, np.uint64), "steps_out": np.full(2, 99, np.uint64)}
    ends = np.array([1, 4], np.uint32)
    return arrays | rule | counts | {"segment_ends": ends, "weight": 1.0, "scale": 1.0} | changes


def step(momentum_in, momentum_out, **arguments):
    psd_core.step_block(slots_in=(momentum_in,), slots_out=(momentum_out,), **arguments)


@pytest.mark.parametrize(("name", "bad", "message"), cases(BAD_GRADIENTS, "grad"))
@pytest.mark.parametrize("kernel", [psd_core.accumulate, psd_core.scaled_copy])
def test_a_bad_gradient_is_refused(kernel, name, bad, message):
    acc = np.ones(4, F32)

    with pytest.raises(psd_core.InvalidArray, match=f"^{name}: .*{message}"):
        kernel(acc, bad)

    assert acc.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("kernel", "name"), [(psd_core.accumulate, "acc"), (psd_core.scaled_copy, "out")])
@pytest.mark.parametrize("bad", [read_only(4), misaligned(4), np.zeros(4, int), np.zeros((4, 1), F32), None])
def test_a_bad_destination_is_refused(kernel, name, bad):
    with pytest.raises(
        psd_core.InvalidArray, match=f"^{name}: expected a writable 1-D C-contiguous aligned float32 or float64"
    ):
        kernel(bad, np.zeros(4, F32))


@pytest.mark.parametrize(
    ("ends", "weights", "message"),
    [
        ([1, 3], [1, 1], "segment_ends: expected 4, the length of out, as the last end, got 3"),
        ([3, 2, 4], [1, 1, 1], "segment_ends: expected ends that never fall, got 2 after 3"),
        ([2, 5], [1, 1], "as the last end, got 5"),
        ([4], [1, 1], "weights: expected length 1, that of segment_ends, got 2"),
    ],
)
def test_segments_that_do_not_fit_are_refused(ends, weights, message):
    out = np.ones(4, F32)

    with pytest.raises(psd_core.InvalidArray, match=message):
        psd_core.weigh_segments(out, np.ones(4, F32), np.array(ends, np.uint32), np.array(weights, np.float64), add=True)

    assert out.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("bad", [np.zeros(4, np.int32), np.zeros((2, 2)), misaligned(4, np.float64), None])
def test_first_nonfinite_of_a_bad_array_is_refused(bad):
    with pytest.raises(psd_core.InvalidArray, match=r"^x: "):
        psd_core.first_nonfinite(bad)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [case for case in cases(BAD_INPUTS, "momentum_in", "acc") if not case.id.endswith("acc-None")]
    + [case for case in cases(BAD_GRADIENTS, "grad") if not case.id.endswith("grad-None")]
    + cases(BAD_OUTPUTS, "param_out", "momentum_out"),
)
def test_a_bad_array_of_a_block_is_refused(name, bad, message):
    arguments = block(**{name: bad})

    with pytest.raises(psd_core.InvalidArray, match=f"^{name}: .*{message}"):
        step(**arguments)

    assert arguments["steps_out"].tolist() == [99, 99]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("segment_ends", np.array([1, 4], np.int32), "expected a 1-D C-contiguous aligned uint32 array"),
        ("segment_ends", np.array([3, 2], np.uint32), "never fall, got 2 after 3"),
        ("segment_ends", np.array([1, 3], np.uint32), "expected 4, the length of param_in, as the last end, got 3"),
        ("segment_ends", np.array([1, 5], np.uint32), "expected 4, the length of param_in, as the last end, got 5"),
        ("touched", np.ones(3, np.uint8), "expected length 2, that of segment_ends, got 3"),
        ("touched", np.ones(2, np.int8), "uint8"),
        ("steps_in", np.ones(1, np.uint64), "expected length 2, that of segment_ends, got 1"),
        ("steps_in", np.ones(2, np.int64), "uint64"),
        ("steps_out", np.frombuffer(bytes(16), np.uint64), "expected a writable"),
    ],
)
def test_a_bad_array_of_segments_is_refused(name, bad, message):
    arguments = block(**{name: bad})

    with pytest.raises(psd_core.InvalidArray, match=f"^{name}: .*{message}"):
        step(**arguments)

    assert arguments["param_out"].tolist() == [0, 0, 0, 0]


def test_a_block_without_segments_must_be_empty():
    none = {"touched": np.ones(0, np.uint8), "steps_in": np.ones(0, np.uint64), "steps_out": np.ones(0, np.uint64)}

    with pytest.raises(psd_core.InvalidArray, match=r"^segment_ends: expected 4"):
        step(**block(segment_ends=np.ones(0, np.uint32), **none))


def test_a_block_without_any_gradient_is_refused():
    with pytest.raises(psd_core.InvalidArray, match=r"^grad: expected an array where acc is None"):
        step(**block(acc=None, grad=None))


def test_memory_that_overlaps_by_a_part_is_refused():
    memory = np.zeros(5, F32)

    with pytest.raises(psd_core.InvalidArray, match=r"^acc: expected memory of its own, got some that overlaps grad"):
        psd_core.accumulate(memory[:4], memory[1:])


@pytest.mark.parametrize("other", ["momentum_in", "momentum_out", "acc", "grad"])
def test_an_output_that_is_not_its_own_input_is_refused(other):
    arguments = block()
    arguments["param_out"] = arguments[other]

    with pytest.raises(psd_core.InvalidArray, match=f"overlaps ({other}|param_out)"):
        step(**arguments)


@pytest.mark.process
@pytest.mark.parametrize("module", ["psd_client", "psd_core"])
def test_what_runs_in_a_checkout_that_was_not_built_is_told_what_to_do(tmp_path, module):
    """The checkout comes before an installed psd on the path: here this environment's, which imports psd_client."""
    copy_tracked(tmp_path)

    ended = subprocess.run(
        [sys.executable, "-c", f"import {module}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    *_, last = ended.stderr.splitlines()
    assert last.startswith(f"ImportError: {tmp_path} is a checkout of psd whose kernels were not built for Python 3."), last
    assert f"pip install -e {tmp_path}" in last
