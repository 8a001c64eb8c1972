"""What the simulated world must compute: kept beside it, from what was sent, counted and decided.

With `fast` aggregation and without rounds it follows which gradient each block counted; what an open round of a killed shard
had counted is forgotten, as the shard forgets it. With `exact` it knows only what shard 0 decided, and computes all parameters,
slots and step counts from that, to the bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from shard_driver import Killed
from simulated_settlement import Counted, Sent

from psd.contract.verdicts import members_mask
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import job_pb2
from psd_core.arena import Page

if TYPE_CHECKING:
    from simulation import Simulation


class Oracle:
    """The expectations of one world."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.initial: dict[int, float] = {}
        self.unsure_initial: dict[int, float] = {}  # by shard, what was being set when it died
        self.counted: dict[int, list[Counted]] = defaultdict(list)
        self.in_flight: dict[int, tuple[int, Counted]] = {}  # by shard, what it was doing when it died
        self.versions: dict[int, int] = defaultdict(int)
        self.entered: dict[tuple[int, int], int] = {}  # (rank, session) -> clock at which it began
        self.sent: dict[tuple[int, int, int], Sent] = {}  # (rank, session, clock)
        self.acknowledged: set[tuple[int, int, int]] = set()
        self.committed: dict[tuple[int, int], int] = {}  # (clock, rank) -> session
        self.decided: dict[int, int] = {}
        self.verdicts: dict[int, job_pb2.Verdict] = {}
        self._exact: dict[int, list[tuple[float, float, int]]] = {}  # block -> by version: parameter, slot, steps
        self.arrived: dict[str, dict[int, int]] = defaultdict(dict)  # barrier -> rank -> session
        self.last_barrier: dict[int, str] = {}
        self.opened: set[tuple[int, int, int]] = set()  # (rank, session, number of the call)
        self.opened_early: list[str] = []
        self.reads = 0

    # -- events --

    def on_arrive(self, barrier: str, caller: job_pb2.Caller) -> None:
        self.arrived[barrier][caller.rank] = caller.session
        self.last_barrier[caller.rank] = barrier

    def on_withdraw(self, barrier: str, caller: job_pb2.Caller) -> None:
        del self.arrived[barrier][caller.rank]

    def on_barrier_end(self, shard: Shard, ticket: Ticket, seq: int) -> None:
        """At the moment at which a call ends: if it is because the barrier opens, all that are waited for have arrived."""
        if ticket.future.exception() is None:
            self.on_opened(shard, ticket.name, (ticket.rank, ticket.session, seq))

    def on_opened(self, shard: Shard, name: str, call: tuple[int, int, int]) -> None:
        if call in self.opened:
            return
        self.opened.add(call)
        arrived = self.arrived[name]
        missing = [w.rank for w in shard._core.members.workers if w.is_waited_for and arrived.get(w.rank) != w.session]
        if missing:
            self.opened_early.append(f"barrier {name!r} has opened without workers {missing}")

    def learn_opened(self, shard: Shard) -> None:
        """Of a shard that has come back: it may have been killed between the opening and the answers."""
        for rank, (session, seq, _) in shard._core.barriers._opened.items():
            self.on_opened(shard, self.last_barrier[rank], (rank, session, seq))

    def on_send(self, rank: int, sent: Sent) -> None:
        self.sent[rank, sent.session, sent.clock] = sent

    def on_acknowledged(self, rank: int, sent: Sent) -> None:
        self.acknowledged.add((rank, sent.session, sent.clock))

    def on_commit(self, rank: int, sent: Sent) -> None:
        """To be called before the commit, which may decide the round although its answer is lost."""
        if sent.clock not in self.decided:
            self.committed[sent.clock, rank] = sent.session

    def on_decisions(self, decisions: Iterable[job_pb2.Decision]) -> None:
        for decision in decisions:
            mask = members_mask(decision.members)
            assert self.decided.setdefault(decision.round, mask) == mask, f"round {decision.round} was decided twice"

    def on_verdict(self, verdict: job_pb2.Verdict) -> None:
        known = self.verdicts.setdefault(verdict.round, verdict)
        assert known == verdict, f"round {verdict.round} has two verdicts: {known}, {verdict}"
        # The sums of rows are float32, and those of the oracle are not.
        tolerance = 1e-6 if self.world.tables is not None else 0
        assert math.isclose(verdict.scale, self.scale(verdict.round), rel_tol=tolerance), (
            f"round {verdict.round}: {verdict.scale}"
        )

    @contextmanager
    def initializing(self, index: int, value: float) -> Iterator[None]:
        """Initial values are being set; if the shard dies meanwhile, `on_restart` finds out whose it has."""
        try:
            yield
        except Killed:
            self.unsure_initial[index] = value
            raise

    @contextmanager
    def counting(self, block: int, rank: int, sent: Sent) -> Iterator[Counted]:
        """A block is being offered a gradient; if the shard dies meanwhile, `on_restart` finds out whether it was counted."""
        part = Counted(rank, sent.session, sent.clock, sent.weight, sent.value + block)
        try:
            yield part
        except Killed:
            self.in_flight[block % len(self.world.shards)] = block, part
            raise
        if part.is_counted:
            self.on_counted(block, part)

    def on_counted(self, block: int, part: Counted) -> None:
        if self.world.is_exact:
            return
        same = [c for c in self.counted[block] if (c.rank, c.clock) == (part.rank, part.clock)]
        if self.world.has_rounds:
            assert not same, f"block {block}: worker {part.rank} counted twice in round {part.clock}"
        assert part.session not in [c.session for c in same], f"block {block}: a push of worker {part.rank} counted twice"
        self.counted[block].append(part)

    def on_restart(self, index: int, shard: Shard) -> None:
        """The shard is back: what was durable counts, what was in open rounds does not."""
        in_flight, initial = self.in_flight.pop(index, None), self.unsure_initial.pop(index, None)
        if not shard.is_recovered:
            assert not self.world.was_initialized, f"shard {index} came back without its values"
            self.initial.pop(index, None)
            return
        self.learn_opened(shard)
        if self.world.tables is not None:
            self.world.tables.on_restart(index, shard)
        if initial is not None:
            self.initial[index] = float(next(iter(shard._core.declared().blocks.values()))._page.parameter[0])
        for block, state in shard._core.declared().blocks.items():
            assert state.version >= self.versions[block], f"block {block}: version went back over a restart"
            if in_flight is not None and in_flight[0] == block:
                part, page = in_flight[1], state._page
                is_in_page = (page.sessions[part.rank], page.clocks[part.rank]) == (part.session, part.clock + 1)
                known = {(c.rank, c.session, c.clock) for c in self.counted[block]}
                if is_in_page and (part.rank, part.session, part.clock) not in known:
                    self.on_counted(block, part)
            if self.world.has_rounds:
                self.counted[block] = [c for c in self.counted[block] if c.clock < state.version]

    # -- what must be --

    def check_initial(self) -> None:
        values = {self.initial.get(index) for index, _ in enumerate(self.world.shards) if self.world.layout.blocks_of(index)}
        assert len(values) == 1, f"shards start from different workers' values: {self.initial}"

    def expected(self, block: int, version: int) -> float:
        """What the block must hold at that version, in float64."""
        spec = self.world.spec
        value = self.initial[block % len(self.world.shards)]
        if not self.world.has_rounds:
            assert version == len(self.counted[block])
            return value - sum(c.value for c in self.counted[block] if c.weight)
        rounds: dict[int, list[Counted]] = defaultdict(list)
        for part in self.counted[block]:
            rounds[part.clock].append(part)
        for round_ in range(version):
            parts = [c for c in rounds[round_] if c.weight]
            if parts and spec.reduction == "sum":
                value -= sum(c.value for c in parts)
            elif parts:
                value -= sum(c.value * c.weight for c in parts) / sum(c.weight for c in parts)
        return value

    def exactly(self, block: int, version: int) -> tuple[float, float, int]:
        """Parameter, momentum and steps of the block at that version, to the bit."""
        states = self._exact.setdefault(block, [(self.initial[block % len(self.world.shards)], 0.0, 0)])
        while len(states) <= version:
            round_ = len(states) - 1
            if round_ not in self.decided:
                self.world.learn_decisions()
            assert round_ in self.decided, f"block {block} closed round {round_}, which nobody has decided"
            if self.world.spec.has_verdicts and self.decided[round_]:
                assert round_ in self.verdicts, f"block {block} closed round {round_}, on which there is no verdict"
            verdict = self.verdicts.get(round_)
            scale = self.scale(round_) if verdict is None else verdict.scale
            states.append(self._stepped(states[-1], self._gradient(block, round_), scale))
        return states[version]

    def members(self, round_: int) -> list[tuple[int, Sent]]:
        """Ranks and pushes that a decided round has, in the order of the ranks."""
        mask, ranks = self.decided[round_], range(self.world.spec.world_size)
        found = [(rank, self.sent[rank, self.committed[round_, rank], round_]) for rank in ranks if mask >> rank & 1]
        assert not any(m.skip for _, m in found), f"round {round_} counts a gradient that is not finite"
        return found

    def _gradient(self, block: int, round_: int) -> float | None:
        """The members' gradient, in the order of the ranks; None if they have none."""
        members = [member for _, member in self.members(round_)]
        is_mean = self.world.spec.reduction == "mean"
        parts = [(m.weight if is_mean else 1.0, m.value + block) for m in members if m.weight]
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0][1]
        total = parts[0][0] * parts[0][1]
        for weight, value in parts[1:]:
            total += weight * value
        return total * (1.0 / sum(m.weight for m in members)) if is_mean else total

    def scale(self, round_: int) -> float:
        """What a round's gradient is multiplied by: torch's clip_grad_norm_ over all blocks, with an exactly rounded sum."""
        norm_max = self.world.spec.clip_norm
        if not norm_max:
            return 1.0
        gradients = [(self._gradient(block.index, round_) or 0.0, block.length) for block in self.world.layout.blocks]
        squares = sum(Fraction(sum([g * g] * length)) for g, length in gradients)
        if self.world.tables is not None:
            squares += self.world.tables.squares(self.members(round_))
        norm = math.sqrt(squares)
        return min(1.0, norm_max / (norm + 1e-6))

    def _stepped(self, state: tuple[float, float, int], gradient: float | None, scale: float) -> tuple[float, float, int]:
        parameter, momentum, steps = state
        if gradient is None:
            return state
        gradient = scale * gradient
        lr, factor, _, _ = self.world.scalars
        momentum = gradient if steps == 0 or not factor else factor * momentum + gradient
        return parameter - lr * momentum, momentum, steps + 1

    def check_page(self, block: int, version: int, page: Page) -> None:
        if self.world.is_exact:
            parameter, momentum, steps = self.exactly(block, version)
            found = page.parameter[0], page.slots[0][0], int(page.steps[0])
            assert (page.parameter == parameter).all(), (
                f"block {block}, version {version}: {found}, not {parameter, momentum, steps}"
            )
            assert (page.slots[0] == momentum).all(), f"block {block}, version {version}: slot {found[1]}, not {momentum}"
            assert (page.steps == steps).all(), f"block {block}, version {version}: steps {found[2]}, not {steps}"
            return
        expected = self.expected(block, version)
        assert np.allclose(page.parameter, expected, rtol=1e-12, atol=1e-9), (
            f"block {block}, version {version}: {page.parameter}, not {expected}"
        )

    def on_read(self, rank: int, clock: int, block: int, version: int, page: Page) -> None:
        self.reads += 1
        assert version >= self.versions[block], f"block {block}: version went back"
        self.versions[block] = version
        self.check_page(block, version, page)
        consistency = self.world.spec.consistency
        if self.world.has_rounds:
            assert version >= clock, f"block {block}: worker {rank} at clock {clock} read version {version}"
        elif consistency.mode == "ssp":
            self._check_bound(rank, clock - consistency.staleness_bound, block)

    def _check_bound(self, reader: int, lag: int, block: int) -> None:
        """Every worker that is waited for has finished `lag` steps, and all its updates up to there are in the block."""
        shard: Any = self.world.shards[block % len(self.world.shards)]
        for worker in shard._core.members.workers:
            if not worker.is_waited_for:
                continue
            assert worker.clock >= lag, f"worker {reader} read while worker {worker.rank} had finished {worker.clock} < {lag}"
            begun = self.entered.get((worker.rank, worker.session))
            if begun is None:
                continue
            there = {c.clock for c in self.counted[block] if (c.rank, c.session) == (worker.rank, worker.session)}
            lacking = set(range(begun, lag)) - there
            assert not lacking, f"block {block}: worker {reader} read without the steps {lacking} of worker {worker.rank}"

    def check_end(self) -> None:
        """What is left when everybody has left."""
        world = self.world
        assert not self.opened_early, self.opened_early
        for block in world.layout.blocks:
            shard = world.shards[block.index % len(world.shards)]
            assert shard is not None
            page = shard._core.declared().blocks[block.index]._page
            self.check_page(block.index, page.version, page)
            counted = self.counted[block.index]
            if world.is_exact:
                assert page.version in (len(self.decided), len(self.decided) - 1), "a decided round was left open"
            elif world.has_rounds:
                assert max((c.clock for c in counted), default=-1) < page.version, "a round was left open"
            else:
                found = sorted((c.rank, c.session, c.clock) for c in counted)
                assert len(found) == len(set(found)), f"block {block.index}: a push was counted twice"
                assert self.acknowledged <= set(found), f"block {block.index}: a push was acknowledged and lost"
            if not world.trouble and world.spec.quorum in (0, world.spec.world_size):
                self._check_everything(block.index)
        if world.tables is not None:
            is_whole = not world.trouble and world.spec.quorum in (0, world.spec.world_size)
            world.tables.check_end(self._everything() if is_whole else None)

    def _everything(self) -> set[tuple[int, int]]:
        """Rank and clock of all pushes."""
        begun = {rank: clock for (rank, _), clock in self.entered.items()}
        return {(r, c) for r, steps in enumerate(self.world.steps) for c in range(begun[r], steps)}

    def _check_everything(self, block: int) -> None:
        """No worker died: every gradient is in."""
        everything = self._everything()
        if self.world.is_exact:
            found = {(r, c) for c, mask in self.decided.items() for r in range(self.world.spec.world_size) if mask >> r & 1}
            skipped = {c for (_, _, c), sent in self.sent.items() if sent.skip}
            everything = {(r, c) for r, c in everything if c not in skipped}
        else:
            found = {(c.rank, c.clock) for c in self.counted[block]}
        assert found == everything, f"block {block}: gradients were lost: {everything ^ found}"
