"""A decorator that keeps torch.compile out of psd's code, when a compiled model or a compiled step calls it.

Must not know what that code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Run a function, and all that it calls, uncompiled, even when compiled code calls it.

    Without this the compiler would follow a call into the client, down to its sockets, and compile each piece that it finds:
    this takes minutes and gains nothing. It follows functions that torch calls, too, such as hooks. This is what torch's
    optimizers use: torch.compiler.disable would load the compiler at once, which takes over a second.
    """
    return cast(Function, _disable_dynamo(function))
