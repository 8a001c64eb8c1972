"""Client states: what each worker saves of its own program with a push, such as its place in the data.

A state is stored before the first block of its push is counted, and names that push. The pages say which pushes are counted. So
the store that counts the push also decides which state holds: whenever the process dies, a worker gets back the state of its
last push that counts. Only the shard of the first trained block has client states.

Must not know blocks or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from psd.contract.config import CLIENT_STATE_BYTES_MAX
from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.state.durability.state_directory import Storage
from psd.state.pages import Counted

_SPARE = 1
"""Number of kept states that are older than the one that counts in a block: another block may be a round behind."""
_PENDING_MAX = 2
"""Most pushes of a worker that may still count later: one in an open round, and one that has come early for the next."""


class _Saved(NamedTuple):
    """A state, and the entry in a page's dedup window that counts its push."""

    window: Counted
    state: bytes


def check_client_state(state: bytes) -> None:
    """Raise InvalidRequest if a client state is too large."""
    if len(state) > CLIENT_STATE_BYTES_MAX:
        raise InvalidRequest(f"client_state: has {len(state)} bytes, the limit is {CLIENT_STATE_BYTES_MAX}")


class ClientStates:
    """The states of all workers: for each, the one that counts, and a few that are older or may still count later."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = locks.new(locks.Level.LEAF)
        self._saved: dict[int, list[_Saved]] = {}

    def on_push(self, rank: int, window: Counted, state: bytes, counted: Counted, is_current: Callable[[], bool]) -> None:
        """Store the state that comes with a push. Call it before any block counts the push.

        Args:
            window: the entry in a page's dedup window that counts the push. counted: the entry that some block has now.
            is_current: returns False if the rank has joined again meanwhile, so that this push cannot count.

        Raises:
            OutOfSpace, InternalError: it cannot be written; nothing has changed.
        """
        with self._lock:
            saved = self._saved.get(rank, [])
            if not is_current() or any(earlier.window == window for earlier in saved):
                return
            self._storage.save_client_state(_name(rank, window), state)
            saved = [*saved, _Saved(window, state)]
            at = _last(saved, counted)
            self._keep(rank, saved[max(0, at - _SPARE) : at + 1] + saved[at + 1 :][-_PENDING_MAX:])

    def settle(self, rank: int, counted: Counted) -> bytes:
        """The state of the last push that counts, for a new session of the rank. States of later pushes are forgotten."""
        with self._lock:
            saved = self._saved.get(rank, [])
            at = _last(saved, counted)
            self._keep(rank, saved[max(0, at - _SPARE) : at + 1])
            return saved[at].state if at >= 0 else b""

    def at(self, counted: Sequence[Counted]) -> dict[int, bytes]:
        """The states, by rank, that hold for some pages. counted: by rank, the last push that these pages count. A restored job
        that had more workers still has the states of their ranks."""
        found = {}
        with self._lock:
            for rank, saved in self._saved.items():
                at = _last(saved, counted[rank] if rank < len(counted) else (0, 0))
                if at >= 0:
                    found[rank] = saved[at].state
        return found

    def begin(self, states: Mapping[int, bytes]) -> None:
        """Begin with the states of a checkpoint, whose pages have empty dedup windows. Raises what `on_push` does."""
        with self._lock:
            self._saved = {}
            for rank, state in states.items():
                self._storage.save_client_state(_name(rank, (0, 0)), state)
                self._saved[rank] = [_Saved((0, 0), state)]

    def recover(self, kept: Mapping[str, bytes]) -> None:
        """Take over the states that an earlier process has left."""
        with self._lock:
            for name, state in kept.items():
                rank, *window = map(int, name.split("-"))
                self._saved.setdefault(rank, []).append(_Saved((window[0], window[1]), state))
            for saved in self._saved.values():
                saved.sort()

    def _keep(self, rank: int, saved: list[_Saved]) -> None:
        before, self._saved[rank] = self._saved.get(rank, []), saved
        for old in before:
            if old not in saved:
                self._storage.remove_client_state(_name(rank, old.window))


def _last(saved: Sequence[_Saved], counted: Counted) -> int:
    """The index of the last state whose push counts; -1 if there is none."""
    return max((i for i, each in enumerate(saved) if each.window <= counted), default=-1)


def _name(rank: int, window: Counted) -> str:
    session, clock = window
    return f"{rank}-{session}-{clock}"
