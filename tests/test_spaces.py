"""Spaces: axioms, dense Gram matrices, refinement, and whole penalised steps in each of them."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import doubleback as db
from doubleback import spaces
from support import gram

BOUNDARIES = ("periodic", "neumann", "dirichlet")


def close(a, b, tolerance=1e-10):
    assert a.shape == b.shape
    assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-300)


@st.composite
def cases(draw):
    """(space, G, G⁻¹, spatial sizes)."""
    sizes = tuple(draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)))
    spacing = tuple(draw(st.floats(0.05, 2.0)) for _ in sizes)
    kind = draw(st.sampled_from(["sobolev", "grid", "weighted"]))
    if kind == "sobolev":
        order = draw(st.floats(-2.0, 2.5))
        ends = tuple(draw(st.sampled_from(BOUNDARIES)) for _ in sizes)
        space = spaces.Sobolev(order, spacing, ends)
        return space, *gram.sobolev(order, sizes, spacing, ends), sizes
    if kind == "grid":
        rule = draw(st.sampled_from(["midpoint", "trapezoid"]))
        return spaces.Grid(spacing, rule), *gram.grid(sizes, spacing, rule), sizes
    weight = torch.rand(sizes, dtype=torch.float64) + 0.1
    flat = weight.flatten()
    return spaces.Weighted(weight), torch.diag(flat), torch.diag(1 / flat), sizes


@hypothesis.given(cases(), st.lists(st.integers(1, 3), max_size=3))
@hypothesis.settings(max_examples=60)
def test_axioms_and_dense_gram_matrices(case, batch):
    space, matrix, inverse, sizes = case
    torch.manual_seed(0)
    u, v, g = (torch.randn(*batch, *sizes, dtype=torch.float64) for _ in range(3))
    axes, dims = len(sizes), len(batch)
    close(space.riesz_inverse(u), gram.apply(matrix, u, axes))
    close(space.riesz(g), gram.apply(inverse, g, axes))
    close(space.riesz(space.riesz_inverse(u)), u)
    inner = space.inner(u, v, batch_dims=dims)
    assert inner.shape == tuple(batch)
    flat = [t.reshape(*batch, -1) for t in (u, v)]
    expected = torch.einsum("...i,ij,...j->...", flat[0], matrix, flat[1])
    scale = space.norm(u, batch_dims=dims) * space.norm(v, batch_dims=dims)
    assert float(((inner - expected).abs() / scale).max()) <= 1e-12
    close(space.inner(v, u, batch_dims=dims), inner, 1e-9 * float((scale / inner.abs()).max()))
    assert bool((space.inner(u, u, batch_dims=dims) > 0).all())
    # the Riesz identity Σ gᵢvᵢ = ⟨riesz(g), v⟩, for all batch entries as one element
    pairing, represented = (g * v).sum(), space.inner(space.riesz(g), v, batch_dims=0)
    assert abs(float(pairing - represented)) <= 1e-9 * float(scale.max() * space.norm(g, 0) + 1)


def test_order_zero_is_the_midpoint_grid_whatever_the_boundary():
    u = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    for boundary in BOUNDARIES:
        space = spaces.Sobolev(0.0, (0.3, 0.2), boundary)
        close(space.riesz(u), spaces.Grid((0.3, 0.2)).riesz(u), 1e-13)


def test_a_wave_has_its_exact_norm_on_every_grid():
    for n in (8, 16, 32):
        x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        for boundary, wave, omega in (
            ("periodic", torch.sin(2 * math.pi * x), 2 * math.pi),
            ("neumann", torch.cos(3 * math.pi * x), 3 * math.pi),
            ("dirichlet", torch.sin(math.pi * x), math.pi),
        ):
            square = spaces.Sobolev(1.5, 1 / n, boundary).inner(wave[None], wave[None])
            assert float(square) == pytest.approx((1 + omega**2) ** 1.5 / 2, rel=1e-12)


# --------------------------------------------------------------------- refinement of the grid


def rates(errors):
    return [math.log2(a / b) for a, b in itertools.pairwise(errors)]


@pytest.mark.parametrize("rule", ["midpoint", "trapezoid"])
def test_quadrature_converges_at_second_order(rule):
    """∫₀¹ eˣ · x dx = 1, and the gradient of u ↦ ∫ eᵘ at u = x has the L² norm² ∫ e²ˣ."""
    errors, dual = [], []
    for n in (16, 32, 64, 128):
        if rule == "midpoint":
            h, x = 1 / n, (torch.arange(n, dtype=torch.float64) + 0.5) / n
        else:
            h, x = 1 / n, torch.arange(n + 1, dtype=torch.float64) / n
        space = spaces.Grid(h, rule)
        errors.append(abs(float(space.inner(x[None], x.exp()[None])) - 1))
        g = space.riesz_inverse(x.exp()[None])  # the Euclidean gradient: weights times eˣ
        square = db.SquaredNorm(space).measure([g])[0]
        dual.append(abs(float(square) - (math.e**2 - 1) / 2))
    assert all(1.9 < r < 2.1 for r in rates(errors)), errors
    assert all(1.9 < r < 2.1 for r in rates(dual)), dual


def test_dual_sobolev_norms_converge_to_those_of_the_boundary_value_problem():
    """‖g‖² in the dual of H¹ is ∫ r v with v − v″ = r and the boundary's conditions."""
    neumann, dirichlet, periodic = [], [], []
    sinh, cosh, tanh = math.sinh(1), math.cosh(1), math.tanh(0.5)
    a = (cosh - 1) / sinh  # r = x: v = x + a cosh x − sinh x
    ramp = 1 / 3 + a * (sinh - cosh + 1) - (cosh - sinh)
    for n in (16, 32, 64, 128):
        x = (torch.arange(n, dtype=torch.float64) + 0.5) / n

        def square(r, boundary, n=n):
            return float(
                db.SquaredNorm(spaces.Sobolev(1, 1 / n, boundary)).measure([r[None] / n])[0]
            )

        neumann.append(abs(square(x, "neumann") - ramp))
        dirichlet.append(abs(square(torch.ones_like(x), "dirichlet") - (1 - 2 * tanh)))
        periodic.append(square(torch.exp(torch.sin(2 * math.pi * x)), "periodic"))
    assert all(1.9 < r < 2.1 for r in rates(neumann)), neumann
    assert all(1.9 < r < 2.1 for r in rates(dirichlet)), dirichlet
    # a smooth periodic function converges faster than any power: exact at 32 points
    assert abs(periodic[1] - periodic[3]) < 1e-14 * periodic[3]


def test_the_euclidean_penalty_drifts_where_the_others_converge():
    """F(u) = ∫ sin(u): the Euclidean gradient is h cos(u), so its norm² falls like h."""
    found = {}
    for n in (64, 128):
        x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        g = (x.cos() / n)[None]
        for space in (spaces.Euclidean(), spaces.Grid(1 / n), spaces.Sobolev(1, 1 / n, "neumann")):
            value = float(db.SquaredNorm(space).measure([g])[0])
            found.setdefault(type(space).__name__, []).append(value)
    ratio = {name: coarse / fine for name, (coarse, fine) in found.items()}
    assert ratio["Euclidean"] == pytest.approx(2, rel=1e-3)
    assert ratio["Grid"] == pytest.approx(1, rel=1e-4)
    assert ratio["Sobolev"] == pytest.approx(1, rel=1e-4)


# -------------------------------------------------------------------- whole steps in a space


def conv_net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 1)
    ).double()


SIZES, STEPS = (4, 6), (0.2, 0.35)
ENDS = ("neumann", "dirichlet")
WEIGHT = torch.rand(SIZES, generator=torch.Generator().manual_seed(1)).double() + 0.2
INPUT_SPACES = {
    "sobolev": (spaces.Sobolev(0.8, STEPS, ENDS), gram.sobolev(0.8, SIZES, STEPS, ENDS)[1]),
    "negative": (spaces.Sobolev(-1, STEPS), gram.sobolev(-1, SIZES, STEPS, ["periodic"] * 2)[1]),
    "trapezoid": (spaces.Grid(STEPS, "trapezoid"), gram.grid(SIZES, STEPS, "trapezoid")[1]),
    "weighted": (spaces.Weighted(WEIGHT), torch.diag(1 / WEIGHT.flatten())),
}
NORMS = {
    "squared": (db.SquaredNorm, lambda s: s),
    "norm": (db.Norm, lambda s: s.sqrt()),
    "deviation": (
        lambda space: db.Deviation(0.3, space=space),
        lambda s: (s.sqrt() - 0.3).square(),
    ),
    "one-sided": (
        lambda space: db.Deviation(0.3, one_sided=True, space=space),
        lambda s: (s.sqrt() - 0.3).relu().square(),
    ),
}


def dense_step(net, x, inverse, p):
    """∇(Σ out² + mean p(gᵀG⁻¹g)) by stock autograd and a dense matrix."""
    x = x.clone().requires_grad_()
    out = net(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    flat = g.reshape(*g.shape[:2], -1)
    penalty = p(torch.einsum("bci,ij,bcj->b", flat, inverse, flat)).mean()
    (out.square().sum() + penalty).backward()
    return penalty.detach(), [x.grad, *(q.grad for q in net.parameters())]


def engine_step(net, x, norm, calls=3, **options):
    model = db.Penalised(net, db.OutputGradient(norm=norm), strict=True, **options)
    for _ in range(calls):
        net.zero_grad()
        x = x.detach().clone().requires_grad_()
        out, penalty = model(x)
        (out.square().sum() + penalty).backward()
    return model, penalty.detach(), [x.grad, *(q.grad for q in net.parameters())]


@pytest.mark.parametrize("flatten_after", [None, 1])
@pytest.mark.parametrize("space", INPUT_SPACES)
def test_engine_against_dense_gram_matrices(space, flatten_after, flattened):
    """Each norm, on one network."""
    space, inverse = INPUT_SPACES[space]
    net = conv_net()
    x = torch.randn(3, 2, *SIZES, dtype=torch.float64)
    for name, (make, p) in NORMS.items():
        flattened.clear()
        expected = dense_step(copy.deepcopy(net), x, inverse, p)
        model, *found = engine_step(net, x, make(space=space), flatten_after=flatten_after)
        net.zero_grad()
        close(found[0], expected[0])
        for ours, theirs in zip(found[1], expected[1], strict=True):
            close(ours, theirs)
        assert len(flattened) == (0 if flatten_after is None else 2), name
        assert db.check(model, x).worst <= 1e-10, name


def test_a_product_space_for_two_inputs(flattened):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.code = nn.Linear(24, 5), nn.Linear(3, 5)
            self.last = nn.Linear(5, 1)

        def forward(self, image, code):
            return self.last(torch.tanh(self.image(image.flatten(1)) + self.code(code)))

    torch.manual_seed(0)
    net = Two().double()
    image, code = torch.randn(4, *SIZES).double(), torch.randn(4, 3).double()
    sobolev, inverse = INPUT_SPACES["sobolev"]
    weight = torch.tensor([1.0, 2.0, 5.0]).double()
    space = spaces.Product(sobolev, spaces.Weighted(weight))
    oracle = copy.deepcopy(net)
    leaves = [image.clone().requires_grad_(), code.clone().requires_grad_()]
    g, k = torch.autograd.grad(oracle(*leaves).sum(), leaves, create_graph=True)
    square = torch.einsum("bi,ij,bj->b", g.flatten(1), inverse, g.flatten(1))
    expected = (square + (k.square() / weight).sum(1)).sqrt().mean()
    expected.backward()
    model = db.Penalised(
        net, db.OutputGradient(norm=db.Norm(space)), wrt=(0, 1), strict=True, flatten_after=1
    )
    for _ in range(2):
        net.zero_grad()
        _, penalty = model(image, code)
        penalty.backward()
    close(penalty.detach(), expected.detach())
    for ours, theirs in zip(net.parameters(), oracle.parameters(), strict=True):
        if theirs.grad is not None:
            close(ours.grad, theirs.grad)
    assert len(flattened) == 2
    with pytest.raises(db.InputError, match="2 factors, but 1 inputs"):
        db.Penalised(net, db.OutputGradient(norm=db.Norm(space)))(image, code)


def test_a_space_of_your_own(flattened):
    class Dense(spaces.Space):
        def __init__(self, matrix):
            self.matrix, self.inverse = matrix, torch.linalg.inv(matrix)

        def riesz(self, g):
            return g @ self.constant(self.inverse, like=g)

        def riesz_inverse(self, u):
            return u @ self.constant(self.matrix, like=u)

    root = torch.randn(4, 4).double()
    matrix = root @ root.T + torch.eye(4).double()
    net = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1)).double()
    x = torch.randn(5, 4).double()
    space = Dense(matrix)
    u = torch.randn(3, 4).double()
    close(space.norm(u).square(), torch.einsum("bi,ij,bj->b", u, matrix, u))
    expected = dense_step(
        copy.deepcopy(net), x[:, None], torch.linalg.inv(matrix), lambda s: s.sqrt()
    )
    _, *found = engine_step(net, x, db.Norm(space), flatten_after=1)
    close(found[0], expected[0])
    for ours, theirs in zip(found[1][1:], expected[1][1:], strict=True):
        close(ours, theirs)
    assert len(flattened) == 4  # each sweep by itself: a space of one's own is called as it is


def test_the_operator_norm_between_two_spaces():
    """‖J‖ = σ_max(G_Y^½ J G_X^{−½}) by power iteration with J* = G_X⁻¹JᵀG_Y."""
    x_space, x_inverse = INPUT_SPACES["sobolev"]
    y_space = spaces.Weighted(torch.tensor([1.0, 4.0, 0.5]).double())
    jacobian = torch.randn(3, 24).double()
    values, vectors = torch.linalg.eigh(x_inverse)
    whitened = torch.diag(y_space.weight.sqrt()) @ jacobian @ vectors @ torch.diag(values.sqrt())
    q = torch.randn(1, *SIZES).double()
    for _ in range(300):
        q = q / x_space.norm(q)
        y = q.flatten(1) @ jacobian.T
        size = y_space.norm(y)
        q = x_space.riesz((y_space.riesz_inverse(y) @ jacobian).reshape(1, *SIZES))
    assert float(size) == pytest.approx(float(torch.linalg.matrix_norm(whitened, 2)), rel=1e-8)


# --------------------------------------------------------------------- dtypes, layouts, compile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", INPUT_SPACES)
def test_lower_precision_is_computed_in_float32(name, dtype):
    space, _ = INPUT_SPACES[name]
    g = torch.randn(2, 3, *SIZES).to(dtype)
    exact = space.riesz(g.double())
    found = space.riesz(g)
    assert found.dtype == dtype and found.shape == g.shape
    close(found.double(), exact, 2 * torch.finfo(dtype).eps)
    values, q = db.Norm(space).measure([g])
    assert values.dtype == torch.float32 and q[0].dtype == dtype
    exact_values, exact_q = db.Norm(space).measure([g.double()])
    close(values.double(), exact_values, 1e-5)
    close(q[0].double(), exact_q[0], 2 * torch.finfo(dtype).eps)


def test_a_bfloat16_net_in_a_sobolev_space():
    """Flattened sweeps of a 16-bit net: the penalty is float32, close to that of the same numbers
    in float64; `accumulate` gives the same gradients as two calls."""
    space, _ = INPUT_SPACES["sobolev"]
    net = conv_net().bfloat16()
    x = torch.randn(3, 2, *SIZES).bfloat16()
    model, penalty, grads = engine_step(net, x, db.SquaredNorm(space), flatten_after=1)
    assert penalty.dtype == torch.float32 and grads[0].dtype == torch.bfloat16
    exact = db.Penalised(copy.deepcopy(net).double(), model.penalty)(x.double())[1]
    assert float(penalty) == pytest.approx(float(exact.detach()), rel=0.03)
    net.zero_grad()
    model(x)[1].backward()
    two = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    model.accumulate(x)
    for a, b in zip(two, (p.grad for p in net.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(a, b)


def test_layout_and_empty_batches_are_kept():
    space = spaces.Sobolev(1, (0.1, 0.1))
    g = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert space.riesz(g).is_contiguous(memory_format=torch.channels_last)
    close(space.riesz(g), space.riesz(g.contiguous()), 1e-6)
    assert space.riesz(torch.randn(0, 3, 4, 4)).shape == (0, 3, 4, 4)


def test_riesz_maps_differentiate_twice():
    space = spaces.Sobolev(0.7, 0.3, "neumann")
    u = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(space.riesz, u)
    assert torch.autograd.gradgradcheck(lambda t: space.riesz(t).tanh(), u)


def test_compiled_sweeps_hold_a_sobolev_space():
    net = conv_net()
    x = torch.randn(3, 2, *SIZES, dtype=torch.float64)
    space, inverse = INPUT_SPACES["sobolev"]
    expected = dense_step(copy.deepcopy(net), x, inverse, lambda s: s)
    _, *found = engine_step(net, x, db.SquaredNorm(space), compile=True)
    close(found[0], expected[0])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        close(ours, theirs)


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("positive weights", lambda: spaces.Weighted(torch.tensor([1.0, -1.0]))),
        ("positive weights", lambda: spaces.Weighted(torch.tensor([1.0, float("inf")]))),
        ("positive weights", lambda: spaces.Weighted(0.0)),
        ("spacing must be a positive", lambda: spaces.Grid(-0.1)),
        ("spacing must be a positive", lambda: spaces.Sobolev(1, (0.1, float("nan")))),
        ("rule must be one of", lambda: spaces.Grid(0.1, "simpson")),
        ("finite number, not inf", lambda: spaces.Sobolev(math.inf, 0.1)),
        ("finite number, not nan", lambda: spaces.Sobolev(math.nan, 0.1)),
        ("boundary must be one of", lambda: spaces.Sobolev(1, 0.1, "robin")),
        ("2 boundaries .* for 3 spacings", lambda: spaces.Sobolev(1, (1, 1, 1), ENDS)),
        ("takes spaces", lambda: spaces.Product(spaces.Euclidean(), "L2")),
        ("at least one", lambda: spaces.Product()),
        ("2 factors, its element has 1", lambda: spaces.Product(
            spaces.Euclidean(), spaces.Euclidean()).riesz((torch.ones(1),))),
        ("at least 2 points", lambda: spaces.Grid(0.1, "trapezoid").riesz(torch.ones(3, 1))),
        ("2 spatial axes, a tensor of shape", lambda: spaces.Grid((1, 1)).riesz(torch.ones(3))),
        ("space must be", lambda: db.SquaredNorm(space="H1")),
        ("space must be", lambda: db.Deviation(space=spaces.Euclidean)),
    ],
)  # fmt: skip
def test_bad_input(message, make):
    with pytest.raises(db.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Grid(0.1), r"1 spatial axis, but one example of shape \(2, 4, 6\) has 3"),
        (spaces.Sobolev(1, (1, 1, 1, 1)), r"4 spatial axes, but one example of shape \(2, 4, 6\)"),
        (spaces.Weighted(torch.ones(5)), r"\(5,\) do not broadcast .* shape \(2, 4, 6\)"),
        (spaces.Weighted(torch.ones(3, 2, 4, 6)), r"do not broadcast .* shape \(2, 4, 6\)"),
    ],
)
def test_a_space_that_does_not_fit_the_input(space, message):
    model = db.Penalised(conv_net(), db.OutputGradient(norm=db.SquaredNorm(space)))
    with pytest.raises(db.InputError, match=message):
        model(torch.randn(3, 2, *SIZES, dtype=torch.float64))


def test_measured_tables_are_those_of_the_results():
    script = Path(__file__).parents[1] / "benchmarks" / "spaces_table.py"
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0


def test_equality_and_printing():
    assert spaces.Weighted(WEIGHT) == spaces.Weighted(WEIGHT.clone()) != spaces.Weighted(2 * WEIGHT)
    assert spaces.Weighted(WEIGHT) != spaces.Euclidean()
    assert spaces.Sobolev(1, 0.5) == spaces.Sobolev(1.0, (0.5,), "periodic") != spaces.Grid(0.5)
    pair = spaces.Product(spaces.Euclidean(), spaces.Grid(0.5))
    assert pair == spaces.Product(spaces.Euclidean(), spaces.Grid(0.5))
    assert len({pair, spaces.Product(*pair.spaces), spaces.Weighted(1.0)}) == 2
    assert "shape (4, 6)" in repr(spaces.Weighted(WEIGHT))


@pytest.mark.parametrize(
    "space",
    [spaces.Sobolev(1.0, 0.1, "neumann"), spaces.Grid(0.1, "trapezoid"), spaces.Weighted(2.0)],
    ids=lambda space: type(space).__name__,
)
def test_spaces_inside_a_compiled_function(space):
    """In a user's own torch.compile, without a break in the graph."""
    u = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    eager = db.SquaredNorm(space).value([u]).sum()
    compiled = torch.compile(
        lambda t: db.SquaredNorm(space).value([t]).sum(), backend="aot_eager", fullgraph=True
    )(u)
    torch.testing.assert_close(compiled, eager)
    for ours, theirs in zip(
        torch.autograd.grad(compiled, u), torch.autograd.grad(eager, u), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
