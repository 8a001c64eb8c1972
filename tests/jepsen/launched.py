"""Runs one plan under psd-run, which is told to end, or killed; each time another one goes on with what it has left.

Leaves what trial.py does, for the same judges. The parameters of the end are those of the last checkpoint: in the end psd-run
removes all else. Judges nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from busyness import Busyness
from course import END_S, START_S
from outcome import Outcome
from plan import LIVES, Fault, Plan
from processes import CHECKPOINTS, HERE, Process, Timeline, last_record
from program import Options

from psd.checkpoint import CheckpointDirectory

SIGNALS = {
    "run-interrupt": signal.SIGINT,
    "run-terminate": signal.SIGTERM,
    "run-hangup": signal.SIGHUP,
    "run-kill": signal.SIGKILL,
}
GRACE_S = 6.0
ENDED_S = 3 * GRACE_S + 10.0
"""From a signal to the end: for a checkpoint, for the workers and for the shards."""

GONE_S = 20.0
"""From the end of psd-run to the end of all that it has started, also if it was killed."""

RESTARTS = 12
LOOK_S = 0.1
"""Between two looks at processes, histories and checkpoints."""


class LaunchedTrial:
    """One trial under psd-run."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.outcome = Outcome(plan, directory)
        self._plan, self._directory = plan, directory
        self._timeline = Timeline(directory / "timeline.jsonl")
        self._busyness = Busyness()
        self._pause = threading.Event()
        self._seen: dict[int, int] = {}  # by rank, the lives that have begun
        self._process: Process | None = None
        self._state = directory / "state"
        (directory / "template.json").write_text(self._template().to_json())

    def _template(self) -> Options:
        plan = self._plan
        return Options(
            history=str(self._directory),
            stop=str(self._directory / "stop"),
            servers="",
            rank=-1,
            workers=plan.workers,
            shards=plan.shards,
            size=plan.size,
            seed=plan.seed,
            first=0,
            count=plan.per_life,
            connect={"transport": plan.lane, "wait_timeout": plan.wait_s, "retry_timeout": plan.retry_s},
            declared=plan.declared,
            style={"of each rank": [vars(style) for style in plan.styles]},
            has_tables=plan.has_tables,
            has_vectors=plan.has_vectors,
            codec=plan.codec,
        )

    # -- the course of things ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The trial."""
        for fault in (*self._plan.faults, None):
            process = self._start()
            first = dict(self._seen)
            if not self._until(lambda first=first, process=process: self._trains(first, process), START_S):
                self._give_up(process)
                return
            self._timeline.note("training")
            self._until(lambda: False, self._plan.seconds if fault is None else fault.at)
            begun, newest = time.monotonic(), self._newest()
            if process.status is not None:
                fault, newest = None, ""  # its programs have done all that they can
            elif fault is None:
                (self._directory / "stop").touch()
            else:
                if fault.kind == "run-kill" and self._plan.is_exact and not newest:
                    fault = replace(fault, kind="run-terminate")  # shards and workers die together: nobody could go on
                self._tell(process, fault)
            if not self._until(lambda process=process: process.status is not None, END_S if fault is None else ENDED_S):
                self._give_up(process)
                return
            self._note_end(process, fault, begun, newest)

    def _tell(self, process: Process, fault: Fault) -> None:
        """One signal, or two."""
        self._timeline.note("begin", fault=vars(fault), text=str(fault))
        process.signal(SIGNALS[fault.kind])
        if fault.seconds and not self._until(lambda: process.status is not None, fault.seconds):
            process.signal(SIGNALS[fault.kind])

    def _note_end(self, process: Process, fault: Fault | None, begun: float, newest: str) -> None:
        took = time.monotonic() - begun
        self._until(lambda: not self._left(), GONE_S)
        self._look_at_lives()
        for rank in self._seen:
            self._note_exit(rank, is_known=fault is None)
        if fault is None:
            for shard in range(self._plan.shards):
                self._timeline.note("exit", name=f"shard {shard}", status=process.status)
        else:
            self._timeline.note("end", fault=vars(fault))
        left, has_stored = sorted(self._left()), self._newest() != newest
        kind = "" if fault is None else fault.kind
        self._timeline.note("launch", kind=kind, status=process.status, took=took, left=left, has_stored=has_stored)

    def _start(self) -> Process:
        plan, name = self._plan, f"psd-run {sum(record['what'] == 'launch' for record in self._timeline.records)}"
        command = [str(HERE / "children.py"), "psd.cli.run"]
        command += ["--shards", str(plan.shards), "--workers", str(plan.workers), "--lease", str(plan.lease_s)]
        command += ["--grace", str(GRACE_S), "--state-dir", str(self._state), "--log-dir", str(self._directory)]
        command += ["--checkpoint-dir", str(self._directory / "checkpoints"), "--checkpoint-keep", str(CHECKPOINTS)]
        command += ["--checkpoint-steps", str(plan.checkpoint_steps), "--max-restarts", str(RESTARTS)]
        command += [str(HERE / "launched_worker.py"), str(self._directory / "template.json")]
        out = self._directory / f"{name.replace(' ', '-')}.out"
        self._process = Process(name, command, out, out.with_suffix(".err"), self._timeline)
        for shard in range(plan.shards):
            self._timeline.note("start", name=f"shard {shard}", pid=-1)
        return self._process

    def _give_up(self, process: Process) -> None:
        self.outcome.stuck.append(process.name)
        for pid in self._left():
            _send(pid, signal.SIGUSR1)
        self._until(lambda: False, 1.0)

    def close(self) -> None:
        """Whatever has happened: nothing is left running."""
        if self._process is not None and self._process.status is None:
            self._process.kill()
            self._until(lambda: not self._left(), GONE_S)
        for pid in self._left():
            _send(pid, signal.SIGKILL)
        self.outcome.has_checkpoint = self._newest() != ""
        self.outcome.factor = self._busyness.close()
        self._timeline.note("closed", factor=round(self.outcome.factor, 2))
        self._timeline.close()
        self.outcome.timeline = self._timeline.records
        self.outcome.save()

    def _until(self, fact: Any, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not fact():
            self._look_at_lives()
            if time.monotonic() > deadline + seconds * (self._busyness.factor - 1):
                return False
            self._pause.wait(LOOK_S)
        return True

    # -- what is seen from outside -------------------------------------------------------------------------------------

    def _newest(self) -> str:
        directory = self._directory / "checkpoints"
        newest = CheckpointDirectory(str(directory)).newest() if directory.exists() else None
        return "" if newest is None else newest.name

    def _history(self, rank: int, life: int) -> Path:
        return self._directory / f"worker-{rank}-life-{life}.jsonl"

    def _trains(self, first: dict[int, int], process: Process) -> bool:
        """Each rank has pushed in a life that has begun since, or there is none any more."""
        lives = [(rank, self._seen.get(rank, 0)) for rank in range(self._plan.workers)]
        has_pushed = [
            any('"op": "push' in self._history(rank, life).read_text() for life in range(first.get(rank, 0), count))
            for rank, count in lives
        ]
        return all(has_pushed) or process.status is not None

    def _look_at_lives(self) -> None:
        for rank in range(self._plan.workers):
            life = self._seen.get(rank, 0)
            if self._history(rank, life).exists():
                if life:
                    self._note_exit(rank, is_known=True)
                self._seen[rank] = life + 1
                self._timeline.note("start", name=f"worker {rank} life {life}", pid=-1)

    def _note_exit(self, rank: int, *, is_known: bool) -> None:
        """The end of a rank's last life, once; unless that is known, somebody has killed it, or it has ended in order."""
        life = self._seen[rank] - 1
        name = f"worker {rank} life {life}"
        if any(record.get("name") == name and record["what"] == "exit" for record in self._timeline.records):
            return
        last = last_record(self._history(rank, life))
        is_ended = last.get("e") == "end"
        if not is_ended and not is_known:
            self._timeline.note("signal", name=name, signal="SIGKILL")
        has_ended_well = is_ended and last["how"] in ("with", "close", "fall")
        self._timeline.note("exit", name=name, pid=-1, status=0 if has_ended_well else 1)

    def _left(self) -> set[int]:
        """Processes that have to do with the trial, but psd-run."""
        words = str(self._directory).encode()
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if words in (process / "cmdline").read_bytes():
                    found.add(int(process.name))
            except OSError:
                continue
        return found - {os.getpid(), 0 if self._process is None else self._process.pid}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def options_of_worker(template: Path) -> Options:
    """Of a worker that psd-run has started: its rank's next life."""
    fields = json.loads(template.read_text())
    rank, workers, life = int(os.environ["PSD_RANK"]), fields["workers"], 0
    while (history := Path(fields["history"]) / f"worker-{rank}-life-{life}.jsonl").exists():
        life += 1
    row = life * workers + rank
    if row >= LIVES + 4:
        raise SystemExit("too many lives")
    fields |= {
        "history": str(history),
        "servers": os.environ["PSD_SERVERS"],
        "rank": rank,
        "seed": (fields["seed"] * 1000 + rank) * 1000 + life,
        "first": row * fields["count"],
        "style": fields["style"]["of each rank"][rank],
    }
    return Options(**fields)
