"""The place and owner of a shard's arena and of its tables' files: makes them when a job is declared, finds them again after
the process has died.

With --state-dir the directory is the operator's, and a shard that is restarted there continues where it was killed. Without,
it is a private one in memory (/dev/shm), removed at the end; what killed shards have left there, the next one clears away.

The kernel keeps what a killed process has written. A machine that goes down keeps some pages of it and not others; when it, or
another machine that has taken over the disk, comes up, the arena would look whole and be of several moments. So a note says in
which life of the machine the arena is in use, or that it was closed in order.

What cannot be written for lack of room is refused by name, and is as it was, here and in the directory; the same call succeeds
when there is room again.

Must not know workers or blocks' contents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.environment import memory_directory
from psd.contract.errors import InternalError, OutOfSpace, PsdError
from psd.state.durability import notes, places, seals
from psd.state.durability.notes import StateDamaged, StateUnsupported
from psd.state.tables.stores import close_stores, create_stores, open_stores, remove_stores, store_paths
from psd.v1 import storage_pb2
from psd.v1.storage_pb2 import StoredBoot
from psd_core.arena import Arena, ArenaBusy, ArenaCorrupt, ArenaError, ArenaFull, BlockShape
from psd_core.table import TableSpec, TableStore
from psd_core.vector import LOG_NAME, VectorStore

logger = logging.getLogger(__name__)

_BARRIERS_NAME = "barriers"
_ORDERS_NAME = "orders"
_VERDICT_NAME = "verdict"
_BOOT_NAME = "boot"
_CANNOT_GO_ON = "this shard cannot go on with it. Remove the directory to start without it"
_VECTORS_NAME = "vectors"
_CLIENT_STATE_PREFIX = "client-state-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PRIVATE_PREFIX = f"psd-{os.getuid()}-"
_MAKING_S_MAX = 60.0
"""Seconds after which a private directory without an arena is abandoned."""


class Storage:
    """The place of one shard's arena."""

    def __init__(self, config: ServerConfig, crash_point: Callable[[str], None] | None) -> None:
        self._config = config
        self._crash_point = crash_point or (lambda _: None)
        self._tables_crash_point = crash_point  # a store that has none need not call Python
        self._is_private = not config.state_dir
        self.directory = (
            memory_directory() / f"{_PRIVATE_PREFIX}{secrets.token_hex(6)}" if self._is_private else Path(config.state_dir)
        )
        self.arena: Arena | None = None
        self.tables: list[TableStore] = []
        self.vectors: VectorStore | None = None
        self._clean_up: weakref.finalize[..., Storage] | None = None

    def recover(self, can_go_back: Callable[[], bool]) -> tuple[storage_pb2.StoredJob, Arena] | None:
        """The job that an earlier process of this shard held, or None.

        Args:
            can_go_back: tells, where a file is damaged, whether there is a checkpoint instead; then all of it is removed.

        Raises:
            ConfigError: the directory is another shard's, another run's, in use, or damaged, or there is no room to go on.
        """
        if self._is_private:
            self._clear_abandoned()
            return None
        try:
            arena = Arena.open(self.directory, crash_point=self._crash_point, check=self._check)
        except ArenaBusy as error:
            raise ConfigError(f"--state-dir: {error}") from error
        except StateDamaged as error:
            if not can_go_back():
                raise ConfigError(f"--state-dir: {error}; {_CANNOT_GO_ON}") from error
            logger.error("--state-dir: %s; going back to a checkpoint", error)  # noqa: TRY400 - the reason says it all
            Arena.remove_from(self.directory, first=self._remove_beside)
            return None
        except (ArenaCorrupt, StateUnsupported) as error:
            raise ConfigError(f"--state-dir: {error}; {_CANNOT_GO_ON}") from error
        except ArenaFull as error:
            raise ConfigError(f"--state-dir: {error.strerror}") from error
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.directory}: {error.strerror or error}") from error
        if arena is None:
            if self.directory.is_dir():
                log = self.directory / _VECTORS_NAME / LOG_NAME
                vectors = log if log.exists() else log.parent
                places.check_unclaimed(
                    [vectors, self.directory / _BOOT_NAME, *self._note_paths(), *store_paths(self.directory)]
                )
                notes.remove(self.directory, _ORDERS_NAME)  # an earlier job's
            return None
        try:
            stored = storage_pb2.StoredJob.FromString(arena.meta)
            self._check_owner(stored)
        except (ConfigError, DecodeError) as error:
            arena.close(remove=False)
            raise ConfigError(f"--state-dir: {self.directory}: {error}") from error
        is_whole = all(arena.current(slot) is not None for slot in range(len(arena.shapes)))
        if arena.word("initialized") and not is_whole:
            arena.close(remove=False)
            raise ConfigError(f"--state-dir: {self.directory}: a block is missing; this shard cannot go on with it")
        is_believed = _is_believed(self._boot())
        has_grown = not (arena.word("initialized") or arena.word("given_up")) and stored.HasField("grown_from")
        if not (is_believed or self._config.checkpoint_dir) and arena.word("initialized"):
            arena.close(remove=False)
            raise ConfigError(
                f"--state-dir: {self.directory}: the machine went down before the shard had ended, so its parameters may "
                "come from different moments. Remove the directory to start without it"
            )
        if not is_believed and arena.word("initialized"):
            logger.warning(
                "the machine went down before the shard had ended, so its files may come from different moments; going back to "
                "a checkpoint",
                extra={"state_dir": str(self.directory)},
            )
        if not (is_believed and (arena.word("initialized") or has_grown)):
            self._remove_beside()
            # Else the process died before the job had its values; nobody can have built on it.
            arena.close(remove=True)
            return None
        try:
            self._note_boot(StoredBoot(boot_id=_boot_id()))  # before anything changes
        except PsdError as error:
            arena.close(remove=False)
            raise ConfigError(f"--state-dir: {error}") from error
        self.arena = arena
        if has_grown:
            try:
                stored, arena = stored.grown_from, self.shrink()
            except PsdError as error:
                self.close(keep=True)
                raise ConfigError(f"--state-dir: {error}") from error
        return stored, arena

    def check_usable(self) -> None:
        """Raise ConfigError if the directory is no place for files."""
        places.check_usable(self.directory)

    def _check(self) -> None:
        """Raise StateDamaged for a byte that is not what was written, as far as that can be told."""
        boot = self._boot()
        seals.check(self.directory, boot.files)
        if _is_believed(boot):
            for path in self._note_paths():
                notes.read(path)

    def _note_paths(self) -> list[Path]:
        """The notes that are there, but that on the boot."""
        found = (
            notes.paths(self.directory, name) for name in (_BARRIERS_NAME, _ORDERS_NAME, _VERDICT_NAME, _CLIENT_STATE_PREFIX)
        )
        return [path for paths in found for path in paths]

    def _remove_beside(self) -> None:
        _remove_notes(self.directory)
        notes.remove(self.directory, _ORDERS_NAME)

    def _check_owner(self, stored: storage_pb2.StoredJob) -> None:
        mine = (self._config.shard_index, self._config.shard_count)
        theirs = (stored.shard_index, stored.shard_count)
        if mine != theirs:
            raise ConfigError(f"holds shard {theirs[0]}/{theirs[1]}, this is {mine[0]}/{mine[1]}")
        if self._config.run_id and self._config.run_id != stored.run_id:
            raise ConfigError(f"holds run {stored.run_id!r}, not {self._config.run_id!r}")

    def create(self, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], workers: int) -> Arena:
        """A new arena for a job, in place of the one that is there.

        Raises:
            OutOfSpace: the directory has no room for it.
            InternalError: it is no place for an arena, or another process's.
        """
        replace = self.arena is not None
        self.close(keep=False)
        arena = self._make(stored, shapes, workers, replace=replace)
        if not self._is_private:
            try:
                self._note_boot(StoredBoot(boot_id=_boot_id()))
            except BaseException:
                _remove_notes(self.directory)
                arena.close(remove=True)
                raise
        return self._take(arena)

    def grow(self, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], tables: Sequence[TableSpec]) -> Arena:
        """A new arena, and tables, for a job that takes the place of one of vectors alone; these, and all notes, stay.

        Until the new job has its values, the next process finds the old one.

        Raises:
            OutOfSpace, InternalError: nothing has changed.
        """
        assert self.arena is not None
        stored.grown_from.CopyFrom(storage_pb2.StoredJob.FromString(self.arena.meta))
        made = create_stores(self.directory, tables, self._tables_crash_point)
        try:
            arena = self._exchange(self.arena, stored, shapes)
        except BaseException:
            close_stores(made, remove=True)
            raise
        self.tables = made
        return self._take(arena)

    def shrink(self) -> Arena:
        """The arena of the job of vectors alone again, whose place the present one has taken. Raises what `grow` does."""
        assert self.arena is not None
        stored = storage_pb2.StoredJob.FromString(self.arena.meta).grown_from
        arena = self._exchange(self.arena, stored, (), initialized=1, timeline=self.arena.word("timeline"))
        close_stores(self.tables, remove=True)
        remove_stores(self.directory)
        self.tables = []
        return self._take(arena)

    def _exchange(self, old: Arena, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], **words: int) -> Arena:
        """An arena with the same members that takes the old one's place."""

        def prepare(arena: Arena) -> None:
            for rank in range(old.workers):
                arena.set_member(rank, *old.member(rank))
            for name, value in words.items():
                arena.set_word(name, value)

        return self._make(stored, shapes, old.workers, instead=old, prepare=prepare)

    def _make(self, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], workers: int, **how: Any) -> Arena:
        try:
            return Arena.create(
                self.directory,
                meta=stored.SerializeToString(),
                shapes=shapes,
                workers=workers,
                crash_point=self._crash_point,
                **how,
            )
        except ArenaFull as error:
            raise OutOfSpace(
                f"{self.directory} has no room for this job's parameters and slots; --state-dir can name another place: "
                f"{error.strerror}"
            ) from error
        except (ArenaBusy, OSError) as error:
            raise InternalError(f"--state-dir: cannot use {self.directory}: {error}") from error

    def _take(self, arena: Arena) -> Arena:
        self._forget_clean_up()
        if self._is_private:  # also when the shard is dropped without being closed
            self._clean_up = weakref.finalize(self, _abandon, arena, self.directory)
        self.arena = arena
        return arena

    def _forget_clean_up(self) -> None:
        if self._clean_up is not None:
            self._clean_up.detach()  # or it would keep the arena, and the memory of all its pages

    @property
    def free_bytes(self) -> int:
        """Space where the files lie, or will."""
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        return shutil.disk_usage(place).free

    def create_tables(self, specs: Sequence[TableSpec]) -> list[TableStore]:
        """Make the stores of a job's tables, beside the new arena.

        Raises:
            OutOfSpace: the directory has no room for them; the arena has gone, too.
        """
        try:
            self.tables = create_stores(self.directory, specs, self._tables_crash_point)
        except BaseException:
            self.close(keep=False)
            raise
        return self.tables

    def open_tables(self, count: int) -> list[TableStore]:
        """Take over the stores of a job's tables with the arena that was found.

        Raises:
            ConfigError: one of them cannot be used.
        """
        with self.taking_over():
            self.tables = open_stores(self.directory, count, self._tables_crash_point)
        return self.tables

    def make_vectors(self) -> None:
        """Make the store of the job's vectors, beside the arena, if it has none yet.

        Raises:
            OutOfSpace: there is no room for it.
        """
        if self.vectors is None:
            config = self._config
            # A shard that was killed while it gave up its arena may have left some.
            shutil.rmtree(self.directory / _VECTORS_NAME, ignore_errors=True)
            try:
                self.vectors = VectorStore.create(
                    self.directory / _VECTORS_NAME,
                    shard=config.shard_index,
                    shards=config.shard_count,
                    sessions_max=2 * config.limits.workers_max + 1,
                    crash_point=self._tables_crash_point,
                )
            except ArenaFull as error:
                raise OutOfSpace(f"{self.directory} has no room for vectors: {error.strerror}") from error

    def open_vectors(self) -> None:
        """Take over the vectors of the arena that was found, if there are any.

        Raises:
            ConfigError: they cannot be used.
        """
        with self.taking_over(), contextlib.suppress(FileNotFoundError):
            self.vectors = VectorStore.open(self.directory / _VECTORS_NAME, crash_point=self._tables_crash_point)

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """Inside, what lies beside the arena that was found is read. If it cannot be: ConfigError."""
        try:
            yield
        except (ArenaError, OSError, DecodeError, ValueError) as error:
            place = "" if isinstance(error, (ArenaError, OSError)) else f"{self.directory}: "
            raise ConfigError(f"--state-dir: {place}{error}; {_CANNOT_GO_ON}") from error

    def save_barriers(self, opened: bytes) -> None:
        """Store the opened barriers beside the arena; does nothing before there is an arena.

        Raises:
            OutOfSpace, InternalError: it cannot be written; what was kept before still is.
        """
        self._save(_BARRIERS_NAME, opened)

    def load_barriers(self) -> bytes:
        """The stored barriers; empty if there are none."""
        return self._load(_BARRIERS_NAME)

    def save_orders(self, orders: bytes) -> None:
        """Keep what the operator has told the job, beside the arena. Raises what `save_barriers` does."""
        self._save(_ORDERS_NAME, orders)

    def load_orders(self) -> bytes:
        """The stored orders; empty if there are none."""
        return self._load(_ORDERS_NAME)

    def save_verdict(self, verdict: bytes) -> None:
        """Keep shard 0's latest verdict, beside the arena. Raises what `save_barriers` does."""
        self._save(_VERDICT_NAME, verdict)

    def load_verdict(self) -> bytes:
        """The stored verdict; empty if there is none."""
        return self._load(_VERDICT_NAME)

    def save_client_state(self, name: str, state: bytes) -> None:
        """Keep one of the states that workers save for themselves, under a name. Raises what `save_barriers` does."""
        self._save(f"{_CLIENT_STATE_PREFIX}{name}", state, "client_state")

    def remove_client_state(self, name: str) -> None:
        """Forget a state that may have been kept."""
        if not self._is_private:
            self._crash_point("storage.client_state.remove")
            (self.directory / f"{_CLIENT_STATE_PREFIX}{name}").unlink(missing_ok=True)

    def load_client_states(self) -> dict[str, bytes]:
        """The states that are kept, by name."""
        paths = notes.paths(self.directory, _CLIENT_STATE_PREFIX)
        return {path.name.removeprefix(_CLIENT_STATE_PREFIX): notes.read(path) for path in paths}

    def _save(self, name: str, content: bytes, what: str = "") -> None:
        if self.arena is not None and not self._is_private:  # a private arena has no next process
            notes.write(self.directory, name, content, lambda step: self._crash_point(f"storage.{what or name}.{step}"))

    def _load(self, name: str) -> bytes:
        return notes.read(self.directory / name)

    def _boot(self) -> StoredBoot:
        return StoredBoot.FromString(self._load(_BOOT_NAME))

    def _note_boot(self, boot: StoredBoot) -> None:
        """Record the machine's boot on the disk, before the files that depend on it."""
        if self._boot() != boot:
            notes.write(self.directory, _BOOT_NAME, boot.SerializeToString(), is_durable=True)

    def close(self, *, keep: bool) -> None:
        """Let go of the arena. It stays if the operator named its directory and `keep`."""
        if self.arena is not None:
            is_removed = self._is_private or not keep
            if is_removed:
                if self.tables or self.vectors is not None:
                    # Whoever finds the arena without them is to take it for one that was never complete.
                    self.arena.set_word("given_up", 1)
                    self.arena.set_word("initialized", 0)
                _remove_notes(self.directory)
            close_stores(self.tables, remove=is_removed)
            self.tables = []
            if self.vectors is not None:
                self.vectors.close(remove=is_removed)
                self.vectors = None
            if not is_removed:
                self._note_closed(self.arena)
            self.arena.close(remove=is_removed)
            self.arena = None
            self._forget_clean_up()

    def _note_closed(self, arena: Arena) -> None:
        """Seal all that is left, when nothing changes it any more."""
        arena.stop()
        others = [*store_paths(self.directory), *(self.directory / _VECTORS_NAME).glob("*"), *self._note_paths()]
        try:
            found = seals.seal(self.directory, arena.path, arena.used_stretches(), others)
            self._note_boot(StoredBoot(is_closed=True, files=found))
        except (PsdError, OSError) as error:
            logger.error(  # noqa: TRY400 - the reason says it all
                "the parameters stay in %s, but this cannot be recorded, so they will not be used if the machine goes down: %s",
                self.directory,
                error,
            )

    @staticmethod
    def _clear_abandoned() -> None:
        for path in memory_directory().glob(f"{_PRIVATE_PREFIX}*"):
            try:
                if path.lstat().st_uid != os.getuid():  # anybody may make such a name there, or a link to what is ours
                    continue
                # Without an arena it may be another shard's that is just about to lock it, and must find it free.
                if not Arena.is_in(path) and time.time() - path.stat().st_mtime < _MAKING_S_MAX:
                    continue
                arena = Arena.open(path)
            except ArenaCorrupt:  # nobody holds its lock, and nobody can ever use it
                shutil.rmtree(path, ignore_errors=True)
                continue
            except (ArenaBusy, OSError):
                continue
            if arena is None:  # killed while it made its arena
                shutil.rmtree(path, ignore_errors=True)
            else:
                _remove_notes(path)
                arena.close(remove=True)
                logger.info("removed %s, left behind by a killed shard", path)


def _boot_id() -> bytes:
    """Identity of the machine's present boot; empty where the system has none."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def _abandon(arena: Arena, directory: Path) -> None:
    remove_stores(directory)
    shutil.rmtree(directory / _VECTORS_NAME, ignore_errors=True)
    arena.abandon()


def _is_believed(boot: StoredBoot) -> bool:
    return boot.is_closed or boot.boot_id == _boot_id()


def _remove_notes(directory: Path) -> None:
    """Delete what lies beside an arena."""
    remove_stores(directory)
    shutil.rmtree(directory / _VECTORS_NAME, ignore_errors=True)
    for name in (_BARRIERS_NAME, _VERDICT_NAME, _BOOT_NAME):
        notes.remove(directory, name)
    for path in directory.glob(f"{_CLIENT_STATE_PREFIX}*"):
        path.unlink(missing_ok=True)
