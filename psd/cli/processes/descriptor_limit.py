"""Raises the limit of open descriptors to what the connections need, as far as the system permits.

Login shells start with 1,024. Idle connections could use up all of them, so that a checkpoint could not be written. Knows
nothing of psd.
"""

from __future__ import annotations

import contextlib


def allow(count: int) -> int:
    """Raise the process's own limit to `count`, or as far as permitted; return the limit, 0 on systems without one."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return soft
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
