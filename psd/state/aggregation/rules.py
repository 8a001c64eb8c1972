"""The update rules as a shard applies them to a page: each binds a group's flags and calls one kernel, or a user's own class.

psd/contract/rules.py says what a rule's numbers may be, and psd_core what they do; psd/state/aggregation/staleness.py wraps a
rule where gradients have an age. Must not know workers, rounds or locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import psd_core
from psd.contract.custom_rules import ListedRule, describe
from psd.contract.errors import InvalidRequest, RuleFailed
from psd.contract.jobspec import GroupSpec, JobSpec
from psd.contract.verdicts import Squares
from psd.state.aggregation.lent_gradients import copy_of
from psd.state.pages import Lender
from psd_core.arena import Page

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Gradient:
    """The reduced gradient of a block, as terms that are still to be summed: scale * (accumulator + weight * last).

    The terms are arrays for a block, and rows for the tables' block (psd/state/tables/rounds.py).

    The kernel that applies the rule adds the last contribution in the same pass; a single one is not accumulated at all.

    Attributes:
        accumulator: sum of the weighted earlier contributions, or None.
        last: the contribution that closes the round, perhaps of 16 bits, or None.
        touched: (k,) uint8, the segments for which some worker has a gradient; the others are carried over unchanged. Not all
            zero, if there is an accumulator or a last contribution.
        age: updates that the block has seen since the worker read it; 0 where rounds hold the workers together.
        ratios: (k,) float64, for a layer-wise rule: the trust ratio of each segment's tensor.
    """

    accumulator: Any
    last: Any
    weight: float
    scale: float
    touched: NDArray[np.uint8]
    ratios: NDArray[np.float64] | None = None
    age: int = 0

    def reduced(self) -> NDArray[Any]:
        """The sum, in the parameters' dtype: a new array, or the only contribution itself if it is the sum.

        It has the same bits as the sum that psd_core.step_block computes.
        """
        given = self.last if self.last is not None else self.accumulator
        assert given is not None
        if self.scale == 1 and (self.accumulator is None or self.last is None) and (self.last is None or self.weight == 1):
            return psd_core.widened(given)
        total = np.empty(given.shape, np.result_type(given, np.float32))
        if self.last is None:
            psd_core.scaled_copy(total, given, self.scale)
            return total
        psd_core.scaled_copy(total, self.last, self.weight)
        if self.accumulator is not None:
            psd_core.accumulate(total, self.accumulator)
        psd_core.scaled_copy(total, total, self.scale)
        return total


class SegmentFailed(Exception):
    """Raised when a user's own rule raises (the cause), for a run of segments that begins with this one."""

    def __init__(self, segment: int) -> None:
        super().__init__(segment)
        self.segment = segment


def rule_failed(cause: BaseException, rule: str, kind: str, name: str, version: int, *, is_known: bool) -> RuleFailed:
    """The error for the workers. The traceback of the user's rule goes to the log, unless it is known.

    Args:
        rule: import path of the rule.
        kind: "tensor" or "table". name: which one was to be updated.
        is_known: True if the round has failed before.
    """
    text = f"rule {rule!r} failed in {kind} {name!r} at version {version}, which stays as it is"
    if not is_known:
        logger.error(text, exc_info=cause)
    return RuleFailed(f"{text}: {describe(cause)}", rule=rule, tensor=name, version=version)


class Rule(Protocol):
    """One update rule, bound to the flags of a group."""

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Write to `after` the result of applying the gradient to `before`. `after` is a spare page of the same shape.

        Raises:
            SegmentFailed: a user's rule has raised.
        """
        ...


class BoundRule(NamedTuple):
    """The rule of a group as its blocks apply it.

    Attributes:
        name: for messages. slot_starts: the value that each slot begins with.
        momentum_at, momentum_scale: as RuleInfo has them, for the group's flags.
    """

    rule: Rule
    name: str
    slot_starts: Sequence[float]
    momentum_at: int | None
    momentum_scale: Callable[[Sequence[float]], float]


class Elementwise(Rule):
    """A rule of psd_core, bound to the flags of a group."""

    def __init__(self, group: GroupSpec) -> None:
        self._flags = group.flags
        self._facts = psd_core.RULES[group.rule]

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        psd_core.step_block(
            self._facts.name,
            before.parameter,
            after.parameter,
            before.slots,
            after.slots,
            gradient.accumulator,
            gradient.last,
            weight=gradient.weight,
            scale=gradient.scale,
            segment_ends=segment_ends,
            touched=gradient.touched,
            steps_in=before.steps,
            steps_out=after.steps,
            scalars=scalars,
            flags=self._flags,
            sums=after.sums,
        )


class Layerwise(Elementwise):
    """A rule such as LAMB: the kernel gives the update's direction, the verdict each tensor's trust ratio.

    The direction is computed twice, once to measure it and once to apply it, so that nothing of a model's size is kept between
    the two.
    """

    def squares(
        self,
        before: Page,
        gradient: Gradient,
        segment_ends: NDArray[np.uint32],
        scalars: Sequence[float],
        accumulators: Lender,
    ) -> Squares:
        """Sums of squares, two for each segment: of its parameters and of its direction; zeros if it is not touched.

        None if some square is not finite.
        """
        sums = [0] * (2 * len(segment_ends))
        if gradient.accumulator is None:
            return sums
        direction, *slots = lent = [accumulators.lend() for _ in (before.parameter, *before.slots)]
        try:
            after = replace(before, parameter=direction, slots=tuple(slots), steps=np.empty_like(before.steps), sums=None)
            super().apply(before, after, gradient, segment_ends, scalars)
            for segment, part, offset in _touched(gradient, segment_ends):
                parameter_squares = psd_core.square_sum(before.parameter[part], offset)
                direction_squares = psd_core.square_sum(direction[part], offset)
                if parameter_squares is None or direction_squares is None:
                    return None
                sums[2 * segment : 2 * segment + 2] = parameter_squares, direction_squares
        finally:
            for array in lent:
                accumulators.give_back(array)
        return sums

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Apply the rule, with the trust ratios of the gradient."""
        assert gradient.ratios is not None
        lr = self._facts.scalars.index("lr")
        super().apply(before, replace(after, sums=None), gradient, segment_ends, scalars)  # the parameter is not yet what stays
        for segment, part, _ in _touched(gradient, segment_ends):
            step = after.parameter[part]
            psd_core.scaled_copy(step, step, -scalars[lr] * gradient.ratios[segment])
            psd_core.accumulate(step, before.parameter[part])


class Static:
    """Tensors that never change."""

    def apply(self, *_: object) -> None:
        """Raise: nothing is pushed to a static group."""
        raise AssertionError("a static group has no updates")


class Published(Rule):
    """Tensors that each round sets to what one worker has pushed."""

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Copy the values; those of 16 bits are widened."""
        del segment_ends, scalars
        assert gradient.accumulator is None, "a block is published by one worker"
        np.copyto(after.steps, before.steps)
        copy_of(after.parameter, gradient.last)


class Custom(Rule):
    """A user's own rule; psd/contract/custom_rules.py says what its author can rely on."""

    def __init__(self, group: GroupSpec, rule: ListedRule) -> None:
        self._rule = rule.kind()
        self._slots = group.slots
        self._scalars = group.scalars

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Apply the user's rule to `after`, which begins as a copy of `before`: one call for each run of neighbouring segments
        that are at the same step."""
        np.copyto(after.parameter, before.parameter)
        slots = dict(zip(self._slots, after.slots, strict=True))
        for old, new in zip(before.slots, after.slots, strict=True):
            np.copyto(new, old)
        touched = gradient.touched != 0
        np.copyto(after.steps, before.steps + touched)
        grad = gradient.reduced().view()
        grad.flags.writeable = False
        hyper = dict(zip(self._scalars, scalars, strict=True))
        edges = np.flatnonzero(np.diff(touched) | (np.diff(after.steps) != 0)) + 1
        for first, end in zip((0, *edges.tolist()), (*edges.tolist(), len(touched)), strict=True):
            run = slice(int(segment_ends[first - 1]) if first else 0, int(segment_ends[end - 1]))
            if not touched[first] or run.start == run.stop:
                continue
            views = {name: slot[run] for name, slot in slots.items()}
            try:
                numbers = {**hyper, "step": int(after.steps[first]), "age": gradient.age}
                check_returned(self._rule.apply(after.parameter[run], grad[run], views, numbers))
            except (Exception, SystemExit) as error:
                raise SegmentFailed(first) from error


def check_returned(value: object) -> None:
    """Raise TypeError if a user's rule has returned something: it should update its arguments in place."""
    if value is not None:
        raise TypeError(f"apply must update param and slots in place and return None, got {type(value).__name__}")


def check_listed(spec: JobSpec, listed: Mapping[str, ListedRule]) -> None:
    """Raise InvalidRequest if a job names a rule that is not listed on this shard, or differs from the one listed."""
    for index, group in enumerate(spec.groups):
        if not group.info.is_custom:
            continue
        if group.rule not in listed:
            raise InvalidRequest(
                f"groups[{index}].rule: {group.rule!r} is not listed on this shard; start psd-server, or psd-run, with "
                f"--rule {group.rule}. Listed: {', '.join(listed) or 'none'}"
            )
        rule = listed[group.rule]
        mine = (tuple(rule.slots), tuple(rule.slots.values()), tuple(rule.hyper))
        if mine != (group.slots, group.constants, group.scalars):
            theirs = dict(zip(group.slots, group.constants, strict=True))
            raise InvalidRequest(
                f"groups[{index}].rule: {group.rule!r} has slots {dict(rule.slots)} and numbers {list(rule.hyper)} on this "
                f"shard, but {theirs} and {list(group.scalars)} in the job; is its code the same here and there?"
            )


def rule_of(group: GroupSpec, listed: Mapping[str, ListedRule]) -> Rule:
    """The rule of a group. The rule exists, because the spec has been checked."""
    if group.is_static:
        return Static()
    if group.is_published:
        return Published()
    if group.is_layerwise:
        return Layerwise(group)
    return Custom(group, listed[group.rule]) if group.info.is_custom else Elementwise(group)


def _touched(gradient: Gradient, segment_ends: NDArray[np.uint32]) -> Iterator[tuple[int, slice, int]]:
    """The number, place in the block, and offset in its run (psd_core.RUN) of each segment that the gradient touches."""
    start = 0
    for segment, (end, is_touched) in enumerate(zip(segment_ends.tolist(), gradient.touched.tolist(), strict=True)):
        if is_touched:
            yield segment, slice(start, end), start % psd_core.RUN
        start = end
