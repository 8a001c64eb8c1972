"""Ranks of learners that are groups of processes, for tests: each a process of its own, over gloo, that runs a program.

The processes are forked from one that has imported torch, and its compiler, which each optimizer's first step loads. A
learner's batch is shared out among its ranks, whose mean gradient is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from free_ports import claimed_port
from learners import OUTER, adam, network
from torch import distributed, nn
from torch.nn import functional as F  # noqa: N812

import psd_client
import psd_client.torch as psd
from psd.contract.errors import Overloaded
from psd_client.client import worker_of

TIMEOUT_S = 200

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "psd_client.torch", __name__])

LOCAL = psd.Local(steps=6, outer=OUTER, fragments=3, delay=2)


class Here(NamedTuple):
    """A program's surroundings: the shards' addresses, its learner, its rank, and the way to the test."""

    servers: str
    learner: int
    learners: int
    rank: int
    pipe: Connection


class Rank:
    """A process of one rank, as the test sees it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe

    def hear(self) -> Any:
        """What the program says next, or returns in the end; or the text of its error."""
        assert self.pipe.poll(TIMEOUT_S), "the rank says nothing"
        return self.pipe.recv()

    def let_go(self) -> None:
        """Let a program go on that waits after each step."""
        self.pipe.send(None)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


class Ranks:
    """All ranks that a test has started."""

    def __init__(self) -> None:
        self.started: list[Rank] = []
        self._claims: list[socket.socket] = []

    def start(
        self, program: Callable[..., Any], servers: str, *args: Any, learner: int = 0, learners: int = 1, size: int = 2
    ) -> list[Rank]:
        """Start the ranks of one learner."""
        port, claim = claimed_port()
        self._claims.append(claim)
        found = []
        for rank in range(size):
            ours, theirs = _FORKS.Pipe()
            here = Here(servers, learner, learners, rank, theirs)
            process = _FORKS.Process(target=_run, args=(program, here, f"tcp://127.0.0.1:{port}", size, args), daemon=True)
            process.start()
            theirs.close()
            found.append(Rank(process, ours))
        self.started += found
        return found

    def close(self) -> None:
        for rank in self.started:
            rank.kill()
            rank.pipe.close()
        for claim in self._claims:
            claim.close()


def _run(program: Callable[..., Any], here: Here, address: str, size: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", init_method=address, rank=here.rank, world_size=size)
        found = program(here, *args)
    except BaseException as error:  # noqa: BLE001 - the test sees it
        found = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    here.pipe.send(found)
    here.pipe.close()
    os._exit(0) if here.rank else None  # a member has nothing to close; rank 0's connection ends as in any program


def prepared(kind: str, model: nn.Sequential) -> nn.Module:
    """The model as this kind of program has it."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model[2], model[4]):
            fully_shard(layer)
        return fully_shard(model)
    return model


def backward(model: nn.Module, step: int, learner: int) -> None:
    """This rank's part of the gradients of the learner's step, which learners.backward has whole."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ids = torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(100 * step + learner))
    own = ids[rank::size]
    model.zero_grad()
    F.cross_entropy(model(own), own.sum(1) % 3).backward()
    if type(model) is nn.Sequential:
        for parameter in model.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
            parameter.grad /= size


def whole(model: nn.Module) -> list[Any]:
    """The parameters as arrays."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [value.detach().clone().numpy() for value in found]


def joined(here: Here, kind: str, local: psd.Local, **options: Any) -> tuple[nn.Module, Any]:
    model = prepared(kind, network())
    if "ps" not in options:
        options |= {"servers": here.servers, "rank": here.learner, "world_size": here.learners}
    return model, psd.distribute(model, adam(model), local=local, group=distributed.group.WORLD, **options)


def train(here: Here, kind: str, local: psd.Local, steps: int, waits: bool = False) -> list[Any]:
    """Train to a local step. waits: say each step before it is made, and wait for leave."""
    model, optimizer = joined(here, kind, local)
    for step in range(optimizer.local_step + 1, steps + 1):
        if waits:
            here.pipe.send(step)
            here.pipe.recv()
        step_once(model, optimizer, step)
    optimizer.close()
    return whole(model)


def step_once(model: nn.Module, optimizer: Any, step: int) -> None:
    backward(model, step, optimizer.rank)
    tokens = 1 + (step + optimizer.rank) % 3
    optimizer.step(tokens=tokens * (0.25 if distributed.get_rank() == 0 else 0.75))


def fail_once(here: Here, steps: int) -> tuple[str, int, list[Any]]:
    """Train while an exchange fails once, at rank 0: the error that this rank has seen, the clock, and the parameters."""
    options: dict[str, Any] = {}
    if here.rank == 0:
        ps = options["ps"] = psd_client.connect(here.servers, 0, 1)
        worker = worker_of(ps)
        real = worker.push_pull_flat

        def fail(*args: Any, **given: Any) -> None:
            del args, given
            worker.push_pull_flat = real  # type: ignore[method-assign]
            raise Overloaded("as ordered")

        worker.push_pull_flat = fail  # type: ignore[method-assign]
    else:
        options["ps"] = None
    model, optimizer = joined(here, "ddp", LOCAL, **options)
    seen = ""
    for step in range(1, steps + 1):
        try:
            step_once(model, optimizer, step)
        except Overloaded as error:
            seen += f"{step}: {error}"
    optimizer.close()
    return seen, optimizer.ps.clock, whole(model)


def stop(here: Here, steps: int) -> Any:
    """Stop the job after some steps, and go on until it ends: what `stop` has returned, and the clock at which the end came."""
    model, optimizer = joined(here, "plain", LOCAL)
    end = None
    for step in range(1, 100):
        if step == steps:
            end = optimizer.stop()
        try:
            step_once(model, optimizer, step)
        except SystemExit:
            return end, optimizer.ps.clock, optimizer.ps.is_over
    return None


def pull(here: Here) -> Any:
    """Pull amid an interval, evaluate, and go on."""
    model, optimizer = joined(here, "fsdp", psd.Local(steps=4, outer=OUTER))
    for step in range(1, 7):
        step_once(model, optimizer, step)
    optimizer.pull()
    with torch.no_grad():
        losses = [float(model(torch.zeros(1, 3, dtype=torch.int64)).sum())]
        for step in range(7, 9):
            with torch.enable_grad():
                step_once(model, optimizer, step)
        optimizer.pull()
        losses.append(float(model(torch.zeros(1, 3, dtype=torch.int64)).sum()))
    return losses, optimizer.local_step, whole(model)


def unequal_calls(here: Here) -> None:
    _, optimizer = joined(here, "plain", psd.Local(steps=2))
    if here.rank:
        optimizer.pull()
    else:
        optimizer.stop()


def unequal_models(here: Here) -> None:
    model = nn.Linear(2, 2 + here.rank)
    psd.distribute(model, adam(model), local=psd.Local(steps=2), group=distributed.group.WORLD)


def far_mesh(here: Here) -> None:
    """Give a DTensor parts outside of the group."""
    model = prepared("fsdp", network())
    own = [distributed.new_group([rank]) for rank in range(2)][here.rank]
    try:
        psd.distribute(model, adam(model), local=psd.Local(steps=2), group=own)
    finally:
        with contextlib.suppress(Exception):
            distributed.barrier()  # torch's store ends with rank 0, while rank 1 may still make its group


def unconnected(here: Here) -> str:
    """Ask rank 1 for what it has not."""
    _, optimizer = joined(here, "plain", psd.Local(steps=2))
    try:
        optimizer.ps.log(0, loss=1.0)
    except AttributeError as error:
        return str(error)
    return ""


def ranks_of_torchrun(here: Here) -> None:
    """Connect as torchrun starts processes."""
    os.environ |= {"RANK": str(here.rank), "WORLD_SIZE": "2"}
    model = network()
    psd.distribute(model, adam(model), local=psd.Local(steps=2), group=distributed.group.WORLD, servers=here.servers)


def no_group(here: Here) -> None:
    model = network()
    psd.distribute(model, adam(model), local=psd.Local(steps=2), group="all")


def without_local(here: Here) -> None:
    model = network()
    psd.distribute(model, adam(model), group=distributed.group.WORLD)  # type: ignore[call-overload]


def nobody_there(here: Here) -> None:
    joined(here, "plain", LOCAL, retry_timeout=0.1)
