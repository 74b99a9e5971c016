"""Which candidate sweeps a Jacobian, and how many seeds at a time: the cheapest that fits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from .candidates import Candidate, Columns, Rows, Waist, candidates
from .errors import InputError, PenaltyWarning
from .flatten import Replay
from .jacobian import MANY_SEEDS, Jacobian
from .jacobian_program import JacobianProgram
from .plan import Plan
from .pricing import Profile, free_bytes, profile
from .segments import Segment
from .sweeps import finite_watch


@dataclass
class Decision:
    """What was chosen, at what price, and why not otherwise.

    profiles: of the candidates that were priced, by name; excluded: why others do not apply.
    """

    chosen: str
    chunk: int
    budget: int
    profiles: dict[str, Profile]
    excluded: dict[str, str]
    shortcuts: dict[str, str] = field(default_factory=dict)


def plan_jacobian(
    plan: Plan, penalty: Jacobian, debug: bool, replay: Replay, price: bool = False
) -> tuple[JacobianProgram, Decision]:
    """The program for a Jacobian penalty. price: profile every candidate, for an explanation."""
    _warn_of_softmax(plan, penalty)
    watch = finite_watch(plan) if debug else None
    found, excluded = candidates(plan, penalty, watch)
    programs = {
        c.name: JacobianProgram(plan, penalty, debug, replay, candidate=c, chunk=[c.seeds])
        for c in found
    }
    device = plan.graph.values[plan.target].device  # type: ignore[union-attr]
    budget = penalty.memory if penalty.memory is not None else free_bytes(device)
    profiles: dict[str, Profile] = {}
    if price:
        profiles = {name: _profile(p) for name, p in programs.items()}
    name = _choose(programs, penalty, excluded, profiles, budget)
    program = programs[name]
    seeds = program.candidate.seeds
    if name == "rows" and penalty.whole:
        _check_seeds(seeds, penalty)
    program.chunk[0] = _chunk(program, penalty, profiles, budget)
    if price:  # the chosen one at its own chunk
        profiles[name] = _profile(program, program.chunk[0])
    shortcuts = _shortcuts(program.candidate, penalty)
    decision = Decision(name, program.chunk[0], budget, profiles, excluded, shortcuts)
    return program, decision


def _check_seeds(seeds: int, penalty: Jacobian) -> None:
    """Refuse tens of thousands of seeds unless the user asked for them."""
    if seeds > MANY_SEEDS and penalty.entries != "all":
        raise InputError(
            f"the exact Jacobian of this network takes {seeds} seeds, {2 * seeds} sweeps through "
            "the network for every step. Estimate it with projections=n, choose outputs with "
            'entries=[...], or insist with entries="all"'
        )


def _profile(program: JacobianProgram, chunk: int | None = None) -> Profile:
    quiet = JacobianProgram(
        program.plan, program.penalty, False, Replay(False, None),
        candidate=program.candidate, chunk=[1],
    )  # fmt: skip
    return profile(quiet, chunk)


def _choose(
    programs: dict[str, JacobianProgram],
    penalty: Jacobian,
    excluded: dict[str, str],
    profiles: dict[str, Profile],
    budget: int,
) -> str:
    if penalty.plan != "auto":
        if penalty.plan not in programs:
            raise InputError(
                f'plan="{penalty.plan}" does not apply here: {excluded[penalty.plan]}; '
                'use plan="auto"'
            )
        return penalty.plan
    rows = programs["rows"].candidate.seeds
    able = [n for n, p in programs.items() if n == "rows" or p.candidate.seeds < rows]
    if len(able) == 1:
        return "rows"
    for name in able:
        profiles.setdefault(name, _profile(programs[name]))
    fits = [n for n in able if profiles[n].largest_chunk(budget) > 0] or able
    return min(fits, key=lambda n: profiles[n].cost(profiles[n].seeds))


def _chunk(
    program: JacobianProgram, penalty: Jacobian, profiles: dict[str, Profile], budget: int
) -> int:
    candidate = program.candidate
    if not candidate.divisible:
        return candidate.seeds
    if penalty.chunk is not None:
        return min(penalty.chunk, candidate.seeds)
    if penalty.memory is None and _surely_fits(program.plan, candidate.seeds, budget):
        return candidate.seeds
    cost = profiles.setdefault(candidate.name, _profile(program))
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
