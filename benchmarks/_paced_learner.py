"""A learner whose steps take the same time whatever the machine: a pause stands for an accelerator's computing.

Knows nothing of how learners come together.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

import torch
from _processes import end_with_benchmark

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import characters


class HasGradients(Protocol):
    """An optimizer."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""


class PacedLearner:
    """The model of one learner, in a process of its own, which ends with the benchmark.

    Args:
        task: has `steps`, a file that gets a byte for each step, and `step_s`, seconds of a step.
        joined: set when it trains.
    """

    def __init__(self, task: Mapping[str, Any], joined: Event) -> None:
        end_with_benchmark()
        torch.set_num_threads(1)
        self._text = characters.read(None, 20_000)
        self.model = characters.Transformer(len(self._text.alphabet), context=16, dim=32, layers=1)
        self.inner = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self._task, self._joined = task, joined

    def begin(self) -> None:
        """Say that it trains from now on."""
        self._joined.set()
        self._pause, self._seed = threading.Event(), random.Random(os.getpid())
        self._done = os.open(self._task["steps"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._due = time.perf_counter()

    def compute(self, optimizer: HasGradients) -> None:
        """Make the gradients of a step, in the time that it takes."""
        self._due = max(self._due + self._task["step_s"], time.perf_counter())
        batch = characters.pieces(self._text.train, 2, self.model.context, self._seed.randrange(1 << 30))
        optimizer.zero_grad()
        characters.loss_of(self.model, batch).backward()
        self._pause.wait(self._due - time.perf_counter())

    def count(self) -> None:
        """Note that a step has been made."""
        os.write(self._done, b".")
