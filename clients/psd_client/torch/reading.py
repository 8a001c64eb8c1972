"""Models that take no part in a job and look up rows on its shards, as a reader does. Must not know connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest
from psd_client.faces import table_in
from psd_client.reader import Reader, ReadTable
from psd_client.torch.embedding import table_modules
from psd_client.torch.row_gradients import Ids
from psd_client.torch.tables import Lookup, Rows, pull_rows
from psd_client.worker.worker import Turn


def read_rows(model: torch.nn.Module, reader: Reader) -> None:
    """Have the embeddings of a model look up rows on the shards of a running job from now on, without taking part in it.

    Each lookup gets the rows as they are at that moment. They are fixed: no gradient reaches them, and no lookup makes or keeps
    one. The model's other parameters stay as they are: `reader.pull()` has them.

    Args:
        model: a model that is in no job. Rows that load_state_dict has given it are dropped.
        reader: made by psd_client.connect(role="reader"). Lookups end when it is closed.

    Raises:
        InvalidRequest: the job has no table of an embedding's name and dim, or the model is in a job itself.
        NotDeclared: no job, or no initial values, within the wait timeout. ShardUnavailable: a shard could not be reached.
    """
    if not isinstance(model, torch.nn.Module):
        refuse(TypeError, "model", "a torch.nn.Module", model)
    if not isinstance(reader, Reader):
        refuse(TypeError, "reader", 'what psd_client.connect(role="reader") returns', reader)
    tables = reader.tables
    source = ReaderRows(tables)
    embeddings = table_modules(model)
    for embedding in embeddings:
        table_in(tables, embedding.spec.name, embedding.spec.dim)
        if embedding.is_in_job:
            raise InvalidRequest(
                f"embedding {embedding.spec.name!r}: its model is in a job, as a worker; pass a copy of the model, or call "
                "close() of the optimizer before"
            )
    for embedding in embeddings:
        embedding.join(source)


class ReaderRows:
    """A reader's tables as the source of lookups; see RowSource."""

    is_trained = False

    def __init__(self, tables: Mapping[str, ReadTable]) -> None:
        self.index_of = {name: index for index, name in enumerate(tables)}
        self._tables = list(tables.values())

    def pull(self, lookups: Sequence[Lookup]) -> list[Rows]:
        """The distinct rows of some lookups."""
        return pull_rows(self, [place for _, place in lookups])

    def pull_rows(self, wanted: dict[int, Ids], *, counts_no_use: bool, turn: Turn | None) -> dict[int, Rows]:  # noqa: ARG002
        """The rows of ids, by index of the table; a reader marks none as used."""
        return {table: self._tables[table].pull(ids) for table, ids in wanted.items()}

    def prefetch(self, lookups: Sequence[Lookup]) -> None:
        """Do nothing: a reader has no steps before which rows could be fetched."""
