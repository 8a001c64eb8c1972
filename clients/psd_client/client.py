"""The public face: ParameterServer, for programs that hold named NumPy arrays. connecting.py makes it.

Adds names to a worker (worker.py, flat_calls.py): the name of each parameter, its group, and the shape and dtype of its
gradient. Must not know shards, sessions or bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from psd.contract.arguments import ByName, refuse
from psd.contract.config import ClientConfig
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared
from psd.contract.keywords import JobKeywords, takes
from psd_client.lanes.transport import Lane
from psd_client.param_groups import ParamGroups
from psd_client.tables import DeclaredTable, Table, gradients_of
from psd_client.tensors import NamedTensors, check_params, fill, tensor_specs
from psd_client.vector_batch import Batch
from psd_client.vectors import Matrix, Vector, by_name, matrix_of, vector_of
from psd_client.worker.exchange.sent_push import WorkerGradient
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.reduction import Reduced
from psd_core.optimizer import Optimizer

logger = logging.getLogger("psd_client")

_NO_TABLES: Mapping[str, tuple[Any, Any]] = MappingProxyType({})


class ParameterServer:
    """One worker's connection to its job; made by `connect`. A context manager; used by one thread at a time.

    After an error the program may make the same call again: a push that some shards have counted already is not counted
    twice. Only errors that end the session, such as SessionFenced and ShardRestarted, do not allow this.

    Args:
        config: settings.
        lanes: the lane to each shard, in the order of the shards; closed with the connection.
        on_end: called when the connection is closed.
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
        """Number of steps that this worker has finished. A worker that joins a running job begins at the others' clock."""
        return self._worker.clock

    @property
    def is_skipped(self) -> bool:
        """True if the last push's round was skipped: a gradient or norm was not finite, so no shard has changed anything.

        Known after the pull that follows the push. In jobs without rounds: whether this worker's push was skipped.
        """
        return self._worker.is_skipped

    @property
    def nan_policy(self) -> str:
        """The declared nan_policy: "refuse", "skip" or "allow"."""
        return self._worker.nan_policy

    @property
    def transports(self) -> list[str]:
        """Transport of bulk data to each shard: "shm", "tcp" or "grpc", and why no better one; empty before `declare`."""
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

    @takes(JobKeywords)
    def declare(
        self,
        params: Mapping[str, Any],
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        copy: bool = True,
        tables: Sequence[Table] = (),
        **job: Unpack[JobKeywords],
    ) -> dict[str, NDArray[Any]]:
        """Agree with the other workers on what is trained and how, and get the job's parameters.

        The first worker's values are used; the others wait for them. A worker that joins later gets the current values.

        Args:
            params: this worker's initial values: float32, float64 or float16 arrays of any shape, by name; {} if there are
                tables alone.
            optimizer: their update rule, such as psd_client.Adam(lr=1e-3), or CustomRule for one of your own. Or several, by
                the names of the job's parts, such as {"generator": ..., "critic": ...}; each push is then of one part.
            groups: like torch's param_groups: {"params": [names], "lr": ..., ...}; what is not given is the optimizer's. Of
                several optimizers, groups name theirs: {"part": "generator", "params": [names]}.
            copy: False: in place of new arrays this, `pull` and `push_pull` return views of the memory where parameters are
                received, or where a shard of this machine has them. They cannot be written to, and hold until the next of
                these calls, or one that fails: use what each one returns. (Of float16 parameters there are copies all the
                same: their masters are float32.)
            tables: sparse ones, each with an optimizer of its own; `ps.tables` then has them by name. See docs/tables.md.
            **job

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
        param_groups = ParamGroups(list(params), optimizer, groups, rules)
        specs = tensor_specs(params, param_groups.group_of)
        self._worker.declare_tensors(
            specs,
            param_groups.specs,
            initial=fill(params),
            is_lending=copy and param_groups.parts is None,  # a step of a part receives no other one's parameters
            reads_planes=not copy and param_groups.parts is None,
            tables=[table.spec(param_groups.group_of_table[table.name]) for table in tables],
            **job,
        )
        named = NamedTensors(specs, [np.asarray(value).dtype for value in params.values()], copy=copy)
        self._named = named, param_groups
        declared = enumerate(self._worker.gradients.layout.spec.tables)
        named_tables = {spec.name: DeclaredTable(self._worker, i, spec, param_groups) for i, spec in declared}
        self._tables = ByName("table", named_tables)
        return self._results()

    def push(
        self,
        grads: Mapping[str, Any],
        weight: float = 1,
        tables: Mapping[str, tuple[Any, Any]] = _NO_TABLES,
        part: str | None = None,
    ) -> None:
        """Send gradients; returns when all shards have them. Parameters without a gradient may be left out.

        Args:
            grads: gradients by name, in the declared shapes and dtypes.
            weight: number of samples behind the gradients, for `reduce="mean"`.
            tables: gradients of rows, as pairs (ids, gradients) by name of the table; see DeclaredTable.push. Ids and gradients
                may be changed once this has returned.
            part: with several optimizers, the name of the one that this steps; all gradients are of its parameters.

        Raises:
            PartsDisagree: another worker has stepped another part in this round; this one may step that.
            InvalidTensor, NonFiniteGradient, InvalidRequest: an argument is wrong; nothing was sent.
            WaitTimeout: in a synchronous job, the previous round has not closed within the wait timeout.
            ShardUnavailable, SessionFenced, ShardRestarted: not all shards have it; see docs/guarantees.md for what to do.
        """
        with self._worker.operation("push"):
            named, groups = self._by_name
            exchange = self._worker.declared
            exchange.confirm()
            rows = None if tables is _NO_TABLES else gradients_of(exchange.gradients.layout.spec.tables, tables)
            of_part = None if part is None and groups.parts is None else groups.part(part, grads)
            present = named.write_gradients(grads, exchange.gradients)
            exchange.push(WorkerGradient(groups.scalars(), weight, present, rows, part=of_part))

    def pull(self) -> dict[str, NDArray[Any]]:
        """Fetch the parameters; in a synchronous job, wait first for the round of this worker's last push.

        Returns new arrays; with `copy=False` in `declare`, arrays that hold until the next call that returns some.

        Raises:
            WaitTimeout: some workers, which the message names, have not pushed within the wait timeout.
            ShardUnavailable, SessionFenced, ShardRestarted: not all shards have answered.
        """
        with self._worker.operation("pull"):
            self._by_name  # noqa: B018 - raises what is wrong before anything is pulled
            self._worker.declared.pull()
            return self._results()

    def push_pull(
        self,
        grads: Mapping[str, Any],
        weight: float = 1,
        tables: Mapping[str, tuple[Any, Any]] = _NO_TABLES,
        part: str | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Push, then pull, in one round trip. Arguments, result and errors are those of `push` and `pull`."""
        with self._worker.operation("push_pull"):
            named, groups = self._by_name
            exchange = self._worker.declared
            exchange.confirm()
            rows = None if tables is _NO_TABLES else gradients_of(exchange.gradients.layout.spec.tables, tables)
            of_part = None if part is None and groups.parts is None else groups.part(part, grads)
            present = named.write_gradients(grads, exchange.gradients)
            exchange.push_pull(WorkerGradient(groups.scalars(), weight, present, rows, part=of_part))
            return self._results()

    def load_parameters(self, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Set the parameters of a running job; return them, as `pull` does.

        All workers must call this at the same step, with the same values. The call waits for all of them, and one of them sends
        the values; when it returns, every worker has them. The slots of the rules stay (see `reset_slots`), and so do the rows
        of tables.

        Args:
            params: all that were declared, by name.

        Raises:
            InvalidTensor: a parameter is missing, unknown, or has another shape. InvalidRequest: another worker passed other
                values. NonFiniteGradient: a parameter holds NaN or infinity. Nothing was set.
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        named, _ = self._by_name
        self._worker.set_parameters(fill(named.whole(params)))
        return self._results()

    def reset_slots(self) -> None:
        """Reset the slots of the rules (momentum, moments, counts of steps) of all tensors and rows to their initial values.

        Parameters, rows and the clock stay. All workers must call this at the same step, as with `load_parameters`.

        Raises:
            InvalidRequest: a table has updates="catch_up" and untrained rows that have changed, by weight decay say (see
                docs/tables.md); nothing was reset.
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        self._worker.set_slots({})

    def vector(self, name: str, size: int | None = None, dtype: str = "float64") -> Vector:
        """Make a vector of zeros on the shards, or find the existing vector of that name.

        Every worker may call this, before or without `declare`; the first call makes the vector. See docs/vectors.md.

        Args:
            name: 1 to 256 bytes of UTF-8, printable.
            size: number of elements; None finds an existing vector, of any size and dtype.
            dtype: "float64", "float32" or "int64".

        Raises:
            SpecMismatch: a vector of that name exists with another size, dtype or row length.
            InvalidRequest: an argument is wrong, or above a limit of the shards. UnknownVector: no such vector, and no size.
            OutOfSpace: a shard has no room for it.
        """
        return vector_of(self._worker.vectors, name, size, dtype)

    def matrix(self, name: str, rows: int | None = None, cols: int | None = None, dtype: str = "float64") -> Matrix:
        """Make a matrix of zeros on the shards, or find the existing one of that name. A matrix is a vector with a row length.

        Args:
            rows, cols: the shape; leave out both to find an existing matrix. name, dtype: as in `vector`.

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
        """Wait until all workers in the job have called `barrier` with this name.

        Raises:
            InvalidRequest: the name is not 1 to 256 bytes of printable UTF-8.
            BarrierTimeout: some workers, which the message names, have not arrived within the wait timeout.
        """
        self._worker.barrier(name)

    def all_reduce(self, values: Mapping[str, Any], op: str = "sum") -> Reduced:
        """Reduce a few numbers over all workers, such as losses and counts of an evaluation, and return the result to each.

            total = ps.all_reduce({"loss": loss_sum, "correct": correct, "count": count})
            print(total["loss"] / total["count"], "over", total.workers, "workers")

        All workers in the job call this, with the same names and `op`, and wait for each other as at a barrier. All get the
        same bits, whatever the order in which they come: sums of floats are rounded once, sums of ints are exact. The numbers
        of a worker count once, or not at all if it leaves or dies before all have come; nobody waits for it then.

        Args:
            values: numbers by name, or tensors and arrays of one element; at most 256 (the shards' --max-reduced-numbers). A
                name that is an int on all workers stays one; NaN and infinity are as in arithmetic.
            op: "sum"; "mean", over workers, which is a float; "min" or "max", NaN if any is.

        Raises:
            InvalidRequest: a name, value or `op` is wrong, or is not that of the workers that have come; or a sum of ints may
                not fit into 64 bits. This worker has not come then.
            BarrierTimeout: some workers, which the message names, have not called it within the wait timeout.
        """
        return self._worker.all_reduce(values, op)

    def stop(self) -> int:
        """End the job for all workers at one step, as an early stop does; call it on any worker, and go on as before.

        All workers make the steps before that one and none beyond, in every consistency mode. It is the earliest that none of
        them may have begun: under "sync" two steps after the present one, else two after the foremost worker's. Then the next
        push of each raises Drained, a SystemExit that ends the program in order, with status 0, unless the program catches it,
        or has looked at `is_over`. Calling it again, or on several workers, changes nothing: the first call holds.

        Returns:
            The step at which the job ends: the clock that every worker then has.

        Raises:
            NotDeclared: nothing is declared yet. InvalidRequest: nothing is trained on shard 0, so that there are no steps.
            ShardUnavailable, SessionFenced: shard 0 may not have heard it; call it again.
            RolledBack: the job has gone back to a checkpoint; call it again if it is still to end.
        """
        return self._worker.stop()

    @property
    def is_over(self) -> bool:
        """True if the job ends at the present step, by `stop` on some worker or psdctl drain: the next push raises Drained.

        For loops that end by themselves: `while ps.clock < steps and not ps.is_over`.
        """
        return self._worker.is_over

    def log(self, step: int, /, *, total: int | None = None, **scalars: Any) -> None:
        """Report scalars of a step for psdctl top, the dashboard and files: `ps.log(ps.clock, loss=loss, accuracy=0.9)`.

        The call takes microseconds: a separate thread sends the points to shard 0 twice a second, and writes them to
        PSD_LOG_DIR and PSD_TENSORBOARD. Neither a slow shard nor a slow disk slows training down. Points are lost if the worker
        is killed before they are sent, and shard 0 keeps only the last 4096 of each series, for as long as it lives. The files
        keep all points.

        Args:
            step: the place on the horizontal axis, 0 or more; most programs use `ps.clock`.
            total: the number of steps after which the job ends, counted from its beginning, as `ps.clock` counts: 1 or more.
                From it follow the progress and the time left that psdctl and the dashboard show. Ends nothing by itself. To say
                it once is enough, also without scalars; what a worker says last holds, and of several workers' the largest.
            scalars: numbers by name, or tensors and arrays of one element; NaN and infinity are shown as such. A worker may use
                at most 64 names, of 1 to 256 bytes each, but not `total`; `**{"loss/train": 0.5}` passes a name that is no
                Python identifier. For a tensor on a GPU the call waits.

        Raises:
            InvalidRequest: step, total, a name or a value is wrong, or there are too many names; the whole call is ignored.
        """
        self._worker.log(step, scalars, total)

    def stats(self) -> dict[str, int]:
        """Statistics of this worker so far.

        Returns:
            Counts by name.

            * pushes: pushes that all shards have.
            * pushes_dropped: pushes given up, because their calls failed and another gradient was to be pushed.
            * pushes_overruled: pushes whose scalars, such as lr, gave way to those of a worker that has been in the job longer.
            * blocks_counted: blocks that have counted the gradient of a push.
            * blocks_duplicate: blocks that had already counted the gradient when it was sent again.
            * blocks_late: blocks that have not counted the gradient, because their round had closed without it.
            * blocks_staged: blocks that hold the gradient but do not know yet whether it counts (exact aggregation).
            * rounds_skipped: rounds that changed nothing; see `is_skipped`.
            * rejoins: new sessions after the first.
            * rows_pushed, rows_pulled: rows of tables, counting each distinct id once per call.
            * sent_bytes, received_bytes: bytes of gradients and parameters moved, including ids.
        """
        return self._worker.stats()

    def save_client_state(self, state: bytes) -> None:
        """Have the shards keep what this worker needs to continue: its place in the data, the state of random numbers.

        Call this before the push of a step: the bytes belong to the time after that step, and are kept only if that push
        counts. `client_state` returns them to the rank's next process, and after the job has gone back to a checkpoint. They
        travel with the next push, and one shard writes them to its state directory. With overlap a push begins in backward(),
        so call this before backward().

        Raises:
            InvalidRequest: this is not bytes, or more than 1 MiB.
        """
        self._worker.save_client_state(state)

    @property
    def client_state(self) -> bytes:
        """The bytes that a worker of this rank saved with its last push that counted; empty if there are none.

        Set by `declare`, and again when the job goes back to a checkpoint.
        """
        return self._worker.client_state

    def close(self) -> None:
        """Finish and disconnect; no other worker waits for this one any more. Idempotent.

        In a synchronous job whose last call was a push, this waits until the round of the push has closed, because a shard that
        is killed before then needs the gradient again. The round closes when each other worker has pushed or ended, or its
        lease has run out; the wait lasts at most for the wait timeout. What prevents the round from closing is logged. If a
        call has failed since the push, that is logged, and this does not wait. A program that ends without close() waits in the
        same way; for a ParameterServer that is no longer referenced, a thread waits.

        One case is weaker: over gRPC, in a Python that starts no threads while it exits (some 3.12 do not), a killed shard gets
        at most 31 MiB again, and nothing with exact aggregation; the log then says that the gradient is lost.
        """
        self._worker.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._worker.close(error)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "psd: a connection cannot be copied or pickled: it is one worker's place in the job. Leave it out of what you "
            "save, as by `with connect() as ps` where you train"
        )

    def _results(self) -> dict[str, NDArray[Any]]:
        """Return the parameters that the last pull has received, by name."""
        named, _ = self._by_name
        exchange = self._worker.declared
        return named.results(exchange.parameters, exchange.places.lend() if exchange.places.is_lending else None)

    @property
    def _by_name(self) -> tuple[NamedTensors, ParamGroups]:
        if self._named is None:
            raise NotDeclared("psd: no parameters are declared by name yet: call declare() first")
        return self._named


def worker_of(ps: ParameterServer) -> FlatCalls:
    """The worker behind a connection: the inner interface, which the faces of frameworks use."""
    return ps._worker  # noqa: SLF001
