"""Ray, played: actors are objects of this process, and their calls run in threads. For what psd does with Ray, not for Ray."""

from __future__ import annotations

import concurrent.futures
import functools
import types
from collections.abc import Sequence
from typing import Any

CLUSTER = {"CPU": 4096.0}


class _Method:
    """A method of an actor, such as actor.address: `remote` calls it."""

    def __init__(self, pool: concurrent.futures.Executor, actor: concurrent.futures.Future[Any], name: str) -> None:
        self._pool, self._actor, self._name = pool, actor, name

    def options(self, **_: Any) -> _Method:
        return self

    def remote(self, *args: Any) -> concurrent.futures.Future[Any]:
        return self._pool.submit(lambda: getattr(self._actor.result(), self._name)(*map(_value, args)))


class _Actor:
    def __init__(self, pool: concurrent.futures.Executor, made: concurrent.futures.Future[Any]) -> None:
        self._pool, self._made = pool, made

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._pool, self._made, name)


class _ActorClass:
    def __init__(self, pool: concurrent.futures.Executor, kind: type[Any]) -> None:
        self._pool, self._kind = pool, kind

    def options(self, **_: Any) -> _ActorClass:
        return self

    def remote(self, *args: Any) -> _Actor:
        return _Actor(self._pool, self._pool.submit(self._kind, *args))


class _Group:
    """A placement group, which has its room at once."""

    def __init__(self, bundles: Sequence[Any]) -> None:
        self.bundle_specs = bundles

    def wait(self, _timeout_s: float) -> bool:
        return True


def _value(given: Any) -> Any:
    """The value of what a call will return; anything else is one."""
    return given.result() if isinstance(given, concurrent.futures.Future) else given


class PlayedRay(types.ModuleType):
    """The module ray, as far as psd.cli uses it. One node, with room for everything."""

    def __init__(self) -> None:
        super().__init__("ray")
        self._pool = concurrent.futures.ThreadPoolExecutor(32)
        errors = {"RayError": Exception, "RayActorError": ConnectionError, "RayTaskError": ChildProcessError}
        self.exceptions = types.SimpleNamespace(**errors, GetTimeoutError=concurrent.futures.TimeoutError)
        self.util = types.SimpleNamespace(
            placement_group=lambda bundles, strategy: _Group(bundles),
            placement_group_table=lambda group: {"state": "CREATED"},
            remove_placement_group=lambda group: None,
            get_node_ip_address=lambda: "127.0.0.1",
            scheduling_strategies=types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: (group, index)),
        )
        self.remote = functools.partial(_ActorClass, self._pool)

    def init(self, **_: Any) -> None:
        """Nothing is to be connected to."""

    def shutdown(self) -> None:
        self._pool.shutdown()

    def kill(self, actor: Any) -> None:
        """Its processes have ended."""

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "played-node")

    def get(self, given: Any, timeout: float | None = None) -> Any:
        return [each.result(timeout) for each in given] if isinstance(given, list) else given.result(timeout)

    def wait(self, given: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        which = concurrent.futures.FIRST_COMPLETED if num_returns == 1 else concurrent.futures.ALL_COMPLETED
        done, rest = concurrent.futures.wait(given, timeout, which)
        return [each for each in given if each in done], [each for each in given if each in rest]
