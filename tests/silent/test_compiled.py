"""Compiled sweeps through operators that write into a base: the tangent of an absent base is a zero
with memory of its own, not one number seen from everywhere."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import doubleback as db
from doubleback.run import inductor
from support.stock import numbers, pair, same_training

aten = torch.ops.aten

compiled = pytest.mark.skipif(
    shutil.which("g++") is None and importlib.util.find_spec("triton") is None,
    reason="Inductor needs a compiler",
)


class Written(nn.Module):
    """A base of constants, of which rows, entries or pieces are replaced or added to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.how = how
        self.register_buffer("base", 0.3 * torch.randn(4, 6))
        self.register_buffer("rows", torch.tensor([2, 0, 0, 1]))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("places", torch.tensor([[0, 2, 1, 3, 0, 1]] * 2))
        self.register_buffer("mask", torch.arange(24).reshape(4, 6) % 3 == 0)

    def write(self, h):
        base, how = self.base, self.how
        if how == "index_add":
            return base.index_add(0, self.rows, h)
        if how == "index_put":
            return base.index_put((self.order,), h)
        if how == "index_put, adding":
            return base.index_put((self.rows,), h, accumulate=True)
        if how == "index_copy":
            return base.index_copy(0, self.order, h)
        if how == "scatter":
            return base.scatter(0, self.order[:, None].expand(4, 6), h)
        if how == "scatter_add":
            return base.scatter_add(0, self.rows[:, None].expand(4, 6), h)
        if how == "scatter_reduce":
            return base.scatter_reduce(0, self.rows[:, None].expand(4, 6), h, "sum")
        if how == "select_scatter":
            return base.select_scatter(h[1], 0, 2)
        if how == "slice_scatter":
            return base.slice_scatter(h[:2], 0, 1, 3)
        if how == "diagonal_scatter":
            return base.diagonal_scatter(h[:, 0])
        return base.masked_scatter(self.mask, h)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.write(h)))


OPERATORS = (
    "index_add", "index_put", "index_put, adding", "index_copy", "scatter", "scatter_add",
    "scatter_reduce", "select_scatter", "slice_scatter", "diagonal_scatter", "masked_scatter",
)  # fmt: skip


@pytest.mark.parametrize("how", OPERATORS)
def test_writing_into_a_constant(how):
    torch.manual_seed(0)
    model, twin = pair(Written(how))
    same_training(model, twin, steps=5)


@compiled
@pytest.mark.parametrize("name", ["index_add", "index_put", "index_copy"])
def test_writing_into_a_constant_compiled(name):
    torch.manual_seed(0)
    model, twin = pair(Written(name), compile=True)
    same_training(model, twin, steps=2, how="accumulate")


@pytest.mark.parametrize("how", OPERATORS)
def test_no_writer_is_handed_an_expanded_base(how):
    """What Inductor mishandles, looked for where it does not depend on Inductor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    writers = ("index_add", "index_put", "index_copy", "scatter", "index_fill")

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if any(name.strip("_").startswith(w) or name.endswith("_scatter") for w in writers):
                self.seen += 1
                base = args[0]
                sizes = zip(base.shape, base.stride(), strict=True)
                assert all(n == 1 or s for n, s in sizes), f"{name} writes into an expanded base"
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model, _ = pair(Written(how))
    x = numbers(0, 4, 5)
    model(x)
    with Watch() as watch:
        out, penalty = model(x)
        (out.sum() + penalty).backward()
    assert watch.seen


WRITERS = {
    "index_fill": lambda a, at, new: a.index_fill(1, at, 0.4),
    "index_copy": lambda a, at, new: a.index_copy(1, at, new),
    "index_add": lambda a, at, new: a.index_add(1, at, new),
    "scatter": lambda a, at, new: a.scatter(1, at.expand(3, 1), new),
    "scatter_add": lambda a, at, new: a.scatter_add(1, at.expand(3, 1), new),
}


class ReadBehind(nn.Module):
    """Reads what was written into a copy of `a` beside a sum over it: Inductor put the reader in
    front of the writer."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.head, self.write = nn.Linear(6, 6), nn.Linear(6, 3), write
        self.register_buffer("at", torch.tensor([1]))
        self.register_buffer("new", torch.tensor([[0.3], [-0.2], [0.7]]))

    def forward(self, x):
        a = self.layer(x)[:, torch.tensor([3, 1, 0, 5, 4, 2])]
        scaled = a / (1 + a.norm(3, 1, keepdim=True))
        return self.head((scaled + self.write(a, self.at, self.new) * a).tanh())


def fresh(write):
    torch.manual_seed(3)
    return ReadBehind(write).double(), torch.randn(3, 6, dtype=torch.float64)


@compiled
@pytest.mark.parametrize("name", ["index_fill", "scatter_add"])
def test_readers_stay_behind_writers(name):
    net, x = fresh(WRITERS[name])
    model = db.Penalised(net, db.OutputGradient(0), compile=True)
    out, penalty = model(x)
    penalty.backward()
    torch.testing.assert_close(out, net(x), rtol=1e-12, atol=1e-12)
    stock, _ = fresh(WRITERS[name])
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(stock(x)[:, 0].sum(), x, create_graph=True)
    g.square().sum(1).mean().backward()
    for p, q in zip(net.parameters(), stock.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@compiled
def test_readers_stay_behind_writers_in_a_compiled_loss_and_in_the_backend():
    net, x = fresh(WRITERS["scatter"])
    torch.testing.assert_close(
        db.compile(lambda t: net(t).square().sum())(x), net(x).square().sum(), rtol=1e-12, atol=0
    )
    found = torch.compile(net, backend="doubleback")(x)
    torch.testing.assert_close(found, net(x), rtol=1e-12, atol=1e-12)


class Shifted(nn.Module):
    """Adds columns of a tensor to columns of the same: Inductor read what it had written."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, 1)
        self.register_buffer("at", torch.tensor([1, 1, 0]))

    def forward(self, x):
        a = self.layer(x) * x[:, :1]
        a = a.index_add(1, self.at, a[:, :3]).tanh()
        b = (a * x[:, 1:2])[:4, :4]
        moved = torch.ops.aten.index_put(b, [None, self.at[1:]], b.t()[:, :2])
        return self.head(torch.cat((a[:, :2], moved), 1).sin())


@compiled
def test_what_is_written_is_read_before():
    torch.manual_seed(0)
    model, twin = pair(Shifted(), compile=True)
    same_training(model, twin, steps=2)
    same_training(model, twin, steps=2, how="accumulate")
    x = numbers(0, 4, 5)
    wanted = twin(x).square().sum()
    loss = db.compile(lambda t: twin(t).square().sum())(x)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    found = torch.compile(twin, backend="doubleback")(x)
    torch.testing.assert_close(found, twin(x), rtol=1e-12, atol=1e-12)


@compiled
def test_the_mean_of_a_part_of_a_window():
    """Where windows reach beyond the padding, Inductor divided by the size of the whole."""

    def pull(y, x, wide, deep):
        flat = aten.avg_pool2d_backward(y, x, [3, 3], [2, 2], [1, 1], True, True, None)
        solid = aten.avg_pool3d_backward(wide, deep, [2] * 3, [2] * 3, [1] * 3, True, True, None)
        return flat, solid

    given = [numbers(k, *size) for k, size in enumerate([[2, 3, 3], [2, 4, 4], [1] + [3] * 3])]
    given.append(numbers(3, 1, 4, 4, 4))
    found = inductor.compiled(make_fx(pull)(*given), True)(list(given))
    torch.testing.assert_close(list(found), list(pull(*given)), rtol=1e-12, atol=0)


@compiled
def test_a_backward_pass_is_no_graph_that_pytorch_compiled_before(monkeypatch):
    """It is compiled when it is first called, and was looked for in the caches on disk among graphs
    of `torch.compile`'s own, where the errors that are put right here still are."""
    from torch._inductor import config
    from torch._inductor.lowering import lowerings

    written_out, seen = lowerings[aten.cos.default], []

    def spy(x):
        seen.append(config.max_fusion_size)
        return written_out(x)

    monkeypatch.setitem(lowerings, aten.cos.default, spy)
    x = numbers(0, 3).requires_grad_()
    with config.patch(fx_graph_cache=False):
        torch.compile(lambda x: x.sin().sum(), backend="doubleback")(x).backward()
    assert seen == [inductor.SOUND["max_fusion_size"]]
    torch.testing.assert_close(x.grad, x.cos().detach())
