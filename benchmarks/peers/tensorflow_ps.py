"""TensorFlow's parameter servers: variables on a "ps" job of tf.distribute.Server, gRPC in C++. A server or worker.

In each step a worker runs one graph: it assigns its gradients, which lie in variables of its own process, to the shared ones by
assign_sub, and copies these back into variables of its own; tensors move by TensorFlow's own gRPC, none through Python. Workers
do not wait for each other, as in ParameterServerStrategy: less work than a synchronous step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow_job
import work
from tensorflow_job import tf, v1
from turns import Turns


def run_worker(turns: Turns, server: Any) -> None:
    """Build the graph, and take turns."""
    told = turns.arguments
    rank = told["rank"]
    shapes = work.shapes_of(told["model"])
    size = work.size_of(told["model"])
    mine = f"/job:worker/task:{rank}/cpu:0"
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    gradients, own, fills, steps = [], [], [], []
    with tf.Graph().as_default():
        whole = v1.placeholder(tf.float32, (size,))
        shared = []
        for index, shape in enumerate(shapes):
            with tf.device("/job:ps/task:0/cpu:0"):
                variable = v1.get_variable(f"p{index}", shape, initializer=tf.zeros_initializer(), use_resource=True)
                shared.append(variable)
            with tf.device(mine):
                name = f"worker{rank}_{index}"
                gradients.append(v1.get_variable(f"g_{name}", shape, initializer=tf.zeros_initializer(), use_resource=True))
                own.append(v1.get_variable(f"o_{name}", shape, initializer=tf.zeros_initializer(), use_resource=True))
                fills.append(gradients[-1].assign(tf.reshape(whole[starts[index] : starts[index + 1]], shape)))
                sent = tf.identity(gradients[-1].read_value())
            with tf.device("/job:ps/task:0/cpu:0"):
                pushed = variable.assign_sub(tf.constant(work.LR) * sent, read_value=False)
                with tf.control_dependencies([pushed]):
                    pulled = variable.read_value()
            with tf.device(mine):
                steps.append(own[-1].assign(pulled, read_value=False))
        step = tf.group(*steps)
        joined = tf.concat([tf.reshape(variable.read_value(), (-1,)) for variable in shared], 0)
        with v1.Session(server.target) as session:
            if rank == 0:
                session.run(v1.variables_initializer(shared))
            session.run(v1.variables_initializer([*gradients, *own]))
            session.run(tf.group(*fills), {whole: work.gradient(rank, size)})
            run_step = session.make_callable(step)
            turns.work(run_step, lambda pushes: work.difference(session.run(joined), pushes))


if __name__ == "__main__":
    turns = Turns()
    tensorflow_job.run(turns, turns.arguments["workers"], run_worker)
