"""The programs of a trial of publications: a publisher, and a reader. python published_program.py PARENT_PID OPTIONS.

Each writes a history, as program.py does:

    {"t": 12.3, "e": "invoke", "op": "put", "number": 17}
    {"t": 12.4, "e": "ok", "op": "put", "version": 9}
    {"t": 12.5, "e": "ok", "op": "pull", "version": 9, "number": 17, "wrong": "", "digest": "...", "way": "out"}

Uses the public face of psd alone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from children import settle_in
from program import RESTART, History, Logs
from published_values import meta_of, parts_of, wrong_in

import psd_client

WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"names": ["sm*", "half"]},
    "rounded": {"dtype": "bfloat16"},
    "out": {},
}
"""How readers pull."""


@dataclass(frozen=True)
class PublishedOptions:
    """What a program is started with.

    Attributes:
        role: "publish"; "finish": put one version, and write it to the file `last`; or "read".
        stop: file whose existence asks publishers to end. last: readers end once they have the version in it.
        first: the first number that it puts.
    """

    role: str
    history: str
    stop: str
    last: str
    servers: str
    rank: int
    ranks: int
    shards: int
    seed: int
    first: int
    connect: dict[str, Any]
    pace_s: float = 0.02

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Caller:
    """Calls what is written down."""

    def __init__(self, options: PublishedOptions, history: History) -> None:
        self.options, self.history = options, history
        self.random = random.Random(options.seed)

    def call(self, op: str, function: Callable[[], Any], **fields: Any) -> Any:
        """The result, for `note_ok`; an error of psd's is written down, and raised."""
        self.history.write("invoke", op=op, **fields)
        try:
            return function()
        except BaseException as error:
            is_psd = isinstance(error, psd_client.PsdError | psd_client.ConfigError)
            self.history.write(
                "error",
                op=op,
                **{"class": type(error).__name__},
                is_psd=is_psd,
                text=str(error)[:1000],
                trace="" if is_psd else traceback.format_exc(),
            )
            raise

    def pause(self) -> None:
        """Between two calls."""
        threading.Event().wait(self.options.pace_s * 2 * self.random.random())

    def must_stop(self) -> bool:
        """True once publishers are to end."""
        return Path(self.options.stop).exists()


class Publisher(Caller):
    """One life of a publisher."""

    def run(self) -> str:
        """Put version after version; how it has ended."""
        options = self.options
        terms: dict[str, Any] = {"like": parts_of(0, options.shards, 1)[0]}
        if options.ranks > 1:
            terms = {"parts": parts_of(0, options.shards, options.ranks), "rank": options.rank}
        try:
            store = self.call("publish", lambda: psd_client.publish(options.servers, **terms, **options.connect))
            self.history.write("ok", op="publish", version=store.version)
        except psd_client.PsdError:
            return self._after_error()
        with store:
            number = options.first
            while options.role == "finish" or not self.must_stop():
                # Of several ranks each must know which put the others are at: the store says so.
                number = number + 1 if options.ranks == 1 else store.version + 1
                if not self._has_put(store, number):
                    self.history.write("end", how="abort")
                    os._exit(RESTART)
                if options.role == "finish":
                    if options.rank == 0:
                        Path(options.last).with_suffix(".part").write_text(f"{store.version}")
                        Path(options.last).with_suffix(".part").rename(options.last)
                    break
                self.pause()
        return "close"

    def _after_error(self) -> str:
        return "restart" if self.options.role == "finish" or not self.must_stop() else "close"

    def _has_put(self, store: psd_client.Store, number: int) -> bool:
        """True once this is put; False if another life, or another put, must go on."""
        state = parts_of(number, self.options.shards, self.options.ranks)[self.options.rank]
        while True:
            try:
                version = self.call("put", lambda: store.put(state, meta_of(number)), number=number)
            except psd_client.PsdError as error:
                passes = type(error).__name__ in ("ShardUnavailable", "WaitTimeout", "Draining", "Overloaded", "RolledBack")
                is_stuck = self.options.ranks > 1 and (self.random.random() < 0.5 or self.must_stop())
                if not passes or is_stuck:
                    return False
                self.pause()
            else:
                self.history.write("ok", op="put", number=number, version=version)
                return True


class Follower(Caller):
    """One life of a reader."""

    def run(self) -> str:
        """Pull version after version until the last one has come; how it has ended."""
        connection = 0
        while True:
            connection += 1
            with psd_client.connect(self.options.servers, role="reader", **self.options.connect) as reader:
                if self._read(reader, connection):
                    return "close"

    def _read(self, reader: psd_client.Reader, connection: int) -> bool:
        """True if the last version has come; False when it is time for another connection."""
        out = {"big": np.zeros(40_000 * self.options.shards, np.float32)}
        version = 0
        for _ in range(self.random.choice((3, 30, 300))):
            way = self.random.choice(tuple(WAYS))
            newer = version if version and self.random.random() < 0.7 else None
            given = {"out": out} if way == "out" else {}
            try:
                found = self.call(
                    "pull",
                    lambda way=way, newer=newer, given=given: reader.pull(**WAYS[way], **given, newer_than=newer, timeout=4),
                    way=way,
                    newer_than=newer,
                    connection=connection,
                )
            except psd_client.PsdError:
                self.pause()
                continue
            wrong = wrong_in(found, found.meta, self.options.shards, WAYS[way].get("dtype"))
            number = found.meta.get("number") if isinstance(found.meta, dict) else None
            told = {"version": found.version, "number": number, "digest": found.digest, "wrong": wrong, "way": way}
            self.history.write("ok", op="pull", connection=connection, **told)
            version = found.version
            last = Path(self.options.last)
            if last.exists() and version >= int(last.read_text()):
                return True
            self.pause()
        return False


def main() -> None:
    settle_in(int(sys.argv[1]))
    options = PublishedOptions(**json.loads(sys.argv[2]))
    history = History(options.history)
    logger = logging.getLogger("psd_client")
    logger.addHandler(Logs(history))
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    history.write("begin", pid=os.getpid(), seed=options.seed)
    how = (Follower if options.role == "read" else Publisher)(options, history).run()
    history.write("end", how=how)
    sys.exit(RESTART if how == "restart" else 0)


if __name__ == "__main__":
    main()
