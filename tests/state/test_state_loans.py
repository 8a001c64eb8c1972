"""Sums that read gradients where they lie: which ones, until when, and that the numbers are those of copies."""

from __future__ import annotations

import numpy as np
import pytest

from psd.state.aggregation.lent_gradients import Loan, RoundSum


class Arrays:
    """BlockAccumulators that count what is out, and may have no memory."""

    def __init__(self):
        self.out = 0
        self.is_exhausted = False

    def lend(self):
        if self.is_exhausted:
            raise MemoryError
        self.out += 1
        return np.full(3, np.nan, np.float32)

    def give_back(self, array):
        array.fill(np.nan)
        self.out -= 1


@pytest.fixture
def arrays():
    return Arrays()


def lent(sum_, *values):
    """A gradient, and a loan of it to the sum."""
    loan = Loan()
    loan.to(lambda ended, _: sum_.take_over(ended), 0)
    return np.array(values, np.float32), loan


def borrows(sum_, values):
    """True if the sum reads these values where they lie."""
    return any(term is values for term in sum_.terms[:2])


def total(sum_):
    """What a kernel makes of the terms."""
    so_far, last, weight = sum_.terms
    found = np.zeros(3, np.float32) if so_far is None else so_far
    return (found if last is None else found + weight * last).tolist()


def test_the_first_and_the_last_gradient_are_read_in_place(arrays):
    """Nothing is copied, and no memory is taken."""
    sum_ = RoundSum(arrays)
    first, first_loan = lent(sum_, 1.0, 2.0, 3.0)
    last, last_loan = lent(sum_, 4.0, 5.0, 6.0)

    sum_.add(first, 1.0, first_loan)
    sum_.complete(last, 2.0, last_loan)

    assert (sum_.terms[0] is first, sum_.terms[1] is last, arrays.out) == (True, True, 0)
    assert total(sum_) == [9.0, 12.0, 15.0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_when_a_loan_has_ended_its_memory_is_not_read_any_more(arrays, order):
    """In whichever order the calls end."""
    sum_ = RoundSum(arrays)
    gradients = [lent(sum_, 1.0, 2.0, 3.0), lent(sum_, 4.0, 5.0, 6.0)]
    sum_.add(gradients[0][0], 1.0, gradients[0][1])
    sum_.complete(gradients[1][0], 2.0, gradients[1][1])

    for which in order:
        values, loan = gradients[which]
        loan.end()
        values.fill(np.nan)
        assert not borrows(sum_, values)
        assert total(sum_) == [9.0, 12.0, 15.0]

    sum_.end()
    assert arrays.out == 0


def test_one_loan_may_be_of_the_only_gradient(arrays):
    """It completes its round alone."""
    sum_ = RoundSum(arrays)
    values, loan = lent(sum_, 4.0, 5.0, 6.0)
    sum_.complete(values, 1.0, loan)

    loan.end()
    values.fill(np.nan)

    assert total(sum_) == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("values", "weight"),
    [(np.array([1.0, 2.0, 3.0], np.float32), 2.0), (np.array([1.0, 2.0, 3.0], np.float16), 1.0), (None, 1.0)],
)
def test_a_sum_that_cannot_begin_with_a_gradient_as_it_is_borrows_nothing(arrays, values, weight):
    """It is weighted, widened, or empty."""
    sum_ = RoundSum(arrays)

    sum_.add(values, weight, Loan())

    assert values is None or not borrows(sum_, values)


def test_a_gradient_between_the_first_and_the_last_is_added_at_once(arrays):
    """And so is the first one then."""
    sum_ = RoundSum(arrays)
    gradients = [lent(sum_, value, value, value) for value in (1.0, 2.0)]

    for values, loan in gradients:
        sum_.add(values, 1.0, loan)
    for values, _ in gradients:
        values.fill(np.nan)

    assert total(sum_) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("which", ["first", "last"])
def test_when_there_is_no_memory_for_a_copy_then_nothing_has_changed(arrays, which):
    """The same call succeeds when there is some."""
    sum_ = RoundSum(arrays)
    values, loan = lent(sum_, 1.0, 2.0, 3.0)
    if which == "first":
        sum_.add(values, 1.0, loan)
    else:
        sum_.complete(values, 1.0, loan)

    arrays.is_exhausted = True
    with pytest.raises(MemoryError):
        sum_.take_over(loan)
    assert borrows(sum_, values)
    assert total(sum_) == [1.0, 2.0, 3.0]

    arrays.is_exhausted = False
    sum_.take_over(loan)
    values.fill(np.nan)
    assert total(sum_) == [1.0, 2.0, 3.0]


def test_what_another_call_has_lent_stays_where_it_is(arrays):
    """A loan ends alone."""
    sum_ = RoundSum(arrays)
    values, loan = lent(sum_, 1.0, 2.0, 3.0)
    sum_.add(values, 1.0, loan)

    sum_.take_over(Loan())

    assert borrows(sum_, values)
    assert arrays.out == 0
