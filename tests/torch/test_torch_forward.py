"""overlap="forward": the next forward pass begins with the parameters that have arrived; none is lost, and none too old."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import Unlike  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, NonFiniteGradient  # noqa: E402
from psd_client.torch.gradients import Gradients, _Push  # noqa: E402

TRANSPORTS = ("shm", "tcp", "grpc")
STEPS = 6


class Model(Unlike):
    """Its gradients do not depend on the parameters: with a learning rate of 1 these are minus the sum of all gradients."""

    def loss(self, factor: float) -> Any:
        return sum(factor * parameter.float().sum() for parameter in self.parameters())

    def all_are(self, value: float) -> bool:
        return all(bool(parameter.eq(value).all()) for parameter in self.parameters())


def begun(ps: Any, **options: Any) -> tuple[Model, Any]:
    model = Model()
    given = SGD(model.parameters(), lr=1.0)
    return model, psd.distribute(model, given, ps=ps, overlap="forward", **{"consistency": "async", **options})


def step(model: Model, optimizer: Any, factor: float) -> None:
    optimizer.zero_grad(set_to_none=bool(factor % 2))
    model.loss(factor).backward()
    optimizer.step()


def assert_held(running: Any, value: float) -> None:
    """All parameters on all shards are that."""
    for shard in running.shards:
        for block in shard.shard._core.initialized().blocks.values():
            _, page = block.read(0)
            assert (page.parameter == value).all()
            block.unpin(page)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_step_then_parameters_are_at_most_one_step_old_and_pull_has_all(run_workers: Any, transport: str) -> None:
    def body(ps: Any) -> None:
        model, optimizer = begun(ps)
        for number in range(1, STEPS + 1):
            step(model, optimizer, number)
            newest = number * (number + 1) / 2
            for parameter in model.parameters():
                assert set(parameter.float().unique().tolist()) <= {-newest, number - newest}
        optimizer.pull()
        assert model.all_are(-STEPS * (STEPS + 1) / 2)

    run_workers(1, 2, body, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_step_when_an_answer_is_late_then_the_next_forward_pass_begins_without_it(cluster: Any, transport: str) -> None:
    """One block is held at the shard. The step after the next waits for it, or another one of its age would follow."""
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, transport=transport, wait_timeout=120) as ps:
        model, optimizer = begun(ps)
        blocks = running.shards[0].shard._core.initialized().blocks
        with blocks[max(blocks)].lock:
            step(model, optimizer, 1)
            assert not model.all_are(-1)
            assert model.last.eq(0).all()
        step(model, optimizer, 2)

        assert model.last.eq(-3).all()
        assert blocks[max(blocks)].ages.total == 1  # of the second gradient: the shard was told what it came from
        optimizer.pull()
        assert model.all_are(-3)


def test_close_when_a_push_goes_on_then_it_is_not_lost(cluster: Callable[..., Any]) -> None:
    """Nor does a barrier mind it."""
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        model, optimizer = begun(ps)
        for number in range(1, STEPS + 1):
            step(model, optimizer, number)
            ps.barrier("done")
        step(model, optimizer, 100)
        optimizer.close()

    assert_held(running, -100 - STEPS * (STEPS + 1) / 2)


PROGRAM = """
import sys, torch, psd_client, psd_client.torch as psd
optimizers = []
for job in sys.argv[1:]:
    servers, transport = job.split("/")
    model = torch.nn.Linear(1000, 1000, bias=False)
    torch.nn.init.zeros_(model.weight)
    ps = psd_client.connect(servers, 0, 1, transport=transport)
    optimizers.append(psd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), ps=ps, consistency="async", overlap="forward"
    ))
    model.weight.sum().backward()
for optimizer in optimizers:
    optimizer.step()
"""


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
def test_program_when_it_ends_without_close_then_its_last_pushes_are_not_lost(cluster: Any) -> None:
    """Its only steps, of three jobs, have not waited."""
    jobs = {transport: cluster(2) for transport in TRANSPORTS}
    arguments = [f"{running.servers}/{transport}" for transport, running in jobs.items()]
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, timeout=280)

    for running in jobs.values():
        workers = [worker for shard in running.shards for worker in shard.shard._core.members.workers]
        assert [worker.state.name for worker in workers] == ["FINISHED"] * 2
        assert_held(running, -1)


def test_close_when_the_last_push_has_failed_then_says_so_and_has_not_finished(cluster: Any, caplog: Any) -> None:
    """Nobody else would hear of it."""
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1) as ps:
        model, optimizer = begun(ps)
        with running.shards[0].shard._core.lock:  # nothing is looked at: the step does not hear of it itself
            step(model, optimizer, float("nan"))

    assert "its last push failed, and the program has not been told" in caplog.text
    assert [worker.state.name for worker in running.shards[0].shard._core.members.workers] == ["EXPIRED"]


def test_step_when_interrupted_then_the_next_backward_does_not_change_what_is_being_sent(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the step waits, with overlap=True; the program goes on. The shard reads the gradient where it lies."""
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, transport="shm") as ps:
        model = Model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps, overlap=True)
        held = [block.lock for block in running.shards[0].shard._core.initialized().blocks.values()]
        for lock in held:
            lock.acquire()

        def released(gradients: Gradients) -> None:
            while held:
                held.pop().release()
            settle(gradients)

        settle = Gradients.settle
        model.loss(1).backward()
        with monkeypatch.context() as patched:
            patched.setattr(_Push, "next_block", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        monkeypatch.setattr(Gradients, "settle", released)
        optimizer.zero_grad()
        model.loss(100).backward()
        optimizer.step()

        assert model.all_are(-101)


def interrupted(_: _Push, __: bool) -> None:
    raise KeyboardInterrupt


def test_backward_when_the_push_before_has_failed_then_says_so(run_workers: Any) -> None:
    """The step did not wait for it. What was sent with it is not there any more, so the worker cannot go on."""

    def body(ps: Any) -> None:
        model, optimizer = begun(ps)
        model.loss(float("nan")).backward()
        with pytest.raises(NonFiniteGradient, match="cannot take part in the job any more"):
            for number in range(3):
                optimizer.step()
                model.loss(number).backward()
        with pytest.raises(InvalidRequest, match="restart this worker"):
            step(model, optimizer, 1)

    run_workers(1, 1, body)


@pytest.mark.parametrize("consistency", ["sync", "ssp:2", None])
def test_distribute_when_parameters_may_not_be_old_then_refuses(run_workers: Any, consistency: str | None) -> None:
    def body(ps: Any) -> None:
        with pytest.raises(InvalidRequest, match=f"overlap: .forward. is for consistency=.async.*{consistency or 'sync'}"):
            begun(ps, consistency=consistency)
        with pytest.raises(InvalidRequest, match=r"overlap: must be False, True or .forward., got .backward."):
            psd.distribute(Model(), SGD(Model().parameters(), lr=1.0), ps=ps, overlap="backward")

    run_workers(1, 1, body)
