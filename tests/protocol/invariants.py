"""What must hold in a state, beyond what the processes have checked themselves.

Of each gradient the program's books say what it was told, and the shards' histories what has happened. Must not know how states
come about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise, zip_longest

from cut_parts import CutPart, complete_cuts
from setting import gradient_of
from world import DEAD, OFF, ON, STALLED, Action, State, World

from psd.checkpoint.cut import CutName, name_of
from psd.contract.errors import StateLost


class Invariants:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._setting = world.setting
        self._is_exact = world.setting.aggregation == "exact"

    def check(self, state: State, free: Iterable[Action]) -> list[str]:
        """What is wrong with a state in which these actions cost nothing."""
        wrong = self._ends(state) + self._cuts(state) + self._together(state) + list(self._parts(state))
        if self._setting.has_rounds:
            wrong += self._agreement(state)
        moves = [action for action in free if self.must_happen(state, action)]
        if not moves:
            waiting = [p for p, mode in enumerate(state.modes) if mode == ON and self._takes_part(state, p)]
            if waiting:
                if not self._is_to_begin_anew(state):
                    wrong.append(f"processes {waiting} wait for what cannot come: {self._waits(state)}")
            elif all(mode != STALLED for mode in state.modes) and not self._has_gone_back_unnoticed(state):
                wrong += self._books(state) + list(self._void(state))
        return wrong

    def _together(self, state: State) -> list[str]:
        """What workers were told of one sum is the same; and those that have heard of the end have made the same steps."""
        views = [node.view for node in state.workers]
        answers = sorted({answer for view in views for answer in view.answers})
        wrong = [f"sums over {one} and {other}" for one, other in combinations(answers, 2) if {*one} & {*other}]
        ends = {view.clock for view in views if view.is_over}
        return [*wrong, *([f"the job ends at different steps: {sorted(ends)}"] if len(ends) > 1 else [])]

    def _is_to_begin_anew(self, state: State) -> bool:
        """True if somebody has ended who has no successor here, because the job is lost: all are to be started again."""
        return any(node.view.ended == StateLost.__name__ for node in state.workers)

    def _has_gone_back_unnoticed(self, state: State) -> bool:
        """True if a shard has lost what it held when everybody had left: whoever comes next goes on from the checkpoint."""
        views = [node.view for node in state.shards]
        return self._setting.has_checkpoint and any(
            view.is_blank and not any(updates for _, updates in view.history) for view in views
        )

    def must_happen(self, state: State, action: Action) -> bool:
        """False for what nobody may rely on: a late message, the end of a worker's stall, a successor."""
        if action[0] == "deliver":
            return self._takes_part(state, action[1])
        return action[0] not in ("late", "start", "wake")

    def _takes_part(self, state: State, process: int) -> bool:
        """True for a program that goes on, but for a successor of which no shard has heard."""
        view = state.workers[process].view
        is_coming = process >= len(self._setting.programs) and not view.session and view.is_joining
        return not view.ended and not (is_coming and view.calls[0][0][0] == 0 and not self._is_known(state, process))

    def _is_known(self, state: State, process: int) -> bool:
        rank = self._world.ranks[process]
        known = {node.view.session for p, node in enumerate(state.workers) if p != process and self._world.ranks[p] == rank}
        return any(node.view.live[rank] and node.view.live[rank] not in known for node in state.shards)

    def _waits(self, state: State) -> str:
        views = [node.view for node, mode in zip(state.workers, state.modes, strict=True) if mode == ON]
        return "; ".join(
            f"{self._world.requests[number].kind} at shard {slot[0]}" for view in views for slot, number in view.calls
        )

    def _ends(self, state: State) -> list[str]:
        """No healthy worker ends."""
        wrong = []
        ranks = self._world.ranks
        started = [p for p, mode in enumerate(state.modes) if mode != OFF]
        for process in started:
            ended = state.workers[process].view.ended
            if state.modes[process] == DEAD or ended in ("", "finished", "ended by choice"):
                continue
            has_other = any(other != process and ranks[other] == ranks[process] for other in started)
            if ended == "SessionFenced (superseded)" and has_other:
                continue
            if ended == StateLost.__name__ and not self._setting.has_checkpoint and self._may_be_lost(state):
                continue
            wrong.append(f"process {process} was ended by {ended}")
        return wrong

    def _may_be_lost(self, state: State) -> bool:
        """True if a shard has come back without what it held; or, exact, somebody has ended who had not waited for a round."""
        views = [node.view for node in state.shards]
        is_lost = any(
            mode in (DEAD, STALLED) or (node.view.ended and any(book in ("held", "open") for _, book in node.view.books))
            for node, mode in zip(state.workers, state.modes, strict=True)
        )
        return any(view.is_blank for view in views) or (self._is_exact and is_lost and any(view.lives > 1 for view in views))

    def _cuts(self, state: State) -> list[str]:
        """Each cut of which all shards have their part, at the same positions, has the same first pushes of each worker in all
        blocks, but for those of which their program was told that they may not count, and what came with the last of them; and
        the later one by its name has what an earlier one has."""
        found = list(complete_cuts([node.view.cuts for node in state.shards]))
        if self._setting.is_published:
            return list(self._versions(found))
        wrong = [text for parts in found for text in self._cut(state, parts)]
        stored = [parts for parts in found if not parts[0].cut.startswith("r")]
        for earlier, later in pairwise(sorted(stored, key=_name_of)):
            lacking = self._counted(earlier) & self.sure(state) - self._counted(later)
            if lacking:
                wrong.append(
                    f"cut {later[0].cut} is the later one by its name, and lacks {sorted(lacking)} of {earlier[0].cut}"
                )
        return wrong

    def _versions(self, found: Sequence[Sequence[CutPart]]) -> Iterator[str]:
        """What readers have is one put, whole; and a put is one version."""
        versions: dict[int, int] = {}
        for parts in found:
            puts = {gradients for part in parts for _, gradients in part.gradients}
            told = f"reader {parts[0].cut} has version {parts[0].step} of puts {sorted(puts)}"
            if len(puts) != 1 or len(next(iter(puts))) != 1:
                yield f"{told}, not of one"
            for gradient in self._counted(parts):
                if versions.setdefault(gradient, parts[0].step) != parts[0].step:
                    yield f"{told}, and another one version {versions[gradient]}"

    @staticmethod
    def _counted(parts: Sequence[CutPart]) -> set[int]:
        return {gradient for part in parts for _, gradients in part.gradients for gradient in gradients}

    def sure(self, state: State, rank: int | None = None) -> set[int]:
        """The gradients, of one worker or all, that count: those of which their program was told so, or waits for word."""
        return {
            gradient
            for process, node in enumerate(state.workers)
            if rank in (None, self._world.ranks[process])
            for gradient, book in node.view.books
            if book in ("held", "kept") or (book == "open" and self._is_at(state, process, gradient))
        }

    def _cut(self, state: State, parts: Sequence[CutPart]) -> Iterator[str]:
        name = parts[0].cut
        blocks = {block: set(gradients) for part in parts for block, gradients in part.gradients}
        history = {block: {g for u in updates for g in u} for node in state.shards for block, updates in node.view.history}
        states = dict(parts[0].states)
        for rank, _ in parts[0].positions:
            sure = self.sure(state, rank)
            counted = {block: gradients & sure for block, gradients in blocks.items()}
            if len({frozenset(gradients) for gradients in counted.values()}) > 1:
                yield f"cut {name} has of worker {rank} {[sorted(gradients) for gradients in counted.values()]} in its blocks"
            for block, gradients in counted.items():
                late = {g for g in history.get(block, set()) & sure if gradients and g < max(gradients)} - gradients
                if late:
                    yield f"cut {name}, block {block}: of worker {rank} it lacks {sorted(late)}, and has {sorted(gradients)}"
            mine = [g for g in sure if g in counted[min(counted)]]
            if mine and states.get(rank) is not None and states[rank] in sure and states[rank] != max(mine):
                yield f"cut {name} has what came with gradient {states[rank]} of worker {rank}, and counts up to {max(mine)}"

    @staticmethod
    def _is_at(state: State, process: int, gradient: int) -> bool:
        """True if a process that lives has gone on to no other gradient."""
        view = state.workers[process].view
        return state.modes[process] == ON and not view.ended and gradient == max(g for g, _ in view.books)

    def _agreement(self, state: State) -> list[str]:
        """Blocks of one step agree: exact, in all; else in those rounds in which no worker was ever missed."""
        if not self._is_exact:
            return []
        histories = [dict(node.view.history) for node in state.shards]
        blocks = {block: updates for history in histories for block, updates in history.items()}
        wrong = []
        for version in range(max((len(updates) for updates in blocks.values()), default=0)):
            found = {block: updates[version] for block, updates in blocks.items() if len(updates) > version}
            if self._setting.is_published:  # a block that has lost a version goes on without it
                found = {block: update for block, update in found.items() if update}
            if len({(self._setting.part_of(block), update) for block, update in found.items()}) > max(1, self._setting.parts):
                wrong.append(f"round {version} is made of different gradients: {found}")
        return wrong

    def _parts(self, state: State) -> Iterator[str]:
        """Each gradient counts in blocks of its part alone, and each round is of one. What a worker has read is as new as its
        clock: what it was not sent again has not changed since."""
        if not self._setting.parts:
            return
        parts = {gradient: part for node in state.workers for gradient, part in node.view.parts}
        histories = {block: updates for node in state.shards for block, updates in node.view.history}
        for block, updates in histories.items():
            others = [g for update in updates for g in update if parts[g] != self._setting.part_of(block)]
            if others:
                yield f"block {block} of part {self._setting.part_of(block)} has gradients of another part: {others}"
        for together in [histories] if self._is_one_round_one_part else [dict(node.view.history) for node in state.shards]:
            for round_, of_round in enumerate(zip_longest(*together.values(), fillvalue=())):
                found = {parts[gradient] for update in of_round for gradient in update}
                if len(found) > 1:
                    yield f"round {round_} is of several parts: {dict(zip(together, of_round, strict=True))}"
        for process, node in enumerate(state.workers):
            clock, versions = node.view.seen
            for block, version in versions:
                if lacking := [g for update in histories.get(block, ())[version:clock] for g in update]:
                    yield f"process {process} at clock {clock} has version {version} of block {block}, which lacks {lacking}"

    @property
    def _is_one_round_one_part(self) -> bool:
        """True if a round is of one part on all shards together: by the decision, or since nobody is mistaken."""
        return self._is_exact or self._setting.successor != "push_pull_own_turns"

    def _void(self, state: State) -> Iterator[str]:
        """At the end: of gradients from before the job went back nothing counts, not even as a residual."""
        void = {g for node in state.workers for g, book in node.view.books if book == "void"}
        for node in state.shards:
            for block, payloads in node.view.carried:
                for payload in payloads:
                    carried = {gradient_of(payload.process, number) for number in payload.numbers} & void
                    if carried:
                        yield f"block {block}: gradients {sorted(carried)} count, from before the job went back: {payload}"

    def _books(self, state: State) -> list[str]:
        """At the end: each gradient that is acknowledged is in every block of its part, or its worker was told how many lack
        it; those of other parts may be among these."""
        counted = {
            block: {gradient for update in updates for gradient in update}
            for node in state.shards
            for block, updates in node.view.history
        }
        if self._setting.is_published:
            puts = [(p, g) for p, node in enumerate(state.workers) for g, book in node.view.books if book == "kept"]
            return [
                f"put {gradient} of process {process} has returned, and not every block has it: {counted}"
                for process, gradient in puts
                if any(gradient not in block for block in counted.values())
            ]
        was_killed = any(node.view.lives > 1 for node in state.shards)
        wrong = []
        for process, mode in enumerate(state.modes):
            if mode == OFF:
                continue
            view = state.workers[process].view
            acknowledged = given_up = 0
            parts = dict(view.parts)
            for gradient, book in view.books:
                missing = sum(
                    gradient not in block
                    for index, block in counted.items()
                    if not parts or self._setting.part_of(index) == parts[gradient]
                )
                if parts:
                    given_up += sum(self._setting.part_of(index) != parts[gradient] for index in counted)
                if book == "held" and (was_killed or (self._is_exact and self._setting.quorum)):
                    given_up += missing  # whoever does not wait for the round to close keeps the gradient in vain
                elif book in ("held", "kept"):
                    acknowledged += missing
                else:
                    given_up += missing
            if not acknowledged <= view.late <= acknowledged + given_up:
                wrong.append(
                    f"process {process}: {acknowledged} block(s) lack acknowledged gradients, and {given_up} others; it was "
                    f"told of {view.late}; its books: {dict(view.books)}; {len(counted)} blocks have "
                    f"{[sorted(block) for block in counted.values()]}"
                )
        return wrong


def _name_of(parts: Sequence[CutPart]) -> CutName:
    found = CutName.of(name_of(0, parts[0].step, parts[0].cut, parts[0].order))
    assert found is not None
    return found
