"""Promises of the codecs beyond single arrays: the same bytes for ever and everywhere, unbiased rounding, error feedback."""

from __future__ import annotations

import ctypes
import itertools
import threading

import codec_model as model
import numpy as np
import pytest
from codec_model import CODECS, DENSE, F32, ROUNDING
from helpers_rules import over

from psd_core import codecs

# -- bytes of the formats


VALUES = np.array([1, -0.75, 0.3, -0.1, 0.02, 0, -3e-5, 2.5, -2], F32)
GOLDEN = {
    ("bf16", None): "803f40bf9a3ecdbda43c0000fcb7204000c0",
    ("bf16", 8): "803f40bf993ecdbda43c0000fbb7204000c0",
    ("fp16", None): "003c00bacd3466ae1f250000f781004100c0",
    ("fp16", 8): "003c00bacd3467ae1f250000f781004100c0",
    ("int8", None): "a23c33da0ffb0100007e9b",
    ("int8", 8): "a23c33da0ffb0100007f9b",
    ("int4", None): "b73e030e71a000",
    ("int4", 8): "b73e030e71b000",
    ("int4log", None): "2040060d74fa01",
    ("int4log", 8): "2040060d74fb00",
    ("sign", None): "3e3f1803",
    ("topk:0.3", None): "030000000000803f00002040000000c0000007000800",
}


@pytest.mark.parametrize(("codec", "seed"), GOLDEN, ids=str)
def test_the_bytes_are_those_of_ever(codec, seed):
    """A shard and a worker of other versions understand each other; what is lost, too, follows from the data."""
    residual = np.zeros(len(VALUES), F32)

    data = codecs.encode(codec, VALUES, residual, seed, "nearest" if seed is None else "stochastic")

    assert data.tobytes().hex() == GOLDEN[codec, seed]
    assert residual.tobytes() == (VALUES - model.decode(codec, data.tobytes(), len(VALUES))).tobytes()


def test_the_random_numbers_are_those_of_splitmix64():
    """Whose state begins as the mixed seed; the first numbers from the state 1234567 are published with the algorithm."""
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(model.GAMMA)

    assert model.mixed(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


# -- the same bits everywhere


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


class Parts(ctypes.Structure):
    """psd_topk_parts of csrc/codec.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("counts", "values", "offsets")]


def wild(rng, n):
    return np.ldexp(rng.standard_normal(n), rng.integers(-150, 125, n)).astype(F32)


def tame(rng, n):
    return rng.standard_normal(n).astype(F32)


@over("numbers", [wild, tame])
@over("seed", [None, 99])
@over("codec", DENSE)
def test_every_instruction_set_gives_the_same_bits(library, codec, seed, numbers, rng):
    """Data, what is lost, decoded numbers and sums; whole blocks and a part of one."""
    if seed is not None and codec not in ROUNDING:
        seed = None
    n = 2003
    values, residual = numbers(rng, n), tame(rng, n)
    kept, out, sums = residual.copy(), np.empty(n, F32), tame(rng, n)
    expected = sums.copy()
    ours = codecs.encode(codec, values, residual, seed, "nearest" if seed is None else "stochastic")
    theirs = np.zeros_like(ours)
    codes = theirs[0 if codec in ("bf16", "fp16") else 16 :]
    number, count = DENSE.index(codec), ctypes.c_ssize_t(n)

    library.psd_codec_encode.restype = ctypes.c_ssize_t
    finite = library.psd_codec_encode(
        number,
        pointer(values),
        pointer(kept),
        ctypes.c_uint64(seed or 0),
        seed is not None,
        pointer(theirs),
        pointer(codes),
        count,
    )
    library.psd_codec_decode(number, pointer(theirs), pointer(codes), pointer(out), count)
    library.psd_codec_accumulate(number, pointer(theirs), pointer(codes), pointer(sums), ctypes.c_float(0.7), count)

    assert finite == -1
    assert theirs.tobytes() == ours.tobytes()
    assert kept.tobytes() == residual.tobytes()
    assert out.tobytes() == model.decode(codec, ours.tobytes(), n).tobytes()
    codecs.accumulate(codec, ours, expected, 0.7)
    assert sums.tobytes() == expected.tobytes()


@pytest.mark.parametrize("numbers", [wild, tame])
def test_every_instruction_set_finds_the_same_largest(library, numbers, rng):
    n, k = 150_001, 1501
    values, residual = numbers(rng, n), tame(rng, n)
    kept = residual.copy()
    ours = codecs.encode("topk:0.01", values, residual)
    theirs = np.zeros_like(ours)
    starts = np.cumsum([theirs.ctypes.data, 4 * 3, 4 * k]).tolist()
    library.psd_topk_room.restype = library.psd_topk_encode.restype = ctypes.c_ssize_t
    room = library.psd_topk_room(ctypes.c_ssize_t(n), ctypes.c_ssize_t(k))
    scratch = np.empty(room, F32), np.empty(room, np.uint32)

    finite = library.psd_topk_encode(
        pointer(values), pointer(kept), ctypes.c_ssize_t(n), ctypes.c_ssize_t(k), Parts(*starts), *map(pointer, scratch)
    )

    assert finite == -1
    assert theirs.tobytes() == ours.tobytes()
    assert kept.tobytes() == residual.tobytes()


# -- rounding


@pytest.mark.parametrize("codec", ROUNDING)
def test_stochastic_rounding_is_unbiased(codec, rng):
    """The mean over many seeds is the number itself, within what its spread allows; errors of neighbours, and of neighbouring
    seeds, have nothing to do with each other."""
    n, seeds = 1000, 600
    values = rng.standard_normal(n).astype(F32) * (F32(1e-6) if codec == "fp16" else F32(1))  # where fp16 has few bits, too
    found = np.empty((seeds, n), F32)
    for seed, out in enumerate(found):
        codecs.decode(codec, codecs.encode(codec, values, seed=seed, rounding="stochastic"), out)
    errors = found.astype(np.float64) - values

    spread = errors.std(axis=0)
    moves = spread > 0  # what is exact, or nearly, is not rounded
    scores = errors.mean(axis=0)[moves] / (spread[moves] / np.sqrt(seeds))
    assert moves.sum() > 900
    assert np.abs(errors[:, ~moves]).max(initial=0) <= 0.01 * np.abs(values).max()
    assert np.abs(scores).max() < 5
    assert abs(scores.mean()) < 5 / np.sqrt(len(scores))
    assert 0.8 < (scores**2).mean() < 1.2
    shares = errors / np.where(moves, spread, 1)
    assert abs((shares[:, 1:] * shares[:, :-1]).mean()) < 5 / np.sqrt(errors.size)
    assert abs((shares[1:] * shares[:-1]).mean()) < 5 / np.sqrt(errors.size)


@pytest.mark.parametrize("codec", ROUNDING)
def test_a_push_that_is_encoded_again_has_the_same_bytes_and_another_one_other_bytes(codec, rng):
    values = tame(rng, 5000)

    first, again, other = (codecs.encode(codec, values, seed=seed, rounding="stochastic").tobytes() for seed in (5, 5, 6))

    assert first == again
    assert first != other


@pytest.mark.parametrize("codec", ROUNDING)
def test_the_random_numbers_of_an_element_depend_on_its_index_alone(codec, rng):
    """The first blocks of a longer array have the same codes: so nobody can tell in how many parts it was encoded."""
    values, n = tame(rng, 5000), 2560
    whole = codecs.encode(codec, values, seed=3, rounding="stochastic")
    part = codecs.encode(codec, values[:n], seed=3, rounding="stochastic")
    outs = np.empty(5000, F32), np.empty(n, F32)

    codecs.decode(codec, whole, outs[0])
    codecs.decode(codec, part, outs[1])

    assert outs[0][:n].tobytes() == outs[1].tobytes()


def test_rounding_to_nearest_is_as_near_as_a_step_allows(rng):
    """Half a step, of which a scale that is rounded up makes at most a 64th more."""
    values = tame(rng, 100_000)
    out = np.empty_like(values)
    largest = np.abs(np.resize(values, (391, 256))).max(axis=1).repeat(256)[: len(values)]

    for codec, levels in (("int8", 127), ("int4", 7)):
        codecs.decode(codec, codecs.encode(codec, values), out)
        assert (np.abs(out - values) <= largest / levels / 2 * (1 + 1 / 64)).all()

    codecs.decode("int4log", codecs.encode("int4log", values), out)
    assert (np.abs(out - values) <= np.maximum(np.abs(values) / 3, largest / 126) * (1 + 1 / 64)).all()


# -- error feedback


@pytest.mark.parametrize(("codec", "rounding"), [*((c, "nearest") for c in CODECS), *((c, "stochastic") for c in ROUNDING)])
def test_what_is_decoded_and_what_is_left_add_up_to_what_was_pushed(codec, rounding, rng):
    """After 1,000 pushes, but for the rounding of a float in each: sums with the residual, and what is then lost."""
    n = 700
    residual, out = np.zeros(n, F32), np.empty(n, F32)
    pushed, decoded, bound = np.zeros((3, n))
    for step in range(1000):
        values = tame(rng, n) * F32(10.0 ** (step % 7 - 3))
        bound += 2.0**-24 * np.abs(values.astype(np.float64) + residual)
        data = codecs.encode(codec, values, residual, step if rounding == "stochastic" else None, rounding)
        codecs.decode(codec, data, out)
        pushed += values
        decoded += out
        bound += 2.0**-24 * np.abs(residual)

    assert (np.abs(decoded + residual - pushed) <= bound + 1e-9).all()
    assert np.abs(decoded).max() > 100
    assert codec == "topk:1" or np.abs(residual).max() > 0


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4"])
def test_rounding_to_nearest_loses_nothing_at_all(codec, rng):
    """Of values of usual size: number and residual are the values exactly, as these have more bits than a step leaves open."""
    values, out = tame(rng, 100_000), np.empty(100_000, F32)
    residual = np.zeros_like(values)

    codecs.decode(codec, codecs.encode(codec, values, residual), out)

    assert (out.astype(np.float64) + residual == values).all()


def test_what_is_too_large_for_a_codec_is_left(rng):
    """And comes with the next pushes."""
    values, residual, out = np.array([100_000, -1], F32), np.zeros(2, F32), np.empty(2, F32)

    codecs.decode("fp16", codecs.encode("fp16", values, residual), out)

    assert (out.tolist(), residual.tolist()) == ([65504, -1], [34496, 0])


# -- threads


def test_a_kernel_lets_other_threads_run(no_forced_switches):
    """After `started` the encoder gives up the GIL in the kernel only, so only then can this thread write the NaN."""
    values = np.zeros(1 << 18, F32)
    out = codecs.encode("int8", values)
    started = threading.Event()
    found = []

    def goes_well(_):
        try:
            codecs.encode("int8", values, out=out)
        except ValueError:
            return False
        return True

    def encode():
        goes_well(0)
        started.set()
        found.extend(itertools.takewhile(goes_well, range(100_000)))

    encoder = threading.Thread(target=encode)
    encoder.start()
    started.wait()
    values[123] = np.nan
    encoder.join()

    assert len(found) < 100_000
