"""Operators: adjoints by definition on random shapes and spaces, formulas against stock PyTorch,
composition, sums, and what the engine makes of locally connected layers."""

from __future__ import annotations

import copy
import itertools

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import doubleback as db
from doubleback.operators import (
    AveragePool,
    Convolution,
    Dense,
    InvertibleDownsampling,
    InvertibleUpsampling,
    LocallyConnected,
    Multilinear,
    Operator,
)
from doubleback.spaces import Euclidean, Grid, Product, Sobolev, Weighted

EXACT = 1e-12  # adjoints of linear maps: rounding alone
few = hypothesis.settings(max_examples=40)


def r(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------------- adjoints by definition


@st.composite
def convolutions(draw):
    n = draw(st.integers(1, 3))
    groups, transposed = draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans())
    kernel, stride, dilation = (
        tuple(draw(st.integers(1, 3 if n < 3 else 2)) for _ in range(n)) for _ in range(3)
    )
    padding = tuple(
        draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)
    )
    sizes = [
        d * (k - 1) + 1 + draw(st.integers(0, 4)) for k, d in zip(kernel, dilation, strict=True)
    ]
    extra = ()
    if transposed:
        room = zip(stride, dilation, strict=True)
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in room)
    before, after = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    pair = (before, after // groups) if transposed else (after, before // groups)
    op = Convolution(stride, padding, dilation, transposed, extra, groups)
    hypothesis.assume(not transposed or all(
        (s - 1) * t - 2 * p + d * (k - 1) + e + 1 > 0
        for s, t, p, d, k, e in zip(sizes, stride, padding, dilation, kernel, extra, strict=True)
    ))  # fmt: skip
    return op, torch.empty(*pair, *kernel), torch.empty(draw(st.integers(1, 3)), before, *sizes)


@hypothesis.given(convolutions())
@few
def test_convolutions(case):
    assert db.check_adjoint(*case).worst <= EXACT


@pytest.mark.parametrize("after, before", [(1, 1), (6, 1), (5, 3), (20, 3)])
@pytest.mark.parametrize(
    "kernel, padding, dilation, stride",
    [((3, 3), (1, 1), (1, 1), 1), ((5, 2), (0, 1), (1, 2), 1), ((3, 3), (4, 0), (1, 1), 1),
     ((3, 3), (1, 1), (1, 1), 2)],
)  # fmt: skip
def test_transposes_in_single_precision(after, before, kernel, padding, dilation, stride):
    """Where few channels are given, they are computed by a convolution of their own."""
    op = Convolution((stride, stride), padding, dilation)
    weight, x = r(after, before, *kernel).float(), r(3, before, 9, 11).float()
    y = torch.randn_like(op.forward(weight, x))
    single = op.adjoints(x, weight, y, x.shape, weight.shape, (True, True, True))
    wide = (t.double() for t in (y, x, weight))
    options = ([stride] * 2, padding, dilation, False, [0, 0], 1, [True] * 3)
    stock = torch.ops.aten.convolution_backward(*wide, [after], *options)
    terms = y.abs().sum((0, 2, 3))  # which cancel in the sum that a bias gets
    for ours, expected, size in zip(single, stock, (stock[0], stock[1], terms), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).norm() <= 1e-6 * size.norm()


@st.composite
def local(draw):
    n = draw(st.integers(1, 2))
    kernel, stride, dilation = (tuple(draw(st.integers(1, 3)) for _ in range(n)) for _ in range(3))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(n))
    sizes = [
        d * (k - 1) + 1 + draw(st.integers(0, 4)) for k, d in zip(kernel, dilation, strict=True)
    ]
    op = LocallyConnected(stride, padding, dilation)
    c, o = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    weight = torch.empty(*op.out_sizes(sizes, kernel), o, c, *kernel)
    return op, weight, torch.empty(draw(st.integers(1, 3)), c, *sizes)


@hypothesis.given(local(), st.integers(1, 4))
@few
def test_locally_connected_by_definition_and_by_unfolding(case, parts):
    op, weight, x = case
    chunked = pytest.MonkeyPatch()
    chunked.setattr("doubleback.kernels.products.LEAST", 1)
    chunked.setattr("doubleback.kernels.products.PARTS", parts)
    try:
        assert db.check_adjoint(op, weight, x).worst <= EXACT
        weight, x = r(*weight.shape), r(*x.shape)
        found = op.forward(weight, x)
        if len(op.stride) == 1:
            x, weight, found = x[:, :, None], weight[None].unsqueeze(-2), found[:, :, None]
        stride, padding, dilation = op._options()
        kernel, places = weight.shape[4:], weight.shape[:2]
        patches = F.unfold(x, kernel, dilation, padding, stride)
        patches = patches.reshape(*x.shape[:2], *kernel, *places)
        expected = torch.einsum("bckluv,uvockl->bouv", patches, weight)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    finally:
        chunked.undo()


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1)), min_size=1,
             max_size=3),
    st.booleans(), st.booleans(), st.sampled_from([None, 5]),
)  # fmt: skip
@few
def test_average_pools(axes, ceil, count, divisor):
    kernel, stride, padding = map(tuple, zip(*axes, strict=True))
    padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
    if len(kernel) == 1:
        divisor = None
    op = AveragePool(kernel, stride, padding, ceil, count, divisor)
    x = r(2, 3, *(2 * k + 1 for k in kernel))
    assert db.check_adjoint(op, None, x).worst <= EXACT
    pool = getattr(F, f"avg_pool{len(kernel)}d")
    extra = {} if len(kernel) == 1 else {"divisor_override": divisor}
    expected = pool(x, kernel, stride, padding, ceil, count, **extra)
    torch.testing.assert_close(op.forward(None, x), expected)


@hypothesis.given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans())
@few
def test_invertible_downsampling(factor, batched):
    op = InvertibleDownsampling(tuple(factor))
    x = r(*([2] if batched else []), 3, *(2 * f for f in factor))
    for each, sample in ((op, x), (op.inverse, op.forward(None, x))):
        assert db.check_adjoint(each, None, sample).worst <= EXACT
    y = op.forward(None, x)
    assert torch.equal(op.inverse.forward(None, y), x) and torch.equal(op.transpose(None, y), x)
    assert op.inverse.inverse == op
    assert float(y.norm()) == pytest.approx(float(x.norm()), rel=1e-14)
    if len(factor) == 2 and factor[0] == factor[1]:
        assert torch.equal(y, F.pixel_unshuffle(x, factor[0]))


@pytest.mark.parametrize(
    "equation",
    ["oi,bi->bo", "oi,bix->bo", "ij,jk", "bqd,bkd,bkv->bqv", "a,b,c->abc", "ab,ab,ab->", "ij->ji",
     "rk,kij,bi,bj->br"],
)  # fmt: skip
def test_multilinear(equation):
    op = Multilinear(equation)
    assert db.check_adjoint(op).worst <= EXACT
    operands = [t.double().requires_grad_() for t in op.sample()]
    out = op.forward(*operands)
    y = torch.randn_like(out)
    expected = torch.autograd.grad(out, operands, y)
    for k, theirs in enumerate(expected):
        torch.testing.assert_close(op.adjoint(k, operands, y).detach(), theirs)


# ------------------------------------------------------------------------------------- spaces

SPACES = [
    Euclidean(),
    Weighted(torch.rand(6, generator=torch.Generator().manual_seed(0)) + 0.3),
    Grid(0.2, "trapezoid"),
    Sobolev(0.7, 0.4, "neumann"),
    Sobolev(-1.2, 0.5, "dirichlet"),
]


@pytest.mark.parametrize(("domain", "codomain"), list(itertools.product(SPACES, repeat=2)))
def test_adjoints_in_spaces(domain, codomain):
    parameters = Sobolev(1.0, 0.3)
    weight, x = torch.empty(6, 6), torch.empty(2, 6)
    K = Dense().between(domain, codomain, parameters)
    assert db.check_adjoint(K, weight, x).worst <= EXACT
    M = Multilinear("oi,bi->bo", (parameters, domain), codomain)
    assert db.check_adjoint(M, weight, x).worst <= EXACT
    W, y = r(6, 6), r(2, 6)
    torch.testing.assert_close(K.transpose(W, y), M.transpose(W, y, (2, 6)))
    torch.testing.assert_close(K.weight_adjoint(y, y), M.weight_adjoint(y, y, (6, 6)))
    # again between other spaces: only the last choice counts
    again = K.between(Euclidean(), Euclidean(), Euclidean())
    torch.testing.assert_close(again.transpose(W, y), Dense().transpose(W, y), rtol=1e-9, atol=1e-9)


def test_the_transpose_in_weighted_spaces_is_not_the_transpose():
    """Kᵀ = G_X⁻¹ Wᵀ G_Y, with the matrices written out."""
    gx, gy = torch.rand(3).double() + 0.5, torch.rand(4).double() + 0.5
    W, y = r(4, 3), r(1, 4)
    K = Dense().between(Weighted(gx), Weighted(gy))
    expected = (torch.diag(1 / gx) @ W.T @ torch.diag(gy) @ y[0])[None]
    torch.testing.assert_close(K.transpose(W, y), expected)


def test_images_in_sobolev_spaces():
    space = Sobolev(1.0, (0.5, 0.5))
    for op in (Convolution((1, 1), (1, 1), (1, 1)), LocallyConnected((1, 1), (1, 1), (1, 1))):
        n = 6 if isinstance(op, LocallyConnected) else None
        weight = torch.empty(*([n, n] if n else []), 3, 2, 3, 3)
        K = op.between(space, Grid((0.5, 0.5)), Sobolev(2.0, (1.0, 1.0), "neumann"))
        assert db.check_adjoint(K, weight, torch.empty(2, 2, 6, 6)).worst <= EXACT


# --------------------------------------------------------------------- composition and sums


def test_compositions_and_sums_keep_their_adjoints():
    conv = Convolution((2, 2), (1, 1), (1, 1))
    down = InvertibleDownsampling((2, 2))
    narrow = Convolution((1, 1), (0, 0), (1, 1))
    wide, one, x = torch.empty(4, 3, 3, 3), torch.empty(4, 12, 1, 1), torch.empty(2, 3, 8, 8)
    for K, weight in (
        (AveragePool((2, 2)) @ conv, (None, wide)),
        (conv + narrow @ down, (wide, (one, None))),
        (AveragePool((3, 3), (1, 1)) @ (conv + narrow @ down), (None, (wide, (one, None)))),
        (LocallyConnected((1, 1), (0, 0), (1, 1)) @ conv, (torch.empty(3, 3, 2, 4, 2, 2), wide)),
    ):
        assert db.check_adjoint(K, weight, x).worst <= EXACT
        with db.count_operations() as ops:
            shape = K.output_shape(weight, x.shape)
        assert shape == tuple(K.forward(weight, x).shape)
        assert ops.products == 0  # nothing ran


def test_compositions_in_spaces():
    middle = Weighted(torch.rand(5) + 0.5)
    A = Dense().between(domain=middle, codomain=Grid(0.3), parameters=Weighted(3.0))
    B = Dense().between(domain=Sobolev(1, 0.2), codomain=middle)
    K = A @ B
    assert K.domain == B.domain and K.codomain == A.codomain
    assert K.parameters == Product(Weighted(3.0), Euclidean())
    weights = torch.empty(4, 5), torch.empty(5, 6)
    assert db.check_adjoint(K, weights, torch.empty(2, 6)).worst <= EXACT
    L = K + Dense().between(domain=B.domain, codomain=A.codomain)
    assert db.check_adjoint(L, (weights, torch.empty(4, 6)), torch.empty(2, 6)).worst <= EXACT


ROW = LocallyConnected((1,), (0,), (1,))
ones = torch.ones


@pytest.mark.parametrize(
    ("message", "make"),
    [
        (r"takes elements of Weighted.* gives elements of Euclidean",
         lambda: Dense().between(domain=Weighted(2.0)) @ Dense()),
        (r"the codomain of Dense\(\) is Euclidean\(\), that of .* is Grid",
         lambda: Dense() + Dense().between(codomain=Grid(0.1))),
        (r"gives shape \(1, 2\), Dense\(\) gives \(1, 4\)",
         lambda: (Dense() + Dense()).forward((ones(2, 3), ones(4, 3)), ones(1, 3))),
        ("pair of weights", lambda: (Dense() @ Dense()).forward(ones(2, 2), ones(1, 2))),
        ("pair of weights", lambda: (Dense() @ Dense()).weight_adjoint(r(1, 2), r(1, 2))),
        ("domain must be a space", lambda: Dense().between(domain="L2")),
        ("needs the input's shape",
         lambda: Convolution((2,), (0,), (1,)).transpose(ones(1, 1, 2), ones(1, 1, 3))),
        ("no adjoint by einsum", lambda: Multilinear("...i,ij->...j")),
        ("no adjoint by einsum", lambda: Multilinear("ii,ij->j")),
        ("2 arguments, but 1 spaces", lambda: Multilinear("i,ij->j", (Euclidean(),))),
        ("takes 2 arguments, not 1", lambda: Multilinear("i,ij->j").forward(ones(2))),
        ("for one or two axes", lambda: LocallyConnected((1,), (0, 0), (1,))),
        (r"such an input has output sizes \(5,\)",
         lambda: ROW.forward(ones(4, 1, 1, 2), ones(1, 1, 6))),
        ("1 spatial axes", lambda: ROW.forward(
            ones(5, 1, 1, 2), ones(1, 6))),
        ("1 to 3 window sizes", lambda: AveragePool((2, 2), (1,))),
        ("no multiples", lambda: InvertibleDownsampling((2,)).forward(None, ones(1, 1, 3))),
        ("no multiple of 4", lambda: InvertibleUpsampling((2, 2)).forward(None, ones(1, 3, 2, 2))),
        ("positive whole factor", lambda: InvertibleDownsampling((0,))),
        (r"tuple, .*InvertibleDownsampling\(\(2, 2\)\)", lambda: InvertibleDownsampling(2)),
        (r"tuple, .*InvertibleUpsampling\(\(3, 3\)\)", lambda: InvertibleUpsampling(3)),
        (r"kernel is a tuple", lambda: AveragePool(2)),
        (r"stride is a tuple", lambda: AveragePool((2, 2), 1)),
        ("takes an operator", lambda: db.check_adjoint(nn.Linear(2, 2))),
        ("gives no sample", lambda: db.check_adjoint(Dense() @ Dense())),
        ("takes θ and x", lambda: db.check_adjoint(Dense(), ones(2, 2))),
        (r"2d's stride must be", lambda: db.LocallyConnected2d(1, 1, 4, 2, stride=0)),
        (r"input_size must be .* 2 of them", lambda: db.LocallyConnected2d(1, 1, (4,), 2)),
        ("no place for a window", lambda: db.LocallyConnected1d(1, 1, 2, 3)),
    ],
)  # fmt: skip
def test_bad_input(message, make):
    with pytest.raises(db.InputError, match=message):
        make()


# ------------------------------------------------------------------------- what must be caught


class Wrong(Operator):
    """A dense operator with one thing changed."""

    def __init__(self, **changed):
        self.changed = changed

    def _run(self, name, *args):
        result = getattr(Dense(), name)(*args)
        return self.changed[name](result) if name in self.changed else result

    def forward(self, weight, x):
        return self._run("forward", weight, x)

    def transpose(self, weight, y, shape=None):
        return self._run("transpose", weight, y)

    def weight_adjoint(self, x, y, shape=None):
        return self._run("weight_adjoint", x, y)


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (r"⟨x, Kᵀ⟩: -?\d+\.\d{6,} against -?\d+\.\d{6,}", {"transpose": lambda t: 1.0001 * t}),
        (r"⟨θ, K□⟩: ", {"weight_adjoint": lambda t: t + 1e-6}),
        (r"\(Kᵀ\)□ = K□: ", {"weight_adjoint": lambda t: -t}),
        (r"\(K□\)ᵀ = Kᵀ: ", {"transpose": lambda t: t.flip(-1)}),
        (r"K\(θ, 0\) = 0: ", {"forward": lambda t: t + 1e-3}),
        (r"K linear in x", {"forward": torch.tanh}),
        (r"K linear in θ", {"forward": torch.tanh}),
        (r"Kᵀ linear in y", {"transpose": torch.sin}),
        (r"K□ linear in x", {"weight_adjoint": torch.sin}),
        (r"K□ has shape \(5, 4\), θ has shape \(4, 5\)", {"weight_adjoint": lambda t: t.T}),
        # beyond the reach of autograd: the pairing finds it
        (r"\(Kᵀ\)□ = K□: ", {"transpose": lambda t: 1.0001 * t.detach()}),
    ],
)
def test_a_wrong_adjoint_is_caught(row, changed):
    sample = torch.empty(4, 5), torch.empty(2, 3, 5)
    assert db.check_adjoint(Wrong(), *sample).worst <= EXACT
    with pytest.raises(db.CheckError, match=row):
        db.check_adjoint(Wrong(**changed), *sample)


def test_an_adjoint_that_forgets_the_space_is_caught():
    class Forgetful(Dense):
        domain = Weighted(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))

    with pytest.raises(db.CheckError, match="⟨x, Kᵀ⟩") as caught:
        db.check_adjoint(Forgetful())
    assert not caught.value.report.passed


def test_an_operator_that_autograd_cannot_see_through():
    operator = Wrong(transpose=torch.Tensor.detach, weight_adjoint=torch.Tensor.detach)
    assert db.check_adjoint(operator, torch.empty(4, 5), torch.empty(2, 5)).worst <= EXACT


# ------------------------------------------------------------------ locally connected layers


class Unfolded(nn.Module):
    """The same layer by unfold and einsum."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach().clone()), None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone())
        self.kernel, self.options = layer.kernel_size, layer.operator

    def forward(self, x):
        o = self.options
        patches = F.unfold(x, self.kernel, o.dilation, o.padding, o.stride)
        patches = patches.reshape(*x.shape[:2], *self.kernel, *self.weight.shape[:2])
        y = torch.einsum("bckluv,uvockl->bouv", patches, self.weight)
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("flatten_after", [None, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_locally_connected_net_against_unfolding(bias, flatten_after):
    torch.manual_seed(0)
    layers = [
        db.LocallyConnected2d(2, 3, (7, 6), 3, stride=(2, 1), padding=1, bias=bias),
        db.LocallyConnected2d(3, 2, (4, 6), (2, 3), dilation=(1, 2), bias=bias),
    ]
    net = nn.Sequential(
        layers[0], nn.Softplus(), layers[1], nn.Flatten(), nn.Linear(12, 3)
    ).double()
    other = copy.deepcopy(net)
    other[0], other[2] = Unfolded(net[0]), Unfolded(net[2])
    x, y = r(4, 2, 7, 6), torch.tensor([0, 1, 2, 0])
    leaf = x.clone().requires_grad_()
    losses = F.cross_entropy(other(leaf), y, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    expected = g.square().sum() / 4
    (losses.mean() + expected).backward()
    model = db.Penalised(net, db.LossGradient(), strict=True, flatten_after=flatten_after)
    for _ in range(3):
        net.zero_grad()
        with db.count_operations() as ops:
            mine = x.clone().requires_grad_()
            out, penalty = model(mine, y)
            (F.cross_entropy(out, y) + penalty).backward()
    assert (ops.products, ops.weight_adjoint) == (4 * 3, 2 * 3)  # x itself asks for one Kᵀ more
    torch.testing.assert_close(penalty.detach(), expected.detach(), rtol=1e-10, atol=0)
    pairs = [(mine, leaf), *zip(net.parameters(), other.parameters(), strict=True)]
    assert all(float((a.grad - b.grad).norm()) <= 1e-10 * float(b.grad.norm()) for a, b in pairs)
    explanation = model.explain(x, y)
    assert "locally_connected" not in str(explanation.generic) and explanation.layers == 3
    assert db.check(model, x, y).worst <= 1e-10


@pytest.mark.parametrize(
    "plan, space",  # columns are Euclidean
    [("rows", None), ("rows", Sobolev(0.7, (0.2, 0.3), "neumann")), ("columns", None)],
)
def test_jacobians_of_locally_connected_nets(plan, space):
    """Seeds join the batch of the layer, of average pools and of pixel shuffles."""
    torch.manual_seed(0)
    net = nn.Sequential(
        db.LocallyConnected2d(2, 3, 6, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2),
        nn.PixelUnshuffle(3), nn.Flatten(), nn.Linear(27, 4),
    )  # fmt: skip
    model = db.Penalised(net, db.Jacobian(space=space, plan=plan, chunk=3), strict=True)
    assert db.check(model, torch.randn(3, 2, 6, 6)).worst <= 1e-10


def test_a_spectral_norm_between_spaces():
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    spectral = db.SpectralNorm(
        iterations=20, domain=Sobolev(1.0, 0.3, "dirichlet"), codomain=Weighted(torch.rand(4) + 0.2)
    )
    x = torch.randn(3, 6)
    assert db.check(db.Penalised(net, spectral, strict=True), x).worst <= 1e-10


def test_the_price_of_a_locally_connected_layer():
    """Two FLOPs per example and weight, as a convolution of the same sizes."""
    K = LocallyConnected((1, 1), (1, 1), (1, 1))
    weight, x = torch.randn(6, 6, 4, 3, 3, 3), torch.randn(2, 3, 6, 6)
    y = torch.randn(2, 4, 6, 6)
    for run in (
        lambda: K.forward(weight, x),
        lambda: K.transpose(weight, y, x.shape),
        lambda: K.weight_adjoint(x, y, weight),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == 2 * 2 * weight.numel()


def test_one_dimensional_layers_are_flat_two_dimensional_ones():
    one = db.LocallyConnected1d(2, 3, 8, 3, stride=2, padding=1, dilation=2).double()
    two = db.LocallyConnected2d(2, 3, (1, 8), (1, 3), (1, 2), (0, 1), (1, 2)).double()
    with torch.no_grad():
        two.weight.copy_(one.weight[None].unsqueeze(-2))
        two.bias.copy_(one.bias.unsqueeze(-2))
    x = r(4, 2, 8)
    torch.testing.assert_close(one(x), two(x.unsqueeze(-2)).squeeze(-2))


def test_equal_filters_are_a_convolution():
    conv = nn.Conv2d(3, 4, 3, 2, 1).double()
    layer = db.LocallyConnected2d(3, 4, (8, 9), 3, 2, 1).double()
    with torch.no_grad():
        layer.weight.copy_(conv.weight.expand_as(layer.weight))
        layer.bias.copy_(conv.bias[:, None, None].expand_as(layer.bias))
    x = r(2, 3, 8, 9)
    torch.testing.assert_close(layer(x), conv(x))


def test_locally_connected_under_autocast_and_in_half():
    layer = db.LocallyConnected2d(2, 3, 5, 3)
    x = torch.randn(4, 2, 5, 5)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_adjoints_round_once(dtype):
    K = LocallyConnected((1, 1), (1, 1), (1, 1))
    weight, x, y = (r(*s).to(dtype) for s in ((6, 6, 4, 3, 3, 3), (2, 3, 6, 6), (2, 4, 6, 6)))
    wide = [t.double() for t in (weight, x, y)]
    pairs = (
        (K.forward(weight, x), K.forward(*wide[:2])),
        (K.transpose(weight, y, x.shape), K.transpose(wide[0], wide[2], x.shape)),
        (K.weight_adjoint(x, y, weight), K.weight_adjoint(wide[1], wide[2], weight)),
    )
    for found, exact in pairs:
        assert found.dtype == dtype
        assert float((found.double() - exact).norm()) <= torch.finfo(dtype).eps * float(
            exact.norm()
        )


def test_locally_connected_operators_are_well_formed_for_torch():
    """torch.library's own tests: schema, fake shapes and autograd registration."""
    x, weight = r(2, 2, 5, 5).requires_grad_(), r(3, 3, 2, 2, 3, 3).requires_grad_()
    geometry = ([2, 2], [1, 1], [1, 1])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.doubleback
    for op, args in (
        (ops.locally_connected.default, (x, weight, *geometry)),
        (ops.locally_connected_transpose.default, (weight, r(2, 2, 3, 3), [5, 5], *geometry)),
        (ops.locally_connected_weight_adjoint.default, (x, r(2, 2, 3, 3), [3, 3], *geometry)),
        (ops.sobolev.default, (x, 0.5, [0.1, 0.2], "periodic,neumann", 2.0)),
    ):
        torch.library.opcheck(op, args, test_utils=tests)
    assert torch.autograd.gradgradcheck(
        lambda a, b: ops.locally_connected(a, b, *geometry), (x[:1], weight)
    )
