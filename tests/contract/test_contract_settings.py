"""A setting is said once: a field of a configuration, from which flags, checks and what launchers hand on follow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import pytest

from psd.cli.words.arguments import add_options
from psd.contract.settings import PORT, SECRET_LOCATION, check, setting, settings_of, shared_flags


@dataclass(frozen=True)
class Inner:
    """Settings with a prefix."""

    rows_max: int = setting(8, "N", "rows", low=1, high=9, prefix="--max-", is_shared=True)

    def __post_init__(self) -> None:
        check(ValueError, self)


@dataclass(frozen=True)
class Outer:
    """One setting of each kind, and a field that is none."""

    index: int
    pace_s: float = setting(1.5, "SECONDS", "pace", low=0.5, high=3_600, group="times", is_shared=True)
    word: str = setting("red", None, "colour", choices=("red", "blue"), is_shared=True)
    place: str = setting("", "URL", "place", kind=SECRET_LOCATION, is_shared=True)
    port: int | None = setting(0, "PORT", "port", kind=PORT, high=65535)
    names: tuple[str, ...] = setting((), "NAME", "names", flag="--name", is_shared=True)
    is_loud: bool = setting(False, None, "loud", is_shared=True)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        check(ValueError, self)


def parsed(*words: str) -> Outer:
    parser = argparse.ArgumentParser()
    for kind in (Outer(0), Inner()):
        add_options(parser.add_argument_group("all"), settings_of(kind), vars(kind))
    given = vars(parser.parse_args(words))
    inner = Inner(given.pop("rows_max"))
    return Outer(0, **given | {"names": tuple(given["names"])}, inner=inner)


def test_what_is_not_said_has_its_default() -> None:
    """Nothing is handed on of that."""
    assert parsed() == Outer(0)
    assert shared_flags(Outer(0)) == []


def test_shared_flags_make_the_same_configuration_elsewhere() -> None:
    """Numbers are not rounded; what is a place's own is left to it."""
    mine = Outer(7, 1234.5678, "blue", "memory://x", None, ("a", "b"), True, Inner(3))

    words = shared_flags(mine)

    assert words == [
        *("--pace=1234.5678", "--word=blue", "--place=memory://x", "--name=a", "--name=b", "--is-loud", "--max-rows=3"),
    ]
    assert parsed(*words, "--port", "off") == Outer(0, *list(vars(mine).values())[1:])
    assert shared_flags(mine, but=["place", "names", "rows_max"]) == ["--pace=1234.5678", "--word=blue", "--is-loud"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pace_s": 0.4}, "--pace: expected 0.5 to 3600 seconds, got 0.4"),
        ({"pace_s": float("nan")}, "--pace: expected 0.5 to 3600 seconds, got nan"),
        ({"word": "green"}, "--word: expected one of red, blue, got 'green'"),
        ({"port": 65536}, "--port: expected 0 to 65535, got 65536"),
        ({"port": -1}, "--port: expected 0 to 65535, got -1"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(given: dict[str, Any], says: str) -> None:
    """With what was expected, and what there was."""
    with pytest.raises(ValueError, match=says):
        Outer(0, **given)


def test_a_number_with_a_prefix_is_refused_by_its_flag() -> None:
    """As it is typed."""
    with pytest.raises(ValueError, match="--max-rows: expected 1 to 9, got 10"):
        Inner(10)


def test_a_location_that_may_have_a_secret_is_not_shown() -> None:
    """Configurations are printed in tests and tracebacks."""
    assert "hush" not in repr(Outer(0, place="ftp://me:hush@x"))


def test_settings_are_found_by_the_groups_of_the_help() -> None:
    """Fields that are no settings are in none."""
    assert list(settings_of(Outer, "times")) == ["pace_s"]
    assert "index" not in settings_of(Outer)
