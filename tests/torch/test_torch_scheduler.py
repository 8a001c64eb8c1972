"""A schedule of learning rates is the job's: whatever becomes of a worker's process, it has the rates of its clock."""

from __future__ import annotations

import itertools
import threading
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, assert_close, backward, batch, part, small_model, train_alone, values  # noqa: E402
from torch.optim import SGD, Adam, lr_scheduler  # noqa: E402
from torch.optim.swa_utils import SWALR  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.checkpoint import CheckpointDirectory, CheckpointState  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402
from psd_client.torch.schedule import DistributedScheduler  # noqa: E402

CLOCKS = [0, 1, 2, 9, 3, 3, 30, 0, 12, 13, 14, 41, 7]
"""The job's clock at each look: on, far on, and back."""


class Decay(lr_scheduler.LRScheduler):
    """A user's own: it moves the weight decay, too, and keeps a number that its steps change."""

    def __init__(self, optimizer):
        self.seen = []
        super().__init__(optimizer)

    def get_lr(self):
        self.seen.append(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.5 / len(self.seen)
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]


def sequential(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [5])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 4, 0.5), sequential(optimizer)]
    )


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9 if step % 2 else 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 11], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 1.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 17, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 5, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=60),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=6),
    "a user's own": Decay,
}


def fresh(kind=SGD, lr=0.1):
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}]
    return kind(groups, lr=lr, momentum=0.9) if kind is SGD else kind(groups, lr=lr)


def options(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def undisturbed(make, kind, steps):
    """The groups' options at each clock."""
    optimizer = fresh(kind)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(options(optimizer))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler_has_the_bits_of_an_undisturbed_run_at_any_clock(name, kind):
    """On to the clock and back to it, learning rates, momentum and whatever else the scheduler moves."""
    expected = undisturbed(SCHEDULERS[name], kind, max(CLOCKS) + 1)
    optimizer = fresh(kind)
    clock = iter(CLOCKS)
    now = [0]

    scheduler = DistributedScheduler(SCHEDULERS[name](optimizer), lambda: now[0], 1)
    for now[0] in clock:
        scheduler.step()
        assert options(optimizer) == expected[now[0]], now
        assert scheduler.get_last_lr() == [group["lr"] for group in options(optimizer)]


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    """As torch's own schedulers have it."""
    optimizer = fresh(lr=torch.tensor(0.1))
    rate, now = optimizer.param_groups[0]["lr"], [9]

    scheduler = DistributedScheduler(lr_scheduler.StepLR(optimizer, 3, 0.5), lambda: now[0], 1)
    at_9, now[0] = rate.item(), 3
    scheduler.step()

    assert optimizer.param_groups[0]["lr"] is rate
    assert (at_9, rate.item()) == (pytest.approx(0.0125), pytest.approx(0.05))


def test_every_says_how_many_steps_of_the_optimizer_an_epoch_has():
    """The scheduler is then where the epochs are, also in the middle of one."""
    optimizer, now = fresh(), [0]
    scheduler = DistributedScheduler(lr_scheduler.StepLR(optimizer, 2, 0.5), lambda: now[0], 10)
    found = []
    for now[0] in (0, 9, 19, 20, 39, 40, 5):
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])

    assert found == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.1]
    assert scheduler.last_epoch == 0
    assert scheduler.state_dict() == {"last_epoch": 0}


def test_a_worker_that_joins_a_running_job_begins_at_its_rates(cluster):
    """The schedule of what distribute has returned, or of the optimizer that it was given; without a call of step()."""
    servers = cluster(2, lease_s=60).servers

    def connected(rank):
        return psd_client.connect(servers, rank, 2, wait_timeout=120)

    def distributed(ps, *, on_given=False):
        model = small_model()
        given = SGD(model.parameters(), lr=0.4)
        optimizer = psd.distribute(model, given, ps=ps)
        return model, optimizer, psd.scheduler(lr_scheduler.StepLR(given if on_given else optimizer, 2, 0.5))

    with connected(0) as stays:
        model, optimizer, schedule = distributed(stays)
        with connected(1) as leaves:
            distributed(leaves)
        for step in range(5):
            backward(model, *batch(step))
            optimizer.step()
            schedule.step()
        for on_given in (False, True):
            with connected(1) as ps:
                _, other, late = distributed(ps, on_given=on_given)
                assert (ps.clock, other.param_groups[0]["lr"], late.get_last_lr()) == (5, 0.1, [0.1])
                assert late.last_epoch == 5


def test_steps_without_a_call_of_the_scheduler_have_the_rates_of_the_clock(run_workers):
    """What the program has not called by the next step is made up for there, with and without overlap."""

    def worker(ps):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps, overlap=ps.rank == 1)
        psd.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
        for _ in range(4):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        return model.weight.item()

    assert run_workers(2, 1, worker) == [-1.875] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_nothing_disturbs_is_as_without_psd(run_workers, world_size):
    """`schedule.step()` where torch has it."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.2, momentum=0.9), ps=ps)
        schedule = psd.scheduler(sequential(optimizer))
        assert isinstance(schedule, lr_scheduler.LRScheduler)
        for step in range(STEPS):
            x, y = part(step, ps.rank, world_size)
            backward(model, x, y)
            optimizer.step(batch_size=len(x))
            schedule.step()
        return values(model)

    model = small_model()
    alone = SGD(model.parameters(), lr=0.2, momentum=0.9)
    expected = train_alone(model, alone, after_step=sequential(alone).step)
    for found in run_workers(world_size, 2, worker):
        assert_close(found, expected, 1e-5)


def test_a_job_that_goes_back_to_a_checkpoint_takes_its_schedule_along(cluster, tmp_path: Path):
    """The model's values are those of a schedule of the clock, although this process makes more steps than the job has."""
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_steps=5, lease_s=60)
    address = running.shards[1].address
    model = torch.nn.Linear(1500, 1000, bias=False)
    torch.nn.init.zeros_(model.weight)
    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps)
        schedule = psd.scheduler(lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step))
        went_back = 0
        while ps.clock < 17 or not went_back:
            optimizer.zero_grad()
            model.weight.sum().backward()
            try:
                optimizer.step()
            except psd_client.RolledBack:
                optimizer.pull()
                went_back += 1
                assert ps.clock < 12
            schedule.step()
            assert optimizer.param_groups[0]["lr"] == 1.0 + ps.clock
            if ps.clock == 12 and not went_back:
                while not any(found.state is CheckpointState.VALID for found in CheckpointDirectory(url).checkpoints()):
                    ps.barrier("a checkpoint")
                running.shards[1].stop()
                cluster(2, only=1, listen=address, checkpoint_dir=url, checkpoint_steps=5, lease_s=60)

        assert went_back == 1
        assert model.weight.eq(-sum(1.0 + step for step in range(ps.clock))).all()


def test_backup_workers_that_fall_behind_have_the_rates_of_where_they_go_on(cluster):
    """The rounds that worker 1 skips are skipped by its schedule, too."""
    servers = cluster(1, lease_s=60).servers
    declared, behind = threading.Barrier(2, timeout=120), threading.Event()

    def worker(rank):
        with psd_client.connect(servers, rank, 2, wait_timeout=120) as ps:
            model = torch.nn.Linear(1, 1, bias=False)
            optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps, quorum=1)
            schedule = psd.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
            declared.wait()
            if rank == 1:
                assert behind.wait(120)
            for _ in range(1 if rank else 5):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                schedule.step()
            behind.set()
            return ps.clock, optimizer.param_groups[0]["lr"]

    found = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: worker(rank)})) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)

    assert found == {0: (5, 0.5**5), 1: (5, 0.5**5)}


def test_loading_a_state_leaves_the_schedule_where_the_job_is(run_workers):
    """The options of a saved optimizer are taken over, but for those that the schedule moves."""

    def worker(ps):
        model = small_model()
        given = SGD(model.parameters(), lr=0.8, weight_decay=0.1)
        optimizer = psd.distribute(model, given, ps=ps)
        schedule = psd.scheduler(lr_scheduler.StepLR(optimizer, 1, 0.5))
        saved = optimizer.state_dict(), given.state_dict(), schedule.state_dict()
        for step in range(3):
            backward(model, *batch(step))
            optimizer.step()
            schedule.step()
        found = []
        for load in (lambda: optimizer.load_state_dict(saved[0]), lambda: given.load_state_dict(saved[1])):
            optimizer.param_groups[0]["weight_decay"] = 0.2
            load()
            schedule.load_state_dict(saved[2])
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        return found

    assert run_workers(1, 1, worker) == [[(0.1, 0.1)] * 2]


def test_what_cannot_be_kept_at_the_clock_is_refused(run_workers):
    """By what is wrong with it, when it is given, or at the first step."""

    def worker(ps):
        model = small_model()
        other = SGD(small_model().parameters(), lr=0.1)
        with pytest.raises(InvalidRequest, match=r"its optimizer is neither distribute\(\)'s result nor"):
            psd.scheduler(lr_scheduler.StepLR(other, 2))
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        with pytest.raises(InvalidRequest, match="ReduceLROnPlateau follows what this worker has measured"):
            psd.scheduler(lr_scheduler.ReduceLROnPlateau(optimizer))
        with pytest.raises(TypeError, match=r"expected one of torch\.optim\.lr_scheduler, got 3"):
            psd.scheduler(3)
        with pytest.raises(InvalidRequest, match="every: must be at least 1, got 0"):
            psd.scheduler(lr_scheduler.StepLR(optimizer, 2), every=0)
        stepped = lr_scheduler.StepLR(optimizer, 2)
        stepped.optimizer._opt_called = True
        stepped.step()
        with pytest.raises(InvalidRequest, match="StepLR has been stepped 1 times; pass it as it is at the job's step 0"):
            psd.scheduler(stepped)

        given = lr_scheduler.StepLR(optimizer, 2)
        schedule = psd.scheduler(given)
        with pytest.raises(InvalidRequest, match="has one already; make one of several"):
            psd.scheduler(lr_scheduler.StepLR(optimizer, 2))
        with pytest.raises(TypeError, match=r"expected one of torch\.optim\.lr_scheduler"):
            psd.scheduler(schedule)
        with pytest.raises(InvalidRequest, match="takes no epoch"):
            schedule.step(3)
        for step in range(3):
            backward(model, *batch(step))
            optimizer.step()
        with pytest.raises(InvalidRequest, match=r"came after 3 steps of the optimizer, and every is 1; a schedule in epochs"):
            schedule.step()
        given.step()
        with pytest.raises(InvalidRequest, match="the given one was stepped by the program"):
            optimizer.step()
        return ps.clock

    assert run_workers(1, 1, worker) == [3]


def test_steps_that_are_made_up_for_do_not_warn():
    """Torch warns of a scheduler that is stepped before its optimizer; here that is in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make, now in itertools.product(SCHEDULERS.values(), (3, 40)):
            DistributedScheduler(make(fresh()), lambda now=now: now, 1)
