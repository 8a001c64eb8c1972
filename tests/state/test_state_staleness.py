"""What is done about the age of gradients: against the paper's formula, by hand; and how ages are counted."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec

from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.staleness import parse_staleness
from psd.state.aggregation.staleness import age_bucket

SGD = (0.5, 0.0, 0.0, 0.0)


def driver_of(staleness="", flags=(), rule="sgd", workers=3, dtype="float64", **config) -> Driver:
    spec = JobSpec(
        workers,
        (TensorSpec("w", (2,), dtype),),
        (GroupSpec(rule, flags, staleness=staleness),),
        Consistency.parse("async"),
    )
    return Driver(spec, **config)


def push(driver, seat, clock, value, version, scalars=SGD):
    driver.push(seat, clock, value, versions=[version], scalars=scalars)


def test_lr_is_divided_by_one_plus_the_age():
    """Zhang et al. 2016: three workers read the same version, and push one after the other."""
    driver = driver_of("lr")
    seats = driver.start()

    for seat in seats:
        push(driver, seat, 0, 6.0, 0)

    assert driver.values() == [-0.5 * (6 + 6 / 2 + 6 / 3)] * 2


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


def test_after_a_restart_the_age_of_a_gradient_on_its_way_is_known(tmp_path):
    """The worker states what it has read."""
    driver = driver_of("lr", state_dir=str(tmp_path / "state"))
    seats = driver.start()
    push(driver, seats[0], 0, 2.0, 0)
    driver.restart(*seats)

    push(driver, seats[1], 0, 4.0, 0)

    assert driver.values() == [-0.5 * (2 + 4 / 2)] * 2
    assert driver.core.job.ages == [0, 1]


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


@pytest.mark.parametrize(("word", "parsed"), [("", ""), (None, ""), ("lr", "lr")])
def test_the_word_says_it_all(word, parsed):
    """None is as good as no word."""
    assert parse_staleness(word) == parsed


@pytest.mark.parametrize("word", ["rate", "lr:2", "LR", 3])
def test_a_wrong_word_is_refused(word):
    """Saying what was expected."""
    with pytest.raises(InvalidRequest, match='staleness: expected "lr" or None, got'):
        parse_staleness(word)
