"""A private cluster for one program, such as a notebook: `local` starts shards, and `run` calls a function in several workers.

    def train(epochs):
        optimizer = psd_client.torch.distribute(model(), ...)      # as in a script under psd-run
        ...
        return loss

    with psd_client.local(shards=2, workers=4) as cluster:
        losses = cluster.run(train, epochs=3)

Workers are fresh processes, not forks: gRPC, OpenMP, CUDA and TensorFlow do not survive a fork, and a notebook has mostly used
one of them by then. The function is sent by cloudpickle, which also takes functions defined in a notebook or a REPL. It travels
through a pipe to a process that this one has started, and its result comes back through a pipe; neither is on the network.

Must not know jobs or connections; psd_client/local_worker.py is the workers' side.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import cloudpickle

from psd.contract.arguments import whole_number
from psd.contract.config import ConfigError
from psd.contract.environment import worker_environment
from psd.contract.launching import python_command
from psd_client.owned import OwnedProcess
from psd_client.standalone import PrivateShard, listed


class RunFailed(RuntimeError):
    """A worker of a local cluster has raised an error or died; the message includes the traceback.

    `__cause__` is the error itself, if it could be sent.

    Attributes:
        rank: the worker's rank.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"worker {rank} {message}")
        self.rank = rank


def local(shards: int = 1, workers: int = 1) -> LocalCluster:
    """Start shards on this machine, for functions that `LocalCluster.run` calls in several workers.

    A context manager. The shards end with it, or with this process, even if that is killed; what they held is lost.

    Args:
        shards: number of shards.
        workers: number of workers that each `run` starts.

    Raises:
        ConfigError: a number is wrong. ShardUnavailable: a shard could not be started.
    """
    for name, value in (("shards", shards), ("workers", workers)):
        if whole_number(ConfigError, name, value) < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
    return LocalCluster(shards, workers)


class LocalCluster:
    """Shards that belong to this process, and a way to run functions in several workers; made by `local`.

    Attributes:
        servers: the shards' addresses, for `psd_client.connect(cluster.servers, role="reader")` and psdctl; they differ from
            run to run.
        workers: number of workers.
    """

    def __init__(self, shards: int, workers: int) -> None:
        self.workers = workers
        self._shard_count = shards
        self._shards: list[PrivateShard] = []
        self._is_closed = self._is_used = False
        self._unlist: Callable[[], None] = lambda: None
        self.servers = self._start_shards()

    def _start_shards(self) -> str:
        self._end_shards()
        self._is_used = False
        self._shards = [PrivateShard(index, self._shard_count) for index in range(self._shard_count)]
        try:
            servers = ",".join([shard.wait_ready() for shard in self._shards])
        except BaseException:
            self.close()
            raise
        self._unlist = listed(servers, self.workers)
        return servers

    def _end_shards(self) -> None:
        self._unlist()
        for shard in self._shards:
            shard.close()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` in all workers at once; return what the calls return, in the order of the ranks.

        Each worker is a separate process with the environment that psd-run gives to a script: `connect()` and `distribute` join
        this cluster, and `rank` and `world_size` of a connection tell the workers apart. What a worker prints is shown here,
        with its rank. Each run is a separate job on new shards, which stay for readers until the next run.

        Raises:
            RunFailed: a worker has raised an error or died; the other workers are ended.
            KeyboardInterrupt: Ctrl-C was pressed; all workers and the cluster are ended.
            TypeError: the function or an argument cannot be sent to another process.
            RuntimeError: the cluster is closed.
        """
        if self._is_closed:
            raise RuntimeError("psd: this local cluster is closed; begin another one with psd_client.local()")
        try:
            # The path apart: reading the call imports what it uses.
            task = cloudpickle.dumps((sys.path, cloudpickle.dumps((fn, args, kwargs))))
        except Exception as error:
            raise TypeError(f"fn: it, or what it uses, cannot be sent to a worker: {error}") from error
        if self._is_used:
            self.servers = self._start_shards()
        self._is_used = True
        workers: list[_Worker] = []
        try:
            for rank in range(self.workers):  # one by one, to be closed if the next cannot be started
                workers.append(_Worker(rank, worker_environment(self.servers, rank, self.workers)))  # noqa: PERF401
            return _results(workers, task)
        except KeyboardInterrupt:
            self.close()
            raise
        finally:
            for worker in workers:
                worker.close()

    def close(self) -> None:
        """End the shards; what they held is lost. Idempotent."""
        self._is_closed = True
        self._end_shards()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class _Worker:
    """One worker's process, the lines that it prints, and its result."""

    def __init__(self, rank: int, environ: dict[str, str]) -> None:
        self.rank = rank
        self.result, result = os.pipe()
        try:
            command = [*python_command("psd_client.local_worker"), str(result)]
            self.process = OwnedProcess(command, environ=environ, pass_fds=[result], is_merged=True)
        except BaseException:
            os.close(self.result)
            raise
        finally:
            os.close(result)
        self.output = self.process.output.fileno()
        self._received = bytearray()
        self._line = b""

    def begin(self, task: bytes, ended: Callable[[int], None]) -> None:
        """Send the task, and call `ended` with the rank when the process has ended; in threads, as both may take long."""

        def send() -> None:
            with contextlib.suppress(OSError, ValueError):  # it has died, or is being ended
                view = memoryview(len(task).to_bytes(8, "little") + task)
                while view:
                    view = view[self.process.input.write(view) :]

        def wait() -> None:
            self.process.wait()
            ended(self.rank)

        for target in (send, wait):
            threading.Thread(target=target, name="psd-local", daemon=True).start()

    def read(self, descriptor: int) -> bool:
        """Read from one of the two descriptors; returns False at its end."""
        data = os.read(descriptor, 1 << 16)
        if descriptor == self.result:
            self._received += data
        else:
            *lines, self._line = (self._line + data).split(b"\n")
            self._show(lines)
        return bool(data)

    def finish(self) -> Any:
        """The result, once the process has ended and all its output has been read.

        Raises:
            RunFailed: the worker has died or raised an error.
        """
        self._show([self._line] if self._line else [])
        self._line = b""
        if not self._received:
            status = self.process.wait()
            raise RunFailed(self.rank, f"died, by signal {-status}" if status < 0 else f"ended with status {status}")
        error, value = cloudpickle.loads(bytes(self._received))
        if error is None:
            return value
        raise RunFailed(self.rank, f"raised an error:\n{error}") from (cloudpickle.loads(value) if value else None)

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            sys.stdout.write(f"[worker {self.rank}] {line.decode(errors='replace')}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """End the process, and every process that it has started."""
        self.process.close(is_killed=True)
        os.close(self.result)


def _results(workers: list[_Worker], task: bytes) -> list[Any]:
    """Run the workers until all have ended, or one has failed; return their results by rank."""
    ended: SimpleQueue[int] = SimpleQueue()
    wakeup, waker = socket.socketpair()

    def on_end(rank: int) -> None:
        ended.put(rank)
        with contextlib.suppress(OSError):  # nobody waits any more
            waker.send(b".")

    results: dict[int, Any] = {}
    with wakeup, waker, selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ)
        for worker in workers:
            for descriptor in (worker.output, worker.result):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ, worker)
            worker.begin(task, on_end)
        while len(results) < len(workers):
            for key, _ in selector.select():
                if key.data is not None and not key.data.read(key.fd):
                    selector.unregister(key.fd)
            while not ended.empty():
                wakeup.recv(1)
                worker = workers[ended.get()]
                for descriptor in (worker.output, worker.result):
                    _drain(worker, descriptor)
                results[worker.rank] = worker.finish()
    return [results[worker.rank] for worker in workers]


def _drain(worker: _Worker, descriptor: int) -> None:
    """Read the output that is left in the pipe of an ended process."""
    with contextlib.suppress(BlockingIOError):  # something that it has started still has the pipe
        while worker.read(descriptor):
            pass
