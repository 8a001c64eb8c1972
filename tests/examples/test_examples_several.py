"""The examples with several models and optimizers: beside one process, and with processes killed in mid-training."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from commands import Job
from loaded_programs import WITH_TORCH

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
Train = Callable[..., None]


def parameters(models: dict[str, Any]) -> list[Any]:
    """Copies, by model and then in their order."""
    return [parameter.detach().clone() for model in models.values() for parameter in model.parameters()]


def assert_trained_alike(found: list[list[Any]], plain: list[Any], at_first: list[Any]) -> None:
    """All workers have what one process has, but for rounding, and nothing is as it was at first."""
    for trained in found:
        for actual, expected, before in zip(trained, plain, at_first, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
            assert (actual - before).abs().max() > 10 * (actual - expected).abs().max()


def test_dcgan_on_two_workers_trains_what_one_process_does_on_their_batches(
    example: Callable[[str], Any], run_workers: Any
) -> None:
    """Batches are normalized by each worker for itself, as by one process that takes one after the other."""
    psd = pytest.importorskip("psd_client.torch")
    dcgan = example("dcgan")
    images, _ = dcgan.digits()
    args = argparse.Namespace(steps=12, batch_size=16, lr=2e-3)

    def train(clock: Callable[[], int], models: Any, optimizers: Any, ranks: Any) -> list[Any]:
        dcgan.train(clock, models, optimizers, images, ranks, args, lambda *_: None)
        return parameters(models)

    def worker(ps: Any) -> list[Any]:
        models = made[ps.rank]
        return train(lambda: ps.clock, models, psd.distribute(models, dcgan.adams(models, args.lr), ps=ps), [ps.rank])

    alone, *made = [dcgan.models() for _ in range(3)]  # in this thread: torch's seed is one for all
    at_first = parameters(alone)
    plain = train(itertools.count().__next__, alone, dcgan.adams(alone, args.lr), range(2))

    assert_trained_alike(run_workers(2, 2, worker), plain, at_first)


def test_actor_critic_on_three_workers_trains_what_one_process_does_on_all_episodes(
    example: Callable[[str], Any], run_workers: Any
) -> None:
    """Three have shares of different sizes, and episodes of different lengths."""
    psd = pytest.importorskip("psd_client.torch")
    actor_critic = example("actor_critic")
    iterations = 4

    def train(clock: Callable[[], int], models: Any, optimizers: Any, rank: int, world_size: int) -> list[Any]:
        actor_critic.train(clock, models, optimizers, rank, world_size, iterations, lambda *_: None)
        return parameters(models)

    def worker(ps: Any) -> list[Any]:
        models = made[ps.rank]
        optimizers = psd.distribute(models, actor_critic.optimizers_of(models), ps=ps)
        return train(lambda: ps.clock, models, optimizers, ps.rank, ps.world_size)

    alone, *made = [actor_critic.models() for _ in range(4)]  # likewise
    at_first = parameters(alone)
    plain = train(itertools.count().__next__, alone, actor_critic.optimizers_of(alone), 0, 1)

    assert_trained_alike(run_workers(3, 2, worker), plain, at_first)


def test_actor_critic_refuses_more_workers_than_there_are_episodes(example: Callable[[str], Any]) -> None:
    actor_critic = example("actor_critic")

    with pytest.raises(ValueError, match="at most 16 workers; got 17"):
        actor_critic.play(actor_critic.models()["actor"], 0, 3, 17)


@pytest.mark.process
def test_actor_critic_learns_to_balance_the_pole() -> None:
    """At first an episode has some 20 steps, and 200 are the most."""
    run = Job(
        "--shards",
        "2",
        "--workers",
        "2",
        str(EXAMPLES / "actor_critic.py"),
        "--iterations",
        "30",
        loads=WITH_TORCH,
    )
    try:
        assert run.end() == 0, run.output
    finally:
        run.close()

    assert result(run)["steps_of_an_episode"] > 120


@pytest.mark.process
@pytest.mark.usefixtures("_one_thread")
def test_dcgan_when_a_worker_and_a_shard_are_killed_then_ends_as_if_nothing_had_happened(
    example: Callable[[str], Any], run_workers: Any
) -> None:
    """The worker that is started again knows by the clock whose turn it is. Undisturbed, workers are threads here."""
    psd = pytest.importorskip("psd_client.torch")
    dcgan, args = example("dcgan"), argparse.Namespace(steps=100, batch_size=32, lr=2e-3)
    images, held_out = dcgan.digits()
    made = [dcgan.models() for _ in range(2)]

    def worker(ps: Any) -> float:
        models = made[ps.rank]
        optimizers = psd.distribute(models, dcgan.adams(models, args.lr), ps=ps, aggregation="exact")
        dcgan.train(lambda: ps.clock, models, optimizers, images, [ps.rank], args, lambda *_: None)
        return dcgan.distance(dcgan.generated(models["generator"], 500), held_out)

    options = ("--shards", "2", "--workers", "2", "--aggregation", "exact", "--max-restarts", "1", "--lease", "60")
    run = Job(*options, str(EXAMPLES / "dcgan.py"), "--steps", "100", "--batch-size", "32", loads=WITH_TORCH)
    try:
        run.wait_until_ready()
        run.line(r"worker 0\] step +50 of 100")
        os.kill(run.worker_pid(1), SIGKILL)
        run.line(r"worker 1\] goes on with step [5-9]\d")
        os.kill(run.shard_pid(1), SIGKILL)
        run.line(r"shard 1 serves again")
        assert run.end() == 0, run.output
    finally:
        run.close()

    undisturbed, _ = run_workers(2, 2, worker)
    assert result(run)["distance"] == undisturbed
    assert undisturbed < 25  # it was 51 at first


def result(run: Job) -> dict[str, Any]:
    (line,) = (line for line in run.lines if " result {" in line)
    found: dict[str, Any] = json.loads(line.partition(" result ")[2])
    return found
