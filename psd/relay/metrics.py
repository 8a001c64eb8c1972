"""The relay's numbers as Prometheus metrics, read at each scrape; the shard that they name is "relay".

Must not know HTTP or sockets.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from psd.contract import facts
from psd.relay.following import Following
from psd.relay.holding import Holding
from psd.relay.views import relay_numbers, shard_numbers
from psd.rim.metrics import Families, split
from psd.state.counts import Counters

LANE = "grpc"
"""The lane of all that it sends and receives."""


class RelayFamilies(Families):
    """The metrics of a relay.

    Args:
        started: when its process began, by the clock of the holding.
    """

    def __init__(self, holding: Holding, following: Following, started: float) -> None:
        super().__init__("relay")
        self._holding = holding
        self._following = following
        self._started = started

    def collect(self) -> Iterator[Metric]:
        """All metrics, now: first the catalogue's numbers, then names and errors."""
        own, by_transport = split(facts.SHARD)
        numbers = shard_numbers(self._holding, self._started)
        counters: Counters = self._holding.counters.copy()
        lane = {fact.name: getattr(counters.lanes[LANE], fact.name) for fact in by_transport}
        yield from self.catalogue(own, [((), numbers)])
        yield from self.catalogue(by_transport, [((LANE,), lane)])
        yield from self.catalogue(facts.RELAY, [((), relay_numbers(self._holding, self._following))])
        yield self.build()
        yield self.errors(counters)
