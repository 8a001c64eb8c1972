"""Defects that learners could have, planted in the processes of a trial: the harness has to find each of them.

Each is called after an exchange, with the learner's parameters of the fragment, the last step of its difference, and what
writes steps. Must not know trials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Write = Callable[[NDArray[np.float32], int, float], None]


def twice(exchanged: Any, values: NDArray[np.float32], last: int, write: Write) -> None:
    """The last step of a difference that has counted travels with the next one, too; of each fifth, so that most are sound."""
    if exchanged.is_counted and exchanged.clock % 5 == 0:
        _add(values, last, write, -1)


def dropped(exchanged: Any, values: NDArray[np.float32], last: int, write: Write) -> None:
    """The last step of a difference that has come late is gone, and does not travel with the next one."""
    if not exchanged.is_counted:
        _add(values, last, write, 1)


def _add(values: NDArray[np.float32], number: int, write: Write, times: float) -> None:
    step = np.zeros_like(values)
    write(step, number, times)
    values += step


PLANTS: dict[str, Callable[..., None]] = {"twice": twice, "dropped": dropped}
