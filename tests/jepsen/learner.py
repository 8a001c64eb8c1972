"""The learner of a trial: local steps that can be told apart, and exchanges, of which its history says what became of each:

    {"t": 12.3, "e": "invoke", "op": "step", "number": 7, "local": 4, "clock": 4}
    {"t": 12.4, "e": "exchange", "clock": 4, "fragment": 0, "is_counted": true, "departed": 4, "landed": 5, "is_mixed": true,
     "weight": 4.0, "absent": [6], "twice": []}

local: the local step that it makes; after an error it makes the next one. absent, twice: of its own steps, those that its own
parameters of the fragment have not, or not once, after the exchange. Uses the public face of psd alone.

A learner may be a group of processes, which do the same, as if they had averaged their gradients; rank 0 tells them when to
end. Each writes a history of its own; after each step it says what its parameters are, as a checksum ("digest").
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from learner_cells import LearnerCells, fragment_names
from merge_replay import MOMENTUM, WEIGHT_UNIT
from planted_in_learners import PLANTS
from program import Failed, Program
from torch import distributed

import psd_client
import psd_client.torch as psd

GROUP_S = 60.0
"""Within which the ranks of a group must meet."""


class Learner(Program):
    """One life of a learner, or of one of its ranks."""

    optimizer: Any = None

    def _meet(self) -> Any:
        """The group of this learner's processes, or None."""
        if self._options.ranks == 1:
            return None
        place = Path(self._options.history.replace(f"-rank-{self._options.group_rank}", "")).with_suffix(".store")
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{place}",
            rank=self._options.group_rank,
            world_size=self._options.ranks,
            timeout=timedelta(seconds=GROUP_S),
        )
        return distributed.group.WORLD

    def connect(self) -> psd_client.ParameterServer | None:
        """Join the job; rank 0 alone has a connection."""
        options, given = self._options, self._options.learning
        group = self._meet()
        if not options.group_rank:
            connect = lambda: psd_client.connect(options.servers, options.rank, options.workers, **options.connect)  # noqa: E731
            self.ps = self.call("connect", connect)
        self._cells = LearnerCells.of(options.codec, options.declared.get("pull") or "", given["merge"])
        length = self._cells.length(options.size, options.shards)
        self._names = fragment_names(given["fragments"])
        self._model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(length)) for name in self._names})
        local = psd.Local(
            given["steps"],
            psd_client.SGD(lr=1, momentum=MOMENTUM if given["merge"] == "heloco" else 0.0),
            fragments=given["fragments"],
            delay=given["delay"],
            alpha=0.0,
            merge=given["merge"],
        )
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        inner = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self.optimizer = self.call(
            "declare", lambda: psd.distribute(self._model, inner, local=local, ps=self.ps, group=group, **options.declared)
        )
        self.optimizer.on_exchange = self._on_exchange
        self._made: list[int] = []
        self._begun = self.optimizer.local_step
        self._exchanged = 0
        return self.ps

    def _on_exchange(self, exchanged: Any) -> None:
        values = self._model[self._names[exchanged.fragment]].detach().numpy()
        least, most = self._cells.counts(values, self._made)
        self._exchanged += 1
        self._history.write(
            "exchange",
            clock=exchanged.clock,
            fragment=exchanged.fragment,
            is_counted=exchanged.is_counted,
            departed=exchanged.departed,
            landed=exchanged.landed,
            is_mixed=exchanged.is_mixed,
            weight=exchanged.weight / WEIGHT_UNIT,
            absent=[number for number, count in zip(self._made, least, strict=True) if count == 0],
            twice=[number for number, count in zip(self._made, most, strict=True) if count > 1],
        )
        if self._options.plant:
            PLANTS[self._options.plant](exchanged, values, self._made[exchanged.departed - self._begun - 1], self._cells.write)

    def _reaction(self, error: Exception) -> str:
        self._last = 0, ()  # it has begun, so that it goes on after errors
        return super()._reaction(error)

    def _step(self, does_push: bool) -> None:
        del does_push
        number = next(self._left)
        gradients = [self._model[name].grad.numpy() for name in self._names]
        for gradient in gradients:
            self._cells.write(gradient, number)
        self._made.append(number)
        try:
            share = 1 / self._options.ranks  # so that a step is one of a single token
            self.call("step", lambda: self.optimizer.step(tokens=share), number=number, local=self.optimizer.local_step + 1)
        except Failed as failed:
            self._pause(0.1)
            if failed.reaction == "abort":
                self._abort()
            if failed.reaction in ("end", "restart"):
                raise
        for gradient in gradients:
            self._cells.write(gradient, number, 0)
        self._pause(self._style.pace_s)

    def _state(self) -> dict[str, Any]:
        if self._options.ranks == 1 or self.optimizer is None:
            return super()._state()
        digest = 0
        for name in self._names:
            digest = zlib.crc32(self._model[name].detach().numpy().data, digest)
        return {**super()._state(), "digest": digest}

    def _must_stop(self) -> bool:
        if self._options.ranks == 1:
            return super()._must_stop()
        told = torch.tensor([self._options.group_rank == 0 and super()._must_stop()], dtype=torch.uint8)
        distributed.broadcast(told, 0)
        return bool(told)

    def run(self) -> None:
        """Connect, train, and end as the style says; by what torch.distributed raises, too, when another rank has gone."""
        try:
            self._live()
        except RuntimeError as error:
            if self._options.ranks == 1:
                raise
            self._history.write("end", how="parted", text=str(error)[:500])
            raise

    def _live(self) -> None:
        ps = self.connect()
        how = self._style.ending
        if how == "close":
            self.train()
            self.call("close", self.optimizer.close)
        elif how == "with" and ps is not None:
            with ps:
                self.train()
        else:
            self.train()
        self._history.write("end", how=how, **self._state())
        if self._options.ranks > 1:
            distributed.destroy_process_group()

    def finish(self) -> None:
        """Instead of `run`: make one exchange."""
        self.connect()
        while not self._exchanged:
            self._step(does_push=False)
        self.call("close", self.optimizer.close)
        self._history.write("end", how="finish", **self._state())
