"""Fused attention under a second derivative: exact against the unfused kernel, memory linear."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from derivatives import error, samples, second
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback.patch import attention
from doubleback.patch.node import Call

D = torch.float64


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=D)


def qkv(n=9, m=9, heads=4, key_heads=4, e=8, ev=8):
    shapes = (2, heads, n, e), (2, key_heads, m, e), (2, key_heads, m, ev)
    return [random(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


MASKED = torch.ones(9, 9, dtype=torch.bool).tril(3)
MASKED[4] = False  # a row without a score
CASES = {
    "plain": (qkv, {}),
    "causal": (qkv, {"is_causal": True}),
    "scale": (qkv, {"scale": 0.3}),
    "added mask": (qkv, {"attn_mask": random(2, 1, 9, 9, seed=5)}),
    "bool mask": (qkv, {"attn_mask": MASKED}),
    "cross": (lambda: qkv(n=5, m=11), {}),
    "gqa": (lambda: qkv(heads=4, key_heads=2), {"enable_gqa": True}),
}


@pytest.mark.parametrize("key", CASES)
def test_every_order_is_that_of_the_unfused_kernel(key):
    make, options = CASES[key]
    inputs = make()

    def function():
        return F.scaled_dot_product_attention(*inputs, **options).sin()

    with sdpa_kernel(SDPBackend.MATH):
        expected = second(function, inputs, order=3)
    with db.patched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert error(second(function, inputs, order=3), expected) < 1e-12


def test_stock_has_no_second_derivative():
    """Or this patch were not needed."""
    inputs = qkv()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        (g,) = torch.autograd.grad(
            F.scaled_dot_product_attention(*inputs).square().sum(), inputs[:1], create_graph=True
        )
        with pytest.raises(RuntimeError, match="not implemented"):
            g.sum().backward()


@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_some_inputs_only(needed):
    inputs = [t.detach().requires_grad_(bool(n)) for t, n in zip(qkv(), needed, strict=True)]
    live = [t for t in inputs if t.requires_grad]

    def function():
        return F.scaled_dot_product_attention(*inputs).sin()

    with sdpa_kernel(SDPBackend.MATH):
        expected = second(function, live)
    with db.patched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert error(second(function, live), expected) < 1e-12


def test_samples_of_the_operator_database():
    name, count = "nn.functional.scaled_dot_product_attention", 0
    for function, inputs in samples(name, largest=3000):
        with torch.random.fork_rng():  # samples with dropout run on the unfused kernel
            torch.manual_seed(0)
            with sdpa_kernel(SDPBackend.MATH):
                expected = second(function, inputs)
            torch.manual_seed(0)
            with db.patched():
                assert error(second(function, inputs), expected) < 1e-11
        count += 1
    assert count > 10


def test_finite_differences_agree():
    inputs = [t.detach()[:1, :2, :4, :3].requires_grad_() for t in qkv()]
    with db.patched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert gradgradcheck(
            lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), inputs, fast_mode=True
        )


def test_torch_func():
    q, k, v = (t.detach()[:1, :2] for t in qkv())

    def loss(q, k):
        return F.scaled_dot_product_attention(q, k, v).pow(3).sum()

    def penalty(q, k):
        return torch.func.grad(loss)(q, k).square().sum()

    def results():
        return [[*torch.func.grad(penalty, argnums=(0, 1))(q, k)]]

    with sdpa_kernel(SDPBackend.MATH):
        expected = results()
    with db.patched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert error(results(), expected) < 1e-12


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of entries of the largest tensor made inside."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.numel())
        return result


def test_no_matrix_of_all_scores(monkeypatch):
    from doubleback.kernels import attention as kernels

    monkeypatch.setitem(kernels.BLOCK_ELEMENTS, "cpu", 2**14)
    monkeypatch.setitem(kernels.BLOCK_ELEMENTS, "traced", 2**14)
    n, e = 1024, 8
    x = torch.randn(1, 1, n, e, requires_grad=True)
    with db.patched(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = F.scaled_dot_product_attention(x, x, x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with Largest() as largest:
            g.square().sum().backward()
    assert largest.entries <= 2**14 < n * n


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=D),
        lambda: nn.MultiheadAttention(16, 4, batch_first=True, dtype=D),
    ],
    ids=["TransformerEncoderLayer", "MultiheadAttention"],
)
def test_modules_take_a_gradient_penalty(build):
    torch.manual_seed(0)
    net = build().train()
    x = random(2, 7, 16).requires_grad_()

    def step():
        y = (
            net(x, x, x, need_weights=False)[0]
            if isinstance(net, nn.MultiheadAttention)
            else net(x)
        )
        (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return [
            list(torch.autograd.grad(g.square().sum(), [x, *net.parameters()], allow_unused=True))
        ]

    with sdpa_kernel(SDPBackend.MATH):
        expected = step()
    with db.patched():
        assert error(step(), expected) < 1e-12


# --------------------------------------------- the formulas of CUDA's kernels, by their arguments


def arguments(name: str, inputs, bias=None) -> dict:
    """The arguments of a CUDA backward, with the log-sum-exp laid out as that kernel lays it."""
    q, k, v = (t.detach() for t in inputs)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)
    lse, out = scores.logsumexp(-1), scores.softmax(-1) @ v
    given = {"query": q, "key": k, "value": v, "out": out, "dropout_p": 0.0, "is_causal": False}
    given |= {"scale": None, "grad_out": random(*out.shape, seed=9)}
    if "efficient" in name:
        given["grad_out_"] = given.pop("grad_out")
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        given |= {"attn_bias": bias, "grad_input_mask": [True, True, True, bias is not None]}
    if "cudnn" in name:
        lse, given["attn_bias"] = lse.unsqueeze(-1), bias
    return given | {"logsumexp": lse}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("formula", attention.FORMULAS[1:], ids=lambda f: f.operator)
def test_formulas_of_cuda_kernels(formula, biased):
    """Their `second` is device-independent: here on the CPU against the unfused kernel."""
    if biased and "_flash_" in formula.operator:
        return  # that kernel takes no bias
    inputs = qkv()
    bias = random(2, 4, 9, 9, seed=7) if biased else None
    a = arguments(formula.operator, inputs, bias)
    schema = {x.name for x in getattr(torch.ops.aten, formula.operator).default._schema.arguments}
    assert set(a) <= schema and formula.accepts(a)
    name = "grad_out_" if "grad_out_" in a else "grad_out"
    names = [name, "query", "key", "value"]
    with_bias = biased and "efficient" in formula.operator
    names += ["attn_bias"] if with_bias else []
    cotangents = [random(*a[n].shape, seed=20 + i) for i, n in enumerate(names[1:])]
    if "efficient" in formula.operator and not with_bias:
        cotangents.append(None)
    found = formula.second(Call(a, {n: n in names for n in a}), cotangents)
    at = {n: a[n].clone().requires_grad_() for n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = formula.composite(a | at)
        total = sum((g * c).sum() for g, c in zip(grads, cotangents, strict=True) if c is not None)
        expected = torch.autograd.grad(total, list(at.values()))
    assert error([[found[n] for n in names]], [list(expected)]) < 1e-12


def test_dropout_and_ragged_batches_are_left_to_stock():
    a = arguments("flash", qkv())
    accepts = attention.FORMULAS[1].accepts
    assert accepts(a)
    assert not accepts(a | {"dropout_p": 0.1})
    assert not accepts(a | {"cum_seq_q": torch.tensor([0, 4, 9])})
