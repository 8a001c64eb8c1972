"""Asynchronous reinforcement learning: one process trains and publishes its policy, the others play with the newest one.

    psd-run --shards 2 --workers 5 --max-restarts 20 examples/rollouts.py

Rank 0 learns by REINFORCE to walk along a corridor, from episodes that the others send over a socket; with them go the version
and the digest of the weights that made them. So it knows how stale an episode is, leaves out those that are too old, and sees
that what was played with is what it had published. Any process, and any shard, may be killed: psd-run starts it again, and the
trainer goes on with the policy that it finds in the store. Alone, the script starts such a job on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from command_line import CommandLine

import psd_client

PLACES, STEPS_MAX = 10, 40
PATIENCE_S = 100.0
NO_POLICY = {"logits": np.zeros((PLACES, 2), np.float32)}


class Episode(NamedTuple):
    """A walk, and the weights that chose its steps."""

    version: int
    digest: str
    places: list[int]
    actions: list[int]  # 0: left, 1: right
    reward: float


def chances(logits: Any) -> Any:
    """Probabilities of the two actions in each place."""
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def play(weights: psd_client.Weights, rng: np.random.Generator) -> Episode:
    """Walk from somewhere to the last place; the sooner, the better."""
    right = chances(weights["logits"])[:, 1]
    place, places, actions = int(rng.integers(PLACES - 1)), [], []
    while place < PLACES - 1 and len(actions) < STEPS_MAX:
        places.append(place)
        actions.append(int(rng.random() < right[place]))
        place = max(0, place + (1 if actions[-1] else -1))
    return Episode(weights.version, weights.digest, places, actions, 1 - len(actions) / STEPS_MAX)


def improve(logits: Any, episodes: list[Episode], lr: float) -> Any:
    """The policy after one step of REINFORCE, with the mean reward as the baseline."""
    baseline, gradient = np.mean([episode.reward for episode in episodes]), np.zeros_like(logits)
    right = chances(logits)[:, 1]
    for episode in episodes:
        for place, action in zip(episode.places, episode.actions, strict=True):
            toward = (action - right[place]) * (episode.reward - baseline)
            gradient[place] += [-toward, toward]
    return logits + lr * gradient / len(episodes)


def meeting_place() -> str:
    """The socket of this job, in a folder that nobody else can enter."""
    job = hashlib.sha256(os.environ["PSD_SERVERS"].encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"rollouts-{os.getuid()}-{job}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder / "episodes")


class Inbox:
    """Takes the players' episodes, one of each at a time: who has sent one goes on when it was taken."""

    def __init__(self, address: str) -> None:
        self.is_over = False
        self._episodes: queue.Queue[tuple[Episode, Connection]] = queue.Queue()
        self._players = 0
        Path(address).unlink(missing_ok=True)  # of a process that was killed
        self._listener = Listener(address, "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            player: Connection = self._listener.accept()
            self._players += 1
            threading.Thread(target=self._receive, args=(player,), daemon=True).start()

    def _receive(self, player: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):  # it has ended, or was killed
            while True:
                self._episodes.put((Episode(*player.recv()), player))
        self._players -= 1

    def take(self) -> Episode:
        """The next episode."""
        episode, player = self._episodes.get(timeout=PATIENCE_S)
        with contextlib.suppress(OSError):
            player.send(self.is_over)
        return episode

    def dismiss(self) -> None:
        """Tell the players that it is over."""
        self.is_over, ends_at = True, time.monotonic() + PATIENCE_S
        while self._players and time.monotonic() < ends_at:
            with contextlib.suppress(queue.Empty):
                self._episodes.put(self._episodes.get(timeout=0.1))
                self.take()


def train(args: argparse.Namespace) -> None:
    """Learn, and publish each policy."""
    inbox = Inbox(meeting_place())
    made: dict[int, str] = {}  # digests of the versions of this process
    rewards: list[float] = []
    ages: list[int] = []
    left_out = 0
    with psd_client.publish(like=NO_POLICY) as store, psd_client.connect(role="reader") as reader:
        logits, update = NO_POLICY["logits"], 0
        if store.version:
            found = reader.pull()
            logits, update = found["logits"], found.meta["update"]
            print(f"goes on after update {update}, with version {found.version}", flush=True)
        while update < args.updates:
            version = store.put({"logits": logits}, {"update": update})
            made[version] = reader.pull(newer_than=version - 1).digest
            episodes: list[Episode] = []
            while len(episodes) < args.batch:
                episode = inbox.take()
                if made.get(episode.version, episode.digest) != episode.digest:
                    raise RuntimeError(f"episode of version {episode.version} was played with other weights")
                age = version - episode.version
                if age > args.max_age:
                    left_out += 1
                    continue
                ages.append(age)
                episodes.append(episode)
            logits = improve(logits, episodes, args.lr).astype(np.float32)
            rewards += [episode.reward for episode in episodes]
            update += 1
            if update % args.report == 0:
                print(
                    f"update {update}: reward {np.mean(rewards):.2f}, episodes {np.mean(ages):.2f} versions old, "
                    f"{max(ages)} at most, {left_out} left out",
                    flush=True,
                )
                rewards, ages = [], []
        inbox.dismiss()


@contextlib.contextmanager
def connected() -> Iterator[Connection]:
    """A connection to the trainer, once it is there."""
    gives_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            trainer = Client(meeting_place(), "AF_UNIX")
            break
        except OSError:
            if time.monotonic() > gives_up_at:
                raise
            time.sleep(0.1)
    with trainer:
        yield trainer


def roll_out(rank: int) -> None:
    """Play, each time with the newest policy, until the trainer says that it is over."""
    rng = np.random.default_rng([rank, os.getpid()])
    with psd_client.connect(role="reader") as reader:
        is_over = False
        while not is_over:
            try:
                with connected() as trainer:
                    while not is_over:
                        trainer.send(tuple(play(reader.pull(), rng)))
                        is_over = trainer.recv()
            except (EOFError, OSError):
                print("the trainer has gone; waiting for the next one", flush=True)


def main(args: argparse.Namespace) -> None:
    """Be the trainer, or a player, of a job; or start one."""
    if "PSD_SERVERS" not in os.environ:
        with psd_client.local(shards=1, workers=5) as cluster:
            cluster.run(main, args)
        return
    rank = int(os.environ["PSD_RANK"])
    if rank:
        roll_out(rank)
    else:
        train(args)


if __name__ == "__main__":
    line = CommandLine("Learn to walk along a corridor, from what other processes play.")
    line.number("--updates", 200, "updates of the policy")
    line.number("--batch", 8, "episodes for each")
    line.number("--lr", 2.0, "learning rate")
    line.number("--max-age", 20, "versions by which an episode may be behind")
    line.number("--report", 20, "updates between two lines of report")
    line.run(main, "psd-run --shards 2 --workers 5 --max-restarts 20")
