"""The work that psd and every peer do in benchmarks: tensors, gradients, and the expected result, to the bit.

Gradients are small whole numbers and the learning rate is a power of two, so that float32 arithmetic is exact in whatever order
a system adds: w = -LR * steps * (sum of the workers' gradients). Worker r's gradient is one more than worker 0's, everywhere.

NumPy alone: peers import it under interpreters that know nothing of psd.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LR = 2.0**-10
STEPS_MAX = 10_000
WORKERS_MAX = 8
"""Workers beyond which the whole numbers would no longer fit into float32."""

COUNTS = struct.Struct("<QQ")
"""Format of the counts, pushes begun and pushes answered, in a file that survives its worker (soak_worker.py)."""

_PERIOD = 251
BytesT = TypeVar("BytesT", bytes, memoryview)

_BLOCK_BYTES = 1 << 20


def _resnet50() -> list[tuple[int, ...]]:
    """25.6 million parameters in 161 tensors: 53 convolutions, each with a batch norm's two vectors, and a linear layer."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, into: int, kernel: int) -> None:
        shapes.extend([(out, into, kernel, kernel), (out,), (out,)])

    convolution(64, 3, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "resnet50": _resnet50(),
    "convnet": [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 64, 3, 3), (128,), (256, 8192), (256,), (10, 256), (10,)],
    "mlp": [(1024, 784), (1024,), (1024, 1024), (1024,), (10, 1024), (10,)],
    "1kb": [(256,)],
    "1kb in 256": [(1,)] * 256,
    "8kb": [(2048,)],
}
"""Shapes by name, all float32: 102, 8.8 and 7.5 MB; for latencies 1 KiB, in one tensor or many, and 8 KiB, of which each of up
to four shards has a part."""


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of a model by name; "8mb" is that many MB in one tensor, "2x8mb" in each of two."""
    if model in MODELS:
        return MODELS[model]
    count, _, size = model.removesuffix("mb").rpartition("x")
    return [(int(size) * 250_000,)] * int(count or 1)


def size_of(model: str) -> int:
    """Number of parameters."""
    return sum(int(np.prod(shape)) for shape in shapes_of(model))


def cut(data: BytesT) -> list[BytesT]:
    """Cut the bytes of references without a layout into blocks: 1 MiB each, and the rest."""
    return [data[start : start + _BLOCK_BYTES] for start in range(0, len(data), _BLOCK_BYTES)]


def gradient(rank: int, size: int) -> NDArray[np.float32]:
    """The gradient (size,) that a worker pushes in every step."""
    period = np.arange(_PERIOD, dtype=np.float32) - np.float32(_PERIOD // 2) + np.float32(rank)
    return np.resize(period, size)


def expected(pushes: list[int], size: int) -> NDArray[np.float32]:
    """The parameters (size,), which began at zero, after that many pushes of each rank."""
    period = np.arange(_PERIOD, dtype=np.float64) - _PERIOD // 2
    total = sum(count * (period + rank) for rank, count in enumerate(pushes))
    return np.resize((-LR * total).astype(np.float32), size)


def difference(values: NDArray[np.float32], pushes: list[int], *, share: float = 0, loss: float = 0) -> str:
    """The error in the parameters after that many pushes of each rank, in words; empty: none.

    Args:
        share: by which compressed parameters may differ. loss: largest part of a gradient that may still be with its worker.
    """
    due = expected(pushes, values.size)
    wrong = np.flatnonzero(np.abs(values - due) > share * np.abs(due) + loss * LR * len(pushes))
    if wrong.size == 0:
        return ""
    first = int(wrong[0])
    return f"{wrong.size} of {values.size} parameters are wrong; number {first} is {values[first]}, must be {due[first]}"
