"""Capture: when it runs again, what it leaves as it was, and what runs on autograd instead."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import random
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import doubleback as db
from doubleback import _torch
from doubleback.capture import dynamo, find_graph, guards, lifting

# ------------------------------------------------------------------------------ captured anew


class Warm(nn.Module):
    """A number that the caller changes, and one that the network counts itself."""

    def __init__(self):
        super().__init__()
        self.dense, self.temperature, self.calls = nn.Linear(4, 3), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.dense(x) / self.temperature)


@pytest.fixture
def counted(monkeypatch):
    made = []

    def count(*args):
        made.append(args)
        return lift(*args)

    lift = dynamo.lift
    monkeypatch.setattr(dynamo, "lift", count)
    return made


def test_a_changed_attribute_is_seen(counted):
    net, x = Warm().double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(0))
    for temperature in (1.0, 2.0, 1.0, 0.5, 2.0):
        net.temperature = temperature
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(y)[:, 0].sum(), y)
        net.calls = 1
        for _ in range(4):
            value = model(x)[1]
        torch.testing.assert_close(value, g.square().sum(1).mean())
    assert len(counted) <= 3  # after the second, numbers that change are left open


def hooked(net):
    net.dense.register_forward_hook(lambda module, args, out: 2 * out)


def prepared(net):
    net.dense.register_forward_pre_hook(lambda module, args: (3 * args[0],))


def masked(net):
    net.mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("change", [hooked, prepared, masked])
def test_hooks_and_buffers_that_come_later_are_seen(change, counted):
    class Net(Warm):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", None)

        def forward(self, x):
            y = super().forward(x)
            return y if self.mask is None else y * self.mask

    net, x = Net().double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.Jacobian())
    values = []
    for _ in range(2):
        for _ in range(4):
            out, value = model(x)
        net.calls = 1
        torch.testing.assert_close(out, net(x))
        net.calls = 1
        values.append(value.item())
        change(net)
    assert values[0] != values[1] and len(counted) <= 3


def test_a_replaced_module_is_seen_wherever_it_lies():
    """The new module may get the place in memory that the old one had."""
    net, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double(), torch.randn(5, 4).double()
    model = db.Penalised(net, db.OutputGradient(0))
    for activation in (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Tanh, nn.ELU):
        net[1] = nn.Identity()
        net[1] = activation()
        torch.testing.assert_close(model(x)[0], net(x))


def test_functions_and_tensors_of_modules_are_read_anew(counted):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.bend, self.mask = nn.Linear(4, 3), torch.sin, torch.rand(3).double()

        def forward(self, x):
            return self.bend(self.dense(x)) * self.mask

    net, x = Net().double(), torch.randn(5, 4).double()
    model = db.Penalised(net, db.OutputGradient(0))
    for bend, shape in ((torch.sin, 3), (torch.tanh, 3), (torch.tanh, (5, 3)), (torch.tanh, 3)):
        net.bend = bend
        for _ in range(4):
            net.mask = torch.rand(shape).double()
            torch.testing.assert_close(model(x)[0], net(x))
    assert len(counted) == 3
    net.dense.forward = lambda x: x[:, :3]
    torch.testing.assert_close(model(x)[0], net(x))


@dataclasses.dataclass
class Settings:
    factor: float = 1.0


class KeepingConfig:
    """A configuration by name, as of libraries of models."""

    def __init__(self):
        self.factor = 1.0


class Held(nn.Module):
    """A number in a container, which two modules share."""

    def __init__(self, held, read):
        super().__init__()
        self.dense, self.held, self.read = nn.Linear(4, 3), held, read
        self.dense.held = held

    def forward(self, x):
        return torch.tanh(self.read(self.held) * self.dense(x))


def assign(held, value):
    if isinstance(held, list):
        held[0] = value
    elif isinstance(held, dict):
        held["deep"][0] = value
    else:
        held.factor = value


HELD = {
    "list": (lambda: [1.0], lambda held: held[0]),
    "dict": (lambda: {"deep": [1.0]}, lambda held: held["deep"][0]),
    "namespace": (lambda: types.SimpleNamespace(factor=1.0), lambda held: held.factor),
    "dataclass": (Settings, lambda held: held.factor),
    "config": (KeepingConfig, lambda held: held.factor),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_number_in_a_container_is_seen(kind, counted):
    make, read = HELD[kind]
    net, x = Held(make(), read).double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(0))
    for value in (1.0, 2.0, 1.0):
        assign(net.held, value)
        for _ in range(3):
            penalty = model(x)[1]
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(y)[:, 0].sum(), y)
        torch.testing.assert_close(penalty, g.square().sum(1).mean())
        assert net.held is net.dense.held
    assert len(counted) == 2


def test_containers_of_other_things_are_no_reason_to_capture_anew(counted):
    net, x = Held([1.0, None], lambda held: held[0]), torch.randn(5, 4)
    model = db.Penalised(net, db.OutputGradient(0))
    net.held[1] = torch.zeros(3)
    for step in range(4):
        net.held[1] = torch.full((3,), float(step))
        model(x)
    assert len(counted) == 1


def test_numbers_that_change_at_every_step_are_left_open(counted):
    net, x = Held([1.0], lambda held: held[0]), torch.randn(5, 4)
    model = db.Penalised(net, db.OutputGradient(0))
    for step in range(12):
        net.held[0] = 1.0 + step
        torch.testing.assert_close(model(x)[0], net(x))
    assert len(counted) <= 3


def test_what_is_captured_again_and_again_is_named():
    net, x = Held(["a0"], lambda held: float(held[0][1:])), torch.randn(5, 4)
    model = db.Penalised(net, db.OutputGradient(0))
    with pytest.warns(db.CaptureWarning, match="held") as caught:
        for step in range(12):
            net.held[0] = f"a{step}"
            torch.testing.assert_close(model(x)[0], net(x))
    assert len(caught) == 1


class Remembering(nn.Module):
    """Notes what it saw, in a list and in a dictionary."""

    def __init__(self):
        super().__init__()
        self.dense, self.seen, self.last = nn.Linear(4, 3), [], {}

    def forward(self, x):
        self.seen.append(x)
        self.last["x"] = x
        return torch.tanh(self.dense(x))


def test_no_tensor_without_numbers_stays_in_a_container():
    net, x = Remembering(), torch.randn(5, 4)
    seen = net.seen
    db.Penalised(net, db.OutputGradient(0), strict=True)(x)
    assert net.seen is seen and len(seen) == 1 and net.last["x"] is seen[0]
    assert type(seen[0]) is torch.Tensor and torch.equal(seen[0], x)


class Stepping(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.dense, self.steps = nn.Linear(4, 3), torch.zeros(())

    def forward(self, x):
        self.steps += 1
        return self.steps * torch.tanh(self.dense(x))


def test_a_tensor_that_counts_is_written_once_a_call():
    net, twin, x = Stepping(), Stepping(), torch.randn(5, 4)
    twin.load_state_dict(net.state_dict())
    model = db.Penalised(net, db.OutputGradient(0))
    for step in range(1, 6):
        out, _ = model(x)
        assert net.steps == step
        torch.testing.assert_close(out, twin(x))


def test_a_network_that_counts_its_calls_is_captured_twice(counted):
    net, x = Warm(), torch.randn(5, 4)
    model = db.Penalised(net, db.OutputGradient(0))
    for _ in range(5):
        model(x)
    assert len(counted) <= 2 and net.calls == 5


def test_what_cannot_be_captured_is_not_tried_again_soon(monkeypatch):
    class Branch(Warm):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    net, x = Branch(), torch.ones(5, 4)
    failures, clock, explain = [], [100.0], dynamo.reason
    monkeypatch.setattr(dynamo, "reason", lambda *args: failures.append(1) or explain(*args))
    monkeypatch.setattr(dynamo, "monotonic", lambda: clock[0])
    model = db.Penalised(net, db.OutputGradient(0))
    with pytest.warns(db.CaptureWarning) as caught:
        for _ in range(3):
            model(x)
            clock[0] -= 1.0  # the attempt's own time is what counts
    assert len(failures) == 1 and len(caught) == 1
    clock[0] += 1000.0
    model(x)
    assert len(failures) == 2


def test_a_network_that_can_be_captured_after_all():
    """Its debugging was switched off."""

    class Printing(Warm):
        chatty = True

        def forward(self, x):
            if self.chatty and x.sum() > 1e9:
                raise ValueError("too large")
            return super().forward(x)

    net, x = Printing().double(), torch.ones(5, 4).double()
    model = db.Penalised(net, db.OutputGradient(0))
    with pytest.warns(db.CaptureWarning):
        before = model(x)[1]
    net.chatty = False
    assert "autograd" not in str(model.explain(x)).splitlines()[0]
    net.chatty = True
    strict = db.Penalised(net, db.OutputGradient(0), strict=True)
    with pytest.raises(db.CaptureError):
        strict(x)
    net.chatty = False  # what is asked for is tried at once
    torch.testing.assert_close(strict(x)[1], before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_run_on_autograd():
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), torch.randn(5, 4).double()
    expected = db.Penalised(net, db.OutputGradient(0))(x)[1]
    with pytest.warns(db.CaptureWarning):
        found = db.Penalised(torch.jit.script(net), db.OutputGradient(0))(x)[1]
    torch.testing.assert_close(found, expected)


# --------------------------------------------------------- gradients that no operator tells


class Reverse(torch.autograd.Function):
    """The identity, with its gradient reversed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Bent(nn.Module):
    """`bend` between two layers; nothing but the input requires grad before the second."""

    def __init__(self, bend):
        super().__init__()
        self.first, self.second, self.bend = nn.Linear(4, 4), nn.Linear(4, 3), bend
        self.first.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.second(self.bend(torch.tanh(self.first(x)))))


def doubled(h):
    h.register_hook(lambda g: 2 * g)
    return h


def penalty_and_gradients(net, x):
    """By stock autograd."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(x)[:, 0].sum(), x, create_graph=True)
    penalty = g.square().sum(1).mean()
    return [penalty, *torch.autograd.grad(penalty, (x, net.second.weight))]


def assert_on_autograd(net, x, match):
    model, y = db.Penalised(net, db.OutputGradient(0)), x.clone().requires_grad_()
    with pytest.warns(db.CaptureWarning, match=match):
        penalty = model(y)[1]
    found = [penalty, *torch.autograd.grad(penalty, (y, net.second.weight))]
    for a, b in zip(found, penalty_and_gradients(net, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bend", [Reverse.apply, doubled])
def test_backward_passes_of_their_own_run_on_autograd(bend, trained):
    net, x = Bent(bend).double(), torch.randn(5, 4, dtype=torch.float64)
    net.first.requires_grad_(trained)
    assert_on_autograd(net, x, "cannot be captured")


def test_a_function_is_seen_under_inference_mode():
    model = db.Penalised(Bent(Reverse.apply), db.OutputGradient(0), strict=True)
    with torch.inference_mode(), pytest.raises(db.CaptureError):
        model(torch.randn(5, 4))


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_run_on_autograd_until_they_are_removed(register):
    net, x = Bent(torch.sin).double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(0))
    plain = model(x)[1]
    handle = getattr(net.second, register)(lambda module, *g: (2 * g[0][0],))
    with pytest.warns(db.CaptureWarning, match="hook"):
        assert model(x)[1] > 2 * plain
    handle.remove()
    torch.testing.assert_close(model(x)[1], plain)


def test_a_model_inside_a_network_runs_on_autograd():
    inner = db.Penalised(nn.Linear(4, 4), db.OutputGradient(0)).double()
    net, x = Bent(lambda h: torch.sin(inner(h)[0])).double(), torch.randn(5, 4).double()
    model = db.Penalised(net, db.OutputGradient(0))
    with pytest.warns(db.CaptureWarning):
        assert model(x)[1].isfinite()


class Edges(nn.Module):
    """Messages along those edges that are no loops."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, edges):
        edges = edges[:, edges[0] != edges[1]]
        h = torch.tanh(self.first(x))
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return self.last(torch.tanh(h))


class Groups(Edges):
    """One row for each number that occurs."""

    def forward(self, x, edges):
        groups, which = torch.unique(edges[0], return_inverse=True)
        h = torch.tanh(self.first(x))
        h = h.new_zeros(len(groups), 6).index_add(0, which, h[edges[0]])
        return self.last(h)


@pytest.mark.parametrize("kind", [Edges, Groups])
def test_numbers_that_are_given_may_decide_sizes(kind):
    torch.manual_seed(0)
    net, twin = kind().double(), kind().double()
    twin.load_state_dict(net.state_dict())
    model = db.Penalised(net, db.LossGradient("mse"), strict=True)
    rows = set()
    for length in (12, 13, 12, 14, 12, 13):
        edges = torch.randint(0, 5, (2, length))
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        out = twin(x, edges)
        y = torch.randn_like(out)
        loss = (out - y).square().sum(1)
        (u,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        wanted = torch.autograd.grad(
            u.square().sum(1).mean() + loss.mean(), [x, *twin.parameters()], allow_unused=True
        )
        found, penalty = model(x, edges, y)
        total = penalty + (found - y).square().sum(1).mean()
        grads = torch.autograd.grad(total, [x, *net.parameters()], allow_unused=True)
        torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-12)
        rows.add(int((edges[0] != edges[1]).sum()) if kind is Edges else len(out))
    assert len(rows) > 1
    assert db.check(model, x, edges, y).worst < 1e-10


class Solve(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x):
        return torch.linalg.solve(self.matrix + torch.diag_embed(x), x)


def test_linear_algebra_is_captured_and_raises_where_a_matrix_is_singular():
    torch.manual_seed(0)
    net = Solve()
    model = db.Penalised(net, db.LossGradient("mse"), strict=True)
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    assert db.check(model, x, y).worst < 1e-10
    with torch.no_grad():
        net.matrix.zero_()
    singular = torch.tensor([[1.0, 0.0, 2.0, 3.0]] * 3, dtype=torch.float64)
    for _ in range(4):
        with pytest.raises(torch.linalg.LinAlgError):
            model(singular, y)


def test_a_given_mask_may_select():
    kept = torch.tensor([True, False, True, True])
    x = torch.randn(5, 4).double()
    for bend in (
        lambda h: h * h[:, kept].sum(1, True),
        lambda h: h * torch.masked_select(h, kept).reshape(5, 3).sum(1, True),
        lambda h: h * h[torch.tensor([True, True, False, True, True])][[0]],
    ):
        model = db.Penalised(Bent(bend).double(), db.OutputGradient(0), strict=True)
        assert db.check(model, x).worst < 1e-10


class Chosen(nn.Module):
    """Weights, or features, that a mask chooses, and other tensors that they meet."""

    def __init__(self, meet):
        super().__init__()
        self.first, self.weight, self.meet = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), meet

    def forward(self, x, mask):
        return self.meet(self.first(x).tanh(), self.weight, mask)


MEETINGS = {
    "a number of them": lambda h, w, mask: (h[:, :4] * w[mask]).sum(1) / w[mask].shape[0],
    "weights": lambda h, w, mask: (h[:, mask] * w[:4]).sin().sum(1),
    "features": lambda h, w, mask: (h[:, mask].sin() * h[:, :4]).square().sum(1),
    "each other": lambda h, w, mask: (h[:, mask] * w[:4][mask[:4]]).sin().sum(1),
    "a first one": lambda h, w, mask: (h[:, mask][:, :1] * h).square().sum(1),
    "a check": lambda h, w, mask: (torch._check(w[mask].shape[0] < 5), (h * w[mask][0]).sum(1))[1],
}


@pytest.mark.parametrize("name", MEETINGS)
def test_as_many_as_a_mask_chooses_meet_others(name):
    """Four meet four others; a single one is spread over them, which no graph for four holds; two
    do not fit, as in eager."""
    torch.manual_seed(0)
    net = Chosen(MEETINGS[name]).double()
    model = db.Penalised(net, db.OutputGradient("sum"), sweeps=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", db.CaptureWarning)
        for count in (4, 4, 4, 1, 4, 1, 6):
            x, mask = torch.randn(3, 6).double(), torch.arange(6) < count
            twin = copy.deepcopy(net)
            leaf = x.clone().requires_grad_()
            try:
                wanted = twin(leaf, mask)
            except RuntimeError as error:
                with pytest.raises(type(error)):
                    model(x, mask)
                continue
            (xi,) = torch.autograd.grad(wanted.sum(), leaf, create_graph=True)
            (wanted.sum() + xi.square().sum(1).mean()).backward()
            net.zero_grad()
            out, penalty = model(x, mask)
            (out.sum() + penalty).backward()
            found = [out.detach(), *(p.grad for p in net.parameters())]
            expected = [wanted.detach(), *(p.grad for p in twin.parameters())]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


RECAST = {
    "products": lambda h, w: torch.einsum("bci,ij->bcj", h, w),
    "products of three": lambda h, w: torch.einsum("bci,ij,bcj->bc", h, w, h),
    "an outer product": lambda h, w: torch.einsum("bci,ij->bcij", h, w),
    "squares": lambda h, w: h.square() * w[0],
    "a pad": lambda h, w: nn.functional.pad(h, (1, 1), mode="reflect"),
    "a finer grid": lambda h, w: nn.functional.interpolate(h, scale_factor=2, mode="linear"),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", RECAST)
def test_what_autocast_casts_inside_of_an_operator(name, inside):
    """It knows what some operators are made of, and not them."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            if not inside:
                return RECAST[name](self.first(x).tanh(), self.weight)
            with torch.autocast("cpu", torch.bfloat16):
                return RECAST[name](self.first(x).tanh(), self.weight)

    torch.manual_seed(0)
    net, x = Cast(), torch.randn(2, 3, 6)
    model = db.Penalised(net, db.OutputGradient("sum"), sweeps=True, strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        wanted, (out, penalty) = net(x), model(x)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted)
    (out.float().sum() + penalty).backward()


def test_shapes_that_depend_on_the_penalised_input_run_on_autograd():
    """A mask of what is differentiated as an index."""
    net, x = Bent(lambda h: h * h[h[:, 0] > 0].sum(0, True)).double(), torch.randn(5, 4).double()
    assert_on_autograd(net, x, "shape")


def test_a_hook_that_takes_numbers_out_is_found_out_once():
    """Not captured anew at every call, as its list grows and sizes change."""
    net, seen = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), []
    net[0].register_forward_hook(lambda module, given, out: seen.append(float(out.detach().sum())))
    model = db.WithGradient(net, sweeps=True)
    with pytest.warns(db.CaptureWarning, match="float") as told:
        for n in range(5, 9):
            x = torch.randn(n, 4).double()
            _, gradient = model(x)
            wanted = torch.autograd.grad(net(x.requires_grad_()).sum(), x)[0]
            torch.testing.assert_close(gradient, wanted)
    assert len(told) == 1
    assert dynamo.capture_of(net, None).graphs == 1
    assert seen[::2] == seen[1::2]


def test_what_is_captured_anew_at_every_call_runs_on_autograd():
    """A list that grows: Dynamo takes its length to be part of the graph."""
    net, seen = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), []
    net[0].register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    model, x = db.WithGradient(net, sweeps=True), torch.randn(5, 4).double()
    calls = 2 * dynamo.MANY
    with pytest.warns(db.CaptureWarning, match="what it reads changes") as told:
        gradients = [model(x)[1] for _ in range(calls)]
    assert len(told) == 1
    assert len(seen) == calls
    assert dynamo.capture_of(net, None).graphs == dynamo.MANY
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0])


# ------------------------------------------------------------------------ draws outside torch


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_outside_torch_run_on_autograd_and_from_the_same_seed(draw):
    net, x = Bent(lambda h: draw() * h).double(), torch.randn(5, 4).double()
    model = db.Penalised(net, db.OutputGradient(0))

    def seeded(run):
        random.seed(0), np.random.seed(0)
        return torch.stack([run(x) for _ in range(3)])

    with pytest.warns(db.CaptureWarning):
        found = seeded(lambda x: model(x)[0])
    torch.testing.assert_close(found, seeded(net))
    assert not torch.equal(found[0], found[1])


# ------------------------------------------------------------------- tensors that are assigned


class Assigning(nn.Module):
    """A running mean by assignment, features for later, and a mask made once."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        self.features = self.dense(x)
        self.mean = 0.9 * self.mean + 0.1 * self.features.mean(0).detach()
        if self.mask is None:
            self.mask = torch.arange(3, dtype=x.dtype, device=x.device).cos()
        return torch.tanh(self.features - self.mean) * self.mask


def test_assigned_buffers_and_attributes_are_those_of_the_network():
    net, x = Assigning().double(), torch.randn(5, 4, dtype=torch.float64)
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(0), strict=True)
    for _ in range(4):
        torch.testing.assert_close(model(x)[0], twin(x))
        torch.testing.assert_close(net.mean, twin.mean)
    for name in ("mask", "features"):
        assert type(getattr(net, name)) is torch.Tensor
        torch.testing.assert_close(getattr(net, name), getattr(twin, name))
    torch.testing.assert_close(net(x), twin(x))


class Sums(nn.Module):
    """Adds to a buffer in place, and returns it beside its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += x.detach().mean()
        return torch.tanh(self.linear(x)) * self.total, self.total, self.linear(x).detach()


@pytest.mark.parametrize("after", [None, 0])
def test_a_buffer_that_is_added_to_stays_the_same_tensor(after):
    nets = [Sums(), Sums()]
    nets[1].load_state_dict(nets[0].state_dict())
    buffer = nets[0].total
    model = db.Penalised(nets[0], db.OutputGradient(0), output=0, strict=True, flatten_after=after)
    for _ in range(3):
        x = torch.randn(4, 3)
        (out, total, cut), penalty = model(x)
        assert nets[0].total is buffer and total is buffer and not buffer.requires_grad
        assert out.requires_grad and not cut.requires_grad
        (out.sum() + penalty).backward()
        torch.testing.assert_close(out, nets[1](x)[0])
        torch.testing.assert_close(buffer, nets[1].total)


def test_a_buffer_that_grows():
    class Growing(Bent):
        def __init__(self):
            super().__init__(lambda h: h * self.seen.shape[0])
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.zeros(self.seen.shape[0] + 1)
            return super().forward(x)

    net, x = Growing().double(), torch.randn(5, 4, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(0))
    for calls in range(1, 5):
        out = model(x)[0]
        assert net.seen.shape == (1 + calls,)
        torch.testing.assert_close(out, Bent.forward(net, x))


# --------------------------------------------------------------------------- other inputs


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x, mask):
        q, k, v = (t[:, None] for t in self.dense(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y[:, 0].mean(1))


def test_attention_stays_whole_unless_its_mask_asks_for_a_gradient(counted):
    net, x = Masked().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.randn(1, 1, 5, 5, dtype=torch.float64)
    model = db.Penalised(net, db.OutputGradient(1))
    whole = torch.ops.aten.scaled_dot_product_attention.default

    def operators():
        graph, _ = find_graph(net, None, (x.clone().requires_grad_(), mask), {})
        return [node.op for node in graph.nodes]

    assert whole in operators()
    model(x, mask)[1].backward()
    mask.requires_grad_()
    assert whole not in operators()
    net.zero_grad()
    model(x, mask)[1].backward()
    found = [mask.grad, *(p.grad for p in net.parameters())]
    mask.grad = None
    net.zero_grad()
    y = x.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (g,) = torch.autograd.grad(net(y, mask)[:, 1].sum(), y, create_graph=True)
        g.square().flatten(1).sum(1).mean().backward()
    for a, b in zip(found, [mask.grad, *(p.grad for p in net.parameters())], strict=True):
        if b is not None:
            torch.testing.assert_close(a, b)
    assert len(counted) == 2


def test_a_forward_hook_that_looks_on_is_called_every_time():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    seen = {}
    hook = net[1].register_forward_hook(lambda module, args, out: seen.update(features=out))
    kept = dict(net[1]._forward_hooks)
    model = db.Penalised(net, db.OutputGradient(0))
    model(torch.randn(6, 4))
    assert net[1]._forward_hooks == kept
    for _ in range(3):
        x = torch.randn(6, 4)
        model(x)[1].backward()
        torch.testing.assert_close(seen["features"], net[:2](x))
    hook.remove()
    db.Penalised(net, db.OutputGradient(0), strict=True)(x)


def test_a_forward_hook_may_remove_itself():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def once(module, args, out):
        hook.remove()
        return 2 * out

    hook = net[1].register_forward_hook(once)
    with pytest.warns(db.CaptureWarning, match="hook"):
        db.Penalised(net, db.OutputGradient(0))(torch.randn(6, 4))
    assert not net[1]._forward_hooks


def test_a_network_that_is_gone_leaves_nothing_behind():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    db.Penalised(net, db.OutputGradient())(torch.randn(3, 4))[1].backward()
    graph = dynamo.find_graph(net, None, (torch.randn(3, 4),), {})[0]
    left = [weakref.ref(t) for t in (net, net[0].weight, dynamo.capture_of(net), graph)]
    del net, graph
    gc.collect()
    assert [r() for r in left] == [None] * 4


@dataclasses.dataclass
class Both:
    logits: torch.Tensor
    features: torch.Tensor


@pytest.mark.parametrize(
    ("pack", "choice", "told"),
    [
        (lambda t: {"energy": t}, "enrgy", r"; did you mean 'energy'\?$"),
        (lambda t: {"head": {"energy": t}}, ("head", "enrgy"), r"; did you mean 'energy'\?$"),
        (lambda t: Both(t, 2 * t), "logit", r"; did you mean 'logits'\?$"),
        (lambda t: (t, 2 * t), 2, "exist$"),
        (lambda t: [t], "energy", "exist$"),
        (lambda t: t, "energy", "exist$"),
        (lambda t: t, 17, "exist$"),
        (lambda t: (t, {"energy": t}), (0, 17), "exist$"),
        (lambda t: (t, {"energy": t}), (1, "enrgy"), r"; did you mean 'energy'\?$"),
        (lambda t: {"head": {"energy": t}}, "head", "is a dict, no tensor; in it are 'energy'$"),
        (lambda t: {"energy": t, "count": 3}, "count", "is a int, no tensor$"),
        (lambda t: t, [0], "by an index, a key"),
    ],
)
def test_an_output_that_is_not_there_is_refused_and_nothing_is_changed(pack, choice, told):
    net = Normed(pack)
    for sweeps in (None, False):
        with pytest.raises(db.OutputChoiceError, match=told):
            db.Penalised(net, db.OutputGradient(0), output=choice, sweeps=sweeps)(torch.randn(3, 4))
    assert net.norm.num_batches_tracked == 0
    assert torch.equal(net.norm.running_var, torch.ones(4))


class Normed(nn.Module):
    """Counts its calls in a buffer. pack: what it returns of a tensor."""

    def __init__(self, pack):
        super().__init__()
        self.norm, self.pack = nn.BatchNorm1d(4), pack

    def forward(self, x, scale=1.0, *, mask=1.0):
        return self.pack(scale * self.norm(x) * mask)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"wrt": (0, "x")}, "names an input twice: 'x' is among the others$"),
        ({"wrt": ["x", "x"], "allow_unused": True}, "names an input twice"),
        ({"wrt": "scales"}, "did you mean 'scale'"),
        ({"wrt": "scale"}, r"wrt='scale' names no argument of this call; it has \['x'\]$"),
        (
            {"wrt": ("x", "scal")},
            "no container, and 'scal' names no argument; did you mean 'scale'",
        ),
        ({"wrt": True}, "neither a position nor a name"),
        ({"wrt": [["x"]]}, "neither a position nor a name"),
        ({"v": 5}, "out of range"),
        ({"v": lambda out: out.sum()}, "must have the output's shape"),
    ],
)
def test_what_is_asked_of_the_derivative_wrongly_is_refused_and_nothing_is_changed(wrong, told):
    net = Normed(torch.sin)
    for sweeps in (None, False):
        with pytest.raises(db.InputError, match=told):
            db.WithGradient(net, sweeps=sweeps, **wrong)(torch.randn(3, 4))
    assert net.norm.num_batches_tracked == 0


@pytest.mark.parametrize("way", ["model", "loss", "backend"])
def test_parameters_can_be_swapped_after_a_call(way):
    """PyTorch refuses to swap a tensor that anything refers to weakly."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(net):
        y = x.clone().requires_grad_()
        out = net(y)
        (g,) = torch.autograd.grad(out.sum(), y, create_graph=True)
        return out.square().mean() + g.square().sum(1).mean()

    if way == "model":
        model = db.Penalised(net, db.OutputGradient(), sweeps=True)
        result = lambda: (lambda out, penalty: out.square().mean() + penalty)(*model(x))  # noqa: E731
    elif way == "loss":
        compiled = db.compile(lambda: loss(net), compiler="eager")
        result = compiled
    else:
        fast = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
        result = lambda: loss(fast)  # noqa: E731
    for _ in range(3):
        for _ in range(2):
            net.zero_grad()
            result().backward()
        found = [p.grad for p in net.parameters()]
        net.zero_grad()
        loss(net).backward()
        for a, b in zip(found, [p.grad for p in net.parameters()], strict=True):
            torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)
        for p in net.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(torch.randn_like(p)))


def test_what_pytorch_knows_of_an_operator_is_put_back(monkeypatch):
    op, known = torch.ops.aten.linear.default, lifting._torch.op_implementations_dict
    made, original = [], lifting.override_composite_implicit_decomp
    monkeypatch.setattr(lifting, "_entries", {})
    monkeypatch.setattr(
        lifting, "override_composite_implicit_decomp", lambda ops: made.append(1) or original(ops)
    )
    before = dict(op.py_kernels), set(known)
    for width in (4, 5):  # two networks, one set of entries
        graph, _ = dynamo.find_graph(nn.Linear(3, width), None, (torch.randn(2, 3),), {})
        assert [node.op for node in graph.nodes] == [op]
        assert (dict(op.py_kernels), set(known)) == before
    assert len(made) == 1
    key = torch._C.DispatchKey.AutogradXLA
    monkeypatch.setattr(op, "py_kernels", {**op.py_kernels, key: torch.nn.functional.linear})
    graph, _ = dynamo.find_graph(nn.Linear(3, 6), None, (torch.randn(2, 3),), {})
    assert len(made) == 2 and op.py_kernels[key] is torch.nn.functional.linear


# ------------------------------------------------------------------- what need not be computed


def operators(net: nn.Module, *args) -> list[str]:
    graph, _ = find_graph(net, None, args, {})
    return [node.op._schema.name.removeprefix("aten::") for node in graph.nodes]


class Heads(nn.Module):
    """Attention as it is often written out: q, k and v by their places, products of heads that do
    not lie one after the other."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.qkv, self.out, self.rate = nn.Linear(6, 18), nn.Linear(6, 2), rate

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        weights = nn.functional.dropout(weights, self.rate, self.training)
        mixed = (weights @ v).transpose(1, 2).reshape(rows, length, width).contiguous()
        return self.out(nn.functional.pad(mixed, (0, 0, 0, 0))).mean(1)


def test_heads_are_copied_once_and_taken_apart_at_once():
    found = operators(Heads(), torch.randn(4, 5, 6))
    assert "matmul" not in found and found.count("bmm") == 2
    assert "select" not in found and found.count("unbind") == 1
    assert found.count("clone") == 4  # q, k, v and what was mixed; none for dropout, none for pad
    assert "pad" not in found
    model = db.Penalised(Heads().double(), db.OutputGradient(0))
    assert db.check(model, torch.randn(4, 5, 6, dtype=torch.float64)).worst < 1e-10


def test_heads_of_open_sizes(counted):
    model = db.WithGradient(Heads().double(), strict=True)
    for rows, length in ((4, 5), (3, 5), (6, 7), (2, 3), (5, 8)):
        x = torch.randn(rows, length, 6, dtype=torch.float64, requires_grad=True)
        _, gradient = model(x)
        (expected,) = torch.autograd.grad(model.net(x).sum(), x)
        torch.testing.assert_close(gradient, expected)
    assert len(counted) <= 3


class Slices(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.cut, self.fc = cut, nn.Linear(6, 6)

    def forward(self, x):
        return self.cut(self.fc(x).tanh())


PIECES = {
    "halves": (lambda h: torch.cat((-h[:, 3:], h[:, :3]), 1) * h, True),
    "three, out of order": (lambda h: h[:, 4:] * h[:, :2] + h[:, 2:4], True),
    "one of them twice": (lambda h: h[:, :3] * h[:, 3:] + h[:, :3], True),
    "columns": (lambda h: h[:, 0] * h[:, 1] + h[:, 2] * h[:, 3] + h[:, 4] * h[:, -1], True),
    "negative ends": (lambda h: h[:, :-2].sum(1) * h[:, -2:].prod(1), True),
    "not all of it": (lambda h: h[:, :2] * h[:, 2:4], False),
    "overlapping": (lambda h: h[:, :4] * h[:, 2:], False),
    "every second": (lambda h: h[:, ::2] * h[:, 1::2], False),
    "rows of the batch": (lambda h: h[:2] * h[2:], True),
    "pieces of a piece": (lambda h: h[:, :2] * (lambda k: k[:, :2] * k[:, 2:])(h[:, 2:]), True),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_that_cover_a_tensor(name):
    """Joined or not, they are what they were."""
    cut, joined = PIECES[name]
    net = Slices(cut).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    found = operators(net, x)
    assert joined == any(op in ("split_with_sizes", "unbind") for op in found)
    assert joined != any(op in ("slice", "select") for op in found)
    model = db.WithGradient(net)
    x.requires_grad_()
    for _ in range(3):
        out, gradient = model(x)
        total = gradient.square().sum() + out.sum()
        got = torch.autograd.grad(total, [x, *net.parameters()])
        expected_out = net(x)
        (slope,) = torch.autograd.grad(expected_out.sum(), x, create_graph=True)
        expected = torch.autograd.grad(
            slope.square().sum() + expected_out.sum(), [x, *net.parameters()]
        )
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


class Copies(nn.Module):
    """Copies that must stay: of a buffer that is written afterwards, of the input, of a result that
    is returned beside them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        before = self.scale.clone()
        self.scale.add_(1.0)
        h = self.fc(x)
        return (h.clone() * before).sin(), h, h.clone().view(-1), x.clone()


class Untold(nn.Module):
    """Copies of what PyTorch calls new and may be the input itself, and of a conjugate."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        images = nn.functional.pixel_shuffle(x.view(1, 1, 3, 4), 1).clone()
        same = x.type_as(self.fc.weight).clone() + images.view(3, 4)
        z = torch.complex(same.sin(), self.fc(same)).conj()
        return torch.view_as_real(z.resolve_conj()).sin().prod(-1)


def test_copies_of_what_may_be_the_input_and_of_a_conjugate_stay():
    net, start = Untold().double(), torch.randn(3, 4, dtype=torch.float64)
    model = db.WithGradient(net)
    for _ in range(4):
        found = []
        for change in (False, True):
            x = start.clone()
            out, gradient = model(x)
            if change:
                x.fill_(9.0)
            total = gradient.square().sum() + out.sum()
            found.append(torch.autograd.grad(total, list(net.parameters())))
        x = start.clone().requires_grad_()
        expected_out = net(x)
        (slope,) = torch.autograd.grad(expected_out.sum(), x, create_graph=True)
        total = slope.square().sum() + expected_out.sum()
        expected = torch.autograd.grad(total, list(net.parameters()))
        torch.testing.assert_close(found, [expected, expected], rtol=1e-10, atol=1e-12)


def test_copies_that_somebody_may_write_to_stay():
    net = Copies().double()
    model = db.WithGradient(net, output=0)
    for step in range(3):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        (out, h, again, same), gradient = model(x)
        assert net.scale.eq(3.0 + step).all()
        for t in (h, again, same):
            with torch.no_grad():
                t.fill_(9.0)
        total = gradient.square().sum() + out.sum()
        got = torch.autograd.grad(total, [x, *net.parameters()])
        expected_out = ((net.fc(x)) * (2.0 + step)).sin()
        (slope,) = torch.autograd.grad(expected_out.sum(), x, create_graph=True)
        expected = torch.autograd.grad(
            slope.square().sum() + expected_out.sum(), [x, *net.parameters()]
        )
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


class Shown:
    def __repr__(self):
        return "shown"


class Alike:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return self.number


SHOWN, KEY, TABLE = Shown(), Alike(1), {Alike(2): 1.0, Alike(1): 2.0}
DRAWS, NUMBER = random.Random(0), np.float64(2.0)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * len(str(SHOWN)),
        lambda x: x * (2.0 if KEY in TABLE else 3.0),
        lambda x: x * (2.0 if SHOWN.__repr__ == KEY.__hash__ else 3.0),
        lambda x: x * DRAWS.random(),
        lambda x: x * (2.0 if isinstance(NUMBER, float) else 3.0),
        lambda x: x * len(os.getenv("HOME", "")),
    ],
)
def test_what_others_compile_is_read_as_before(program, monkeypatch):
    """What the library knows better than Dynamo, or refuses, is for its own graphs: other backends
    have as many graphs as they have without it."""

    def compile():
        torch._dynamo.reset()
        graphs = []
        torch.compile(
            program, backend=lambda module, given: graphs.append(module) or module.forward
        )(torch.ones(2))
        return [[n.target for n in module.graph.nodes] for module in graphs]

    guards.teach()
    taught = compile()
    monkeypatch.setattr(guards, "_is_ours", lambda: False)
    assert compile() == taught
    assert taught or _torch.before(2, 13)  # which has no graph of some


@pytest.mark.parametrize("on", [True, False])
def test_garbage_of_a_first_capture_is_left_to_python_s_collector(on, monkeypatch):
    """Where it is switched on; where it is not, Dynamo's own collection stays."""
    collected, collect, was = [], gc.collect, gc.isenabled()
    (gc.enable if on else gc.disable)()
    monkeypatch.setattr(gc, "collect", lambda *given: collected.append(given) or collect(*given))
    before = _torch.dynamo_config.run_gc_after_compile
    try:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        db.WithGradient(net, sweeps=True)(torch.randn(5, 3))
    finally:
        (gc.enable if was else gc.disable)()
    assert bool(collected) != on
    assert before and _torch.dynamo_config.run_gc_after_compile


def test_an_error_leaves_transforms_of_every_kind():
    functorch = torch._C._functorch

    def fails(x):
        with dynamo.leaving_transforms():
            functorch._jvp_increment_nesting()
            functorch._grad_increment_nesting()
            functorch._vmap_increment_nesting(2, "error")
            functorch._func_increment_nesting(False)
            raise KeyError("inside")

    def outer(x):
        before = _torch.transforms_entered()
        with pytest.raises(KeyError):
            fails(x)
        assert _torch.transforms_entered() == before > 0
        return x.sin()

    x = torch.randn(3, 2)
    torch.testing.assert_close(torch.func.vmap(outer)(x), x.sin())


class SlicedByDefault(nn.Module):
    def forward(self, x):
        return torch.ops.aten.slice.Tensor(x).sin()


def test_a_slice_whose_axis_is_left_out_is_captured():
    penalty = db.OutputGradient("sum")
    model = db.Penalised(SlicedByDefault(), penalty, strict=True, sweeps=True)
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(model(x)[1], x.cos().square().sum(1).mean())
