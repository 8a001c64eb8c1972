"""The form in which a job's blocks of float32 travel: a codec for gradients, one for parameters, and what becomes of the loss.

A property of the job: all workers and shards derive the form of each block from it (layout.py). Table rows, vectors, buffers
and what is not float32 travel as they are. Must not know blocks, messages on their way, or who keeps a residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psd.contract import arguments
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.v1 import job_pb2
from psd_core import codecs
from psd_core.codecs import Rounding

ROUNDED = ("bf16", "fp16")
"""Codecs of parameters themselves. Others lose too much of a number that is not a difference."""

PULL_CODECS = (*ROUNDED, *codecs.DIFFERENCES)
"""Codecs of pulls: of parameters, or, in rounds, of their differences to the version that a worker has."""

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Compression:
    """The compression of a job; InvalidRequest if it is wrong.

    Attributes:
        push: codec of gradients, pull: of parameters that workers pull, or of their differences; "": as they are.
        error_feedback: True if a worker adds to its next gradient what the last encoding has lost.
        rounding: of gradients: "nearest" or "stochastic".
    """

    push: str = ""
    pull: str = ""
    error_feedback: bool = True
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.push:
            _check_codec("compress", self.push)
        if self.pull and self.pull not in PULL_CODECS:
            raise InvalidRequest(f"pull: must be one of {', '.join(PULL_CODECS)}, or None, got {self.pull!r}")
        if self.rounding not in ROUNDINGS:
            raise InvalidRequest(f"rounding: must be nearest or stochastic, got {self.rounding!r}")
        if self.rounding == "stochastic" and not codecs.rounds(self.push or "sign"):
            raise InvalidRequest(f"rounding: stochastic, but {self.push or 'nothing is compressed, which'} rounds nothing")
        if not self.push and not self.error_feedback:
            raise InvalidRequest("error_feedback: is False, but nothing is compressed; pass compress, too")

    @classmethod
    def of(cls, push: Any, pull: Any, error_feedback: Any, rounding: Any) -> Compression:
        """The compression that a program asks for by its keywords; None as in JobKeywords."""
        for name, value in (("compress", push), ("pull", pull), ("rounding", rounding)):
            if value is not None:
                arguments.word(InvalidRequest, name, value)
        if not isinstance(error_feedback, bool):
            arguments.refuse(InvalidRequest, "error_feedback", "True or False", error_feedback)
        if push:
            _check_codec("compress", push)
        if rounding is None:  # without feedback, only rounding at random has the gradient as its mean
            rounding = "stochastic" if push and not error_feedback and codecs.rounds(push) else "nearest"
        return cls(push or "", pull or "", error_feedback, rounding)

    @property
    def has_differences(self) -> bool:
        """True if workers pull differences."""
        return self.pull in codecs.DIFFERENCES

    def check_mode(self, consistency: Consistency) -> None:
        """Raise InvalidRequest if workers pull differences, and there are no rounds."""
        if self.has_differences and not consistency.has_rounds:
            raise InvalidRequest(
                f"pull: {self.pull} is of differences from round to round; without rounds (the mode is {consistency}) use "
                f"{' or '.join(ROUNDED)}"
            )

    def __str__(self) -> str:
        """The words of a status; empty if nothing is compressed."""
        more = "" if self.error_feedback else " without feedback"
        more += " stochastic" if self.rounding == "stochastic" else ""
        return ", ".join([f"{self.push}{more}"] * bool(self.push) + [f"pull {self.pull}"] * bool(self.pull))

    @classmethod
    def from_message(cls, message: job_pb2.Compression) -> Compression:
        """Read the protobuf form; raises as the constructor does."""
        rounding: Rounding = "stochastic" if message.is_stochastic else "nearest"
        return cls(message.push, message.pull, not message.without_feedback, rounding)

    def to_message(self) -> job_pb2.Compression | None:
        """The protobuf form; None if nothing is compressed."""
        if self == NONE:
            return None
        return job_pb2.Compression(
            push=self.push,
            pull=self.pull,
            without_feedback=not self.error_feedback,
            is_stochastic=self.rounding == "stochastic",
        )


NONE = Compression()


def _check_codec(name: str, codec: str) -> None:
    try:
        codecs.encoded_bytes(codec, 0)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {str(error).removeprefix('codec: ')}") from None
