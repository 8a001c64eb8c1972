"""A worker whose pushes add up: each step adds rank + 1 to every parameter, so that the sum says what has counted.

It goes on until it finds the file stop-at in its home, with the number of the last step. Begins where the job is.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import psd_client

STOP_AT = Path.home() / "stop-at"
SHAPES = {"small": (7,), "large": (700, 1000), "scalar": ()}


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the test reads it


def is_over(clock: int) -> bool:
    return STOP_AT.exists() and clock >= int(STOP_AT.read_text())


with psd_client.connect() as ps:
    params = ps.declare(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, psd_client.SGD(lr=1.0), reduce="sum"
    )
    push = {name: np.full(shape, -(ps.rank + 1), np.float32) for name, shape in SHAPES.items()}
    say(f"begins at {ps.clock}")
    while not is_over(ps.clock):
        params = ps.push_pull(push)
        say(f"step {ps.clock} at {time.monotonic()}")
    sums = sorted({float(value) for array in params.values() for value in np.unique(array)})
    say(f"steps {ps.clock} sums {sums} lanes {ps.transports}")
