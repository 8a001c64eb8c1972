"""The checker of the protocol in a small scope; `make check-protocol` has the large one."""

from __future__ import annotations

import pytest
from check_protocol import SETTINGS, explore
from setting import Setting

from psd.state.job import Job
from psd.state.rounds import FastRound, Outcome
from psd_client.exchange import ParameterExchange

SECONDS = 2.0
"""Of CPU for each setting."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS[:5], ids=lambda setting: setting.name)
def test_with_one_fault_nothing_is_found(setting: Setting) -> None:
    explorer, told = explore(setting, SECONDS)

    assert told == []
    assert explorer.states > 100


@pytest.mark.slow
def test_a_successor_that_pushes_into_its_predecessors_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: its gradient was taken for a duplicate of the one that the dead worker had pushed."""
    monkeypatch.setattr(Job, "entry_round", lambda job, rank: job.version_max)
    monkeypatch.setattr(FastRound, "standing", lambda round_, part: Outcome.DUPLICATE if part.rank in round_.sessions else None)

    _, told = explore(Setting("planted", faults=frozenset({"die"})), 30)

    assert len(told) == 1


@pytest.mark.slow
def test_a_failed_push_that_another_one_follows_unfenced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: the shards took another gradient for the same push."""

    def forget(exchange: ParameterExchange, failed: object) -> None:
        exchange._unconfirmed = exchange._failed = exchange._session.pushing = None

    monkeypatch.setattr(ParameterExchange, "_give_up", forget)

    _, told = explore(Setting("planted", faults=frozenset({"outage", "timeout"})), 60)

    assert len(told) == 1
