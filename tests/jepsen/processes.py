"""The processes of a trial: shards that are killed and started again at the same ports, and workers, one life after the other.

Every change is written down in the timeline. Knows no schedule.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import damage
from loaded_programs import WITH_TORCH, Program, parent_of_programs
from plan import Plan
from program import Options

HOST = "127.0.0.1"
HERE = Path(__file__).parent

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections, which would take a shard's while it is down."""


LIMITS = (
    (),
    ("--max-workers", "3", "--max-push-ids", "100000"),
    ("--max-workers", "5000", "--max-tables", "4", "--max-vectors", "1"),
    ("--max-table-rows", "100000", "--max-batch-operations", "1", "--max-reads", "1"),
)
"""Flags of a life, where they change: all of them allow what programs do."""

CHECKPOINTS = 8
"""Of those that a trial's shards store, so many are left, to be restored."""


class Timeline:
    """What the harness has done to whom, and when: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self.records: list[dict[str, Any]] = []

    def note(self, what: str, **fields: Any) -> None:
        record = {"t": round(time.monotonic(), 4), "what": what, **fields}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class Process:
    """One process of the trial, in one life.

    Args:
        command: a program, and its arguments but for the first, which is the process id of its parent.
        loads: a module that its interpreter has loaded, beside psd.
    """

    def __init__(self, name: str, command: Sequence[str], out: Path, log: Path, timeline: Timeline, *, loads: str = "") -> None:
        self.name = name
        self._timeline = timeline
        self.is_stopped = False
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PSD_")} | {"OPENBLAS_NUM_THREADS": "1"}
        program, *arguments = command
        command = [program, str(parent_of_programs(loads)), *arguments]
        with out.open("ab") as out_file, log.open("ab") as log_file:
            self._popen = Program(command, stdout=out_file, stderr=log_file, env=environ, loads=loads)
        self.pid = self._popen.pid
        timeline.note("start", name=name, pid=self.pid)

    def signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if self.status is not None:
            return
        self._timeline.note("signal", name=self.name, signal=signal.Signals(number).name)
        if number == signal.SIGSTOP:
            self.is_stopped = True
        self._popen.send_signal(number)

    def resume(self) -> None:
        """After SIGSTOP."""
        if self.is_stopped and self.status is None:
            self._timeline.note("signal", name=self.name, signal="SIGCONT")
            self._popen.send_signal(signal.SIGCONT)
        self.is_stopped = False

    @property
    def status(self) -> int | None:
        """The exit status, once it has ended; written down the first time."""
        if self._popen.returncode is None and self._popen.poll() is not None:
            self._timeline.note("exit", name=self.name, pid=self.pid, status=self._popen.returncode)
        return self._popen.returncode

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if it has not ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        if self._popen.returncode is not None:
            self._timeline.note("exit", name=self.name, pid=self.pid, status=self._popen.returncode)
        return self._popen.returncode

    def kill(self) -> None:
        """And wait for its end. Nothing, if it has ended."""
        if self.status is None:
            self.signal(signal.SIGKILL)
            assert self.wait(60) is not None


class ShardActor:
    """One shard, with its state directory and ports, over all of its lives."""

    def __init__(self, plan: Plan, index: int, directory: Path, timeline: Timeline) -> None:
        self.index = index
        self._held = [held_port(), held_port()]
        self.control, self.bulk = (int(held.getsockname()[1]) for held in self._held)
        self._disk = directory / f"disk-{index}"
        self._disk.mkdir()
        self.is_small = plan.small_disk and _mount(self._disk, plan)
        self._state = self._disk / "state"
        self._out = directory / f"shard-{index}.out"
        self.log = directory / f"shard-{index}.log"
        self._timeline = timeline
        server = ["stepping", str(plan.revoke_s)] if plan.revoke_s else ["psd.cli.server"]
        self._command = [str(HERE / "children.py"), *server, "--shard", f"{index}/{plan.shards}"]
        self._command += ["--listen", f"{HOST}:{self.control}", "--bulk-port", str(self.bulk), "--state-dir", str(self._state)]
        self._command += ["--lease", str(plan.lease_s), "--grace", "4"]
        if plan.named:
            self._command += ["--run-id", f"trial-{plan.seed}"]
        if plan.checkpoint_steps:
            self._command += ["--checkpoint-dir", str(directory / "checkpoints")]
            self._command += ["--checkpoint-steps", str(plan.checkpoint_steps), "--checkpoint-keep", str(CHECKPOINTS)]
        self._has_new_limits, self._limits = plan.new_limits, random.Random(f"{plan.seed} {index}")
        self.process: Process | None = None
        self._damaged: FileIO | None = None

    @property
    def address(self) -> str:
        """Without a proxy."""
        return f"{HOST}:{self.control}"

    def start(self) -> None:
        """Begin a life, unless one has begun: two faults may have ended the one before, and each heals what it has done."""
        if self.process is not None and self.process.status is None:
            return
        self._out.unlink(missing_ok=True)
        command = [*self._command, *(self._limits.choice(LIMITS) if self._has_new_limits else ())]
        self.process = Process(f"shard {self.index}", command, self._out, self.log, self._timeline)
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """It serves; written down the first time."""
        if self.process is None or self.process.status is not None:
            return False
        if not self._is_ready and "ready at" in self._out.read_text():
            self._is_ready = True
            self._timeline.note("ready", name=f"shard {self.index}")
        return self._is_ready

    def lose_state(self) -> None:
        """As if its machine had gone."""
        shutil.rmtree(self._state, ignore_errors=True)

    def damage(self, source: random.Random) -> bool:
        """Change a byte that counts, in any of its files; False if it has none yet."""
        drawn = damage.draw(self._state, source)
        if drawn is None:
            return False
        path, self._damaged_at = drawn
        self._timeline.note("damage", name=f"shard {self.index}", file=str(path), at=self._damaged_at)
        self._close_damaged()
        self._damaged = path.open("r+b", buffering=0)
        self._byte = self._flip()
        return True

    def repair(self) -> None:
        """Undo `damage`; unless the shard has found it, and has removed the file, or another one has come in its place, before
        the shard was killed."""
        assert self._damaged is not None
        path, there = Path(str(self._damaged.name)), os.fstat(self._damaged.fileno())
        is_same = path.exists() and os.path.samestat(path.stat(), there)  # held open, so that no other file gets its number
        if is_same and os.pread(self._damaged.fileno(), 1, self._damaged_at) == bytes([self._byte]):
            self._timeline.note("repair", name=f"shard {self.index}")
            self._flip()

    def _flip(self) -> int:
        """Change the byte. Returns what it is now."""
        assert self._damaged is not None
        descriptor = self._damaged.fileno()
        (byte,) = os.pread(descriptor, 1, self._damaged_at)
        os.pwrite(descriptor, bytes([byte ^ 1]), self._damaged_at)
        return byte ^ 1

    def _close_damaged(self) -> None:
        if self._damaged is not None:
            self._damaged.close()
            self._damaged = None

    def fill_disk(self) -> None:
        """Leave no byte free."""
        if not self.is_small:
            return
        with (self._disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))

    def clear_disk(self) -> None:
        """Undo `fill_disk`."""
        (self._disk / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Kill it, and leave nothing in memory."""
        if self.process is not None and self.process.status is None:
            self.process.kill()
        self._close_damaged()
        if self.is_small:
            subprocess.run(["umount", "-l", str(self._disk)], check=False)
        shutil.rmtree(self._disk, ignore_errors=True)
        for held in self._held:
            held.close()


class WorkerActor:
    """One rank, over all of its lives.

    Attributes:
        lives: their processes and options, in their order. is_wanted: it gets a successor when it ends.
        mates: by life, the processes of a learner's other ranks.
    """

    def __init__(self, rank: int, timeline: Timeline) -> None:
        self.rank = rank
        self._timeline = timeline
        self.lives: list[tuple[Process, Options]] = []
        self.mates: list[list[Process]] = []
        self.is_wanted = True

    @property
    def processes(self) -> list[Process]:
        """All of the latest life."""
        return [self.lives[-1][0], *self.mates[-1]] if self.lives else []

    @property
    def wants_successor(self) -> bool:
        """After its end: it has not ended in order, nor for good."""
        _, options = self.lives[-1]
        last = last_word(options)
        return any(each.status != 0 for each in self.processes) and not (last.get("e") == "end" and last["how"] == "end")

    def kill(self) -> None:
        """What is left of the latest life, as a launcher does when one of its processes has failed."""
        for process in self.processes:
            process.kill()

    def start(self, options: Options, name: str = "") -> None:
        """Begin a life."""
        name = name or f"worker {self.rank} life {len(self.lives)}"
        process, *mates = (self._begin(options, name, rank) for rank in range(options.ranks))
        self.lives.append((process, options))
        self.mates.append(mates)

    def _begin(self, options: Options, name: str, rank: int) -> Process:
        if rank:
            name, stem = f"{name} rank {rank}", Path(options.history).with_suffix("")
            options = replace(options, group_rank=rank, history=f"{stem}-rank-{rank}.jsonl")
        command = [str(HERE / "program.py"), options.to_json()]
        stem = Path(options.history).with_suffix("")
        files = stem.with_suffix(".out"), stem.with_suffix(".log")
        return Process(name, command, *files, self._timeline, loads=WITH_TORCH if options.learning is not None else "")


def last_word(options: Options) -> dict[str, Any]:
    """The last record of a life's history, if there is one."""
    return last_record(Path(options.history))


def last_record(path: Path) -> dict[str, Any]:
    """The last line of a history, if there is one."""
    lines = path.read_text().splitlines() if path.exists() else []
    record: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return record


def held_port() -> socket.socket:
    """A socket bound to a port that nobody has. As long as it is held nobody else takes the port, while the shard is down, say;
    the shard may, because this one does not listen."""
    source = random.Random(os.urandom(8))
    while True:
        address = HOST, source.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(address)  # fails beside any other socket, also one that does not listen
            probe.close()
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
            return held


def may_mount() -> bool:
    """This process may make small file systems."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


_DISK_BYTES = {"small": 2 << 20, "medium": 24 << 20, "large": 160 << 20}


def _mount(path: Path, plan: Plan) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES[plan.size]}", "none", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
