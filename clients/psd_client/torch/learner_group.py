"""A learner of several processes: rank 0 of their group is the job's worker, and the others follow it.

They meet at the local steps at which there is something to exchange or to land, and for `pull` and `stop`: rank 0 begins a
talk, does as any learner does, and says what the others must do with their parameters; the talk ends with the job's state, or
with the error that all ranks then raise. So the ranks decide nothing by themselves, and their collective calls have one order.
Must not know how anything travels, or how parameters are spread.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from psd.contract.environment import check_rank_of_learner
from psd.contract.errors import InvalidRequest, InvalidTensor, PsdError, error_from
from psd.contract.keywords import JobKeywords
from psd_client.client import ParameterServer, worker_of
from psd_client.faces import connection_of
from psd_client.lanes.flat import FlatBuffers
from psd_client.torch.buffers import Buffers
from psd_client.torch.declaration import TorchDeclaration, read_declaration
from psd_client.torch.flight import Counts, Smoothed
from psd_client.torch.given import given_fragments
from psd_client.torch.group_channel import GroupChannel
from psd_client.torch.group_parameters import LeadParameters, check_places, gather_parts, reshard, write_shared
from psd_client.torch.job_optimizer import JobOptimizer
from psd_client.torch.learner import LocalOptimizer, refuse_inner_steps
from psd_client.torch.local import Local
from psd_client.torch.parameters import as_tensors
from psd_client.torch.schedule import register
from psd_client.torch.uncompiled import uncompiled
from psd_client.worker.background_call import BackgroundCall
from psd_client.worker.session.orders import Drained

_TICK_S = 10.0
"""Seconds after which rank 0 tells the others that it still waits: their collective calls have a time limit of their own."""


def distribute_group(
    model: torch.nn.Module,
    optimizer: Any,
    local: Local,
    group: Any,
    buffers: str,
    ps: ParameterServer | None,
    job: JobKeywords,
    of_connect: Mapping[str, Any],
) -> LocalOptimizer:
    """Do what `distribute` says, on each rank of a learner's group.

    Raises:
        TypeError: this is no process group, or a rank other than 0 has a connection.
        InvalidTensor: the ranks' models differ, or a DTensor has parts elsewhere.
        ConfigError: torchrun's rank would be taken for the learner's.
    """
    declaration = read_declaration(model, given_fragments(model, optimizer, local), buffers, is_spread=True)
    channel = GroupChannel(group, declaration.parameters[0].device)
    _check_alike(channel, declaration)
    declaration.merge(local.merges(model, [declaration.parameters[index] for index in declaration.trained]))
    check_places(declaration, channel.members)
    if channel.rank > 0:
        if ps is not None:
            raise TypeError(f"ps: this is rank {channel.rank} of the learner's group, and rank 0 alone has a connection")
        return MemberOptimizer(optimizer, model, declaration, channel)
    parameters = LeadParameters(declaration.parameters, channel)

    def write(flat: FlatBuffers) -> None:
        views = as_tensors(flat)
        for index, value in parameters.whole(range(len(declaration.parameters))):
            views[index].copy_(value)
        Buffers(declaration, flat).write()

    made: list[LeadOptimizer] = []
    with _talk(channel, parameters, "distribute", lambda: made[0].told if made else {}):
        channel.total(0)
        if ps is None and of_connect.get("rank") is None:
            check_rank_of_learner()
        with connection_of(ps, of_connect) as connection, torch.no_grad():
            worker = worker_of(connection)
            worker.declare_tensors(
                declaration.tensors, declaration.groups, initial=write, is_learner=True, sample=local.sample, **job
            )
            views = as_tensors(worker.parameters)
            for index in set(range(len(declaration.parameters))).difference(declaration.trained):
                parameters.mix(index, views[index], 0)
            made.append(LeadOptimizer(optimizer, connection, model, declaration, local, channel, parameters))
    return made[0]


def _check_alike(channel: GroupChannel, declaration: TorchDeclaration) -> None:
    """Raise InvalidTensor, on all ranks, if the ranks' models differ."""
    own = repr([(spec.name, spec.shape, spec.dtype, spec.group) for spec in declaration.tensors])
    digests = channel.everybodys(hashlib.sha256(own.encode()).digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise InvalidTensor(
            f"group: rank {other} has another model than rank 0: names, shapes, dtypes or fragments of its parameters differ"
        )


@contextmanager
def _talk(
    channel: GroupChannel, parameters: LeadParameters, call: str, state: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """Talk to the other ranks, who make the same call; they end it as this block ends, by its error, too."""
    channel.say({"do": "begin", "call": call})
    try:
        yield
        parameters.flush()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the error may be that a rank has gone
            parameters.flush()
            channel.say({"do": "fail", **_said(error), **state()})
        raise
    channel.say({"do": "end", **state()})


def _said(error: BaseException) -> dict[str, Any]:
    """An error of rank 0, for the others."""
    if isinstance(error, Drained):
        return {"drained": [error.clock, error.asked_by]}
    detail = error.detail if isinstance(error, PsdError) else {}
    return {"reason": type(error).__name__, "text": str(error), "detail": detail}


def _heard(said: Mapping[str, Any]) -> BaseException:
    """The same error on another rank; PsdError in the place of what is not psd's."""
    if "drained" in said:
        return Drained(*said["drained"])
    return error_from(said["reason"], f"rank 0 of the learner's group: {said['text']}", said["detail"])


class LeadOptimizer(LocalOptimizer):
    """A learner's rank 0, which has the connection."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        ps: ParameterServer,
        model: torch.nn.Module,
        declaration: TorchDeclaration,
        local: Local,
        channel: GroupChannel,
        parameters: LeadParameters,
    ) -> None:
        self._channel, self._model, self._shared = channel, model, parameters
        self._meeting = 0
        super().__init__(inner, ps, declaration, local, parameters)

    @override
    def _begin(self) -> None:
        super()._begin()
        self._buffers.follow(self._worker.times_gone_back)
        self._shared.flush()
        self._channel.say({"do": "buffers"})
        for buffer in self._declaration.buffers:
            self._channel.share(buffer)

    @property
    def told(self) -> dict[str, Any]:
        """The state that the other ranks learn at the end of a talk."""
        self._meeting = max(self._next, self.local_step + 1)
        ps, step = self.ps, self.local_step
        facts = {"rank": ps.rank, "world_size": ps.world_size, "clock": ps.clock, "is_over": ps.is_over}
        return {"job": facts, "local_step": step, "meeting": self._meeting}

    @contextmanager
    def _talking(self, call: str) -> Iterator[dict[str, Any]]:
        """Talk to the other ranks. Yields a dict for what else they learn."""
        more: dict[str, Any] = {}
        with _talk(self._channel, self._shared, call, lambda: {**self.told, **more}):
            reshard(self._model)
            tokens = self._channel.total(0)  # of the others; its own are counted
            self._tokens += tokens
            for counts in self._counts:
                counts.add(0, tokens)
            super()._follow()
            yield more

    @override
    def _follow(self) -> None:
        """Nothing: the ranks go back when they meet."""

    @override
    def _exchange(self) -> None:
        if self.local_step >= self._meeting:
            with self._talking("step"):
                super()._exchange()

    @override
    def _wait(self, call: BackgroundCall) -> None:
        while not call.ended.wait(_TICK_S):
            self._channel.say({"do": "wait"})
        super()._wait(call)

    @override
    @uncompiled
    def pull(self) -> None:
        with self._talking("pull"):
            super().pull()

    @override
    def stop(self) -> int:
        with self._talking("stop") as more:
            more["end"] = super().stop()
        return int(more["end"])

    @override
    def close(self) -> None:
        """Finish. No talk: the other ranks may be gone."""
        try:
            for call in (self._look, *self._flights):
                if call is not None:
                    call.wait()
        finally:
            self.ps.close()


class FollowedJob:
    """A job as a rank without a connection knows it, as of its learner's last exchange.

    Attributes:
        rank, world_size: number of the learner, and how many there are. clock, is_over: of rank 0's connection.
    """

    def __init__(self, rank: int, world_size: int, clock: int, is_over: bool) -> None:
        self.rank, self.world_size, self.clock, self.is_over = rank, world_size, clock, is_over

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ps.{name}: this rank of the learner's group has no connection; call it on the group's rank 0")


class MemberOptimizer(LocalOptimizer):
    """Another rank of a learner: it steps as rank 0 does, and does with its parameters what that says."""

    ps: Any

    def __init__(
        self, inner: torch.optim.Optimizer, model: torch.nn.Module, declaration: TorchDeclaration, channel: GroupChannel
    ) -> None:
        self._channel, self._model, self._declaration = channel, model, declaration
        self._own = Counts()
        self._counts, self._tokens = [self._own], 0.0
        self._step_s, self._resumed_at = Smoothed(), 0.0
        self._inner, self.state, self._schedule, self._is_stepping = inner, inner.state, None, False
        self.local_step = 0
        self.outer_groups = [group for part in declaration.parts for group in part.given.optimizer.param_groups]
        told = self._hear("distribute")
        JobOptimizer.__init__(self, inner, FollowedJob(**told["job"]))  # type: ignore[arg-type]
        self.state = inner.state
        self._know(told)
        register(self, self, inner)
        inner.register_step_pre_hook(refuse_inner_steps(self))

    def _know(self, told: Mapping[str, Any]) -> None:
        self.ps = FollowedJob(**told["job"])
        self.local_step, self._meeting = told["local_step"], told["meeting"]

    def _meet(self, call: str) -> dict[str, Any]:
        """Do what rank 0 says until the call has ended."""
        reshard(self._model)
        told = self._hear(call)
        self._know(told)
        return told

    def _hear(self, call: str) -> dict[str, Any]:
        channel, parameters = self._channel, self._declaration.parameters
        begun = channel.hear()
        if begun["call"] != call:
            raise InvalidRequest(f"{call}: rank 0 of the learner's group calls {begun['call']}; all ranks make the same calls")
        tokens, self._own.tokens = self._own.tokens, 0.0
        channel.total(tokens)
        while True:
            said = channel.hear()
            match said["do"]:
                case "gather":
                    gather_parts(parameters, said["indices"])
                case "write":
                    write_shared(parameters, channel, said["writes"])
                case "buffers":
                    self._take_buffers()
                case "end":
                    return said
                case "fail":
                    if "job" in said:
                        self._know(said)
                    raise _heard(said)

    @torch.no_grad()
    def _take_buffers(self) -> None:
        for buffer in self._declaration.buffers:
            value = self._channel.share(torch.empty_like(buffer))
            if not torch.equal(buffer, value.to(buffer.device)):
                buffer.copy_(value)

    @override
    def _follow(self) -> None:
        """Nothing: rank 0 follows the job."""

    @override
    def _exchange(self) -> None:
        if self.local_step >= self._meeting:
            self._meet("step")

    @override
    @uncompiled
    def pull(self) -> None:
        self._meet("pull")

    @override
    def stop(self) -> int:
        return int(self._meet("stop")["end"])

    @override
    def close(self) -> None:
        """Nothing: rank 0 has the connection."""
