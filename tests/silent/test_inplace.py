"""Writes that autograd does not see: in place under `no_grad`, through `.detach()` and `.data`, and
the renormalisation of an embedding's rows."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.capture import lifting
from support.stock import assert_close, assert_same_state, numbers, pair, same_training


class Written(nn.Module):
    """Squares a hidden layer whose numbers were changed behind autograd's back: the derivative is
    that of the unchanged layer, taken at the changed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)

    def write(self, h):
        raise NotImplementedError

    def forward(self, x):
        h = self.first(x)
        self.write(h)
        return self.last(h * h)


class Clamped(Written):
    def write(self, h):
        with torch.no_grad():
            h.clamp_(-0.5, 0.5)


class Detached(Written):
    def write(self, h):
        h.detach().clamp_(-0.5, 0.5)


class Data(Written):
    def write(self, h):
        h.data.mul_(0.5)


class Rows(Written):
    def write(self, h):
        with torch.no_grad():
            h[:, 1:3] = 0.25


class Masked(Written):
    def write(self, h):
        with torch.no_grad():
            h[h < 0] *= 0.1


class Copied(Written):
    def write(self, h):
        with torch.no_grad():
            h.copy_(h.round(decimals=1))


class CutInPlace(Written):
    """`detach_` makes a constant of what was a function of the input."""

    def forward(self, x):
        h = self.first(x)
        g = h.clone()
        g.detach_()
        return self.last(h * g)


class InputItself(Written):
    """A view of the input's copy, written to while no gradient is recorded."""

    def forward(self, x):
        z = 2 * x
        with torch.no_grad():
            z.view(-1).clamp_(-1.0, 1.0)
        h = self.first(z)
        return self.last(h * h)


class Recorded(Written):
    """In place with autograd's knowledge, as a control."""

    def write(self, h):
        h.clamp_(-0.5, 0.5)


WRITTEN = (Clamped, Detached, Data, Rows, Masked, Copied, CutInPlace, InputItself, Recorded)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_hidden_layer_is_written_to(kind, how):
    torch.manual_seed(1)
    model, twin = pair(kind())
    same_training(model, twin, how=how)


class Cosine(Written):
    """`cosine_similarity` raises norms below eps to eps, in C++ and behind autograd's back."""

    def forward(self, x):
        h = self.first(x)
        far = F.cosine_similarity(h, self.last.weight, eps=0.5)
        return (far + h[:, 0] * F.cosine_similarity(h, self.last.weight, eps=3.0)).unsqueeze(1)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_small_norms_are_raised(how):
    torch.manual_seed(1)
    model, twin = pair(Cosine(), strict=True)
    same_training(model, twin, how=how)


def test_a_function_that_writes_within_is_refused(monkeypatch):
    table = lifting.decompositions
    left = lambda: {op: fn for op, fn in table().items() if "cosine" not in str(op)}  # noqa: E731
    monkeypatch.setattr(lifting, "decompositions", left)
    with pytest.raises(db.CaptureError, match="cosine_similarity changes a tensor of shape"):
        db.WithGradient(Cosine(), strict=True)(torch.randn(4, 5))


SAME = {  # calls of which eager returns their input, or a view of it, although no schema says so
    "dropout in evaluation": lambda h: F.dropout(h, 0.5, False),
    "dropout at rate 0": lambda h: F.dropout(h, 0.0),
    "type_as": lambda h: h.type_as(h),
    "einsum": lambda h: torch.einsum("bi->ib", h),
    "diagonal by einsum": lambda h: torch.einsum("ii->i", h[:4, :4]),
}


class Same(Written):
    """What a call returned is written to, with autograd's knowledge; its input is read on."""

    def __init__(self, name):
        super().__init__()
        self.call = SAME[name]

    def write(self, h):
        self.call(h).mul_(0.5).add_(1)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("name", SAME)
def test_what_a_call_passes_on_is_written_to(name, how):
    torch.manual_seed(1)
    model, twin = pair(Same(name), strict=True)
    same_training(model, twin, how=how)


@pytest.mark.parametrize("name", SAME)
def test_what_a_call_passes_on_is_written_to_in_compiled_code(name):
    torch.manual_seed(1)
    net = Same(name).double()
    region = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
    loss = db.compile(lambda x: net(x).sin().sum(), compiler="eager", strict=True)
    for i in range(3):
        x = numbers(i, 4, 5).requires_grad_()
        wanted = net(x)
        assert_close(region(x), wanted, f"region, call {i}")
        assert_close(loss(x), wanted.sin().sum(), f"loss, call {i}")
        steep = [
            torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)[0] for f in (region, net)
        ]
        found, wanted = (torch.autograd.grad(g.square().sum(), net.first.weight)[0] for g in steep)
        assert_close(found, wanted, f"second derivative, call {i}")


class Spectrum(Written):
    """Few Fourier modes of many, written into a spectrum of zeros; so are their weights."""

    def forward(self, x):
        modes, weights = torch.zeros(4, 6, dtype=torch.complex128), torch.ones(6, 3).cdouble()
        weights[:, 1] = torch.complex(self.first.weight[:, 0], self.first.weight[:, 1])
        weights[::2, 2:] *= self.first.bias[::2, None]
        modes[:, :3] = torch.fft.rfft(self.first(x))[:, 1:] * weights[:3].diagonal()
        modes[:, 4] += modes[:, 0].conj()
        return self.last((modes @ weights).abs().repeat(1, 2))


@pytest.mark.parametrize("how", ["backward", "accumulate", "compiled"])
def test_parts_of_a_complex_tensor_are_written_to(how):
    torch.manual_seed(1)
    model, twin = pair(Spectrum(), strict=True, compile=how == "compiled")
    same_training(model, twin, how=how)


class Weights(Written):
    """Weights clipped in forward, as a Wasserstein critic's may be."""

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x)))


class Statistics(Written):
    """A running mean, kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return self.last(torch.tanh(h - self.mean))


class AssignedStatistics(Statistics):
    """The same by an assignment to `.data`."""

    def forward(self, x):
        h = self.first(x)
        self.mean.data = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(torch.tanh(h - self.mean))


class AssignedBehind(Statistics):
    """Read first, then assigned to."""

    def forward(self, x):
        h = self.first(x) - self.mean
        self.mean.data = (0.9 * self.mean + 0.1 * h.mean(0)).detach()
        return self.last(torch.tanh(h))


class AssignedWeights(Written):
    def forward(self, x):
        self.first.weight.data = self.first.weight.data.clamp(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x)))


ASSIGNED = (AssignedStatistics, AssignedBehind, AssignedWeights)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", [Weights, Statistics, *ASSIGNED])
def test_state_is_written_to(kind, how):
    torch.manual_seed(1)
    model, twin = pair(kind())
    same_training(model, twin, how=how)


@pytest.mark.parametrize("how", ["compile", "backend"])
@pytest.mark.parametrize("kind", ASSIGNED)
def test_data_is_assigned_in_compiled_code(kind, how):
    torch.manual_seed(1)
    net = kind().double()
    twin = copy.deepcopy(net)

    def loss(run, x):
        leaf = x.detach().requires_grad_()
        out = run(leaf)
        (slope,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        return out.square().mean() + slope.square().sum()

    if how == "compile":
        step = db.compile(lambda x: loss(net, x), compiler="eager")
    else:
        compiled = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
        step = functools.partial(loss, compiled)
    for i in range(4):
        net.zero_grad(), twin.zero_grad()
        x = numbers(i, 4, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", db.CaptureWarning)
            found = step(x)
            found.backward()
        wanted = loss(twin, x)
        wanted.backward()
        assert_close(found, wanted, f"step {i}, loss")
        assert_same_state(net, twin, f"step {i}")


class Embedded(nn.Module):
    """Tokens beside numbers; rows of the table that are used are scaled down to length one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = kind(7, 6, max_norm=1.0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x, tokens):
        rows = self.table(tokens)
        rows = rows.mean(1) if rows.dim() == 3 else rows
        return self.last(torch.tanh(self.first(x) * rows))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_greatest_norm(kind, how):
    torch.manual_seed(2)
    net = Embedded(kind)
    with torch.no_grad():
        net.table.weight.mul_(3.0)

    def batch(i):
        generator = torch.Generator().manual_seed(i)
        return numbers(i, 4, 5), torch.randint(0, 7, (4, 3), generator=generator)

    model, twin = pair(net)
    same_training(model, twin, batch=batch, how=how)
