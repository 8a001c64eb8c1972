"""The whole: workers, shards, and the messages between them; what can happen next, and what comes of it.

A state is a tuple of the processes' nodes and of what is under way. Whatever the real system leaves open is an option: which
message arrives first, which waiting call goes on, when a lease runs out. Options that are faults cost; the others are free.
Must not know how processes work: automaton.py has them, by their views.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from automaton import Automaton, Node
from first_checkpoint import memory_directory, write_checkpoint
from setting import Setting
from shard_process import ShardProcess
from shard_view import ShardTold
from wire import UNREACHED, Numbers, Request
from worker_process import Slot, Told, WorkerProcess, WorkerView

Action = tuple[Any, ...]

OFF, ON, STALLED, DEAD = range(4)
"""What a worker's process does: not started yet; runs; nothing, for now; nothing any more."""


class State(NamedTuple):
    """Of the world.

    Attributes:
        workers, modes: by process. shards. inbox: what a stalled worker will find: process, slot, outcome. late: requests whose
            callers have given them up, and which may still arrive: shard, request.
    """

    workers: tuple[Node, ...]
    modes: tuple[int, ...]
    shards: tuple[Node, ...]
    inbox: tuple[tuple[int, Slot, int], ...] = ()
    late: tuple[tuple[int, int], ...] = ()


class Result(NamedTuple):
    """What an action leads to.

    Attributes:
        wrong: broken invariants. texts: what the workers said. lost: requests that were given up while on their way.
    """

    state: State
    wrong: tuple[str, ...]
    texts: tuple[str, ...]
    lost: tuple[tuple[int, int], ...]


class World:
    """The processes of one setting.

    Args:
        checkpoints: the directory that its job goes on from.

    Attributes:
        requests, outcomes, files: by number. directory: where it keeps files.
    """

    def __init__(self, setting: Setting, checkpoints: str = "") -> None:
        self.setting = setting
        self.requests = Numbers()
        self.outcomes = Numbers()
        self.files = Numbers()
        self.unreached = self.outcomes.of(UNREACHED)
        self.directory = Path(tempfile.mkdtemp(prefix="psd-protocol-", dir=memory_directory()))
        if setting.has_checkpoint and not checkpoints:
            checkpoints = write_checkpoint(setting, self.directory / "checkpoints")
        self._checkpoints = checkpoints
        self._lives = count()
        self.ranks = [rank for rank, _ in setting.processes]
        self.workers = [
            Automaton(partial(WorkerProcess, setting, index, self.requests, self.outcomes))
            for index in range(len(setting.processes))
        ]
        self.shards = [Automaton(partial(self._make_shard, index)) for index in range(setting.shards)]

    def _make_shard(self, index: int) -> ShardProcess:
        directory = self.directory / f"{index}-{next(self._lives)}"
        return ShardProcess(self.setting, index, self.requests, self.outcomes, self.files, directory, self._checkpoints)

    def close(self) -> None:
        """End everything."""
        for automaton in (*self.workers, *self.shards):
            automaton.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def initial(self) -> State:
        """Nobody has been started."""
        return State(
            tuple(automaton.root for automaton in self.workers),
            (OFF,) * len(self.workers),
            tuple(automaton.root for automaton in self.shards),
        )

    def without_offer(self, outcome: int) -> int:
        """The same answer, which offers no steps."""
        return self.outcomes.of(self.outcomes[outcome]._replace(offer=b""))

    # -- what can happen -----------------------------------------------------------------------------------------------

    def undelivered(self, state: State, process: int) -> Iterator[tuple[Slot, int]]:
        """The requests of a process that are on their way."""
        for slot, number in state.workers[process].view.calls:
            shard, thread = slot
            is_there = any(key == (process, thread) for key, _ in state.shards[shard].view.handlers)
            is_answered = any(entry[:2] == (process, slot) for entry in state.inbox)
            if not is_there and not is_answered:
                yield slot, number

    def options(self, state: State, *, with_faults: bool = True) -> list[tuple[Action, int]]:
        """The actions that are possible, each with its cost in faults."""
        faults = self.setting.faults if with_faults else frozenset()
        options: list[tuple[Action, int]] = []
        for process, mode in enumerate(state.modes):
            options += self._options_of_worker(state, process, mode, faults)
            if mode in (ON, STALLED):
                for slot, number in self.undelivered(state, process):
                    if state.shards[slot[0]].view.is_up:
                        options.append((("deliver", process, slot), 0))
                        # What heartbeats ask for they ask again.
                        for variant in self._variants(state, process, slot, number) if faults and slot[1] == "op" else ():
                            if variant[0] in faults:
                                options.append((("deliver", process, slot, *variant), 1))
        for shard, node in enumerate(state.shards):
            options += self._options_of_shard(state, shard, node, faults)
        for shard, number in dict.fromkeys(state.late):
            if state.shards[shard].view.is_up:
                options.append((("late", shard, number), 0))
        return options

    def _variants(self, state: State, process: int, slot: Slot, number: int) -> Iterator[tuple[Any, ...]]:
        """How a delivery may go wrong."""
        yield ("lose",)
        yield ("late",)
        request: Request = self.requests[number]
        if request.kind in ("push", "push_pull", "initialize"):
            for blocks in range(len(request.blocks)):
                yield ("cut", blocks)
        event = ("call", (process, slot[1]), number, None)
        _, told = self.shards[slot[0]].step(state.shards[slot[0]], event)
        if told.replies and self.outcomes[told.replies[0][1]].offer:
            yield ("unarmed",)
        if not told.replies and request.kind not in ("join", "leave", "step"):
            yield ("timeout",)
        for point in told.crash_points:
            yield "crash", point
        for lock in range(2, told.locks + 1):
            yield "pause", lock

    def _options_of_worker(self, state: State, process: int, mode: int, faults: frozenset[str]) -> Iterator[tuple[Action, int]]:
        view: WorkerView = state.workers[process].view
        setting = self.setting
        if mode == OFF:
            is_first = process < len(setting.programs)
            if is_first or ("twice" in faults and state.modes[setting.mortal] == STALLED):
                yield ("start", process), 0 if is_first else 1
            return
        if mode == STALLED:
            yield ("wake", process), 0
        if mode != ON:
            return
        for choice in range(len(view.options) if view.options != ("go",) else 0):
            yield ("choose", process, choice), 0
        for slot in view.sleeps:
            if slot[0] < 0:
                yield ("slept", process, slot), 0
            elif not state.shards[slot[0]].view.is_up:
                yield ("away", process, slot), 0
        if not view.ended and not view.is_beating:
            for shard, number in enumerate(view.beats):
                if number >= 0 and state.shards[shard].view.is_up and self._matters(state, process, shard, number):
                    yield ("beat", process, shard), 0
        if self.ranks[process] == setting.mortal and process < len(setting.programs) and not view.ended:
            if "die" in faults:
                yield ("die", process), 1
            if "stall" in faults:
                yield ("stall", process), 1

    def has_gone(self, state: State, process: int) -> bool:
        """True if a launcher starts this process's successor."""
        ended = state.workers[process].view.ended
        return state.modes[process] == DEAD or (state.modes[process] == ON and ended not in ("", "finished"))

    def _matters(self, state: State, process: int, shard: int, number: int) -> bool:
        """True if a heartbeat would change anything beyond the lease, that no call on its way there is about to change."""
        before = state.shards[shard]
        after, told = self.shards[shard].step(before, ("call", (process, "beat"), number, None))
        if self.setting.cuts or self.setting.reads:
            heard, _ = self.workers[process].step(state.workers[process], ("beat", shard, told.replies[0][1]))
            if heard is not state.workers[process]:
                return True
        if self.outcomes[told.replies[0][1]].reason != "ShardRestarted":
            return after is not before
        return self.setting.has_slow_beats or all(slot != (shard, "op") for slot, _ in self.undelivered(state, process))

    def _options_of_shard(self, state: State, shard: int, node: Node, faults: frozenset[str]) -> Iterator[tuple[Action, int]]:
        view = node.view
        if not view.is_up:
            yield ("restart", shard), 0
            return
        if view.has_lost_round:
            yield ("tick", shard), 0
        if view.is_graced:
            yield ("grace", shard), 0
        if shard == 0 and view.announced < self.setting.cuts:
            yield ("announce", shard), 0
        # Of a publication, readers begin at shard 0.
        reads = len(state.shards[0].view.told) if self.setting.is_published and shard else self.setting.reads
        if view.reads < reads and view.can_be_read:
            yield ("read", shard), 0
        for key, is_ready in view.handlers:
            if is_ready:
                yield ("go", shard, key), 0
                if "lose" in faults:
                    yield ("go", shard, key, "lose"), 1
                if "unarmed" in faults:
                    _, told = self.shards[shard].step(node, ("go", key))
                    if told.replies and self.outcomes[told.replies[0][1]].offer:
                        yield ("go", shard, key, "unarmed"), 1
            elif self._is_step(state, key, shard):
                yield ("long", shard, key), 0
        for rank, session in enumerate(view.live):
            if session and self._may_expire(state, shard, rank, session):
                yield ("expire", shard, rank), 0
        for rank in view.armed if "revoke" in faults else ():
            yield ("revoke", shard, rank), 1
        for fault in ("kill", "outage", "blank", "suspend"):
            if fault in faults:
                yield (fault, shard), 1

    def _is_step(self, state: State, key: Any, shard: int) -> bool:
        """True if a call that a shard has not answered is a step, which waits for its round but for a moment."""
        process, thread = key
        calls = dict(state.workers[process].view.calls) if process < len(state.workers) else {}
        number = calls.get((shard, thread))
        return number is not None and self.requests[number].kind == "step"

    def overdue(self, state: State) -> list[Action]:
        """What happens if nothing else does: cuts for which pushes are held are given up."""
        return [("overdue", shard) for shard, node in enumerate(state.shards) if node.view.is_up and node.view.holds]

    def _may_expire(self, state: State, shard: int, rank: int, session: int) -> bool:
        """True if nobody renews the lease for as long as it takes."""
        processes = [p for p, each in enumerate(self.ranks) if each == rank and state.modes[p] != OFF]
        active = [p for p in processes if state.modes[p] == ON and not state.workers[p].view.ended]
        for process in active:
            view: WorkerView = state.workers[process].view
            if view.beats[shard] >= 0 and view.session == session:
                return False
        if any(p not in active and state.workers[p].view.session == session for p in processes):
            return True
        # Whoever is about to join may be the one who was given this session just now.
        return not any(state.workers[p].view.is_joining for p in active)

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def take(self, state: State, action: Action) -> Result:
        """What an action leads to. ("+late", action): and what it gives up on the way may arrive later."""
        keeps_late = action[0] == "+late"
        step = _Step(self, state)
        step.take(action[1] if keeps_late else action)
        step.finish()
        if keeps_late:
            step.late += step.lost
            step.lost = []
        return Result(step.state(), tuple(step.wrong), tuple(step.texts), tuple(step.lost))


class _Step:
    """One action being taken."""

    def __init__(self, world: World, state: State) -> None:
        self.world = world
        self.workers = list(state.workers)
        self.modes = list(state.modes)
        self.shards = list(state.shards)
        self.inbox = list(state.inbox)
        self.late = list(state.late)
        self.lost: list[tuple[int, int]] = []
        self.wrong: list[str] = []
        self.texts: list[str] = []

    def state(self) -> State:
        return State(
            tuple(self.workers), tuple(self.modes), tuple(self.shards), tuple(sorted(self.inbox)), tuple(sorted(self.late))
        )

    def shard_event(self, shard: int, event: Any) -> ShardTold:
        self.shards[shard], told = self.world.shards[shard].step(self.shards[shard], event)
        self.wrong += told.wrong
        return told

    def worker_event(self, process: int, event: Any) -> None:
        told: Told
        self.workers[process], told = self.world.workers[process].step(self.workers[process], event)
        self.wrong += told.wrong
        self.texts += [f"worker {self.world.ranks[process]}{self._incarnation(process)}: {text}" for text in told.texts]
        for (shard, thread), number in told.cancelled:
            self.give_up(process, shard, thread, number)

    def _incarnation(self, process: int) -> str:
        return "'" if process >= len(self.world.setting.programs) else ""

    def give_up(self, process: int, shard: int, thread: str, number: int) -> None:
        """Nobody waits for this call's answer any more."""
        if any(key == (process, thread) for key, _ in self.shards[shard].view.handlers):
            self.shard_event(shard, ("hang up", (process, thread)))
        elif self.shards[shard].view.is_up:
            self.lost.append((shard, number))

    def reply(self, process: int, slot: Slot, outcome: int) -> None:
        """A call's outcome reaches its worker."""
        if self.modes[process] == STALLED:
            self.inbox.append((process, slot, outcome))
        elif self.modes[process] == ON:
            self.worker_event(process, ("reply", slot, outcome))

    def take(self, action: Action) -> None:
        match action:
            case ("start", process):
                self.modes[process] = ON
                self.worker_event(process, ("start",))
            case ("deliver", process, slot, *variant):
                self.deliver(process, slot, variant)
            case ("late", shard, number):
                self.late.remove((shard, number))
                self.arrive_late(shard, number)
            case ("go", shard, key, *variant):
                self.go(shard, key, variant[0] if variant else "")
            case ("long", shard, key):
                told = self.shard_event(shard, ("time out", key))
                self.reply(key[0], (shard, key[1]), told.replies[0][1])
            case ("revoke", shard, rank):
                self.shard_event(shard, ("revoke", rank))
            case ("expire", shard, rank):
                self.shard_event(shard, ("expire", rank))
            case ("read", shard):
                view, first = self.shards[shard].view, self.shards[0].view
                self.shard_event(shard, ("read", first.told[view.reads] if self.world.setting.is_published and shard else None))
            case ("suspend" | "tick" | "grace" | "restart" | "announce" | "overdue", shard):
                self.shard_event(shard, (action[0],))
            case ("kill" | "outage" | "blank", shard):
                self.shard_event(shard, ("kill",))
                self.break_connections(shard)
                if action[0] != "outage":
                    self.shard_event(shard, ("restart" if action[0] == "kill" else "blank",))
            case ("beat", process, shard):
                number = self.workers[process].view.beats[shard]
                told = self.shard_event(shard, ("call", (process, "beat"), number, None))
                self.worker_event(process, ("beat", shard, told.replies[0][1]))
            case ("choose", process, choice):
                self.worker_event(process, ("choose", choice))
            case ("slept", process, slot):
                self.worker_event(process, ("wake", slot))
            case ("away", process, slot):
                self.worker_event(process, ("give up", slot))
            case ("die", process):
                self.die(process)
            case ("stall", process):
                self.modes[process] = STALLED
            case ("wake", process):
                self.modes[process] = ON
                mine = [entry for entry in self.inbox if entry[0] == process]
                self.inbox = [entry for entry in self.inbox if entry[0] != process]
                for _, slot, outcome in mine:
                    if any(each == slot for each, _ in self.workers[process].view.calls):
                        self.worker_event(process, ("reply", slot, outcome))
            case _:
                raise AssertionError(action)

    def deliver(self, process: int, slot: Slot, variant: list[Any]) -> None:
        shard, thread = slot
        number = dict(self.workers[process].view.calls)[slot]
        key = (process, thread)
        kind = variant[0] if variant else ""
        if kind == "late":
            self.late.append((shard, number))
            self.reply(process, slot, self.world.unreached)
            return
        how = tuple(variant) if kind in ("cut", "crash", "pause") else None
        told = self.shard_event(shard, ("call", key, number, how))
        if kind == "crash":
            assert not self.shards[shard].view.is_up
            self.break_connections(shard)
            self.shard_event(shard, ("restart",))
            return
        outcome = told.replies[0][1] if told.replies else None
        if kind in ("lose", "cut"):
            if outcome is None:
                self.shard_event(shard, ("hang up", key))
            outcome = self.world.unreached
        elif kind == "unarmed":
            assert outcome is not None
            outcome = self.world.without_offer(outcome)
        elif kind == "timeout":
            assert outcome is None
            outcome = self.shard_event(shard, ("time out", key)).replies[0][1]
        if outcome is not None:
            self.reply(process, slot, outcome)

    def arrive_late(self, shard: int, number: int) -> None:
        """Nobody waits for the answer; nor does the shard for anybody."""
        key = (100, "late")
        told = self.shard_event(shard, ("call", key, number, None))
        if not told.replies:
            self.shard_event(shard, ("hang up", key))

    def go(self, shard: int, key: Any, how: str) -> None:
        told = self.shard_event(shard, ("go", key))
        process, thread = key
        is_lost = how == "lose"
        if told.replies:
            outcome = self.world.unreached if is_lost else told.replies[0][1]
            self.reply(process, (shard, thread), self.world.without_offer(outcome) if how == "unarmed" else outcome)
        elif is_lost and any(each == key for each, _ in self.shards[shard].view.handlers):
            self.shard_event(shard, ("hang up", key))
            self.reply(process, (shard, thread), self.world.unreached)

    def die(self, process: int) -> None:
        for (shard, thread), number in self.workers[process].view.calls:
            if not any(entry[:2] == (process, (shard, thread)) for entry in self.inbox):
                self.give_up(process, shard, thread, number)
        self.inbox = [entry for entry in self.inbox if entry[0] != process]
        self.modes[process] = DEAD

    def break_connections(self, shard: int) -> None:
        """A shard has died: whoever has a call there hears of it."""
        for process, mode in enumerate(self.modes):
            if mode not in (ON, STALLED):
                continue
            for slot, _ in self.workers[process].view.calls:
                if slot[0] == shard and not any(entry[:2] == (process, slot) for entry in self.inbox):
                    self.reply(process, slot, self.world.unreached)

    def finish(self) -> None:
        """What follows without delay."""
        while any(self._follow(process) for process in range(len(self.modes))):
            pass

    def _follow(self, process: int) -> bool:
        """Let what follows without delay for a worker happen; True if something has."""
        view: WorkerView = self.workers[process].view
        setting = self.world.setting
        if self.modes[process] == OFF:
            is_due = process >= len(setting.programs) and self.world.has_gone(self.state(), setting.mortal)
            if is_due:
                self.modes[process] = ON
                self.worker_event(process, ("start",))
            return is_due
        if self.modes[process] != ON:
            return False
        if view.options == ("go",) and all(self._is_ready(p) for p in range(len(setting.programs))):
            self.worker_event(process, ("choose", 0))
            return True
        for slot, number in view.calls:
            shard = slot[0]
            if not self.shards[shard].view.is_up:  # who calls a shard that is down is refused
                self.worker_event(process, ("reply", slot, self.world.unreached))
                return True
            is_leaving = self.world.requests[number].kind == "leave"
            is_prompt = not setting.leaves if is_leaving else slot[1] == "beat" and not setting.has_slow_beats
            if is_prompt and not any(key == (process, slot[1]) for key, _ in self.shards[shard].view.handlers):
                self.deliver(process, slot, [])
                return True
        for slot in view.sleeps:
            if slot[0] >= 0 and self.shards[slot[0]].view.is_up:  # who waits for one that is up tries again
                self.worker_event(process, ("wake", slot))
                return True
        return False

    def _is_ready(self, process: int) -> bool:
        """True if a first process has joined, or is gone."""
        view = self.workers[process].view
        return self.modes[process] != OFF and (view.options == ("go",) or view.is_begun)
