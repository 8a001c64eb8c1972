"""Histories that are made up, for the tests of those who judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from batch_counts import check_batches
from batches import batches_of
from cells import NUMBERS, PER_LIFE, TENSORS, Counts, Gradients, initial
from conduct import check_conduct
from counting import compare
from history import Histories
from learner_counts import check_learners
from lossy_cells import LOSSY, LossyCells
from merge_replay import Part, replayed
from numpy.typing import NDArray
from outcome import Outcome
from plan import Fault, Plan, Style
from prefixes import check_prefixes
from residual_counts import check_residuals
from restores import Restored, keep

SHARDS = 2


class Story:
    """A history of one worker that is made up, call by call, and the parameters that the job has ended with."""

    def __init__(self, directory: Path, mode: str = "fast", life: int = 0, **options: Any) -> None:
        self._directory, self._name = directory, f"worker 0 life {life}"
        self._plan = Plan(1, "grpc", mode, 1, SHARDS, styles=(Style(),), **options)
        self._lines: list[dict[str, Any]] = []
        self._stats = dict.fromkeys(("pushes", "blocks_counted", "blocks_duplicate", "blocks_late", "pushes_dropped"), 0)
        self.t = 10.0
        names = (*(f"shard {index}" for index in range(SHARDS)), self._name)
        self.timeline: list[dict[str, Any]] = [{"t": self.t, "what": "start", "name": name} for name in names]
        self.parameters = initial("small", SHARDS, self._plan.codec)
        self._residual = np.zeros_like(self.parameters.get(LOSSY, np.zeros(0, np.float32)))
        self.shard_logs = [""] * SHARDS
        self._batches: NDArray[np.int64] | None = None

    def call(self, op: str, result: str = "ok", *, took: float = 0.1, clock: int = 0, **change: Any) -> None:
        """A call; number: of its gradient; change: of the stats."""
        number = change.pop("number", None)
        pushed = {} if number is None else {"number": number, "tensors": list(self._plan.names)}
        self._write(e="invoke", op=op, clock=clock, **pushed)
        self.t += took
        if result == "killed":
            return
        fields = {name: change.pop(name) for name in ("text", "is_psd", "detail", "trace", "seen") if name in change}
        for name, value in change.items():
            self._stats[name] += value
        outcome = {"e": "ok"} if result == "ok" else {"e": "error", "class": result}
        self._write(**outcome, op=op, clock=clock + (result == "ok"), stats=dict(self._stats), **fields)

    def push_pull(self, number: int, result: str = "ok", **change: Any) -> None:
        """Which counts in all blocks, by what its worker is told."""
        counted = {"blocks_counted": 4} if result == "ok" and "blocks_counted" not in change else {}
        self.call("push_pull", result, number=number, **counted, **change)

    def say(self, text: str) -> None:
        self._write(e="log", level="WARNING", text=text)

    def count(self, number: int, times: int = 1, tensors: tuple[str, ...] = TENSORS, part: slice = slice(None)) -> None:
        """What the shards have done with a gradient."""
        gradients = Gradients("small", SHARDS).write(number, tensors)
        for name in tensors:
            self.parameters[name][part] -= times * gradients[name][part]

    def count_lossy(self, number: int, *, times: int = 1, keeps: bool = True) -> None:
        """What the shards have done with a compressed gradient; keeps: its worker has kept the residual of the one before."""
        cells, counts = LossyCells(self._plan.codec, NUMBERS, PER_LIFE), Counts(self.parameters, SHARDS, self._plan.codec)
        if not keeps:
            self._residual[...] = 0
        for first, values in counts.lossy.values():
            part = slice(first, first + len(values))
            sent, self._residual[part] = cells.sent(number, self._residual[part], first)
            self.parameters[LOSSY][part] -= times * sent

    def learn(self, number: int, local: int, result: str = "ok", *, clock_before: int = 0, **exchanged: Any) -> None:
        """A local step, and an exchange of fragment 0 that ends in it."""
        self._write(e="invoke", op="step", clock=clock_before, number=number, local=local)
        if exchanged:
            told = {"e": "exchange", "clock": 0, "fragment": 0, "landed": local, "is_mixed": False, "weight": 1.0}
            told |= {"absent": [], "twice": []}
            self._write(**told | exchanged)
        self._write(**{"e": "ok"} if result == "ok" else {"e": "error", "class": result, "detail": {"timeline": 1, "step": 0}})

    def group(self, own: Sequence[int], of_mate: Sequence[int], mate_status: int = 0) -> None:
        """The learner has another rank: what the parameters of both were after each step, and how that one has ended."""
        name = f"{self._name} rank 1"
        self.timeline.insert(0, {"t": self.t, "what": "start", "name": name})
        self.note("exit", name=name, pid=2, status=mate_status)
        steps = [(number, self._step(number, digest)) for number, digest in enumerate(of_mate)]
        lines = [
            *(line for _, both in steps for line in both),
            {"t": self.t, "e": "end", "how": "parted" if mate_status else "close"},
        ]
        (self._directory / f"{name.replace(' ', '-')}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._lines += [line for number, digest in enumerate(own) for line in self._step(number, digest)]

    def _step(self, number: int, digest: int) -> list[dict[str, Any]]:
        invoked = {"t": self.t, "e": "invoke", "op": "step", "clock": 0, "number": number, "local": number + 1}
        return [invoked, {"t": self.t, "e": "ok", "op": "step", "digest": digest}]

    def has_learned(self, *numbers: int, times: int = 1, rounds: Sequence[Sequence[int]] = ()) -> None:
        """The parameters of the end; rounds: or what these merges of one learner's steps, by clock, lead to."""
        cells, learning = self._plan.learner_cells, self._plan.learning
        values = -cells.total(cells.length("small", SHARDS), numbers, times)
        if rounds and learning is not None:
            merges = {clock: [Part(tuple(of_round), len(of_round))] for clock, of_round in enumerate(rounds) if of_round}
            values.reshape(-1, cells.cells)[:] -= replayed(cells, learning.merge, merges)
        np.savez(self._directory / "final.npz", f0=values)

    def found_of_learners(self) -> set[str]:
        """The kinds of failures of what learners have learned."""
        return {failure.kind for failure in check_learners(self._histories(self._directory / "final.npz"))}

    def found_of_conduct(self) -> set[str]:
        """Likewise of how its processes behave."""
        return {failure.kind for failure in check_conduct(self._histories(self._directory))}

    def found_of_residuals(self) -> set[str]:
        """Likewise of what workers have kept."""
        np.savez(self._directory / "final.npz", **self.parameters)
        return {failure.kind for failure in check_residuals(self._histories(self._directory / "final.npz"))}

    def restore(self, *numbers: int, state: int | None = None, part: slice = slice(None), times: int = 1) -> None:
        """A checkpoint has these gradients, of the last one a part, and a client state."""
        parameters = initial("small", SHARDS)
        for number in numbers:
            for name, gradient in Gradients("small", SHARDS).write(number, TENSORS).items():
                where = part if number == numbers[-1] else slice(None)
                parameters[name][where] -= times * gradient[where]
        name, step = f"step-{len(numbers)}", len(numbers)
        keep(self._directory, Restored(name, step, parameters, {} if state is None else {0: state}, self._batches))

    def batches(self, run: int, torn: int = 0) -> None:
        """So many batches of the one life have run, and in one column so many more."""
        self._lines.insert(0, {"t": 10.0, "e": "begin", "row": 1})
        rows = np.zeros((3, 4), np.int64)
        rows[1] = run
        rows[1, 3] += torn
        np.save(batches_of(self._directory), rows)
        self._batches = rows

    def note(self, what: str, **fields: Any) -> None:
        self.timeline.append({"t": self.t, "what": what, **fields})

    def fault(self, kind: str, seconds: float = 0.1) -> None:
        fault = vars(Fault(kind, 0, seconds, 0, 0))
        self.note("begin", fault=fault)
        self.timeline.append({"t": self.t + seconds, "what": "end", "fault": fault})
        if kind in ("shard-kill", "shard-lose", "shard-terminate"):
            self.timeline.append({"t": self.t + seconds, "what": "start", "name": "shard 0"})

    def end(self, how: str = "with", status: int = 0) -> None:
        if how:
            self._write(e="end", how=how)
        self.note("exit", name=self._name, pid=1, status=status)

    def found(self) -> set[str]:
        """The kinds of failures that the checks find."""
        histories = self._histories(self._directory)
        failures = compare(histories, Counts(self.parameters, SHARDS)) + check_conduct(histories) + check_prefixes(histories)
        failures += check_batches(histories)
        return {failure.kind for failure in failures}

    def _histories(self, final: Path) -> Histories:
        self.t += 1
        self.note("closed")
        lines = "".join(json.dumps(line) + "\n" for line in self._lines)
        (self._directory / f"{self._name.replace(' ', '-')}.jsonl").write_text(lines)
        for shard in range(SHARDS):
            (self._directory / f"shard-{shard}.log").write_text(self.shard_logs[shard])
        return Histories(Outcome(self._plan, self._directory, self.timeline, final=final))

    def _write(self, **record: Any) -> None:
        self._lines.append({"t": self.t, **record})
