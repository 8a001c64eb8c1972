"""Checks of the values that a program passes to a call, by kind: a word, a whole number, a number, a path.

Each returns the value in the one form that is used below (an int for a NumPy integer, a str for a path), or raises the error
that the caller has chosen, with the argument's name, what was expected and what there was. Must not know which arguments there
are.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from psd_core.optimizer import number

ItemT = TypeVar("ItemT")


def refuse(error: type[Exception], name: str, expected: str, value: Any) -> NoReturn:
    """Raise the error for a value of the wrong kind."""
    shown = reprlib.repr(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else repr(value)[:80]
    raise error(f"{name}: expected {expected}, got {shown}")


def word(error: type[Exception], name: str, value: Any) -> str:
    """A string."""
    return value if isinstance(value, str) else refuse(error, name, "a string", value)


def choice(error: type[Exception], name: str, value: Any, words: Iterable[str]) -> str:
    """One of several words."""
    words = list(words)
    if isinstance(value, str) and value in words:
        return value
    refuse(error, name, f"one of {', '.join(words)}", value)


def whole_number(error: type[Exception], name: str, value: Any) -> int:
    """A whole number, NumPy's included; a bool is none."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    refuse(error, name, "a whole number", value)


def real_number(error: type[Exception], name: str, value: Any) -> float:
    """A number; a bool or a string is none."""
    try:
        return number(name, value)
    except TypeError:
        refuse(error, name, "a number", value)


class ByName(dict[str, ItemT]):
    """Items by name, which say what there is when they are asked for another one.

    Args:
        kind: what an item is, for messages.
    """

    def __init__(self, kind: str, items: Mapping[str, ItemT]) -> None:
        super().__init__(items)
        self._kind = kind

    def __missing__(self, name: Any) -> NoReturn:
        raise KeyError(f"there is no {self._kind} {name!r}; there are {', '.join(self) or 'none'}")


def path(error: type[Exception], name: str, value: Any) -> str:
    """A path, as str or os.PathLike."""
    try:
        return word(error, name, os.fspath(value))
    except TypeError:
        refuse(error, name, "a path", value)
