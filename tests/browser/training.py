"""A worker of the browser's tests: small steps of 32 samples, until it is ended. Worker 1 is slow.

Each logs a loss of its own and, now and then, an accuracy; all log the same learning rate.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

import psd_client

PAUSE_S = {0: 0.01, 1: 0.04}

with psd_client.connect() as ps:
    params = ps.declare({"w": np.ones((64, 64), np.float32)}, optimizer=psd_client.SGD(lr=0.01))
    total, noise = int(sys.argv[1]), np.random.default_rng(ps.rank)
    while ps.clock < total:
        threading.Event().wait(PAUSE_S.get(ps.rank, 0.01))
        params = ps.push_pull({"w": params["w"]}, weight=32)
        loss = float(np.mean(params["w"] ** 2)) * noise.lognormal(0.0, 0.2)
        ps.log(ps.clock, total=total, loss=loss, lr=0.01 * 0.999**ps.clock)
        if ps.clock % 10 == 0:
            ps.log(ps.clock, **{"validation/accuracy of the rare classes": 1 - loss})
