"""What a checkpoint must say: of each worker's gradients a prefix counts, and its client state is the one of the last of them.

Only gradients that must count once in the end are asked about: of the others, each block may say something else. Each counts
in all blocks of a checkpoint or in none; none counts twice; and the last checkpoint of shards that have ended in order has all.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells import Counts
from counting import Failure, claim
from history import Gradient, Histories
from restores import Restored, restored


def check_prefixes(histories: Histories) -> list[Failure]:
    """Compare what each checkpoint was restored to with what programs were told."""
    if histories.plan.learning is not None:
        return []
    found = list(restored(histories.outcome))
    failures = [Failure("not restored", f"checkpoint {each.name}: {each.error}") for each in found if each.error]
    acknowledged = _acknowledged(histories)
    for each in found:
        if not each.error:
            counts = Counts(each.parameters, histories.plan.shards, histories.plan.codec)
            failures += compare_prefix(histories, each, counts, acknowledged)
            if each is found[-1] and histories.outcome.have_all_ended_in_order:
                missing = [g for own in acknowledged.values() for g in own if not _has_counted(counts, g)]
                failures += [Failure("not in the last checkpoint", f"{each.name} lacks {gradient}") for gradient in missing[:1]]
    return failures


def compare_prefix(
    histories: Histories, checkpoint: Restored, counts: Counts, acknowledged: dict[int, list[Gradient]]
) -> Iterator[Failure]:
    """As `check_prefixes`, for one checkpoint whose counts have been read."""
    if not counts.is_whole:
        yield Failure("no counts in a checkpoint", f"{checkpoint.name}: the parameters are no negated whole numbers")
        return
    for gradient in histories.gradients.values():
        if max(most for _, most in counts.of(gradient.number, gradient.tensors).values()) > 1:
            yield Failure("twice in a checkpoint", f"{checkpoint.name} has {gradient} twice")
    for rank, own in acknowledged.items():
        by_block = [counts.of(gradient.number, gradient.tensors) for gradient in own]
        for gradient, found in zip(own, by_block, strict=True):
            if len({count for both in found.values() for count in both}) > 1:
                yield Failure("torn checkpoint", f"{checkpoint.name} has {gradient} in some blocks alone: {found}")
        has = [_has_counted(counts, gradient) for gradient in own]
        first_absent = has.index(False) if False in has else len(has)
        if any(has[first_absent:]):
            later = own[first_absent + has[first_absent:].index(True)]
            yield Failure("no prefix", f"{checkpoint.name} lacks {own[first_absent]}, and has {later}")
        elif (wrong := _wrong_state(histories, own, first_absent, checkpoint.states.get(rank))) is not None:
            yield Failure("client state of another moment", f"{checkpoint.name}, worker {rank}: {wrong}")


def _wrong_state(histories: Histories, own: list[Gradient], counted: int, state: int | None) -> str | None:
    """What is wrong with a client state beside the first `counted` of a worker's gradients."""
    begun = -1.0 if state is None else histories.gradients[state].begun
    before = [gradient for gradient in own if gradient.begun <= begun]
    if len(before) == counted:
        return None
    last = own[counted - 1] if counted else None
    return f"it is that of gradient {state}, and the last that counts is {last}"


def _has_counted(counts: Counts, gradient: Gradient) -> bool:
    return any(most for _, most in counts.of(gradient.number, gradient.tensors).values())


def _acknowledged(histories: Histories) -> dict[int, list[Gradient]]:
    """By rank, the gradients that must count once, in their order."""
    found: dict[int, list[Gradient]] = {}
    for gradient in sorted(histories.gradients.values(), key=lambda gradient: gradient.begun):
        if claim(histories, gradient) == "once":
            found.setdefault(gradient.life.rank, []).append(gradient)
    return found
