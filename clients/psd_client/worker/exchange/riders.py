"""The riders on a worker's pushes: each thing beside the gradient that is told to the shards, or heard in a reply, is one.

A push in progress calls them in the order of `riders_of`. A new one is a class here, or in a module of its own, a line in that
function, and a field of PushHeader or PushReply; its mirror on the shards is a rider of psd/state/desks/riders.py. Must not
know when a push is sent, or sent again.
"""

from __future__ import annotations

from psd.contract.layout import Layout
from psd.v1 import data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.exchange.attendance import Attendance
from psd_client.worker.exchange.first_gradient import FirstGradient
from psd_client.worker.exchange.norms import Norms
from psd_client.worker.exchange.rider import Rider, Riders
from psd_client.worker.exchange.sent_push import SentPush
from psd_client.worker.session.session import Session


class OrderRider(Rider):
    """Hears an operator's orders from shard 0. DataRequests scales the learning rates of a push by them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def hear(self, sent: SentPush) -> None:
        """Take over shard 0's present orders."""
        if 0 in sent.replies:
            self._session.orders.hear(sent.replies[0].orders)


class DecisionRider(Rider):
    """Exact aggregation: carries shard 0's decisions on rounds to all shards."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def write(self, sent: SentPush) -> None:
        """Write the latest decisions."""
        if self._session.decisions:
            sent.header.decisions.extend(self._session.decisions)


class CutRider(Rider):
    """Carries the cuts that shards name to all shards; without rounds, also the worker's positions in them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def write_to(self, _shard: int, header: data_pb2.PushHeader) -> None:
        """Write the present cuts: a push that is sent again may say more about them."""
        cuts = self._session.cuts
        if cuts.are_named:
            header.cuts.extend(cuts.carried())

    def hear(self, sent: SentPush) -> None:
        """Note the cuts that each shard names. The push has ended, so positions can be chosen again."""
        self._session.hear_cuts(sent.replies)
        if self._session.cuts.is_unready:
            self._session.cuts.set_ready(True)


class ClientStateRider(Rider):
    """Carries the state that the program saves for itself to the shard that keeps it.

    Args:
        keeper: the shard that keeps it (Layout.client_state_shard).

    Attributes:
        state: the state to send with the next push; empty: nothing new.
    """

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._sent = b""
        self.state = b""

    def write(self, _sent: SentPush) -> None:
        """Attach the state to this push, also for when it is sent again."""
        self._sent = self.state

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Write the state into the header for the shard that keeps it."""
        if self._sent and shard == self._keeper:
            header.client_state = self._sent

    def hear(self, _sent: SentPush) -> None:
        """Note that the shard has the state."""
        if self.state is self._sent:  # else the program has set the state for the next push already
            self.state = b""


def riders_of(
    rank: int, session: Session, layout: Layout, gradients: FlatBuffers, counts: dict[str, int], *others: Rider
) -> Riders:
    """All that ride on the pushes of one worker.

    Args:
        counts: see Attendance. others: those that the exchange knows, too.
    """
    return Riders(
        OrderRider(session),
        CutRider(session),
        *([DecisionRider(session)] if layout.spec.aggregation == "exact" else []),
        Attendance(rank, layout.spec, counts),
        *([Norms(gradients)] if layout.spec.directed_tensors else []),
        *([FirstGradient(rank, gradients)] if layout.spec.world_size > 1 else []),
        *others,
    )
