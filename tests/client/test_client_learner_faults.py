"""Learners whose exchanges meet faults: each of their steps counts once, in all blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from client_faults import connect_faulty, expire, in_threads, until  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd_client import SGD, connect  # noqa: E402

SIZE = 2000
"""Of a tensor with a block on each of two shards."""


class Learner:
    """Exchanges each step, by which it moves all of its parameters by -1."""

    def __init__(self, ps: Any, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(SIZE))
        self.parameter.grad = torch.ones(SIZE)
        inner = torch.optim.SGD([self.parameter], lr=1.0)
        local = psd.Local(steps=1, outer=SGD(lr=1))
        self.optimizer = psd.distribute(
            torch.nn.ParameterList([self.parameter]), inner, local=local, ps=ps, reduce="sum", **options
        )

    def step(self) -> None:
        self.optimizer.step()


def test_a_difference_that_one_shard_has_when_the_lease_runs_out_counts_once_in_all_blocks(cluster: Callable[..., Any]) -> None:
    """The round closes without it at the other shard: it must not stay in one, and come again with the learner's next one."""
    job = cluster(2)
    ps, faults = connect_faulty(job.servers, 0, 2, wait_timeout_s=100)
    with ps, connect(job.servers, 1, 2, wait_timeout=100) as peer:
        own, other = in_threads(lambda: Learner(ps), lambda: Learner(peer))
        left = [other.step]

        def go_on_without() -> None:
            if left:
                until(lambda: job.shards[0].shard._core.declared().open_rounds > 0)
                for shard in job.shards:
                    expire(shard, 0)
                left.pop()()

        for method in ("push", "push_pull"):
            faults.run_before(method, shard=1, action=go_on_without)
        own.step()
        assert not left
        in_threads(own.step, other.step)
        in_threads(own.optimizer.pull, other.optimizer.pull)

        assert ps.stats()["blocks_late"] > 0
        assert own.parameter.unique().tolist() == [-4.0]
        assert other.parameter.unique().tolist() == [-4.0]
