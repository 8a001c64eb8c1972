"""Restoration: a shard takes its state from a checkpoint, at its start or because another shard has lost its own.

A shard that starts with no state of its own, and finds a checkpoint, loads it and is *tentative*: it cannot know whether the
other shards are further ahead. The workers can: they bring all shards together on one checkpoint and a new *timeline*, by
Rollback (psd_client/worker/session/timeline.py). Nothing else is done on a tentative shard, so states are never mixed.

The job that goes on may have another consistency mode than the one that was stored. Every worker's clock is the checkpoint's
step, which all workers had finished; with rounds it is every block's version, too. Without rounds a version counts updates:
about one for each step of each worker, and not quite the same number for every block. The number of updates that each segment
has seen, with which rules correct their means, is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from psd.checkpoint import (
    CheckpointDirectory,
    Manifest,
    ParameterSource,
    RestoredBlock,
    StoredTable,
    ValueRows,
    directory_at,
    open_parameters,
    parameter_blocks,
    table_values,
)
from psd.checkpoint.cut import ORDER_MAX, CutName
from psd.contract.config import ConfigError
from psd.contract.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    ForeignRun,
    InternalError,
    InvalidRequest,
    NonFiniteGradient,
    OutOfSpace,
    PsdError,
    RolledBack,
    SpecMismatch,
)
from psd.contract.integers import INTEGER_MAX, drawn_integer
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.orders import scale_at
from psd.state.aggregation.rules import check_listed
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.job import Job
from psd.state.life import Life
from psd.state.tables.filling import fill
from psd.state.tables.partition import PartitionState
from psd.state.tables.slots import WholeRows, as_trained_by_nobody
from psd.state.workers.membership import Membership
from psd.v1 import control_pb2
from psd_core import first_nonfinite
from psd_core.arena import StoreFull
from psd_core.vector import Piece
from psd_core.vector_operations import VectorOperation

logger = logging.getLogger(__name__)

VERSION_MAX = ORDER_MAX
"""Largest version that a restored publication may become."""


class Restoration:
    """Loads checkpoints into a shard: those in `directory` or, if it has none, those of --from-checkpoint."""

    def __init__(self, core: ShardCore, cuts: Cuts, directory: CheckpointDirectory | None) -> None:
        config = core.config
        self._core = core
        self._cuts = cuts
        self._directories = [directory] if directory is not None else []
        if config.from_checkpoint and not config.parameters_only:
            self._directories.append(directory_at(config.from_checkpoint))
        self._parameters: ParameterSource | None = None

    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint to begin with. Raises CheckpointFailed or CheckpointUnsupported if it cannot tell."""
        return any(directory.newest() is not None for directory in self._directories)

    def begin(self) -> str | None:
        """Load the newest checkpoint, at the start of a shard that holds nothing, and return its name. Without one, open the
        parameters of --parameters-only, and return None.

        Raises:
            ConfigError: the checkpoint's job names a rule that is not listed; or --from-checkpoint has no checkpoint.
            CheckpointFailed, CheckpointCorrupt, CheckpointUnsupported: what there is cannot be read.
        """
        config = self._core.config
        name = self.load_newest()
        if name is None and config.parameters_only:
            self._parameters = open_parameters(config.from_checkpoint)
        elif name is None and config.from_checkpoint:
            raise ConfigError(f"--from-checkpoint: no checkpoint in {self._directories[-1].location} can be read")
        return name

    def give_values(self, job: Job) -> bool:
        """Set the parameters of a job that is just declared, and not served yet, by --parameters-only; False without that flag.

        Raises:
            SpecMismatch: the parameters are not those of the job. NonFiniteGradient, CheckpointFailed, CheckpointCorrupt,
                OutOfSpace.
        """
        source = self._parameters
        if source is None:
            return False
        for block, values in parameter_blocks(source, job.layout, self._core.config.shard_index):
            element = first_nonfinite(values) if values.dtype.kind == "f" else -1
            if element >= 0:
                tensor = job.layout.tensor_at(block, element)
                raise NonFiniteGradient(f"the value of {tensor!r} in {source.location} holds NaN or infinity", tensor=tensor)
            job.blocks[block.index].begin(job.blocks[block.index].prepare(values))
        if job.tables is not None:
            shares = table_values(source, job.layout, self._core.config.shard_index)
            for partition, (count, pieces) in zip(job.tables.partitions, shares, strict=True):
                used = partition.next_clock(job.tables.step)
                fill(partition, _checked(partition, pieces, source.location, used), count, clock=used)
            job.tables.begin(0)
        logger.info("the job begins with the parameters of %s", source.location)
        return True

    def load_newest(self) -> str | None:
        """Load the newest checkpoint that can be read, and become tentative. Return its name, or None if there is none.

        Raises:
            ConfigError: its job names a rule that is not listed.
        """
        for directory in self._directories:
            if name := self._load_newest_of(directory):
                return name
        if self._core.life.now is Life.LOST:
            with self._core.lock:
                self._core.restored_from = ""
                self._core.become(Life.EMPTY)
        return None

    def _load_newest_of(self, directory: CheckpointDirectory) -> str | None:
        manifest = directory.newest()
        while manifest is not None:
            try:
                self._load(manifest, Life.TENTATIVE, timeline=manifest.timeline)
            except CheckpointCorrupt as error:
                logger.error(  # noqa: TRY400 - the reason says it all
                    "checkpoint %s cannot be used, going back to the one before: %s", manifest.name, error
                )
                manifest = directory.newest(before=manifest.name)
            except InvalidRequest as error:
                raise ConfigError(f"--rule: checkpoint {manifest.name} holds a job that needs it: {error}") from error
            else:
                return manifest.name
        return None

    def give_up_lost_round(self) -> None:
        """EXACT: if a round has lost a gradient for good, load the newest checkpoint, as if everything had been lost; workers
        then bring all shards back to it.

        Without a checkpoint, calls that wait for the round get StateLost.
        """
        core = self._core
        if core.life.now is not Life.DAMAGED:
            return
        with core.job_lock:
            if core.life.now is not Life.DAMAGED:
                return  # a worker's Rollback came first
            job = core.declared()
            logger.error("%s", core.lost_round)
            try:
                self.load_newest()
            except (PsdError, ConfigError, OSError) as failure:
                logger.error("cannot go back to a checkpoint: %s", failure)  # noqa: TRY400 - the reason says it all
            except Exception:
                logger.exception("cannot go back to a checkpoint, by a defect")
            if core.job is job:
                with core.lock:
                    core.become(Life.STRANDED)
                job.settle()

    def rollback(self, request: control_pb2.RollbackRequest) -> None:
        """Begin a timeline from a checkpoint. Does nothing if this shard is on that timeline, or on a later one, or is in
        another incarnation than the worker has found.

        Raises:
            InvalidRequest: there is no such timeline.
            CheckpointFailed, CheckpointCorrupt: the checkpoint cannot be read here; the shard is as it was. If it is damaged or
                gone, trying again would not help: the error names another one.
        """
        core = self._core
        if request.version > VERSION_MAX:
            raise InvalidRequest(f"version: {request.version} is above the limit of {VERSION_MAX}")
        if request.timeline > INTEGER_MAX:
            raise InvalidRequest(f"timeline: {request.timeline} is above the limit of {INTEGER_MAX}")
        with core.job_lock:
            with core.lock:
                if core.run_id and request.run_id and request.run_id != core.run_id:
                    raise ForeignRun(f"run_id: this shard serves run {core.run_id!r}, not {request.run_id!r}")
                if (core.timeline >= request.timeline and not core.is_tentative) or request.incarnation != core.incarnation:
                    return
                is_there = core.life.now is Life.TENTATIVE and core.restored_from == request.checkpoint
                is_there = is_there and not core.declared().spec.is_publication  # which is to have another version
                if is_there:
                    core.members.on_gone_back(request.workers, core.now())
                    core.timeline = request.timeline
                    core.declared().arena.set_word("timeline", request.timeline)
                    core.become(Life.RESTORED)
                    self._begin_incarnation()
            if not is_there:
                try:
                    manifest = self._readable(request.checkpoint).load(request.checkpoint)
                    version = request.version if manifest.spec.is_publication else 0
                    self._load(manifest, Life.RESTORED, timeline=request.timeline, workers=request.workers, version=version)
                except CheckpointCorrupt as error:
                    error.detail["instead"] = self._instead_of(request.checkpoint)
                    raise
        # A tentative shard has logged its checkpoint already; any other shard gives up later steps now.
        level = logging.DEBUG if is_there else logging.WARNING
        logger.log(level, "went back to checkpoint %s; timeline %d begins", request.checkpoint, request.timeline)

    def _instead_of(self, checkpoint: str) -> str:
        """The newest checkpoint before this one, which cannot be read here, or else the newest of all; "" if there is none."""
        if CutName.of(checkpoint) is None:
            return ""
        try:
            directory = self._readable(checkpoint)
            found = directory.newest(before=checkpoint) or directory.newest()
        except PsdError:
            return ""
        return found.name if found is not None and found.name != checkpoint else ""

    def redeclare(self, spec: JobSpec) -> None:
        """Load the restored checkpoint again for another spec: the first declaration after a restore may change workers,
        consistency, reduction and the treatment of staleness.

        Raises:
            SpecMismatch: the tensors or the groups are not those of the checkpoint.
            CheckpointFailed, CheckpointCorrupt: the checkpoint cannot be read any more.
        """
        core = self._core
        stored = core.declared().spec
        if difference := stored.difference_from_stored(spec, core.restored_from):
            raise SpecMismatch(f"{difference}. {core.how_to_begin_afresh}")
        manifest = self._readable(core.restored_from).load(core.restored_from)
        version = core.declared().version_min if stored.is_publication else 0
        self._load(manifest, Life.RESTORED, timeline=core.timeline, spec=spec, members=core.members, version=version)

    def _load(
        self,
        manifest: Manifest,
        following: Life,
        *,
        timeline: int,
        spec: JobSpec | None = None,
        members: Membership | None = None,
        workers: Sequence[int] = (),
        version: int = 0,
    ) -> None:
        """Load everything from a checkpoint, for the job as it was stored, or with the spec and members given. It becomes this
        version, or that of the checkpoint's step if that is later.

        Every byte is checked before the present state is given up. If reading fails after that, the shard has lost its state,
        and is tentative: the next worker brings it to a checkpoint again. Files are read without the shard's lock.
        """
        core, step = self._core, max(manifest.step, version)
        spec = spec if spec is not None else manifest.spec
        check_listed(spec, core.rules)
        if core.job is not None:
            layout = Layout(spec, core.config.shard_count)
            for _ in self._blocks(manifest, layout):
                pass
            for table in self._tables(manifest, layout):
                for _ in table:
                    pass
            for _ in self._vectors(manifest):
                pass
        if members is None:
            members = core.new_members(spec.world_size)
        self._give_up(manifest, timeline, members, step)
        try:
            job = core.make_job(spec, members, manifest.name)
            for restored in self._blocks(manifest, job.layout):
                block = job.blocks[restored.block.index]
                has_rounds = job.policy.has_rounds and block.plan.trained
                block.restore(restored._replace(version=step) if has_rounds else restored)
            if job.tables is not None:
                for partition, stored in zip(job.tables.partitions, self._tables(manifest, job.layout), strict=True):
                    history = stored.history if stored.history.size else None
                    fill(partition, stored, stored.count, step=stored.step, clock=stored.clock, history=history)
                job.tables.begin(manifest.step)
            self._fill_vectors(manifest, max(spec.world_size, core.config.limits.workers_max))
            keeps_states = core.config.shard_index == job.layout.client_state_shard
            core.client_states.begin(manifest.client_states if keeps_states else {})
            if core.config.shard_index == 0:
                with core.lock:
                    core.orders.on_restore(manifest.learning_rates)
                    scale = scale_at(core.orders.learning_rates_from(manifest.step), manifest.step)
                if scale != 1.0:
                    logger.warning("the learning rate is scaled by %g, as it was at checkpoint %s", scale, manifest.name)
        except (Exception, SystemExit) as error:  # a user's own rule may raise either
            core.storage.close(keep=False)
            with core.lock:
                core.become(Life.LOST)
                self._begin_incarnation()
            if isinstance(error, OSError):
                raise InternalError(f"--state-dir: cannot use {core.storage.directory}: {error}") from error
            raise
        with core.lock:
            if job.is_exact:
                job.arena.set_word("decided", step)
            job.arena.set_word("timeline", timeline)
            core.timeline, core.restored_version = timeline, version
            members.on_gone_back(workers, core.now())
            core.take_job(job, members)
            core.become(following)
            job.arena.set_word("initialized", 1)

    def _give_up(self, manifest: Manifest, timeline: int, members: Membership, step: int) -> None:
        """Give up the present job, if there is one. All sessions end, except those of `members`, which go on at `step`."""
        core = self._core
        with core.lock:
            if core.job is not None:
                self._cuts.forget(core.job)
            error = RolledBack(f"the job goes back to checkpoint {manifest.name}", timeline=timeline, checkpoint=manifest.name)
            for ticket in core.waiting.open():
                ticket.fail(error)
            core.revoke()
            if core.membership not in (None, members):
                self._begin_incarnation()
            members.on_restore(step)
            core.job, core.membership, core.gates = None, members, []
            core.become(Life.LOADING)
            core.initial = core.new_initial()
            core.run_id = core.run_id or manifest.run_id
            core.restored_from = manifest.name

    def _begin_incarnation(self) -> None:
        self._core.incarnation = drawn_integer()

    def _blocks(self, manifest: Manifest, layout: Layout) -> Iterator[RestoredBlock]:
        """A checkpoint's blocks for this shard, without the dedup windows, because no session of then goes on."""
        for restored in self._readable(manifest.name).read_blocks(manifest, layout, self._core.config.shard_index):
            yield restored._replace(sessions=None, clocks=None)

    def _tables(self, manifest: Manifest, layout: Layout) -> list[StoredTable]:
        """A checkpoint's tables, with this shard's rows."""
        directory, index = self._readable(manifest.name), self._core.config.shard_index
        return [directory.read_table(manifest, layout, index, table) for table in range(len(layout.spec.tables))]

    def _vectors(self, manifest: Manifest) -> Iterator[Piece]:
        """This shard's elements of a checkpoint's vectors."""
        config = self._core.config
        return self._readable(manifest.name).read_vectors(manifest, config.shard_index, config.shard_count)

    def _fill_vectors(self, manifest: Manifest, workers: int) -> None:
        """Make and fill the vectors of a checkpoint, for at most so many workers; OutOfSpace if the machine lacks room."""
        storage = self._core.storage
        if not manifest.vectors:
            return
        storage.make_vectors(workers)
        assert storage.vectors is not None
        try:
            for spec in manifest.vectors:
                storage.vectors.create_vector(spec)
            for piece in self._vectors(manifest):
                storage.vectors.run([VectorOperation("put", piece.spec.name, start=piece.start, values=piece.values)])
        except StoreFull as error:
            raise OutOfSpace(f"{storage.directory} has no room for vectors: {error.strerror}") from error

    def _readable(self, checkpoint: str) -> CheckpointDirectory:
        """The directory that has this checkpoint, or the first one if none has it; CheckpointFailed without directories."""
        if not self._directories:
            raise CheckpointFailed("checkpoint: this shard was started without --checkpoint-dir and cannot read one")
        return next((directory for directory in self._directories if directory.has(checkpoint)), self._directories[0])


def _checked(partition: PartitionState, pieces: Iterator[ValueRows], location: str, used: int) -> Iterator[WholeRows]:
    """The rows that a table begins with, marked as used at that clock; NonFiniteGradient if a value is not finite."""
    for ids, values in pieces:
        element = first_nonfinite(values.reshape(-1))
        if element >= 0:
            name, key = partition.spec.name, ids[element // partition.spec.dim]
            raise NonFiniteGradient(f"the value of table {name!r} in {location} holds NaN or infinity (id {key})", tensor=name)
        yield as_trained_by_nobody(partition.store, ids, values, used)
