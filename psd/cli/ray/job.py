"""psd-run --on ray: a job on a Ray cluster. Shards (psd/cli/ray/shards.py) and workers
(psd/cli/ray/worker.py) are actors, in one placement group.

    a worker's program fails     it is run again, while --max-restarts lasts; then the job ends with its status
    a worker's actor or node     Ray starts the actor again, elsewhere if need be; the program is run again as above
    a shard's node               Ray starts the shard elsewhere, with the newest checkpoint; all programs are run again, since
                                 their shards have other addresses now
    a node, and no room is left  the job waits for room, and says what is missing
    psd-run itself               Ray ends all actors of the job, and these their processes

psd/cli/job/policy.py decides, as on any machine, but for shards, which Ray and their actors start again. Knows a worker's
environment, but not what it does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

from psd.cli.job.actions import Name
from psd.cli.job.conductor import Conductor
from psd.cli.job.plan import JobPlan
from psd.cli.job.policy import Phase
from psd.cli.ray import room
from psd.cli.ray.shards import NAMESPACE, actor_resources, load, place_shards
from psd.cli.ray.worker import WorkerProcess
from psd.cli.words.arguments import EXIT_FAILURE, exit_status, refuse_given
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError

_NOT_WITH_RAY = {
    "state_dir": "the parameters are in the memory of the shards' nodes",
    "log_dir": "Ray keeps a log of each actor",
    "tensorboard": "use --env PSD_TENSORBOARD=DIR, a directory that is there on all nodes",
    "metrics_port": "the shards' ports would be on hosts that Ray chooses",
    "nnodes": "Ray finds the hosts",
    "hosts": "Ray finds the hosts",
    "rendezvous": "Ray finds the hosts",
    "max_shard_restarts": "Ray starts shards again",
}

_SENT_BYTES_MAX = 10 << 20

_LOOK_S = 1.0
"""Seconds between two looks at the shards' addresses."""


@dataclass(frozen=True)
class RayPlan(JobPlan):
    """A job for Ray; its variables are in addition to the nodes' own.

    Attributes:
        address: address of the cluster; "auto": the cluster that this machine belongs to.
        shard_flags: flags of psd-server. modules: modules for shards, see ShardProcess.
        script: see WorkerProcess.run. worker_resources: Ray resources of each worker.
    """

    address: str
    shard_flags: Sequence[str] = field(repr=False)
    script: Mapping[str, bytes]
    modules: Mapping[str, bytes]
    worker_resources: Mapping[str, float]

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        try:
            os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # or of lines that are alike only one worker's is shown
            ray = load()
            signal.signal(signal.SIGTERM, _interrupt)
            try:
                ray.init(address=self.address, log_to_driver=True, logging_level="warning")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"--address: cannot connect to Ray at {self.address}: {error}") from error
            return _RayJob(self, ray).run()
        except ConfigError as error:
            _say(f"error: {error}")
            return EXIT_FAILURE
        except KeyboardInterrupt as interrupt:
            return _interrupted(interrupt)


class _RayJob(Conductor):
    """One job, from its placement group to its last actor. Ray, and the actors, start shards again that die."""

    def __init__(self, plan: RayPlan, ray: Any) -> None:
        super().__init__(plan, [""] * plan.places.shards)
        self._plan: RayPlan = plan
        self._ray = ray
        self._signals: list[int] = []
        self._lives: dict[Any, int] = {}  # running programs: Ray's reference to the result, and the rank
        self._held: dict[Any, int] = {}  # those that have ended since the shards' addresses were last checked
        self._asked: list[Any] = []  # Ray's references to the shards' addresses,
        self._is_asked_late = True  # and True if they were requested after all in _held had ended
        self._news: dict[Any, Name] = {}  # Ray's references to what shards will say
        self._known = [("", 0)] * plan.places.shards  # of each: its actor's life, and how many of its lines are known
        self._begun = [0] * sum(plan.places.workers)  # number of lives begun, by rank
        self._lacks_room_since: float | None = None

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        ray, plan = self._ray, self._plan
        shard_bundles = [{"CPU": 1.0}] * plan.places.shards
        self._group = room.reserve(ray, [*shard_bundles, *[plan.worker_resources] * len(self._begun)])
        given = plan.run_id, plan.shard_flags, plan.shard_environ, plan.modules
        self._shards = place_shards(self._group, shard_bundles, *given)
        try:
            self._actors = [self._place_worker(rank) for rank in range(len(self._begun))]
            room.wait_for(ray, self._group)
            _ = self._shards.servers  # raises ConfigError if one cannot be started
            with self._noted_signals():
                self._perform(self._policy.on_start(time.monotonic()))
                status = self._conduct()
        except KeyboardInterrupt as interrupt:
            status = _interrupted(interrupt)
            self.say(f"stopping the job, within {plan.shards.grace_s:g} s")
        finally:
            self._unlist()
            self._end()
        self._sum_up(status)
        return status

    def _place_worker(self, rank: int) -> Any:
        ray, plan = self._ray, self._plan
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, plan.places.shards + rank)
        actor = ray.remote(WorkerProcess).options(
            name=f"{plan.run_id}/worker-{rank}",
            namespace=NAMESPACE,
            **actor_resources(plan.worker_resources),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=4,
            scheduling_strategy=place,
        )
        return actor.remote(rank)

    @contextlib.contextmanager
    def _noted_signals(self) -> Iterator[None]:
        """Record signals for the policy, instead of interrupting what is under way."""
        signums = [each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
        before = {signum: signal.signal(signum, lambda heard, _: self._signals.append(heard)) for signum in signums}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @override
    def _wait(self) -> None:
        """Handle results of Ray's tasks, if any come soon."""
        tasks = [task for task in (*self._lives, *self._news) if task not in self._held]
        ended, _ = self._ray.wait(tasks, timeout=_LOOK_S)
        for task in ended:
            if task in self._news:
                self._on_news(self._news.pop(task), *self._ray.get(task))
            else:
                self._held[task] = self._lives[task]
                self._is_asked_late = not self._asked
        if self._policy.phase is not Phase.RUNNING:
            self._on_lives_end()
        self._tell_of_room()
        self._look_for_moves()
        while self._signals:
            self._perform(self._policy.on_signal(self._signals.pop(0), time.monotonic()))
        self._on_time()

    def _look_for_moves(self) -> None:
        """Rerun all workers if shards have moved, unless the job is ending. If none has, report workers' ends to the policy."""
        if len(self._addresses) < self._plan.places.shards:  # not all have said yet that they serve
            return
        self._asked = self._asked or self._shards.answers("address")
        moved = self._shards.addresses(self._asked, _LOOK_S if self._held else 0.0)
        if moved is None:
            return
        is_late, self._asked, self._is_asked_late = self._is_asked_late, [], True
        if moved == self._servers:
            if is_late:
                self._on_lives_end()
            return
        shards = [Name("shard", index) for index, address in enumerate(self._servers) if moved[index] != address]
        self._addresses = dict(enumerate(moved))
        if self._entry is not None:
            with contextlib.suppress(OSError):
                self._entry.change(servers=tuple(moved))
        if self._policy.phase is not Phase.RUNNING:
            self._perform(self._policy.on_lost(shards, "a node was lost", time.monotonic()))
            return
        self.say(f"shards have moved; running all workers again, with {','.join(moved)}")
        ranks = sorted(self._lives.values())
        self._stop_workers()
        for rank in ranks:
            self._summary.on_start("worker", rank)
            self._begin(rank)

    def _on_lives_end(self) -> None:
        held, self._held = self._held, {}
        for life, rank in held.items():
            del self._lives[life]
            worker = Name("worker", rank)
            self._perform(self._policy.on_exit(worker, self._status_of(worker, life), time.monotonic()))

    def _status_of(self, worker: Name, life: Any) -> int:
        """Exit status of a program that has ended, negative for a signal."""
        try:
            return int(self._ray.get(life))
        except self._ray.exceptions.RayActorError:
            self.say(f"{worker} was lost with its actor or node")
        except self._ray.exceptions.RayTaskError as error:
            self.say(f"{worker} could not be run: {error.cause}")
        return EXIT_FAILURE

    def _listen(self, shard: Name) -> None:
        """Ask a shard for what it says next."""
        self._news[self._shards.news(shard.number, *self._known[shard.number])] = shard

    def _on_news(self, shard: Name, life: str, lines: Sequence[str], status: int | None) -> None:
        before, known = self._known[shard.number]
        self._known[shard.number] = life, len(lines) + (known if life == before else 0)
        for line in lines:
            self._hear(shard, line)
        if status is None:
            self._listen(shard)
        else:
            self._perform(self._policy.on_exit(shard, status, time.monotonic()))

    @override
    def _on_address(self, shard: int, address: str) -> None:
        """Note where a shard serves. That it has moved is handled when all serve."""
        if shard in self._addresses:
            self._summary.on_start("shard", shard)
        else:
            super()._on_address(shard, address)

    @override
    def say(self, text: str, quote: Name | None = None) -> None:
        _say(text)

    @override
    def _start(self, name: Name) -> None:
        if name.kind == "worker":
            self._begin(name.number)
        else:  # its actor has started it
            self._listen(name)

    @override
    def _send(self, name: Name, signum: int) -> None:
        if name.kind == "shard":
            self._shards.signal(name.number, signum)
        else:
            grace_s = 0.0 if signum == signal.SIGKILL else self._plan.shards.grace_s
            self._actors[name.number].stop.remote(self._begun[name.number], grace_s)

    @override
    def _tell(self, name: Name, line: str) -> None:
        self._shards.tell(name.number, line)

    def _begin(self, rank: int) -> None:
        """Run a worker's program once more."""
        plan, actor = self._plan, self._actors[rank]
        self._begun[rank] += 1
        # Ray shows to each worker the GPUs that are its own, so that it is the only one there.
        environ = plan.worker_environ(rank, self._servers)
        # Once its actor is there: a call to one that Ray is just starting again would fail, as a life of the worker.
        run = actor.run.options(max_task_retries=0)
        life = run.remote(self._begun[rank], list(plan.words), plan.script, environ, actor.ready.remote())
        self._lives[life] = rank

    def _tell_of_room(self) -> None:
        """Tell the user, once, which resources are missing if actors of a lost node find no room elsewhere."""
        if room.state(self._ray, self._group) != "RESCHEDULING":
            self._lacks_room_since = None
            return
        now = time.monotonic()
        if self._lacks_room_since is None:
            self._lacks_room_since = now
        elif now >= self._lacks_room_since + room.NOTICE_S:
            self.say(room.waiting_text(self._ray, self._group))
            self._lacks_room_since = float("inf")

    def _stop_workers(self) -> None:
        """End all workers' programs, and forget them."""
        grace_s = self._plan.shards.grace_s
        stopped = [self._actors[rank].stop.remote(self._begun[rank], grace_s) for rank in self._lives.values()]
        self._ray.wait(stopped, num_returns=len(stopped), timeout=grace_s + 5.0) if stopped else None
        self._lives.clear()
        self._held.clear()

    def _end(self) -> None:
        """End all programs and shards that are left, and release their resources."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._stop_workers()
            self._shards.stop(self._plan.shards.grace_s)
        self._ray.shutdown()


def ray_plan(args: argparse.Namespace, job: JobPlan, shard_flags: Sequence[str]) -> RayPlan:
    """The job that psd-run's options describe.

    Raises:
        ConfigError: an option does not go together with --on ray, or is wrong.
    """
    refuse_given(args, _NOT_WITH_RAY, "not with --on ray, where ")
    word = job.words[0]
    script = _script(word)
    rule_dir = [f"--rule-dir={Path(word).parent}"] if args.rules and word.endswith(".py") and not script else []
    who = {"PSD_WORLD_SIZE": str(sum(job.places.workers)), "PSD_RUN_ID": job.run_id}
    own = {"shard_restarts_max": None, "for_workers": {"PYTHONUNBUFFERED": "1", **job.for_workers, **who}}
    return RayPlan(
        **{**vars(job), **own},
        address=args.address,
        shard_flags=[*shard_flags, *rule_dir],
        script=script,
        modules=script if args.rules else {},
        worker_resources=_resources(args.worker_resources),
    )


def _script(word: str) -> dict[str, bytes]:
    """The script, and the Python files beside it, which it may import; empty if the nodes have what is to run."""
    path = Path(word)
    if path.suffix != ".py" or path.is_absolute():
        return {}
    try:
        found = {file.name: file.read_bytes() for file in [path, *path.parent.glob("*.py")] if file.is_file() or file == path}
    except OSError as error:
        raise ConfigError(f"cannot read the script {word}: {error}") from error
    size = sum(map(len, found.values()))
    if size > _SENT_BYTES_MAX:
        raise ConfigError(
            f"the script {word} and the Python files beside it have {size:,} bytes; at most {_SENT_BYTES_MAX:,} are sent. "
            "Give an absolute path, to where all nodes have them"
        )
    return found


def _resources(text: str) -> dict[str, float]:
    """Parse --worker-resources, such as CPU=4,GPU=1."""
    found = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        try:
            found[name] = float(count)
        except ValueError:
            found[name] = -1.0
        if not name or not 0 <= found[name] < float("inf"):
            raise ConfigError(f"--worker-resources: expected NAME=COUNT,NAME=COUNT, such as CPU=4,GPU=1, got {part!r}")
    if not any(found.values()):
        raise ConfigError(f"--worker-resources: expected at least one above 0, got {text!r}")
    return found


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """The exit status after Ctrl-C or SIGTERM."""
    return exit_status(interrupt.args[0] if interrupt.args else signal.SIGINT)


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def _say(text: str) -> None:
    show(f"[psd-run] {text}", is_error=True)
