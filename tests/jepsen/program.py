"""The training program of a trial: it pushes gradients that can be told apart, goes on after errors in its own way, and writes
down what it was told. python program.py PARENT_PID OPTIONS, a JSON object: see `Options`.

The history is one JSON object a line, written at once, so that it is there whatever happens to the process:

    {"t": 12.3, "e": "invoke", "op": "push", "number": 7, "tensors": ["a", "c"], "clock": 4}
    {"t": 12.4, "e": "ok", "op": "push", "clock": 5, "stats": {...}, "seen": [1, 1]}
    {"t": 12.4, "e": "error", "op": "pull", "class": "WaitTimeout", "is_psd": true, "text": "...", "detail": {...}, ...}
    {"t": 12.5, "e": "log", "level": "WARNING", "text": "psd: worker 0: ..."}
    {"t": 12.6, "e": "end", "how": "with"}

t: seconds of the machine's monotonic clock. seen: how often the program's last gradient counts in the parameters that the call
has brought, at least and at most. new: likewise by table, in the rows that it alone has. steps: see stepping.py. Uses the
public face of psd alone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stepping
from batches import COLUMNS, MATRIX, ROWS, batches_of
from cells import CELLS, DIGITS, Gradients, initial, names, param_groups, seen
from children import settle_in
from lossy_cells import LOSSY
from plan import Style
from row_cells import PASSING, TABLES, RowCells, tables

import psd_client
from psd_core import codecs

ENDS_SESSION = ("SessionFenced", "ShardRestarted", "StateLost", "ForeignRun", "SpecMismatch", "WrongShard", "InternalError")
"""Errors after which nothing can be called again."""

ATTEMPTS_MAX = 60

RESTART = 75
"""The exit status of a program that wants a successor."""


@dataclass(frozen=True)
class Options:
    """What a program is started with.

    Attributes:
        history: file to write. stop: file whose existence asks it to end. first, count: the numbers of its gradients.
        is_stepping: it does nothing that an armed step does not carry.
        learning: how it learns, if it is a learner, else None; see plan.py. plant: a defect that it then has.
        group_rank: of a learner of several processes, which rank this one is; all have the same options else.
        role: "train"; "finish": push one gradient, so that what is open closes; "read": keep the parameters in `final`.
    """

    history: str
    stop: str
    servers: str
    rank: int
    workers: int
    shards: int
    size: str
    seed: int
    first: int
    count: int
    connect: dict[str, Any]
    declared: dict[str, Any]
    style: dict[str, Any]
    has_tables: bool = False
    has_vectors: bool = False
    codec: str = ""
    is_stepping: bool = False
    learning: dict[str, Any] | None = None
    plant: str = ""
    group_rank: int = 0
    role: str = "train"
    final: str = ""

    @property
    def ranks(self) -> int:
        """How many processes the life has."""
        return int(self.learning["ranks"]) if self.learning is not None and self.role == "train" else 1

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def row_of(options: Options) -> int:
    """Of a life in the matrix of batches."""
    return options.first // options.count


class History:
    """Writes what happens, line by line."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields}, default=str) + "\n"
        os.write(self._file, line.encode())


class Logs(logging.Handler):
    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        self._history.write("log", level=record.levelname, text=record.getMessage())
        sys.stderr.write(f"{record.levelname} {record.getMessage()}\n")


class Failed(Exception):
    """A call has failed; what the program does about it."""

    def __init__(self, reaction: str, error: BaseException) -> None:
        super().__init__(reaction)
        self.reaction = reaction
        self.error = error


class Program:
    """One life of a worker."""

    def __init__(self, options: Options, history: History) -> None:
        self._options = options
        self._history = history
        self._style = Style(**options.style)
        self._random = random.Random(options.seed)
        self._gradients = Gradients(options.size, options.shards, options.codec)
        # Not where gradients are patterns; and as differences parameters come back with an error, which goes with the next one.
        self._shows_lossy = options.codec != "sign" and options.declared.get("pull") not in codecs.DIFFERENCES
        self._rows = RowCells(CELLS, DIGITS, options.shards)
        self._left = iter(range(options.first, options.first + options.count))
        self._last: tuple[int, Sequence[str]] | None = None
        self._steps = 0
        self._new: dict[str, list[float]] = {}
        self.ps: psd_client.ParameterServer | None = None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, op: str, function: Callable[[], Any], **fields: Any) -> Any:
        """The result of a call of the public API, written down; an error of psd's becomes Failed."""
        ps = self.ps
        clock = None if ps is None else ps.clock
        self._history.write("invoke", op=op, clock=clock, **fields)
        try:
            result = function()
        except BaseException as error:
            is_psd = isinstance(error, psd_client.PsdError | psd_client.ConfigError)
            is_ours = is_psd or isinstance(error, KeyboardInterrupt)
            self._history.write(
                "error",
                op=op,
                **{"class": type(error).__name__},
                is_psd=is_psd,
                text=str(error)[:2000],
                detail=getattr(error, "detail", {}),
                trace="" if is_ours else traceback.format_exc(),
                **self._state(),
            )
            if not is_psd:
                raise
            raise Failed(self._reaction(error), error) from error
        more: dict[str, Any] = {}
        if isinstance(result, dict) and self._last is not None:
            number, tensors = self._last
            shown = tensors if self._shows_lossy else [name for name in tensors if name != LOSSY]
            more["seen"] = seen(result, number, shown)  # None: it has rows alone, which were not asked for
        if op == "push_pull" and self._options.is_stepping:
            more["steps"] = stepping.taken()
        if op == "pull" and self._new:
            more["new"], self._new = self._new, {}
        self._history.write("ok", op=op, **self._state(), **more)
        return result

    def _state(self) -> dict[str, Any]:
        return {} if self.ps is None else {"clock": self.ps.clock, "stats": self.ps.stats()}

    def _reaction(self, error: Exception) -> str:
        name = type(error).__name__
        if self._last is None or name in ENDS_SESSION:
            return "restart"
        if name in ("RolledBack", "BarrierTimeout"):
            return "other"
        reactions = self._style.reactions
        return self._random.choices(list(reactions), list(reactions.values()))[0]

    def _insist(self, op: str, function: Callable[[], Any], **fields: Any) -> bool:
        """Call until it succeeds, or the program turns to something else; True if it has come about."""
        for _ in range(ATTEMPTS_MAX):
            try:
                self.call(op, function, **fields)
            except Failed as failed:
                self._pause(0.1)
                match failed.reaction:
                    case "again":
                        continue
                    case "other":
                        return False
                    case "pull":
                        return op != "pull" and self._pulled()  # which completes the push
                    case "abort":
                        self._abort()
                raise
            return True
        raise RuntimeError(f"{op} failed {ATTEMPTS_MAX} times")

    def _abort(self) -> None:
        self._history.write("end", how="abort")
        os._exit(RESTART)

    def _pulled(self) -> bool:
        assert self.ps is not None
        try:
            self.call("pull", self._pull)
        except Failed as failed:
            if type(failed.error).__name__ in ENDS_SESSION:
                raise
            return False
        return True

    def _pull(self) -> dict[str, Any]:
        """Everything that is dense, and the rows of the last gradient."""
        assert self.ps is not None
        found: dict[str, Any] = dict(self.ps.pull())
        if self._options.has_tables and self._last is not None:
            ids = self._rows.ids[self._last[0] // DIGITS]
            found |= {name: self.ps.tables[name].pull(ids) for name in TABLES}
            new = self._rows.new_ids(self._last[0])
            self._new = {name: (-self.ps.tables[name].pull(new)[:, 0]).tolist() for name in PASSING}
        return found

    # -- the program ---------------------------------------------------------------------------------------------------

    def connect(self) -> psd_client.ParameterServer:
        """Join the job."""
        options = self._options
        values = initial(options.size, options.shards, options.codec)
        ps = self.call("connect", lambda: psd_client.connect(options.servers, options.rank, options.workers, **options.connect))
        self.ps = ps
        declared = {
            "groups": param_groups(options.codec),
            "tables": tables(DIGITS, options.shards) if options.has_tables else [],
            **options.declared,
        }
        self.call("declare", lambda: ps.declare(values, psd_client.SGD(lr=1), **declared))
        if options.has_vectors:
            self._insist("matrix", lambda: ps.matrix(MATRIX, ROWS, COLUMNS, "int64"))
        return ps

    def train(self) -> None:
        """Until somebody asks for the end, and one step more; or the numbers are used up."""
        try:
            while not self._must_stop():
                self._step(self._random.random() < self._style.push_share)
            self._step(does_push=self._style.ending != "with" and self._random.random() < 0.5)
        except StopIteration:
            pass

    def _must_stop(self) -> bool:
        return Path(self._options.stop).exists()

    def _step(self, does_push: bool) -> None:
        ps, style = self.ps, self._style
        assert ps is not None
        # Who comes last may come alone: a barrier opens for those that are there, and the next one would wait at it for ever.
        has_barriers = style.barrier_every > 0 and self._options.role == "train"
        if has_barriers and ps.clock % style.barrier_every == 0:
            self._insist("barrier", lambda: ps.barrier(f"at {ps.clock}"))
        number = next(self._left)
        is_absent = self._random.random() < style.absent_share
        all_names = names(with_tables=self._options.has_tables, is_compressed=bool(self._options.codec))
        tensors = [name for name in all_names if not is_absent or self._random.random() < 0.6] or ["c"]
        rows = self._rows.gradients(number, tensors) if self._options.has_tables else {}
        gradient = self._gradients.write(number, tensors)
        self._last = number, tensors
        if not self._options.is_stepping:
            ps.save_client_state(b"%d" % number)
        if does_push:
            has_pushed = self._insist("push", lambda: ps.push(gradient, tables=rows), number=number, tensors=tensors)
        else:
            self._insist("push_pull", lambda: ps.push_pull(gradient, tables=rows), number=number, tensors=tensors)
        self._gradients.wipe(number, tensors)
        if self._options.has_vectors:
            self._insist("batch", self._batch)
        if does_push and has_pushed:
            self._pause(self._random.random() * style.pause_s)
            if self._random.random() < style.pull_share and not self._must_stop():
                self._insist("pull", self._pull)
        self._pause(style.pace_s)

    def _batch(self) -> None:
        """Count one more in every column of this life's row."""
        assert self.ps is not None
        with self.ps.batch() as batch:
            batch.add_rows(self.ps.vectors[MATRIX], np.ones((1, COLUMNS), np.int64), np.array([row_of(self._options)]))

    @staticmethod
    def _pause(seconds: float) -> None:
        if seconds:
            threading.Event().wait(seconds)

    def run(self) -> None:
        """Connect, train, and end as the style says."""
        ps = self.connect()
        how = self._style.ending
        try:
            self.train()
        except BaseException:
            if how == "with":
                ps.__exit__(*sys.exc_info())
            raise
        if how == "with":
            self.call("close", lambda: ps.__exit__(None, None, None))
        elif how == "close":
            self.call("close", ps.close)
        self._history.write("end", how=how, **self._state())

    def finish(self) -> None:
        """Instead of `run`: push one gradient."""
        ps = self.connect()
        with ps:
            self._step(does_push=False)
        self._history.write("end", how="finish", **self._state())

    def read(self) -> None:
        """Instead of `run`: keep the parameters."""
        options = self._options
        wanted = {"transport": options.connect["transport"], "wait_timeout": 20.0}
        with psd_client.connect(options.servers, role="reader", **wanted) as reader:
            found = self.call("read", reader.pull)
            if options.has_tables:
                ids = self._rows.ids.reshape(-1)
                found |= {name: self.call("read", lambda name=name: reader.tables[name].pull(ids)) for name in TABLES}
            np.savez(options.final, **found)
            if options.has_vectors:
                np.save(batches_of(Path(options.final).parent), self.call("read", reader.vectors[MATRIX].pull))
        self._history.write("end", how="read")


def _learner(options: Options, history: History) -> Program:
    from learner import Learner  # only learners need torch

    return Learner(options, history)


def main() -> None:
    settle_in(int(sys.argv[1]))
    live(Options(**json.loads(sys.argv[2])))


def live(options: Options) -> None:
    """One life of a worker, in this process."""
    history = History(options.history)
    logger = logging.getLogger("psd_client")
    logger.addHandler(Logs(history))
    logger.setLevel(logging.INFO)  # what the job begins from, too
    logger.propagate = False
    history.write("begin", pid=os.getpid(), seed=options.seed, row=row_of(options))
    if options.is_stepping:
        stepping.watch()
    program = Program(options, history) if options.learning is None else _learner(options, history)
    try:
        {"train": program.run, "finish": program.finish, "read": program.read}[options.role]()
    except Failed as failed:
        history.write("end", how=failed.reaction)
        raise failed.error from None


if __name__ == "__main__":
    sys.modules["program"] = sys.modules[__name__]  # a learner raises the errors that `live` knows
    main()
