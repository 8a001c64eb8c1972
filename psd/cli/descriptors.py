"""Lets the process have as many open descriptors as its connections may need, where the system permits it.

Login shells start with 1,024, of which connections that nobody uses could take all, so that a checkpoint could not be written.
Knows nothing of psd.
"""

from __future__ import annotations

import contextlib


def allow(count: int) -> int:
    """Raise the process's own limit to `count`, or to what it may; returns the limit, 0 where there is no such thing."""
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
