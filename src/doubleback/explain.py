"""What a plan will do, and why, as text and as a dictionary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .penalties import Penalty
from .plan import Plan, Step
from .rules import Structure

_COUNTED = (
    "linear", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "matmul", "mm", "bmm", "mv", "dot", "addmm",
    "baddbmm", "addmv", "einsum",
)  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """A plan's sweeps, operation counts, kept memory and rules; prints as a table."""

    sweeps: dict[str, dict[str, int]]
    layers: int
    paper: dict[str, int]
    piecewise_linear: bool
    kept_bytes: int
    operators: dict[str, dict[str, Any]]
    generic: tuple[str, ...]
    prelude: int
    penalty: str

    @property
    def total(self) -> dict[str, int]:
        keys = ("forward", "transpose", "weight_adjoint")
        return {key: sum(sweep[key] for sweep in self.sweeps.values()) for key in keys}

    def as_dict(self) -> dict[str, Any]:
        return {
            "penalty": self.penalty,
            "layers": self.layers,
            "sweeps": self.sweeps,
            "total": self.total,
            "paper": self.paper,
            "piecewise_linear": self.piecewise_linear,
            "kept_bytes": self.kept_bytes,
            "operators": self.operators,
            "generic": list(self.generic),
            "prelude_nodes": self.prelude,
        }

    def __str__(self) -> str:
        lines = [self.penalty, "", f"{'sweep':<10}{'nodes':>7}{'K':>6}{'Kᵀ':>6}{'K□':>6}"]
        for name, row in self.sweeps.items():
            lines.append(
                f"{name:<10}{row['nodes']:>7}{row['forward']:>6}{row['transpose']:>6}"
                f"{row['weight_adjoint']:>6}"
            )
        total = self.total
        lines.append(
            f"{'total':<10}{'':>7}{total['forward']:>6}{total['transpose']:>6}"
            f"{total['weight_adjoint']:>6}"
        )
        products = total["forward"] + total["transpose"]
        lines += [
            "",
            f"K and Kᵀ: {products} for {self.layers} bilinear layers with the loss riding along; "
            f"the paper's algorithm: {self.paper['penalty_and_loss']}, "
            f"plain step: {self.paper['plain']}",
            f"piecewise linear in x: {'yes' if self.piecewise_linear else 'no'}",
            f"kept between the sweeps: {self.kept_bytes / 2**20:.1f} MiB",
            f"run before the sweeps, under autograd: {self.prelude} nodes",
            "",
            f"{'operator':<48}{'count':>6}  structure",
        ]
        for name, row in self.operators.items():
            lines.append(f"{name:<48}{row['count']:>6}  {row['structure']}")
        if self.generic:
            names = ", ".join(sorted(set(self.generic)))
            lines += ["", f"on the generic rule (reverse over reverse of that node): {names}"]
        return "\n".join(lines)


def explain(plan: Plan, penalty: Penalty) -> Explanation:
    """Read the counts off the plan: exactly the calls that the sweeps will make."""
    sweeps = {
        "forward": _row(plan, lambda s: (True, 1, 0, 0)),
        "backward": _row(plan, _backward_counts),
        "tangent": _row(plan, _tangent_counts),
        "second": _row(plan, _second_counts),
    }
    layers = sum(1 for s in plan.steps if _bilinear(s))
    kept = sum(_bytes(plan, v) for v in plan.kept if v not in plan.leaves)
    kept += sum(_bytes(plan, v) for s in plan.steps if s.keeps_xi for v in s.node.outputs)
    operators: dict[str, dict[str, Any]] = {}
    for step in plan.steps:
        row = operators.setdefault(str(step.node.op), {"count": 0, "structure": _structure(step)})
        row["count"] += 1
    return Explanation(
        sweeps, layers, {"plain": 2 * layers - 1, "penalty_and_loss": _paper(layers, penalty)},
        plan.piecewise_linear, kept, operators,
        tuple(str(n.op) for n in plan.generic), len(plan.prelude), repr(penalty),
    )  # fmt: skip


def _paper(layers: int, penalty: Penalty) -> int:
    """The paper's count with a loss: 4L−1 for the classical penalty, 5L−2 for any other."""
    return 4 * layers - 1 if penalty.extras == 1 and penalty.varying else 5 * layers - 2


def _bilinear(step: Step) -> bool:
    name = step.node.op._schema.name.rpartition("::")[2]
    return name in _COUNTED


def _structure(step: Step) -> str:
    if not step.differentiated:
        return "no derivative"
    if step.rule.structure is Structure.GENERAL and not step.rule.own:
        return "general (generic rule)"
    return step.rule.structure.value


def _bytes(plan: Plan, value: int) -> int:
    meta = plan.graph.values[value]
    return meta.bytes if meta is not None else 0


def _row(plan: Plan, count: Any) -> dict[str, int]:
    row = {"nodes": 0, "forward": 0, "transpose": 0, "weight_adjoint": 0}
    for step in plan.steps:
        runs, k, kt, kw = count(step)
        row["nodes"] += bool(runs)
        if runs and _bilinear(step):
            row["forward"] += k
            row["transpose"] += kt
            row["weight_adjoint"] += kw
    return row


def _slots(step: Step, flags: tuple[bool, ...]) -> tuple[bool, bool]:
    """(activation side, weight side) of a product's inputs."""
    shift = 1 if step.node.op._schema.name in ("aten::addmm", "aten::baddbmm", "aten::addmv") else 0
    return flags[shift], flags[shift + 1] if len(flags) > shift + 1 else False


def _backward_counts(step: Step) -> tuple[bool, int, int, int]:
    x, weight = _slots(step, step.pull) if _bilinear(step) else (False, False)
    return any(step.pull), 0, int(x), int(weight)


def _tangent_counts(step: Step) -> tuple[bool, int, int, int]:
    if not _bilinear(step):
        return step.push or step.curves, 0, 0, 0
    x_moves, weight_moves = _slots(step, step.pull)
    x_bends, weight_bends = _slots(step, step.bend)
    products = int(step.push) * (int(x_moves) + int(weight_moves))
    return step.push or step.curves, products, int(x_bends), int(weight_bends)


def _second_counts(step: Step) -> tuple[bool, int, int, int]:
    x, weight = _slots(step, step.pull2) if _bilinear(step) else (False, False)
    return any(step.pull2), 0, int(x), int(weight)
