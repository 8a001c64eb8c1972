"""The codecs of psd_core.codecs in NumPy, as docs/design/codecs.md has them: slow, and one step after the other."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

F32 = np.float32
BLOCK, CHUNK = 256, 65536
DENSE = ("bf16", "fp16", "int8", "int4", "int4log", "sign")
ROUNDING = ("bf16", "fp16", "int8", "int4", "int4log")
CODECS = (*DENSE, "topk:0.01", "topk:0.3", "topk:1")
LEVELS = {"int8": 127, "int4": 7, "int4log": 1}
PER_BYTE = {"int8": 1, "int4": 2, "int4log": 2, "sign": 8}
SCALES = {"int8": (0x0080, 0x7BFF), "int4": (0x0080, 0x7DFF), "int4log": (0x0380, 0x7E80), "sign": (0x0080, 0x7F7F)}
GAMMA = 0x9E3779B97F4A7C15


def mixed(x):
    """The finalizer of SplitMix64, of whole numbers or arrays of them."""
    x = np.asarray(x, np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise(seed, n):
    """The 16 random bits of each element."""
    words = -(-n // 4)
    with np.errstate(over="ignore"):
        states = mixed(seed) + np.arange(1, words + 1, dtype=np.uint64) * np.uint64(GAMMA)
    parts = np.stack([(mixed(states) >> np.uint64(16 * place)) & np.uint64(0xFFFF) for place in range(4)], axis=1)
    return parts.reshape(-1)[:n].astype(np.uint32)


def jitter(random):
    """A share of a step in (-1/2, 1/2)."""
    return ((random.astype(np.float64) - 32767.5) / 65536).astype(F32)


def bits_of(x):
    return np.asarray(x, F32).view(np.uint32)


def from_bfloat16(bits):
    return (np.asarray(bits, np.uint32) << 16).view(F32)


def encode(codec, values, residual=None, random=None):
    """Data and what is lost; `random` holds the 16 bits of each element, None is rounding to nearest."""
    x = values if residual is None else values + residual
    if codec.startswith("topk"):
        return encode_topk(codec, x)
    if codec in ("bf16", "fp16"):
        codes = (bfloat16 if codec == "bf16" else float16)(x, random)
        data = codes.astype("<u2").tobytes()
    else:
        blocks = [slice(begin, begin + BLOCK) for begin in range(0, len(x), BLOCK)]
        pairs = [encode_block(codec, x[at], None if random is None else random[at]) for at in blocks]
        data = np.array([scale for scale, _ in pairs], "<u2").tobytes() + b"".join(code for _, code in pairs)
    return data, x - decode(codec, data, len(x))


def bfloat16(x, random):
    magnitude = bits_of(x) & 0x7FFFFFFF
    up = 0x7FFF + (magnitude >> 16 & 1) if random is None else random
    return np.minimum((magnitude + up) >> 16, 0x7F7F) | (bits_of(x) >> 16 & 0x8000)


def float16(x, random):
    if random is None:
        return np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    magnitude = bits_of(x) & 0x7FFFFFFF
    normal = ((magnitude + (random >> 3)) >> 13).astype(np.int64) - (112 << 10)
    steps = np.where(magnitude < 0x38800000, np.abs(x), 0).astype(F32) * F32(2**24) + jitter(random)
    code = np.where(magnitude < 0x38800000, np.rint(steps), normal)
    return np.minimum(code, 0x7BFF).astype(np.uint32) | (bits_of(x) >> 16 & 0x8000)


def encode_block(codec, x, random):
    """The bits of the scale, and the bytes of the codes."""
    scale_bits = scale_of(codec, x)
    scale = from_bfloat16([scale_bits])[0]
    inverse = F32(1) / scale if scale > 0 else F32(0)
    if codec == "sign":
        codes = np.signbit(x).astype(np.uint8)
    elif codec == "int4log":
        codes = logarithmic(x, inverse, random)
    else:
        steps = x * inverse
        levels = np.rint(steps if random is None else steps + jitter(random))
        codes = np.clip(levels, -LEVELS[codec], LEVELS[codec]).astype(np.int64) & (255 if codec == "int8" else 15)
    return scale_bits, packed(codes, PER_BYTE[codec])


def scale_of(codec, x):
    least, most = SCALES[codec]
    if codec == "sign":
        bits = int(bfloat16(np.array([mean_magnitude(x)]), None)[0])
        return bits if bits >= least else 0
    largest = np.abs(x).max()
    bits = int(bits_of([largest / F32(LEVELS[codec])])[0])
    return 0 if largest == 0 else min(max(-(-bits // 65536), least), most)


def mean_magnitude(x):
    """Element i of a block is added in lane i mod 16; the lanes are folded in halves."""
    lanes = [sum(np.abs(x[lane::16]).astype(np.float64).tolist(), 0.0) for lane in range(16)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return F32(lanes[0] / len(x))


def logarithmic(x, inverse, random):
    codes = []
    for i, share in enumerate(np.abs(x) * inverse):
        mantissa, exponent = math.frexp(share)  # share = mantissa * 2**exponent, 1/2 <= mantissa < 1
        if random is None:
            code = 7 + exponent - (mantissa < 0.75)
            code = max(code, int(share >= 2**-7))
        elif share >= 2**-6:
            way = 2 * mantissa - 1  # from 2**(exponent - 1) to 2**exponent
            code = 6 + exponent + (way + (random[i] + 0.5) / 65536 >= 1)
        else:
            code = int(F32(share) * F32(2**22) > random[i] + 0.5)
        code = min(code, 7) if share > 0 else 0
        codes.append(code + 8 * bool(code and np.signbit(x[i])))
    return np.array(codes)


def packed(codes, per_byte):
    """Byte k of w has the codes k, k + w, k + 2 w and so on, from its lowest bits on."""
    w = -(-len(codes) // per_byte)
    padded = np.zeros(w * per_byte, np.int64)
    padded[: len(codes)] = codes
    return (
        sum(padded[place * w : (place + 1) * w] << (8 // per_byte * place) for place in range(per_byte))
        .astype(np.uint8)
        .tobytes()
    )


def decode(codec, data, n):
    """The numbers that data stand for."""
    if codec.startswith("topk"):
        return decode_topk(codec, data, n)
    if codec in ("bf16", "fp16"):
        codes = np.frombuffer(data, "<u2")
        return from_bfloat16(codes) if codec == "bf16" else codes.view("<f2").astype(F32)
    blocks = -(-n // BLOCK)
    scales = from_bfloat16(np.frombuffer(data, "<u2", blocks))
    out, at = np.empty(n, F32), 2 * blocks
    for block, begin in enumerate(range(0, n, BLOCK)):
        count = min(BLOCK, n - begin)
        w = -(-count // PER_BYTE[codec])
        out[begin : begin + count] = numbers(codec, unpacked(data[at : at + w], PER_BYTE[codec])[:count]) * scales[block]
        at += w
    return out


def unpacked(data, per_byte):
    codes, bits = np.frombuffer(data, np.uint8), 8 // per_byte
    return np.concatenate([codes >> (bits * place) & ((1 << bits) - 1) for place in range(per_byte)])


def numbers(codec, codes):
    """The numbers of codes, before the scale."""
    if codec == "int8":
        return codes.view(np.int8).astype(F32)
    if codec == "int4":
        return ((codes.astype(np.int8) ^ 8) - 8).astype(F32)
    if codec == "sign":
        return np.where(codes, F32(-1), F32(1))
    levels = np.array([0, *(2.0**e for e in range(-6, 1))], F32)
    return np.where(codes & 8, -levels[codes & 7], levels[codes & 7])


def kept(codec, n):
    return math.ceil(Fraction(codec.removeprefix("topk:")) * n)


def encode_topk(codec, x):
    k, magnitudes = kept(codec, len(x)), bits_of(x) & 0x7FFFFFFF
    chosen = np.sort(np.lexsort((np.arange(len(x)), -magnitudes.astype(np.int64)))[:k])
    counts = np.bincount(chosen // CHUNK, minlength=-(-len(x) // CHUNK)) if k else np.zeros(0)
    lost = x.copy()
    lost[chosen] = 0
    return counts.astype("<u4").tobytes() + x[chosen].astype("<f4").tobytes() + (chosen % CHUNK).astype("<u2").tobytes(), lost


def decode_topk(codec, data, n):
    k, chunks = kept(codec, n), -(-n // CHUNK)
    counts = np.frombuffer(data, "<u4", chunks)
    values = np.frombuffer(data, "<f4", k, 4 * chunks)
    offsets = np.frombuffer(data, "<u2", k, 4 * chunks + 4 * k)
    out = np.zeros(n, F32)
    out[np.repeat(np.arange(chunks), counts) * CHUNK + offsets] = values
    return out
