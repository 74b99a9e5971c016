"""Which candidate sweeps a Jacobian, and how many seeds at a time: the cheapest that fits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import InputError, PenaltyWarning
from ..penalties import MANY_SEEDS, Jacobian
from ..plan import Plan
from ..run import Replay
from ..sweeps import finite_watch
from .pricing import Profile, Run, free_bytes, profile
from .programs import JacobianProgram
from .segments import Segment
from .strategies import Candidate, Columns, Rows, Waist, candidates


class Prices:
    """Profiles by candidate, made when asked for; none runs twice with the same number of seeds."""

    def __init__(self, plan: Plan, penalty: Jacobian, found: Iterable[Candidate]) -> None:
        self.programs = {
            c.name: JacobianProgram(plan, penalty, candidate=c, chunk=[1]) for c in found
        }
        self.runs: dict[str, dict[int, Run]] = {name: {} for name in self.programs}

    def __call__(self, name: str, chunk: int | None = None) -> Profile:
        return profile(self.programs[name], chunk, self.runs[name])


@dataclass(frozen=True)
class Decision:
    """What was chosen, and why not otherwise. excluded: why other candidates do not apply."""

    chosen: str
    chunk: int
    budget: int
    excluded: dict[str, str]
    shortcuts: dict[str, str]
    prices: Prices

    @property
    def profiles(self) -> dict[str, Profile]:
        """Of every candidate by name, the chosen one at its own chunk."""
        return {
            name: self.prices(name, self.chunk if name == self.chosen else None)
            for name in self.prices.programs
        }


def plan_jacobian(plan: Plan, penalty: Jacobian, debug: bool, replay: Replay) -> JacobianProgram:
    """The program for a Jacobian penalty; its `decision` explains itself."""
    _warn_of_softmax(plan, penalty)
    quiet, excluded = candidates(plan, penalty)
    watched = candidates(plan, penalty, finite_watch(plan))[0] if debug else quiet
    found = {c.name: c for c in watched}
    prices = Prices(plan, penalty, quiet)
    device = plan.graph.values[plan.target].device  # type: ignore[union-attr]
    budget = penalty.memory if penalty.memory is not None else free_bytes(device)
    name = _choose(found, penalty, excluded, prices, budget)
    candidate = found[name]
    if name == "rows" and penalty.whole:
        _check_seeds(candidate.seeds, penalty)
    chunk = _chunk(plan, candidate, penalty, prices, budget)
    shortcuts = _shortcuts(candidate, penalty)
    decision = Decision(name, chunk, budget, excluded, shortcuts, prices)
    return JacobianProgram(
        plan, penalty, debug, replay, candidate=candidate, chunk=[chunk], decision=decision
    )


def _check_seeds(seeds: int, penalty: Jacobian) -> None:
    """Refuse tens of thousands of seeds unless the user asked for them."""
    if seeds > MANY_SEEDS and penalty.entries != "all":
        raise InputError(
            f"the exact Jacobian of this network takes {seeds} seeds, {2 * seeds} sweeps through "
            "the network for every step. Estimate it with projections=n, choose outputs with "
            'entries=[...], or insist with entries="all"'
        )


def _choose(
    found: Mapping[str, Candidate],
    penalty: Jacobian,
    excluded: Mapping[str, str],
    prices: Prices,
    budget: int,
) -> str:
    if penalty.plan != "auto":
        if penalty.plan not in found:
            raise InputError(
                f'plan="{penalty.plan}" does not apply here: {excluded[penalty.plan]}; '
                'use plan="auto"'
            )
        return penalty.plan
    rows = found["rows"].seeds
    able = [n for n, c in found.items() if n == "rows" or c.seeds < rows]
    if len(able) == 1:
        return "rows"
    profiles = {name: prices(name) for name in able}
    fits = [n for n in able if profiles[n].largest_chunk(budget) > 0] or able
    return min(fits, key=lambda n: profiles[n].cost(profiles[n].seeds))


def _chunk(plan: Plan, candidate: Candidate, penalty: Jacobian, prices: Prices, budget: int) -> int:
    if not candidate.divisible:
        return candidate.seeds
    if penalty.chunk is not None:
        return min(penalty.chunk, candidate.seeds)
    if penalty.memory is None and _surely_fits(plan, candidate.seeds, budget):
        return candidate.seeds
    cost = prices(candidate.name)
    chunk = cost.largest_chunk(budget)
    if chunk == 0:
        raise InputError(
            f"memory={budget} bytes is too small for even one seed, which takes "
            f"{cost.peak_bytes(1)}; raise it, or make the batch smaller"
        )
    return -(-candidate.seeds // -(-candidate.seeds // chunk))  # parts of equal size


def _surely_fits(plan: Plan, seeds: int, budget: int) -> bool:
    """Whether many times what any sweep could keep stays within a quarter of the budget."""
    values = [v for s in plan.steps if any(s.pull) for v in (*s.node.inputs, *s.node.outputs)]
    metas = [plan.graph.values[v] for v in set(values)]
    return 3 * seeds * sum(m.bytes for m in metas if m is not None) < budget // 4


def _shortcuts(candidate: Candidate, penalty: Jacobian) -> dict[str, str]:
    """What spares work in the chosen candidate, in words."""
    found: dict[str, str] = {}
    if penalty.of == "softmax" and penalty.projections is None and isinstance(candidate, Rows):
        found["rank of softmax"] = "C − 1 seeds: the rows of softmax's Jacobian sum to zero"
    segments: list[Segment] = []
    if isinstance(candidate, (Rows, Columns)):
        segments = [candidate.segment]
    elif isinstance(candidate, Waist):
        segments = [candidate.before, candidate.behind.segment]
        found["narrow waist"] = f"every path crosses a layer of width {candidate.seeds}"
    else:
        found["closed form"] = "Σ g′(z_i)²‖W_i‖²: no work per seed"
    for segment in segments:
        graph = segment.body.graph
        which, where = ("rows", "last") if segment.by_rows else ("columns", "first")
        if segment.read is not None:
            shape = graph.shape(segment.read.weight)
            found[f"{which} of the {where} layer"] = f"read off its {shape[0]}×{shape[1]} weight"
        if segment.gram is not None:
            shape = graph.shape(segment.gram.weight)
            end = "first" if segment.by_rows else "last"
            found[f"Gram matrix of the {end} layer"] = (
                f"stands for its {shape[0]}×{shape[1]} weight"
            )
    return found


def _warn_of_softmax(plan: Plan, penalty: Jacobian) -> None:
    if penalty.of != "softmax":
        return
    for step in plan.steps:
        name = step.node.op._schema.name.removeprefix("aten::")
        if plan.target in step.node.outputs and name in ("softmax", "_softmax", "_safe_softmax"):
            warnings.warn(
                f'of="softmax" on a network that already ends in softmax ({step.node.source}): '
                'the penalty is on the softmax of probabilities. Use of="output"',
                PenaltyWarning, stacklevel=2,
            )  # fmt: skip
