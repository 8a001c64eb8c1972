"""The model finds what is planted: each kind of failure in a history that was made up, and none in one that is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import CELLS, DIGITS, NUMBERS, TENSORS, Counts, Gradients, initial, seen
from plan import Learning, Plan, draw
from row_cells import TABLES, RowCells
from story import Story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_cells_when_gradients_have_counted_then_each_is_told_apart_in_each_block() -> None:
    """Also the last one, and one that lacks tensors."""
    parameters = initial("medium", 3)
    gradients = Gradients("medium", 3)
    for number, tensors, times in ((0, TENSORS, 1), (13, ("a", "c"), 2), (NUMBERS - 1, ("b",), 1)):
        for name, gradient in gradients.write(number, tensors).items():
            parameters[name] -= times * gradient
        gradients.wipe(number, tensors)

    counts = Counts(parameters, 3)

    assert counts.is_whole
    assert counts.numbers() == [0, 13, NUMBERS - 1]
    assert set(counts.of(0, TENSORS)) == set(counts.shard_of)
    assert set(counts.of(0, TENSORS).values()) == {(1, 1)}
    assert set(counts.of(13, ("a", "c")).values()) == {(2, 2)}
    assert set(counts.of(1, TENSORS).values()) == {(0, 0)}
    assert counts.elsewhere(13, ("a",)) == ["c"]
    assert counts.elsewhere(13, ("a", "c")) == []
    assert seen(parameters, 13, ("a", "c")) == (2, 2)
    assert seen(parameters, 13, TENSORS) == (0, 2)


def test_cells_of_rows_when_gradients_have_counted_then_each_is_told_apart_on_each_shard() -> None:
    """A table's part of a gradient is in the shards' block of tables, beside the other's."""
    cells, counted = RowCells(CELLS, DIGITS, 3), {0: TABLES, 13: ("rows",), NUMBERS - 1: TABLES}
    parameters: dict[str, Any] = dict(initial("small", 3))
    ids = cells.ids.reshape(-1)
    for name in TABLES:
        parameters[name] = np.zeros((len(ids), DIGITS), np.float32)
        for number, tables in counted.items():
            of_gradient, values = cells.gradients(number, tables).get(name, (ids[:0], np.empty((0, DIGITS), np.float32)))
            for key, value in zip(of_gradient, values, strict=True):
                parameters[name][ids == key] -= value
    parameters["rows"][cells.owners.reshape(-1) == 2] = 0  # which this shard has lost

    counts = Counts(parameters, 3)

    blocks = sorted(counts.shard_of)[-3:]
    assert [counts.shard_of[block] for block in blocks] == [0, 1, 2]
    assert counts.numbers() == list(counted)
    assert counts.of(0, TABLES) == {blocks[0]: (1, 1), blocks[1]: (1, 1), blocks[2]: (0, 1)}
    assert counts.of(13, ("rows",)) == {blocks[0]: (1, 1), blocks[1]: (1, 1), blocks[2]: (0, 0)}
    assert counts.elsewhere(NUMBERS - 1, ("rows",)) == ["tags"]
    assert seen({"rows": np.full((2, DIGITS), -1.0, np.float32)}, 5, TABLES) == (1, 1)


def test_cells_when_a_block_has_half_of_a_gradient_then_it_shows() -> None:
    parameters = initial("medium", 1)
    for name, gradient in Gradients("medium", 1).write(5, TENSORS).items():
        parameters[name][: 20 * CELLS] -= gradient[: 20 * CELLS]

    assert (0, 1) in Counts(parameters, 1).of(5, TENSORS).values()


def test_checks_when_all_is_well_then_they_find_nothing(story: Story) -> None:
    for number in range(3):
        story.push_pull(number, clock=number)
        story.count(number)
    story.call("close")
    story.end()

    assert story.found() == set()


@pytest.mark.parametrize(("times", "kind"), [(0, "acknowledged and lost"), (2, "counted twice")])
def test_checks_when_an_acknowledged_gradient_does_not_count_once_then_they_find_it(
    story: Story, times: int, kind: str
) -> None:
    story.push_pull(0)
    story.count(0, times)
    story.end("fall")

    assert story.found() == {kind}


@pytest.mark.parametrize(("mode", "found"), [("fast", set()), ("exact", {"on some shards only, with exact aggregation"})])
def test_checks_when_a_failed_gradient_is_on_one_shard_then_that_is_a_failure_with_exact_aggregation(
    tmp_path: Path, mode: str, found: set[str]
) -> None:
    story = Story(tmp_path, mode)
    story.fault("link-reset")
    story.push_pull(0, "ShardUnavailable")
    story.count(0, 1, ("c",), slice(0, 1104))
    story.end("restart", 1)

    assert story.found() == found


def test_checks_when_a_program_was_told_that_blocks_were_late_then_as_many_count(tmp_path: Path) -> None:
    """And stats() agrees with them in all."""
    story = Story(tmp_path, "quorum-fast")
    story.push_pull(0, blocks_counted=1, blocks_late=3)
    story.call("close")
    story.end()

    assert story.found() == {"told of 1 blocks that count", "stats() is wrong"}


@pytest.mark.parametrize("excuse", ["pushes_dropped", "killed", "unsafe end", "rolled back"])
def test_checks_when_a_program_was_told_or_could_not_be_then_a_lost_gradient_is_no_failure(tmp_path: Path, excuse: str) -> None:
    story = Story(tmp_path, checkpoint_steps=5)
    if excuse == "pushes_dropped":
        story.push_pull(0, pushes_dropped=1, blocks_counted=0)
    else:
        story.call("push", number=0, blocks_counted=4)
    if excuse in ("killed", "unsafe end"):
        story.fault("shard-kill")
    if excuse == "unsafe end":
        story.say("psd: worker 0: ends without knowing whether its last push was applied; ...")
    if excuse == "rolled back":
        story.fault("shard-lose")
        story.call("pull", "RolledBack", detail={"timeline": 1, "step": 0})
    if excuse == "killed":
        story.note("signal", name="worker 0 life 0", signal="SIGKILL")
    story.end("" if excuse == "killed" else "fall", -9 if excuse == "killed" else 0)

    assert story.found() == set()


@pytest.mark.parametrize(("times", "found"), [(0, {"acknowledged and lost", "own gradient not read"}), (1, set())])
def test_checks_when_a_pull_completes_a_push_that_has_failed_then_it_counts_once(
    story: Story, times: int, found: set[str]
) -> None:
    story.fault("shard-kill")
    story.call("push", "ShardUnavailable", number=0, blocks_counted=2)
    story.call("pull", pushes=1, blocks_counted=2, seen=[times, times])
    story.count(0, times)
    story.end("fall")

    assert story.found() == found


def test_checks_when_a_round_is_lost_then_a_gradient_in_it_need_not_count(tmp_path: Path) -> None:
    """With exact aggregation: another worker has died, and a shard, which had its gradient; there is no checkpoint."""
    story = Story(tmp_path, "exact")
    story.fault("shard-kill")
    story.push_pull(0, "StateLost", pushes=1, blocks_counted=4)
    story.end("restart", 1)

    assert "acknowledged and lost" not in story.found()


def test_checks_when_a_push_was_dropped_before_the_next_then_only_that_one_may_be_lost(story: Story) -> None:
    story.fault("shard-kill")
    story.push_pull(0, "ShardUnavailable")
    story.push_pull(1, pushes=1, pushes_dropped=1, clock=1)
    story.end("fall")

    assert story.found() == {"acknowledged and lost"}


def test_checks_when_a_call_fails_before_it_has_begun_its_push_then_only_the_one_before_is_completed(story: Story) -> None:
    story.fault("shard-kill")
    story.push_pull(0, "ShardUnavailable")
    story.push_pull(1, "ShardUnavailable")
    story.push_pull(2, pushes=2)
    story.count(0)
    story.count(2)
    story.end("fall")

    assert story.found() == set()


@pytest.mark.parametrize(
    ("op", "result", "options", "kind"),
    [
        ("pull", "TimeoutError", {"is_psd": False}, "builtin TimeoutError"),
        ("pull", "SessionFenced", {}, "unexpected SessionFenced"),
        ("pull", "InternalError", {}, "unexpected InternalError"),
        ("pull", "ShardUnavailable", {}, "unexpected ShardUnavailable"),
        ("pull", "WaitTimeout", {}, "unexpected WaitTimeout"),
    ],
)
def test_checks_when_a_call_raises_what_it_must_not_then_they_find_it(
    story: Story, op: str, result: str, options: dict[str, Any], kind: str
) -> None:
    story.call(op, result, **options)
    story.end("restart", 1)

    assert story.found() == {kind}


def test_checks_when_a_call_takes_long_without_a_reason_then_they_find_that_and_the_silence(story: Story) -> None:
    story.call("pull", took=30)
    story.end()

    assert story.found() == {"slow", "silent"}


def test_checks_when_a_program_says_whom_it_waits_for_then_it_is_not_silent(story: Story) -> None:
    story.fault("shard-stop", 30)
    story.call("barrier", "killed", took=5)
    story.say("psd: worker 0: shard 1 at 127.0.0.1:1 has not answered for 5 s")
    story.t += 20
    story.end("restart", 1)

    assert story.found() == set()


@pytest.mark.parametrize(
    ("run", "torn", "kinds"),
    [
        (2, 0, set()),
        (3, 0, set()),
        (2, 1, set()),
        (1, 0, {"batch lost"}),
        (1, 1, {"batch lost"}),
        (4, 0, {"batch ran twice"}),
        (1, 2, {"torn batch"}),
    ],
)
def test_checks_when_batches_have_run_then_the_acknowledged_ones_have_once(
    story: Story, run: int, torn: int, kinds: set[str]
) -> None:
    """Two are acknowledged, and one was under way when its program was killed."""
    for result in ("ok", "ok", "killed"):
        story.call("batch", result)
    story.batches(run, torn)
    story.note("signal", name="worker 0 life 0", signal="SIGKILL")
    story.end("", -9)

    assert story.found() == kinds


@pytest.mark.parametrize(("options", "kinds"), [({}, {"Ctrl-C"}), ({"learning": Learning(2, 1, 0)}, set())])
def test_checks_when_ctrl_c_takes_long_then_they_find_it(tmp_path: Path, options: dict[str, Any], kinds: set[str]) -> None:
    """A learner has torch to let go of."""
    story = Story(tmp_path, **options)
    story.note("signal", name="worker 0 life 0", signal="SIGINT")
    story.t += 9
    story.end("", -2)

    assert story.found_of_conduct() == kinds


def test_checks_when_a_worker_does_not_read_its_own_gradient_then_they_find_it(story: Story) -> None:
    story.push_pull(0, seen=[0, 0])
    story.count(0)
    story.end("fall")

    assert story.found() == {"own gradient not read"}


@pytest.mark.parametrize(
    ("status", "signals", "checkpoints", "is_right"),
    [(143, 2, 0, True), (143, 1, 0, False), (-15, 1, 0, False), (74, 1, 5, True), (74, 1, 0, False)],
)
def test_checks_when_a_shard_was_told_to_end_then_its_status_says_how(
    tmp_path: Path, status: int, signals: int, checkpoints: int, is_right: bool
) -> None:
    """A second signal ends it at once; while the others go on there is no last checkpoint."""
    story = Story(tmp_path, checkpoint_steps=checkpoints)
    story.note("ready", name="shard 1")
    story.fault("shard-terminate")
    for _ in range(signals):
        story.note("signal", name="shard 1", signal="SIGTERM")
    story.note("exit", name="shard 1", pid=2, status=status)
    story.end("fall")

    assert ("exit status of a shard" not in story.found()) == is_right


@pytest.mark.parametrize(("ready_after", "is_right"), [(15.0, True), (1.0, False)])
def test_checks_when_a_shard_is_slow_to_start_then_who_joins_may_be_late(
    tmp_path: Path, ready_after: float, is_right: bool
) -> None:
    """A killed shard is away until it serves again, and not only until it has been started."""
    story = Story(tmp_path, life=1)
    story.fault("shard-kill")
    begun = story.t
    story.call("connect", took=15.0, text="")
    story.timeline.append({"t": begun + ready_after, "what": "ready", "name": "shard 0"})
    story.call("declare", took=1.0)
    story.end()

    assert ("slow successor" not in story.found()) == is_right


@pytest.mark.parametrize(
    ("log", "kinds"),
    [("ERROR --state-dir: state/arena: the bytes have changed; going back to a checkpoint", set()), ("", {"damage not found"})],
)
def test_checks_when_a_file_was_damaged_then_its_shard_must_have_named_it(tmp_path: Path, log: str, kinds: set[str]) -> None:
    """Before it went back to a checkpoint."""
    story = Story(tmp_path, checkpoint_steps=5)
    story.fault("shard-damage")
    story.note("damage", name="shard 0", file="state/arena", at=7)
    story.note("ready", name="shard 0")
    story.push_pull(0, "RolledBack")
    story.end("restart", 1)
    story.shard_logs[0] = log

    assert story.found() == kinds


def test_checks_when_a_shard_was_killed_before_it_has_looked_then_it_need_not_name_the_damage(tmp_path: Path) -> None:
    story = Story(tmp_path, checkpoint_steps=5)
    story.fault("shard-damage")
    story.note("damage", name="shard 0", file="state/arena", at=7)
    story.note("signal", name="shard 0", signal="SIGSTOP")
    story.note("signal", name="shard 0", signal="SIGKILL")
    story.note("repair", name="shard 0")
    story.note("ready", name="shard 0")
    story.end("fall")

    assert story.found() == set()


@pytest.mark.parametrize(
    ("kind", "changes", "kinds"),
    [
        ("", {}, set()),
        ("", {"status": 74}, {"exit status of psd-run"}),
        ("run-terminate", {"status": 143}, set()),
        ("run-terminate", {"status": 74, "has_stored": False}, set()),
        ("run-terminate", {"status": 130}, {"exit status of psd-run"}),
        ("run-hangup", {"status": 129, "has_stored": False}, {"no last checkpoint"}),
        ("run-kill", {"status": -9, "has_stored": False}, set()),
        ("run-kill", {"status": -9, "left": [7]}, {"left behind"}),
        ("", {"said": "Traceback (most recent call last):"}, {"traceback of psd-run"}),
    ],
)
def test_checks_when_psd_run_was_told_to_end_then_it_has_done_so_in_order(
    tmp_path: Path, kind: str, changes: dict[str, Any], kinds: set[str]
) -> None:
    story = Story(tmp_path, checkpoint_steps=5, is_launched=True)
    story.end("fall")
    (tmp_path / "psd-run-0.err").write_text(changes.pop("said", ""))
    story.note("launch", **{"kind": kind, "status": 0, "took": 1.0, "left": [], "has_stored": True} | changes)

    assert story.found() == kinds


def test_plans_when_drawn_then_a_seed_says_it_all_and_files_keep_it() -> None:
    for seed in range(200):
        plan = draw(seed, may_mount=True)
        assert plan == draw(seed, may_mount=True)
        assert Plan.from_json(plan.to_json()) == plan
