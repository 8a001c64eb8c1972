"""The processes of a job on TensorFlow's parameter servers: tf.distribute.Server, gRPC in C++.

Imported before TensorFlow by the scripts that are such processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf
from turns import Turns

v1: Any = tf.compat.v1


def run(turns: Turns, workers: Sequence[str], run_worker: Callable[[Turns, Any], None]) -> None:
    """Run the server, or the worker that the process is. workers: their addresses."""
    told = turns.arguments
    cluster = tf.train.ClusterSpec({"ps": [told["ps"]], "worker": workers})
    if told.get("rank", -1) >= 0:
        run_worker(turns, v1.train.Server(cluster, job_name="worker", task_index=told["rank"]))
    else:
        server = v1.train.Server(cluster, job_name="ps", task_index=0)
        turns.serve()
        del server
    os._exit(0)  # the threads of a tf.distribute.Server do not end
