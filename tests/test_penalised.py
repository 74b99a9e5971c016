"""The module that users hold: operation counts, flattened and compiled sweeps, mixed precision,
accumulation, arguments, and what bad input gets."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.rules import find_rule


def mlp(act=nn.Tanh, widths=(6, 7, 8, 5), head=None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    layers = layers[:-1] + ([head] if head is not None else [])
    return nn.Sequential(*layers)


def convnet(act=nn.Tanh, depth=3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(2 if i == 0 else 4, 4, 3, padding=1), act()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batch(shape=(3, 6), classes=5):
    return torch.randn(*shape), torch.randint(classes, (shape[0],))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=name)


# ------------------------------------------------------------------------ operation counts

NETS = {
    "dense": (lambda act, head=None: mlp(act, head=head), (3, 6), 5, 3),
    "convolution": (lambda act, head=None: convnet(act), (2, 2, 5, 5), 4, 3),
}


@pytest.mark.parametrize("kind", NETS)
class TestCounts:
    """Theory §5, as executed, for L = 3 layers."""

    def run(self, kind, act, penalty, extra=(), loss=None):
        make, shape, _, layers = NETS[kind]
        model = db.Penalised(make(act), penalty, strict=True)
        x = torch.randn(*shape)
        with db.count_operations() as ops:
            out, value = model(x, *extra)
            (value + loss(out) if loss else value).backward()
        total = model.explain(x, *extra).total
        return ops, total, layers

    def labels(self, kind):
        _, shape, classes, _ = NETS[kind]
        return torch.randint(classes, (shape[0],))

    def test_plain_step(self, kind):
        make, shape, _, layers = NETS[kind]
        model = db.Penalised(make(nn.Tanh), db.LossGradient("cross_entropy"))
        with db.count_operations() as ops:
            model.accumulate(torch.randn(*shape), self.labels(kind), weight=0)
        assert (ops.products, ops.weight_adjoint) == (2 * layers - 1, layers)

    def test_classical_with_and_without_loss(self, kind):
        y = self.labels(kind)
        for loss in (None, lambda out: F.cross_entropy(out, y)):
            ops, total, n = self.run(kind, nn.Tanh, db.LossGradient("cross_entropy"), (y,), loss)
            assert (ops.products, ops.weight_adjoint) == (4 * n - 1, 2 * n)
            assert total == vars(ops)

    def test_any_penalty_carries_the_loss_for_free(self, kind):
        """4L − 1 where the paper's algorithm takes 5L − 2: v depends on the output here."""
        penalty = db.Custom(lambda out: out**2)
        ops, _, n = self.run(kind, nn.Tanh, penalty, (), lambda out: out.sum())
        assert (ops.products, ops.weight_adjoint) == (4 * n - 1, 2 * n)

    def test_the_papers_count_is_the_classical_one_for_the_gradient_of_a_loss_alone(self, kind):
        make, shape, _, n = NETS[kind]
        x, y = torch.randn(*shape), self.labels(kind)
        classical = db.Penalised(make(nn.Tanh), db.LossGradient("cross_entropy")).explain(x, y)
        assert classical.paper["penalty_and_loss"] == 4 * n - 1
        other = db.Custom(lambda out, labels: out * labels.sum(), extras=1)
        assert db.Penalised(make(nn.Tanh), other).explain(x, y).paper["penalty_and_loss"] == (
            5 * n - 2
        )

    def test_the_text_says_what_is_counted_and_the_price(self, kind):
        make, shape, _, n = NETS[kind]
        told = db.Penalised(make(nn.Tanh), db.LossGradient("cross_entropy")).explain(
            torch.randn(*shape), self.labels(kind)
        )
        assert told.price == told.flops / told.plain_flops and 1.3 < told.price < 2.5
        text = str(told)
        assert "K□ gives the gradient of its weight" in text
        assert f"{n} bilinear layers" in text and f"expected price: {told.price:.2g}" in text
        assert "under autograd: 0 nodes" in text
        assert "under autograd: 1 node\n" in str(replace(told, prelude=1))

    def test_piecewise_linear(self, kind):
        ops, _, n = self.run(kind, nn.ReLU, db.OutputGradient(1))
        assert (ops.products, ops.weight_adjoint) == (3 * n - 1, n)
        ops, _, n = self.run(kind, nn.LeakyReLU, db.OutputGradient(1), (), lambda out: out.sum())
        assert (ops.products, ops.weight_adjoint) == (4 * n - 2, 2 * n)

    def test_no_grad_is_two_sweeps(self, kind):
        make, shape, _, n = NETS[kind]
        model = db.Penalised(make(nn.Tanh), db.OutputGradient(0))
        with torch.no_grad(), db.count_operations() as ops:
            out, penalty = model(torch.randn(*shape))
        assert not penalty.requires_grad and not out.requires_grad
        assert (ops.products, ops.weight_adjoint) == (2 * n, 0)

    def test_frozen_layers_take_no_weight_adjoint(self, kind):
        make, shape, _, _ = NETS[kind]
        net = make(nn.Tanh)
        for p in list(net.parameters())[2:]:
            p.requires_grad_(False)
        model = db.Penalised(net, db.LossGradient("cross_entropy"))
        with db.count_operations() as ops:
            model(torch.randn(*shape), self.labels(kind))[1].backward()
        assert ops.weight_adjoint == 2


# -------------------------------------------------------------------- flattened, compiled


@pytest.mark.parametrize("make", [mlp, convnet, lambda: convnet(nn.ReLU)])
def test_flattened_sweeps_give_the_same_gradients(make):
    net = make()
    x = torch.randn(3, 6) if isinstance(net[0], nn.Linear) else torch.randn(3, 2, 5, 5)
    y = torch.randint(4, (3,))
    found = []
    for after in (None, 0):
        model = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=after)
        for _ in range(2):
            with db.count_operations() as ops:
                out, penalty = model(x, y)
                (F.cross_entropy(out, y) + 0.3 * penalty).backward()
        found.append((gradients(model), ops))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_flattening_happens_after_the_asked_number_of_calls_and_keeps_graphs_apart():
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"), flatten_after=1)
    for size in (3, 3, 4, 3, 3):
        x, y = batch((size, 6))
        (early, penalty), late = model(x, y), model(x, y)
        penalty.backward(retain_graph=True)
        first = gradients(model)
        penalty.backward()
        assert_same(first, gradients(model))
        late[1].backward()
        assert_same(first, gradients(model))
        torch.testing.assert_close(early, late[0])


def test_sweeps_that_cannot_be_flattened_go_on_node_by_node():
    """The rule reads a number out of a tensor, which no trace on fake tensors can."""
    op = torch.ops.aten.sinh.default
    right = find_rule(op)

    def scaled(call, y, wanted):
        factor = float(call.value(0).abs().max())
        return [None if g is None else g * factor / factor for g in right.backward(call, y, wanted)]

    db.register_rule(op, replace(right, backward=scaled), replace=True)
    try:
        net = nn.Sequential(nn.Linear(6, 4), Sinh(), nn.Linear(4, 1))
        model = db.Penalised(net, db.OutputGradient(), flatten_after=0)
        for _ in range(2):
            model(X)[1].backward()
        found = gradients(model)
        assert max(float(g.norm()) for g in found.values()) > 0
        with pytest.raises(db.RuleError, match="compile=False"):
            db.Penalised(net, db.OutputGradient(), compile=True)(X)
    finally:
        db.register_rule(op, right, replace=True)


class Sinh(nn.Module):
    def forward(self, x):
        return torch.sinh(x)


def test_compiled():
    """One graph for each pair of sweeps, and one for all four; gradients unchanged."""
    x, y = batch()
    net = mlp(widths=(6, 5, 5))
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    out, penalty = model(x, y)
    (F.cross_entropy(out, y) + 0.3 * penalty).backward()
    expected = gradients(model)
    compiled = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True)
    with db.count_operations() as ops:
        out, penalty = compiled(x, y)
        (F.cross_entropy(out, y) + 0.3 * penalty).backward()
    assert_same(expected, gradients(compiled))
    assert (ops.products, ops.weight_adjoint) == (7, 4)
    _, loss, value = compiled.accumulate(x, y, weight=0.3)
    assert_same(expected, gradients(compiled))
    torch.testing.assert_close(value, penalty.detach())
    torch.testing.assert_close(loss, F.cross_entropy(out, y).detach())


# ------------------------------------------------------------------------- accumulation


def test_accumulate_equals_two_calls():
    x, y = batch()
    x.requires_grad_()
    for penalty, loss, extra in (
        (db.LossGradient("cross_entropy"), "cross_entropy", (y,)),
        (db.LossGradient("cross_entropy"), None, (y,)),
        (db.OutputGradient(2, norm=db.Norm()), "cross_entropy", (y,)),
        (db.OutputGradient(2), lambda out, t: F.cross_entropy(out, t, reduction="none"), (y,)),
    ):
        model = db.Penalised(mlp(), penalty, flatten_after=1)
        own = (y,) if penalty.extras else ()
        out, value = model(x, *own)
        (F.cross_entropy(out, y) + 0.2 * value).backward()
        expected, at_x = gradients(model), x.grad.clone()
        for _ in range(3):
            x.grad = None
            out2, loss_value, value2 = model.accumulate(x, *extra, loss=loss, weight=0.2)
            assert_same(expected, gradients(model))
            torch.testing.assert_close(x.grad, at_x)
            torch.testing.assert_close((out2, value2), (out.detach(), value.detach()))
            torch.testing.assert_close(loss_value, F.cross_entropy(out, y).detach())
        x.grad = None


def test_accumulate_adds():
    x, y = batch()
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"))
    model.accumulate(x, y)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.accumulate(x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])


# ----------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU])
def test_autocast_matches_autograd_under_autocast(act):
    x, y = batch((16, 6))
    net = mlp(act)

    def autograd():
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(leaf)
        each = F.cross_entropy(out.float(), y, reduction="none")
        (xi,) = torch.autograd.grad(each.sum(), leaf, create_graph=True)
        penalty = xi.square().sum(1).mean()
        (each.mean() + penalty).backward()
        return out, penalty

    out, penalty = autograd()
    expected = gradients(net)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), strict=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out2, penalty2 = model(x, y)
    assert out2.dtype == out.dtype == torch.bfloat16
    (F.cross_entropy(out2.float(), y) + penalty2).backward()
    torch.testing.assert_close(penalty2, penalty, rtol=2e-2, atol=0)
    found = gradients(net)
    for name in expected:  # bfloat16 rounds to 2⁻⁸
        assert found[name].dtype == torch.float32
        scale = expected[name].norm()
        assert (found[name] - expected[name]).norm() <= 3e-2 * scale, name


def test_bfloat16_penalty_is_accumulated_in_float32():
    model = db.Penalised(mlp().bfloat16(), db.LossGradient("cross_entropy"))
    x, y = batch()
    out, penalty = model(x.bfloat16(), y)
    assert out.dtype == torch.bfloat16 and penalty.dtype == torch.float32
    penalty.backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_grad_scaler_scales_both_terms():
    x, y = batch()
    model = db.Penalised(mlp(), db.LossGradient("cross_entropy"))
    out, penalty = model(x, y)
    (F.cross_entropy(out, y) + penalty).backward()
    expected = gradients(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    out, penalty = model(x, y)
    scaler.scale(F.cross_entropy(out, y) + penalty).backward()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.unscale_(optimiser)
    assert_same(expected, gradients(model))


# ------------------------------------------------------------------------------- memory


def test_values_are_freed_in_backward_and_the_module_holds_none():
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    net = nn.Sequential(nn.Linear(6, 64), Watched(), nn.Linear(64, 5))
    model = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=None)
    x, y = batch()
    out, penalty = model(x, y)
    node = penalty.grad_fn
    seen = [weakref.ref(t) for t in node.state.values.values() if t.numel() == 3 * 64]
    assert seen
    (out.sum() + penalty).backward()
    gc.collect()
    assert node.state is None
    assert all(ref() is None for ref in seen)


def test_outputs_do_not_keep_themselves_alive():
    model = db.Penalised(mlp(), db.OutputGradient(0))
    out, penalty = model(torch.randn(3, 6))
    ref = weakref.ref(out)
    del out, penalty
    assert ref() is None


def test_piecewise_linear_nets_keep_no_float_mask():
    """A ReLU's mask is read off the value that the next layer keeps anyway."""
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=None)
    _, penalty = model(torch.randn(8, 6))
    kept = [t for t in penalty.grad_fn.state.values.values() if tuple(t.shape) == (8, 64)]
    assert len(kept) == 2


# ---------------------------------------------------------------------------- arguments


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, left, right, *, scale=1.0):
        hidden = torch.tanh(self.a(left) * scale + self.b(right))
        return {"main": hidden.sum(1), "aux": (hidden, 7)}


def test_choices_of_input_and_output():
    left, right = torch.randn(5, 3), torch.randn(5, 2)
    values = {}
    for wrt in (0, "left", 1, "right", (0, 1)):
        model = db.Penalised(Two(), db.OutputGradient(), wrt=wrt, output="main", strict=True)
        model.net.load_state_dict(values.setdefault("state", model.net.state_dict()))
        assert db.check(model, left, right, scale=2.0).worst < 1e-10
        out, values[wrt] = model(left, right, scale=2.0)
        assert out["aux"][1] == 7 and out["aux"][0].shape == (5, 4)
    assert values[0] == values["left"] and values[1] == values["right"]
    torch.testing.assert_close(values[0] + values[1], values[0, 1])
    model = db.Penalised(Two(), db.OutputGradient(2), output=("aux", 0))
    assert db.check(model, left, right).worst < 1e-10


def test_names_that_clash_with_the_exported_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.graph = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.graph(torch.tanh(self.code(x)))

    assert db.check(db.Penalised(Net(), db.OutputGradient()), torch.randn(2, 3)).worst < 1e-10


# ---------------------------------------------------------------------------- bad input

X, Y = torch.randn(3, 6), torch.tensor([0, 1, 2])
CLASSICAL = db.LossGradient("cross_entropy")


@pytest.mark.parametrize(
    ("error", "match", "make", "call"),
    [
        (db.InputError, "floating point", lambda: (mlp(), CLASSICAL), (X.long(), Y)),
        (db.InputError, "one value per example",
         lambda: (mlp(), db.LossGradient(lambda out, y: F.cross_entropy(out, y))), (X, Y)),
        (db.LabelError, r"shape \(3,\)", lambda: (mlp(), CLASSICAL), (X, Y[:2])),
        (db.LabelError, "found 9", lambda: (mlp(), CLASSICAL), (X, torch.tensor([0, 9, 1]))),
        (db.LabelError, "output's shape", lambda: (mlp(), db.LossGradient("mse")), (X, X)),
        (db.InputError, "index 7 is out of range", lambda: (mlp(), db.OutputGradient(7)), (X,)),
        (db.InputError, "choose an entry", lambda: (mlp(), db.OutputGradient()), (X,)),
        (db.OutputChoiceError, "choose the penalised one",
         lambda: (Two(), db.OutputGradient()), (torch.randn(5, 3), torch.randn(5, 2))),
        (db.InputError, "different|move one", lambda: (mlp().to("meta"), CLASSICAL), (X, Y)),
        (db.InputError, "takes the last 1", lambda: (mlp(), CLASSICAL), ()),
        (db.InputError, "shaped like the penalised", lambda: (mlp(), db.GradientMatch(0)),
         (X, X[:2])),
        (db.InputError, "output's shape", lambda: (mlp(), db.BilinearForm()), (X, X, X)),
        (db.InputError, "one number per example",
         lambda: (mlp(), db.OutputGradient(0, norm=lambda u: u.sum())), (X,)),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(error, match, make, call):
    net, penalty = make()
    net.append(nn.BatchNorm1d(5)) if isinstance(net, nn.Sequential) else None
    net.to(next(net.parameters()).device)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(error, match=match):
        db.Penalised(net, penalty, strict=True)(*call)
    for name, value in net.state_dict().items():
        if value.device.type != "meta":
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("match", "make"),
    [
        ("nn.Module", lambda: db.Penalised(lambda x: x, CLASSICAL)),
        ("instance", lambda: db.Penalised(mlp(), db.OutputGradient)),
        ("reduction", lambda: db.OutputGradient(0, reduction="median")),
        ("loss must be", lambda: db.LossGradient("hinge")),
        ("norm must be", lambda: db.OutputGradient(0, norm=3)),
        ("label_smoothing", lambda: db.LossGradient("mse", label_smoothing=0.1)),
        ("positive weights", lambda: db.spaces.Weighted(torch.zeros(3))),
    ],
)
def test_bad_construction(match, make):
    with pytest.raises(db.InputError, match=match):
        make()


def test_debug_says_where_a_nan_appears():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return torch.sqrt(x * self.w).sum(1)

    model = db.Penalised(Net(), db.OutputGradient(), debug=True)
    with pytest.raises(db.NonFiniteError, match=r"forward sweep at aten\.sqrt"):
        model(-torch.ones(2, 6))
    with pytest.raises(db.NonFiniteError, match="backward sweep"):
        model(torch.zeros(2, 6))


def test_uncapturable_networks_warn_once_and_run_on_autograd():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 1)

        def forward(self, x):
            if x.sum() > 0:
                return torch.tanh(self.a(x))
            return self.a(x)

    model = db.Penalised(Net(), db.OutputGradient())
    with pytest.warns(db.CaptureWarning, match=r"if x\.sum"):
        _, penalty = model(X)
    penalty.backward()
    assert model.net.a.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        model.accumulate(X, torch.randn(3, 1), loss="mse")
    with pytest.raises(db.CaptureError, match=r"if x\.sum"):
        db.Penalised(Net(), db.OutputGradient(), strict=True)(X)


def test_uncapturable_attention_runs_on_its_fused_kernel():
    """Autograd falls back to doubleback's second derivatives, for Jacobians as well."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            if x.sum() > 1e9:
                return x.sum((1, 2))[:, None]
            q, k, v = self.qkv(x).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)[:, :3]

    net, x = Net(), torch.randn(2, 5, 8)
    rows = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaf = x.clone().requires_grad_()
        out = net(leaf)
        for i in range(3):
            rows.append(torch.autograd.grad(out[:, i].sum(), leaf, create_graph=True)[0])
        expected = sum(row.square().sum() for row in rows) / 2
        (want,) = torch.autograd.grad(expected, net.qkv.weight)
    with pytest.warns(db.CaptureWarning):
        penalty = db.Penalised(net, db.Jacobian())(x)[1]
    penalty.backward()
    torch.testing.assert_close(penalty, expected)
    torch.testing.assert_close(net.qkv.weight.grad, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("penalty", [db.LossGradient("mse"), db.Jacobian()])
def test_cuda_graph_gives_the_same_gradients(penalty):
    net = mlp().cuda()
    plain = db.Penalised(net, penalty)
    graphed = db.Penalised(net, penalty, cuda_graph=True)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        x, y = torch.randn(4, 6, device="cuda"), torch.randn(4, 5, device="cuda")
        found = []
        for model in (plain, graphed):
            optimiser.zero_grad()
            out, loss, value = model.accumulate(x, y, loss="mse", weight=0.3)
            found.append([out, loss, value, *(p.grad.clone() for p in net.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        optimiser.step()


def test_weighted_space():
    """‖g‖² in the dual of a weighted space is Σ g²/w; checked through the whole engine."""
    weight = torch.rand(6) + 0.5
    space = db.spaces.Weighted(weight)
    for norm in (db.SquaredNorm(space), db.Norm(space), db.Deviation(1.0, space=space)):
        model = db.Penalised(mlp(), db.OutputGradient(1, norm=norm))
        assert db.check(model, X).worst < 1e-10
    leaf = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(model.net(leaf)[:, 1].sum(), leaf)
    expected = (((g.square() / weight).sum(1)).sqrt() - 1).square().mean()
    torch.testing.assert_close(model(X)[1], expected)


def test_accumulate_delivers_like_backward():
    """To hooks, to leaves that share a gradient, and on top of what is there already."""

    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
            self.dense = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.dense(x)) + self.a + self.b

    net, x, y = Shifts().double(), torch.randn(1, 4).double(), torch.randn(1, 4).double()
    model = db.Penalised(net, db.LossGradient("mse"))
    seen = []
    net.dense.weight.register_hook(lambda g: seen.append(g.clone()))
    net.dense.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for times in (1, 2):
        model.accumulate(x, y, weight=0.3)
        assert len(seen) == 2 * times
        assert net.a.grad.data_ptr() != net.b.grad.data_ptr()
    twice = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    out, penalty = model(x, y)
    ((out - y).square().sum() + 0.3 * penalty).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(twice[name], 2 * p.grad, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------- buffers


class History(nn.Module):
    """Keeps the mean of the batch, the one before, and the one before that; and counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        for name in ("now", "before", "long_ago"):
            self.register_buffer(name, torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.long_ago.copy_(self.before)
        self.before.copy_(self.now)
        self.now.copy_(x.detach().mean(0))
        self.calls.add_(1)
        return torch.tanh(x - self.long_ago) @ self.weight


@pytest.mark.parametrize("how", ["two calls", "accumulate"])
@pytest.mark.parametrize("after", [None, 0])
def test_buffers_that_move_into_each_other(how, after):
    net, twin = History(), History()
    twin.load_state_dict(net.state_dict())
    model = db.Penalised(net, db.OutputGradient(1), flatten_after=after)
    for _ in range(4):
        x = torch.randn(3, 6)
        twin(x)
        if how == "accumulate":
            model.accumulate(x)
        else:
            model(x)[1].backward()
        for name, buffer in twin.named_buffers():
            torch.testing.assert_close(net.get_buffer(name), buffer, rtol=0, atol=0)


class Unfilled(nn.Module):
    def forward(self, x):
        room = torch.empty_like(x)
        room[:, 1:] = x[:, :-1].sin()
        room[:, 0] = x[:, -1]
        return room


def test_debugging_minds_no_memory_that_nobody_filled(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    try:
        net = nn.Sequential(nn.Linear(6, 6), Unfilled(), nn.Linear(6, 2))
        out, penalty = db.Penalised(net, db.OutputGradient(0), debug=True)(torch.randn(3, 6))
        (out.sum() + penalty).backward()
    finally:
        torch.use_deterministic_algorithms(False)
