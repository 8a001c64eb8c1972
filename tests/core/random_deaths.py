"""Processes that are killed at random instants, for tests of what they leave."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any


def last_word_of_a_killed_process(
    processes: BaseContext, work: Callable[..., None], path: Path, random_: random.Random, words_max: int
) -> Any:
    """Run `work(path, connection)` in a process of its own, and kill it some time after one of its first words.

    Returns:
        The last thing that it has sent.
    """
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(path, theirs))  # type: ignore[attr-defined]  # every context has it
    process.start()
    theirs.close()
    word = None
    for _ in range(random_.randrange(1, words_max)):
        word = ours.recv()
    for _ in range(random_.randrange(20_000)):  # up to about a millisecond, so that no step is favoured
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with contextlib.suppress(EOFError):
        while ours.poll():
            word = ours.recv()
    ours.close()
    return word


def last_words_of_killed_processes(work: Callable[..., None], path: Path) -> Iterator[Any]:
    """The last words of a few processes, one after the other, each forked from one that has imported what `work` needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    random_ = random.Random(7)
    for _ in range(8):
        yield last_word_of_a_killed_process(context, work, path, random_, 25)
