"""The checker of the protocol in a small scope; `make check-protocol` has the large one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted
import pytest
from check_protocol import SETTINGS, explore
from invariants import Invariants
from setting import Setting

STATES = 25
"""To look at in each setting; `make check-protocol` looks at all of them."""

SMALL = ("cuts-async", "cuts-tables-async", "readers", "push-only-exact", "lost-disks")
"""What walks do not see (test_walks.py)."""

COUNT = """
from check_protocol import explore
from setting import Setting
faults = frozenset({"lose", "late", "kill", "die", "stall", "timeout"})
explorer, told = explore(Setting("counted", faults=faults), states_max=15)
print(explorer.states, explorer.steps, explorer.depth, explorer.strikes, told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.name in SMALL], ids=lambda setting: setting.name)
def test_with_one_fault_nothing_is_found(setting: Setting) -> None:
    explorer, told = explore(setting.with_one_fault(), states_max=STATES)

    assert told == []
    assert explorer.states == STATES


@pytest.mark.slow
def test_every_process_counts_the_same_states() -> None:
    found = {count_with_hash_seed(seed) for seed in ("1", "2")}

    assert len(found) == 1
    assert found.pop().startswith("15 ")


def count_with_hash_seed(seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True).stdout


# -- defects that psd once had ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clock_that_moves_on_before_the_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.clock_before_commit(monkeypatch)

    story = find(Setting("planted", aggregation="exact", faults=frozenset({"outage", "timeout"})))

    assert "counts twice" in story[0]
    assert told_in_order(story, "raises ShardUnavailable", "decides: again", "push gradient", "commit clock")


@pytest.mark.slow
def test_a_successor_that_pushes_into_its_predecessors_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.successor_in_the_open_round(monkeypatch)

    story = find(Setting("planted", faults=frozenset({"die"})))

    assert "lack acknowledged gradients" in story[0]
    assert told_in_order(
        story, "worker 0 -> shard", "worker 0 dies", "worker 0': push_pull", "worker 0': push_pull(12) returns"
    )


@pytest.mark.slow
def test_a_returning_worker_that_speaks_for_the_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.all_voices_alike(monkeypatch)

    story = find(Setting("planted", has_schedule=True, faults=frozenset({"die"})))

    assert "was ended by ScalarsDisagree" in story[0]
    assert told_in_order(story, "worker 0 dies", "worker 0': push_pull(12) at clock", "= ScalarsDisagree")


@pytest.mark.slow
def test_a_session_that_ends_on_its_way_into_the_job_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.unguarded_rejoin(monkeypatch)

    story = find(Setting("planted", steps=1, faults=frozenset({"outage", "stall"}), budget=2))

    assert "was ended by SessionFenced (expired)" in story[0]
    assert told_in_order(story, "stays away", "shard 0: join (session 0)", "runs out", "= SessionFenced")


@pytest.mark.slow
def test_a_failed_push_that_another_one_follows_unfenced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.unfenced_push(monkeypatch)

    story = find(Setting("planted", faults=frozenset({"timeout"})))

    assert "lack acknowledged gradients" in story[0]
    assert told_in_order(story, "raises WaitTimeout", "decides: other", "push_pull gradient")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuts-async", "cuts-ssp", "cuts-tables-async"])
def test_a_cut_of_different_pushes_on_two_shards_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    planted.cut_at_an_instant(monkeypatch)

    story = find(small(name).but(restores=0))

    assert "cut c9" in story[0]
    assert told_in_order(story, "announces a cut", "push_pull gradient", "heartbeat")


@pytest.mark.slow
def test_a_readers_copy_of_different_pushes_on_two_shards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.cut_at_an_instant(monkeypatch)

    story = find(Setting("planted", consistency="async", reads=1, faults=frozenset(), budget=0))

    assert "cut r1" in story[0]
    assert told_in_order(story, "push_pull gradient", "shard 0 is called by a reader")


@pytest.mark.slow
def test_a_cut_that_is_not_the_newest_by_its_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.cuts_without_order(monkeypatch)

    story = find(small("two-cuts"))

    assert "cut c9 is the later one by its name, and lacks" in story[0]


@pytest.mark.slow
@pytest.mark.parametrize("plant", [planted.saved_elsewhere, planted.cut_at_an_instant])
def test_a_gradient_that_counts_twice_after_a_restore_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    """Also where nobody has looked at the checkpoint before."""
    plant(monkeypatch)
    monkeypatch.setattr(Invariants, "_cut", lambda *_: iter(()))

    story = find(small("cuts-async"))

    assert story[0].startswith("what goes on from cut c9 on")
    assert "counts twice" in story[0]


@pytest.mark.slow
def test_a_push_for_the_turn_of_a_round_that_is_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's clock is behind its worker's, which has given a push up and joined anew."""
    planted.turn_by_an_old_clock(monkeypatch)

    story = find(Setting("planted", parts=2, blocks=3, faults=frozenset({"timeout"})))

    assert "is of several parts" in story[0]
    assert told_in_order(story, "raises WaitTimeout", "decides: other", "join", "= PartsDisagree")


@pytest.mark.slow
def test_a_push_that_is_answered_before_its_round_has_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker goes on, and nobody has it any more when the shard is killed."""
    planted.answered_before_the_round_has_closed(monkeypatch)

    story = find(Setting("planted", parts=2, blocks=3, faults=frozenset({"kill"})))

    assert "wait for what cannot come" in story[0]
    assert told_in_order(story, "shard 1: push_pull gradient  clock 0", "shard 1 is killed and restarted", "clock 1")


# -- defects that parts could have ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_shard_that_answers_with_the_blocks_of_another_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.another_parts_blocks(monkeypatch)

    story = find(Setting("planted", parts=2, blocks=3, faults=frozenset(), budget=0))

    assert "at clock 1 has version 0 of block 2, which lacks [0, 6]" in story[0]


@pytest.mark.slow
def test_a_round_that_takes_gradients_of_several_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor counts turns by itself, and begins with the first one, while the other worker is at the second."""
    planted.any_part(monkeypatch)

    story = find(Setting("planted", parts=2, blocks=3, successor="push_pull_own_turns", faults=frozenset({"die"})))

    assert "round 1 is of several parts" in story[0]
    assert told_in_order(story, "worker 0 dies", "worker 0': push_pull(12) at clock 1")


# -- quorum and grace -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fragments_with_quorum_and_grace_under_a_death_have_no_findings() -> None:
    """Of a learner at any moment; one of two may come late, when the grace is over: all states that there are on one shard."""
    explorer, told = explore(named("fragments").with_one_fault().but(faults=frozenset({"die"}), shards=1, blocks=2))

    assert told == []
    assert explorer.extent() == "0 faults: everything, 1 faults: everything"
    assert explorer.states > 1000


@pytest.mark.slow
def test_a_late_push_that_is_answered_as_if_it_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.late_as_counted(monkeypatch)

    story = find(named("fragments").with_one_fault().but(faults=frozenset(), budget=0))

    assert "lack acknowledged gradients" in story[0]
    assert told_in_order(story, "waits no longer for more than the quorum", "push gradient 6", "push_pull(6) returns")


@pytest.mark.slow
def test_a_late_push_that_counts_in_the_next_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.late_in_the_next_round(monkeypatch)

    story = find(named("fragments").but(shards=1, blocks=2, faults=frozenset(), budget=0))

    assert "is of several parts" in story[0]
    assert told_in_order(story, "came too late", "push_pull(7) at clock 1")


# -- defects that residuals could have -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_push_that_is_encoded_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.encoded_again(monkeypatch)

    story = find(Setting("planted", has_residuals=True, faults=frozenset({"kill", "lose"})))

    assert "has taken its residual twice" in story[0] or "are not what error feedback leads to" in story[0]
    assert told_in_order(story, "push_pull gradient 0", "push_pull gradient 0")


@pytest.mark.slow
def test_a_residual_from_before_the_job_went_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.kept_by_who_goes_back(monkeypatch)

    story = find(Setting("planted", has_residuals=True, has_checkpoint=True, faults=frozenset({"blank"})))

    assert "from before the job went back" in story[0]
    assert told_in_order(story, "push_pull gradient", "RolledBack", "push_pull gradient")


@pytest.mark.slow
def test_a_residual_that_is_lost_with_a_push_that_was_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.lost_with_a_push_that_is_given_up(monkeypatch)

    story = find(Setting("planted", has_residuals=True, faults=frozenset({"timeout"})))

    assert "are not what error feedback leads to" in story[0]
    assert told_in_order(story, "raises WaitTimeout", "decides: other", "push_pull gradient")


# -- defects that tables could have ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_that_one_table_has_twice_after_a_kill_between_two_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.rows_again(monkeypatch)

    story = find(Setting("planted", tables=2, faults=frozenset({"crash"})))

    assert "table 0 of block 3, update 2: gradient 0 counts twice" in story
    assert told_in_order(story, "shard is killed at its crash point", "push_pull gradient 0", "block 3 is now made of [0, 6]")


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["rows", "tensors"])
def test_a_push_that_comes_again_without_its_rows_or_its_tensors_is_found(
    monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    planted.half_sent_again(monkeypatch, left_out)

    story = find(Setting("planted", tables=2, faults=frozenset({"kill"})))

    assert "it has closed with [0], and waits for [0, 1]" in story[0]
    assert told_in_order(story, "is killed", "worker 1 -> shard 0: push_pull", "is now made of [0]")


# -- publications ----------------------------------------------------------------------------------------------------------

PUBLISHED = Setting(
    "publications",
    aggregation="exact",
    quorum=1,
    programs=("put",),
    successor="put",
    reads=1,
    is_published=True,
    faults=frozenset({"kill", "die"}),
)

PUBLISHED_STATES = 400


@pytest.mark.slow
def test_publications_that_are_read_under_one_kill_have_no_findings() -> None:
    """Of a shard between any two requests, or of the publisher at any moment: some states of each, which `make check-protocol`
    has all of."""
    explorer, told = explore(PUBLISHED, states_max=PUBLISHED_STATES)

    assert told == []
    assert explorer.states == PUBLISHED_STATES
    assert explorer.extent().startswith("0 faults: everything, 1 faults: ")
    _, followed = explorer.strikes[1]
    assert followed > 1  # to all their ends, of the states in which the fault has struck


@pytest.mark.parametrize(
    ("plant", "wrong"),
    [
        (planted.put_before_its_commit, "is made of different gradients"),
        (planted.unheard_decision, "of which a reader has told, and stays behind"),
        (planted.newest_page, "not of one"),
    ],
)
def test_what_makes_a_version_lie_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any, wrong: str) -> None:
    plant(monkeypatch)

    story = find(PUBLISHED)

    assert wrong in story[0]


def named(name: str) -> Setting:
    """One of those that are searched at length."""
    (found,) = (each for each in SETTINGS if each.name == name)
    return found


def small(name: str) -> Setting:
    """The world with cuts that is seen whole, before any fault."""
    return named(name).with_one_fault().but(faults=frozenset(), budget=0)


def find(setting: Setting) -> list[str]:
    """The lines of what the checker finds: what is wrong, and the events that lead there."""
    _, told = explore(setting, states_max=20_000)
    (text,) = told
    return text.splitlines()


def told_in_order(story: list[str], *events: str) -> bool:
    """True if these words occur in lines of the story, one after the other."""
    lines = iter(story[1:])
    return all(any(event in line for line in lines) for event in events)
