"""What is done about the age of gradients: against the papers' formulas, by hand; and what a shard keeps for it."""

from __future__ import annotations

import numpy as np
import pytest
from shard_driver import Driver, job_spec

from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.staleness import parse_staleness
from psd.state.aggregation.staleness import EPS, age_bucket

SGD = (0.5, 0.0, 0.0, 0.0)


def driver_of(staleness="", flags=(), rule="sgd", workers=3, dtype="float64", **config) -> Driver:
    spec = JobSpec(
        workers,
        (TensorSpec("w", (2,), dtype),),
        (GroupSpec(rule, flags, staleness=staleness),),
        Consistency.parse("async"),
    )
    return Driver(spec, **config)


def read(driver, *seats):
    """Each of them pulls, as a worker does before it computes a gradient; the version."""
    for seat in seats:
        driver.pull(seat, 0)
    return driver.version()


def push(driver, seat, clock, value, version, scalars=SGD):
    driver.push(seat, clock, value, versions=[version], scalars=scalars)


def test_lr_is_divided_by_one_plus_the_age():
    """Zhang et al. 2016: three workers read the same version, and push one after the other."""
    driver = driver_of("lr")
    seats = driver.start()

    for seat in seats:
        push(driver, seat, 0, 6.0, 0)

    assert driver.values() == [-0.5 * (6 + 6 / 2 + 6 / 3)] * 2


def test_a_late_gradient_is_compensated():
    """DC-ASGD-c by hand: g + lambda * g * g * (w_now - w_read), applied by SGD."""
    driver = driver_of("dc")
    a, b, _ = driver.start()
    version = read(driver, a, b)
    scalars = (*SGD, 0.25)

    push(driver, a, 0, [2.0, -1.0], version, scalars)
    push(driver, b, 0, [4.0, 4.0], version, scalars)

    now = np.array([-1.0, 0.5])
    compensated = 4.0 + 0.25 * 4.0 * 4.0 * (now - 0.0)
    assert driver.values() == (now - 0.5 * compensated).tolist()


def test_a_gradient_of_age_0_is_used_as_it_is():
    """A single worker trains as without compensation, to the bit."""
    plain, compensated = driver_of(workers=1), driver_of("dc", workers=1)
    for driver, scalars in ((plain, SGD), (compensated, (*SGD, 0.3))):
        (a,) = driver.start()
        for clock in range(5):
            push(driver, a, clock, 0.1 + clock / 3, read(driver, a), scalars)

    assert plain.values() == compensated.values()


def test_the_backup_is_what_the_worker_read_last():
    """Not what it read first, nor what another one has."""
    driver = driver_of("dc")
    a, b, c = driver.start()
    scalars = (*SGD, 1.0)
    old = read(driver, a)
    push(driver, b, 0, 2.0, old, scalars)  # -1
    new = read(driver, a, b)
    push(driver, c, 0, 2.0, old, scalars)  # has read nothing: not compensated, -2

    push(driver, a, 0, 1.0, new, scalars)

    assert driver.values() == [-2 - 0.5 * (1 + 1 * (-2 - -1))] * 2


def test_dc_adaptive_divides_lambda_by_the_root_of_a_running_mean():
    """DC-ASGD-a by hand: the mean of squares begins as zero, and every gradient enters it, fresh ones too."""
    driver = driver_of("dc-adaptive")
    a, b, _ = driver.start()
    version = read(driver, a, b)
    scalars = (*SGD, 2.0, 0.75)

    push(driver, a, 0, 2.0, version, scalars)
    push(driver, b, 0, 4.0, version, scalars)

    mean_square = 0.75 * (0.25 * 4.0) + 0.25 * 16.0
    compensated = 4.0 + 2.0 / np.sqrt(mean_square + EPS) * 16.0 * (-1.0 - 0.0)
    assert driver.values() == pytest.approx([-1.0 - 0.5 * compensated] * 2, rel=1e-14)
    assert driver.core.job.blocks[0]._page.slots[-1].tolist() == [mean_square] * 2


def test_compensation_goes_before_any_rule():
    """Here momentum, and an objective that is maximized, whose curvature has the other sign."""
    driver = driver_of("dc", flags=("maximize", "momentum"))
    a, b, _ = driver.start()
    version = read(driver, a, b)
    scalars = (0.5, 0.5, 0.0, 0.0, 0.25)

    push(driver, a, 0, 2.0, version, scalars)
    push(driver, b, 0, 4.0, version, scalars)

    compensated = 4.0 - 0.25 * 16.0 * 1.0
    assert driver.values() == [1.0 + 0.5 * (0.5 * 2.0 + compensated)] * 2


def test_float32_stays_float32():
    """No double slips in, which would give other bits elsewhere."""
    driver = driver_of("dc-adaptive", dtype="float32")
    a, b, _ = driver.start()
    version = read(driver, a, b)
    push(driver, a, 0, 0.1, version, (*SGD, 2.0, 0.95))
    push(driver, b, 0, 0.3, version, (*SGD, 2.0, 0.95))

    g, now, decay = np.float32(0.3), -np.float32(0.5) * np.float32(0.1), np.float32(0.95)
    mean = (g * g) * np.float32(1 - 0.95) + decay * ((np.float32(0.1) * np.float32(0.1)) * np.float32(1 - 0.95))
    moved = (now * g) * g * (np.float32(2.0) / np.sqrt(mean + np.float32(EPS))) + g
    assert np.float32(driver.values()[0]) == now - np.float32(0.5) * moved


def test_a_page_that_was_read_costs_memory_only_while_its_reader_is_there():
    """What is kept for a worker is given back when it reads again, leaves, or expires."""
    driver = driver_of("dc")
    a, b, c = driver.start()
    arena = driver.core.job.arena
    pins = lambda: {rank: page.version for rank, page in driver.core.job.blocks[0].readers._pages.items()}  # noqa: E731

    read(driver, a, b, c)
    push(driver, a, 0, 1.0, 0, (*SGD, 0.1))
    first = driver.core.job.blocks[0].readers._pages[1]
    assert read(driver, a) == 1
    assert pins() == {0: 1, 1: 0, 2: 0}
    driver.leave(b)
    driver.expire(c, keep=[a])

    assert pins() == {0: 1}
    assert first.pins == 0
    assert arena.current(0).pins == 2


def test_a_pull_that_only_waits_reads_nothing():
    """The worker's next gradient is still of what it read before."""
    from psd.v1 import data_pb2

    driver = driver_of("dc")
    a, b, _ = driver.start()
    read(driver, a)
    push(driver, b, 0, 1.0, 0, (*SGD, 0.1))
    request = data_pb2.PullRequest(caller=a.caller, clock=0, layout_digest=driver.layout.digest, versions_only=True)
    pull, (block,) = driver.shard.exchange.begin_pull(request)
    found = driver.shard.exchange.read(block, pull)
    block.unpin(found[1])

    assert block.readers._pages[0].version == 0


def test_after_a_restart_a_gradient_on_its_way_is_not_compensated(tmp_path):
    """The pages that were read ended with the process; the age, which the worker states, is known."""
    driver = driver_of("dc", state_dir=str(tmp_path / "state"))
    a, b, c = driver.start()
    version = read(driver, a, b)
    push(driver, a, 0, 2.0, version, (*SGD, 1.0))
    driver.restart(a, b, c)

    push(driver, b, 0, 4.0, version, (*SGD, 1.0))

    assert driver.values() == [-3.0] * 2
    assert driver.core.job.ages == [0, 1]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([], "versions: are needed, because a group of the job has a staleness"),
        ([0, 0], "versions: expected one per trained block of the shard, 1, got 2"),
        ([1], "versions: worker 0 says that it has read version 1 of block 0, which is at 0"),
    ],
)
def test_versions_that_cannot_be_are_refused(versions, message):
    """And nothing is counted."""
    driver = driver_of("lr")
    a, *_ = driver.start()

    with pytest.raises(InvalidRequest, match=message):
        driver.push(a, 0, 1.0, versions=versions)

    assert driver.values() == [0.0] * 2
    assert driver.version() == 0


def test_a_client_that_states_no_versions_can_train_without_a_staleness():
    """Such as one on stock stubs; its gradients are in no histogram."""
    driver = driver_of()
    a, *_ = driver.start()

    driver.push(a, 0, 1.0)

    assert driver.version() == 1
    assert driver.core.job.ages == []


def test_sync_ignores_versions():
    """There a gradient is of its round, or refused."""
    driver = Driver(job_spec(1))
    (a,) = driver.start()

    driver.push(a, 0, 1.0, versions=[99])

    assert driver.version() == 1
    assert driver.core.job.ages == []


def test_ages_are_counted_once_per_gradient():
    """Duplicates are not."""
    driver = driver_of()
    a, b, _ = driver.start()
    for clock in range(6):
        push(driver, a, clock, 1.0, clock)
        push(driver, a, clock, 1.0, 0)
    push(driver, b, 0, 1.0, 3)

    assert driver.core.job.ages == [6, 0, 0, 1]


def test_buckets_double():
    """0, 1, 2, 3 to 4, 5 to 8, 9 to 16."""
    buckets = [age_bucket(age) for age in range(18)]

    assert buckets == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6]


@pytest.mark.parametrize(
    ("word", "parsed"),
    [
        ("", ("", {})),
        ("lr", ("lr", {})),
        ("dc", ("dc", {"dc_lambda": 0.04})),
        ("dc:0.5", ("dc", {"dc_lambda": 0.5})),
        ("dc-adaptive", ("dc-adaptive", {"dc_lambda": 2.0, "dc_decay": 0.95})),
        ("dc-adaptive:1", ("dc-adaptive", {"dc_lambda": 1.0, "dc_decay": 0.95})),
    ],
)
def test_the_word_says_it_all(word, parsed):
    """With the papers' values where it does not."""
    assert parse_staleness(word) == parsed


@pytest.mark.parametrize("word", ["rate", "lr:2", "dc:", "dc:x", "dc:-1", "dc:nan", ":1", "DC"])
def test_a_wrong_word_is_refused(word):
    """Saying what was expected."""
    with pytest.raises(InvalidRequest, match=r'staleness: got .*; expected "lr", "dc" or "dc-adaptive"'):
        parse_staleness(word)
