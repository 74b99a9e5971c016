"""Attention's second derivative under dropout, and the mask read off a kernel by codes."""

from __future__ import annotations

import itertools

import pytest
import torch

from doubleback.errors import PatchError
from doubleback.kernels import attention
from doubleback.kernels import attention as kernels
from doubleback.kernels.attention import BITS, Dropout, attention_forward, attention_second
from support.attention import BLOCKS, CASES, LARGE, Case, Largest, all_close, close, data, oracle
from support.dropout import provider

P = 0.3
STEPS = {"whole": 6 * 64, "parts": 6}


@pytest.fixture(params=BLOCKS, ids=list(BLOCKS))
def blocks(request, monkeypatch):
    if BLOCKS[request.param] is not None:
        for key in kernels.BLOCK_ELEMENTS:
            monkeypatch.setitem(kernels.BLOCK_ELEMENTS, key, BLOCKS[request.param])


def known(primals, layout, step, p=P):
    """A random mask as Z and as its provider."""
    f = kernels.frame(*primals, *layout)
    generator = torch.Generator().manual_seed(7)
    keep = torch.rand(*f.batch, f.h * f.g, f.n, f.m, generator=generator) >= p
    z = keep.double() / (1 - p)
    return z if f.shape else z[0], provider(keep, p, step)


def saved_by_a_kernel(primals, layout, expected):
    """O with dropout; the log-sum-exp knows none."""
    return (*primals, expected[0].to(primals[0].dtype), attention_forward(*primals, *layout)[1][0])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [*CASES, "several tiles", "several causal tiles"])
def test_parity(name, step, blocks):
    primals, tangents, xi, layout = data({**CASES, **LARGE}[name])
    z, dropout = known(primals, layout, STEPS[step])
    expected = oracle(primals, tangents, xi, layout, z)
    with torch.no_grad():
        saved = saved_by_a_kernel(primals, layout, expected)
        t_out, sources = attention_second(xi, *tangents, *saved, *layout, dropout=dropout)
    close(t_out, expected[2])
    all_close(sources, expected[3])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("keep", list(itertools.product([True, False], repeat=3)))
def test_absent_tangents_and_unwanted_results(keep, step, blocks):
    primals, tangents, xi, layout = data(CASES["gqa mask"])
    z, dropout = known(primals, layout, STEPS[step])
    some = [t if k else None for t, k in zip(tangents, keep, strict=True)]
    zeros = [0 * t for t in tangents]
    expected = oracle(primals, some if any(keep) else zeros, xi, layout, z)
    with torch.no_grad():
        saved = saved_by_a_kernel(primals, layout, expected)
        for wanted in itertools.product([True, False], repeat=4):
            t_out, sources = attention_second(
                xi, *some, *saved, *layout,
                wanted=wanted[1:], tangent=wanted[0], dropout=dropout,
            )  # fmt: skip
            for found, exact, want in zip(
                (t_out, *sources), (expected[2], *expected[3]), wanted, strict=True
            ):
                assert (found is not None) == want
                if want:
                    close(found, exact)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["plain", "causal", "float mask", "gqa", "dead rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision(name, dtype, step):
    primals, tangents, xi, layout = data(CASES[name], dtype)
    z, dropout = known(primals, layout, STEPS[step])
    expected = oracle(primals, tangents, xi, layout, z)
    with torch.no_grad():
        saved = saved_by_a_kernel(primals, layout, expected)
        t_out, sources = attention_second(xi, *tangents, *saved, *layout, dropout=dropout)
    close(t_out, expected[2], dtype)
    all_close(sources, expected[3], dtype)


def test_nothing_kept():
    """p = 1: O = 0 whatever the inputs, even where a kernel divides by 1 − p."""
    primals, tangents, xi, layout = data(CASES["plain"])
    dropout = attention.recovered(attention.EFFICIENT, 1.0, *primals, xi, xi)
    assert not dropout.dense(7, torch.float64).any()
    nothing = torch.full_like(xi, torch.nan)
    t_out, sources = attention_second(
        xi, *tangents, *primals, nothing, xi[..., 0], *layout, dropout=dropout
    )
    assert not any(t.any() for t in (t_out, *sources))


def test_no_matrix_of_all_scores(monkeypatch):
    n, limit, step = 384, 2048, 48
    for key in kernels.BLOCK_ELEMENTS:
        monkeypatch.setitem(kernels.BLOCK_ELEMENTS, key, limit)
    primals, tangents, xi, layout = data(Case((1, 2, n, 8), (1, 2, n, 8)))
    with torch.no_grad():
        out, residual = attention_forward(*primals, *layout)
        dropout = Dropout(
            P, step, lambda first: torch.full((1, 2, n, step // BITS), 0b101101).byte()
        )
        with Largest() as seen:
            attention_second(xi, *tangents, *primals, out, residual, *layout, dropout=dropout)
    assert seen.entries <= 2 * step * n < n * n


# ------------------------------------------------------------------- the mask, read off a kernel

KERNELS = {
    "flash": attention.FLASH,
    "efficient": attention.EFFICIENT,
    "cudnn": attention.CUDNN,
}


@pytest.fixture
def kernel(monkeypatch):
    """A kernel with a known mask, that rounds P and its result; and the states it was called at."""
    states = []

    def install(keep, p):
        def drop(backend, rate, q, k, v):
            assert rate == p and q.shape[1] == k.shape[1] == v.shape[1]
            weights = (q @ k.mT).softmax(-1, dtype=torch.float32).to(q.dtype)
            weights = (weights * keep / (1 - p)).to(q.dtype)
            return (weights.float() @ v.float()).to(q.dtype)

        class State:
            def __init__(self, device, *state):
                states.append(state)

            def __enter__(self):
                return None

            def __exit__(self, *error):
                return None

        monkeypatch.setattr(attention, "drop", drop)
        monkeypatch.setattr(attention, "_random_state", State)
        return states

    return install


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("m, width", [(5, 8), (48, 8), (197, 8), (100, 32)])
def test_codes_tell_every_column(m, width, p, dtype, kernel):
    keep = torch.rand(2, 4, 7, m, generator=torch.Generator().manual_seed(m)) >= p
    kernel(keep, p)
    q = torch.randn(2, 4, 7, width).to(dtype)
    k, v = torch.randn(2, 2, 2, m, width).to(dtype)  # two key heads
    zero = torch.tensor(0)
    dropout = attention.recovered(attention.EFFICIENT, p, q, k, v, zero, zero)
    assert dropout.step == BITS * width
    torch.testing.assert_close(dropout.dense(m, torch.float64), keep.double() / (1 - p))
    assert dropout.codes(0).dtype == torch.uint8


def test_random_states_are_whole_64_bits(kernel):
    """Flash attention keeps both numbers in one unsigned tensor, the others in two signed ones."""
    seed, offset = 2**64 - 3, 8
    states = kernel(torch.ones(1, 1, 3, 3), P)
    q = torch.randn(1, 1, 3, 8)
    both = torch.tensor([seed - 2**64, offset]).view(torch.uint64)
    pairs = {
        attention.FLASH: (both, torch.empty(0)),
        attention.EFFICIENT: (torch.tensor(seed - 2**64), torch.tensor(offset)),
    }
    for backend, pair in pairs.items():
        attention.recovered(backend, P, q, q, q, *pair).codes(0)
    assert states == [(seed, offset)] * 2


def test_no_random_state_in_a_traced_graph():
    q, zero = torch.randn(1, 1, 3, 8), torch.tensor(0)

    def step(q):
        return attention.recovered(attention.EFFICIENT, P, q, q, q, zero, zero).codes(0)

    with pytest.raises(PatchError, match="random state"):
        torch.fx.experimental.proxy_tensor.make_fx(step)(q)


def test_no_random_state_in_a_cuda_graph(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    q, zero = torch.randn(1, 1, 3, 8), torch.tensor(0)
    with pytest.raises(PatchError, match=r"SDPBackend\.MATH"):
        attention.recovered(attention.EFFICIENT, P, q, q, q, zero, zero)


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_operators_fit(name):
    """CUDA's operators take the code and return what is decoded: shapes, without a GPU."""
    q, k, v = (torch.empty(2, 4, n, 16, dtype=torch.bfloat16, device="meta") for n in (7, 9, 9))
    assert attention.drop(KERNELS[name], P, q, k, v).shape == (2, 4, 7, 16)
