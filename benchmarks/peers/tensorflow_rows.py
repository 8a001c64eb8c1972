"""A sparse table in TensorFlow: a variable on a "ps" job of tf.distribute.Server, gRPC in C++. A server or worker.

In each step a worker runs one graph to gather rows and one to update them by TensorFlow's own sparse Adagrad. Workers do not
wait for each other.
"""

from __future__ import annotations

from typing import Any

import rows
import tensorflow_job
from tensorflow_job import tf, v1
from turns import Turns


def run_worker(turns: Turns, server: Any) -> None:
    """Build the graphs, and take turns."""
    told = turns.arguments
    turn = rows.Turn(told)
    with tf.Graph().as_default(), tf.device("/job:ps/task:0/cpu:0"):
        size = turn.shape.rows, turn.shape.dim
        values, sums = (
            v1.get_variable(name, size, initializer=tf.zeros_initializer(), use_resource=True) for name in ("values", "sums")
        )
        with tf.device(f"/job:worker/task:{told['rank']}/cpu:0"):
            ids, grads = v1.placeholder(tf.int64, (None,)), v1.placeholder(tf.float32, (None, turn.shape.dim))
        gathered = tf.gather(values, ids)
        update = tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=values.handle, accum=sums.handle, lr=rows.LR, epsilon=rows.EPS, grad=grads, indices=ids, update_slots=True
        )
        with v1.Session(server.target) as session:
            if told["rank"] == 0:
                session.run(v1.global_variables_initializer())
            pull, push = session.make_callable(gathered, [ids]), session.make_callable(update, [ids, grads])

            def step() -> None:
                for of_step, of_rows in turn.next():
                    pull(of_step)
                    push(of_step, of_rows)

            turns.work(step, lambda pushes: turn.check.difference(pull(turn.check.ids), pushes[told["rank"]]))


if __name__ == "__main__":
    turns = Turns()
    tensorflow_job.run(turns, turns.arguments["peers"], run_worker)
