"""Defects that learners could have, in the processes of a trial: the harness has to find each of them.

Must not know trials, nor how they are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

EVERY = 5
"""Every so-manieth difference is struck."""


def twice() -> None:
    """A difference that has counted stays with its learner, too, and travels with the next one of the fragment."""
    from psd_client.torch.learner import LocalOptimizer
    from psd_client.torch.parameters import as_tensors

    numbers = count(1)

    def keep(optimizer: Any, flight: Any) -> None:
        take(optimizer, flight)
        if not flight.is_late and next(numbers) % EVERY == 0:
            differences = as_tensors(optimizer._worker.gradients)
            for index in _own(optimizer, flight):
                optimizer._parameters.move(index, -differences[index])

    take = LocalOptimizer._take
    LocalOptimizer._take = keep  # type: ignore[method-assign]


def dropped() -> None:
    """A difference that has come late is gone, and its learner believes that it travels with the next one."""
    from psd_client.torch.learner import LocalOptimizer

    def forget(optimizer: Any, flight: Any) -> None:
        take(optimizer, flight)
        if flight.is_late:
            for index in _own(optimizer, flight):
                optimizer._parameters.mix(index, optimizer._base[index], 0)

    take = LocalOptimizer._take
    LocalOptimizer._take = forget  # type: ignore[method-assign]


def _own(optimizer: Any, flight: Any) -> Iterator[int]:
    """The parameters of a flight's fragment."""
    groups, tensors = optimizer._declaration.parts[flight.fragment].groups, optimizer._declaration.tensors
    return (index for index in optimizer._declaration.trained if tensors[index].group in groups)


PLANTS: dict[str, Callable[[], None]] = {"twice": twice, "dropped": dropped}
