"""One function per update rule, on whole arrays in place: what ``step_block`` does to a segment.

All of them share this contract, so that their docstrings say only what is their own:

Args:
    param: (n,) float32|float64, writable. Updated.
    grad: (n,) same type. Never modified; must not overlap the others.
    slots, by name: (n,) same type, writable. Updated. One that is None here must be given if the options need it.
    scalars: rounded to the arrays' type; what is derived from them, such as ``1 - beta1`` or a bias correction, after deriving
        it in float64.
    maximize: ascend.
    step: updates including this one, >= 1.

Raises:
    InvalidTensor: type, shape, layout, alignment, length or overlap, or a missing slot; nothing is written.
    ValueError: ``step`` is less than 1.

Cost: O(n), no allocation, GIL released.

Rules that are in torch.optim follow it operation by operation in the arrays' type; torch itself may fuse a multiply and an
add, and so differ by rounding. ``tests/core/test_core_rules.py`` compares over 100 steps.
"""

from __future__ import annotations

import math

from psd_core import _kernels
from psd_core._kernels import InvalidTensor
from psd_core._norms import square_sum, trust_ratio
from psd_core._rules import RULES, RealArray


def _update(
    name: str,
    param: RealArray,
    grad: RealArray,
    slots: dict[str, RealArray | None],
    scalars: tuple[float, ...],
    flags: set[str],
    step: int,
) -> None:
    if step < 1:
        raise ValueError(f"step: expected an integer >= 1, got {step}")
    rule = RULES[name]
    needed = rule.slots_of(flags)
    for slot in needed:
        if slots[slot] is None:
            raise InvalidTensor(f"{slot}: expected an array, got None")
    arrays = tuple(slots[slot.name] if slot.name in needed else None for slot in rule.slots)
    names = tuple(slot.name for slot in rule.slots)
    _kernels.step(rule.number, param, grad, names, arrays, scalars, rule.bits(flags), step)


def _flags(**flags: bool) -> set[str]:
    return {name for name, is_set in flags.items() if is_set}


def sgd(
    param: RealArray,
    grad: RealArray,
    momentum_buffer: RealArray | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    keras: bool = False,
    step: int = 1,
) -> None:
    """Apply one update of stochastic gradient descent in place.

    Args:
        momentum_buffer: needed if ``momentum`` is not 0, and else left alone; at step 1 its contents are not read.
        dampening: share of the gradient that does not enter the buffer. nesterov: look ahead along the buffer.
        step: at step 1 the buffer becomes the gradient, undampened.
        keras: the buffer has the learning rate in it.

    Source: torch.optim.SGD; with ``keras``, keras.optimizers.SGD. The rest is as for all rules, see ``psd_core._updates``.
    """
    if momentum_buffer is None and momentum != 0:
        raise InvalidTensor(f"momentum_buffer: expected an array, since momentum is {momentum}, got None")
    flags = _flags(maximize=maximize, nesterov=nesterov, momentum=momentum != 0, keras=keras)
    scalars = (lr, momentum, dampening, weight_decay)
    _update("sgd", param, grad, {"momentum": momentum_buffer}, scalars, flags, step)


def adagrad(
    param: RealArray,
    grad: RealArray,
    sum_: RealArray,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    maximize: bool = False,
    keras: bool = False,
    step: int = 1,
) -> None:
    """Apply one Adagrad update in place.

    Args:
        sum_: of the squared gradients; begins with the initial accumulator value, >= 0.
        lr_decay: the rate is ``lr / (1 + (step - 1) * lr_decay)``. keras: epsilon is under the root.

    Source: Duchi, Hazan and Singer 2011; torch.optim.Adagrad, or keras.optimizers.Adagrad. The rest is as for all rules, see
        ``psd_core._updates``.
    """
    flags = _flags(maximize=maximize, keras=keras)
    _update("adagrad", param, grad, {"sum": sum_}, (lr, lr_decay, eps, weight_decay), flags, step)


def adadelta(
    param: RealArray,
    grad: RealArray,
    square_avg: RealArray,
    acc_delta: RealArray,
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
    step: int = 1,
) -> None:
    """Apply one Adadelta update in place.

    Args:
        square_avg, acc_delta: averages of the squared gradients and of the squared updates, with the decay ``rho``.

    Source: Zeiler 2012 (arXiv:1212.5701) alg. 1; torch.optim.Adadelta. The rest is as for all rules, see ``psd_core._updates``.
    """
    slots: dict[str, RealArray | None] = {"square_avg": square_avg, "acc_delta": acc_delta}
    _update("adadelta", param, grad, slots, (lr, rho, eps, weight_decay), _flags(maximize=maximize), step)


def rmsprop(
    param: RealArray,
    grad: RealArray,
    square_avg: RealArray,
    grad_avg: RealArray | None = None,
    momentum_buffer: RealArray | None = None,
    *,
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
    keras: bool = False,
    step: int = 1,
) -> None:
    """Apply one RMSprop update in place.

    Args:
        grad_avg: needed if ``centered``, and else left alone. momentum_buffer: likewise if ``momentum`` is not 0.
        keras: epsilon is under the root, and the learning rate in the momentum buffer.

    Source: Tieleman and Hinton 2012; torch.optim.RMSprop, or keras.optimizers.RMSprop, except that the centered
        second moment is kept from falling below zero by rounding, where torch stores NaN. The rest is as for all rules, see
        ``psd_core._updates``.
    """
    slots = {"square_avg": square_avg, "grad_avg": grad_avg, "momentum_buffer": momentum_buffer}
    flags = _flags(maximize=maximize, centered=centered, momentum=momentum != 0, keras=keras)
    _update("rmsprop", param, grad, slots, (lr, alpha, eps, weight_decay, momentum), flags, step)


def adam(
    param: RealArray,
    grad: RealArray,
    exp_avg: RealArray,
    exp_avg_sq: RealArray,
    max_exp_avg_sq: RealArray | None = None,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    keras: bool = False,
    step: int,
) -> None:
    """Apply one Adam update in place; with ``decoupled_weight_decay``, one of AdamW.

    Args:
        exp_avg, exp_avg_sq: first and second moment, not corrected for their bias.
        max_exp_avg_sq: needed if ``amsgrad``, and else left alone: the largest second moment so far.
        weight_decay: added to the gradient; or, decoupled, the parameter is first multiplied by ``1 - lr * weight_decay``.
        keras: epsilon is added before the bias correction.
        step: the bias corrections are ``1 - beta**step``, with the power by repeated squaring.

    Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 1, Loshchilov and Hutter 2019, Reddi et al. 2018; torch.optim.Adam and
        AdamW: epsilon is added after the bias correction; or keras.optimizers. The rest is as for all rules, see
        ``psd_core._updates``.
    """
    slots = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
    flags = _flags(maximize=maximize, amsgrad=amsgrad, decoupled_weight_decay=decoupled_weight_decay, keras=keras)
    _update("adam", param, grad, slots, (lr, beta1, beta2, eps, weight_decay), flags, step)


def adamax(
    param: RealArray,
    grad: RealArray,
    exp_avg: RealArray,
    exp_inf: RealArray,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    keras: bool = False,
    step: int,
) -> None:
    """Apply one Adamax update in place.

    Args:
        exp_avg: first moment. exp_inf: infinity norm, which has ``eps`` in it.
        keras: it has not; ``eps`` is added to it where it divides.

    Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 2; torch.optim.Adamax, or keras.optimizers.Adamax. The rest is
        as for all rules, see ``psd_core._updates``.
    """
    slots: dict[str, RealArray | None] = {"exp_avg": exp_avg, "exp_inf": exp_inf}
    _update("adamax", param, grad, slots, (lr, beta1, beta2, eps, weight_decay), _flags(maximize=maximize, keras=keras), step)


def nadam(
    param: RealArray,
    grad: RealArray,
    exp_avg: RealArray,
    exp_avg_sq: RealArray,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 0.004,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    step: int,
) -> None:
    """Apply one NAdam update in place.

    Args:
        momentum_decay: the momentum of step i is ``beta1 * (1 - 0.96**(i * momentum_decay) / 2)``.
        step: the product of the momenta so far follows from it, ``beta1`` and ``momentum_decay``, as if those two had never
            changed; torch keeps a running product.

    Cost: O(n + the steps until that product is below 1e-20), which are some hundreds for a ``beta1`` of 0.9.
    Source: Dozat 2016; torch.optim.NAdam. The rest is as for all rules, see ``psd_core._updates``.
    """
    slots: dict[str, RealArray | None] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    flags = _flags(maximize=maximize, decoupled_weight_decay=decoupled_weight_decay)
    _update("nadam", param, grad, slots, (lr, beta1, beta2, eps, weight_decay, momentum_decay), flags, step)


def ftrl(
    param: RealArray,
    grad: RealArray,
    accumulator: RealArray,
    linear: RealArray,
    *,
    lr: float,
    beta: float = 1.0,
    l1: float = 0.0,
    l2: float = 0.0,
    step: int = 1,
) -> None:
    """Apply one update of FTRL-proximal in place.

    Args:
        accumulator: the paper's n, the sum of the squared gradients. linear: the paper's z.
        lr: the paper's alpha, > 0. beta: makes the first rates smaller.
        l1: parameters whose ``linear`` is within it are exactly 0.

    Source: McMahan et al. 2013, alg. 1. Parameters are meant to begin at 0: the rule derives them from the slots, and an
        element whose gradients were all 0 becomes 0. The rest is as for all rules, see ``psd_core._updates``.
    """
    slots: dict[str, RealArray | None] = {"accumulator": accumulator, "linear": linear}
    _update("ftrl", param, grad, slots, (lr, beta, l1, l2), set(), step)


def lamb(
    param: RealArray,
    grad: RealArray,
    exp_avg: RealArray,
    exp_avg_sq: RealArray,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    maximize: bool = False,
    step: int,
) -> None:
    """Apply one LAMB update to a whole tensor in place; this one allocates an array of the tensor's size.

    Args:
        exp_avg, exp_avg_sq: first and second moment, not corrected for their bias.
        weight_decay: times the parameter, a part of the update whose norm counts.

    Source: You et al. 2020 (arXiv:1904.00962) alg. 2, with the norm itself as its phi; the trust ratio is 1 where either norm
        is 0. The rest is as for all rules, see ``psd_core._updates``.
    """
    direction = param.copy()
    slots: dict[str, RealArray | None] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _update("lamb", direction, grad, slots, (lr, beta1, beta2, eps, weight_decay), _flags(maximize=maximize), step)
    squares, direction_squares = square_sum(param), square_sum(direction)
    ratio = math.nan if squares is None or direction_squares is None else trust_ratio(squares, direction_squares)
    _kernels.accumulate(param, direction, -lr * ratio)


def lion(
    param: RealArray,
    grad: RealArray,
    exp_avg: RealArray,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
    step: int = 1,
) -> None:
    """Apply one Lion update in place.

    Args:
        exp_avg: the momentum, with the decay ``beta2``; ``beta1`` mixes it with the gradient, and the sign of that is the step.
        weight_decay: decoupled: the step is ``lr * (sign + weight_decay * param)``.

    Source: Chen et al. 2023 (arXiv:2302.06675) alg. 2. The rest is as for all rules, see ``psd_core._updates``.
    """
    _update("lion", param, grad, {"exp_avg": exp_avg}, (lr, beta1, beta2, weight_decay), _flags(maximize=maximize), step)
