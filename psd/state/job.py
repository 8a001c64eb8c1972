"""A declared job on one shard: layout, policy, blocks, and the members of its rounds.

Must not know sessions, leases or tickets.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from psd.contract.config import Limits
from psd.contract.custom_rules import ListedRule
from psd.contract.errors import BlockOutOfRange, InvalidRequest, LayoutMismatch, StateLost
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block, Layout
from psd.contract.layout_message import layout_message
from psd.state import pages
from psd.state.aggregation.agreement import Agreement, Scalars
from psd.state.aggregation.block import BlockServices, BlockState
from psd.state.aggregation.consistency import policy_of
from psd.state.aggregation.corrected_rounds import CorrectedRound
from psd.state.aggregation.directed_rounds import DirectedRound
from psd.state.aggregation.exact_rounds import ExactRound, MeasuredRound
from psd.state.aggregation.offered_buffers import Offered
from psd.state.aggregation.rounds import FastRound, Round
from psd.state.aggregation.rules import check_listed
from psd.state.aggregation.sampling import Sampling
from psd.state.aggregation.settlement import Coordinator, Participant
from psd.state.aggregation.small_block import SmallBlock, small_blocks, terms_of
from psd.state.aggregation.staleness import bound_rule
from psd.state.aggregation.trained import RoundServices, Trained
from psd.state.counts import Histogram, RoundTimes, total
from psd.state.durability.state_directory import Storage
from psd.state.kept_versions import KeptVersions
from psd.state.pages import Counted
from psd.state.tables.block import TablesBlock
from psd.state.tables.partition import counted_in
from psd.state.tables.rounds import RowChecks
from psd.state.workers.learners import Learners
from psd.state.workers.membership import Membership
from psd.v1 import job_pb2
from psd_core.arena import Arena, BlockShape, Page
from psd_core.steps import Steps
from psd_core.table import TableSnapshot, TableStore

logger = logging.getLogger(__name__)

_TIME, _WORD = struct.Struct("<d"), struct.Struct("<Q")


class Job:
    """A declared job on one shard.

    Args:
        arena_of: makes, or finds again, the arena for blocks of these shapes. stores_of: does so for the tables' stores.
        on_lost: as in RoundServices.
        rules: the users' own rules that are listed on this shard.
        storage: keeps verdicts beside the arena.
        now: returns monotonic seconds. wall: returns seconds since 1970.

    Raises:
        InvalidRequest: the job names a rule that is not listed on this shard.

    Attributes:
        blocks: this shard's blocks by index. tables: the block that stands for its part of the tables; None without any.
        block_count: both. trained_count: those that every push must cover. is_trained: there are some, here or on other shards.
        tables_index: index of the tables' block; None without any.
        buffer_blocks: those of them that workers compute. wants_buffers: some worker is to call StoreBuffers.
        wants_all_buffers: each of them is.
        is_cut_by_positions: cuts are positions of the workers; see psd/state/cuts/positions.py.
        agreement: SYNC: scalars and parts of the open rounds.
        kept: versions that readers have.
        steps: its part here, for steps; None until a worker is armed. See psd/state/desks/steps.py.
        coordinator: EXACT, on shard 0 only. participant: EXACT, on all shards. See settlement.py.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        shard_index: int,
        shard_count: int,
        membership: Membership,
        arena_of: Callable[[Layout, list[BlockShape]], Arena],
        stores_of: Callable[[], list[TableStore]],
        limits: Limits,
        on_lost: Callable[[StateLost], bool],
        rules: Mapping[str, ListedRule],
        storage: Storage,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        check_listed(spec, rules)
        self.kept = KeptVersions(limits.keep_versions)
        self._passed = 0  # latest version of a publication that was lost
        self.spec = spec
        self.layout = Layout(spec, shard_count)
        self.policy = policy_of(spec)
        self.is_exact = spec.aggregation == "exact"
        bound = {
            index: bound_rule(group, rules)
            for index, group in enumerate(spec.groups)
            if index not in {table.group for table in spec.tables}
        }
        self._infos = [group.info for group in spec.groups]
        plans = self.layout.blocks_of(shard_index)
        first = next((plan for plan in plans if plan.trained), None)  # it measures who is late; other blocks see much the same
        self.arena = arena_of(
            self.layout,
            [
                BlockShape(
                    plan.dtype.name,
                    plan.length,
                    len(bound[plan.group].slot_starts),
                    len(plan.segment_ends),
                    int(plan.has_differences),
                )
                for plan in plans
            ],
        )
        sampling = Sampling(spec.sample, self.layout.digest, membership) if spec.sample else None
        on_passed = self._note_passed if spec.is_publication else None
        rounds = RoundServices(membership, self.policy, spec.reduction == "mean", on_lost, sampling, on_passed)
        on_awaited = partial(_add_awaited, membership)
        services = BlockServices(
            self.arena,
            rounds,
            round_kind_of(spec),
            self.layout.tensor_at,
            self.kept.forget,
        )
        small = small_blocks(spec, services.round_kind, plans)
        self.blocks: dict[int, BlockState] = {}
        for slot, plan in enumerate(plans):
            group, times = spec.groups[plan.group], RoundTimes(now, on_awaited if plan is first else None)
            if plan.index in small:
                terms = terms_of(plan, spec, self.policy)
                self.blocks[plan.index] = SmallBlock(
                    plan, slot, bound[plan.group], services, terms, now, measures_ranks=plan is first
                )
                continue
            offered = Offered() if "mean" in group.flags and group.is_of_buffers else None
            self.blocks[plan.index] = BlockState(
                plan, slot, bound[plan.group], services, times, self._ratio_places(plan), offered
            )
        trained_blocks = [b for b in self.blocks.values() if b.plan.trained]
        self._trained: list[Trained] = [*trained_blocks]
        self.tables: TablesBlock | None = None
        self.tables_index = self.layout.tables_block(shard_index)
        if self.tables_index is not None:
            checks = RowChecks(spec, shard_index, shard_count, limits)
            self.tables = TablesBlock(
                self.tables_index, spec, stores_of(), rounds, checks, now, wall, rules, measures_ranks=first is None
            )
            self._trained.append(self.tables)
        self.block_count = len(self.blocks) + (self.tables is not None)
        self.trained_count = len(self._trained)
        self._pushed_to: dict[int, BlockState | TablesBlock] = {block.index: block for block in trained_blocks}
        if self.tables is not None:
            self._pushed_to[self.tables.index] = self.tables
        self.buffer_blocks = {index: b for index, b in self.blocks.items() if spec.groups[b.plan.group].is_of_buffers}
        self.wants_buffers = any(group.is_of_buffers for group in spec.groups) or bool(self.layout.untrained_shards)
        self.wants_all_buffers = any(group.is_of_buffers and "mean" in group.flags for group in spec.groups)
        self.is_trained = bool(spec.tables) or any(block.trained for block in self.layout.blocks)
        self.is_cut_by_positions = self.is_trained and not self.policy.has_rounds
        self.participant = Participant(spec, self._trained)
        self.coordinator: Coordinator | None = None
        if self.is_exact and shard_index == 0:
            with_blocks = {self.layout.shard_of(block.index) for block in self.layout.blocks if block.trained}
            measuring = shard_count if spec.tables else len(with_blocks)
            self.coordinator = Coordinator(spec, self.policy, membership, sampling, self.arena, storage, measuring, now)
        self.learners = Learners()
        self.agreement = Agreement(self._infos, lambda: self.version_min)
        self.steps: Steps | None = None
        self._fit_scalars: Scalars | None = None  # the last ones that were found valid: the next ones mostly equal them
        self._shard_index = shard_index

    def _note_passed(self, version: int, error: StateLost) -> None:
        """Log, once for all blocks, that a publication was lost."""
        if version > self._passed:
            self._passed = version
            logger.warning("version %d was not published, and nobody will read it: %s", version, error)

    def _ratio_places(self, plan: Block) -> NDArray[np.intp] | None:
        tensors = np.array(self.spec.ratio_tensors, np.int64)
        places = np.searchsorted(tensors, plan.segment_tensors)
        is_of_them = np.isin(plan.segment_tensors, tensors)
        return np.where(is_of_them, places, -1) if is_of_them.any() else None

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_digest(self, digest: bytes) -> None:
        """Raise LayoutMismatch unless the caller's layout equals this shard's."""
        if digest != self.layout.digest:
            raise LayoutMismatch(
                f"layout_digest: {digest.hex()[:32] or 'empty'} is not this job's {self.layout.digest.hex()}; "
                "do all workers and shards run the same version of psd?"
            )

    def block(self, index: int) -> BlockState:
        """The block of that index; BlockOutOfRange if it is not this shard's."""
        try:
            return self.blocks[index]
        except KeyError:
            total = len(self.layout.blocks)
            if index == self.tables_index:
                raise BlockOutOfRange(f"block: {index} is the tables' block, which has rows and no values") from None
            where = f"there are {total}" if index >= total else f"shard {self.layout.shard_of(index)} owns it"
            raise BlockOutOfRange(f"block: {index} is not on shard {self._shard_index}; {where}") from None

    def trained(self, index: int) -> BlockState | TablesBlock:
        """The block of that index, which may be the tables' block, for a push.

        Raises:
            BlockOutOfRange: it is not this shard's. InvalidRequest: nothing is pushed to it.
        """
        found = self._pushed_to.get(index)
        if found is None:
            group = self.block(index).plan.group
            raise InvalidRequest(f"block: {index} belongs to static group {group}, to which nothing is pushed")
        return found

    def place_of(self, index: int) -> int:
        """The place of a trained block among all that are trained here."""
        return next(place for place, block in enumerate(self._trained) if block.index == index)

    @cached_property
    def layout_message(self) -> job_pb2.ShardLayout:
        """This shard's part of the layout, as sent to workers and readers."""
        return layout_message(self.layout, self._shard_index)

    def read_from(self, indexes: Sequence[int]) -> list[Trained]:
        """The blocks of these indexes, in their order; without indexes, all blocks."""
        if not indexes:
            return [*self.blocks.values(), *([] if self.tables is None else [self.tables])]
        return [self.tables if self.tables is not None and i == self.tables_index else self.block(i) for i in indexes]

    def lacking(self, covered: Collection[int]) -> int:
        """The lowest index of a block that a push must cover and has not."""
        return min(block.index for block in self._trained if block.index not in covered)

    def note_cut(self, order: int) -> None:
        """Store the order of the latest cut, also for the shard's next process: the next cut's must be greater."""
        if order > self.arena.word("cut_order"):
            self.arena.set_word("cut_order", order)

    @property
    def left_at(self) -> float:
        """Time at which the last worker left, by its own clock, in seconds since 1970; 0: none has, or it did not say."""
        (found,) = _TIME.unpack(_WORD.pack(self.arena.word("left_at")))
        return float(found)

    def note_left(self, left_at: float) -> None:
        """Store when a worker has left, also for the shard's next process: it is the time of the final checkpoint."""
        (word,) = _WORD.unpack(_TIME.pack(max(left_at, self.left_at)))
        self.arena.set_word("left_at", word)

    def check_scalars(self, scalars: Scalars) -> None:
        """Raise InvalidRequest unless there is one entry per group, each valid for its rule."""
        if scalars == self._fit_scalars:
            return
        if len(scalars) != len(self._infos):
            raise InvalidRequest(f"scalars: expected {len(self._infos)} groups, got {len(scalars)}")
        for index, (info, values) in enumerate(zip(self._infos, scalars, strict=True)):
            info.check_scalars(values, self.spec.groups[index].flags, f"scalars[{index}]")
        self._fit_scalars = scalars

    def versions_read(self, versions: Sequence[int]) -> dict[int, int]:
        """The versions that the worker of a push has read, as its header says, by block index. May be empty.

        Raises:
            InvalidRequest: there are not as many versions as trained blocks; or none, and the job needs them.
        """
        if not self._trained:
            return {}
        if not versions and any(group.staleness for group in self.spec.groups):
            raise InvalidRequest("versions: are needed, because a group of the job has a staleness")
        if versions and len(versions) != len(self._trained):
            raise InvalidRequest(
                f"versions: expected one per trained block of the shard, {len(self._trained)}, got {len(versions)}"
            )
        return {block.index: version for block, version in zip(self._trained, versions, strict=False)}

    def held(self, held: Sequence[int]) -> dict[int, int]:
        """The versions that a worker holds of its shard's blocks, by index, of those of which it holds any.

        Raises:
            InvalidRequest: there are not as many entries as trained blocks, or the job pulls no differences.
        """
        if not held:
            return {}
        blocks = [index for index, block in self.blocks.items() if block.is_trained]
        if len(held) != len(blocks) or not self.spec.compression.has_differences:
            expected = f"{len(blocks)}, one per trained block" if self.spec.compression.has_differences else "none in this job"
            raise InvalidRequest(f"held: expected {expected}, got {len(held)}")
        return {index: version - 1 for index, version in zip(blocks, held, strict=True) if version}

    @property
    def ages(self) -> list[int]:
        """Number of gradients applied without rounds, by their age, as in StatusReply.ages."""
        totals: list[int] = []
        for block in self._trained:
            counts = list(block.ages.counts)
            totals += [0] * (len(counts) - len(totals))
            for bucket, count in enumerate(counts):
                totals[bucket] += count
        return totals

    @property
    def age_total(self) -> int:
        """The sum of the ages in `ages`."""
        return sum(block.ages.total for block in self._trained)

    @property
    def round_times(self) -> Histogram:
        """Seconds from the first gradient of a round to its update, of each block."""
        return total([block.times.closed for block in self._trained])

    @property
    def round_closed_at(self) -> float | None:
        """Time at which the last round of a block closed; None: none has, in this process."""
        found = [block.times.closed_at for block in self._trained]
        return max([at for at in found if at is not None], default=None)

    @property
    def updates(self) -> int:
        """Updates applied, summed over the blocks."""
        return sum(block.version for block in self._trained)

    @property
    def open_rounds(self) -> int:
        """Blocks with an incomplete round."""
        return sum(block.times.is_open for block in self._trained)

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def version_min(self) -> int:
        """Updates applied to the block that is furthest behind; 0 without trained blocks."""
        return min([b.version for b in self._trained], default=0)

    @property
    def version_max(self) -> int:
        """Updates applied to the block that is furthest ahead."""
        return max([b.version for b in self._trained], default=0)

    @property
    def trained_versions(self) -> tuple[int, ...]:
        """Distinct versions of the trained blocks, ascending. There is one unless a round is half closed."""
        return tuple(sorted({block.version - (not block.has_version) for block in self._trained}))

    def entry_round(self, rank: int) -> int:
        """The first round in which a new session of the rank can take part, as far as this shard's blocks tell.

        With fast aggregation a rank has one gradient in a round, and some blocks' open round may have an earlier session's.
        """
        if self.is_exact:
            return self.version_max
        return max((block.entry_round(rank) for block in self._trained), default=0)

    def counted(self, rank: int) -> Counted:
        """The latest push of a rank that counts in some block here, or will when its round closes."""
        is_committed = self.coordinator is not None and self.coordinator.has_committed(rank)
        return max((block.counted(rank, is_committed=is_committed) for block in self._trained), default=(0, 0))

    def last_counted(self, rank: int) -> Counted:
        """The last push of a rank that counts in the first block; others may be a round behind or ahead. Takes no lock."""
        return self._trained[0].last_counted(rank)

    def last_pushes(self, rank: int) -> set[Counted]:
        """The last pushes of a rank that count in the blocks here. There is one, unless some blocks lack their part of it."""
        return {block.last_counted(rank) for block in self._trained}

    def counted_on(self, of_blocks: Mapping[int, Page], of_tables: Collection[TableSnapshot]) -> list[Counted]:
        """The latest push of each rank that is counted in some of these pages, which are those of all blocks, or snapshots."""
        trained = [of_blocks[index] for index, block in self.blocks.items() if block.plan.trained]
        found = [pages.counted(trained)] if trained else []
        found += [counted_in(snapshot.notes) for snapshot in of_tables]
        return [max(counted) for counted in zip(*found, strict=True)] or [(0, 0)] * self.spec.world_size

    def settle_decisions(self) -> list[tuple[int, int]]:
        """Decide the rounds that are complete now; see Coordinator.settle. Under the shard's lock."""
        news = self.coordinator.settle() if self.coordinator is not None else []
        if self.coordinator is not None:
            self.learners.on_decided(news, self.coordinator.absent_in)
        return news

    def settle(self) -> None:
        """Close every round that is complete now that a worker has left, expired or skipped rounds."""
        if self.policy.has_rounds:
            for block in self._trained:
                block.settle()

    def take_all(self, but: Collection[int] = (), *, base: str | None) -> tuple[dict[int, Page], list[TableSnapshot] | None]:
        """The pages of all blocks except `but`, by index, pinned at one instant; and the tables' snapshots, None if others are
        under way.

        base: the checkpoint on which the snapshots build, as for TablesBlock.snapshots; None: begin no snapshots.
        """
        pages: dict[int, Page] = {}
        tables: list[TableSnapshot] | None = []
        with contextlib.ExitStack() as locks:
            for block in self.read_from(()):
                locks.enter_context(block.lock)
            try:
                for index in self.blocks.keys() - but:
                    pages[index] = self.blocks[index].pin()
                if base is not None and self.tables is not None:
                    tables = self.tables.snapshots(base)
            except BaseException:
                self.unpin_all(pages)
                raise
        return pages, tables

    def unpin_all(self, pages: Mapping[int, Page]) -> None:
        """Give pinned pages back."""
        for page in pages.values():
            self.arena.unpin(page)

    @property
    def lacks_space(self) -> bool:
        """True if a complete round could not be applied for lack of space; it is to be settled again later."""
        return any(block.lacks_space for block in self._trained)

    def on_gone(self, rank: int) -> None:
        """Forget what matters only during a session of the rank, because that has ended."""
        self.agreement.on_gone(rank)
        self.learners.on_gone(rank)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def tensor_count(self) -> int:
        """Tensors of the job, on all shards."""
        return len(self.spec.tensors)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this shard's parameters."""
        return sum(b.plan.nbytes for b in self.blocks.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of this shard's slots."""
        return sum(b.slot_bytes for b in self.blocks.values())


def round_kind_of(spec: JobSpec) -> type[Round]:
    """The class of the rounds of a job's blocks."""
    if spec.directed_tensors:
        return DirectedRound
    if spec.corrected_tensors:
        return CorrectedRound
    if spec.has_verdicts:
        return MeasuredRound
    return ExactRound if spec.aggregation == "exact" else FastRound


def _add_awaited(membership: Membership, rank: int, seconds: float) -> None:
    membership.workers[rank].awaited_s += seconds
