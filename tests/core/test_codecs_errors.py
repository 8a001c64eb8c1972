"""Refusals of the codecs: each names the argument, or the field of the data, and the limit, and leaves outputs as they were."""

from __future__ import annotations

import struct

import codec_model as model
import numpy as np
import pytest
from codec_model import CHUNK, CODECS, DENSE, F32, ROUNDING, SCALES
from helpers_rules import over
from hypothesis import given
from hypothesis import strategies as st

import psd_core
from psd_core import _codecs, codecs

# -- names and lengths


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("int3", r"^codec: expected one of bf16, fp16, int8, int4, int4log, sign, topk:SHARE, got 'int3'$"),
        ("", "^codec: expected one of .*, got ''$"),
        (None, "^codec: expected one of .*, got None$"),
        ("topk", r"^codec: expected topk:SHARE with 0 < SHARE <= 1, such as topk:0\.01, got 'topk'$"),
        *((f"topk:{share}", "^codec: expected topk:SHARE") for share in ("", ".", "0", "0.0", "1.1", "-0.1", "1e-2", "1/2")),
    ],
)  # fmt: skip
def test_an_unknown_codec_is_refused(codec, message):
    for call in (
        lambda: codecs.encoded_bytes(codec, 1),
        lambda: codecs.encode(codec, np.ones(1, F32)),
        lambda: codecs.decode(codec, b"", np.ones(1, F32)),
        lambda: codecs.accumulate(codec, b"", np.ones(1, F32)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("n", [-1, 1 << 32])
def test_a_number_of_elements_that_no_array_has_is_refused(n):
    with pytest.raises(ValueError, match=f"^n: expected a number of elements from 0 to 4294967295, got {n}$"):
        codecs.encoded_bytes("int8", n)


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        ("bf16", [0, 2, 510, 512, 514, 50_000_000]),
        ("fp16", [0, 2, 510, 512, 514, 50_000_000]),
        ("int8", [0, 3, 257, 258, 261, 25_195_314]),
        ("int4", [0, 3, 130, 130, 133, 12_695_314]),
        ("int4log", [0, 3, 130, 130, 133, 12_695_314]),
        ("sign", [0, 3, 34, 34, 37, 3_320_314]),
        ("topk:0.01", [0, 10, 22, 22, 22, 1_501_528]),
        ("topk:1", [0, 10, 1534, 1540, 1546, 150_001_528]),
        ("topk:.000000001", [0, 10, 10, 10, 10, 1534]),
    ],
)
def test_the_number_of_bytes_is_known_before(codec, nbytes):
    assert [codecs.encoded_bytes(codec, n) for n in (0, 1, 255, 256, 257, 25_000_000)] == nbytes


# -- arguments


def misaligned(n):
    return np.frombuffer(bytearray(4 * n + 1), F32, offset=1)


def read_only(n):
    return np.frombuffer(bytes(4 * n), F32)


BAD_ARRAYS = {
    "float64": (np.zeros(4), "expected a 1-D float32 array, got 1-D float64"),
    "byte order": (np.zeros(4, ">f4"), "expected a 1-D float32 array, got 1-D >f4"),
    "2-D": (np.zeros((2, 2), F32), "expected a 1-D float32 array, got 2-D float32"),
    "no array": ([0.0] * 4, "expected a 1-D float32 array, got list"),
    "strided": (np.zeros(8, F32)[::2], "expected a (writable )?C-contiguous aligned array, got a strided or misaligned one"),
    "misaligned": (misaligned(4), "expected a (writable )?C-contiguous aligned array, got a strided or misaligned one"),
}
BAD_OUTPUTS = BAD_ARRAYS | {"read-only": (read_only(4), "expected a writable C-contiguous aligned array, got a read-only one")}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", BAD_OUTPUTS)
def test_an_array_that_a_kernel_cannot_take_is_refused(codec, kind):
    bad, message = BAD_OUTPUTS[kind]
    data = codecs.encode(codec, np.ones(4, F32))

    if kind in BAD_ARRAYS:
        with pytest.raises(psd_core.InvalidArray, match=f"^values: {message}"):
            codecs.encode(codec, bad)
    with pytest.raises(psd_core.InvalidArray, match=f"^residual: {message}"):
        codecs.encode(codec, np.ones(4, F32), bad)
    with pytest.raises(psd_core.InvalidArray, match=f"^out: {message}"):
        codecs.decode(codec, data, bad)
    with pytest.raises(psd_core.InvalidArray, match=f"^accumulator: {message}"):
        codecs.accumulate(codec, data, bad)


@pytest.mark.parametrize("codec", CODECS)
def test_arrays_that_do_not_match_are_refused(codec):
    values = np.ones(4, F32)
    nbytes = codecs.encoded_bytes(codec, 4)

    with pytest.raises(psd_core.InvalidArray, match=r"^residual: expected length 4, that of values, got 3"):
        codecs.encode(codec, values, np.zeros(3, F32))
    for out in (np.zeros(nbytes - 1, np.uint8), np.zeros(nbytes + 1, np.uint8), np.zeros(nbytes, np.int8), bytes(nbytes)):
        with pytest.raises(psd_core.InvalidArray, match=f"^out: expected an array of {nbytes} uint8, got "):
            codecs.encode(codec, values, out=out)
    with pytest.raises(psd_core.InvalidArray, match=r"^out: expected a writable C-contiguous array"):
        codecs.encode(codec, values, out=np.frombuffer(bytes(nbytes), np.uint8))
    with pytest.raises(psd_core.InvalidArray, match=r"^data: expected contiguous bytes, got memoryview"):
        codecs.decode(codec, memoryview(bytes(2 * nbytes))[::2], values)
    with pytest.raises(psd_core.InvalidArray, match=r"^data: expected contiguous bytes, got str"):
        codecs.decode(codec, "0" * nbytes, values)


@pytest.mark.parametrize("codec", CODECS)
def test_memory_that_overlaps_is_refused(codec):
    values, residual = np.ones(80, F32), np.zeros(80, F32)
    nbytes = codecs.encoded_bytes(codec, 20)
    inside, beside = values.view(np.uint8)[40 : 40 + nbytes], residual.view(np.uint8)[1 : 1 + nbytes]

    for call, name, other in (
        (lambda: codecs.encode(codec, values[:20], values[:20]), "residual", "values"),
        (lambda: codecs.encode(codec, values[:20], values[19:39]), "residual", "values"),
        (lambda: codecs.encode(codec, values[:20], out=inside), "out", "values"),
        (lambda: codecs.encode(codec, values[:20], residual[:20], out=beside), "out", "residual"),
        (lambda: codecs.decode(codec, inside, values[:20]), "out", "data"),
        (lambda: codecs.accumulate(codec, inside, values[:20]), "accumulator", "data"),
    ):  # fmt: skip
        with pytest.raises(
            psd_core.InvalidArray, match=f"^{name}: expected memory of its own, got some that overlaps {other}$"
        ):
            call()

    assert values.tolist() == [1] * 80
    assert not residual.any()


@pytest.mark.parametrize("codec", ROUNDING)
def test_a_seed_is_needed_for_stochastic_rounding_and_has_64_bits(codec):
    values = np.ones(4, F32)

    with pytest.raises(ValueError, match=r"^seed: expected a whole number for stochastic rounding, got None$"):
        codecs.encode(codec, values, rounding="stochastic")
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"^seed: expected a whole number from 0 to 18446744073709551615, got {seed}$"):
            codecs.encode(codec, values, seed=seed)
    with pytest.raises(ValueError, match=r"^rounding: expected nearest or stochastic, got 'up'$"):
        codecs.encode(codec, values, rounding="up")


@pytest.mark.parametrize("codec", ["sign", "topk:0.01"])
def test_what_rounds_nothing_refuses_to_round_at_random(codec):
    with pytest.raises(ValueError, match=f"^rounding: expected nearest, since {codec} rounds nothing, got 'stochastic'$"):
        codecs.encode(codec, np.ones(4, F32), seed=1, rounding="stochastic")


# -- numbers that are not finite


@pytest.mark.parametrize("codec", CODECS)
@over("bad", [np.nan, -np.nan, np.inf, -np.inf])
@over("place", [(1, 0), (300, 255), (300, 256), (300, 299), (100_003, 0), (100_003, 70_001)])
def test_a_number_that_is_not_finite_is_named_and_the_residual_stays(codec, bad, place, rng):
    """The first of several, with and without a residual."""
    n, at = place
    values, residual = rng.standard_normal((2, n)).astype(F32)
    values[[at, -1]] = bad
    before = residual.copy()

    for kept in (None, residual):
        with pytest.raises(psd_core.InvalidArray, match=f"^values: expected finite numbers, got {F32(bad)} at element {at}$"):
            codecs.encode(codec, values, kept)

    assert residual.tobytes() == before.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [300, 100_003])
def test_a_sum_that_overflows_is_named(codec, n):
    values, residual = np.ones((2, n), F32)
    values[270] = residual[270] = 3e38
    before = residual.copy()

    with pytest.raises(
        psd_core.InvalidArray, match=r"^residual: expected finite sums with values, got 3.*e\+38 \+ 3.*e\+38 at element 270"
    ):
        codecs.encode(codec, values, residual)

    assert residual.tobytes() == before.tobytes()


# -- data of a peer


def refused(codec, data, n, message):
    """Both ways of decoding refuse data, and touch nothing."""
    out = np.full(n, 7, F32)
    with pytest.raises(codecs.InvalidEncoding, match=message):
        codecs.decode(codec, data, out)
    with pytest.raises(codecs.InvalidEncoding, match=message):
        codecs.accumulate(codec, data, out)
    assert (out == 7).all()


def accepted(codec, data, n):
    out, sums = np.zeros((2, n), F32)
    codecs.decode(codec, data, out)
    codecs.accumulate(codec, data, sums)
    assert np.isfinite(out).all()
    assert (sums == out).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [0, 1, 257])
def test_data_of_another_length_are_refused(codec, n):
    nbytes = codecs.encoded_bytes(codec, n)

    for got in {nbytes - 1, nbytes + 1, 0, 2 * nbytes} - {nbytes, -1}:
        refused(codec, bytes(got), n, f"^data: expected {nbytes} bytes, those of {n} elements in {codec}, got {got}$")


@pytest.mark.parametrize("codec", SCALES)
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_scale_out_of_range_is_refused(codec, block, rng):
    """One step beyond each end, of the other sign, -0, infinity and NaN; at the ends, all codes stand for finite numbers."""
    least, most = SCALES[codec]
    data = bytearray(codecs.encode(codec, rng.standard_normal(513).astype(F32)).tobytes())
    data[6:] = bytes(range(256)) * 3 if codec == "int8" else data[6:]

    for bits in (least - 1, most + 1, 0x8000, 0x8000 | least, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF):
        data = data[: codecs.encoded_bytes(codec, 513)]
        data[2 * block : 2 * block + 2] = struct.pack("<H", bits)
        got = f"{model.from_bfloat16([bits])[0]:g}"
        low, high = (f"{x:g}" for x in model.from_bfloat16([least, most]))
        refused(
            codec,
            bytes(data),
            513,
            f"^scale: expected 0 or a number from {low} to {high}, got {got} in block {block}$".replace("+", r"\+"),
        )
    for bits in (0, least, most):
        data[2 * block : 2 * block + 2] = struct.pack("<H", bits)
        accepted(codec, bytes(data), 513)


@pytest.mark.parametrize(("codec", "n", "byte", "mask"), [
    ("int4", 1, 0, 0xF0), ("int4", 257, 128, 0x10), ("int4", 511, 255, 0x80), ("int4log", 3, 1, 0x80),
    ("sign", 1, 0, 0x02), ("sign", 1, 0, 0x80), ("sign", 9, 0, 0x20), ("sign", 9, 1, 0x10), ("sign", 511, 63, 0x80),
])  # fmt: skip
def test_bits_behind_the_last_element_must_be_0(codec, n, byte, mask):
    data = bytearray(codecs.encode(codec, np.ones(n, F32)).tobytes())
    codes_at = 2 * -(-n // 256)
    accepted(codec, bytes(data), n)

    data[codes_at + byte] |= mask

    got = f"{data[codes_at + byte]:#04x}"
    refused(codec, bytes(data), n, f"^codes: expected 0 in the bits behind the last element, got byte {got} at {byte}$")


@pytest.mark.parametrize(
    ("codec", "patterns"), [("bf16", (0x7F80, 0xFF80, 0x7FC0)), ("fp16", (0x7C00, 0xFC00, 0x7E00, 0xFFFF))]
)
@pytest.mark.parametrize("at", [0, 255, 256, 699])
def test_a_half_that_is_not_finite_is_refused(codec, patterns, at):
    for bits in patterns:
        data = bytearray(codecs.encode(codec, np.ones(700, F32)).tobytes())
        data[2 * at : 2 * at + 2] = struct.pack("<H", bits)

        refused(codec, bytes(data), 700, f"^value: expected a finite number, got -?(inf|nan) at element {at}$")


def topk(counts, values, offsets):
    return struct.pack(f"<{len(counts)}I{len(values)}f{len(offsets)}H", *counts, *values, *offsets)


NINE, ASCENDING = [1.0] * 9, [0, 1, 2] * 3
TOPK_FAULTS = {
    "more than the chunk has": ([3, 8, 4294967295], NINE, ASCENDING, "count: .* at most 7, .* of chunk 2, got 4294967295"),
    "more than a chunk has": ([65537, 0, 0], NINE, ASCENDING, "count: .* at most 65536, the elements of chunk 0, got 65537"),
    "too few": ([3, 3, 2], NINE, ASCENDING, "count: expected 9 entries in all chunks, got 8"),
    "too many": ([65536, 65536, 7], NINE, ASCENDING, "count: expected 9 entries in all chunks, got 131079"),
    "twice": ([3, 3, 3], NINE, [0, 1, 1, 0, 1, 2, 0, 1, 2], "offset: .* more than that of .* before, got 1 in entry 2"),
    "descending": ([3, 3, 3], NINE, [0, 1, 2, 0, 9, 8, 0, 1, 2], "offset: .* more than that of .* before, got 8 in entry 5"),
    "behind the end": ([3, 3, 3], NINE, [0, 1, 2, 0, 1, 2, 0, 1, 7], "offset: .* at most 6, .* last chunk, got 7 in entry 8"),
    "not a number": ([3, 3, 3], [1.0] * 8 + [np.nan], ASCENDING, "value: expected a finite number, got nan in entry 8"),
    "infinite": ([3, 3, 3], [np.inf] + [1.0] * 8, ASCENDING, "value: expected a finite number, got inf in entry 0"),
}
TOPK_N, TOPK_CODEC = 2 * CHUNK + 7, "topk:0.00006866"  # 9 of 131,079


@pytest.mark.parametrize("fault", TOPK_FAULTS)
def test_entries_that_no_encoder_writes_are_refused(fault):
    *parts, message = TOPK_FAULTS[fault]

    refused(TOPK_CODEC, topk(*parts), TOPK_N, f"^{message}$")


def test_entries_at_the_ends_of_chunks_are_accepted():
    data = topk([3, 3, 3], range(1, 10), [0, 1, 65535, 0, 65534, 65535, 0, 5, 6])
    out = np.zeros(TOPK_N, F32)

    codecs.decode(TOPK_CODEC, data, out)

    places = [0, 1, 65535, 65536, 131070, 131071, 131072, 131077, 131078]
    assert (np.flatnonzero(out).tolist(), out[places].tolist()) == (places, [1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("codec", [*DENSE, "topk:0.3", "topk:1"])
@given(n=st.sampled_from([1, 2, 9, 255, 257, 300]), data=st.data())
def test_any_bytes_are_refused_or_stand_for_finite_numbers(codec, n, data):
    nbytes = codecs.encoded_bytes(codec, n)
    found = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    out = np.full(n, 7, F32)

    try:
        codecs.decode(codec, found, out)
    except codecs.InvalidEncoding:
        assert (out == 7).all()
    else:
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, model.decode(codec, found, n))


@pytest.mark.parametrize("fault", ["more than the chunk has", "too many", "behind the end", "twice"])
def test_data_that_change_after_the_check_cannot_reach_other_memory(fault):
    """A lane's memory is shared with the worker, who may write while the shard decodes."""
    *parts, _ = TOPK_FAULTS[fault]
    found = np.frombuffer(topk(*parts), np.uint8)
    memory = np.zeros(TOPK_N + 2 * CHUNK, F32)
    out = memory[CHUNK : CHUNK + TOPK_N]

    _codecs.topk_accumulate(found, 9, out, 1.0)
    _codecs.topk_decode(found, 9, out)

    assert not memory[:CHUNK].any()
    assert not memory[CHUNK + TOPK_N :].any()
    assert out.any()


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4", "int4log", "sign"])
@pytest.mark.parametrize("at", [0, 300, 1000])
def test_encode_when_the_caller_has_looked_then_the_bytes_are_the_same_and_an_infinite_sum_is_still_refused(codec, at):
    values = np.random.default_rng(at).standard_normal(1001, np.float32)
    residuals = [np.full(1001, 0.1, np.float32) for _ in range(2)]
    data = [codecs.encode(codec, values, r, is_finite=known) for r, known in zip(residuals, (False, True), strict=True)]
    assert data[0].tobytes() == data[1].tobytes()
    assert residuals[0].tobytes() == residuals[1].tobytes()

    values[at] = residuals[0][at] = 3e38
    with pytest.raises(
        psd_core.InvalidArray, match=f"residual: expected finite sums with values, got 3.0\\d*e\\+38 .* at element {at}$"
    ):
        codecs.encode(codec, values, residuals[0], is_finite=True)
