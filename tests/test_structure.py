"""What the planner relies on and no number shows: declarations that earn short cuts, who draws
random numbers, which rule a complex number takes, what is kept and when it is let go, what an error
says. Quick, so that mutation testing can afford them at every mutant."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback import sweeps
from doubleback.capture import find_graph
from doubleback.graph import compile_sizes
from doubleback.plan import make_plan
from doubleback.rules import add, find_rule, linear, structures
from doubleback.rules.table import overload
from support import declarations, oracle
from support.oracle import Spec

D = torch.float64


def by_operator(lines) -> dict[str, list[str]]:
    found = defaultdict(list)
    for line in lines:
        name, _, rest = line.partition(": ")
        found[name].append(rest)
    return found


def test_what_rules_declare():
    """Change a declaration on purpose, and write the file anew: its header says how."""
    written = by_operator(declarations.FILE.read_text().splitlines())
    found = by_operator(declarations.lines())
    for name in written.keys() - found.keys():
        assert overload(name.removeprefix("aten.")) is None, f"{name} has lost its rule"
    assert {n: rows for n, rows in found.items() if rows != written.get(n)} == {}


# ------------------------------------------------------------------------------------- networks


def step(net, x, spec, ours: bool, **how):
    """Everything that one training step yields."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    torch.manual_seed(1)
    if ours:
        penalty = db.OutputGradient(spec.index, norm=db.Norm())
        out, value = db.Penalised(net, penalty, flatten_after=None, strict=True, **how)(x)
    else:
        out, value = oracle.value(net, (x,), spec)
    oracle.total_loss(out, value).backward()
    return oracle.collect(net, (x,), out, value)


def agree(net, x, **how):
    spec = Spec("", "output", index=1, norm=("norm",))
    with oracle.twice_differentiable():
        truth = step(net, x, spec, False)
    errors = oracle.compare(step(net, x, spec, True, **how), truth, 1e-6)
    assert max(errors.values()) <= 1e-10, errors


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


class Complex(nn.Module):
    """Linear and curved functions of complex numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(5, 3)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.first(x).tanh())
        spectrum = spectrum * spectrum.conj() * (0.3 + 0.2j) + 2 * spectrum
        return self.last(spectrum.abs())


class Pooled(nn.Module):
    """Maxima of an image that lies channels-last, and of one without a batch."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(12, 3)

    def forward(self, x):
        h = self.convolution(x.contiguous(memory_format=torch.channels_last))
        return self.last(F.max_pool2d(h.tanh() + h, 2).flatten(1))


def test_complex_numbers():
    torch.manual_seed(0)
    agree(Complex().to(D), numbers(3, 6))


def test_maxima_of_an_image_that_lies_channels_last():
    torch.manual_seed(0)
    agree(Pooled().to(D), numbers(3, 2, 4, 4))


def test_a_mask_of_attention_that_moves_alone():
    """Its tangent without any curvature source, and with the others at rest."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    rule = find_rule(op)
    q, k, v, mask, along = (numbers(2, 3, 4, seed=i) for i in range(5))
    mask, along = mask @ numbers(4, 3), along @ numbers(4, 3)
    sample = declarations.sample_of(op, (q, k, v, mask), {}, rule)
    found = rule.tangent(sample.call, [None, None, None, along])

    def moved(q, k, v):
        return torch.func.jvp(lambda m: (q @ k.mT / 2 + m).softmax(-1) @ v, (mask,), (along,))[1]

    torch.testing.assert_close(found, moved(q, k, v), rtol=1e-10, atol=1e-12)
    xi = numbers(2, 3, 4, seed=7)
    wanted, moving = (True, True, True, False), [None, None, None, along]
    tangent, sources = rule.both(sample.call, xi, moving, wanted, True)
    torch.testing.assert_close(tangent, found, rtol=1e-10, atol=1e-12)
    _, at_rest = rule.both(sample.call, xi, [q, k, v, None], wanted, False)
    assert len(at_rest) == 4 and at_rest[3] is None  # one for each input
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(moved(*leaves), leaves, xi)
    for a, b in zip(sources[:3], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divide", [
    lambda h: torch.div(2.0, h), lambda h: 2.0 / h, lambda h: torch.div(h, 2.0) + h / (1 + h),
])  # fmt: skip
def test_a_number_divided_by_a_tensor(divide):
    """It bends in its only input; a tensor divided by a number does not."""
    agree(Through(lambda h: divide(h.exp() + 1)).to(D), numbers(3, 6))


def test_only_memory_of_its_own_is_written_to():
    seen = torch.zeros(1, 4).expand(3, 4)
    assert structures.base(seen).stride() == (4, 1)
    for own in (torch.zeros(3, 4), torch.zeros(1, 4).expand(1, 4), torch.zeros(4, 3).T):
        assert structures.base(own) is own


def test_other_operators_whose_first_argument_is_a_number():
    def function(h):
        w = h.exp() + 1
        return (
            torch.mul(2.0, h) + torch.add(2.0, h, alpha=3) + torch.sub(2.0, h, alpha=0.5)
            + torch.pow(2.0, h) + torch.xlogy(2.0, w) + torch.float_power(2.0, h)
            + torch.special.xlog1py(0.5, w) + torch.where(h > 0, 2.0, w * h)
            + torch.rsub(h, 3.0)
        )  # fmt: skip

    agree(Through(function).to(D), numbers(3, 6))


def test_sums_where_none_is_zero():
    a, one = numbers(3, 4), torch.ones(1, 1, dtype=D).expand(3, 4)
    for left, right in ((one, a), (a, one)):
        assert torch.equal(add(left, right), a + 1) and add(left, right).stride() == (4, 1)
    assert add(None, a) is a and add(a, None) is a and add(None, None) is None


def test_an_output_without_a_cotangent():
    assert structures._parts(None, [numbers(2), numbers(2)], True) == (None, None)


# --------------------------------------------------------------------------------- who draws


@torch.library.custom_op("structure::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> torch.Tensor:
    """Draws, and does not say so by a tag."""
    return x * (0.5 + torch.rand_like(x))


@torch.library.custom_op("structure::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


for own in (jitter, doubled):
    own.register_fake(torch.empty_like)
jitter.register_autograd(lambda ctx, y: y)
doubled.register_autograd(lambda ctx, y: 2 * y)


class Through(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.function(self.first(x)).tanh())


def test_weights_that_are_dropped_after_an_activation():
    """They are drawn in the network's order, although they do not depend on x."""

    class Dropped(Through):
        def forward(self, x):
            h = F.dropout(self.first(x), 0.4).tanh()
            return F.linear(h, F.dropout(self.last.weight, 0.4)) + F.dropout(self.last.bias, 0.4)

    agree(Dropped(torch.tanh).to(D), numbers(3, 6))


def test_numbers_that_are_drawn_in_place():
    def masked(h):
        return h * torch.empty_like(h).bernoulli_(0.4) + h * torch.empty_like(h).bernoulli_()

    agree(Through(masked).to(D), numbers(3, 6))


def test_an_operator_that_draws_and_does_not_say_so():
    model = db.Penalised(Through(jitter).to(D), db.OutputGradient(1), strict=True)
    before = torch.get_rng_state()
    with pytest.raises(db.DoublebackError, match="draws random numbers"):
        model(numbers(3, 6))
    assert torch.equal(before, torch.get_rng_state())
    agree(Through(doubled).to(D), numbers(3, 6))


# ------------------------------------------------------------------------------- what is kept


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + torch.tanh(layer(x))
        return x.sum(1, keepdim=True)


@pytest.mark.parametrize("recompute", [True, False])
def test_values_are_let_go_at_their_last_use(recompute):
    """After the forward sweep what a derivative reads is there and nothing else; after the tangent
    sweep no cotangent; after the second sweep no value."""
    net, x = Chain().to(D), numbers(3, 5)
    graph, inputs = find_graph(net, None, (x,), {})
    graph = graph.at(graph.read_symbols(inputs))
    given = dict(zip(graph.inputs, inputs, strict=True))
    penalised = [v for v, t in given.items() if t is x]
    wanted = [v for v, t in given.items() if isinstance(t, nn.Parameter)]
    plan = make_plan(
        graph, penalised, graph.targets[0], wanted, varying_seed=False, recompute=recompute
    )
    leaves = {v: t.detach() for v, t in given.items()}
    state = sweeps.forward(plan, leaves)
    produced = {v for s in plan.steps for v in s.node.outputs}
    pinned = {*plan.outputs, plan.target, *plan.mutations.values()}
    assert state.values.keys() & produced == (plan.kept | pinned) & produced
    assert not any(s.rule.reads_inputs is None and s.reads_output and s.node.outputs[0] not in
                   plan.kept for s in plan.steps)  # fmt: skip
    (xi,) = sweeps.backward(plan, state, torch.ones(3, 1, dtype=D))
    held = {s.node.index for s in plan.steps if plan.holds_xi(s)}
    assert state.xi.keys() == held
    assert bool(plan.renewals) == recompute
    h, gamma = sweeps.tangent(plan, state, {plan.penalised[0]: xi})
    assert h is None or not plan.needs_head_tangent
    assert not state.xi
    found = sweeps.second(plan, state, gamma)
    assert not state.saved and not (state.values.keys() & produced) - {plan.target}
    assert set(found) >= {v for v in wanted if graph.values[v].shape == (5, 5)}


def test_a_second_pass_finds_all_that_it_needs():
    net, x = Chain().to(D), numbers(3, 5).requires_grad_()
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=None)
    _, penalty = model(x)
    penalty.backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    penalty.backward()
    for a, b in zip(first, [p.grad for p in net.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------ what errors say


@pytest.mark.parametrize("penalty", [db.OutputGradient(1), db.Jacobian(plan="rows")])
@pytest.mark.parametrize("sweep", ["forward", "backward", "tangent"])
def test_an_error_names_sweep_operator_and_shape(sweep, penalty):
    def broken(call, *_):
        raise ValueError("made up")

    op, right = torch.ops.structure.doubled.default, linear(lambda call, y: 2 * y)
    rule = replace(right, **{sweep: broken}, seeded=None)
    db.register_rule(op, rule)
    try:
        x = numbers(3, 6).requires_grad_()
        model = db.Penalised(Through(doubled).to(D), penalty, flatten_after=None)
        with pytest.raises(db.RuleError, match=f"the {sweep} sweep failed at .*doubled.*3, 4"):
            model(x)[1].backward()
    finally:
        db.unregister_rule(op)


def test_a_nan_is_named_where_it_first_appears():
    net = Through(torch.log).to(D)
    with pytest.raises(db.NonFiniteError, match=r"forward sweep at .*log"):
        db.Penalised(net, db.OutputGradient(1), debug=True)(numbers(3, 6))
    db.Penalised(Through(torch.sin).to(D), db.OutputGradient(1), debug=True)(numbers(3, 6))


def test_sizes_under_one_symbol_and_sizes_without_one():
    """Dynamo names equal sizes alike, and one that follows from another not at all."""
    a, b = sympy.symbols("a b", integer=True, positive=True)
    sizes = compile_sizes([a * b, b + 1], [a, b, a, b + 1, sympy.Integer(3)])
    assert sizes(2, 5, 2, 6, 3) == (10, 6)
