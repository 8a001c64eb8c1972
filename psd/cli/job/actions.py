"""The processes of a job by name, and what psd-run does with them and for them. Pure; knows no reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Name:
    """A process of the job: "shard 0", "worker 3"."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True)
class Start:
    """Start this process."""

    name: Name


@dataclass(frozen=True)
class Send:
    """Send a signal to this process's group."""

    name: Name
    signum: int


@dataclass(frozen=True)
class Say:
    """Tell the user. quote: process whose last lines are shown with the message."""

    text: str
    quote: Name | None = None


@dataclass(frozen=True)
class Tell:
    """Write this line to a shard's standard input."""

    name: Name
    line: str


Action = Start | Send | Say | Tell
