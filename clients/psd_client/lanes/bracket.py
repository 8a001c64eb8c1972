"""A context manager made of two functions. Must not know what they do."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Bracket(Generic[T]):
    """A context manager that calls `begin` and `end`. Each step uses it, and contextlib's takes four times as long.

    Args:
        what: passed to both functions. begin: if it raises, `end` is not called.
        end: gets the exception of the context, or None; may raise another.
    """

    __slots__ = ("_begin", "_end", "_what")

    def __init__(self, what: T, begin: Callable[[T], None], end: Callable[[T, BaseException | None], None]) -> None:
        self._what = what
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin(self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end(self._what, error)
