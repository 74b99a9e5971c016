"""Gradients that a CUDA graph lends: what anybody holds survives the next replay."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import doubleback as db
from doubleback.capture import find_graph
from doubleback.run import straight_line
from doubleback.run.bridge import deliver
from doubleback.run.cuda_graphs import Lent, culprit, innermost

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TO_COPY = torch.ops.aten._to_copy.default


class Replayed:
    """A step whose gradients lie in the same memory every time, as those of a CUDA graph do."""

    def __init__(self, owners: list[nn.Parameter]) -> None:
        self.owners, self.places = owners, [torch.zeros_like(p) for p in owners]
        self.lent = Lent([*self.places[:-1], None, self.places[-1]])

    def __call__(self, value: float) -> None:
        owners = [*self.owners[:-1], torch.ones(2), self.owners[-1]]
        self.lent.recall(owners)
        for i, place in enumerate(self.places):
            place.fill_(value + i)
        grads = self.lent.hand_out()
        assert grads[-2] is None
        deliver([(t, g) for t, g in zip(owners, grads, strict=True) if g is not None], True)


@pytest.fixture
def step() -> Replayed:
    return Replayed([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])


def grads(step: Replayed) -> list[float]:
    found = [p.grad for p in step.owners]
    assert all(g is not None and (g == g.flatten()[0]).all() for g in found)
    return [float(g.flatten()[0]) for g in found if g is not None]


def lies_there(step: Replayed) -> bool:
    pairs = zip(step.owners, step.places, strict=True)
    return all(p.grad is not None and p.grad.data_ptr() == t.data_ptr() for p, t in pairs)


def test_gradients_are_not_copied(step):
    for value in (1.0, 5.0):
        for p in step.owners:
            p.grad = None
        step(value)
        assert grads(step) == [value, value + 1]
        assert lies_there(step)


def test_gradients_are_added_up(step):
    for value in (1.0, 5.0, 10.0):
        step(value)
    assert grads(step) == [16.0, 19.0]


def test_zeroed_in_place(step):
    step(1.0)
    for p in step.owners:
        p.grad.zero_()
    step(5.0)
    assert grads(step) == [5.0, 6.0]


def test_who_holds_a_gradient_keeps_it(step):
    step(1.0)
    first = step.owners[0].grad  # the tensor itself,
    part = step.owners[1].grad[1]  # and a view
    for p in step.owners:
        p.grad = None
    step(5.0)
    assert grads(step) == [5.0, 6.0]
    assert first.tolist() == [1.0] * 3
    assert part.tolist() == [2.0] * 2
    del first, part
    for p in step.owners:
        p.grad = None
    step(7.0)
    assert grads(step) == [7.0, 8.0]
    assert lies_there(step)


def test_who_holds_a_gradient_that_is_added_to(step):
    step(1.0)
    held = [p.grad for p in step.owners]
    parts = [g.view(-1)[1:] for g in held]
    step(5.0)
    assert grads(step) == [6.0, 8.0]
    assert [float(g.flatten()[0]) for g in held] == [6.0, 8.0]  # the tensor that was added to
    assert [float(g[0]) for g in parts] == [6.0, 8.0]  # and what reads it


@needs_gpu
def test_on_a_device():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).cuda()
    plain = db.Penalised(net, db.LossGradient("mse"))
    graphed = db.Penalised(net, db.LossGradient("mse"), cuda_graph=True)

    def run(model: db.Penalised, sets: list) -> list[torch.Tensor]:
        for p in net.parameters():
            p.grad = None
        for x, y in sets:
            model.accumulate(x, y)
        return [p.grad for p in net.parameters() if p.grad is not None]

    sets = [(torch.randn(4, 6).cuda(), torch.randn(4, 5).cuda()) for _ in range(3)]
    expected = [[g.clone() for g in run(plain, sets[:n])] for n in (1, 2, 3)]
    found = [run(graphed, sets[:n]) for n in (1, 2, 3)]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


class Mask(nn.Module):
    """Writes numbers into a tensor of its own, as windows of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(x.shape)
        mask[:, 1:3] = torch.tensor(-2.0)
        return self.layer(torch.tanh(x + mask) * torch.tensor(0.5))


def test_constants_of_the_host_lie_where_they_are_read():
    """`meta` stands for a device here."""
    net = Mask()
    net.layer.to("meta")
    graph, _ = find_graph(net, None, (torch.randn(4, 6, device="meta"),), {})
    assert len(graph.constants) == 2
    assert {t.device.type for t in graph.constants.values()} == {"meta"}
    assert {m.device.type for m in graph.values if m is not None} == {"meta"}
    graph, _ = find_graph(Mask(), None, (torch.randn(4, 6),), {})
    assert {t.device.type for t in graph.constants.values()} == {"cpu"}


def test_a_flat_graph_copies_no_constant_of_the_host():
    weight = torch.tensor([1.0, 2.0])

    def copied(x):
        return x * weight.to(x.device).expand(3, 2)

    def written(x):
        return x * weight.to(x.device).add_(1)

    x = torch.randn(3, 2, device="meta")
    for fn, left in ((copied, 0), (written, 1)):
        module = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        assert [n.target for n in module.graph.nodes].count(TO_COPY) == 1
        straight_line.move_constants(module)
        assert [n.target for n in module.graph.nodes].count(TO_COPY) == left
        assert module(x).shape == (3, 2)


def test_the_operator_that_a_graph_cannot_hold_is_named():
    def broken(x, y):
        return torch.ops.aten.mm.default(torch.ops.aten.sin.default(x), y)

    module = make_fx(broken)(torch.randn(2, 3), torch.randn(3, 2))
    with pytest.raises(RuntimeError) as found:
        try:
            module(torch.randn(2, 3), torch.randn(2, 2))
        finally:
            torch.ones(2)[5:].view(3)  # what ending the capture raises
    assert culprit(innermost(found.value)) == "aten.mm.default"


def gpu_step(model: db.Penalised, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    for p in model.parameters():
        p.grad = None
    out, loss, penalty = model.accumulate(x, y)
    return [out, loss, penalty, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


class Waits(nn.Module):
    """An operator that waits for the device, which no capture survives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return waits(self.inner(x))


@torch.library.custom_op("doubleback_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    return x * (1 if x.sum().item() < 1e9 else 2)


@waits.register_fake
def _(x):
    return torch.empty_like(x)


waits.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("doubleback_test::fails", mutates_args=())
def fails(x: torch.Tensor, where: list[int]) -> torch.Tensor:
    if where == FAILS:
        raise ValueError("as a capture does")
    return x * 1


@fails.register_fake
def _(x, where):
    return torch.empty_like(x)


FAILS: list[int] = []
fails.register_autograd(
    lambda ctx, grad: (fails(grad, [ctx.where, 1]), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "where", inputs[1][0]),
)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fails(self.inner(x), VALUE)


VALUE, DERIVATIVE = [0, 0], [0, 1]
NODE_BY_NODE, STRAIGHT_LINE = 0, 4  # calls before


@pytest.mark.parametrize(
    ("by", "where", "calls"),
    [
        ("call", VALUE, NODE_BY_NODE),
        ("call", DERIVATIVE, NODE_BY_NODE),
        ("call", VALUE, STRAIGHT_LINE),
        ("accumulate", DERIVATIVE, STRAIGHT_LINE),
    ],
)
def test_the_operator_of_a_step_that_fails_is_named(monkeypatch, by, where, calls):
    model = db.Penalised(Failing(), db.LossGradient("mse"))
    x, y = torch.randn(4, 6), torch.randn(4, 5)

    def step():
        if by == "call":
            sum(model(x, y)[1:]).backward()
        else:
            model.accumulate(x, y)

    for _ in range(calls):
        step()
    monkeypatch.setattr(sys.modules[__name__], "FAILS", where)
    with pytest.raises((RuntimeError, ValueError), match="as a capture does") as found:
        step()
    assert ("<string>" in str(found.getrepr())) == (calls == STRAIGHT_LINE)
    assert "fails" in culprit(innermost(found.value))


CALLS = {
    "a binding": (lambda x, y: (x.mm(y),), "mm"),
    "a dense layer": (lambda x, y: (torch.addmm(y[0], x, y.t()),), "_C._nn.linear"),
    "a method": (lambda x, y: (y.sin().view(len(x), 2),), "reshape"),
    "an operator": (lambda x, y: (y.unfold(1, len(x), 1),), "aten.unfold.default"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_of_a_line_is_named(name):
    fn, expected = CALLS[name]
    graph = make_fx(fn, tracing_mode="fake")(torch.randn(2, 2), torch.randn(2, 2))
    code = straight_line.boxed(graph)
    with pytest.raises((RuntimeError, IndexError)) as found:
        code([torch.randn(2, 2), torch.randn(3, 1)])
    assert culprit(found.value) == expected


@needs_gpu
def test_a_capture_that_fails_leaves_all_as_it_was():
    torch.manual_seed(0)
    net = Waits().cuda()
    plain, graphed = (
        db.Penalised(net, db.LossGradient("mse"), cuda_graph=on) for on in (False, True)
    )
    x, y = torch.randn(4, 6).cuda(), torch.randn(4, 5).cuda()
    torch.cuda.manual_seed(1)
    expected = [gpu_step(plain, x, y) for _ in range(3)]
    end = torch.cuda.get_rng_state()
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(1)
    with pytest.warns(db.CaptureWarning, match="waits") as said:
        found = [gpu_step(graphed, x, y) for _ in range(3)]
    assert len([w for w in said if "cuda_graph" in str(w.message)]) == 1
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cuda.get_rng_state(), end)
    assert torch.cuda.current_stream() == stream
    torch.randn(3, device="cuda")  # the generator is not taken to be in a capture
    assert not torch.cuda.is_current_stream_capturing()
    held = torch.cuda.memory_allocated()
    torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == held
    other = db.Penalised(nn.Linear(6, 5).cuda(), db.LossGradient("mse"), cuda_graph=True)
    assert all(t.isfinite().all() for t in gpu_step(other, x, y))  # and captures work


@needs_gpu
def test_constants_of_the_host_are_captured():
    torch.manual_seed(0)
    net = Mask().cuda()
    x, y = torch.randn(4, 6).cuda(), torch.randn(4, 5).cuda()
    for penalty in (
        db.LossGradient("mse"),
        db.LossGradient("mse", db.Norm(db.spaces.Weighted(torch.rand(6) + 1))),
    ):
        plain, graphed = (db.Penalised(net, penalty, cuda_graph=on) for on in (False, True))
        for _ in range(4):
            a, b = gpu_step(plain, x, y), gpu_step(graphed, x, y)
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ two graphs for one call


class Images(nn.Module):
    """With buffers that the forward pass writes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.head(self.drop(torch.nn.functional.silu(self.norm(self.conv(x)))).mean((2, 3)))


def _trained(model: db.Penalised, batches: list, **options) -> list[torch.Tensor]:
    """Parameters and buffers after a few steps of a plain loop."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimiser.zero_grad(**options)
        out, penalty = model(x, y)
        (torch.nn.functional.cross_entropy(out, y) + 0.3 * penalty).backward()
        optimiser.step()
    return [t.detach().clone() for t in (*model.net.parameters(), *model.net.buffers())]


def _models() -> tuple[db.Penalised, db.Penalised]:
    torch.manual_seed(0)
    net = Images().cuda().double()
    twin = Images().cuda().double()
    twin.load_state_dict(net.state_dict())
    penalty = db.LossGradient("cross_entropy")
    return db.Penalised(net, penalty), db.Penalised(twin, penalty, cuda_graph=True)


def _batches(count: int) -> list:
    x = torch.randn(count, 4, 3, 8, 8).cuda().double()
    return list(zip(x, torch.randint(5, (count, 4)).cuda(), strict=True))


@needs_gpu
@pytest.mark.parametrize("to_none", [True, False])
def test_a_call_and_its_backward_are_two_graphs(to_none):
    plain, graphed = _models()
    batches = _batches(7)
    expected = _trained(plain, batches, set_to_none=to_none)
    found = _trained(graphed, batches, set_to_none=to_none)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@needs_gpu
def test_a_call_before_the_last_one_s_backward_runs_beside_it():
    plain, graphed = _models()
    plain.eval(), graphed.eval()
    (x, y), (u, v) = _batches(2)
    for _ in range(3):
        graphed(x, y)[1].backward()
    for model in (plain, graphed):
        model.zero_grad()
        first, second = model(x, y), model(u, v)
        (first[1] + 2 * second[1] + first[0].square().mean() + second[0].sum()).backward()
    for p, q in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@needs_gpu
def test_outputs_and_gradients_of_a_graphed_call_stay_what_they_were():
    plain, graphed = _models()
    plain.eval(), graphed.eval()
    batches = _batches(4)
    held = []
    for x, y in batches:
        graphed.zero_grad()
        out, penalty = graphed(x, y)
        penalty.backward()
        held.append((out, penalty, [p.grad for p in graphed.parameters()]))
    for (x, y), (out, penalty, grads) in zip(batches, held, strict=True):
        plain.zero_grad()
        expected, value = plain(x, y)
        value.backward()
        assert torch.allclose(out, expected) and torch.allclose(penalty, value)
        for p, g in zip(plain.parameters(), grads, strict=True):
            assert torch.allclose(g, p.grad, rtol=1e-9, atol=1e-12)


@needs_gpu
def test_a_graphed_call_with_other_seeds_and_kept_graphs():
    plain, graphed = _models()
    plain.eval(), graphed.eval()
    ((x, y),) = _batches(1)
    for _ in range(2):
        found = []
        for model in (plain, graphed):
            model.zero_grad()
            out, penalty = model(x, y)
            penalty.backward(retain_graph=True)
            out.sum().backward(retain_graph=True)
            (out.square().sum() + penalty).backward()
            found.append([p.grad for p in model.parameters()])
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@needs_gpu
def test_a_kept_graph_that_is_let_go_leaves_the_pair_free():
    graphed = _models()[1]
    ((x, y),) = _batches(1)
    graphed(x, y)[1].backward()
    penalty = graphed(x, y)[1]
    penalty.backward(retain_graph=True)  # its last two sweeps are captured here
    del penalty
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda g: replays.append(1) or replay(g))
        graphed(x, y)[1].backward()
    assert len(replays) == 2


@needs_gpu
def test_sizes_that_change_run_without_a_graph_and_say_so():
    graphed = _models()[1]
    with pytest.warns(db.CaptureWarning, match="sizes change"):
        for n in (4, 3, 2, 5):
            x, y = torch.randn(n, 3, 8, 8).cuda().double(), torch.randint(5, (n,)).cuda()
            graphed(x, y)[1].backward()
