"""Settings, each said once: a field of a configuration with its default, its bounds, its flag, the help, and who shares it.

What follows from that: psd-server's options and their help (psd/cli/words/arguments.py), the checks of a configuration, and the
flags with which every launcher starts the shards of a job. Must not know any setting, nor how flags are parsed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

SECRET_LOCATION = "a path or a URL, which may have a secret in it"  # noqa: S105 - the name of a kind
PORT = "a port, or off"

_KEY = "setting"


@dataclass(frozen=True)
class Setting:
    """Description of an option, beside its name and its default.

    Attributes:
        metavar: of its value in the help; None: its choices, or there is no value.
        help: shows the default, unless that is empty or the help names it.
        kind: of its value: int, float (seconds), str, SECRET_LOCATION or PORT; bool: a flag alone; tuple: may be given
            several times.
        choices: the words that there are; empty: any.
        low, high: bounds of a number.
        group: of the help.
        flag: if it is not made of the name. prefix: of one that is.
        is_shared: the same for all shards of a job, so that launchers hand it on.
    """

    metavar: str | None
    help: str
    kind: Any = str
    choices: Sequence[str] = ()
    low: float = 0
    high: float = math.inf
    group: str = ""
    flag: str = ""
    prefix: str = "--"
    is_shared: bool = False

    def flag_of(self, name: str) -> str:
        """The flag, such as --max-restarts of max_restarts, and --lease of lease_s: units are the help's."""
        plain = name.removesuffix("_s").removesuffix("_max").replace("_", "-")
        return self.flag or f"{self.prefix}{plain}"


def setting(default: Any, metavar: str | None, text: str, *, kind: Any = None, **others: Any) -> Any:
    """A field of a configuration that is an option, too; see Setting. Its kind is the default's, unless it is given."""
    found = Setting(metavar, text, type(default) if kind is None else kind, **others)
    return field(default=default, repr=found.kind is not SECRET_LOCATION, metadata={_KEY: found})


def settings_of(configuration: Any, group: str | None = None) -> dict[str, Setting]:
    """The settings of a configuration, or of its class, by the names of the fields; of a group of the help alone."""
    found = {each.name: each.metadata[_KEY] for each in fields(configuration) if _KEY in each.metadata}
    return {name: each for name, each in found.items() if group in (None, each.group)}


def check(error: type[Exception], configuration: Any) -> None:
    """Raise an error, which names the flag, for a number out of its bounds or a word that there is not."""
    for name, each in settings_of(configuration).items():
        value, flag = getattr(configuration, name), each.flag_of(name)
        if each.choices and value not in each.choices:
            raise error(f"{flag}: expected one of {', '.join(each.choices)}, got {value!r}")
        if each.kind is float:
            check_seconds(error, flag, value, each.low, each.high)
        elif each.kind in (int, PORT) and value is not None:
            check_count(error, flag, value, each.low, each.high)


def check_seconds(error: type[Exception], name: str, value: float, low: float, high: float) -> None:
    """Raise an error for a time out of its bounds; NaN is out of any."""
    if not low <= value <= high:
        raise error(f"{name}: expected {low:g} to {high:g} seconds, got {value:g}")


def check_count(error: type[Exception], name: str, value: int, low: float, high: float) -> None:
    """Raise an error for a whole number out of its bounds."""
    if not low <= value <= high:
        raise error(f"{name}: expected {low} to {high}, got {value}")


def shared_flags(configuration: Any, but: Collection[str] = ()) -> list[str]:
    """The flags by which a shard anywhere has what all share of this configuration: those that are not at their defaults."""
    found = []
    for each in fields(configuration):
        value = getattr(configuration, each.name)
        if is_dataclass(value):
            found += shared_flags(value, but)
        elif _KEY in each.metadata and value != each.default and each.name not in but:
            known: Setting = each.metadata[_KEY]
            found += words_of(known.flag_of(each.name), value) if known.is_shared else []
    return found


def words_of(flag: str, value: Any) -> list[str]:
    """The words that give an option a value; of a list, once for each; none for False."""
    if isinstance(value, (list, tuple)):
        return [word for each in value for word in words_of(flag, each)]
    return [] if value is False else [flag] if value is True else [f"{flag}={text_of(value)}"]


def text_of(value: Any) -> str:
    """A value as its flag takes it: 20 for 20.0, and not rounded."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
