"""The steps that all faces have in common when they declare a job: its keywords, and the connection that is passed or made.

Must not know frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from psd.contract.keywords import OF_CONNECT, FaceKeywords, JobKeywords
from psd.contract.staleness import parse_staleness
from psd_client.client import ParameterServer
from psd_client.connecting import connect


def split(keywords: FaceKeywords) -> tuple[JobKeywords, dict[str, Any]]:
    """The keywords of the job, and those of `connect`."""
    parse_staleness(keywords.get("staleness"))  # before a connection is made
    job = {name: value for name, value in keywords.items() if name not in OF_CONNECT}
    return cast(JobKeywords, job), {name: value for name, value in keywords.items() if name in OF_CONNECT}


@contextmanager
def connection_of(ps: ParameterServer | None, of_connect: Mapping[str, Any]) -> Iterator[ParameterServer]:
    """Yield the given connection; or a new one, made with these keywords of `connect`, which is closed if the block fails.

    Raises:
        TypeError: `ps` is no connection, or is given beside keywords of `connect`.
    """
    if ps is not None and of_connect:
        raise TypeError(f"distribute: pass either ps or {', '.join(sorted(of_connect))}; ps is connected already")
    if not isinstance(ps, ParameterServer | None):
        raise TypeError(f"ps: expected what psd_client.connect() returns, got {ps!r}")
    connection = ps if ps is not None else connect(**of_connect)
    try:
        yield connection
    except BaseException:
        if ps is None:
            connection.close()
        raise
