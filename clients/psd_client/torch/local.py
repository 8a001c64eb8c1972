"""Local steps: how often a learner's parameters are exchanged, in which fragments, and what becomes of what comes back.

Decides which tensors are in which fragment, and at which local step each is exchanged. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from psd.contract.arguments import real_number, refuse, whole_number
from psd.contract.errors import InvalidRequest
from psd_core.optimizer import Optimizer
from psd_core.rules import SGD

PATTERNS = ("balanced", "strided")
MERGES = ("mean", "rda", "heloco")

STEPS = 50
"""Local steps of the fastest learner with steps="auto"."""


@dataclass(frozen=True)
class Local:
    """Options of a learner, which makes many steps of its own optimizer between two exchanges with the shards.

    An exchange sends how far the learner has moved from what it received last (the base less its parameters) as a gradient, to
    which the shards apply the outer rule. With one fragment and no delay this is DiLoCo (arXiv 2311.08105); with several, or a
    delay, Streaming DiLoCo (2501.18512).

    Args:
        steps: local steps between two exchanges of a fragment, at least 1; the same on all learners. "auto", or "auto:50": so
            many (default 50) of the fastest learner's; of a slower one fewer, so that all take about the same time.
        outer: the rule that the shards apply, one of psd_client's.
        fragments: number of parts of the model, each exchanged every `steps` steps at an offset of its own, so that at any time
            only one of them travels; at most `steps`. Or lists of modules, one for each fragment.
        pattern: how a number of fragments is filled: "balanced", by size, embeddings in one of their own; "strided", the
            modules in turn. Tensors are not cut.
        delay: local steps that the learner makes while an exchange is under way. 0: it waits. Two may be under way, of
            different fragments: so it is at most what lies between an exchange and the next but one; with one fragment, at
            most `steps`. With a quorum of some learners it waits for nobody: what is later comes in later.
        alpha: share of the learner's own parameters when what came back is mixed in, 0 to 1: own * alpha + received *
            (1 - alpha). None: 0 without a delay, else 0.5.
        merge: how the differences of several learners become one, tensor by tensor: "mean", weighted; "rda", by norm and
            direction (Decoupled DiLoCo, 2604.21428); or "heloco", the mean of differences that are turned towards the outer
            rule's momentum where they oppose it, or hardly agree (HeLoCo, 2606.00271). Embeddings have the mean in each. The
            latter two are for rounds alone, and imply aggregation="exact".
        sample: share of the learners present that takes part in each round, above 0 and at most 1; at least one does. The
            others go on, and exchange what they have learned since when they are next chosen. None: all take part. A quorum is
            of those chosen. In rounds alone; implies aggregation="exact".

    Raises:
        InvalidRequest, TypeError: an option is wrong; the message names it.
    """

    steps: int | str
    outer: Optimizer = field(default_factory=lambda: SGD(lr=0.7, momentum=0.9, nesterov=True))
    fragments: int | Sequence[Sequence[torch.nn.Module]] = 1
    pattern: str = "balanced"
    delay: int = 0
    alpha: float | None = None
    merge: str = "mean"
    sample: float | None = None

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise InvalidRequest(f"local.steps: must be at least 1, got {self.steps}")
        if not isinstance(self.outer, Optimizer):
            refuse(TypeError, "local.outer", "a rule such as psd_client.SGD(lr=0.7)", self.outer)
        if self.pattern not in PATTERNS:
            raise InvalidRequest(f'local.pattern: must be "balanced" or "strided", got {self.pattern!r}')
        if self.merge not in MERGES:
            raise InvalidRequest(f'local.merge: must be "mean", "rda" or "heloco", got {self.merge!r}')
        if self.sample is not None and not 0 < real_number(InvalidRequest, "local.sample", self.sample) <= 1:
            raise InvalidRequest(f"local.sample: must be above 0 and at most 1, or None for all learners, got {self.sample}")
        if not isinstance(self.fragments, Sequence):
            whole_number(InvalidRequest, "local.fragments", self.fragments)
        if not 1 <= self.count <= self.interval:
            raise InvalidRequest(f"local.fragments: must be 1 to steps ({self.interval}), got {self.count}")
        apart = min(self.step_of(number + self.under_way) - self.step_of(number) for number in range(self.count))
        if not 0 <= whole_number(InvalidRequest, "local.delay", self.delay) <= apart:
            raise InvalidRequest(
                f"local.delay: must be 0 to {apart}, the least number of steps between an exchange and the "
                f"{'next but one' if self.under_way > 1 else 'next'}, got {self.delay}"
            )
        if self.alpha is not None and not 0 <= real_number(InvalidRequest, "local.alpha", self.alpha) <= 1:
            raise InvalidRequest(f"local.alpha: must be from 0 to 1, got {self.alpha}")

    @property
    def is_paced(self) -> bool:
        """True if slower learners make fewer steps."""
        return isinstance(self.steps, str)

    @property
    def interval(self) -> int:
        """Local steps between two exchanges of a fragment; of the fastest learner, if slower ones make fewer."""
        if not isinstance(self.steps, str):
            return whole_number(InvalidRequest, "local.steps", self.steps)
        word, _, number = self.steps.partition(":")
        if word != "auto" or not (number.isdecimal() if ":" in self.steps else not number):
            raise InvalidRequest(f'local.steps: must be a number, "auto", or "auto:50", got {self.steps!r}')
        return int(number or STEPS)

    @property
    def count(self) -> int:
        """Number of fragments."""
        return len(self.fragments) if isinstance(self.fragments, Sequence) else self.fragments

    @property
    def under_way(self) -> int:
        """Number of exchanges that may have departed and not landed, of different fragments."""
        return min(2, self.count)

    @property
    def share(self) -> float:
        """The learner's own share in what it goes on with."""
        return (0.5 if self.delay else 0.0) if self.alpha is None else float(self.alpha)

    @property
    def offsets(self) -> list[int]:
        """The step, within `steps`, after which each fragment is exchanged."""
        return [(number + 1) * self.interval // self.count for number in range(self.count)]

    def step_of(self, exchange: int) -> int:
        """The local step after which an exchange is made, counted over all fragments from 0; -1, before the first, is at 0."""
        times, fragment = divmod(exchange, self.count)
        return times * self.interval + self.offsets[fragment] if exchange >= 0 else 0

    def merges(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> list[str]:
        """The merge of each trained parameter, as in TensorSpec."""
        own, apart = "" if self.merge == "mean" else self.merge, _of_embeddings(model)
        return ["" if id(parameter) in apart else own for parameter in trained]

    def split(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The trained parameters of each fragment.

        Raises:
            InvalidRequest: a fragment is empty; or a parameter is in two lists of modules, or in none.
        """
        if isinstance(self.fragments, Sequence):
            found = _listed(self.fragments, model, trained)
        elif self.pattern == "strided":
            found = _strided(model, trained, self.count)
        else:
            found = _balanced(model, trained, self.count)
        if not all(found):
            raise InvalidRequest(
                f"local.fragments: fragment {found.index([])} of {self.count} has no parameters to train; make fewer of them"
            )
        return found


def _of_embeddings(model: torch.nn.Module) -> set[int]:
    """The identities of the weights of embeddings."""
    return {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)}


def _balanced(model: torch.nn.Module, trained: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """The largest first, each to the smallest fragment."""
    place = {id(parameter): index for index, parameter in enumerate(trained)}
    of_tables = _of_embeddings(model)
    apart = [parameter for parameter in trained if id(parameter) in of_tables] if count > 1 else []
    rest = [parameter for parameter in trained if not any(parameter is one for one in apart)]
    if not rest:
        apart, rest = [], list(trained)
    found: list[list[torch.Tensor]] = [[] for _ in range(count - bool(apart))]
    sizes = [0] * len(found)
    for parameter in sorted(rest, key=lambda parameter: (-parameter.numel(), place[id(parameter)])):
        smallest = sizes.index(min(sizes))
        found[smallest].append(parameter)
        sizes[smallest] += parameter.numel()
    return [*found, apart] if apart else found


def _strided(model: torch.nn.Module, trained: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """The parameters of one module after the other, in turn."""
    left = {id(parameter): parameter for parameter in trained}
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    turn = 0
    for module in model.modules():
        own = [left.pop(id(p)) for p in module.parameters(recurse=False) if id(p) in left]
        found[turn % count] += own
        turn += bool(own)
    return found


def _listed(
    modules: Sequence[Sequence[torch.nn.Module]], model: torch.nn.Module, trained: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = {id(parameter): parameter for parameter in trained}
    found: list[list[torch.Tensor]] = []
    taken: set[int] = set()
    for number, members in enumerate(modules):
        found.append([])
        for parameter in (parameter for module in members for parameter in module.parameters()):
            if id(parameter) in taken and not any(parameter is own for own in found[-1]):
                raise InvalidRequest(f"local.fragments[{number}]: {names[id(parameter)]!r} is in an earlier one, too")
            if id(parameter) in left:
                found[-1].append(left.pop(id(parameter)))
                taken.add(id(parameter))
    if left:
        raise InvalidRequest(f"local.fragments: {names[next(iter(left))]!r} is in none of them")
    return found
