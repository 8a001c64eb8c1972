"""Parameters and slots that the program loads in the midst of a job, on all workers at once; slots also the other way.

Shard 0 lets all workers wait until all have called, and chooses the one that sends the values to the shards; the others go on
when it has done so. Must not know frameworks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import NonFiniteGradient
from psd.contract.layout import Block
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Lane, Scope
from psd_client.worker.exchange.buffers import in_requests
from psd_client.worker.session.session import Session

POLL_S = 0.02


class SlotValues(NamedTuple):
    """The slots of one tensor.

    Attributes:
        arrays: flat arrays by the slot's name; a missing slot gets its initial value. steps: number that the tensor has made.
    """

    arrays: Mapping[str, NDArray[Any]]
    steps: int


class ParameterLoad:
    """Loads the parameters, or the slots, of one job for one worker.

    Args:
        parameters: the worker's buffers. wait_s: how long to wait for the other workers. timeout_s: the same, with the time for
            the data.
    """

    def __init__(
        self, rank: int, session: Session, shards: Shards, parameters: FlatBuffers, wait_s: float, timeout_s: float
    ) -> None:
        self._rank = rank
        self._session = session
        self._shards = shards
        self._parameters = parameters
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._seq = 0
        layout = parameters.layout
        self._blocks: dict[int, list[Block]] = {
            lane.shard: [b for b in layout.blocks_of(lane.shard) if not layout.spec.groups[b.group].is_of_buffers]
            for lane in shards.lanes
        }

    def run(self, write: Callable[[FlatBuffers], None]) -> None:
        """Set the parameters on all shards to what `write` writes. The last push must be confirmed. Fetch parameters then.

        Raises:
            NonFiniteGradient: a value is NaN or infinite; nothing was set.
            InvalidRequest: another worker was given other values; nothing was set.
            BarrierTimeout: not all workers have called this within the wait timeout.
        """
        self._parameters.is_filled = True
        write(self._parameters)
        tensor = self._parameters.first_nonfinite()
        if tensor is not None:
            text = f"worker {self._rank}: the value of {tensor!r} holds NaN or infinity; nothing was set"
            raise NonFiniteGradient(text, rank=self._rank, tensor=tensor)
        digest = hashlib.blake2b(digest_size=16)
        for blocks in self._blocks.values():
            for block in blocks:
                digest.update(self._parameters.block(block.index).data)
        lanes = [lane for lane in self._shards.lanes if self._blocks[lane.shard]]
        self._agree(digest.digest(), lambda shard: self._of_parameters(self._blocks[shard]), lanes)

    def run_slots(self, given: Mapping[int, SlotValues], groups: Set[int] | None = None) -> None:
        """Set these slots of tensors, by the tensors' index; all other slots, those of rows included, begin anew. The last push
        must be confirmed.

        Args:
            groups: those of one part of the job, in which the given tensors are: slots of other groups, and of rows, stay.

        Raises:
            NonFiniteGradient: a slot holds NaN or infinity; nothing was set.
            InvalidRequest: as in `run`; or the slots of a table's rows cannot begin anew, see ControlService.Load.
            BarrierTimeout: as in `run`.
        """
        digest = hashlib.blake2b(b"slots" if groups is None else f"slots of {sorted(groups)}".encode(), digest_size=16)
        tensors = self._parameters.layout.spec.tensors
        for index, slots in sorted(given.items()):
            digest.update(f"{index} {slots.steps}".encode())
            for name, array in sorted(slots.arrays.items()):
                if not np.isfinite(array).all():
                    tensor = tensors[index].name
                    text = f"worker {self._rank}: slot {name!r} of {tensor!r} holds NaN or infinity; nothing was set"
                    raise NonFiniteGradient(text, rank=self._rank, tensor=tensor)
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).data)
        self._agree(
            digest.digest(),
            lambda shard: self._of_slots(self._blocks[shard], given, groups),
            self._shards.lanes,
            resets_slots=groups is None,
        )

    def fetch_slots(self) -> dict[int, SlotValues]:
        """The slots of the tensors whose rule has any, by the tensors' index. The last push must be confirmed.

        Without rounds, and with backup workers, the others' pushes go on meanwhile: blocks are then of several versions.
        """
        spec, blocks = self._parameters.layout.spec, self._parameters.layout.blocks
        names = [group.info.slots(group.flags) for group in spec.groups]
        found: dict[int, SlotValues] = {}
        for number in range(max(map(len, names))):
            received = self._fetch(number + 1, [len(each) > number for each in names])
            for block, steps in received.steps.items():
                for tensor, made in zip(blocks[block].segment_tensors.tolist(), steps, strict=True):
                    known = found.get(tensor, SlotValues({}, 0))
                    slot = {names[blocks[block].group][number]: received.views[tensor].reshape(-1)}
                    found[tensor] = SlotValues({**known.arrays, **slot}, max(known.steps, made))
        return found

    def _fetch(self, slot: int, is_there: Sequence[bool]) -> FlatBuffers:
        """Fetch a slot, by its number from 1, of the blocks that have it. is_there: by group, whether its rule has it."""
        buffers = FlatBuffers(self._parameters.layout)
        wanted = {shard: [each for each in blocks if is_there[each.group]] for shard, blocks in self._blocks.items()}

        def pull_at(lane: Lane, call: Call) -> None:
            caller, digest = self._session.caller(lane.shard), buffers.layout.digest
            indexes = [block.index for block in wanted[lane.shard]]
            request = data_pb2.PullRequest(
                caller=caller, clock=self._session.clock, layout_digest=digest, blocks=indexes, slot=slot
            )
            lane.pull(request, wanted[lane.shard], buffers, call)

        for attempt in self._session.attempts():
            with attempt:
                lanes = [lane for lane in self._shards.lanes if wanted[lane.shard]]
                self._shards.run(pull_at, self._timeout_s, lanes, is_bulk=True)
        return buffers

    def _agree(
        self,
        digest: bytes,
        requests: Callable[[int], Iterator[data_pb2.ParametersRequest]],
        lanes: Iterable[Lane],
        *,
        resets_slots: bool = False,
    ) -> None:
        """Wait until all workers have come. If shard 0 chooses this one, send the requests to each shard."""
        self._session.catch_up()
        self._seq += 1

        def set_at(lane: Lane, call: Call) -> None:
            for request in requests(lane.shard):
                self._set_at(lane, call, request)

        for attempt in self._session.attempts():
            with attempt:
                if self._ask(digest, self._wait_s, resets_slots=resets_slots).sets:
                    self._await_cuts()
                    try:
                        self._shards.run(set_at, self._timeout_s, list(lanes))
                    finally:
                        self._session.cuts.set_ready(True)
                    self._ask(digest, self._timeout_s, is_set=True, resets_slots=resets_slots)

    def _await_cuts(self) -> None:
        """Make sure that no cut without rounds has values that only some shards have: this worker chooses no position until all
        shards have them, and waits until shards have taken the cuts for which it has chosen one. The other workers wait
        meanwhile, and push nothing."""
        self._session.cuts.set_ready(False)
        deadline = self._session.now() + self._timeout_s
        while self._session.cuts.is_held_to and self._session.now() < deadline:
            Scope().sleep(POLL_S)

    def _ask(
        self, digest: bytes, timeout_s: float, *, is_set: bool = False, resets_slots: bool = False
    ) -> control_pb2.LoadReply:
        def load_at(lane: Lane, call: Call) -> control_pb2.LoadReply:
            caller, clock = self._session.caller(lane.shard), self._session.clock
            return lane.load(
                control_pb2.LoadRequest(
                    caller=caller, digest=digest, clock=clock, seq=self._seq, is_set=is_set, resets_slots=resets_slots
                ),
                call,
            )

        (reply,) = self._shards.run(load_at, timeout_s, self._shards.lanes[:1])
        return reply

    def _set_at(self, lane: Lane, call: Call, request: data_pb2.ParametersRequest) -> None:
        request.caller.CopyFrom(self._session.caller(lane.shard))
        request.layout_digest, request.clock, request.seq = self._parameters.layout.digest, self._session.clock, self._seq
        lane.set_parameters(request, call)

    def _of_parameters(self, of_shard: list[Block]) -> Iterator[data_pb2.ParametersRequest]:
        for blocks, _ in in_requests(of_shard):
            request = data_pb2.ParametersRequest()
            for block in blocks:
                request.parameters.add(block=block.index, payload=self._parameters.block(block.index).tobytes())
            yield request

    def _of_slots(
        self, of_shard: list[Block], given: Mapping[int, SlotValues], groups: Set[int] | None
    ) -> Iterator[data_pb2.ParametersRequest]:
        for block in of_shard:
            pieces = list(self._parameters.pieces(block.index))
            if block.group not in groups if groups is not None else not any(tensor in given for tensor, _ in pieces):
                continue
            group = self._parameters.layout.spec.groups[block.group]
            starts = group.info.slot_starts(group.flags, group.constants)
            steps = [given[tensor].steps if tensor in given else 0 for tensor, _ in pieces]
            for number, (name, start) in enumerate(zip(group.info.slots(group.flags), starts, strict=True), 1):
                values = np.full(block.length, start, block.dtype)
                begin = 0
                for tensor, elements in pieces:
                    end = begin + elements.stop - elements.start
                    if tensor in given and name in given[tensor].arrays:
                        values[begin:end] = given[tensor].arrays[name][elements]
                    begin = end
                request = data_pb2.ParametersRequest()
                request.parameters.add(block=block.index, payload=values.tobytes(), slot=number, steps=steps)
                yield request
        if groups is None:
            yield data_pb2.ParametersRequest(resets_slots=True)
