"""One worker's calls for server-side vectors: a batch goes to every shard, and counts once.

A batch is named by the session that sends it first, and a number. If a call fails, it is not known whether some shards have run
the batch. So a failed batch is kept: if the program calls again, it is sent under the same name; before another batch, it is
completed. So all shards run the same batches of a worker, in the same order. Must not know gRPC, or what operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from psd.contract.config import ClientConfig
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest, OutOfSpace, RolledBack, RuleFailed, SpecMismatch
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.vector_batches import OutgoingBatch, payload_bytes
from psd.contract.vectors import check_same, check_spec, spec_message, spec_of
from psd.v1 import vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import THROUGHPUT_MIN, Shards
from psd_client.lanes.transport import Call, Lane
from psd_client.worker.session.session import Session
from psd_client.worker.vectors.fetches import Fetches
from psd_core.reductions import Answer as Found
from psd_core.reductions import unpack_answers
from psd_core.vector import VectorSpec
from psd_core.vector_operations import VectorOperation

_REFUSALS = (InvalidRequest, OutOfSpace, RuleFailed, SpecMismatch, RolledBack)
"""Errors after which a batch is not completed: shards have refused it, or the job has gone back to a time before it."""


Asked = TypeVar("Asked")


@dataclass(eq=False)
class _Sent:
    """A batch that was sent, or is about to be.

    Attributes:
        operations, vectors: as in VectorCalls.run; empty if the batch makes or drops a vector.
        session: the session that sent it first. seq: its number.
        change: "create" or "drop", and the vector; None for a batch of operations.
    """

    operations: list[VectorOperation]
    vectors: Mapping[str, VectorSpec]
    session: int
    seq: int
    change: tuple[str, VectorSpec] | None = None

    def is_same(self, other: _Sent) -> bool:
        """True if both batches say the same, so that a program that calls again after a failure means the same batch."""
        return (
            self.change == other.change
            and self.vectors == other.vectors
            and len(self.operations) == len(other.operations)
            and all(map(_are_same, self.operations, other.operations))
        )

    def keep(self) -> None:
        """Copy the program's arrays, which it may change from now on."""
        self.operations = [_copied(operation) for operation in self.operations]


class VectorCalls:
    """The calls of one worker.

    Args:
        operation: begins a call of the program; see WorkerConnection.operation.
        is_declared: returns whether the worker has declared a job.
    """

    def __init__(
        self,
        config: ClientConfig,
        session: Session,
        shards: Shards,
        operation: Callable[[str], AbstractContextManager[None]],
        is_declared: Callable[[], bool],
    ) -> None:
        self._config = config
        self._session = session
        self._shards = shards
        self._operation = operation
        self._is_declared = is_declared
        self._has_joined = False
        self._seq = 0
        self._unfinished: _Sent | None = None
        self._functions: list[set[str]] | None = None  # the users' functions that each shard has listed
        self._fetches = Fetches(shards, lambda shard: {"caller": session.caller(shard)}, config.wait_timeout_s)

    # -- vectors ---------------------------------------------------------------------------------------------------------

    def make(self, spec: VectorSpec) -> None:
        """Make a vector, unless it exists.

        Raises:
            SpecMismatch: there is another vector of that name.
        """
        check_spec(spec)
        with self._operation(f"vector {spec.name!r}"):
            self._join_job()
            there = {known.name: known for known in self._listed()}
            if spec.name in there:
                check_same(spec, there[spec.name])
            self._complete(self._named([], {}, ("create", spec)))

    def drop(self, spec: VectorSpec) -> None:
        """Remove a vector."""
        with self._operation(f"drop of vector {spec.name!r}"):
            self._complete(self._named([], {}, ("drop", spec)))

    def listed(self) -> list[VectorSpec]:
        """The vectors that every shard has, by name."""
        with self._operation("vectors"):
            self._join_job()
            return self._listed()

    def _listed(self) -> list[VectorSpec]:
        def ask(lane: Lane, call: Call) -> vectors_pb2.VectorListReply:
            return lane.list_vectors(vectors_pb2.VectorListRequest(caller=self._session.caller(lane.shard)), call)

        replies = self._as_a_session(lambda: self._shards.run(ask, self._config.wait_timeout_s))
        self._functions = [set(reply.functions) for reply in replies]
        common = {spec_of(message) for message in replies[0].vectors}
        return sorted(common.intersection(*({spec_of(message) for message in reply.vectors} for reply in replies)))

    # -- batches ---------------------------------------------------------------------------------------------------------

    def run(self, operations: list[VectorOperation], vectors: Mapping[str, VectorSpec]) -> list[Found]:
        """Run a batch on these vectors on all shards. Returns the results of its reductions over all shards, in order."""
        with self._operation("batch on vectors"):
            self._check_functions(operations)
            return self._complete(self._named(operations, vectors))

    def pull(self, spec: VectorSpec, first: int, last: int) -> NDArray[Any]:
        """Elements of a range."""
        with self._operation(f"pull of vector {spec.name!r}"):
            self._finish_earlier()
            return self._as_a_session(lambda: self._fetches.stretch(spec, first, last))

    def pull_at(self, spec: VectorSpec, indices: NDArray[np.int64], *, of_rows: bool) -> NDArray[Any]:
        """Elements at indices (n,), or rows of a matrix by number, end to end."""
        with self._operation(f"pull of vector {spec.name!r}"):
            self._finish_earlier()
            return self._as_a_session(lambda: self._fetches.at(spec, indices, of_rows=of_rows))

    def _as_a_session(self, ask: Callable[[], Asked]) -> Asked:
        """Ask, and return the answer; ask again if the session has ended."""
        found = None
        for attempt in self._session.attempts():
            with attempt:
                found = ask()
        assert found is not None
        return found

    def _check_functions(self, operations: Sequence[VectorOperation]) -> None:
        """Raise InvalidRequest for a user's function that some shard does not allow, before any shard runs the batch."""
        for operation in operations:
            if operation.name == "custom":
                if self._functions is None:
                    self._listed()
                for shard, listed in enumerate(self._functions or []):
                    if operation.function not in listed:
                        allowed = ", ".join(sorted(listed)) or "none"
                        raise InvalidRequest(
                            f"function: {operation.function!r} is not allowed on shard {shard}; --rule lists {allowed}"
                        )

    def _named(
        self, operations: list[VectorOperation], vectors: Mapping[str, VectorSpec], change: tuple[str, VectorSpec] | None = None
    ) -> _Sent:
        """A batch with the next name; or the one that has failed, if this is the same. Any other failed one is completed."""
        made = _Sent(operations, vectors, self._session.number, self._seq + 1, change)
        if self._unfinished is not None and self._unfinished.is_same(made):
            return self._unfinished
        self._finish_earlier()
        self._seq += 1
        made.session = self._session.number
        return made

    def _finish_earlier(self) -> None:
        if self._unfinished is not None:
            self._complete(self._unfinished)

    def _complete(self, sent: _Sent) -> list[Found]:
        """Send a batch until all shards have run it, and return the merged results of its reductions."""
        try:
            outgoing = OutgoingBatch(sent.operations, sent.vectors)
            nbytes = sum(operation.values.nbytes for operation in sent.operations if operation.values is not None)
            timeout_s = self._config.wait_timeout_s + nbytes / THROUGHPUT_MIN
            answers: list[vectors_pb2.VectorAnswer] = []
            for attempt in self._session.attempts():
                with attempt:
                    send = partial(self._send, sent, outgoing)
                    answers = self._shards.run(send, timeout_s, is_bulk=sent.change is None)
        except _REFUSALS:
            self._unfinished = None
            raise
        except BaseException:
            if self._unfinished is not sent:
                sent.keep()
                self._unfinished = sent
            raise
        self._unfinished = None
        self._session.hear_cuts(dict(enumerate(answers)))
        return _merged([answer.found for answer in answers])

    def _send(self, sent: _Sent, outgoing: OutgoingBatch, lane: Lane, call: Call) -> vectors_pb2.VectorAnswer:
        name: dict[str, Any] = {"caller": self._session.caller(lane.shard), "session": sent.session, "seq": sent.seq}
        if sent.change is not None:
            kind, spec = sent.change
            request = vectors_pb2.VectorChange(vector=spec_message(spec), cuts=self._session.cuts.carried(), **name)
            return lane.change_vectors(kind, request, call)
        message, pieces = outgoing.at(lane.shard, len(self._shards.lanes))
        message.caller.CopyFrom(name["caller"])
        message.cuts.extend(self._session.cuts.carried())
        message.session, message.seq, message.payload_bytes = sent.session, sent.seq, payload_bytes(pieces)
        return lane.run_vectors(message, pieces, call)

    # -- the job ---------------------------------------------------------------------------------------------------------

    def _join_job(self) -> None:
        """Take part in the job. If this worker has not declared one, declare a job of vectors alone, which fits any job."""
        if self._has_joined or self._is_declared():
            return
        spec = JobSpec(world_size=self._config.world_size, tensors=(), groups=(), consistency=Consistency("async"))
        values = FlatBuffers(Layout(spec, len(self._shards.lanes)))
        self._session.declare(spec, values, lambda: None)
        self._has_joined = True


def _merged(parts: Sequence[bytes]) -> list[Found]:
    """The results of all shards, merged."""
    found = unpack_answers(parts[0])
    for part in parts[1:]:
        found = [one.merge(other) for one, other in zip(found, unpack_answers(part), strict=True)]  # type: ignore[arg-type]
    return found


def _are_same(one: VectorOperation, other: VectorOperation) -> bool:
    """True if both operations are equal, where NaN equals NaN."""
    for mine, its in zip(one, other, strict=True):
        if isinstance(mine, np.ndarray) and isinstance(its, np.ndarray):
            if mine.shape != its.shape or mine.tobytes() != its.tobytes():
                return False
        elif repr(mine) != repr(its):
            return False
    return True


def _copied(operation: VectorOperation) -> VectorOperation:
    arrays = {name: value.copy() for name, value in operation._asdict().items() if isinstance(value, np.ndarray)}
    return operation._replace(**arrays)
