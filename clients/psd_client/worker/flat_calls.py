"""The calls on flat buffers, with which the faces of frameworks declare, push and pull.

The buffers belong to the worker. A face writes gradients into the memory from which they are sent, and reads parameters from
the memory into which they are received. Must not know frameworks, names of tensors, or how anything travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from psd.contract import arguments
from psd.contract.compression import Compression
from psd.contract.environment import job_defaults
from psd.contract.errors import InvalidRequest, NonFiniteGradient
from psd.contract.jobspec import AGGREGATIONS, NAN_POLICIES, REDUCTIONS, GroupSpec, JobSpec, TensorSpec
from psd.contract.keywords import DEFAULTS, JobKeywords
from psd.contract.layout import Layout
from psd.contract.rows import TableRows
from psd.contract.staleness import parse_staleness
from psd.contract.tables import SparseTableSpec
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Aborted, Feed
from psd_client.worker.exchange.exchange import ParameterExchange
from psd_client.worker.exchange.learner_rider import LearnerRider
from psd_client.worker.exchange.loading import SlotValues
from psd_client.worker.exchange.sent_push import JobPart, Spare, WorkerGradient
from psd_client.worker.exchange.value_exchange import ValueExchange
from psd_client.worker.rows import Gradients
from psd_client.worker.vectors.calls import VectorCalls
from psd_client.worker.worker import ONE_JOB, Turn, WorkerConnection

_OF_COMPRESSION = ("compress", "pull", "error_feedback", "rounding")


def _grace_of(grace: float | str | None) -> float:
    """The seconds; infinity for "auto"."""
    if grace is None:
        return 0.0
    if grace == "auto":
        return math.inf
    if not 0 <= arguments.real_number(InvalidRequest, "grace", grace) < math.inf:
        raise InvalidRequest(f'grace: must be seconds >= 0, or "auto", got {grace}')
    return float(grace)


class FlatCalls(WorkerConnection):
    """A worker that declares, pushes and pulls whole buffers."""

    @cached_property
    def vectors(self) -> VectorCalls:
        """The calls for server-side vectors."""
        return VectorCalls(self._config, self._session, self._shards, self.operation, lambda: self._exchange is not None)

    def declare_tensors(
        self,
        tensors: Sequence[TensorSpec],
        groups: Sequence[GroupSpec],
        *,
        initial: Callable[[FlatBuffers], None],
        is_lending: bool = False,
        reads_planes: bool = False,
        tables: Sequence[SparseTableSpec] = (),
        is_learner: bool = False,
        sample: float | None = None,
        exchange_kind: type[ParameterExchange] = ParameterExchange,
        **job: Unpack[JobKeywords],
    ) -> None:
        """Declare flat tensors, and tables, whose rows `pull_rows` fetches. Afterwards `parameters` hold the job's values.

        Args:
            initial: writes this worker's initial values into the buffers.
            is_lending: as in ParameterPlaces.
            reads_planes: as ParameterPlaces.read_planes says: `parameters` may then be other buffers after each pull, which
                cannot be written to.
            is_learner: pushes are differences, of many steps: with a quorum, too, they count as a whole or not at all; and each
                has the note `learner`.
            sample: share of the learners that takes part in a round; None: all.
            exchange_kind: the class of the worker's data plane.
        """
        with self.operation("declare"):
            if self._exchange is not None:
                raise InvalidRequest(f"declare: this connection has declared its job already. {ONE_JOB}")
            spec = self._spec(tensors, groups, tables, job, is_learner=is_learner, sample=sample)
            layout = Layout(spec, len(self._shards.lanes))
            sharing = self._session.prepare_lanes()
            exchange = exchange_kind(
                self.rank,
                self._config.wait_timeout_s,
                self._session,
                self._shards,
                layout,
                sharing,
                is_lending=is_lending,
                is_learner=is_learner,
            )
            if reads_planes:
                exchange.places.read_planes()
            initial(exchange.parameters)
            tensor = exchange.parameters.first_nonfinite()
            if tensor is not None:
                raise NonFiniteGradient(
                    f"worker {self.rank}: the initial value of {tensor!r} holds NaN or infinity", rank=self.rank, tensor=tensor
                )
            self._session.declare(spec, exchange.parameters, exchange.pull_all)
            self._exchange = exchange

    def _spec(
        self,
        tensors: Sequence[TensorSpec],
        groups: Sequence[GroupSpec],
        tables: Sequence[SparseTableSpec],
        job: JobKeywords,
        *,
        is_learner: bool,
        sample: float | None,
    ) -> JobSpec:
        """The declaration. Raises InvalidRequest or InvalidTensor for what is wrong; JobKeywords say what is right."""
        default = job_defaults()
        mode = default.consistency_of(job.get("consistency"))
        reduction, quorum, aggregation = job.get("reduce"), job.get("quorum"), job.get("aggregation")
        grace = _grace_of(job.get("grace"))
        clip_norm, nan_policy = job.get("clip_norm"), job.get("nan_policy", DEFAULTS["nan_policy"])
        if quorum is None:
            quorum = default.quorum if mode.has_rounds else 0
        elif arguments.whole_number(InvalidRequest, "quorum", quorum) == 0:
            raise InvalidRequest(f"quorum: must be 1 to world_size ({self.world_size}), or None for all workers, got 0")
        if clip_norm is not None and not arguments.real_number(InvalidRequest, "clip_norm", clip_norm) > 0:
            raise InvalidRequest(f"clip_norm: must be > 0, or None for no clipping, got {clip_norm}")
        arguments.choice(InvalidRequest, "nan_policy", nan_policy, NAN_POLICIES)
        if aggregation is None:
            needs_exact = clip_norm is not None or nan_policy == "skip" or any(group.is_layerwise for group in groups)
            needs_exact = needs_exact or any(tensor.merge for tensor in tensors) or grace > 0 or sample is not None
            needs_exact = needs_exact or (is_learner and 0 < quorum < self.world_size)
            aggregation = "fast" if not mode.has_rounds else "exact" if needs_exact else default.aggregation
        if is_learner and 0 < quorum < self.world_size and aggregation == "fast":
            raise InvalidRequest(
                f"aggregation: is fast, but with a quorum ({quorum} of {self.world_size}) a learner's difference must count as "
                "a whole or not at all, which exact does"
            )
        staleness = parse_staleness(job.get("staleness"))
        return JobSpec(
            world_size=self.world_size,
            tensors=tuple(tensors),
            groups=tuple(replace(group, staleness="" if group.is_static else staleness) for group in groups),
            consistency=mode,
            reduction=arguments.choice(
                InvalidRequest, "reduce", default.reduction if reduction is None else reduction, REDUCTIONS
            ),
            quorum=int(quorum),
            aggregation=arguments.choice(InvalidRequest, "aggregation", aggregation, AGGREGATIONS),
            clip_norm=float(clip_norm or 0.0),
            nan_policy=nan_policy,
            grace=grace,
            sample=sample or 0.0,
            tables=tuple(tables),
            compression=Compression.of(*(job.get(name, DEFAULTS.get(name)) for name in _OF_COMPRESSION)),
        )

    def keep_buffers(self, fill: Callable[[int], None]) -> None:
        """Send buffers whenever they are due. `fill` writes them into their tensors' views in `parameters`.

        fill: called with `times_gone_back`. If that has grown, it must write nothing: the views hold the checkpoint's buffers.
        """
        self.declared.buffers.fill = fill

    @property
    def times_gone_back(self) -> int:
        """Times that the job has gone back to a checkpoint since it was declared; `parameters` then hold the checkpoint's."""
        return self.declared.times_gone_back

    @property
    def nan_policy(self) -> str:
        """The declared nan_policy: "refuse", "skip" or "allow"."""
        return self.declared.parameters.layout.spec.nan_policy

    @property
    def is_skipped(self) -> bool:
        """True if the round of the last push has changed nothing on any shard, because a gradient or a norm was not finite.

        Known after the pull that follows the push. Without rounds it is this worker's push that was left out.
        """
        return self._exchange is not None and self._exchange.is_skipped

    def pull_flat(self) -> None:
        """Pull into `parameters`, whose contents are undefined if this fails."""
        with self.operation("pull"):
            self.declared.pull()

    def pull_rows(
        self, wanted: Mapping[int, NDArray[Any]], *, counts_no_use: bool = False, turn: Turn | None = None
    ) -> dict[int, NDArray[np.float32]]:
        """Pull rows of tables, in one round trip to each shard: new arrays of shape (*ids.shape, dim), by table.

        Args:
            wanted: ids by index of the table: int64 or uint64, of any shape. Each distinct id is sent once.
            counts_no_use: for evaluation: do not mark the rows as used.
            turn: the call's turn, if it is made in another thread, for which `take_turn` has reserved the connection.
        """
        if self._turn is None and not counts_no_use and (found := self.declared.rows.take(wanted)):
            self._check_usable("pull of rows")
            return found
        with self.operation("pull of rows", turn=turn):
            return self.declared.pull_rows(wanted, counts_no_use=counts_no_use)

    def prefetch_rows(self, wanted: Mapping[int, NDArray[Any]]) -> None:
        """Ask for rows with the next push_pull: then `pull_rows` of the same ids, after it, needs no round trip."""
        self.declared.rows.prefetch(wanted)

    def rows_by_shard(self, rows: Gradients) -> list[list[TableRows]]:
        """Gradients of rows in the form that `Feed.finish` takes. Do not change them before the feed's push has ended."""
        return self.declared.rows.gradients(rows).by_shard

    def set_parameters(self, write: Callable[[FlatBuffers], None]) -> None:
        """Set the job's parameters to what `write` writes. All workers must call it, with the same values, at the same step.

        When it returns, `parameters` hold these values.
        """
        with self.operation("load_parameters"):
            self.declared.load(lambda load: load.run(write))

    def put_flat(self, write: Callable[[FlatBuffers], None], present: NDArray[np.bool_] | None, put: bytes) -> int:
        """Publish what `write` writes into the gradient buffers; return its version. For an exchange of kind ValueExchange.

        Args:
            present: (tensors,) those that this worker publishes; None: all. put: as in CommitRequest.
        """
        with self.operation("put"):
            exchange = self.declared
            assert isinstance(exchange, ValueExchange)
            exchange.confirm()
            write(exchange.gradients)
            scalars = [()] * len(exchange.gradients.layout.spec.groups)
            return exchange.put(WorkerGradient(scalars, 1, present, put=put))

    def set_slots(self, given: Mapping[int, SlotValues], job_part: JobPart | None = None) -> None:
        """Set the slots of tensors, by the tensors' index; let the slots of all other tensors, and of rows, begin anew.

        All workers must call it, with the same values, at the same step.

        Args:
            job_part: the part in which the tensors are: slots of other parts, and of rows, stay.
        """
        groups = None if job_part is None else job_part.groups
        with self.operation("reset_slots"):
            self.declared.load(lambda load: load.run_slots(given, groups))

    def slots(self) -> dict[int, SlotValues]:
        """The slots of the tensors whose rule has any, by the tensors' index, at the worker's clock."""
        with self.operation("state_dict"):
            return self.declared.slots()

    def push_pull_flat(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float = 1,
        present: NDArray[np.bool_] | None = None,
        rows: Gradients | None = None,
        *,
        skip: bool = False,
        job_part: JobPart | None = None,
        turn: Turn | None = None,
        spare: Spare | None = None,
    ) -> None:
        """Push `gradients` and pull into `parameters`, whose contents are undefined if this fails, in one round trip.

        Args:
            scalars: the rule's scalars for each group, in the order of the rule's list.
            weight: number of samples from which the gradients were computed.
            present: (tensors,) which tensors have a gradient; None: all. The views of others in the same groups are zeroed.
            rows: gradients of rows of tables; copied if they are needed later.
            skip: the gradients are not finite: skip the round. For jobs with nan_policy="skip".
            job_part: the part of the job to step: `present` and `rows` have nothing of others, and the gradients of others in
                the buffers stay. All workers step the parts in the same order. Not with `is_lending`.
            turn: the call's turn, if it is made in another thread, for which `take_turn` has reserved the connection.
            spare: of a learner, which goes on meanwhile; noted in it is when the round was decided.
        """
        with self.operation("push_pull", turn=turn):
            self.declared.push_pull(WorkerGradient(scalars, weight, present, rows, skip, part=job_part, spare=spare))

    def learn_clock(self, turn: Turn) -> None:
        """Go on at the job's clock, if others have closed rounds without this worker; `parameters` stay."""
        with self.operation("look for the clock", turn=turn):
            self.declared.learn_clock()

    def take_back(self, since: int, groups: Collection[int]) -> None:
        """Keep of `gradients` what has counted of the last push, a learner's, of the clock `since` or later, which came late.

        The rest is to be sent as a part of another: it becomes 0, and what encoding it has done to residuals is undone.

        groups: that were pushed. The gradients of others may be those of a push before, whose learner has not looked at it yet.
        """
        exchange = self.declared
        late = exchange.learner.late_blocks(since, groups, exchange.gradients.layout)
        if exchange.encoder is not None:
            exchange.encoder.take_back(late, since)
        for block in late:
            exchange.gradients.block(block).fill(0)

    @property
    def sits_out(self) -> bool:
        """True if the job chooses who takes part in a round, and at the last `learn_clock` not this worker."""
        return self._session.sits_out

    @property
    def learner(self) -> LearnerRider:
        """The note that goes with a learner's pushes, and what it has heard of the other learners."""
        return self.declared.learner

    def take_turn(self, turn: Turn) -> None:
        """Reserve the connection for a call that another thread will make, before that thread is started: the call comes after
        those already made, and before those made from now on."""
        turn.before, self._turn = self._turn, turn

    def begin_feed(self, feed: Feed) -> None:
        """Reserve the connection for `push_pull_feed`, before the thread that calls it starts: later calls come after it."""
        self._session.orders.check_end(self.clock)
        self.take_turn(feed)
        self._untold = None

    def push_pull_feed(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float,
        feed: Feed,
        on_received: Callable[[int], None],
        versions_read: Sequence[int] | None = None,
    ) -> None:
        """Push and pull as `push_pull_flat` does, while the gradients are still being computed. Call it in another thread.

        Once the feed is finished, other calls wait until this one has ended.

        Args:
            feed: says which blocks of `gradients` are ready. The shards check for NaN.
            on_received: called, in any thread, with the index of each block of `parameters` that was received; again, if it is
                received again.
            versions_read: by block, the version from which the gradients were computed; None: the versions received last.
        """
        try:
            with self.operation("push_pull", turn=feed):
                receiving = self.receiving
                receiving.on_received = on_received
                try:
                    self.declared.push_pull(WorkerGradient(scalars, weight, feed=feed, versions_read=versions_read))
                finally:
                    receiving.on_received = None
        except Exception as error:
            self._untold = None if isinstance(error, Aborted) else error
            raise
        finally:
            if self._turn is feed:
                self._turn = None
            feed.ended.set()

    def forget_failure(self) -> None:
        """Note that the program knows of the last push's failure."""
        self._untold = None
