"""The data plane of one worker: pushes, pulls and push_pulls of whole flat buffers, over all shards that hold trained blocks.

Invariants. A push is named by (rank, session, clock) from its beginning to its end, even if its worker has to join anew
meanwhile. The clock moves on only when every shard has the push and, with exact aggregation, shard 0 knows that. A call that
has failed leaves its push behind. The same call, made again, goes on with it; before another gradient is sent, the push is
either completed or its session is ended, so that no more of it can count. With rounds, the shards keep a gradient in memory
until its round has closed; until then this side keeps it, too, and sends it again to a shard that was killed and came back.
Nothing is sent unless all of it is valid. Static blocks are never pushed, and pulled only once, by `pull_all`. Gradients of
tables' rows are part of a push like any block. Must not know names, optimizers or gRPC.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import RolledBack
from psd.contract.layout import Layout
from psd.contract.rules import weight_of
from psd.v1 import control_pb2
from psd_client.lanes.flat import FlatBuffers, share_memory
from psd_client.lanes.shards import Shards, transfer_s
from psd_client.lanes.transport import Call, Lane, Share
from psd_client.worker.exchange.armed_steps import NO_TABLES, ArmedSteps, RowsOfCall
from psd_client.worker.exchange.buffers import BufferKeeper
from psd_client.worker.exchange.data_requests import DataRequests, check_skip, is_finite
from psd_client.worker.exchange.gradient_encoder import GradientEncoder
from psd_client.worker.exchange.learner_rider import LearnerRider
from psd_client.worker.exchange.lending import ParameterPlaces, lent_places
from psd_client.worker.exchange.loading import ParameterLoad, SlotValues
from psd_client.worker.exchange.riders import ClientStateRider, PushCounts, RoundGone, riders_of
from psd_client.worker.exchange.row_traffic import RowTraffic
from psd_client.worker.exchange.sent_push import JobPart, SentPush, WorkerGradient
from psd_client.worker.exchange.verdict_search import VerdictSearch
from psd_client.worker.rows import RowGradients
from psd_client.worker.session.session import Session


class ParameterExchange:
    """Sends gradients and receives parameters.

    Args:
        sharing: shares memory with a shard; one for each shard that can see this process's memory.
        is_lending: as in ParameterPlaces.
        is_learner: pushes have a learner's note.

    Attributes:
        gradients: the buffers that the next push sends. After `push`, write to them only when `confirm` has returned.
        parameters: what the last pull has brought; undefined if it failed. places: memory for that, and what was lent of it.
        client_state: carries the state that the program saves. buffers: sends what it computes beside the parameters.
        is_skipped: True if the round of the last push changed nothing, because some worker's gradient was not finite; without
            rounds, this worker's. Known after the pull.
        counts: as ParameterServer.stats shows them. rows: rows of tables that are on their way. encoder: of gradients, or None.
        learner: a learner's note, if this is one.
    """

    def __init__(
        self,
        rank: int,
        wait_timeout_s: float,
        session: Session,
        shards: Shards,
        layout: Layout,
        sharing: Sequence[Share] = (),
        *,
        is_lending: bool = False,
        is_learner: bool = False,
    ) -> None:
        self._rank = rank
        self._session = session
        self._shards = shards
        self._layout = layout
        self._blocks = [[block for block in layout.blocks_of(lane.shard) if block.trained] for lane in shards.lanes]
        self._trained = [block for block in layout.blocks if block.trained]
        self._trained_count = len(self._trained) + (layout.shard_count if layout.spec.tables else 0)
        self._lanes = [lane for lane in shards.lanes if self._blocks[lane.shard] or layout.spec.tables]
        self._has_static = any(not block.trained for block in layout.blocks)
        self._has_rounds, self._is_exact = layout.spec.consistency.has_rounds, layout.spec.aggregation == "exact"
        self._timeout_s = wait_timeout_s + transfer_s(layout, shards.lanes)
        self._unconfirmed: SentPush | None = None  # the last push, while its round may be open
        self._failed: SentPush | None = None  # the push of the last call, if that has failed
        self._seen = 0  # `parameters` have all rounds before this clock, and the program knows it
        has = layout.spec.has_verdicts and self._lanes  # without lanes there is no gradient to measure
        self._verdicts = VerdictSearch(session, shards, self._lanes, self._timeout_s, self._push_again) if has else None
        self.is_skipped, self.times_gone_back = False, 0
        self.client_state = ClientStateRider(layout.client_state_shard)
        segment = share_memory(layout, lent_places(layout) if is_lending else 1) if sharing else None
        self.gradients = FlatBuffers(layout, segment=segment, of_gradients=True)
        self.places = ParameterPlaces(layout, segment, is_lending=is_lending)
        self.parameters, self.rows = self.places.current, RowTraffic(layout, segment, lambda: session.push_ids_max)
        self._counts = PushCounts()
        self.counts = self._counts.totals
        self.buffers = BufferKeeper(session, shards, layout, self.parameters, self._timeout_s, lambda: self.times_gone_back)
        self.learner = LearnerRider()
        self.encoder = GradientEncoder(rank, self.gradients) if any(block.codec for block in layout.blocks) else None
        own = [self.client_state, *([self.buffers] if self.buffers.has_use else ()), self.rows, self._counts]
        own += [*([self.learner] if is_learner else ()), *([self.encoder] if self.encoder is not None else ())]
        self._riders = riders_of(rank, session, layout, self.gradients, self.counts, *own)
        self._requests = DataRequests(session, self.gradients, self._riders, self._verdicts, self.encoder, self.places.held)
        self._steps = ArmedSteps(session, shards.health, self._lanes, self.gradients, self.places, self._riders, self.counts)
        self._load = ParameterLoad(rank, session, shards, self.parameters, wait_timeout_s, self._timeout_s)
        for share in sharing if segment is not None else ():
            share(self.encoder.sent if self.encoder is not None else self.gradients, self.places.shared)

    # -- operations ----------------------------------------------------------------------------------------------------

    def pull_all(self) -> None:
        """Fetch every block, static ones too."""
        self.resolve()
        layout = self._layout
        self._fetch([lane for lane in self._shards.lanes if layout.blocks_of(lane.shard) or layout.spec.tables], is_all=True)
        self._failed = None

    def load(self, how: Callable[[ParameterLoad], None]) -> None:
        """Load parameters or slots by calling `how`, and fetch all blocks then."""
        self.confirm()
        how(self._load)
        self.pull_all()

    def slots(self) -> dict[int, SlotValues]:
        """Fetch the slots of tensors, by the tensors' index, when the round of the last push has closed."""
        self.confirm()
        return self._load.fetch_slots()

    def go_back(self) -> None:
        """Go on from the checkpoint to which the job has gone back."""
        self._session.go_back(self._begin_again)

    def _begin_again(self) -> None:
        self._unconfirmed = self._failed = self._session.pushing = None
        self.rows.versions_read.clear()
        if self._verdicts is not None:
            self._verdicts.forget()
        self.pull_all()
        self.times_gone_back += 1
        for forget in self._riders.forget:
            forget()

    def pull(self) -> None:
        """Fetch the trained blocks, at the worker's clock. If a failed call has left a push behind, that is resolved first."""
        self.resolve()
        self._fetch(self._lanes)
        self._failed = None

    def pull_rows(self, wanted: Mapping[int, NDArray[Any]], *, counts_no_use: bool = False) -> dict[int, NDArray[np.float32]]:
        """Fetch rows at the worker's clock, as `pull` fetches the trained blocks: see FlatCalls.pull_rows."""
        self.resolve()
        if not counts_no_use and (fetched := self.rows.take(wanted)):
            return fetched
        pull = self.rows.pull(wanted)
        wanted_at = {lane.shard: pull.at(lane.shard) for lane in self._lanes}

        def pull_at(lane: Lane, call: Call) -> None:
            self._push_again(lane, call)
            request = self._requests.pull(lane.shard)
            portions = wanted_at[lane.shard] or [[]]  # a pull of no rows still waits for the round
            read = [lane.pull_rows(request, rows, call, counts_no_use=counts_no_use) for rows in portions]
            self.rows.versions_read[lane.shard] = min(read)

        for attempt in self._session.attempts():
            with attempt:
                self._learn()
                # This waits for the tables' blocks alone; if nothing else is trained, the round has closed then.
                is_closing = self.is_unconfirmed and not self._trained
                lanes = [lane for lane in self._lanes if is_closing or wanted_at[lane.shard]]
                self._shards.run(pull_at, self._timeout_s + pull.transfer_s, lanes, is_bulk=True)
                if is_closing:
                    self._on_closed()
        self._failed = None
        self.counts["rows_pulled"] += pull.rows
        return pull.results()

    def confirm(self) -> None:
        """Wait until the round of the last push has closed, so that its gradients are no longer needed. Free after a pull.

        If a failed call has left a push behind, that is resolved first.
        """
        self.resolve()
        if self._unconfirmed is not None:
            self._fetch(self._lanes, versions_only=True)

    def keep(self) -> None:
        """Send the last push again to shards that were restarted, and its commit to shard 0, without waiting for its round."""
        sent = self._unconfirmed
        if sent is not None and self._session.clock > sent.header.clock + 1:  # late: no round is to wait for this worker
            self._fetch(self._lanes, versions_only=True)
        else:
            self._shards.run(self._push_again, self._timeout_s, self._lanes, is_bulk=True)
            if self._is_exact and sent is not None and not sent.is_decided:
                self._commit(sent, without_waiting=True)

    @property
    def is_unconfirmed(self) -> bool:
        """True if the round of the last push may still be open."""
        return self._unconfirmed is not None

    def push(self, gradient: WorkerGradient) -> None:
        """Send a gradient; returns when every shard has it. The push before must be confirmed."""
        sent = self._begin(gradient)
        try:
            self._complete(sent)
        except BaseException as error:
            self._on_failed(sent, error)
            raise
        self._on_done()

    def push_pull(self, gradient: WorkerGradient) -> None:
        """Send a gradient, and fetch the parameters of the clock after it, and the rows that were asked for by prefetch.

        Of a gradient of one part of the job, that part's parameters alone, unless others may have changed meanwhile.
        """
        steps = self._steps
        made = RowsOfCall() if steps.has_tables else NO_TABLES
        try:
            if steps.are_armed and self._failed is None and self._unconfirmed is None and steps.push_pull(gradient, made):
                self._seen, self.is_skipped = self._session.clock, False
                return
            sent = self._begin(gradient, made.pushed)
        except RoundGone as gone:
            self._fetch(self._lanes)
            self._counts.on_gone(self._rank, gone.clock, self._trained_count)
            self.is_skipped = False
            return
        except BaseException as error:
            if steps.offered.are_under_way:
                with steps.offered.ending():
                    rows = made.pushed or self.rows.no_gradients
                    self._on_failed(self._requests.push(gradient, weight_of(gradient.weight), rows), error)
            raise
        ahead = None if self._is_exact or sent.is_finished else made.ahead or self.rows.pull_ahead(steps.shards)

        def push_pull_at(lane: Lane, call: Call) -> None:
            rows = ahead.at.get(lane.shard) if ahead is not None else None
            reply = steps.finish(lane.shard, call, made) if steps.offered.are_under_way else None
            if reply is None:
                part = self._requests.part(lane, call, sent, self._blocks[lane.shard], self.parameters.versions)
                part.wants_steps = steps.are_wanted and sent.feed is None
                reply = lane.push_pull(part, self.parameters, call, rows)
            self._counts.on_reply(sent, lane.shard, reply)

        self.parameters = self.places.renew() if self.places.has_choice else self.parameters
        try:
            if self._is_exact or sent.is_finished:
                self._complete(sent, and_wait=True)
                if self._is_exact and gradient.part is not None and self._session.clock == self._seen + 1:
                    self._fetch(self._lanes, versions_only=True)
                    self._fetch(self._lanes, part=gradient.part)
                else:
                    self._fetch(self._lanes)
            else:
                for attempt in self._session.attempts():
                    with attempt:
                        self._shards.run(push_pull_at, self._timeout_s + sent.rows.transfer_s, self._lanes, is_bulk=True)
                self._finish(sent)
                # A push that was late at one shard has moved the clock further: other shards' answers may be older than that.
                behind = [lane for lane in self._lanes if sent.replies[lane.shard].clock < self._session.clock]
                if gradient.part is not None and self._has_rounds and self._session.clock != self._seen + 1:
                    behind = self._lanes  # rounds of other parts have closed without this worker
                for attempt in self._session.attempts() if behind else ():
                    with attempt:
                        self._pull(behind)
                ahead = None if behind else ahead
                self.parameters = self.places.settle() if self.places.reads_planes else self.parameters
            self.rows.came(ahead, self.counts)
            if steps.are_wanted:
                steps.renew()
        except BaseException as error:
            self._on_failed(sent, error)
            raise
        self._seen = self._session.clock
        self._on_done()

    # -- a push, from its beginning to its end -------------------------------------------------------------------------

    def _begin(self, gradient: WorkerGradient, rows: RowGradients | None = None) -> SentPush:
        """The next push, or the last one if this is the same call again. Raises if something must not be sent. rows: its."""
        spec, feed, skip = self._layout.spec, gradient.feed, gradient.skip
        if skip:
            check_skip(spec)
        self._session.orders.check_end(self._session.clock, is_begun=feed is not None)
        weight, clock, rows = weight_of(gradient.weight), self._session.clock, rows or self.rows.gradients(gradient.rows or {})
        if feed is None:
            skip = not is_finite(self.gradients, gradient.present, rows, self._rank, clock, is_expected=skip) or skip
        if skip:
            gradient = gradient._replace(skip=True, present=np.zeros(len(spec.tensors), np.bool_))
            weight, rows = 0.0, self.rows.gradients({})
        failed = self._failed
        if failed is not None:
            if feed is not None:
                feed.wait()
            present, tables = (gradient.present, rows.by_shard) if feed is None else (feed.present, feed.tables)
            values = self._session.orders.scaled(gradient.scalars, spec.groups, failed.header.clock)
            if failed.is_same(values, weight, gradient, tables) and failed.is_unchanged(self._trained, self.gradients, present):
                failed.feed = feed
                if not failed.is_finished:
                    self._session.pushing = failed.header.clock
                return failed
            self._give_up(failed)
        self._session.catch_up()
        if self._is_exact:
            for attempt in self._session.attempts():
                with attempt:
                    self._session.await_decisions(self._timeout_s)
        if self._verdicts is not None and self._verdicts.is_untold_before(self._session.clock):
            self._fetch(self._lanes, versions_only=True)
        self._session.orders.check_end(self._session.clock)  # again: a new session may have brought orders, and a later clock
        chosen_at = self._seen if gradient.spare is None else gradient.spare.chosen_at
        if gradient.part is not None and self._has_rounds and self._session.clock != chosen_at:
            raise RoundGone(self._seen)  # the worker has joined anew, and the program had chosen the part by its clock before
        for prepare in self._riders.prepare:
            prepare()
        sent = self._requests.push(gradient, weight, rows)
        self.is_skipped = gradient.skip and not self._has_rounds
        self.counts["rounds_skipped"] += self.is_skipped
        self._session.pushing = sent.header.clock
        return sent

    def _on_failed(self, sent: SentPush, error: BaseException) -> None:
        """Note that the program's call has failed: the next call must go on with this push, or end it.

        Raises:
            NonFiniteGradient: in place of the error, if the gradient could not be encoded.
        """
        encoded = self.encoder.push if self.encoder is not None else None
        failure = encoded.failure if encoded is not None else None
        if not isinstance(error, RolledBack):
            sent.on_failure(failure or error, self._trained, self.gradients)
            self._failed = sent
            self._session.cuts.set_ready(sent.is_finished)
        self._steps.offered.end()
        if failure is not None:
            raise failure from None

    def _on_done(self) -> None:
        self._failed = None
        if self._unconfirmed is None:
            self._session.pushing = None

    def resolve(self) -> None:
        """Complete the push that a failed call has left behind if its gradient is still in the buffers; else give it up."""
        failed = self._failed
        if failed is None or (failed.is_finished and failed is not self._unconfirmed):
            return
        present = failed.present if failed.feed is None else failed.feed.present
        if (failed.is_finished or failed.may_be_completed) and failed.is_unchanged(self._trained, self.gradients, present):
            self._complete(failed)
        else:
            self._give_up(failed)

    def _give_up(self, failed: SentPush) -> None:
        """Give up an earlier push, for another gradient. Its session ends: blocks that have counted it stay as they are, but no
        other block will count it."""
        if failed.is_superseded:
            assert failed.error is not None
            raise failed.error
        if not failed.is_finished or failed is self._unconfirmed:
            self._session.begin_anew()
        self._unconfirmed = self._failed = self._session.pushing = None
        if not failed.is_finished:
            self.counts["pushes_dropped"] += 1
            failed.warn_given_up(self._rank, self._trained_count)

    def _complete(self, sent: SentPush, *, and_wait: bool = False) -> None:
        """Send the push until all shards have it. and_wait: with exact aggregation, also wait until its round is decided."""
        if sent.is_finished:
            return
        for attempt in self._session.attempts():
            with attempt:
                self._send(sent)
        if self._is_exact:
            for attempt in self._session.attempts():
                with attempt:
                    self._commit(sent, without_waiting=not and_wait)
        self._finish(sent)

    def _send(self, sent: SentPush) -> None:
        def push_at(lane: Lane, call: Call) -> None:
            incarnation = self._session.incarnation(lane.shard)
            if sent.incarnations.get(lane.shard) != incarnation:
                part = self._requests.part(lane, call, sent, self._blocks[lane.shard], self.parameters.versions)
                self._counts.on_reply(sent, lane.shard, lane.push(part, call))
                sent.incarnations[lane.shard] = incarnation

        self._shards.run(push_at, self._timeout_s + sent.rows.transfer_s, self._lanes, is_bulk=True)
        self._unconfirmed = sent if self._has_rounds else None

    def _finish(self, sent: SentPush) -> None:
        """Note that every shard has the push, and go on at the largest of their clocks. If it came late, that is beyond the
        next clock."""
        sent.is_finished = True
        replies = sent.replies.values()
        self._session.clock = max([self._session.clock, sent.header.clock + 1, *[reply.clock for reply in replies]])
        for hear in self._riders.hear:
            hear(sent)
        late = sum([reply.blocks_late for reply in replies])
        if late and sent.session != self._session.number:
            sent.warn_expired(self._rank, late, self._trained_count)

    def _push_again(self, lane: Lane, call: Call) -> None:
        """Send the last push again to a shard that has lost it: it was killed before the round had closed."""
        sent = self._unconfirmed
        if sent is None or lane.shard not in sent.incarnations:
            return
        incarnation = self._session.incarnation(lane.shard)
        if sent.incarnations[lane.shard] == incarnation:
            return
        part = self._requests.part(lane, call, sent, self._blocks[lane.shard], self.parameters.versions)
        reply = lane.push(part, call)
        self._counts.on_reply(sent, lane.shard, reply)
        sent.incarnations[lane.shard] = incarnation
        if reply.blocks_late:
            sent.warn_closed(self._rank, lane.shard, reply.blocks_late)

    def _commit(self, sent: SentPush, *, without_waiting: bool) -> None:
        """Exact aggregation: tell shard 0 that all shards have a push, and learn what it has decided."""

        def commit_at(lane: Lane, call: Call) -> control_pb2.CommitReply:
            self._push_again(lane, call)
            return lane.commit(self._requests.commit(lane.shard, sent, without_waiting=without_waiting), call)

        (reply,) = self._shards.run(commit_at, self._timeout_s, self._shards.lanes[:1])
        self._session.decisions = list(reply.decisions)
        if self._verdicts is not None:
            self._verdicts.on_commit(sent.header.clock, reply)
        if (is_skipped := self._counts.on_commit(sent, self._rank, reply, self._layout.spec.nan_policy)) is not None:
            self.is_skipped = is_skipped
        if not without_waiting:
            self._session.clock = max(self._session.clock, reply.clock)
            sent.is_decided = True
            if sent.spare is not None:
                sent.spare.decided_at = time.monotonic()

    def learn_clock(self) -> None:
        """Exact aggregation: go on at the job's clock, if others have closed rounds without this worker. `parameters` stay."""
        self.resolve()
        self._session.catch_up()
        for attempt in self._session.attempts():
            with attempt:
                self._session.learn_clock(self._timeout_s)

    # -- pulls ---------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Exact aggregation: learn decisions and verdict. Pulls carry them to the shards, so that rounds close there."""
        sent = self._unconfirmed
        if self._is_exact and sent is not None and not sent.is_decided:
            self._commit(sent, without_waiting=False)
        self._session.await_decisions(self._timeout_s)
        if self._verdicts is not None:
            self._verdicts.find()

    def _fetch(
        self, lanes: Sequence[Lane], *, is_all: bool = False, versions_only: bool = False, part: JobPart | None = None
    ) -> None:
        """Wait until the round of the last push has closed, and fetch the trained blocks, or all, or none; or those of a part,
        which waits for no others."""
        for attempt in self._session.attempts():
            with attempt:
                self._pull(lanes, is_all=is_all, versions_only=versions_only, part=part)
                if part is None:
                    self._on_closed()
        if not versions_only:
            self._seen = self._session.clock
            self.parameters = self.places.settle() if self.places.reads_planes else self.parameters

    def _pull(
        self, lanes: Sequence[Lane], *, is_all: bool = False, versions_only: bool = False, part: JobPart | None = None
    ) -> None:
        """Fetch the blocks at the worker's clock, or only wait for their versions."""
        self._learn()
        self.parameters = self.places.renew() if self.places.has_choice and not versions_only else self.parameters

        def pull_at(lane: Lane, call: Call) -> None:
            self._push_again(lane, call)
            blocks = self._layout.blocks_of(lane.shard) if is_all else self._blocks[lane.shard]
            if part is not None:
                blocks = [block for block in blocks if block.group in part.groups]
                if not blocks:
                    return
            is_some = part is not None or (self._has_static and not is_all)
            request = self._requests.pull(lane.shard, blocks if is_some else None)
            request.versions_only = versions_only
            lane.pull(request, blocks, self.parameters, call)

        self._shards.run(pull_at, self._timeout_s, lanes, is_bulk=True)

    def _on_closed(self) -> None:
        """Note that all shards have closed the round of the last push."""
        last, self._unconfirmed = self._unconfirmed, None
        self._session.pushing = None
        if self._verdicts is None:
            return
        self._verdicts.on_applied()
        if last is not None and self._verdicts.skips(last.header.clock):
            self.is_skipped = True
            self._counts.on_skipped_norm(self._rank, last.header.clock)
