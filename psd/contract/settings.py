"""Settings, each declared once: a field of a configuration with default, bounds, flag and help, and whether shards share it.

From this are made: psd-server's options and their help (psd/cli/words/arguments.py), the checks of a configuration, and the
flags with which every launcher starts a job's shards. Must not know any single setting, or how flags are parsed.
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
    """Description of an option, without its name and default.

    Attributes:
        metavar: the value's name in the help; None: its choices, or it has no value.
        help: the text. The default is added, unless it is empty or the text names it.
        kind: the value's kind: int, float (seconds), str, SECRET_LOCATION or PORT; bool: a flag alone; tuple: may be given
            several times.
        choices: the allowed words; empty: any. low, high: bounds of a number. group: heading in the help.
        flag: the flag; empty: made from `prefix` and the name.
        is_shared: True if all shards of a job have the same value, so that launchers pass it on.
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
        """The flag, such as --max-restarts for max_restarts, and --lease for lease_s: the help names the unit."""
        plain = name.removesuffix("_s").removesuffix("_max").replace("_", "-")
        return self.flag or f"{self.prefix}{plain}"


def setting(default: Any, metavar: str | None, text: str, *, kind: Any = None, **others: Any) -> Any:
    """A field of a configuration that is an option, too; see Setting. Its kind is by default the default's type."""
    found = Setting(metavar, text, type(default) if kind is None else kind, **others)
    return field(default=default, repr=found.kind is not SECRET_LOCATION, metadata={_KEY: found})


def settings_of(configuration: Any, group: str | None = None) -> dict[str, Setting]:
    """The settings of a configuration, or of its class, by the names of the fields. group: only those under this heading."""
    found = {each.name: each.metadata[_KEY] for each in fields(configuration) if _KEY in each.metadata}
    return {name: each for name, each in found.items() if group in (None, each.group)}


def check(error: type[Exception], configuration: Any) -> None:
    """Raise an error, which names the flag, for a number out of its bounds or an unknown word."""
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
    """The flags for settings that all shards of a job share and that differ from their defaults; without fields in `but`."""
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
    """The command-line words that give an option a value; for a list, one for each item; none for False."""
    if isinstance(value, (list, tuple)):
        return [word for each in value for word in words_of(flag, each)]
    return [] if value is False else [flag] if value is True else [f"{flag}={text_of(value)}"]


def text_of(value: Any) -> str:
    """A value as text for its flag: 20 for 20.0; not rounded."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
