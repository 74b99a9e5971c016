"""`every` and `fraction`: right on average, for calls and `accumulate` alike."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db

D = torch.float64
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=D)
Y = torch.arange(6) % 3


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def gradients(model, run):
    model.zero_grad()
    run(model)
    return [p.grad.clone() for p in model.parameters()]


def by_call(model):
    out, penalty = model(X, Y)
    (F.cross_entropy(out, Y) + 0.3 * penalty).backward()


def by_accumulate(model):
    model.accumulate(X, Y, weight=0.3)


def mean(runs):
    return [torch.stack(parts).mean(0) for parts in zip(*runs, strict=True)]


def penalty_of(reduction="mean"):
    return db.LossGradient("cross_entropy", reduction=reduction)


@pytest.mark.parametrize("run", [by_call, by_accumulate])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_averages_to_the_whole(run, reduction):
    whole = db.Penalised(network(), penalty_of(reduction))
    thin = db.Penalised(network(), penalty_of(reduction), every=3)
    expected = gradients(whole, run)
    plain = gradients(whole, lambda model: F.cross_entropy(model.net(X), Y).backward())
    found = [gradients(thin, run) for _ in range(6)]
    assert thin.calls == 6
    torch.testing.assert_close(mean(found), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0], found[3], rtol=1e-10, atol=1e-12)
    for one in (1, 2, 4, 5):  # plain steps in between
        torch.testing.assert_close(found[one], plain, rtol=1e-10, atol=1e-12)


class Fixed:
    """Draws all parts of so many rows in turn, in the place of chance."""

    def __init__(self, count):
        self.parts = itertools.cycle(itertools.combinations(range(6), count))

    def __call__(self, batch, generator=None, device=None):
        rows = list(next(self.parts))
        return torch.tensor(rows + [i for i in range(batch) if i not in rows], device=device)


@pytest.mark.parametrize("run", [by_call, by_accumulate])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sweeps", [True, False])
def test_fraction_is_right_in_expectation(run, reduction, sweeps, monkeypatch):
    """All 15 parts of two rows among six, each as likely as any other: their average is the whole
    penalty's gradient to rounding."""
    whole = db.Penalised(network(), penalty_of(reduction), sweeps=sweeps)
    thin = db.Penalised(network(), penalty_of(reduction), sweeps=sweeps, fraction=0.34)
    monkeypatch.setattr(torch, "randperm", Fixed(2))
    found = [gradients(thin, run) for _ in range(15)]
    torch.testing.assert_close(mean(found), gradients(whole, run), rtol=1e-10, atol=1e-12)
    assert max((a - b).abs().max() for a, b in zip(found[0], found[1], strict=True)) > 1e-6


def test_both_together(monkeypatch):
    whole = db.Penalised(network(), penalty_of())
    thin = db.Penalised(network(), penalty_of(), every=2, fraction=0.5)
    monkeypatch.setattr(torch, "randperm", Fixed(3))
    found = [gradients(thin, by_accumulate) for _ in range(40)]
    expected = gradients(whole, by_accumulate)
    torch.testing.assert_close(mean(found), expected, rtol=1e-10, atol=1e-12)


def test_rows_are_drawn_evenly():
    """Each of six rows in a third of the draws, by a generator of one's own."""
    seen, x = torch.zeros(6), torch.eye(6)
    net = nn.Sequential(nn.Linear(6, 1), nn.Softplus())
    own = torch.Generator().manual_seed(2)
    norm = lambda g: g.square().sum(1)  # noqa: E731
    thin = db.Penalised(net, db.OutputGradient(norm=norm), fraction=1 / 3, generator=own)
    before = torch.get_rng_state()
    for _ in range(300):
        rows = x.clone().requires_grad_()
        thin(rows)[1].backward()
        seen += rows.grad.abs().sum(1) > 0
    assert torch.equal(torch.get_rng_state(), before)  # PyTorch's own is left alone
    assert seen.sum() == 600 and (seen - 100).abs().max() < 35  # four deviations


@pytest.mark.parametrize("options", [{"every": 2}, {"fraction": 0.5}])
def test_outputs_and_the_gradient_of_x_are_whole(options):
    net = network()
    thin = db.Penalised(net, db.Jacobian(), **options)
    for _ in range(2):
        x = X.clone().requires_grad_()
        out, penalty = thin(x)
        torch.testing.assert_close(out, net(X), rtol=1e-10, atol=1e-12)
        (out.sum() + 0 * penalty).backward()
        again = X.clone().requires_grad_()
        net(again).sum().backward()
        torch.testing.assert_close(x.grad, again.grad, rtol=1e-10, atol=1e-12)


def test_without_training_every_call_has_its_whole_penalty():
    whole = db.Penalised(network(), penalty_of())
    thin = db.Penalised(network(), penalty_of(), every=5, fraction=0.5)
    expected = whole(X, Y)[1].detach()
    with torch.no_grad():
        assert torch.allclose(thin(X, Y)[1], expected) and torch.allclose(thin(X, Y)[1], expected)
    thin.eval()
    assert torch.allclose(thin(X, Y)[1], expected) and thin.calls == 0
    thin.train()
    assert not torch.allclose(thin(X, Y)[1], expected) and thin.calls == 1
    assert thin(X, Y)[1].item() == 0


def test_values_of_a_call_without_a_penalty():
    thin = db.Penalised(network(), db.Jacobian(reduction="none"), every=2)
    first, second = thin(X)[1], thin(X)[1]
    exact = db.Penalised(network(), db.Jacobian(reduction="none"))(X)[1]
    torch.testing.assert_close(first, 2 * exact)
    assert second.shape == (6,) and not second.any()
    second.sum().backward()  # as any other


def test_keys_stay_and_the_count_goes_with_the_model():
    thin = db.Penalised(network(), penalty_of(), every=4, generator=torch.Generator())
    thin(X, Y)
    assert set(thin.state_dict()) == set(db.Penalised(network(), penalty_of()).state_dict())
    for again in (copy.deepcopy(thin), pickle.loads(pickle.dumps(thin))):
        assert again.calls == 1 and again(X, Y)[1].item() == 0
    thin.calls = 4
    assert thin(X, Y)[1].item() > 0


def test_tuples_keywords_and_other_arguments():
    """Arguments with a row for each example go with their rows, others as they are; so do the
    parts of a result."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, shift, *, scale):
            return {"out": self.net(x * scale + shift), "x": (2 * x,)}

    thin = db.Penalised(Two(), db.LossGradient("cross_entropy"), fraction=0.5, output="out")
    shift, scale = torch.randn(6, 1, dtype=D), torch.randn(4, dtype=D)
    result, _ = thin(X, shift, Y, scale=scale)
    torch.testing.assert_close(result["out"], thin.net(X, shift, scale=scale)["out"])
    assert torch.equal(result["x"][0], 2 * X)


def test_an_argument_that_happens_to_be_as_long_as_the_batch():
    """It would go by rows; at a size where that shows, it is refused."""

    class Scaled(nn.Module):
        def forward(self, x, scale):
            return (x * scale).sum(1, keepdim=True)

    thin = db.Penalised(Scaled(), db.OutputGradient(0), fraction=0.2)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D)
    torch.testing.assert_close(thin(X, scale)[0], (X * scale).sum(1, keepdim=True))
    with pytest.raises(db.InputError, match="changes with the other examples"):
        thin(X[:4], scale)


def test_check_and_explain():
    thin = db.Penalised(network(), penalty_of(), every=2, fraction=0.5)
    assert db.check(thin, X, Y).worst < 1e-10 and thin.calls == 0
    told = thin.explain(X, Y)
    assert told.average_price == pytest.approx(1 + (told.price - 1) / 4)
    assert "1 of 2 calls and 50 % of the rows" in str(told) and "1 of 2 calls" in repr(thin)
    assert told.as_dict()["average_price"] == told.average_price


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Pooled(nn.Module):
    def forward(self, x):
        return x, x.mean(0)


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: db.Penalised(network(), penalty_of(), every=0), "every must be an int"),
        (lambda: db.Penalised(network(), penalty_of(), every=2.0), "every must be an int"),
        (lambda: db.Penalised(network(), penalty_of(), every=True), "every must be an int"),
        (lambda: db.Penalised(network(), penalty_of(), fraction=0), "above 0 and at most 1"),
        (lambda: db.Penalised(network(), penalty_of(), fraction=1.5), "above 0 and at most 1"),
        (lambda: db.Penalised(network(), penalty_of(), fraction="half"), "above 0 and at most 1"),
        (lambda: db.Penalised(network(), penalty_of(), fraction=float("nan")), "above 0"),
        (lambda: db.Penalised(network(), penalty_of(), generator=3), "must be a torch.Generator"),
        (lambda: db.Penalised(network(), penalty_of("none"), fraction=0.5), "without a value"),
        (lambda: db.Penalised(nn.Sequential(network(), nn.BatchNorm1d(3).double()), penalty_of(),
                              fraction=0.5)(X, Y), "BatchNorm1d '1' computes its statistics"),
        (lambda: db.Penalised(nn.Sequential(Centred(), network()), penalty_of(),
                              fraction=0.5)(X, Y), "changes with the other examples"),
        (lambda: db.Penalised(nn.Sequential(network(), Pooled()), db.OutputGradient(0), output=0,
                              fraction=0.5)(X), "a row of every output"),
    ],
)  # fmt: skip
def test_errors(make, error):
    with pytest.raises(db.InputError, match=error):
        make()


def test_the_search_for_dependence_leaves_the_network_as_it_was():
    net = nn.Sequential(network(), nn.Dropout(0.5))
    net[1].eval()
    seed = torch.get_rng_state()
    db.Penalised(net, db.OutputGradient(0), fraction=0.5, generator=torch.Generator())(X)
    assert net.training and not net[1].training and torch.equal(torch.get_rng_state(), seed)


def test_labels_are_checked_in_every_call():
    thin = db.Penalised(network(), penalty_of(), every=2)
    thin.accumulate(X, Y)
    with pytest.raises(db.InputError):
        thin.accumulate(X, Y[:3])


# -------------------------------------------- what all examples share, and is as long as the batch


def weighted():
    """v = w⟨y⟩ e⟨y⟩: the class of each example, by the weight of the class."""
    return lambda out, y, w: F.one_hot(y, 6).to(out.dtype) * w[y][:, None]


def six():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6)).double()


Y6 = torch.tensor([0, 1, 0, 1, 1, 0])
W6 = torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0, 13.0], dtype=D)


@pytest.mark.parametrize("ones", [False, True])
def test_an_extra_that_all_examples_share_is_not_cut_unsaid(ones):
    """Class weights of six classes and a batch of six; at first they may all be the same."""
    own = torch.Generator().manual_seed(0)
    penalty = db.Custom(weighted(), extras=2)
    thin = db.Penalised(six(), penalty, fraction=0.5, generator=own)
    if ones:
        thin(X, Y6, torch.ones_like(W6))
        thin(X, Y6, torch.ones_like(W6))
        thin(X, Y6, torch.ones_like(W6))
    with pytest.raises(db.InputError, match="shared="):
        for _ in range(4):
            thin(X, Y6, W6)


def test_what_is_said_to_be_shared_stays_whole(monkeypatch):
    penalty = db.Custom(weighted(), extras=2)
    whole = db.Penalised(six(), penalty)
    thin = db.Penalised(six(), penalty, fraction=0.34, shared=2)
    monkeypatch.setattr(torch, "randperm", Fixed(2))
    run = lambda model: torch.add(*(t.sum() for t in model(X, Y6, W6))).backward()  # noqa: E731
    found = [gradients(thin, run) for _ in range(15)]
    torch.testing.assert_close(mean(found), gradients(whole, run), rtol=1e-10, atol=1e-12)


def test_a_shared_argument_of_the_network_by_name_and_by_keyword():
    class Scaled(nn.Module):
        def forward(self, x, scale):
            return (x * scale).sum(1, keepdim=True)

    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D)
    expected = (X[:4] * scale).sum(1, keepdim=True)
    thin = db.Penalised(Scaled(), db.OutputGradient(0), fraction=0.5, shared=["scale"])
    torch.testing.assert_close(thin(X[:4], scale)[0], expected)
    torch.testing.assert_close(thin(X[:4], scale=scale)[0], expected)
    for wrong in ("scales", 7):
        with pytest.raises(db.InputError, match=f"shared={wrong!r}"):
            db.Penalised(Scaled(), db.OutputGradient(0), fraction=0.5, shared=wrong)(X[:4], scale)


@pytest.mark.parametrize("kind", ["loss", "norm"])
def test_a_caller_s_loss_or_norm_of_the_whole_batch_is_refused(kind):
    if kind == "loss":  # labels with a part that all examples share
        loss = lambda out, y: F.cross_entropy(out, y[0], reduction="none") * y[1][y[0]]  # noqa: E731
        thin = db.Penalised(six(), db.LossGradient(loss), fraction=0.5)
        arguments = (X, (Y6, W6))
    else:
        norm = lambda g: (g - g.mean(0)).square().sum(1)  # noqa: E731
        thin = db.Penalised(six(), db.OutputGradient(0, norm=norm), fraction=0.5)
        arguments = (X,)
    with pytest.raises(db.InputError, match="use every"):
        for _ in range(4):
            thin(*arguments)


class Whitened(nn.Module):
    """A batch norm of one's own: of the batch in training alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=D))

    def forward(self, x):
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def test_dependence_in_training_mode_alone_is_refused():
    net = nn.Sequential(Whitened(), network())
    with pytest.raises(db.InputError, match="use every"):
        db.Penalised(net, penalty_of(), fraction=0.5)(X, Y)
    assert not net[0].mean.any()  # the trial is undone


def test_dependence_that_shows_in_training_only_later_is_refused():
    """The last layer starts at zero, where every row of the output is the same."""
    net = nn.Sequential(Centred(), network())
    nn.init.zeros_(net[1][2].weight)
    thin = db.Penalised(net, db.LossGradient("mse"), fraction=0.5)
    target = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(db.InputError, match="use every"):
        for _ in range(4):
            optimiser.zero_grad()
            thin.accumulate(X, target, weight=0.1)
            optimiser.step()


def test_draws_in_training_are_no_dependence():
    """Dropout, and a v of random signs: alike where they are drawn alike."""
    net = nn.Sequential(network(), nn.Dropout(0.5))
    v = lambda out, w: torch.randint_like(out, 2).mul(2).sub(1) * w  # noqa: E731
    thin = db.Penalised(net, db.Custom(v, extras=1), fraction=0.5)
    for _ in range(3):
        thin(X, torch.rand(6, 1, dtype=D))[1].backward()


def test_an_output_with_a_row_for_each_example_by_chance():
    class Book(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.book = network(), nn.Parameter(torch.randn(6, 2, dtype=D))

        def forward(self, x):
            return self.net(x), self.book

    thin = db.Penalised(Book(), db.Jacobian(), output=0, fraction=0.5)
    with pytest.raises(db.InputError, match="a row of every output"):
        thin(X)
