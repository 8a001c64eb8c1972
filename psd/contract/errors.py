"""All errors that cross the wire, in one tree, each with its gRPC status code.

    PsdError
    ├── InvalidRequest            a field is wrong; a bug in the caller
    │   ├── InvalidTensor         a tensor's name, shape, dtype or bytes
    │   ├── NonFiniteGradient     NaN or infinity in a gradient or an initial value
    │   ├── BlockOutOfRange       a block that this shard does not own
    │   └── UnknownVector         a vector that does not exist, or was dropped
    ├── WrongShard                the address belongs to another shard
    ├── ForeignRun                the shard serves another run
    ├── ShardRestarted            the shard is not the one that the worker joined
    ├── StateLost                 the shard has come back without what it held
    ├── RolledBack                the job has gone back to a checkpoint; go on from there
    ├── LayoutMismatch            the two sides cut the parameters differently
    ├── SpecMismatch              another job spec was declared first
    ├── ScalarsDisagree           workers of one round use different learning rates or the like
    ├── PartsDisagree             workers of one round step different parts of the job
    ├── NotDeclared               the shard has no job, or no initial values, yet
    ├── CutMissed                 the shard has gone beyond the cut that a reader named
    ├── SessionFenced             the worker's session has ended: its lease ran out, or its rank joined again
    ├── WorkerFailed              another worker has failed, and the job was to end then
    ├── WaitTimeout               a wait for other workers reached its deadline
    │   └── BarrierTimeout
    ├── CheckpointFailed          a checkpoint could not be written or read: disk full, permission, network
    ├── CheckpointCorrupt         a checkpoint is damaged or incomplete
    ├── CheckpointUnsupported     a checkpoint is whole, but of a version of psd whose checkpoints this one does not read
    ├── RuleFailed                a user's own update rule raised; the parameters are as they were
    ├── OutOfSpace                a shard has no room for the job's parameters, or in its --state-dir
    ├── Overloaded                a limit on concurrent work is reached
    ├── Draining                  the shard is shutting down
    ├── JobOver                   the shard is shutting down because all workers have left
    ├── Unauthenticated           the call has no token, or one that the shard does not know
    ├── PermissionDenied          the token's role may not make the call
    ├── TlsFailed                 raised by clients: a certificate was refused, or one of the two sides does without TLS
    ├── ShardUnavailable          raised by clients: a shard could not be reached until the deadline
    └── InternalError             a defect of the shard; its log has the traceback

A class's name is its *reason*, which is sent in trailing metadata beside the status, so that clients raise the class that the
shard raised. `code` is the name of a gRPC status, chosen by what the caller should do (see the gRPC guide on status codes).
This module imports no library: the rim and the clients turn the names into their library's objects.
"""

from __future__ import annotations

from typing import Any, ClassVar

from psd.contract.printable import printable

REASON_KEY = "psd-reason"
DETAIL_KEY = "psd-detail-bin"
"""Keys of trailing metadata: for the class name, and for a JSON object of `PsdError.detail`."""


class PsdError(Exception):
    """Base of psd's errors. Its text is made printable, because a peer may have chosen parts of it.

    Attributes:
        code: name of the gRPC status that carries the error.
        detail: JSON-serializable facts for programs, such as the ranks that were waited for.
    """

    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, /, **detail: Any) -> None:
        super().__init__(printable(message))
        self.detail = detail

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__.startswith("_"):
            return  # an error with a private name is never sent
        if cls.__name__ in _BY_REASON:
            raise TypeError(f"two errors have the reason {cls.__name__}")
        _BY_REASON[cls.__name__] = cls

    @property
    def reason(self) -> str:
        """The name under which the error is sent."""
        return type(self).__name__


_BY_REASON: dict[str, type[PsdError]] = {}


class InvalidRequest(PsdError, ValueError):
    """A field of the request is wrong; the message names the field and the limit."""

    code = "INVALID_ARGUMENT"


class InvalidTensor(InvalidRequest):
    """A tensor's name, shape, dtype or number of bytes is wrong."""


class NonFiniteGradient(InvalidRequest):
    """A gradient or an initial value holds NaN or infinity. Detail: rank, clock, and tensor, or table and id."""


class BlockOutOfRange(InvalidRequest):
    """The block does not exist or belongs to another shard."""

    code = "OUT_OF_RANGE"


class UnknownVector(InvalidRequest):
    """No vector has that name; it was never made, or was dropped. Detail: vector."""

    code = "NOT_FOUND"


class WrongShard(PsdError):
    """The address belongs to another shard, or the job has another number of shards."""

    code = "FAILED_PRECONDITION"


class ForeignRun(PsdError):
    """The shard serves another run."""

    code = "FAILED_PRECONDITION"


class ShardRestarted(PsdError):
    """The shard is a later incarnation than the one that the worker joined. Detail: shard."""

    code = "FAILED_PRECONDITION"


class StateLost(PsdError):
    """The shard has come back without its state, so this job cannot continue with it. Detail: shard."""

    code = "DATA_LOSS"


class RolledBack(PsdError):
    """The job has gone back to a checkpoint, because a shard had lost its state.

    Detail: timeline, checkpoint; from clients also step, the clock at which the worker goes on.
    """

    code = "ABORTED"


class LayoutMismatch(PsdError):
    """Worker and shard divide the parameters into different blocks."""

    code = "FAILED_PRECONDITION"


class SpecMismatch(PsdError):
    """Another job spec was declared first; the message names the first difference."""

    code = "ALREADY_EXISTS"


class ScalarsDisagree(PsdError):
    """Two workers that were there from the start pushed different scalars in a round. Detail: ranks, group, scalar, round."""

    code = "INVALID_ARGUMENT"


class PartsDisagree(PsdError):
    """Two workers pushed gradients of different parts of the job in one round. Detail: ranks, parts, round."""

    code = "INVALID_ARGUMENT"


class NotDeclared(PsdError):
    """The shard has no job spec, or no initial values, yet."""

    code = "FAILED_PRECONDITION"


class CutMissed(PsdError):
    """The shard has gone beyond the cut that a reader named; name a later one. Detail: version."""

    code = "ABORTED"


class SessionFenced(PsdError):
    """The worker's session has ended. Detail: cause, "expired" (join again) or "superseded" (another worker has the rank)."""

    code = "ABORTED"


class WorkerFailed(PsdError):
    """Another worker has failed, or fallen silent, and the shards were told to end the job then. Detail: its rank."""

    code = "ABORTED"


class WaitTimeout(PsdError):
    """A wait for other workers reached its deadline. Detail: missing, the ranks that were waited for."""

    code = "DEADLINE_EXCEEDED"


class BarrierTimeout(WaitTimeout):
    """Not all workers arrived at a barrier in time; the arrival was withdrawn. Detail: missing, the absent ranks."""


class CheckpointFailed(PsdError):
    """A checkpoint could not be written or read; the message has the file and the system's error. Training goes on."""

    code = "FAILED_PRECONDITION"


class CheckpointCorrupt(PsdError):
    """A checkpoint is damaged or incomplete; the message names the file and what is wrong with it.

    Detail, if a shard should have gone back to it: instead, another checkpoint for all shards; empty if there is none.
    """

    code = "DATA_LOSS"


class CheckpointUnsupported(PsdError):
    """A checkpoint is whole, but of a format, a layout or a rule that this version of psd does not know."""

    code = "FAILED_PRECONDITION"


class RuleFailed(PsdError):
    """A user's own update rule raised an exception on a shard; the block, or the table, is unchanged.

    Detail: rule, tensor (or table), version.
    """

    code = "FAILED_PRECONDITION"


class OutOfSpace(PsdError):
    """A shard has no room, in memory or on disk, for what it must keep; the same call succeeds when there is room again.

    Nothing was changed, except by going back to a checkpoint: then the shard has dropped its state, and goes back when it is
    asked again.
    """

    code = "RESOURCE_EXHAUSTED"


class Overloaded(PsdError):
    """A limit on concurrent work is reached; the same call may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class Draining(PsdError):
    """The shard is shutting down."""

    code = "UNAVAILABLE"


class JobOver(PsdError):
    """The job is over: all its workers have left, and the shards end. Detail: shard."""

    code = "FAILED_PRECONDITION"


class Unauthenticated(PsdError):
    """The call has no token, or one that the shard does not know."""

    code = "UNAUTHENTICATED"


class PermissionDenied(PsdError):
    """The token's role may not make the call. Detail: role."""

    code = "PERMISSION_DENIED"


class TlsFailed(PsdError):
    """A TLS connection with a shard failed: a certificate was refused, or one side has no TLS. Detail: shard, address."""

    code = "UNAVAILABLE"


class ShardUnavailable(PsdError):
    """A shard could not be reached until the caller's deadline. Detail: shard, address."""

    code = "UNAVAILABLE"


class InternalError(PsdError):
    """A defect of the shard. The message is generic: the shard's log has the traceback."""

    code = "INTERNAL"


def reasons() -> dict[str, type[PsdError]]:
    """Map from reasons to errors."""
    return dict(_BY_REASON)


def error_from(reason: str, message: str, detail: dict[str, Any]) -> PsdError:
    """The error that a peer raised. A reason that this version does not know, from a newer peer, becomes a plain PsdError."""
    return _BY_REASON.get(reason, PsdError)(message, **detail)


def error_text(error: BaseException) -> str:
    """The text of an error; its class if it has none, like KeyboardInterrupt and most MemoryErrors."""
    return str(error) or type(error).__name__
