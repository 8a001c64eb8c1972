"""The model finds what is planted: each kind of failure in a history that was made up, and none in one that is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import CELLS, DIGITS, NUMBERS, TENSORS, Counts, Gradients, initial, seen
from conduct import check_conduct
from counting import compare
from history import Histories
from outcome import Outcome
from plan import Fault, Plan, Style, draw
from row_cells import TABLES, RowCells

SHARDS = 2


class Story:
    """A history of one worker that is made up, call by call, and the parameters that the job has ended with."""

    def __init__(self, directory: Path, mode: str = "fast", **options: Any) -> None:
        self._directory = directory
        self._plan = Plan(1, "grpc", mode, 1, SHARDS, styles=(Style(),), **options)
        self._lines: list[dict[str, Any]] = []
        self._stats = dict.fromkeys(("pushes", "blocks_counted", "blocks_duplicate", "blocks_late", "pushes_dropped"), 0)
        self.t = 10.0
        names = (*(f"shard {index}" for index in range(SHARDS)), "worker 0 life 0")
        self.timeline: list[dict[str, Any]] = [{"t": self.t, "what": "start", "name": name} for name in names]
        self.parameters = initial("small", SHARDS)

    def call(self, op: str, result: str = "ok", *, took: float = 0.1, clock: int = 0, **change: Any) -> None:
        """A call; number: of its gradient; change: of the stats."""
        number = change.pop("number", None)
        pushed = {} if number is None else {"number": number, "tensors": list(TENSORS)}
        self._write(e="invoke", op=op, clock=clock, **pushed)
        self.t += took
        if result == "killed":
            return
        fields = {name: change.pop(name) for name in ("text", "is_psd", "detail", "trace", "seen") if name in change}
        for name, value in change.items():
            self._stats[name] += value
        outcome = {"e": "ok"} if result == "ok" else {"e": "error", "class": result}
        self._write(**outcome, op=op, clock=clock + (result == "ok"), stats=dict(self._stats), **fields)

    def push_pull(self, number: int, result: str = "ok", **change: Any) -> None:
        """Which counts in all blocks, by what its worker is told."""
        counted = {"blocks_counted": 4} if result == "ok" and "blocks_counted" not in change else {}
        self.call("push_pull", result, number=number, **counted, **change)

    def say(self, text: str) -> None:
        self._write(e="log", level="WARNING", text=text)

    def count(self, number: int, times: int = 1, tensors: tuple[str, ...] = TENSORS, part: slice = slice(None)) -> None:
        """What the shards have done with a gradient."""
        gradients = Gradients("small", SHARDS).write(number, tensors)
        for name in tensors:
            self.parameters[name][part] -= times * gradients[name][part]

    def note(self, what: str, **fields: Any) -> None:
        self.timeline.append({"t": self.t, "what": what, **fields})

    def fault(self, kind: str, seconds: float = 0.1) -> None:
        fault = vars(Fault(kind, 0, seconds, 0, 0))
        self.note("begin", fault=fault)
        self.timeline.append({"t": self.t + seconds, "what": "end", "fault": fault})
        if kind in ("shard-kill", "shard-lose", "shard-terminate"):
            self.timeline.append({"t": self.t + seconds, "what": "start", "name": "shard 0"})

    def end(self, how: str = "with", status: int = 0) -> None:
        if how:
            self._write(e="end", how=how)
        self.note("exit", name="worker 0 life 0", pid=1, status=status)

    def found(self) -> set[str]:
        """The kinds of failures that the checks find."""
        self.t += 1
        self.note("closed")
        lines = "".join(json.dumps(line) + "\n" for line in self._lines)
        (self._directory / "worker-0-life-0.jsonl").write_text(lines)
        for shard in range(SHARDS):
            (self._directory / f"shard-{shard}.log").touch()
        outcome = Outcome(self._plan, self._directory, self.timeline, final=self._directory)
        histories = Histories(outcome)
        failures = compare(histories, Counts(self.parameters, SHARDS)) + check_conduct(histories)
        return {failure.kind for failure in failures}

    def _write(self, **record: Any) -> None:
        self._lines.append({"t": self.t, **record})


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


def test_checks_when_ctrl_c_takes_long_then_they_find_it(story: Story) -> None:
    story.note("signal", name="worker 0 life 0", signal="SIGINT")
    story.t += 9
    story.end("", -2)

    assert story.found() == {"Ctrl-C"}


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


def test_plans_when_drawn_then_a_seed_says_it_all_and_files_keep_it() -> None:
    for seed in range(200):
        plan = draw(seed, may_mount=True)
        assert plan == draw(seed, may_mount=True)
        assert Plan.from_json(plan.to_json()) == plan
