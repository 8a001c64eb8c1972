"""The thread by which a relay follows its servers: it waits for each newer version, fetches it once, and hands it over.

When the servers are lost it tries on, and what the relay has is served meanwhile; it says so, with the age. What is older than
that, because the job has gone back to a checkpoint or has begun anew, is not taken. Must not know the relay's own readers.
"""

from __future__ import annotations

import logging
import threading

from psd.contract.config import ClientConfig, alternatives, is_loopback
from psd.contract.credentials import Credentials
from psd.contract.errors import NotDeclared, PsdError, WaitTimeout
from psd.contract.layout import Layout
from psd.relay.holding import Holding, held_version
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shard_lane import ShardLane
from psd_client.lanes.transport import Cancelled
from psd_client.reader import Reader, WholeCopy

logger = logging.getLogger(__name__)

FOLLOW_S = 10.0
"""Seconds for which one call waits for a newer version."""

PAUSE_S = 0.5
"""Seconds between two attempts to reach servers that are lost. Each attempt has retries of its own."""

REPORT_S = 60.0
"""Seconds between two lines of the log that say how the relay is doing."""


def addresses_of(config: ClientConfig) -> list[str]:
    """All addresses that a reader may dial."""
    return [address for server in config.servers for address in alternatives(server)]


class Following:
    """Keeps a `Holding` at the newest version of the servers.

    Args:
        config: settings of a reader of the servers. holding: gets the versions.

    Raises:
        ConfigError: a file of credentials cannot be used.

    Attributes:
        versions: how many were fetched so far. problem: why there are no newer ones; empty: nothing is wrong.
    """

    def __init__(self, config: ClientConfig, holding: Holding) -> None:
        credentials = Credentials(config.tls_ca, config.tls_cert, config.tls_key, config.token_file)
        if credentials.has_token and not (credentials.has_tls or all(map(is_loopback, addresses_of(config)))):
            logger.warning("without --upstream-tls-ca the token crosses the network unencrypted, where anybody can take it")
        self._lanes = [ShardLane(index, server, "grpc", credentials) for index, server in enumerate(config.servers)]
        self.versions = 0
        self.problem = ""
        self._reader = Reader(config, self._lanes)
        self._servers = ",".join(config.servers)
        self._holding = holding
        self._layout: Layout | None = None
        self._spare: FlatBuffers | None = None
        self._is_lost = False
        self._reported_at = holding.now()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psd-follow", daemon=True)

    @property
    def newest(self) -> int:
        """The newest version that the servers have told of."""
        return self._reader.newest

    @property
    def heard_s(self) -> float:
        """Seconds since the servers last answered; -1: never."""
        return -1.0 if self._reader.heard_at is None else self._holding.age_s(self._reader.heard_at)

    def start(self, name: str) -> None:
        """Begin to follow. name: by which the servers' status calls this relay."""
        self._reader.name = name
        logger.info("following %s", self._servers)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and disconnect."""
        self._stopping.set()
        for lane in self._lanes:  # which ends the thread's calls
            lane.close()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Cancelled:
                return
            except Exception:  # without this thread the relay would serve an old version for ever
                logger.exception("following failed because of a defect")
                self._stopping.wait(PAUSE_S)
            if self._holding.now() - self._reported_at > REPORT_S:
                self._report()

    def _follow(self) -> None:
        """Take one newer version, if it comes within FOLLOW_S."""
        held, before = self._holding.held, self._reader.received_bytes
        self._reader.relayed_readers = self._holding.readers.number()
        try:
            newer_than, base = (None, None) if held is None else (held.version, held.buffers)
            copy = self._reader.pull_whole(newer_than, FOLLOW_S, self._spare, base)
        except WaitTimeout:
            self._heard("" if held is None or self._reader.newest >= held.version else self._older(held.version))
        except NotDeclared as error:
            self._heard(str(error))
        except PsdError as error:
            self._lost(error)
            self._stopping.wait(PAUSE_S)
        else:
            self._take(copy)
            self._heard("")
        finally:
            self._count(self._reader.received_bytes - before)

    def _take(self, copy: WholeCopy) -> None:
        layout = copy.buffers.layout
        if not layout.is_gathered:
            if self._layout is None or self._layout.spec is not layout.spec:
                self._layout = Layout(layout.spec, layout.shard_count, is_gathered=True)
            layout = self._layout
        is_first = self._holding.held is None
        held = held_version(copy, layout, self._servers, self._holding.now())
        self.versions += 1
        self._spare = self._holding.take(held)
        level = logging.INFO if is_first else logging.DEBUG
        logger.log(level, "has version %d", held.version, extra={"run_id": held.described.run_id, "bytes": held.nbytes})

    def _count(self, received: int) -> None:
        self._holding.counters.lanes["grpc"].count_bytes(received=received)

    def _older(self, version: int) -> str:
        return (
            f"{self._servers} are at version {self._reader.newest}, older than {version}, which stays until they are beyond "
            "it: the job has gone back to a checkpoint, or has begun anew"
        )

    def _heard(self, problem: str) -> None:
        """Note that the servers have answered, and what is wrong all the same."""
        if self._is_lost:
            self._is_lost = False
            logger.info("following %s again", self._servers)
        if problem and problem != self.problem:
            logger.warning("%s", problem)
        self.problem = problem
        self._holding.explain(problem or "none has come yet")

    def _lost(self, error: PsdError) -> None:
        self.problem = str(error)
        self._holding.explain(self.problem)
        if self._is_lost:
            return
        self._is_lost = True
        held = self._holding.held
        serving = "has no version yet"
        if held is not None:
            serving = f"serves version {held.version}, {self._holding.now() - held.since:.0f} s old, until they are back"
        logger.warning("cannot follow %s, and %s: %s", self._servers, serving, error)

    def _report(self) -> None:
        self._reported_at = self._holding.now()
        logger.info("%s", self.totals)

    @property
    def totals(self) -> str:
        """Clauses that say what the relay has done, without their subject."""
        held, holding, counters = self._holding.held, self._holding, self._holding.counters
        if held is None:
            return f"has fetched no version from {self._servers}"
        return (
            f"has fetched {self.versions} versions of {held.described.run_id} from {self._servers}, "
            f"{counters.received_bytes} bytes, and sent {counters.sent_bytes} bytes; at version {held.version}, "
            f"{holding.age_s(held.since):.0f} s old; {holding.readers.calls} readers"
        )
