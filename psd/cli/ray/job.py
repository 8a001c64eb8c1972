"""psd-run --on ray: a job on a Ray cluster. Shards (psd/cli/ray/shards.py) and workers
(psd/cli/ray/worker.py) are actors, in one placement group.

    a worker's program fails     it is run again, while --max-restarts lasts; then the job ends with its status
    a worker's actor or node     Ray starts the actor again, elsewhere if need be; the program is run again as above
    a shard's node               Ray starts the shard elsewhere, with the newest checkpoint; all programs are run again, since
                                 their shards have other addresses now
    a node, and no room is left  the job waits for room, and says what is missing
    psd-run itself               Ray ends all actors of the job, and these their processes

psd/cli/job/policy.py decides, as on any machine; this module carries out its decisions with Ray. Knows a worker's environment,
but not what it does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from psd.cli.job.policy import Action, JobPolicy, Name, Phase, Say, Send, Start, Tell
from psd.cli.job.summary import Summary
from psd.cli.ray import room
from psd.cli.ray.shards import NAMESPACE, actor_resources, load, place_shards
from psd.cli.ray.worker import WorkerProcess
from psd.cli.words.arguments import EXIT_FAILURE, LAST_CHECKPOINT_SIGNAL, exit_status, refuse_given
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.launching import HAS_STORED

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
class RayPlan:
    """A job for Ray.

    Attributes:
        address: address of the cluster; "auto": the cluster that this machine belongs to.
        shards, workers, restarts_max, grace_s, on_worker_failure: see psd-run --help.
        run_id: id of the job. checkpoint_dir: see psd-run --help. shard_flags: flags of psd-server.
        shard_environ, worker_environ: variables in addition to the nodes' own.
        command, script: see WorkerProcess.run. modules: modules for shards, see ShardProcess.
        worker_resources: Ray resources of each worker.
    """

    address: str
    shards: int
    workers: int
    restarts_max: int
    grace_s: float
    on_worker_failure: str
    run_id: str
    checkpoint_dir: str = field(repr=False)
    shard_flags: Sequence[str] = field(repr=False)
    shard_environ: Mapping[str, str]
    command: Sequence[str]
    script: Mapping[str, bytes]
    modules: Mapping[str, bytes]
    worker_environ: Mapping[str, str]
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


class _RayJob:
    """One job, from its placement group to its last actor. psd/cli/job/policy.py decides, as on any machine, except that Ray
    restarts shards that die."""

    def __init__(self, plan: RayPlan, ray: Any) -> None:
        self._plan, self._ray = plan, ray
        self._policy = JobPolicy(
            state_dirs=[""] * plan.shards,
            workers=plan.workers,
            on_worker_failure=plan.on_worker_failure,
            restarts_max=plan.restarts_max,
            shard_restarts_max=0,
            grace_s=plan.grace_s,
            has_checkpoints=bool(plan.checkpoint_dir),
        )
        self._signals: list[int] = []
        self._servers: list[str] = []
        self._lives: dict[Any, int] = {}  # running programs: Ray's reference to the result, and the rank
        self._held: dict[Any, int] = {}  # those that have ended since the shards' addresses were last checked
        self._asked: list[Any] = []  # Ray's references to the shards' addresses,
        self._is_asked_late = True  # and True if they were requested after all in _held had ended
        self._awaited: dict[Any, Callable[[Any], None]] = {}  # Ray's references to results of shards, and their handlers
        self._begun = [0] * plan.workers  # number of lives begun, by rank
        self._summary = Summary(checkpoint_dir=plan.checkpoint_dir)
        self._lacks_room_since: float | None = None

    def run(self) -> int:
        ray, plan = self._ray, self._plan
        shard_bundles = [{"CPU": 1.0}] * plan.shards
        began_at = time.monotonic()
        self._group = room.reserve(ray, [*shard_bundles, *[plan.worker_resources] * plan.workers])
        given = plan.run_id, plan.shard_flags, plan.shard_environ, plan.modules
        self._shards = place_shards(self._group, shard_bundles, *given)
        try:
            self._actors = [self._place_worker(rank) for rank in range(plan.workers)]
            room.wait_for(ray, self._group)
            self._servers = self._shards.servers
            _say(f"run {plan.run_id}; to look inside: psdctl status --servers {','.join(self._servers)}")
            with self._noted_signals():
                status = self._train()
        except KeyboardInterrupt as interrupt:
            status = _interrupted(interrupt)
            _say(f"stopping the job, within {plan.grace_s:g} s")
        finally:
            self._end()
        _say(f"the job has ended with status {status}" if status else "all workers have finished")
        for line in self._summary.lines(time.monotonic() - began_at):
            _say(line)
        return status

    def _place_worker(self, rank: int) -> Any:
        ray, plan = self._ray, self._plan
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, plan.shards + rank)
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

    def _train(self) -> int:
        """Carry out the policy's decisions until the last process has ended; return the job's status."""
        for index, task in enumerate(self._shards.answers("said", "done")):
            self._awaited[task] = functools.partial(self._on_done, index)
        for index, task in enumerate(self._shards.answers("ended")):
            self._awaited[task] = functools.partial(self._on_shard_end, index)
        self._perform(self._policy.on_start(time.monotonic()))
        for index in range(self._plan.shards):
            self._summary.on_start("shard", index)
            self._perform(self._policy.on_ready(Name("shard", index), time.monotonic()))
        while self._policy.phase is not Phase.ENDED:
            self._wait()
            while self._signals:
                self._perform(self._policy.on_signal(self._signals.pop(0), time.monotonic()))
            deadline = self._policy.deadline
            if deadline is not None and time.monotonic() >= deadline:
                self._perform(self._policy.on_deadline(time.monotonic()))
        assert self._policy.status is not None
        return self._policy.status

    def _wait(self) -> None:
        """Handle results of Ray's tasks, if any come soon."""
        tasks = [task for task in (*self._lives, *self._awaited) if task not in self._held]
        ended, _ = self._ray.wait(tasks, timeout=_LOOK_S)
        for task in ended:
            if task in self._awaited:
                self._awaited.pop(task)(self._ray.get(task))
            else:
                self._held[task] = self._lives[task]
                self._is_asked_late = not self._asked
        if self._policy.phase is not Phase.RUNNING:
            self._on_lives_end()
        self._tell_of_room()
        self._look_for_moves()

    def _look_for_moves(self) -> None:
        """Rerun all workers if shards have moved, unless the job is ending. If none has, report workers' ends to the policy."""
        self._asked = self._asked or self._shards.answers("address")
        moved = self._shards.addresses(self._asked, _LOOK_S if self._held else 0.0)
        if moved is None:
            return
        is_late, self._asked, self._is_asked_late = self._is_asked_late, [], True
        if moved == self._servers:
            if is_late:
                self._on_lives_end()
            return
        shards = [Name("shard", index) for index in range(len(moved)) if moved[index] != self._servers[index]]
        self._servers = moved
        if self._policy.phase is not Phase.RUNNING:
            self._perform(self._policy.on_lost(shards, "a node was lost", time.monotonic()))
            return
        for shard in shards:
            self._summary.on_start("shard", shard.number)
        _say(f"shards have moved; running all workers again, with {','.join(moved)}")
        ranks = sorted(self._lives.values())
        self._stop_workers()
        for rank in ranks:
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
            _say(f"{worker} was lost with its actor or node")
        except self._ray.exceptions.RayTaskError as error:
            _say(f"{worker} could not be run: {error.cause}")
        return EXIT_FAILURE

    def _on_done(self, index: int, line: str) -> None:
        if line:
            self._policy.on_done(Name("shard", index))

    def _on_shard_end(self, index: int, end: tuple[int, bool]) -> None:
        status, is_done = end
        self._on_done(index, "done" if is_done else "")
        if self._policy.phase is Phase.RUNNING and not is_done:
            raise ConfigError(f"shard {index} has ended with status {status}, and is not started again")
        self._perform(self._policy.on_exit(Name("shard", index), status, time.monotonic()))

    def _on_saved(self, line: str) -> None:
        self._perform(self._policy.on_saved(time.monotonic(), is_stored=HAS_STORED in line))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    _say(text)
                case Tell(name, line):
                    self._shards.tell(name.number, line)
                case Start(name) if name.kind == "worker":
                    self._begin(name.number)
                case Send(name, signum) if name.kind == "worker":
                    grace_s = 0.0 if signum == signal.SIGKILL else self._plan.grace_s
                    self._actors[name.number].stop.remote(self._begun[name.number], grace_s)
                case Send(name, signum):
                    self._shards.signal(name.number, signum)
                    if signum == LAST_CHECKPOINT_SIGNAL and name.number == 0:
                        self._awaited[self._shards.answers("said", "saved")[0]] = self._on_saved

    def _begin(self, rank: int) -> None:
        plan, actor = self._plan, self._actors[rank]
        self._begun[rank] += 1
        self._summary.on_start("worker", rank)
        # Ray shows to each worker the GPUs that are its own, so that it is the only one there.
        who = {"PSD_RANK": str(rank), "PSD_LOCAL_RANK": "0", "PSD_WORLD_SIZE": str(plan.workers), "PSD_RUN_ID": plan.run_id}
        environ = {**plan.worker_environ, "PSD_SERVERS": ",".join(self._servers), "PYTHONUNBUFFERED": "1", **who}
        # Once its actor is there: a call to one that Ray is just starting again would fail, as a life of the worker.
        run = actor.run.options(max_task_retries=0)
        life = run.remote(self._begun[rank], list(plan.command), plan.script, environ, actor.ready.remote())
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
            _say(room.waiting_text(self._ray, self._group))
            self._lacks_room_since = float("inf")

    def _stop_workers(self) -> None:
        """End all workers' programs, and forget them."""
        grace_s = self._plan.grace_s
        stopped = [self._actors[rank].stop.remote(self._begun[rank], grace_s) for rank in self._lives.values()]
        self._ray.wait(stopped, num_returns=len(stopped), timeout=grace_s + 5.0) if stopped else None
        self._lives.clear()
        self._held.clear()

    def _end(self) -> None:
        """End all programs and shards that are left, and release their resources."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._stop_workers()
            for index, counted in enumerate(self._shards.stop(self._plan.grace_s)):
                self._summary.on_line(index, counted)
        self._ray.shutdown()


def ray_plan(
    args: argparse.Namespace,
    words: Sequence[str],
    run_id: str,
    shard_flags: Sequence[str],
    shard_environ: Mapping[str, str],
    worker_environ: Mapping[str, str],
) -> RayPlan:
    """The job that psd-run's options describe.

    Args:
        words: the words to run, as given. For the others see RayPlan.

    Raises:
        ConfigError: an option does not go together with --on ray, or is wrong.
    """
    refuse_given(args, _NOT_WITH_RAY, "not with --on ray, where ")
    script = _script(words[0])
    is_there = words[0].endswith(".py") and not script
    rule_dir = [f"--rule-dir={Path(words[0]).parent}"] if args.rules and is_there else []
    return RayPlan(
        address=args.address,
        shards=args.shards,
        workers=args.workers,
        restarts_max=args.max_restarts,
        grace_s=args.grace_s,
        on_worker_failure=args.on_worker_failure,
        run_id=run_id,
        checkpoint_dir=args.checkpoint_dir,
        shard_flags=[*shard_flags, *rule_dir],
        shard_environ=shard_environ,
        command=words,
        script=script,
        modules=script if args.rules else {},
        worker_environ=worker_environ,
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
