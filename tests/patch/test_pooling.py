"""Average pooling of channels-last images: the first derivative, and with it every other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import doubleback as db
from doubleback.patch.mechanism import Patcher
from doubleback.patch.missing import POOLING, in_rows, wrong
from support.gpu import needs_gpu

aten = torch.ops.aten
WINDOWS = {  # kernel, stride, padding, ceil_mode, count_include_pad, divisor
    "apart": ([2, 2], [], [0, 0], False, True, None),
    "overlapping": ([3, 3], [1, 1], [1, 1], False, True, None),
    "one way": ([3, 2], [2, 2], [0, 0], False, True, None),
    "one number": ([3], [2], [0], True, True, None),
    "over the edge": ([2, 2], [2, 2], [1, 0], True, False, None),
    "own divisor": ([3, 3], [2, 1], [1, 1], False, True, 5),
}
LAYOUTS = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "half the channels": lambda x: torch.cat([x, x], 1)
    .contiguous(memory_format=torch.channels_last)[:, ::2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}  # fmt: skip


def images() -> torch.Tensor:
    return torch.randn(3, 4, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_for_rows_serves_every_layout(layout, windows):
    x = LAYOUTS[layout](images())
    options = WINDOWS[windows]
    grad = torch.randn_like(LAYOUTS[layout](aten.avg_pool2d(x, *options)))
    expected = aten.avg_pool2d_backward(grad, x, *options)
    found = in_rows(aten.avg_pool2d_backward, grad, x, *options)
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_it_is_asked_for_only_where_it_is_needed():
    x = images()
    last = x.contiguous(memory_format=torch.channels_last)
    sizes = {name: options[:3] for name, options in WINDOWS.items()}
    assert not any(wrong(x, *s) for s in sizes.values())
    assert {name for name, s in sizes.items() if wrong(last, *s)} == set(sizes) - {"apart"}
    assert all(
        wrong(LAYOUTS["half the channels"](x), *sizes[n]) for n in ("overlapping", "one way")
    )


def test_it_is_there_from_the_start():
    with db.patched(only="pooling"):
        (entry,) = [e for e in db.patch_report() if e.family == "pooling"]
        assert entry.state == "replaced"
    db.patch()  # before any create_graph
    assert [e.state for e in db.patch_report() if e.family == "pooling"] == ["replaced"]


def derivatives(layout: str, windows: str, device: str) -> list[torch.Tensor]:
    """First with and without a graph, and second."""
    kernel, stride, *others = WINDOWS[windows]
    x = LAYOUTS[layout](images().to(device)).requires_grad_()
    y = F.avg_pool2d(x, kernel, stride or None, *others)
    first = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]
    return [t.cpu() for t in (first, again, *torch.autograd.grad(again.pow(3).sum(), x))]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_a_kernel_of_autograd(layout, windows):
    """On the CPU, where nothing is wrong: the same derivatives of both orders."""
    expected = derivatives(layout, windows, "cpu")
    calls = []

    def counted(formula, stock, switch):
        kernel = formula_here.kernel(formula, stock, switch)

        def call(*args):
            calls.append(args)
            return kernel(*args)

        return call

    (formula_here,) = POOLING
    here = replace(formula_here, keys=("AutogradCPU",), kernel=counted)
    with Patcher([here]).patched(None):
        found = derivatives(layout, windows, "cpu")
    assert len(calls) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@needs_gpu
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_on_a_gpu_are_the_cpu_s(layout, windows):
    expected = derivatives(layout, windows, "cpu")
    with db.patched():
        for found, right in zip(derivatives(layout, windows, "cuda"), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
