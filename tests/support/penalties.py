"""What the tests of whole networks share: tolerances, and a penalty of each kind."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import doubleback as db
from support.oracle import Spec


class Tolerance(NamedTuple):
    relative: float  # ||got - truth|| / ||truth||, per tensor
    floor: float  # a gradient smaller than floor * (largest gradient) counts as that large


# The truth is float64 autograd on the very numbers that the dtype holds (weights and inputs are
# rounded first), so what is left is rounding inside the step.
#   float64: a formula that is right agrees to about 1e-14. 1e-10 leaves room for ill-conditioned
#     nets (a batch norm of three examples), none for a wrong term.
#     Floor: 1e-10 * 1e-6 is the rounding unit of the largest gradient. A gradient that cancels
#     exactly (a shift before a batch norm, the bias of attention's keys) is no more than that.
#   float32: eps is 6e-8; stock autograd in float32 is itself off by up to 1.3e-5 on the zoo.
#   bfloat16: eps is 4e-3; stock is off by up to 0.05. The subset has few kinks that rounding
#     could cross.
TOLERANCE = {
    torch.float64: Tolerance(1e-10, 1e-6),
    torch.float32: Tolerance(1e-4, 1e-2),
    torch.bfloat16: Tolerance(1e-1, 1e-1),
}


def turned(out, w):
    """A seed that depends on the output and on data."""
    return torch.sin(out) + w


def quartic(xi):
    parts = [xi] if isinstance(xi, Tensor) else list(xi)
    return sum((x**4 + 0.1 * x).flatten(1).sum(1) for x in parts)


def library_penalty(spec: Spec):
    norm = {
        "squared": lambda: db.SquaredNorm(),
        "norm": lambda: db.Norm(),
        "deviation": lambda target, one_sided: db.Deviation(target, one_sided=one_sided),
    }[spec.norm[0]](*spec.norm[1:])
    if spec.kind == "loss":
        return db.LossGradient(
            spec.loss, norm=norm, reduction=spec.reduction, label_smoothing=spec.label_smoothing,
            class_weights=spec.class_weights, ignore_index=spec.ignore_index,
        )  # fmt: skip
    if spec.kind == "output":
        return db.OutputGradient(spec.index, norm=norm, reduction=spec.reduction)
    if spec.kind == "jacobian":
        return db.Jacobian("softmax" if spec.softmax else "output", reduction=spec.reduction,
                           entries=list(spec.entries) or None)  # fmt: skip
    if spec.kind == "match":
        return db.GradientMatch(spec.index, reduction=spec.reduction)
    if spec.kind == "bilinear":
        return db.BilinearForm(reduction=spec.reduction)
    return db.Custom(
        spec.v, spec.p, extras=len(spec.extras), sees_output=spec.sees_output,
        reduction=spec.reduction,
    )  # fmt: skip
