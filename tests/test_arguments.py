"""Gradients of the tensors inside a penalty: targets, directions and soft labels that require grad
receive what autograd's double backward gives them, however the sweeps are run."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.run import straight_line
from support.zoo import double

B, N, C = 4, 3, 5


@pytest.fixture(autouse=True)
def in_double():
    with double():
        torch.manual_seed(7)
        yield


def mlp(outputs: int = C) -> nn.Module:
    return nn.Sequential(
        nn.Linear(N, 8), nn.Tanh(), nn.Linear(8, 6), nn.Softplus(), nn.Linear(6, outputs)
    )


class Affine(nn.Module):
    """Where a penalty's tensor comes from: s⊙a + c."""

    def __init__(self, *shape: int, soft: bool = False):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(shape))
        self.register_buffer("at", torch.randn(B, *shape))
        self.soft = soft

    def forward(self):
        value = self.scale * self.at + 0.1
        return value.softmax(-1) if self.soft else value


def pulled(net, x, v):
    """J*v by stock autograd."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    out = net(x)
    (u,) = torch.autograd.grad(out, x, v(out), create_graph=True)
    return out, u


def match(net, x, target):
    out, u = pulled(net, x, lambda out: F.one_hot(torch.full((B,), 1), C).double())
    return out, (u - target).square().sum(1)


def deviating(net, x, target):
    out, u = pulled(net, x, lambda out: F.one_hot(torch.full((B,), 1), C).double())
    return out, ((u - target).norm(dim=1) - 1).square()


def form(net, x, w, q):
    out, u = pulled(net, x, lambda out: w)
    return out, (u * q).sum(1)


def squared(net, x, y):
    out, u = pulled(net, x, lambda out: 2 * (out - y))
    return out, u.square().sum(1)


def entropy(net, x, y):
    def gradient(out):
        return torch.autograd.grad(-(y * out.log_softmax(1)).sum(), out, create_graph=True)[0]

    out, u = pulled(net, x, gradient)
    return out, u.square().sum(1)


def weighted(net, x, a):
    out, u = pulled(net, x, lambda out: a * out.square())
    return out, u.square().sum(1)


def own_loss(out, y):
    return ((out - y) ** 4).sum(1)


def quartic(net, x, y):
    out, u = pulled(net, x, lambda out: 4 * (out - y) ** 3)
    return out, u.square().sum(1)


# penalty, its value per example by autograd, and where its tensors come from
CASES = {
    "match": (lambda r: db.GradientMatch(1, reduction=r), match, [Affine(N)]),
    "match_deviation": (
        lambda r: db.GradientMatch(1, db.Deviation(1.0), reduction=r), deviating, [Affine(N)],
    ),
    "match_callable": (
        lambda r: db.GradientMatch(1, lambda u: u.square().sum(1), reduction=r), match, [Affine(N)],
    ),
    "form": (lambda r: db.BilinearForm(r), form, [Affine(C), Affine(N)]),
    "form_w": (lambda r: db.BilinearForm(r), form, [Affine(C), None]),
    "form_q": (lambda r: db.BilinearForm(r), form, [None, Affine(N)]),
    "mse": (lambda r: db.LossGradient("mse", reduction=r), squared, [Affine(C)]),
    "cross_entropy": (
        lambda r: db.LossGradient("cross_entropy", reduction=r), entropy, [Affine(C, soft=True)],
    ),
    "own_loss": (lambda r: db.LossGradient(own_loss, reduction=r), quartic, [Affine(C)]),
    "custom": (
        lambda r: db.Custom(lambda out, a: a * out.square(), extras=1, reduction=r), weighted,
        [Affine(C)],
    ),
}  # fmt: skip
REDUCE = {"mean": torch.mean, "sum": torch.sum, "none": lambda values: values}


def tensors(sources):
    """The penalty's tensors; one without a source is a constant (w is made before q)."""
    shapes = (C, N)
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(B, shapes[i], generator=generator) if s is None else s.double()()
        for i, s in enumerate(sources)
    ]


def gradients(parts) -> list:
    found = []
    for module in parts:
        for p in () if module is None else module.parameters():
            found.append(None if p.grad is None else p.grad.clone())
            p.grad = None
    return found


def assert_alike(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-10 * max(1.0, b.norm())


def total(out, penalty, reduction):
    weights = torch.linspace(0.5, 2, B) if reduction == "none" else torch.tensor(0.7)
    return out.square().mean() + (weights * penalty).sum()


def expected_of(case, net, x, reduction="mean"):
    _, oracle, sources = CASES[case]
    out, values = oracle(net, x, *tensors(sources))
    total(out, REDUCE[reduction](values), reduction).backward()
    return gradients([net, *sources])


@pytest.mark.parametrize("reduction", REDUCE)
@pytest.mark.parametrize("case", CASES)
def test_parity(case, reduction):
    """Eagerly, then flattened: five calls of one shape."""
    make, _, sources = CASES[case]
    net, x = mlp(), torch.randn(B, N)
    expected = expected_of(case, net, x, reduction)
    model = db.Penalised(net, make(reduction), strict=True)
    for _ in range(5):
        out, penalty = model(x, *tensors(sources))
        total(out, penalty, reduction).backward()
        assert_alike(gradients([net, *sources]), expected)


@pytest.mark.parametrize("case", ["match", "form", "custom"])
def test_accumulate(case):
    make, oracle, sources = CASES[case]
    net, x, y = mlp(), torch.randn(B, N), torch.randn(B, C)
    out, values = oracle(net, x, *tensors(sources))
    ((out - y).square().sum(1).mean() + 0.3 * values.mean()).backward()
    expected = gradients([net, *sources])
    model = db.Penalised(net, make("mean"), strict=True)
    for _ in range(5):
        model.accumulate(x, y, *tensors(sources), loss="mse", weight=0.3)
        assert_alike(gradients([net, *sources]), expected)
    model.accumulate(x, y, *tensors(sources), loss="mse", weight=0)
    assert gradients(sources)[0] is None


def test_accumulate_holds_the_targets_of_losses_constant():
    net, x, y = mlp(), torch.randn(B, N), torch.randn(B, C, requires_grad=True)
    for penalty, loss in ((db.LossGradient("mse"), None), (db.OutputGradient(0), "mse")):
        with pytest.raises(db.InputError, match=r"loss's target constant.*detach"):
            db.Penalised(net, penalty).accumulate(x, y, loss=loss)


@pytest.mark.parametrize("case", ["match", "form"])
def test_compiled(case):
    make, _, sources = CASES[case]
    net, x = mlp(), torch.randn(B, N)
    expected = expected_of(case, net, x)
    out, penalty = db.Penalised(net, make("mean"), compile=True)(x, *tensors(sources))
    total(out, penalty, "mean").backward()
    assert_alike(gradients([net, *sources]), expected)


@pytest.mark.parametrize("case", ["match", "form", "mse"])
def test_frozen_network(case):
    """Only the penalty's tensors are trained: no parameter and no x asks for anything."""
    make, _, sources = CASES[case]
    net, x = mlp().requires_grad_(False), torch.randn(B, N)
    expected = expected_of(case, net, x)
    model = db.Penalised(net, make("mean"), strict=True)
    for _ in range(4):
        out, penalty = model(x, *tensors(sources))
        total(out, penalty, "mean").backward()
        assert_alike(gradients([net, *sources]), expected)
    with torch.no_grad():
        assert not model(x, *tensors(sources))[1].requires_grad


def test_with_and_without_in_turn():
    """A target that requires grad and one that does not are two programs of one model."""
    net, x, target = mlp(), torch.randn(B, N), torch.randn(B, N)
    model = db.Penalised(net, db.GradientMatch(1))
    for asks in (False, True, False, True, True):
        given = target.clone().requires_grad_(asks)
        model(x, given)[1].backward()
        assert (given.grad is not None) is asks


def test_target_made_from_x():
    net, x = mlp(), torch.randn(B, N, requires_grad=True)
    match(net, x, x.sin())[1].mean().backward()
    expected, x.grad = x.grad, None
    db.Penalised(net, db.GradientMatch(1), strict=True)(x, x.sin())[1].backward()
    assert_alike([x.grad], [expected])


def test_several_inputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(N, 6), nn.Linear(2, 6)
            self.out = nn.Linear(6, 1)

        def forward(self, x, y):
            return self.out((self.a(x) * self.b(y)).tanh())

    x, y = torch.randn(B, N), torch.randn(B, 2)
    targets = tuple(torch.randn_like(t).requires_grad_() for t in (x, y))
    model = db.Penalised(Net(), db.GradientMatch(), wrt=(0, 1))
    assert db.check(model, x, y, targets).worst <= 1e-10
    form = db.Penalised(Net(), db.BilinearForm(), wrt=(0, 1))
    w = torch.randn(B, 1, requires_grad=True)
    report = db.check(form, x, y, w, (targets[0], targets[1].detach()))
    names = {row.name for row in report.rows}
    assert {"∇ argument 0", "∇ argument 1"} <= names and "∇ argument 2" not in names


def test_on_autograd():
    """A network that cannot be captured gives the same."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x) if float(x.detach().sum()) < 1e9 else x

    make, _, sources = CASES["form"]
    net, x = Net(), torch.randn(B, N)
    expected = expected_of("form", net, x)
    with pytest.warns(db.CaptureWarning):
        out, penalty = db.Penalised(net, make("mean"))(x, *tensors(sources))
    total(out, penalty, "mean").backward()
    assert_alike(gradients([net, *sources]), expected)


def test_changed_in_place_and_third_derivatives():
    net, x, target = mlp(), torch.randn(B, N), torch.randn(B, N, requires_grad=True)
    model = db.Penalised(net, db.GradientMatch(1))
    penalty = model(x, target)[1]
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(db.StaleGraphError):
        penalty.backward()
    (grad,) = torch.autograd.grad(model(x, target)[1], target, create_graph=True)
    with pytest.raises(db.ThirdDerivativeError):
        grad.sum().backward()


@pytest.mark.parametrize("asks", [False, True])
def test_only_w_costs_a_tangent_at_the_output(asks):
    """∂/∂w = J q takes the last layer's K; a target takes no operation at all."""
    net = nn.Sequential(nn.Linear(N, 6), nn.ReLU(), nn.Linear(6, C))
    x, w, q = torch.randn(B, N), torch.randn(B, C), torch.randn(B, N)

    def products(penalty, *own):
        with db.count_operations() as ops:
            db.Penalised(net, penalty)(x, *own)[1].backward()
        return ops.products

    plain = products(db.BilinearForm(), w, q)
    assert products(db.BilinearForm(), w.requires_grad_(asks), q) == plain + asks
    plain = products(db.GradientMatch(0), q)
    assert products(db.GradientMatch(0), q.clone().requires_grad_(asks)) == plain


# ----------------------------------------------------------- what changes from call to call


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        first, second, third = (head(x.tanh()) for head in self.heads)
        return first, second, third.tanh()


@pytest.mark.parametrize("penalty", [db.Jacobian(), db.OutputGradient(0)], ids=["many", "one"])
def test_the_loss_may_take_one_output_and_then_another(penalty):
    """Outputs of one shape: the flat graph of the one is not that of the other."""
    net, x = Heads(), torch.randn(5, 4)
    model = db.Penalised(net, penalty, output=2)
    for _ in range(4):
        for chosen in (0, 1):
            net.zero_grad()
            outputs, value = model(x)
            (outputs[chosen].sum() + value).backward()
            grads = [head.weight.grad for head in net.heads[:2]]
            reached = [grad is not None and bool(grad.any()) for grad in grads]
            assert reached == [chosen == 0, chosen == 1]


@pytest.mark.parametrize("wrap", [float, lambda s: {"s": s}, lambda s: OrderedDict(s=s)])
def test_a_number_for_the_penalty_may_change(wrap):
    def times(out, given):
        return out * (given if isinstance(given, float) else given["s"])

    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(5, 4)
    model = db.Penalised(net, db.Custom(times, extras=1))
    base = model(x, wrap(1.0))[1].item()
    for scale in (1.0, 1.0, 1.0, 2.0, 3.0, 1.0):
        assert model(x, wrap(scale))[1].item() == pytest.approx(scale**2 * base)


def test_a_tensor_for_the_penalty_may_change_its_shape():
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(5, 4)
    model = db.Penalised(net, db.Custom(lambda out, s: out * len(s), extras=1))
    base = model(x, torch.ones(1))[1].item()
    for count in (1, 1, 1, 2, 3, 1):
        assert model(x, torch.ones(count))[1].item() == pytest.approx(count**2 * base)


def test_numbers_that_never_come_again_do_not_pile_up(flattened):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(5, 4)
    model = db.Penalised(net, db.Custom(lambda out, s: s * out, extras=1), flatten_after=0)
    found = [model(x, float(s))[1].item() / s**2 for s in range(1, 7)]
    assert found == pytest.approx(found[:1] * 6)
    assert len(flattened) == 2  # forward and backward sweep, once


@pytest.mark.parametrize("penalty", [db.LossGradient("mse"), db.Jacobian()], ids=["loss", "J"])
def test_a_weight_that_changes_at_every_step_takes_one_graph(penalty, monkeypatch):
    made = []
    boxed = straight_line.boxed
    monkeypatch.setattr(straight_line, "boxed", lambda graph: made.append(graph) or boxed(graph))
    net, x, y = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(5, 4), torch.randn(5, 3)
    model = db.Penalised(net, penalty, flatten_after=1)
    counts, grads = [], []
    for weight in (0.1, 0.2, 0.3, 0.4, 0):
        net.zero_grad()
        model.accumulate(x, y, loss="mse", weight=weight)
        counts.append(len(made))
        grads.append(net[0].weight.grad.clone())
    assert counts[1] == counts[2] == counts[3] > 0
    slope = grads[1] - grads[0]
    torch.testing.assert_close(grads[3], grads[0] + 3 * slope)
    torch.testing.assert_close(grads[4], grads[0] - slope)
    assert slope.norm() > 0


def test_transforms_of_torch_func_are_refused_and_leave_nothing_behind():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = db.Penalised(net, db.OutputGradient(0), strict=True)
    x, parameters = torch.randn(6, 4), dict(model.named_parameters())

    def penalty(parameters):
        return torch.func.functional_call(model, parameters, (x,))[1]

    transformed = (
        lambda: torch.func.grad(penalty)(parameters),
        lambda: torch.func.vmap(lambda t: model(t[None])[1])(x),
        lambda: torch.func.jvp(penalty, (parameters,), (parameters,)),
        lambda: torch.func.grad(lambda t: model.accumulate(t)[2])(x),
    )
    for call in transformed:
        with pytest.raises(db.InputError, match=r"torch\.func"):
            call()
    model(x)[1].backward()
    doubled = {name: 2 * p.detach() for name, p in parameters.items()}
    with torch.no_grad():
        assert penalty(doubled) != penalty(parameters)


def test_without_labels_it_is_said_how_to_evaluate():
    model = db.Penalised(nn.Linear(6, 3), db.LossGradient("cross_entropy")).eval()
    with pytest.raises(db.InputError, match=r"model\.net\(x\)"):
        model(torch.randn(4, 6))
