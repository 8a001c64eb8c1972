"""The data plane of one rank that publishes: each put is a push whose numbers are the values, and is there when it returns.

A put travels, is kept and counts once as a gradient of exact aggregation does (exchange.py): on all shards or on none. What
shards hold is never fetched. Must not know names, or what is published.
"""

from __future__ import annotations

import logging

from typing_extensions import override

from psd.contract.errors import StateLost
from psd_client.worker.exchange.exchange import ParameterExchange
from psd_client.worker.exchange.sent_push import WorkerGradient

logger = logging.getLogger("psd_client")


class ValueExchange(ParameterExchange):
    """Sends values."""

    @override
    def pull_all(self) -> None:
        """Wait until all shards have the last version that is decided."""
        self.resolve()
        self._fetch(self._lanes, versions_only=True)
        self._failed = None

    def put(self, values: WorkerGradient) -> int:
        """Send the values in the gradient buffers, and wait until all shards have them as their next version; return that.

        The put before must be confirmed. If the version is lost, because another rank and a shard have died, it puts again.
        """
        while True:
            sent = self._begin(values)
            try:
                self._complete(sent, and_wait=True)
                self._fetch(self._lanes, versions_only=True)
            except BaseException as error:
                self._on_failed(sent, error)
                if not (isinstance(error, StateLost) and "version" in error.detail):
                    raise
                logger.warning("psd: put begins anew, as the next version: %s", error)
                self._give_up(sent)
            else:
                self._on_done()
                return sent.header.clock + 1
