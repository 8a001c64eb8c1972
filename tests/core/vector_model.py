"""Vectors in NumPy: what the store must hold and answer, to the bit, written once more in the simplest way."""

import math

import numpy as np

from psd_core import vector_operations as ops
from psd_core.reductions import ExactSum, Extreme, unpack_answers

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
    for first in range(0, len(products), ops.STRIPE):
        stripe = products[first : first + ops.STRIPE]
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
        out = a[o.out] if hasattr(o, "out") else None
        real = out.dtype.type if out is not None else None
        match o:
            case ops.Fill():
                out[:] = o.value
            case ops.Copy():
                out[:] = a[o.x]
            case ops.Scale():
                out[:] = real(o.a) * out
            case ops.Axpy():
                out[:] = out + real(o.a) * a[o.x]
            case ops.Combine():
                terms = [real(c) * a[x] for c, x in zip(o.a, o.x, strict=True)]
                out[:] = sum(terms[1:], start=terms[0])
            case ops.Random():
                out[:] = random_numbers(o.seed, len(out), out.dtype.name, o.low, o.high)
            case ops.Map():
                wider = a[o.x].astype(np.float64) if o.function in INEXACT else a[o.x]
                out[:] = MAPS[o.function](wider, *map(real, o.arguments))
            case ops.Zip():
                out[:] = ZIPS[o.function](a[o.x], a[o.y], *map(real, o.arguments))
            case ops.Apply():
                out[:] = o.function(*(a[x] for x in o.x))
            case ops.Put():
                out[o.start : o.start + len(o.values)] = o.values
            case ops.Add():
                out[o.start : o.start + len(o.values)] += o.values
            case ops.AddAt():
                np.add.at(out, o.indices, o.values)
            case ops.AddRows():
                np.add.at(out.reshape(-1, self.specs[o.out].columns), o.rows, o.values)
            case ops.Dot():
                return [sum_of(wide(a[o.x]) * wide(a[o.y]))]
            case ops.Norm2():
                return [sum_of(wide(a[o.x]) ** 2 if a[o.x].dtype.kind == "i" else wide(a[o.x]) * wide(a[o.x]))]
            case ops.Sum():
                return [sum_of(wide(a[o.x]))]
            case ops.Min() | ops.Max():
                return [extreme(a[o.x], greatest=isinstance(o, ops.Max))]
            case ops.Gram():
                pairs = [(x, y) for x in o.x for y in o.y] or [(x, y) for i, x in enumerate(o.x) for y in o.x[: i + 1]]
                return [sum_of(wide(a[x]) * wide(a[y])) for x, y in pairs]
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
        return ops.Map(pick(), function, pick(), MAP_ARGUMENTS.get(function, ()))

    def zipped():
        function = str(rng.choice(WHOLE_ZIPS if is_whole else list(ZIPS)))
        return ops.Zip(pick(), function, pick(), pick(), ZIP_ARGUMENTS.get(function, ()))

    def rows():
        spec = group[0]
        if not spec.columns:
            return ops.AddAt(pick(), rng.integers(0, size, 9), values(9))
        return ops.AddRows(spec.name, rng.integers(0, size // spec.columns, 4), values(4, spec.columns))

    makers = [
        lambda: ops.Fill(pick(), number()),
        lambda: ops.Copy(pick(), pick()),
        lambda: ops.Scale(pick(), number()),
        lambda: ops.Axpy(pick(), number(), pick()),
        lambda: ops.Combine(pick(), [number(), number(), number()], [pick(), pick(), pick()]),
        lambda: ops.Random(pick(), int(rng.integers(1 << 32)), *((-9, 9) if is_whole else (-1.0, 1.0))),
        mapped,
        zipped,
        lambda: ops.Put(pick(), start, values(count)),
        lambda: ops.Add(pick(), start, values(count)),
        lambda: ops.AddAt(pick(), rng.integers(0, size, 9), values(9)),
        rows,
        lambda: ops.Dot(pick(), pick()),
        lambda: ops.Sum(pick()),
        lambda: ops.Norm2(pick()),
        lambda: ops.Min(pick()),
        lambda: ops.Max(pick()),
        lambda: ops.Gram([pick(), pick(), pick()], [pick()] * int(rng.integers(6))),
    ]
    return makers[rng.integers(len(makers))]()
