"""Measures a step with Keras against the torch client's: the same gradients to the same kind of shard, in the same process.

    .venv-keras/bin/python benchmarks/keras_step.py [--model mlp] [--transport shm] [--steps 200] [--json FILE]

One worker, one shard each. Gradients are there already, as back-propagation leaves them, in memory of the framework's; a step
copies them to where they are sent from, pushes, pulls, and copies the parameters into the model. Three take turns, a step each:

    torch client      psd_client.torch, optimizer.step()
    keras, graph      psd_client.keras, optimizer.apply in a tf.function, as model.fit calls it
    keras, eager      the same outside of one

It needs an interpreter that has Keras, TensorFlow and PyTorch, such as that of `make test-keras`, and runs as psd-run starts
workers: with malloc settings that spare fresh memory, which TensorFlow would else take for the variables in each step. What
has been computed is verified, to the bit. Exit status: 1 if it is wrong; the criterion does not decide.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import _report as report
import keras
import numpy as np
import tensorflow as tf
import torch
from _processes import Shard, cleanly, environment, start_all
from _report import Criterion, ratio
from numpy.typing import NDArray
from peers import work

import psd_client
import psd_client.keras
import psd_client.torch

WARM_UP = 10
STARTED = "PSD_KERAS_STEP_STARTED"
MNIST = [(3, 1, 3, 3), (3,), (10, 192), (10,)]
"""The ConvNet of examples/mnist.py."""


class Holder(keras.Layer):
    """Variables without arithmetic."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__(name="holder")
        for number, shape in enumerate(shapes):
            self.add_weight(shape=shape, initializer="zeros", name=f"w{number}")
        self.built = True


def gradients_of(shapes: list[tuple[int, ...]]) -> list[NDArray[np.float32]]:
    """Gradients, the same for every step."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = np.split(work.gradient(0, sum(sizes)), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def with_torch(ps: psd_client.ParameterServer, shapes: list[tuple[int, ...]]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Make a step; return the parameters as arrays."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
    optimizer = psd_client.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=work.LR), ps=ps)
    gradients = [torch.from_numpy(gradient) for gradient in gradients_of(shapes)]

    def step() -> None:
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step, lambda: [parameter.detach().numpy() for parameter in model]


def with_keras(
    ps: psd_client.ParameterServer, shapes: list[tuple[int, ...]], *, is_graph: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Make a step; return the parameters as arrays."""
    model = keras.Sequential([Holder(shapes)])
    model.built = True
    optimizer = psd_client.keras.distribute(model, keras.optimizers.SGD(work.LR), ps=ps)
    gradients = [tf.constant(gradient) for gradient in gradients_of(shapes)]
    apply = tf.function(optimizer.apply) if is_graph else optimizer.apply
    return lambda: apply(gradients), model.get_weights


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transport="shm")
    models = ["mnist", *(name for name in work.MODELS if name != "1kb")]
    parser.add_argument("--model", choices=models, default="mlp", help="shapes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="timed ones of each kind (default: %(default)s)")
    args = parser.parse_args()
    if os.environ.get(STARTED) is None:  # malloc reads its settings when a process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment(), "KERAS_BACKEND": "tensorflow", STARTED: "1"})
    shapes = MNIST if args.model == "mnist" else work.shapes_of(args.model)
    about = report.machine()
    with cleanly() as stack:
        shards = [Shard() for _ in range(3)]
        start_all(stack, shards)
        connections = [stack.enter_context(psd_client.connect(s.address, 0, 1, transport=args.transport)) for s in shards]
        contenders = {
            "torch client": with_torch(connections[0], shapes),
            "keras, graph": with_keras(connections[1], shapes, is_graph=True),
            "keras, eager": with_keras(connections[2], shapes, is_graph=False),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(WARM_UP + args.steps):
            for name, (step, _) in contenders.items():
                begun = time.perf_counter()
                step()
                if number >= WARM_UP:
                    times[name].append(time.perf_counter() - begun)
        expected = work.expected([WARM_UP + args.steps], sum(int(np.prod(shape)) for shape in shapes))
        wrong = [
            name
            for name, (_, values) in contenders.items()
            if not np.array_equal(np.concatenate([value.reshape(-1) for value in values()]), expected)
        ]
    median = {name: statistics.median(found) for name, found in times.items()}
    criteria = [Criterion(3, "keras, graph / torch client", ratio(median["keras, graph"], median["torch client"]), 1.3)]
    print(f"{args.model}, {expected.nbytes:,} bytes each way, over {args.transport}; medians of {args.steps} steps")
    print(report.machine_line(about))
    rows = [[name, f"{1e3 * value:.2f}", f"{1e3 * min(times[name]):.2f}"] for name, value in median.items()]
    print("\n" + report.table(["", "ms", "fastest"], rows))
    print("\n" + report.criteria_table(criteria))
    report.write_json(args.json, {"machine": about, "model": args.model, "median_s": median}, criteria)
    if wrong:
        print(f"WRONG: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
