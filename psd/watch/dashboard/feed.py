"""Messages for browsers: first the whole history, then each snapshot; earlier runs. Plain JSON; NaN, which JSON does not have,
becomes null.

Knows the values of psd/watch, but neither requests nor sockets.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from psd.watch.earlier import EarlierRun
from psd.watch.history import History, Moment, moment_of
from psd.watch.sampler import Sampler
from psd.watch.snapshot import as_json

COLUMNS = tuple(field.name for field in dataclasses.fields(Moment))


def whole(sampler: Sampler) -> str:
    """Everything that is known: the latest snapshot, and the history in columns."""
    history: History = sampler.history
    found = {
        "now": as_json(sampler.now),
        "history": {name: [_brief(getattr(moment, name)) for moment in history.moments] for name in COLUMNS},
        "events": as_json(list(history.events)),
        "curves": {name: [[p.rank, p.step, as_json(p.value), p.at] for p in points] for name, points in history.curves.items()},
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


def look(sampler: Sampler) -> str:
    """The latest snapshot only, to be added to what was sent before."""
    assert sampler.now is not None
    moment = moment_of(sampler.now)
    found = {
        "now": as_json(sampler.now),
        "moment": {name: _brief(getattr(moment, name)) for name in COLUMNS},
        "events": as_json(list(sampler.events)),
        "points": [[name, p.rank, p.step, as_json(p.value), p.at] for name, p in sampler.points],
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


def runs(earlier: Sequence[EarlierRun]) -> str:
    """The earlier runs whose curves can be asked for."""
    return json.dumps({"runs": [{"name": run.name, "begun_at": run.begun_at} for run in earlier]}, allow_nan=False)


def _brief(value: Any) -> Any:
    """Numbers to be drawn, rounded to the digits that are visible in a drawing."""
    if isinstance(value, tuple):
        return [_brief(item) for item in value]
    return as_json(round(value, 5)) if isinstance(value, float) else value
