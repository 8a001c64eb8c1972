"""The step from a Keras optimizer to the shards: what all backends share, and all optimizers of one job.

Must not know a framework, shards or messages.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from psd.contract.keywords import JobKeywords
from psd_client.client import ParameterServer, worker_of
from psd_client.keras.declaration import KerasDeclaration, TrainedPart
from psd_client.keras.table_rows import Gradients, LayerRows
from psd_client.lanes.flat import FlatBuffers


class Link(ABC):
    """Links the variables of a job's models to one connection. Each backend's subclass copies gradients into the buffers, and
    parameters out.

    Args:
        connection: a connection that has declared nothing yet. job: the job's keywords.

    Attributes:
        batch_size: number of samples behind the gradients of the next step.
        error: the error that the last step has raised, or None. In graph mode TensorFlow raises another error instead.
        is_skipped: True if the last step's round was skipped; a tensor of the backend, in graph mode a symbolic one.
        models: return the models whose training ends with the job, or None if one is gone.
        optimizers: all of the job, if there are several.
    """

    def __init__(self, declaration: KerasDeclaration, connection: ParameterServer, job: JobKeywords) -> None:
        self.declaration = declaration
        self.ps = connection
        self.worker = worker_of(connection)
        self.batch_size = 1.0
        self.error: BaseException | None = None
        self.is_skipped: Any = False
        self.models: list[Callable[[], Any]] = []
        self.optimizers: list[Any] = []
        self._lock = threading.Lock()
        self.worker.declare_tensors(
            declaration.tensors,
            declaration.groups,
            initial=self._initialize,
            reads_planes=len(declaration.parts) == 1,
            tables=declaration.tables,
            **job,
        )
        index_of = {table.name: index for index, table in enumerate(declaration.tables)}
        self._joined: list[tuple[Any, LayerRows]] = []
        self._rows: list[tuple[int, LayerRows]] = []  # of embeddings, with the index of the handle
        for layer in declaration.layers:
            name, dim = layer.spec.name, layer.spec.dim
            rows = LayerRows(self.worker, index_of[name], name, dim, self._noting)
            layer.join(rows)
            self._joined.append((layer, rows))
            handle = declaration.handle_of(layer)
            if handle < declaration.trained:  # else the layer is frozen, and its rows have no gradients
                self._rows.append((handle, rows))

    @abstractmethod
    def _initialize(self, flat: FlatBuffers) -> None:
        """Write the models' values into the buffers."""

    @abstractmethod
    def load(self) -> None:
        """Copy all declared values from the buffers into the models: at the beginning, and after a pull."""

    def set_parameters(self) -> None:
        """Set the job's parameters to what the models hold; called by all workers at the same step."""
        with self._noting():
            self.worker.set_parameters(self._initialize)

    @abstractmethod
    def exchange(self, part: TrainedPart, rates: Sequence[Any], indices: Sequence[int], gradients: Sequence[Any]) -> Any:
        """Make one step: send the gradients to the shards, and load the new parameters into the models.

        Args:
            part: of the optimizer that is stepped.
            rates: the learning rate of each part: a number, or a tensor or variable of the backend.
            indices: indices of the variables that have a gradient.

        Returns:
            the worker's clock after the step, for Keras's `iterations`; a number or a tensor of the backend.
        """

    def close(self) -> None:
        """Finish: no other worker waits for this one any more, and the model's embeddings look up no more rows."""
        for layer, rows in self._joined:
            layer.leave(rows)
        self.ps.close()

    def push_pull(
        self, part: TrainedPart, rates: Sequence[float], missing: Sequence[int], write: Callable[[FlatBuffers], None]
    ) -> tuple[int, bool]:
        """Call `write` to put the gradients into the buffers; push and pull; return the clock, and whether the round was
        skipped.

        missing: indices of the trained variables without a gradient, of all parts.
        """
        with self._noting():
            scalars = self.declaration.scalars(rates)
            write(self.worker.gradients)
            present = self.worker.gradients.present_but(missing)
            rows = self._row_gradients(part)
            self.worker.push_pull_flat(scalars, self.batch_size, present, rows, job_part=part.job_part)
            if self.ps.is_over:
                for model in filter(None, (found() for found in self.models)):
                    model.stop_training = True  # fit ends with this batch
            return self.ps.clock, self.ps.is_skipped

    def _row_gradients(self, part: TrainedPart) -> dict[int, Gradients]:
        """The gradients of a part's rows, by table, scaled as the handles' gradients were. The handles' gradients are then set
        to zero."""
        parts: dict[int, list[Gradients]] = {}
        for handle, rows in self._rows:
            if handle not in part.trained:
                continue
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
