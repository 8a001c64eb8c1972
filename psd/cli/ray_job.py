"""psd-run --on ray: a job on a Ray cluster. Shards (psd/cli/ray_shards.py) and workers are actors, in one placement group.

    a worker's program fails     it is run again, while --max-restarts lasts; then the job ends with its status
    a worker's actor or node     Ray starts the actor again, elsewhere if need be; the program is run again as above
    a shard's node               Ray starts the shard elsewhere, with the newest checkpoint; all programs are run again, since
                                 their shards have other addresses now
    psd-run itself               Ray ends all actors of the job, and these their processes

Knows what a worker finds in its environment; nothing of what it does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from psd.cli.arguments import EXIT_FAILURE, EXIT_OK, exit_status, refuse_given
from psd.cli.ray_shards import RayShards, load, place_shards, wait_for
from psd.cli.terminal import show
from psd.cli.watchdog import Watchdog
from psd.contract.config import ConfigError

_NOT_WITH_RAY = {
    "state_dir": "the parameters are in the memory of the shards' nodes",
    "log_dir": "Ray keeps a log of each actor",
    "metrics_port": "the shards' ports would be on hosts that Ray chooses",
    "nnodes": "Ray finds the hosts",
    "hosts": "Ray finds the hosts",
    "rendezvous": "Ray finds the hosts",
}

_LOOK_S = 1.0
"""Seconds between two looks at the shards' addresses."""


class WorkerProcess:
    """An actor: the place of one worker on a node. `run` is called for each of its lives."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        """Prefix of its lines in Ray's logs."""
        return f"worker {self._rank}"

    def run(self, command: Sequence[str], script: str | None, environ: Mapping[str, str]) -> int:
        """Run the worker's command to its end; return its status, negative for a signal.

        Args:
            command: with the script's place taken by its first word, if there is a text of one.
            script: text of the script; None: the command needs none. environ: beside this actor's own.
        """
        with tempfile.TemporaryDirectory(prefix="psd-run-") as folder:
            words = list(command)
            if script is not None:
                file = Path(folder) / Path(words[0]).name
                file.write_text(script)
                words[0] = str(file)
            if words[0] == "-m" or script is not None or words[0].endswith(".py"):
                words = [sys.executable, "-u", *words]
            # It ends what the worker has started, too, if this actor is killed.
            mark = f"{environ['PSD_RUN_ID']}/worker-{self._rank}"
            nothing = os.open(os.devnull, os.O_RDONLY)
            watchdog = Watchdog(environ["PSD_RUN_ID"], nothing, mark)
            os.close(nothing)
            try:
                self._process = subprocess.Popen(  # noqa: S603 - what the user asked for
                    words,
                    env={**os.environ, **environ, "PSD_NODE": mark},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                watchdog.add(self._process.pid)
                return self._process.wait()
            finally:
                watchdog.close()

    def stop(self, grace_s: float) -> None:
        """End the command: SIGTERM, after `grace_s` SIGKILL."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class RayPlan:
    """A job for Ray.

    Attributes:
        address: of the cluster; "auto": the one that this machine belongs to.
        shards, workers, restarts_max, grace_s, goes_on: see psd-run --help; goes_on: without workers that have failed for good.
        run_id: of the job. shard_options: of psd-server. command, script: see WorkerProcess.run. environ: of the workers.
        worker_resources: of each worker, for Ray.
    """

    address: str
    shards: int
    workers: int
    restarts_max: int
    grace_s: float
    goes_on: bool
    run_id: str
    shard_options: Mapping[str, Any]
    command: Sequence[str]
    script: str | None
    environ: Mapping[str, str]
    worker_resources: Mapping[str, float]

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        try:
            ray = load()
            try:
                ray.init(address=self.address, log_to_driver=True, logging_level="warning")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"--address: cannot connect to Ray at {self.address}: {error}") from error
            signal.signal(signal.SIGTERM, _interrupt)
            return _RayJob(self, ray).run()
        except ConfigError as error:
            _say(f"error: {error}")
            return EXIT_FAILURE


class _RayJob:
    """One job, from its placement group to its last actor."""

    def __init__(self, plan: RayPlan, ray: Any) -> None:
        self._plan, self._ray = plan, ray
        self._restarts_left = plan.restarts_max
        self._lives: dict[Any, int] = {}  # of programs that run: what Ray will say of each, and its rank

    def run(self) -> int:
        ray, plan = self._ray, self._plan
        shard_bundles = [{"CPU": 1.0}] * plan.shards
        group = ray.util.placement_group([*shard_bundles, *[dict(plan.worker_resources)] * plan.workers], strategy="SPREAD")
        self._shards = place_shards(group, 0, shard_bundles, plan.run_id, plan.shard_options)
        self._actors = [self._place_worker(group, rank) for rank in range(plan.workers)]
        began_at = time.monotonic()
        try:
            wait_for(group)
            servers = self._shards.servers
            _say(f"run {plan.run_id}; to look inside: psdctl status --servers {','.join(servers)}")
            status = self._train(servers)
        except KeyboardInterrupt as interrupt:
            status = exit_status(interrupt.args[0] if interrupt.args else signal.SIGINT)
            _say(f"stopping the job, within {plan.grace_s:g} s")
        finally:
            self._end(self._shards)
        _say(f"the job has ended with status {status}" if status else "all workers have finished")
        _say(f"{time.monotonic() - began_at:.1f} s; {plan.restarts_max - self._restarts_left} restarts of workers")
        if place := plan.shard_options.get("checkpoint_dir"):
            _say(f"checkpoints: {place}")
        return status

    def _place_worker(self, group: Any, rank: int) -> Any:
        ray, resources = self._ray, self._plan.worker_resources
        return (
            ray.remote(WorkerProcess)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources={name: count for name, count in resources.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, self._plan.shards + rank
                ),
            )
            .remote(rank)
        )

    def _train(self, servers: list[str]) -> int:
        """Run the workers' programs to their ends; returns the job's status."""
        status = EXIT_OK
        for rank in range(self._plan.workers):
            self._begin(rank, servers)
        while self._lives:
            ended, _ = self._ray.wait(list(self._lives), timeout=_LOOK_S)
            moved = self._shards.servers
            if moved != servers:
                servers = moved
                _say(f"shards have moved; running all workers again, with {','.join(servers)}")
                ranks = sorted(self._lives.values())
                self._stop_workers()
                for rank in ranks:
                    self._begin(rank, servers)
                continue
            for life in ended:
                rank = self._lives.pop(life)
                failed = self._failure(life)
                if not failed:
                    continue
                why, failure = failed
                if self._restarts_left:
                    self._restarts_left -= 1
                    _say(f"worker {rank} {why}; running it again ({self._restarts_left} restarts left)")
                    self._begin(rank, servers)
                elif self._plan.goes_on:
                    _say(f"worker {rank} {why}; the others go on without it")
                    status = status or failure
                else:
                    _say(f"worker {rank} {why}; no restarts left; stopping the job")
                    return failure
        return status

    def _begin(self, rank: int, servers: Sequence[str]) -> None:
        plan = self._plan
        who = {"PSD_RANK": str(rank), "PSD_WORLD_SIZE": str(plan.workers), "PSD_RUN_ID": plan.run_id}
        environ = {**plan.environ, "PSD_SERVERS": ",".join(servers), "PYTHONUNBUFFERED": "1", **who}
        self._lives[self._actors[rank].run.remote(list(plan.command), plan.script, environ)] = rank

    def _failure(self, life: Any) -> tuple[str, int] | None:
        """Tell what has become of a program, and the status for that; None: it has finished."""
        try:
            status = self._ray.get(life)
        except self._ray.exceptions.RayActorError:
            return "was lost with its actor or node", EXIT_FAILURE
        except self._ray.exceptions.RayTaskError as error:
            return f"could not be run: {error.cause}", EXIT_FAILURE
        if status == 0:
            return None
        return (
            (f"ended with status {status}", status) if status > 0 else (f"was killed by signal {-status}", exit_status(-status))
        )

    def _stop_workers(self) -> None:
        """End all programs, and forget them."""
        stopped = [self._actors[rank].stop.remote(self._plan.grace_s) for rank in self._lives.values()]
        self._ray.wait(stopped, num_returns=len(stopped), timeout=self._plan.grace_s + 5.0) if stopped else None
        self._lives.clear()

    def _end(self, shards: RayShards) -> None:
        """End the shards first if workers train: they take a last checkpoint then, if they take any."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            if self._lives and not self._plan.shard_options.get("checkpoint_dir"):
                self._stop_workers()
            shards.stop(self._plan.grace_s)
            self._stop_workers()
        self._ray.shutdown()


def ray_plan(
    args: argparse.Namespace, words: Sequence[str], run_id: str, shard_options: Mapping[str, Any], environ: Mapping[str, str]
) -> RayPlan:
    """The job that psd-run's options describe.

    Args:
        words: what is to run, as it was given. shard_options: of psd-server. environ: for the workers.

    Raises:
        ConfigError: an option does not go together with --on ray, or is wrong.
    """
    refuse_given(args, _NOT_WITH_RAY, "not with --on ray, where ")
    if args.on_worker_failure == "end":
        raise ConfigError("--on-worker-failure: not end with --on ray")
    script = None
    if words[0].endswith(".py") and not Path(words[0]).is_absolute():
        try:
            script = Path(words[0]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the script {words[0]}: {error}") from error
    return RayPlan(
        address=args.address,
        shards=args.shards,
        workers=args.workers,
        restarts_max=args.max_restarts,
        grace_s=args.grace_s,
        goes_on=args.on_worker_failure == "continue",
        run_id=run_id,
        shard_options=shard_options,
        command=words,
        script=script,
        environ=environ,
        worker_resources=_resources(args.worker_resources),
    )


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
    return found


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def _say(text: str) -> None:
    show(f"[psd-run] {text}", is_error=True)
