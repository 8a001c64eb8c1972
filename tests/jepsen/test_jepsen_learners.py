"""The model of compressed gradients and of learners finds what is planted, and nothing in a history that is sound."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import NUMBERS, PER_LIFE, Counts, Gradients, initial, seen
from learner_cells import MERGES_BY_DIRECTION, LearnerCells
from loaded_programs import WITH_TORCH, Program, parent_of_programs
from lossy_cells import FORMS, LOSSY, LossyCells, totals
from merge_replay import MOMENTUM, Part, replayed
from plan import Learning
from processes import HERE, last_record
from program import Options
from story import Story

PUSHES = 38
LEARNING = {"learning": Learning(2, 1, 0)}


@pytest.mark.parametrize("codec", FORMS)
def test_cells_that_travel_compressed_count_each_gradient_once_and_show_the_residual(codec: str) -> None:
    """In each block, with exact sums; and a residual that was dropped, or is taken again, leaves others."""
    cells = LossyCells(codec, NUMBERS, PER_LIFE)
    parameters = initial("medium", 2, codec)
    blocks = Counts(parameters, 2, codec).lossy
    assert len(blocks) > 2
    for first, values in blocks.values():
        residual = np.zeros_like(values)
        for number in range(PUSHES):
            sent, residual = cells.sent(number, residual, first)
            parameters[LOSSY][first : first + len(values)] -= sent

    counts = Counts(parameters, 2, codec)

    assert counts.is_whole
    assert counts.numbers() == list(range(PUSHES))
    assert counts.of(7, (LOSSY,)) == dict.fromkeys(blocks, (1, 1))
    if codec != "sign":
        assert seen(parameters, PUSHES - 1, (LOSSY,)) == (1, 1)
    assert set(counts.of(PUSHES, (LOSSY,)).values()) == {(0, 0)}
    for first, values in counts.lossy.values():
        sure = [(number, True, True) for number in range(PUSHES)]
        (expected,) = totals(cells, sure, len(values), first)
        (dropped,) = totals(cells, [*sure[:3], None, *sure[3:]], len(values), first)
        np.testing.assert_array_equal(-values, expected)
        assert not np.array_equal(dropped, expected)
        assert len(list(totals(cells, [*sure, (PUSHES, False, False)], len(values), first))) == 2


def test_gradients_that_travel_compressed_are_what_the_model_takes_them_for() -> None:
    gradients = Gradients("small", 2, "int8")
    written = gradients.write(11, (LOSSY,))[LOSSY].copy()

    expected = np.empty_like(written)
    LossyCells("int8", NUMBERS, PER_LIFE).write(expected, 11)
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(
    ("second", "kinds"),
    [({}, set()), ({"keeps": False}, {"residual not taken once"}), ({"times": 2}, {"residual not taken once"})],
)
def test_checks_when_a_residual_is_lost_then_they_find_it(tmp_path: Path, second: dict[str, Any], kinds: set[str]) -> None:
    story = Story(tmp_path, codec="int4")
    for number in range(4):
        story.push_pull(number)
        story.count(number)
        story.count_lossy(number, **second if number == 2 else {})
    story.end()

    assert story.found_of_residuals() == kinds


@pytest.mark.parametrize(
    ("codec", "pull", "merge"), [("", "", "mean"), ("sign", "", "mean"), ("", "int8", "mean"), ("", "", "rda")]
)
def test_steps_are_told_apart(codec: str, pull: str, merge: str) -> None:
    cells = LearnerCells.of(codec, pull, merge)
    length, last = cells.length("small", 2), cells.numbers - 1
    in_part = cells.total(length, [7])
    in_part[: length // 2] = 0
    values = -(cells.total(length, [5]) + cells.total(length, [last], 2) + in_part)

    least, most = cells.counts(values, [5, last, 6, 7])

    twice = 1 if cells.is_presence else 2
    assert (least.tolist(), most.tolist()) == ([1, twice, 0, 0], [1, twice, 0, 1])
    assert cells.is_whole(values)
    assert not cells.is_whole(values + 1)


@pytest.mark.parametrize(
    ("has", "times", "kinds"),
    [
        ((0, 1, 2, 3), 1, set()),
        ((0, 1), 1, {"acknowledged and lost"}),
        ((0, 1, 2, 3, 4), 1, {"dropped and counted"}),
        ((0, 1, 2, 3), 2, {"counted twice"}),
        ((0, 1, 2, 3, 9), 1, {"unknown step"}),
    ],
)
def test_checks_when_a_difference_comes_late_then_its_steps_count_with_the_next(
    tmp_path: Path, has: tuple[int, ...], times: int, kinds: set[str]
) -> None:
    story = Story(tmp_path, "quorum-exact", **LEARNING)
    story.learn(0, 1)
    story.learn(1, 2, departed=2, is_counted=False)
    story.learn(2, 3)
    story.learn(3, 4, departed=4, is_counted=True)
    story.learn(4, 5)
    story.call("close")
    story.end()
    story.has_learned(*has, times=times)

    assert story.found_of_learners() == kinds


@pytest.mark.parametrize("merge", MERGES_BY_DIRECTION)
def test_a_replay_comes_to_what_learners_are_merged_to(merge: str) -> None:
    """By another implementation; the second round has momentum, and a learner that has learned more."""
    learners = pytest.importorskip("learners")
    torch = learners.torch
    cells = LearnerCells.of("", "", merge)
    rounds = [[Part((0, 1), 2), Part((600, 601, 602), 5)], [Part((2,), 1), Part((603,), 1)], [Part((3, 604), 2)]]
    total, momentum = (torch.zeros(cells.cells, dtype=torch.float64) for _ in range(2))
    for of_round in rounds:
        differences = [torch.from_numpy(cells.total(cells.cells, part.numbers)) for part in of_round]
        gradient = learners.merged(merge, differences, [part.weight for part in of_round], momentum * (1 - MOMENTUM)).double()
        momentum = momentum * MOMENTUM * (merge == "heloco") + gradient
        total += momentum

    found = replayed(cells, merge, dict(enumerate(rounds)))

    np.testing.assert_allclose(found, total.numpy(), atol=1e-6)
    assert len(set(found[[0, 2, 3, 600]].round(3))) == 4, "each difference is scaled in its own way"


@pytest.mark.parametrize("merge", MERGES_BY_DIRECTION)
@pytest.mark.parametrize(
    ("rounds", "kinds"),
    [
        (((0, 1), (2,), (3, 4)), set()),
        (((0, 1), (2, 0, 1), (3, 4)), {"not what the merges lead to"}),  # the first one again, with the second
        (((0, 1), (2,), (3, 4), (3, 4)), {"not what the merges lead to"}),  # the last one again
        (((0, 1), (), (3, 4)), {"acknowledged and lost", "not what the merges lead to"}),
        (((0, 1), (2,), (3, 4), (5,)), set()),  # nobody has heard of it
        (((0, 1), (2,), (3, 4), (5,), (5,)), {"not what the merges lead to"}),
    ],
)
def test_checks_when_differences_are_merged_by_direction_then_they_find_what_counts_twice(
    tmp_path: Path, merge: str, rounds: Any, kinds: set[str]
) -> None:
    story = Story(tmp_path, "exact", learning=Learning(2, 1, 0, merge=merge))
    story.learn(0, 1)
    story.learn(1, 2, departed=2, is_counted=True, clock=0, weight=2.0)
    story.learn(2, 3, departed=3, is_counted=True, clock=1)
    story.learn(3, 4)
    story.learn(4, 5, departed=5, is_counted=True, clock=2, weight=2.0)
    story.learn(5, 6, clock_before=3)
    story.end("", -9)
    story.has_learned(rounds=rounds)

    assert story.found_of_learners() == kinds


@pytest.mark.parametrize("has", [(), (0, 1)])
def test_checks_when_a_learner_is_killed_then_its_difference_counts_once_or_not(tmp_path: Path, has: tuple[int, ...]) -> None:
    story = Story(tmp_path, **LEARNING)
    story.learn(0, 1)
    story.learn(1, 2)
    story.end("", -9)
    story.has_learned(*has)

    assert story.found_of_learners() == set()


@pytest.mark.parametrize(
    ("told", "kinds"),
    [({"absent": [0]}, {"own step lost"}), ({"twice": [1]}, {"own step counts twice"}), ({"absent": [2]}, set())],
)
def test_checks_when_a_learner_does_not_have_its_own_steps_then_they_find_it(
    tmp_path: Path, told: dict[str, Any], kinds: set[str]
) -> None:
    """But for those over which others' were mixed in."""
    story = Story(tmp_path, **LEARNING)
    story.learn(0, 1)
    story.learn(1, 2)
    story.learn(2, 3, departed=2, is_counted=True, is_mixed=True, **told)
    story.call("close")
    story.end()
    story.has_learned(0, 1)

    assert story.found_of_learners() == kinds


@pytest.mark.parametrize(("of_mate", "kinds"), [((7, 8), set()), ((7,), set()), ((7, 9), {"ranks differ"})])
def test_checks_when_the_ranks_of_a_learner_differ_then_they_find_it(
    tmp_path: Path, of_mate: tuple[int, ...], kinds: set[str]
) -> None:
    """After the same step; one of them may have ended earlier. Nothing counts once for each rank."""
    story = Story(tmp_path, "exact", learning=Learning(2, 1, 0, ranks=2))
    story.group((7, 8), of_mate)
    story.end()
    story.has_learned(0, 1)

    assert story.found_of_learners() == kinds


@pytest.mark.parametrize(("mate_status", "kinds"), [(-9, set()), (0, {"builtin RuntimeError"})])
def test_checks_when_another_rank_has_gone_then_collective_calls_may_fail(
    tmp_path: Path, mate_status: int, kinds: set[str]
) -> None:
    story = Story(tmp_path, "exact", learning=Learning(2, 1, 0, ranks=2))
    story.group((7,), (7,), mate_status)
    story.call("step", "RuntimeError", is_psd=False, text="Connection closed by peer", number=1)
    story.end("parted", 1)

    assert story.found_of_conduct() & {"builtin RuntimeError"} == kinds


def test_checks_when_the_job_has_gone_back_then_what_was_acknowledged_since_need_not_count(tmp_path: Path) -> None:
    story = Story(tmp_path, checkpoint_steps=5, **LEARNING)
    story.learn(0, 1, departed=1, is_counted=True, clock=3)
    story.fault("shard-lose")
    story.learn(1, 2, "RolledBack")
    story.end("restart", 1)
    story.has_learned()

    assert story.found_of_learners() == set()


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
def test_learner_when_a_call_fails_for_good_then_it_says_that_it_ends(tmp_path: Path) -> None:
    """As any other program of a trial: its errors are those that the program's last lines know."""
    history = tmp_path / "history.jsonl"
    options = Options(
        history=str(history),
        stop=str(tmp_path / "stop"),
        servers="127.0.0.1:1",
        rank=0,
        workers=1,
        shards=1,
        size="small",
        seed=1,
        first=0,
        count=1,
        connect={"transport": "tcp", "retry_timeout": 0.1},
        declared={},
        style={},
        learning=vars(Learning(2, 1, 0)),
    )

    command = [str(HERE / "program.py"), str(parent_of_programs(WITH_TORCH)), options.to_json()]
    with Program(command, stderr=subprocess.PIPE, loads=WITH_TORCH) as ended:
        said = ended.stderr.read()

    assert (ended.returncode, last_record(history)["e"]) == (1, "end"), said
