"""A share of the learners in each exchange: those who sit out go on, and every step counts once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from client_faults import in_threads  # noqa: E402
from learners import SUM, Walker  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

OPTIONS = {"reduce": "sum"}
"""Each difference that counts moves the job by as much as the learner has moved: what the job has is a count of steps."""


def left_of(walker: Walker) -> list[float]:
    """By fragment, what the learner has learned and no round has counted."""
    return [float(walker.optimizer._base[index][0] - walker.place[index]) for index in range(2)]


@pytest.mark.parametrize("quorum", [None, 1])
def test_every_step_counts_once_while_some_take_part_and_some_leave(cluster: Any, quorum: int | None) -> None:
    """Six learners, two of them in a round; they end one after the other, and the first is there until nobody else is."""
    servers, world, steps = cluster(2).servers, 6, [0, 40, 40, 30, 20, 10]
    local = psd.Local(steps=4, outer=SUM, fragments=2, sample=1 / 3)
    left: dict[int, list[float]] = {}
    made: dict[int, int] = {}
    members: dict[int, set[int]] = {}
    everybody = threading.Barrier(world)

    def learn(rank: int) -> list[float]:
        with psd_client.connect(servers, rank, world) as ps:
            walker = Walker(ps, local, **OPTIONS, quorum=quorum)
            everybody.wait()
            begun = walker.optimizer.local_step
            walker.optimizer.on_exchange = lambda each: members.setdefault(each.clock, set()).update([rank][: each.is_counted])
            while walker.optimizer.local_step < begun + steps[rank] or (rank == 0 and len(made) < world - 1):
                walker.walk()
            left[rank], made[rank] = left_of(walker), walker.optimizer.local_step - begun
            walker.optimizer.pull()
            return walker.place

    place, *_ = in_threads(*(lambda rank=rank: learn(rank) for rank in range(world)))

    counted = [sum(each[index] for each in left.values()) - place[index] for index in range(2)]
    assert counted == [float(sum(made.values()))] * 2
    assert len({rank for ranks in members.values() for rank in ranks}) >= 3
    assert max(map(len, members.values())) == (2 if quorum is None else 1)


@pytest.mark.parametrize("share", [0, 1.5, -1, True, "half"])
def test_what_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises((InvalidRequest, TypeError), match=r"local\.sample"):
        psd.Local(steps=1, sample=share)


def test_a_share_needs_rounds(cluster: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with psd_client.connect(cluster(1).servers, 0, 1) as ps, pytest.raises(InvalidRequest, match=r"sample: is 0\.5, but only"):
        adam = torch.optim.Adam(model.parameters())
        psd.distribute(model, adam, local=psd.Local(steps=1, sample=0.5), ps=ps, consistency="async")


def test_with_a_delay_nobody_stands_still_for_those_who_are_chosen(cluster: Any) -> None:
    """Two of two are chosen, and one never comes: the other one goes on, beyond the delay."""
    servers, local = cluster(1).servers, psd.Local(steps=2, outer=SUM, delay=1, sample=1.0)
    with psd_client.connect(servers, 1, 2) as absent, psd_client.connect(servers, 0, 2) as there:
        first, second = in_threads(lambda: Walker(there, local, **OPTIONS), lambda: Walker(absent, local, **OPTIONS))
        exchanges: list[Any] = []
        first.optimizer.on_exchange = exchanges.append
        while not first.optimizer._flights:
            first.walk()
        assert first.walk(20)[0] == -float(first.optimizer.local_step)
        assert not first.optimizer._flights[0].ended.is_set()

        second.optimizer.close()

        assert first.optimizer._flights[0].ended.wait(60)
        first.walk()
        assert [each.is_counted for each in exchanges] == [True]
