"""Learners in a job's status: what they say of themselves, and how their differences fare."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from learners import SUM, Walker  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.cli.psdctl import main  # noqa: E402


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
        assert "RANK  STATE  LOCAL STEPS  TOKENS  LOCAL STEP  BASE AGE  MERGE PERCENT  ROUNDS MISSED" in shown
