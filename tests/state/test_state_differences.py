"""Parameters as workers have them, at the shard: whose version a difference is for, and what outlives a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shard_driver import Driver, job_spec

from psd.contract.compression import Compression
from psd.contract.errors import InvalidRequest
from psd.state.aggregation.outgoing import Shown, follow
from psd.v1 import data_pb2

DATA = np.arange(3, dtype=np.uint8)


@pytest.mark.parametrize(
    ("held", "version", "expected"),
    [
        (3, 9, None),  # it lacks more than one difference
        (4, 9, "difference"),  # rounds of other parts have closed meanwhile
        (6, 9, "difference"),
        (6, 7, "difference"),
        (7, 9, "nothing"),
        (9, 9, "nothing"),
        (10, 9, None),  # nobody can
        (5, 6, None),  # the page is of the version before
        (6, 6, None),
    ],
)
def test_a_difference_is_for_those_who_have_the_copy_before(held: int, version: int, expected: str | None) -> None:
    """Versions that have changed nothing count as the one before them."""
    found = Shown(7, 4, DATA).difference_for(held, version)

    assert {None: None, "difference": DATA.tolist(), "nothing": []}[expected] == (None if found is None else found.tolist())


def test_after_a_load_nobody_holds_anything_until_all_numbers_have_come() -> None:
    """Workers hold the same version as it was before the load."""
    shown = Shown.anew(5 + 1)
    assert shown.difference_for(5, 5) is None
    shown = Shown(6, shown.since, DATA)

    assert shown.difference_for(5, 6) is None
    assert Shown(7, shown.since, DATA).difference_for(6, 7) is DATA


def test_a_difference_without_form_is_followed_by_all_numbers() -> None:
    """Workers then get what the shard has."""
    values, before, after = np.array([np.inf, 1], np.float32), np.zeros(2, np.float32), np.empty(2, np.float32)

    assert follow("int8", values, before, after) is None
    assert after.tolist() == [np.inf, 1]
    assert Shown(3, 2, None).difference_for(2, 3) is None


def driver(**more: Any) -> Driver:
    return Driver(job_spec(1, size=1000, dtype="float32", compression=Compression(pull="int8")), **more)


def page_of(shard: Driver) -> Any:
    return shard.core.declared().blocks[0]._page


def test_the_copy_is_in_the_page_of_its_version_also_for_the_shards_next_process(tmp_path: Any) -> None:
    """To the bit, though it is not the masters."""
    shard = driver(state_dir=str(tmp_path))
    (seat,) = shard.start()
    for clock in range(3):
        shard.push(seat, clock, np.linspace(-1, 1, 1000, dtype=np.float32) * np.float32(clock + 1))
    page = page_of(shard)
    master, (copy,) = page.parameter.copy(), (array.copy() for array in page.extra)
    assert not np.array_equal(master, copy)
    assert np.abs(master - copy).max() <= 3 / 127
    shard.restart(seat)

    page = page_of(shard)
    assert (page.parameter.tobytes(), page.extra[0].tobytes()) == (master.tobytes(), copy.tobytes())


@pytest.mark.parametrize("call", ["push", "pull"])
@pytest.mark.parametrize(("is_asked", "held"), [(True, [1, 1]), (True, [1] * 3), (False, [1])])
def test_held_when_it_has_not_one_entry_for_each_block_then_it_is_refused(is_asked: bool, held: list[int], call: str) -> None:
    """Or any, in a job that pulls no differences. Nothing has changed then."""
    shard = driver() if is_asked else Driver(job_spec(1, size=1000, dtype="float32"))
    (seat,) = shard.start()
    before = shard.fingerprint()

    expected = "1, one per trained block" if is_asked else "none in this job"
    with pytest.raises(InvalidRequest, match=f"held: expected {expected}, got {len(held)}"):
        if call == "push":
            shard.begin_push(seat, 0, held=held)
        else:
            request = data_pb2.PullRequest(caller=seat.caller, layout_digest=shard.layout.digest, held=held)
            shard.shard.exchange.begin_pull(request)
    assert shard.fingerprint() == before
