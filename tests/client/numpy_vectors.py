"""Server-side vectors in this process, as NumPy arrays: what L-BFGS needs of a connection, for tests of its decisions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from psd_client.lbfgs.run import minimize


def _pseudo_gradient(x, g, l1):
    at_zero = np.sign(g) * np.maximum(np.abs(g) - l1, 0)
    return np.where(x != 0, g + l1 * np.sign(x), at_zero)


FUNCTIONS = {
    "abs": np.abs,
    "project": lambda x, y: np.where(np.sign(x) == np.sign(y), x, 0.0),
    "orthant": lambda x, g: np.where(x != 0, np.sign(x), np.sign(-g)),
    "pseudo_gradient": _pseudo_gradient,
}


class Killed(BaseException):
    """End of a worker, which nothing catches."""


class Space:
    """The shards: vectors by name, and a barrier of the workers that are there.

    Attributes:
        arrays: by name. most: how many there were at most. before_batch: called before each batch of the leader's.
    """

    def __init__(self, world_size=1):
        self.world_size = world_size
        self.arrays = {}
        self.most = 0
        self.before_batch = lambda: None
        self._changed = threading.Condition()
        self._present, self._arrived, self._opened = world_size, 0, 0

    def minimize(self, *arguments, losses, **options):
        """Results, or errors, of all workers, by rank."""

        def worker(rank):
            try:
                return minimize(Connection(self, rank), losses[rank], *arguments, **options)
            except (Exception, Killed) as error:  # noqa: BLE001 - the result of the worker
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(worker, range(self.world_size)))

    def leave(self):
        """Wait for one worker less."""
        with self._changed:
            self._present -= 1
            self._open_if_complete()

    def meet(self):
        with self._changed:
            self._arrived += 1
            opens = self._opened + 1
            self._open_if_complete()
            assert self._changed.wait_for(lambda: self._opened >= opens, timeout=100)

    def _open_if_complete(self):
        if self._arrived >= self._present:
            self._arrived, self._opened = 0, self._opened + 1
            self._changed.notify_all()


class Connection:
    """One worker's."""

    def __init__(self, space, rank=0):
        self.space, self.rank, self.world_size = space, rank, space.world_size

    def vector(self, name, size):
        assert self.space.arrays.setdefault(name, np.zeros(size)).size == size
        self.space.most = max(self.space.most, len(self.space.arrays))
        return Vector(self, name)

    @property
    def vectors(self):
        return {name: Vector(self, name) for name in self.space.arrays}

    def batch(self):
        return Batch(self)

    def barrier(self, _name):
        self.space.meet()


class Vector:
    def __init__(self, ps, name):
        self.ps, self.name = ps, name

    @property
    def array(self):
        return self.ps.space.arrays[self.name]

    def pull(self):
        return self.array.copy()

    def put(self, values, start=0):
        self.array[start : start + len(values)] = values

    def drop(self):
        del self.ps.space.arrays[self.name]


class Batch:
    def __init__(self, ps):
        self.ps, self.todo = ps, []

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.run()

    def run(self):
        if self.ps.rank == 0:
            self.ps.space.before_batch()
        for function in self.todo:
            function()

    def _write(self, y, compute):
        self.todo.append(lambda: y.array.__setitem__(slice(None), compute()))

    def _reduce(self, compute):
        found = Number()
        self.todo.append(lambda: setattr(found, "value", compute()))
        return found

    def copy(self, y, x):
        self._write(y, lambda: x.array)

    def scale(self, y, a):
        self._write(y, lambda: a * y.array)

    def axpy(self, y, a, x):
        self._write(y, lambda: y.array + a * x.array)

    def put(self, y, values):
        self._write(y, lambda: values)

    def combine(self, y, coefficients, vectors):
        self._write(y, lambda: sum(a * x.array for a, x in zip(coefficients, vectors, strict=True)))

    def map(self, y, name, of=None):
        self._write(y, lambda: FUNCTIONS[name]((of or y).array))

    def zip(self, y, name, x, *arguments, of=None):
        self._write(y, lambda: FUNCTIONS[name]((of or y).array, x.array, *arguments))

    def gram(self, ys, xs):
        return self._reduce(lambda: np.array([[y.array @ x.array for x in xs] for y in ys]))

    def dot(self, y, x):
        return self._reduce(lambda: y.array @ x.array)

    def sum(self, y):
        return self._reduce(lambda: np.sum(y.array))

    def min(self, y):
        return self._reduce(lambda: np.min(y.array))

    def max(self, y):
        return self._reduce(lambda: np.max(y.array))


class Number:
    value: float

    def __float__(self):
        return float(self.value)
