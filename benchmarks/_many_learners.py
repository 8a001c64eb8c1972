"""Many small sites on one set of shards: learners of a tiny model, some tens of them in a process, each in a thread of its own.

Every local step moves each element but the last by -1, and every difference that counts moves the job as far: so what the job
has moved, and what its learners have still to send, is the number of steps that they have made, to the last one. Knows nothing
of command lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import _report
import torch
from _processes import FORKS, Shard, cpu_s, end_with_benchmark

import psd_client
import psd_client.torch as psd

IN_A_PROCESS = 25
FRAGMENTS = 2
OUTER = psd_client.SGD(lr=1.0)


class Site:
    """One learner.

    Args:
        task: the servers, the number of learners, the size of a tensor, the options of psd.Local and of a step.
    """

    def __init__(self, rank: int, task: Mapping[str, Any]) -> None:
        self._task = task
        self._model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(task["elements"])) for name in "ab"})
        for parameter in self._model.values():
            parameter.grad = torch.ones_like(parameter)
            parameter.grad[-1] = rank / 1024  # else a shard would take two learners for one
        local = psd.Local(task["local_steps"], OUTER, fragments=FRAGMENTS, sample=task["sample"])
        inner = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._optimizer = psd.distribute(
            self._model, inner, local=local, servers=task["servers"], rank=rank, world_size=task["sites"], reduce="sum"
        )
        self._begun = self._optimizer.local_step
        self._counted = 0
        self._optimizer.on_exchange = self._on_exchange
        self._optimizer.ps.barrier("begin")

    def _on_exchange(self, exchanged: Any) -> None:
        self._counted += exchanged.is_counted

    @property
    def clock(self) -> int:
        """Rounds of the job, as of this learner's last exchange."""
        return self._optimizer.ps.clock

    def train(self, until: Any) -> None:
        """Make steps until `until()`."""
        pause, due = threading.Event(), time.perf_counter()
        while not until():
            due = max(due + self._task["step_s"], time.perf_counter())
            self._optimizer.step()
            pause.wait(due - time.perf_counter())

    def end(self, *, is_last: bool = False) -> dict[str, Any]:
        """Leave; what it has made, and has not sent, by tensor. The last one also says how far the job has moved."""
        steps = self._optimizer.local_step - self._begun
        left = self._left()
        moved: list[float] = []
        if is_last:
            self._optimizer.pull()
            moved = [-float(parameter[0].detach()) for parameter in self._model.values()]
        self._optimizer.close()
        return {"steps": steps, "left": left, "counted": self._counted, "moved": moved}

    def _left(self) -> list[float]:
        base = self._optimizer._base  # noqa: SLF001 - what the learner has received last
        return [float(base[index][0] - parameter[0].detach()) for index, parameter in enumerate(self._model.values())]


def run_sites(ranks: range, task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train these learners, in one process, for the task's seconds."""
    torch.set_num_threads(1)

    def run(rank: int) -> dict[str, Any]:
        site = Site(rank, task)
        end = time.monotonic() + task["seconds"]
        site.train(lambda: time.monotonic() > end)
        return site.end()

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))


def measure(task: Mapping[str, Any], shards: list[Shard]) -> dict[str, Any]:
    """Train all learners; the first one is there until the others have left, and counts.

    Raises:
        RuntimeError: a step was lost, or counted twice.
    """
    sites, before = task["sites"], {}
    groups = [range(first, min(first + IN_A_PROCESS, sites)) for first in range(1, sites, IN_A_PROCESS)]
    with ProcessPoolExecutor(len(groups), FORKS, end_with_benchmark) as pool:
        jobs = [pool.submit(run_sites, ranks, task) for ranks in groups]
        own = Site(0, task)
        began, before = time.monotonic(), {shard.pid: cpu_s(shard.pid) for shard in shards}
        middle: dict[str, float] = {}

        def is_over() -> bool:
            if not middle and time.monotonic() - began >= task["seconds"]:
                middle["seconds"] = time.monotonic() - began
                middle["cpu_s"] = sum(cpu_s(pid) - earlier for pid, earlier in before.items())
            return all(job.done() for job in jobs)

        own.train(is_over)
        found = [one for job in jobs for one in job.result()]
        found.append(own.end(is_last=True))
    return {**_counted(found), **middle, "rounds": own.clock}


def _counted(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals; RuntimeError unless each step is in the job once, or still with its learner."""
    steps = sum(one["steps"] for one in found)
    for index, moved in enumerate(found[-1]["moved"]):
        left = sum(one["left"][index] for one in found)
        if moved + left != steps:
            raise RuntimeError(
                f"{steps:,} steps were made; of tensor {index} {moved:,.0f} are in the job, and {left:,.0f} left"
            )
    return {"steps": steps, "exchanges": sum(one["counted"] for one in found)}


def text(found: Mapping[str, Any]) -> str:
    """A table of the figures."""
    seconds, rounds = found["seconds"], found["rounds"]
    cells = (
        f"{found['sites']}, of which {found['sample']:.0%}",
        f"{rounds / seconds:.1f}",
        f"{found['exchanges'] / max(1, rounds):.1f}",
        f"{found['cpu_s'] / seconds:.0%}",
        f"{1e3 * found['cpu_s'] / max(1, found['exchanges']):.1f}",
        f"{found['steps']:,}, each counted once",
    )
    names = ("learners", "rounds a second", "members of a round", "CPU of the shards", "ms of it per exchange", "steps")
    return _report.table(names, [cells])
