"""One worker of psd: pushes its gradient and pulls the parameters, over a given transport."""

from __future__ import annotations

import numpy as np
import work
from turns import Turns

import psd_client
from psd_client.client import worker_of

LOSSES = {"": 0.0, "int8": 1.5, "int4": 20.0}
"""Largest part of these gradients that a residual has, by codec: half of a level."""


def main() -> None:
    """Join, and take turns."""
    turns = Turns()
    told = turns.arguments
    shapes = work.shapes_of(told["model"])
    size = work.size_of(told["model"])
    names = [f"t{index:03}" for index in range(len(shapes))]
    where = told["servers"], told["rank"], told["world_size"]
    try:
        connected = psd_client.connect(*where, transport=told["transport"], wait_timeout=120, tls_ca=told["tls_ca"])
    except psd_client.ConfigError as error:
        turns.say(refused=f"psd_client.connect refuses it: {error}")
        return
    worker = worker_of(connected)
    with connected as ps:
        ps.declare(
            {name: np.zeros(shape, told["dtype"]) for name, shape in zip(names, shapes, strict=True)},
            psd_client.SGD(lr=work.LR),
            consistency=told["consistency"],
            reduce="sum",
            compress=told["compress"] or None,
            pull=told["pull"] or None,
            copy=told["call"] != "flat",  # whoever reads the flat buffers keeps nothing of them
        )
        scalars = [list(psd_client.SGD(lr=work.LR).scalars().values())]
        whole = work.gradient(told["rank"], size).astype(told["dtype"])  # small whole numbers, which float16 can hold, too
        grads, start = {}, 0
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            stop = start + int(np.prod(shape))
            grads[name] = whole[start:stop].reshape(shape)
            worker.gradients.views[index][...] = grads[name]
            start = stop

        def verify(pushes: list[int]) -> str:
            ps.barrier(f"after {sum(pushes)} pushes")
            worker.pull_flat()
            found = np.concatenate([view.ravel() for view in worker.parameters.views])
            return work.difference(found, pushes, share=2**-8 if told["pull"] else 0, loss=LOSSES[told["compress"]])

        steps = {
            "flat": lambda: worker.push_pull_flat(scalars),
            "named": lambda: ps.push_pull(grads),
            "push": lambda: ps.push(grads),
        }
        turns.work(steps[told["call"]], verify)


if __name__ == "__main__":
    main()
