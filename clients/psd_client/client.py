"""The public face: ParameterServer, for programs that hold named NumPy arrays; connecting.py makes one.

Adds names to a worker (worker.py, flat_calls.py): what a parameter is called, which group it is in, what its gradient must look
like. Must not know shards, sessions or bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import ByName, refuse
from psd.contract.config import ClientConfig
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared
from psd_client.lanes.transport import Lane
from psd_client.param_groups import ParamGroups
from psd_client.tables import DeclaredTable, Table, gradients_of
from psd_client.tensors import NamedTensors, check_params, fill, tensor_specs
from psd_client.vector_batch import Batch
from psd_client.vectors import Matrix, Vector, by_name, matrix_of, vector_of
from psd_client.worker.flat_calls import FlatCalls
from psd_core.optimizer import Optimizer

logger = logging.getLogger("psd_client")

_NO_TABLES: Mapping[str, tuple[Any, Any]] = MappingProxyType({})


class ParameterServer:
    """One worker's connection to its job; made by `connect`. A context manager; used by one thread at a time.

    After any error but SessionFenced, ShardRestarted and the like, which end the session, the same call may be made again: a
    push that some shards have counted already is not counted twice.

    Args:
        config: settings.
        lanes: the way to each shard, in their order; closed with the connection.
        on_end: called when it is closed.
    """

    def __init__(self, config: ClientConfig, lanes: Sequence[Lane], on_end: Callable[[], None] = lambda: None) -> None:
        self._worker = FlatCalls(config, lanes, on_end)
        self._named: tuple[NamedTensors, ParamGroups] | None = None
        self._tables: Mapping[str, DeclaredTable] = {}

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._worker.rank

    @property
    def world_size(self) -> int:
        """Number of workers of the job."""
        return self._worker.world_size

    @property
    def clock(self) -> int:
        """Steps that this worker has finished; a worker that joins a running job begins at the others' clock."""
        return self._worker.clock

    @property
    def is_skipped(self) -> bool:
        """True if the round of the last push has changed nothing on any shard, because a gradient or a norm was not finite.

        Known after the pull that follows the push. Without rounds it is this worker's push that was left out.
        """
        return self._worker.is_skipped

    @property
    def nan_policy(self) -> str:
        """The declared nan_policy: "refuse", "skip" or "allow"."""
        return self._worker.nan_policy

    @property
    def transports(self) -> list[str]:
        """Per shard, the transport of bulk data ("shm", "tcp", "grpc"), and why not a better one; empty before `declare`."""
        return self._worker.transports

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One dict per group: its names ("params" or "tables") and scalars; a new value takes effect at the next push."""
        return self._by_name[1].groups

    @property
    def tables(self) -> Mapping[str, DeclaredTable]:
        """The declared tables by name."""
        self._by_name  # noqa: B018 - raises if nothing is declared
        return MappingProxyType(self._tables)

    def declare(
        self,
        params: Mapping[str, Any],
        optimizer: Optimizer | None = None,
        consistency: str | None = None,
        reduce: str | None = None,
        quorum: int | None = None,
        aggregation: str | None = None,
        staleness: str | None = None,
        clip_norm: float | None = None,
        nan_policy: str = "refuse",
        groups: Sequence[Mapping[str, Any]] | None = None,
        copy: bool = True,
        tables: Sequence[Table] = (),
    ) -> dict[str, NDArray[Any]]:
        """Agree with the other workers on what is trained and how, and get the job's parameters.

        The first worker's values are used; the others wait for them. A worker that joins later gets the current ones.

        Args:
            params: this worker's initial values: float32, float64 or float16 arrays of any shape, by name; {} if there are
                tables alone.
            optimizer: their update rule, such as psd_client.Adam(lr=1e-3), or CustomRule for one of your own.
            consistency: "sync", "async" or "ssp:S".
            reduce: "mean", weighted by the pushes' weights, or "sum".
            quorum: workers whose gradients close a synchronous round; all of them by default.
            aggregation: "fast", gradients are added as they arrive; or "exact", in the order of the ranks, those of a worker on
                all shards or on none: the same bits whatever the timing and whatever dies, but of tables with
                `expire_seconds`, in which time has a part. Synchronous only.
            staleness: async and ssp: treatment of gradients whose parameters have been updated since their worker read
                them, `age` times. "lr" divides the learning rate by 1 + age. See docs/consistency.md.
            clip_norm: the largest norm that a round's gradient may have, over all parameters and rows, and the workers' mean
                (or sum): a longer one is scaled down, as torch.nn.utils.clip_grad_norm_ does. Without rounds: each push's.
                Implies "exact".
            nan_policy: treatment of NaN and infinity in gradients: "refuse", an error that names worker, parameter and step;
                "skip", the round changes nothing on any shard (see `is_skipped`), implies "exact"; "allow".
            groups: like torch's param_groups: {"params": [names], "lr": ..., ...}; what is not given is the optimizer's.
            copy: False: in place of new arrays this, `pull` and `push_pull` return views of the memory where parameters are
                received, which cannot be written to and which the next of these calls changes: there is one such memory. (Of
                float16 parameters there are copies all the same: their masters are float32.)
            tables: sparse ones, each with an optimizer of its own; `ps.tables` then has them by name. See docs/tables.md.

        Raises:
            SpecMismatch: another worker has declared something else; the message names the first difference.
            InvalidRequest, InvalidTensor, NonFiniteGradient: an argument is wrong; nothing was declared.
            WaitTimeout: no worker has provided initial values within the wait timeout.
        """
        check_params(params)
        if not isinstance(tables, (list, tuple)) or not all(isinstance(table, Table) for table in tables):
            refuse(InvalidRequest, "tables", "a list of psd_client.Table", tables)
        if not params and not tables:
            raise InvalidTensor("params: is empty; there must be at least one parameter to train, or a table")
        rules = {table.name: table.optimizer for table in tables}
        param_groups = ParamGroups(list(params), optimizer, groups, staleness, rules)
        specs = tensor_specs(params, param_groups.group_of)
        self._worker.declare_tensors(
            specs,
            param_groups.specs,
            initial=fill(params),
            consistency=consistency,
            reduce=reduce,
            quorum=quorum,
            aggregation=aggregation,
            clip_norm=clip_norm,
            nan_policy=nan_policy,
            is_lending=copy,
            tables=[table.spec(param_groups.group_of_table[table.name]) for table in tables],
        )
        named = NamedTensors(specs, [np.asarray(value).dtype for value in params.values()], copy=copy)
        self._named = named, param_groups
        declared = enumerate(self._worker.gradients.layout.spec.tables)
        named_tables = {spec.name: DeclaredTable(self._worker, i, spec, param_groups) for i, spec in declared}
        self._tables = ByName("table", named_tables)
        return self._results()

    def push(self, grads: Mapping[str, Any], weight: float = 1, tables: Mapping[str, tuple[Any, Any]] = _NO_TABLES) -> None:
        """Send gradients; returns when all shards have them. Parameters without a gradient may be left out.

        Args:
            grads: by name, in the declared shapes and dtypes.
            weight: samples behind them, for `reduce="mean"`.
            tables: gradients of rows, as pairs (ids, gradients) by name of the table; see DeclaredTable.push. Ids and gradients
                may be changed once this has returned.

        Raises:
            InvalidTensor, NonFiniteGradient, InvalidRequest: an argument is wrong; nothing was sent.
            WaitTimeout: synchronous: the previous round has not closed within the wait timeout.
            ShardUnavailable, SessionFenced, ShardRestarted: not all shards have it; see docs/guarantees.md for what to do.
        """
        with self._worker.operation("push"):
            named, groups = self._by_name
            exchange = self._worker.declared
            exchange.confirm()
            rows = None if tables is _NO_TABLES else gradients_of(exchange.gradients.layout.spec.tables, tables)
            present = named.write_gradients(grads, exchange.gradients)
            exchange.push(groups.scalars(), weight, present, rows)

    def pull(self) -> dict[str, NDArray[Any]]:
        """Fetch the parameters, in synchronous jobs after the round of this worker's last push.

        Returns new arrays; with `copy=False` in `declare`, always the same ones.

        Raises:
            WaitTimeout: the workers that it names have not pushed within the wait timeout.
            ShardUnavailable, SessionFenced, ShardRestarted: not all shards have answered.
        """
        with self._worker.operation("pull"):
            self._by_name  # noqa: B018 - raises what is wrong before anything is pulled
            self._worker.declared.pull()
            return self._results()

    def push_pull(
        self, grads: Mapping[str, Any], weight: float = 1, tables: Mapping[str, tuple[Any, Any]] = _NO_TABLES
    ) -> dict[str, NDArray[Any]]:
        """`push`, then `pull`, in one round trip; arguments, result and errors are those of both."""
        with self._worker.operation("push_pull"):
            named, groups = self._by_name
            exchange = self._worker.declared
            exchange.confirm()
            rows = None if tables is _NO_TABLES else gradients_of(exchange.gradients.layout.spec.tables, tables)
            present = named.write_gradients(grads, exchange.gradients)
            exchange.push_pull(groups.scalars(), weight, present, rows)
            return self._results()

    def load_parameters(self, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Set the job's parameters in the midst of it; returns them, as `pull` does.

        To be called by all workers at the same step, with the same values: it waits until all have, one of them sets them, and
        all have them when it returns. What the rules keep on the shards stays, see `reset_slots`; so do the rows of tables.

        Args:
            params: all that were declared, by name.

        Raises:
            InvalidTensor: one is missing, unknown, or of another shape. InvalidRequest: another worker was given other values.
            NonFiniteGradient: one holds NaN or infinity. Nothing was set.
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        named, _ = self._by_name
        self._worker.set_parameters(fill(named.whole(params)))
        return self._results()

    def reset_slots(self) -> None:
        """Let what the rules keep on the shards begin anew: momentum, moments, the counts of steps; of tensors and of rows.

        Parameters, rows and the clock stay. To be called as `load_parameters` is, by all workers at the same step.

        Raises:
            InvalidRequest: rows that nobody has trained have changed with a table's steps, see docs/tables.md; nothing changed.
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        self._worker.set_slots({})

    def vector(self, name: str, size: int | None = None, dtype: str = "float64") -> Vector:
        """Make a vector of zeros on the shards, or find the one of that name.

        Every worker may call this, before or without `declare`; the first one makes it. See docs/vectors.md.

        Args:
            name: 1 to 256 bytes of UTF-8, printable.
            size: number of elements; None finds a vector that is there already, whatever its size and dtype.
            dtype: "float64", "float32" or "int64".

        Raises:
            SpecMismatch: there is one of that name with another size, dtype or row length.
            InvalidRequest: an argument is wrong, or above a limit of the shards. UnknownVector: no such vector, and no size.
            OutOfSpace: a shard has no room for it.
        """
        return vector_of(self._worker.vectors, name, size, dtype)

    def matrix(self, name: str, rows: int | None = None, cols: int | None = None, dtype: str = "float64") -> Matrix:
        """Make a matrix of zeros on the shards, or find the one of that name: a vector with a row length.

        Args:
            rows, cols: the shape; neither finds a matrix that is there already. name, dtype: as in `vector`.

        Raises:
            SpecMismatch, InvalidRequest, UnknownVector, OutOfSpace: as `vector`.
        """
        return matrix_of(self._worker.vectors, name, rows, cols, dtype)

    @property
    def vectors(self) -> dict[str, Vector]:
        """The vectors and matrices that are on the shards, by name."""
        return by_name(self._worker.vectors)

    def batch(self) -> Batch:
        """Begin a batch of operations on vectors: `with ps.batch() as b: ...`; see Batch."""
        return Batch(self._worker.vectors)

    def barrier(self, name: str) -> None:
        """Wait until all workers that are in the job have called barrier with this name.

        Raises:
            InvalidRequest: the name is not 1 to 256 bytes of printable UTF-8.
            BarrierTimeout: the workers that it names have not arrived within the wait timeout.
        """
        self._worker.barrier(name)

    def log(self, step: int, /, **scalars: Any) -> None:
        """Report scalars of a step for psdctl top, the dashboard and files: `ps.log(ps.clock, loss=loss, accuracy=0.9)`.

        Costs microseconds: a thread of its own sends them to shard 0 twice a second, and writes them to PSD_LOG_DIR and
        PSD_TENSORBOARD. Neither a slow shard nor a slow disk keeps training; points are lost where the worker is killed before
        they are sent, and shard 0 keeps the last 4096 of each series only as long as it lives. The files keep all.

        Args:
            step: the place on the horizontal axis, 0 or more; most programs use `ps.clock`.
            scalars: by name, numbers, or tensors and arrays of one element; NaN and infinity are shown as such. At most 64
                names for a worker, of 1 to 256 bytes each; `**{"loss/train": 0.5}` gives one that is no Python name. A tensor
                on a GPU is waited for.

        Raises:
            InvalidRequest: a step, name or value is wrong, or there are too many names; nothing of the call was noted.
        """
        self._worker.log(step, scalars)

    def stats(self) -> dict[str, int]:
        """Statistics of this worker so far.

        Returns:
            Counts by name.

            * pushes: pushes that all shards have.
            * pushes_dropped: pushes given up, because their calls failed and another gradient was to be pushed.
            * pushes_overruled: pushes whose learning rate or the like gave way to that of a worker longer in the job.
            * blocks_counted: blocks that count the gradient of a push.
            * blocks_duplicate: blocks that had counted it already when it came again.
            * blocks_late: blocks that do not count it, because their round had closed without it.
            * blocks_staged: blocks that have it but do not know yet whether it counts (exact aggregation).
            * rounds_skipped: see `is_skipped`.
            * rejoins: new sessions after the first.
            * rows_pushed, rows_pulled: rows of tables, distinct ids in each call.
            * sent_bytes, received_bytes: bytes of gradients and parameters moved, ids included.
        """
        return self._worker.stats()

    def save_client_state(self, state: bytes) -> None:
        """Have the shards keep what this worker needs to continue: its place in the data, the state of random numbers.

        Call it before the push of a step; it then belongs to the time after that step, and holds if that push counts.
        `client_state` gives it back to the rank's next process, and after a restore. At most 1 MiB; it travels with the next
        push, and is written to the state directory of one shard. With overlap, where the push begins in backward(), call it
        before that.

        Raises InvalidRequest for what is not bytes, or more than 1 MiB.
        """
        self._worker.save_client_state(state)

    @property
    def client_state(self) -> bytes:
        """The state that a worker of this rank saved with its last push that counts; empty if none.

        Set by `declare`, and anew when the job goes back to a checkpoint.
        """
        return self._worker.client_state

    def close(self) -> None:
        """Finish and disconnect; nobody waits for this worker any more. Idempotent.

        Synchronous: if the last call was a push, this waits until its round has closed, because until then a shard that is
        killed needs the gradient again: until all other workers have pushed, or ended, or their leases have; at most for the
        wait timeout. What prevents that is logged; so is a call that has failed since, after which nothing is waited for. A
        program that ends without close() waits likewise, and so does a thread of its own for a ParameterServer that is
        forgotten. Only over gRPC, and if this Python starts no threads at its end, as some 3.12 do not, a killed shard gets no
        more than 31 MiB again, and nothing with exact aggregation; the log says then that the gradient is lost.
        """
        self._worker.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._worker.close(error)

    def _results(self) -> dict[str, NDArray[Any]]:
        """Return what has been pulled."""
        named, _ = self._by_name
        exchange = self._worker.declared
        return named.results(exchange.parameters, exchange.places.lend())

    @property
    def _by_name(self) -> tuple[NamedTensors, ParamGroups]:
        if self._named is None:
            raise NotDeclared("psd: no parameters are declared by name yet: call declare() first")
        return self._named


def worker_of(ps: ParameterServer) -> FlatCalls:
    """The worker behind a connection: the inner interface that the faces of frameworks build on."""
    return ps._worker  # noqa: SLF001
