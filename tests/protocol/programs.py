"""What the workers' programs do: scripts of calls, and what becomes of each gradient as far as the program is told.

A program that gets an error after which it may go on has the choice: the same call again, another gradient, or its end. The
checker takes every one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from residuals import lanes_of
from setting import GRADIENTS_MAX, Setting, gradient_of, row_of, value_of

from psd.contract.errors import PartsDisagree, PsdError, RolledBack, ShardUnavailable, WaitTimeout
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.exchange.exchange import ParameterExchange
from psd_client.worker.exchange.sent_push import JobPart, Spare, WorkerGradient
from psd_client.worker.exchange.value_exchange import ValueExchange
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.rows import Gradients

MAY_GO_ON = (WaitTimeout, ShardUnavailable)
Seen = tuple[int, tuple[tuple[int, int], ...]]

STEPS_BEFORE_STOP = 3

ERRORS_MAX = 2
"""After which a program ends: the checker's runs must, too."""


class Program:
    """One program, and its books.

    Attributes:
        books: by gradient, what the program knows: "open": begun, no answer. "held": a push has returned. "kept": a pull after
            it, too. "dropped": it was told that the gradient may not count.
            "void": the job has gone back.
        parts: by gradient, the part of the job that it is of, from 0; empty if the job has none.
        seen: the clock at which a step or a pull has returned last, and the version of each block that has come until then.
        late: blocks of gradients of which it was told that they came too late. told: what it says for the trace.
        answers: what it was told of sums over workers, to each of which a process brings a digit of its own. is_over: it has
            heard that the job ends at its clock.
        ended: how it has ended; "" before. first: its first gradient. wrong: what must not have happened.
    """

    def __init__(self, setting: Setting, process: int, choose: Callable[[str, tuple[str, ...]], str]) -> None:
        self.setting = setting
        self.process = process
        self.rank, self.script = setting.processes[process]
        self.choose = choose
        self.books: dict[int, str] = {}
        self.parts: dict[int, int] = {}
        self.seen: Seen = (0, ())
        self.versions: dict[int, int] = {}
        self.late = 0
        self.steps_made = 0
        self.errors = 0
        self.clock = 0
        self.answers: list[tuple[int, ...]] = []
        self.is_over = False
        self.ended = ""
        self.first = gradient_of(process, 0)
        self.is_begun = False
        self.told_part = (-1, 0)
        self.wrong: list[str] = []
        self.told: list[str] = []
        self.ps: FlatCalls | None = None
        self.spare: Spare | None = None
        self.has_new_row = False  # the last gradient

    def run(self, connect: Callable[[], FlatCalls]) -> None:
        """The whole life of the process."""
        try:
            self.ps = connect()
            self.declare()
            self.choose("ready", ("go",))
            self.is_begun = True
            SCRIPTS[self.script](self)
            self.close(None)
            self.ended = "finished"
        except PsdError as error:
            self.say(f"ends by {error.reason}{self.detail(error)}")
            if self.ps is not None:
                self.close(error)
            self.ended = "ended by choice" if isinstance(error, MAY_GO_ON) else f"{error.reason}{self.detail(error)}"
        except Exception as error:  # noqa: BLE001 - the finding itself
            self.say(f"ends by {type(error).__name__}: {error}")
            self.ended = f"{type(error).__name__}: {error}"

    @staticmethod
    def detail(error: PsdError) -> str:
        cause = error.detail.get("cause")
        return f" ({cause})" if cause else ""

    def say(self, text: str) -> None:
        self.told.append(text)

    def declare(self) -> None:
        assert self.ps is not None
        spec = self.setting.spec
        self.ps.declare_tensors(
            spec.tensors,
            spec.groups,
            initial=lambda buffers: None,
            consistency=self.setting.consistency,
            reduce=spec.reduction,
            quorum=self.setting.quorum or None,
            aggregation=self.setting.aggregation,
            tables=spec.tables,
            compress=self.setting.codec or None,
            exchange_kind=ValueExchange if self.setting.is_published else ParameterExchange,
            **self.setting.job,
        )
        self.clock = self.ps.clock
        stored = self.ps._session.stored_state
        if self.setting.stored_by and stored:  # what its rank has saved says which gradient comes next
            self.first = int(stored) + 1

    def close(self, error: BaseException | None) -> None:
        """Leave as a program does that ends, in order or by an error."""
        assert self.ps is not None
        exchange = self.ps._exchange
        is_confirmed = error is None and exchange is not None and not exchange.is_unconfirmed
        if exchange is not None:
            confirm = exchange.confirm

            def watched() -> None:
                nonlocal is_confirmed
                confirm()
                is_confirmed = True

            exchange.confirm = watched  # type: ignore[method-assign]
        self.ps.close(error)
        if is_confirmed:
            self.confirmed()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def new_gradient(self) -> int:
        gradient = self.first + len(self.books)
        is_free = self.setting.rows_max > 0 and self.clock >= self.setting.early_steps
        self.has_new_row = is_free and self.choose("rows that are there", ("no others", "and a new one")) == "and a new one"
        self.books[gradient] = "open"
        if self.setting.parts:
            self.parts[gradient] = self._turn()
        return gradient

    def _turn(self) -> int:
        """The part whose turn it is: by the clock, but by its own count in a program that is mistaken, until it is told.

        The last part comes first, of which not every shard has a block.
        """
        assert self.ps is not None
        round_, part = self.told_part
        if round_ == self.ps.clock:
            return part
        count = self.steps_made if self.script == "push_pull_own_turns" else self.ps.clock
        return (self.setting.parts - 1 - count) % self.setting.parts

    def push(self, gradient: int) -> None:
        def call(ps: FlatCalls, scalars: Any) -> None:
            with ps.operation("push"):
                ps.declared.confirm()  # until then the push before may need its gradient
                self._write(gradient)
                ps.declared.push(WorkerGradient(scalars, rows=self._rows(gradient)))

        self._call(f"push({gradient})", gradient, call)
        self.books[gradient] = "held" if self.books[gradient] == "open" else self.books[gradient]
        self.steps_made += 1

    def push_pull(self, gradient: int) -> None:
        self._write(gradient)
        rows = self._rows(gradient)
        present, part = self._present(gradient), self._job_part(gradient)
        self._call(
            f"push_pull({gradient})",
            gradient,
            lambda ps, scalars: ps.push_pull_flat(scalars, 1, present, rows, job_part=part, spare=self.spare),
        )
        self.books[gradient] = "held" if self.books[gradient] == "open" else self.books[gradient]
        self.has_read()
        self.steps_made += 1

    def put(self, gradient: int) -> None:
        """Publish; the gradient's number is what all tensors are set to."""

        def write(buffers: FlatBuffers) -> None:
            for view in buffers.views:
                view[...] = value_of(gradient)

        self._call(f"put({gradient})", gradient, lambda ps, _: ps.put_flat(write, None, b""))
        self.books[gradient] = "kept"
        self.steps_made += 1

    def _write(self, gradient: int) -> None:
        assert self.ps is not None
        if (self.setting.cuts and self.setting.saves) or self.setting.stored_by:
            self.ps.declared.client_state.state = b"%d" % gradient
        part = self.parts.get(gradient, 0)
        for block, view in enumerate(self.ps.gradients.views):
            if self.setting.part_of(block) == part:  # what others hold must not be sent
                view[...] = lanes_of(gradient, len(view)) if self.setting.has_residuals else value_of(gradient)

    def _job_part(self, gradient: int) -> JobPart | None:
        return self.setting.job_parts[self.parts[gradient]] if self.setting.parts else None

    def _present(self, gradient: int) -> NDArray[np.bool_] | None:
        """Which tensors have a gradient."""
        if not self.setting.parts:
            return None
        return np.array([self.setting.part_of(block) == self.parts[gradient] for block in range(self.setting.blocks)])

    def _rows(self, gradient: int) -> Gradients:
        """The gradients of rows: on every shard, in every table; those of new rows, which nobody counts, are zeros."""
        ids = self.setting.ids
        values = np.tile(row_of(gradient, len(self.setting.processes)), (len(ids), 1))
        if self.has_new_row:
            ids = np.concatenate([ids, self.setting.new_ids(gradient)])
            values = np.concatenate([values, np.zeros_like(values)])
        return dict.fromkeys(range(self.setting.tables), (ids, values))

    def look(self) -> None:
        """Ask for the job's clock, as a decoupled learner does, and choose the next part by it."""

        def call(ps: FlatCalls, _: Any) -> None:
            with ps.operation("look"):
                ps.declared.learn_clock()

        self._call("look", None, call)
        assert self.ps is not None
        self.spare = Spare(0.0, self.ps.clock)

    def pull(self) -> None:
        self._call("pull", None, lambda ps, scalars: ps.pull_flat())
        self.has_read()

    def barrier(self) -> None:
        self._call("barrier", None, lambda ps, scalars: ps.barrier("end"))

    def sum(self) -> None:
        found: list[Any] = []

        def call(ps: FlatCalls, _: Any) -> None:
            found.append(ps.all_reduce({"x": 4**self.process}, "sum"))

        self._call("sum", None, call)
        (answer,) = found
        counts = [answer["x"] // 4**process % 4 for process in range(len(self.setting.processes))]
        there = [process for process, count in enumerate(counts) if count]
        ranks = {self.setting.processes[process][0] for process in there}
        if max(counts) > 1 or self.process not in there or not answer.workers == len(there) == len(ranks):
            self.wrong.append(f"process {self.process} is told of a sum over {answer.workers} workers that has {counts}")
        self.answers.append(tuple(there))

    def stop(self) -> None:
        self._call("stop", None, lambda ps, _: ps.stop())

    def has_read(self) -> None:
        """Note what has come by a step or a pull."""
        assert self.ps is not None
        if self.setting.parts:
            self.seen = self.ps.clock, tuple(sorted(self.versions.items()))
        self.confirmed()

    def confirmed(self) -> None:
        self.books = {g: "kept" if state == "held" else state for g, state in self.books.items()}

    def _call(self, what: str, gradient: int | None, call: Callable[[FlatCalls, Any], None]) -> None:
        """One call; its word on what became of the gradients goes into the books."""
        assert self.ps is not None
        stats_before = self.ps.stats()
        self.say(f"{what} at clock {self.ps.clock}")
        try:
            call(self.ps, self.setting.scalars(self.steps_made))
        except PsdError as error:
            self.say(f"{what} raises {error.reason}{self.detail(error)}")
            if isinstance(error, RolledBack):
                self.books = dict.fromkeys(self.books, "void")
                self.late, self.clock = 0, self.ps.clock
            elif isinstance(error, PartsDisagree):
                self.told_part = error.detail["round"], error.detail["parts"][0] - 1
            raise
        finally:
            self._note_stats(stats_before, gradient)
        self.say(f"{what} returns, clock {self.ps.clock}")
        if self.ps.clock < self.clock:
            self.wrong.append(f"process {self.process}: the clock went back from {self.clock} to {self.ps.clock}")
        self.clock = self.ps.clock

    def _note_stats(self, stats_before: dict[str, int], gradient: int | None) -> None:
        assert self.ps is not None
        after = self.ps.stats()
        self.late += after["blocks_late"] - stats_before["blocks_late"]
        dropped = after["pushes_dropped"] - stats_before["pushes_dropped"]
        if dropped:
            # An earlier gradient whose call has failed, or this call's own.
            earlier = [g for g, state in self.books.items() if state == "open" and g != gradient]
            held = [g for g, state in self.books.items() if state == "held" and g != gradient]
            named = (earlier + held)[-dropped:] or ([gradient] if gradient is not None else [])
            for each in named:
                self.books[each] = "dropped"
            self.say(f"is told that {dropped} push(es) may not count: {named}")
        late = after["blocks_late"] - stats_before["blocks_late"]
        if late:
            self.say(f"is told that {late} block(s) came too late")

    def after(self, error: PsdError, options: tuple[str, ...]) -> str:
        """What the program does about an error; raises it if that is its end."""
        if isinstance(error, (RolledBack, PartsDisagree)):
            return "other"
        self.errors += 1
        what = "end" if self.errors >= ERRORS_MAX else self.choose(error.reason, options)
        if what == "end":
            raise error
        return what

    @property
    def goes_on(self) -> bool:
        assert self.ps is not None
        self.is_over = self.ps.is_over
        return self.ps.clock < self.setting.steps and len(self.books) < GRADIENTS_MAX and not self.is_over


def put(program: Program) -> None:
    """One version per step."""
    while program.goes_on:
        gradient = program.new_gradient()
        _until_it_is_done(program, lambda: program.put(gradient))  # noqa: B023 - called at once


def push_pull(program: Program) -> None:
    """One call per step."""
    while program.goes_on:
        gradient = program.new_gradient()
        _until_it_is_done(program, lambda: program.push_pull(gradient))  # noqa: B023 - called at once


def look_push_pull(program: Program) -> None:
    """One call per step, by the job's clock, which is asked for before."""
    while program.goes_on:
        if _until_it_is_done(program, program.look) and program.goes_on:
            gradient = program.new_gradient()
            _until_it_is_done(program, lambda: program.push_pull(gradient))  # noqa: B023 - called at once


def push_then_pull(program: Program) -> None:
    """Two calls per step."""
    while program.goes_on:
        gradient = program.new_gradient()
        if _until_it_is_done(program, lambda: program.push(gradient)):  # noqa: B023 - called at once
            _until_it_is_done(program, program.pull)


def push_only(program: Program) -> None:
    """No pull at all."""
    while program.goes_on:
        gradient = program.new_gradient()
        _until_it_is_done(program, lambda: program.push(gradient))  # noqa: B023 - called at once


def push_only_barrier(program: Program) -> None:
    """No pull at all, and a barrier in the end."""
    push_only(program)
    _until_it_is_done(program, program.barrier)


def push_pull_barrier(program: Program) -> None:
    """One call per step, and a barrier in the end."""
    push_pull(program)
    _until_it_is_done(program, program.barrier)


def push_pull_sum(program: Program) -> None:
    """One call per step, and a sum over all workers in the end."""
    push_pull(program)
    _until_it_is_done(program, program.sum)


def stop_push_pull(program: Program) -> None:
    """The end of the job is asked for before the first step."""
    _until_it_is_done(program, program.stop)
    push_pull(program)


def push_pull_stop(program: Program) -> None:
    """One call per step; the end of the job is asked for after the third one."""
    while program.goes_on:
        gradient = program.new_gradient()
        _until_it_is_done(program, lambda: program.push_pull(gradient))  # noqa: B023 - called at once
        if program.steps_made == STEPS_BEFORE_STOP:
            _until_it_is_done(program, program.stop)


_MAY = ("again", "other", "end")


def _until_it_is_done(program: Program, call: Callable[[], None]) -> bool:
    """Make a call, again after an error if the program decides so; False if it goes on with something else.

    With a barrier or a sum it does not: a gradient that is given up may be a step, and the next would be one more than others
    make.
    """
    while True:
        try:
            call()
        except (*MAY_GO_ON, PartsDisagree, RolledBack) as error:
            if program.after(error, ("again", "end") if program.script in MEETING else _MAY) == "other":
                return False
        else:
            return True


SCRIPTS: dict[str, Callable[[Program], None]] = {
    "push_pull": push_pull,
    "look_push_pull": look_push_pull,
    "push_pull_own_turns": push_pull,
    "put": put,
    "push_then_pull": push_then_pull,
    "push_only": push_only,
    "push_only_barrier": push_only_barrier,
    "push_pull_barrier": push_pull_barrier,
    "push_pull_sum": push_pull_sum,
    "stop_push_pull": stop_push_pull,
    "push_pull_stop": push_pull_stop,
}
MEETING = ("push_only_barrier", "push_pull_barrier", "push_pull_sum", "stop_push_pull", "push_pull_stop")
