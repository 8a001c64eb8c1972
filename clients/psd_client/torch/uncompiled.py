"""A decorator that keeps torch.compile out of psd's own work, where a compiled model or a compiled step calls it.

Must not know what that work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Have a function, and all that it calls, run as it is written where it is called from compiled code.

    The compiler would follow a call into the client, down to its sockets, and compile each piece that it finds there: minutes
    for nothing. Functions that torch calls, such as hooks, are followed, too.
    """
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
