"""The scalars of a round, such as lr, and the part of the job that it is of, as its workers state them on one shard.

An update counts the gradients of several workers, and uses the scalars of the one that has been in the job longest (rounds.py
chooses it for each block, by their `Voice`). A worker that joined later may have a schedule that lags: its scalars are ignored,
and a reply tells it so. If two workers that have been there from the start disagree, the job is configured wrongly, and the
push is refused. So is a push of another part than the round's, whoever sends it: it would step tensors that the others do not.
Used under the shard's lock; must not know blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psd.contract.errors import PartsDisagree, ScalarsDisagree
from psd.contract.rules import RuleInfo
from psd.state import locks
from psd.state.aggregation.consistency import ranks_in
from psd.v1 import data_pb2
from psd_core.steps import Steps

Scalars = tuple[tuple[float, ...], ...]
"""One tuple per group, in the order of the rule's list."""


class Voice(NamedTuple):
    """The scalars that one worker states for a round. The least voice holds: that of the worker that has been there longest.

    So the order in which gradients arrive does not matter, and shards that have heard the same workers agree.

    Attributes:
        since: the clock since which the worker has taken part without a gap (PushHeader.since).
        scalars: the scalars of one group, or a tuple for each group.
        part: the part of the job that its push is of (PushHeader.part).
    """

    since: int
    rank: int
    scalars: Sequence[Any]
    part: int = 0


@dataclass(slots=True)
class _Round:
    """One round: each rank's voice, for all groups; the ranks whose gradients were counted; the voice that holds."""

    voices: dict[int, Voice] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    held: Voice | None = None


@locks.guarded_by(locks.Level.SHARD)
class Agreement:
    """The scalars of the rounds that are open on one shard, and of the round before them.

    Args:
        infos: facts about the rule of each group. open_round: returns the lowest round that is open on this shard.
    """

    def __init__(self, infos: Sequence[RuleInfo], open_round: Callable[[], int]) -> None:
        self._infos = infos
        self._open_round = open_round
        self._rounds: dict[int, _Round] = {}
        self._steps: Steps | None = None

    def listen_to(self, steps: Steps) -> None:
        """Hear also what workers say by steps, which all say the same of a round."""
        self._steps = steps

    def _hear_steps(self) -> None:
        for round_, flat, spoke, counted, since in self._steps.voices() if self._steps is not None else ():
            if round_ < self._open_round() - 1:
                continue
            scalars = _by_group(flat, self._infos)
            said = self._rounds.setdefault(round_, _Round())
            for rank in ranks_in(spoke):
                if rank not in said.voices:
                    said.voices[rank] = Voice(since[rank], rank, scalars)
            said.counted.update(ranks_in(counted))
            said.held = min(said.voices.values())

    def check(self, round_: int, voice: Voice) -> None:
        """Raise unless this worker and the one whose voice holds may have their gradients in one round.

        Raises:
            PartsDisagree: they push different parts.
            ScalarsDisagree: they state different scalars, and both have been there from the start. Both errors name the two
                workers and what they say.
        """
        if self._steps is not None:
            self._hear_steps()
        said = self._rounds.get(round_)
        held = said.held if said is not None else None
        if said is None or held is None or held[2:] == voice[2:]:
            return
        if held.rank == voice.rank and voice.rank not in said.counted:
            return  # its push was refused before anything was counted, and comes back with others
        if round_ < self._open_round():
            return  # it is late, whatever it says
        if held.part != voice.part:
            raise PartsDisagree(
                f"part: in round {round_} worker {voice.rank} steps part {voice.part} of the job, worker {held.rank} steps "
                f"part {held.part}; all workers step the parts in the same order, which a program knows by the clock",
                ranks=[held.rank, voice.rank],
                parts=[held.part, voice.part],
                round=round_,
            )
        if held.since or voice.since or held.scalars == voice.scalars:
            return
        group, scalar = _difference(held.scalars, voice.scalars)
        name = self._infos[group].scalars[scalar]
        raise ScalarsDisagree(
            f"scalars[{group}].{name}: in round {round_} worker {voice.rank} says {voice.scalars[group][scalar]:g}, "
            f"worker {held.rank} said {held.scalars[group][scalar]:g}; the workers of a round must agree",
            ranks=[held.rank, voice.rank],
            group=group,
            scalar=name,
            round=round_,
        )

    def hear(self, round_: int, voice: Voice) -> None:
        """Note what a worker says whose push has brought a valid block; raises what `check` does."""
        if self._steps is not None:  # first, so that no step says something else from now on
            self._steps.hear(round_, [each for group in voice.scalars for each in group], not voice.part)
            self._hear_steps()
        said = self._rounds.get(round_)
        held = said.held if said is not None else None
        if said is not None and held is not None and held[2:] == voice[2:]:
            voice = voice._replace(scalars=held.scalars)  # not kept once for each worker
        else:
            self.check(round_, voice)
            open_round = self._open_round()
            if round_ < open_round:
                return
            if len(self._rounds) > 1:
                for old in [r for r in self._rounds if r < open_round - 1]:
                    del self._rounds[old]
            said = self._rounds.setdefault(round_, _Round())
        if voice.rank in said.counted:
            return  # sent again; or by a successor of the worker, whose gradient is in the round already
        said.voices[voice.rank] = voice
        said.held = min(said.voices.values()) if held is None or held.rank == voice.rank else min(held, voice)

    def on_counted(self, round_: int, rank: int) -> None:
        """Note that a worker's gradient was counted: its scalars still count if the worker dies."""
        if round_ in self._rounds:
            self._rounds[round_].counted.add(rank)

    def on_gone(self, rank: int) -> None:
        """Forget the scalars of a worker that has gone, except in rounds that have counted its gradient."""
        if self._steps is not None:
            self._hear_steps()
            self._steps.forget_voice(rank)
        for round_, said in list(self._rounds.items()):
            if rank in said.voices and rank not in said.counted:
                del said.voices[rank]
                said.held = min(said.voices.values(), default=None)
                if said.held is None:
                    del self._rounds[round_]

    def overruled(self, round_: int, rank: int) -> data_pb2.Overruled | None:
        """The notice, for the reply to a worker's push, that its scalars gave way in that round or the one before; or None."""
        if self._steps is not None:
            self._hear_steps()
        for said_of in (round_, round_ - 1):
            said = self._rounds.get(said_of)
            own = said.voices.get(rank) if said is not None else None
            held = said.held if said is not None else None
            if own is None or held is None or own.scalars == held.scalars:
                continue
            group, scalar = _difference(held.scalars, own.scalars)
            return data_pb2.Overruled(
                round=said_of,
                rank=held.rank,
                group=group,
                scalar=scalar,
                own=own.scalars[group][scalar],
                held=held.scalars[group][scalar],
            )
        return None

    def known(self) -> dict[int, object]:
        """All that is known, by round; tests compare it."""
        self._hear_steps()
        return {r: (dict(said.voices), set(said.counted), said.held) for r, said in self._rounds.items()}


def _by_group(flat: Sequence[float], infos: Sequence[RuleInfo]) -> Scalars:
    """The scalars of all groups, one tuple for each."""
    rest = iter(flat)
    return tuple(tuple(itertools.islice(rest, len(info.scalars))) for info in infos)


def _difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> tuple[int, int]:
    """The group and the scalar of the first difference. The two must not be equal."""
    return next(
        (group, scalar)
        for group, pair in enumerate(zip(first, second, strict=True))
        for scalar, (one, other) in enumerate(zip(*pair, strict=True))
        if one != other
    )
