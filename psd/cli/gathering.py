"""The other hosts of a job, as the psd-run sees them that leads it: who has joined, what is told to them, what they tell.

    hello           from a node: what it was asked to run, which number it wants, its address
    begin           to all, when all are there: the run's id, each one's number     ->   ready, or failed, and why
    start, signal                                                                   ->   output, exit, say
    told            from a node that got Ctrl-C: the job is to end everywhere
    end             to all: the job's status; they clear away, and end

A node runs the command that it was itself started with: nobody can make it run another by way of this connection. A connection
that ends, or has been silent for too long, is a node that is lost, with all that it ran; its own psd-run ends all that.

Knows messages and connections; decides nothing about the job. psd/cli/rendezvous.py and psd/cli/ssh.py make the connections,
psd/cli/follower.py is the other side.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psd
from psd.cli.node_link import Message, NodeLink
from psd.cli.plan import Plan
from psd.cli.policy import Name
from psd.contract.printable import printable

GATHER_S = 600.0
"""Seconds for all nodes to join: a cluster may start them one after the other."""

END_S = 20.0
"""Seconds for nodes to clear away in the end, before their connections are closed."""

_FLUSH_S = 0.05
"""Seconds until a connection that had no room is tried again."""


class Leader(Protocol):
    """Leader of a job, psd-run's loop, as the events of other hosts see it."""

    def on_nodes_ready(self, plan: Plan, address: str) -> None:
        """All nodes are ready for the job to begin, by this plan; this machine has this address, or no part if it is empty."""

    def on_output(self, name: Name, data: bytes) -> None:
        """Handle output of a process."""

    def on_exit(self, name: Name, returncode: int) -> None:
        """Handle the end of a process."""

    def on_signal(self, signum: int, count: int) -> None:
        """Handle a signal that a node was sent, the count-th one there."""

    def on_lost(self, names: Sequence[Name], why: str) -> None:
        """Handle a node that is gone, with these processes."""

    def say(self, text: str) -> None:
        """Tell the user."""


class Peer:
    """A connection to another host, and what is known of it.

    Args:
        link: to it. close: ends the connection. number: which node it is; None: it says so itself, or takes any.
    """

    def __init__(self, link: NodeLink, close: Callable[[], None], number: int | None = None) -> None:
        self.link, self.close, self.number = link, close, number
        self.has_joined = self.is_ready = False
        self.address = self.host = ""


class Gathering:
    """The other hosts of one job.

    Args:
        plan: of the job; its node is this machine's, if that has one.
        address: this machine's, for the others; empty: no node is here.
        replan: makes the plan again, for the run id that is agreed on.
        selector: of the caller's loop; functions are its data. leader: what events lead to.
    """

    def __init__(
        self, plan: Plan, address: str, replan: Callable[[str], Plan], selector: selectors.BaseSelector, leader: Leader
    ) -> None:
        assert plan.meeting is not None
        self._plan, self._meeting, self._replan = plan, plan.meeting, replan
        self._address = address
        self._selector, self._leader = selector, leader
        self._peers: list[Peer] = []
        self._run_id = plan.run_id
        self._is_over = False
        self._gather_by: float | None = time.monotonic() + GATHER_S

    @property
    def due(self) -> float | None:
        """The time at which to call `on_time`; None: no need."""
        times = [peer.link.beat_at() for peer in self._peers]
        times += [time.monotonic() + _FLUSH_S] if any(peer.link.has_unsent for peer in self._peers) else []
        times += [self._gather_by] if self._gather_by is not None else []
        return min(times, default=None)

    def on_time(self, now: float) -> None:
        """Say that this side is there, send what had no room, and look who has not said anything for too long."""
        for peer in list(self._peers):
            peer.link.flush()
            if not peer.link.beat(now):
                self._lose(peer, "it has been silent for too long")
        if self._gather_by is not None and now >= self._gather_by:
            self._gather_by = None
            self._leader.on_lost(
                [], f"{self._missing} of {self._plan.places.nodes} nodes have not joined within {GATHER_S:g} s"
            )

    def listen(self, listener: socket.socket) -> None:
        """Take connections from now on."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))
        host, port = listener.getsockname()[:2]
        self._leader.say(f"waiting at {host}:{port} for {self._missing} more of {self._plan.places.nodes} nodes")

    def add(self, peer: Peer) -> None:
        """Take a connection whose other side is about to say hello."""
        self._peers.append(peer)
        self._selector.register(peer.link.reader, selectors.EVENT_READ, functools.partial(self._read, peer))

    def start(self, name: Name, addresses: Sequence[str]) -> None:
        """Have a process started where it belongs."""
        self._send(name, {"start": [name.kind, name.number], "addresses": list(addresses)})

    def signal(self, name: Name, signum: int) -> None:
        """Have a process signalled."""
        self._send(name, {"signal": [name.kind, name.number], "signum": signum})

    def close(self, status: int) -> None:
        """Tell all nodes that the job is over, and wait until they have cleared away, but not for long."""
        self._gather_by, self._is_over = None, True
        for peer in self._peers:
            peer.link.send({"end": status})
        end_by = time.monotonic() + END_S
        while self._peers and (left_s := end_by - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left_s, _FLUSH_S)):
                if isinstance(key.fileobj, int):  # a node's; signals are left alone, as there is nothing to be hastened
                    key.data()
            for peer in self._peers:
                peer.link.flush()
        for peer in self._peers:
            peer.close()

    # -- one connection --

    @property
    def _joined(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.has_joined]

    @property
    def _missing(self) -> int:
        return self._plan.places.nodes - len(self._joined) - bool(self._address)

    def _send(self, name: Name, message: Message) -> None:
        node = self._plan.places.node_of(name)
        for peer in self._joined:
            if peer.number == node:
                peer.link.send(message)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            self.add(Peer(NodeLink(connection.fileno(), connection.fileno()), connection.close))

    def _read(self, peer: Peer) -> None:
        messages = peer.link.receive()
        why = "the connection has ended" if messages is None else ""
        for message in messages or []:
            try:
                why = why or self._handle(peer, message)
            except (KeyError, TypeError, ValueError):
                why = "what it says makes no sense"
        if why and peer in self._peers:
            self._lose(peer, why)

    def _handle(self, peer: Peer, message: Message) -> str:
        """Handle a message; returns the reason to end the connection, usually none."""
        if not peer.has_joined:
            return self._welcome(peer, message["hello"]) if message else ""
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
        elif "ready" in message:
            peer.is_ready = True
            if all(other.is_ready for other in self._joined) and not self._missing:
                self._leader.on_nodes_ready(self._replan(self._run_id), self._address)
        return ""

    def _name(self, peer: Peer, given: Sequence[object]) -> Name:
        """A process of a peer's own; ValueError if it is somebody else's."""
        kind, number = given
        name = Name(str(kind), int(str(number)))
        if peer.number is None or name not in self._plan.places.names(peer.number):
            raise ValueError(f"{name} is not a process of node {peer.number}")
        return name

    def _lose(self, peer: Peer, why: str) -> None:
        self._selector.unregister(peer.link.reader)
        self._peers.remove(peer)
        peer.close()
        if peer.number is None or self._is_over:  # a stranger, or one that was refused; or all is well
            return
        host = f" ({peer.host})" if peer.host else ""
        names = self._plan.places.names(peer.number) if peer.has_joined else []
        self._leader.on_lost(names, f"node {peer.number}{host} is lost: {why}")

    def _welcome(self, peer: Peer, hello: Message) -> str:
        """Let a node join; begin when all are there. Returns the reason if it cannot."""
        places = self._plan.places
        taken = {other.number for other in self._joined} | ({self._plan.node} if self._address else set())
        free = [number for number in range(places.nodes) if number not in taken]
        wanted = peer.number if peer.number is not None else hello["node"]
        peer.host, peer.address = printable(str(hello["host"]))[:64], str(ipaddress.ip_address(hello["address"]))
        refused = self._why_not(hello, peer.address)
        if not refused and wanted is None and not free:
            refused = f"all {places.nodes} nodes are there already"
        elif not refused and wanted is not None and wanted not in free:
            refused = f"there is a node {wanted} already, of {places.nodes}"
        if refused:
            peer.link.send({"refused": refused})
            self._leader.say(f"refused {peer.host}: {refused}")
            return refused
        peer.number, peer.has_joined = free[0] if wanted is None else int(wanted), True
        if hello["kept"] is not None:
            self._run_id = str(hello["kept"])
        missing = f"; waiting for {self._missing} more" if self._missing else ""
        self._leader.say(f"node {peer.number} of {places.nodes} is {peer.host}, at {peer.address}{missing}")
        if not self._missing:
            self._gather_by = None
            for other in self._joined:
                other.link.send({"begin": self._run_id, "node": other.number})
        return ""

    def _why_not(self, hello: Message, address: str) -> str:
        if hello["psd"] != psd.__version__:
            return f"it has psd {hello['psd']}, not {psd.__version__}"
        if hello["digest"] != self._meeting.digest:
            return "its psd-run was given other options or another command; both must be the same on all hosts"
        known = [*filter(None, [self._address]), *(peer.address for peer in self._joined)]
        are_loopback = {ipaddress.ip_address(each).is_loopback for each in (*known, address)}
        if len(are_loopback) > 1:
            return f"{known[0]} and {address} cannot reach each other; name hosts by addresses that the others reach"
        if are_loopback == {False} and not self._meeting.is_guarded:
            return (
                "shards that other machines reach need a certificate (--tls-cert, --tls-key; and --token-file), or "
                "--insecure on a network that keeps strangers out"
            )
        return ""
