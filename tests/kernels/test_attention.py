"""Attention's four functions against autograd on softmax(s·QKᵀ + mask) V written out plainly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from doubleback.errors import InputError
from doubleback.kernels import attention as attention_kernels
from doubleback.kernels import attention_triton as fused
from doubleback.kernels.attention import (
    FLASH,
    MATH,
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
)
from support.attention import (
    BLOCKS,
    CASES,
    LARGE,
    TOLERANCE,
    Case,
    Largest,
    all_close,
    close,
    data,
    oracle,
)
from support.gpu import CUDA, INTERPRETED, TRITON, needs_gpu, on_gpu_all


@pytest.fixture(params=BLOCKS, ids=list(BLOCKS))
def blocks(request, monkeypatch):
    if BLOCKS[request.param] is not None:
        for key in attention_kernels.BLOCK_ELEMENTS:
            monkeypatch.setitem(attention_kernels.BLOCK_ELEMENTS, key, BLOCKS[request.param])
    return request.param


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_parity(name, stock, blocks, monkeypatch):
    if not stock:
        monkeypatch.setattr(attention_kernels, "choose_backend", lambda *_: MATH)
    primals, tangents, xi, layout = data(CASES[name])
    expected = oracle(primals, tangents, xi, layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        close(out, expected[0])
        assert residual[0].shape == out.shape[:-1]
        all_close(attention_backward(xi, *saved), expected[1])
        close(attention_tangent(*tangents, *saved), expected[2])
        t_out, sources = attention_second(xi, *tangents, *saved)
        close(t_out, expected[2])
        all_close(sources, expected[3])
        # A bare log-sum-exp is enough of a residual.
        bare = (*primals, out, residual[0], *layout)
        all_close(attention_backward(xi, *bare), expected[1])
        all_close(attention_second(xi, *tangents, *bare)[1], expected[3])


@pytest.mark.parametrize("keep", list(itertools.product([True, False], repeat=3))[:-1])
def test_absent_tangents_are_zero(keep, blocks):
    primals, tangents, xi, layout = data(CASES["gqa mask"])
    some = [t if k else None for t, k in zip(tangents, keep, strict=True)]
    _, _, expected_t, expected_s = oracle(primals, some, xi, layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        close(attention_tangent(*some, *saved), expected_t)
        t_out, sources = attention_second(xi, *some, *saved)
    close(t_out, expected_t)
    all_close(sources, expected_s)


def test_no_tangent_at_all():
    primals, _, xi, layout = data(CASES["plain"])
    out, residual = attention_forward(*primals, *layout)
    saved = (*primals, out, residual, *layout)
    assert not attention_tangent(None, None, None, *saved).any()
    t_out, sources = attention_second(xi, None, None, None, *saved)
    assert not any(t.any() for t in (t_out, *sources))


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "blocked"])
def test_only_what_is_wanted(wanted, stock, monkeypatch):
    if not stock:
        monkeypatch.setattr(attention_kernels, "choose_backend", lambda *_: MATH)
    primals, tangents, xi, layout = data(CASES["gqa causal"])
    _, grads, t, sources = oracle(primals, tangents, xi, layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        for tangent in (True, False):
            t_out, s = attention_second(xi, *tangents, *saved, wanted=wanted, tangent=tangent)
            assert (t_out is not None) == tangent
            found = [*s, *attention_backward(xi, *saved, wanted=wanted)]
            if tangent:
                close(t_out, t)
            for f, e, want in zip(found, [*sources, *grads], wanted * 2, strict=True):
                assert (f is not None) == want
                if want:
                    close(f, e)


@pytest.mark.parametrize("name", ["cross", "causal", "dead rows", "gqa mask", "5-d"])
def test_curvature_is_symmetric(name):
    """⟨S(ξ, t), u⟩ = ⟨S(ξ, u), t⟩"""
    primals, t, xi, layout = data(CASES[name])
    _, u, _, _ = data(CASES[name], seed=1)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        sides = []
        for a, b in ((t, u), (u, t)):
            source = attention_second(xi, *a, *saved, tangent=False)[1]
            sides.append(sum((s * x).sum() for s, x in zip(source, b, strict=True)))
    torch.testing.assert_close(*sides, rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["plain", "causal", "padding mask", "gqa", "wide value"])
def test_tangent_is_dual_to_backward(name):
    """⟨ξ, ∂O t⟩ = ⟨(∂O)* ξ, t⟩"""
    primals, tangents, xi, layout = data(CASES[name])
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        left = (xi * attention_tangent(*tangents, *saved)).sum()
        grads = attention_backward(xi, *saved)
    right = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close(left, right, rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "float mask", "gqa", "dead rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision(name, dtype, blocks):
    primals, tangents, xi, layout = data(CASES[name], dtype)
    expected = oracle(primals, tangents, xi, layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        assert residual[0].dtype == torch.float32
        close(out, expected[0], dtype)
        all_close(attention_backward(xi, *saved), expected[1], dtype)
        t_out, sources = attention_second(xi, *tangents, *saved)
    close(t_out, expected[2], dtype)
    all_close(sources, expected[3], dtype)


@pytest.mark.parametrize("name", ["plain", "causal", "dead rows", "dead rows, float", "gqa"])
def test_forward_is_pytorchs(name):
    primals, _, _, (mask, causal, scale, gqa) = data(CASES[name])
    expected = F.scaled_dot_product_attention(
        *primals, mask, 0.0, causal, scale=scale, enable_gqa=gqa
    )
    out, (lse, backend, *_) = attention_forward(*primals, mask, causal, scale, gqa)
    assert backend == FLASH
    assert torch.equal(out, expected)
    assert lse.isfinite().all()


def test_rows_without_a_score_are_zero(blocks):
    primals, tangents, xi, layout = data(CASES["dead rows"])
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual[0], *layout)
        dq, _, _ = attention_backward(xi, *saved)
        t_out, (sq, _, _) = attention_second(xi, *tangents, *saved)
    for t in (out, dq, t_out, sq):
        assert not t[..., 2, :].any()


@pytest.mark.parametrize("padding", ["infinite", "padded", "column"])
def test_other_layouts_of_the_log_sum_exp(padding):
    """−∞ for a dead row, N padded to 32s (efficient attention), a last axis of 1 (cuDNN)."""
    primals, tangents, xi, layout = data(CASES["dead rows"])
    with torch.no_grad():
        out, (lse, *_) = attention_forward(*primals, *layout)
        expected = attention_second(xi, *tangents, *primals, out, lse, *layout)[1]
        if padding == "infinite":
            lse = lse.clone()
            lse[..., 2] = -math.inf
        elif padding == "padded":
            lse = F.pad(lse, (0, 25), value=math.nan)
        else:
            lse = lse[..., None]
        found = attention_second(xi, *tangents, *primals, out, lse, *layout)[1]
    all_close(found, expected)


def test_strided_inputs():
    """q, k, v cut out of one projection, as transformers have them; ξ spread out of one number."""
    qkv = torch.randn(2, 7, 3, 3, 8, dtype=torch.float64)
    primals = list(qkv.permute(2, 0, 3, 1, 4).unbind())
    tangents = [torch.randn(2, 3, 8, 7, dtype=torch.float64).mT for _ in range(3)]
    xi = torch.tensor(0.5, dtype=torch.float64).expand(2, 3, 7, 8)
    layout = (None, True, None, False)
    expected = oracle(primals, tangents, xi, layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        all_close(attention_backward(xi, *saved), expected[1])
        t_out, sources = attention_second(xi, *tangents, *saved)
    close(t_out, expected[2])
    all_close(sources, expected[3])


@pytest.mark.parametrize(
    "shapes", [((2, 0, 4), (2, 3, 4)), ((2, 3, 4), (2, 0, 4)), ((0, 3, 4), (0, 5, 4))]
)
def test_empty(shapes):
    q, k = (torch.randn(s) for s in shapes)
    with torch.no_grad():
        out, residual = attention_forward(q, k, k)
        saved = (q, k, k, out, residual, None, False, None, False)
        assert out.shape == q.shape and not out.any()
        grads = attention_backward(out, *saved)
        t_out, sources = attention_second(out, q, k, k, *saved)
    assert not any(t.any() for t in (*grads, t_out, *sources))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["heads", "gqa"])
def test_no_matrix_of_all_scores(causal, heads, monkeypatch):
    n, limit = 128, 2048
    for key in attention_kernels.BLOCK_ELEMENTS:
        monkeypatch.setitem(attention_kernels.BLOCK_ELEMENTS, key, limit)
    monkeypatch.setattr(attention_kernels, "choose_backend", lambda *_: MATH)
    case = Case((2, heads[0], n, 4), (2, heads[1], n, 4), causal=causal, gqa=heads[0] != heads[1])
    primals, tangents, xi, layout = data(case)
    with torch.no_grad(), Largest() as seen:
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        attention_backward(xi, *saved)
        attention_second(xi, *tangents, *saved)
    # [tq, Q] and its like: 2E numbers a row; nothing near N·M = 16384 for each of eight heads.
    assert seen.entries <= max(limit, 2 * out.numel())


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", ["plain", "dead rows", "gqa causal", "wide value", "spread batch"])
def test_traces(name, mode, monkeypatch):
    """One graph, no mutation in it, the same numbers, and the fused kernels still there."""
    monkeypatch.setitem(attention_kernels.BLOCK_ELEMENTS, "traced", 200)
    primals, tangents, xi, layout = data(CASES[name])

    def sweeps(q, k, v, tq, tk, tv, xi, mask):
        out, residual = attention_forward(q, k, v, mask, *layout[1:])
        saved = (q, k, v, out, residual, mask, *layout[1:])
        grads = attention_backward(xi, *saved)
        return out, grads, attention_second(xi, tq, tk, tv, *saved)

    args = (*primals, *tangents, xi, layout[0])
    with torch.no_grad():
        graph = make_fx(sweeps, tracing_mode=mode)(*args)
        expected, found = tree_leaves(sweeps(*args)), tree_leaves(graph(*args))
    all_close(found, expected)
    operators = {n.target for n in graph.graph.nodes if n.op == "call_function"}
    assert not any(getattr(getattr(o, "_schema", None), "is_mutable", False) for o in operators)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in operators
    assert fused == (name not in ("wide value", "spread batch"))


def test_nothing_is_overwritten_where_autograd_watches():
    """Outside no_grad the blocked functions are differentiable themselves."""
    primals, tangents, xi, layout = data(CASES["cross"])
    expected = oracle(primals, tangents, xi, layout)
    leaves = [t.clone().requires_grad_() for t in primals]
    with torch.no_grad():
        out, (lse, *_) = attention_forward(*primals, *layout)
    t_out, _ = attention_second(xi, *tangents, *leaves, out, lse, *layout, wanted=(False,) * 3)
    close(t_out.detach(), expected[2])
    assert t_out.requires_grad


def test_heads_that_do_not_divide():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 3, 5, 8)
    with pytest.raises(InputError, match=r"4 query heads .* 3 key heads"):
        attention_forward(q, k, k, enable_gqa=True)
    with pytest.raises(InputError, match="enable_gqa"):
        attention_forward(q, k[:, :2], k[:, :2])


# CUDA's fused kernels, and the Triton kernels on a GPU or in Triton's interpreter.


@pytest.fixture
def kernels(monkeypatch):
    """The device for the Triton kernels, which float32 reaches under TF32 alone."""
    if not TRITON:
        pytest.skip("needs Triton, the extra `test` brings it")
    if INTERPRETED:
        monkeypatch.setattr(fused, "supported", lambda *_: True)
        monkeypatch.setattr(attention_kernels, "EFFICIENT", FLASH)  # a CPU's
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield "cuda" if CUDA else "cpu"
    torch.set_float32_matmul_precision(precision)


def check_on(device, case, dtype, keep=(True, True, True), factor=1.0):
    primals, tangents, xi, layout = data(case, dtype)
    some = [t if k else None for t, k in zip(tangents, keep, strict=True)]
    expected = oracle(primals, some, xi, layout)

    def move(ts):
        return [t.to(device) if isinstance(t, torch.Tensor) else t for t in ts]

    primals, some, (xi,), layout = move(primals), move(some), move([xi]), move(layout)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        saved = (*primals, out, residual, *layout)
        first = [out, *attention_backward(xi, *saved)]
        t_out, sources = attention_second(xi, *some, *saved)
        second = [attention_tangent(*some, *saved), t_out, *sources]
    _, grads, t, s = expected
    for results, wanted in ((first, [expected[0], *grads]), (second, [t, t, *s])):
        # what is zero is a difference of products of the same numbers as the largest result
        terms = max(1.0, *(float(e.norm()) for e in wanted))
        for f, e in zip(results, wanted, strict=True):
            close(f.cpu(), e, dtype, factor, terms)


# In the interpreter, which multiplies the bits of bfloat16 as integers: each branch of a kernel.
INTERPRETER = (
    "odd head", "wide value", "negative scale", "causal tall", "float mask of examples",
    "padding mask", "dead rows", "mask and causal", "gqa causal", "gqa mask", "spread value", "5-d",
    "one row", "one column", "several causal tiles of a group", "wide heads",
)  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES if CUDA else DTYPES[:1], ids=str)
@pytest.mark.parametrize("name", on_gpu_all({**CASES, **LARGE}, *INTERPRETER))
def test_triton(name, dtype, kernels):
    case, factor = {**CASES, **LARGE}[name], 1.0
    if dtype == torch.float32 and not INTERPRETED:
        # TF32 keeps the 11 bits of float16, not the 24 of float32. What it rounds off q and k
        # moves a score in proportion to the scale, and the score's probability by as much.
        steep = abs(case.scale or 0) * case.q[-1] ** 0.5
        factor = TOLERANCE[torch.float16] / TOLERANCE[dtype] * max(1.0, steep)
    check_on(kernels, case, dtype, factor=factor)


@pytest.mark.parametrize("keep", list(itertools.product([True, False], repeat=3))[:-1])
@pytest.mark.parametrize("name", ["gqa causal", *(["wide heads"] if CUDA else [])])
def test_triton_absent_tangents(name, keep, kernels):
    check_on(kernels, {**CASES, **LARGE}[name], torch.float16, keep)


WANTED = list(itertools.product([True, False], repeat=3))[:-1]


@pytest.mark.parametrize("wanted", WANTED if CUDA else [(True, False, True), (False, True, False)])
def test_triton_first_is_one_operator(wanted, kernels):
    """The vjp of float32 where TF32 is allowed, whole and in parts."""
    primals, _, xi, layout = data(CASES["causal"], torch.float32)
    primals, xi = [t.to(kernels) for t in primals], xi.to(kernels)
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)

        def first(*args):
            return attention_backward(*args, residual, *layout, wanted=wanted)

        args = (xi, *primals, out)
        graph = make_fx(first, tracing_mode="real")(*args)
        every = attention_backward(*args, residual, *layout)
        for f, e, w in zip(first(*args), every, wanted, strict=True):
            assert (f is not None) == w and (f is None or torch.equal(f, e))
        operator = torch.ops.doubleback.attention_first.default
        assert [n.target for n in graph.graph.nodes].count(operator) == 1
        lse, scale = residual[0], primals[0].shape[-1] ** -0.5
        torch.library.opcheck(operator, (*args, lse, None, True, scale, list(wanted)))


def test_triton_is_one_operator(kernels):
    primals, tangents, xi, layout = data(CASES["gqa causal"], torch.float16)
    primals, tangents = ([t.to(kernels) for t in ts] for ts in (primals, tangents))
    xi = xi.to(kernels)
    with torch.no_grad():
        out, (lse, *_) = attention_forward(*primals, *layout)
        args = (xi, *tangents, *primals, out, lse)

        def second(*args):
            return attention_second(*args, *layout)

        graph = make_fx(second, tracing_mode="fake")(*args)
        for f, e in zip(tree_leaves(graph(*args)), tree_leaves(second(*args)), strict=True):
            assert torch.equal(f, e)
        operator = torch.ops.doubleback.attention_second.default
        assert [n.target for n in graph.graph.nodes].count(operator) == 1
        scale = primals[0].shape[-1] ** -0.5
        torch.library.opcheck(operator, (*args, None, True, scale, [True, True, False, True]))


@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize(
    "backend, masked",  # flash attention has no masks
    [
        ("FLASH", False),
        ("EFFICIENT", False),
        ("EFFICIENT", True),
        ("CUDNN", False),
        ("CUDNN", True),
    ],
)
def test_cuda_operators_fit(backend, width, masked, monkeypatch):
    """What CUDA's forward operators return is what their backward takes: shapes, without a GPU."""
    monkeypatch.setattr(
        attention_kernels, "choose_backend", lambda *_: getattr(attention_kernels, backend)
    )
    q, k = (torch.empty(2, 3, n, width, dtype=torch.bfloat16, device="meta") for n in (7, 9))
    layout = (torch.empty(7, 9, dtype=torch.bool, device="meta") if masked else None, False)
    out, residual = attention_forward(q, k, k, *layout)
    assert out.shape == q.shape and residual[0].shape == (2, 3, 7)
    grads = attention_backward(out, q, k, k, out, residual, *layout)
    t_out, sources = attention_second(out, q, k, k, q, k, k, out, residual, *layout)
    assert t_out.shape == q.shape
    for found in (grads, sources):
        assert [g.shape for g in found] == [q.shape, k.shape, k.shape]


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_cuda(name, dtype):
    """Whatever kernels this device has, at the precision that PyTorch is set to."""
    check_on("cuda", {**CASES, **LARGE}[name], dtype)
