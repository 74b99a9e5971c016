"""What a plan will do, and why, as text and as a dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .counting import Operations
from .jacobian import Decision
from .penalties import Jacobian, Penalty
from .plan import Plan, Step
from .rules import Structure


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
    flops: int | None = None
    peak_bytes: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    way: str = ""

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
            "flops": self.flops,
            "peak_bytes": self.peak_bytes,
            "plan": self.plan,
            "way": self.way,
        }

    def __str__(self) -> str:
        width = max(10, *(len(name) + 2 for name in self.sweeps))
        lines = [self.penalty, "", f"{'sweep':<{width}}{'nodes':>7}{'K':>7}{'Kᵀ':>7}{'K□':>7}"]
        for name, row in (*self.sweeps.items(), ("total", self.total)):
            nodes = row.get("nodes", "")
            lines.append(
                f"{name:<{width}}{nodes:>7}{row['forward']:>7}{row['transpose']:>7}"
                f"{row['weight_adjoint']:>7}"
            )
        total = self.total
        products = total["forward"] + total["transpose"]
        lines += [
            "",
            f"K and Kᵀ: {products} for {self.layers} bilinear layers, loss included; the paper: "
            f"{self.paper['penalty_and_loss']}, autograd: {self.paper['autograd']}, plain step: "
            f"{self.paper['plain']}",
        ]
        if self.flops is not None and self.peak_bytes is not None:
            lines.append(
                f"FLOPs of a step: {_si(self.flops)}; peak memory beyond parameters and input: "
                f"{_mib(self.peak_bytes)}"
            )
        if self.way:
            lines.append(f"runs by {self.way}")
        lines += self._plan_lines()
        lines += [
            f"piecewise linear in x: {'yes' if self.piecewise_linear else 'no'}",
            f"kept between the sweeps: {_mib(self.kept_bytes)}",
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

    def _plan_lines(self) -> list[str]:
        plan = self.plan
        if not plan:
            return []
        lines = ["", f"{'plan':<12}{'seeds':>7}{'FLOPs':>10}{'peak':>12}"]
        for name, row in plan["candidates"].items():
            mark = "  ← chosen" if name == plan["chosen"] else ""
            lines.append(
                f"{name:<12}{row['seeds']:>7}{_si(row['flops']):>10}"
                f"{_mib(row['peak_bytes']):>12}{mark}"
            )
        for name, why in plan["excluded"].items():
            lines.append(f"{name:<12}not here: {why}")
        lines.append(
            f"seeds at a time: {plan['chunk']} of {plan['seeds']}, within {_mib(plan['budget'])}"
        )
        lines += [f"short cut: {name}: {why}" for name, why in plan["shortcuts"].items()]
        return [*lines, ""]


def _si(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def explain(plan: Plan, penalty: Penalty) -> Explanation:
    """Read the counts off the plan: exactly the calls that the sweeps will make."""
    sweeps = {
        "forward": _row(plan, lambda s: (True, 1, 0, 0)),
        "backward": _row(plan, _backward_counts),
        "tangent": _row(plan, _tangent_counts),
        "second": _row(plan, _second_counts),
    }
    layers = sum(1 for s in plan.steps if s.rule.layer)
    kept = sum(_bytes(plan, v) for v in plan.kept if v not in plan.leaves)
    kept += sum(_bytes(plan, v) for s in plan.steps if plan.holds_xi(s) for v in s.node.outputs)
    operators: dict[str, dict[str, Any]] = {}
    for step in plan.steps:
        row = operators.setdefault(str(step.node.op), {"count": 0, "structure": _structure(step)})
        row["count"] += 1
    paper = {
        "plain": 2 * layers - 1,
        "penalty_and_loss": _paper(layers, penalty),
        "autograd": 4 * layers - 1,
    }
    return Explanation(
        sweeps, layers, paper, plan.piecewise_linear, kept, operators,
        tuple(str(n.op) for n in plan.generic), len(plan.prelude), repr(penalty),
    )  # fmt: skip


def explain_jacobian(plan: Plan, penalty: Jacobian, decision: Decision) -> Explanation:
    """What the chosen candidate runs, at what price, and what the others would have cost."""
    base, profiles = explain(plan, penalty), decision.profiles
    profile = profiles[decision.chosen]
    seeds, layers = profile.seeds, base.layers
    outputs = plan.graph.shape(plan.target)[1:]
    rows = penalty.projections or (penalty.seed_count((1, *outputs)) + (penalty.of == "softmax"))
    sweeps = {
        "forward": _counts(profile.open_operations, base.sweeps["forward"]["nodes"]),
        f"{seeds} seeds, backward and tangent": _counts(
            profile.all_seeds,
            seeds * (base.sweeps["backward"]["nodes"] + base.sweeps["tangent"]["nodes"]),
        ),
        "second": _counts(profile.close_operations, base.sweeps["second"]["nodes"]),
    }
    paper = {
        "plain": 2 * layers - 1,
        "penalty_and_loss": 2 * rows * layers + 3 * layers - 2,
        "autograd": 2 * rows * layers + 2 * layers - 1,
        "naive": layers + rows * (3 * layers - 1) + layers - 1,
    }
    told = {
        "chosen": decision.chosen,
        "chunk": decision.chunk,
        "seeds": seeds,
        "budget": decision.budget,
        "candidates": {
            name: {"seeds": p.seeds, "flops": p.flops(p.seeds), "peak_bytes": p.peak_bytes(p.seeds)}
            for name, p in profiles.items()
        },
        "excluded": decision.excluded,
        "shortcuts": decision.shortcuts,
    }
    return replace(
        base, sweeps=sweeps, paper=paper, plan=told,
        flops=profile.flops(decision.chunk), peak_bytes=profile.peak_bytes(decision.chunk),
    )  # fmt: skip


def with_iterations(told: Explanation, plan: Plan, iterations: int) -> Explanation:
    """The power iteration's rounds beside the four sweeps: K and Kᵀ through every layer each."""
    layers = sum(1 for s in plan.steps if s.rule.layer and any(s.pull))
    nodes = 2 * iterations * sum(1 for s in plan.steps if any(s.pull))
    done = Operations(iterations * layers, iterations * layers, 0)
    sweeps = dict(told.sweeps)
    rest = {name: sweeps.pop(name) for name in ("backward", "tangent", "second")}
    sweeps[f"{iterations} power iterations"] = _counts(done, nodes)
    return replace(told, sweeps={**sweeps, **rest})


def _counts(done: Operations, nodes: int) -> dict[str, int]:
    return {
        "nodes": nodes,
        "forward": done.forward,
        "transpose": done.transpose,
        "weight_adjoint": done.weight_adjoint,
    }


def _paper(layers: int, penalty: Penalty) -> int:
    """The paper's count with a loss: 4L−1 for the classical penalty, 5L−2 for any other."""
    return 4 * layers - 1 if penalty.own_loss is not None else 5 * layers - 2


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
        if runs and step.rule.layer:
            row["forward"] += k
            row["transpose"] += kt
            row["weight_adjoint"] += kw
    return row


def _slots(step: Step, flags: tuple[bool, ...]) -> tuple[bool, bool]:
    """(activation side, weight side) of a layer's inputs; neither of any other operator."""
    x, weight = step.rule.layer or (len(flags), len(flags))
    return flags[x : x + 1] == (True,), flags[weight : weight + 1] == (True,)


def _backward_counts(step: Step) -> tuple[bool, int, int, int]:
    x, weight = _slots(step, step.pull)
    return any(step.pull), 0, int(x), int(weight)


def _tangent_counts(step: Step) -> tuple[bool, int, int, int]:
    x_moves, weight_moves = _slots(step, step.pull)
    x_bends, weight_bends = _slots(step, step.bend)
    products = int(step.push) * (int(x_moves) + int(weight_moves))
    return step.push or step.curves, products, int(x_bends), int(weight_bends)


def _second_counts(step: Step) -> tuple[bool, int, int, int]:
    x, weight = _slots(step, step.pull2)
    return any(step.pull2), 0, int(x), int(weight)
