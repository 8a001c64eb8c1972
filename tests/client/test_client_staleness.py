"""Versions that a worker states with its pushes in async and ssp, and their effect."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psd_client
from psd_client import SGD, ParameterServer, connect

Start = Callable[..., Any]


def pair(servers: str, **options: Any) -> list[ParameterServer]:
    """Two workers of one job with a vector over both shards."""
    workers = [connect(servers, rank, 2) for rank in range(2)]
    for ps in workers:
        ps.declare({"w": np.zeros(20_000)}, SGD(lr=0.5), consistency="async", **options)
    return workers


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(20_000, float(value))}


def values(ps: ParameterServer) -> list[float]:
    return [float(value) for value in np.unique(ps.pull()["w"])]


def test_ages_are_counted_from_what_each_worker_has_read(cluster: Start) -> None:
    """A push alone reads nothing; a pull and a push_pull do. psdctl status shows the histogram, as a table and as JSON."""
    servers = cluster(2).servers
    first, second = pair(servers)
    with first, second:
        for _ in range(6):
            first.push_pull(gradient(1))  # of age 0
        second.push(gradient(1))  # 6
        second.push(gradient(1))  # 7
        second.pull()
        second.push_pull(gradient(1))  # 0
        first.push(gradient(1))  # 3
        command = [sys.executable, "-m", "psd.cli.psdctl", "status", "--servers", servers]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        shown = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)

    blocks = shown["shards"][0]["blocks"]
    assert [shard["ages"] for shard in shown["shards"]] == [[7 * blocks, 0, 0, blocks, 2 * blocks]] * 2
    rows = [line.split() for line in text.splitlines()]
    assert ["SHARD", "AGE", "0", "1", "2", "3-4", "5-8"] in rows
    assert ["1", *(str(n * blocks) for n in (7, 0, 0, 1, 2))] in rows


@pytest.mark.parametrize(("word", "late"), [("", 4.0), ("lr", 4.0 / 2)])
def test_a_late_gradient_is_treated_as_was_asked_for(cluster: Start, word: str, late: float) -> None:
    """Both have read version 0; the first one moves the parameters to -1."""
    first, second = pair(cluster(2).servers, staleness=word)
    with first, second:
        first.pull()
        second.pull()
        first.push(gradient(2))
        second.push(gradient(4))

        assert values(first) == pytest.approx([-1 - 0.5 * late], rel=1e-12)


def test_sync_refuses_it(cluster: Start) -> None:
    """There is nothing that it could do there."""
    with (
        connect(cluster(1).servers, 0, 1) as ps,
        pytest.raises(psd_client.InvalidRequest, match=r"groups.staleness: is 'lr', but under sync no gradient is stale"),
    ):
        ps.declare({"w": np.zeros(3)}, SGD(lr=1), consistency="sync", staleness="lr")


class Plain:
    slots: dict[str, float] = {}
    hyper = {"lr": 1.0}

    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> None:
        param -= hyper["lr"] * grad


PATH = f"{__name__}:Plain"


def test_a_custom_rule_says_what_is_wrong_with_it() -> None:
    """Before anything is sent."""
    with pytest.raises(TypeError, match=r"test_client_staleness:Plain has no number 'rate'; it has lr"):
        psd_client.CustomRule(PATH, rate=3)
    with pytest.raises(TypeError, match="lr: expected a number, got 'fast'"):
        psd_client.CustomRule(PATH, lr="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr: must be finite"):
        psd_client.CustomRule(PATH, lr=float("nan"))
    with pytest.raises(psd_client.ConfigError, match="expected an import path"):
        psd_client.CustomRule("Plain")
    in_the_script = type("Mine", (), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Mine is in the script itself, where shards cannot find it"):
        psd_client.CustomRule(in_the_script)


def test_a_custom_rule_that_is_not_listed_is_refused_by_name(cluster: Start) -> None:
    """The worker learns which flag was not given."""
    with (
        connect(cluster(1).servers, 0, 1) as ps,
        pytest.raises(psd_client.InvalidRequest, match=f"--rule {PATH}. Listed: none"),
    ):
        ps.declare({"w": np.zeros(3)}, psd_client.CustomRule(PATH))


def test_groups_of_one_rule_may_have_other_numbers(cluster: Start) -> None:
    """As with psd's own rules; one that there is not is refused."""
    with connect(cluster(2, rules=(PATH,)).servers, 0, 1) as ps:
        with pytest.raises(ValueError, match="no option 'momentum'; there are lr"):
            ps.declare({"a": np.zeros(3)}, psd_client.CustomRule(PATH), groups=[{"params": ["a"], "momentum": 1}])
        groups = [{"params": ["a"]}, {"params": ["b"], "lr": -3.0}]
        ps.declare({"a": np.zeros(3), "b": np.zeros(2)}, psd_client.CustomRule(PATH), groups=groups)
        params = ps.push_pull({"a": np.ones(3), "b": np.ones(2)})

    assert params["a"].tolist() == [-1] * 3
    assert params["b"].tolist() == [3] * 2
