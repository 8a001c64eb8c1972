"""Defects that psd once had, planted again: the checker has to find each of them.

Each is a function that takes pytest's monkeypatch and undoes the mending as locally as it can. Must not know the checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from published import notes_of
from step_serving import WatchedRanks
from watched_tables import WatchedTables

from psd.rim.data_plane import DataPlane
from psd.state.aggregation.agreement import Agreement, Voice
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.exact_rounds import ExactRound
from psd.state.aggregation.rounds import Contribution, FastRound, Outcome
from psd.state.aggregation.small_block import SmallBlock
from psd.state.cuts.positions import Positions
from psd.state.desks.exchange import Exchange
from psd.state.desks.settlement import SettlementDesk
from psd.state.desks.steps import StepDesk
from psd.state.desks.transfers import Pull, Push
from psd.state.durability.client_states import ClientStates
from psd.state.job import Job
from psd.state.tables.block import TablesBlock
from psd.state.tables.partition import VERSION
from psd.state.workers.membership import Membership
from psd.v1 import data_pb2
from psd_client.lanes.transport import Call, GradientPart, Lane
from psd_client.worker.exchange.data_requests import DataRequests
from psd_client.worker.exchange.exchange import ParameterExchange
from psd_client.worker.exchange.gradient_encoder import EncodedPush, GradientEncoder
from psd_client.worker.exchange.riders import RoundGone
from psd_client.worker.exchange.sent_push import SentPush
from psd_client.worker.session.membership import Memberships
from psd_client.worker.session.session import Session


def clock_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves on before shard 0 knows of the push, and a call that has failed then leaves nothing behind."""

    def forget(exchange: ParameterExchange, sent: SentPush, error: BaseException) -> None:
        exchange._session.pushing = None

    def commit(exchange: ParameterExchange, sent: SentPush, *, without_waiting: bool) -> None:
        if not sent.is_finished:
            exchange._finish(sent)
        real(exchange, sent, without_waiting=without_waiting)

    real = ParameterExchange._commit
    monkeypatch.setattr(ParameterExchange, "_on_failed", forget)
    monkeypatch.setattr(ParameterExchange, "_commit", commit)


def successor_in_the_open_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor's gradient is taken for a duplicate of the one that the dead worker has pushed."""
    monkeypatch.setattr(Job, "entry_round", lambda job, rank: job.version_max)
    monkeypatch.setattr(FastRound, "standing", lambda round_, part: Outcome.DUPLICATE if part.rank in round_.sessions else None)
    contribute = SmallBlock.contribute

    def mistaken(block: SmallBlock, part: Contribution) -> Outcome:
        outcome = contribute(block, part)
        is_in_round = part.clock == block.version and block._core.session_of(part.rank) > 0
        return Outcome.DUPLICATE if outcome is Outcome.LATE and is_in_round else outcome

    monkeypatch.setattr(SmallBlock, "contribute", mistaken)


def all_voices_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pushes first says what the round's scalars are, also a worker that has just come back."""
    hear, check = Agreement.hear, Agreement.check

    def alike(method: Any) -> Any:
        return lambda agreement, round_, voice: method(agreement, round_, _from_the_start(voice))

    monkeypatch.setattr(Agreement, "hear", alike(hear))
    monkeypatch.setattr(Agreement, "check", alike(check))


def _from_the_start(voice: Voice) -> Voice:
    return voice._replace(since=0)


def unguarded_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has heartbeats only once all shards know it, and one that ends on its way into the job ends the worker."""

    def enter(session: Session) -> None:
        session.join_anew()
        if session._declaration is not None:
            session._declare(session._declaration, is_first=False)
        session._is_entered = True

    monkeypatch.setattr(Session, "_enter", enter)
    monkeypatch.setattr(Memberships, "latest", property(lambda memberships: memberships._held))


def unfenced_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a push that has failed another gradient leaves under the same name."""

    def forget(exchange: ParameterExchange, failed: object) -> None:
        exchange._unconfirmed = exchange._failed = exchange._session.pushing = None

    monkeypatch.setattr(ParameterExchange, "_give_up", forget)


def cut_at_an_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounds each shard takes its part of a cut when it hears of it."""
    monkeypatch.setattr(Positions, "lacking", lambda positions, workers, *, by_clock: 0)
    monkeypatch.setattr(Positions, "agreed", lambda positions, workers: {worker.rank: 0 for worker in workers})
    monkeypatch.setattr(Positions, "step", lambda positions, workers, default, *, has_bound: 0)


def saved_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers have saved does not come back with a checkpoint."""
    begin = ClientStates.begin
    monkeypatch.setattr(ClientStates, "begin", lambda states, found: begin(states, {}))


def cuts_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cuts with one step a random id says which is the later one."""
    monkeypatch.setattr(Job, "note_cut", lambda job, order: None)


def turn_by_an_old_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push of the part whose turn it was by the clock stands for a later round, if the worker joins anew within its call."""
    real = ParameterExchange._begin

    def begin(exchange: ParameterExchange, *arguments: Any, **options: Any) -> SentPush:
        seen = exchange._seen
        try:
            return real(exchange, *arguments, **options)
        except RoundGone:
            exchange._seen = exchange._session.clock
            sent = real(exchange, *arguments, **options)
            exchange._seen = seen
            return sent

    monkeypatch.setattr(ParameterExchange, "_begin", begin)


def answered_before_the_round_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard answers a push of a part when that part's blocks are there, also if it has none; others may be open."""
    begin, read = Exchange.begin_answer, Exchange.read
    answers: dict[int, tuple[Pull, set[int]]] = {}

    def begin_answer(exchange: Exchange, push: Push) -> Pull:
        pull = begin(exchange, push)
        answers[id(pull)] = pull, {*push.header.answered}
        return pull

    def hasty(exchange: Exchange, block: Any, pull: Pull) -> Any:
        _, answered = answers.get(id(pull), (pull, {block.index}))
        return read(exchange, block, pull) if block.index in answered else block.read(0)

    monkeypatch.setattr(Exchange, "begin_answer", begin_answer)
    monkeypatch.setattr(Exchange, "read", hasty)


# -- defects that parts could have ----------------------------------------------------------------------------------------


def another_parts_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard answers a push of a part with the blocks of the others."""
    push_pull = DataPlane.push_pull

    def others(plane: DataPlane, header: data_pb2.PushHeader, *arguments: Any) -> Any:
        wrong = data_pb2.PushHeader()
        wrong.CopyFrom(header)
        wrong.ClearField("answered")
        wrong.answered.extend({0, 1, 2} - {*header.answered})
        return push_pull(plane, wrong, *arguments)

    monkeypatch.setattr(DataPlane, "push_pull", others)


def any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard takes gradients of any parts into one round."""
    hear, check = Agreement.hear, Agreement.check

    def whole(method: Any) -> Any:
        return lambda agreement, round_, voice: method(agreement, round_, voice._replace(part=0))

    monkeypatch.setattr(Agreement, "hear", whole(hear))
    monkeypatch.setattr(Agreement, "check", whole(check))


# -- defects that quorum and grace could have --------------------------------------------------------------------------------


def late_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that comes when its round is decided is answered as if it had come before, and counted."""
    end_push = Exchange.end_push

    def kindly(exchange: Exchange, push: Push) -> data_pb2.PushReply:
        reply = end_push(exchange, push)
        reply.blocks_duplicate += reply.blocks_late
        reply.blocks_late = 0
        reply.ClearField("late")
        return reply

    monkeypatch.setattr(Exchange, "end_push", kindly)


def late_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that comes late counts in the round that is open then, too, and its worker sends it again with the next one."""
    contribute = BlockState.contribute

    def twice(block: BlockState, part: Contribution) -> Outcome:
        outcome = contribute(block, part)
        if outcome is Outcome.LATE and part.clock < block.version:
            contribute(block, part._replace(clock=block.version))
        return outcome

    monkeypatch.setattr(BlockState, "contribute", twice)


# -- defects that residuals could have --------------------------------------------------------------------------------------


def encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that is sent again is encoded again, and takes its residual a second time."""
    block = EncodedPush.block

    def again(push: EncodedPush, *arguments: Any) -> Any:
        push._done.clear()
        return block(push, *arguments)

    monkeypatch.setattr(EncodedPush, "block", again)


def kept_by_who_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps its residual when the job goes back."""
    monkeypatch.setattr(GradientEncoder, "forget", lambda encoder: None)


def lost_with_a_push_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that is given up takes with it all that its worker has kept, and not its own part alone."""
    give_up = ParameterExchange._give_up

    def lose(exchange: ParameterExchange, failed: SentPush) -> None:
        give_up(exchange, failed)
        if exchange.encoder is not None:
            exchange.encoder.forget()

    monkeypatch.setattr(ParameterExchange, "_give_up", lose)


# -- defects that tables could have ---------------------------------------------------------------------------------------


def rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes again after a kill goes to all tables, also to one whose transaction the kill has come after."""
    monkeypatch.setattr(TablesBlock, "_has", lambda block, partition, update, clock: False)


def half_sent_again(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    """A push that is sent again has its tensors without its rows, or the other way round."""

    def part(requests: DataRequests, lane: Lane, call: Call, sent: SentPush, *arguments: Any) -> GradientPart:
        made = real(requests, lane, call, sent, *arguments)
        if sent.replies or sent.incarnations:
            if left_out == "rows":
                made.tables = ()
            else:
                made.present = np.zeros(len(requests._layout.spec.tensors), np.bool_)
        return made

    real = DataRequests.part
    monkeypatch.setattr(DataRequests, "part", part)


def put_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard takes a put for a version as soon as it has it, whatever the others have."""
    take = ExactRound.take

    def decided(round_: ExactRound, part: Contribution) -> Any:
        round_._decided = 1 << part.rank
        return take(round_, part)

    monkeypatch.setattr(ExactRound, "take", decided)


def unheard_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """What readers say of shard 0's decision is not followed."""
    monkeypatch.setattr(SettlementDesk, "hear", lambda desk, request, job: None)


def newest_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader is given the page that is current, whatever version it has asked for."""
    at_version = BlockState.at_version
    monkeypatch.setattr(
        BlockState, "at_version", lambda block, version, whose, take: at_version(block, block.version, whose, take)
    )


# -- defects that armed steps could have -----------------------------------------------------------------------------------


def no_second_look_at_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has looked at its epoch goes on, whatever is revoked before it counts: nobody who revokes waits for it."""
    revoke = WatchedRanks.revoke

    def hasty(ranks: WatchedRanks) -> None:
        door = WatchedRanks.door()
        if door is None or not door.are_inside:
            revoke(ranks)

    monkeypatch.setattr(WatchedRanks, "revoke", hasty)


def repeat_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that is made in place of a step counts, although the step has been counted."""
    contribute = SmallBlock.contribute

    def again(block: SmallBlock, part: Contribution) -> Outcome:
        outcome = contribute(block, part)
        is_half = block._members.ranks.half(part.rank, part.session, part.clock)
        if outcome is Outcome.DUPLICATE and is_half:
            return contribute(block, part._replace(clock=part.clock + 1))
        return outcome

    monkeypatch.setattr(SmallBlock, "contribute", again)


def rows_of_a_step_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of pushes that come the long way lacks those that have come as steps."""
    see = TablesBlock._see

    def forgetful(block: TablesBlock) -> None:
        before = [partition.notes.copy() for partition in block.partitions]
        see(block)
        for partition, notes in zip(block.partitions, before, strict=True):
            notes[VERSION] = partition.notes[VERSION]
            partition.note(notes)
        block._recall()

    monkeypatch.setattr(TablesBlock, "_see", forgetful)


def rows_without_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step publishes its rows, and does not note whose push they are of."""
    watching_step = WatchedTables.watching_step

    def forgetful(tables: WatchedTables, call: Callable[[], int]) -> int:
        before = [notes_of(store) for store in tables._stores]
        outcome = watching_step(tables, call)
        for store, notes in zip(tables._stores, before, strict=True):
            notes[VERSION] = notes_of(store)[VERSION]
            store.write(np.empty(0, np.uint64), np.empty((0, store.spec.layout.width), np.float32), notes=notes)
        return outcome

    monkeypatch.setattr(WatchedTables, "watching_step", forgetful)


def close_that_forgets_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that closes a round tells nobody who waits for that by a ticket."""
    monkeypatch.setattr(StepDesk, "end_waits", lambda desk, job, rank: None)


def floor_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is armed also while another one has joined that begins at a later round: its steps go on without that one."""
    monkeypatch.setattr(Membership, "is_settled", lambda members, round_: True)
