"""The place and owner of a shard's arena and of its tables' files: makes them when a job is declared, finds them again after
the process has died.

With --state-dir the directory is the operator's, and a shard that is restarted there continues where it was killed. Without,
it is a private one in memory (/dev/shm), removed at the end; what killed shards have left there, the next one clears away.

The kernel keeps what a killed process has written. A machine that goes down keeps some pages of it and not others; when it, or
another machine that has taken over the disk, comes up, the arena would look whole, but be of several moments. So a note says in
which boot of the machine the arena is in use, or that it was closed in order, with checksums of all files
(end_checksums.py), which are checked before a byte is used.

If there is no room for a file, the error says so, and nothing has changed, here or in the directory; the same call succeeds
when there is room again.

Must not know workers or blocks' contents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.environment import memory_directory
from psd.contract.errors import InternalError, OutOfSpace, PsdError
from psd.state.durability import directory_checks, end_checksums, leftovers, notes
from psd.state.durability.boots import boot_id
from psd.state.durability.notes import StateDamaged, StateUnsupported
from psd.state.tables.stores import close_stores, create_stores, drop_stores, open_stores, store_paths
from psd.v1 import storage_pb2
from psd.v1.storage_pb2 import StoredBoot
from psd_core.arena import (
    Arena,
    ArenaBusy,
    ArenaCorrupt,
    ArenaError,
    ArenaForeign,
    BlockShape,
    StoreFull,
    no_crash,
    plane_paths,
)
from psd_core.table import TableSpec, TableStore
from psd_core.vector import LOG_NAME, VectorStore

logger = logging.getLogger(__name__)

_CANNOT_GO_ON = "this shard cannot go on with it. Remove the directory to start without it"
_PRIVATE_PREFIX = f"psd-{os.getuid()}-"


class LeftDamaged(ConfigError):
    """A file that an earlier process has left beside its arena is damaged; the message names it."""


class Storage:
    """The place of one shard's arena."""

    def __init__(self, config: ServerConfig, crash_point: Callable[[str], None] | None) -> None:
        self._config = config
        self._crash_point = crash_point or no_crash
        self._tables_crash_point = crash_point  # a store that has none need not call Python
        self._is_private = not config.state_dir
        self.directory = (
            memory_directory() / f"{_PRIVATE_PREFIX}{secrets.token_hex(6)}" if self._is_private else Path(config.state_dir)
        )
        self.arena: Arena | None = None
        self.tables: list[TableStore] = []
        self.vectors: VectorStore | None = None
        self._clean_up: weakref.finalize[..., Storage] | None = None
        self._has_remains = False  # of an arena that was given up: files that could not be deleted then

    def recover(self, can_go_back: Callable[[], bool]) -> tuple[storage_pb2.StoredJob, Arena] | None:
        """The job that an earlier process of this shard held, or None.

        Args:
            can_go_back: called if a file is damaged: returns whether there is a checkpoint. If so, all files are removed.

        Raises:
            ConfigError: the directory is another shard's, another run's, in use, or damaged, or there is no room to go on.
        """
        if self._is_private:
            leftovers.clear_abandoned(memory_directory(), _PRIVATE_PREFIX)
            return None
        if self.directory.exists():
            directory_checks.check_private(self.directory, leftovers.names(self.directory))
        try:
            arena = Arena.open(self.directory, crash_point=self._crash_point, check=self._check)
        except ArenaBusy as error:
            raise ConfigError(f"--state-dir: {error}") from error
        except (ArenaForeign, StateUnsupported) as error:
            raise ConfigError(f"--state-dir: {error}; {_CANNOT_GO_ON}") from error
        except (ArenaCorrupt, StateDamaged) as error:
            if not can_go_back():
                raise ConfigError(f"--state-dir: {error}; {_CANNOT_GO_ON}") from error
            with self._deleting(ConfigError):
                self.give_up(error)
            return None
        except StoreFull as error:
            raise ConfigError(f"--state-dir: {error.strerror}") from error
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.directory}: {error.strerror or error}") from error
        if arena is None:
            if self.directory.is_dir():
                log = self.directory / leftovers.VECTORS_NAME / LOG_NAME
                vectors = log if log.exists() else log.parent
                directory_checks.check_unclaimed(
                    [vectors, self.directory / leftovers.BOOT_NAME, *self._note_paths(), *store_paths(self.directory)]
                )
                with self._deleting(ConfigError):
                    notes.remove(self.directory, leftovers.ORDERS_NAME)  # an earlier job's
            return None
        try:
            return self._take_over(arena)
        except BaseException as error:
            self.close(keep=True)
            arena.close(remove=False)  # if it was not taken
            if isinstance(error, PsdError):
                raise ConfigError(f"--state-dir: {error}") from error
            if isinstance(error, (OSError, ArenaError, DecodeError)):
                raise ConfigError(f"--state-dir: {self.directory}: {error}") from error
            raise

    def _take_over(self, arena: Arena) -> tuple[storage_pb2.StoredJob, Arena] | None:
        """Go on with an arena that was found; None if its job is given up."""
        stored = storage_pb2.StoredJob.FromString(arena.meta)
        self._check_owner(stored)
        is_whole = all(arena.current(slot) is not None for slot in range(len(arena.shapes)))
        if arena.word("initialized") and not is_whole:
            raise ConfigError(f"--state-dir: {self.directory}: a block is missing; this shard cannot go on with it")
        boot = self._boot()
        is_believed = self._is_believed(boot)
        why_not = (
            "the machine went down before the shard had ended"
            if boot.boot_id and boot_id(self.directory)
            else "the shard was killed, and this system does not tell whether the machine went down then"
        )
        has_grown = not (arena.word("initialized") or arena.word("given_up")) and stored.HasField("grown_from")
        if not (is_believed or self._config.checkpoint_dir) and arena.word("initialized"):
            raise ConfigError(
                f"--state-dir: {self.directory}: {why_not}, so its parameters may come from different moments. Remove the "
                "directory to start without it"
            )
        if not is_believed and arena.word("initialized"):
            logger.warning(
                "%s, so its files may come from different moments; going back to a checkpoint",
                why_not,
                extra={"state_dir": str(self.directory)},
            )
        if not (is_believed and (arena.word("initialized") or has_grown)):
            # Else the process died before the job had its values; nobody can have built on it.
            with self._deleting(ConfigError), contextlib.ExitStack() as closing:
                closing.callback(arena.close, remove=True)
                self._remove_beside()
            return None
        self._note_boot(StoredBoot(boot_id=boot_id(self.directory)))  # before anything changes
        self.arena = arena
        if has_grown:
            stored, arena = stored.grown_from, self.shrink()
        return stored, arena

    def check_usable(self) -> None:
        """Raise ConfigError if no file can be made in the directory."""
        directory_checks.check_usable(self.directory)

    def _check(self) -> None:
        """Raise StateDamaged if a file is not what was written, as far as checksums tell."""
        boot = self._boot()
        end_checksums.check(self.directory, boot.files)
        if self._is_believed(boot):
            for path in self._note_paths():
                notes.read(path)

    def give_up(self, why: Exception) -> None:
        """Remove state that cannot be used, because there is a checkpoint to go back to."""
        logger.error("%s; going back to a checkpoint", f"--state-dir: {str(why).removeprefix('--state-dir: ')}")
        if self.arena is not None:
            self.close(keep=False)
        else:
            Arena.remove_from(self.directory, first=self._remove_beside)

    def _is_believed(self, boot: StoredBoot) -> bool:
        """True if the files have all that the shard wrote: it was closed in order, or the machine has not gone down since."""
        return boot.is_closed or (boot.boot_id != b"" and boot.boot_id == boot_id(self.directory))

    def _note_paths(self) -> list[Path]:
        """The notes in the directory, except the one on the boot."""
        found = (
            notes.paths(self.directory, name)
            for name in (leftovers.BARRIERS_NAME, leftovers.ORDERS_NAME, leftovers.VERDICT_NAME, leftovers.CLIENT_STATE_PREFIX)
        )
        return [path for paths in found for path in paths]

    def _remove_beside(self) -> None:
        leftovers.remove_notes(self.directory)
        notes.remove(self.directory, leftovers.ORDERS_NAME)

    def _check_owner(self, stored: storage_pb2.StoredJob) -> None:
        mine = (self._config.shard_index, self._config.shard_count)
        theirs = (stored.shard_index, stored.shard_count)
        if mine != theirs:
            raise ConfigError(
                f"--state-dir: {self.directory}: holds shard {theirs[0]}/{theirs[1]}, this is {mine[0]}/{mine[1]}"
            )
        if self._config.run_id and self._config.run_id != stored.run_id:
            raise ConfigError(f"--state-dir: {self.directory}: holds run {stored.run_id!r}, not {self._config.run_id!r}")

    def create(self, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], workers: int) -> Arena:
        """Make a new arena for a job, in place of the present one.

        Raises:
            OutOfSpace: the directory has no room for it.
            InternalError: the directory cannot hold an arena, or another process uses it.
        """
        replace = self.arena is not None or self._has_remains
        self.close(keep=False)
        if self._has_remains:
            with self._deleting():
                leftovers.remove_notes(self.directory)
            self._has_remains = False
        arena = self._make(stored, shapes, workers, replace=replace)
        if not self._is_private:
            try:
                self._note_boot(StoredBoot(boot_id=boot_id(self.directory)))
            except BaseException:
                self._take(arena)
                self.close(keep=False)
                raise
        return self._take(arena)

    def grow(self, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], tables: Sequence[TableSpec]) -> Arena:
        """Make an arena, and tables, for a job that replaces one of vectors alone. The vectors, and all notes, stay.

        Until the new job has its values, the next process finds the old one.

        Raises:
            OutOfSpace, InternalError: nothing has changed.
        """
        assert self.arena is not None
        stored.grown_from.CopyFrom(storage_pb2.StoredJob.FromString(self.arena.meta))
        with self._deleting():
            made = create_stores(self.directory, tables, self._tables_crash_point)
        try:
            arena = self._exchange(self.arena, stored, shapes)
        except BaseException:
            drop_stores(made)
            raise
        self.tables = made
        return self._take(arena)

    def shrink(self) -> Arena:
        """Go back to the arena of the job of vectors alone that `grow` has replaced. Raises what `grow` does.

        Tables' files that cannot be deleted do no harm: those of the next job with tables replace them.
        """
        assert self.arena is not None
        stored = storage_pb2.StoredJob.FromString(self.arena.meta).grown_from
        arena = self._exchange(self.arena, stored, (), initialized=1)
        tables, self.tables = self.tables, []
        drop_stores(tables)
        return self._take(arena)

    def _exchange(self, old: Arena, stored: storage_pb2.StoredJob, shapes: Sequence[BlockShape], **words: int) -> Arena:
        """Replace an arena by a new one with the same members, timeline, order of cuts, and time at which a worker left."""
        kept = {name: old.word(name) for name in ("timeline", "cut_order", "left_at")}

        def prepare(arena: Arena) -> None:
            for rank in range(old.workers):
                arena.set_member(rank, *old.member(rank))
            for name, value in {**kept, **words}.items():
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
        except StoreFull as error:
            raise OutOfSpace(
                f"{self.directory} has no room for this job's parameters and slots; --state-dir can name another place: "
                f"{error.strerror}"
            ) from error
        except (ArenaBusy, OSError) as error:
            raise InternalError(f"--state-dir: cannot use {self.directory}: {error}") from error

    def _take(self, arena: Arena) -> Arena:
        self._forget_clean_up()
        if self._is_private:  # also when the shard is dropped without being closed
            self._clean_up = weakref.finalize(self, leftovers.abandon, arena, self.directory)
        self.arena = arena
        return arena

    def _forget_clean_up(self) -> None:
        if self._clean_up is not None:
            self._clean_up.detach()  # or it would keep the arena, and the memory of all its pages

    @property
    def free_bytes(self) -> int:
        """Free space in bytes where the files are, or will be."""
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        return shutil.disk_usage(place).free

    def create_tables(self, specs: Sequence[TableSpec]) -> list[TableStore]:
        """Make the stores of a job's tables, beside the new arena.

        Raises:
            OutOfSpace: the directory has no room for them; the arena is removed, too.
        """
        try:
            with self._deleting():
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

    def make_vectors(self, workers: int) -> None:
        """Make the store of the job's vectors, beside the arena, if it has none yet.

        Args:
            workers: number of workers that can send batches.

        Raises:
            OutOfSpace: there is no room for it.
        """
        if self.vectors is None:
            config = self._config
            # A shard that was killed while it gave up its arena may have left some.
            shutil.rmtree(self.directory / leftovers.VECTORS_NAME, ignore_errors=True)
            try:
                self.vectors = VectorStore.create(
                    self.directory / leftovers.VECTORS_NAME,
                    shard=config.shard_index,
                    shards=config.shard_count,
                    senders=workers,
                    crash_point=self._tables_crash_point,
                )
            except StoreFull as error:
                raise OutOfSpace(f"{self.directory} has no room for vectors: {error.strerror}") from error
            except (ArenaError, OSError) as error:
                raise InternalError(f"--state-dir: cannot use {self.directory}: {error}") from error

    def open_vectors(self) -> None:
        """Take over the vectors of the arena that was found, if there are any.

        Raises:
            ConfigError: they cannot be used.
        """
        with self.taking_over(), contextlib.suppress(FileNotFoundError):
            self.vectors = VectorStore.open(self.directory / leftovers.VECTORS_NAME, crash_point=self._tables_crash_point)

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """Turn errors of reading files beside the arena that was found into LeftDamaged, or another ConfigError."""
        try:
            yield
        except (ArenaCorrupt, StateDamaged) as error:
            kind = ConfigError if isinstance(error, ArenaForeign) else LeftDamaged
            raise kind(f"--state-dir: {error}; {_CANNOT_GO_ON}") from error
        except (ArenaError, OSError, DecodeError, ValueError) as error:
            place = "" if isinstance(error, (ArenaError, OSError)) else f"{self.directory}: "
            raise ConfigError(f"--state-dir: {place}{error}; {_CANNOT_GO_ON}") from error

    def save_barriers(self, opened: bytes) -> None:
        """Store the opened barriers beside the arena; does nothing before there is an arena.

        Raises:
            OutOfSpace, InternalError: they cannot be written; those stored before are unchanged.
        """
        self._save(leftovers.BARRIERS_NAME, opened)

    def load_barriers(self) -> bytes:
        """The stored barriers; empty if there are none."""
        return self._load(leftovers.BARRIERS_NAME)

    def save_orders(self, orders: bytes) -> None:
        """Store the operator's orders beside the arena. Raises what `save_barriers` does."""
        self._save(leftovers.ORDERS_NAME, orders)

    def load_orders(self) -> bytes:
        """The stored orders; empty if there are none."""
        return self._load(leftovers.ORDERS_NAME)

    def save_verdict(self, verdict: bytes) -> None:
        """Store shard 0's latest verdict beside the arena. Raises what `save_barriers` does."""
        self._save(leftovers.VERDICT_NAME, verdict)

    def load_verdict(self) -> bytes:
        """The stored verdict; empty if there is none."""
        return self._load(leftovers.VERDICT_NAME)

    def save_client_state(self, name: str, state: bytes) -> None:
        """Store a state that a worker saves for itself, under a name. Raises what `save_barriers` does."""
        self._save(f"{leftovers.CLIENT_STATE_PREFIX}{name}", state, "client_state")

    def remove_client_state(self, name: str) -> None:
        """Delete a stored state, if it exists. If its file cannot be deleted, it does no harm: it counts as an older one."""
        if not self._is_private:
            self._crash_point("storage.client_state.remove")
            with contextlib.suppress(OSError):
                (self.directory / f"{leftovers.CLIENT_STATE_PREFIX}{name}").unlink(missing_ok=True)

    def load_client_states(self) -> dict[str, bytes]:
        """The stored states, by name."""
        paths = notes.paths(self.directory, leftovers.CLIENT_STATE_PREFIX)
        return {path.name.removeprefix(leftovers.CLIENT_STATE_PREFIX): notes.read(path) for path in paths}

    def _save(self, name: str, content: bytes, what: str = "") -> None:
        if self.arena is not None and not self._is_private:  # a private arena has no next process
            notes.write(self.directory, name, content, lambda step: self._crash_point(f"storage.{what or name}.{step}"))

    def _load(self, name: str) -> bytes:
        return notes.read(self.directory / name)

    def _boot(self) -> StoredBoot:
        return StoredBoot.FromString(self._load(leftovers.BOOT_NAME))

    def _note_boot(self, boot: StoredBoot) -> None:
        """Record the machine's boot on the disk, before the files that depend on it."""
        if self._boot() != boot:
            notes.write(self.directory, leftovers.BOOT_NAME, boot.SerializeToString(), is_durable=True)

    def close(self, *, keep: bool) -> None:
        """Close the arena and the files beside it. With `keep`, files in a directory that the operator named stay; else all go.

        If a file cannot be deleted, all are closed nevertheless, the log names it, and the next arena replaces what is left.
        """
        if self.arena is None:
            return
        arena, tables, vectors = self.arena, self.tables, self.vectors
        self.arena, self.tables, self.vectors = None, [], None
        is_removed = self._is_private or not keep
        if is_removed:  # so that a process that finds some of the files takes the arena for one that was never complete
            arena.set_word("given_up", 1)
            arena.set_word("initialized", 0)
        try:
            with contextlib.ExitStack() as closing:  # from the last line to the first one, whatever fails
                closing.callback(self._forget_clean_up)
                closing.callback(arena.close, remove=is_removed)
                if not is_removed:
                    closing.callback(self._note_closed, arena)
                if vectors is not None:
                    closing.callback(vectors.close, remove=is_removed)
                closing.callback(close_stores, tables, remove=is_removed)
                if is_removed:
                    closing.callback(leftovers.remove_notes, self.directory)
        except OSError as error:
            self._has_remains = True
            logger.error(  # noqa: TRY400 - the reason says it all
                "%s: what the shard held cannot all be deleted, and will be replaced: %s", self.directory, error
            )

    @contextlib.contextmanager
    def _deleting(self, refusal: type[ConfigError | InternalError] = InternalError) -> Iterator[None]:
        """Turn errors of deleting files, which others are to replace, into `refusal`."""
        try:
            yield
        except OSError as error:
            raise refusal(f"--state-dir: cannot use {self.directory}: {error}") from error

    def _note_closed(self, arena: Arena) -> None:
        """Seal the files that stay, when nothing changes them any more."""
        arena.stop()
        others = [*store_paths(self.directory), *(self.directory / leftovers.VECTORS_NAME).glob("*"), *self._note_paths()]
        try:
            found = end_checksums.seal(self.directory, arena.path, arena.front_bytes, plane_paths(self.directory), others)
            self._note_boot(StoredBoot(is_closed=True, files=found))
        except (PsdError, OSError) as error:
            logger.error(  # noqa: TRY400 - the reason says it all
                "the parameters stay in %s, but this cannot be recorded, so they will not be used if the machine goes down: %s",
                self.directory,
                error,
            )
