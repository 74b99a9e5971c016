"""Standardisation against autograd's reverse over reverse of the stock norms, in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from doubleback.errors import InputError
from doubleback.kernels import eager, standardisation
from doubleback.kernels import standardisation_triton as fused_kernels
from doubleback.kernels.standardisation import (
    Groups,
    Point,
    standardise,
    standardise_backward,
    standardise_second,
)
from support.gpu import CUDA, TRITON, needs_triton

# Raised inside Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# Largest error, relative to the largest entry of the exact result. The 16-bit rows allow for
# the rounding of the result and of one intermediate; sums over the batch are kept in float32.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.bfloat16: 1.2e-2,
    torch.float16: 1.5e-3,
}


class Case(NamedTuple):
    name: str
    groups: Groups
    shape: tuple[int, ...]
    form: torch.memory_format = torch.contiguous_format


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
CASES = [
    Case("layer 2d", Groups.layer_norm([7]), (5, 7)),
    Case("layer 3d", Groups.layer_norm([12]), (2, 9, 12)),
    Case("layer 4d, two axes", Groups.layer_norm([4, 3]), (2, 5, 4, 3)),
    Case("layer, one row", Groups.layer_norm([6]), (6,)),
    Case("rms 2d", Groups.rms_norm([7]), (5, 7)),
    Case("rms 3d, two axes", Groups.rms_norm([4, 3]), (5, 4, 3)),
    Case("batch 2d", Groups.batch_norm(), (6, 4)),
    Case("batch 3d", Groups.batch_norm(), (6, 4, 3)),
    Case("batch 4d", Groups.batch_norm(), (5, 3, 4, 5)),
    Case("batch 4d, channels-last", Groups.batch_norm(), (5, 6, 4, 3), LAST),
    Case("batch 5d", Groups.batch_norm(), (3, 4, 2, 3, 2)),
    Case("batch 5d, channels-last", Groups.batch_norm(), (3, 4, 2, 3, 2), LAST_3D),
    Case("group 2d", Groups.group_norm(2), (4, 8)),
    Case("group 3d", Groups.group_norm(2), (3, 4, 5)),
    Case("group 4d", Groups.group_norm(3), (3, 6, 5, 3)),
    Case("group 4d, channels-last", Groups.group_norm(3), (3, 6, 5, 3), LAST),
    Case("group 5d, channels-last", Groups.group_norm(2), (2, 6, 2, 3, 2), LAST_3D),
    Case("instance 3d", Groups.instance_norm(), (3, 4, 5)),
    Case("instance 4d", Groups.instance_norm(), (3, 4, 5, 2)),
    Case("instance 4d, channels-last", Groups.instance_norm(), (3, 4, 5, 2), LAST),
]
NAMES = [case.name for case in CASES]
# on the CPU: few calls for small tensors, few passes for others, and operations for a compiler
ROUTES = ["eager", "passes", "plain"]
KERNELS = ["triton", "two passes"] if TRITON else []
ROUTES += ["cuda", *KERNELS] if CUDA else []
# In Triton's interpreter, which is slow: every case once in float64, some in float32.
BRIEF = ["layer 2d", "rms 2d", "batch 4d, channels-last", "group 4d"]
SLOW = [] if CUDA else KERNELS


def stock(groups: Groups, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    if groups.rms:
        return torch.rms_norm(x, groups.shape, w, eps)
    if groups.kind == "rows":
        return torch.layer_norm(x, groups.shape, w, b, eps)
    if groups.kind == "batch":
        return torch.batch_norm(x, w, b, None, None, True, 0.1, eps, False)
    if groups.count:
        return torch.group_norm(x, groups.count, w, b, eps)
    return torch.instance_norm(x, w, b, None, None, True, 0.1, eps, False)


class Drawn(NamedTuple):
    x: Tensor
    w: Tensor | None
    b: Tensor | None
    xi: Tensor
    q: Tensor


def draw(case: Case, affine=True, dtype=torch.float64, device="cpu", parameters=None) -> Drawn:
    torch.manual_seed(0)

    def random(shape, offset=0.0, dtype=dtype):
        return (torch.randn(shape, dtype=torch.float64) + offset).to(dtype).to(device)

    x, xi, q = random(case.shape, 1.5), random(case.shape), random(case.shape, 0.5)
    shape = case.groups.shape or case.shape[1:2]
    w, b = (random(shape, dtype=parameters or dtype) for _ in range(2))
    x = x.contiguous(memory_format=case.form)
    return Drawn(x, w if affine else None, None if case.groups.rms or not affine else b, xi, q)


def truth(groups: Groups, given: Drawn, eps=1e-5) -> dict[str, Tensor]:
    """y, dx, dw, db, t_y, s_x and s_w, all by reverse over reverse in float64."""
    given = Drawn(*(None if t is None else t.double() for t in given))
    leaves = {"x": given.x, "w": given.w, "b": given.b}
    leaves = {k: t.detach().requires_grad_() for k, t in leaves.items() if t is not None}
    x, inputs = leaves["x"], list(leaves.values())
    y = stock(groups, x, leaves.get("w"), leaves.get("b"), eps)
    xi = given.xi.clone().requires_grad_()
    first = torch.autograd.grad(y, inputs, xi, create_graph=True)
    found = {"y": y, **{f"d{k}": g for k, g in zip(leaves, first, strict=True)}}
    curved = [xi, *(leaves[k] for k in ("x", "w") if k in leaves)]
    second = torch.autograd.grad(first[0], curved, given.q, allow_unused=True)
    found |= dict(zip(("t_y", "s_x", "s_w"), second, strict=False))
    return {k: t.detach() for k, t in found.items() if t is not None}


def tangent_alone(groups: Groups, q: Tensor, *at, fused=None) -> Tensor:
    return standardise_second(groups, None, q, *at, (False, False), fused=fused)[0]


def compute(groups: Groups, given: Drawn, route="eager", eps=1e-5) -> dict[str, Tensor]:
    x, w, b, xi, q = given
    fused = {"plain": False, "recorded": True}.get(route)
    y, mean, rstd = standardise(groups, x, w, b, eps, fused=fused)
    at = (x, mean, rstd, w)
    wanted = (True, True, b is not None)
    dx, dw, db = standardise_backward(groups, xi, *at, wanted, fused=fused)
    if route in ("triton", "two passes"):
        point = Point.of(groups, *at)
        mask = [True, True, w is not None, True]
        t_y, s_x, s_w, pulled = fused_kernels.second(point, xi, q, mask)
        tangent, *_ = fused_kernels.second(point, None, q, [True, False, False, False])
        if groups.kind == "batch":
            mask = [True, w is not None, b is not None]
            dx, dw, db = fused_kernels.batch_backward(point, xi, mask)
    else:
        t_y, s_x, s_w, pulled = standardise_second(groups, xi, q, *at, pulled=True, fused=fused)
        tangent = tangent_alone(groups, q, *at, fused=fused)
    found = {"y": y, "dx": dx, "dw": dw, "db": db, "t_y": t_y, "s_x": s_x, "s_w": s_w}
    found |= {"mean": mean, "rstd": rstd, "tangent": tangent, "pulled": pulled}
    return {k: t for k, t in found.items() if t is not None}


def error(found: Tensor, exact: Tensor) -> float:
    scale = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return ((found.double() - exact).abs().max() / scale).item()


def assert_agree(found: dict, exact: dict, tolerance: float) -> None:
    errors = {k: error(found[k], exact[k]) for k in exact}
    errors["tangent"] = error(found["tangent"], exact["t_y"])
    errors["pulled"] = error(found["pulled"], exact["dx"])
    assert max(errors.values()) <= tolerance, errors


@pytest.fixture
def short_rows(monkeypatch):
    """Every group counts as long, and spans several tiles."""
    monkeypatch.setattr(fused_kernels, "LONGEST", 1)
    monkeypatch.setattr(fused_kernels, "TILE", 8 if CUDA else 32)
    for plans in ("_plans", "_forward_plans"):  # without what was planned before
        monkeypatch.setattr(fused_kernels, plans, {})


@pytest.fixture
def device(route, request):
    if route == "two passes":
        request.getfixturevalue("short_rows")
    if route == "passes":
        request.getfixturevalue("monkeypatch").setattr(standardisation, "SMALL", 0)
    return "cuda" if CUDA and route in ("cuda", "triton", "two passes") else "cpu"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_parity_in_float64(case, affine, route, device):
    given = draw(case, affine, device=device)
    assert_agree(compute(case.groups, given, route), truth(case.groups, given), 1e-10)


@pytest.mark.parametrize("route", SLOW)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_in_the_interpreter(case, route, device):
    """With a weight in float64; some without, and in float32."""
    given = draw(case)
    assert_agree(compute(case.groups, given, route), truth(case.groups, given), 1e-10)
    if case.name in BRIEF:
        given = draw(case, affine=False)
        assert_agree(compute(case.groups, given, route), truth(case.groups, given), 1e-10)
        given = draw(case, dtype=torch.float32)
        exact = truth(case.groups, given)
        assert_agree(compute(case.groups, given, route), exact, TOLERANCE[torch.float32])


@pytest.mark.parametrize("route", [*ROUTES, *SLOW])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.groups.kind == "batch"], ids=lambda c: c[0])
def test_backward_adds_to_what_is_there(case, dtype, route, device):
    given = draw(case, dtype=dtype, device=device)
    x, w, _, xi, there = given
    _, mean, rstd = standardise(case.groups, x, w, None, 1e-5)
    at = (x, mean, rstd, w)
    if route in ("triton", "two passes"):
        point = Point.of(case.groups, *at)
        dx, dw, _ = fused_kernels.batch_backward(point, xi, [True, True, False], there)
    else:
        fused = {"plain": False}.get(route)
        wanted = (True, True, False)
        dx, dw, _ = standardise_backward(case.groups, xi, *at, wanted, onto=there, fused=fused)
    exact = truth(case.groups, given)
    assert dx.dtype == dtype
    assert error(dx, exact["dx"] + there.double()) <= TOLERANCE[dtype]
    assert error(dw, exact["dw"]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_lower_precision(case, dtype, route, device):
    given = draw(case, dtype=dtype, device=device)
    found = compute(case.groups, given, route)
    assert found["rstd"].dtype == torch.float32
    assert all(found[k].dtype == dtype for k in found if k not in ("mean", "rstd"))
    assert_agree(found, truth(case.groups, given), TOLERANCE[dtype])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["layer 3d", "rms 2d", "batch 4d", "group 4d", "instance 3d"])
def test_float32_parameters_beside_16_bit_input(name, dtype, route, device):
    case = CASES[NAMES.index(name)]
    given = draw(case, dtype=dtype, device=device, parameters=torch.float32)
    found = compute(case.groups, given, route)
    assert found["rstd"].dtype == found["s_w"].dtype == found["dw"].dtype == torch.float32
    assert all(found[k].dtype == dtype for k in ("y", "dx", "t_y", "s_x", "tangent"))
    assert_agree(found, truth(case.groups, given), TOLERANCE[dtype])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["batch 4d", "layer 3d", "group 4d"])
def test_16_bit_statistics_are_taken(name, route, device):
    """Graphs captured from stock norms hand over the statistics that those kernels store."""
    case = CASES[NAMES.index(name)]
    x, w, _, xi, q = draw(case, dtype=torch.bfloat16, device=device)
    _, mean, rstd = standardise(case.groups, x, w, None, 1e-5)
    at = (x, mean.bfloat16(), rstd.bfloat16(), w)
    dx, _, _ = standardise_backward(case.groups, xi, *at)
    tangent = tangent_alone(case.groups, q, *at)
    _, s_x, s_w, _ = standardise_second(case.groups, xi, q, *at)
    exact = truth(case.groups, Drawn(x, w, None, xi, q))
    found = {"dx": dx, "t_y": tangent, "s_x": s_x, "s_w": s_w}
    assert max(error(found[k], exact[k]) for k in found) <= 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("eps", [1e-12, 1e-1])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_eps(case, eps, route, device):
    given = draw(case, device=device)
    exact = truth(case.groups, given, eps)
    assert_agree(compute(case.groups, given, route, eps), exact, 1e-10)


FORWARD = [
    ((5, 6, 4, 3), LAST), ((3, 4, 2, 3, 2), LAST_3D), ((2, 70, 5, 3), LAST), ((2, 3, 1, 1), LAST),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "none"])
@pytest.mark.parametrize("shape, form", FORWARD, ids=str)
def test_batch_norm_by_kernels(shape, form, running, affine, short_rows):
    """Output, statistics and running statistics are PyTorch's; a mean a million deviations away
    from zero costs no more digits than there."""
    torch.manual_seed(0)
    device = "cuda" if CUDA else "cpu"
    x = torch.randn(shape, dtype=torch.float64, device=device) + 3
    x[:, 1] = 1e6 + x[:, 1]
    x = x.contiguous(memory_format=form)
    w, b, mean, var = torch.rand(4, shape[1], dtype=torch.float64, device=device)
    w, b = (w, b) if affine else (None, None)
    given = (mean, var) if running else None
    aten = torch.ops.aten
    if running:
        op = aten._native_batch_norm_legit_functional
        expected = op(x, w, b, mean, var, True, 0.1, 1e-5)
    else:
        expected = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    result = fused_kernels.batch_forward(x, w, b, given, 0.1, 1e-5)
    assert len(result) == len(expected)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@needs_triton
def test_batch_norm_of_another_layout():
    """Recorded for a channels-last image, and then given one that is not."""
    x = torch.randn(5, 6, 4, 3, dtype=torch.float64, device="cuda" if CUDA else "cpu")
    expected = torch.ops.aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)
    result = torch.ops.doubleback.batch_norm_forward(x, None, None, None, None, 0.1, 1e-5)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert result[0].is_contiguous(memory_format=LAST)


SINGLE = [
    Case("layer", Groups.layer_norm([1]), (4, 1)),
    Case("rms", Groups.rms_norm([1]), (4, 1)),
    Case("batch", Groups.batch_norm(), (1, 3, 1, 1)),
    Case("group", Groups.group_norm(3), (4, 3)),
    Case("instance", Groups.instance_norm(), (2, 3, 1)),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", SINGLE, ids=[case.name for case in SINGLE])
def test_groups_of_one_entry(case, route, device):
    """var = 0: with a mean only y = b and db remain; without, x̂ = x/√(x² + ε) does."""
    given = draw(case, device=device)
    found, exact = compute(case.groups, given, route), truth(case.groups, given)
    if case.groups.rms:  # P(q) = εr²q is what cancellation leaves of q
        return assert_agree(found, exact, 1e-9)
    assert max(error(found[k], exact[k]) for k in ("y", "db")) <= 1e-10
    for key in ("dx", "dw", "t_y", "s_x", "s_w", "tangent"):
        assert found[key].abs().max() <= 1e-10, key


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_constant_input(case, route, device):
    """var = 0 in groups of several entries: x̂ = 0 and r = ε^(−1/2)."""
    given = draw(case, device=device)
    given = given._replace(x=torch.full_like(given.x, 2.0))
    assert_agree(compute(case.groups, given, route), truth(case.groups, given), 1e-10)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_results_keep_the_layout(case, route, device):
    given = draw(case, device=device)
    found = compute(case.groups, given, route)
    for key in ("y", "dx", "t_y", "s_x", "tangent"):
        assert found[key].shape == given.x.shape
        assert found[key].stride() == given.x.stride(), key


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 5, 8, 14, 18)], ids=lambda c: c.name)
def test_strided_and_expanded_arguments(case, route, device):
    given = draw(case, device=device)
    x = given.x.transpose(0, -1).contiguous().transpose(0, -1)
    q = given.q[:1].expand(case.shape)
    given = given._replace(x=x, q=q, w=torch.stack([given.w, given.w], -1)[..., 0])
    assert_agree(compute(case.groups, given, route), truth(case.groups, given), 1e-10)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_projection_is_self_adjoint(case):
    """⟨u, rP(q)⟩ = ⟨rP(u), q⟩."""
    x, _, _, u, q = draw(case)
    _, mean, rstd = standardise(case.groups, x, None, None, 1e-5)

    def project(v):
        return tangent_alone(case.groups, v, x, mean, rstd, None)

    left, right = (u * project(q)).sum(), (project(u) * q).sum()
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("route", ["eager", "plain"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_curvature_is_symmetric(case, route):
    """⟨S(ξ, q), u⟩ = ⟨S(ξ, u), q⟩."""
    x, w, _, xi, q = draw(case)
    u = torch.randn_like(q)
    _, mean, rstd = standardise(case.groups, x, w, None, 1e-5)

    def source(v):
        at = (x, mean, rstd, w, (True, False), False)
        return standardise_second(case.groups, xi, v, *at, fused=route == "eager")[1]

    left, right = (source(q) * u).sum(), (source(u) * q).sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("route", ["eager", "passes", "plain", *KERNELS])
@pytest.mark.parametrize("name", ["layer 2d", "rms 2d", "batch 4d", "group 4d"])
@pytest.mark.parametrize(
    "mask", [(t, x, w, x) for t in (0, 1) for x in (0, 1) for w in (0, 1)] + [(1, 1, 1, 0)], ids=str
)
def test_only_what_is_wanted(name, mask, route, device):
    case, mask = CASES[NAMES.index(name)], [bool(m) for m in mask]
    given = draw(case, device=device)
    x, w, _, xi, q = given
    exact = truth(case.groups, given)
    _, mean, rstd = standardise(case.groups, x, w, None, 1e-5)
    at = (x, mean, rstd, w)
    if route in ("eager", "passes", "plain"):
        fused = route != "plain"
        found = standardise_second(
            case.groups, xi, q, *at, mask[1:3], mask[0], pulled=mask[3], fused=fused
        )
    else:
        found = fused_kernels.second(Point.of(case.groups, *at), xi, q, mask)
    for key, part, want in zip(("t_y", "s_x", "s_w", "dx"), found, mask, strict=True):
        assert (part is not None) == want
        assert part is None or error(part, exact[key]) <= 1e-10


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["layer 2d", "rms 2d", "batch 4d", "group 4d"])
@pytest.mark.parametrize("only", [0, 1, 2])
def test_backward_returns_only_what_is_wanted(name, only, fused):
    case = CASES[NAMES.index(name)]
    x, w, _, xi, _ = draw(case)
    _, mean, rstd = standardise(case.groups, x, w, None, 1e-5)
    every = standardise_backward(case.groups, xi, x, mean, rstd, w, fused=fused)
    wanted = [i == only for i in range(3)]
    found = standardise_backward(case.groups, xi, x, mean, rstd, w, wanted, fused=fused)
    assert [part is not None for part in found] == wanted
    torch.testing.assert_close(found[only], every[only])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.groups.rms], ids=lambda c: c.name)
def test_bias_without_weight(case, dtype, fused):
    given = draw(case, dtype=dtype)
    x, w, b, xi, _ = given
    given = given._replace(w=torch.ones_like(w))  # stock autograd needs one
    y, mean, rstd = standardise(case.groups, x, None, b, 1e-5, fused=fused)
    dx, dw, db = standardise_backward(case.groups, xi, x, mean, rstd, None, fused=fused)
    exact = truth(case.groups, given)
    assert dw is None
    for key, part in (("y", y), ("dx", dx), ("db", db)):
        assert error(part, exact[key]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["layer 2d", "rms 2d", "group 4d"])
def test_empty_batch(name):
    case = CASES[NAMES.index(name)]
    x = torch.empty(0, *case.shape[1:], dtype=torch.float64)
    shape = case.groups.shape or case.shape[1:2]
    w = torch.ones(shape, dtype=torch.float64)
    mean = rstd = torch.ones(0, case.groups.count or 1, dtype=torch.float64)
    mean = None if case.groups.rms else mean
    t_y, s_x, s_w, _ = standardise_second(case.groups, x, x, x, mean, rstd, w)
    assert t_y.shape == s_x.shape == x.shape
    assert s_w.count_nonzero() == 0


# Tracing -----------------------------------------------------------------------------------------


def everything(groups: Groups, route="eager"):
    def run(x, w, b, xi, q):
        return [t.clone() for t in compute(groups, Drawn(x, w, b, xi, q), route).values()]

    return run


@pytest.mark.parametrize("route", ["eager", "recorded"])
@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [(n, "fake", torch.float64) for n in NAMES]
    + [(n, m, d) for n in BRIEF for m, d in (("fake", torch.bfloat16), ("real", torch.float64))],
    ids=str,
)
def test_flattened_graph_agrees(name, mode, route, dtype):
    """Traced for a compiler ("eager" turns `fused` off), and recorded with `fused` for replay."""
    case = CASES[NAMES.index(name)]
    given = draw(case, dtype=dtype)
    graph = make_fx(everything(case.groups, route), tracing_mode=mode)(*given)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    found, exact = graph(*given), everything(case.groups)(*given)
    for part, whole in zip(found, exact, strict=True):
        assert part.dtype == whole.dtype and part.stride() == whole.stride()
        assert error(part, whole.double()) <= TOLERANCE[dtype]


def test_compiled_graph_agrees():
    """Two norms in one graph, through Inductor."""
    cases = [CASES[NAMES.index(n)] for n in ("layer 3d", "batch 4d")]
    drawn = [draw(case, dtype=torch.float32)._replace(b=None) for case in cases]

    def run(*flat):
        parts = (Drawn(w=flat[4 * i + 1], b=None, x=flat[4 * i], xi=flat[4 * i + 2],
                       q=flat[4 * i + 3]) for i in range(len(cases)))  # fmt: skip
        pairs = zip(cases, parts, strict=True)
        return [t for case, part in pairs for t in everything(case.groups)(*part)]

    flat = [t for d in drawn for t in d if t is not None]
    compiled = torch._inductor.compile(make_fx(run, tracing_mode="fake")(*flat), flat)
    for part, whole in zip(compiled(*flat), run(*flat), strict=True):
        assert error(part, whole.double()) <= TOLERANCE[torch.float32]


def test_eager_knows_tracers():
    x = torch.ones(3)
    seen = []
    record = lambda t: (seen.append(eager(t)), t * 2)[1]  # noqa: E731
    assert eager(x, None, torch.nn.Parameter(x))
    make_fx(record)(x)
    make_fx(record, tracing_mode="fake")(x)
    torch.func.vmap(record)(x)
    with FakeTensorMode() as mode:
        record(mode.from_tensor(x))
    assert seen == [False] * 4


# Bad input ---------------------------------------------------------------------------------------


def test_channels_must_divide_into_groups():
    with pytest.raises(InputError, match=r"group norm: 5 channels .* 2 groups; choose a divisor"):
        standardise(Groups.group_norm(2), torch.ones(2, 5, 3), None, None, 1e-5)


def test_sources_need_the_cotangent():
    x = torch.ones(2, 3)
    with pytest.raises(InputError, match="need the cotangent xi"):
        standardise_second(Groups.layer_norm([3]), None, x, x, x[:, :1], x[:, :1], None)
