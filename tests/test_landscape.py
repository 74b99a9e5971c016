"""Exact breakpoints and derivative curves against brute force, autograd and the engine."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback import landscape as L
from doubleback.landscape.pieces import find_roots, horner
from support.landscape_nets import CASES, build, changes, mlp, pattern, prepared, run_at

TOLERANCE = 1e-10  # relative, float64


@cache
def followed(case: str):
    """net, examples, path description, span and the followed path: made once per case."""
    net, x, along, span = build(case)
    return net, x, along, span, L.follow(net, x, along, span)


def close(ours: float, truth: float, tolerance: float = TOLERANCE) -> bool:
    return abs(ours - truth) <= tolerance * (1 + abs(truth))


# ----------------------------------------------------------------------------- breakpoints


@pytest.mark.parametrize("case", CASES)
def test_pattern_is_constant_on_a_piece_and_changes_at_its_end(case):
    net, x, along, _, path = followed(case)
    assert len(path.breakpoints) >= 1
    generator = torch.Generator().manual_seed(0)
    for piece in torch.randperm(len(path.start), generator=generator)[:40].tolist():
        start, end, example = path.start[piece], path.end[piece], int(path.example[piece])
        own = x[example : example + 1]
        inner = start + (end - start) * (0.002 + 0.996 * torch.rand(3, generator=generator))
        patterns = [pattern(net, own, along, float(t)) for t in inner]
        assert not any(changes(patterns[0], p).any() for p in patterns), (
            f"changes in {start} … {end}"
        )
    for b in path.breakpoints[:: max(1, len(path.breakpoints) // 40)]:
        own, gap = x[b.example : b.example + 1], _gap(path, b)
        left = pattern(net, own, along, b.t - gap)
        right = pattern(net, own, along, b.t + gap)
        assert int(changes(left, right).sum()) == len(b.units), f"{b} is not a change"


def _gap(path: L.Path, b: L.Breakpoint) -> float:
    """A third of the shorter neighbouring piece."""
    near = [e - s for s, e in path.pieces_of(b.example) if close(s, b.t) or close(e, b.t)]
    return min(near) / 3


@pytest.mark.parametrize("case", CASES)
def test_no_change_on_a_grid_is_missed(case):
    """A change of pattern between neighbours of a grid ⟺ a breakpoint between them."""
    net, x, along, span, path = followed(case)
    grid = torch.linspace(*span, 801, dtype=torch.float64)
    patterns = torch.stack([pattern(net, x, along, float(t)) for t in grid])
    moved = changes(patterns[1:], patterns[:-1]).any(2)
    for example in range(len(x)):
        places = [b.t for b in path.breakpoints if b.example == example]
        cells = torch.bincount(
            torch.searchsorted(grid, torch.tensor(places, dtype=torch.float64)) - 1,
            minlength=len(grid) - 1,
        )
        changed = moved[:, example]
        assert bool((cells[changed] >= 1).all())
        # a cell with two breakpoints may hold a unit that flips there and back
        assert bool(changed[cells == 1].all())


def test_a_million_points_of_the_papers_network_hold_no_other_sign_change():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1))
    net = net.double()
    x = torch.zeros(1, 1, dtype=torch.float64)
    path = L.follow(net, x, L.InputLine(torch.ones(1)), (-10.0, 10.0))
    grid = torch.linspace(-10, 10, 1_000_001, dtype=torch.float64)
    with torch.no_grad():
        first = net[0](grid[:, None])
        second = net[2](net[1](first))
    signs = torch.cat([first, second], 1) > 0
    cell, unit = (signs[1:] != signs[:-1]).nonzero(as_tuple=True)
    layers = {"0": 0, "2": 8}
    found = {
        (int(torch.searchsorted(grid, b.t)) - 1, layers[u.layer] + u.index[0])
        for b in path.breakpoints
        for u in b.units
    }
    assert found == set(zip(cell.tolist(), unit.tolist(), strict=True))
    assert len(found) == sum(len(b.units) for b in path.breakpoints) > 8


def test_units_are_named_by_layer_and_index():
    *_, path = followed("residual, first filter")
    units = {u for b in path.breakpoints for u in b.units}
    operators = {u.operator for u in units}
    assert {"relu", "max_pool2d", "leaky_relu"} <= operators
    assert {len(u.index) for u in units if u.operator != "abs"} == {3}
    assert {u.layer for u in units if u.operator == "relu"} == {"norm"}
    assert all(u.index[0] == 1 for u in units if u.operator in ("relu", "max_pool2d"))


def test_two_units_that_flip_together_are_one_breakpoint():
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1, bias=False), nn.ReLU())
    with torch.no_grad():
        net[0].weight[:] = torch.tensor([[1.0], [2.0]])
        net[0].bias[:] = torch.tensor([-1.0, -2.0])
        net[2].weight[:] = 1.0
    path = L.follow(net, torch.zeros(1, 1), L.InputLine(torch.ones(1)), (-3.0, 3.0))
    assert [b.t for b in path.breakpoints] == [1.0]
    assert {str(u) for u in path.breakpoints[0].units} == {"0[0]", "0[1]", "2[0]"}


def test_examples_are_independent_and_chunks_do_not_matter(monkeypatch):
    net, x, along, span = build("residual, first filter", examples=6)
    whole = L.follow(net, x, along, span)
    monkeypatch.setattr("doubleback.landscape.paths.CHUNK", 4)
    monkeypatch.setattr("doubleback.landscape.pieces.LIMIT", 1)
    parts = L.follow(net, x, along, span)
    assert torch.equal(whole.flips.example, parts.flips.example)
    assert torch.equal(whole.flips.unit, parts.flips.unit)
    assert torch.allclose(whole.flips.at, parts.flips.at, rtol=0, atol=1e-12)


def test_pieces_cover_the_span():
    _, x, _, span, path = followed("relu, all layers")
    for example in range(len(x)):
        pieces = path.pieces_of(example)
        assert pieces[0][0] == span[0] and pieces[-1][1] == span[1]
        assert all(a[1] == b[0] for a, b in pairwise(pieces))


# ------------------------------------------------------------------------------- polynomials


def test_roots_of_random_polynomials():
    generator = torch.Generator().manual_seed(0)
    for degree in range(1, 8):
        roots = 3 * torch.rand(200, degree, generator=generator, dtype=torch.float64) - 1.5
        roots[:20, degree // 2 :] = roots[:20, degree // 2 :].round()  # integers and repetitions
        coefficients = [torch.ones(200, dtype=torch.float64)]
        for root in roots.unbind(1):  # multiply by (s − root)
            shifted = [torch.zeros(200, dtype=torch.float64), *coefficients]
            coefficients = [
                b - root * a
                for a, b in zip([*coefficients, torch.zeros(200)], shifted, strict=True)
            ]
        lo, hi = torch.tensor(-1.0).double(), torch.tensor(1.0).double()
        index, found = find_roots(coefficients, lo, hi)
        for k in range(20, 200):
            truth = roots[k][roots[k].abs() < 1].sort().values
            gaps = (truth[1:] - truth[:-1]).min() if len(truth) > 1 else torch.tensor(1.0)
            if gaps < 1e-6 or bool((roots[k].abs() - 1).abs().min() < 1e-9):
                continue
            ours = found[index == k].sort().values
            assert len(ours) == len(truth)
            # rounding of the coefficients moves a root by about ε / gap^(degree − 1)
            assert torch.allclose(ours, truth, rtol=0, atol=1e-6)
            own = [c[k] for c in coefficients]
            left, right = horner(own, ours - 1e-7), horner(own, ours + 1e-7)
            assert bool((left * right < 0).all()) or gaps < 1e-4


def test_double_roots_are_no_sign_change():
    for lift, count in ((1e-9, 0), (-1e-9, 2)):  # (s − 0.3)², just above and just below zero
        square = torch.tensor([[0.09 + lift], [-0.6], [1.0]], dtype=torch.float64)
        ends = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        index, at = find_roots(square.unbind(), *ends)
        assert len(index) == count
        assert torch.allclose(at.sort().values, 0.3 + 1e-9**0.5 * ends[:count])


# ------------------------------------------------------------------------------------ curves


def gradient_of(out, x, seed):
    """∇ₓ⟨seed(out), out⟩ with the seed held, differentiable."""
    return torch.autograd.grad(out, x, seed, create_graph=True)[0]


def oracle(net, x, along, t: float, of, *extra):
    """R and dR/dt of one example by float64 autograd alone."""
    place = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    if isinstance(along, L.InputLine):
        leaf = (x + place * along.direction).requires_grad_()
        out = net(leaf)
    else:
        leaf = x.clone().requires_grad_()
        out = run_at(net, leaf, along, place)
    if of == "cross_entropy":
        loss = nn.functional.cross_entropy(out, *extra)
    elif of == "mse":
        loss = (out - extra[0]).square().sum()
    else:
        loss = out[0, of]
    (xi,) = torch.autograd.grad(loss, leaf, create_graph=True)
    value = xi.square().sum()
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value, place, allow_unused=True)
    return value.item(), 0.0 if slope is None else slope.item()


PENALTIES = {
    "node": (1, lambda: db.OutputGradient(1)),
    "mse": ("mse", lambda: db.LossGradient("mse")),
    "cross_entropy": ("cross_entropy", lambda: db.LossGradient("cross_entropy")),
}


def labels(kind: str, examples: int, outputs: int):
    generator = torch.Generator().manual_seed(4)
    if kind == "mse":
        return (torch.randn(examples, outputs, generator=generator, dtype=torch.float64),)
    return (torch.randint(outputs, (examples,), generator=generator),) if kind != "node" else ()


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("clamped")])
def test_penalties_and_their_slopes_are_those_of_autograd(case, kind):
    """At a random point of every piece (at most twelve): R and dR/dt by float64 autograd."""
    net, x, along, _, path = followed(case)
    of, make = PENALTIES[kind]
    extra = labels(kind, len(x), 2)
    curve = L.penalty(path, make(), *extra)
    of_output = path.motion.degree.get(path.network.out, 0) if kind == "mse" else 0
    degree = 2 * (path.motion.slope + of_output)
    assert curve.value.exact == (kind != "cross_entropy" and degree <= 16)
    tolerance = TOLERANCE if curve.value.exact else 1e-3  # an interpolant between its exact ends
    generator = torch.Generator().manual_seed(1)
    for piece in torch.randperm(len(path.start), generator=generator)[:12].tolist():
        start, end, example = path.start[piece], path.end[piece], int(path.example[piece])
        t = start + (end - start) * torch.rand((), generator=generator, dtype=torch.float64)
        own = (e[example : example + 1] for e in extra)
        value, slope = oracle(net, x[example : example + 1], along, float(t), of, *own)
        assert close(float(curve.value(t, example)), value, tolerance)
        assert close(float(curve.slope(t, example)), slope, tolerance)


@pytest.mark.parametrize("of", ["output", "softmax"])
@pytest.mark.parametrize("case", ["relu, weight", "relu, input", "residual, norm"])
def test_jacobian_penalties_are_those_of_autograd(case, of):
    """‖J‖²_F summed over the rows of J, by float64 autograd, and its derivative along the path."""
    net, x, along, _, path = followed(case)
    curve = L.penalty(path, db.Jacobian(of))
    assert curve.value.exact == (of == "output")

    def truth(own, t: float) -> tuple[float, float]:
        place = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        if isinstance(along, L.InputLine):
            leaf = (own + place * along.direction).requires_grad_()
            out = net(leaf)
        else:
            leaf = own.clone().requires_grad_()
            out = run_at(net, leaf, along, place)
        out = out.softmax(1) if of == "softmax" else out
        rows = [torch.autograd.grad(o, leaf, create_graph=True)[0] for o in out[0]]
        value = sum(row.square().sum() for row in rows)
        slope = torch.autograd.grad(value, place, allow_unused=True)[0]
        return value.item(), 0.0 if slope is None else slope.item()

    tolerance = TOLERANCE if of == "output" else 1e-3  # an interpolant between its exact ends
    for piece in range(0, len(path.start), max(1, len(path.start) // 8)):
        example = int(path.example[piece])
        t = float(path.start[piece] + 0.3 * (path.end[piece] - path.start[piece]))
        value, slope = truth(x[example : example + 1], t)
        at = torch.tensor(t, dtype=torch.float64)
        assert close(float(curve.value(at, example)), value, tolerance)
        assert close(float(curve.slope(at, example)), slope, tolerance)


def test_penalties_that_are_no_function_of_weights_and_inputs_are_refused():
    *_, path = followed("relu, weight")
    with pytest.raises(db.InputError, match="without projections"):
        L.penalty(path, db.Jacobian(projections=1))
    with pytest.raises(db.InputError, match="by iteration"):
        L.penalty(path, db.SpectralNorm())


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("case", ["relu, weight", "prelu, all layers", "residual, first filter"])
def test_penalties_are_those_of_the_engine(case, kind):
    """`Penalised` with the parameters of the path, and its gradient along the path."""
    net, x, along, _, path = followed(case)
    _, make = PENALTIES[kind]
    extra = labels(kind, len(x), 2)
    curve = L.penalty(path, make(), *extra)
    tolerance = TOLERANCE if curve.value.exact else 1e-3
    model = db.Penalised(copy.deepcopy(net), make(), flatten_after=None)
    moved = dict(model.net.named_parameters())
    rest, directions = {n: p.detach().clone() for n, p in moved.items()}, {}
    if isinstance(along, L.Coordinate):
        directions[along.name] = torch.zeros_like(rest[along.name])
        directions[along.name][along.index] = 1
        rest[along.name][along.index] = 0
    else:
        directions |= along.by_name
    generator = torch.Generator().manual_seed(7)
    for piece in torch.randperm(len(path.start), generator=generator)[:8].tolist():
        start, end, example = path.start[piece], path.end[piece], int(path.example[piece])
        t = start + (end - start) * torch.rand((), generator=generator, dtype=torch.float64)
        with torch.no_grad():
            for name, d in directions.items():
                moved[name].copy_(rest[name] + t * d)
        own = tuple(e[example : example + 1] for e in extra)
        _, value = model(x[example : example + 1], *own)
        grads = torch.autograd.grad(value, [moved[name] for name in directions], allow_unused=True)
        pairs = zip(grads, directions.values(), strict=True)
        slope = sum(float((g * d).sum()) for g, d in pairs if g is not None)
        assert close(float(curve.value(t, example)), value.item(), tolerance)
        assert close(float(curve.slope(t, example)), slope, tolerance)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize(
    "case", ["relu, weight", "relu, input", "residual, norm", "maxout, weight"]
)
def test_jumps_are_differences_of_two_sided_limits(case, kind):
    """Richardson's extrapolation of autograd's values to the breakpoint, from either side."""
    net, x, along, _, path = followed(case)
    of, make = PENALTIES[kind]
    extra = labels(kind, len(x), 2)
    curve = L.penalty(path, make(), *extra)
    jumps = (curve.value.jumps(), curve.slope.jumps())
    assert [float(t) for t in jumps[0].t] == [b.t for b in path.breakpoints]
    for k, b in list(enumerate(path.breakpoints))[:12]:
        own = tuple(e[b.example : b.example + 1] for e in extra)
        step = min(1e-4, _gap(path, b))
        for which, found in enumerate(jumps):

            def limit(side: int, b=b, own=own, step=step, which=which) -> float:
                near, far = (
                    oracle(net, x[b.example : b.example + 1], along, b.t + side * h, of, *own)
                    for h in (step, 2 * step)
                )
                return 2 * near[which] - far[which]

            truth = limit(1) - limit(-1)
            assert abs(float(found.height[k]) - truth) <= 1e-5 * (1 + abs(truth))


class Rectified(nn.Module):
    """A kink in the parameters, and one behind a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2)

    def forward(self, x):
        h = nn.functional.linear(x, self.w.relu() - 0.3)
        return self.b(torch.relu(h) * h[:, :1])


@pytest.mark.parametrize("along", ["w[1,2]", None])
def test_kinks_in_parameters_and_products_of_activations(along):
    net = prepared(Rectified)
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    direction = L.random_direction(net, "w", seed=1) if along is None else L.Coordinate.parse(along)
    path = L.follow(net, x, direction, (-2.0, 2.0))
    own = [b for b in path.breakpoints if any(u.layer == "w" for u in b.units)]
    assert (own and all(b.t == pytest.approx(0.0, abs=1e-12) for b in own)) or along is None
    curve = L.penalty(path, db.OutputGradient(1))
    assert curve.value.exact and curve.value.jumps().largest > 1e-3
    for piece in range(len(path.start)):
        t, example = (path.start[piece] + 2 * path.end[piece]) / 3, int(path.example[piece])
        value, slope = oracle(net, x[example : example + 1], direction, float(t), 1)
        assert close(float(curve.value(t, example)), value)
        assert close(float(curve.slope(t, example)), slope)


def test_gradient_and_output_curves():
    net, x, along, _, path = followed("relu, weight")
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    out, slope = L.output(path, 1), L.gradient(path, 1, direction)
    for piece in range(0, len(path.start), 3):
        t, example = (path.start[piece] + path.end[piece]) / 2, int(path.example[piece])
        leaf = x[example : example + 1].clone().requires_grad_()
        z = run_at(net, leaf, along, t)[0, 1]
        (xi,) = torch.autograd.grad(z, leaf)
        assert close(float(out.value(t, example)), float(z.detach()))
        assert close(float(slope.value(t, example)), float((xi[0] * direction).sum()))
    assert out.value.jumps().largest <= 1e-12  # the network is continuous
    assert slope.value.jumps().largest > 1e-3  # its gradient is not


def test_a_mean_over_the_batch_divides_jumps_by_its_size():
    net, x, along, span = build("relu, weight", examples=5)
    path = L.follow(net, x, along, span)
    curve = L.penalty(path, db.OutputGradient(0))
    jumps = curve.slope.jumps()
    k = int(jumps.height.abs().argmax())
    t, example = jumps.t[k], int(jumps.example[k])
    near = min(1e-7, _gap(path, path.breakpoints[k]))
    ends = curve.slope.mean(torch.stack([t - near, t + near]))
    assert abs(float(ends[1] - ends[0]) - float(jumps.height[k]) / 5) <= 1e-5
    single = L.penalty(L.follow(net, x[example : example + 1], along, span), db.OutputGradient(0))
    assert close(single.slope.jumps().largest, jumps.largest)


# ------------------------------------------------------------------------------------- errors


def test_a_smooth_activation_is_refused_with_its_line():
    class Smooth(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    net, x = Smooth(), torch.randn(2, 2)
    with pytest.raises(db.NotPiecewiseLinearError, match=r"tanh.*test_landscape\.py:\d+.*tanh"):
        L.follow(net, x, "a.weight[0,0]")
    behind = L.follow(net, x, "b.weight[0,0]")  # a path behind it meets no kink, and is fine
    assert behind.breakpoints == ()
    curve = L.penalty(behind, db.OutputGradient())
    value, slope = oracle(copy.deepcopy(net).double(), x[:1].double(), behind.along, 0.3, 0)
    assert close(float(curve.value(torch.tensor(0.3).double())), value, 1e-7)  # 0.3 in float32
    assert close(float(curve.slope(torch.tensor(0.3).double())), slope, 1e-6)


@pytest.mark.parametrize(
    ("along", "message"),
    [
        ("0.wieght[0,0]", "did you mean '0.weight'"),
        ("0.weight[0,9]", "shape"),
        ("0.weight", "name"),
        (L.Direction({"0.weight": torch.zeros(2)}), "shape"),
        (L.Direction({"1.weight": torch.zeros(2)}), "did you mean"),
        (L.Direction({}), "no parameter"),
        (L.InputLine(torch.zeros(5)), "shape"),
    ],
)
def test_paths_that_do_not_exist(along, message):
    with pytest.raises(db.InputError, match=message):
        L.follow(mlp(), torch.randn(2, 3), along)


def test_random_direction_of_an_unknown_layer():
    with pytest.raises(db.InputError, match="did you mean"):
        L.random_direction(mlp(), "9")


def test_batch_coupling_is_refused():
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(db.InputError, match=r"BatchNorm1d '1'.*net\.eval"):
        L.follow(norm, torch.randn(4, 3), "0.bias[0]")
    assert L.follow(norm.eval(), torch.randn(4, 3), "0.bias[0]", (-9, 9)).breakpoints

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, x):
            return self.a(x - x.mean(0, keepdim=True))

    with pytest.raises(db.InputError, match="couples the examples"):
        L.follow(Centred(), torch.randn(4, 3), "a.bias[0]")


def test_randomness_and_jumping_activations_are_refused():
    dropout = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(db.InputError, match=r"random.*eval"):
        L.follow(dropout, torch.randn(4, 3), "0.bias[0]")
    shrink = nn.Sequential(nn.Linear(3, 4), nn.Threshold(0.1, 2.0), nn.Linear(4, 1))
    with pytest.raises(db.NotPiecewiseLinearError, match="jumps in its value"):
        L.follow(shrink, torch.randn(4, 3), "0.bias[0]")


def test_spans_and_inputs_are_checked():
    net = mlp()
    with pytest.raises(db.InputError, match="increasing"):
        L.follow(net, torch.randn(2, 3), "0.bias[0]", (1.0, 1.0))
    with pytest.raises(db.InputError, match="batch of shape"):
        L.follow(net, torch.zeros(0, 3), "0.bias[0]")
    path = L.follow(net, torch.randn(2, 3), "0.bias[0]")
    assert path.span == pytest.approx((path.rest - 1, path.rest + 1))
    with pytest.raises(db.InputError, match="direction"):
        L.gradient(path, 0)
    with pytest.raises(db.InputError, match="output index"):
        L.output(path, 2)


def test_the_network_is_left_as_it_was():
    net = prepared(mlp).float()
    before = {name: p.clone() for name, p in net.state_dict().items()}
    L.penalty(L.follow(net, torch.randn(2, 3), L.random_direction(net)), db.OutputGradient(0))
    assert all(torch.equal(before[name], p) for name, p in net.state_dict().items())
    assert all(p.grad is None and p.dtype is torch.float32 for p in net.parameters())
