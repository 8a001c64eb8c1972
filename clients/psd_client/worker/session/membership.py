"""A worker's membership as the shards have confirmed it: the session, and the incarnation of each shard that knows it.

An operation's thread makes memberships; the heartbeats' thread reads them, and notes which shards were restarted. So a
membership is an immutable value, and every change is made under one lock, and only to the membership that it is about. Must not
know calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from psd.v1 import job_pb2
from psd_client.lanes.transport import Cancelled


@dataclass(frozen=True)
class JobMembership:
    """The shards' replies when the worker joined.

    Attributes:
        run_id, session: as in Caller.
        incarnations: the incarnation of each shard; 0 if the session has not joined there yet.
        lease_s: the shortest lease of all shards. timeline: the job's timeline.
        is_joining: True while it is being made; then only heartbeats may use it.
    """

    rank: int
    run_id: str
    session: int
    incarnations: tuple[int, ...]
    lease_s: float
    timeline: int
    is_joining: bool = False
    _callers: dict[int, job_pb2.Caller] = field(default_factory=dict, init=False, repr=False, compare=False)

    def caller(self, shard: int) -> job_pb2.Caller:
        """The caller of a request to that shard. Do not change the message."""
        caller = self._callers.get(shard)
        if caller is None:
            life = self.incarnations[shard]
            caller = job_pb2.Caller(run_id=self.run_id, incarnation=life, rank=self.rank, session=self.session)
            self._callers[shard] = caller
        return caller

    def with_incarnation(self, shard: int, incarnation: int) -> JobMembership:
        """The same session, known to another incarnation of a shard."""
        incarnations = list(self.incarnations)
        incarnations[shard] = incarnation
        return replace(self, incarnations=tuple(incarnations))


class Memberships:
    """The present membership of a worker, and the one in the making, whose leases run from the first shard's answer on.

    Attributes:
        on_joining: called when a new membership has leases that must be renewed. on_restart: called, from any thread, when a
            restarted shard has taken over the session.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: JobMembership | None = None
        self._joining: JobMembership | None = None
        self.on_joining: Callable[[], None] = nothing
        self.on_restart: Callable[[], None] = nothing

    @property
    def latest(self) -> JobMembership | None:
        """The membership whose leases must be renewed; None before the worker has joined anywhere, and after it has left."""
        with self._lock:
            return self._joining if self._joining is not None else self._held

    @property
    def held(self) -> JobMembership:
        """The membership for the worker's calls; Cancelled if another thread has left the job."""
        held = self._held
        if held is None:
            raise Cancelled
        return held

    def begin(self, first: JobMembership) -> None:
        """Begin a membership with the session that shard 0 has issued; an earlier one in the making is given up."""
        with self._lock:
            self._joining = replace(first, is_joining=True)
        self.on_joining()

    def on_joined(self, session: int, shard: int, incarnation: int, lease_s: float) -> None:
        """Note that another shard knows the session in the making."""
        with self._lock:
            joining = self._joining
            if joining is not None and joining.session == session:
                joining = joining.with_incarnation(shard, incarnation)
                self._joining = replace(joining, lease_s=min(joining.lease_s, lease_s))
        self.on_joining()

    def complete(self) -> JobMembership:
        """Let the worker use the session in the making, because all shards know it now."""
        with self._lock:
            if self._joining is None:
                raise Cancelled
            self._held, self._joining = replace(self._joining, is_joining=False), None
            return self._held

    def give_up(self) -> None:
        """Drop the session in the making; does nothing if it was completed."""
        with self._lock:
            self._joining = None

    def on_resumed(self, seen: JobMembership, shard: int, incarnation: int) -> bool:
        """Note that another incarnation of a shard has taken over the session of `seen`. False if that is no longer the
        worker's session, or another thread has noted it already."""

        def changed(membership: JobMembership | None) -> JobMembership | None:
            if membership is None or membership.session != seen.session:
                return membership
            if membership.incarnations[shard] != seen.incarnations[shard]:
                return membership
            return membership.with_incarnation(shard, incarnation)

        with self._lock:
            before = (self._held, self._joining)
            self._held, self._joining = changed(self._held), changed(self._joining)
            has_changed = before != (self._held, self._joining)
        if has_changed:
            self.on_restart()
        return has_changed

    def end(self) -> Callable[[int], JobMembership | None]:
        """Drop both memberships, because the worker leaves. Returns a function: by shard, the last membership that it knows."""
        with self._lock:
            held, joining = self._held, self._joining
            self._held = self._joining = None

        def known_as(shard: int) -> JobMembership | None:
            return joining if joining is not None and joining.incarnations[shard] else held

        return known_as


def nothing() -> None:
    """Do nothing. The value of `on_joining` and `on_restart` until they are set."""
