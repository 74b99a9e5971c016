"""Where autograd is quicker than sweeps, it is taken, with the same numbers."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback.patch.mechanism import Patcher

pytestmark = pytest.mark.choice


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def images(groups: int) -> nn.Module:
    first = nn.Conv2d(4, 8, 3, padding=1, groups=groups)
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(512, 3))


SMALL = {
    "dense": (mlp, (5, 6)),
    "convolution": (lambda: images(1), (5, 4, 8, 8)),
    "normalised": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), mlp(8)[1:]), (5, 6)),
    "attention": (Attention, (5, 4, 8)),
    "recurrent": (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), Last(nn.GRU(3, 4))), (5, 6)),
}
LARGE = {
    "dense": (
        lambda: nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 3)),
        (512, 512),
    ),
    "in groups": (lambda: images(4), (5, 4, 8, 8)),
    "attention": (Attention, (8, 300, 8)),
}


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.transpose(0, 1))[0][-1])


def by_sweeps(t: torch.Tensor) -> bool:
    return t.grad_fn is not None and "Bridge" in t.grad_fn.name()


def labels(shape) -> torch.Tensor:
    return torch.randint(3, (shape[0],), generator=torch.Generator().manual_seed(1))


def step(model, x, y) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out, penalty = model(x, y)
    (F.cross_entropy(out, y) + 0.3 * penalty).backward()
    named = {n: p.grad.clone() for n, p in model.net.named_parameters()}
    return {"out": out.detach(), "penalty": penalty.detach(), **named}


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_run_on_autograd_from_the_second_call_on_with_the_same_numbers(name):
    torch.manual_seed(0)
    build, shape = SMALL[name]
    net = build().double()
    penalty = db.LossGradient("cross_entropy")
    free, held = db.Penalised(net, penalty), db.Penalised(copy.deepcopy(net), penalty, sweeps=True)
    x, y = torch.randn(shape).double(), labels(shape)
    assert by_sweeps(free(x, y)[1])
    held(x, y)
    for _ in range(3):
        assert not by_sweeps(free(x, y)[1]) and by_sweeps(held(x, y)[1])
        ours, theirs = step(free, x, y), step(held, x, y)
        for n, expected in theirs.items():
            assert torch.allclose(ours[n], expected, rtol=1e-10, atol=1e-13), n
    for a, b in zip(free.net.buffers(), held.net.buffers(), strict=True):
        assert torch.allclose(a, b)  # batch norm has counted each call once


@pytest.mark.parametrize("name", LARGE)
def test_where_sweeps_spare_more_than_they_cost_they_stay(name):
    torch.manual_seed(0)
    build, shape = LARGE[name]
    model = db.Penalised(build(), db.LossGradient("cross_entropy"))
    x, y = torch.randn(shape), labels(shape)
    assert all(by_sweeps(model(x, y)[1]) for _ in range(3))
    assert model.explain(x, y).way.startswith("sweeps")


@pytest.mark.parametrize(
    "options",
    [{"strict": True}, {"debug": True}, {"flatten_after": None}, {"sweeps": True}],
    ids=str,
)
def test_whoever_asks_for_sweeps_gets_them(options):
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"), **options)
    x, y = torch.randn(5, 6), labels((5,))
    assert all(by_sweeps(model(x, y)[1]) for _ in range(3))


def test_whoever_asks_for_autograd_gets_it_at_once():
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"), sweeps=False)
    x, y = torch.randn(5, 6), labels((5,))
    assert not by_sweeps(model(x, y)[1])
    assert model.explain(x, y).way == "autograd: asked for"
    attention = db.Penalised(Attention(), db.LossGradient("cross_entropy"), sweeps=False)
    attention(torch.randn(5, 4, 8), y)[1].backward()  # by the library's second derivative


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_labels_of_any_integer_dtype_run_either_way(dtype):
    torch.manual_seed(0)
    model = db.Penalised(mlp().double(), db.LossGradient("cross_entropy"))
    x, y = torch.randn(5, 6).double(), labels((5,))
    seen = [model(x, y.to(dtype))[1] for _ in range(3)]
    assert by_sweeps(seen[0]) and not by_sweeps(seen[1])
    assert all(torch.allclose(penalty, seen[0], rtol=1e-12) for penalty in seen)


def test_counting_operations_counts_sweeps():
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"))
    x, y = torch.randn(5, 6), labels((5,))
    for _ in range(3):
        with db.count_operations() as operations:
            model(x, y)[1].backward()
        assert operations.products == 7
    assert not by_sweeps(model(x, y)[1])


def test_accumulate_and_with_gradient_choose_too():
    torch.manual_seed(0)
    net = mlp().double()
    twin = copy.deepcopy(net)
    free = db.Penalised(net, db.LossGradient("cross_entropy"))
    held = db.Penalised(twin, db.LossGradient("cross_entropy"), sweeps=True)
    x, y = torch.randn(5, 6).double(), labels((5,))
    for _ in range(3):
        a, b = free.accumulate(x, y, weight=0.2), held.accumulate(x, y, weight=0.2)
        assert all(torch.allclose(s, t, rtol=1e-12) for s, t in zip(a, b, strict=True))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-14)
    potential = db.WithGradient(mlp(), wrt=0)
    assert [by_sweeps(potential(torch.randn(5, 6))[1]) for _ in range(3)] == [True, False, False]


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x / 2)


def test_division_by_a_number_is_no_reason_for_sweeps():
    potential = db.WithGradient(Halved(), wrt=0)
    assert [by_sweeps(potential(torch.randn(5, 6))[1]) for _ in range(3)] == [True, False, False]


def test_sizes_of_one_order_of_magnitude_are_one_decision():
    potential = db.WithGradient(mlp(), wrt=0)
    potential(torch.randn(17, 6))
    assert not any(by_sweeps(potential(torch.randn(n, 6))[1]) for n in (18, 23, 31))
    assert by_sweeps(potential(torch.randn(40, 6))[1])  # the first of its order


def test_explain_says_which_and_why():
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"))
    told = model.explain(torch.randn(5, 6), labels((5,)))
    assert "runs by autograd, by estimate: in a step of about" in str(told)
    assert told.as_dict()["way"].startswith("autograd")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at the penalty
@pytest.mark.parametrize("sweeps", [None, True])
def test_an_outer_compiler_calls_the_model_as_it_is(sweeps):
    torch.manual_seed(0)
    net, x, y = mlp().double(), torch.randn(5, 6).double(), labels((5,))
    model = db.Penalised(net, db.LossGradient("cross_entropy"), sweeps=sweeps)
    expected = step(db.Penalised(copy.deepcopy(net), db.LossGradient("cross_entropy")), x, y)
    inside = torch.compile(lambda x, y: model(x, y)[1] * 1.0, backend="eager")
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        for name, found in step(compiled, x, y).items():
            assert torch.allclose(found, expected[name], rtol=1e-10, atol=1e-13), name
        assert torch.allclose(inside(x, y), expected["penalty"], rtol=1e-10)


class Unbelievable(nn.Module):
    """Cannot be captured, and so runs on autograd."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) if float(x.detach().sum()) < 1e9 else x


def in_part(net: nn.Module) -> nn.Module:
    net[0].compile(backend="aot_eager")
    return net


COMPILED = {
    "the whole": lambda net: torch.compile(net, backend="aot_eager"),
    "in place": lambda net: (net.compile(backend="aot_eager"), net)[1],
    "a part": in_part,
    "not captured": lambda net: Unbelievable(torch.compile(net, backend="aot_eager")),
}


@pytest.mark.filterwarnings("ignore::doubleback.errors.CaptureWarning")
@pytest.mark.parametrize("sweeps", [None, True])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_network(kind, sweeps):
    """What AOTAutograd made of it has no double backward, and is not what runs on autograd."""
    torch.manual_seed(0)
    net, x, y = mlp().double(), torch.randn(5, 6).double(), labels((5,))
    expected = step(db.Penalised(copy.deepcopy(net), db.LossGradient("cross_entropy")), x, y)
    model = db.Penalised(COMPILED[kind](net), db.LossGradient("cross_entropy"), sweeps=sweeps)
    potential = db.WithGradient(model.net, v=0, sweeps=sweeps)
    for _ in range(3):
        found = step(model, x, y)
        for theirs, ours in zip(expected.values(), found.values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13)
        potential(x)[1].square().sum().backward()
    if kind != "not captured":
        assert db.check(model, x, y).worst <= 1e-10


def test_hooks_of_a_compiled_network_are_called():
    net, x, y = mlp(), torch.randn(5, 6), labels((5,))
    compiled, calls = torch.compile(net, backend="eager"), []
    model = db.Penalised(compiled, db.LossGradient("cross_entropy"))
    for _ in range(4):
        model(x, y)
    compiled.register_forward_hook(lambda *_: calls.append(1))
    model(x, y)[1].backward()
    assert calls


def outside(net: nn.Module, **options) -> nn.Module:
    model = db.Penalised(net, db.LossGradient("cross_entropy"), **options)
    return torch.compile(model, backend="aot_eager")


def inside(net: nn.Module, **options) -> db.Penalised:
    compiled = torch.compile(net, backend="aot_eager")
    return db.Penalised(compiled, db.LossGradient("cross_entropy"), **options)


def neither(net: nn.Module, **options) -> db.Penalised:
    return db.Penalised(net, db.LossGradient("cross_entropy"), **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at the penalty
@pytest.mark.parametrize("sweeps", [None, True])
@pytest.mark.parametrize("wrapped", [neither, outside, inside])
def test_a_compiled_training_step(wrapped, sweeps):
    """Of any of the three; the last batch has another size."""
    torch.manual_seed(0)
    net = mlp().double()
    twin = neither(copy.deepcopy(net))
    model = wrapped(net, sweeps=sweeps)
    compiled = torch.compile(lambda x, y: step(model, x, y), backend="aot_eager")
    for rows in (5, 5, 5, 7):
        x, y = torch.randn(rows, 6).double(), labels((rows,))
        expected = step(twin, x, y)
        found = compiled(x, y)
        for theirs, ours in zip(expected.values(), found.values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13)


# From the third call of one shape on, arguments are not taken apart any more.


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.net(x)


@pytest.mark.parametrize(
    "penalty, labelled",
    [
        (db.LossGradient("cross_entropy"), True),
        (db.LossGradient("cross_entropy", reduction="sum", norm=db.Norm()), True),
        (db.LossGradient("cross_entropy", label_smoothing=0.1), True),
        (db.LossGradient(lambda out, y: (out - y[:, None]).square().sum(1)), True),
        (db.OutputGradient(1), False),
        (db.OutputGradient("sum", reduction="none"), False),
    ],
)
def test_the_short_way_has_the_same_numbers(penalty, labelled):
    """Calls and `accumulate`, with the loss that v is the gradient of and with another."""
    torch.manual_seed(0)
    net, x = Counted().double(), torch.randn(5, 6, dtype=torch.float64)
    y = labels(x.shape)
    extra = (y,) if labelled else ()
    chosen, swept = db.Penalised(net, penalty), db.Penalised(net, penalty, sweeps=True)

    def call(model):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out, value = model(leaf, *extra)
        (out.square().sum() + 0.3 * value.sum()).backward()
        return [out.detach(), value.detach(), leaf.grad, *(p.grad for p in net.parameters())]

    def accumulate(model, loss):
        model.zero_grad()
        args = (x, *extra) if labelled or loss is None else (x, y)
        told = model.accumulate(*args, loss=loss, weight=0.3)
        return [*told, *(p.grad for p in net.parameters() if p.grad is not None)]

    for run in (call, lambda m: accumulate(m, None), lambda m: accumulate(m, "cross_entropy")):
        expected = [t.clone() for t in run(swept)]
        for _ in range(4):
            net.calls.zero_()
            torch.testing.assert_close(run(chosen), expected, rtol=1e-10, atol=1e-12)
            assert net.calls == 1


SHORT = {
    "squared errors": (db.LossGradient("mse"), ("out",)),
    "binary": (db.LossGradient("bce", norm=db.Norm()), ("probabilities",)),
    "labels to ignore": (db.LossGradient("cross_entropy", ignore_index=-7), ("ignored",)),
    "a class to ignore": (db.LossGradient("cross_entropy", ignore_index=1), ("labels",)),
    "weighted classes": (
        db.LossGradient("cross_entropy", class_weights=torch.tensor([0.5, 1.0, 2.0]).double()),
        ("labels",),
    ),
    "soft labels": (db.LossGradient("cross_entropy"), ("probabilities",)),
    "a loss of one's own": (
        db.LossGradient(lambda out, y: (out * y).sin().sum(1)), ("out",),
    ),
    "deviation": (db.OutputGradient(0, norm=db.Deviation(0.3, one_sided=True)), ()),
    "p of one's own": (db.OutputGradient("sum", norm=lambda g: g.pow(4).sum(1)), ()),
    "in a space": (
        db.OutputGradient(0, norm=db.Norm(db.spaces.Weighted(torch.arange(1.0, 7)))), (),
    ),
    "match": (db.GradientMatch("sum"), ("x",)),
    "match, row by row": (db.GradientMatch(2, reduction="none"), ("x",)),
    "bilinear": (db.BilinearForm(), ("out", "x")),
    "v of one's own": (db.Custom(lambda out: out.square(), db.Norm()), ()),
    "projection": (db.Jacobian(projections=1), ()),
    "projection of a softmax": (db.Jacobian("softmax", projections=1), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_the_short_way_of_every_penalty(name):
    torch.manual_seed(0)
    penalty, extras = SHORT[name]
    net, x = Counted().double(), torch.randn(5, 6, dtype=torch.float64)
    given = {
        "x": torch.randn_like(x), "out": torch.randn(5, 3).double(), "labels": labels(x.shape),
        "probabilities": torch.rand(5, 3).double(), "ignored": torch.tensor([0, -7, 2, 1, -7]),
    }  # fmt: skip

    def call(model):
        torch.manual_seed(1)  # of directions that are drawn
        model.zero_grad()
        leaf, extra = x.clone().requires_grad_(), [given[e].clone() for e in extras]
        for t in extra:
            t.requires_grad_(t.is_floating_point())
        out, value = model(leaf, *extra)
        (out.square().sum() + 0.3 * value.sum()).backward()
        asked = [t.grad for t in extra if t.requires_grad]
        return [
            out.detach(),
            value.detach(),
            leaf.grad,
            *asked,
            *(p.grad for p in net.parameters()),
        ]

    def accumulate(model):
        torch.manual_seed(1)
        model.zero_grad()
        told = model.accumulate(x, *(given[e] for e in extras), weight=0.3)
        return [*told, *(p.grad for p in net.parameters() if p.grad is not None)]

    chosen, swept = db.Penalised(net, penalty), db.Penalised(net, penalty, sweeps=True)
    for run in (call, accumulate):
        expected = [t.clone() for t in run(swept)]
        for _ in range(4):
            net.calls.zero_()
            torch.testing.assert_close(run(chosen), expected, rtol=1e-10, atol=1e-12)
            assert net.calls == 1
    assert not by_sweeps(chosen(x, *(given[e] for e in extras))[1])


@pytest.mark.parametrize("v", ["sum", 1, lambda out: out.square()])
def test_the_short_way_of_gradients(v):
    torch.manual_seed(0)
    net, x = Counted().double(), torch.randn(5, 6, dtype=torch.float64)

    def call(model):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out, gradient = model(leaf)
        (out.square().sum() + gradient.pow(3).sum()).backward()
        return [out.detach(), gradient.detach(), leaf.grad, *(p.grad for p in net.parameters())]

    chosen = db.WithGradient(net, v=v)
    expected = [t.clone() for t in call(db.WithGradient(net, v=v, sweeps=True))]
    for _ in range(4):
        net.calls.zero_()
        torch.testing.assert_close(call(chosen), expected, rtol=1e-10, atol=1e-12)
        assert net.calls == 1
    assert not by_sweeps(chosen(x)[1])


@pytest.mark.parametrize("kind", ["smoothed", "weighted", "short integers"])
def test_the_short_way_looks_at_labels(kind):
    options = {"smoothed": {"label_smoothing": 0.1}, "weighted": {"class_weights": torch.ones(3)}}
    net, x = mlp(), torch.randn(5, 6)
    y = labels(x.shape).int() if kind == "short integers" else labels(x.shape)
    model = db.Penalised(net, db.LossGradient("cross_entropy", **options.get(kind, {})))
    for _ in range(4):
        model(x, y)
    for run in (model, model.accumulate):
        with pytest.raises(db.InputError, match=r"labels must lie in 0 … 2"):
            run(x, y + 3)


def test_the_short_way_says_what_is_wrong_and_goes_on():
    net, x = mlp(), torch.randn(5, 6)
    y, model = labels(x.shape), db.Penalised(net, db.LossGradient("cross_entropy"))
    for _ in range(4):
        model(x, y)
    for run in (model, model.accumulate):
        with pytest.raises(db.InputError, match=r"labels must lie in 0 … 2"):
            run(x, y + 3)
        with pytest.raises(db.InputError, match="labels must have shape"):
            run(x, y[:, None])
    with pytest.raises(db.InputError, match="last 1 positional"):
        model()
    soft = torch.rand(5, 3, requires_grad=True)
    for _ in range(3):
        with pytest.raises(db.InputError, match="holds the loss's target constant"):
            model.accumulate(x, soft)
    assert not by_sweeps(model(x, y)[1])
    model.sweeps = True
    assert by_sweeps(model(x, y)[1])
    model.sweeps = None
    with torch.no_grad():
        assert not model(x, y)[1].requires_grad


def test_the_short_way_refuses_an_input_that_is_not_used():
    class Switch(nn.Module):
        on = True

        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x) if self.on else self.net(torch.ones_like(x))

    net = Switch()
    x, model = torch.randn(5, 6), db.Penalised(net, db.LossGradient("cross_entropy"))
    for _ in range(4):
        model(x, labels(x.shape))
    net.on = False
    with pytest.raises(db.InputError, match="does not depend on"):
        model(x, labels(x.shape))


@pytest.mark.parametrize("penalty", [db.Jacobian(), db.Jacobian("softmax")], ids=repr)
def test_few_outputs_of_a_small_network_are_pulled_one_by_one(penalty, flattened):
    """At sizes that change: no flat graph is made for calls that go to autograd from then on."""
    torch.manual_seed(0)
    net = mlp().double()
    free, held = db.Penalised(net, penalty), db.Penalised(net, penalty, sweeps=True)
    kinds = []
    for rows in (5, 6, 7, 4, 12, 9, 15):
        results = []
        x = torch.randn(rows, 6).double()
        for model in (free, held):
            net.zero_grad()
            out, value = model(x)
            (out.square().mean() + 0.3 * value).backward()
            results.append([out, value, *[p.grad.clone() for p in net.parameters()]])
            del flattened[: 99 if model is held else 0]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
        kinds.append(by_sweeps(results[0][1]))
        assert by_sweeps(results[1][1]) and not flattened
    assert kinds == [True, *[False] * 3, True, False, False]  # once for each of about one size


def test_many_outputs_stay_with_the_sweeps():
    model = db.Penalised(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 40)), db.Jacobian()
    )
    assert all(by_sweeps(model(torch.randn(5, 6))[1]) for _ in range(3))
    told = db.Penalised(mlp(), db.Jacobian(chunk=2))
    assert all(by_sweeps(told(torch.randn(5, 6))[1]) for _ in range(3))


# ------------------------------------------------------------------ networks that are not captured


class Branch(nn.Module):
    """Its way depends on numbers of the input's."""

    def __init__(self, inner: nn.Module, size: int):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(size, 3)

    def forward(self, x):
        h = self.inner(x)
        return self.head(-h if h.sum() > 1e9 else h)


class Heads(Attention):
    """With an axis of heads, which the fused kernel asks for."""

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v).mean((1, 2)))


def penalised(net, x, y):
    x = x.clone().requires_grad_()
    out = net(x)
    (xi,) = torch.autograd.grad(F.cross_entropy(out, y, reduction="sum"), x, create_graph=True)
    return out, xi.square().flatten(1).sum(1).mean()


def registered(monkeypatch) -> list[str]:
    made, register = [], Patcher.register
    monkeypatch.setattr(
        Patcher, "register", lambda self, f, *a: made.append(f.operator) or register(self, f, *a)
    )
    return made


def gradients(net, results) -> list[torch.Tensor]:
    net.zero_grad()
    out, value = results
    (out.square().mean() + 0.3 * value.square().sum()).backward()
    return [out, value, *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


@pytest.mark.parametrize(
    ("norm", "by"), [(None, 1), (nn.LayerNorm, 1), (nn.LayerNorm, 1100), (nn.BatchNorm1d, 1100)]
)
@pytest.mark.parametrize("options", [{}, {"sweeps": False}], ids=["refused", "asked for"])
def test_what_is_not_captured_soon_registers_nothing(options, norm, by, monkeypatch):
    """To register the patch takes longer than the step of a small network. by: for sizes whose
    norms gain by it, too."""
    torch.manual_seed(0)
    net = Branch(mlp() if norm is None else nn.Sequential(norm(6), mlp()), 3).double()
    made = registered(monkeypatch)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), **options)
    other = db.WithGradient(net, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k, rows in enumerate((5, 6, 7, 5, 6, 12, 7)):
            if k == 4:
                del made[:]
            x, y = torch.randn(by * rows, 6).double(), labels((by * rows,))
            ours = gradients(net, model(x, y)), gradients(net, other(x))
            leaf = x.clone().requires_grad_()
            out = net(leaf)
            slope = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
            theirs = gradients(net, penalised(net, x, y)), gradients(net, (out, slope))
            for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert not made
    assert len(caught) == (0 if options else 2)  # one for each model


def test_what_is_not_captured_keeps_the_derivatives_that_it_uses(monkeypatch):
    """Fused attention has none of PyTorch's own."""
    torch.manual_seed(0)
    net = Branch(Heads(), 3)
    entered, patched = [], Patcher.patched
    monkeypatch.setattr(
        Patcher, "patched", lambda self, only: entered.append(only) or patched(self, only)
    )
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    x, y = torch.randn(5, 4, 8), labels((5,))
    with pytest.warns(db.CaptureWarning):
        first = gradients(net, model(x, y))
    for _ in range(4):
        for a, b in zip(gradients(net, model(x, y)), first, strict=True):
            torch.testing.assert_close(a, b)
    assert entered == [None] * 3  # after which attention's alone is switched on


def test_small_attention_of_what_is_not_captured_is_not_fused():
    """PyTorch's unfused kernel takes less of the host's time; what is larger than what was looked
    at stays with the fused one."""
    torch.manual_seed(0)
    net = Branch(Heads(), 3).double()
    model, other = db.Penalised(net, db.LossGradient("cross_entropy")), db.WithGradient(net)

    def is_fused(rows: int) -> list[bool]:
        x, y = torch.randn(rows, 4, 8).double(), labels((rows,))
        with sdpa_kernel(SDPBackend.MATH):
            leaf = x.clone().requires_grad_()
            out = net(leaf)
            slope = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
            expected = gradients(net, penalised(net, x, y)), gradients(net, (out, slope))
        told = []
        for call, theirs in zip((lambda: model(x, y), lambda: other(x)), expected, strict=True):
            with torch.profiler.profile() as events:
                results = call()
            told.append(any("flash_attention_for_cpu" in e.name for e in events.events()))
            for a, b in zip(gradients(net, results), theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        return told

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert is_fused(5) == [True, True]
        for _ in range(2):
            assert is_fused(5) == is_fused(6) == [False, False]
            assert is_fused(60) == [True, True]
    cuda = torch.backends.cuda
    assert cuda.flash_sdp_enabled() and cuda.math_sdp_enabled()


class Later(Branch):
    """Comes to an operator without a second derivative of PyTorch's own only after a while."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        h = super().forward(x)
        return h + torch.cdist(h, h.detach() + 1) if self.calls > 8 else h


@pytest.mark.parametrize("options", [{}, {"sweeps": False}], ids=["refused", "asked for"])
def test_what_is_used_late_has_its_derivative(options):
    torch.manual_seed(0)
    net = Later(mlp(), 3).double()
    model = db.Penalised(net, db.LossGradient("cross_entropy"), **options)
    x, y = torch.randn(3, 6).double(), labels((3,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            calls = net.calls
            ours = gradients(net, model(x, y))
            net.calls = calls
            with db.patched():
                theirs = gradients(net, penalised(net, x, y))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_bad_input_is_told_alike_on_the_short_way():
    net = Branch(mlp(), 3)
    model, other = db.Penalised(net, db.LossGradient("cross_entropy")), db.WithGradient(net)
    x, y = torch.randn(5, 6), labels((5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            model(x, y), other(x)
        with pytest.raises(db.InputError):
            model(x.long(), y)
        with pytest.raises(db.InputError):
            other(x.long())
        with pytest.raises(db.LabelError):
            model(x, y + 7)


def test_statistics_that_another_call_writes():
    """Batch norm's, between a call on autograd and its backward pass, which reads none of them:
    another size runs by sweeps first, and so does a call without gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(0))
    for rows in (4, 4, 8, 16):
        x, more = torch.randn(2, rows, 4).double()
        found, other = model(x), model(more.repeat(2, 1))
        with torch.no_grad():
            model(more)
        leaves = [t.clone().requires_grad_() for t in (x, more.repeat(2, 1), more)]
        outs = [twin(t) for t in leaves]
        for net_, total in (
            (net, sum(out.square().sum() + p for out, p in (found, other))),
            (twin, sum(_penalised(out, t) for out, t in zip(outs[:2], leaves, strict=False))),
        ):
            net_.zero_grad()
            total.backward()
        for (name, t), u in zip(net.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(t.grad, u.grad, rtol=1e-10, atol=1e-12, msg=name)
        for t, u in zip(net.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(t, u)


def _penalised(out, leaf):
    (slope,) = torch.autograd.grad(out[:, 0].sum(), leaf, create_graph=True)
    return out.square().sum() + slope.square().sum(1).mean()


@pytest.mark.parametrize("sweeps", [None, False])
@pytest.mark.parametrize(
    "made",
    [
        lambda net, sweeps: db.Penalised(net, db.OutputGradient(1), sweeps=sweeps),
        lambda net, sweeps: db.WithGradient(net, v=1, sweeps=sweeps),
    ],
    ids=["Penalised", "WithGradient"],
)
def test_third_derivatives_raise_on_autograd_too(made, sweeps):
    """Whatever way a call takes; PyTorch's own, through norms, are wrong."""
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), mlp(8)[1:]).double()
    model, weight = made(net, sweeps), net[0].weight
    for _ in range(6):
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        out, told = model(x)
        g = torch.autograd.grad(told.square().sum() + out.sum(), [weight, x], create_graph=True)
        for at in (weight, x):
            with pytest.raises(db.ThirdDerivativeError):
                torch.autograd.grad(sum(t.square().sum() for t in g), at, retain_graph=True)
        if isinstance(model, db.WithGradient):
            continue
        scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        g = torch.autograd.grad(scale * told.sum(), weight, create_graph=True)[0]
        (found,) = torch.autograd.grad(g.sum(), scale)  # as of the weight of a penalty
        torch.testing.assert_close(found, g.sum() / scale)


def test_hooks_of_a_caller_s_on_what_autograd_returns_come_and_go():
    """Beside the one that refuses third derivatives."""
    net = mlp().double()
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    x, y, seen = torch.randn(5, 6, dtype=torch.float64), labels((5,)), []
    for k in range(4):
        penalty = model(x, y)[1]
        first, second = penalty.register_hook(seen.append), penalty.register_hook(lambda g: 2 * g)
        if k % 2:
            first.remove()
        weight = net[0].weight
        (doubled,) = torch.autograd.grad(penalty, weight, retain_graph=True)
        second.remove()
        (slope,) = torch.autograd.grad(penalty, weight, create_graph=True)
        torch.testing.assert_close(doubled, 2 * slope.detach())
        with pytest.raises(db.ThirdDerivativeError):
            torch.autograd.grad(slope.sum(), weight)
    assert len(seen) == 4  # twice in each call that kept it


def test_what_can_be_captured_again_soon_is(monkeypatch):
    """A network on autograd is asked every few calls only whether its time of rest is over."""
    from doubleback.capture import dynamo

    net = Branch(mlp(), 3)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    captured, x, y = dynamo.capture_of(net), torch.randn(5, 6), labels((5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            model(x, y)
        assert captured.refusal is not None and not captured.graphs
        captured._again = 0.0  # the rest is over
        monkeypatch.setattr(Branch, "forward", lambda self, x: self.head(self.inner(x)))
        for _ in range(20):
            model(x, y)
    assert captured.graphs == 1
