"""A decorator that keeps torch.compile out of psd's code, when a compiled model or a compiled step calls it.

Must not know what that code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Run a function, and all that it calls, uncompiled, even when compiled code calls it.

    Without this the compiler would follow a call into the client, down to its sockets, and compile each piece that it finds:
    this takes minutes and gains nothing. It follows functions that torch calls, too, such as hooks.
    """
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
