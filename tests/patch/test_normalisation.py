"""Norms: equal to stock at second order, right where stock is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradgradcheck

import doubleback as db
from doubleback.patch.faster import NORMALISATION
from doubleback.patch.mechanism import Applied
from support.derivatives import error, samples, second

D = torch.float64


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=D)


MEAN, VAR = random(4, seed=8), random(4, seed=9).square() + 0.5
X, ROW = (3, 4, 3, 2), (3, 2)
NORMS = {  # function of (x, w, b), shape of w
    "layer": (lambda x, w, b: F.layer_norm(x, ROW, w, b), ROW),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (4,)),
    "instance": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (4,)),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4,)),
    "batch in eval": (lambda x, w, b: F.batch_norm(x, MEAN, VAR, w, b, False), (4,)),
    "rms": (lambda x, w, b: F.rms_norm(x, ROW, w), ROW),
}
STOCK_IS_WRONG = ("layer", "instance", "batch")  # at third order, and of tangents


def every_norm(test):
    """With and without weight and bias, in both layouts."""
    for name, values in (
        ("affine", [True, False]),
        ("form", [torch.contiguous_format, torch.channels_last]),
        ("key", list(NORMS)),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


def problem(key: str, affine: bool = True, form: torch.memory_format = torch.contiguous_format):
    function, shape = NORMS[key]
    inputs = [random(*X).contiguous(memory_format=form).requires_grad_()]
    if affine:
        inputs += [random(*shape, seed=i).requires_grad_() for i in (1, 2)][
            : 1 if key == "rms" else 2
        ]

    def norm(x, w=None, b=None):
        return function(x, w, b)

    return norm, inputs


@every_norm
def test_batched_gradients_are_those_of_one_cotangent_at_a_time(key, form, affine):
    norm, inputs = problem(key, affine, form)
    seeds = random(3, *X, seed=4)
    with db.patched():
        (g,) = torch.autograd.grad(norm(*inputs).pow(3).sum(), inputs[0], create_graph=True)
        single = [torch.autograd.grad(g, inputs, seed, retain_graph=True) for seed in seeds]
        found = torch.autograd.grad(g, inputs, seeds, is_grads_batched=True)
    expected = [torch.stack(part) for part in zip(*single, strict=True)]
    assert error([found], [expected]) < 1e-12


def test_a_bias_may_change_before_the_backward_pass():
    norm, (x, w, b) = problem("group")

    def gradients():
        found = norm(x, w, b).sin()
        with torch.no_grad():
            b.add_(0.0)
        return [torch.autograd.grad(found.sum(), (x, w, b))]

    expected = gradients()
    with db.patched():
        assert error(gradients(), expected) < 1e-12


def test_derivatives_of_group_norm_s_statistics():
    _, (x, w, b) = problem("group")
    sizes = (3, 4, 6, 2, 1e-5)

    def gradients():
        y, mean, rstd = torch.ops.aten.native_group_norm(x, w, b, *sizes)
        return [torch.autograd.grad(y.sum() + mean.sin().sum() + rstd.sin().sum(), (x, w, b))]

    group = x.detach().unflatten(1, (2, 2)).requires_grad_()
    mean = group.mean((2, 3, 4))
    rstd = (group.var((2, 3, 4), correction=0) + 1e-5).rsqrt()
    (by_hand,) = torch.autograd.grad(mean.sin().sum() + rstd.sin().sum(), group)
    plain = torch.autograd.grad(F.group_norm(x, 2, w, b).sum(), (x, w, b))
    expected = (plain[0] + by_hand.flatten(1, 2), *plain[1:])
    with db.patched():
        assert error(gradients(), [expected]) < 1e-12


@every_norm
def test_second_order_is_stock_s(key, form, affine):
    norm, inputs = problem(key, affine, form)

    def function():
        return norm(*inputs).sin()

    expected = second(function, inputs)
    with db.patched():
        assert error(second(function, inputs), expected) < 1e-12


@pytest.mark.parametrize("key", NORMS)
def test_third_order_by_finite_differences(key):
    norm, inputs = problem(key)

    def gradients(*inputs):
        y = norm(*inputs)
        weights = random(*y.shape, seed=4)
        return torch.autograd.grad((y.sin() * weights).sum(), inputs, create_graph=True)

    with db.patched():
        assert gradgradcheck(gradients, inputs, fast_mode=True)


NAMES = [
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.instance_norm",
    "nn.functional.batch_norm",
    "nn.functional.rms_norm",
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
]


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_operator_database(name):
    for function, inputs in samples(name, largest=500):
        try:
            expected = second(function, inputs)
        except RuntimeError:  # stock layer norm with a bias and no weight has none
            with db.patched():
                assert gradgradcheck(lambda *_, f=function: f()[0], inputs)
            continue
        with db.patched():
            assert error(second(function, inputs), expected) < 1e-11


# ------------------------------------------------------------------------------- forward mode


def tangent(norm, inputs, directions):
    return torch.func.jvp(norm, tuple(inputs), tuple(directions))[1]


def numerical(function, inputs, step=1e-3):
    """∂function by central differences of fourth order."""
    found = []
    for i, t in enumerate(inputs):
        grad = torch.zeros(t.numel(), dtype=D)
        for j in range(t.numel()):
            change = torch.zeros(t.numel(), dtype=D)
            change[j] = step

            def at(c, i=i, t=t, change=change):
                moved = t + c * change.view_as(t)
                return function(*(moved if k == i else u for k, u in enumerate(inputs)))

            grad[j] = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
        found.append(grad.view_as(t))
    return found


@pytest.mark.parametrize("key", NORMS)
def test_reverse_over_forward(key):
    norm, inputs = problem(key)
    inputs = [t.detach() for t in inputs]
    directions = [random(*t.shape, seed=30 + i) for i, t in enumerate(inputs)]

    def value(*inputs):
        return tangent(norm, inputs, directions).pow(2).sum()

    places = tuple(range(len(inputs)))
    expected = numerical(value, inputs)
    stock = torch.func.grad(value, argnums=places)(*inputs)
    with db.patched():
        found = torch.func.grad(value, argnums=places)(*inputs)
    assert error([found], [expected]) < 1e-6
    wrong = error([stock], [expected]) > 1e-2
    assert wrong == (key in STOCK_IS_WRONG), "PyTorch has changed: see the module's docstring"


@pytest.mark.parametrize("key", NORMS)
def test_reverse_over_forward_with_dual_tensors(key):
    norm, inputs = problem(key)
    directions = [random(*t.shape, seed=30 + i) for i, t in enumerate(inputs)]

    def step():
        with torch.autograd.forward_ad.dual_level():
            make = torch.autograd.forward_ad.make_dual
            duals = [make(t, d) for t, d in zip(inputs, directions, strict=True)]
            t = torch.autograd.forward_ad.unpack_dual(norm(*duals)).tangent
            return torch.autograd.grad(t.pow(2).sum(), inputs, allow_unused=True)

    plain = [t.detach() for t in inputs]
    expected = numerical(lambda *a: tangent(norm, a, directions).pow(2).sum(), plain)
    with db.patched():
        assert error([step()], [expected]) < 1e-6


@pytest.mark.parametrize("key", NORMS)
def test_forward_over_forward_and_forward_over_reverse(key):
    norm, inputs = problem(key)
    x, *others = (t.detach() for t in inputs)
    p, q = random(*X, seed=40), random(*X, seed=41)

    def of_x(x):
        return norm(x, *others)

    def loss(x):
        return of_x(x).pow(3).sum()

    h = torch.func.vjp(torch.func.grad(loss), x)[1](p)[0]
    # d²⟨v, y⟩(p, q) for a random v, by reverse over reverse
    v = random(*X, seed=42)
    curvature = torch.func.vjp(lambda x: torch.func.vjp(of_x, x)[1](v)[0], x)[1](p)[0]
    with db.patched():
        inner = lambda x: torch.func.jvp(of_x, (x,), (p,))[1]  # noqa: E731
        nested = torch.func.jvp(inner, (x,), (q,))[1]
        over_reverse = torch.func.jvp(torch.func.grad(loss), (x,), (p,))[1]
    nested, curvature = (nested * v).sum(), (curvature * q).sum()
    assert error([[nested, over_reverse]], [[curvature, h]]) < 1e-11


def test_a_tangent_alone_is_stock_s_bit_for_bit():
    norm, inputs = problem("layer")
    inputs = [t.detach() for t in inputs]

    def run():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[0], random(*X, seed=3))
            return torch.autograd.forward_ad.unpack_dual(norm(dual, *inputs[1:]))

    expected = run()
    with db.patched():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_running_statistics_are_updated_once_in_forward_mode():
    x, mean, var = random(*X), torch.zeros(4, dtype=D), torch.ones(4, dtype=D)

    def run(mean, var):
        torch.func.jvp(lambda x: F.batch_norm(x, mean, var, None, None, True), (x,), (x,))

    run(a := mean.clone(), b := var.clone())
    with db.patched():
        run(mean, var)
    assert torch.equal(mean, a) and torch.equal(var, b)


# ----------------------------------------------------------------------------- the rest


def test_torch_func_vmap():
    norm, inputs = problem("layer")
    x, w, b = (t.detach() for t in inputs)

    def penalty(x, w):
        return torch.func.grad(lambda x: norm(x, w, b).pow(3).sum())(x).square().sum()

    def results():
        return [[*torch.func.vmap(torch.func.grad(penalty, (0, 1)), (0, None))(x, w)]]

    expected = results()
    with db.patched():
        assert error(results(), expected) < 1e-12


def test_statistics_of_group_norm_keep_their_derivatives():
    x = random(*X).requires_grad_()

    def function():
        return torch.ops.aten.native_group_norm(x, None, None, 3, 4, 6, 2, 1e-5)

    expected = second(function, [x])
    with db.patched():
        assert error(second(function, [x]), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["layer", "group", "batch"])
def test_16_bits_are_computed_with_in_float32(key, dtype):
    """Error at most that of rounding the exact result's terms: a few units of the last place."""
    norm, inputs = problem(key)
    rounded = [t.detach().to(dtype) for t in inputs]

    def penalty(leaves):
        leaves = [t.clone().requires_grad_() for t in leaves]
        (g,) = torch.autograd.grad(norm(*leaves).pow(2).sum(), leaves[0], create_graph=True)
        return [list(torch.autograd.grad(g.pow(2).sum(), leaves, allow_unused=True))]

    with db.patched():
        found, exact = penalty(rounded), penalty([t.double() for t in rounded])
    found = [[None if t is None else t.double() for t in found[0]]]
    assert error(found, exact) < 30 * torch.finfo(dtype).eps


CUDNN = {"epsilon": 1e-5, "reserveSpace": torch.empty(0), "running_mean": None, "running_var": None}


def test_formulas_of_cuda_s_operators():
    """cudnn_batch_norm_backward and RMS norm's, by their arguments, against the composite."""
    x, xi, w = random(*X), random(*X, seed=1), random(4, seed=2)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    batch = CUDNN | {"input": x, "grad_output": xi, "weight": w, "save_mean": mean}
    batch["save_var"] = (var + 1e-5).rsqrt()
    r = (x.square().mean((2, 3), keepdim=True) + 1e-5).rsqrt()
    rms = {"grad_out": xi, "input": x, "normalized_shape": ROW, "rstd": r}
    rms |= {"weight": random(*ROW, seed=3), "output_mask": [True, True]}
    formulas = {f.operator: f for f in NORMALISATION}
    for name, a in (("cudnn_batch_norm_backward", batch), ("_fused_rms_norm_backward", rms)):
        formula = formulas[name]
        schema = getattr(torch.ops.aten, name).default._schema.arguments
        assert {s.name for s in schema} == set(a) and formula.accepts(a)
        names = [n for n in ("grad_output", "grad_out", "input", "weight") if n in a]
        at = {n: a[n].clone().requires_grad_() for n in names}
        grads = formula.composite(a | at)
        cotangents = [random(*g.shape, seed=50 + i) for i, g in enumerate(grads)]
        total = sum((g * c).sum() for g, c in zip(grads, cotangents, strict=True))
        expected = torch.autograd.grad(total, list(at.values()))
        found = formula.second(Applied(a, {n: n in names for n in a}), cotangents)
        assert error([[found[n] for n in names]], [list(expected)]) < 1e-12
