"""Riders on a worker's pushes: each thing that a push tells the shards beside the gradient, or hears in their replies, is a
rider. The exchange has a list of them.

A push in progress calls them in the order of that list. A new one is a class here or in a module of its own, a line in the list
(exchange.py), and a field of PushHeader or PushReply; its mirror on the shards is a rider of psd/state/riders.py. Must not know
when a push is sent, or sent again.
"""

from __future__ import annotations

from psd.v1 import data_pb2
from psd_client.worker.exchange.sent_push import SentPush
from psd_client.worker.session.session import Session


class Rider:
    """Rides on each push of one worker. A method that a rider does not define does nothing."""

    def before_push(self) -> None:
        """Prepare for a push that is about to be made; may call the shards."""

    def write(self, sent: SentPush) -> None:
        """Add fields that are the same for all shards to a push's header. Called once for a push, however often it is sent."""

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Add fields to one shard's header. Called each time that the push is sent to it, from the shard's own thread."""

    def hear(self, sent: SentPush) -> None:
        """Read the replies. Called once all shards have the push, when the worker's clock has moved on."""

    def forget(self) -> None:
        """Forget what belongs to the old parameters: the job has gone back to a checkpoint, and its parameters are here now."""


class Riders:
    """All riders of a worker, in their order.

    Attributes:
        prepare, write, write_to, hear, forget: this method (before_push for prepare) of each rider that defines it.
    """

    def __init__(self, *riders: Rider) -> None:
        self.prepare = [rider.before_push for rider in riders if type(rider).before_push is not Rider.before_push]
        self.write = [rider.write for rider in riders if type(rider).write is not Rider.write]
        self.write_to = [rider.write_to for rider in riders if type(rider).write_to is not Rider.write_to]
        self.hear = [rider.hear for rider in riders if type(rider).hear is not Rider.hear]
        self.forget = [rider.forget for rider in riders if type(rider).forget is not Rider.forget]


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
