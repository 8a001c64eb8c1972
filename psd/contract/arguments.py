"""Checks of the values that a program passes to a call, by kind: a word, a whole number, a number, a path.

Each returns the value in one form (an int for a NumPy integer, a str for a path), or raises the error class that the caller
passes, with the argument's name, what was expected and what was given. Must not know any particular argument.
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
    """The value, which must be a string."""
    return value if isinstance(value, str) else refuse(error, name, "a string", value)


def choice(error: type[Exception], name: str, value: Any, words: Iterable[str]) -> str:
    """The value, which must be one of several words."""
    words = list(words)
    if isinstance(value, str) and value in words:
        return value
    refuse(error, name, f"one of {', '.join(words)}", value)


def whole_number(error: type[Exception], name: str, value: Any) -> int:
    """The value as an int; it must be a whole number, perhaps NumPy's, and no bool."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    refuse(error, name, "a whole number", value)


def real_number(error: type[Exception], name: str, value: Any) -> float:
    """The value as a float; it must be a number, and no bool or string."""
    try:
        return number(name, value)
    except TypeError:
        refuse(error, name, "a number", value)


def identifier(error: type[Exception], name: str, value: Any) -> str:
    """The value, which must be a word that names may begin with: a Python identifier."""
    if isinstance(value, str) and value.isidentifier():
        return value
    raise error(f"{name}: names must be words such as 'generator', got {value!r}")


class ByName(dict[str, ItemT]):
    """Items by name. The error for an unknown name lists those that exist.

    Args:
        kind: what an item is, for messages.
    """

    def __init__(self, kind: str, items: Mapping[str, ItemT]) -> None:
        super().__init__(items)
        self._kind = kind

    def __missing__(self, name: Any) -> NoReturn:
        raise KeyError(f"there is no {self._kind} {name!r}; there are {', '.join(self) or 'none'}")


def path(error: type[Exception], name: str, value: Any) -> str:
    """The value as a str; it must be a str or os.PathLike."""
    try:
        return word(error, name, os.fspath(value))
    except TypeError:
        refuse(error, name, "a path", value)
