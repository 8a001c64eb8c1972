"""The worker's end of armed steps: small push_pulls that are one call of C, however many shards there are.

This module is the public face of `_worker_steps.pyx`; csrc/step_frames.h says how steps look. It knows no sessions or clocks.
"""

from __future__ import annotations

from psd_core._worker_steps import BROKEN, REFUSED, ROWS_BYTES_MAX, TAKEN, UNSENT, WorkerSteps

__all__ = ["BROKEN", "REFUSED", "ROWS_BYTES_MAX", "TAKEN", "UNSENT", "WorkerSteps"]
