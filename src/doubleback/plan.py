"""What each sweep has to do at each node, decided once per graph from structure alone.

Flags per value (theory §2, any directed acyclic graph):

    dependent   its number depends on the penalised input, or on random numbers drawn after some
                of the network's: it is computed in the forward sweep, in the network's order
    active      its derivative along the penalised input can differ from zero
    trained     a wanted gradient (parameter, x) flows through it: it carries γ
    reaching    the penalised output depends on it: it carries ξ
    moving      its tangent q is read by someone

Values that are not dependent are computed before the sweeps, under ordinary autograd; those that
the sweeps read are the *effective parameters*.

Renewals are cotangents that are computed again where they are read, instead of held from sweep to
sweep. The tangent sweep reads ξ at every node that bends. Where u = K(θ, w) goes into y = F(u)
alone and F bends too, ξ_u = (∂F)*ξ_y: with F light (one pass over memory, as for activations and
norms) only ξ_y is held, and the tangent sweep, which comes to K before F, pulls it through F once
more. Light nodes that do not bend themselves (permutations, casts) may stand between. Where F's
rule gives tangent, source and (∂F)*ξ_y at once, K's source waits until F's turn has come.

Operators that draw random numbers say so by a tag: PyTorch's own are tagged
`nondeterministic_seeded`; one from `torch.library` is if its author thought of it. So one without
is run once, on numbers made up for it, while the generators are watched.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import disable_current_modes
from .errors import RuleError, let_through
from .graph import Graph, Meta, Node, Ref, draws, map_refs, shares
from .rules import GENERIC, Rule, Structure, convolution_of, find_rule


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One swept node: its rule and what is asked of it.

    pull: inputs that get ξ in the backward sweep (empty: the node is skipped there);
    push: whether its tangent is needed; bend: inputs that get a curvature source;
    pull2: inputs that get γ in the second sweep.
    """

    node: Node
    rule: Rule
    pull: tuple[bool, ...]
    push: bool
    bend: tuple[bool, ...]
    pull2: tuple[bool, ...]
    reads: tuple[bool, ...]
    reads_output: bool
    differentiated: bool

    @property
    def curves(self) -> bool:
        """Whether it reads ξ in the tangent sweep."""
        return any(self.bend)


class Stretch(NamedTuple):
    """A part of the second sweep: the steps, counted from the last of the network, after which the
    gradients of `values` are complete and nobody reads these values any more."""

    steps: range
    values: tuple[int, ...]


STRETCH = 2**20  # bytes of gradients that are worth handing over on their own
STRETCHES = 16  # at most


@dataclass(frozen=True, eq=False)
class Plan:
    """The sweeps over one graph for one choice of penalised input, output and gradients."""

    graph: Graph
    penalised: tuple[int, ...]
    target: int
    prelude: tuple[Node, ...]
    steps: tuple[Step, ...]
    effective: tuple[int, ...]
    constants: tuple[int, ...]
    wanted: frozenset[int]
    outputs: tuple[int, ...]
    mutations: Mapping[int, int]
    trained: frozenset[int]
    reaching: frozenset[int]
    moving: frozenset[int]
    needs_head_tangent: bool
    kept: frozenset[int]
    drop_forward: tuple[tuple[int, ...], ...]
    drop_tangent: tuple[tuple[int, ...], ...]
    drop_second: tuple[tuple[int, ...], ...]
    renewals: Mapping[int, Renewal]
    waits: Mapping[int, int]
    channels_last: frozenset[int] = frozenset()
    taps_first: frozenset[int] = frozenset()

    @property
    def leaves(self) -> tuple[int, ...]:
        """Values the sweeps start from, besides the penalised ones."""
        return self.effective + self.constants

    @cached_property
    def beside(self) -> frozenset[int]:
        """Values that callers hold, that no derivative reads, and that may lie in the memory of one
        that is read, or of what a rule saves: the network's input before it is flattened."""
        root = list(range(len(self.graph.values)))
        for node in (*self.prelude, *(step.node for step in self.steps)):
            if node.inputs and shares(node.op):
                for v in node.outputs:
                    root[v] = root[node.inputs[0]]
        many = [s.node for s in self.steps if s.node.many and s.differentiated]  # indices, masks
        read = {root[v] for v in self.kept}.union(*(node.outputs for node in many))
        held = (*self.penalised, *self.effective, *self.constants, *self.outputs)
        return frozenset(v for v in held if root[v] in read and v not in self.kept)

    def at(self, graph: Graph) -> Plan:
        """The same plan over the same program at other sizes."""
        if graph is self.graph:
            return self
        nodes = graph.nodes
        steps = tuple([replace(s, node=nodes[s.node.index]) for s in self.steps])
        by_index = {s.node.index: s for s in steps}
        renewals = {
            i: replace(r, reader=by_index[r.reader.node.index]) for i, r in self.renewals.items()
        }
        prelude = tuple([nodes[n.index] for n in self.prelude])
        return replace(self, graph=graph, steps=steps, renewals=renewals, prelude=prelude)

    @cached_property
    def whole(self) -> tuple[Stretch]:
        """The second sweep in one stretch."""
        return (Stretch(range(len(self.steps)), (*self.penalised, *self.effective)),)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The second sweep in stretches, each of which ends where enough gradients of effective
        parameters have become complete. Those of the penalised inputs are in the last."""
        first: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for v in step.node.inputs:
                first.setdefault(v, i)
        size = {v: meta.bytes for v in self.effective if (meta := self.graph.values[v]) is not None}
        share = max(STRETCH, sum(size.values()) / STRETCHES)
        complete: dict[int, list[int]] = {}  # after how many steps
        for v in sorted(size, key=lambda v: -first.get(v, 0)):
            complete.setdefault(len(self.steps) - first.get(v, 0), []).append(v)
        stretches: list[Stretch] = []
        start, ready = 0, []
        for end, values in complete.items():
            ready += values
            if sum(size[v] for v in ready) >= share and end < len(self.steps):
                stretches.append(Stretch(range(start, end), tuple(ready)))
                start, ready = end, []
        done = {v for stretch in stretches for v in stretch.values}
        rest = tuple(v for v in (*self.penalised, *self.effective) if v not in done)
        return (*stretches, Stretch(range(start, len(self.steps)), rest))

    def holds_xi(self, step: Step) -> bool:
        """Whether ξ at the node's output is held from the backward to the tangent sweep."""
        return step.curves and step.node.index not in self.renewals

    @property
    def generic(self) -> tuple[Node, ...]:
        """Nodes that run on the generic rule."""
        return tuple(
            s.node
            for s in self.steps
            if s.differentiated and s.rule.structure is Structure.GENERAL and not s.rule.own
        )

    @property
    def piecewise_linear(self) -> bool:
        """Whether x ↦ target is piecewise linear: no curvature in the activations."""
        return not any(
            s.rule.structure.curved and (s.rule.structure is not Structure.BILINEAR or _mixed(s))
            for s in self.steps
            if any(s.pull)
        )


def _mixed(step: Step) -> bool:
    return sum(step.pull) > 1


def make_plan(
    graph: Graph,
    penalised: Sequence[int],
    target: int,
    wanted: Iterable[int],
    *,
    varying_seed: bool,
    recompute: bool = True,
    like: Plan | None = None,
) -> Plan:
    """Decide the four sweeps.

    wanted: values whose gradient is asked for (trainable parameters, x where it requires grad);
    varying_seed: whether v depends on the output, so that its tangent enters the head;
    recompute: whether cotangents are renewed where that is light;
    like: a plan over the same graph whose forward sweep this one's sweeps follow, so that each node
    takes the form of its rule that was chosen there: another would miss what it has saved.
    """
    wanted = frozenset(wanted)
    dependent = _dependent(graph, penalised)
    needed = _needed(graph)
    inner = [n for n in graph.nodes if needed[n.index] and n.outputs[0] in dependent]
    prelude = tuple(n for n in graph.nodes if needed[n.index] and n.outputs[0] not in dependent)
    rules = {n.index: _rule(graph, n) for n in graph.nodes if needed[n.index]}
    active = _flow(graph, penalised, rules)
    trained = _flow(graph, wanted, rules)
    reaching = _reaching(inner, rules, active, target)
    moving = _moving(inner, rules, active, trained, reaching, target if varying_seed else None)
    produced = {v for n in inner for v in n.outputs}
    outputs = tuple(dict.fromkeys(v for v in graph.outputs if isinstance(v, int)))
    swept_out = tuple(v for v in outputs if v in produced or v in penalised)
    mutations = {name: v for name, v in graph.mutations.items() if v in produced}
    pinned = {*swept_out, *mutations.values(), target}

    def step_by(node: Node, rule: Rule) -> Step:
        return _step(node, rule, active, trained, reaching, moving)

    steps = [step_by(n, rules[n.index]) for n in inner]
    for step in steps:
        _check_generic(graph, step)
    if like is None:
        steps = tuple(_formed(steps, step_by, lambda v: v in pinned or v not in produced))
    else:
        chosen = {s.node.index: s.rule for s in like.steps}
        steps = tuple(step_by(s.node, chosen.get(s.node.index, s.rule)) for s in steps)
    read = dict.fromkeys([*(v for n in inner for v in n.inputs), target])
    outer = [v for v in read if v not in produced and v not in penalised]
    effective = tuple(v for v in outer if v in trained)
    constants = tuple(v for v in outer if v not in trained)
    later = [_needed_later(graph, s) for s in steps]
    kept = {v for values in later for v in values}
    renewals = find_renewals(graph, steps, target) if recompute else {}
    return Plan(
        graph, tuple(penalised), target, prelude, steps, effective, constants, wanted,
        swept_out, mutations, frozenset(trained), frozenset(reaching), frozenset(moving),
        varying_seed and target in active, frozenset(kept),
        _drops([s.node.inputs + s.node.outputs for s in steps], keep=kept | pinned),
        _drops([s.node.inputs + s.node.outputs for s in steps], keep={target}),
        _drops(later[::-1], keep=set()),
        renewals, find_waits(steps, renewals), *_layouts(graph, steps, penalised, outer),
    )  # fmt: skip


def _rule(graph: Graph, node: Node) -> Rule:
    """The node's rule. The generic one is for complex numbers, whose adjoints conjugate and whose
    |z| bends, unless the operator is linear, and for a number divided by a tensor, which bends in
    its only input where a tensor divided by a number does not."""
    rule = find_rule(node.op)
    if node.op is torch.ops.aten.div.Tensor and not isinstance(node.args[0], Ref):
        return GENERIC
    metas = [graph.values[v] for v in (*node.inputs, *node.outputs)]
    is_complex = any(m is not None and m.dtype.is_complex for m in metas)
    plain = rule.structure in (Structure.LINEAR, Structure.CONSTANT)
    return GENERIC if is_complex and not plain else rule


def _stops(rule: Rule) -> bool:
    return rule.structure is Structure.CONSTANT


def _dependent(graph: Graph, sources: Iterable[int]) -> set[int]:
    """Values whose number depends on `sources`, or on numbers drawn after the first that such a
    value drew: drawn before the sweeps, they would not be those that the network draws."""
    dependent, drawn = set(sources), False
    for node in graph.nodes:
        late = drawn and draws(node.op) and (find_rule(node.op).own or not node.inputs)
        if late or any(v in dependent for v in node.inputs):
            dependent.update(node.outputs)
            drawn = drawn or draws(node.op)
    return dependent


def _flow(graph: Graph, sources: Iterable[int], rules: Mapping[int, Rule]) -> set[int]:
    """Values that a derivative reaches from `sources`."""
    reached = set(sources)
    for node in graph.nodes:
        rule = rules.get(node.index)
        if rule is None or _stops(rule) or not any(v in reached for v in node.inputs):
            continue
        for v in node.outputs:
            meta = graph.values[v]
            if meta is not None and meta.differentiable:
                reached.add(v)
    return reached


def _needed(graph: Graph) -> list[bool]:
    """Nodes whose result reaches an output or a buffer."""
    wanted = {v for v in graph.outputs if isinstance(v, int)} | set(graph.mutations.values())
    needed = [False] * len(graph.nodes)
    for node in reversed(graph.nodes):
        if any(v in wanted for v in node.outputs):
            needed[node.index] = True
            wanted.update(node.inputs)
    return needed


def _reaching(nodes, rules, active, target) -> set[int]:
    reaching = {target} & active
    for node in reversed(nodes):
        if any(v in reaching for v in node.outputs) and not _stops(rules[node.index]):
            reaching.update(v for v in node.inputs if v in active)
    return reaching


def _moving(nodes, rules, active, trained, reaching, head) -> set[int]:
    """Values whose tangent is read: by a curvature source, by a K□, or by the head."""
    moving = {head} & active if head is not None else set()
    for node in reversed(nodes):
        rule = rules[node.index]
        if _stops(rule):
            continue
        onward = any(v in moving for v in node.outputs)
        reaches = any(v in reaching for v in node.outputs)
        for j, value in enumerate(node.inputs):
            bends = reaches and any(
                v in trained and rule.curves(i, j) for i, v in enumerate(node.inputs)
            )
            if value in active and (onward or bends):
                moving.add(value)
    return moving


def _step(node, rule, active, trained, reaching, moving) -> Step:
    stops = _stops(rule)
    reaches = any(v in reaching for v in node.outputs) and not stops
    acts = [v in active for v in node.inputs]
    trains = [v in trained and not stops for v in node.inputs]
    pull = tuple(reaches and a for a in acts)
    bend = tuple(
        reaches and t and any(a and rule.curves(i, j) for j, a in enumerate(acts))
        for i, t in enumerate(trains)
    )
    push = any(v in moving for v in node.outputs) and not stops
    live = [a or t for a, t in zip(acts, trains, strict=True)]
    differentiated = not stops and any(v in active or v in trained for v in node.outputs)
    reads = _reads(rule, live) if differentiated else (False,) * len(live)
    return Step(
        node, rule, pull, push, bend, tuple(trains), reads,
        differentiated and "output" in rule.reads, differentiated,
    )  # fmt: skip


def _formed(
    steps: Sequence[Step], step_by: Callable[[Node, Rule], Step], free: Callable[[int], bool]
) -> Iterator[Step]:
    """The steps, each with the first form of its rule that costs no memory of its own. Rules of
    some operators can be written from the operator's input or from its output; a form is taken
    whose values stay in memory anyway, since another step reads them or since they are `free` (an
    input or an output of the network). Without one, the rule stays as it is."""
    readers = Counter(v for step in steps for v in _read_values(step))
    for step in steps:
        own = _read_values(step)
        forms = [step, *(step_by(step.node, rule) for rule in step.rule.forms(step.node))]
        fitting = (
            form
            for form in forms
            if all(readers[v] > own.count(v) or free(v) for v in _read_values(form))
        )
        yield next(fitting, step)


def _reads(rule: Rule, live: Sequence[bool]) -> tuple[bool, ...]:
    if rule.reads_inputs is not None:
        return tuple(rule.reads_inputs(live))
    return ("inputs" in rule.reads,) * len(live)


def _read_values(step: Step) -> tuple[int, ...]:
    values = [v for v, read in zip(step.node.inputs, step.reads, strict=True) if read]
    if step.reads_output:
        values.extend(step.node.outputs)
    return tuple(values)


def _needed_later(graph: Graph, step: Step) -> tuple[int, ...]:
    """Values that its derivatives will need after the forward sweep: those they read, and the
    indices and masks by which the operator itself runs in the other sweeps."""
    metas = ((v, graph.values[v]) for v in step.node.inputs if step.differentiated)
    fixed = [v for v, meta in metas if meta is not None and not meta.differentiable]
    return (*_read_values(step), *fixed)


def _drops(uses: Sequence[Sequence[int]], keep: set[int]) -> tuple[tuple[int, ...], ...]:
    """For each step, the values whose last use it is."""
    last: dict[int, int] = {}
    for position, values in enumerate(uses):
        for v in values:
            last[v] = position
    drops: list[list[int]] = [[] for _ in uses]
    for v, position in last.items():
        if v not in keep:
            drops[position].append(v)
    return tuple(tuple(d) for d in drops)


def _layouts(
    graph: Graph, steps: Sequence[Step], images: Sequence[int], leaves: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Images and filters that the sweeps hold channels-last on a GPU, whose convolutions and batch
    norms are faster so and copy less, and depthwise filters, which they hold taps-first; results
    come back in the usual layout. An image that every reader folds into blocks stays as it is."""
    convolutions = [
        s.node
        for s in steps
        if str(s.node.op._schema.name) in ("aten::conv2d", "aten::convolution")
        and len(graph.shape(s.node.inputs[1])) == 4
    ]
    if not convolutions or any(m is not None and m.device.type != "cuda" for m in graph.values):
        return frozenset(), frozenset()
    layers = [node.inputs[:2] for node in convolutions]
    folding = {
        node.index
        for node in convolutions
        if convolution_of(node, 2).folds(torch.device("cuda"), graph.shape(node.inputs[1]))
    }
    unfolded = {v for s in steps if s.node.index not in folding for v in s.node.inputs}
    depthwise = {w for x, w in layers if graph.shape(w)[:2] == (graph.shape(x)[-3], 1) != (1, 1)}
    filters = {w for _, w in layers if w in leaves}
    held = frozenset(v for v in images if len(graph.shape(v)) == 4 and v in unfolded)
    return held | (filters - depthwise), frozenset(filters & depthwise)


# Operators whose derivative PyTorch cannot differentiate by itself, or in all its results at once
# (eigenvectors, whose phase is free): autograd can, under the patch, in what a network uses.
_ONCE = (
    "aten._embedding_bag", "aten._ctc_loss", "aten.segment_reduce", "aten.linalg_eig.default",
    "torch_nn._linear_cross",
)  # fmt: skip


def _check_generic(graph: Graph, step: Step) -> None:
    """What the generic rule cannot do: a random operator would draw anew when it is run again, and
    some have no second derivative."""
    if not step.differentiated or step.rule.own:
        return
    if str(step.node.op).startswith(_ONCE):
        raise RuleError(
            f"the sweeps have no second derivative of {step.node.op}, which has no rule of its own "
            f"({step.node.source})"
        )
    if draws(step.node.op) or draws_untold(graph, step.node):
        raise RuleError(
            f"{step.node} draws random numbers and has no rule of its own, so its derivative "
            f"would see other numbers ({step.node.source}). Remedy: db.register_rule for it."
        )


# --------------------------------------------------------------------------------------- renewals


@dataclass(frozen=True, slots=True, eq=False)
class Renewal:
    """ξ of a node's output number `place` is what `reader` pulls to its input `slot`."""

    place: int
    reader: Step
    slot: int


def find_renewals(graph: Graph, steps: Sequence[Step], target: int) -> dict[int, Renewal]:
    """By node, how its ξ is had from that of the one node which reads it.

    A node is left out where its ξ has several sources (the penalised output's own among them),
    where it comes through a heavy node or a larger one, and where nobody down the line holds any.
    """
    readers: dict[int, list[tuple[Step, int]]] = {}
    for step in steps:
        for slot, (v, on) in enumerate(zip(step.node.inputs, step.pull, strict=True)):
            if on:
                readers.setdefault(v, []).append((step, slot))
    renewals: dict[int, Renewal] = {}
    for step in reversed(steps):
        places = [i for i, v in enumerate(step.node.outputs) if v in readers or v == target]
        if len(places) != 1:
            continue
        value = step.node.outputs[places[0]]
        if value == target or len(readers[value]) != 1:
            continue
        reader, slot = readers[value][0]
        held = reader.curves or reader.node.index in renewals
        grows = prod(graph.shape(reader.node.outputs[0])) > prod(graph.shape(value))
        if held and reader.rule.renews and not grows:
            renewals[step.node.index] = Renewal(places[0], reader, slot)
    return renewals


def find_waits(steps: Sequence[Step], renewals: Mapping[int, Renewal]) -> dict[int, int]:
    """By node whose source waits: the node whose ξ comes out when the next that bends has its turn,
    and by which, through light nodes that do not bend, the waiting one's is had."""
    waits: dict[int, int] = {}
    for step in steps:
        together = step.rule.tangent_curvature or step.rule.at_once
        bends_alone = step.curves and step.push and together is None
        link = step.node.index
        while bends_alone and link in renewals:
            reader = renewals[link].reader
            if reader.curves:
                if reader.rule.at_once is not None and reader.bend[renewals[link].slot]:
                    waits[step.node.index] = link
                break
            link = reader.node.index
    return waits


# ------------------------------------------------------------------------------------------ draws


# of PyTorch itself: tagged, or not to be run by one process alone
_TAGGED = ("aten", "prims", "prim", "doubleback", "rngprims", "higher_order", "torchvision")
_TOGETHER = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "symm_mem",
    "fsdp",
)
_KNOWN = frozenset({*_TAGGED, *_TOGETHER})
_FOUND: dict[Any, bool] = {}


def draws_untold(graph: Graph, node: Node) -> bool:
    """Whether a node's operator, of somebody else's, moves a generator; looked at once for each.
    One that cannot be run on made-up numbers counts as one that does not."""
    op = node.op
    if getattr(op, "namespace", "aten") in _KNOWN:
        return False
    if op not in _FOUND:
        _FOUND[op] = _moves_a_generator(graph, node)
    return _FOUND[op]


def _moves_a_generator(graph: Graph, node: Node) -> bool:
    def made_up(ref: Ref) -> Tensor:
        meta = graph.values[ref.index]
        assert meta is not None
        return _numbers(meta)

    devices = {m.device for v in node.inputs if (m := graph.values[v]) is not None}
    cuda = [d for d in devices if d.type == "cuda"]
    with disable_current_modes(), torch.no_grad(), torch.random.fork_rng(cuda):
        args, kwargs = map_refs((node.args, dict(node.kwargs)), made_up)
        before, handled = _states(cuda), sys.exception()
        try:
            node.op(*args, **kwargs)
        except Exception as error:
            let_through(error, handled)
            return False
        return any(not torch.equal(a, b) for a, b in zip(before, _states(cuda), strict=True))


def _numbers(meta: Meta) -> Tensor:
    """Ones, in the domain of most functions; integers are zero, an index into anything."""
    make = torch.ones if meta.differentiable or meta.dtype is torch.bool else torch.zeros
    return make(meta.shape, dtype=meta.dtype, device=meta.device)


def _states(cuda: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
