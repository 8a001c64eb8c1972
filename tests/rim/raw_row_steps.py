"""A worker of a job with tables that makes steps, over raw sockets and structures; see raw_steps.py."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from raw_bulk import error_in, send
from raw_steps import DONE, HAS_VERSIONS, HEAD, Again, StepWorker, eights

from psd.contract.rows import TableRows, parts_of, payload_of, tables_present
from psd.contract.wire import Kind
from psd.v1 import bulk_pb2, data_pb2

ROWS = struct.Struct("<5Q")
AREA = 1 << 16
"""Bytes of memory for the rows of one direction."""

Pushed = Mapping[int, tuple[NDArray[np.uint64], NDArray[np.float32]]]
"""By table ids and gradients."""
Pulled = Mapping[int, NDArray[np.uint64]]


class RowsDone(NamedTuple):
    """The answer to a push, by whatever way it came. rows: those that were pulled."""

    clock: int
    counted: int
    duplicate: int
    versions: list[int]
    parameters: list[list[float]]
    rows: dict[int, list[list[float]]]


class RowStepWorker(StepWorker):
    """A worker of a job of small blocks and tables. job: as a message, which has some.

    Attributes:
        in_memory: with memory attached, rows lie there; else they travel.
    """

    extra_bytes = 2 * AREA

    def __init__(self, *args: Any, in_memory: bool = True, **how: Any) -> None:
        super().__init__(*args, **how)
        self.in_memory = in_memory and self.lane == "memory"
        self.dims = [table.dim for table in self.job.tables]

    @property
    def tables_block(self) -> int:
        """Index of the tables' block."""
        return self.blocks

    def open(self) -> None:
        super().open()
        if self.lane == "memory":
            self.rows_start = 64 + self.apart * self.blocks * 3

    def _placed(self, start: int, rows: Sequence[TableRows]) -> list[int]:
        """Offsets of rows' values, one behind the other."""
        found, at = [], start
        for each in rows:
            found.append(at)
            at += eights(each.values.nbytes)
        assert at <= start + AREA
        return found

    def _write(self, starts: Sequence[int], rows: Sequence[TableRows]) -> None:
        with mmap.mmap(self.memory, 0) as mapped:
            for start, each in zip(starts, rows, strict=True):
                mapped[start : start + each.values.nbytes] = each.values.tobytes()

    def _read(self, starts: Sequence[int], rows: Sequence[TableRows]) -> dict[int, list[list[float]]]:
        with mmap.mmap(self.memory, 0) as mapped:
            found = [np.frombuffer(mapped, np.float32, each.values.size, at) for at, each in zip(starts, rows, strict=True)]
            rows_of = {each.table: one.reshape(each.values.shape).tolist() for each, one in zip(rows, found, strict=True)}
            del found  # views of what is unmapped now
            return rows_of

    def _wanted(self, pulled: Pulled) -> list[TableRows]:
        return [TableRows(table, ids, np.zeros((len(ids), self.dims[table]), np.float32)) for table, ids in pulled.items()]

    # -- the long way --------------------------------------------------------------------------------------------------

    def push_rows(self, values: Sequence[float], clock: int, pushed: Pushed, pulled: Pulled, **more: Any) -> RowsDone:
        """A push_pull as a call. more: further fields of the header."""
        given = [TableRows(table, ids, grads) for table, (ids, grads) in pushed.items()]
        asked = self._wanted(pulled)
        header = data_pb2.PushHeader(
            caller=self.caller,
            clock=clock,
            weight=more.pop("weight", 1.0),
            layout_digest=self.digest,
            scalars=[data_pb2.GroupScalars(values=own) for own in self.scalars],
            **more,
        )
        into = self.lane == "memory"
        call = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PUSH_PULL, timeout_s=30, wants_steps=True, into_memory=into)
        if pulled:
            call.ahead.rows.extend(parts_of(asked))
            call.ahead.payload = b"".join([each.ids.tobytes() for each in asked])
            call.ahead.last = True
        self.stream.send(Kind.CALL, call.SerializeToString())
        gradients = self._gradients(values)
        if into and self.blocks:
            self._remember(gradients)
            frames = [data_pb2.PushFrame(in_memory=range(self.blocks))]
        else:
            frames = [data_pb2.PushFrame(block=i, payload=gradients[i].tobytes()) for i in range(self.blocks)]
        frames.append(
            data_pb2.PushFrame(
                block=self.tables_block,
                rows=parts_of(given),
                payload=b"".join([piece.tobytes() for piece in payload_of(given)]),
                present=tables_present(given, len(self.dims)),
                last=True,
            )
        )
        frames[0].push.CopyFrom(header)
        send(self.stream, frames)
        return self._answered(asked)

    def _answered(self, asked: Sequence[TableRows]) -> RowsDone:
        versions, parameters, rows = [0] * (self.blocks + 1), [[0.0]] * self.blocks, {}
        answered: set[int] = set()
        while True:
            kind, head, nbytes = self.stream.receive()
            if kind is Kind.ANSWER and len(answered) == self.blocks + 1 - (self.blocks + 1 if self.lane == "memory" else 0):
                frame = data_pb2.RowsFrame.FromString(head)
                versions[self.tables_block] = frame.version
                for each in asked:
                    self.stream.read_into(each.values.data.cast("B")) if len(each.ids) else None
                    rows[each.table] = each.values.tolist()
                continue
            if kind is Kind.ANSWER:
                pull = data_pb2.PullFrame.FromString(head)
                answered.add(pull.block)
                versions[pull.block] = pull.version
                if pull.block < self.blocks:
                    numbers = np.empty(self.plans[pull.block].length, self.plans[pull.block].dtype)
                    self.stream.read_into(numbers.data.cast("B"))
                    parameters[pull.block] = numbers.tolist()
                continue
            if kind is Kind.ALIVE:
                continue
            if kind is Kind.ERROR:
                raise error_in(head)
            assert (kind, nbytes) == (Kind.REPLY, 0)
            reply = bulk_pb2.BulkReply.FromString(head)
            self.offer = reply.step if reply.HasField("step") else None
            if self.lane == "memory":
                parameters = self._parameters(0)
                of = dict(zip(reply.blocks, reply.versions, strict=True))
                versions = [max(of[i], versions[i]) for i in range(self.blocks + 1)]
            push = reply.push
            return RowsDone(push.clock, push.blocks_counted, push.blocks_duplicate, versions, parameters, rows)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def send_rows(self, values: Sequence[float], clock: int, pushed: Pushed, pulled: Pulled, **named: Any) -> list[Any]:
        """Send a step; returns what `receive_rows` needs. named: versions, weight, since; head: rows by table, in place
        of what is right."""
        offer = self.offer
        assert offer is not None
        assert offer.tables == len(self.dims)
        given = [TableRows(table, ids, grads) for table, (ids, grads) in pushed.items()]
        asked = self._wanted(pulled)
        versions = named.get("versions", ())
        front = HEAD.pack(
            offer.epoch, self.session, clock, named.get("since", 0), named.get("weight", 1.0), HAS_VERSIONS * bool(versions), 0
        )
        front += struct.pack(f"<{self.blocks + 1}Q", *(versions or [0] * (self.blocks + 1)))
        front += struct.pack(f"<{offer.scalars}d", *[each for own in self.scalars for each in own])
        front = front.ljust(offer.head_bytes - ROWS.size * offer.tables, b"\0")
        at, to = [0] * len(given), [0] * len(asked)
        if self.in_memory:
            at, to = self._placed(self.rows_start, given), self._placed(self.rows_start + AREA, asked)
            self._write(at, given)
        by_table: dict[int, list[int]] = {table: [0, 0, 0, 0, 0] for table in range(offer.tables)}
        for start, each in zip(at, given, strict=True):
            by_table[each.table] = [len(each.ids), 0, start, 0, 1]
        for start, each in zip(to, asked, strict=True):
            by_table[each.table][1], by_table[each.table][3] = len(each.ids), start
        by_table |= named.get("head", {})
        front += b"".join([ROWS.pack(*by_table[table]) for table in range(offer.tables)])
        payload = b""
        gradients = self._gradients(values)
        if self.lane == "memory":
            self._remember(gradients)
        else:
            payload = b"".join([each.tobytes().ljust(eights(each.nbytes), b"\0") for each in gradients])
        ids_of, wants = {each.table: each for each in given}, {each.table: each for each in asked}
        for table in range(offer.tables):
            payload += b"".join([of[table].ids.tobytes() for of in (ids_of, wants) if table in of])
        for table in range(offer.tables) if not self.in_memory else ():
            if table in ids_of:
                payload += ids_of[table].values.tobytes().ljust(eights(ids_of[table].values.nbytes), b"\0")
        self.stream.send(Kind.STEP, front, payload)
        return [asked, to]

    def receive_rows(self, sent: list[Any]) -> RowsDone | Again:
        """Receive the answer to a step."""
        asked, to = sent
        if isinstance(found := self.receive_done(), Again):
            return found
        head, payload = found
        clock, counted, duplicate = DONE.unpack_from(head)
        versions = list(struct.unpack_from(f"<{self.blocks + 1}Q", head, DONE.size))
        parameters, at = self.parameters_in(payload, 0)
        if self.in_memory:
            rows = self._read(to, asked)
        else:
            rows = {}
            for each in sorted(asked, key=lambda each: each.table):
                numbers = np.frombuffer(payload, np.float32, each.values.size, at)
                rows[each.table] = numbers.reshape(each.values.shape).tolist()
                at += eights(each.values.nbytes)
        assert at == len(payload)
        return RowsDone(clock, counted, duplicate, versions, parameters, rows)

    def train_rows(
        self, values: Sequence[float], clock: int, pushed: Pushed, pulled: Pulled, **named: Any
    ) -> tuple[RowsDone, bool]:
        """A step if that is offered and taken, else the long way, under the same name; and whether it was a step."""
        if self.offer is not None:
            found = self.receive_rows(self.send_rows(values, clock, pushed, pulled, **named))
            if isinstance(found, RowsDone):
                return found, True
        return self.push_rows(values, clock, pushed, pulled, **named), False
