"""Armed steps: small push_pulls that a shard takes in C. csrc/steps.h says what they do, and step_frames.h how they look.

This module is the public face of `_steps.pyx` and `_tables.pyx`: what is known of each rank of a job, a job's part on a shard,
tables among it, and the loop of a connection. It knows no files, sockets' ends or protobuf; who is armed, and when that is
revoked, is the caller's.
"""

from __future__ import annotations

from psd_core import _steps
from psd_core._ranks import RankPlace, Ranks
from psd_core._steps import BLOCKS_MAX, PlayedStep, StepConnection, Steps
from psd_core._tables import TablesCore, TablesPlace

SERVED_CLOSED = _steps.SERVED_CLOSED
"""StepConnection.serve has returned because the peer has gone, or is hung up on."""
SERVED_OTHER = _steps.SERVED_OTHER
"""Another message comes."""
SERVED_WRONG = _steps.SERVED_WRONG
"""A step has another size than was offered."""
SERVED_AGAIN = _steps.SERVED_AGAIN
"""A step was answered AGAIN."""
SERVED_TICKETS = _steps.SERVED_TICKETS
"""A step has closed a round, or opened a gate, for which callers wait by tickets; it is gone on with by the next call."""
SERVED_ERROR = _steps.SERVED_ERROR
"""The socket has failed."""

AGAIN_REVOKED, AGAIN_LONG_WAIT, AGAIN_CUT = _steps.AGAIN_REVOKED, _steps.AGAIN_LONG_WAIT, _steps.AGAIN_CUT

__all__ = [
    "AGAIN_CUT",
    "AGAIN_LONG_WAIT",
    "AGAIN_REVOKED",
    "BLOCKS_MAX",
    "SERVED_AGAIN",
    "SERVED_CLOSED",
    "SERVED_ERROR",
    "SERVED_OTHER",
    "SERVED_TICKETS",
    "SERVED_WRONG",
    "PlayedStep",
    "RankPlace",
    "Ranks",
    "StepConnection",
    "Steps",
    "TablesCore",
    "TablesPlace",
]
