"""Scalars that workers report beside their gradients, such as the loss, or reduce: the rules for their names and values.

Both sides check: the client before it takes a scalar, the shard because it cannot trust clients. Must not know transports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from psd.contract import arguments
from psd.contract.config import ConfigError
from psd.contract.errors import InvalidRequest
from psd.contract.integers import INTEGER_MAX
from psd.contract.printable import is_printable
from psd.v1.control_pb2 import Number

NAME_BYTES_MAX = 256
SERIES_MAX = 64
"""Most series of one worker."""
BATCH_POINTS_MAX = 4096
"""Most points of one LogRequest."""
LOG_SUFFIX = ".jsonl"
"""Ending of the files of scalars in a log directory."""


def check_name(name: str, limit: int = NAME_BYTES_MAX) -> None:
    """Raise InvalidRequest unless a series may have this name."""
    if not 1 <= len(name.encode("utf-8", "replace")) <= limit:
        raise InvalidRequest(f"name: expected 1 to {limit} bytes, got {name[:limit]!r}")
    if not is_printable(name):
        raise InvalidRequest(f"name: {name!r} has control characters")


def checked_step(step: Any) -> int:
    """The step as an int; InvalidRequest if it is none."""
    found = arguments.whole_number(InvalidRequest, "step", step)
    if not 0 <= found <= INTEGER_MAX:
        raise InvalidRequest(f"step: expected 0 to {INTEGER_MAX}, got {found}")
    return found


def checked_total(total: Any) -> int:
    """The number of steps after which a job ends, as an int; InvalidRequest if it is none."""
    found = arguments.whole_number(InvalidRequest, "total", total)
    if not 1 <= found <= INTEGER_MAX:
        raise InvalidRequest(f"total: expected 1 to {INTEGER_MAX}, got {found}")
    return found


def checked_number(name: str, value: Any) -> float | int:
    """The number as an int if it is whole by its type, NumPy's and tensors' included, else as `checked_value` has it.

    Raises:
        InvalidRequest: it is no number, or a whole one beyond 64 bits.
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
            if not -(1 << 63) <= found < 1 << 63:
                raise InvalidRequest(f"{name}: {found} is beyond 64 bits; pass a float")
            return found
    return checked_value(name, value)


def number_message(name: str, value: float | int) -> Number:
    """The message that carries a number of an all_reduce."""
    return Number(name=name, real=value) if isinstance(value, float) else Number(name=name, integer=value)


def number_of(message: Number) -> float | int:
    """The number that a message carries; 0 if it has none."""
    return message.real if message.HasField("real") else message.integer


def checked_value(name: str, value: Any) -> float:
    """The scalar as a float, NaN and infinity included; a tensor or an array of one element is one, too.

    Raises:
        InvalidRequest: it is no number.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _as_float(name, value)
    detach = getattr(value, "detach", None)  # a torch loss that still has its graph
    found = detach() if detach is not None else value
    if isinstance(value, (bool, str, bytes)) or not hasattr(found, "__float__") or getattr(found, "size", 1) == 0:
        arguments.refuse(InvalidRequest, name, "a number", value)
    return _as_float(name, found)


def _as_float(name: str, value: Any) -> float:
    item = getattr(value, "item", None)  # for arrays: float() takes only those without dimensions
    try:
        return float(value if item is None else item())
    except (TypeError, ValueError, RuntimeError):  # e.g. an array of several elements; frameworks raise different errors
        arguments.refuse(InvalidRequest, name, "a number", value)
    except OverflowError:  # an int beyond float64
        return math.inf if value > 0 else -math.inf


def as_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """Scalars by name for JSON, which has no NaN and no infinity: those are the strings "NaN", "Infinity" and "-Infinity"."""
    return {name: value if math.isfinite(value) else _WORDS[str(value)] for name, value in values.items()}


_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class LoggedScalars(NamedTuple):
    """Scalars that one call has reported: a line of JSON in a worker's file of a log directory.

    Attributes:
        time: seconds since 1970. run: name of the run.
    """

    time: float
    run: str
    rank: int
    step: int
    scalars: Mapping[str, float]

    def line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps({**self._asdict(), "scalars": as_json(self.scalars)}) + "\n"

    @classmethod
    def read(cls, line: str | bytes) -> LoggedScalars:
        """The record of a line; its run is empty if the line does not name it. Raises ValueError for a line that is none."""
        try:
            found = json.loads(line)
            scalars = {str(name): float(value) for name, value in found["scalars"].items()}  # "NaN" and "Infinity", too
            time, run, rank = float(found["time"]), str(found.get("run", "")), int(found["rank"])
            return cls(time, run, rank, checked_step(found["step"]), scalars)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InvalidRequest) as error:
            raise ValueError("no line of a worker's scalars") from error


def tensorboard_module() -> str:
    """Name of a module that writes TensorBoard's files, which is not imported yet.

    Raises:
        ConfigError: none is installed.
    """
    if importlib.util.find_spec("tensorboardX") is not None:
        return "tensorboardX"
    if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("tensorboard") is not None:
        return "torch.utils.tensorboard"
    raise ConfigError(
        "--tensorboard: nothing is installed that writes TensorBoard's files; pip install 'psd[tensorboard]', or "
        "tensorboard beside PyTorch"
    )
