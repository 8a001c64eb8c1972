"""The other hosts of a job, for the psd-run that leads it: which have joined, and the messages to and from them.

    join            from a node: its version of psd                                 ->   nonce
    hello           from a node: its proof, what it was asked to run, which number it wants, its address   ->   welcome, a proof
    begin           to all, when all are there: the run's id, each one's number     ->   ready, or failed, and why
    start, signal, tell                                                             ->   output, exit, say
    told            from a node that got Ctrl-C: the job is to end everywhere
    end             to all: the job's status; they clear away, and end

A node runs the command that it was itself started with; nobody can make it run another one through this connection. If a
connection ends, or is silent for too long, its node counts as lost, with all its processes; the node's own psd-run ends them.

A host that has connected is a stranger until it is welcome. Only a few strangers are kept at a time, for a short while, and
their messages must be short.

Knows messages and connections. psd/cli/hosts/admission.py decides who may join, and the policy what becomes of the job.
psd/cli/hosts/rendezvous.py and psd/cli/hosts/ssh.py make the connections; psd/cli/hosts/follower.py is the other side.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from psd.cli.hosts.admission import NodeAdmission, NotAdmittedError
from psd.cli.hosts.link import BEAT_S, FLUSH_S, MESSAGE_BYTES_MAX, SILENCE_S, Message, NodeLink
from psd.cli.hosts.proof import new_nonce, proof_of
from psd.cli.job.actions import Name
from psd.cli.job.plan import HostPlan
from psd.cli.processes import descriptor_limit
from psd.cli.processes.state_directories import is_run_id
from psd.contract.config import is_loopback, join_address
from psd.contract.printable import printable

GATHER_S = 600.0
"""Seconds for all nodes to join: a cluster may start them one after the other."""

MISSING_SAID_S = 5.0
"""Seconds between two messages about missing nodes."""

STRANGERS_MAX = 64
"""Largest number of strangers; the oldest is turned away for a new one."""

STRANGER_S = 10.0
"""Seconds within which a stranger must have become a node."""

STRANGERS_MESSAGE_BYTES_MAX = 16 << 10

_REFUSALS_SAID_MAX = 20
"""Number of different refusals that are shown to the user, so that repeated connections cannot fill the log."""

PRINTED_MAX = 200
"""Number of characters quoted from a line that a host prints before its psd-run sends anything."""

END_S = 20.0
"""Seconds for nodes to clear away at the end, before their connections are closed."""


class Leader(Protocol):
    """The leader of a job (psd-run's loop): its methods are called for events of other hosts."""

    def on_nodes_ready(self, plan: HostPlan, address: str) -> None:
        """Begin the job by this plan: all nodes are ready. address: that of this machine; empty if it runs no processes."""

    def on_output(self, name: Name, data: bytes) -> None:
        """Handle output of a process."""

    def on_exit(self, name: Name, returncode: int) -> None:
        """Handle the end of a process."""

    def on_signal(self, signum: int, count: int) -> None:
        """Handle a signal that a node's psd-run has received. count: number of signals that it has received so far."""

    def on_lost(self, names: Sequence[Name], why: str) -> None:
        """Handle the loss of a node, and of these processes with it."""

    def say(self, text: str) -> None:
        """Tell the user."""


Close: TypeAlias = Callable[[bool], str | None]
"""Ends a connection. The argument says whether a node has joined through it. Returns how it has ended, in words, or None."""


class Peer:
    """A connection to another host, and what is known of that host.

    Args:
        link: the connection.
        number: number of the node; None for a stranger, which asks for a number or takes any.
        origin: the host's address, as this side sees it.
    """

    def __init__(self, link: NodeLink, close: Close, number: int | None = None, origin: str = "") -> None:
        self.link, self.number = link, number
        self._close = close
        self.origin = self.host = origin
        self.nonce = ""
        self.has_joined = self.is_ready = False
        self.welcome_by = time.monotonic() + STRANGER_S
        if number is None:
            link.message_bytes_max = STRANGERS_MESSAGE_BYTES_MAX
        else:
            link.silence_s = GATHER_S  # ssh says nothing while it connects

    def close(self) -> str | None:
        """End the connection."""
        self.link.end()
        return self._close(self.has_joined)


class Gathering:
    """The other hosts of one job.

    Args:
        plan: plan of the job; its node is that of this machine, if it has one.
        address: address of this machine, for the others; empty if no node is here.
        replan: makes the plan again, with the run id that all agree on.
        selector: selector of the caller's loop; its data are functions. leader: is told of events.
    """

    def __init__(
        self, plan: HostPlan, address: str, replan: Callable[[str], HostPlan], selector: selectors.BaseSelector, leader: Leader
    ) -> None:
        assert plan.meeting is not None
        self._plan, self._meeting, self._replan = plan, plan.meeting, replan
        self._address = address
        self._selector, self._leader = selector, leader
        self._peers: list[Peer] = []
        self._run_id = plan.run_id
        self._is_over = False
        self._admission = NodeAdmission(plan, address)
        self._tls: ssl.SSLContext | None = None
        self._refusals: set[str] = set()
        self._gather_by: float | None = time.monotonic() + GATHER_S
        self._say_at = time.monotonic() + MISSING_SAID_S
        self._is_closed = threading.Event()

    @property
    def due(self) -> float | None:
        """The time at which to call `on_time`; None if there is no need."""
        times = [peer.link.beat_at() for peer in self._peers]
        times += [time.monotonic() + FLUSH_S] if any(peer.link.has_unsent for peer in self._peers) else []
        times += [peer.welcome_by for peer in self._strangers]
        times += [self._gather_by, self._say_at] if self._gather_by is not None else []
        return min(times, default=None)

    def on_time(self, now: float) -> None:
        """Send signs of life and unsent messages, and give up connections that have been silent for too long."""
        for peer in list(self._peers):
            peer.link.flush()
            if not peer.link.beat(now):
                self._lose(peer, "it has been silent for too long")
        for peer in self._strangers:
            if now >= peer.welcome_by:
                self._lose(peer, "it has not said who it is")
        if self._gather_by is None:
            return
        if now >= self._gather_by:
            self._gather_by = None
            self._leader.on_lost([], f"not all have joined within {GATHER_S:g} s; missing: {self._admission.who_is_missing()}")
        elif now >= self._say_at:
            self._say_at = now + MISSING_SAID_S
            self._leader.say(f"waiting for {self._admission.who_is_missing()}")

    def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections from now on; with TLS if a context is given."""
        self._tls = tls
        descriptor_limit.allow(2 * self._plan.places.nodes + 8 * STRANGERS_MAX)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))
        where = join_address(*listener.getsockname()[:2])
        # A host's own name means 127.0.1.1 on some systems, and something else elsewhere.
        reached = ", which only this machine reaches," if is_loopback(where) else ""
        self._leader.say(f"waiting at {where}{reached} for {self._admission.who_is_missing()}")

    def add(self, peer: Peer) -> None:
        """Add a connection to a host that will say hello."""
        self._peers.append(peer)
        self._selector.register(peer.link.reader, selectors.EVENT_READ, functools.partial(self._read, peer))

    def keep_in_touch(self) -> None:
        """Send signs of life from a separate thread, because the loop may be held up, for instance by a stopped terminal."""
        threading.Thread(target=self._keep_in_touch, name="psd-run-beats", daemon=True).start()

    def _keep_in_touch(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            for peer in tuple(self._peers):
                peer.link.beat(time.monotonic())

    def start(self, name: Name, addresses: Sequence[str]) -> None:
        """Have a process started on its node."""
        self._send(name, {"start": [name.kind, name.number], "addresses": list(addresses)})

    def signal(self, name: Name, signum: int) -> None:
        """Have a process signalled on its node."""
        self._send(name, {"signal": [name.kind, name.number], "signum": signum})

    def tell(self, name: Name, line: str) -> None:
        """Have a line written to a shard's standard input."""
        self._send(name, {"tell": [name.kind, name.number], "line": line})

    def close(self, status: int) -> None:
        """Tell all nodes that the job is over, and wait a short time until they have cleared away."""
        self._gather_by, self._is_over = None, True
        for peer in list(self._peers):
            peer.link.send({"end": status})
            if not peer.has_joined:  # nothing runs there
                self._lose(peer, "")
        end_by = time.monotonic() + END_S
        while self._peers and (left_s := end_by - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left_s, FLUSH_S)):
                if isinstance(key.fileobj, int):  # a node's; signals are left alone, as there is nothing to be hastened
                    key.data()
            for peer in self._peers:
                peer.link.flush()
        for peer in self._peers:
            peer.close()
        self._is_closed.set()

    # -- one connection --

    @property
    def _joined(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.has_joined]

    @property
    def _strangers(self) -> list[Peer]:
        """Hosts that have connected and are not welcome yet, the oldest first."""
        return [peer for peer in self._peers if not peer.has_joined and peer.number is None]

    def _send(self, name: Name, message: Message) -> None:
        node = self._plan.places.node_of(name)
        for peer in self._joined:
            if peer.number == node:
                peer.link.send(message)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, origin = listener.accept()
            tls = None
            if self._tls is not None:
                connection.setblocking(False)
                connection = tls = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            for peer in self._strangers[: -STRANGERS_MAX + 1]:
                self._lose(peer, "others have come")
            link = NodeLink(connection.fileno(), connection.fileno(), tls)
            self.add(Peer(link, lambda _: connection.close(), origin=str(origin[0])))

    def _read(self, peer: Peer) -> None:
        messages = peer.link.receive()
        why = "the connection has ended" if messages is None else ""
        for message in messages or []:
            try:
                why = why or self._handle(peer, message)
            except NotAdmittedError as error:
                self._refuse(peer, str(error))
                why = str(error)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                why = "what it says makes no sense"
        if why and peer in self._peers:
            self._lose(peer, why)

    def _handle(self, peer: Peer, message: Message) -> str:
        """Handle a message; return a reason to end the connection, usually none."""
        if not peer.has_joined:
            if message:
                self._meet(peer, message)
            return ""
        if "output" in message:
            self._leader.on_output(self._name(peer, message["output"]), message["data"].encode("latin-1"))
        elif "exit" in message:
            self._leader.on_exit(self._name(peer, message["exit"]), int(message["status"]))
        elif "say" in message:
            self._leader.say(f"node {peer.number}: {printable(message['say'])}")
        elif "told" in message:
            self._leader.on_signal(int(message["told"]), int(message["count"]))
        elif "failed" in message:
            return printable(message["failed"])
        elif "ready" in message and not peer.is_ready:
            peer.is_ready = True
            if all(other.is_ready for other in self._joined) and not self._admission.missing:
                self._leader.on_nodes_ready(self._replan(self._run_id), self._address)
        return ""

    def _name(self, peer: Peer, given: Sequence[object]) -> Name:
        """Name of a process of this peer. Raises ValueError if it belongs to another host."""
        kind, number = given
        name = Name(str(kind), int(str(number)))
        if peer.number is None or name not in self._plan.places.names(peer.number):
            raise ValueError(f"{name} is not a process of node {peer.number}")
        return name

    def _lose(self, peer: Peer, why: str) -> None:
        self._selector.unregister(peer.link.reader)
        self._peers.remove(peer)
        end = peer.close()
        if peer.number is None or self._is_over:  # a stranger, or one that was refused; or all is well
            return
        host = f" ({peer.host})" if peer.host else ""
        if peer.has_joined:
            self._leader.on_lost(self._plan.places.names(peer.number), f"node {peer.number}{host} is lost: {why}")
        else:
            words = "".join(f"; it printed: {printable(line[:PRINTED_MAX])}" for line in peer.link.preamble)
            self._leader.on_lost([], f"node {peer.number}{host} has not joined: {end or why}{words}")

    def _meet(self, peer: Peer, message: Message) -> None:
        """Handle a message of a host that has not joined; begin when all have. Raises NotAdmittedError if it cannot."""
        if not peer.nonce:
            self._admission.check_version(message["join"])
            peer.nonce = new_nonce()
            peer.link.send({"nonce": peer.nonce})
            return
        hello = message["hello"]
        kept = hello["kept"]
        if kept is not None and not is_run_id(kept):
            raise ValueError("the id of its run cannot be one")
        node = self._admission.admit(hello, peer.nonce, peer.number)
        peer.number, peer.host, peer.has_joined = node.number, node.host, True
        peer.link.message_bytes_max, peer.link.silence_s = MESSAGE_BYTES_MAX, SILENCE_S
        peer.link.send({"welcome": proof_of(self._meeting.key, "leader", peer.nonce, hello["nonce"])})
        self._run_id = kept or self._run_id
        more = len(self._admission.missing)
        missing = f"; waiting for {more} more" if more else ""
        self._leader.say(f"node {node.number} of {self._plan.places.nodes} is {node.host}, at {node.address}{missing}")
        if not more:
            self._gather_by = None
            for other in self._joined:
                other.link.send({"begin": self._run_id, "node": other.number})

    def _refuse(self, peer: Peer, why: str) -> None:
        peer.link.send({"refused": why})
        refusal = f"refused {peer.host}: {why}"
        if len(self._refusals) < _REFUSALS_SAID_MAX and refusal not in self._refusals:
            self._refusals.add(refusal)
            self._leader.say(refusal)
