"""Helpers of the Keras tests: a small model, its data, and ordinary training in one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

import psd_client.keras as psd
from psd_client import ParameterServer

STEPS, BATCH, EPOCHS = 10, 16, 3

Make = Callable[[], Any]
Weights = list[NDArray[Any]]


def small_model(seed: int = 1) -> keras.Model:
    """The same values for the same seed."""
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(3, name="out"),
        ]
    )
    set_values(model, seed)
    return model


def set_values(model: keras.Model, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model.set_weights([rng.uniform(-0.4, 0.4, w.shape).astype(w.dtype) for w in model.get_weights()])


def data() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """STEPS batches: inputs (STEPS, BATCH, 6), targets (STEPS, BATCH, 3)."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(STEPS, BATCH, 6)).astype(np.float32)
    return inputs, np.tanh(inputs[..., :3] - inputs[..., 3:]).astype(np.float32)


def fit(model: keras.Model, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    """model.fit on this worker's share of each batch, in order."""
    x, y = data()
    size = BATCH // world_size
    mine = slice(rank * size, (rank + 1) * size)
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, **options}
    return model.fit(x[:, mine].reshape(-1, 6), y[:, mine].reshape(-1, 3), batch_size=size, **options)


def train_alone(make: Make, model: Callable[[], keras.Model] = small_model, **options: Any) -> Weights:
    alone = model()
    alone.compile(optimizer=make(), loss="mse")
    fit(alone, **options)
    return alone.get_weights()


def distribute_in_order(ps: ParameterServer, model: keras.Model, optimizer: Any, **options: Any) -> Any:
    """Call psd.distribute, rank 0 first, whose values so are everybody's."""
    if ps.rank != 0:
        ps.barrier("declared")
    distributed = psd.distribute(model, optimizer, ps=ps, **options)
    if ps.rank == 0:
        ps.barrier("declared")
    return distributed


def fit_worker(make: Make, model: Callable[[int], keras.Model] = small_model, **options: Any) -> Callable[..., Weights]:
    """A worker that compiles and fits; options go to distribute. Only rank 0 has the values that train_alone has."""

    def worker(ps: ParameterServer) -> Weights:
        mine = model(1 + ps.rank)
        mine.compile(optimizer=distribute_in_order(ps, mine, make(), **options), loss="mse")
        fit(mine, ps.rank, ps.world_size)
        return mine.get_weights()

    return worker


def assert_close(actual: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]], tolerance: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for mine, right in zip(actual, expected, strict=True):
        assert mine.dtype == right.dtype
        np.testing.assert_allclose(mine, right, rtol=0, atol=tolerance)
