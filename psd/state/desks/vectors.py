"""Calls for server-side vectors: checks the caller, whether a batch has run before, and the vectors that it names.

Vectors are stored beside the arena, and belong to the job as its parameters do; a job may have nothing else. A batch has the
name (session, seq). The store keeps the answer to the latest batch of each session, so a batch that is sent again, perhaps by
the worker's next session, is answered but not run again. Must not know how messages travel, files or stripes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.custom_rules import describe
from psd.contract.errors import CheckpointFailed, InvalidRequest, OutOfSpace, RuleFailed, UnknownVector
from psd.contract.vector_batches import IncomingBatch
from psd.contract.vectors import FETCH_BYTES_MAX, VECTORS_OF_BATCH_MAX, check_same, spec_of
from psd.state import locks
from psd.state.core import ShardCore
from psd.state.desks.transfers import check_begun_as
from psd.state.locks import Level
from psd.state.workers.membership import WorkerState
from psd.v1 import job_pb2, vectors_pb2
from psd_core import vector as store
from psd_core.arena import StoreClosed, StoreFull
from psd_core.vector import BatchName, Piece, VectorSnapshot, VectorSpec, VectorStore
from psd_core.vector_operations import VectorOperation, extent


class VectorCounts(NamedTuple):
    """Counts of a shard's vectors.

    Attributes:
        number: number of vectors. bytes: size of this shard's part of them.
        batches, operations: numbers of those that were run. repeated: number of batches that were only answered again.
    """

    number: int
    bytes: int
    batches: int
    operations: int
    repeated: int


class VectorsCut:
    """The vectors of a cut, as psd.checkpoint.VectorsPart.

    Attributes:
        specs: the vectors. sessions: by session, the number of its latest batch.
    """

    def __init__(self, snapshot: VectorSnapshot, sessions: dict[int, int]) -> None:
        self.specs, self.sessions = snapshot.specs, sessions
        self._snapshot = snapshot

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._snapshot)


class _Seat:
    """State of a rank that sends batches: a lock, so that one runs at a time; the session that began the last one; and the
    connection of the program that sent it."""

    def __init__(self) -> None:
        self.lock = locks.new(Level.LEAF)
        self.session = self.connection = 0


class VectorDesk:
    """Handles the calls of VectorService."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core
        self._lock = locks.new(Level.LEAF)  # of the counts
        self._seats: dict[int, _Seat] = {}  # by rank
        self._batches = self._operations = self._repeated = 0

    # -- changes ---------------------------------------------------------------------------------------------------------

    def run(self, request: vectors_pb2.VectorBatch, payload: memoryview) -> bytes:
        """Run a batch, or answer it again. Returns this shard's results of its reductions. See VectorService.Run."""
        limits = self._core.config.limits
        if not 1 <= len(request.operations) <= limits.batch_operations_max:
            raise InvalidRequest(
                f"operations: must be 1 to {limits.batch_operations_max} (the shard's --max-batch-operations), got "
                f"{len(request.operations)}"
            )
        if len(request.vectors) > VECTORS_OF_BATCH_MAX:
            raise InvalidRequest(f"vectors: {len(request.vectors)} are above the limit of {VECTORS_OF_BATCH_MAX}")
        self.check_payload(len(payload))
        with self._store(request.caller) as vectors, self._named(vectors, request) as name:
            found = vectors.answer(name)
            is_new = found is None
            if found is None:
                specs = self._known(vectors, request.vectors)
                operations = IncomingBatch(request, payload, specs, self._core.functions).operations()
                found = vectors.run([_named_errors(operation) for operation in operations], name)
        with self._lock:
            self._batches += is_new
            self._operations += len(request.operations) * is_new
            self._repeated += not is_new
        return found

    def check_payload(self, nbytes: int) -> None:
        """Raise InvalidRequest if a batch has more bytes than the shard takes at a time."""
        limit = self._core.config.limits.batch_bytes_max
        if nbytes > limit:
            raise InvalidRequest(f"payload: {nbytes} bytes are above the shard's --max-batch-bytes {limit}")

    def create(self, request: vectors_pb2.VectorChange) -> None:
        """Make a vector; see VectorService.Create."""
        spec = spec_of(request.vector)
        with self._core.lock:
            self._core.check_caller(request.caller)
        self._open()
        with self._store(request.caller) as vectors, self._named(vectors, request) as name:
            there = vectors.vectors()
            if spec.name in there:
                check_same(spec, there[spec.name])
            elif vectors.answer(name) is None:
                self._check_room(spec, list(there.values()))
            vectors.create_vector(spec, name)

    def drop(self, request: vectors_pb2.VectorChange) -> None:
        """Remove a vector; see VectorService.Drop."""
        spec = spec_of(request.vector)
        with self._store(request.caller) as vectors, self._named(vectors, request) as name:
            if vectors.answer(name) is None:
                self._known(vectors, [request.vector])
                vectors.drop_vector(spec.name, name)

    # -- reads -----------------------------------------------------------------------------------------------------------

    def all(self, request: vectors_pb2.VectorListRequest) -> list[VectorSpec]:
        """All vectors, sorted by name; see VectorService.List."""
        self._check_asker(request)
        if self._core.storage.vectors is None:
            return []
        with self._store() as vectors:
            return [spec for _, spec in sorted(vectors.vectors().items())]

    @property
    def functions(self) -> list[str]:
        """Import paths of the users' functions that batches may name."""
        return list(self._core.functions)

    def fetch(self, request: vectors_pb2.VectorFetch) -> NDArray[Any]:
        """Those of the requested elements that this shard has; see VectorService.Fetch."""
        self._check_asker(request)
        with self._store() as vectors:
            (spec,) = self._known(vectors, [request.vector])
            if request.indices or request.rows:
                columns = spec.columns if request.rows else 1
                if not columns:
                    raise InvalidRequest(f"rows: {spec.name!r} is a vector, which has none")
                asked = request.rows or request.indices
                if len(asked) % 8:
                    raise InvalidRequest(f"indices: have {len(asked)} bytes, which are no int64 numbers")
                places = np.frombuffer(asked, np.int64)
                _check_answer(spec, places.size * columns, columns)
                found = vectors.read_rows(spec.name, places) if request.rows else vectors.read_at(spec.name, places)
            else:
                if not request.start <= request.stop <= spec.size:
                    raise InvalidRequest(f"start: {request.start} to {request.stop} is no range of {spec.name!r}: {spec.size}")
                config = self._core.config
                begin, end = extent(spec.size, config.shard_index, config.shard_count)
                _check_answer(spec, min(request.stop, end) - max(request.start, begin), 0)
                found = vectors.read(spec.name, request.start, request.stop)
        return found

    def status(self) -> VectorCounts:
        """Counts of the vectors, and of the batches since the shard started."""
        vectors, specs = self._core.storage.vectors, list[VectorSpec]()
        if vectors is not None:
            with suppress(StoreClosed):
                specs = list(vectors.vectors().values())
        return VectorCounts(len(specs), self._bytes(specs), self._batches, self._operations, self._repeated)

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    @property
    def has_vectors(self) -> bool:
        """True if there is a store of vectors."""
        return self._core.storage.vectors is not None

    def latest(self) -> dict[int, int]:
        """The number of each live worker's latest batch, by session; 0 if it has sent none. If a program has joined again, its
        earlier session is included, too, because that may have a batch to complete."""
        with self._core.lock:
            live = [worker for worker in self._core.members.workers if worker.state is WorkerState.LIVE]
        sessions = {worker.session for worker in live}
        for worker in live:
            seat = self._seats.get(worker.rank)
            if seat is not None and seat.session and worker.connection and seat.connection == worker.connection:
                sessions.add(seat.session)
        return self.latest_of(sessions)

    def latest_of(self, sessions: Collection[int]) -> dict[int, int]:
        """The number of the latest batch of each of these sessions; 0 for a session that is not known, or not any more."""
        vectors = self._core.storage.vectors
        known = {} if vectors is None else vectors.sessions()
        return {session: known.get(session, 0) for session in sessions}

    @contextmanager
    def snapshot(self, sessions: Collection[int] | None = None) -> Iterator[VectorsCut | None]:
        """All vectors as they are now, for a checkpoint; None if there are none.

        Args:
            sessions: the sessions whose latest batches must be the same in all shards' parts; None: those of `latest`.

        Raises:
            CheckpointFailed: the shard goes back to a checkpoint.
        """
        vectors = self._core.storage.vectors
        try:
            if vectors is None or not vectors.vectors():
                yield None
                return
            sessions = self.latest() if sessions is None else sessions
            with vectors.snapshot() as snapshot:
                known = snapshot.sessions
                yield VectorsCut(snapshot, {session: known.get(session, 0) for session in sessions})
        except StoreClosed:
            raise CheckpointFailed("vectors: the job goes back to a checkpoint") from None

    # -- checks ----------------------------------------------------------------------------------------------------------

    def _check_asker(self, request: vectors_pb2.VectorListRequest | vectors_pb2.VectorFetch) -> None:
        """Raise what `check_caller` does for a worker, and what `check_run` does for a reader."""
        if not request.HasField("caller"):
            self._core.check_run(request.run_id)
            return
        with self._core.lock:
            self._core.check_caller(request.caller)

    @contextmanager
    def _named(self, vectors: VectorStore, request: vectors_pb2.VectorBatch | vectors_pb2.VectorChange) -> Iterator[BatchName]:
        """The name of a worker's batch. While the context is open, no other batch of that worker runs.

        Raises:
            SessionFenced: the worker has already sent batches in a later session, so this one comes too late.
        """
        core = self._core
        with core.lock:
            worker = core.check_caller(request.caller)
            core.declared()
            core.on_used()
        if request.seq < 1:
            raise InvalidRequest(f"seq: must be at least 1, got {request.seq}")
        name = BatchName(check_begun_as(request.session, request.caller), request.seq, worker.rank)
        seat = self._seats.setdefault(worker.rank, _Seat())
        with seat.lock:
            if name.session < max(seat.session, vectors.session_of(worker.rank)):
                raise worker.replaced(name.session)
            seat.session, seat.connection = name.session, worker.connection
            yield name

    def _known(self, vectors: VectorStore, asked: Sequence[vectors_pb2.VectorSpec]) -> list[VectorSpec]:
        """The specs that a caller states; UnknownVector or InvalidRequest if the shard has no such vectors."""
        specs = [spec_of(message) for message in asked]
        there = vectors.specs(spec.name for spec in specs)
        for spec in specs:
            if spec.name not in there:
                raise UnknownVector(
                    f"vectors: there is no vector {spec.name!r}; it was dropped, or never made", vector=spec.name
                )
            check_same(spec, there[spec.name])
        return specs

    def _check_room(self, spec: VectorSpec, there: list[VectorSpec]) -> None:
        limits = self._core.config.limits
        if len(there) >= limits.vectors_max:
            raise InvalidRequest(f"vector {spec.name!r}: there are {len(there)} already, the shard's --max-vectors")
        nbytes, limit = self._bytes([*there, spec]), limits.vector_bytes_max
        if limit and nbytes > limit:
            raise InvalidRequest(
                f"vector {spec.name!r}: all vectors would take {nbytes} bytes on this shard, its --max-vector-bytes is {limit}"
            )

    def _bytes(self, specs: Sequence[VectorSpec]) -> int:
        config, total = self._core.config, 0
        for spec in specs:
            first, last = extent(spec.size, config.shard_index, config.shard_count)
            total += (last - first) * np.dtype(spec.dtype).itemsize
        return total

    def _open(self) -> None:
        """Make the store, if this is the job's first vector."""
        if self._core.storage.vectors is None:
            with self._core.job_lock:
                self._core.declared()
                self._core.storage.make_vectors(len(self._core.members.workers))

    @contextmanager
    def _store(self, caller: job_pb2.Caller | None = None) -> Iterator[VectorStore]:
        """The store, with its errors turned into the contract's.

        caller: a worker, which is checked first if there is no store: the shard may have lost one that the worker knows.
        """
        vectors = self._core.storage.vectors
        if vectors is None:
            if caller is not None:
                with self._core.lock:
                    self._core.check_caller(caller)
            self._core.declared()
            raise UnknownVector("vectors: none was made yet")
        try:
            yield vectors
        except store.NoSuchVector as error:
            raise UnknownVector(str(error)) from error
        except store.VectorError as error:
            raise InvalidRequest(str(error)) from error
        except StoreFull as error:
            raise OutOfSpace(f"{self._core.storage.directory} has no room for this batch: {error.strerror}") from error
        except StoreClosed:
            raise self._core.gone_back() from None


def _named_errors(operation: VectorOperation) -> VectorOperation:
    """The operation, with a user's function wrapped so that its errors name the vector."""
    function = operation.function
    if isinstance(function, str):
        return operation

    def apply(*pieces: NDArray[Any]) -> Any:
        try:
            return function(*pieces)
        except Exception as error:
            raise RuleFailed(f"vector {operation.out!r}: the function raised {describe(error)}") from error

    return operation._replace(function=apply)


def _check_answer(spec: VectorSpec, count: int, columns: int) -> None:
    """Raise InvalidRequest if so many elements, unless they are one row, exceed what a Fetch answers."""
    nbytes = count * np.dtype(spec.dtype).itemsize
    if nbytes > FETCH_BYTES_MAX and count > columns:
        raise InvalidRequest(
            f"start, indices, rows: {nbytes} bytes of {spec.name!r} are above {FETCH_BYTES_MAX}, the limit of a call"
        )
