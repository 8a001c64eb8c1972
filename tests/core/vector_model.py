"""Vectors in NumPy: what the store must hold and answer, to the bit, written once more in the simplest way."""

import math

import numpy as np
import vector_words as ops

from psd_core.reductions import ExactSum, Extreme, unpack_answers
from psd_core.vector_operations import STRIPE

MAPS = {
    "abs": np.abs, "neg": np.negative, "sign": lambda x: np.sign(x) + x.dtype.type(0), "square": np.square, "sqrt": np.sqrt,
    "clip": np.clip, "reciprocal": lambda x: 1 / x, "exp": np.exp, "log": np.log,
    "soft_threshold": lambda x, by: np.where(x > by, x - by, np.where(x < -by, x + by, x * 0 + 0)),
}  # fmt: skip
ZIPS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "div": np.divide,
    "project": lambda x, y: np.where(np.sign(x) == np.sign(y), x, np.sign(x) * 0 + np.sign(y) * 0 + 0),
    "orthant": lambda x, g: np.where(x != 0, np.sign(x), -np.sign(g)) + 0,
    "pseudo_gradient": lambda x, g, l1: np.select(
        [x > 0, x < 0, x != 0, g + l1 < 0, g - l1 > 0], [g + l1, g - l1, x, g + l1, g - l1], g * 0 + 0
    ),
}  # fmt: skip
INEXACT = ("exp", "log")


def mixed(x):
    """SplitMix64's finalizer, on arrays of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_numbers(seed, n, dtype, low, high):
    """The numbers of Random."""
    key = mixed(np.array([seed], np.uint64))[0]
    hashes = mixed(key + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    if dtype == "int64":
        return np.array([int(low) + (int(h) * (int(high) - int(low)) >> 64) for h in hashes], np.int64)
    bits = 24 if dtype == "float32" else 53
    real = np.dtype(dtype).type
    unit = (hashes >> np.uint64(64 - bits)).astype(dtype) / real(2**bits)
    numbers = real(low) + (real(high) - real(low)) * unit
    return np.where(numbers < real(high), numbers, real(low))


def sum_of(products):
    """The exact sum of stripes, each added in 16 lanes and a tree; of whole numbers the sum itself."""
    if products.dtype == object:
        return ExactSum(sum(products.tolist()) << 1074)
    total = ExactSum()
    for first in range(0, len(products), STRIPE):
        stripe = products[first : first + STRIPE]
        lanes = np.zeros(-(-len(stripe) // 16) * 16)
        lanes[: len(stripe)] = stripe
        s = np.add.reduce(np.vstack([np.zeros(16), lanes.reshape(-1, 16)]), axis=0)
        s = s[:8] + s[8:]
        total = total.add([float(((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])))])
    return total


def wide(x):
    """Numbers whose products are exact enough: float64, or Python's integers."""
    return x.astype(object) if x.dtype.kind == "i" else x.astype(np.float64)


def extreme(x, *, greatest):
    index = int(np.argmax(x) if greatest else np.argmin(x))
    return Extreme(x[index].item(), index, greatest)


class Model:
    """Vectors as NumPy arrays."""

    def __init__(self, specs):
        self.specs = {spec.name: spec for spec in specs}
        self.arrays = {spec.name: np.zeros(spec.size, spec.dtype) for spec in specs}

    def run(self, operations):
        """Answers of a batch."""
        answers = []
        with np.errstate(all="ignore"):
            for operation in operations:
                answers += self._one(operation)
        return answers

    def _one(self, o):
        a = self.arrays
        out = a[o.out] if o.out else None
        real = out.dtype.type if out is not None else None
        x = [a[name] for name in o.x]
        match o.name:
            case "fill":
                out[:] = o.numbers[0]
            case "copy":
                out[:] = x[0]
            case "scale":
                out[:] = real(o.numbers[0]) * out
            case "axpy":
                out[:] = out + real(o.numbers[0]) * x[0]
            case "combine":
                terms = [real(c) * z for c, z in zip(o.numbers, x, strict=True)]
                out[:] = sum(terms[1:], start=terms[0])
            case "random":
                out[:] = random_numbers(o.seed, len(out), out.dtype.name, *o.numbers)
            case "map":
                wider = x[0].astype(np.float64) if o.function in INEXACT else x[0]
                out[:] = MAPS[o.function](wider, *map(real, o.numbers))
            case "zip":
                out[:] = ZIPS[o.function](*x, *map(real, o.numbers))
            case "custom":
                out[:] = o.function(*x)
            case "put":
                out[o.start : o.start + len(o.values)] = o.values
            case "add":
                out[o.start : o.start + len(o.values)] += o.values
            case "add_at":
                np.add.at(out, o.places, o.values)
            case "add_rows":
                np.add.at(out.reshape(-1, self.specs[o.out].columns), o.places, o.values)
            case "dot":
                return [sum_of(wide(x[0]) * wide(x[1]))]
            case "norm2":
                return [sum_of(wide(x[0]) ** 2 if x[0].dtype.kind == "i" else wide(x[0]) * wide(x[0]))]
            case "sum":
                return [sum_of(wide(x[0]))]
            case "min" | "max":
                return [extreme(x[0], greatest=o.name == "max")]
            case "gram":
                y = [a[name] for name in o.y]
                pairs = [(z, w) for z in x for w in y] or [(z, w) for i, z in enumerate(x) for w in x[: i + 1]]
                return [sum_of(wide(z) * wide(w)) for z, w in pairs]
        return []


def merged(blobs):
    """The answers of all shards, as one."""
    parts = [unpack_answers(blob) for blob in blobs]
    answers = parts[0]
    for other in parts[1:]:
        answers = [mine.merge(theirs) for mine, theirs in zip(answers, other, strict=True)]
    return answers


def same_answers(ours, theirs):
    """Compare, NaN being equal to itself, and -0 to 0."""
    return len(ours) == len(theirs) and all(
        str(a) == str(b) or a == b or (math.isnan(getattr(a, "value", 0)) and a.index == b.index)
        for a, b in zip(ours, theirs, strict=True)
    )


MAP_ARGUMENTS = {"clip": (-2, 3), "soft_threshold": (0.5,)}
ZIP_ARGUMENTS = {"pseudo_gradient": (0.25,)}
WHOLE_MAPS, WHOLE_ZIPS = ("abs", "neg", "sign", "square", "clip"), ("add", "sub", "mul", "min", "max")
REAL_MAPS = (*WHOLE_MAPS, "sqrt", "reciprocal", "soft_threshold")


def random_batch(rng, specs):
    """Some operations on vectors of each size and dtype."""
    groups = {}
    for spec in specs:
        groups.setdefault((spec.size, spec.dtype), []).append(spec)
    return [random_operation(rng, list(groups.values())[rng.integers(len(groups))]) for _ in range(rng.integers(1, 6))]


def random_operation(rng, group):
    """An operation on vectors of one size and dtype; small whole numbers for int64."""
    size, dtype, is_whole = group[0].size, group[0].dtype, group[0].dtype == "int64"
    start = int(rng.integers(size))
    count = int(rng.integers(size - start + 1))

    def pick():
        return group[rng.integers(len(group))].name

    def number():
        return int(rng.integers(-5, 6)) if is_whole else float(rng.standard_normal())

    def values(*shape):
        return (rng.integers(-99, 99, shape) if is_whole else rng.standard_normal(shape)).astype(dtype)

    def mapped():
        function = str(rng.choice(WHOLE_MAPS if is_whole else REAL_MAPS))
        return ops.map(pick(), function, pick(), MAP_ARGUMENTS.get(function, ()))

    def zipped():
        function = str(rng.choice(WHOLE_ZIPS if is_whole else list(ZIPS)))
        return ops.zip(pick(), function, pick(), pick(), ZIP_ARGUMENTS.get(function, ()))

    def rows():
        spec = group[0]
        if not spec.columns:
            return ops.add_at(pick(), rng.integers(0, size, 9), values(9))
        return ops.add_rows(spec.name, rng.integers(0, size // spec.columns, 4), values(4, spec.columns))

    makers = [
        lambda: ops.fill(pick(), number()),
        lambda: ops.copy(pick(), pick()),
        lambda: ops.scale(pick(), number()),
        lambda: ops.axpy(pick(), number(), pick()),
        lambda: ops.combine(pick(), [number(), number(), number()], [pick(), pick(), pick()]),
        lambda: ops.random(pick(), int(rng.integers(1 << 32)), *((-9, 9) if is_whole else (-1.0, 1.0))),
        mapped,
        zipped,
        lambda: ops.put(pick(), start, values(count)),
        lambda: ops.add(pick(), start, values(count)),
        lambda: ops.add_at(pick(), rng.integers(0, size, 9), values(9)),
        rows,
        lambda: ops.dot(pick(), pick()),
        lambda: ops.sum(pick()),
        lambda: ops.norm2(pick()),
        lambda: ops.min(pick()),
        lambda: ops.max(pick()),
        lambda: ops.gram([pick(), pick(), pick()], [pick()] * int(rng.integers(6))),
    ]
    return makers[rng.integers(len(makers))]()
