"""A reader: fetches consistent copies of the parameters while training continues, and takes no part in it.

The reader asks all shards for the same cut, the newest version that some block has; each shard pins its blocks' pages as they
reach it. So the copy has one version throughout, no worker waits, and no round counts the reader. If rounds close faster than
shards can be asked, it asks for a version ahead. In jobs without rounds the workers' positions define the cut, as for
checkpoints: the copy is the state after each worker's pushes up to its position. A relay answers with the newest version that
it has; from another one a reader takes no older version than it has had. Rows of tables are read in their current state. A
reader that must wait, for a job that has not begun, logs this. Must not know sessions, clocks or gradients.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import ByName, whole_number
from psd.contract.config import SHARDS_MAX, ClientConfig
from psd.contract.errors import CutMissed, InternalError, InvalidRequest, LayoutMismatch, NotDeclared, WaitTimeout
from psd.contract.integers import INTEGER_MAX
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.publications import decode_meta
from psd.contract.settings import check_seconds
from psd.contract.tables import SparseTableSpec
from psd.contract.vectors import spec_of
from psd.contract.waits import explained
from psd.v1 import control_pb2, data_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers, Mismatch, share_memory
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.lanes.shards import RetryPolicy, Shards, transfer_s
from psd_client.lanes.transport import Call, Lane, Scope
from psd_client.lanes.waiting import ShardHealth
from psd_client.reading_places import GivenPlace, ReadingPlaces, ReceivingPlaces
from psd_client.tables import as_row_ids
from psd_client.vectors import Vector, as_vector
from psd_client.wanted_tensors import Nothing, WantedTensors, blocks_with, meta_of
from psd_client.weights import Weights, digest_of
from psd_client.worker.exchange.lending import lent_places
from psd_client.worker.rows import Batches, RowPull
from psd_client.worker.vectors.fetches import Fetches
from psd_core.reductions import Answer as Found
from psd_core.vector import VectorSpec
from psd_core.vector_operations import VectorOperation

logger = logging.getLogger("psd_client")

PATIENCE_S = 1.0
"""Seconds to wait for a version ahead. If rounds have become slower than that, the newest one is asked for instead."""

NEWEST_PATIENCE_S = 10.0
"""Seconds to wait for the version of the newest block in the others; then the shards are asked anew how far they are."""

POSITIONS_PATIENCE_S = 60.0
"""Seconds to wait for the workers' positions in jobs without rounds: a lost worker is waited for until its lease runs out."""

DESCRIBE_TIMEOUT_S = READ_TIMEOUT_S = 10.0

POLL_S = 0.05

ResultT = TypeVar("ResultT")


class ReadTable:
    """A table of the job, as a reader sees it; an item of `Reader.tables`.

    Attributes:
        name: the declared name. dim: length of a row.
    """

    def __init__(self, spec: SparseTableSpec, read: Callable[[NDArray[Any]], NDArray[np.float32]]) -> None:
        """Take a table of the reader's job, and the function that reads its rows; not for programs."""
        self.name = spec.name
        self.dim = spec.dim
        self._read = read

    def pull(self, ids: Any) -> NDArray[np.float32]:
        """Fetch the current rows of ids: a new float32 array of shape `(*ids.shape, dim)`.

        Each row is read whole; no row is created or marked as used. Workers may push meanwhile, so rows of different shards may
        be of different steps.

        Args:
            ids: as in DeclaredTable.pull.

        Raises:
            InvalidTensor: the ids are not whole numbers.
            NotDeclared: the job has no initial values within the wait timeout. ShardUnavailable: a shard could not be reached.
        """
        return self._read(as_row_ids("ids", ids))


class ReadVectors:
    """A reader's calls for server-side vectors: it can pull them, but not change them."""

    def __init__(self, fetches: Fetches) -> None:
        """Take the functions that fetch from the shards; not for programs."""
        self._fetches = fetches

    def run(self, operations: list[VectorOperation], vectors: Mapping[str, VectorSpec]) -> list[Found]:
        """Refuse: only workers run batches."""
        raise InvalidRequest(
            f"batch on {', '.join(vectors)}: {len(operations)} operations are for workers; a reader only pulls"
        )

    def drop(self, spec: VectorSpec) -> None:
        """Refuse: only workers drop vectors."""
        raise InvalidRequest(f"vector {spec.name!r}: is dropped by workers; a reader only pulls")

    def pull(self, spec: VectorSpec, first: int, last: int) -> NDArray[Any]:
        """Fetch the elements of a range."""
        return self._fetches.stretch(spec, first, last)

    def pull_at(self, spec: VectorSpec, indices: NDArray[np.int64], *, of_rows: bool) -> NDArray[Any]:
        """Fetch the elements at indices (n,), or rows of a matrix by number, one after the other."""
        return self._fetches.at(spec, indices, of_rows=of_rows)


class WholeCopy(NamedTuple):
    """All parameters of one version.

    Attributes:
        described: what the first shard has said of the job. version: as Weights.version.
        buffers: hold the values, and are the receiver's.
    """

    described: control_pb2.DescribeReply
    version: int
    buffers: FlatBuffers


class Reader:
    """Reads the parameters of a running job; made by `connect(role="reader")`. A context manager.

    Args:
        config: settings; rank and world_size mean nothing here.
        lanes: the lane to each shard; closed with the reader.

    Attributes:
        job: name of the job; timeline: how often it had gone back to a checkpoint, and so counts its versions anew. Both as the
            shards have last said; empty and 0 before the first call.
        name: how psdctl and the dashboard call this reader; a program may set it, to at most 256 bytes, printable.
        newest: the newest version that the shards have told of. heard_at: when that was, by time.monotonic; None: never.
    """

    def __init__(self, config: ClientConfig, lanes: Sequence[Lane]) -> None:
        self._config = config
        self._health = ShardHealth([lane.address for lane in lanes])
        self._shards = Shards(lanes, RetryPolicy(config.retry_timeout_s), self._health)
        self._last: Exception | None = None  # why the last attempt of a pull has found nothing
        self._layout: Layout | None = None
        self._places: ReceivingPlaces | None = None  # what pulls are received in
        self._comes_again = False  # so that shards keep what it has, to tell it what changes
        self._described = control_pb2.DescribeReply()
        self._version = 0  # that it has fetched
        self.newest = 0
        self.heard_at: float | None = None
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.relayed_readers: int | None = None  # set by a relay
        self._id = secrets.randbits(53) or 1
        self.job = ""
        self.timeline = 0

    @property
    def received_bytes(self) -> int:
        """Bytes of numbers that this reader has received so far."""
        return sum([lane.traffic.received_bytes for lane in self._shards.lanes])

    @property
    def transports(self) -> list[str]:
        """Transport of parameters from each shard, as in ParameterServer.transports; empty strings before the first pull."""
        return [lane.transport for lane in self._shards.lanes]

    @property
    def dtypes(self) -> dict[str, str]:
        """The declared dtype of each tensor of the job by name, such as "bfloat16".

        Raises:
            NotDeclared: no job, or no initial values, within the wait timeout. ShardUnavailable: a shard could not be reached.
        """
        layout = self._patiently(lambda: self._layout_of(self._describe()))
        return {tensor.name: tensor.dtype for tensor in layout.spec.tensors[: meta_of(layout)]}

    @property
    def tables(self) -> dict[str, ReadTable]:
        """The job's tables by name.

        Raises:
            NotDeclared: no job, or no initial values, within the wait timeout. ShardUnavailable: a shard could not be reached.
        """
        layout = self._patiently(lambda: self._layout_of(self._describe()))
        tables = enumerate(layout.spec.tables)
        return ByName("table", {spec.name: ReadTable(spec, partial(self._rows_of, index)) for index, spec in tables})

    @property
    def vectors(self) -> dict[str, Vector]:
        """The job's server-side vectors and matrices by name. A pull returns what each shard has at that moment.

        Raises:
            NotDeclared: no job within the wait timeout. ShardUnavailable: a shard could not be reached.
        """
        replies = self._patiently(self._list_vectors)
        calls = ReadVectors(Fetches(self._shards, lambda _: {"run_id": self._config.run_id}, READ_TIMEOUT_S))
        return ByName("vector", {message.name: as_vector(spec_of(message), calls) for message in replies[0].vectors})

    def _list_vectors(self) -> list[vectors_pb2.VectorListReply]:
        self._describe()  # which says that there is no job yet
        request = vectors_pb2.VectorListRequest(run_id=self._config.run_id)
        return self._shards.run(lambda lane, call: lane.list_vectors(request, call), READ_TIMEOUT_S)

    def _rows_of(self, table: int, ids: NDArray[Any]) -> NDArray[np.float32]:
        return self._patiently(lambda: self._read_rows(table, ids))

    def _read_rows(self, table: int, ids: NDArray[Any]) -> NDArray[np.float32]:
        replies = self._describe()
        layout = self._layout_of(replies)
        pull = RowPull(Batches(layout), {table: ids}, RowsMemory(None), min([reply.push_ids_max for reply in replies]))
        wanted_at = {lane.shard: pull.at(lane.shard) for lane in self._shards.lanes}
        request = data_pb2.ReadRequest(run_id=replies[0].run_id, layout_digest=layout.digest)

        def read_at(lane: Lane, call: Call) -> None:
            for rows in wanted_at[lane.shard]:
                lane.read_rows(request, rows, call)

        lanes = [lane for lane in self._shards.lanes if wanted_at[lane.shard]]
        self._shards.run(read_at, READ_TIMEOUT_S + pull.transfer_s, lanes)
        return pull.results()[table]

    def _patiently(self, read: Callable[[], ResultT]) -> ResultT:
        """The result of `read`, which is repeated until there is a job with initial values."""
        self._last = None
        clock = RetryPolicy(0).clock
        deadline = clock() + self._config.wait_timeout_s
        with explained(self._explain, self._config.report_after_s):
            while True:
                try:
                    return read()
                except NotDeclared as error:
                    self._last = error
                    if clock() > deadline:
                        raise
                Scope().sleep(POLL_S)

    def pull(
        self,
        *,
        names: Sequence[str] | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
        dtype: str | None = None,
        newer_than: int | None = None,
        timeout: float | None = None,
    ) -> Weights:
        """Fetch the tensors by name (float16 and bfloat16 as float32); all of one version if the job has rounds.

        Without rounds they are the state after a certain number of each worker's pushes, the same on all shards. Of a store
        (see `publish`) they are what one `put` has set; before the first one, this waits for it.

        Args:
            names: fetch these tensors alone: names, or patterns such as "encoder.*", as in fnmatch. None: all.
            out: fetch the tensors of these names, into these arrays, and return them. After an error the arrays are unchanged.
            dtype: "bfloat16" or "float16": fetch tensors of float32 in that precision, with half the bytes; they are still
                arrays of float32, of which the lower bits are rounded away. A block with NaN or infinity, or numbers beyond the
                range, comes as it is. Published tensors of 16 bits travel as such anyway. None: all bits.
            newer_than: wait until there is a later version than this one. Waiting loads neither the reader nor the shards. A
                job that goes back to a checkpoint counts its versions from there.
            timeout: seconds after which the call gives up; None: the wait timeout.

        Raises:
            InvalidRequest: a name that no tensor has, or an argument that makes no sense. InvalidTensor: an array in `out` has
                another shape or dtype than its tensor.
            NotDeclared: no job, or no initial values, in time. JobOver: all workers have left, and the shards end.
            WaitTimeout: there is no newer version in time, or the shards' blocks were not found at one version.
            ShardUnavailable: a shard could not be reached.
        """
        wanted = WantedTensors(names, out, dtype)
        self._comes_again |= newer_than is not None
        if newer_than is not None and not 0 <= whole_number(InvalidRequest, "newer_than", newer_than) < INTEGER_MAX:
            raise InvalidRequest(f"newer_than: must be from 0 to {INTEGER_MAX - 1}, got {newer_than}")
        oldest = 0 if newer_than is None else newer_than + 1
        timeout_s = self._config.wait_timeout_s if timeout is None else timeout
        check_seconds(InvalidRequest, "timeout", timeout_s, 0, 30 * 86_400)
        self._last = None
        with explained(self._explain, self._config.report_after_s):
            return self._pull(wanted, oldest, timeout_s)

    def pull_whole(
        self, newer_than: int | None, timeout_s: float, into: FlatBuffers | None, base: FlatBuffers | None = None
    ) -> WholeCopy:
        """Fetch all parameters, as `pull` does, for a relay; not for programs. From then on no other run is read.

        Args:
            into: buffers that nobody uses any more, for the values; may be of another layout, and are not used then.
            base: an earlier version, from which on the servers may tell what has changed; stays as it is.
        """
        self._places = place = GivenPlace(into, base)
        self._comes_again = True
        self._last = None
        self._pull(Nothing(), 0 if newer_than is None else newer_than + 1, timeout_s)
        place.buffers.base = None
        self._config = replace(self._config, run_id=self._described.run_id)
        return WholeCopy(self._described, self._version, place.buffers)

    def _explain(self, waited_s: float) -> None:
        why = self._health.silent() or ([str(self._last)] if self._last is not None else self._health.asked())
        logger.warning("psd: reader: pull has taken %.0f s: %s", waited_s, "; ".join(why) or "no shard has answered yet")

    def _pull(self, wanted: WantedTensors, oldest: int, timeout_s: float) -> Weights:
        clock = RetryPolicy(0).clock
        deadline = clock() + timeout_s
        ahead = 0  # rounds; doubled each time that the shards have gone on before they were asked
        progress = -1
        while True:
            try:
                replies = self._describe()
                layout = self._layout_of(replies)
                has_rounds = layout.spec.consistency.has_rounds
                oldest = max(oldest, int(layout.spec.is_publication))  # version 0 of a store was never put
                progress = max((reply.progress for reply in replies if reply.has_blocks), default=0)
                self._described, self.newest, self.heard_at = replies[0], progress, clock()
                if not any(block.trained for block in layout.blocks):  # there is no block whose version could be waited for
                    _check_newer(progress, oldest)
                    step, patience_s = progress, NEWEST_PATIENCE_S
                elif replies[0].relay_of:
                    step, patience_s = max(progress, oldest, self._version), NEWEST_PATIENCE_S
                elif has_rounds:
                    step, patience_s = max(progress + ahead, oldest), PATIENCE_S if ahead else NEWEST_PATIENCE_S
                else:
                    _check_newer(progress, oldest)  # no shard knows when all workers will have got there
                    step, patience_s = progress, POSITIONS_PATIENCE_S
                found = self._read(replies, layout, wanted, step, min(patience_s, deadline - clock()))
            except CutMissed as error:
                if self._layout is not None and not self._layout.spec.consistency.has_rounds:
                    Scope().sleep(POLL_S)
                else:
                    ahead = max(1, 2 * ahead)
                last: Exception = error
            except (WaitTimeout, NotDeclared) as error:
                ahead = 0
                last = error
                Scope().sleep(POLL_S)
            else:
                self._version = found.version
                if replies[0].relay_of:  # another relay may be another job's
                    self._config = replace(self._config, run_id=replies[0].run_id)
                self._comes_again = True
                return found
            self._last = last
            if clock() > deadline:
                if progress >= 0:
                    _check_newer(progress, oldest)
                raise last

    def _describe(self) -> list[control_pb2.DescribeReply]:
        count = len(self._shards.lanes)
        return self._shards.run(
            lambda lane, call: lane.describe(
                control_pb2.DescribeRequest(shard_index=lane.shard, shard_count=count, run_id=self._config.run_id), call
            ),
            DESCRIBE_TIMEOUT_S + self._config.retry_timeout_s,
        )

    def _layout_of(self, replies: list[control_pb2.DescribeReply]) -> Layout:
        digests = {reply.layout_digest for reply in replies}
        if self._layout is None or digests != {self._layout.digest}:
            is_relay, count = bool(replies[0].relay_of), len(replies)
            if is_relay and not 1 <= (count := replies[0].relayed_shards) <= SHARDS_MAX:
                raise InternalError(f"relayed_shards: a relay has said {count}; expected 1 to {SHARDS_MAX}")
            self._layout = Layout(JobSpec.from_message(replies[0].spec), count, is_gathered=is_relay)
        if digests != {self._layout.digest}:
            raise LayoutMismatch("the shards and this reader cut the parameters differently: their versions of psd differ")
        if len({reply.timeline for reply in replies}) > 1:
            raise NotDeclared("the shards are going back to a checkpoint")
        self.job, self.timeline = replies[0].run_id, replies[0].timeline
        return self._layout

    def _read(
        self, replies: list[control_pb2.DescribeReply], layout: Layout, wanted: WantedTensors, step: int, patience_s: float
    ) -> Weights:
        described = replies[0]
        cut = data_pb2.Cut(id=secrets.token_hex(8), step=step)
        tensors, meta = wanted.tensors(layout), meta_of(layout)
        of_meta = blocks_with(layout, [] if meta is None else [meta])
        blocks = blocks_with(layout, tensors) | of_meta
        has_rounds = layout.spec.consistency.has_rounds
        timeline = self.timeline
        note = data_pb2.ReaderNote(id=self._id, name=self.name, relayed_readers=self.relayed_readers)
        places = self._prepared(layout, data_pb2.ReadRequest(reader=note))
        buffers = places.renew(layout, [block.read_codec(wanted.codec) for block in layout.blocks])
        base = buffers.base or buffers

        def read_at(lane: Lane, call: Call) -> set[int]:
            own = layout.blocks_of(lane.shard)
            asked = [block for block in own if block.index in blocks] or own[:1]
            request = data_pb2.ReadRequest(
                run_id=described.run_id,
                layout_digest=layout.digest,
                cut=cut,
                codec=wanted.codec,
                reader=note,
                timeline=timeline,
                or_newer=bool(described.relay_of),
            )
            if described.HasField("decision") and replies[lane.shard].progress <= described.decision.round:
                request.decision.CopyFrom(described.decision)  # the publisher may be dead, and that shard not know of it
                request.seal = described.seal
            held = [base.contents.get(block.index, 0) for block in asked]
            if len(asked) < len(own) or self._comes_again:
                request.blocks.extend(block.index for block in asked)
            if self._comes_again:
                request.held.extend(held)
            try:
                return lane.read(request, asked, buffers, call)
            except Mismatch as error:
                logger.warning("psd: reader: %s; all of it is fetched anew", error)
            request.ClearField("held")
            return lane.read(request, asked, buffers, call)

        # Without rounds, workers choose their positions when every shard waits for them.
        has_some = {layout.shard_of(index) for index in blocks}
        lanes = [lane for lane in self._shards.lanes if lane.shard in has_some or not has_rounds]
        found = self._shards.run(read_at, max(0.1, patience_s) + transfer_s(layout, lanes), lanes, is_bulk=True)
        if len(set().union(*found)) > 1:
            raise CutMissed("workers have joined, or were lost, while their positions were asked for")
        if described.relay_of:
            versions = {buffers.versions[index] for index in blocks} or {step}
            if len(versions) > 1:
                raise InternalError(f"{lanes[0].address}: a relay has mixed versions {sorted(versions)} in one answer")
            (step,) = versions
        contents = {index: content for index, content in buffers.contents.items() if index in blocks - of_meta}
        return Weights(
            wanted.results(layout, tensors, buffers, places.lend(buffers, wanted.lent(tensors))),
            step,
            None if meta is None else decode_meta(buffers.views[meta]),
            digest_of(layout.digest, contents),
        )

    def _prepared(self, layout: Layout, request: data_pb2.ReadRequest) -> ReceivingPlaces:
        """The places for this layout. New ones are shared with the shards on this machine."""
        places = self._places
        if places is not None and places.layout in (None, layout):
            return places
        timeout_s = DESCRIBE_TIMEOUT_S + self._config.retry_timeout_s
        shares = self._shards.run(lambda lane, call: lane.prepare_reads(request, call), timeout_s)
        sharing = [share for share in shares if share is not None]
        segment = share_memory(layout, lent_places(layout), is_reader=True) if sharing else None
        self._places = places = ReadingPlaces(layout, segment)
        for share in sharing if segment is not None else ():
            share(None, places.shared)
        return places

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._shards.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _check_newer(progress: int, oldest: int) -> None:
    """Raise WaitTimeout if the newest version is older than what is asked for."""
    if progress < oldest == 1:
        raise WaitTimeout("newer_than: there is no version above 0 yet", missing=[])
    if progress < oldest:
        raise WaitTimeout(
            f"newer_than: the newest version is {progress}, and there has come none above {oldest - 1}", missing=[]
        )
