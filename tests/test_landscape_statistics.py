"""Linear regions, roughness and verdicts against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback import landscape as L
from doubleback.landscape.curves import fit_exponent, mean_curve
from support.landscape_nets import Clamped, Maxout, mlp, prepared

WINDOW = L.Window.of_inputs((-2.0, 2.0), (-1.5, 2.5))


def small(act=nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), act(), nn.Linear(6, 5), act(), nn.Linear(5, 2))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 9), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x).reshape(-1, 3, 3).amax(2))


def random_points(region: L.Region, count: int, generator: torch.Generator) -> torch.Tensor:
    share = torch.rand(count, len(region.corners), generator=generator, dtype=torch.float64)
    return (share / share.sum(1, keepdim=True)) @ region.corners


NETS = {
    "relu": small,
    "leaky": lambda: small(lambda: nn.LeakyReLU(0.2)),
    "prelu": lambda: small(nn.PReLU),
    "hardtanh": lambda: small(nn.Hardtanh),
    "maxout": Pooled,
}


@pytest.mark.parametrize("name", NETS)
def test_regions_tile_the_window_and_are_affine(name):
    net = prepared(NETS[name])
    found = L.partition(net, WINDOW, 1)
    table = found.table()
    assert table["sum of areas"] == pytest.approx(16.0, abs=1e-10)
    assert table["regions"] == len(found.regions) > 5
    assert all(r.area > 0 for r in found.regions)  # counter-clockwise
    generator = torch.Generator().manual_seed(0)
    for region in found.regions:
        points = random_points(region, 3, generator).requires_grad_()
        z = net(points)[:, 1]
        (g,) = torch.autograd.grad(z.sum(), points)
        truth = torch.tensor(region.gradient, dtype=torch.float64)
        assert torch.allclose(g, truth.expand_as(g), rtol=0, atol=1e-10)
        assert torch.allclose(z, region.constant + points @ truth, rtol=0, atol=1e-10)
        assert region.norm == pytest.approx(float(truth.norm()))


@pytest.mark.parametrize("name", ["relu", "maxout"])
def test_one_region_per_pattern(name):
    """Every pattern that two hundred thousand random points meet is one polygon; no polygon is
    counted twice."""
    net = prepared(NETS[name])
    found = L.partition(net, WINDOW)
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(200_000, 2, generator=generator, dtype=torch.float64)
    x = torch.tensor([-2.0, -1.5]) + 4 * share
    centres = torch.stack([r.corners.mean(0) for r in found.regions])

    def patterns(points):
        with torch.no_grad():
            if name == "maxout":
                return net.a(points).reshape(-1, 3, 3).argmax(2)
            return torch.cat([net[0](points) > 0, net[2](net[1](net[0](points))) > 0], 1).long()

    seen = {tuple(p) for p in patterns(x).unique(dim=0).tolist()}
    own = [tuple(p) for p in patterns(centres).tolist()]
    assert len(set(own)) == len(own)
    assert seen <= set(own)
    # those that no point met are small
    assert all(r.area < 1e-2 for r, p in zip(found.regions, own, strict=True) if p not in seen)


def test_a_window_in_a_larger_space_measures_in_its_own_metric():
    net = prepared(mlp)
    generator = torch.Generator().manual_seed(2)
    origin, u, v = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    found = L.partition(net, L.Window(origin, u, v, (-1.0, 1.0), (-1.0, 1.0)))
    basis = torch.linalg.qr(torch.stack([u, v], 1))[0]
    for region in found.regions[:10]:
        p, q = region.corners.mean(0)
        x = (origin + p * u + q * v)[None].requires_grad_()
        (g,) = torch.autograd.grad(net(x)[0, 0], x)
        assert region.norm == pytest.approx(float((g[0] @ basis).norm()), rel=1e-9)


def test_windows_that_do_not_fit():
    bad = L.Window(torch.zeros(2), torch.zeros(3), torch.zeros(2), (0, 1), (0, 1))
    with pytest.raises(db.InputError, match="shape"):
        L.partition(small(), bad)

    class Gate(nn.Module):
        def forward(self, x):
            return x[:, :1].relu() * x[:, 1:]

    with pytest.raises(db.InputError, match="multiplies activations"):
        L.partition(Gate(), WINDOW)


# ------------------------------------------------------------------------------- statistics


def curve_of(make=mlp, examples=6, span=(-3.0, 3.0), along="0.weight[2,1]"):
    net = prepared(make)
    generator = torch.Generator().manual_seed(2)
    size = 3 if make is not Maxout else 4
    x = torch.randn(examples, size, generator=generator, dtype=torch.float64)
    path = L.follow(net, x, along, span)
    return L.penalty(path, db.OutputGradient(0))


@pytest.mark.parametrize("examples", [1, 6])
def test_roughness_adds_up_to_the_total_variation(examples):
    """On a grid of a million points, jumps and smooth variation cannot be told apart, but their sum
    can be measured: with monotone pieces between jumps it is the total variation."""
    curve = curve_of(examples=examples)
    found = L.roughness(curve.slope)
    grid = torch.linspace(-3, 3, 200_001, dtype=torch.float64)
    values = curve.slope.mean(grid)
    brute = float((values[1:] - values[:-1]).abs().sum())
    assert brute == pytest.approx(found.jump_variation + found.smooth_variation, rel=2e-3)
    assert found.jumps == int((curve.slope.jumps().height.abs() > 1e-12).sum())
    assert found.largest == pytest.approx(curve.slope.jumps().largest / examples)
    assert found.size == pytest.approx(float(values.max() - values.min()), rel=1e-2)


def test_a_batch_of_some_examples_is_a_path_of_its_own():
    curve = curve_of()
    chosen = torch.tensor([1, 4])
    ours = L.roughness(curve.slope, chosen)
    path = curve.slope.path
    alone = L.follow(path.net, path.x[chosen], path.along, path.span)
    truth = L.roughness(L.penalty(alone, db.OutputGradient(0)).slope)
    for name, value in vars(truth).items():
        assert getattr(ours, name) == pytest.approx(value, rel=1e-9, abs=1e-12)


def test_mean_curve_holds_both_limits():
    curve = curve_of()
    t, left, right = mean_curve(curve.slope, grid=50)
    assert bool((t[1:] >= t[:-1]).all()) and len(t) == 50 + len(curve.slope.jumps())
    gap = float((right - left).abs().sum())
    assert gap == pytest.approx(L.roughness(curve.slope).jump_variation)


def test_exponents():
    assert fit_exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert math.isnan(fit_exponent([1, 2], [0.0, 1.0]))


def test_verdicts_follow_the_numbers():
    rough, smooth = L.judge(curve_of(examples=1)), L.judge(curve_of(examples=400))
    assert rough.share > smooth.share and rough.enough > 1
    assert "jumps are" in str(rough)
    assert smooth.as_dict()["text"] == str(smooth)
    still = L.judge(curve_of(along="4.weight[0,0]"))
    assert still.slope.jumps == 0 and "neither" in str(still)
    assert rough.nearest == pytest.approx(
        min(abs(b.t - curve_of(examples=1).slope.path.rest)
            for b in curve_of(examples=1).slope.path.breakpoints)
    )  # fmt: skip


def test_the_verdict_on_leaky_relu_is_that_of_the_leaky_network():
    """Built again with leaky ReLUs and the same weights, and followed anew."""
    curve = curve_of(examples=6)
    found = L.judge(curve)
    path = curve.slope.path
    twin = mlp(lambda: nn.LeakyReLU(0.1)).double()
    twin.load_state_dict(path.net.state_dict())
    other = L.penalty(L.follow(twin, path.x, path.along, path.span), db.OutputGradient(0))
    truth = L.judge(other)
    assert found.leaky == pytest.approx(truth.share, rel=1e-9)
    assert truth.leaky is None  # it has no ReLU left to replace
    assert f"slope 0.1 and these weights the largest would be {100 * found.leaky:.0f} %" in str(
        found
    )
    assert "below 1 % if no example jumps higher" in str(found)


def test_penalties_that_are_no_polynomials_are_exact_at_the_ends_of_pieces():
    net = prepared(Clamped)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    path = L.follow(net, x, "a.weight[1,2]", (-2.0, 2.0))
    norm = L.penalty(path, db.OutputGradient(0, norm=db.Norm()))
    square = L.penalty(path, db.OutputGradient(0))
    assert not norm.value.exact and square.value.exact
    for ours, squared in zip(norm.value.ends, square.value.ends, strict=True):
        assert torch.allclose(ours.square(), squared, rtol=1e-9, atol=1e-12)
