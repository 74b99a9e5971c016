"""Penalties over fixed directions: log |det(I + J)| against the exact one, Jacobians matched."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import doubleback as db


def contraction(size: int = 4, scale: float = 0.7) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(size, 12), nn.Tanh(), nn.Linear(12, size)).double()
    for p in net.parameters():
        p.data *= scale
    return net


def convolution() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Softplus(), nn.Conv2d(3, 2, 1)).double()
    for p in net.parameters():
        p.data *= 0.5
    return net


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """∂out/∂x per example, differentiable in the parameters and in x."""
    parameters = dict(net.named_parameters())

    def one(t: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (t[None],))[0]

    return torch.func.vmap(torch.func.jacrev(one))(x)


def log_det(net: nn.Module, x: Tensor) -> Tensor:
    size = x[0].numel()
    full = torch.eye(size).double() + jacobian(net, x).reshape(-1, size, size)
    return torch.linalg.slogdet(full).logabsdet


def gradients(value: Tensor, net: nn.Module, x: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, [x, *net.parameters()], allow_unused=True)
    leaves = [x, *net.parameters()]
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    scale = max(float(t.norm()) for t in theirs)
    return max(float((a - b).norm()) for a, b in zip(ours, theirs, strict=True)) / scale


# ------------------------------------------------------------------------------ log-determinant


@pytest.mark.parametrize(
    "make, shape, chunk", [(contraction, (6, 4), None), (convolution, (3, 2, 3, 3), 7)]
)
def test_a_complete_series_is_the_log_determinant(make, shape, chunk):
    """Exact traces and enough terms: value and gradient to 1e-10 of slogdet's, in every way."""
    net = make()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    each = torch.linspace(0.5, 1.5, shape[0], dtype=torch.float64)
    exact = log_det(net, x)
    wanted = gradients((each * exact).sum(), net, x)
    assert exact.abs().min() > 1e-3
    penalty = db.LogDet(None, terms=60, roulette=0, reduction="none", chunk=chunk)
    model = db.Penalised(net, penalty, strict=True)
    for _ in range(4):  # node by node, then flat
        _, value = model(x)
        assert (value - exact).abs().max() <= 1e-10 * exact.abs().max()
        assert error(gradients((each * value).sum(), net, x), wanted) <= 1e-10


def test_accumulate_and_reductions():
    net, x = contraction(), torch.randn(6, 4, dtype=torch.float64)
    exact = log_det(net, x)
    for reduction, value in (("mean", exact.mean()), ("sum", exact.sum())):
        wanted = torch.autograd.grad(0.3 * value, list(net.parameters()), retain_graph=True,
                                     allow_unused=True)  # fmt: skip
        penalty = db.LogDet(None, terms=60, roulette=0, reduction=reduction)
        model = db.Penalised(net, penalty)
        for _ in range(4):
            net.zero_grad()
            _, _, told = model.accumulate(x, weight=0.3)
            assert torch.allclose(told, value.detach(), rtol=1e-10)
            for p, g in zip(net.parameters(), wanted, strict=True):
                assert (p.grad is None) == (g is None)  # the last bias
                assert g is None or torch.allclose(p.grad, g, atol=1e-12)


def test_the_remainder_is_below_its_bound():
    net, x = contraction(), torch.randn(6, 4, dtype=torch.float64)
    exact = log_det(net, x)
    slope = math.prod(torch.linalg.matrix_norm(net[i].weight, 2).item() for i in (0, 2))
    assert 0.3 < slope < 1
    before = torch.inf
    for terms in (1, 2, 4, 8):
        penalty = db.LogDet(None, terms=terms, roulette=0, reduction="none")
        off = (db.Penalised(net, penalty)(x)[1] - exact).abs().max().item()
        assert off <= 4 * slope ** (terms + 1) / ((terms + 1) * (1 - slope))
        assert off < before
        before = off
    assert before > 1e-12  # eight terms do not end it


def test_the_roulette_is_unbiased():
    """Mean over many calls, each with its own signs and its own number of terms, of value and
    gradient: within four standard errors of the exact ones, from which a series that is cut off
    after as many terms lies farther away."""
    net, x = contraction(3), torch.randn(1, 3, dtype=torch.float64).expand(64, 3).contiguous()
    exact = log_det(net, x[:1]).mean()
    weight = net[0].weight
    wanted = torch.cat([exact[None], torch.autograd.grad(exact, weight)[0].flatten()]).detach()

    def trials(model: db.Penalised, count: int) -> Tensor:
        found = []
        for _ in range(count):
            _, value = model(x)
            (g,) = torch.autograd.grad(value, weight)
            found.append(torch.cat([value.detach()[None], g.flatten()]))
        return torch.stack(found)

    generator = torch.Generator().manual_seed(0)
    penalty = db.LogDet(1, terms=1, roulette=0.6, generator=generator)
    drawn = trials(db.Penalised(net, penalty), 400)
    deviation = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - wanted).abs() < 4 * deviation).all()
    cut = trials(db.Penalised(net, db.LogDet(None, terms=1, roulette=0)), 1)[0]
    assert (cut - wanted).abs()[0] > 8 * deviation[0]


def test_the_number_of_terms_has_its_distribution():
    penalty = db.LogDet(terms=3, roulette=0.7, generator=torch.Generator().manual_seed(1))
    drawn = torch.tensor([penalty.drawn_rounds() for _ in range(4000)]).double()
    assert drawn.min() == 3
    for more in range(1, 5):
        share = float((drawn >= 3 + more).double().mean())
        assert abs(share - 0.7**more) < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"projections": 3, "reduction": "sum", "chunk": 2},
        {"projections": None, "reduction": "none"},
    ],
)
def test_check_log_det(options):
    model = db.Penalised(contraction(), db.LogDet(**{"terms": 3, **options}))
    assert db.check(model, torch.randn(5, 4)).worst < 1e-10


def test_a_generator_of_ones_own():
    """The same state gives the same numbers, PyTorch's own generator does not move, and a copy of
    the model goes on from where the model is."""
    generator = torch.Generator().manual_seed(3)
    model = db.Penalised(contraction(), db.LogDet(terms=2, generator=generator))
    x = torch.randn(5, 4, dtype=torch.float64)
    state = generator.get_state()
    before = torch.get_rng_state()
    found = [model(x)[1].item() for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), before) and len(set(found)) > 1
    generator.set_state(state)
    assert [model(x)[1].item() for _ in range(2)] == found[:2]
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    following = model(x)[1].item()
    assert [twin(x)[1].item() for twin in twins] == [following, following]


def test_without_sweeps_and_without_gradients():
    """On autograd, under no_grad, and with a batch without examples."""
    net, x = contraction(), torch.randn(5, 4, dtype=torch.float64)
    penalty = db.LogDet(None, terms=60, roulette=0)
    exact = log_det(net, x).mean()
    with torch.no_grad():
        for _ in range(4):
            assert torch.allclose(db.Penalised(net, penalty)(x)[1], exact, rtol=1e-10)
    assert torch.allclose(db.Penalised(net, penalty, sweeps=False)(x)[1], exact, rtol=1e-10)
    assert db.Penalised(net, db.LogDet(reduction="none"))(x[:0])[1].shape == (0,)


def test_other_batch_sizes_and_dtypes():
    net = contraction().float()
    model = db.Penalised(net, db.LogDet(None, terms=40, roulette=0, reduction="none"))
    for batch in (3, 5, 2, 5, 5, 5):
        x = torch.randn(batch, 4)
        _, value = model(x)
        exact = log_det(copy.deepcopy(net).double(), x.double())
        assert torch.allclose(value.double(), exact, atol=1e-6)
        value.sum().backward()
    half = db.Penalised(net.bfloat16(), db.LogDet(None, terms=4, roulette=0))
    assert half(torch.randn(4, 4).bfloat16())[1].dtype == torch.float32


def test_explain_says_how_many_terms():
    model = db.Penalised(contraction(), db.LogDet(terms=3, roulette=0.75))
    told = model.explain(torch.randn(5, 4, dtype=torch.float64))
    assert told.sweeps["1 direction, 6 terms"]["transpose"] == 12
    assert told.flops and "LogDet(projections=1, terms=3, roulette=0.75" in str(told)
    whole = db.Penalised(contraction(), db.LogDet(None, terms=3, roulette=0))
    told = whole.explain(torch.randn(5, 4, dtype=torch.float64))
    assert told.sweeps["4 directions, 3 terms"]["transpose"] == 24
    assert told.sweeps["backward"]["transpose"] == 8


def test_examples_that_depend_on_one_another_are_warned_of():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    for p in net.parameters():
        p.data *= 0.5
    x = torch.randn(5, 3).double()
    with pytest.warns(db.PenaltyWarning, match="batch_norm.* may couple the examples"):
        db.Penalised(net, db.LogDet())(x)
    db.Penalised(net.eval(), db.LogDet())(x)


def test_a_network_that_does_not_contract_is_warned_of():
    net = contraction(scale=3.0)
    with pytest.warns(db.PenaltyWarning, match="does not contract"):
        db.Penalised(net, db.LogDet(terms=4, roulette=0))(torch.randn(5, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"terms": 0}, "terms must be an int"),
        ({"terms": True}, "terms must be an int"),
        ({"roulette": 1.0}, "probability in"),
        ({"roulette": -0.1}, "probability in"),
        ({"projections": 0}, "projections must be an int, at least 1"),
        ({"projections": 1.5}, "projections must be an int"),
        ({"chunk": 0}, "chunk must be an int, at least 1"),
        ({"generator": 3}, "generator must be a torch.Generator"),
        ({"reduction": "max"}, "reduction must be one of"),
    ],
)
def test_log_det_refuses(wrong, told):
    with pytest.raises(db.InputError, match=told):
        db.LogDet(**wrong)


def test_log_det_refuses_other_shapes_and_graphs_that_would_bias_it():
    with pytest.raises(db.InputError, match="square Jacobian"):
        db.Penalised(nn.Linear(4, 3), db.LogDet())(torch.randn(2, 4))
    with pytest.raises(db.InputError, match="which biases LogDet; use roulette=0"):
        db.Penalised(contraction(), db.LogDet(), cuda_graph=True)
    own = db.LogDet(roulette=0, generator=torch.Generator())
    with pytest.raises(db.InputError, match="PyTorch's own generator"):
        db.Penalised(contraction(), own, cuda_graph=True)


# --------------------------------------------------------------------------- matching Jacobians


def vector_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("reduction, chunk", [("mean", 2), ("sum", None), ("none", 2)])
def test_jacobian_match_is_the_squared_distance(reduction, chunk):
    """Value and gradients in parameters, x and the target against the written-out Jacobian."""
    net = vector_net()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    each = torch.linspace(0.5, 1.5, 5, dtype=torch.float64) if reduction == "none" else 1.0
    exact = (jacobian(net, x) - target).square().sum((1, 2))
    exact = {"mean": exact.mean(), "sum": exact.sum(), "none": exact}[reduction]
    leaves = [x, target, net[0].weight, net[0].bias, net[2].weight]
    wanted = torch.autograd.grad((each * exact).sum(), leaves)
    model = db.Penalised(net, db.JacobianMatch(reduction=reduction, chunk=chunk), strict=True)
    for _ in range(4):
        _, value = model(x, target)
        assert torch.allclose(value, exact, rtol=1e-11)
        found = torch.autograd.grad((each * value).sum(), leaves)
        assert error(list(found), list(wanted)) <= 1e-10


def test_projections_estimate_it_and_all_of_them_give_it():
    net, x = vector_net(), torch.randn(2, 4, dtype=torch.float64)
    target = torch.randn(2, 3, 4, dtype=torch.float64)
    exact = (jacobian(net, x) - target).square().sum((1, 2)).detach()
    all_of_them = db.Penalised(net, db.JacobianMatch(3, "none"))(x, target)[1]
    assert torch.allclose(all_of_them, exact, rtol=1e-10)
    generator = torch.Generator().manual_seed(0)
    one = db.Penalised(net, db.JacobianMatch(1, "none", generator=generator))
    many = one(x.repeat(4000, 1), target.repeat(4000, 1, 1))[1].reshape(4000, 2)
    assert ((many.mean(0) - exact).abs() < 4 * many.std(0) / math.sqrt(4000)).all()
    assert (many.std(0) > 0.05 * exact).all()


def test_a_teacher_by_its_products_with_directions():
    """A function v ↦ T*v gives what its Jacobian gives, with the same directions."""
    net, teacher = vector_net(), copy.deepcopy(vector_net())
    teacher[2].weight.data.mul_(-1)
    x = torch.randn(5, 4, dtype=torch.float64)
    written = jacobian(teacher, x).detach()
    pull = torch.func.vjp(teacher, x)[1]
    for projections in (None, 2):
        found = []
        for target in (written, lambda v: pull(v)[0]):
            generator = torch.Generator().manual_seed(1)
            model = db.Penalised(net, db.JacobianMatch(projections, generator=generator))
            for _ in range(4):
                _, value = model(x, target)
                value.backward()
            found.append((value.item(), net[0].weight.grad.clone()))
            net.zero_grad()
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
        assert torch.allclose(found[0][1], found[1][1], rtol=1e-10)


@pytest.mark.parametrize("options", [{}, {"projections": 2, "reduction": "none"}])
def test_check_jacobian_match(options):
    target = torch.randn(5, 3, 4, requires_grad=True)
    model = db.Penalised(vector_net(), db.JacobianMatch(**options))
    assert db.check(model, torch.randn(5, 4), target).worst < 1e-10


def test_several_inputs_images_and_spaces():
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a.flatten(1)[:, :2] * b.sin()).square()

    a, b = torch.randn(3, 2, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    targets = (torch.randn(3, 2, 2, 2).double(), torch.randn(3, 2, 2).double())
    model = db.Penalised(Two(), db.JacobianMatch(), wrt=(0, 1))
    rows = torch.func.vmap(
        torch.func.jacrev(lambda p, q: Two()(p[None], q[None])[0], argnums=(0, 1))
    )(a, b)
    exact = sum(((j - t) ** 2).flatten(1).sum(1) for j, t in zip(rows, targets, strict=True))
    assert torch.allclose(model(a, b, targets)[1], exact.mean())
    net = vector_net()
    halved = db.JacobianMatch(space=db.spaces.Weighted(4.0))  # dual norm: a fourth of the square
    x, target = torch.randn(3, 4).double(), torch.randn(3, 3, 4).double()
    whole = db.Penalised(net, db.JacobianMatch())(x, target)[1]
    assert torch.allclose(4 * db.Penalised(net, halved)(x, target)[1], whole)


def test_a_constant_network_has_the_distance_to_zero():
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), 3).double()

    target = torch.randn(5, 3, 4).double()
    model = db.Penalised(Constant(), db.JacobianMatch(), allow_unused=True)
    for sweeps in (None, False):
        model.sweeps = sweeps
        _, value = model(torch.randn(5, 4).double(), target)
        assert torch.allclose(value, target.square().sum() / 5)


def test_jacobian_match_refuses():
    net, x = vector_net(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.JacobianMatch())
    with pytest.raises(db.InputError, match=r"\(5, 3, 4\)\], not \[\(5, 4\)\]"):
        model(x, x)
    with pytest.raises(db.InputError, match="exceeds the 3 directions"):
        db.Penalised(net, db.JacobianMatch(4))(x, torch.randn(5, 3, 4))
    with pytest.raises(db.InputError, match="inner product"):
        db.JacobianMatch(space=db.spaces.Lp(1))
    with pytest.raises(db.InputError, match="JacobianMatch"):
        db.Penalised(net, db.GradientMatch())(x, x)


# ------------------------------------------------------------------------- a critic of patches


def test_the_sum_of_a_patch_critics_outputs():
    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2), nn.Softplus(), nn.Conv2d(4, 1, 3, padding=1)
    ).double()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x)
    for reduction in ("mean", "none"):
        model = db.Penalised(critic, db.OutputGradient("sum", reduction=reduction))
        scores, penalty = model(x)
        exact = slope.square().flatten(1).sum(1)
        assert scores.shape == (3, 1, 3, 3)
        assert torch.allclose(penalty, exact.mean() if reduction == "mean" else exact)
    assert db.check(model, x).worst < 1e-10
    match = db.Penalised(critic, db.GradientMatch("sum"))
    assert match(x, slope.detach())[1] < 1e-25
    with pytest.raises(db.InputError, match=r'OutputGradient\(index="sum"\)'):
        db.Penalised(critic, db.OutputGradient())(x)
    with pytest.raises(db.InputError, match='or "sum"'):
        db.OutputGradient("mean")


def test_landscapes_refuse_directions():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    path = db.landscape.follow(
        net, torch.randn(3, 2).double(), db.landscape.Coordinate("0.weight", (0, 0)), (-1.0, 1.0)
    )
    for penalty in (db.LogDet(None, roulette=0), db.JacobianMatch()):
        with pytest.raises(db.InputError, match="many directions of its own"):
            db.landscape.penalty(path, penalty)
