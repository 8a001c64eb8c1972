"""The connection that a framework's face trains over: the program's own, or one that is made for it.

Must not know frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psd_client.client import ParameterServer, connect


def check_connection(ps: Any, *others: str) -> None:
    """Raise TypeError unless `ps` is a connection, or None. others: names of arguments that are given to make one."""
    if ps is not None and others:
        raise TypeError(f"distribute: pass either ps or {', '.join(sorted(others))}; ps is connected already")
    if not isinstance(ps, ParameterServer | None):
        raise TypeError(f"ps: expected what psd_client.connect() returns, got {ps!r}")


@contextmanager
def connection_of(ps: ParameterServer | None, arguments: Mapping[str, Any]) -> Iterator[ParameterServer]:
    """The given connection; or one made with these arguments of `connect`, which is closed if the block fails."""
    connection = ps if ps is not None else connect(**arguments)
    try:
        yield connection
    except BaseException:
        if ps is None:
            connection.close()
        raise
