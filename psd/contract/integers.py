"""Integers that cross the wire: small enough for languages that have only doubles, such as JavaScript.

These would round a larger one, so that comparisons with it fail. Must not know what they count.
"""

from __future__ import annotations

import secrets

INTEGER_MAX = (1 << 53) - 1
"""Doubles represent all integers up to this one."""


def drawn_integer() -> int:
    """A random number from 1 to INTEGER_MAX, unique in practice."""
    return secrets.randbelow(INTEGER_MAX) + 1
