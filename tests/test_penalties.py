"""Losses, norms and penalties one by one: against their definitions, and on one small network
against the oracle. Quick, so that mutation testing can afford them at every mutant."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.penalties import many_seeds
from doubleback.penalties.losses import CallableLoss, fingerprint, make_loss
from support import oracle
from support.oracle import Spec
from support.penalties import library_penalty, quartic, turned

D = torch.float64


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def same(a, b, limit=1e-12):
    torch.testing.assert_close(a, b, rtol=limit, atol=limit)


# ----------------------------------------------------------------------------------------- losses

WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=D)
LABELS = torch.tensor([0, 3, 1, 2, 3])
IGNORED = torch.tensor([0, -100, 1, 2, 3])
LOSSES = {
    "cross entropy": ("cross_entropy", {}, LABELS),
    "smoothed": ("cross_entropy", {"label_smoothing": 0.2}, LABELS),
    "weighted": ("cross_entropy", {"class_weights": WEIGHTS}, LABELS),
    "ignored": ("cross_entropy", {}, IGNORED),
    "smoothed, ignored": ("cross_entropy", {"label_smoothing": 0.2}, IGNORED),
    "a class ignored": ("cross_entropy", {"ignore_index": 3}, LABELS),
    "the first class ignored": ("cross_entropy", {"ignore_index": 0}, LABELS),
    "probabilities": ("cross_entropy", {}, numbers(5, 4, seed=2).softmax(1)),
    "smoothed probabilities": (
        "cross_entropy", {"label_smoothing": 0.1}, numbers(5, 4, seed=2).softmax(1)
    ),
    "squared error": ("mse", {}, numbers(5, 4, seed=3)),
    "binary": ("bce", {}, numbers(5, 4, seed=3).sigmoid()),
    "own": (lambda out, y: (out - y).square().exp().sum(1), {}, 0.1 * numbers(5, 4, seed=3)),
}  # fmt: skip


def by_definition(name, out, y, options):
    if name == "cross_entropy":
        told = {"weight" if n == "class_weights" else n: v for n, v in options.items()}
        losses = F.cross_entropy(out, y, reduction="none", **told)
    elif name == "mse":
        losses = (out - y) ** 2
    elif name == "bce":
        losses = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    else:
        return name(out, y)
    return losses.reshape(len(out), -1).sum(1)


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("positions", [(), (2,)])
def test_values_gradient_and_hessian_of_a_loss(case, positions):
    name, options, y = LOSSES[case]
    if positions and callable(name):
        return
    out = numbers(5, 4, *positions)
    if positions:
        y = torch.stack([y, y.roll(1, 0)], -1)
    loss, h = make_loss(name, **options), numbers(5, 4, *positions, seed=1)
    loss.check(out.shape, y)
    leaf = out.clone().requires_grad_()
    values = by_definition(name, leaf, y, options)
    (gradient,) = torch.autograd.grad(values.sum(), leaf, create_graph=True)
    (hessian,) = torch.autograd.grad(gradient, leaf, h)
    same(loss.values(out, y), values.detach())
    same(loss.gradient(out, y), gradient.detach())
    same(loss.hessian(out, y, h), hessian)
    total = loss.total(out, y)
    if total is not None:
        same(total, values.sum().detach())
    else:
        assert name != "cross_entropy" or options.keys() - {"ignore_index"} or y.is_floating_point()


def test_excluded_classes_cost_nothing():
    out = numbers(2, 4)
    out[:, 2] = -math.inf
    loss = make_loss("cross_entropy")
    assert loss.values(out, torch.tensor([0, 1])).isfinite().all()
    assert not loss.values(out, torch.tensor([2, 1])).isfinite().all()


def test_sixteen_bits_are_summed_in_more():
    out, y = numbers(5, 4).bfloat16(), numbers(5, 4, seed=1).bfloat16()
    for name, target in (("cross_entropy", LABELS), ("mse", y), ("bce", y.sigmoid())):
        loss = make_loss(name)
        assert loss.values(out, target).dtype == torch.float32
        assert loss.gradient(out, target).dtype == torch.bfloat16
        assert loss.hessian(out, target, out).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name, shape, y",
    [
        ("cross_entropy", (5,), LABELS),
        ("cross_entropy", (5, 4), LABELS[:4]),
        ("cross_entropy", (5, 4, 2), LABELS),
        ("cross_entropy", (5, 3), LABELS),
        ("cross_entropy", (5, 4), -1 - LABELS),
        ("cross_entropy", (5, 4), numbers(5, 3).softmax(1)),
        ("cross_entropy", (5, 4), [0, 1, 2, 3, 0]),
        ("mse", (5, 4), numbers(5, 3)),
        ("bce", (5, 4), numbers(4, 4)),
        ("mse", (5, 4), None),
    ],
)
def test_targets_that_do_not_fit(name, shape, y):
    with pytest.raises(db.LabelError):
        make_loss(name).check(shape, y)


def test_labels_that_fit():
    check = make_loss("cross_entropy", ignore_index=7).check
    check((5, 4), torch.tensor([0, 7, 3, 3, 0]))
    check((0, 4), LABELS[:0])
    with pytest.raises(db.LabelError):
        make_loss("cross_entropy", class_weights=WEIGHTS).check((5, 3), LABELS % 3)
    make_loss("cross_entropy", class_weights=WEIGHTS).check((5, 4), LABELS)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_smoothing_that_is_no_share(share):
    with pytest.raises(db.InputError):
        make_loss("cross_entropy", label_smoothing=share)
    make_loss("cross_entropy", label_smoothing=0.0)
    make_loss("cross_entropy", label_smoothing=1.0)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"class_weights": WEIGHTS}, {"ignore_index": 0}]
)
def test_options_belong_to_cross_entropy(options):
    with pytest.raises(db.InputError):
        make_loss("mse", **options)
    make_loss("cross_entropy", **options)


@pytest.mark.parametrize("result", [torch.tensor(1.0), torch.ones(5, 1), 1.0])
def test_a_loss_of_ones_own_is_one_number_per_example(result):
    with pytest.raises(db.InputError):
        make_loss(lambda out, y: result).values(numbers(5, 4), None)


def test_a_linear_loss_of_ones_own_has_no_hessian():
    loss = make_loss(lambda out, y: out.sum(1))
    assert isinstance(loss, CallableLoss)
    assert loss.hessian(numbers(5, 4), None, numbers(5, 4)) is None


def test_fingerprints_know_every_number():
    assert fingerprint(db.Deviation(1.0)) == fingerprint(db.Deviation(1.0))
    assert fingerprint(db.Deviation(1.0)) != fingerprint(db.Deviation(1.0, one_sided=True))
    assert fingerprint([1, 2]) != fingerprint((1, 2)) and fingerprint(object()) is None
    weights = WEIGHTS.clone()
    loss = make_loss("cross_entropy", class_weights=weights)
    before = loss.fingerprint()
    loss.check((5, 4), LABELS)  # what was looked at is no number of it
    assert before == loss.fingerprint() is not None
    weights.add_(1)
    assert before != loss.fingerprint()
    assert make_loss(lambda out, y: out).fingerprint() is None
    with torch.inference_mode():
        assert fingerprint(torch.ones(2)) is None


# ------------------------------------------------------------------------------------------ norms

XI = [numbers(3, 4), numbers(3, 2, 2, seed=1)]


@pytest.mark.parametrize(
    "norm, function",
    [
        (db.SquaredNorm(), lambda n: n**2),
        (db.Norm(), lambda n: n),
        (db.Deviation(1.5), lambda n: (n - 1.5) ** 2),
        (db.Deviation(1.5, one_sided=True), lambda n: (n - 1.5).clamp(min=0) ** 2),
        (db.Deviation(9.0, one_sided=True), lambda n: 0 * n),
    ],
)
def test_a_norm_and_its_gradient(norm, function):
    leaves = [u.clone().requires_grad_() for u in XI]
    size = torch.cat([u.flatten(1) for u in leaves], 1).norm(dim=1)
    expected = function(size)
    grads = torch.autograd.grad(expected.sum(), leaves)
    values, found = norm.measure(XI)
    same(values, expected.detach())
    same(norm.value(XI), expected.detach())
    for a, b in zip(found, grads, strict=True):
        same(a, b)


@pytest.mark.parametrize("norm", [db.SquaredNorm(), db.Norm(), db.Deviation(0.5)])
def test_a_norm_at_zero(norm):
    values, (gradient,) = norm.measure([torch.zeros(2, 3, dtype=D)])
    same(gradient, torch.zeros(2, 3, dtype=D))
    same(values, norm.value([torch.zeros(2, 3, dtype=D)]))
    assert values[0] == (0.25 if isinstance(norm, db.Deviation) else 0)
    low = [numbers(2, 3).bfloat16()]
    assert norm.measure(low)[0].dtype == torch.float32
    assert norm.measure(low)[1][0].dtype == torch.bfloat16


def test_a_norm_must_be_one():
    for wrong in ("squared", 3):
        with pytest.raises(db.InputError):
            db.OutputGradient(0, norm=wrong)  # type: ignore[arg-type]
    with pytest.raises(db.InputError):
        db.Norm("flat")  # type: ignore[arg-type]
    with pytest.raises(db.InputError):
        db.OutputGradient(0, reduction="median")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- penalties


class Net(nn.Module):
    """Two inputs, which meet in a product; an output per example, and one that is not penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x, z):
        h = self.first(x).tanh() * (1 + self.second(z).sin())
        return self.last(h + 0.3 * h.square())


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().to(D)


B = 4
Y3 = torch.tensor([0, 2, 1, 2])
OUT = numbers(B, 3, seed=5)
ALONG = {0: numbers(B, 6, seed=6), 1: numbers(B, 4, seed=7)}
ALONG[(0, 1)] = (ALONG[0], ALONG[1])  # type: ignore[index]


def specs(wrt):
    q = ALONG[wrt]
    return {
        "cross entropy": Spec("", "loss", "cross_entropy", extras=(Y3,)),
        "smoothed": Spec("", "loss", "cross_entropy", ("norm",), extras=(Y3,),
                         label_smoothing=0.1, class_weights=WEIGHTS[:3]),
        "mse": Spec("", "loss", "mse", ("deviation", 0.3, False), extras=(OUT,)),
        "bce": Spec("", "loss", "bce", extras=(OUT.sigmoid(),)),
        "own loss": Spec("", "loss", lambda o, y: (o * y).sin().sum(1), extras=(OUT,)),
        "output": Spec("", "output", index=1),
        "one-sided": Spec("", "output", index=2, norm=("deviation", 0.1, True)),
        "match": Spec("", "match", index=0, extras=(q,)),
        "bilinear": Spec("", "bilinear", extras=(OUT, q)),
        "custom": Spec("", "custom", v=turned, p=quartic, extras=(OUT,)),
        "coupled": Spec("", "custom", v=turned, p=coupled, extras=(OUT,)),
        "seen": Spec("", "custom", v=turned, p=seen, sees_output=True, extras=(OUT,)),
        "jacobian": Spec("", "jacobian"),
        "entries": Spec("", "jacobian", entries=(0, 2)),
        "softmax": Spec("", "jacobian", softmax=True),
    }  # fmt: skip


def coupled(xi):
    parts = [xi] if isinstance(xi, torch.Tensor) else list(xi)
    rows = torch.cat([u.flatten(1) for u in parts], 1)
    return (rows - 0.3 * rows.mean(0)).square().sum(1).add(1.0).sqrt()


def seen(xi, out, y):
    return quartic(xi) * (out * y).sum(1).tanh() + out.square().sum(1)


def arguments():
    return numbers(B, 6, seed=8).requires_grad_(), numbers(B, 4, seed=9).requires_grad_()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wrt", [0, 1, (0, 1)])
@pytest.mark.parametrize("kind", specs(0))
def test_a_penalty(net, kind, wrt, reduction):
    spec = replace(specs(wrt)[kind], reduction=reduction)
    truth_net, args = copy.deepcopy(net), arguments()
    truth_net.zero_grad()
    truth = oracle.solve(truth_net, args, spec, wrt=wrt)
    net.zero_grad()
    model = db.Penalised(net, library_penalty(spec), wrt=wrt, flatten_after=None, strict=True)
    args = arguments()
    out, penalty = model(*args, *spec.extras)
    oracle.total_loss(out, penalty).backward()
    got = oracle.collect(net, args, out, penalty)
    errors = oracle.compare(got, truth, 1e-6)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("kind", specs(0))
def test_a_penalty_on_autograd(net, kind):
    """The library's own way without sweeps, which networks that cannot be captured take."""
    spec = specs(0)[kind]
    truth_net, args = copy.deepcopy(net), arguments()
    truth_net.zero_grad()
    truth = oracle.solve(truth_net, args, spec)
    net.zero_grad()
    args = arguments()
    model = db.Penalised(net, library_penalty(spec), sweeps=False)
    out, penalty = model(*args, *spec.extras)
    oracle.total_loss(out, penalty).backward()
    errors = oracle.compare(oracle.collect(net, args, out, penalty), truth, 1e-6)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", specs(0))
def test_accumulate(net, kind, reduction, weight):
    spec = replace(specs(0)[kind], reduction=reduction)
    truth_net, args = copy.deepcopy(net), arguments()
    truth_net.zero_grad()
    out, penalty = oracle.value(truth_net, args, spec)
    own = spec.kind == "loss"
    losses = oracle.example_losses(spec if own else Spec("", "loss", "mse"), out,
                                   spec.extras[0] if own else OUT)  # fmt: skip
    (losses.mean() + weight * penalty).backward()
    truth = oracle.collect(truth_net, args, out, penalty)
    net.zero_grad()
    model = db.Penalised(net, library_penalty(spec), flatten_after=None, strict=True)
    args = arguments()
    given = spec.extras if own else (OUT, *spec.extras)
    told = {} if own else {"loss": "mse"}
    out, loss, penalty = model.accumulate(*args, *given, weight=weight, **told)
    same(loss, losses.mean().detach())
    got = oracle.collect(net, args, out, penalty if weight else truth.penalty)
    errors = oracle.compare(got, truth, 1e-6)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("kind", ["mse", "bce", "match", "bilinear", "custom", "own loss", "seen"])
@pytest.mark.parametrize("wrt", [0, (0, 1)])
def test_the_penaltys_own_tensors_receive_their_gradient(net, kind, wrt):
    def fresh():
        def leaf(t):
            return t.clone().requires_grad_()

        return tuple(
            tuple(map(leaf, e)) if isinstance(e, tuple) else leaf(e)
            for e in specs(wrt)[kind].extras
        )

    grads = []
    for ours in (True, False):
        spec = replace(specs(wrt)[kind], extras=fresh(), reduction="sum")
        if ours:
            model = db.Penalised(net, library_penalty(spec), wrt=wrt, flatten_after=None)
            _, penalty = model(*arguments(), *spec.extras)
        else:
            _, penalty = oracle.value(net, arguments(), spec, wrt=wrt)
        penalty.backward()
        leaves = [t for e in spec.extras for t in (e if isinstance(e, tuple) else (e,))]
        grads.append([t.grad for t in leaves])
    for a, b in zip(*grads, strict=True):
        same(a, b, 1e-10)


def test_what_would_lose_a_gradient_is_refused(net):
    """A p, as a v, that depends on a tensor which is none of its arguments and requires grad."""
    scale = torch.ones((), dtype=D, requires_grad=True)

    def scaled(xi):
        return scale * xi.square().sum(1)

    for penalty in (db.Custom(torch.ones_like, scaled), db.OutputGradient(1, norm=scaled)):
        model = db.Penalised(net, penalty, sweeps=True)
        for call in (model, model.accumulate):
            with pytest.raises(db.InputError, match="p depends on a tensor of shape"):
                call(*arguments())
    with pytest.raises(db.InputError, match="as an extra"):
        db.Deviation(scale)  # type: ignore[arg-type]
    with pytest.raises(db.InputError, match="callable p"):
        db.Custom(torch.ones_like, db.Norm(), sees_output=True)
    given = db.Custom(
        lambda out, s: torch.ones_like(out),
        lambda xi, out, s: s * xi.square().sum(1),
        extras=1,
        sees_output=True,
    )
    db.Penalised(net, given, sweeps=True)(*arguments(), scale)[1].backward()
    assert scale.grad is not None


@pytest.mark.parametrize("index", [(1, 2), (0, -1), (-2, 0)])
def test_an_entry_of_several_axes(index):
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Unflatten(1, (2, 3))).to(D)
    x = numbers(3, 5).requires_grad_()
    _, penalty = db.Penalised(net, db.OutputGradient(index), flatten_after=None)(x)
    (xi,) = torch.autograd.grad(net(x)[(slice(None), *index)].sum(), x)
    same(penalty.detach(), xi.square().sum(1).mean())


@pytest.mark.parametrize(
    "penalty, shape",
    [
        (db.OutputGradient(), (3, 2)),
        (db.OutputGradient(2), (3, 2)),
        (db.OutputGradient(-3), (3, 2)),
        (db.OutputGradient((0, 1)), (3, 2)),
        (db.OutputGradient(0), (3, 2, 2)),
        (db.GradientMatch(2), (3, 2)),
        (db.Jacobian(), (3,)),
        (db.Jacobian(), (3, 2, 2)),
        (db.Jacobian("softmax"), (3, 1)),
        (db.Jacobian("softmax"), (3, 2, 2)),
        (db.Jacobian(projections=3), (3, 2)),
        (db.Jacobian("softmax", projections=2), (3, 2)),
        (db.Jacobian(entries=[2]), (3, 2)),
        (db.Jacobian(entries=[-3]), (3, 2)),
        (db.Jacobian(entries=[(0, 0)]), (3, 2)),
        (db.Jacobian(entries=[]), (3, 2)),
        (db.SpectralNorm(), (3,)),
    ],
)
def test_outputs_that_do_not_fit(penalty, shape):
    x = [numbers(3, 4)]
    with pytest.raises(db.InputError):
        penalty.check(shape, x, *x)


@pytest.mark.parametrize(
    "penalty, shape",
    [
        (db.OutputGradient(), (3, 1)),
        (db.OutputGradient(), (3,)),
        (db.OutputGradient(1), (3, 2)),
        (db.OutputGradient(-2), (3, 2)),
        (db.OutputGradient((1, 0)), (3, 2, 2)),
        (db.Jacobian(entries="all"), (3, 2, 2)),
        (db.Jacobian(entries=[(1, 1), (-2, 0)]), (3, 2, 2)),
        (db.Jacobian(projections=2), (3, 2)),
        (db.Jacobian(projections=1), (3, 2, 2)),
        (db.Jacobian("softmax", projections=1), (3, 2)),
        (db.Jacobian("softmax"), (3, 2)),
        (db.SpectralNorm(), (3, 2)),
    ],
)
def test_outputs_that_fit(penalty, shape):
    penalty.check(shape, [numbers(3, 4)])


@pytest.mark.parametrize(
    "given",
    [(numbers(3, 2), numbers(3, 5)), (numbers(3, 4), numbers(3, 4)), (1.0, numbers(3, 4)),
     (numbers(3, 2), (numbers(3, 4), numbers(3, 4))), (numbers(3, 2), 2.0)],
)  # fmt: skip
def test_a_bilinear_form_that_does_not_fit(given):
    with pytest.raises(db.InputError):
        db.BilinearForm().check((3, 2), [numbers(3, 4)], *given)
    db.BilinearForm().check((3, 2), [numbers(3, 4)], numbers(3, 2), numbers(3, 4))


def test_inputs_of_different_leading_sizes():
    with pytest.raises(db.InputError, match="leading sizes"):
        db.OutputGradient(0).check((3, 2), [numbers(3, 4), numbers(2, 4)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: db.OutputGradient(1.0),
        lambda: db.OutputGradient(True),
        lambda: db.OutputGradient((0, "a")),
        lambda: db.Custom("ones"),
        lambda: db.Jacobian("logits"),
        lambda: db.Jacobian(plan="fast"),
        lambda: db.Jacobian(projections=0),
        lambda: db.Jacobian(projections=True),
        lambda: db.Jacobian(chunk=1.5),
        lambda: db.Jacobian("softmax", entries=[0]),
        lambda: db.Jacobian(projections=1, entries=[0]),
        lambda: db.Jacobian(projections=1, plan="columns"),
        lambda: db.SpectralNorm(-1),
        lambda: db.SpectralNorm(True),
        lambda: db.SpectralNorm(1.5),
        lambda: db.SpectralNorm(0, warm_start=False),
        lambda: db.SpectralNorm(domain=db.spaces.Lp(3.0)),
        lambda: db.SpectralNorm(codomain=db.spaces.Lp(3.0)),
        lambda: db.Jacobian(space=db.spaces.Lp(3.0)),
    ],
)
def test_penalties_that_cannot_be(make):
    with pytest.raises(db.InputError):
        make()


def test_a_v_of_another_shape():
    with pytest.raises(db.InputError):
        db.Custom(lambda out: out.sum(1)).seed(numbers(3, 2))
    with pytest.raises(db.InputError):
        db.Custom(lambda out: 1.0).seed(numbers(3, 2))


def test_a_v_that_draws_and_bends():
    penalty = db.Custom(lambda out: out * torch.randn_like(out))
    with pytest.raises(db.InputError, match="draws random numbers"):
        penalty.head(numbers(3, 2), numbers(3, 2))
    assert db.Custom(torch.randn_like).head(numbers(3, 2), numbers(3, 2)) is None


def test_whose_values_are_coupled():
    assert not db.OutputGradient(0, reduction="none").coupled
    assert not db.OutputGradient(0, norm=coupled).coupled
    assert db.OutputGradient(0, norm=coupled, reduction="none").coupled


def test_a_loss_is_shared_with_itself_alone():
    penalty = db.LossGradient("mse")
    assert penalty.shares(penalty.loss) and not penalty.shares(None)
    assert not penalty.shares(db.LossGradient("mse").loss)
    assert not db.OutputGradient(0).shares(None)


# ------------------------------------------------------------------------------------- many seeds


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_basis_of_vectors_that_sum_to_zero(size):
    rows = many_seeds.helmert(size, D, "cpu")
    assert rows.shape == (size - 1, size)
    same(rows @ rows.T, torch.eye(size - 1, dtype=D))
    same(rows.sum(1), torch.zeros(size - 1, dtype=D))
    same(rows.tril(1), rows)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_directions_are_orthonormal_and_uniform(count):
    torch.manual_seed(0)
    found = many_seeds.directions(2000, 3, count, "cpu").double()
    assert found.shape == (count, 2000, 3)
    same(torch.einsum("ibk,jbk->bij", found, found), torch.eye(count, dtype=D).expand(2000, -1, -1),
         1e-6)  # fmt: skip
    mean = torch.einsum("ibk,ibl->kl", found, found) / (2000 * count)
    torch.testing.assert_close(mean, torch.eye(3, dtype=D) / 3, rtol=0, atol=0.03)


def test_unit_vectors():
    found = many_seeds.unit_vectors(torch.tensor([4, 1]), (2, 3, 2), D)
    expected = torch.zeros(2, 2, 3, 2, dtype=D)
    expected[0, :, 2, 0] = expected[1, :, 0, 1] = 1
    assert torch.equal(found, expected)


def test_the_number_of_seeds():
    assert db.Jacobian().seed_count((3, 5)) == 5
    assert db.Jacobian(entries="all").seed_count((3, 5, 2)) == 10
    assert db.Jacobian(entries=[(1, 1), (-5, 0)]).seed_count((3, 5, 2)) == 2
    assert db.Jacobian("softmax").seed_count((3, 5)) == 4
    assert db.Jacobian(projections=2).seed_count((3, 5)) == 2
    assert many_seeds._entries([(1, 1), (-5, 0), 9, -1], (3, 5, 2)) == [3, 0, 9, 9]
    assert many_seeds._entries(2, (3, 5)) == [2] and many_seeds._entries((1, 0), (3, 5, 2)) == [2]
    assert db.Jacobian(projections=1).one_seed and not db.Jacobian(projections=2).one_seed
    assert db.Jacobian(projections=2).scale((3, 5)) == 2.5 and db.Jacobian().scale((3, 5)) == 1
    assert db.Jacobian("softmax", projections=2).scale((3, 5)) == 2


@pytest.mark.parametrize("of", ["output", "softmax"])
def test_projections_are_right_on_average(net, of):
    """In as many directions as there are, they are exact."""
    x = arguments()
    exact = db.Penalised(net, db.Jacobian(of), flatten_after=None)(*x)[1]
    full = 3 if of == "output" else 2
    every = db.Penalised(net, db.Jacobian(of, projections=full), flatten_after=None)(*x)[1]
    same(every.detach(), exact.detach(), 1e-10)
    torch.manual_seed(0)
    one = db.Penalised(net, db.Jacobian(of, projections=1), flatten_after=None)
    mean = sum(one(*x)[1].item() for _ in range(200)) / 200
    assert abs(mean / exact.item() - 1) < 0.15


def test_the_operator_norm(net):
    x = arguments()
    penalty = db.SpectralNorm(iterations=300, warm_start=False, reduction="none")
    found = db.Penalised(net, penalty, flatten_after=None)(*x)[1]
    jacobian = torch.autograd.functional.jacobian(lambda t: net(t, x[1]).sum(0), x[0])
    expected = torch.linalg.matrix_norm(jacobian.transpose(0, 1), 2)
    same(found.detach(), expected, 1e-5)


def test_a_direction_is_carried_on():
    penalty, out = db.SpectralNorm(), numbers(3, 4)
    v = penalty.normalised(numbers(3, 4, seed=1))
    same(v.norm(dim=1), torch.ones(3, dtype=D))
    carried: dict = {}
    db.SpectralNorm(warm_start=False).carry(carried, out, v)
    assert not carried
    penalty.carry(carried, out, v)
    begun = penalty.begin(out, carried)
    same(begun.norm(dim=1), torch.ones(3, dtype=D))
    assert 1e-6 < (begun - v).norm() < 0.5
    still = db.SpectralNorm(0).begin(out, carried)
    assert torch.equal(still, v)
    anew = db.SpectralNorm(warm_start=False).begin(out, carried)
    assert (anew - v).norm() > 0.5
    w = numbers(3, 4)
    w[0], w[1, 0] = 0.0, math.inf
    same(penalty.normalised(w, v)[:2], v[:2])
    same(penalty.normalised(w)[:2], torch.zeros(2, 4, dtype=D))
