"""Integers that cross the wire: small enough for languages whose only numbers are doubles, such as JavaScript.

A larger one would be rounded there, and what is compared with it would differ. Must not know what they count.
"""

from __future__ import annotations

import secrets

INTEGER_MAX = (1 << 53) - 1
"""The largest integer up to which a double has all of them."""


def drawn_integer() -> int:
    """A random number, 1 to INTEGER_MAX, that nobody else has."""
    return secrets.randbelow(INTEGER_MAX) + 1
