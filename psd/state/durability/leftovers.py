"""Files that shards leave in their directories beside an arena: the names of these files, and their removal.

Must not know what they hold, or who may go on with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path

from psd.state.durability import notes
from psd.state.tables.stores import remove_stores, store_paths
from psd_core.arena import ARENA_NAME, LOCK_NAME, Arena, ArenaBusy, ArenaCorrupt, plane_paths

logger = logging.getLogger(__name__)

BARRIERS_NAME = "barriers"
ORDERS_NAME = "orders"
VERDICT_NAME = "verdict"
BOOT_NAME = "boot"
VECTORS_NAME = "vectors"
CLIENT_STATE_PREFIX = "client-state-"

_MAKING_S_MAX = 60.0
"""Seconds after which a private directory without an arena is abandoned."""


def names(directory: Path) -> list[Path]:
    """Paths that a shard's files may have in a directory, whether they exist or not, and files that are half made there."""
    fixed = (ARENA_NAME, LOCK_NAME, BARRIERS_NAME, ORDERS_NAME, VERDICT_NAME, BOOT_NAME, VECTORS_NAME)
    found = [directory / name for name in fixed]
    found += [*store_paths(directory), *directory.glob(f"{CLIENT_STATE_PREFIX}*"), *directory.glob("*.new")]
    found += plane_paths(directory)
    inside = directory / VECTORS_NAME
    return [*found, *(inside.glob("*") if inside.is_dir() and not inside.is_symlink() else ())]


def remove_notes(directory: Path) -> None:
    """Delete a shard's files beside an arena, except an operator's orders."""
    remove_stores(directory)
    shutil.rmtree(directory / VECTORS_NAME, ignore_errors=True)
    for name in (BARRIERS_NAME, VERDICT_NAME, BOOT_NAME):
        notes.remove(directory, name)
    for path in directory.glob(f"{CLIENT_STATE_PREFIX}*"):
        path.unlink(missing_ok=True)


def abandon(arena: Arena, directory: Path) -> None:
    """Delete a private directory with all that is in it; works even while the process exits."""
    remove_stores(directory)
    shutil.rmtree(directory / VECTORS_NAME, ignore_errors=True)
    arena.abandon()


def clear_abandoned(memory: Path, prefix: str) -> None:
    """Remove the private directories of this user's killed shards, whose names begin with `prefix`. What cannot be deleted
    stays."""
    for path in memory.glob(f"{prefix}*"):
        with contextlib.suppress(ArenaBusy, OSError):
            if path.lstat().st_uid != os.getuid():  # anybody may make such a name there, or a link to what is ours
                continue
            # Without an arena it may be another shard's that is just about to lock it, and must find it free.
            if not Arena.is_in(path) and time.time() - path.stat().st_mtime < _MAKING_S_MAX:
                continue
            try:
                arena = Arena.open(path)
            except ArenaCorrupt:  # nobody holds its lock, and nobody can ever use it
                arena = None
            if arena is None:  # or killed while it made its arena
                shutil.rmtree(path, ignore_errors=True)
                continue
            with contextlib.ExitStack() as closing:
                closing.callback(arena.close, remove=True)
                remove_notes(path)
            logger.info("removed %s, left behind by a killed shard", path)
