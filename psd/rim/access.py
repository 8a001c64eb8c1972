"""Access control: the one table of methods and roles, and the interceptor that checks every call before its first message.

Without --token-file there is none, and everybody may do everything. With it a call needs a token whose role may call the
method. A method that is not in the table is refused to everybody. Only who may push can open a worker's connection of the bulk
lane, because that takes a call (OpenBulk), and whoever may read a reader's (OpenReads); what they carry is asked of the same
table. Must not know what the methods do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
from typing_extensions import override

from psd.contract.errors import PermissionDenied, PsdError, Unauthenticated
from psd.contract.tokens import Role, presented, read_tokens
from psd.contract.watched import Watched
from psd.rim.calls import abort
from psd.rim.pace import Pace

logger = logging.getLogger(__name__)

_CONTROL, _DATA, _HEALTH = "/psd.v1.ControlService/", "/psd.v1.DataService/", "/grpc.health.v1.Health/"
_VECTORS = "/psd.v1.VectorService/"
_REFLECTION = tuple(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha"))

_WORKER = frozenset({Role.WORKER, Role.ADMIN})
_PUSHES = _WORKER | {Role.PUBLISHER}
_ADMIN = frozenset({Role.ADMIN})
_ALL = frozenset(Role)

OPEN = frozenset({_HEALTH + "Check"})
"""Methods that need no token: one health check for probes. `Watch` would hold a stream open."""

ROLES: dict[str, frozenset[Role]] = {
    _HEALTH + "Watch": _ALL,
    **dict.fromkeys(_REFLECTION, _ALL),
    # For observers.
    _CONTROL + "Describe": _ALL,
    _CONTROL + "Status": _ALL,
    _CONTROL + "Curves": _ALL,
    _CONTROL + "OpenReads": _ALL,
    _DATA + "Read": _ALL,
    _DATA + "ReadRows": _ALL,
    _VECTORS + "List": _ALL,
    _VECTORS + "Fetch": _ALL,
    # For workers, and for programs that publish parameters, each the worker of a job of its own. Rollback: they bring shards
    # back to one checkpoint when one shard has lost its memory.
    _CONTROL + "Join": _PUSHES,
    _CONTROL + "Declare": _PUSHES,
    _CONTROL + "Heartbeat": _PUSHES,
    _CONTROL + "Leave": _PUSHES,
    _CONTROL + "Commit": _PUSHES,
    _CONTROL + "Measure": _PUSHES,
    _CONTROL + "Counted": _PUSHES,
    _CONTROL + "Barrier": _PUSHES,
    _CONTROL + "Load": _PUSHES,
    _CONTROL + "Rollback": _PUSHES,
    _CONTROL + "OpenBulk": _PUSHES,
    _DATA + "Push": _PUSHES,
    _DATA + "Pull": _PUSHES,
    _DATA + "PullRows": _PUSHES,
    _DATA + "PushPull": _PUSHES,
    _DATA + "PushPullSmall": _PUSHES,
    _DATA + "Initialize": _PUSHES,
    _DATA + "StoreBuffers": _PUSHES,
    _DATA + "SetParameters": _PUSHES,
    # For workers alone: what ends the job, and what takes the shards' time and memory beyond its parameters.
    _CONTROL + "Stop": _WORKER,
    _CONTROL + "Log": _WORKER,
    _VECTORS + "Run": _WORKER,
    _VECTORS + "RunFrames": _WORKER,
    _VECTORS + "Create": _WORKER,
    _VECTORS + "Drop": _WORKER,
    # For operators: what takes room and time on a disk,
    _CONTROL + "Checkpoint": _ADMIN,
    # and what changes the job for all its workers.
    _CONTROL + "Kick": _ADMIN,
    _CONTROL + "SetLearningRate": _ADMIN,
    _CONTROL + "Drain": _ADMIN,
}
"""The roles that may call a method, by its full name."""

OPEN_CALLS_MAX = 16
"""Most calls without a token at a time,"""
OPEN_CALL_S = 5.0
"""and the seconds that one may take, so that an idle caller takes no thread from the workers for longer."""

OPEN_BULK, RUN_VECTORS, READ = _CONTROL + "OpenBulk", _VECTORS + "Run", _DATA + "Read"
"""Methods whose roles hold for calls on the bulk lane: for all of a worker's, for batches on vectors, and for a reader's."""

REFUSALS_LOGGED_S = 10.0

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Access:
    """The tokens of one shard, and the table.

    Args:
        token_file: its path; the format is in psd/contract/tokens.py. Read again when it changes.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(self, token_file: str) -> None:
        self._tokens = Watched((token_file,), lambda: read_tokens(token_file))

    def check(self, method: str, metadata: Metadata) -> None:
        """Raise unless this call is allowed.

        Raises:
            Unauthenticated: the call has no token, or an unknown one. PermissionDenied: its role may not call the method.
        """
        digest = presented(metadata)
        if digest is None:
            raise Unauthenticated(
                f"{_short(method)}: this shard requires a token: pass token_file, set PSD_TOKEN_FILE, or use psdctl "
                "--token-file"
            )
        role = self._tokens.current().role_of(digest)
        if role is None:
            raise Unauthenticated(
                f"{_short(method)}: this shard does not know the token; its --token-file does not list it (any more)"
            )
        allowed = ROLES.get(method, frozenset())
        if role not in allowed:
            roles = ", ".join(sorted(role.value for role in allowed)) or "nobody"
            raise PermissionDenied(f"{_short(method)}: is for {roles}; this token is a {role.value}'s", role=role.value)

    def seal(self, words: bytes) -> bytes:
        """A proof that these words come from a shard of the job, as Tokens.seal makes it."""
        return self._tokens.current().seal(words)

    def holder(self, metadata: Metadata) -> Callable[[str], bool]:
        """A function that returns, at any later time, whether the call's token may call a method, given by its full name."""
        digest = presented(metadata)

        def may(method: str) -> bool:
            return digest is not None and self._tokens.current().role_of(digest) in ROLES[method]

        return may


def _short(method: str) -> str:
    return method.rpartition("/")[2]


class AccessInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # only its stub is generic
    """Refuses calls that `access` does not allow, before their first message.

    Args:
        pace: the pace of refusals. on_refusal: called for each.
    """

    def __init__(self, access: Access, pace: Pace, on_refusal: Callable[[PsdError], object] = lambda _: None) -> None:
        self._access = access
        self._pace = pace
        self._on_refusal = on_refusal
        self._open_calls = threading.BoundedSemaphore(OPEN_CALLS_MAX)
        self._refusals = _Refusals()

    @override
    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if details.method in OPEN:
            handler = continuation(details)
            return None if handler is None else self._bounded(handler)
        try:
            self._access.check(details.method, details.invocation_metadata)
        except PsdError as error:
            return self._refusal(details.method, error)
        return continuation(details)

    def _refusal(self, method: str, error: PsdError) -> grpc.RpcMethodHandler[Any, Any]:
        def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            del requests
            self._on_refusal(error)
            self._refusals.log(method, context.peer(), error)
            self._pace.wait(context)
            abort(context, error)

        # For methods of any kind: a handler of this kind begins before the first message, and so waits for nothing.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _bounded(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap an open unary method, so that a silent caller cannot keep its thread."""

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            if not self._open_calls.acquire(blocking=False):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {OPEN_CALLS_MAX} calls without a token")
            timer = threading.Timer(OPEN_CALL_S, context.cancel)
            timer.daemon = True
            try:
                timer.start()
                for request in requests:
                    yield handler.unary_unary(request, context)
                    return
            finally:
                timer.cancel()
                self._open_calls.release()

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


class _Refusals:
    """Logs refused calls, but not every one in a flood."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold = 0
        self._next = time.monotonic()

    def log(self, method: str, peer: str, error: PsdError) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._untold += 1
                return
            untold, self._untold, self._next = self._untold, 0, now + REFUSALS_LOGGED_S
        more = f" (and {untold} calls before it)" if untold else ""
        logger.warning("refused a call of %s from %s%s: %s: %s", method, peer, more, error.reason, error)
