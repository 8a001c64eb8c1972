"""The harness in short: a few trials, each with faults of several kinds at once; `make jepsen` has them at length."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
from counting import Failure
from plan import Fault, Learning, Plan, Style
from processes import ShardActor, Timeline
from verdict import Verdict, shrink, try_plan

AGAIN, OTHER = {"again": 1.0}, {"other": 1.0}

SHORT = {"workers": 2, "shards": 2, "seconds": 3.0}
PLANS = {
    "exact, waits that end too early, a shard killed, connections cut": Plan(
        seed=1,
        lane="grpc",
        mode="exact",
        **SHORT,
        wait_s=0.5,
        lease_s=4.0,
        styles=(Style(reactions=AGAIN, push_share=0.5), Style(reactions=AGAIN, pace_s=0.8)),
        faults=(
            Fault("link-reset", 1.0, 0.0, shard=0, rank=0, way="control"),
            Fault("shard-kill", 1.6, 0.3, shard=1),
        ),
    ),
    "fast, workers killed after pushes, a torn message": Plan(
        seed=2,
        lane="tcp",
        mode="fast",
        **SHORT,
        size="medium",
        lease_s=2.0,
        styles=(Style(reactions=OTHER, push_share=1.0, pause_s=0.3, ending="close"), Style(push_share=0.5, pause_s=0.3)),
        faults=(
            Fault("link-truncate", 0.8, 0.5, shard=1, rank=1, way="bulk", direction="up"),
            Fault("worker-kill", 1.4, 0.1, rank=0),
            Fault("worker-kill", 2.4, 0.1, rank=1),
        ),
    ),
    "ssp, a shard suspended, a damaged file, workers that are dead or hang at the end": Plan(
        seed=3,
        lane="shm",
        mode="ssp",
        **SHORT,
        lease_s=4.0,
        checkpoint_steps=5,
        has_vectors=True,
        ends_dead=True,
        styles=(Style(reactions=OTHER), Style(reactions=OTHER, pace_s=0.1)),
        faults=(Fault("shard-stop", 0.8, 1.0, shard=1), Fault("shard-damage", 2.2, 0.2, shard=0)),
    ),
    "async, compressed, shards and a worker killed, a call whose answer is lost": Plan(
        seed=6,
        lane="tcp",
        mode="async",
        **SHORT,
        lease_s=2.0,
        checkpoint_steps=20,
        codec="topk:0.00078125",
        pull="bf16",
        styles=(Style(reactions=AGAIN), Style(reactions=OTHER, push_share=1.0, absent_share=0.3)),
        faults=(
            Fault("shard-kill", 0.6, 0.3, shard=1),
            Fault("link-truncate", 1.2, 0.3, shard=0, rank=0, way="bulk", direction="down"),
            Fault("worker-kill", 1.8, 0.1, rank=1),
            Fault("shard-kill", 2.4, 0.3, shard=0),
        ),
    ),
    "learners with a quorum, merged by direction, one killed, one suspended, a shard killed": Plan(
        seed=7,
        lane="grpc",
        mode="quorum-exact",
        workers=2,
        shards=2,
        seconds=5.0,
        lease_s=2.0,
        learning=Learning(steps=4, fragments=2, delay=1, grace=0.1, merge="rda"),
        styles=(Style(reactions=AGAIN, ending="close"), Style(reactions=AGAIN, pace_s=0.1, ending="close")),
        faults=(
            Fault("shard-kill", 1.0, 0.3, shard=1),
            Fault("worker-stop", 1.5, 2.5, rank=1),
            Fault("worker-kill", 2.5, 0.1, rank=0),
        ),
    ),
    "async, armed steps that are revoked again and again, a shard and a worker killed, a torn message": Plan(
        seed=8,
        lane="tcp",
        mode="async",
        **SHORT,
        lease_s=2.0,
        is_stepping=True,
        revoke_s=0.05,
        styles=(Style(reactions=AGAIN, push_share=0.0, pace_s=0.01), Style(reactions=OTHER, push_share=0.1)),
        faults=(
            Fault("shard-kill", 0.6, 0.3, shard=1),
            Fault("link-truncate", 1.4, 0.3, shard=0, rank=0, way="bulk", direction="down"),
            Fault("worker-kill", 1.8, 0.1, rank=1),
        ),
    ),
    "exact, under psd-run, which is told to end": Plan(
        seed=5,
        lane="shm",
        mode="exact",
        workers=2,
        shards=2,
        seconds=0.5,
        checkpoint_steps=5,
        has_tables=True,
        has_vectors=True,
        is_launched=True,
        styles=(Style(reactions=AGAIN), Style(reactions=AGAIN)),
        faults=(Fault("run-terminate", 0.5, 0.0),),
    ),
}


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
@pytest.mark.parametrize("name", PLANS)
def test_a_trial_when_much_goes_wrong_then_what_was_acknowledged_counts_once(tmp_path: Path, name: str) -> None:
    verdict = try_plan(PLANS[name], tmp_path / "trial")

    assert verdict.failures == [], verdict.report()
    assert verdict.counts["pushes"] + verdict.counts["exchanges"] > 0
    assert verdict.counts["steps"] > 0 or not PLANS[name].is_stepping


def test_shard_when_two_faults_have_ended_it_then_it_begins_one_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminations may overlap, and each starts again what it has ended; a second process would be refused the state."""
    lives: list[SimpleNamespace] = []

    def begin(*_: object) -> SimpleNamespace:
        lives.append(SimpleNamespace(status=None))
        return lives[-1]

    monkeypatch.setattr(processes, "Process", begin)
    timeline = Timeline(tmp_path / "timeline.jsonl")
    shard = ShardActor(Plan(1, "grpc", "fast", 1, 1), 0, tmp_path, timeline)
    shard.start()
    lives[0].status = 0

    shard.start()
    shard.start()

    assert len(lives) == 2
    lives[1].status = 0
    shard.close()
    timeline.close()


@pytest.mark.parametrize("becomes", ["", "longer", "the same"])
def test_shard_when_it_has_replaced_a_damaged_file_then_the_new_one_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """It goes back to a checkpoint, and is killed meanwhile: the file that it makes anew may be shorter than where the damage
    was, which ended the harness once; and if it is not, a byte of it was changed for a repair, and nobody knew."""
    timeline = Timeline(tmp_path / "timeline.jsonl")
    shard = ShardActor(Plan(1, "grpc", "fast", 1, 1), 0, tmp_path, timeline)
    path = tmp_path / "arena"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(processes.damage, "draw", lambda *_: (path, 7))
    assert shard.damage(random.Random(1))
    assert path.read_bytes() == b"0123456689"

    if becomes != "the same":
        path.unlink()
        path.write_bytes(becomes.encode() * 3)
    shard.repair()

    assert path.read_bytes() == (b"0123456789" if becomes == "the same" else becomes.encode() * 3)
    assert [record["what"] for record in timeline.records] == ["damage"] + ["repair"] * (becomes == "the same")
    shard.close()
    timeline.close()


def test_shrink_when_one_fault_is_to_blame_then_it_alone_is_left(tmp_path: Path) -> None:
    """In few trials, and though a trial does not fail each time."""
    faults = tuple(Fault("shard-kill", float(at), 0.1, shard=0) for at in range(6))
    plan = Plan(1, "grpc", "fast", 1, 1, faults=faults)
    tried: list[int] = []

    def attempt(smaller: Plan, directory: Path) -> Verdict:
        directory.mkdir(parents=True)
        tried.append(len(smaller.faults))
        fails = faults[4] in smaller.faults and len(tried) % 2 == 0
        return Verdict(smaller, directory, failed.failures if fails else [])

    failed = Verdict(plan, tmp_path, [Failure("counted twice", "")])
    smallest = shrink(failed, tmp_path / "shrinking", runs=20, seconds=60, say=lambda _: None, attempt=attempt)

    assert smallest.plan.faults == (faults[4],)
    assert len(tried) <= 20
    assert [path for path in (tmp_path / "shrinking").iterdir() if path != smallest.directory] == []
