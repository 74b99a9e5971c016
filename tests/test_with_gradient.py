"""`WithGradient` against stock autograd: sizes that change, several inputs, paths, any loss."""

from __future__ import annotations

import copy
import itertools
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


class Pairs(nn.Module):
    """Less of the same, for a compiler: sums over pairs of atoms."""

    def __init__(self):
        super().__init__()
        self.embed, self.filter = nn.Embedding(4, 3), nn.Linear(1, 3)

    def forward(self, pos, z, edges, batch, molecules):
        i, j = edges
        apart = (pos[i] - pos[j]).square().sum(-1, keepdim=True)
        energies = (self.embed(z)[j] * torch.tanh(self.filter(apart))).sum(1)
        return torch.zeros(molecules.shape[0], dtype=pos.dtype).index_add(0, batch[i], energies)


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
    net = (Pairs() if compile else Molecules()).double()
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


def test_the_name_of_all_arguments_is_no_argument_s():
    """wrt=(0, "data") is a path, also where forward takes *data."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = dense(1)

        def forward(self, *data, **more):
            return self.body(data[0]["data"]) + data[0]["beside"]

    data = {key: torch.randn(5, 4, dtype=torch.float64) for key in ("data", "beside")}
    net = Module().double()
    _, gradient = db.WithGradient(net, wrt=(0, "data"), strict=True)(data)
    x = data["data"].clone().requires_grad_()
    wanted = torch.autograd.grad(net({**data, "data": x}).sum(), x)[0]
    torch.testing.assert_close(gradient, wanted)


def test_a_method_may_call_itself_what_it_likes():
    class Module(nn.Module):
        def __init__(me):
            super().__init__()
            me.body = dense(1)

        def forward(me, y, x):
            return me.body(x) * y

    net, x = Module(), torch.randn(5, 4, dtype=torch.float64)
    _, gradient = db.WithGradient(net, wrt="x", strict=True)(torch.ones(5, 1).double(), x)
    _, expected = db.WithGradient(net.body, strict=True)(x)
    torch.testing.assert_close(gradient, expected)


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


def rows_of(net, x, v):
    """J*v for each v, by autograd."""
    out = net(x)
    seeds = v(out)
    found = [torch.autograd.grad(out, x, row, create_graph=True)[0] for row in seeds]
    return out, torch.stack(found)


def entries(*which):
    """Unit vectors of these entries of an output (batch, 3)."""
    return lambda out: torch.stack([torch.eye(3).to(out)[i].expand_as(out) for i in which])


SEVERAL = {
    "entries": ([0, 2], entries(0, 2)),
    "one row": ([1], entries(1)),
    "mixed": (["sum", (1,), torch.sin],
              lambda o: torch.stack([torch.ones_like(o), entries(1)(o)[0], o.sin()])),
    "a callable": (lambda o: torch.stack([o, o.cos(), o * 0 + 2]),
                   lambda o: torch.stack([o, o.cos(), o * 0 + 2])),
    "all": ([0, 1, 2], entries(0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("after", [0, 2, None])
@pytest.mark.parametrize("kind", SEVERAL)
def test_several_rows(kind, after):
    """Jacobian products, in a loss that needs their second derivative; sizes change, too."""
    given, v = SEVERAL[kind]
    net = dense()
    model = db.WithGradient(net, v=given, flatten_after=after, strict=True)
    for size in (5, 5, 7, 6, 7):
        x = torch.randn(size, 4, dtype=torch.float64)
        results = []
        for run in (lambda t: model(t), lambda t: rows_of(net, t, v)):
            net.zero_grad()
            y = x.clone().requires_grad_()
            out, rows = run(y)
            loss = out.square().sum() + (rows**3).sum() + (rows[0] * rows[-1]).sin().sum()
            loss.backward()
            results.append([out, rows, loss, y.grad, *(p.grad.clone() for p in net.parameters())])
        assert results[0][1].shape[1:] == x.shape
        same(*results)


@pytest.mark.filterwarnings("ignore::doubleback.CaptureWarning")
@pytest.mark.parametrize("options", [{}, {"sweeps": False}], ids=["usual", "autograd"])
@pytest.mark.parametrize("kind", ["dense", "branching"])
def test_several_rows_on_autograd_and_without_gradients(kind, options):
    net, count = (dense(3), 3) if kind == "dense" else (Branching().double(), 1)
    x = torch.randn(5, 4, dtype=torch.float64)
    _, expected = rows_of(net, x.clone().requires_grad_(), lambda o: entries_of(count, o))
    model = db.WithGradient(net, v=list(range(count)), **options)
    for gradients in (True, True, False):
        with torch.set_grad_enabled(gradients):
            out, rows = model(x)
        assert rows.shape == (count, 5, 4)
        assert rows.requires_grad == out.requires_grad == gradients
        same([rows], [expected])


def test_several_penalties_on_one_forward_pass():
    """R1 of one entry, and the classical penalty weighted by what the output says."""
    net, x = dense(), torch.randn(5, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1])

    def slopes(out):
        return out.softmax(1) - nn.functional.one_hot(y, 3)

    def loss(out, rows):
        sure = out.softmax(1).amax(1)
        return rows[0].square().sum() + (sure * rows[1].square().sum(1)).mean() + out.sum()

    model = db.WithGradient(net, v=[0, slopes], sweeps=True, strict=True)
    with db.count_operations() as operations:
        out, rows = model(x)
    assert operations.forward == sum(isinstance(part, nn.Linear) for part in net.modules())
    found = torch.autograd.grad(loss(out, rows), list(net.parameters()))
    seeds = lambda out: torch.stack([entries(0)(out)[0], slopes(out)])  # noqa: E731
    truth = loss(*rows_of(net, x.clone().requires_grad_(), seeds))
    same(found, torch.autograd.grad(truth, list(net.parameters())))


def entries_of(count, out):
    return torch.eye(count).to(out)[:, None].expand(count, *out.shape)


def test_several_rows_of_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.other = dense(), nn.Linear(2, 3).double()

        def forward(self, x, y):
            return self.body(x).sin() * self.other(y).mean(0)

    net = Two()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    model = db.WithGradient(net, wrt=["x", "y"], v=[0, 2], strict=True)
    for _ in range(3):
        net.zero_grad()
        _, (a, b) = model(x, y)
        assert a.shape == (2, 5, 4) and b.shape == (2, 3, 2)
        (a.square().sum() + b.square().sum()).backward()
        found = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        s, t = x.clone().requires_grad_(), y.clone().requires_grad_()
        out = net(s, t)
        each = [torch.autograd.grad(out[:, i].sum(), [s, t], create_graph=True) for i in (0, 2)]
        sum(g.square().sum() for pair in each for g in pair).backward()
        same(found, [p.grad for p in net.parameters()])
    report = db.check(model, x, y)
    assert report.worst < 1e-10


class Neighbours(nn.Module):
    """Three numbers for each node of a graph, whose nodes and edges come in a dictionary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(4, 7).double(), nn.Linear(7, 3).double()

    def forward(self, data):
        h = torch.tanh(self.enter(data["pos"]))
        i, j = data["edges"]
        h = h + torch.zeros_like(h).index_add(0, i, torch.sin(h.index_select(0, j)))
        return {"energy": self.leave(torch.tanh(h)) * data["w"]}


def nodes(count):
    double = {"dtype": torch.float64}
    return {"pos": torch.randn(count, 4, **double), "w": torch.randn(count, 1, **double),
            "edges": torch.randint(0, count, (2, 2 * count + 1))}  # fmt: skip


def two_rows(out):
    return torch.stack([torch.sin(out), out.square()])


def cotangents(v, out):
    """(the cotangents one by one, whether they are rows)."""
    if isinstance(v, list):
        return [cotangents(part, out)[0][0] for part in v], True
    if isinstance(v, int):
        return [torch.eye(3, dtype=out.dtype)[v].expand_as(out)], False
    found = torch.ones_like(out) if v == "sum" else v(out)
    return (list(found), True) if found.dim() > out.dim() else ([found], False)


KINDS = {"index": 1, "own": torch.sin, "own rows": two_rows, "rows": ["sum", 0, 2],
         "rows, some own": ["sum", torch.sin]}  # fmt: skip
HOW = {
    "nodes": {"flatten_after": None},
    "flat": {"flatten_after": 1},
    "compiled": {"compile": True},
}
ASKED = {"one": ("data", "pos"), "two": [("data", "pos"), ("data", "w")]}
BRIEF = {("own", "flat", "two"), ("own rows", "flat", "one"), ("rows", "flat", "two")}


@pytest.mark.parametrize(
    ("kind", "how", "asked"),
    [
        pytest.param(*case, marks=() if case in BRIEF else pytest.mark.long)
        for case in itertools.product(KINDS, HOW, ASKED)
    ],
)
def test_every_cotangent_at_changing_sizes(kind, how, asked, counted_captures, flattened):
    v, net = KINDS[kind], Neighbours()
    model = db.WithGradient(net, ASKED[asked], v, "energy", strict=True, **HOW[how])
    names = ("pos", "w") if asked == "two" else ("pos",)
    counts = []
    for count in (5, 8, 6, 3, 9, 7):
        data = nodes(count)
        out, found = model(dict(data))
        gradients = found if asked == "two" else (found,)
        force_loss(out["energy"], *gradients).backward()
        ours = [*gradients, *(p.grad for p in net.parameters())]
        net.zero_grad()
        data |= {name: data[name].clone().requires_grad_() for name in names}
        energy, x = net(data)["energy"], [data[name] for name in names]
        rows, many = cotangents(v, energy)
        pulled = [torch.autograd.grad(energy, x, row, create_graph=True) for row in rows]
        expected = [torch.stack(parts) if many else parts[0] for parts in zip(*pulled, strict=True)]
        force_loss(energy, *expected).backward()
        same(ours, [*expected, *(p.grad for p in net.parameters())])
        net.zero_grad()
        counts.append(len(flattened))
    assert len(counted_captures) <= 3
    assert counts[-1] == counts[3] and bool(counts[-1]) == (how != "nodes")


@pytest.mark.parametrize(
    ("v", "said"),
    [([], "empty list"), ([[0, 1]], "list of lists"), (["all"], "must be"),
     ([0, 9], "out of range"), (torch.ones(3), "is a tensor"),
     (lambda o: o[:, :2], "axis of rows in front"),
     (lambda o: o.expand(2, 2, *o.shape), "axis of rows in front"),
     ([lambda o: torch.stack([o, o])], "each v of a list")],
)  # fmt: skip
def test_cotangents_that_do_not_fit(v, said):
    with pytest.raises(db.InputError, match=said):
        db.WithGradient(dense(), v=v, strict=True)(torch.randn(5, 4, dtype=torch.float64))


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


class Mixed(nn.Module):
    """A tensor and a number."""

    def forward(self, x):
        return {"energy": x.square().sum(1), "count": len(x)}


class Nothing(nn.Module):
    def forward(self, x):
        return None


@pytest.mark.parametrize(
    ("net", "output", "said"),
    [
        (Mixed(), "enregy", "did you mean 'energy'"),
        (Mixed(), "count", "is a int, no tensor"),
        (Nothing(), None, "no tensor"),
    ],
)
def test_an_output_that_is_not_there(net, output, said):
    x = torch.randn(5, 4)
    penalised = db.Penalised(net, db.OutputGradient("sum"), output=output)
    for call in (db.WithGradient(net, output=output), penalised, penalised.accumulate):
        for _ in range(2):
            with pytest.raises(db.OutputChoiceError, match=said):
                call(x)


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
