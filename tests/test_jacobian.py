"""Jacobian and operator-norm penalties: parity under every plan and chunk, operation counts,
FLOPs and memory against the planner's word, estimators against their variance."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import doubleback as db
from doubleback.jacobian import planner
from doubleback.jacobian import programs as jacobian_program
from doubleback.jacobian.planner import Meter
from doubleback.penalties.many_seeds import directions, helmert
from doubleback.run import straight_line
from support.zoo import double

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
}


@pytest.fixture(autouse=True)
def in_double():
    with double():
        torch.manual_seed(3)
        yield


def mlp(sizes, activation=nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def conv(activation=nn.GELU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), activation(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2), activation(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


NETS = {
    "wide": (lambda act: mlp([3, 5, 7, 8], act), (4, 3)),
    "narrow": (lambda act: mlp([20, 5, 6, 4], act), (4, 20)),
    "autoencoder": (lambda act: mlp([8, 6, 2, 5, 8], act), (3, 8)),
    "conv": (conv, (3, 2, 8, 8)),
}


def truth(net: nn.Module, x: Tensor, of: str, with_loss: bool) -> tuple[Tensor, list[Tensor]]:
    """torch.func.jacrev of one example at a time, then autograd over the parameters."""

    def one(example: Tensor) -> Tensor:
        out = net(example[None])[0]
        return out.softmax(-1) if of == "softmax" else out

    rows = torch.stack([torch.func.jacrev(one)(example).square().sum() for example in x])
    total = rows.mean() + (net(x).square().mean() if with_loss else 0)
    gradients = torch.autograd.grad(total, list(net.parameters()), allow_unused=True)
    return rows.mean(), filled(net, gradients)


def filled(net: nn.Module, gradients) -> list[Tensor]:
    """Zeros for None."""
    return [torch.zeros_like(p) if g is None else g
            for g, p in zip(gradients, net.parameters(), strict=True)]  # fmt: skip


def grads(net: nn.Module) -> list[Tensor]:
    return [g.clone() for g in filled(net, [p.grad for p in net.parameters()])]


def ours(net, x, penalty, with_loss, **options) -> tuple[Tensor, list[Tensor]]:
    net.zero_grad(set_to_none=True)
    model = db.Penalised(net, penalty, **options)
    out, value = model(x)
    (value + (out.square().mean() if with_loss else 0)).backward()
    return value.detach(), grads(net)


def close(found, expected) -> None:
    scale = max(g.norm() for g in expected[1]).item()
    assert abs(found[0] - expected[0]) <= 1e-10 * abs(expected[0])
    for got, want in zip(found[1], expected[1], strict=True):
        assert (got - want).norm() <= 1e-10 * max(want.norm().item(), 1e-6 * scale)


# ----------------------------------------------------------------------------------------- parity


# every activation with two networks, every network with two activations or more
PAIRS = [(n, a) for i, n in enumerate(NETS) for j, a in enumerate(ACTIVATIONS) if (i + j) % 4 < 2]


@pytest.mark.parametrize("name, act", PAIRS)
def test_parity_with_jacrev(name, act):
    make, shape = NETS[name]
    net, x = make(ACTIVATIONS[act]), torch.randn(shape)
    count = net(x).shape[1]
    for of in ("output", "softmax"):
        expected = truth(net, x, of, with_loss=True)
        for chunk in (1, 2, count, count - 1):
            penalty = db.Jacobian(of, chunk=chunk, plan="rows")
            close(ours(net, x, penalty, True), expected)
        expected = truth(net, x, of, with_loss=False)
        close(ours(net, x, db.Jacobian(of), False, flatten_after=0), expected)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("of", ["output", "softmax"])
def test_every_plan_gives_the_same(name, of):
    make, shape = NETS[name]
    net, x = make(nn.Tanh), torch.randn(shape)
    expected = truth(net, x, of, True)
    applied = []
    for plan in ("rows", "columns", "waist", "diagonal"):
        for chunk in (None, 2):
            try:
                close(ours(net, x, db.Jacobian(of, plan=plan, chunk=chunk), True), expected)
                applied.append(plan)
            except db.InputError as error:
                assert "does not apply" in str(error)
    assert {"rows", "columns"} <= set(applied)
    assert ("waist" in applied) == (name == "autoencoder")


def test_contractive_encoder_by_its_closed_form():
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Sigmoid()), torch.randn(5, 2, 4)
    s = net(x)
    rows = net[1].weight.square().sum(1)
    value = ((s * (1 - s)).square() * rows).sum(1).mean()
    expected = value, list(torch.autograd.grad(value + s.square().mean(), net.parameters()))
    for plan in ("auto", "diagonal", "rows", "columns"):
        close(ours(net, x, db.Jacobian(plan=plan), True), expected)
    told = db.Penalised(net, db.Jacobian()).explain(x).as_dict()
    assert told["plan"]["chosen"] == "diagonal"
    with db.count_operations() as ops:
        ours(net, x, db.Jacobian(), True)
    assert (ops.forward, ops.transpose, ops.weight_adjoint) == (1, 0, 1)  # no work per seed


def test_deep_linear_net_by_its_closed_form():
    """J = W₃W₂W₁: ∇_{W₂}‖J‖² = 2 W₃ᵀ J W₁ᵀ, and so on."""
    net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((6, 5), (5, 4), (4, 3))))
    w1, w2, w3 = (layer.weight.detach() for layer in net)
    j = w3 @ w2 @ w1
    expected = j.square().sum(), [2 * (w3 @ w2).T @ j, 2 * w3.T @ j @ w1.T, 2 * j @ (w2 @ w1).T]
    close(ours(net, torch.randn(7, 6), db.Jacobian(), False), expected)


def test_finite_differences():
    net, x = mlp([5, 6, 4], nn.Softplus), torch.randn(3, 5)
    model = db.Penalised(net, db.Jacobian("softmax"))
    model(x)[1].backward()
    for p in net.parameters():
        along, step = torch.randn_like(p), 1e-6
        with torch.no_grad():
            p += step * along
            up = model(x)[1]
            p -= 2 * step * along
            down = model(x)[1]
            p += step * along
        slope = (p.grad * along).sum()
        assert abs((up - down) / (2 * step) - slope) <= 1e-7 * max(1, abs(slope))


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    act=st.sampled_from(sorted(ACTIVATIONS)),
    chunk=st.one_of(st.none(), st.integers(1, 7)),
    of=st.sampled_from(["output", "softmax"]),
)
@settings(max_examples=8, deadline=None)
def test_random_networks(sizes, act, chunk, of):
    if of == "softmax" and sizes[-1] < 2:
        sizes = [*sizes[:-1], 2]
    net = mlp(sizes, ACTIVATIONS[act])
    report = db.check(db.Penalised(net, db.Jacobian(of, chunk=chunk)), torch.randn(3, sizes[0]))
    assert report.worst <= 1e-10


def test_batch_norm_in_training_couples_examples():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(8, 4)
    for chunk in (1, 3):
        model = db.Penalised(net, db.Jacobian(chunk=chunk))
        assert db.check(model, x).worst <= 1e-10
    told = db.Penalised(net, db.Jacobian()).explain(x).as_dict()
    assert "couple" in told["plan"]["excluded"]["columns"]
    net.eval()  # now example by example
    assert "columns" in db.Penalised(net, db.Jacobian()).explain(x).as_dict()["plan"]["candidates"]


@pytest.mark.parametrize("options", [{}, {"memory": 400_000}, {"plan": "rows"}, {"chunk": 3}])
def test_explain_prices_nothing_twice(monkeypatch, options):
    """Choice, chunk and explanation share what was run on fake tensors."""
    run, ran = planner._run, []

    def recorded(program, size):
        ran.append((program.candidate.name, size))
        return run(program, size)

    monkeypatch.setattr(planner, "_run", recorded)
    net, x = mlp([3, 16, 40]), torch.randn(9, 3)
    model = db.Penalised(net, db.Jacobian(**options))
    told = model.explain(x).as_dict()["plan"]
    model(x)
    assert model.explain(x).as_dict()["plan"] == told
    assert len(ran) == len(set(ran))
    assert {name for name, _ in ran} == set(told["candidates"])
    sizes = {size for name, size in ran if name == told["chosen"]}
    assert min(told["chunk"], told["seeds"]) in sizes


def test_debugging_does_not_look_at_prices():
    """Candidates are priced on tensors without numbers, where no NaN can be looked for."""
    net, x = mlp([3, 16, 40]), torch.randn(9, 3)
    penalty = db.Penalised(net, db.Jacobian())(x)[1]
    torch.testing.assert_close(db.Penalised(net, db.Jacobian(), debug=True)(x)[1], penalty)
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(db.NonFiniteError, match="forward sweep"):
        db.Penalised(net, db.Jacobian(), debug=True)(x)


def test_reductions_no_grad_and_accumulate():
    net, x = mlp([6, 5, 4]), torch.randn(3, 6)
    values = db.Penalised(net, db.Jacobian(reduction="none"))(x)[1]
    assert values.shape == (3,)
    weights = torch.tensor([0.5, 2.0, -1.0])
    (values * weights).sum().backward()
    found = grads(net)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda e: net(e)))(x)
    expected = (jacobians.square().flatten(1).sum(1) * weights).sum()
    want = torch.autograd.grad(expected, net.parameters(), allow_unused=True)
    for got, g in zip(found, filled(net, want), strict=True):
        torch.testing.assert_close(got, g, rtol=1e-10, atol=1e-12)
    model = db.Penalised(net, db.Jacobian())
    with torch.no_grad(), db.count_operations() as ops:
        value = model(x)[1]
    assert not value.requires_grad and ops.weight_adjoint == 0
    torch.testing.assert_close(value, values.detach().mean(), rtol=1e-12, atol=0)
    y = torch.tensor([0, 1, 2])
    net.zero_grad()
    model.accumulate(x, y, loss="cross_entropy", weight=0.3)
    one_shot = grads(net)
    net.zero_grad()
    out, penalty_again = model(x)
    (F.cross_entropy(out, y) + 0.3 * penalty_again).backward()
    for a, b in zip(one_shot, grads(net), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_retain_graph_and_several_backwards():
    net, x = mlp([6, 5, 4]), torch.randn(3, 6)
    for after in (None, 0):
        net.zero_grad()
        penalty = db.Penalised(net, db.Jacobian(), flatten_after=after)(x)[1]
        penalty.backward(retain_graph=True)
        once = grads(net)
        penalty.backward()
        for a, b in zip(once, grads(net), strict=True):
            torch.testing.assert_close(2 * a, b, rtol=1e-12, atol=1e-14)
        with pytest.raises(db.StaleGraphError):
            penalty.backward()


def test_gradient_with_respect_to_the_input_and_frozen_weights():
    net, x = mlp([6, 5, 4]), torch.randn(3, 6, requires_grad=True)
    for p in net[0].parameters():
        p.requires_grad_(False)
    for plan in ("rows", "columns"):
        assert db.check(db.Penalised(net, db.Jacobian(plan=plan)), x).worst <= 1e-10
    penalty = db.Penalised(net, db.Jacobian())(x)[1]
    assert torch.autograd.grad(penalty, x)[0].norm() > 0 and net[0].weight.grad is None


def test_spatial_outputs_by_entries():
    net, x = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)
    chosen = db.Jacobian(entries=[(0, 1, 1), (2, 0, 2), 26])
    assert db.check(db.Penalised(net, chosen), x).worst <= 1e-10
    whole = db.Penalised(net, db.Jacobian(entries="all"))(x)[1]
    each = db.Penalised(net, db.Jacobian(entries=list(range(27))))(x)[1]
    torch.testing.assert_close(whole, each)


def test_several_inputs_and_a_weighted_space():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

        def forward(self, x, z):
            return torch.tanh(self.a(x)) * self.b(z)

    args = torch.randn(6, 3), torch.randn(6, 5)
    assert db.check(db.Penalised(Two(), db.Jacobian(), wrt=(0, 1)), *args).worst <= 1e-10
    space = db.spaces.Weighted(torch.rand(6) + 0.5)
    model = db.Penalised(mlp([6, 4, 3]), db.Jacobian(space=space))
    assert db.check(model, torch.randn(2, 6)).worst <= 1e-10


# ------------------------------------------------------------------------- counts, FLOPs, memory


@pytest.mark.parametrize("act", ["relu", "tanh"])
@pytest.mark.parametrize("sizes", [[6, 7, 7, 7, 5], [30, 7, 5], [9, 8, 8, 2]])
def test_operation_counts_of_the_theory(sizes, act):
    layers, classes = len(sizes) - 1, sizes[-1]
    net, x = mlp(sizes, ACTIVATIONS[act]), torch.randn(4, sizes[0])
    y = torch.randint(classes, (4,))
    for of, seeds in (("output", classes), ("softmax", classes - 1)):
        for chunk, after in ((None, None), (1, None), (3, None), (None, 0), (3, 0)):
            penalty = db.Jacobian(of, chunk=chunk, plan="rows")
            model = db.Penalised(net, penalty, flatten_after=after)
            with db.count_operations() as ops:
                out, value = model(x)
                (F.cross_entropy(out, y) + value).backward()
            last = 1 if of == "output" else 0  # whose rows are read
            assert ops.products == 2 * seeds * (layers - last) + 2 * layers - 1
            assert ops.weight_adjoint == seeds * layers + layers


def test_two_classes_take_one_seed():
    told = db.Penalised(mlp([9, 8, 2]), db.Jacobian("softmax")).explain(torch.randn(4, 9))
    assert told.as_dict()["plan"]["seeds"] == 1


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in NETS),
        *((name, {"chunk": 2}) for name in ("narrow", "conv")),
        *((name, {"of": "softmax"}) for name in ("wide", "conv")),
        *((name, {"plan": "columns"}) for name in ("autoencoder", "conv")),
    ],
)
def test_predicted_flops_are_executed_flops(name, options):
    make, shape = NETS[name]
    net, x = make(nn.Tanh), torch.randn(shape)
    model = db.Penalised(net, db.Jacobian(**options))
    told = model.explain(x).as_dict()
    for call in range(4):  # node by node, then flat
        with FlopCounterMode(display=False) as counter, db.count_operations() as ops:
            out, penalty = model(x)
            (out.sum() + penalty).backward()
        if call == 2:  # flattening runs everything once more, on fake tensors
            continue
        assert counter.get_total_flops() == told["flops"]
        assert told["total"] == {"forward": ops.forward, "transpose": ops.transpose,
                                 "weight_adjoint": ops.weight_adjoint}  # fmt: skip


def peak_of_a_step(model: db.Penalised, x: Tensor) -> int:
    with Meter([*model.parameters(), x]) as meter:
        out, penalty = model(x)
        torch.autograd.backward([out, penalty], [torch.ones_like(out), torch.ones_like(penalty)])
    model.zero_grad(set_to_none=True)
    return meter.peak


@pytest.mark.parametrize("name", NETS)
def test_predicted_memory_is_taken(name):
    make, shape = NETS[name]
    net, x = make(nn.Tanh), torch.randn(64, *shape[1:])
    for chunk in (1, 3, None):
        model = db.Penalised(net, db.Jacobian(chunk=chunk, plan="rows"), flatten_after=None)
        told = model.explain(x).as_dict()["peak_bytes"]
        assert abs(peak_of_a_step(model, x) / told - 1) <= 0.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [db.Jacobian(), db.Jacobian(chunk=1), db.SpectralNorm(2)])
@pytest.mark.parametrize("sizes", [[60, 40, 6, 40, 60], [90, 120]], ids=["auto-encoder", "encoder"])
def test_predicted_memory_is_that_of_flat_sweeps(sizes, penalty, dtype):
    net, x = mlp(sizes).to(dtype), torch.randn(8, sizes[0], dtype=dtype)
    model = db.Penalised(net, penalty, flatten_after=0)
    told = model.explain(x).as_dict()["peak_bytes"]
    peak_of_a_step(model, x)  # flattens
    assert abs(told / peak_of_a_step(model, x) - 1) <= 0.03


def test_memory_does_not_grow_with_the_number_of_outputs():
    """At a fixed chunk, beyond what is C-sized itself: the output, the gradient handed to it, and
    the last layer's source before and after a chunk is added."""
    peaks, batch = {}, 16
    for classes in (2, 20, 200):
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
        ).float()  # fmt: skip
        model = db.Penalised(net, db.Jacobian(chunk=1, plan="rows"), flatten_after=None)
        x = torch.randn(batch, 1, 14, 14, dtype=torch.float32)
        peaks[classes] = peak_of_a_step(model, x) - 4 * classes * (batch + 2 * 8)
    assert max(peaks.values()) <= 1.05 * min(peaks.values()), peaks


def test_the_cheapest_plan_is_chosen():
    def chosen(net, x, **options):
        return db.Penalised(net, db.Jacobian(**options)).explain(x).as_dict()["plan"]["chosen"]

    assert chosen(mlp([64, 32, 10]), torch.randn(8, 64)) == "rows"
    assert chosen(mlp([3, 32, 50]), torch.randn(8, 3)) == "columns"
    assert chosen(mlp([64, 32, 4, 32, 64]), torch.randn(8, 64)) == "waist"
    told = db.Penalised(mlp([64, 16, 10]), db.Jacobian()).explain(torch.randn(99, 64)).as_dict()
    assert any("Gram" in name for name in told["plan"]["shortcuts"])


def test_the_gram_matrix_saves_flops():
    net, x = mlp([400, 20, 10]), torch.randn(50, 400)
    told = db.Penalised(net, db.Jacobian()).explain(x).as_dict()
    naive = 2 * 50 * 400 * 20 * 3 * 10  # Kᵀ, K and K□ of the first layer for ten seeds
    assert told["flops"] < naive / 5


def test_chunk_follows_the_memory_budget():
    net, x = mlp([32, 128, 128, 40]), torch.randn(64, 32)
    one = db.Penalised(net, db.Jacobian(chunk=1)).explain(x).as_dict()["peak_bytes"]
    all_ = db.Penalised(net, db.Jacobian(chunk=40)).explain(x).as_dict()["peak_bytes"]
    budget = (one + all_) // 2
    told = db.Penalised(net, db.Jacobian(memory=budget, plan="rows")).explain(x).as_dict()
    assert 1 < told["plan"]["chunk"] < 40 and told["peak_bytes"] <= budget
    with pytest.raises(db.InputError, match="too small for even one seed"):
        db.Penalised(net, db.Jacobian(memory=1000, plan="rows"))(x)


def test_chunk_stays_within_the_caches_of_a_cpu():
    """Of one value under all seeds of a chunk at most 3.9 MB; compiled, all seeds are one graph."""
    net, x = nn.Sequential(nn.Linear(4, 16384), nn.Linear(16384, 10)), torch.randn(10, 4)
    for options, chunk in (({}, 2), ({"chunk": 5}, 5)):
        model = db.Penalised(net, db.Jacobian(plan="rows", **options))
        assert model.explain(x).as_dict()["plan"]["chunk"] == chunk
    compiled = db.Penalised(net, db.Jacobian(plan="rows"), compile=True)
    assert compiled.explain(x).as_dict()["plan"]["chunk"] == 10


def test_out_of_memory_halves_the_chunk(monkeypatch):
    net, x = mlp([6, 5, 8]), torch.randn(3, 6)
    whole = db.Penalised(net, db.Jacobian(plan="rows"))(x)[1]
    part = jacobian_program.JacobianProgram._part

    def small(self, swept, bank, weight, sources):
        if bank.shape[0] > 2:
            raise torch.OutOfMemoryError("no room")
        return part(self, swept, bank, weight, sources)

    monkeypatch.setattr(jacobian_program.JacobianProgram, "_part", small)
    model = db.Penalised(net, db.Jacobian(plan="rows"))
    with pytest.warns(db.MemoryWarning, match="4") as caught:
        value = model(x)[1]
        again = model(x)[1]
    assert len(caught) == 1
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(again, whole)


# ------------------------------------------------------------------------------------ estimators


def test_directions_are_orthonormal():
    v = directions(4, 7, 3, "cpu").double()
    gram = torch.einsum("ibd,jbd->bij", v, v)
    torch.testing.assert_close(gram, torch.eye(3).expand(4, 3, 3), rtol=0, atol=1e-12)
    h = helmert(6, torch.float64, "cpu")
    torch.testing.assert_close(h @ h.T, torch.eye(5))
    torch.testing.assert_close(h.sum(1), torch.zeros(5))


def test_all_projections_are_exact():
    net, x = mlp([6, 5, 4]), torch.randn(3, 6)
    for of, n in (("output", 4), ("softmax", 3)):
        exact = db.Penalised(net, db.Jacobian(of))(x)[1]
        torch.testing.assert_close(db.Penalised(net, db.Jacobian(of, projections=n))(x)[1], exact)


def test_one_projection_has_the_variance_of_the_theory():
    """Var = 2C/(C+2)·tr((JJᵀ)²) − 2/(C+2)·‖J‖⁴, by 40 000 draws of one fixed Jacobian."""
    net = nn.Linear(3, 5, bias=False)
    x = torch.zeros(40_000, 3)
    draws = db.Penalised(net, db.Jacobian(projections=1, reduction="none"))(x)[1].detach()
    j = net.weight.detach()
    c, square = 5, j.square().sum()
    variance = 2 * c / (c + 2) * (j @ j.T).square().sum() - 2 / (c + 2) * square**2
    error = math.sqrt(variance / len(draws))
    assert abs(draws.mean() - square) < 5 * error
    fourth = (draws - square).pow(4).mean()
    spread = math.sqrt((fourth - variance**2) / len(draws))
    assert abs(draws.var() - variance) < 5 * spread


def test_orthogonal_projections_are_unbiased_and_vary_less():
    net = nn.Linear(3, 4, bias=False)
    x = torch.zeros(20_000, 3)
    square = net.weight.detach().square().sum()
    spread = []
    for n in (1, 2, 3):
        draws = db.Penalised(net, db.Jacobian(projections=n, reduction="none"))(x)[1].detach()
        assert abs(draws.mean() - square) < 5 * draws.std() / math.sqrt(len(draws))
        spread.append(draws.var() * n)  # below 1/n: orthogonal directions repeat nothing
    assert spread[0] > spread[1] > spread[2]


# --------------------------------------------------------------------------------- operator norm


def test_spectral_norm_converges_to_the_svd():
    net, x = mlp([6, 7, 5]), torch.randn(3, 6)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda e: net(e)))(x)
    sigma = torch.linalg.matrix_norm(jacobians, 2)
    model = db.Penalised(net, db.SpectralNorm(iterations=400, reduction="none"))
    torch.testing.assert_close(model(x)[1], sigma.detach(), rtol=1e-8, atol=0)
    model(x)[1].sum().backward()
    want = torch.autograd.grad(sigma.sum(), net.parameters(), allow_unused=True)
    for got, g in zip(grads(net), filled(net, want), strict=True):
        torch.testing.assert_close(got, g, rtol=1e-6, atol=1e-9)


def from_one_draw(model, x):
    """The penalty, where the power iteration starts from the same draw unless one is carried on."""
    torch.manual_seed(3)
    return model(x)[1].detach()


def test_warm_start_is_kept_across_steps():
    net, x = mlp([6, 7, 5]), torch.randn(3, 6)
    sigma = torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(lambda e: net(e)))(x), 2)
    warm = db.Penalised(net, db.SpectralNorm(1))
    cold = db.Penalised(net, db.SpectralNorm(1, warm_start=False))
    for _ in range(300):
        last = warm(x)[1]
    torch.testing.assert_close(last, sigma.mean(), rtol=1e-6, atol=0)
    first = from_one_draw(cold, x)
    assert abs(first - sigma.mean()) > 1e-4 * sigma.mean()
    other = db.Penalised(net, db.SpectralNorm(1))  # nothing is shared between models
    torch.testing.assert_close(from_one_draw(other, x), first, rtol=1e-12, atol=0)


class Unread(nn.Module):
    """The output depends on x through values alone, or on z not at all."""

    def __init__(self, stopped: bool) -> None:
        super().__init__()
        self.layer, self.stopped = nn.Linear(6, 5).double(), stopped

    def forward(self, x, z):
        return self.layer(x.detach() if self.stopped else x.sin())


@pytest.mark.parametrize("penalty", [db.Jacobian(), db.Jacobian(chunk=2), db.SpectralNorm(2)])
@pytest.mark.parametrize("stopped", [True, False])
def test_inputs_that_the_output_does_not_depend_on(penalty, stopped):
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    model = db.Penalised(Unread(stopped), penalty, wrt=(0, 1), allow_unused=True)
    assert db.check(model, x, z).worst <= 1e-10
    for _ in range(4):  # flattened after two
        out, found = model(x, z)
        (out.sum() + found).backward()
        assert (found == 0) == stopped


@pytest.mark.parametrize("spoil", [0.0, math.nan, math.inf])
def test_warm_start_outlives_a_jacobian_without_direction(spoil):
    net, x = mlp([6, 7, 5]), torch.randn(3, 6)
    layer = next(m for m in net.modules() if isinstance(m, nn.Linear))
    model = db.Penalised(net, db.SpectralNorm(4, reduction="none"))
    weight = layer.weight.detach().clone()
    for _ in range(3):
        nn.init.constant_(layer.weight, spoil)
        model(x)
    layer.weight.data.copy_(weight)
    for _ in range(100):
        last = model(x)[1]
    sigma = torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(lambda e: net(e)))(x), 2)
    torch.testing.assert_close(last, sigma, rtol=1e-6, atol=0)


class Branching(nn.Module):
    """Its control flow depends on values: it runs on autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).double()

    def forward(self, x):
        return self.layer(x) if x.sum() < 1e9 else x[:, :5]


def test_warm_start_of_a_net_that_cannot_be_captured():
    net, x = Branching(), torch.randn(3, 6)
    sigma = torch.linalg.matrix_norm(net.layer.weight, 2)
    model = db.Penalised(net, db.SpectralNorm(1))
    with pytest.warns(db.CaptureWarning), torch.no_grad():
        first = from_one_draw(model, x)
    # a call without gradients left the vector as it was, the next one moves it
    torch.testing.assert_close(from_one_draw(model, x), first, rtol=1e-12, atol=0)
    assert abs(from_one_draw(model, x) - first) > 1e-4 * first
    for _ in range(300):
        last = model(x)[1]
    torch.testing.assert_close(last, sigma, rtol=1e-6, atol=0)
    cold = db.Penalised(net, db.SpectralNorm(1, warm_start=False))
    with pytest.warns(db.CaptureWarning):
        cold(x)
    torch.testing.assert_close(from_one_draw(cold, x), first, rtol=1e-12, atol=0)


class Apart(nn.Module):
    """Positions do not mix, and those with x ≤ 0 are dead: J is diagonal, of sin x⁺."""

    def forward(self, x):
        return x.relu().cos()


def test_warm_start_follows_the_batch_between_subspaces_that_do_not_mix():
    model = db.Penalised(Apart(), db.SpectralNorm(20, reduction="none"))
    first, second = torch.tensor([[1.5, 0.5, -1.0]]), torch.tensor([[0.2, 0.5, 1.2]])
    for x in (first, second, -first, second, first):
        for _ in range(20):
            found = model(x.detach().requires_grad_())[1]  # under no_grad nothing is carried on
        torch.testing.assert_close(found, x.relu().sin().amax(1))


@pytest.mark.parametrize("iterations", [1, 4])
def test_spectral_norm_against_autograd(iterations):
    for net, x in ((mlp([6, 7, 5]), torch.randn(3, 6)), (conv(), torch.randn(2, 2, 8, 8))):
        for norm in (None, db.SquaredNorm()):
            model = db.Penalised(net, db.SpectralNorm(iterations, norm=norm))
            assert db.check(model, x).worst <= 1e-10
    model = db.Penalised(mlp([6, 7, 5]), db.SpectralNorm(iterations, reduction="none"))
    assert db.check(model, torch.randn(3, 6)).worst <= 1e-10


def test_spectral_norm_counts():
    net, x = mlp([6, 7, 5]), torch.randn(3, 6)
    with db.count_operations() as ops:
        out, sigma = db.Penalised(net, db.SpectralNorm(3))(x)
        (out.sum() + sigma).backward()
    told = db.Penalised(net, db.SpectralNorm(3)).explain(x).total
    assert told == {"forward": ops.forward, "transpose": ops.transpose,
                    "weight_adjoint": ops.weight_adjoint}  # fmt: skip


# -------------------------------------------------------------------------- compiled and 16 bits


def test_compiled():
    net, x = mlp([6, 5, 4]), torch.randn(3, 6)
    expected = truth(net, x, "softmax", True)
    close(ours(net, x, db.Jacobian("softmax", chunk=2), True, compile=True), expected)


def test_autocast_and_bfloat16():
    net, x = mlp([6, 16, 16, 4], nn.GELU).float(), torch.randn(8, 6, dtype=torch.float32)
    exact = db.Penalised(net, db.Jacobian())(x)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = db.Penalised(net, db.Jacobian())(x)[1]
    assert abs(value - exact) < 0.05 * exact
    low = db.Penalised(net.bfloat16(), db.Jacobian())(x.bfloat16())[1]
    assert abs(low.float() - exact) < 0.05 * exact


def test_weights_are_not_rounded_to_16_bits():
    """A penalty weight that bfloat16 rounds by 0.25 %: gradients do not show it."""
    net, x = mlp([6, 16, 4]).bfloat16(), torch.randn(83, 6).bfloat16()
    factor = 0.0122985
    assert abs(float(torch.tensor(factor).bfloat16()) / factor - 1) > 2e-3
    found = []
    for weight in (1.0, factor):
        net.zero_grad()
        (weight * db.Penalised(net, db.Jacobian())(x)[1]).backward()
        found.append(torch.cat([g.flatten().double() for g in grads(net)]))
    whole, scaled = found
    assert abs(float((scaled * whole).sum() / whole.square().sum()) / factor - 1) < 1e-3


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "options, words",
    [
        ({"projections": 0}, "at least 1"),
        ({"chunk": 0}, "at least 1"),
        ({"chunk": 1.5}, "int"),
        ({"of": "logits"}, "softmax"),
        ({"plan": "sideways"}, "rows"),
        ({"plan": "columns", "projections": 1}, "exact"),
        ({"of": "softmax", "entries": [0]}, "entries"),
        ({"reduction": "median"}, "reduction"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(db.InputError, match=words):
        db.Jacobian(**options)


def test_bad_outputs():
    image, x = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)
    with pytest.raises(db.InputError, match="27 entries per example"):
        db.Penalised(image, db.Jacobian())(x)
    with pytest.raises(db.InputError, match="out of range"):
        db.Penalised(image, db.Jacobian(entries=[(0, 0, 9)]))(x)
    for short in ((1,), (0, 0)):
        with pytest.raises(db.InputError, match="does not index"):
            db.Penalised(image, db.Jacobian(entries=[short]))(x)
    with pytest.raises(db.InputError, match="exceeds the 27 directions"):
        db.Penalised(image, db.Jacobian(projections=28))(x)
    many = nn.Sequential(nn.Unflatten(1, (1, 96, 96)), nn.AvgPool2d(1), nn.Flatten())
    with pytest.raises(db.InputError, match=r"18432 sweeps .* projections"):
        db.Penalised(many, db.Jacobian(plan="rows"))(torch.randn(1, 9216))
    with pytest.raises(db.InputError, match="iterations"):
        db.SpectralNorm(-1)


def test_softmax_of_a_softmax_is_warned_of():
    net = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    with pytest.warns(db.PenaltyWarning, match="already ends in softmax"):
        db.Penalised(net, db.Jacobian("softmax"))(torch.randn(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        db.Penalised(net, db.Jacobian("output"))(torch.randn(2, 3))


# ---------------------------------------------------------------- a whole step as one graph


def step_gradients(model, x, y, **options):
    model.zero_grad(set_to_none=True)
    result = model.accumulate(x, y, loss="cross_entropy", weight=0.3, **options)[1:]
    return [*result, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"of": "softmax"}, {"chunk": 2}, {"plan": "columns"}])
def test_accumulate_takes_all_phases_together(options, monkeypatch):
    made, boxed = [], straight_line.boxed
    monkeypatch.setattr(straight_line, "boxed", lambda graph: made.append(graph) or boxed(graph))
    net, x, y = mlp([6, 8, 7, 4]), torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    slow = db.Penalised(net, db.Jacobian(**options), flatten_after=None)
    fast = db.Penalised(net, db.Jacobian(**options), flatten_after=0)
    expected = step_gradients(slow, x, y)
    for _ in range(2):
        for a, b in zip(step_gradients(fast, x, y), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (len(made) == 1) is ("chunk" not in options)


def test_accumulate_of_projections_draws_anew():
    net, x, y = mlp([6, 8, 7, 4]), torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    found = {}
    for after in (None, 0):
        model = db.Penalised(net, db.Jacobian(projections=2), flatten_after=after)
        torch.manual_seed(3)
        found[after] = [step_gradients(model, x, y) for _ in range(3)]
    for a, b in zip(found[None], found[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert found[0][0][1] != found[0][1][1]


def test_a_whole_step_that_does_not_fit_goes_on_in_chunks(monkeypatch):
    net, x, y = mlp([6, 8, 7, 4]), torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    expected = step_gradients(db.Penalised(net, db.Jacobian(), flatten_after=None), x, y)
    model = db.Penalised(net, db.Jacobian(), flatten_after=0)

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("doubleback.run.program.FlatProgram.step", no_room)
    with pytest.warns(db.MemoryWarning, match="going on with 2"):
        found = step_gradients(model, x, y)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_compiled_accumulate():
    net, x, y = mlp([6, 8, 7, 4]), torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    expected = step_gradients(db.Penalised(net, db.Jacobian(), flatten_after=None), x, y)
    model = db.Penalised(net, db.Jacobian(), compile=True)
    for a, b in zip(step_gradients(model, x, y), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("penalty", [db.SpectralNorm(2), db.Jacobian()], ids=repr)
def test_a_rectifier_between_dense_layers(penalty):
    """Its rule has forms that keep other things; every sweep takes the one of the forward sweep."""
    net = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))
    for after in (None, 0):
        model = db.Penalised(net, penalty, flatten_after=after, strict=True)
        model(torch.randn(4, 9))[1].backward()
        assert all(p.grad.isfinite().all() for p in (net[0].weight, net[2].weight))
