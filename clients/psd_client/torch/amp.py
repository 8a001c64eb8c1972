"""The link to torch's GradScaler: tells a step whether a gradient is infinite, and the scaler whether the step counted.

When `scaler.step(optimizer)` has found an infinity, it skips the step of an ordinary optimizer; the other workers would then
wait for a gradient that never comes. But an optimizer with `_step_supports_amp_scaling`, whose step takes a `grad_scaler`, is
always called, with the scaler. Ours unscales the gradients, and afterwards tells the scaler whether the round of all workers
was skipped, so that all scalers back off or grow alike.

The other protocol, the attributes `grad_scale` and `found_inf`, has no way back to the scaler. Imports no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from psd.contract.errors import InvalidRequest


def ignore_the_warning() -> None:
    """Silence torch's warning about optimizers whose step takes a `grad_scaler`; users cannot act on it."""
    warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def check(scaler: Any, optimizer: Any, nan_policy: str) -> None:
    """Raise InvalidRequest if the shards cannot be told of the scaler's infinities."""
    if scaler is None and hasattr(optimizer, "found_inf"):
        raise InvalidRequest("grad_scaler: this version of torch does not give its GradScaler to the optimizer's step")
    if scaler is not None and nan_policy != "skip":
        raise InvalidRequest('nan_policy: a GradScaler needs "skip"; pass nan_policy="skip" to distribute()')


def unscale(scaler: Any, optimizer: Any) -> bool:
    """Unscale the gradients, unless the program has done so; return True if one is infinite or NaN."""
    is_ready = scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"  # noqa: SLF001 - the contract's own words
    if is_ready and any(parameter.grad is not None for parameter in _parameters(optimizer)):
        scaler.unscale_(optimizer)
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())  # noqa: SLF001


def report(scaler: Any, optimizer: Any, *, is_skipped: bool) -> None:
    """Tell the scaler's next update whether all workers skipped the step, even if this worker's gradients were finite."""
    found = scaler._found_inf_per_device(optimizer)  # noqa: SLF001
    if not found:  # without gradients, where a scaler has looked at nothing, and its update would fail
        flag = scaler.scale(next(_parameters(optimizer)).detach().new_zeros(()))
        found[flag.device] = flag.float()
    for flag in found.values():
        flag.fill_(float(is_skipped))


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
