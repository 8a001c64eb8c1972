"""The leader's decision which hosts may become nodes of the job, and which nodes are still missing.

A node must have the leader's version of psd, its tokens, options and command, an address that the other nodes can reach, and a
unique number. A refusal says what is wrong, to the node and to the leader's user. Knows no connections.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

import psd
from psd.cli.hosts.link import Message
from psd.cli.hosts.proof import proof_of, what_is_wrong
from psd.cli.job.plan import HostPlan
from psd.cli.words.arguments import flag_of
from psd.contract.printable import printable

_SHOWN_MAX = 8
"""Number of nodes that are named; the others are only counted."""

_TEXT_MAX = 64


class NotAdmittedError(Exception):
    """Raised when a host cannot be a node of the job; the text is for both sides."""


@dataclass(frozen=True)
class Node:
    """A node that has joined."""

    number: int
    host: str
    address: str


class NodeAdmission:
    """The nodes of one job.

    Args:
        plan: the leader's plan of the job. address: address of the leader's machine; empty if no node is there.
    """

    def __init__(self, plan: HostPlan, address: str) -> None:
        assert plan.meeting is not None
        self._meeting, self._places = plan.meeting, plan.places
        self.nodes = {plan.node: Node(plan.node, "this host", address)} if address else {}

    @property
    def missing(self) -> list[int]:
        """Numbers of the nodes that have not joined."""
        return [number for number in range(self._places.nodes) if number not in self.nodes]

    def who_is_missing(self) -> str:
        """Words that name the missing nodes, and those that have joined."""
        hosts = self._meeting.hosts
        missing = [f"{number} ({hosts[number]})" if hosts else f"{number}" for number in self.missing]
        there = [f"{node.number} ({node.host})" for _, node in sorted(self.nodes.items())]
        found = f"node{'s' if len(missing) > 1 else ''} {_list(missing)} of {self._places.nodes}"
        return f"{found}; there are {_list(there)}" if there else found

    def check_version(self, theirs: object) -> None:
        """Raise NotAdmittedError unless the other side has this version of psd."""
        if theirs != psd.__version__:
            raise NotAdmittedError(f"it has psd {_text(theirs)}, and node 0 has {psd.__version__}")

    def admit(self, hello: Message, nonce: str, number: int | None) -> Node:
        """Admit a node.

        Args:
            hello: the host's hello. nonce: the nonce that it was sent. number: the node's number; None: the hello names one, or
                any will do.

        Raises:
            NotAdmittedError: the host cannot be a node. KeyError, TypeError, ValueError: the hello is malformed.
        """
        if wrong := what_is_wrong(proof_of(self._meeting.key, "node", nonce, hello["nonce"]), hello["proof"]):
            raise NotAdmittedError(wrong)
        self._check_alike(hello["alike"])
        host, address = _text(hello["host"]), str(ipaddress.ip_address(hello["address"]))
        self._check_address(address)
        node = Node(self._number(hello["node"] if number is None else number), host, address)
        self.nodes[node.number] = node
        return node

    def _check_alike(self, alike: Mapping[str, str]) -> None:
        ours = self._meeting.alike
        others = [name for name in ours if alike.get(name) != ours[name]]
        if others:
            names = [name if name == "command" else flag_of(name.removesuffix("_s")) for name in others]
            raise NotAdmittedError(f"its {_list(names)} differs from node 0's; all hosts must be given the same")

    def _check_address(self, address: str) -> None:
        known = [node.address for node in self.nodes.values()]
        are_loopback = {ipaddress.ip_address(each).is_loopback for each in (*known, address)}
        if len(are_loopback) > 1:
            raise NotAdmittedError(
                f"{known[0]} and {address} cannot reach each other; name hosts by addresses that the others reach"
            )
        if are_loopback == {False} and not self._meeting.is_guarded:
            raise NotAdmittedError(
                "shards that other machines reach need a certificate (--tls-cert, --tls-key; and --token-file), or "
                "--insecure on a network that keeps strangers out"
            )

    def _number(self, wanted: object) -> int:
        if not self.missing:
            raise NotAdmittedError(f"all {self._places.nodes} nodes are there already")
        if wanted is None:
            return self.missing[0]
        number = int(str(wanted))
        if number in self.nodes:
            other = self.nodes[number]
            raise NotAdmittedError(f"its --node-rank is {number}, and that is {other.host}, at {other.address}")
        if number not in self.missing:
            raise ValueError(f"there is no node {number}")
        return number


def _text(given: object) -> str:
    """Text from a peer, made printable for a terminal."""
    return printable(str(given))[:_TEXT_MAX]


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more
