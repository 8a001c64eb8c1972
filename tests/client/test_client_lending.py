"""Parameters of large models, which are returned where they were received: they stay as they are while anybody has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psd_client
from psd_client.client import worker_of
from psd_client.lanes.segment import ALIGN_BYTES, Segment

ELEMENTS = 300_000


@pytest.fixture(params=["shm", "tcp", "grpc"])
def ps(request: pytest.FixtureRequest, cluster: Callable[..., Any]) -> Any:
    """A worker whose pushes of minus one add one to its parameters, which were zero."""
    with psd_client.connect(cluster(2).servers, 0, 1, transport=request.param) as connected:
        yield connected


def declare(ps: psd_client.ParameterServer) -> dict[str, Any]:
    values = {"w": np.zeros(ELEMENTS, np.float32), "empty": np.zeros((0, 2)), "h": np.zeros(3, np.float16), "s": np.float64(0)}
    return ps.declare(values, psd_client.SGD(lr=1))


def step(ps: psd_client.ParameterServer) -> dict[str, Any]:
    return ps.push_pull({"w": np.full(ELEMENTS, -1, np.float32), "h": np.full(3, -1, np.float16), "s": -1.0})


def test_pull_when_the_program_keeps_everything_then_nothing_of_it_changes(ps: psd_client.ParameterServer) -> None:
    """However many it keeps, and what it writes there is its own, too."""
    kept = [declare(ps)]
    for _ in range(5):
        kept.append(step(ps))
        kept[-1]["w"][0] = -7

    for number, params in enumerate(kept):
        assert params["w"].tolist()[1:] == [number] * (ELEMENTS - 1)
        assert (params["h"].tolist(), params["s"], params["empty"].shape) == ([number] * 3, number, (0, 2))
        assert params["h"].dtype == np.float16
    assert ps.pull()["w"][0] == 5


def test_push_pull_when_the_program_lets_go_of_what_it_had_then_two_places_are_enough(ps: psd_client.ParameterServer) -> None:
    """The usual loop: it has the last parameters while it gets the next ones."""
    params = declare(ps)
    addresses = set()
    for number in range(6):
        assert (params["w"] == number).all()
        addresses.add(params["w"].ctypes.data)
        params = step(ps)

    assert len(addresses) == 2


def test_push_pull_when_a_piece_is_still_held_then_its_place_is_left_alone(ps: psd_client.ParameterServer) -> None:
    """Whatever it was made by: here a slice of a reshaped array."""
    piece = declare(ps)["w"].reshape(3, -1)[1, 5:9]
    for number in range(1, 5):
        assert (step(ps)["w"] == number).all()

    assert piece.tolist() == [0.0] * 4


def test_push_pull_when_the_process_has_forked_then_the_childs_parameters_stay_as_they_are(
    ps: psd_client.ParameterServer,
) -> None:
    """It may have shared memory, and its parent does not know what it holds."""
    params = declare(ps)
    place = params["w"].ctypes.data
    worker_of(ps).declared.places.on_fork()  # what os.fork calls; a child of a process with threads of gRPC is not for tests
    del params
    for number in range(1, 5):
        params = step(ps)
        assert (params["w"] == number).all()
        assert params["w"].ctypes.data != place


def test_the_system_calls_what_watches_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every place in shared memory, once for each child."""
    from psd_client.worker.exchange import lending

    class Places:
        forks = 0

        def on_fork(self) -> None:
            self.forks += 1

    places = Places()
    monkeypatch.setattr(lending, "_sharing", {places})
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    assert places.forks == 1


def test_a_forked_child_writes_to_memory_of_its_own() -> None:
    """Such as one that evaluates, and sets gradients to zero: those are its parent's to send."""
    segment = Segment(1 << 20)
    array, _ = segment.zeros(1 << 18, np.dtype(np.float32))
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] += 1
        os._exit(int(array.sum() != 2 * array.size))

    assert os.waitpid(child, 0)[1] == 0
    assert (array == 1).all()
    assert segment.where([array]) == [ALIGN_BYTES]
