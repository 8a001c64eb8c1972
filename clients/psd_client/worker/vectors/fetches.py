"""Fetches of server-side vectors: asks each shard for its part, and puts the answers together into one array.

For workers and readers. A request is so small that neither side holds more than some MiB of indices. Must not know sessions or
programs' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.vectors import FETCH_BYTES_MAX, spec_message
from psd.v1 import vectors_pb2
from psd_client.lanes.shards import THROUGHPUT_MIN, Shards
from psd_client.lanes.transport import Call, Lane
from psd_core.vector import VectorSpec
from psd_core.vector_operations import extent

INDICES_MAX = 1 << 19
"""Most indices in one request."""


class Fetches:
    """Fetches from all shards.

    Args:
        asker: returns the fields that identify, in a request to a shard, the caller: a worker, or a reader of some run.
        timeout_s: limit for each set of requests to all shards, without the time for moving the numbers.
    """

    def __init__(self, shards: Shards, asker: Callable[[int], Mapping[str, Any]], timeout_s: float) -> None:
        self._shards = shards
        self._asker = asker
        self._timeout_s = timeout_s

    def stretch(self, spec: VectorSpec, first: int, last: int) -> NDArray[Any]:
        """Elements of a range: a new array (last - first,)."""
        out: NDArray[Any] = np.empty(last - first, spec.dtype)
        view, itemsize = out.data.cast("B"), out.itemsize
        portion = FETCH_BYTES_MAX // itemsize

        def fetch(lane: Lane, call: Call) -> None:
            begin, end = extent(spec.size, lane.shard, len(self._shards.lanes))
            low, high = max(first, begin), min(last, end)
            for start in range(low, high, portion):
                stop = min(start + portion, high)
                asked = vectors_pb2.VectorFetch(vector=spec_message(spec), start=start, stop=stop, **self._asker(lane.shard))
                part = view[(start - first) * itemsize : (stop - first) * itemsize]
                lane.fetch_vector(asked, part, call)

        self._run(fetch, [lane for lane in self._shards.lanes if self._has(lane, spec, first, last)], out.nbytes)
        return out

    def at(self, spec: VectorSpec, places: NDArray[np.int64], *, of_rows: bool) -> NDArray[Any]:
        """Elements at indices, or rows by number, end to end: a new array."""
        length = spec.columns if of_rows else 1
        out: NDArray[Any] = np.empty((len(places), length), spec.dtype)
        portion = max(1, min(INDICES_MAX, FETCH_BYTES_MAX // (length * out.itemsize)))
        for start in range(0, len(places), portion):
            part = slice(start, start + portion)
            low, high = int(places[part].min()) * length, (int(places[part].max()) + 1) * length
            lanes = [lane for lane in self._shards.lanes if self._has(lane, spec, low, high)]
            fetch = partial(self._fetch_at, spec, places[part], out[part], of_rows)
            self._run(fetch, lanes, out[part].nbytes)
        return out.reshape(-1)

    def _fetch_at(
        self, spec: VectorSpec, places: NDArray[np.int64], out: NDArray[Any], of_rows: bool, lane: Lane, call: Call
    ) -> None:
        begin, end = extent(spec.size, lane.shard, len(self._shards.lanes))
        length = out.shape[1]
        starts = places * length
        is_here = (starts < end) & (starts + length > begin)
        wanted = places[is_here]
        if not wanted.size:
            return
        asked = {"rows" if of_rows else "indices": wanted.astype("<i8", copy=False).tobytes()}
        request = vectors_pb2.VectorFetch(vector=spec_message(spec), **asked, **self._asker(lane.shard))
        first, last = np.maximum(starts[is_here], begin), np.minimum(starts[is_here] + length, end)
        numbers: NDArray[Any] = np.empty(int((last - first).sum()), spec.dtype)
        lane.fetch_vector(request, numbers.data.cast("B"), call)
        if len(numbers) == len(wanted) * length:
            out[is_here] = numbers.reshape(-1, length)
        else:  # shards share rows, of which each has a part
            elements = starts[is_here, None] + np.arange(length)
            here, columns = np.nonzero((elements >= begin) & (elements < end))
            out[np.flatnonzero(is_here)[here], columns] = numbers

    def _has(self, lane: Lane, spec: VectorSpec, first: int, last: int) -> bool:
        begin, end = extent(spec.size, lane.shard, len(self._shards.lanes))
        return first < end and last > begin

    def _run(self, fetch: Callable[[Lane, Call], None], lanes: list[Lane], nbytes: int) -> None:
        if lanes:
            self._shards.run(fetch, self._timeout_s + nbytes / THROUGHPUT_MIN, lanes, is_bulk=True)
