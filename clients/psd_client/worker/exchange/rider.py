"""The moments of a push at which what rides on it has a say.

Must not know what rides (riders.py), nor when a push is sent, or sent again.
"""

from __future__ import annotations

from psd.v1 import data_pb2
from psd_client.worker.exchange.sent_push import SentPush


class Rider:
    """Rides on each push of one worker. A method that a rider does not define does nothing."""

    def before_push(self) -> None:
        """Prepare for a push that is about to be made; may call the shards."""

    def write(self, sent: SentPush) -> None:
        """Add to the header of a new push what is the same for all shards. Called once for a push, however often it is sent."""

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Add to one shard's header. Called each time that the push leaves for it; from a thread of its own."""

    def hear(self, sent: SentPush) -> None:
        """Take what the replies say, once all shards have the push. The worker's clock has moved on."""

    def forget(self) -> None:
        """Forget what went with the parameters: the job has gone back to a checkpoint, whose parameters are there now."""


class Riders:
    """All riders of a worker, in their order.

    Attributes:
        prepare, write, write_to, hear, forget: that method of each rider that has something to do then.
    """

    def __init__(self, *riders: Rider) -> None:
        self.prepare = [rider.before_push for rider in riders if type(rider).before_push is not Rider.before_push]
        self.write = [rider.write for rider in riders if type(rider).write is not Rider.write]
        self.write_to = [rider.write_to for rider in riders if type(rider).write_to is not Rider.write_to]
        self.hear = [rider.hear for rider in riders if type(rider).hear is not Rider.hear]
        self.forget = [rider.forget for rider in riders if type(rider).forget is not Rider.forget]
