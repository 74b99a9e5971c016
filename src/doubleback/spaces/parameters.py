"""Steps in parameter spaces: a gradient is a representer, and the space is a choice (theory §7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import InputError
from .base import Space


def parameter_spaces(optimizer: Optimizer, spaces: Mapping[Tensor, Space]) -> Optimizer:
    """The same optimiser, stepping with the gradients' representers in the given spaces.

    ∇^Θ ℓ = G_Θ⁻¹ ∇ℓ: the direction of steepest descent depends on what a unit step of a parameter
    means. In a Sobolev space of filters it is smoothed, in a weighted space scaled entry by entry.

    optimizer: any optimiser that holds the parameters; it is returned, so schedulers, `GradScaler`
        and closures work as before. spaces: parameter → space; others keep their gradients.

    Only the step sees the representers: `.grad` holds the Euclidean gradient again afterwards.
    Weight decay, momentum and the like act on the representer, as the optimiser defines them;
    gradients are clipped before, in the Euclidean norm.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Conv2d(3, 8, 7)
    >>> smooth = db.spaces.Sobolev(1.0, spacing=(1.0, 1.0), boundary="neumann")
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> optimizer = db.parameter_spaces(optimizer, {net.weight: smooth})
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    chosen: list[tuple[Tensor, Space]] = []
    for parameter, space in spaces.items():
        if not isinstance(space, Space):
            raise InputError(f"parameter_spaces needs a space for each parameter, not {space!r}")
        if not any(parameter is p for p in held):
            raise InputError(
                f"the optimiser does not hold the parameter of shape {tuple(parameter.shape)} "
                f"that {space} is for"
            )
        with torch.no_grad():  # a space that does not fit is known before the first step
            space.riesz(torch.zeros_like(parameter))
        chosen.append((parameter, space))
    euclidean: list[tuple[Tensor, Tensor]] = []

    def represent() -> None:
        euclidean.clear()
        with torch.no_grad():
            for parameter, space in chosen:
                if parameter.grad is not None:
                    euclidean.append((parameter, parameter.grad))
                    parameter.grad = space.riesz(parameter.grad)

    def before(_: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimiser
        if closure is None:
            represent()
            return None

        def represented() -> Any:
            result = closure()
            represent()
            return result

        if len(args) > 1:
            return (args[0], represented, *args[2:]), kwargs
        return args, {**kwargs, "closure": represented}

    def after(*_: Any) -> None:
        for parameter, gradient in euclidean:
            parameter.grad = gradient
        euclidean.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer
