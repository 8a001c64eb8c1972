"""A learner: steps of the program's own torch optimizer, and exchanges with the shards, fragment by fragment, now and then.

What travels is the base less the parameters; the base is what the learner has received last. While an exchange is under way the
learner may go on: the call then runs in a thread of its own. Two exchanges, of different fragments, may have departed before
the first has landed; they travel one after the other. A difference that the shards have dropped, because it came late, stays in
the learner's parameters, and so in its next difference. So does what it has learned since, if the base of a fragment that it
was not exchanging has changed. With a quorum of some learners (decoupled) it waits for nobody: an exchange begins at the job's
clock, which it asks for, and ends when it does. Must not know how fragments are chosen, or how anything travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, overload

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from psd.contract.errors import InvalidRequest, RolledBack
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer, worker_of
from psd_client.optimizers import scalar_values
from psd_client.torch.buffers import kept_buffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.flight import Counts, Departure, Exchanged, Flight, FreshValues, Smoothed
from psd_client.torch.job_optimizer import JobOptimizer
from psd_client.torch.local import Local
from psd_client.torch.parameters import as_tensor, as_tensors
from psd_client.torch.schedule import DistributedScheduler, register
from psd_client.torch.uncompiled import uncompiled
from psd_client.torch.whole import OwnParameters
from psd_client.worker.background_call import BackgroundCall
from psd_client.worker.exchange.sent_push import Spare
from psd_client.worker.worker import Turn


class LocalOptimizer(JobOptimizer):
    """A torch optimizer that steps in this process, and whose results are exchanged; made by `distribute` with `local`.

    Its param_groups and its state are those of the optimizer that was given.

    Attributes:
        ps: the connection. Its clock counts exchanges.
        local_step: local steps that this learner has made. After a restart it is the step of the job's last exchange.
        on_exchange: called with each exchange that has ended; may be None.
        outer_groups: options of the outer rule, one dict for each fragment. The program may change them, on all learners alike.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        ps: ParameterServer,
        declaration: TorchDeclaration,
        local: Local,
        parameters: OwnParameters | None = None,
    ) -> None:
        super().__init__(inner, ps)
        self._inner, self._local = inner, local
        self.state = inner.state
        self._parameters = OwnParameters(declaration.parameters) if parameters is None else parameters
        self._worker = worker_of(ps)
        self._declaration = declaration
        self._buffers = kept_buffers(declaration, self._worker)
        self.outer_groups = [group for part in declaration.parts for group in part.given.optimizer.param_groups]
        self.on_exchange: Callable[[Exchanged], None] | None = None
        self._schedule: DistributedScheduler | None = None
        self._is_stepping = False
        self._flights: list[Flight] = []  # in the order in which they have departed
        self._look: BackgroundCall | None = None  # asks for the job's clock
        spec = self._worker.parameters.layout.spec
        self._is_sampled = spec.sample > 0
        self._is_decoupled = spec.consistency.has_rounds and (spec.quorum < spec.world_size or self._is_sampled)
        self._step_s, self._fetch_s = Smoothed(), Smoothed()
        self._resumed_at = 0.0  # when the program went on after the last step; 0: it has made none
        self._tokens = 0.0
        self._begin()
        register(self, self, inner)
        inner.register_step_pre_hook(refuse_inner_steps(self))

    @torch.no_grad()
    def _begin(self) -> None:
        """Go on from the values that have been received last, as of the job's last exchange."""
        declaration, flat = self._declaration, self._worker.parameters
        views = as_tensors(flat)
        self._base = {index: views[index].clone() for index in declaration.trained}
        self._versions = list(flat.versions)
        for index in declaration.trained:
            self._parameters.mix(index, views[index], 0)
        self._times_gone_back = self._worker.times_gone_back
        self._exchanges = self.ps.clock
        self.local_step = self._local.step_of(self._exchanges - 1)
        self._departed = self.local_step
        self._counts = [Counts() for _ in declaration.parts]
        self._received = [self._version_of(fragment) for fragment in range(len(declaration.parts))]

    def _version_of(self, fragment: int) -> int:
        """The version of a fragment that was received last; with rounds, the clock as of which it is."""
        flat, groups = self._worker.parameters, self._declaration.parts[fragment].groups
        return min(flat.versions[block.index] for block in flat.layout.blocks if block.group in groups)

    @overload
    def step(self, closure: None = None, *, tokens: float = 1) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, tokens: float = 1) -> float: ...
    @uncompiled
    def step(self, closure: Callable[[], float] | None = None, *, tokens: float = 1) -> float | None:
        """Step the program's optimizer; begin an exchange, or mix in what one has brought, if it is time for that.

        Args:
            closure: as the optimizer takes it.
            tokens: what this step has learned from, in tokens or samples. A learner's weight in a merge is, counted since it
                received the fragment last, tokens x tokens per step (arXiv 2604.21428).

        Raises:
            PsdError: what the shards or the connection refuse. The local step is made; the exchange is tried again, with the
                same difference, at the next call.
        """
        size = weight_of(tokens, "tokens")
        self._follow()
        self._is_stepping = True
        try:
            loss = self._inner.step() if closure is None else self._inner.step(closure)
        finally:
            self._is_stepping = False
        if self._resumed_at:
            self._step_s.add(time.monotonic() - self._resumed_at)
        self.local_step += 1
        self._tokens += size
        for counts in self._counts:
            counts.add(1, size)
        if self._schedule is not None:
            self._schedule.on_optimizer_step()
        try:
            self._exchange()
        finally:
            self._resumed_at = time.monotonic()
        return loss

    def _follow(self) -> None:
        """Begin anew if the job has gone back to a checkpoint, which another call has told the program."""
        if self._times_gone_back != self._worker.times_gone_back:
            self._drop()

    def _drop(self) -> None:
        """Give up what is under way, and begin anew."""
        self._flights, self._look = [], None
        self._begin()

    @property
    def _next(self) -> int:
        """Local step after which there is something to exchange, or to land."""
        steps = [self._departs_at - self._looks_ahead] if self._has_room else []
        steps += [self.local_step + 1 if flight.is_told else flight.departure.due for flight in self._flights[:1]]
        return min(steps)

    @property
    def _has_room(self) -> bool:
        """True if another exchange may depart, although one may not have landed."""
        return len(self._flights) < self._local.under_way

    @property
    def _looks_ahead(self) -> bool:
        """True if the learner asks for the job's clock a step before it departs."""
        return self._is_decoupled and not self._waits

    def _exchange(self) -> None:
        while self._flights and self._is_landing(self._flights[0]):
            self._land()
        if self._has_room and self.local_step >= self._departs_at - self._looks_ahead:
            clock = self._next_clock()
            if clock is not None:
                self._depart(clock)
                if self._local.delay == 0:
                    self._land()

    def _is_landing(self, flight: Flight) -> bool:
        """True if it is time to take what an exchange has brought, or to wait for it; or to raise its error."""
        is_due = flight.is_failed or self.local_step >= flight.departure.due
        return is_due and (self._waits or flight.ended.is_set())

    @property
    def _waits(self) -> bool:
        """True if the learner waits for exchanges that take longer than the delay."""
        return not self._is_decoupled or self._local.delay == 0

    def _next_clock(self) -> int | None:
        """The job's clock, by which it is some fragment's turn to be exchanged now; None: not yet.

        A decoupled learner asks for the clock, while it makes the step before: others have not waited for it. If it is so much
        slower that it would exchange a fragment again that it has just exchanged, it leaves that round to the others. So does
        one that was not chosen for it, and asks again when its next exchange is due.
        """
        last = self._flights[-1] if self._flights else None
        if not self._is_decoupled:
            return self.ps.clock if last is None or last.ended.is_set() else last.departure.spare.chosen_at + 1
        if last is not None and (last.is_failed or not last.ended.is_set()):
            return None
        if self._look is None:
            self._look = BackgroundCall(self._worker, self._worker.learn_clock)
        if self.local_step < self._departs_at or not (self._waits or self._look.ended.is_set()):
            return None
        look, self._look = self._look, None
        self._wait_for(look)
        if self._is_sampled:
            if not self._worker.sits_out:
                return self.ps.clock
            self._exchanges += 1
            self._departed = self.local_step
            return None
        clock, steps = self.ps.clock, [counts.steps for counts in self._counts]
        if last is not None and clock % self._local.count == last.departure.fragment:
            return None
        is_new = 2 * steps[clock % self._local.count] < max(steps)
        return None if is_new and self.local_step < self._departs_at + self._local.interval else clock

    def _wait_for(self, call: BackgroundCall) -> None:
        try:
            self._wait(call)
        except RolledBack:
            self._drop()
            raise

    def _wait(self, call: BackgroundCall) -> None:
        """Wait for the end of a call; raise its error."""
        call.wait()

    @property
    def _pace(self) -> float:
        """The share of the fastest learner's steps that this one makes, at most 1."""
        fastest = self._worker.learner.fastest_step_s
        return min(1.0, fastest / self._step_s.seconds) if self._local.is_paced and fastest and self._step_s.seconds else 1.0

    @property
    def _departs_at(self) -> int:
        """The local step after which the next exchange begins."""
        following = self._local.step_of(self._exchanges)
        if not (self._is_decoupled or self._local.is_paced):
            return following
        return self._departed + max(1, round(self._pace * (following - self._local.step_of(self._exchanges - 1))))

    @torch.no_grad()
    def _depart(self, clock: int) -> None:
        """Begin to exchange the fragment whose turn it is at this clock."""
        declaration, worker, local = self._declaration, self._worker, self._local
        fragment = clock % local.count
        part = declaration.parts[fragment]
        counts, self._counts[fragment] = self._counts[fragment], Counts()
        views = as_tensors(worker.gradients)
        present = np.zeros(len(declaration.tensors), np.bool_)
        for index, value in self._parameters.whole([declaration.trained[position] for position in part.trained]):
            present[index] = True
            base = self._base[index]
            views[index].copy_(base - value.to(base.device, base.dtype))
        options = iter(self.outer_groups)
        scalars = [
            scalar_values(spec, {} if spec.is_static else next(options), index) for index, spec in enumerate(declaration.groups)
        ]
        note = worker.learner.make_note(
            steps=self.local_step,
            tokens=self._tokens,
            step_s=self._step_s.seconds,
            base=self._received[fragment],
            of_steps=counts.steps,
            of_tokens=counts.tokens,
        )
        pace, departed = self._pace, self.local_step
        delay = max(1, round(pace * local.delay)) if local.delay else 0
        self._exchanges += 1
        self._departed = departed
        spare_s = max(0.0, delay * self._step_s.seconds - self._fetch_s.seconds)
        spare = Spare(time.monotonic() + spare_s, clock, worker.unsent_state)

        def exchange(turn: Turn) -> None:
            worker.learner.note = note
            worker.push_pull_flat(scalars, counts.weight, present, job_part=part.job_part, turn=turn, spare=spare)
            spare.ended_at = time.monotonic()

        def bring(is_late: bool) -> FreshValues:
            if is_late:
                worker.take_back(clock, part.groups)
            return self._brought(part.groups)

        departure = Departure(exchange, bring, fragment, counts, spare, departed, departed + delay)
        self._flights.append(Flight(worker, departure, self._flights[-1] if self._flights else None))

    @torch.no_grad()
    def _brought(self, own: Collection[int]) -> FreshValues:
        """Copies of the groups that an exchange has changed, and of its own. Called in the exchange's turn."""
        declaration, flat = self._declaration, self._worker.parameters
        changed = {block.group for block in flat.layout.blocks if flat.versions[block.index] != self._versions[block.index]}
        self._versions = list(flat.versions)
        wanted = changed.union(own)
        values = {
            index: as_tensor(flat.views[index]).clone()
            for index in declaration.trained
            if declaration.tensors[index].group in wanted
        }
        versions = tuple(self._version_of(fragment) for fragment in range(len(declaration.parts)))
        return FreshValues(frozenset(changed), values, versions)

    def _settle(self) -> None:
        """End the exchanges under way."""
        if self._look is not None:
            look, self._look = self._look, None
            self._wait_for(look)
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the first exchange under way, and take what it has brought."""
        if self._flights[0].is_told:
            again: list[Flight] = []
            for flight in self._flights:
                again.append(flight.again(again[-1] if again else None))
            self._flights = again
        flight = self._flights[0]
        self._wait_for(flight)
        self._flights.pop(0)
        spare = flight.departure.spare
        if spare.decided_at and spare.ended_at:
            self._fetch_s.add(spare.ended_at - spare.decided_at)
        self._take(flight.departure, is_repeated=flight.is_repeated)

    @torch.no_grad()
    def _take(self, departure: Departure, *, is_repeated: bool) -> None:
        """Mix a fragment's received values in; carry what was learned of others over to new bases of theirs.

        If the difference came late, all that was learned of the fragment is carried over, too, but in blocks that have counted
        it; if it was sent again, or has taken longer than the delay, what was learned since it was taken."""
        declaration, brought = self._declaration, departure.brought
        assert brought is not None
        own = declaration.parts[departure.fragment].groups
        is_mixed = not departure.is_late and not is_repeated and self.local_step <= departure.due
        differences = [] if is_mixed else as_tensors(self._worker.gradients)  # of blocks that have not counted theirs, 0
        if departure.is_late:
            self._counts[departure.fragment].add(departure.counts.steps, departure.counts.tokens)
        for fragment, part in enumerate(declaration.parts):
            if fragment == departure.fragment or brought.groups.intersection(part.groups):
                self._received[fragment] = brought.versions[fragment]
        for index, value in brought.values.items():
            is_own = declaration.tensors[index].group in own
            if is_own and is_mixed:
                self._parameters.mix(index, value, self._local.share)
            else:
                moved = value - self._base[index]
                self._parameters.move(index, moved + differences[index] if is_own else moved)
            self._base[index] = value
        if self.on_exchange is not None:
            self.on_exchange(
                Exchanged(
                    departure.spare.chosen_at,
                    departure.fragment,
                    not departure.is_late,
                    departure.at,
                    self.local_step,
                    departure.counts.weight,
                    is_mixed,
                    tuple(self._received),
                )
            )

    @uncompiled
    def pull(self) -> None:
        """Take the job's current parameters into the model, for evaluation or at the end; what this learner has learned since
        its last exchanges is dropped. An exchange under way is waited for."""
        self._settle()
        self._worker.pull_flat()
        exchanges, step, departed = self._exchanges, self.local_step, self._departed
        self._begin()
        self._exchanges, self.local_step, self._departed = exchanges, step, departed
        self._buffers.follow(self._worker.times_gone_back)

    def stop(self) -> int:
        """End the job for all learners at one exchange; ParameterServer.stop says how."""
        self._settle()
        return self.ps.stop()

    def close(self) -> None:
        """Finish: no other learner waits for this one any more. The end of the program does the same."""
        try:
            self._settle()
        finally:
            self.ps.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the program's own optimizer, and the local step. It is in no checkpoint of the shards: a learner that is
        restarted without it begins with fresh moments."""
        return {**self._inner.state_dict(), "local_step": self.local_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of the program's own optimizer. The local step stays: it follows from the job's clock."""
        self._inner.load_state_dict({name: value for name, value in state_dict.items() if name != "local_step"})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def keep_schedule(self, given: LRScheduler, every: int) -> DistributedScheduler:
        """Keep a schedule at the local step. Called by `scheduler`; not for programs."""
        if self._schedule is not None:
            raise InvalidRequest("scheduler: the optimizer has one already; combine several by torch's ChainedScheduler")
        self._schedule = DistributedScheduler(given, lambda: self.local_step, every)
        return self._schedule


def refuse_inner_steps(owner: LocalOptimizer) -> Callable[..., None]:
    """A hook that refuses a step of the given optimizer which its owner does not make: it would never be exchanged."""

    def check(given: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if not owner._is_stepping:  # noqa: SLF001 - of its own module
            raise InvalidRequest(
                f"{type(given).__name__}.step: this optimizer was given to psd.distribute(); step its result, which counts the "
                "local steps: optimizer = psd.distribute(model, optimizer, local=...)"
            )

    return check
