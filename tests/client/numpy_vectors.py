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


class Space:
    """The shards: vectors by name, and a barrier. `before_batch` is called before each batch of the leader's."""

    def __init__(self, world_size=1):
        self.world_size = world_size
        self.arrays = {}
        self.most = 0
        self.before_batch = lambda: None
        self.meeting = threading.Barrier(world_size, timeout=10)

    def minimize(self, *arguments, losses, **options):
        """Results, or errors, of all workers, by rank."""

        def worker(rank):
            try:
                return minimize(Connection(self, rank), losses[rank], *arguments, **options)
            except Exception as error:  # noqa: BLE001 - the result of the worker
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(worker, range(self.world_size)))


class Connection:
    def __init__(self, space, rank):
        self.space, self.rank, self.world_size = space, rank, space.world_size

    def vector(self, name, size):
        assert self.space.arrays.setdefault(name, np.zeros(size)).size == size
        self.space.most = max(self.space.most, len(self.space.arrays))
        return Vector(self, name)

    def batch(self):
        return Batch(self)

    def barrier(self, _name):
        self.space.meeting.wait()


class Vector:
    def __init__(self, ps, name):
        self.ps, self.name = ps, name

    @property
    def array(self):
        return self.ps.space.arrays[self.name]

    def pull(self):
        return self.array.copy()

    def put(self, values, indices=slice(None)):
        self.array[indices] = values

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
        self.todo.append(lambda: setattr(found, "value", float(compute())))
        return found

    def copy(self, y, x):
        self._write(y, lambda: x.array)

    def scale(self, y, a):
        self._write(y, lambda: a * y.array)

    def axpy(self, y, a, x):
        self._write(y, lambda: y.array + a * x.array)

    def put(self, y, values):
        self._write(y, lambda: values)

    def map(self, y, name):
        self._write(y, lambda: FUNCTIONS[name](y.array))

    def zip(self, y, name, x, *arguments):
        self._write(y, lambda: FUNCTIONS[name](y.array, x.array, *arguments))

    def dot(self, y, x):
        return self._reduce(lambda: y.array @ x.array)

    def sum(self, y):
        return self._reduce(lambda: y.array.sum())

    def min(self, y):
        return self._reduce(lambda: y.array.min())

    def max(self, y):
        return self._reduce(lambda: y.array.max())


class Number:
    value: float

    def __float__(self):
        return self.value
