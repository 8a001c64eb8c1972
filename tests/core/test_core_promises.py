"""Promises of the kernels beyond numbers: no GIL, the same bits on every instruction set, an honest build."""

import ctypes
import doctest
import itertools
import re
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import vector_words as ops
from helpers_rules import cases, over

import psd_core
from psd_core.reductions import unpack_answers
from psd_core.vector import VectorSpec, VectorStore
from psd_core.vector_operations import KINDS, MAP_FUNCTIONS, STRIPE, ZIP_FUNCTIONS

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "psd_core" / "csrc"


def test_example_in_the_docstring_runs():
    results = doctest.testmod(psd_core)

    assert results.attempted > 0
    assert results.failed == 0


def test_public_names_are_documented():
    assert [name for name in psd_core.__all__ if not getattr(psd_core, name).__doc__] == []


def test_a_kernel_lets_other_threads_run(no_forced_switches):
    """After `started` the scanner gives up the GIL in the kernel only, so only then can this thread write the NaN."""
    x = np.zeros(1 << 18, np.float32)
    started = threading.Event()
    found = []

    def scan():
        psd_core.first_nonfinite(x)
        started.set()
        found.extend(itertools.takewhile(lambda _: psd_core.first_nonfinite(x) == -1, range(100_000)))

    scanner = threading.Thread(target=scan)
    scanner.start()
    started.wait()
    x[123] = np.nan
    scanner.join()

    assert len(found) < 100_000


# -- the same bits everywhere


RULES_H = (CSRC / "rules.h").read_text()  # generated when building
FLAGS_MAX, SCALARS_MAX, SLOTS_MAX = (int(n) for n in re.findall(r"#define PSD_\w+_MAX (\d+)", RULES_H))


class Hyper(ctypes.Structure):
    """psd_hyper of csrc/rules.h."""

    _fields_ = [("flags", ctypes.c_uint8 * FLAGS_MAX), ("scalars", ctypes.c_double * SCALARS_MAX)]


class Arrays(ctypes.Structure):
    """psd_arrays of csrc/kernels.h."""

    _fields_ = [
        ("param_in", ctypes.c_void_p),
        ("param_out", ctypes.c_void_p),
        ("slots_in", ctypes.c_void_p * SLOTS_MAX),
        ("slots_out", ctypes.c_void_p * SLOTS_MAX),
        ("acc", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("grad_dtype", ctypes.c_int),
        ("sums", ctypes.c_void_p),
    ]


class Segments(ctypes.Structure):
    """psd_segments of csrc/kernels.h."""

    _fields_ = [("count", ctypes.c_ssize_t)] + [
        (name, ctypes.c_void_p) for name in ("ends", "touched", "steps_in", "steps_out")
    ]


def wild_numbers(rng, shape, dtype):
    """Numbers of every magnitude that the type has, subnormal ones too: sums and products overflow and underflow."""
    largest = np.finfo(dtype).maxexp - 1
    return np.ldexp(rng.standard_normal(shape), rng.integers(-largest - 10, largest, shape)).astype(dtype)


def address(array):
    return array.ctypes.data


def same_bits(a, b):
    """Compare bits, but for which NaN a NaN is."""
    return np.where(np.isnan(a), 0, a).tobytes() == np.where(np.isnan(b), 0, b).tobytes() and np.array_equal(
        np.isnan(a), np.isnan(b)
    )


def tame_numbers(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


@over("case", cases() + cases("lamb"))
@pytest.mark.filterwarnings("ignore:overflow")
def test_every_instruction_set_gives_the_same_bits(library, case, rng):
    """In both precisions, at a first step and at a later one, with numbers of any magnitude."""
    for numbers, dtype, step in itertools.product((wild_numbers, tame_numbers), (np.float32, np.float64), (1, 7)):
        ours, theirs = by_both(library, case, numbers(rng, (3 + len(case.slots), 1003), dtype), step)

        assert same_bits(ours, theirs), (numbers.__name__, dtype, step)


def by_both(library, case, values, step):
    """Parameter and slots after a step, by psd_core and by the library."""
    (_, n), dtype, rule = values.shape, values.dtype, psd_core.RULES[case.rule]
    param, acc, grad, *slots = values
    out, theirs = np.empty((1 + len(slots), n), dtype), np.empty((1 + len(slots), n), dtype)
    arrays = Arrays(address(param), address(theirs[0]), acc=address(acc), grad=address(grad), weight=0.7, scale=1 / 3)
    for name, slot, to in zip(case.slots, slots, theirs[1:], strict=True):
        position = [slot.name for slot in rule.all_slots].index(name)
        arrays.slots_in[position], arrays.slots_out[position] = address(slot), address(to)
    flags = (ctypes.c_uint8 * FLAGS_MAX)(*(flag in case.flags for flag in rule.flags))
    hyper = Hyper(flags, (ctypes.c_double * SCALARS_MAX)(*case.scalars))
    arrays.grad_dtype = code = [np.float32, np.float64].index(dtype)
    parts = {
        "segment_ends": np.array([n], np.uint32),
        "touched": np.ones(1, np.uint8),
        "steps_in": np.array([step - 1], np.uint64),
        "steps_out": np.zeros(1, np.uint64),
    }

    segments = Segments(1, *map(address, parts.values()))
    library.psd_step_block(code, rule.number, ctypes.byref(arrays), ctypes.byref(hyper), ctypes.byref(segments))
    psd_core.step_block(
        case.rule, param, out[0], slots, tuple(out[1:]), acc, grad, weight=0.7, scale=1 / 3, **parts,
        scalars=case.scalars, flags=case.flags,
    )  # fmt: skip
    return out, theirs


@pytest.mark.parametrize(("dtype", "code"), [(np.float32, 0), (np.float64, 1)])
@pytest.mark.parametrize("offset", [0, 5])
def test_every_instruction_set_gives_the_same_sum_of_squares(library, dtype, code, offset, rng):
    """Whole runs and parts of them; squares of every magnitude that has one."""
    x = np.ldexp(rng.standard_normal(4099), rng.integers(-500, 500, 4099) if code else rng.integers(-140, 120, 4099)).astype(
        dtype
    )
    limbs = (ctypes.c_uint64 * 68)()

    is_finite = library.psd_add_squares(
        code, limbs, ctypes.c_void_p(address(x)), ctypes.c_ssize_t(len(x)), ctypes.c_ssize_t(offset)
    )

    assert is_finite
    assert sum(limb << 32 * place for place, limb in enumerate(limbs)) == psd_core.square_sum(x, offset)


@pytest.mark.parametrize("code", [2, 3])
@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_every_instruction_set_widens_all_halves_to_the_same_bits(library, code, weight):
    """psd_dtype 2 is float16, 3 bfloat16."""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if code == 2 else np.uint16)
    wide, ours, theirs = np.empty(len(half), np.float32), *np.ones((2, len(half)), np.float32)
    n = ctypes.c_ssize_t(len(half))

    library.psd_widen(code, ctypes.c_void_p(address(wide)), ctypes.c_void_p(address(half)), n)
    library.psd_accumulate(code, ctypes.c_void_p(address(theirs)), ctypes.c_void_p(address(half)), ctypes.c_double(weight), n)
    psd_core.accumulate(ours, half, weight)

    assert wide.tobytes() == psd_core.widened(half).tobytes()
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_instruction_set_gives_the_same_bits_of_vectors(library, dtype, memory_path, rng):
    """Functions, combinations and sums of server-side vectors, over all of a stripe but one element."""
    n, suffix = STRIPE - 1, {"float64": "f64", "float32": "f32"}[dtype]
    x, y = wild_numbers(rng, n, dtype), tame_numbers(rng, n, dtype)
    store = VectorStore.create(memory_path / "vectors", shard=0, shards=1, senders=1)
    for name, values in (("x", x), ("y", y), ("z", x)):
        store.create_vector(VectorSpec(name, n, dtype))
        store.run([ops.put(name, 0, values)])

    for function, operation in (
        (0, ops.axpy("z", 0.3, "y")),
        *((number, ops.map("z", name, "y")) for number, name in enumerate(MAP_FUNCTIONS) if not MAP_FUNCTIONS[name]),
        *((number, ops.zip("z", name, "x", "y")) for number, name in enumerate(ZIP_FUNCTIONS) if not ZIP_FUNCTIONS[name]),
    ):
        store.run([ops.put("z", 0, x), operation])
        code, inputs = KINDS[operation.name].number, {"axpy": (x, y), "map": (y,), "zip": (x, y)}[operation.name]
        pointers = (ctypes.c_void_p * 2)(*map(address, inputs))
        packed = struct.pack("=8I5Q2d", code, 0, function, 0, 0, len(inputs), 0, 0, *[0] * 5, 0.3, 0)
        theirs = np.empty(n, dtype)
        compute = library[f"psd_vector_compute_{suffix}"]
        compute(packed, ctypes.c_void_p(address(theirs)), pointers, None, ctypes.c_ssize_t(n), ctypes.c_uint64(0))
        assert same_bits(store.read("z"), theirs), operation

    (dot,) = unpack_answers(store.run([ops.dot("y", "y")]))
    partial, pointers = np.empty(3), (ctypes.c_void_p * 1)(address(y))
    dots = library[f"psd_vector_dots_{suffix}"]
    dots(ctypes.c_void_p(address(y)), pointers, ctypes.c_ssize_t(1), ctypes.c_ssize_t(n), ctypes.c_void_p(address(partial)))
    assert dot.round() == partial[0]
    store.close(remove=True)


# -- the build


def test_the_build_neither_ties_itself_to_a_machine_nor_bends_arithmetic():
    text = (ROOT / "setup.py").read_text()
    arguments = re.findall(r'"(-[^"]+)"', text)

    assert "-ffp-contract=off" in arguments
    assert [flag for flag in arguments if flag.startswith(("-march", "-mtune", "-Ofast", "-ffast", "-funsafe"))] == []


@pytest.mark.parametrize(("module", "released"), [("_kernels.pyx", 8), ("_codecs.pyx", 9)])
def test_no_exception_is_raised_where_the_gil_is_released(module, released):
    """Cython compiles `raise` in a noexcept or nogil span, and loses the exception."""
    text = (ROOT / "psd_core" / module).read_text()
    spans = re.findall(r"^( *)with nogil:\n((?:\1 +.*\n)+)", text, re.MULTILINE)
    functions = re.findall(r"^cdef .*noexcept.*:\n((?: +.*\n)+)", text, re.MULTILINE)

    assert len(spans) == text.count("with nogil:") == released
    assert len(functions) == len(re.findall(r"^cdef .*noexcept", text, re.MULTILINE)) > 0
    assert [body for body in [*(body for _, body in spans), *functions] if re.search(r"\b(raise|assert)\b", body)] == []
