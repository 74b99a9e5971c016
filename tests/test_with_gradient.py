"""`WithGradient` against stock autograd: sizes that change, several inputs, paths, any loss."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db


def filters(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(count, width), nn.Softplus(), nn.Linear(width, width))


class Molecules(nn.Module):
    """A small SchNet: distances, continuous filters, sums over neighbours and over molecules."""

    def __init__(self, width=6, waves=5):
        super().__init__()
        self.embed = nn.Embedding(4, width)
        self.register_buffer("centres", torch.linspace(0, 3, waves))
        self.filter, self.mix = filters(waves, width), filters(width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, pos, z, edges, batch, molecules, strain=None):
        if strain is not None:
            pos = pos + torch.einsum("ni,nij->nj", pos, strain[batch])
        i, j = edges
        apart = (pos[i] - pos[j]).square().sum(-1, keepdim=True).add(1e-3).sqrt()
        waves = torch.exp(-(apart - self.centres).square())
        h = self.embed(z)
        messages = h[j] * self.filter(waves)
        h = h + self.mix(torch.zeros_like(h).index_add(0, i, messages))
        energies = self.head(h)[:, 0]
        return torch.zeros(molecules.shape[0], dtype=pos.dtype).index_add(0, batch, energies)


def molecules(seed: int, atoms: int, count: int):
    g = torch.Generator().manual_seed(seed)
    pos = torch.randn(atoms, 3, generator=g, dtype=torch.float64)
    z = torch.randint(4, (atoms,), generator=g)
    batch = torch.sort(torch.randint(count, (atoms,), generator=g))[0]
    pairs = [(a, b) for a in range(atoms) for b in range(atoms) if a != b and batch[a] == batch[b]]
    edges = torch.tensor(pairs or [(0, 0)]).T
    return pos, z, edges, batch, torch.zeros(count)


def stock(net, loss, x, args, kwargs=None, v=torch.ones_like):
    """Loss and gradients by autograd's double backward."""
    net.zero_grad()
    out = net(*args, **(kwargs or {}))
    gradients = torch.autograd.grad(out, x, v(out), create_graph=True)
    value = loss(out, *gradients)
    value.backward()
    return value, [p.grad for p in net.parameters()]


def same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if b is None or a is None:
            assert (a is None or not a.any()) and (b is None or not b.any())
        else:
            assert (a - b).norm() <= 1e-10 * max(b.norm().item(), 1e-6)


def force_loss(energy, gradient, *more):
    value = energy.square().mean() + F.huber_loss(-gradient, torch.ones_like(gradient), delta=0.3)
    return value + sum(g.abs().sum() for g in more)


@pytest.mark.parametrize("compile", [False, pytest.param(True, id="compiled")])
def test_every_batch_of_another_size(compile, counted_captures):
    """Energies and forces; three captures for any number of sizes."""
    torch.manual_seed(0)
    net = Molecules().double()
    twin = copy.deepcopy(net)
    model = db.WithGradient(net, wrt="pos", strict=True, compile=compile)
    sizes = (
        [(7, 2), (9, 3), (12, 4), (6, 2), (15, 5), (11, 3)]
        if compile
        else [(5 + (7 * k) % 13, 2 + k % 4) for k in range(20)]
    )
    for seed, (atoms, count) in enumerate(sizes):
        pos, *rest = molecules(seed, atoms, count)
        net.zero_grad()
        energy, gradient = model(pos, *rest)
        value = force_loss(energy, gradient)
        value.backward()
        x = pos.clone().requires_grad_()
        expected, grads = stock(twin, force_loss, [x], (x, *rest))
        same([value, *(p.grad for p in net.parameters())], [expected, *grads])
    assert len(counted_captures) <= 3


@pytest.fixture
def counted_captures(monkeypatch):
    from doubleback.capture import dynamo

    made, lift = [], dynamo.lift
    monkeypatch.setattr(dynamo, "lift", lambda *args: made.append(1) or lift(*args))
    return made


@pytest.mark.parametrize("structures", [1, 3])
def test_inputs_of_different_leading_sizes(structures):
    """Positions and strain, as for forces and stress."""
    net = Molecules().double()
    twin = copy.deepcopy(net)
    model = db.WithGradient(net, wrt=["pos", "strain"], strict=True)
    for seed in range(5):
        pos, *rest = molecules(seed, 8 + seed, structures)
        strain = torch.zeros(structures, 3, 3, dtype=torch.float64)
        net.zero_grad()
        energy, (gradient, stress) = model(pos, *rest, strain=strain)
        assert gradient.shape == pos.shape and stress.shape == strain.shape
        value = force_loss(energy, gradient, stress)
        value.backward()
        x, s = pos.clone().requires_grad_(), strain.clone().requires_grad_()
        expected, grads = stock(twin, force_loss, [x, s], (x, *rest), {"strain": s})
        same([value, *(p.grad for p in net.parameters())], [expected, *grads])


def dense(last=3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, last)).double()


@dataclass
class Record:
    pos: torch.Tensor
    scale: float


class Packed(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.body, self.read = dense(), read

    def forward(self, data):
        return {"a": [self.body(self.read(data)).sin()], "b": self.read(data).sum()}


PACKED = {
    "dictionary": (lambda d: d["x"]["pos"], lambda x: {"x": {"pos": x}}, ("data", "x", "pos")),
    "list": (lambda d: d[1], lambda x: [x.detach() * 2, x], (0, 1)),
}


@pytest.mark.parametrize("kind", PACKED)
def test_paths_into_arguments_and_results(kind):
    read, pack, path = PACKED[kind]
    net = Packed(read).double()
    model = db.WithGradient(net, wrt=[path], output=("a", 0), strict=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(5, 4, dtype=torch.float64)
        net.zero_grad()
        out, gradient = model(pack(x))
        gradient.square().sum().backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(pack(y))["a"][0].sum(), y, create_graph=True)
        g.square().sum().backward()
        torch.testing.assert_close(gradient, g)
        same(found, [p.grad for p in net.parameters() if p.grad is not None])
        assert set(out) == {"a", "b"}


def test_a_path_that_names_nothing_is_told_the_nearest():
    net = Packed(PACKED["dictionary"][0]).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises(db.InputError, match="did you mean 'pos'"):
        db.WithGradient(net, wrt=[("data", "x", "poss")], output=("a", 0))({"x": {"pos": x}})
    with pytest.raises(db.InputError, match="did you mean 'data'"):
        db.WithGradient(net, wrt="date", output=("a", 0))({"x": {"pos": x}})


@pytest.mark.parametrize("after", [0, None])
@pytest.mark.parametrize("v", [1, (2,), torch.sin, "sum"], ids=["1", "(2,)", "sin", "sum"])
def test_which_cotangent(v, after):
    net, x = dense(), torch.randn(5, 4, dtype=torch.float64)

    def cotangent(out):
        if callable(v):
            return v(out)
        index = v if isinstance(v, int) else v[0] if v != "sum" else slice(None)
        ones = torch.zeros_like(out)
        ones[:, index] = 1
        return ones

    model = db.WithGradient(net, v=v, flatten_after=after, strict=True)
    for _ in range(4):
        net.zero_grad()
        y = x.clone().requires_grad_()
        out, gradient = model(y)
        (out.square().sum() + (gradient**3).sum()).backward()
        found = [y.grad, *(p.grad.clone() for p in net.parameters())]
        z = x.clone().requires_grad_()
        _, grads = stock(net, lambda o, g: o.square().sum() + (g**3).sum(), [z], (z,), v=cotangent)
        same(found, [z.grad, *grads])


def test_without_gradients_and_what_the_caller_writes_to():
    net, x = dense(1), torch.randn(5, 4, dtype=torch.float64)
    model = db.WithGradient(net)
    with torch.no_grad():
        out, gradient = model(x)
    assert not out.requires_grad and not gradient.requires_grad
    for after in (None, 0):
        model = db.WithGradient(nn.Identity(), flatten_after=after)
        y = x.clone().requires_grad_()
        _, gradient = model(y)
        gradient.mul_(2)
        torch.testing.assert_close(gradient, 2 * torch.ones_like(x))


def test_twice_with_retain_graph_and_never_a_third_derivative():
    net, x = dense(1), torch.randn(5, 4, dtype=torch.float64)
    _, gradient = db.WithGradient(net)(x)
    value = gradient.square().sum()
    value.backward(retain_graph=True)
    once = net[0].weight.grad.clone()
    value.backward()
    torch.testing.assert_close(net[0].weight.grad, 2 * once)
    _, gradient = db.WithGradient(net)(x)
    (g,) = torch.autograd.grad(gradient.square().sum(), net[0].weight, create_graph=True)
    with pytest.raises(db.ThirdDerivativeError):
        g.sum().backward()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = dense(1)

    def forward(self, x):
        return self.body(x) * (2 if x.sum() > 0 else 3)


def test_where_it_cannot_be_captured():
    net, x = Branching().double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.WithGradient(net)
    with pytest.warns(db.CaptureWarning) as caught:
        for _ in range(3):
            net.zero_grad()
            _, gradient = model(x)
            gradient.square().sum().backward()
    assert len(caught) == 1
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    y = x.clone().requires_grad_()
    _, grads = stock(net, lambda o, g: g.square().sum(), [y], (y,))
    same(found, [g for g in grads if g is not None])


def test_an_input_that_the_output_does_not_depend_on():
    class Cut(nn.Module):
        def forward(self, x):
            return x.detach().sin()

    x = torch.randn(5, 4)
    with pytest.raises(db.InputError, match="does not depend"):
        db.WithGradient(Cut())(x)
    _, gradient = db.WithGradient(Cut(), allow_unused=True)(x)
    assert not gradient.any()
    with pytest.raises(db.InputError, match="floating point"):
        db.WithGradient(nn.Embedding(4, 3))(torch.tensor([1, 2]))


def test_check_compares_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = db.check(db.WithGradient(dense(1)), torch.randn(5, 4))
    assert report.worst < 1e-10


def test_state_dict_is_that_of_the_network():
    net = dense()
    model = db.WithGradient(net)
    assert set(model.state_dict()) == {f"net.{name}" for name in net.state_dict()}
    copy.deepcopy(model)(torch.randn(2, 4, dtype=torch.float64))
