"""One worker's process: the real client, on fake lanes, driven event by event.

Events: ("start",), ("reply", slot, outcome), ("wake", slot), ("give up", slot), ("choose", k), ("beat", shard, outcome). A
slot is
a shard and the thread that calls it, "op" or "beat"; outcomes are numbers. Must not know what is in a request.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import fake_steps
import green
from canonical import Walker
from fake_lane import FakeLane
from fake_steps import PendingStep
from green import Fiber, Fibers, Sleep
from programs import Program, Seen
from setting import Setting
from wire import Numbers, Outcome, Request

from psd.contract.config import ClientConfig
from psd.v1 import control_pb2
from psd_client.lanes.shards import RetryPolicy
from psd_client.lanes.transport import Cancelled, Scope
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.session.heartbeat import Heartbeats

Slot = tuple[int, str]
AWAY_S = 1e6
BEAT_S = 1.0


class Told(NamedTuple):
    """What an event has led to, beside the new state.

    Attributes:
        cancelled: slots whose calls were given up, with the request. texts: for the trace. wrong: broken invariants.
    """

    cancelled: tuple[tuple[Slot, int], ...]
    texts: tuple[str, ...]
    wrong: tuple[str, ...]


class WorkerView(NamedTuple):
    """What the rest of the world needs to know of a worker's process.

    Attributes:
        calls: by slot, the request. sleeps: slots of fibers that sleep; shard -1: not because of a shard. options: of the
        choice
            that the program has. beats: per shard, the heartbeat that would be sent now; -1: none. session: that heartbeats
            name.
        ended, books, late, parts, seen: see Program. is_joining: a call that joins is under way. is_begun: it makes
            steps. is_beating: the thread of the heartbeats is not done with the last one.
    """

    calls: tuple[tuple[Slot, int], ...]
    sleeps: tuple[Slot, ...]
    options: tuple[str, ...]
    beats: tuple[int, ...]
    session: int
    is_joining: bool
    is_begun: bool
    is_beating: bool
    ended: str
    books: tuple[tuple[int, str], ...]
    late: int
    clock: int
    parts: tuple[tuple[int, int], ...]
    seen: Seen
    answers: tuple[tuple[int, ...], ...]
    is_over: bool


class QuietHeartbeats(Heartbeats):
    """Heartbeats that the checker sends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, clock=green.now)

    def start(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def join(self) -> None:
        pass


@lru_cache(4096)
def _session_of(body: bytes) -> int:
    return control_pb2.HeartbeatRequest.FromString(body).caller.session


def stand_ins() -> list[tuple[Any, str, Any]]:
    """What `green` is to put into the client beside threads and time."""
    worker, ending = importlib.import_module("psd_client.worker.worker"), importlib.import_module("psd_client.worker.ending")
    return [
        (worker, "RetryPolicy", lambda timeout_s: RetryPolicy(timeout_s, clock=green.now, uniform=lambda: 0.0)),
        (worker, "Heartbeats", QuietHeartbeats),
        (
            importlib.import_module("psd_client.worker.session.joining"),
            "drawn_integer",
            lambda: green.current().fibers.number + 1,
        ),
        (ending, "remember", lambda worker: None),
        (ending, "close_in_thread", lambda worker: None),
        *fake_steps.stand_ins(),
    ]


class WorkerProcess:
    """A live process. Not made anew: `view`, `key` and `apply` follow its history."""

    def __init__(self, setting: Setting, process: int, requests: Numbers, outcomes: Numbers) -> None:
        self._setting = setting
        self._requests = requests
        self._outcomes = outcomes
        self._fibers = Fibers(process + 1)
        self._fibers.owner = self
        self._calls: dict[Slot, tuple[int, Fiber | PendingStep]] = {}
        self._cancelled: list[tuple[Slot, int]] = []
        self._options: tuple[str, ...] = ()
        self._chooser: Fiber | None = None
        self._heartbeats: Heartbeats | None = None
        self._beats: dict[int, int] | None = None
        self._injected: tuple[int, Outcome] | None = None
        self.program = Program(setting, process, self._choose)

    # -- events --------------------------------------------------------------------------------------------------------

    def apply(self, event: tuple[Any, ...], *, is_known: bool = False) -> Told:
        del is_known
        match event:
            case ("start",):
                self._fibers.spawn(lambda: self.program.run(self._connect), "op")
            case ("reply", slot, outcome):
                _, asks = self._calls.pop(slot)
                if isinstance(asks, PendingStep):
                    asks.take(self._outcomes[outcome])
                else:
                    self._fibers.wake(asks, self._outcomes[outcome])
            case ("wake", slot):
                self._fibers.wake(self._sleeper(slot))
            case ("give up", slot):
                fiber = self._sleeper(slot)
                fiber.now += AWAY_S
                self._fibers.wake(fiber)
            case ("choose", choice):
                chooser, self._chooser = self._chooser, None
                assert chooser is not None
                option, self._options = self._options[choice], ()
                self._fibers.wake(chooser, option)
            case ("beat", shard, outcome):
                self._injected = (shard, self._outcomes[outcome])
                self._fibers.spawn(self._beat, "beat")
            case _:
                raise AssertionError(event)
        self._fibers.run()
        cancelled, self._cancelled = tuple(self._cancelled), []
        texts, self.program.told = tuple(self.program.told), []
        wrong, self.program.wrong = tuple(self.program.wrong), []
        return Told(cancelled, texts, wrong)

    def _connect(self) -> FlatCalls:
        setting = self._setting
        lanes = [FakeLane(shard, self) for shard in range(setting.shards)]
        config = ClientConfig(
            tuple(lane.address for lane in lanes), self.program.rank, len(setting.programs), run_id="run", wait_timeout_s=600
        )
        # Heartbeats begin before the worker has joined, within the constructor.
        made = FlatCalls.__new__(FlatCalls)
        self.program.ps = made
        try:
            made.__init__(config, lanes)  # type: ignore[misc]
        except BaseException:
            self.program.ps = None
            raise
        return made

    def _choose(self, why: str, options: tuple[str, ...]) -> str:
        self._options, self._chooser = options, green.current()
        found: str = green.park(("choice", why))
        if why != "ready":
            self.program.say(f"after {why}: {found}")
        return found

    def _sleeper(self, slot: Slot) -> Fiber:
        return next(fiber for fiber in self._fibers.alive if isinstance(fiber.awaits, Sleep) and _slot(fiber) == slot)

    # -- what lanes ask for ----------------------------------------------------------------------------------------------

    def ask(self, shard: int, request: Request, scope: Scope) -> Outcome:
        """See fake_lane.Asks."""
        fiber = green.current()
        slot = (shard, fiber.thread)
        assert slot not in self._calls, f"two calls at once from {slot}"
        number = self._requests.of(request)
        self._calls[slot] = (number, fiber)

        def cancel() -> None:
            if slot in self._calls and self._calls[slot][1] is fiber:
                del self._calls[slot]
                self._cancelled.append((slot, number))
                self._fibers.wake(fiber)

        with scope.entered(cancel):
            outcome: Outcome | None = green.park(("call", slot))
        if outcome is None:
            raise Cancelled
        error = outcome.error(shard)
        if error is not None:
            fiber.last_shard = shard
            raise error
        return outcome

    @property
    def peer(self) -> int:
        """See fake_lane.Asks."""
        return self._fibers.number - 1 if self._setting.has_armed else -1

    def send_step(self, shard: int, message: bytes) -> PendingStep:
        """Send a step, by the connection of this process."""
        slot, pending = (shard, "op"), PendingStep()
        assert slot not in self._calls, f"two calls at once from {slot}"
        number = self._requests.of(Request("step", message, process=self.peer))
        self._calls[slot] = (number, pending)
        return pending

    def abandon_step(self, shard: int) -> None:
        """End the connection over which a step may be under way."""
        slot = (shard, "op")
        if slot in self._calls and isinstance(self._calls[slot][1], PendingStep):
            number, _ = self._calls.pop(slot)
            self._cancelled.append((slot, number))

    def beat(self, shard: int, request: Request) -> Callable[[], Outcome]:
        """See fake_lane.Asks."""
        if self._beats is not None:
            self._beats[shard] = self._requests.of(request)
        outcome = self._injected[1] if self._injected is not None and self._injected[0] == shard else Outcome()

        def reply() -> Outcome:
            if self._injected is None or self._injected[0] != shard:
                raise Cancelled  # nothing was sent there
            error = outcome.error(shard)
            if error is not None:
                raise error
            return outcome

        return reply

    def received(self, versions: Sequence[tuple[int, int]]) -> None:
        """See fake_lane.Asks."""
        if self._setting.has_rounds:
            self.program.versions.update(versions)

    def _beat(self) -> None:
        heartbeats, ps = self._real_heartbeats, self.program.ps
        assert heartbeats is not None
        assert ps is not None
        membership = ps._session.memberships.latest
        assert membership is not None
        heartbeats._beat(membership, BEAT_S)

    @property
    def _real_heartbeats(self) -> Heartbeats | None:
        ps = self.program.ps
        return None if ps is None or ps._ended.locked() else getattr(ps, "_heartbeats", None)

    def _heartbeats_now(self) -> tuple[int, ...]:
        """The requests that the heartbeats' thread would send now."""
        ps, none = self.program.ps, (-1,) * self._setting.shards
        heartbeats = self._real_heartbeats
        if heartbeats is None or heartbeats._stopped or ps is None or ps._session.memberships.latest is None:
            return none
        self._beats, self._injected = {}, None
        heartbeats._beat(ps._session.memberships.latest, BEAT_S)
        found, self._beats = tuple(self._beats.get(shard, -1) for shard in range(self._setting.shards)), None
        return found

    # -- state ---------------------------------------------------------------------------------------------------------

    def view(self) -> WorkerView:
        beats = self._heartbeats_now()
        fibers = self._fibers.alive
        first = next((beat for beat in beats if beat >= 0), -1)
        session = _session_of(self._requests[first].body) if first >= 0 else 0
        kinds = [self._requests[number].kind for (_, thread), (number, _) in self._calls.items() if thread == "op"]
        return WorkerView(
            calls=tuple(sorted((slot, number) for slot, (number, _) in self._calls.items())),
            sleeps=tuple(sorted(_slot(fiber) for fiber in fibers if isinstance(fiber.awaits, Sleep))),
            options=self._options,
            beats=beats,
            session=session,
            is_joining="join" in kinds,
            is_begun=self.program.is_begun,
            is_beating=any(fiber.thread == "beat" for fiber in fibers),
            ended=self.program.ended,
            books=tuple(sorted(self.program.books.items())),
            late=self.program.late,
            clock=self.program.clock,
            parts=tuple(sorted(self.program.parts.items())),
            seen=self.program.seen,
            answers=tuple(self.program.answers),
            is_over=self.program.is_over,
        )

    def key(self, view: WorkerView) -> bytes:
        walker = self._walked()
        return repr(view).encode() + walker.key()

    def _walked(self) -> Walker:
        walker = Walker(lambda file: "/psd_client/" in file or file.endswith("programs.py"))
        program = self.program
        if program.ended:
            return walker
        walker.walk((program.steps_made, program.errors, program.versions, program.told_part, program.has_new_row))
        ps = program.ps
        if ps is not None and hasattr(ps, "_session"):
            walker.walk([ps._session, ps._barriers, ps._exchange, ps._turn, ps._untold, ps._last_failed])
        for fiber in sorted(self._fibers.alive, key=lambda fiber: (fiber.thread, repr(_place(fiber)))):
            walker.fiber(fiber)
        return walker

    def end(self) -> None:
        """Let go of everything."""
        self._fibers.end()
        ps = self.program.ps
        if ps is not None:
            ps._ended.acquire(blocking=False)


def _slot(fiber: Fiber) -> Slot:
    shard = fiber.awaits.shard
    return (-1 if shard is None else shard, fiber.thread)


def _place(fiber: Fiber) -> Any:
    awaits = fiber.awaits
    if isinstance(awaits, Sleep):
        return _slot(fiber)
    return awaits[1] if isinstance(awaits, tuple) else ""
