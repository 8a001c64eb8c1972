"""Jobs of server-side vectors while shards are killed: L-BFGS ends in the same bits, and no token of a topic model is lost."""

from __future__ import annotations

import argparse
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shard_processes import servers_of

import psd_client.lbfgs

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.process
SIZE = 9000  # three stripes


def loss_and_grad(x):
    """Of a chain of weights, whose neighbours ought to be alike, and whose first is 1."""
    jumps = np.diff(x)
    gradient = np.zeros_like(x)
    gradient[0] = 4 * (x[0] - 1) ** 3
    gradient[1:] += jumps
    gradient[:-1] -= jumps
    return (x[0] - 1) ** 4 + jumps @ jumps / 2, gradient


class Killer:
    """Kills shards, one after the other, while the others' calls go on, and starts them again."""

    def __init__(self, shards, times):
        self._shards, self._left = shards, times
        self._thread = threading.Thread()

    def strike(self):
        """Kill one, unless one is being killed; returns at once."""
        if self._left and not self._thread.is_alive():
            self._left -= 1
            self._thread = threading.Thread(target=self._kill, args=[self._shards[self._left % len(self._shards)]])
            self._thread.start()

    def _kill(self, shard):
        shard.kill()
        shard.start()

    def join(self):
        self._thread.join()
        assert not self._left


def run(servers, worker):
    def connected(rank):
        with psd_client.connect(servers, rank, 2, retry_timeout=60, wait_timeout=60) as ps:
            return worker(ps)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(connected, range(2)))


def test_lbfgs_ends_in_the_same_bits_and_topics_add_up_when_shards_are_killed(run_workers, shard_processes, monkeypatch):
    """A job of both, whose shards are killed now and then, beside what each gives undisturbed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lda, data = importlib.import_module("lda"), importlib.import_module("sparse_data").generated_documents()
    topics = argparse.Namespace(topics=20, sweeps=50, alpha=0.1, beta=0.01, report=1000, seed=1)
    problem = {"x0": np.zeros(SIZE), "l2": 1e-4, "max_iterations": 30}
    whole, _ = run_workers(2, 1, lambda ps: psd_client.lbfgs.minimize(ps, loss_and_grad, **problem))
    shards = shard_processes(2)
    killer = Killer(shards, 3)

    def worker(ps):
        calls = iter(range(1000))

        def disturbed(x):
            if next(calls) in (5, 20) and ps.rank == 1:
                killer.strike()
            return loss_and_grad(x)

        def store(shared, *arguments):
            if next(calls) % 15 == 0:
                killer.strike()
            undisturbed_store(shared, *arguments)

        undisturbed_store = lda.Shared.store
        result = psd_client.lbfgs.minimize(ps, disturbed, **problem)
        if ps.rank == 0:
            monkeypatch.setattr(lda.Shared, "store", store)
        return result, lda.work(ps, data, topics)

    (first, counted), (second, _) = run(servers_of(shards), worker)

    killer.join()
    assert first.x.tobytes() == second.x.tobytes() == whole.x.tobytes()
    assert (first.fun, first.nit, first.nfev) == (whole.fun, whole.nit, whole.nfev)
    assert whole.nit == 30
    assert (counted["counted"], counted["is_exact"]) == (len(data.words), True)
    assert counted["perplexity"] == pytest.approx(lda.alone(data, topics)["perplexity"], rel=0.02)


def test_lbfgs_and_topics_go_on_from_a_checkpoint_with_other_numbers_of_shards_and_workers(
    run_workers, cluster, tmp_path, monkeypatch
):
    """L-BFGS ends in the same bits as one that went through. Topics are of all tokens, also with one worker in place of two."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lda, data = importlib.import_module("lda"), importlib.import_module("sparse_data").generated_documents()
    topics = {"topics": 20, "alpha": 0.1, "beta": 0.01, "report": 1000, "seed": 1}
    problem = {"x0": np.zeros(SIZE), "l2": 1e-4, "max_iterations": 20}
    whole, _ = run_workers(2, 1, lambda ps: psd_client.lbfgs.minimize(ps, loss_and_grad, **problem))
    checkpoints = str(tmp_path / "checkpoints")

    def interrupted(ps):
        calls = iter(range(12))

        def breaking(x):
            next(calls)
            return loss_and_grad(x)

        with pytest.raises((RuntimeError, StopIteration, psd_client.WorkerFailed)):
            psd_client.lbfgs.minimize(ps, breaking if ps.rank == 1 else loss_and_grad, **problem)
        return lda.work(ps, data, argparse.Namespace(sweeps=10, **topics))

    def resumed(ps):
        return psd_client.lbfgs.minimize(ps, loss_and_grad, **problem)

    first = cluster(2, checkpoint_dir=checkpoints)
    (early, _) = run(first.servers, interrupted)
    first.finish()
    second = cluster(3, checkpoint_dir=checkpoints)
    results = run(second.servers, resumed)
    second.finish()
    third = cluster(1, checkpoint_dir=checkpoints)
    with psd_client.connect(third.servers, 0, 1) as ps:
        late = lda.work(ps, data, argparse.Namespace(sweeps=30, **topics))

    assert {result.x.tobytes() for result in results} == {whole.x.tobytes()}
    assert (results[0].fun, results[0].nit) == (whole.fun, whole.nit)
    assert (early["counted"], early["is_exact"]) == (late["counted"], late["is_exact"]) == (len(data.words), True)
    assert late["perplexity"] < early["perplexity"]


def test_workers_that_sample_topics_wait_for_those_that_are_some_sweeps_behind(run_workers, monkeypatch):
    """A worker that begins late fits its documents no worse, since the first one waits for it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lda, data = importlib.import_module("lda"), importlib.import_module("sparse_data").generated_documents()
    topics = argparse.Namespace(topics=20, sweeps=50, alpha=0.1, beta=0.01, report=1000, seed=1)
    is_waiting, ahead = threading.Event(), []

    def worker(ps):
        def barrier(name):
            if name == "sweep":
                is_waiting.set()
            undisturbed_barrier(name)

        undisturbed_barrier = ps.barrier
        monkeypatch.setattr(ps, "barrier", barrier)
        return lda.work(ps, data, topics)

    def store(shared, first, topics, changes, sweep):
        if first and sweep:  # the second worker
            assert is_waiting.wait(100)
        elif sweep and not is_waiting.is_set():
            ahead.append(sweep)
        undisturbed_store(shared, first, topics, changes, sweep)
        if sweep == 50:
            is_waiting.set()

    undisturbed_store = lda.Shared.store
    monkeypatch.setattr(lda.Shared, "store", store)
    found, _ = run_workers(2, 1, worker)

    assert max(ahead) == lda.APART
    assert found["perplexity"] == pytest.approx(lda.alone(data, topics)["perplexity"], rel=0.02)
