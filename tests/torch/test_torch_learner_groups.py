"""Learners that are groups of processes: each of two ranks, in processes of their own, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import group_ranks  # noqa: E402
from group_ranks import LOCAL, Ranks  # noqa: E402
from helpers_torch import assert_close  # noqa: E402
from learners import OUTER  # noqa: E402
from test_torch_local import simulated  # noqa: E402

import psd_client.torch as psd  # noqa: E402

pytestmark = pytest.mark.process


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def tokens(step: int, learner: int) -> int:
    """Of a learner's ranks together."""
    return 1 + (step + learner) % 3


def tensors(found: Any) -> list[Any]:
    assert not isinstance(found, str), found
    return [torch.from_numpy(value) for value in found]


@pytest.mark.parametrize(
    ("kind", "local"),
    [("plain", psd.Local(steps=4, outer=OUTER)), ("ddp", LOCAL), ("fsdp", LOCAL), ("fsdp", replace(LOCAL, delay=4))],
    ids=["plain", "ddp", "fsdp", "two under way"],
)
def test_groups_have_the_numbers_of_a_simulation_in_one_process(
    cluster: Any, ranks: Ranks, kind: str, local: psd.Local
) -> None:
    """The tokens of a learner's ranks count together, and all of them have the same parameters."""
    expected = simulated(local, 2, 15, tokens)
    servers = cluster(2).servers

    started = [ranks.start(group_ranks.train, servers, kind, local, 15, learner=learner, learners=2) for learner in range(2)]
    found = [[tensors(rank.hear()) for rank in group] for group in started]

    for (first, other), right in zip(found, expected, strict=True):
        assert_close(first, right, 1e-5)
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_learner_one_of_whose_ranks_is_killed_ends_and_comes_back(cluster: Any, ranks: Ranks, killed: int) -> None:
    """The other learner goes on meanwhile; the group that is started again is at the job's last exchange."""
    shards = cluster(1)
    local = psd.Local(steps=4, outer=OUTER, fragments=2)
    lasting = ranks.start(group_ranks.train, shards.servers, "ddp", local, 12, True, learner=0, learners=2)
    struck = ranks.start(group_ranks.train, shards.servers, "ddp", local, 12, True, learner=1, learners=2)
    _walk([*lasting, *struck], 1, 5)
    assert [rank.hear() for rank in struck] == [5, 5]

    struck[killed].kill()
    survivor = struck[1 - killed]
    survivor.let_go()
    assert "Error" in survivor.hear()
    survivor.process.join(group_ranks.TIMEOUT_S)
    if killed == 0:
        _expire(shards.shards[0].shard, 1)
    _walk(lasting, 5, 9)  # past the exchanges after 6 and 8
    back = ranks.start(group_ranks.train, shards.servers, "ddp", local, 12, True, learner=1, learners=2)
    _walk([*lasting, *back], 9, 13)

    found = [tensors(rank.hear()) for rank in [*lasting, *back]]
    for one, other in (found[:2], found[2:]):
        assert all(map(torch.equal, one, other))
    exchanged = [index for index in range(6) if torch.equal(found[0][index], found[2][index])]
    assert exchanged  # the last exchange, after step 12, was of both learners


def _expire(shard: Any, rank: int) -> None:
    """Let a learner's lease run out now."""
    with shard._core.lock:
        shard._core.members.worker(rank).last_seen -= 1000
        shard.tick()


def _walk(ranks: list[Any], start: int, stop: int) -> None:
    """Let ranks make the steps from `start` on, before `stop`."""
    for step in range(start, stop):
        for rank in ranks:
            assert rank.hear() == step
        for rank in ranks:
            rank.let_go()


def test_an_error_of_rank_0_is_raised_on_all_ranks_and_the_exchange_is_made_again(cluster: Any, ranks: Ranks) -> None:
    started = ranks.start(group_ranks.fail_once, cluster(2).servers, 15)
    (seen, clock, first), (told, *others) = (rank.hear() for rank in started)

    assert seen == "4: as ordered"  # begun after step 2, and due two steps later
    assert told == "4: rank 0 of the learner's group: as ordered"
    assert clock == 7
    assert all(map(torch.equal, tensors(first), tensors(others[1])))


def test_an_end_of_the_job_reaches_all_ranks(cluster: Any, ranks: Ranks) -> None:
    started = ranks.start(group_ranks.stop, cluster(1).servers, 5)
    first, other = (rank.hear() for rank in started)

    assert first == other
    end, clock, is_over = first
    assert is_over
    assert end == clock


def test_pull_gives_all_ranks_the_jobs_parameters(cluster: Any, ranks: Ranks) -> None:
    """An evaluation between two of them leaves nothing of the earlier values behind."""
    started = ranks.start(group_ranks.pull, cluster(1).servers)
    (losses, step, found), other = (rank.hear() for rank in started)

    assert step == 8
    assert losses == other[0]
    assert losses[0] != losses[1]
    model = group_ranks.network()
    for parameter, value in zip(model.parameters(), tensors(found), strict=True):
        parameter.data.copy_(value)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).sum().item() == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (group_ranks.unequal_calls, [None, "pull: rank 0 of the learner's group calls stop"]),
        (group_ranks.unequal_models, ["group: rank 1 has another model than rank 0"] * 2),
        (group_ranks.far_mesh, ["has parts on process 1 of torch.distributed, which is not in the", "on process 0"]),
        (group_ranks.unconnected, [None, "ps.log: this rank of the learner's group has no connection"]),
        (group_ranks.ranks_of_torchrun, ["RANK is 0, which with group= is not the learner's number", "RANK is 0"]),
        (group_ranks.no_group, ["group: expected a process group such as"] * 2),
        (group_ranks.without_local, ["group: only with local"] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_goes_wrong_in_a_group_is_said_on_its_ranks(
    cluster: Any, ranks: Ranks, program: Any, texts: list[str | None]
) -> None:
    started = ranks.start(program, cluster(1).servers)

    for rank, text in reversed(list(zip(started, texts, strict=True))):
        if text is not None:
            assert text in rank.hear()


def test_shards_that_do_not_answer_are_told_of_on_all_ranks(ranks: Ranks) -> None:
    for rank in ranks.start(group_ranks.nobody_there, "127.0.0.1:1"):
        assert rank.hear().startswith("ShardUnavailable")
