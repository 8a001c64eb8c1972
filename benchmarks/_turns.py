"""Runs contenders against each other: starts them all, lets them take turns, verifies each one's arithmetic.

A contender that cannot be started, fails, or is wrong is left out with the reason; the others go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from _contenders import Contender, Starter
from _processes import ProcessFailed, Refused, cleanly
from _report import progress

from psd.contract.config import ConfigError
from psd.contract.environment import client_config


class Match:
    """Contenders that take turns in one run.

    Attributes:
        left_out: why, by name.
        failed: names of those that are left out for anything else than a refusal.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.left_out: dict[str, str] = {}
        self.failed: list[str] = []
        self._stack = stack.enter_context(ExitStack())
        self._contenders: list[tuple[Contender, ExitStack]] = []

    def add(self, name: str, starter: Starter) -> None:
        """Start a contender."""
        with ExitStack() as own:
            try:
                contender = starter(own)
            except (ProcessFailed, OSError) as error:
                self._leave_out(name, error)
                return
            self._contenders.append((contender, self._stack.enter_context(own.pop_all())))

    def run(self, rounds: int, steps: int) -> list[Contender]:
        """Give each contender its turns: in each round a step or two that are not timed, and `steps` that are.

        Returns:
            Those that have come through it, in the order in which they were added.
        """
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            # To and fro, so that nobody always follows the same one.
            for contender, own in self._contenders[:: -1 if number % 2 else 1]:
                self._try(contender, own, lambda c: c.take_turn(2 if c.all_steps == 0 else 1, steps))
        for contender, own in list(self._contenders):
            self._try(contender, own, lambda c: c.verify())
        return [contender for contender, _ in self._contenders]

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def _try(self, contender: Contender, own: ExitStack, action: Callable[[Contender], None]) -> None:
        try:
            action(contender)
        except ProcessFailed as error:
            self._leave_out(contender.name, error)
            self._contenders = [(c, o) for c, o in self._contenders if c is not contender]
            own.close()

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = str(error)
        if not isinstance(error, Refused):
            self.failed.append(name)
        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)


def over_transports(
    transports: list[str], measure: Callable[[str], list[dict[str, Any]]]
) -> tuple[list[str], list[dict[str, Any]], dict[str, str], int]:
    """Measure over one transport after the other.

    Returns:
        those that are usable; what `measure` has found, all together; why some are left out, by name; how many of these failed
        by more than a refusal.
    """
    able, left_out = usable(transports)
    results: list[dict[str, Any]] = []
    failed = 0
    with cleanly():
        for transport in able:
            try:
                results += measure(transport)
            except ProcessFailed as error:
                left_out[f"psd {transport}"] = str(error)
                failed += not isinstance(error, Refused)
    return able, results, left_out, failed


def usable(transports: list[str]) -> tuple[list[str], dict[str, str]]:
    """Transports that psd_client.connect would take, and reasons against the others, by name."""
    good, refused = [], {}
    for transport in transports:
        try:
            client_config(servers="127.0.0.1:1", rank=0, world_size=1, transport=transport)
        except ConfigError as error:
            refused[f"psd {transport}"] = f"psd_client.connect refuses it: {error}"
            print(f"psd {transport} is left out: psd_client.connect refuses it: {error}", file=sys.stderr, flush=True)
        else:
            good.append(transport)
    return good, refused
