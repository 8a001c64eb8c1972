"""The steps that all faces have in common: a job's keywords when it is declared, the connection that is passed or made, and the
tables that a model reads from outside of its job.

Must not know frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from psd.contract.errors import InvalidRequest
from psd.contract.keywords import OF_CONNECT, FaceKeywords, JobKeywords
from psd.contract.staleness import parse_staleness
from psd_client.client import ParameterServer
from psd_client.connecting import connect
from psd_client.reader import ReadTable


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


def table_in(tables: Mapping[str, ReadTable], name: str, dim: int) -> ReadTable:
    """A job's table, as a reader has it, for an embedding. Raises InvalidRequest unless there is one with this name and dim."""
    if name not in tables:
        raise InvalidRequest(f"embedding {name!r}: the job has no such table; it has {', '.join(tables) or 'none'}")
    if tables[name].dim != dim:
        raise InvalidRequest(f"embedding {name!r}: dim: is {dim}, and that of the job's table is {tables[name].dim}")
    return tables[name]
