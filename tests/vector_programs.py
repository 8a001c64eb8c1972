"""Random programs on server-side vectors, run on NumPy arrays as well: what shards hold and answer must be the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from psd_client import ParameterServer

SIZE = 3 * 4096 + 77  # stripes of 4,096 on several shards, the last one short
LIMIT = 1e3

ZIPS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
MAPS = {"abs": np.abs, "neg": np.negative, "square": np.square, "sign": np.sign}
CHANGES = ("fill", "copy", "scale", "axpy", "combine", "map", "zip", "put", "add", "add_at")
REDUCTIONS = ("dot", "gram", "norm2", "sum", "min", "max", "argmax")


class Mirror:
    """Vectors of one dtype on the shards, and the arrays that they must equal."""

    def __init__(self, ps: ParameterServer, dtype: str, prefix: str = "") -> None:
        names = [f"{prefix}{dtype}.{letter}" for letter in "xyz"]
        self.ps = ps
        self.dtype = np.dtype(dtype)
        self.vectors = [ps.vector(name, SIZE, dtype) for name in names]
        self.arrays = [np.zeros(SIZE, dtype) for _ in names]

    def run(self, rng: np.random.Generator, operations: int) -> list[Any]:
        """Run a batch of random operations on both, and compare its answers, which are returned."""
        answers, expected = [], []
        with np.errstate(over="ignore"), self.ps.batch() as batch:
            for _ in range(operations):
                if rng.random() < 0.3:
                    answer, value = self._reduce(batch, rng)
                    answers.append(answer)
                    expected.append(value)
                else:
                    self._change(batch, rng)
            if self.dtype.kind == "f":
                for vector, array in zip(self.vectors, self.arrays, strict=True):
                    batch.map(vector, "clip", -LIMIT, LIMIT)
                    np.clip(array, -LIMIT, LIMIT, out=array)
        for answer, (value, tolerance) in zip(answers, expected, strict=True):
            if tolerance is None:
                assert np.array_equal(answer.value, value), answer
            else:
                np.testing.assert_allclose(answer.value, value, rtol=0, atol=tolerance, err_msg=repr(answer))
        return [answer.value for answer in answers]

    def check(self) -> None:
        """Compare all elements."""
        for vector, array in zip(self.vectors, self.arrays, strict=True):
            np.testing.assert_array_equal(vector.pull(), array)

    def _number(self, rng: np.random.Generator) -> Any:
        return int(rng.integers(-3, 4)) if self.dtype.kind == "i" else round(float(rng.uniform(-1, 1)), 2)

    def _numbers(self, rng: np.random.Generator, count: int) -> Any:
        return rng.integers(-50, 50, count) if self.dtype.kind == "i" else rng.standard_normal(count).astype(self.dtype)

    def _change(self, batch: Any, rng: np.random.Generator) -> None:
        of, x, z = rng.integers(0, 3, 3)
        y, array, alpha = self.vectors[of], self.arrays[of], self.dtype.type(0)
        number = self._number(rng)
        alpha = self.dtype.type(number)
        match CHANGES[rng.integers(len(CHANGES))]:
            case "fill":
                batch.fill(y, number)
                array[:] = alpha
            case "copy":
                batch.copy(y, self.vectors[x])
                array[:] = self.arrays[x]
            case "scale":
                batch.scale(y, number)
                array *= alpha
            case "axpy":
                batch.axpy(y, number, self.vectors[x])
                array += alpha * self.arrays[x]
            case "combine":
                other = self._number(rng)
                batch.combine(y, [number, other], [self.vectors[x], self.vectors[z]])
                array[:] = alpha * self.arrays[x] + self.dtype.type(other) * self.arrays[z]
            case "map":
                name = list(MAPS)[rng.integers(len(MAPS))]
                batch.map(y, name)
                array[:] = MAPS[name](array)
            case "zip":
                name = list(ZIPS)[rng.integers(len(ZIPS))]
                batch.zip(y, name, self.vectors[x])
                array[:] = ZIPS[name](array, self.arrays[x])
            case "put":
                start = int(rng.integers(0, SIZE))
                values = self._numbers(rng, int(rng.integers(0, SIZE - start)))
                batch.put(y, values, start)
                array[start : start + len(values)] = values
            case "add":
                values = self._numbers(rng, SIZE)
                batch.add(y, values)
                array += values
            case "add_at":
                indices = rng.integers(0, SIZE, int(rng.integers(0, 200)))
                indices[::2] %= 10  # some several times
                values = self._numbers(rng, len(indices))
                batch.add(y, values, indices)
                np.add.at(array, indices, values)

    def _reduce(self, batch: Any, rng: np.random.Generator) -> tuple[Any, tuple[Any, float | None]]:
        of, other = rng.integers(0, 3, 2)
        y, x, array, its = self.vectors[of], self.vectors[other], self.arrays[of], self.arrays[other]
        is_whole = self.dtype.kind == "i"
        match REDUCTIONS[rng.integers(len(REDUCTIONS))]:
            case "dot":
                return batch.dot(y, x), (_dot(array, its), None if is_whole else _tolerance(array, its))
            case "gram":
                both = [[_dot(one, another) for another in (array, its)] for one in (array, its)]
                tolerance = None if is_whole else _tolerance(np.maximum(abs(array), abs(its)), np.maximum(abs(array), abs(its)))
                return batch.gram([y, x]), (np.array(both, object if is_whole else None), tolerance)  # exact beyond 2^63
            case "norm2":
                return batch.norm2(y), (math.sqrt(_dot(array, array)), 1e-12 + 1e-12 * math.sqrt(_dot(array, array)))
            case "sum":
                total = sum(array.tolist()) if is_whole else math.fsum(array.tolist())
                return batch.sum(y), (total, None if is_whole else _tolerance(array, np.ones_like(array)))
            case "min":
                return batch.min(y), (array.min(), None)
            case "max":
                return batch.max(y), (array.max(), None)
        return batch.argmax(y), (int(array.argmax()), None)


def _dot(one: Any, other: Any) -> Any:
    if one.dtype.kind == "i":
        return sum(a * b for a, b in zip(one.tolist(), other.tolist(), strict=True))
    return math.fsum((one.astype(np.float64) * other).tolist())


def _tolerance(one: Any, other: Any) -> float:
    return 1e-13 * float(np.abs(one.astype(np.float64) * other).sum()) + 1e-300
