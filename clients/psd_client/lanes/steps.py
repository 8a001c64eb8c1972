"""Armed steps: small push_pulls that all shards of a worker have offered to take as such (psd_core/csrc/step_frames.h). Each is
one call of C, without the GIL, however many shards there are.

A step that a shard has not taken at once, or has refused, is left to the caller, who goes on with it shard by shard: `finish`
says what has become of it, under the conditions of an ordinary call, and where the push is to be made as one. Must not know
whether a push may be made so, sessions, retries, or what scalars and clocks mean.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Block
from psd.contract.rows import TableRows
from psd.contract.wire import READ_AHEAD_BYTES, Disconnected
from psd.v1 import bulk_pb2, data_pb2
from psd_client.lanes.bulk_connection import BulkClient
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import Call, Lane, Stepping, Traffic
from psd_core.worker_steps import BROKEN, REFUSED, ROWS_BYTES_MAX, TAKEN, UNSENT, WorkerSteps


class SteppingClient(BulkClient):
    """A worker's connection, which carries steps, too: while one is under way it is held, and nothing else uses it."""

    @property
    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._stream.fileno()

    def offered(self, gradients: FlatBuffers, parameters: FlatBuffers) -> bulk_pb2.StepOffer | None:
        """The offer in the shard's last reply, if it holds for these buffers."""
        offer = self.offer
        if offer is None or not self._stream.is_single or self._stream.has_read_ahead:
            return None
        return offer if not offer.in_memory or (self._has(gradients) and self._has(parameters)) else None

    def hold(self, offer: bulk_pb2.StepOffer) -> bool:
        """Begin a step. False: it cannot be made on this connection now."""
        with self._lock:
            if not self.is_open or self.offer is not offer:
                return False
            self._is_busy = True
        self._wanted, self._uses_memory = None, True
        return True

    def finish(self, steps: WorkerSteps, place: int, call: Call) -> bool:
        """End a step that is under way. True: it was taken; False: it is to be made as a call. Raises what a call would."""
        try:
            with self._under_way(call):
                return self._finish(steps, place)
        except BaseException:
            if self.is_open or self._is_busy:  # the call was cancelled before it could begin
                self.abandon_step()
            raise

    def _finish(self, steps: WorkerSteps, place: int) -> bool:
        while not steps.advance(place):
            self._patience.check()
        state = steps.state(place)
        if state == BROKEN:
            error = steps.error(place)
            raise Disconnected(os.strerror(error) if error else "the peer has closed the connection")
        if state == TAKEN:
            return True
        unread = steps.unread(place)
        if len(unread) > READ_AHEAD_BYTES:
            raise Disconnected("the answer to a step is none")
        self._stream.give_back(unread)
        if state != REFUSED:
            kind, head, _ = self._stream.receive()
            self._raise(kind, head)
        return False

    def cancel_step(self) -> None:
        """End a step that is under way, without waiting for the shard."""
        self._cancel()

    def abandon_step(self) -> None:
        """End a step that is under way, and the connection."""
        try:
            self._abandon()
        finally:
            self.let_go()


class _Way(NamedTuple):
    """One shard's part in the steps: its connection, which has made this offer, and its lane's traffic."""

    connection: Stepping
    offer: bulk_pb2.StepOffer
    traffic: Traffic


class StepRows(NamedTuple):
    """The rows that a step pushes to one shard, and those that it pulls from there, whose values are filled."""

    pushed: Sequence[TableRows]
    pulled: Sequence[TableRows]

    @property
    def sent_bytes(self) -> int:
        """Bytes of ids and gradients."""
        return sum([rows.nbytes for rows in self.pushed]) + sum([rows.ids.nbytes for rows in self.pulled])

    @property
    def received_bytes(self) -> int:
        """Bytes of rows."""
        return sum([rows.values.nbytes for rows in self.pulled])

    @property
    def fits(self) -> bool:
        """True if a step can carry them."""
        is_float = all(rows.values.dtype == np.float32 for rows in (*self.pushed, *self.pulled))
        most = ROWS_BYTES_MAX - 8 * max(len(self.pushed), len(self.pulled))  # each is followed by up to a multiple of 8 bytes
        return is_float and self.sent_bytes <= most and self.received_bytes <= most


NO_ROWS = StepRows((), ())


class _Mask(NamedTuple):
    """Which tensors have a gradient; for each shard the masks of its blocks, as in STEP, and the bytes that count as sent.
    bits: None if all have."""

    present: bytes
    bits: list[bytes] | None
    sent_bytes: list[int]


class SteppingLanes:
    """The steps of one worker.

    Args:
        lanes: of the shards that have trained blocks. blocks: these, for each lane, but for the tables' block.
        gradients: what is sent. looks: look for NaN and infinity in it. parameters: where to receive.
        sends_versions: False in a job with rounds. looks_out: as in WorkerSteps.

    Attributes:
        are_under_way: True from the beginning of a step until `end`, unless nothing was sent.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        blocks: Sequence[Sequence[Block]],
        gradients: FlatBuffers,
        parameters: FlatBuffers,
        *,
        looks: bool,
        sends_versions: bool,
        looks_out: bool,
    ) -> None:
        self._lanes = lanes
        self._blocks = blocks
        self._gradients = gradients
        self._parameters = parameters
        self._looked_at = gradients.looked_at if looks else []
        self._sends_versions = sends_versions
        self._looks_out = looks_out
        self._steps: WorkerSteps | None = None
        self._made_for: list[bulk_pb2.StepOffer] = []
        self._ways: list[_Way] = []
        self._places = {lane.shard: place for place, lane in enumerate(lanes)}
        self._is_in_memory = False
        self._left: set[int] = set()  # places of steps that have not been looked at since they were under way
        self._received_bytes = [sum([block.nbytes for block in own]) for own in blocks]
        self._whole = _Mask(b"", None, [sum([block.pushed_nbytes for block in own]) for own in blocks])
        self._mask = self._whole  # of the step that is under way
        self._rows: Sequence[StepRows] = ()  # likewise, for each lane, in a job with tables
        self._last_mask = self._whole  # that was made
        self.are_under_way = False

    def renew(self) -> bool:
        """Take over what the shards' last replies have offered, and `end` the last step. True if all have offered steps."""
        if self.are_under_way:
            self.end()
        self._ways = []
        ways: list[_Way] = []
        for lane in self._lanes:
            connection = lane.stepping
            if connection is None or (offer := connection.offered(self._gradients, self._parameters)) is None:
                return False
            ways.append(_Way(connection, offer, lane.traffic))
        made_for = [_without_epoch(way.offer) for way in ways]
        if self._steps is None or made_for != self._made_for:
            self._steps = self._laid_out([way.offer for way in ways])
            self._made_for = made_for
        if self._steps is None:
            return False
        for place, way in enumerate(ways):
            self._steps.arm(place, way.connection.fileno, way.offer.epoch)
        self._ways = ways
        self._is_in_memory = any(way.offer.in_memory for way in ways)
        return True

    def _laid_out(self, offers: Sequence[bulk_pb2.StepOffer]) -> WorkerSteps | None:
        """Steps as these offers say; None if that does not fit the layout."""
        steps = WorkerSteps(
            len(offers),
            versions=self._parameters.versions,
            sends_versions=self._sends_versions,
            scalars=offers[0].scalars,
            looked_at=self._looked_at,
            looks_out=self._looks_out,
        )
        layout = self._gradients.layout
        for place, (offer, blocks, lane) in enumerate(zip(offers, self._blocks, self._lanes, strict=True)):
            indices = [block.index for block in blocks]
            travels = [] if offer.in_memory else indices
            if (tables_block := layout.tables_block(lane.shard)) is not None:
                indices = [*indices, tables_block]
            if list(offer.blocks) != indices or offer.scalars != offers[0].scalars or offer.tables != len(layout.spec.tables):
                return None
            gradients = [self._gradients.block(index) for index in travels]
            parameters = [self._parameters.block(index) for index in travels]
            try:
                sizes = steps.lay_out(place, array("I", indices), offer.head_bytes, 0, gradients, parameters, offer.tables)
            except ValueError:
                return None
            if sizes != (offer.gradient_bytes, offer.parameter_bytes):
                return None
        return steps

    def run(
        self,
        session: int,
        clock: int,
        since: int,
        weight: float,
        scalars: Sequence[Sequence[float]],
        present: NDArray[np.bool_] | None,
        rows: Sequence[StepRows] = (),
    ) -> bool | None:
        """Make a push_pull of what is in the buffers. True: all shards have taken it, and counted it in all blocks. None:
        nothing was sent, because it must not be, or not so. False: `finish` it at each shard.

        Args:
            rows: for each lane, in a job with tables.

        Raises what a signal's handler raises; then `abandon` it.
        """
        steps, ways, segment = self._steps, self._ways, self._gradients.segment
        assert steps is not None
        if self._is_in_memory and segment is not None and segment.is_given_up:
            return None
        if rows and not all(each.fits for each in rows):
            return None
        self._mask = mask = self._whole if present is None else self._masked(present)
        for held, way in enumerate(ways):
            if not way.connection.hold(way.offer):
                for other in ways[:held]:
                    other.connection.let_go()
                return None
        self._rows = rows
        for place, each in enumerate(rows):
            places = ways[place].connection.places
            steps.give_rows(place, _placed(each.pushed, places), _placed(each.pulled, places))
        self._left.update(range(len(ways)))
        self.are_under_way = True
        took: bool | None = steps.run(session, clock, since, weight, scalars, mask.bits)
        for place, way in enumerate(ways):
            if took is not False or steps.state(place) in (TAKEN, UNSENT):
                way.connection.let_go()
            if took:
                self._count(place)
        if took is not False:
            self._left.clear()
            self._rows = ()  # their memory is the next call's
            self.are_under_way = took is True
        return took

    def _masked(self, present: NDArray[np.bool_]) -> _Mask:
        """The masks of a step."""
        key = present.tobytes()
        if self._last_mask.present != key:
            bits, sent_bytes = [], []
            for blocks in self._blocks:
                masks = [present[block.segment_tensors] for block in blocks]
                joined = b"".join([np.packbits(mask, bitorder="little").tobytes() for mask in masks])
                bits.append(joined + bytes(-len(joined) % 8))
                sent_bytes.append(sum([block.pushed_nbytes for block, mask in zip(blocks, masks, strict=True) if mask.any()]))
            self._last_mask = _Mask(key, bits, sent_bytes)
        return self._last_mask

    def finish(self, shard: int, call: Call) -> data_pb2.PushReply | None:
        """The reply of a shard that has taken its step; None: make the push as a call. Once for each step and shard, then None.

        Raises what a call raises.
        """
        place, steps = self._places[shard], self._steps
        if steps is None or place not in self._left:
            return None
        self._left.discard(place)
        way, state = self._ways[place], steps.state(place)
        if state == UNSENT or (state != TAKEN and not way.connection.finish(steps, place, call)):
            return None
        self._count(place)
        clock, counted, duplicate = steps.done(place)
        return data_pb2.PushReply(clock=clock, blocks_counted=counted, blocks_duplicate=duplicate)

    def _count(self, place: int) -> None:
        """Count the bytes of a step that a shard has taken."""
        traffic = self._ways[place].traffic
        traffic.sent_bytes += self._mask.sent_bytes[place]
        traffic.received_bytes += self._received_bytes[place]
        if self._rows:
            traffic.sent_bytes += self._rows[place].sent_bytes
            traffic.received_bytes += self._rows[place].received_bytes

    def end(self) -> None:
        """Note that nothing needs the last step any more. What is still under way of it is abandoned, with its connection."""
        left, self._left, self._rows, self.are_under_way = self._left, set(), (), False
        if not left:
            return
        assert self._steps is not None
        with ExitStack() as stack:  # whatever one of them raises
            for place in left:
                connection = self._ways[place].connection
                if self._steps.state(place) in (TAKEN, UNSENT):
                    connection.let_go()
                else:
                    connection.cancel_step()
                    stack.callback(connection.abandon_step)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A context after which `end` is called, whatever happens."""
        try:
            yield
        finally:
            self.end()


def _placed(
    rows: Sequence[TableRows], places: Callable[[Sequence[TableRows]], list[int]]
) -> dict[int, tuple[NDArray[np.uint64], NDArray[np.float32], int]]:
    """Rows by table, as WorkerSteps has them."""
    starts = places(rows) or [0] * len(rows)
    return {each.table: (each.ids, each.values, start) for each, start in zip(rows, starts, strict=True)}


def _without_epoch(offer: bulk_pb2.StepOffer) -> bulk_pb2.StepOffer:
    """The offer, as it stays when it is made again."""
    lasting = bulk_pb2.StepOffer()
    lasting.CopyFrom(offer)
    lasting.ClearField("epoch")
    return lasting
