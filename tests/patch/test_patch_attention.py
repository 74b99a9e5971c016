"""Fused attention under a second derivative: exact against the unfused kernel, memory linear."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import doubleback as db
from doubleback.kernels import BITS
from doubleback.patch import mechanism, missing
from doubleback.patch.mechanism import Applied
from support.derivatives import error, samples, second
from support.dropout import kept, provider

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


@pytest.mark.parametrize("small", [False, True], ids=["", "small"])
@pytest.mark.parametrize("key", CASES)
def test_every_order_is_that_of_the_unfused_kernel(key, small, monkeypatch):
    monkeypatch.setattr(mechanism, "SMALL_ON_STOCK", small)
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


class Largest(TorchDispatchMode):
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


def arguments(name: str, inputs, bias=None, z=1.0) -> dict:
    """The arguments of a CUDA backward, with the log-sum-exp laid out as that kernel lays it."""
    q, k, v = (t.detach() for t in inputs)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)
    lse, out = scores.logsumexp(-1), (z * scores.softmax(-1)) @ v
    given = {"query": q, "key": k, "value": v, "out": out, "dropout_p": 0.0, "is_causal": False}
    given |= {"scale": None, "grad_out": random(*out.shape, seed=9)}
    given |= {"philox_seed": torch.tensor(0), "philox_offset": torch.tensor(0)}
    if "efficient" in name:
        given["grad_out_"] = given.pop("grad_out")
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        given |= {"attn_bias": bias, "grad_input_mask": [True, True, True, bias is not None]}
    if "cudnn" in name:
        lse, given["attn_bias"] = lse.unsqueeze(-1), bias
    return given | {"logsumexp": lse}


def cotangent_name(a: dict) -> str:
    return "grad_out_" if "grad_out_" in a else "grad_out"


BIASED = [  # the flash kernel takes no bias
    pytest.param(f, biased, id=f"{f.operator}{'-biased' if biased else ''}")
    for f in missing.ATTENTION[1:]
    for biased in (False, True)
    if not (biased and "_flash_" in f.operator)
]


@pytest.mark.parametrize("formula, biased", BIASED)
def test_formulas_of_cuda_kernels(formula, biased):
    """Their `second` is device-independent: here on the CPU against the unfused kernel."""
    inputs = qkv()
    bias = random(2, 4, 9, 9, seed=7) if biased else None
    a = arguments(formula.operator, inputs, bias)
    schema = {x.name for x in getattr(torch.ops.aten, formula.operator).default._schema.arguments}
    assert set(a) <= schema and formula.accepts(a)
    names = [cotangent_name(a), "query", "key", "value"]
    with_bias = biased and "efficient" in formula.operator
    names += ["attn_bias"] if with_bias else []
    cotangents = [random(*a[n].shape, seed=20 + i) for i, n in enumerate(names[1:])]
    if "efficient" in formula.operator and not with_bias:
        cotangents.append(None)
    found = formula.second(Applied(a, {n: n in names for n in a}), cotangents)
    at = {n: a[n].clone().requires_grad_() for n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = formula.composite(a | at)
        total = sum((g * c).sum() for g, c in zip(grads, cotangents, strict=True) if c is not None)
        expected = torch.autograd.grad(total, list(at.values()))
    assert error([[found[n] for n in names]], [list(expected)]) < 1e-12


@pytest.mark.parametrize("again", [False, True], ids=["blocks", "composite"])
@pytest.mark.parametrize("step", [BITS, 8 * BITS])
@pytest.mark.parametrize("formula", missing.ATTENTION[1:], ids=lambda f: f.operator)
def test_formulas_of_cuda_kernels_with_dropout(formula, step, again, monkeypatch):
    """With a known mask instead of one read off the kernel; third derivatives take all of it."""
    inputs, p = qkv(n=9, m=15), 0.4
    keep = torch.rand(2, 4, 9, 15, generator=torch.Generator().manual_seed(3)) >= p
    z = keep.double() / (1 - p)
    monkeypatch.setattr(missing, "recovered", lambda *_: provider(keep, p, step))
    a = arguments(formula.operator, inputs, z=z) | {"dropout_p": p}
    assert formula.accepts(a)
    names = [cotangent_name(a), "query", "key", "value"]
    at = {n: a[n].clone().requires_grad_() for n in names}
    xi, *leaves = at.values()
    scores = leaves[0] @ leaves[1].mT / math.sqrt(8)
    out = (z * scores.softmax(-1)) @ leaves[2]
    cotangents = [random(*t.shape, seed=20 + i) for i, t in enumerate(leaves)]
    grads = torch.autograd.grad(out, leaves, xi, create_graph=True)
    expected = torch.autograd.grad(grads, [xi, *leaves], cotangents)
    given = a | at if again else a
    found = formula.second(Applied(given, {n: n in names for n in a}), cotangents)
    assert error([[found[n] for n in names]], [list(expected)]) < 1e-12


def test_ragged_batches_and_dropout_on_the_cpu_are_left_to_stock():
    a = arguments("flash", qkv())
    accepts = missing.ATTENTION[1].accepts
    assert accepts(a) and accepts(a | {"dropout_p": 0.1})
    assert not accepts(a | {"cum_seq_q": torch.tensor([0, 4, 9])})
    stateless = {n: x for n, x in a.items() if "philox" not in n}
    assert accepts(stateless) and not accepts(stateless | {"dropout_p": 0.1})


class Calls(TorchDispatchMode):
    """The first argument of every call of an attention backward."""

    def __init__(self):
        super().__init__()
        self.gradients = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.gradients.append(args[0])
        return func(*args, **(kwargs or {}))


def test_the_first_derivative_is_not_run_again_on_no_gradient():
    """Where only a penalty is differentiated the output has no gradient, for which cuDNN's kernel
    returns uninitialised memory."""
    inputs = [t.requires_grad_() for t in qkv()]
    with db.patched(), Calls() as calls:
        y = F.scaled_dot_product_attention(*inputs)
        (g,) = torch.autograd.grad(y, inputs[0], random(*y.shape), create_graph=True)
        assert len(calls.gradients) == 1
        torch.autograd.grad(g.square().sum(), inputs)
    assert len(calls.gradients) == 1


# ------------------------------------------------------------------- dropout of CUDA's own kernels

# Relative errors in norm: the unit of rounding of each dtype, over the products of a few of them.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, (torch.float16, torch.bfloat16)),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, tuple(TOLERANCE)),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, (torch.float16, torch.bfloat16)),
}
ALL = tuple(BACKENDS)
DROPPED = {
    "one range of columns": ((2, 4, 197, 64), (2, 4, 197, 64), {}, ALL),
    "several ranges": ((2, 4, 200, 16), (2, 4, 200, 16), {}, ALL),
    "causal": ((2, 4, 200, 16), (2, 4, 200, 16), {"is_causal": True}, ALL),
    "cross": ((2, 4, 70, 32), (2, 4, 300, 32), {"scale": 0.3}, ALL),
    "odd width": ((2, 4, 100, 20), (2, 4, 100, 20), {}, ("flash",)),
    "gqa": ((2, 4, 100, 32), (2, 2, 100, 32), {"enable_gqa": True}, ("flash",)),
    "added mask": (
        (2, 4, 96, 32), (2, 4, 96, 32), {"attn_mask": random(2, 4, 96, 96, seed=5)},
        ("efficient",),
    ),
}  # fmt: skip
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def dropped(backend: SDPBackend, dtype: torch.dtype, case: str, p: float):
    """(inputs, fused function, inputs in float64, unfused function of the same mask)"""
    shape, key_shape, options, _ = DROPPED[case]
    shapes, options = (shape, key_shape, key_shape), dict(options)
    inputs = [random(*s, seed=i).to("cuda", dtype).requires_grad_() for i, s in enumerate(shapes)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    mask = options.pop("attn_mask", None)
    mask = None if mask is None else mask.to("cuda", dtype)
    z = kept(backend, p, inputs[0], key_shape[2], seed=11).double() / (1 - p)

    def fused():
        torch.manual_seed(11)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, mask, p, **options)

    def unfused():
        q, k, v = exact
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
        if options.get("is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        scores = scores if mask is None else scores + mask
        return (z * scores.softmax(-1)) @ v

    return inputs, fused, exact, unfused


TAKEN = [
    pytest.param(backend, case, dtype, id=f"{name}-{case}-{dtype}")
    for name, (backend, dtypes) in BACKENDS.items()
    for case in DROPPED
    for dtype in dtypes
    if name in DROPPED[case][3]
]


@cuda
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("backend, case, dtype", TAKEN)
def test_dropout_of_cuda_kernels(backend, case, dtype, p):
    inputs, fused, exact, unfused = dropped(backend, dtype, case, p)
    expected = second(unfused, exact, rounded=dtype)
    with db.patched():
        found = second(fused, inputs, rounded=dtype)
    for grads, others in zip(found, expected, strict=True):
        for g, e in zip(grads, others, strict=True):
            assert (g.double() - e).norm() <= TOLERANCE[dtype] * e.norm()


@cuda
@pytest.mark.parametrize("name", BACKENDS)
def test_third_derivatives_under_dropout(name):
    backend, dtype = BACKENDS[name][0], torch.float16
    inputs, fused, exact, unfused = dropped(backend, dtype, "several ranges", p=0.2)
    expected = second(unfused, exact, order=3, rounded=dtype)
    with db.patched():
        found = second(fused, inputs, order=3, rounded=dtype)
    for g, e in zip(found[2], expected[2], strict=True):
        assert (g.double() - e).norm() <= 2 * TOLERANCE[dtype] * e.norm()


@cuda
@pytest.mark.parametrize("name", BACKENDS)
def test_the_generator_stays_where_it_was(name):
    inputs, fused, *_ = dropped(BACKENDS[name][0], torch.bfloat16, "several ranges", p=0.2)
    with db.patched():
        (g,) = torch.autograd.grad(fused().float().square().sum(), inputs[0], create_graph=True)
        before = torch.cuda.get_rng_state()
        g.float().square().sum().backward()
        assert torch.equal(torch.cuda.get_rng_state(), before)


@cuda
def test_dropout_in_a_cuda_graph_is_an_error():
    q = torch.randn(1, 2, 32, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        (g,) = torch.autograd.grad(y.float().sum(), q, create_graph=True)
        return torch.autograd.grad(g.float().sum(), q)

    with db.patched():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(db.PatchError, match="random state"), torch.cuda.graph(graph):
            step()
