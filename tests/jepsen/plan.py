"""What a trial is: a job, programs, and a schedule of faults; drawn by a seed, kept as JSON, made smaller by shrinking.

The same plan is the same faults at the same seconds and the same choices of the programs, though not the same interleaving.
Knows nothing of processes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cells import PER_LIFE, SIZES, names
from learner_cells import MERGES_BY_DIRECTION, LearnerCells
from lossy_cells import FORMS

LANES = ("shm", "tcp", "grpc")

MODES: dict[str, dict[str, Any]] = {
    "fast": {"consistency": "sync"},
    "exact": {"consistency": "sync", "aggregation": "exact"},
    "quorum-fast": {"consistency": "sync", "quorum": -1},
    "quorum-exact": {"consistency": "sync", "aggregation": "exact", "quorum": -1},
    "norm": {"consistency": "sync", "clip_norm": 1e30},
    "async": {"consistency": "async"},
    "ssp": {"consistency": "ssp:2"},
}
"""By name, what is declared. A quorum of -1: one less than there are workers. So large a norm is measured, and never clips."""

EXACT = ("exact", "quorum-exact", "norm")
ROUNDS = ("fast", "exact", "quorum-fast", "quorum-exact", "norm")

LINKS = ("link-refuse", "link-reset", "link-delay", "link-truncate", "link-half-open", "link-black-hole", "link-mute")
SHARDS = ("shard-kill", "shard-stop", "shard-terminate", "shard-lose", "shard-vanish", "disk-full")
RUN = ("run-interrupt", "run-terminate", "run-hangup", "run-kill")
"""What happens to psd-run, under which the trial then is; `at`: after training has begun under it; `seconds`: if not 0, it gets
the signal once more so much later."""

DAMAGE = "shard-damage"
"""A shard ends in order, or is killed if `part` is below a half, and a byte of its files changes before it is started again."""

WORKERS = ("worker-kill", "worker-stop", "worker-interrupt", "worker-twin", "worker-vanish")

OF_READERS = ("reader-kill", "reader-stop", "relay-kill", "relay-stop")
"""Of publications. Clients have one order: publishers, readers, relays; `rank` is the place in it, for links, too."""

WAYS = ("control", "bulk", "both")

LIVES = 24
"""Of all workers together, at most; each has its share of the numbers of gradients."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong `at` seconds after training has begun, for `seconds`.

    Attributes:
        kind: link-*: of the connections between `rank` and `shard` (-1: all), `way` of WAYS; the others strike a process.
            direction, side: see links.py. part: of a piece of data that still passes; also the seconds by which it is delayed;
            of learners that are groups, it says which processes are killed or stopped.
    """

    kind: str
    at: float
    seconds: float
    shard: int = -1
    rank: int = -1
    way: str = "both"
    direction: str = "up"
    side: str = "worker"
    part: float = 0.5

    def __str__(self) -> str:
        whom = [f"shard {self.shard}"] * (self.shard >= 0) + [f"worker {self.rank}"] * (self.rank >= 0)
        how = {"link-truncate": [self.way, self.direction], "link-delay": [self.way, self.direction]}
        more = how.get(self.kind, [self.way, self.side] if self.kind == "link-half-open" else [self.way])
        return " ".join(
            [f"{self.at:.2f}", self.kind, *whom, *(more if self.kind in LINKS else []), f"for {self.seconds:.2f} s"]
        )


@dataclass(frozen=True)
class Style:
    """How a program behaves.

    Attributes:
        push_share: of its steps that push, and pull later or not at all, instead of push_pull. pull_share: of pushes that are
            followed by a pull.
        pause_s: after a push, at most; pace_s: after each step.
        absent_share: of gradients that leave out a tensor.
        barrier_every: steps; 0: never.
        reactions: weights of "again", "other", "pull", "end", "restart", "abort", for what it does after an error.
        ending: how it ends at last: "with" (the context manager), "close", "fall" (off the end of the program).
    """

    push_share: float = 0.3
    pull_share: float = 0.7
    pause_s: float = 0.05
    pace_s: float = 0.02
    absent_share: float = 0.2
    barrier_every: int = 0
    reactions: dict[str, float] = field(default_factory=lambda: {"again": 1.0})
    ending: str = "with"


@dataclass(frozen=True)
class Learning:
    """How learners learn: as psd.Local and declare() have it. grace: seconds, or "auto"; 0: none. ranks: of each learner, which
    is a group of so many processes, until the last ones, that are alone."""

    steps: int
    fragments: int
    delay: int
    grace: float | str = 0.0
    merge: str = "mean"
    ranks: int = 1


@dataclass(frozen=True)
class Publishing:
    """Who reads what the workers publish: so many readers of the shards, and of the relays, if there are any; each of these has
    two of them to choose from. pace_s: a publisher's, between two puts, on average. puts_between: faults strike one after the
    other, whenever so many more puts have returned, and the trial has at most its seconds; 0: they strike by the clock."""

    readers: int = 2
    relays: int = 0
    pace_s: float = 0.02
    puts_between: int = 0


@dataclass(frozen=True)
class Plan:
    """One trial.

    Attributes:
        lease_s, wait_s, retry_s: the shards' and the workers' settings. checkpoint_steps: 0: no checkpoints.
        seconds: of training before the faults are healed and the programs end.
        early: the faults begin with the programs, not only when all of them train.
        named: the job has a name. small_disk: state directories are tiny file systems (needs root).
        has_tables: gradients have rows of tables, too. has_vectors: with each comes a batch on vectors.
        codec: in which one tensor more travels, or none; pull: likewise, how workers get it.
        learning: the workers are learners; None: they are not.
        publishing: the workers publish the parts of a version, and others read them; None: they do not.
        new_limits: each life of a shard has other limits.
        is_stepping: programs do what armed steps carry, so that most of their calls are such. revoke_s: each shard revokes all
            steps again and again, after so many seconds on average; 0: only when it has a reason.
        is_launched: psd-run runs the job, one after the other for each fault and once more; the faults are those of RUN.
        ends_dead: in the end all workers die, or hang, in the midst of training, and then the shards are told to end.
        plant: a defect that learners have, which the trial must find; see planted_in_learners.py.
    """

    seed: int
    lane: str
    mode: str
    workers: int
    shards: int
    size: str = "small"
    lease_s: float = 4.0
    wait_s: float = 20.0
    retry_s: float = 20.0
    checkpoint_steps: int = 0
    seconds: float = 6.0
    early: bool = False
    named: bool = False
    small_disk: bool = False
    has_tables: bool = False
    has_vectors: bool = False
    codec: str = ""
    pull: str = ""
    learning: Learning | None = None
    publishing: Publishing | None = None
    new_limits: bool = False
    is_stepping: bool = False
    revoke_s: float = 0.0
    is_launched: bool = False
    ends_dead: bool = False
    plant: str = ""
    styles: tuple[Style, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def is_exact(self) -> bool:
        """A gradient counts on all shards or on none."""
        return self.mode in EXACT

    @property
    def has_rounds(self) -> bool:
        """The mode is synchronous."""
        return self.mode in ROUNDS

    @property
    def declared(self) -> dict[str, Any]:
        """For declare()."""
        options = dict(MODES[self.mode])
        if "quorum" in options:
            options["quorum"] = max(1, self.workers - 1)
        if self.codec or self.pull:
            options |= {"compress": self.codec or None, "pull": self.pull or None}
        if self.learning is not None and self.learning.grace:
            options["grace"] = self.learning.grace
        is_mean = self.learning is not None and self.learning.merge in MERGES_BY_DIRECTION
        return options | {"reduce": "mean" if is_mean else "sum"}

    @property
    def per_life(self) -> int:
        """Numbers of gradients, or of a learner's steps, that each life of a worker has."""
        return PER_LIFE if self.learning is None else self.learner_cells.per_life

    @property
    def learner_cells(self) -> LearnerCells:
        """Where learners' steps are in the parameters."""
        return LearnerCells.of(self.codec, self.pull, "mean" if self.learning is None else self.learning.merge)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what a gradient may have."""
        return names(with_tables=self.has_tables, is_compressed=bool(self.codec))

    def without(self, faults: Sequence[Fault]) -> Plan:
        """The same with fewer faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))

    def to_json(self) -> str:
        """As kept in a failure's directory."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """As `to_json` has written it."""
        fields = json.loads(text)
        fields["styles"] = tuple(Style(**style) for style in fields["styles"])
        fields["learning"] = Learning(**fields["learning"]) if fields.get("learning") else None
        fields["publishing"] = Publishing(**fields["publishing"]) if fields.get("publishing") else None
        fields["faults"] = tuple(Fault(**fault) for fault in fields["faults"])
        return cls(**fields)

    def __str__(self) -> str:
        extras = (
            [f"checkpoints every {self.checkpoint_steps}"] * bool(self.checkpoint_steps)
            + ["small disk"] * self.small_disk
            + ["tables"] * self.has_tables
            + ["vectors"] * self.has_vectors
            + ([f"learners {asdict(self.learning)}"] if self.learning is not None else [])
            + ([f"publications {asdict(self.publishing)}"] if self.publishing is not None else [])
            + [f"compressed ({self.codec or 'whole'}, {self.pull or 'whole'})"] * bool(self.codec or self.pull)
            + ["new limits"] * self.new_limits
            + [f"steps, revoked every {self.revoke_s:g} s" if self.revoke_s else "steps"] * self.is_stepping
            + ["under psd-run"] * self.is_launched
            + ["dead workers at the end"] * self.ends_dead
            + [f"planted: {self.plant}"] * bool(self.plant)
            + ["early"] * self.early
        )
        job = f"{self.lane}, {self.mode}, {self.workers} workers x {self.shards} shards, {self.size}"
        times = f"lease {self.lease_s:g}, wait {self.wait_s:g}, retry {self.retry_s:g}"
        return "; ".join([f"seed {self.seed}: {job}, {times}", *extras, f"{len(self.faults)} faults"])


def draw(seed: int, *, may_mount: bool = False, may_learn: bool = False) -> Plan:
    """The plan of a seed. may_learn: workers may be learners, which need torch."""
    source = random.Random(seed)
    lane, mode = source.choice(LANES), source.choice(tuple(MODES))
    workers, shards = source.choice((1, 2, 2, 2, 3, 3)), source.choice((1, 2, 2, 2, 3))
    if mode.startswith("quorum"):
        workers = max(workers, 2)
    barrier_every = source.choice((0, 0, 0, 0, 5))
    plan = Plan(
        seed=seed,
        lane=lane,
        mode=mode,
        workers=workers,
        shards=shards,
        size=source.choices(SIZES, (6, 3, 1))[0],
        lease_s=source.choice((2.0, 2.0, 4.0, 4.0, 10.0)),
        wait_s=2.0 if barrier_every else source.choice((0.5, 2.0, 20.0, 20.0)),
        retry_s=source.choice((1.0, 3.0, 20.0, 20.0)),
        checkpoint_steps=source.choice((0, 0, 5, 20)),
        early=source.random() < 0.2,
        named=source.random() < 0.5,
        small_disk=may_mount and source.random() < 0.1,
    )
    more = random.Random(f"tables {seed}")
    plan = replace(plan, has_tables=more.random() < 0.6, has_vectors=more.random() < 0.3, new_limits=more.random() < 0.3)
    plan = replace(plan, new_limits=plan.new_limits and not plan.small_disk)  # some take more room than such a disk has
    of_bytes = random.Random(f"compression {seed}")
    if of_bytes.random() < 0.35:
        pulls = ("", "bf16", "int8", "int4") if plan.has_rounds else ("", "bf16")
        plan = replace(plan, codec=of_bytes.choice(tuple(FORMS)), pull=of_bytes.choice(pulls))
    plan = replace(plan, styles=tuple(_style(source, barrier_every) for _ in range(workers)))
    faults = [drawn_fault(source, plan) for _ in range(source.choice((0, 1, 1, 2, 3, 4)))]
    if not faults or source.random() < 0.5:
        recipe = source.choice(RECIPES)
        plan = replace(plan, size="large") if recipe is _lost_machine else plan
        faults += recipe(source, plan)
    if plan.small_disk:
        faults.append(drawn_fault(source, plan, "disk-full"))
    last = random.Random(f"last {seed}")
    plan = replace(plan, ends_dead=plan.checkpoint_steps > 0 and not plan.small_disk and last.random() < 0.25)
    if last.random() < 0.15:
        faults.append(drawn_fault(last, plan, DAMAGE))
    of_learners = random.Random(f"learners {seed}")
    if may_learn and of_learners.random() < 0.25:
        plan = _learning(of_learners, plan)
    elif last.random() < 0.12:
        return _launched(last, plan)
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


_MODES_OF_LEARNERS = {"quorum-fast": "quorum-exact", "norm": "exact"}


def _learning(source: random.Random, plan: Plan) -> Plan:
    """The same job, of learners."""
    steps, mode = source.choice((1, 4, 6)), _MODES_OF_LEARNERS.get(plan.mode, plan.mode)
    fragments = source.choice((1, 1, 2, 3)) if steps > 1 else 1
    has_quorum = mode.startswith("quorum")
    learning = Learning(
        steps,
        fragments,
        delay=source.choice((0, 0, 1, steps // fragments)),
        grace=source.choice((0.0, "auto", 0.2)) if has_quorum else 0.0,
    )
    styles = tuple(replace(each, pace_s=source.choice((0.01, 0.02, 0.05, 0.2))) for each in plan.styles)
    codec, pull = source.choice(("", "", "bf16", "int4log", "sign")), ""
    if mode in EXACT:
        learning = replace(learning, merge=source.choice(("mean", "rda", "heloco")) if codec != "sign" else "mean")
    if mode in ROUNDS and learning.merge == "mean" and codec != "sign":
        pull = source.choice(("", "int8", "int8"))
    if fragments > 1 and random.Random(f"two under way {plan.seed}").random() < 0.5:
        learning = replace(learning, delay=steps // fragments + 1)  # longer than what lies between two exchanges
    learning = replace(learning, ranks=random.Random(f"ranks {plan.seed}").choice((1, 1, 2)))
    changed = {"has_tables": False, "has_vectors": False, "ends_dead": False, "pull": pull, "wait_s": 20.0}
    return replace(plan, mode=mode, learning=learning, styles=styles, codec=codec, **changed)


def _launched(source: random.Random, plan: Plan) -> Plan:
    """The same job under psd-run."""
    faults = tuple(
        drawn_fault(
            source,
            plan,
            source.choice(RUN),
            at=3.0 * source.random(),
            seconds=source.choice((0.0, 0.0, 0.5)),
            shard=-1,
            rank=-1,
        )
        for _ in range(source.choice((1, 2, 3)))
    )
    changed = {"early": False, "named": False, "small_disk": False, "new_limits": False, "ends_dead": False}
    steps = plan.checkpoint_steps or source.choice((5, 1000))
    return replace(plan, is_launched=True, checkpoint_steps=steps, seconds=2.0, wait_s=20.0, faults=faults, **changed)


def _style(source: random.Random, barrier_every: int) -> Style:
    is_slow = source.random() < 0.15
    reactions = source.choice(
        (
            {"again": 1.0},
            {"again": 4.0, "other": 1.0, "pull": 1.0},
            {"other": 1.0},
            {"again": 2.0, "other": 2.0, "pull": 2.0, "end": 0.3, "restart": 1.0, "abort": 1.0},
            {"restart": 1.0, "abort": 1.0},
        )
    )
    return Style(
        push_share=source.choice((0.0, 0.3, 0.7, 1.0)),
        pull_share=source.choice((0.0, 0.5, 1.0)),
        pause_s=source.choice((0.0, 0.05, 0.5)),
        pace_s=1.0 if is_slow else source.choice((0.01, 0.02, 0.05)),
        absent_share=source.choice((0.0, 0.0, 0.3)),
        barrier_every=barrier_every,
        reactions=reactions,
        ending=source.choice(("with", "close", "fall")),
    )


def drawn_fault(source: random.Random, plan: Plan, kind: str = "", **fields: Any) -> Fault:
    """A fault of a kind, or of any."""
    if not kind:
        kind = source.choice(source.choice((SHARDS, WORKERS, LINKS)))
    if (kind == "shard-lose" and not plan.checkpoint_steps) or (kind == "disk-full" and not plan.small_disk):
        kind = "shard-kill"
    seconds = source.choice((0.1, 0.5, 1.5, 3.0, 6.5)) * (0.7 + 0.6 * source.random())
    if kind == "link-half-open":
        seconds = 0.0  # new connections work; the dead ones are for their peers to notice
    drawn = Fault(
        kind,
        at=source.random() * plan.seconds * 0.9,
        seconds=seconds,
        shard=source.randrange(plan.shards) if kind not in WORKERS else -1,
        rank=source.randrange(plan.workers) if kind not in (*SHARDS, DAMAGE) else -1,
        way=source.choice(WAYS),
        direction=source.choice(("up", "down")),
        side=source.choice(("worker", "shard")),
        part=round(source.random(), 3),
    )
    drawn = replace(drawn, **fields)
    return replace(drawn, at=round(drawn.at, 3), seconds=round(drawn.seconds, 3))


# -- faults that belong together ---------------------------------------------------------------------------------------


def _interrupted_beside_a_silent_shard(source: random.Random, plan: Plan) -> list[Fault]:
    silent = drawn_fault(source, plan, source.choice(("shard-stop", "shard-vanish")), at=1 + 3 * source.random(), seconds=9.0)
    return [silent, drawn_fault(source, plan, "worker-interrupt", at=silent.at + 0.2 + 2 * source.random(), seconds=0.5)]


def _silent_where_connections_begin(source: random.Random, plan: Plan) -> list[Fault]:
    reset = drawn_fault(source, plan, "link-reset", way="both", at=1 + 3 * source.random())
    return [reset, drawn_fault(source, plan, "shard-stop", shard=reset.shard, at=reset.at + 0.3 * source.random(), seconds=7.5)]


def _suspended_after_a_restart(source: random.Random, plan: Plan) -> list[Fault]:
    killed = drawn_fault(source, plan, "shard-kill", at=1 + 3 * source.random(), seconds=0.1)
    at = killed.at + 0.7 + source.random()
    return [killed, drawn_fault(source, plan, "shard-stop", shard=killed.shard, at=at, seconds=plan.lease_s * 1.5)]


def _stalled_while_a_shard_is_away(source: random.Random, plan: Plan) -> list[Fault]:
    stalled = drawn_fault(source, plan, "worker-stop", at=1 + 2 * source.random(), seconds=min(plan.lease_s * 1.3, 6.0))
    kind = source.choice(("shard-stop", "shard-kill"))
    at = stalled.at + stalled.seconds * source.random()
    return [stalled, drawn_fault(source, plan, kind, at=at, seconds=plan.lease_s * 1.5)]


def _lost_machine(source: random.Random, plan: Plan) -> list[Fault]:
    """While shards send, which never ends."""
    gone = drawn_fault(source, plan, "worker-vanish", at=1.5 + 3 * source.random(), seconds=0.5)
    return [Fault("link-delay", round(gone.at - 1, 3), 1.5, rank=gone.rank, way="bulk", direction="down", part=0.5), gone]


def _mute_bulk_port(source: random.Random, plan: Plan) -> list[Fault]:
    at = 1 + 3 * source.random()
    reset = drawn_fault(source, plan, "link-reset", way="bulk", at=at)
    return [reset, replace(reset, kind="link-mute", at=round(at - 0.001, 3), seconds=8.0)]


def _dead_connection(source: random.Random, plan: Plan) -> list[Fault]:
    return [drawn_fault(source, plan, "link-half-open", way="bulk"), drawn_fault(source, plan, "link-half-open")]


def _killed_at_the_end(source: random.Random, plan: Plan) -> list[Fault]:
    at = plan.seconds + 0.5 * source.random()
    return [drawn_fault(source, plan, "shard-kill", at=at, seconds=1.0)]


def _many_deaths(source: random.Random, plan: Plan) -> list[Fault]:
    kinds = source.choice((("worker-kill",), ("shard-kill",), ("worker-kill", "shard-kill")))
    return [drawn_fault(source, plan, source.choice(kinds), seconds=0.3 * source.random()) for _ in range(5)]


def _two_lives(source: random.Random, plan: Plan) -> list[Fault]:
    twin = drawn_fault(source, plan, "worker-twin", at=1 + 3 * source.random(), seconds=1.5)
    return [
        twin,
        drawn_fault(source, plan, source.choice(("shard-kill", "shard-stop", "worker-kill")), at=twin.at + source.random()),
    ]


RECIPES = (
    _interrupted_beside_a_silent_shard,
    _silent_where_connections_begin,
    _suspended_after_a_restart,
    _stalled_while_a_shard_is_away,
    _lost_machine,
    _mute_bulk_port,
    _dead_connection,
    _killed_at_the_end,
    _many_deaths,
    _two_lives,
)
