"""What a plan will do, and why, as text and as a dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .counting import Operations
from .jacobian import Decision, price_sweeps
from .penalties import Penalty, Thinning
from .plan import Plan, Step
from .rules import Structure
from .run import Program

OPERATIONS = ("forward", "transpose", "weight_adjoint")  # K, Kᵀ, K□


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
    plain_flops: int | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    way: str = ""
    thinning: Thinning = field(default_factory=Thinning)

    @property
    def total(self) -> dict[str, int]:
        """K, Kᵀ and K□ of all sweeps; empty where they could not be counted."""
        counted = [row for row in self.sweeps.values() if OPERATIONS[0] in row]
        return {key: sum(row[key] for row in counted) for key in OPERATIONS} if counted else {}

    @property
    def price(self) -> float | None:
        """A step's FLOPs in those of a plain training step, which has no penalty."""
        return self.flops / self.plain_flops if self.flops and self.plain_flops else None

    @property
    def average_price(self) -> float | None:
        """The same of an average step, where not every call or row is penalised."""
        return None if self.price is None else self.thinning.price(self.price)

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
            "plain_flops": self.plain_flops,
            "flops": self.flops,
            "price": self.price,
            "average_price": self.average_price,
            "peak_bytes": self.peak_bytes,
            "plan": self.plan,
            "way": self.way,
        }

    def __str__(self) -> str:
        width = max(10, *(len(name) + 2 for name in self.sweeps))
        lines = [self.penalty, "", f"{'sweep':<{width}}{'nodes':>7}{'K':>7}{'Kᵀ':>7}{'K□':>7}"]
        for name, row in (*self.sweeps.items(), ("total", self.total)):
            counts = "".join(f"{row.get(key, '?'):>7}" for key in OPERATIONS)
            lines.append(f"{name:<{width}}{row.get('nodes', ''):>7}{counts}")
        lines += ["K applies a layer, Kᵀ its transpose, K□ gives the gradient of its weight", ""]
        if self.total:
            products = self.total["forward"] + self.total["transpose"]
            lines.append(
                f"K and Kᵀ: {products} for {_several(self.layers, 'bilinear layer')}, loss "
                f"included; the paper: {self.paper['penalty_and_loss']}, autograd: "
                f"{self.paper['autograd']}, plain step: {self.paper['plain']}"
            )
        if self.flops is not None and self.peak_bytes is not None:
            lines.append(
                f"FLOPs of a step: {_si(self.flops)}; peak memory beyond parameters and input: "
                f"{_mib(self.peak_bytes)}"
            )
        if self.price is not None:
            told = f"{self.price:.2g}"
            steps = "step" if told == "1" else "steps"
            lines.append(f"expected price: {told} plain {steps}, by FLOPs")
        if self.thinning and self.average_price is not None:
            lines.append(
                f"penalised: {self.thinning}, which makes {self.average_price:.3g} on average"
            )
        if self.way:
            lines.append(f"runs by {self.way}")
        lines += self._plan_lines()
        lines += [
            f"piecewise linear in x: {'yes' if self.piecewise_linear else 'no'}",
            f"kept between the sweeps: {_mib(self.kept_bytes)}",
            f"run before the sweeps, under autograd: {_several(self.prelude, 'node')}",
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


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def explain(program: Program) -> Explanation:
    """What a program will do, and why so."""
    told = _four_sweeps(program.plan, program.penalty)
    if program.decision is not None:
        return _with_decision(told, program.plan, program.penalty, program.decision)
    if program.pulls is not None:
        return _with_pulls(told, *program.pulls)
    return _with_iterations(told, program.penalty.iterations)


def _four_sweeps(plan: Plan, penalty: Penalty) -> Explanation:
    """Their operations are counted by running them on tensors without numbers."""
    nodes = {
        "forward": len(plan.steps),
        "backward": sum(any(s.pull) for s in plan.steps),
        "tangent": sum(s.push or s.curves for s in plan.steps),
        "second": sum(any(s.pull2) for s in plan.steps),
    }
    try:
        prices = price_sweeps(plan)
    except (RuntimeError, TypeError):  # a rule that needs numbers
        prices = {}
    sweeps = {
        name: _row(count, prices[name].operations if prices else None)
        for name, count in nodes.items()
    }
    plain = prices["forward"].flops + prices["second"].flops if prices else None
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
        tuple(str(n.op) for n in plan.generic), len(plan.prelude), repr(penalty), plain,
    )  # fmt: skip


def _with_decision(base: Explanation, plan: Plan, penalty: Any, decision: Decision) -> Explanation:
    """What the chosen way to a Jacobian runs, at what price, and what others would have cost."""
    profiles = decision.profiles
    profile = profiles[decision.chosen]
    seeds, layers = profile.seeds, base.layers
    outputs = plan.graph.shape(plan.target)[1:]
    rows = penalty.projections or (penalty.seed_count((1, *outputs)) + (penalty.of == "softmax"))
    sweeps = {
        "forward": _row(base.sweeps["forward"]["nodes"], profile.run.open_operations),
        f"{_several(seeds, 'seed')}, backward and tangent": _row(
            seeds * (base.sweeps["backward"]["nodes"] + base.sweeps["tangent"]["nodes"]),
            profile.all_seeds,
        ),
        "second": _row(base.sweeps["second"]["nodes"], profile.run.close_operations),
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


def _with_iterations(told: Explanation, iterations: int) -> Explanation:
    """The power iteration's rounds beside the four sweeps: each a backward sweep, and tangents
    through all that it passed."""
    if not iterations:
        return told
    sweeps, rounds = dict(told.sweeps), None
    back = sweeps["backward"]
    if told.total:
        pulled = back["transpose"], back["weight_adjoint"]
        rounds = Operations(*(iterations * n for n in (sum(pulled), *pulled)))
    rest = {name: sweeps.pop(name) for name in ("backward", "tangent", "second")}
    name = _several(iterations, "power iteration")
    sweeps[name] = _row(2 * iterations * back["nodes"], rounds)
    return replace(told, sweeps={**sweeps, **rest})


def _with_pulls(told: Explanation, directions: int, rounds: int) -> Explanation:
    """Backward and tangent sweep for every direction, and the backward sweeps before, `rounds` for
    each, that find the directions."""
    sweeps = dict(told.sweeps)
    rest = {name: sweeps.pop(name) for name in ("backward", "tangent", "second")}
    for name in ("backward", "tangent"):
        rest[name] = {key: directions * n for key, n in rest[name].items()}
    if rounds:
        name = f"{_several(directions, 'direction')}, {_several(rounds, 'term')}"
        sweeps[name] = {key: rounds * n for key, n in rest["backward"].items()}
    return replace(told, sweeps={**sweeps, **rest})


def _row(nodes: int, done: Operations | None) -> dict[str, int]:
    counts = {} if done is None else {key: getattr(done, key) for key in OPERATIONS}
    return {"nodes": nodes, **counts}


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
