"""A worker whose pushes add up: each step adds rank + 1 to every parameter, so that the sum says what has counted.

It begins where the job is. When worker 0 finds the file `stop` in its home, its push says so, and all end after that step.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

import psd_client

SHAPES = {"small": (7,), "large": (200, 1000), "scalar": ()}
STOP = Path.home() / "stop"
PACE_S = 0.01
"""Between steps: pods that start meanwhile, on the same machine, get processors, too."""


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the test reads it


with psd_client.connect() as ps:
    initial = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params = ps.declare({**initial, "stop": np.zeros((), np.float32)}, psd_client.SGD(lr=1.0), reduce="sum")
    push = {name: np.full(shape, -(ps.rank + 1), np.float32) for name, shape in SHAPES.items()}
    say(f"begins at {ps.clock}")
    while not params["stop"]:
        is_last = ps.rank == 0 and STOP.exists()
        params = ps.push_pull({**push, "stop": np.array(-float(is_last), np.float32)})
        say(f"step {ps.clock} at {time.monotonic()}")
        threading.Event().wait(PACE_S)
    sums = sorted({float(value) for name in SHAPES for value in np.unique(params[name])})
    say(f"steps {ps.clock} sums {sums} lanes {ps.transports}")
