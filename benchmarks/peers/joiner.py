"""Workers that join a job of psd and leave it, one after the other, while another one trains; for benchmarks/latency.py.

{"joins": n}: that many ranks from 1 on join, get the parameters and leave. The process has a low priority, so that it is the
shard that others wait for, rather than a core.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import work
from turns import Turns

import psd_client


def main() -> None:
    """Join and leave when told."""
    turns = Turns()
    told = turns.arguments
    os.nice(10)
    shapes = work.shapes_of(told["model"])
    tensors = {f"t{index:03}": np.zeros(shape, np.float32) for index, shape in enumerate(shapes)}

    def answered(request: dict[str, Any]) -> dict[str, Any]:
        begun = time.monotonic()
        for rank in range(1, 1 + request["joins"]):
            where = told["servers"], rank, told["world_size"]
            with psd_client.connect(*where, transport=told["transport"], wait_timeout=120) as ps:
                ps.declare(tensors, psd_client.SGD(lr=work.LR), consistency="async", reduce="sum")
        return {"seconds": time.monotonic() - begun}

    turns.answer(answered)


if __name__ == "__main__":
    main()
