"""The relay's view of itself: the numbers of the catalogue (psd/contract/facts.py), for Status and for metrics.

Must not know messages or HTTP.
"""

from __future__ import annotations

from psd.contract import facts
from psd.relay.following import Following
from psd.relay.holding import Holding
from psd.rim.views import numbers_of, process_numbers, reader_totals


def relay_numbers(holding: Holding, following: Following) -> dict[str, float]:
    """The numbers of a relay, by their names in the catalogue; without those that do not exist yet."""
    held = holding.held
    known = {
        "version": None if held is None else held.version,
        "behind": max(0, following.newest - (0 if held is None else held.version)),
        "age_s": None if held is None else holding.age_s(held.since),
        "heard_s": following.heard_s,
        "readers": holding.readers.calls,
        "versions": following.versions,
    }
    return numbers_of(facts.RELAY, {"relay": known})


def shard_numbers(holding: Holding, started: float) -> dict[str, float]:
    """Numbers that it has as a shard has them. started: when its process began, by the clock of the holding."""
    held, counters = holding.held, holding.counters
    readers = reader_totals(holding.readers.all(), holding.readers.sent_bytes, holding.age_s)
    names = ("received_bytes", "sent_bytes", "saved_bytes", "requests_refused")
    numbers = {
        "uptime_s": holding.age_s(started),
        **{name: getattr(counters, name) for name in names},
        **process_numbers(),
        **readers,
    }
    if held is not None:
        numbers |= {
            "blocks": len(held.blocks),
            "parameter_bytes": held.nbytes,
            "tensors": len(held.described.spec.tensors),
            "version_min": held.version,
            "version_max": held.version,
            "timeline": held.described.timeline,
        }
    return numbers
