"""Which candidate sweeps a Jacobian, and how many seeds at a time: the cheapest that fits.

What a program costs, in FLOPs, operations and peak memory, is known before it runs, from shapes
alone: the phases run once on fake tensors, which have shapes but no numbers, so that what is priced
is what will be executed. FLOPs are counted by PyTorch's own table, memory by following every
storage from its creation to the end of its last user. Work and memory per seed are affine in the
number of seeds swept at once, so two sizes give all others.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import sweeps
from .._torch import FakeTensorMode, TorchDispatchMode, pytree
from ..counting import Operations, flop_registry, recording
from ..errors import InputError, PenaltyWarning
from ..plan import Plan
from ..rules import add
from ..run import NEAR, Arrived, Replay
from .programs import JacobianProgram
from .strategies import Candidate, Columns, Rows, Segment, Waist, candidates

if TYPE_CHECKING:
    from ..penalties import Jacobian

MANY_SEEDS = 8192  # beyond, a user has to insist

# On a CPU: bytes of the largest value under the seeds of one chunk. Beyond, kernels wait for memory
# and the allocator for pages, which costs more than calls for fewer seeds at a time.
NEARBY = 3_900_000

# ----------------------------------------------------------------------------------------- prices


# What a byte written counts for, in FLOPs of whatever kernel: a few on a CPU, 80 to 200 on a GPU.
# One number for all devices, because it ranks plans and predicts no time.
WRITTEN_BYTE = 20


class Meter(TorchDispatchMode):
    """Counts FLOPs and live bytes of everything executed inside.

    joins: foretell flattened sweeps, which compute a matrix product and the sum that it soon goes
    into by one `addmm` (straight_line.py): the product is not held, and a sum of two products takes
    the place of the first. Whether a product goes into a sum is known a few operators later; so the
    live bytes of the last few operators are kept apart (`_recent`), and the product is subtracted
    there before they enter the maximum.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, joins: bool = False) -> None:
        """known: tensors that exist already and are not counted, nor are views of them."""
        super().__init__()
        self.joins = joins
        self.flops = 0
        self.written = 0
        self.live = 0
        self._highest = 0
        self._recent: deque[int] = deque([0])  # most live bytes during the last operators
        self._products: dict[int, int] = {}  # storage of a product → operators ago
        self._sums: set[int] = set()  # storages of products, and of sums that started with one
        self._users: dict[int, int] = {}
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._recent.append(self.live)
        if len(self._recent) > NEAR:
            self._highest = max(self._highest, self._recent.popleft())
        self._products = {k: ago + 1 for k, ago in self._products.items() if ago < NEAR - 1}
        out = func(*args, **kwargs)
        formula = flop_registry().get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self.hold(t)
        if self.joins and func is torch.ops.aten.mm.default:
            self._products[out.untyped_storage()._cdata] = 0
            self._sums.add(out.untyped_storage()._cdata)
        elif func is torch.ops.aten.add.Tensor and not kwargs:
            self._join(*args, total=out)
        return out

    @property
    def peak(self) -> int:
        """The most bytes alive at once since `restart`."""
        return max(self._highest, *self._recent)

    def restart(self) -> None:
        self._highest, self._recent = 0, deque([self.live])
        self._products.clear()

    def _join(self, left: Any, right: Any, *, total: Tensor) -> None:
        """left + right, one of which may be a product that need not have existed."""
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return
        if left.shape != right.shape or left.dtype != right.dtype:
            return
        for base, t in ((left, right), (right, left)):
            ago = self._products.pop(t.untyped_storage()._cdata, None)
            if ago is not None:
                size = t.untyped_storage().nbytes()
                for i in range(len(self._recent) - 1 - ago, len(self._recent)):
                    self._recent[i] -= size
                if base.untyped_storage()._cdata in self._sums:
                    self._recent[-1] -= size
                    self._sums.add(total.untyped_storage()._cdata)
                return

    def hold(self, t: Tensor) -> None:
        """Follow the storage of `t` until its last tensor is gone."""
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if key not in self._users:
            self._users[key] = 0
            self.written += size
            self.live += size
            self._recent[-1] = max(self._recent[-1], self.live)
        self._users[key] += 1
        weakref.finalize(t, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._sums.discard(key)
            self.live -= size


@dataclass(frozen=True)
class Affine:
    """A cost through (a, at_a) and (b, at_b), affine in the number of seeds."""

    a: int
    at_a: float
    b: int
    at_b: float

    @property
    def slope(self) -> float:
        return (self.at_b - self.at_a) / (self.b - self.a) if self.b > self.a else 0.0

    @property
    def fixed(self) -> float:
        return self.at_b - self.slope * self.b

    def __call__(self, c: int) -> float:
        return self.fixed + self.slope * c


@dataclass(frozen=True)
class Profile:
    """The cost of a Jacobian program as a function of its chunk: phases that do not depend on it
    as they were in one `run`, and of the others what each seed adds."""

    seeds: int
    divisible: bool
    run: Run
    part_flops: Affine
    part_operations: Operations
    part_peak: Affine
    part_written: Affine

    def parts(self, chunk: int) -> int:
        return -(-self.seeds // chunk)

    def flops(self, chunk: int) -> int:
        per_seed = self.part_flops.slope * self.seeds
        fixed = self.part_flops.fixed * self.parts(chunk)
        return round(self.run.open_flops + self.run.close_flops + per_seed + fixed)

    def cost(self, chunk: int) -> float:
        """FLOPs, and bytes written at the exchange rate of a device that is short of bandwidth."""
        written = self.run.fixed_written + self.part_written.slope * self.seeds
        written += self.part_written.fixed * self.parts(chunk)
        return self.flops(chunk) + WRITTEN_BYTE * written

    def peak_bytes(self, chunk: int) -> int:
        part = self.run.kept + self.part_peak(min(chunk, self.seeds))
        return round(max(self.run.open_peak, part, self.run.close_peak))

    @property
    def all_seeds(self) -> Operations:
        """The operations of every seed together."""
        each, n = self.part_operations, self.seeds
        return Operations(n * each.forward, n * each.transpose, n * each.weight_adjoint)

    def largest_chunk(self, budget: int) -> int:
        """The most seeds at once that stay within `budget` bytes; 0 where not even one does."""
        if self.peak_bytes(self.seeds) <= budget:
            return self.seeds
        if not self.divisible:
            return 0
        room = budget - self.run.kept - self.part_peak.fixed
        slope = self.part_peak.slope
        if max(self.run.open_peak, self.run.close_peak) > budget or room < slope:
            return 0
        return max(1, min(self.seeds, int(room // max(slope, 1))))


def profile(program: JacobianProgram, chunk: int | None, runs: dict[int, Run]) -> Profile:
    """Run every phase on fake tensors, with few seeds and with `chunk` (or as many as show how
    cost grows: peak memory is convex in the number of seeds, so large numbers tell).

    runs: those there are, by number of seeds; it gains the new ones.
    """
    seeds = program.candidate.seeds
    most = min(seeds, chunk or 16) if program.candidate.divisible else seeds
    few = max(1, most // 2) if program.candidate.divisible else seeds
    for size in {few, most} - set(runs):
        runs[size] = _run(program, size)
    small, large = runs[few], runs[most]

    def cost(name: str) -> Affine:
        return Affine(few, getattr(small, name), most, getattr(large, name))

    each = large.part_operations
    per_seed = Operations(each.forward // most, each.transpose // most, each.weight_adjoint // most)
    flops, written = cost("part_flops"), cost("part_written")
    if few == most:  # one size is all there is: everything grows with it
        flops, written = Affine(0, 0, most, flops.at_b), Affine(0, 0, most, written.at_b)
    divisible = program.candidate.divisible
    return Profile(seeds, divisible, large, flops, per_seed, cost("part_peak"), written)


@dataclass
class Run:
    """What each phase took, with one number of seeds."""

    open_flops: int = 0
    close_flops: int = 0
    part_flops: int = 0
    open_operations: Any = None
    close_operations: Any = None
    part_operations: Any = None
    open_peak: int = 0
    close_peak: int = 0
    part_peak: int = 0
    kept: int = 0
    fixed_written: int = 0
    part_written: int = 0


def _run(program: JacobianProgram, size: int) -> Run:
    """Every phase once on fake tensors, with so many seeds at a time."""
    cost = Run()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        leaves = _fake_leaves(program.plan)
        with Meter(leaves.values(), joins=True) as meter:

            def phase(fn: Callable[[], Any]) -> tuple[Any, int, Operations, int]:
                before = meter.flops
                meter.restart()
                with recording() as operations:
                    result = fn()
                return result, meter.flops - before, operations, meter.peak

            opened, cost.open_flops, cost.open_operations, cost.open_peak = phase(
                lambda: program._open(leaves)
            )
            outputs, mutated, swept = opened
            del opened, mutated
            bank = program.candidate.bank(swept.state)[:size]
            cost.kept = meter.live
            out = swept.values[program.plan.target]
            weight = program._weight(leaves, out)
            cost.fixed_written = meter.written
            result, cost.part_flops, cost.part_operations, peak = phase(
                lambda: program._part(swept, bank, weight, {})
            )
            values, sources = result
            del result
            cost.part_written = meter.written - cost.fixed_written
            if size < program.candidate.seeds:  # chunks to come find the sources of those before
                again, _, _, peak = phase(lambda: program._part(swept, bank, weight, sources))
                values, sources = again
                del again
            cost.part_peak = peak - cost.kept
            grads = {program.plan.target: torch.empty_like(out)}
            held, cost.close_flops, cost.close_operations, cost.close_peak = phase(
                lambda: next(
                    program._close(swept, sources, values.sum(), grads, False, program.plan.whole)
                )
            )
            cost.fixed_written = meter.written - cost.part_written
            del held, outputs
    return cost


@dataclass(frozen=True)
class Price:
    """FLOPs of one step, and the most bytes it holds at once."""

    flops: int
    peak_bytes: int


def price(program: Any, extra: Sequence[Any], twice: bool = False) -> Price:
    """A whole step, forward to gradients, run on fake tensors. twice: a first time without being
    looked at, for programs that flatten their sweeps then; what counts are the flat ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        leaves = _fake_leaves(program.plan)
        more = pytree.tree_map_only(Tensor, mode.from_tensor, tuple(extra))
        if twice:
            _step(program, leaves, more)
        with Meter(leaves.values(), joins=not twice) as meter, recording():
            _step(program, leaves, more)
    return Price(meter.flops, meter.peak)


def _step(program: Any, leaves: dict[int, Tensor], extra: tuple) -> None:
    outputs, values, _, state = program.first(leaves, extra)
    seeds = {
        v: torch.empty_like(t)
        for v, t in zip(program.plan.outputs, outputs, strict=True)
        if t.is_floating_point()
    }
    program.last(Arrived(state, extra, seeds, torch.empty_like(values)))


class SweepPrice(NamedTuple):
    """FLOPs and bilinear operations of one sweep."""

    flops: int
    operations: Operations


def price_sweeps(plan: Plan) -> dict[str, SweepPrice]:
    """Each of the four sweeps by itself, run on fake tensors with a gradient at every output."""
    prices: dict[str, SweepPrice] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        leaves = _fake_leaves(plan)
        with Meter(leaves.values()) as meter:

            def run(name: str, sweep: Callable[[], Any]) -> Any:
                before = meter.flops
                with recording() as operations:
                    result = sweep()
                prices[name] = SweepPrice(meter.flops - before, operations)
                return result

            state = run("forward", lambda: sweeps.forward(plan, leaves))
            ends = {v: torch.empty_like(state.values[v]) for v in (plan.target, *plan.outputs)}
            seed = ends[plan.target]
            xi = run("backward", lambda: sweeps.backward(plan, state, seed))
            pairs = zip(plan.penalised, xi, strict=True)
            q0 = {x: torch.empty_like(leaves[x] if u is None else u) for x, u in pairs}
            h, gamma = run("tangent", lambda: sweeps.tangent(plan, state, q0))
            for v in plan.outputs if h is None else (plan.target, *plan.outputs):
                if v in plan.trained and ends[v].is_floating_point():
                    gamma[v] = add(gamma.get(v), ends[v])
            run("second", lambda: sweeps.second(plan, state, gamma))
    return prices


def _fake_leaves(plan: Plan) -> dict[int, Tensor]:
    """A fake tensor per value that the sweeps start from; they exist before, and cost nothing."""
    leaves = {}
    for v in (*plan.penalised, *plan.leaves):
        meta = plan.graph.values[v]
        assert meta is not None
        leaves[v] = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
    return leaves


def free_bytes(device: torch.device) -> int:
    """Memory that the sweeps may still take: most of what the device has left."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.9 * (free + idle))
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(0.5 * int(line.split()[1]) * 1024)
    except OSError:
        pass
    return 4 * 2**30


# ----------------------------------------------------------------------------------------- choice


class Prices:
    """Profiles by candidate, made when asked for; none runs twice with the same number of seeds."""

    def __init__(self, plan: Plan, penalty: Jacobian, candidates: Iterable[Candidate]) -> None:
        self.programs = {
            c.name: JacobianProgram(plan, penalty, candidate=c, chunk=[1]) for c in candidates
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
        """The price of every candidate by name, of the chosen one at its own chunk."""
        return {
            name: self.prices(name, self.chunk if name == self.chosen else None)
            for name in self.prices.programs
        }


def plan_jacobian(plan: Plan, penalty: Jacobian, debug: bool, replay: Replay) -> JacobianProgram:
    """The program for a Jacobian penalty; its `decision` explains itself."""
    _warn_of_softmax(plan, penalty)
    quiet, excluded = candidates(plan, penalty)
    watched = candidates(plan, penalty, sweeps.finite_watch(plan))[0] if debug else quiet
    by_name = {c.name: c for c in watched}
    prices = Prices(plan, penalty, quiet)
    device = plan.graph.values[plan.target].device  # type: ignore[union-attr]
    budget = penalty.memory if penalty.memory is not None else free_bytes(device)
    name = _choose(by_name, penalty, excluded, prices, budget)
    candidate = by_name[name]
    if name == "rows" and penalty.whole:
        _check_seeds(candidate.seeds, penalty)
    chunk = _chunk(plan, candidate, penalty, prices, budget, bool(replay.compiler))
    shortcuts = _shortcuts(candidate, penalty)
    decision = Decision(name, chunk, budget, excluded, shortcuts, prices)
    return JacobianProgram(
        plan, penalty, debug, replay=replay, candidate=candidate, chunk=[chunk], decision=decision
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
    by_name: Mapping[str, Candidate],
    penalty: Jacobian,
    excluded: Mapping[str, str],
    prices: Prices,
    budget: int,
) -> str:
    if penalty.plan != "auto":
        if penalty.plan not in by_name:
            raise InputError(
                f'plan="{penalty.plan}" does not apply here: {excluded[penalty.plan]}; '
                'use plan="auto"'
            )
        return penalty.plan
    rows = by_name["rows"].seeds
    able = [n for n, c in by_name.items() if n == "rows" or c.seeds < rows]
    if len(able) == 1:
        return "rows"
    profiles = {name: prices(name) for name in able}
    fits = [n for n in able if profiles[n].largest_chunk(budget) > 0] or able
    return min(fits, key=lambda n: profiles[n].cost(profiles[n].seeds))


def _chunk(
    plan: Plan, candidate: Candidate, penalty: Jacobian, prices: Prices, budget: int, fused: bool
) -> int:
    """fused: a compiler makes one graph of all seeds, which keeps little of them."""
    if not candidate.divisible:
        return candidate.seeds
    if penalty.chunk is not None:
        return min(penalty.chunk, candidate.seeds)
    most = candidate.seeds if fused else _nearby(plan, candidate.seeds)
    if penalty.memory is None and _surely_fits(plan, most, budget):
        return _even(candidate.seeds, most)
    cost = prices(candidate.name)
    chunk = cost.largest_chunk(budget)
    if chunk == 0:
        raise InputError(
            f"memory={budget} bytes is too small for even one seed, which takes "
            f"{cost.peak_bytes(1)}; raise it, or make the batch smaller"
        )
    return _even(candidate.seeds, min(chunk, most))


def _even(seeds: int, most: int) -> int:
    """Parts of equal size, none above `most`."""
    return -(-seeds // -(-seeds // most))


def _nearby(plan: Plan, seeds: int) -> int:
    """How many seeds at a time a CPU sweeps best."""
    swept = [plan.graph.values[v] for s in plan.steps if any(s.pull) for v in s.node.outputs]
    metas = [m for m in swept if m is not None]
    if not metas or metas[0].device.type != "cpu":
        return seeds
    return max(1, min(seeds, NEARBY // max(1, *(m.bytes for m in metas))))


def _surely_fits(plan: Plan, seeds: int, budget: int) -> bool:
    """Whether many times what any sweep could keep stays within a quarter of the budget."""
    values = [v for s in plan.steps if any(s.pull) for v in (*s.node.inputs, *s.node.outputs)]
    metas = [plan.graph.values[v] for v in set(values)]
    return 3 * seeds * sum(m.bytes for m in metas if m is not None) < budget // 4


def _shortcuts(candidate: Candidate, penalty: Jacobian) -> dict[str, str]:
    """What spares work in the chosen candidate, in words."""
    told: dict[str, str] = {}
    if penalty.of == "softmax" and penalty.projections is None and isinstance(candidate, Rows):
        told["rank of softmax"] = "C − 1 seeds: the rows of softmax's Jacobian sum to zero"
    segments: list[Segment] = []
    if isinstance(candidate, (Rows, Columns)):
        segments = [candidate.segment]
    elif isinstance(candidate, Waist):
        segments = [candidate.before, candidate.behind.segment]
        told["narrow waist"] = f"every path crosses a layer of width {candidate.seeds}"
    else:
        told["closed form"] = "Σ g′(z_i)²‖W_i‖²: no work per seed"
    for segment in segments:
        graph = segment.body.graph
        which, where = ("rows", "last") if segment.by_rows else ("columns", "first")
        if segment.read is not None:
            shape = graph.shape(segment.read.weight)
            told[f"{which} of the {where} layer"] = f"read off its {shape[0]}×{shape[1]} weight"
        if segment.gram is not None:
            shape = graph.shape(segment.gram.weight)
            end = "first" if segment.by_rows else "last"
            told[f"Gram matrix of the {end} layer"] = f"stands for its {shape[0]}×{shape[1]} weight"
    return told


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
