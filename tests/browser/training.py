"""A worker of the browser's tests: small steps, its loss logged, until it is ended. Worker 1 is slow."""

from __future__ import annotations

import sys
import threading

import numpy as np

import psd_client

PAUSE_S = {0: 0.01, 1: 0.04}

with psd_client.connect() as ps:
    params = ps.declare({"w": np.ones((64, 64), np.float32)}, optimizer=psd_client.SGD(lr=0.01))
    while ps.clock < int(sys.argv[1]):
        threading.Event().wait(PAUSE_S.get(ps.rank, 0.01))
        params = ps.push_pull({"w": params["w"]})
        ps.log(ps.clock, loss=float(np.mean(params["w"] ** 2)))
