"""Learners in a job's status: what they say of themselves, and how their differences fare."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from learners import SUM, Walker  # noqa: E402
from torch import nn, optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.cli.psdctl import main  # noqa: E402
from psd_client.client import worker_of  # noqa: E402


def test_status_shows_learners(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, tokens, the age of a base, the part in the last merge, and rounds that were decided without it."""
    servers = cluster(2).servers
    local = psd.Local(steps=2, outer=SUM)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(psd_client.connect(servers, rank, 2)) for rank in range(2)]
        walkers: list[Any] = [None, None]

        def begin(rank: int) -> None:
            walkers[rank] = Walker(connections[rank], local, quorum=1)

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fast, slow = walkers
        slow.walk(2)
        fast.walk(6)

        assert main(["status", "--servers", servers, "--json"]) == 0
        first, second = (worker for worker in json.loads(capsys.readouterr().out)["workers"])
        names = ("local_steps", "tokens", "base_age", "merge_percent", "rounds_missed")
        assert [first[name] for name in names] == [6, 6, 0, 100, 0]
        assert [second[name] for name in names] == [2, 2, 0, 100, 3]

        slow.walk(2)
        assert main(["status", "--servers", servers]) == 0
        shown = capsys.readouterr().out
        assert (
            "RANK  STATE  LOCAL STEPS  TOKENS  LOCAL STEP  BASE AGE  MERGE PERCENT  MERGE COSINE PERCENT  ROUNDS MISSED"
            in shown
        )


def test_status_shows_how_far_the_directions_of_a_merge_agree(run_workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three learners: in one tensor two agree, and the third is orthogonal to both; in the other all are."""
    directions = {"a": ((1, 0, 0), (2, 0, 0), (0, 3, 0)), "b": ((1, 0, 0), (0, 2, 0), (0, 0, 3))}
    shown: list[str] = []

    def learner(ps: Any) -> None:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in directions})
        local = psd.Local(steps=1, outer=SUM, merge="rda")
        optimizer = psd.distribute(model, optim.SGD(model.parameters(), lr=1.0), local=local, ps=ps)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensor(directions[name][ps.rank], dtype=torch.float32)
        optimizer.step()
        ps.barrier("stepped")
        if ps.rank == 0:
            assert main(["status", "--servers", ",".join(worker_of(ps).seat[0]), "--json"]) == 0
            shown.append(capsys.readouterr().out)
        ps.barrier("shown")

    run_workers(3, 2, learner)

    found = [worker["merge_cosine_percent"] for worker in json.loads(shown[0])["workers"]]
    assert found == [round(100 * (1 / 3 + 0) / 2)] * 3, "of three pairs one agrees, in one of two tensors"
