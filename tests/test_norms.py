"""Norms and dual norms: values by definition, gradients by autograd, whole steps in Lᵖ."""

from __future__ import annotations

import copy
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import doubleback as db
from doubleback import spaces

EXPONENTS = [1.0, 1.3, 1.5, 2.0, 3.0, 8.0, math.inf]


def weights(kind: str, size: int):
    """(measure, its weights)."""
    if kind == "euclidean":
        return spaces.Euclidean(), torch.ones(size, dtype=torch.float64)
    if kind == "grid":
        return spaces.Grid(0.3), torch.full((size,), 0.3, dtype=torch.float64)
    w = torch.rand(size, generator=torch.Generator().manual_seed(size)).double() + 0.2
    return spaces.Weighted(w), w


def dual_norm(g, w, p):
    """Written from the definition: (Σ w|g/w|^q)^{1/q}, 1/p + 1/q = 1."""
    r = (g / w).abs()
    if p == 1:
        return r.max(-1).values
    if p == math.inf:
        return g.abs().sum(-1)
    q = 1 / (1 - 1 / p)
    return (w * r**q).sum(-1) ** (1 / q)


cases = st.tuples(
    st.sampled_from(EXPONENTS), st.sampled_from(["euclidean", "grid", "weighted"]),
    st.integers(1, 7), st.integers(0, 10**6),
)  # fmt: skip


@hypothesis.given(cases)
@hypothesis.settings(max_examples=80)
def test_dual_norms_by_definition(case):
    p, kind, size, seed = case
    measure, w = weights(kind, size)
    space = spaces.Lp(p, measure)
    generator = torch.Generator().manual_seed(seed)
    g, u = (torch.randn(3, size, generator=generator, dtype=torch.float64) for _ in range(2))
    dual = space.dual_norm(g)
    torch.testing.assert_close(dual, dual_norm(g, w, p), rtol=1e-12, atol=0)
    # Hölder: no u of norm 1 gains more, and the duality map attains it
    assert bool(((g * u).sum(1) <= dual * space.norm(u) * (1 + 1e-12)).all())
    square, (j,) = space.dual_square([g])
    torch.testing.assert_close((g * j).sum(1), square, rtol=1e-12, atol=0)
    torch.testing.assert_close(space.norm(j), dual, rtol=1e-10, atol=0)


@hypothesis.given(cases, st.sampled_from(["squared", "norm", "deviation", "one-sided"]))
@hypothesis.settings(max_examples=80)
def test_gradients_of_norms(case, name):
    """measure() against autograd on value(), and on the definition."""
    p, kind, size, seed = case
    measure, w = weights(kind, size)
    space = spaces.Lp(p, measure)
    norm, of_norm = {
        "squared": (db.SquaredNorm(space), lambda n: n.square()),
        "norm": (db.Norm(space), lambda n: n),
        "deviation": (db.Deviation(0.7, space=space), lambda n: (n - 0.7).square()),
        "one-sided": (
            db.Deviation(0.7, one_sided=True, space=space), lambda n: (n - 0.7).relu().square(),
        ),
    }[name]  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(3, size, generator=generator, dtype=torch.float64).requires_grad_()
    values, (q,) = norm.measure([g.detach()])
    for other in (norm.value([g]), of_norm(dual_norm(g, w, p))):
        torch.testing.assert_close(values, other.detach(), rtol=1e-11, atol=1e-14)
        (gradient,) = torch.autograd.grad(other.sum(), g)
        torch.testing.assert_close(q, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("norm", [db.SquaredNorm, db.Norm])
def test_a_vanishing_gradient_has_derivative_zero(p, norm):
    norm = norm(spaces.Lp(p))
    g = torch.zeros(2, 3, requires_grad=True)
    values, (q,) = norm.measure([g.detach()])
    assert not values.any() and not q.any()
    (gradient,) = torch.autograd.grad(norm.value([g]).sum(), g)
    assert not gradient.any()


def test_a_maximum_that_is_reached_twice_shares_its_derivative():
    g = torch.tensor([[3.0, -3.0, 1.0]], requires_grad=True)
    norm = db.Norm(spaces.Lp(1))
    torch.testing.assert_close(norm.measure([g.detach()])[1][0], torch.tensor([[0.5, -0.5, 0.0]]))
    (gradient,) = torch.autograd.grad(norm.value([g]).sum(), g)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, -0.5, 0.0]]))


def test_large_numbers_do_not_overflow():
    g = torch.tensor([[1e30, -1e30], [1e-30, 0.0]])
    norm = spaces.Lp(1.25).dual_norm(g)  # p′ = 5
    torch.testing.assert_close(norm, torch.tensor([1e30 * 2**0.2, 1e-30]))


def test_several_inputs_are_one_vector():
    """An attack bounded by ε in every coordinate of every input gains ε times the sum of all |g|;
    a product space adds squares instead."""
    parts = [torch.randn(4, 3).double(), torch.randn(4, 2, 5).double()]
    sums = [g.abs().flatten(1).sum(1) for g in parts]
    space = spaces.Lp(math.inf)
    torch.testing.assert_close(db.Norm(space).measure(parts)[0], sums[0] + sums[1])
    product = db.SquaredNorm(spaces.Product(space, space)).measure(parts)[0]
    torch.testing.assert_close(product, sums[0] ** 2 + sums[1] ** 2)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
@pytest.mark.parametrize("flatten_after", [None, 1])
def test_engine_in_lp(p, flatten_after, flattened):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 1, 0])
    measure, w = weights("weighted", 6)
    oracle, leaf = copy.deepcopy(net), x.clone().requires_grad_()
    losses = nn.functional.cross_entropy(oracle(leaf), y, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    expected = (dual_norm(g, w, p) - 0.2).square().mean()
    (losses.mean() + expected).backward()
    norm = db.Deviation(0.2, space=spaces.Lp(p, measure))
    model = db.Penalised(net, db.LossGradient(norm=norm), strict=True, flatten_after=flatten_after)
    for _ in range(3):
        net.zero_grad()
        ours = x.clone().requires_grad_()
        out, penalty = model(ours, y)
        (nn.functional.cross_entropy(out, y) + penalty).backward()
    torch.testing.assert_close(penalty.detach(), expected.detach(), rtol=1e-10, atol=0)
    pairs = [(ours, leaf), *zip(net.parameters(), oracle.parameters(), strict=True)]
    for mine, theirs in pairs:
        assert float((mine.grad - theirs.grad).norm()) <= 1e-10 * float(theirs.grad.norm())
    assert len(flattened) == (0 if flatten_after is None else 2)


def test_the_dual_of_bounded_perturbations_predicts_a_sign_attack():
    """ℓ(x + ε sign ∇ℓ) − ℓ(x) = ε ‖∇ℓ‖₁ + O(ε²)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 1, 0])
    norm = db.Norm(spaces.Lp(math.inf))
    with torch.no_grad():
        _, penalty = db.Penalised(net, db.LossGradient(norm=norm, reduction="none"))(x, y)
    leaf = x.clone().requires_grad_()

    def loss(t):
        return nn.functional.cross_entropy(net(t), y, reduction="none")

    (g,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    step = 1e-6
    gain = (loss(x + step * g.sign()) - loss(x)) / step
    torch.testing.assert_close(gain.detach(), penalty, rtol=1e-4, atol=0)


def test_bad_input():
    for p in (0.5, math.nan, "inf", -1):
        with pytest.raises(db.InputError, match="1 ≤ p ≤ ∞"):
            spaces.Lp(p)
    with pytest.raises(db.InputError, match="Euclidean, Weighted or Grid"):
        spaces.Lp(3, spaces.Sobolev(1, 0.1))
    with pytest.raises(db.InputError, match="no inner product"):
        spaces.Lp(3).inner(torch.ones(1, 2), torch.ones(1, 2))
    assert spaces.Lp(2).hilbert and not spaces.Lp(3).hilbert
    assert not spaces.Product(spaces.Euclidean(), spaces.Lp(1)).hilbert
    assert float(spaces.Lp(2).inner(torch.ones(1, 2), torch.ones(1, 2))) == 2
