"""Between forward and backward, and from call to call: what callers change, and how gradients are
delivered."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import doubleback as db
from doubleback.check.parity import compare

X, Y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))


def dense(out=3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()


def gradients(net) -> list:
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    return found


# ------------------------------------------------------------------------- changed in place


def label(net, y):
    y.fill_(0)


def frozen(net, y):
    with torch.no_grad():
        net[3].weight.mul_(2)


def statistics(net, y):
    net[1].running_mean.add_(1)


@pytest.mark.parametrize("change", [label, frozen, statistics])
@pytest.mark.parametrize("after", [None, 0])
def test_what_backward_reads_may_not_change_before(change, after):
    net = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3).requires_grad_(False)
    )
    model = db.Penalised(net.double().eval(), db.LossGradient(), flatten_after=after)
    y = Y.clone()
    _, penalty = model(X, y)
    change(net, y)
    with pytest.raises(db.StaleGraphError, match="changed in place"):
        penalty.backward()


MANY = {
    "rows": lambda r: db.Jacobian(plan="rows", reduction=r),
    "a row at a time": lambda r: db.Jacobian(plan="rows", chunk=1, reduction=r),
    "columns": lambda r: db.Jacobian(plan="columns", reduction=r),
    "waist": lambda r: db.Jacobian(plan="waist", reduction=r),
    "softmax": lambda r: db.Jacobian(of="softmax", reduction=r),
    "projections": lambda r: db.Jacobian(projections=2, reduction=r),
    "spectral": lambda r: db.SpectralNorm(reduction=r),
    "match": lambda r: db.JacobianMatch(reduction=r),
    "log-determinant": lambda r: db.LogDet(reduction=r),
    "one seed": lambda r: db.OutputGradient(0, reduction=r),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", MANY)
def test_a_parameter_may_change_before_backward_unless_it_is_read(name, reduction):
    """Any of them, and x: either the gradients are those of before, or it is refused; a last bias
    no derivative reads, and stock does not mind."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 6), nn.Softplus(), nn.Linear(6, 4)
    ).double()
    extra = (torch.randn(3, 4, 4).double(),) if name == "match" else ()
    x = torch.randn(3, 4).double()

    def make():
        after = 0 if name == "rows" else None
        return db.Penalised(net, MANY[name](reduction), sweeps=True, flatten_after=after)

    kept = make()

    def run(changed=None):
        model = make() if kept.penalty.carries else kept  # a call goes on from the last one's
        torch.manual_seed(1)
        out, penalty = model(x, *extra)
        if changed is not None:
            before = changed.detach().clone()
            with torch.no_grad():
                changed.add_(0.5)
        try:
            (out.square().sum() + (penalty * torch.arange(1, 4)).sum()).backward()
        finally:
            if changed is not None:
                with torch.no_grad():
                    changed.copy_(before)
        return gradients(net)

    expected, refused = run(), []
    for i, changed in enumerate((*net.parameters(), x)):
        try:
            torch.testing.assert_close(run(changed), expected, rtol=1e-10, atol=1e-12)
        except db.StaleGraphError:
            refused.append(i)
    assert 2 in refused and 7 not in refused


@pytest.mark.parametrize("after", [None, 0])
def test_an_output_may_change_unless_backward_reads_it(after):
    net = dense()
    model = db.Penalised(net, db.LossGradient(), flatten_after=after)
    out, penalty = model(X, Y)
    out.mul_(0.5)
    with pytest.raises(db.StaleGraphError, match="the output"):
        (F.cross_entropy(out, Y) + penalty).backward()
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=after)
    found = []
    for halve in (lambda out: out.mul_(0.5), lambda out: 0.5 * out):
        out, penalty = model(X)
        (F.cross_entropy(halve(out), Y) + penalty).backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


class Beside(nn.Module):
    """Returns what `cut` makes of x and of a layer's result: the penalised output, and another."""

    def __init__(self, cut):
        super().__init__()
        self.fc, self.cut = nn.Linear(4, 4), cut

    def forward(self, x):
        return self.cut(self.fc, x)


def chosen(fc, x):
    values, places = fc(x).topk(2)
    return values.sin(), places


BESIDE = {  # name: (network, what is changed, whether it has to be refused)
    "input, viewed": (lambda fc, x: (fc(x.view(2, 3, 4)).sin(), x.sum()), "x", True),
    "input, of which a part is read": (lambda fc, x: (x[:, :2] * x[:, 2:], fc(x)), "x", True),
    "output, viewed": (lambda fc, x: (lambda h: (h.view(-1).sin(), h))(fc(x)), "other", True),
    "view that is returned": (lambda fc, x: (lambda h: (h.sin(), h.t()))(fc(x)), "other", True),
    "two views": (lambda fc, x: (lambda h: (h.mT.sin(), h[0]))(fc(x)), "other", True),
    "places": (chosen, "other", True),
    "output, copied": (lambda fc, x: (lambda h: (h.t().reshape(-1).sin(), h))(fc(x)), "other",
                       False),
    "output, joined": (lambda fc, x: (lambda h: (torch.cat((h, h)).sin(), h))(fc(x)), "other",
                       False),
}  # fmt: skip


@pytest.mark.parametrize("after", [None, 0])
@pytest.mark.parametrize("name", BESIDE)
def test_memory_that_backward_reads_may_not_change_under_another_name(name, after):
    cut, what, refused = BESIDE[name]
    model = db.WithGradient(Beside(cut).double(), output=0, flatten_after=after, sweeps=True)
    found = []
    for change in (False, True):
        (out, other), gradient = model(given := X.clone())
        if change:
            with torch.no_grad():
                (given if what == "x" else other).fill_(1)
        step = gradient.square().sum() + out.sum()
        if change and refused:
            with pytest.raises(db.StaleGraphError, match="changed in place"):
                step.backward()
        else:
            step.backward()
            found.append(gradients(model.net))
    if not refused:
        torch.testing.assert_close(*found)


def test_statistics_that_the_call_itself_updates_are_no_change():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = db.Penalised(net, db.LossGradient())
    first, second = model(X, Y)[1], model(2 * X, Y)[1]
    (first + second).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("sweeps", [None, False])
def test_inputs_from_inference_mode_are_as_good_as_others(sweeps):
    net = dense()
    model = db.Penalised(net, db.LossGradient(), sweeps=sweeps)
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    found = []
    for given in ((x, y), (X, Y)):
        out, penalty = model(*given)
        (out.square().mean() + penalty).backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("sweeps", [True, False])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_penalty_without_gradients_is_the_same(without, sweeps):
    """On autograd it was zero under inference_mode, where the output was held to be unused."""
    options = {"sweeps": sweeps, "allow_unused": True}
    model = db.Penalised(dense(), db.OutputGradient("sum"), **options)
    slope = db.WithGradient(model.net, **options)
    wanted = model(X)[1].detach(), slope(X)[1].detach()
    with without():
        found = model(X)[1], slope(X)[1]
    assert not any(t.requires_grad or t.is_inference() for t in found)
    torch.testing.assert_close(found, wanted)


# ------------------------------------------------------------------------------- delivered


def test_a_tensor_in_two_places_receives_both_gradients():
    net, noise = dense(4), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    model = db.Penalised(net, db.BilinearForm())
    model(X, noise, noise)[1].backward()
    expected, noise.grad = noise.grad, None
    for times in (1, 2):
        model.accumulate(X, noise, noise)
        torch.testing.assert_close(noise.grad, times * expected)


@pytest.mark.parametrize("sweeps", [None, False])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_accumulate_without_gradients_reaches_what_lies_before_the_sweeps(without, sweeps):
    net = dense()
    weight_norm(net[0])
    model = db.Penalised(net, db.LossGradient(), sweeps=sweeps)
    model.accumulate(X, Y)
    expected = gradients(net)
    with without():
        model.accumulate(X, Y)
    found = gradients(net)
    torch.testing.assert_close(found, expected)
    assert not any(g.is_inference() for g in found)


# ------------------------------------------------------------------------ from call to call


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, z):
        h = torch.tanh(self.a(x)) * torch.sigmoid(self.b(z))
        return h, h.square()


@pytest.mark.parametrize(
    "change",
    [{"penalty": db.OutputGradient(1)}, {"output": 1}, {"wrt": (1,)}, {"debug": True}],
    ids=lambda change: next(iter(change)),
)
def test_a_model_follows_its_attributes(change):
    net, z = Two().double(), torch.randn(6, 4, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(0), output=0)
    for _ in range(4):
        model(X, z)
    for name, value in change.items():
        setattr(model, name, value)
    given = {"penalty": db.OutputGradient(0), "output": 0, **change}
    expected = db.Penalised(net, given.pop("penalty"), **given)(X, z)[1]
    torch.testing.assert_close(model(X, z)[1], expected)
    with torch.no_grad():
        net.a.weight.fill_(float("inf"))
    if model.debug:
        with pytest.raises(db.NonFiniteError):
            model(X, z)


SCALE = 1.0

W3 = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


class Sharpened(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, out, y):
        return F.cross_entropy(out * self.scale, y, reduction="none")


def captured(state):
    return lambda out, y: F.cross_entropy(out * state["scale"], y, reduction="none")


def by_global(out, y):
    return F.cross_entropy(out * SCALE, y, reduction="none")


def ways():
    """By name: how the scale is set, and a loss that reads it."""
    state, module, other = {"scale": 1.0}, Sharpened(), Sharpened()
    yield "captured", lambda scale: state.update(scale=scale), captured(state)
    yield "module", lambda scale: setattr(module, "scale", scale), module
    yield "method", lambda scale: setattr(other, "scale", scale), other.forward
    yield "global", lambda scale: globals().update(SCALE=scale), by_global


@pytest.mark.parametrize(("change", "loss"), [pytest.param(*w[1:], id=w[0]) for w in ways()])
def test_numbers_that_a_loss_reads_may_change(change, loss):
    net = dense()
    models = [db.Penalised(net, db.LossGradient(loss)), db.Penalised(net, db.OutputGradient(0))]
    for scale in (1.0, 2.0, 3.0):
        change(scale)
        x = X.clone().requires_grad_()
        expected = F.cross_entropy(net(x) * scale, Y, reduction="none")
        (g,) = torch.autograd.grad(expected.sum(), x, retain_graph=True)
        for _ in range(4):
            torch.testing.assert_close(models[0](X, Y)[1], g.square().sum(1).mean())
            for model, own in zip(models, ({}, {"loss": loss}), strict=True):
                torch.testing.assert_close(model.accumulate(X, Y, **own)[1], expected.mean())


# ------------------------------------------------------------- tensors that a loss holds


WEIGHTS = torch.ones(3, dtype=torch.float64)


def weighted_by_global(out, y):
    return F.cross_entropy(out, y, WEIGHTS, reduction="none")


class Holder:
    def __init__(self, weights):
        self.weights = weights

    def loss(self, out, y):
        return F.cross_entropy(out, y, self.weights, reduction="none")


def weighted():
    """By name: where class weights lie and how they are replaced, and a loss that reads them."""

    def start():
        return torch.ones(3, dtype=torch.float64)

    module, inside = (nn.CrossEntropyLoss(start(), reduction="none") for _ in range(2))
    globals().update(WEIGHTS=start())
    holder, state = Holder(start()), {"weights": start()}
    yield "module", vars(module)["_buffers"], "weight", module
    yield "captured module", vars(inside)["_buffers"], "weight", lambda out, y: inside(out, y)
    yield "method", vars(holder), "weights", holder.loss
    yield "global", globals(), "WEIGHTS", weighted_by_global
    yield (
        "captured",
        state,
        "weights",
        lambda out, y: F.cross_entropy(out, y, state["weights"], reduction="none"),
    )


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("place", "name", "loss"), [pytest.param(*w[1:], id=w[0]) for w in weighted()]
)
def test_tensors_that_a_loss_holds_may_change(place, name, loss, compile, flattened):
    """In place, or replaced by others; they are read anew at every call, without a new graph."""
    if compile and not isinstance(loss, nn.Module):
        pytest.skip("compiled once")
    net = dense()
    model = db.Penalised(net, db.LossGradient(loss), flatten_after=0, compile=compile)
    beside = db.Penalised(net, db.OutputGradient(0), flatten_after=0, compile=compile)
    made = 0
    for change in (lambda: None, lambda: place[name].mul_(3), lambda: place.update({name: W3})):
        change()
        x = X.clone().requires_grad_()
        each = F.cross_entropy(net(x), Y, place[name], reduction="none")
        (g,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        penalty = g.square().sum(1).mean()
        net.zero_grad()
        (each.mean() + penalty).backward()
        expected = gradients(net)
        out, found = model(X, Y)
        torch.testing.assert_close(found, penalty)
        (F.cross_entropy(out, Y, place[name], reduction="none").mean() + found).backward()
        torch.testing.assert_close(gradients(net), expected)
        model.accumulate(X, Y)
        torch.testing.assert_close(gradients(net), expected)
        torch.testing.assert_close(beside.accumulate(X, Y, loss=loss)[1], each.mean())
        net.zero_grad()
        made = made or len(flattened)
    assert len(flattened) == made


def test_a_tensor_out_of_sight_is_not_frozen():
    """In an object whose attribute the function does not name."""
    seen, box = torch.ones((), dtype=torch.float64), Box()

    def loss(out, y):
        return seen * F.cross_entropy(out, y, box.get(), reduction="none")

    net = dense()
    models = [db.Penalised(net, db.LossGradient(loss), flatten_after=0)]
    models.append(db.Penalised(net, db.LossGradient(loss), compile=True))
    for weights in (box.weights, W3):
        box.weights = weights
        expected = F.cross_entropy(net(X), Y, weights, reduction="none").mean()
        for model in models:
            torch.testing.assert_close(model.accumulate(X, Y)[1], expected.detach())


class Box:
    def __init__(self):
        self.weights = torch.ones(3, dtype=torch.float64)

    def get(self):
        return self.weights


def test_a_loss_that_the_loop_defines_anew_takes_no_new_graph(flattened):
    """It is called as it is; the sweeps around it stay flat."""
    net = dense()
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=0)
    criterion = nn.CrossEntropyLoss(reduction="none")
    made = 0
    for step in range(6):
        weights, scales = (1.0 + step) * W3, [1.0, 2.0 if step < 3 else 3.0]

        def loss(out, y, weights=weights, scales=scales):
            return scales[1] * criterion(out, y) * weights[y]

        expected = loss(net(X), Y).mean().detach()
        torch.testing.assert_close(model.accumulate(X, Y, loss=loss)[1], expected)
        made = made or len(flattened)
    assert len(flattened) == made > 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out, y):
        self.calls.add_(1)
        return F.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize("options", [{"flatten_after": None}, {"flatten_after": 0},
                                     {"compile": True}], ids=str)  # fmt: skip
def test_a_loss_of_the_callers_is_called_once_a_step(options):
    loss = Counting()
    model = db.Penalised(dense(), db.LossGradient(loss), **options)
    for _ in range(3):
        model(X, Y)[1].backward()
    assert loss.calls == 3
    for _ in range(3):
        model.accumulate(X, Y)
    assert loss.calls == 6
    beside = db.Penalised(dense(), db.OutputGradient(0), **options)
    for _ in range(3):
        beside.accumulate(X, Y, loss=loss)
    assert loss.calls == 9


def test_one_tensor_in_two_places_may_become_two():
    one, two = torch.ones(3, dtype=torch.float64), W3
    state = {"a": one, "b": one, "c": two}

    def loss(out, y):
        each = F.cross_entropy(out, y, state["a"] * state["b"].square(), reduction="none")
        return each * state["c"].sum()

    net = dense()
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=0)
    for b in (one, two):
        state["b"] = b
        expected = loss(net(X), Y).mean().detach()
        torch.testing.assert_close(model.accumulate(X, Y, loss=loss)[1], expected)


def test_held_tensors_changed_before_backward():
    loss = nn.CrossEntropyLoss(torch.ones(3, dtype=torch.float64), reduction="none")
    _, penalty = db.Penalised(dense(), db.LossGradient(loss))(X, Y)
    loss.weight.mul_(2)
    with pytest.raises(db.StaleGraphError):
        penalty.backward()


def test_numbers_of_a_captured_module_may_change():
    inside = nn.CrossEntropyLoss(reduction="none")
    net = dense()
    model = db.Penalised(net, db.LossGradient(lambda out, y: inside(out, y)), flatten_after=0)
    for smoothing in (0.0, 0.3):
        inside.label_smoothing = smoothing
        expected = F.cross_entropy(net(X), Y, label_smoothing=smoothing)
        torch.testing.assert_close(model.accumulate(X, Y)[1], expected.detach())


# ----------------------------------------------------------------------------------- corners


def test_lazy_modules_are_to_be_called_before():
    net = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    model = db.Penalised(net, db.OutputGradient(0))
    with pytest.raises(db.InputError, match="lazy"):
        model(X.float())
    net(X.float())
    model(X.float())[1].backward()


@pytest.mark.parametrize("after", [None, 0])
def test_classes_excluded_by_infinite_logits(after):
    """0·log 0 = 0, as in F.cross_entropy."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.out = dense(), torch.tensor([False, False, True])

        def forward(self, x):
            return self.net(x).masked_fill(self.out, -float("inf"))

    net, y = Masked(), Y % 2
    model = db.Penalised(net, db.LossGradient(), flatten_after=after)
    out, penalty = model(X, y)
    loss = F.cross_entropy(out, y)
    (loss + penalty).backward()
    expected = gradients(net)
    found = model.accumulate(X, y)
    torch.testing.assert_close(found[1:], (loss.detach(), penalty.detach()))
    torch.testing.assert_close(gradients(net), expected)
    assert db.check(model, X, y).worst < 1e-10
    agreed = {"out": (out, out), "gradient": (X, X + 1e-3)}
    assert max(row.error for row in compare(agreed)) > 1e-4  # not measured against infinity


def test_check_patches_its_oracle_where_pytorch_lacks_a_derivative():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return torch.cdist(x, self.points, p=1.5)

    report = db.check(db.Penalised(Distances(), db.LossGradient("cross_entropy")), X, Y)
    assert report.worst < 1e-10 and "under db.patch()" in str(report)
    assert any(row.name.startswith("accumulate") for row in report.rows)


def test_penalties_that_are_not_reduced_are_summed_on_autograd_too():
    class Branching(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x.sum() < 1e9 else x

    net = dense()
    found = []
    for each in (net, Branching(*net)):
        model = db.Penalised(each, db.LossGradient(reduction="none"))
        with contextlib.nullcontext() if each is net else pytest.warns(db.CaptureWarning):
            penalty = model.accumulate(X, Y, weight=0.3)[2]
        assert penalty.shape == (6,)
        found.append(gradients(net))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("norm", [db.SquaredNorm(), db.Norm()])
@pytest.mark.parametrize("after", [None, 0])
def test_an_empty_batch_adds_nothing(norm, after):
    net = dense()
    penalty = db.LossGradient(norm=norm, reduction="sum")
    model = db.Penalised(net, penalty, flatten_after=after)
    out, penalty = model(X[:0], Y[:0])
    (out.sum() + penalty).backward()
    assert penalty == 0 and all(not g.any() for g in gradients(net))


@pytest.mark.parametrize("ignored", [0, 1, 255])
def test_an_ignored_label_may_be_a_class(ignored):
    net, y = dense(), torch.where(torch.arange(6) % 3 == 0, ignored, 2)
    x = X.clone().requires_grad_()
    losses = F.cross_entropy(net(x), y, ignore_index=ignored, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), x)
    model = db.Penalised(net, db.LossGradient(ignore_index=ignored))
    torch.testing.assert_close(model(X, y)[1], g.square().sum(1).mean())
    torch.testing.assert_close(model.accumulate(X, y)[1], losses.mean())


def test_parameters_of_a_loss_are_refused_unless_they_are_its_arguments():
    net, scale = dense(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def scaled(out, given):
        y, by = given
        return F.cross_entropy(out * by, y, reduction="none")

    hidden = db.Penalised(net, db.LossGradient(lambda out, y: scaled(out, (y, scale))))
    with pytest.raises(db.InputError, match="requires grad and is none of its arguments"):
        hidden(X, Y)
    bent = db.Penalised(net, db.Custom(lambda out: out * scale))
    with pytest.raises(db.InputError, match="v depends on a tensor"):
        bent(X)[1].backward()
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(scaled(net(x), (Y, scale)).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(g.square().sum(1).mean(), scale)
    db.Penalised(net, db.LossGradient(scaled))(X, (Y, scale))[1].backward()
    torch.testing.assert_close(scale.grad, expected)


def test_class_weights_are_flattened_with_the_rest(flattened):
    weights, net = torch.rand(3), dense()
    penalty = db.LossGradient(class_weights=weights)
    models = [db.Penalised(net, penalty, flatten_after=after) for after in (None, 0)]
    for factor in (1.0, 2.0):
        weights.mul_(factor)
        found = []
        for model in models:
            model(X, Y)[1].backward()
            found.append(gradients(net))
        torch.testing.assert_close(*found)
    assert flattened


def test_binary_labels_may_be_truth_values():
    model, y = db.Penalised(dense(), db.LossGradient("bce")), torch.rand(6, 3) > 0.5
    torch.testing.assert_close(model(X, y)[1], model(X, y.double())[1])


class Record:
    """No type that PyTorch can take apart."""

    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda h: {"values": h, "b": 2 * h}, "values"),
        (lambda h: {"a": [2 * h, h]}, ("a", 1)),
        (Record, "logits"),
        (lambda h: (Record(h), 2 * h), (0, "logits")),
    ],
)
def test_outputs_by_name(pack, output):
    class Packing(nn.Sequential):
        def forward(self, x):
            return pack(super().forward(x))

    net = dense()
    model = db.Penalised(Packing(*net), db.LossGradient(), output=output, strict=True)
    penalty = model(X, Y)[1]
    torch.testing.assert_close(penalty, db.Penalised(net, db.LossGradient())(X, Y)[1])


# --------------------------------------------------------------------------- random numbers


def noisy(out):
    return out * torch.randn_like(out)


def test_a_v_that_draws_and_has_a_derivative():
    """It is computed once, and differentiated with the numbers it drew."""
    for options in ({}, {"flatten_after": 0}):
        net = dense()
        torch.manual_seed(4)
        db.Penalised(net, db.Custom(noisy), **options)(X)[1].backward()
        found = gradients(net)
        net.zero_grad()
        torch.manual_seed(4)
        x = X.clone().requires_grad_()
        out = net(x)
        (g,) = torch.autograd.grad(out, x, noisy(out), create_graph=True)
        g.square().sum(1).mean().backward()
        torch.testing.assert_close(found, gradients(net))
    net, noise = dense(), torch.randn(6, 3, dtype=torch.float64)
    model = db.Penalised(net, db.Custom(lambda out, e: out * e, extras=1))
    assert db.check(model, X, noise).passed


def test_a_v_of_random_numbers_alone_is_fine():
    net = dense()
    model = db.Penalised(net, db.Custom(lambda out: torch.randn_like(out)), flatten_after=0)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model(X)[1].backward()
        found.append(gradients(net))
    torch.manual_seed(3)
    v = torch.randn(6, 3, dtype=torch.float64)
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad((net(x) * v).sum(), x, create_graph=True)
    g.square().sum(1).mean().backward()
    for a, b, c in zip(*found, gradients(net), strict=True):
        torch.testing.assert_close(a, b)
        if c is not None:
            torch.testing.assert_close(a, c)


@pytest.mark.parametrize("penalty", [
    db.Jacobian(reduction="sum"), db.Jacobian(projections=2, reduction="sum"),
    db.SpectralNorm(reduction="sum"),
], ids=repr)  # fmt: skip
def test_jacobians_of_no_examples(penalty):
    net = dense()
    model = db.Penalised(net, penalty)
    out, value = model(X[:0])
    value.backward()
    assert out.shape == (0, 3) and value == 0
    _, _, again = model.accumulate(X[:0], Y[:0], loss=lambda out, y: out.sum(1))
    assert again == 0


@pytest.mark.parametrize("flatten_after", [None, 0])
def test_what_backward_does_not_read_may_change_before_it(flatten_after):
    """As on autograd: the last bias is in no derivative."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=flatten_after)
    x, grads = torch.randn(4, 6), []
    for change in (0.0, 1.0):
        net.zero_grad()
        out, penalty = model(x)
        with torch.no_grad():
            net[2].bias.add_(change)
        (out.sum() + penalty).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    out, penalty = model(x)
    with torch.no_grad():
        net[2].weight.add_(1.0)
    with pytest.raises(db.StaleGraphError):
        (out.sum() + penalty).backward()


# --------------------------------------------------------------- gradients as they are complete


class Mixed(nn.Module):
    """Tied and parametrised weights, a frozen one, a norm, a convolution, parameters of the whole
    batch's shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Linear(12, 12)
        self.normed = weight_norm(nn.Linear(12, 12))
        self.row, self.rows = (nn.Parameter(torch.randn(n)) for n in (12, 72))
        self.last = nn.Linear(12, 3)
        self.last.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        h = self.norm(self.convolution(x[:, None])).flatten(1)
        h = torch.tanh(self.tied(torch.sigmoid(self.tied(h)))) + self.row
        if len(x) == 6:
            h = torch.tanh(h) + self.rows.view(6, 12)
        return self.last(self.normed(h) * h)


def in_stretches(monkeypatch, stretches: int) -> None:
    """As with several processes."""
    monkeypatch.setattr("doubleback.run.bridge.several", lambda: True)
    monkeypatch.setattr("doubleback.plan.STRETCH", 1)
    monkeypatch.setattr("doubleback.plan.STRETCHES", stretches)


PENALTIES = {
    "a loss": lambda: db.LossGradient("cross_entropy"),
    "a caller's": lambda: db.LossGradient(lambda out, y: F.cross_entropy(out, y, reduction="none")),
    "a Jacobian": db.Jacobian,
}


def stretched_steps(model: db.Penalised, twin: db.Penalised, sizes=(6, 6, 6, 5, 4)) -> None:
    """Whatever is handed over is written to at once: nothing that is still to come reads it."""
    seen = {}

    def overwrite(t, name):
        seen[name] = t.grad.clone()
        t.grad.fill_(torch.nan)

    for name, t in model.net.named_parameters():
        if t.requires_grad:
            t.register_post_accumulate_grad_hook(lambda t, name=name: overwrite(t, name))
    for i, rows in enumerate(sizes):
        x, y = X[:rows] * (1 + i), Y[:rows]
        for one in (model, twin):
            one.zero_grad()
            out, penalty = one(x, y) if one.penalty.extras else one(x)
            (F.cross_entropy(out, y) + penalty).backward()
        for name, t in twin.net.named_parameters():
            if t.grad is None:
                assert name not in seen, name
            else:
                torch.testing.assert_close(seen.pop(name), t.grad, rtol=1e-10, atol=1e-12)
        assert not seen


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("stretches", [3, 1000])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_in_stretches(monkeypatch, penalty, stretches, compiled):
    """compiled: cut into pieces as for Inductor, whose place PyTorch takes."""
    in_stretches(monkeypatch, stretches)
    pieces = []

    def eager(graph, tensors):
        pieces.append(graph)

        def run(tensors):
            given = list(tensors)
            tensors.clear()
            return graph(*given)

        return run

    monkeypatch.setattr("doubleback.run.inductor._by_inductor", eager)
    model = db.Penalised(Mixed(), penalty(), strict=True, sweeps=True, compile=compiled)
    twin = db.Penalised(Mixed(), penalty(), sweeps=False)
    stretched_steps(model, twin, sizes=(6, 6, 6) if compiled else (6, 6, 6, 5, 4))
    assert (len(pieces) > 3) == compiled


def test_compiled_gradients_in_stretches(monkeypatch):
    in_stretches(monkeypatch, 2)
    nets = [dense() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    penalty = db.LossGradient("cross_entropy")
    model = db.Penalised(nets[0], penalty, strict=True, sweeps=True, compile=True)
    stretched_steps(model, db.Penalised(nets[1], penalty, sweeps=False), sizes=(6, 6, 5, 4))


@pytest.mark.parametrize("step", [0, 3], ids=["node by node", "flat"])
def test_many_cotangents_at_once_are_refused(step):
    """`is_grads_batched` says what to do, and what it says works; nothing is used up by it."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = db.Penalised(net, db.OutputGradient(0))
    x = torch.randn(5, 3, dtype=torch.float64)
    for _ in range(step):
        model(x)[1].backward()
    seeds = torch.randn(6, 5, 2, dtype=torch.float64)
    parameters = list(net.parameters())
    out, _ = model(x)
    with pytest.raises(db.InputError, match="sweeps=False"):
        torch.autograd.grad(out, parameters, seeds, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(out, parameters, s, retain_graph=True) for s in seeds]
    out, _ = db.Penalised(net, db.OutputGradient(0), sweeps=False)(x)
    together = torch.autograd.grad(out, parameters, seeds, is_grads_batched=True)
    for mine, its in zip(zip(*one_by_one, strict=True), together, strict=True):
        torch.testing.assert_close(torch.stack(mine), its)
