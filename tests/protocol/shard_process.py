"""One shard's process, and the disk that it leaves behind: the real psd.state, event by event.

Events: ("call", key, request, how), ("go", key), ("time out", key), ("hang up", key), ("expire", rank), and words alone. A key
names a call: its process and its thread. `how`: None; ("crash", n): the process dies at its nth crash point; ("cut", n): the
connection breaks after n blocks; ("pause", n): before its nth lock, others have their turn. Must not know more of workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import green
import step_serving
from canonical import Walker
from cut_parts import CutParts
from green import Fiber, Fibers
from published import History, notes_of, watch_cores
from serving import Broken, Context, Desks, GreenTicket, Handler, Paused
from setting import Setting
from shard_view import Key, ShardTold, ShardView
from step_serving import StepDoor
from watched_tables import Killed, WatchedTables
from wire import UNREACHED, Numbers, Outcome

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ServerConfig
from psd.contract.errors import PsdError
from psd.state import core as state_core
from psd.state import locks
from psd.state import shard as state_shard
from psd.state.aggregation.settlement import KEPT
from psd.state.cuts.positions import HOLD_S_MAX
from psd.state.desks import restoration as state_restoration
from psd.state.durability.state_directory import Storage
from psd.state.life import Life
from psd.state.shard import Shard
from psd.state.tables.stores import close_stores
from psd.state.workers.membership import WorkerState
from psd_core.arena import WORDS
from psd_core.table import TableStore

LOSS_S = 1e-4
"""Between two lives of a shard that loses everything, by the clock that sessions grow with: no session comes twice."""

NO_STATE = ("restarts", "left_at")
"""Words that only count, or are times."""


class PausingLock:
    """A lock of the shard. Nobody waits for it here: a call that is to pause does so while it holds none."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, blocking: bool = True) -> bool:
        del blocking
        process = ShardProcess.active
        assert process is not None
        process.on_lock()
        is_taken: bool = self._lock.acquire()
        return is_taken

    def release(self) -> None:
        process = ShardProcess.active
        assert process is not None
        process.locks_held -= 1
        self._lock.release()

    def locked(self) -> bool:
        is_locked: bool = self._lock.locked()
        return is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class WatchedStorage(Storage):
    """Storage whose arenas and tables tell the history what is published."""

    def create_tables(self, *arguments: Any) -> Any:
        return self._watched_tables(lambda: super(WatchedStorage, self).create_tables(*arguments))

    def open_tables(self, count: int) -> Any:
        return self._watched_tables(lambda: super(WatchedStorage, self).open_tables(count))

    def _watched_tables(self, make: Callable[[], Sequence[TableStore]]) -> Sequence[TableStore]:
        process = ShardProcess.active
        assert process is not None
        self._tables_crash_point = process.tables.on_store
        stores = make()
        process.tables.watch(stores)
        return stores

    def create(self, *arguments: Any, **options: Any) -> Any:
        return self._watched(super().create(*arguments, **options))

    def recover(self, can_go_back: Callable[[], bool]) -> Any:
        found = super().recover(can_go_back)
        return None if found is None else (found[0], self._watched(found[1]))

    @staticmethod
    def _watched(arena: Any) -> Any:
        process = ShardProcess.active
        assert process is not None
        process.watch(arena)
        return arena


def stand_ins() -> list[tuple[Any, str, Any]]:
    """What `green.green` is to put into psd.state."""
    new_lock = locks.new

    def drawn_incarnation() -> int:
        assert ShardProcess.active is not None
        return ShardProcess.active.next_incarnation()

    def first_epoch() -> int:
        assert ShardProcess.active is not None
        return ShardProcess.active._incarnations

    def door() -> StepDoor | None:
        desks = ShardProcess.active._desks if ShardProcess.active is not None else None
        return desks.door if desks is not None else None

    return [
        (state_core, "Ticket", GreenTicket),
        (locks, "new", lambda level, index=0, _own=None: PausingLock(new_lock(level, index))),
        (state_core, "drawn_integer", drawn_incarnation),
        (state_restoration, "drawn_integer", drawn_incarnation),
        (state_shard, "Storage", WatchedStorage),
        *step_serving.stand_ins(door, first_epoch),
    ]


class ShardProcess:
    """A live shard."""

    active: ClassVar[ShardProcess | None] = None

    def __init__(
        self,
        setting: Setting,
        index: int,
        requests: Numbers,
        outcomes: Numbers,
        files: Numbers,
        directory: Path,
        checkpoints: str = "",
    ) -> None:
        self._setting = setting
        self._index = index
        self._requests = requests
        self._outcomes = outcomes
        self._directory = directory
        self._checkpoints = checkpoints
        self._fibers = Fibers()
        self._abandoned: list[Fibers] = []
        self._handlers: dict[Key, Handler] = {}
        self._replies: list[tuple[Key, int]] = []
        self._now = 1000.0
        self._lives = self._incarnations = self._losses = 0
        self._has_died = self._is_watched = False
        self._fuse = self._burnt = self.locks_held = self._locks = 0
        self._crash_points: dict[bytes, int] = {}
        self.history = History(setting, index)
        self.history.waited_in = self._waited_in
        self.tables = WatchedTables(setting, index, self.history, self._crash_point)
        self.cut_parts = CutParts(setting, index, files, directory.with_name(f"{directory.name}-stored"))
        self._shard: Shard | None = None
        self._desks: Desks | None = None
        ShardProcess.active = self
        self._start()

    def _start(self) -> None:
        self._lives += 1
        config = ServerConfig(
            self._index,
            self._setting.shards,
            run_id="run",
            lease_s=self._setting.lease_s,
            on_worker_failure="continue",  # the other words leave more to the lease, which is explored, too
            state_dir=str(self._directory),
        )
        self._shard = Shard(
            config,
            now=lambda: self._now,
            wall=lambda: LOSS_S * self._losses,
            incarnation=self.next_incarnation(),
            crash_point=self._crash_point,
            directory=CheckpointDirectory(self._checkpoints) if self._checkpoints else None,
        )
        self._shard.steps.can_arm = self._setting.has_armed  # by the clock it would not
        ranks = [rank for rank, _ in self._setting.processes]
        self._desks = Desks(self._shard, self.history, ranks, self.tables.watching_step)
        self.cut_parts.begin(self._shard, config)
        if self._setting.stored_by and self._lives == 1:
            self.history.seed(self._shard)

    def next_incarnation(self) -> int:
        """As large as no other one is."""
        self._incarnations += 1
        return 100 * (self._index + 1) + self._incarnations

    def watch(self, arena: Any) -> None:
        """Have an arena tell the history what is published."""
        publish, load = arena.publish, arena._blocks.table.load
        blocks = range(self._index, self._setting.blocks, self._setting.shards)

        def watched(slot: int, page: Any, version: int) -> None:
            before, entry = arena.current(slot), load(slot)
            try:
                publish(slot, page, version)
            finally:
                if load(slot) != entry:  # also if the process dies at once
                    self.history.on_publish(blocks[slot], before, page, version)

        arena.publish = watched
        watch_cores(arena, lambda slot, *published: self.history.on_publish(blocks[slot], *published))

    # -- what the code that runs comes by ------------------------------------------------------------------------------

    def _crash_point(self, _: str) -> None:
        self._burnt += 1
        if self._fuse:
            if self._burnt >= self._fuse:
                raise Killed
        elif self._is_watched:
            self._crash_points.setdefault(self._front(), self._burnt)

    def _front(self) -> bytes:
        """What the disk holds beside the contents of pages and rows, which the block table and the tables' notes stand for."""
        storage = self._shard._core.storage if self._shard is not None else None
        if storage is None or storage.arena is None:
            return b""
        notes = b"".join(notes_of(store).tobytes() for store in storage.tables)
        front: bytes = storage.arena._file.read(storage.arena._front.size, 0)
        return front + notes

    def on_lock(self) -> None:
        """A lock is about to be taken."""
        self.on_piece()
        self.locks_held += 1

    def on_piece(self) -> None:
        """A call is about to take a lock, or a step its next piece."""
        fiber = green.getcurrent()
        if self.locks_held == 0 and isinstance(fiber, Fiber):
            handler = next((each for each in self._handlers.values() if each.fiber is fiber), None)
            if handler is not None:
                handler.locks_taken += 1
                self._locks = handler.locks_taken
                if handler.locks_left and handler.locks_taken == handler.locks_left:
                    handler.locks_left = 0
                    green.park(Paused())

    # -- events --------------------------------------------------------------------------------------------------------

    def apply(self, event: tuple[Any, ...], *, is_known: bool = False) -> ShardTold:
        ShardProcess.active = self
        self._burnt = self._fuse = self._locks = 0
        self._is_watched = "crash" in self._setting.faults and not is_known and event[0] == "call"
        self._crash_points = {self._front(): 0} if self._is_watched else {}
        try:
            self._apply(event)
        except Killed:
            self._die()
        if self._shard is not None and self._is_watched:
            self._crash_points.setdefault(self._front(), self._burnt + 1)
        replies, self._replies = tuple(self._replies), []
        points = tuple(sorted(point for point in self._crash_points.values() if point))
        wrong, self.cut_parts.wrong = tuple(self.cut_parts.wrong), []
        return ShardTold(replies, points, self._locks, self.history.take_wrong() + wrong)

    def _apply(self, event: tuple[Any, ...]) -> None:
        shard = self._shard
        match event:
            case ("restart" | "blank" as what,):
                assert shard is None
                if what == "blank":
                    shutil.rmtree(self._directory, ignore_errors=True)
                    self._losses += 1
                    self.history.on_blank()
                self._start()
                return
        assert shard is not None
        match event:
            case ("call", key, request, how):
                self._begin(key, request, how)
            case ("go", key):
                self._fibers.wake(self._fiber(key))
            case ("time out", key):
                self._fibers.wake(self._fiber(key), "time out")
            case ("hang up", key):
                self._handlers[key].hang_up()
                self._fibers.wake(self._fiber(key))
            case ("expire", rank):
                self._expire(rank)
            case ("revoke", rank):
                shard.steps.revoke(rank)
            case ("grace",):
                shard.settlement._coordinator()._grace._began = 0.0  # long ago
                shard.settlement.decide_due()
            case ("announce",):
                self.cut_parts.announce()
            case ("read", told):
                self.cut_parts.read(told)
            case ("overdue",):
                self._now += HOLD_S_MAX + 1
                shard.cuts.on_tick(self._now, self._setting.lease_s)
            case ("tick" | "suspend" as what,):
                self._now += 2 * self._setting.lease_s * (what == "suspend")
                shard.tick()
            case ("kill",):
                raise Killed
            case _:
                raise AssertionError(event)
        self._fibers.run()
        self.cut_parts.collect()
        if self._has_died or self._fuse:  # if it has come through: just before it answers
            raise Killed

    def _fiber(self, key: Key) -> Fiber:
        fiber = self._handlers[key].fiber
        assert fiber is not None
        return fiber

    def _expire(self, rank: int) -> None:
        """A lease runs out. Everybody else has been heard of just now."""
        assert self._shard is not None
        members = self._shard._core.members
        for worker in members.workers:
            worker.last_seen = self._now
        members._last_tick = self._now
        members.workers[rank].last_seen = self._now - 1.5 * self._setting.lease_s
        self._shard.tick()

    def _die(self) -> None:
        """What the kernel does: memory is gone, locks are released, the arena's file stays as it is."""
        assert self._shard is not None
        storage = self._shard._core.storage
        if storage.arena is not None:
            storage.arena._directory.close()
        close_stores(storage.tables, remove=False)
        self.tables.end_life()
        self._abandoned.append(self._fibers)  # nothing of it runs any more, not even to clear up
        self._fibers, self._handlers, self._replies = Fibers(), {}, []
        self._shard, self._desks, self._has_died, self.locks_held = None, None, False, 0

    def _begin(self, key: Key, number: int, how: Any) -> None:
        assert key not in self._handlers, f"two calls at once from {key}"
        handler = self._handlers[key] = Handler(number, Context())
        kind, count = how if how is not None else ("", 0)
        self._fuse = count if kind == "crash" else 0
        handler.locks_left = count if kind == "pause" else 0
        blocks_max = count if kind == "cut" else None
        desks, request = self._desks, self._requests[number]
        assert desks is not None

        def serve() -> None:
            try:
                if request.kind == "step":
                    outcome = desks.take_step(request, self.on_piece, lambda: handler.is_hung_up)
                else:
                    outcome = desks.serve(request, handler.context, blocks_max, is_late=key[1] == "late")
            except Broken:
                outcome = UNREACHED
            except PsdError as error:
                outcome = Outcome.of_error(error)
            except Killed:
                self._has_died = True
                return
            except green.GreenletExit:
                raise
            except Exception as error:  # noqa: BLE001 - the finding itself
                self.history.wrong.append(f"a defect of the shard: {type(error).__name__}: {error}")
                outcome = Outcome(reason="InternalError")
            if not handler.is_hung_up:
                self._replies.append((key, self._outcomes.of(outcome)))
            if self._handlers.get(key) is handler:
                del self._handlers[key]

        handler.fiber = self._fibers.spawn(serve, "call")

    # -- state ---------------------------------------------------------------------------------------------------------

    def view(self) -> ShardView:
        core = self._shard._core if self._shard is not None else None
        workers = core.membership.workers if core is not None and core.membership is not None else []
        return ShardView(
            is_up=core is not None,
            lives=self._lives,
            is_blank=self._losses > 0,
            has_lost_round=core is not None and core.life.now is Life.DAMAGED,
            handlers=tuple(sorted((key, handler.is_ready) for key, handler in self._handlers.items())),
            live=tuple(w.session if w.state is WorkerState.LIVE else 0 for w in workers) or (0,) * len(self._setting.programs),
            history=self.history.summary(),
            ahead=self.history.ahead(),
            carried=self.history.carried(),
            cuts=tuple(sorted(self.cut_parts.found.values())),
            announced=self.cut_parts.announced,
            reads=self.cut_parts.reads,
            told=tuple(self.cut_parts.told),
            can_be_read=self._shard is not None and self.cut_parts.can_be_read,
            holds=self._shard is not None and self.cut_parts.holds,
            armed=self._desks.door.armed_ranks if self._desks is not None and self._setting.has_armed else (),
            is_graced=self._shard is not None and self._shard.settlement.due_in() is not None,
        )

    def _waited_in(self, round_: int) -> int:
        members = self._shard._core.membership if self._shard is not None else None
        return members.waited_in(round_) if members is not None else 0

    def key(self, view: ShardView) -> bytes:
        return repr(view).encode() + self.walked().key()

    def walked(self) -> Walker:
        """The state, written down."""
        ShardProcess.active = self
        walker = Walker(lambda file: "/psd/" in file)
        walker.walk(self._incarnations)
        if self._shard is None:
            self._walk_disk(walker)
            return walker
        core = self._shard._core
        if core.storage.arena is not None:
            self._walk_arena(walker, core.storage.arena)
        members = core.membership
        walker.walk([core, self._shard.admission._last_session, members is None or members._last_tick is None])
        if self._setting.cuts or self._setting.reads:
            walker.walk(self._shard.cuts)
        if self._setting.has_armed and self._desks is not None:
            walker.walk(self._desks.door.known([self._fiber(key) for key in sorted(self._handlers)]))
        for key, handler in sorted(self._handlers.items()):
            walker.walk((key, handler.request, handler.is_hung_up))
            walker.fiber(self._fiber(key))
        return walker

    def _walk_arena(self, walker: Walker, arena: Any) -> None:
        walker.walk([arena.word(name) for name in WORDS if name not in NO_STATE])
        walker.walk([arena.member(rank) for rank in range(len(self._setting.programs))])
        decided = arena.word("decided")
        walker.walk([arena.decision(round_) for round_ in range(max(0, decided - KEPT), decided + 1)])
        for slot in range(len(arena.shapes)):
            walker.page(arena.current(slot))

    def _walk_disk(self, walker: Walker) -> None:
        """By opening it as the next process will."""
        storage = Storage(
            ServerConfig(self._index, self._setting.shards, run_id="run", state_dir=str(self._directory)), lambda _: None
        )
        found = storage.recover(lambda: False)
        if found is not None:
            self._walk_arena(walker, found[1])
            walker.walk([storage.load_barriers(), storage.load_orders(), storage.load_verdict(), storage.load_client_states()])
            if self._setting.tables:
                walker.walk(storage.open_tables(self._setting.tables))
                close_stores(storage.tables, remove=False)
            found[1]._directory.close()

    def end(self) -> None:
        """Let go of everything."""
        ShardProcess.active = self
        for fibers in (self._fibers, *self._abandoned):
            fibers.end()
        if self._shard is not None:
            self._shard.close(keep=False)
        shutil.rmtree(self._directory, ignore_errors=True)
