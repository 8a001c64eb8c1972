"""A call that another thread makes for the program, in its turn, such as a prefetch of rows or an exchange of a learner.

Must not know what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from psd_client.lanes.daemon_threads import End, Task
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.worker import Turn


class BackgroundCall:
    """A call in another thread, begun when this is made: after the program's earlier calls, and before its later ones.

    Args:
        call: makes the call; given this turn.

    Attributes:
        error: why the call has failed, or None.
        is_finished, in_background, ended, before: see psd_client.worker.worker.Turn.
    """

    is_finished = in_background = True
    before: Turn | None = None

    def __init__(self, worker: FlatCalls, call: Callable[[Turn], None]) -> None:
        self.error: BaseException | None = None
        self.ended: threading.Event = End()
        self._call = call
        worker.take_turn(self)
        # The end of the program, which closes the connection, ends the call.
        worker.background.begin(Task(self._run))

    def _run(self) -> None:
        try:
            if self.before is not None:
                self.before.ended.wait()
                self.before = None
            self._call(self)
        except BaseException as error:  # noqa: BLE001 - raised by wait
            self.error = error
        finally:
            self.ended.set()

    def abort(self) -> None:
        """Do nothing: the connection is ending, which ends the call."""

    def wait(self) -> None:
        """Wait until the call has ended; raise its error."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
