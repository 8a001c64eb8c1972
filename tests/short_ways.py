"""Short ways that an exchange may take, seen from outside: armed steps, and pages that are read where the shard has them.

Must not know what the tests train.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from psd_client import ParameterServer
from psd_client.client import worker_of
from psd_client.lanes.steps import SteppingLanes


class Watch:
    """What has become of all steps so far: True: taken; None: not sent; False: finished the long way; or interrupted.

    `before` is called with each; `after`, when it is no more in C.
    """

    def __init__(self) -> None:
        self.took: list[bool | None] = []
        self.before: Callable[[], object] = lambda: None
        self.after = threading.Event()
        self._beginning = threading.Lock()

    def run(self, steps: SteppingLanes, *args: Any) -> bool | None:
        """Take the place of `SteppingLanes.run`, in any thread."""
        self.before()
        with self._beginning:
            at = len(self.took)
            self.took.append(False)
        try:
            self.took[at] = RUN(steps, *args)
        finally:
            self.after.set()
        return self.took[at]


RUN = SteppingLanes.run


def reads_planes(ps: ParameterServer) -> bool:
    """True if the last pull has copied nothing of what planes have."""
    exchange = worker_of(ps).declared
    return exchange.parameters is not exchange.places.current
