"""A learner: steps of the program's own torch optimizer, and exchanges with the shards, fragment by fragment, now and then.

What travels is the base less the parameters; the base is what the learner has received last. While an exchange is under way the
learner may go on: the call then runs in a thread of its own. A difference that the shards have dropped, because it came late,
stays in the learner's parameters, and so in its next difference. So does what it has learned since, if the base of a fragment
that it was not exchanging has changed. Must not know how fragments are chosen, or how anything travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from psd.contract.errors import InvalidRequest, RolledBack
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer, worker_of
from psd_client.optimizers import scalar_values
from psd_client.torch.buffers import kept_buffers
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.job_optimizer import JobOptimizer
from psd_client.torch.local import Local
from psd_client.torch.parameters import as_tensors
from psd_client.torch.schedule import DistributedScheduler, register
from psd_client.torch.uncompiled import uncompiled
from psd_client.torch.whole import OwnParameters
from psd_client.worker.background_call import BackgroundCall
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.worker import Turn

_WEIGHT_UNIT = 2.0**-20
"""Weights are multiplied by this: they are squares of numbers of tokens, and a push's weight is at most 10^15."""


class LocalOptimizer(JobOptimizer):
    """A torch optimizer that steps in this process, and whose results are exchanged; made by `distribute` with `local`.

    Its param_groups and its state are those of the optimizer that was given.

    Attributes:
        ps: the connection. Its clock counts exchanges.
        local_step: local steps that this learner has made. After a restart it is the step of the job's last exchange.
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
        self._schedule: DistributedScheduler | None = None
        self._is_stepping = False
        self._flight: Flight | None = None
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
        self._counts = [StepCounts() for _ in declaration.parts]

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
        self.local_step += 1
        for counts in self._counts:
            counts.steps += 1
            counts.tokens += size
        if self._schedule is not None:
            self._schedule.on_optimizer_step()
        self._exchange()
        return loss

    def _follow(self) -> None:
        """Begin anew if the job has gone back to a checkpoint, which another call has told the program."""
        if self._times_gone_back != self._worker.times_gone_back:
            self._flight = None
            self._begin()

    @property
    def _next(self) -> int:
        """Local step after which there is something to exchange, or to land."""
        if self._flight is None:
            return self._local.step_of(self._exchanges)
        return self.local_step + 1 if self._flight.is_told else self._flight.due

    def _exchange(self) -> None:
        local = self._local
        if self._flight is not None and (self._flight.is_failed or self.local_step >= self._flight.due):
            self._land()
        if self._flight is None and self.local_step >= local.step_of(self._exchanges):
            self._exchanges += 1
            self._depart(self.ps.clock % local.count)
            if not local.delay:
                self._land()

    @torch.no_grad()
    def _depart(self, fragment: int) -> None:
        """Begin to exchange a fragment: the next in turn, by the job's clock."""
        declaration, worker = self._declaration, self._worker
        part = declaration.parts[fragment]
        counts, self._counts[fragment] = self._counts[fragment], StepCounts()
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

        def call(turn: Turn) -> None:
            worker.push_pull_flat(scalars, counts.weight, present, job_part=part.job_part, turn=turn)

        due, late_before = self.local_step + self._local.delay, worker.stats()["blocks_late"]
        self._flight = Flight(worker, call, fragment, due, late_before)

    def _settle(self) -> None:
        """End the exchange under way, if there is one."""
        if self._flight is not None:
            self._land()

    def _land(self) -> None:
        """Wait for the exchange under way, and take what it has brought."""
        flight = self._flight
        assert flight is not None
        if flight.is_told:
            flight = self._flight = flight.again()
        try:
            self._wait(flight)
        except RolledBack:
            self._flight = None
            self._begin()
            raise
        self._flight = None
        self._take(flight)

    def _wait(self, flight: Flight) -> None:
        """Wait for the end of an exchange; raise its error."""
        flight.wait()

    @torch.no_grad()
    def _take(self, flight: Flight) -> None:
        """Mix a fragment's received values in; carry what was learned of others over to new bases of theirs.

        If the difference came late, all that was learned of the fragment is carried over, too; if it was sent again, what was
        learned since it was taken."""
        declaration, flat = self._declaration, self._worker.parameters
        views, differences = as_tensors(flat), as_tensors(self._worker.gradients)
        received = {block.group for block in flat.layout.blocks if flat.versions[block.index] != self._versions[block.index]}
        self._versions = list(flat.versions)
        own = declaration.parts[flight.fragment].groups
        is_mixed = not flight.is_late and not flight.is_repeated
        share = self._local.share
        for index in declaration.trained:
            group = declaration.tensors[index].group
            base, value = self._base[index], views[index]
            if group in own and is_mixed:
                self._parameters.mix(index, value, share)
            elif group in received or group in own:
                has_counted = group in own and not flight.is_late
                self._parameters.move(index, value - base + differences[index] if has_counted else value - base)
            else:
                continue
            base.copy_(value)

    @uncompiled
    def pull(self) -> None:
        """Take the job's current parameters into the model, for evaluation or at the end; what this learner has learned since
        its last exchanges is dropped. An exchange under way is waited for."""
        self._settle()
        self._worker.pull_flat()
        exchanges, step = self._exchanges, self.local_step
        self._begin()
        self._exchanges, self.local_step = exchanges, step
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


class StepCounts:
    """Counts of a learner's steps and tokens since it received a fragment last."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0.0

    @property
    def weight(self) -> float:
        """The learner's weight in a merge."""
        return self.tokens * (self.tokens / self.steps) * _WEIGHT_UNIT


class Flight(BackgroundCall):
    """One exchange of a fragment.

    Args:
        call: makes the exchange; again, with the same difference, if it has failed.
        due: local step at which the learner waits for its end. late_before: count of blocks that had been late before it.

    Attributes:
        is_repeated: it was made again. is_told: its error has been raised.
    """

    is_repeated = is_told = False

    def __init__(self, worker: FlatCalls, call: Callable[[Turn], None], fragment: int, due: int, late_before: int) -> None:
        self.fragment, self.due = fragment, due
        self._worker = worker
        self._late_before = late_before
        super().__init__(worker, call, "psd-exchange")

    def again(self) -> Flight:
        """Make the call again."""
        flight = Flight(self._worker, self._call, self.fragment, self.due, self._late_before)
        flight.is_repeated = True
        return flight

    @property
    def is_failed(self) -> bool:
        """True once the call has ended with an error."""
        return self.ended.is_set() and self.error is not None

    @property
    def is_late(self) -> bool:
        """True if the shards have closed the round without the difference."""
        return self._worker.stats()["blocks_late"] > self._late_before

    @override
    def wait(self) -> None:
        self.ended.wait()
        self.is_told = self.error is not None
        super().wait()


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
