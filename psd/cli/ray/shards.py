"""The shards of a job as actors of Ray, each with its own psd-server. Programs use them through psd.ray.

Ray places the actors with a placement group, and restarts an actor that has died. An actor restarts its psd-server if only that
dies. In both cases the shard finds its parameters in a directory in the node's memory, and has the same address. If the node is
lost, the parameters are lost, too: Ray then starts the shard elsewhere, at another address, with the newest checkpoint, and all
shards go back to it.

Must not know workers: psd/cli/ray/job.py starts them, or the program does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from psd.cli.job.policy import READY_TIMEOUT_S, START_S_MAX
from psd.cli.processes.state_directories import StateDirectory, clear_abandoned, private_path, remove_private, url_file
from psd.cli.ray import room
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, LAST_CHECKPOINT_SIGNAL, SECRET_OPTIONS, flag_of
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError, join_address
from psd.contract.launching import (
    ALL_STORED_PATTERN,
    COUNTED_PATTERN,
    DONE_PATTERN,
    LAST_CHECKPOINT_PATTERN,
    READY_PATTERN,
    python_command,
)
from psd.contract.locations import has_secret
from psd.contract.settings import words_of
from psd_core import private_files

NAMESPACE = "psd"
"""Ray's namespace of the actors of all jobs. Names in it are unique, so a job's shards keep out a second job of that name."""

STARTS_MAX = 20
"""Starts of psd-server in a row after none of which the shard has served. More than psd-run's, because the process of an actor
that has just ended may have the directory and the port for a moment."""

NEWS = re.compile("|".join((ALL_STORED_PATTERN, COUNTED_PATTERN, DONE_PATTERN, LAST_CHECKPOINT_PATTERN, READY_PATTERN)))
"""The lines of psd-server that are kept for whoever runs the job; see `news`."""

_AGAIN_S = 0.5


def load() -> Any:
    """The module ray; ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed here: pip install 'psd[ray]'") from error
    return ray


class ShardProcess:
    """An actor: one shard on one node, restarted until it has ended in order.

    Args:
        index, count: index of the shard, number of shards. run_id: id of the job. flags: flags of psd-server.
        environ: variables in addition to this actor's own.
        modules: texts of files, by name, in which psd-server looks for rules; empty if --rule-dir names a directory.
    """

    def __init__(
        self,
        index: int,
        count: int,
        run_id: str,
        flags: Sequence[str],
        environ: Mapping[str, str],
        modules: Mapping[str, bytes],
    ) -> None:
        ray = load()
        node = ray.get_runtime_context().get_node_id()[:12]
        self._host = ray.util.get_node_ip_address()
        clear_abandoned()
        # Its own for each node, also where one machine plays several.
        path, urls = private_path(f"{run_id}-{node}-{index}"), {}
        self._index, self._flags = index, ["--shard", f"{index}/{count}", "--run-id", run_id]
        for flag in flags:
            name, _, value = flag.partition("=")
            if name in map(flag_of, SECRET_OPTIONS) and has_secret(value):
                file = url_file(name.removeprefix("--"))
                urls[file] = value
                flag = f"{name}=@{path / file}"
            self._flags.append(flag)
        self._state = StateDirectory(path, run_id, count, is_private=False, urls=urls)
        if modules:
            folder = self._state.path / "modules"
            folder.mkdir(mode=0o700, exist_ok=True)
            for name, text in modules.items():
                private_files.write(folder / name, text)
            self._flags.append(f"--rule-dir={folder}")
        self._environ = environ
        self._port = self._state.path / "port"
        self._address, self._error = "", ""
        self._last_line, self._status = "", EXIT_FAILURE
        self._life, self._news = secrets.token_hex(4), list[str]()
        self._keeps_parts = any(flag.startswith("--checkpoint-dir=") and flag[-1] != "=" for flag in flags)
        self._is_over = self._has_ended = False
        self._told: dict[str, tuple[int, float]] = {}  # lines for --heed-launcher: turn, when
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._runner = threading.Thread(target=self._keep_running, daemon=True)
        self._runner.start()

    def __repr__(self) -> str:
        """Prefix of its lines in Ray's logs."""
        return f"shard {self._index}"

    def address(self) -> str:
        """Address at which the shard serves; waits until it does. Raises ConfigError if it cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._error, READY_TIMEOUT_S)
            if not self._address:
                raise ConfigError(self._error or f"shard {self._index} was not ready after {READY_TIMEOUT_S:g} s")
            return self._address

    def news(self, life: str, known: int) -> tuple[str, list[str], int | None]:
        """Wait for lines that match NEWS, after so many that are known of this life of the actor, or for psd-server's end.

        Returns:
            The actor's life, the new lines, and the status of a psd-server that has ended for good.
        """
        with self._changed:
            first = known if life == self._life else 0
            self._changed.wait_for(lambda: len(self._news) > first or self._has_ended)
            return self._life, self._news[first:], self._status if self._has_ended else None

    def _has_said(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, line) for line in self._news)

    def signal(self, signum: int) -> None:
        """Send a signal to psd-server. After a signal that ends it, it is not restarted."""
        with self._changed:
            self._is_over = self._is_over or signum != LAST_CHECKPOINT_SIGNAL
            process = self._process
        if process is not None:
            process.send_signal(signum)

    def tell(self, turn: int, line: str) -> None:
        """Pass a line about a worker to psd-server (--heed-launcher), unless a later line has overtaken it. turn: number of the
        line.

        A psd-server that is restarted meanwhile gets the line, too.
        """
        who = line.rpartition(" ")[2]
        with self._changed:
            earlier = {other: at for other, at in self._told.items() if other.rpartition(" ")[2] == who}
            if all(at < turn for at, _ in earlier.values()):
                self._told = {other: at for other, at in self._told.items() if other not in earlier}
                self._told[line] = turn, time.monotonic()
                self._write([line])

    def _write(self, lines: Sequence[str]) -> None:
        if lines and self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has just died
                self._process.stdin.write("".join(f"{line}\n" for line in lines))
                self._process.stdin.flush()

    def stop(self, grace_s: float) -> str:
        """End the shard in order, with a last checkpoint if it takes checkpoints; then remove its state.

        Returns:
            The shard's report of the pushes that it has counted; empty if it has made none.
        """
        self.signal(signal.SIGTERM)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s + 5.0)
            self._process.kill()
            self._process.wait()
        self._runner.join()
        self._state.close(keep=False)
        remove_private(self._state.path)
        return next((line for line in reversed(self._news) if re.fullmatch(COUNTED_PATTERN, line)), "")

    def _keep_running(self) -> None:
        starts = 0
        while not self._is_over and starts < STARTS_MAX:
            starts += 1
            if self._run_once():
                starts = 0
            time.sleep(_AGAIN_S)
        with self._changed:
            self._has_ended = True
            self._error = f"shard {self._index} cannot be started: {self._last_line}"
            self._changed.notify_all()

    def _run_once(self) -> bool:
        """Run psd-server to its end; return True if it has served."""
        port = self._port.read_text() if self._port.exists() else "0"
        place = [
            "--listen",
            join_address(self._host, port),
            "--state-dir",
            str(self._state.shard(self._index)),
            "--exit-on-eof",
        ]
        with self._changed:
            if self._is_over:
                return False
            process = subprocess.Popen(  # noqa: S603 - our own module
                [*python_command("psd.cli.server"), *self._flags, *place],
                env={**os.environ, **self._environ},
                stdin=subprocess.PIPE,  # its end is this actor's, however that ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        has_served = False
        for line in process.stdout:
            print(line, end="", flush=True)
            self._last_line = line.rstrip("\n")
            if NEWS.fullmatch(self._last_line):
                with self._changed:
                    self._news.append(self._last_line)
                    self._changed.notify_all()
            if ready := re.fullmatch(READY_PATTERN, self._last_line):
                has_served = True
                private_files.write(self._port, ready[3].rpartition(":")[2].encode())
                with self._changed:
                    self._address = ready[3]
                    since = time.monotonic() - START_S_MAX
                    self._write([line for line, (_, at) in self._told.items() if at >= since])
                    self._changed.notify_all()
        self._status = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it did not hear
                pipe.close()
        # One that is killed after all workers have left it is done only if its part of the last checkpoint is stored.
        lacks_part = self._status < 0 and self._keeps_parts and not self._has_said(ALL_STORED_PATTERN)
        is_done = self._status == EXIT_OK or (self._has_said(DONE_PATTERN) and not lacks_part)
        if self._status == EXIT_USAGE or (has_served and is_done):
            self._is_over = True  # it would do the same again, or is done
        return has_served


class RayShards:
    """The shards of a job on a Ray cluster; can be sent to tasks and actors.

    Attributes:
        run_id: id of the job.
    """

    def __init__(self, actors: Sequence[Any], run_id: str, group: Any) -> None:
        self._actors, self.run_id, self._group, self._turn = list(actors), run_id, group, 0

    @property
    def servers(self) -> list[str]:
        """Current addresses of the shards; waits for shards that are being restarted.

        Raises:
            ConfigError: a shard cannot be started.
        """
        ray = load()
        asked = self.answers("address")
        began_at, has_told = time.monotonic(), False
        while (found := self.addresses(asked, room.NOTICE_S)) is None:
            lacks_room = room.state(ray, self._group) != "CREATED"
            what = room.waiting_text(ray, self._group) if lacks_room else "starting"
            if lacks_room and not has_told:
                has_told = True
                show(f"psd: shards of {self.run_id}: {what}", is_error=True)
            longest_s = room.PLACED_S if lacks_room else READY_TIMEOUT_S
            if time.monotonic() > began_at + longest_s:
                raise ConfigError(f"not all shards of {self.run_id} were ready within {longest_s:g} s; still {what}")
        return found

    def addresses(self, asked: Sequence[Any], timeout_s: float) -> list[str] | None:
        """Results of `answers("address")`; None if not all came in time. Raises ConfigError if a shard cannot be started."""
        ray = load()
        try:
            return list(ray.get(list(asked), timeout=timeout_s))
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(str(error.cause)) from error
        except ray.exceptions.RayActorError as error:
            raise ConfigError(f"the shards of {self.run_id} have ended, or could not be started: {error}") from error

    def answers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ShardProcess on each shard; return Ray's references to the results."""
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def news(self, index: int, life: str, known: int) -> Any:
        """Ray's reference to what a shard says next; see ShardProcess."""
        return self._actors[index].news.remote(life, known)

    def signal(self, index: int, signum: int) -> None:
        """Send a signal to a shard; does not wait."""
        self._actors[index].signal.remote(signum)

    def tell(self, index: int, line: str) -> None:
        """Pass a line about a worker to a shard that was started with --heed-launcher; does not wait."""
        self._turn += 1
        self._actors[index].tell.remote(self._turn, line)

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Environment variables for a worker, which tell `psd_client.connect()` the shards' addresses and its rank."""
        who = {"PSD_RANK": str(rank), "PSD_WORLD_SIZE": str(world_size)}
        return {"PSD_SERVERS": ",".join(self.servers), "PSD_RUN_ID": self.run_id, **who}

    def stop(self, grace_s: float = 10.0) -> list[str]:
        """End the shards, with a last checkpoint if they take checkpoints and workers train; release their resources.

        Returns:
            Each shard's report of the pushes that it has counted; empty if it has made none.
        """
        ray = load()
        found = [""] * len(self._actors)
        stopped = [actor.stop.remote(grace_s) for actor in self._actors]
        # All at once: they take a checkpoint together. Those that have never had room do not answer.
        patience_s = grace_s + 20.0 if room.state(ray, self._group) != "PENDING" else 0.0
        ended, _ = ray.wait(stopped, num_returns=len(stopped), timeout=patience_s)
        for index, task in enumerate(stopped):
            if task in ended:
                with contextlib.suppress(ray.exceptions.RayError):
                    found[index] = ray.get(task)
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)
        return found


def start(shards: int = 1, *, run_id: str = "", resources: Mapping[str, float] | None = None, **options: Any) -> RayShards:
    """Start the shards of a job as actors on the Ray cluster that this program is connected to, spread over its nodes.

    Args:
        shards: number of shards.
        run_id: name of the job; empty: one is made up.
        resources: Ray resources of each shard (default: one CPU).
        options: options of psd-server, such as checkpoint_dir="s3://bucket/run", checkpoint_steps=1000, lease=20,
            insecure=True.

    Raises:
        ConfigError: Ray is not installed, the cluster has no room, a job of this name runs on it, or psd-server refuses an
            option.
    """
    ray = load()
    if shards < 1:
        raise ConfigError(f"shards: expected 1 or more, got {shards}")
    bundles = [dict(resources or {"CPU": 1.0})] * shards
    group = room.reserve(ray, bundles)
    given = [word for name, value in options.items() for word in words_of(flag_of(name), value)]
    found = place_shards(group, bundles, run_id or f"ray-{secrets.token_hex(6)}", given, {}, {})
    try:
        room.wait_for(ray, group)
        _ = found.servers
    except BaseException:
        found.stop(0.0)
        raise
    return found


def place_shards(
    group: Any,
    bundles: Sequence[Mapping[str, float]],
    run_id: str,
    flags: Sequence[str],
    environ: Mapping[str, str],
    modules: Mapping[str, bytes],
) -> RayShards:
    """Start a shard in each of a placement group's first bundles; for flags, environ and modules see ShardProcess."""
    ray = load()
    actor = ray.remote(ShardProcess)
    try:
        actors = [
            actor.options(
                name=f"{run_id}/shard-{index}",
                namespace=NAMESPACE,
                **actor_resources(bundle),
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=8,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
            ).remote(index, len(bundles), run_id, flags, dict(environ), dict(modules))
            for index, bundle in enumerate(bundles)
        ]
    except ValueError as error:
        ray.util.remove_placement_group(group)
        raise ConfigError(f"run_id: a job with the name {run_id} runs on this Ray cluster: {error}") from error
    return RayShards(actors, run_id, group)


def actor_resources(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor that takes up a whole bundle."""
    others = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU", "memory")}
    own = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}
    return {**own, "memory": bundle["memory"]} if "memory" in bundle else own
