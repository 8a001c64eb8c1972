"""Messages for browsers: the whole past, then each look. Plain JSON, without NaN, which JSON does not have: null instead.

Knows the values of psd/watch; neither requests nor sockets.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from psd.watch.history import History, Moment, moment_of
from psd.watch.sampler import Sampler

COLUMNS = tuple(field.name for field in dataclasses.fields(Moment))


def plain(value: Any) -> Any:
    """Values of JSON for dataclasses, sequences and numbers; those that are not finite become None."""
    if isinstance(value, float):
        return _number(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def whole(sampler: Sampler) -> str:
    """Everything that is known: the last look, and the history in columns."""
    history: History = sampler.history
    found = {
        "now": plain(sampler.now),
        "history": {name: [_brief(getattr(moment, name)) for moment in history.moments] for name in COLUMNS},
        "events": plain(list(history.events)),
        "curves": {name: [[p.rank, p.step, _number(p.value), p.at] for p in points] for name, points in history.curves.items()},
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


def look(sampler: Sampler) -> str:
    """The last look alone: what to add to what was sent before."""
    assert sampler.now is not None
    moment = moment_of(sampler.now)
    found = {
        "now": plain(sampler.now),
        "moment": {name: _brief(getattr(moment, name)) for name in COLUMNS},
        "events": plain(list(sampler.events)),
        "points": [[name, p.rank, p.step, _number(p.value), p.at] for name, p in sampler.points],
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


def _brief(value: Any) -> Any:
    """Numbers to be drawn, with the digits that a drawing shows."""
    if isinstance(value, tuple):
        return [_brief(item) for item in value]
    return _number(round(value, 5)) if isinstance(value, float) else value
