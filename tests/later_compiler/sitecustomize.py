"""Has torch load faster: its compiler with the first thing that it compiles, and not with the first optimizer.

Torch keeps its compiler out of optimizers, and loads it for that, in each program: 1.5 s of processor time, as long as torch
itself takes. Where nothing has loaded it, nothing is compiled, and there is nothing to keep it out of. A fourth of torch's own
time goes into what only compiling and exporting need: these modules are loaded when something asks for what is in them, or
when the compiler is. A third goes into searches for garbage while torch is loaded and in the end, when all that it has made is
in use: they are left out. Most programs that tests start have this folder on their path (`later_compiler` in conftest.py);
pytest itself, and the README's program in tests/install, have torch as users do.

Must not change what a program computes, or anything once the compiler is there. On the device "meta" some operations are
unknown until then, and say so.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TORCH = "torch"
COMPILER = "torch._dynamo"

FOR_COMPILING = ("torch.export", "torch._meta_registrations")


def _kept_out_later(module: ModuleType) -> None:
    """torch._compile: its decorator of what is not to be compiled."""
    kept_out = module._disable_dynamo

    def disable(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive)
        return _either(kept_out(function, recursive), function)

    module._disable_dynamo = disable


def _steps_later(module: ModuleType) -> None:
    """torch.optim.optimizer: its decorator of step(), which breaks what is compiled into two parts there."""
    broken = module._use_grad_for_differentiable

    def use_grad(step: Callable[..., Any]) -> Any:
        import torch

        def plain(self: Any, *arguments: Any, **named: Any) -> Any:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *arguments, **named)

        return _either(broken(step), plain)

    module._use_grad_for_differentiable = use_grad


def _either(with_compiler: Any, without: Any) -> Any:
    @functools.wraps(with_compiler)
    def call(*arguments: Any, **named: Any) -> Any:
        return (with_compiler if COMPILER in sys.modules else without)(*arguments, **named)

    return call


def _load_without_search(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    gc.disable()
    try:
        execute(module)
        gc.freeze()
    finally:
        gc.enable()
    atexit.register(gc.freeze)


class _Later(ModuleType):
    """A module that is loaded with the first use of what is in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever goes through all modules does not mean this one
            raise AttributeError(name)
        _load(self)
        return getattr(self, name)


def _put_off(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    _PUT_OFF[module.__name__] = execute
    module.__class__ = _Later
    if module.__name__ == "torch._meta_registrations":
        _let_generators_be_made()


def _let_generators_be_made() -> None:
    """Does what torch._prims.rng_prims does for torch.Generator: it has no class of its class until then."""
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):  # since 2.13
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


def _load(module: ModuleType) -> None:
    if type(module) is _Later:
        module.__class__ = ModuleType
        _PUT_OFF[module.__name__](module)


def _load_all() -> None:
    for name in _PUT_OFF:
        _load(sys.modules[name])


_PUT_OFF: dict[str, Callable[[ModuleType], None]] = {}
"""What loads each of the modules that were put off."""

_CHANGED = {"torch._compile": _kept_out_later, "torch.optim.optimizer": _steps_later}
_NEED_ALL = (COMPILER, "torch.distributed.tensor")  # the latter asks the kernels for "meta" how large results are


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        if name in _NEED_ALL:
            _load_all()
        spec = PathFinder.find_spec(name, path) if name in (TORCH, *FOR_COMPILING, *_CHANGED) else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def load(module: ModuleType) -> None:
                if name == TORCH:
                    _load_without_search(module, execute)
                elif name in FOR_COMPILING:
                    _put_off(module, execute)
                else:
                    execute(module)
                    _CHANGED[name](module)

            spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)
