"""The step from a Keras optimizer to the shards: the part that all backends share.

Must not know a framework, shards or messages.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.keywords import JobKeywords
from psd_client.client import ParameterServer, worker_of
from psd_client.keras.declaration import KerasDeclaration
from psd_client.keras.table_rows import Gradients, LayerRows
from psd_client.lanes.flat import FlatBuffers


class Link(ABC):
    """Links one model's variables to one connection. Each backend's subclass copies gradients into the buffers, and parameters
    out.

    Args:
        connection: a connection that has declared nothing yet. job: the job's keywords.

    Attributes:
        batch_size: number of samples behind the gradients of the next step.
        error: the error that the last step has raised, or None. In graph mode TensorFlow raises another error instead.
        is_skipped: True if the last step's round was skipped; a tensor of the backend, in graph mode a symbolic one.
        is_scaled: True if the loss is scaled dynamically, by an optimizer that knows of skipped rounds.
        model: returns the model whose training ends with the job, or None if it is gone.
    """

    def __init__(self, declaration: KerasDeclaration, connection: ParameterServer, job: JobKeywords) -> None:
        self.declaration = declaration
        self.ps = connection
        self.worker = worker_of(connection)
        self.batch_size = 1.0
        self.error: BaseException | None = None
        self.is_skipped: Any = False
        self.is_scaled = False
        self.model: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()
        self.worker.declare_tensors(
            declaration.tensors, declaration.groups, initial=self._initialize, tables=declaration.tables, **job
        )
        index_of = {table.name: index for index, table in enumerate(declaration.tables)}
        self._rows: list[tuple[int, LayerRows]] = []  # of embeddings, with the index of the handle
        for layer in declaration.layers:
            layer.link, layer.rows = self, LayerRows(self.worker, index_of[layer.spec.name], layer.spec.name, layer.spec.dim)
            handle = declaration.handle_of(layer)
            if handle < declaration.trained:  # else the layer is frozen, and its rows have no gradients
                self._rows.append((handle, layer.rows))

    @abstractmethod
    def _initialize(self, flat: FlatBuffers) -> None:
        """Write the model's values into the buffers."""

    @abstractmethod
    def load(self) -> None:
        """Copy all declared values from the buffers into the model: at the beginning, and after a pull."""

    def set_parameters(self) -> None:
        """Set the job's parameters to what the model holds; called by all workers at the same step."""
        with self._noting():
            self.worker.set_parameters(self._initialize)

    @abstractmethod
    def exchange(self, learning_rate: Any, indices: Sequence[int], gradients: Sequence[Any]) -> Any:
        """Make one step: send the gradients to the shards, and load the new parameters into the model.

        Args:
            learning_rate: a number, or a tensor or variable of the backend.
            indices: indices of the variables that have a gradient.

        Returns:
            the worker's clock after the step, for Keras's `iterations`; a number or a tensor of the backend.
        """

    @abstractmethod
    def look_up(self, handle: Any, ids: Any, rows: LayerRows, *, counts_no_use: bool) -> Any:
        """Rows (..., dim) of ids (...), in float32. The handle gets the gradient that LayerRows.collect returns for theirs."""

    def pull_rows(self, ids: NDArray[Any], rows: LayerRows, *, counts_no_use: bool) -> NDArray[np.float32]:
        """Pull a layer's rows; waits for other calls of this model that are under way."""
        with self._noting():
            return rows.pull(ids, counts_no_use=counts_no_use)

    def close(self) -> None:
        """Finish: no other worker waits for this one any more."""
        self.ps.close()

    def push_pull(self, learning_rate: float, missing: Sequence[int], write: Callable[[FlatBuffers], None]) -> tuple[int, bool]:
        """Call `write` to put the gradients into the buffers; push and pull; return the clock, and whether the round was
        skipped.

        missing: indices of the trained variables without a gradient.
        """
        with self._noting():
            scalars = self.declaration.scalars(learning_rate)
            write(self.worker.gradients)
            present = self.worker.gradients.present_but(missing)
            self.worker.push_pull_flat(scalars, self.batch_size, present, self._row_gradients())
            model = self.model() if self.ps.is_over else None
            if model is not None:
                model.stop_training = True  # fit ends with this batch
            return self.ps.clock, self.ps.is_skipped

    def _row_gradients(self) -> dict[int, Gradients]:
        """The gradients of rows, by table, scaled as the handles' gradients were. The handles' gradients are then set to
        zero."""
        parts: dict[int, list[Gradients]] = {}
        for handle, rows in self._rows:
            view = self.worker.gradients.views[handle]
            taken = rows.take(view)
            view[...] = 0.0
            if taken is not None:
                parts.setdefault(rows.table, []).append(taken)
        return {
            table: (np.concatenate([ids for ids, _ in found]), np.concatenate([values for _, values in found]))
            for table, found in parts.items()
        }

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with self._lock:
            self.error = None
            try:
                yield
            except BaseException as error:
                self.error = error
                raise
