"""The connection that a framework's face uses: one that the program passes, or one that is made here.

Must not know frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from typing import Any

from psd_client.client import ParameterServer
from psd_client.connecting import connect

OF_CONNECT = signature(connect).parameters.keys() - {"role"}
OF_THE_JOB = {"consistency", "reduce", "quorum", "aggregation", "clip_norm", "nan_policy"}
"""Keywords of every `distribute` that go to `connect`, and to the job's declaration."""


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword of `distribute`; the message suggests the most similar known one."""
    known = set(known)
    for name in given:
        if name not in known:
            likely = get_close_matches(name, sorted(known | OF_THE_JOB), 1)
            hint = f"; did you mean {likely[0]!r}?" if likely else ""
            raise TypeError(f"distribute() got an unexpected keyword argument {name!r}{hint}")


def check_connection(ps: Any, *others: str) -> None:
    """Raise TypeError unless `ps` is a connection, or None. others: names of arguments for `connect`."""
    check_keywords(others, OF_CONNECT)
    if ps is not None and others:
        raise TypeError(f"distribute: pass either ps or {', '.join(sorted(others))}; ps is connected already")
    if not isinstance(ps, ParameterServer | None):
        raise TypeError(f"ps: expected what psd_client.connect() returns, got {ps!r}")


@contextmanager
def connection_of(ps: ParameterServer | None, arguments: Mapping[str, Any]) -> Iterator[ParameterServer]:
    """Yield the given connection, or a new one made with these arguments of `connect`, which is closed if the block fails."""
    connection = ps if ps is not None else connect(**arguments)
    try:
        yield connection
    except BaseException:
        if ps is None:
            connection.close()
        raise
