"""The shards of a job as actors of Ray, each with a psd-server of its own. psd.ray is the face of it for programs.

Ray places them, by a placement group, and starts an actor again that has died. An actor starts its psd-server again if that
alone dies. Both find the parameters where they were, in a directory in the memory of the node, at the same address. If
the node is gone, so are they: Ray starts the shard elsewhere, at another address, and it begins with the newest checkpoint, to
which all shards go back then.

Must not know workers: psd/cli/ray_job.py starts them, or the program does.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from psd.cli.arguments import flag_of
from psd.cli.state import StateDirectory, clear_abandoned, private_path, remove_private
from psd.contract.config import ConfigError
from psd.contract.launching import READY_PATTERN, python_command

READY_S = 120.0
"""Seconds for a shard to be placed, started and ready."""

STARTS_MAX = 20
"""Starts of psd-server in a row that have not led to a shard that serves. More than psd-run's, since the one before, which ends
with its actor, may have the directory and the port for a moment."""

_AGAIN_S = 0.5


def load() -> Any:
    """The module ray; ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed here: pip install 'psd[ray]'") from error
    return ray


class ShardProcess:
    """An actor: one shard on one node, started again until it has ended in order.

    Args:
        index, count: which shard of how many. run_id: of the job. flags: of psd-server.
    """

    def __init__(self, index: int, count: int, run_id: str, flags: Sequence[str]) -> None:
        ray = load()
        node = ray.get_runtime_context().get_node_id()[:12]
        self._host = ray.util.get_node_ip_address()
        clear_abandoned()
        # Its own for each node, also where one machine plays several.
        self._state = StateDirectory(private_path(f"{run_id}-{node}-{index}"), run_id, count, is_private=False)
        self._index, self._flags = index, ["--shard", f"{index}/{count}", "--run-id", run_id, *flags]
        self._port = self._state.path / "port"
        self._address, self._error = "", ""
        self._is_over = False
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        threading.Thread(target=self._keep_running, daemon=True).start()

    def __repr__(self) -> str:
        """Prefix of its lines in Ray's logs."""
        return f"shard {self._index}"

    def address(self) -> str:
        """Address at which it serves; waits until it does. ConfigError if it cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._error, READY_S)
            if not self._address:
                raise ConfigError(self._error or f"shard {self._index} was not ready after {READY_S:g} s")
            return self._address

    def stop(self, grace_s: float) -> None:
        """End the shard in order, with a last checkpoint if it takes some; then remove what it held."""
        with self._changed:
            self._is_over = True
            process = self._process
        if process is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s + 5.0)
            process.kill()
            process.wait()
        self._state.close(keep=False)
        remove_private(self._state.path)

    def _keep_running(self) -> None:
        starts = 0
        while not self._is_over and starts < STARTS_MAX:
            starts += 1
            if self._run_once():
                starts = 0
            time.sleep(_AGAIN_S)
        with self._changed:
            self._error = self._error or f"shard {self._index} ended {starts} times at its start; see its log"
            self._changed.notify_all()

    def _run_once(self) -> bool:
        """Run psd-server to its end; True if it has served."""
        port = self._port.read_text() if self._port.exists() else "0"
        listen = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        place = ["--listen", listen, "--state-dir", str(self._state.shard(self._index)), "--exit-on-eof"]
        with self._changed:
            if self._is_over:
                return False
            process = subprocess.Popen(  # noqa: S603 - our own module
                [*python_command("psd.cli.server"), *self._flags, *place],
                stdin=subprocess.PIPE,  # its end is this actor's, however that ends
                stdout=subprocess.PIPE,
                text=True,
            )
            self._process = process
        assert process.stdout is not None
        has_served = False
        for line in process.stdout:
            print(line, end="", flush=True)
            if ready := re.fullmatch(READY_PATTERN, line.rstrip("\n")):
                has_served = True
                self._port.write_text(ready[3].rpartition(":")[2])
                with self._changed:
                    self._address = ready[3]
                    self._changed.notify_all()
        if process.wait() == 0 and has_served:
            self._is_over = True
        return has_served


class RayShards:
    """The shards of a job on a Ray cluster; can be sent to tasks and actors.

    Attributes:
        run_id: of the job.
    """

    def __init__(self, actors: Sequence[Any], run_id: str, group: Any) -> None:
        self._actors, self.run_id, self._group = list(actors), run_id, group

    @property
    def servers(self) -> list[str]:
        """Addresses of the shards, as they are now; waits for those that are being started again.

        Raises:
            ConfigError: a shard cannot be started.
        """
        ray = load()
        try:
            return list(ray.get([actor.address.remote() for actor in self._actors], timeout=READY_S))
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(str(error.cause)) from error
        except ray.exceptions.GetTimeoutError as error:
            raise ConfigError(f"not all shards have been placed and started within {READY_S:g} s") from error

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Variables for a worker, by which `psd_client.connect()` finds the shards and knows who it is."""
        who = {"PSD_RANK": str(rank), "PSD_WORLD_SIZE": str(world_size)}
        return {"PSD_SERVERS": ",".join(self.servers), "PSD_RUN_ID": self.run_id, **who}

    def stop(self, grace_s: float = 10.0) -> None:
        """End the shards, with a last checkpoint if they take some and workers train, and give back their resources."""
        ray = load()
        for stopped in [actor.stop.remote(grace_s) for actor in self._actors]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(stopped, timeout=grace_s + 20.0)
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)


def start(shards: int = 1, *, run_id: str = "", resources: Mapping[str, float] | None = None, **options: Any) -> RayShards:
    """Start the shards of a job as actors on the Ray cluster that this program is connected to, spread over its nodes.

    Args:
        shards: how many.
        run_id: name of the job; empty: one is made up.
        resources: of each shard, for Ray (default: one CPU).
        options: of psd-server, such as checkpoint_dir="s3://bucket/run", checkpoint_steps=1000, lease=20, insecure=True.

    Raises:
        ConfigError: Ray is not installed, the cluster has not enough resources, or psd-server refuses an option; its own log
            says why.
    """
    ray = load()
    bundles = [dict(resources or {"CPU": 1.0})] * shards
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    found = place_shards(group, 0, bundles, run_id or f"ray-{secrets.token_hex(6)}", options)
    try:
        wait_for(group)
        _ = found.servers
    except ConfigError:
        found.stop(0.0)
        raise
    return found


def wait_for(group: Any) -> None:
    """Wait until a placement group has its resources; ConfigError if they do not come."""
    ray = load()
    try:
        ray.get(group.ready(), timeout=READY_S)
    except ray.exceptions.GetTimeoutError as error:
        raise ConfigError(f"the cluster has had no room for {group.bundle_specs} within {READY_S:g} s") from error


def place_shards(
    group: Any, first: int, bundles: Sequence[Mapping[str, float]], run_id: str, options: Mapping[str, Any]
) -> RayShards:
    """Start a shard in each of a placement group's bundles, from `first` on."""
    ray = load()
    flags = []
    for name, value in options.items():
        flag = flag_of(name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            flags += [flag] if each is True else [f"{flag}={each}"] if each is not False else []
    actor = ray.remote(ShardProcess)
    actors = [
        actor.options(
            num_cpus=bundle.get("CPU", 0),
            resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, first + index),
        ).remote(index, len(bundles), run_id, flags)
        for index, bundle in enumerate(bundles)
    ]
    return RayShards(actors, run_id, group)
