"""`torch.compile(net, backend="doubleback")`: double backward through compiled regions, against
stock eager autograd in float64."""

import copy
import functools
import gc
import importlib
import tomllib
import warnings
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import doubleback as db
from support.fresh import run_fresh
from support.gpu import needs_gpu

# Dynamo looks at it itself where a region is given another's output, and says so to itself alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # what PyTorch advises on a GPU that has them, once in a process, while it compiles
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

TOLERANCE = 1e-10
ROOT = Path(__file__).parent.parent
backend = importlib.import_module("doubleback.compile.backend")


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def made(monkeypatch) -> list:
    """All sets of passes that are made while a test runs."""
    found, original = [], backend.Stages

    def recorded(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(backend, "Stages", recorded)
    return found


def compiled(fn, compiler="eager", **options):
    return torch.compile(fn, backend="doubleback", options={"compiler": compiler}, **options)


def tensors_of(result) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [t for t in results if isinstance(t, Tensor) and t.requires_grad]


def penalty(fn, x: Tensor, parameters) -> list:
    """A loss of all outputs and of their gradient by x, and its gradients."""
    total = sum((1 + i) * t.cos().sum() for i, t in enumerate(tensors_of(fn(x))))
    (g,) = torch.autograd.grad(total, x, create_graph=True)
    loss = 0.1 * total + (g.square().sum(1) + 1e-3).sqrt().mean()
    return [loss, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)]


def assert_same(found, wanted, tolerance=TOLERANCE):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def trained(net: nn.Module) -> list[Tensor]:
    return [p for p in net.parameters() if p.requires_grad]


def against_eager(net, make=lambda: torch.randn(6, 4), calls=3, compiler="eager", run=penalty):
    """Several calls of both: the first double backward is autograd's, the next are the passes'."""
    reference, fast = copy.deepcopy(net), compiled(net, compiler)
    for _ in range(calls):
        x = make().requires_grad_()
        wanted = run(reference, x, trained(reference))
        assert_same(run(fast, x, trained(net)), wanted)
        for a, b in zip(net.state_dict().values(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    return fast


def mlp(width=8, out=2) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, out)
    )


class Net(nn.Module):
    """Two layers with something in between, which is given the first one's output and itself."""

    def __init__(self, between, last=6) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 6), nn.Linear(last, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).tanh(), self))


# --------------------------------------------------------------- what forward passes do


def split(h, _):
    torch._dynamo.graph_break()
    a, b = (2 * h).chunk(2, 1)
    torch._dynamo.graph_break()
    return torch.cat([a.sin() * b, b.exp()], 1)


def branch(h, _):
    return h.exp() if h.sum() > 0 else h.sin()


def in_place(h, _):
    h = h * 2
    h[:, 0].mul_(2)
    h.add_(1).sin_()
    other = h.clone()
    other[:, :2] = h[:, 2:4]
    return other * h


def partly_off(h, _):
    with torch.no_grad():
        most = h.max(1, keepdim=True).values
    return (h - most).exp() * h.detach().sin()


def checkpointed(h, _):
    return checkpoint(lambda z: (2 * z).tanh().sin(), h, use_reentrant=False)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        y = x.exp()
        ctx.save_for_backward(x, y)
        ctx.k = k
        return y * x, y.detach()

    @staticmethod
    def backward(ctx, g, _):
        x, _y = ctx.saved_tensors
        return ctx.k * g * x.exp() * (1 + x), None


def own_function(h, _):
    return Squared.apply(h, 3.0)[0]


def embedded(h, net):
    return h * F.embedding(torch.arange(h.shape[0]) % 4, net.first.weight[:4].T.repeat(1, 1)[:, :1])


def normed(h, _):
    return F.layer_norm(h, (6,)) * F.softmax(h, 1)


def constants(h, _):
    return h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(6)


def transformed(h, net):
    weight = net.first.weight[:, 0]
    return torch.func.vmap(torch.func.grad(lambda z: (z.sin() * weight).sum().square()))(h)


def complex_numbers(h, _):
    return torch.view_as_real(torch.polar(h.exp(), h)[:, :3]).flatten(1)


BETWEEN = [
    constants, transformed, complex_numbers,
    split, branch, in_place, partly_off, checkpointed, own_function, embedded, normed,
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_what_forward_passes_do(between):
    against_eager(Net(between))


def test_attention_whose_second_derivative_pytorch_lacks(made):
    def between(h, _):
        q = h.reshape(1, -1, 2, 3).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q.sin(), q.cos()).transpose(1, 2).reshape(-1, 6)

    net = Net(between)
    fast = compiled(net)
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = penalty(net, x, trained(net))
        assert_same(penalty(fast, x, trained(net)), wanted)
    assert made


def test_regions_are_compiled_from_the_second_call_on(made):
    net = Net(split)
    fast = compiled(net)
    counts = []
    for _ in range(4):
        penalty(fast, torch.randn(6, 4, requires_grad=True), trained(net))
        counts.append(len(made))
    assert counts[0] == 0 and counts[1] == counts[3] > 2  # one for each region


@pytest.mark.parametrize("frozen", ["first.weight", "second.weight", "first.bias"])
def test_frozen_weights(frozen):
    net = Net(normed)
    net.get_parameter(frozen).requires_grad_(False)
    against_eager(net)


def test_weights_frozen_during_the_call_alone():
    """Their gradient is none, whatever they ask for when the region is differentiated."""
    net = mlp()
    reference, fast = copy.deepcopy(net), compiled(net)
    for _ in range(4):
        x = torch.randn(6, 4, requires_grad=True)
        found = []
        for each, called in ((reference, reference), (net, fast)):
            each.zero_grad()
            each[2].requires_grad_(False)
            out = called(x)
            each[2].requires_grad_(True)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            slope.square().sum().backward(inputs=list(each.parameters()))
            found.append([p.grad for p in each.parameters()])
        assert_same(found[1], found[0])


def test_tied_weights():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    net[2].weight = net[0].weight
    against_eager(net)


def test_batch_norm_is_written_once():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    fast = against_eager(net)
    net.eval()
    reference = copy.deepcopy(net)
    for _ in range(2):
        x = torch.randn(6, 4, requires_grad=True)
        wanted = penalty(reference, x, trained(reference))
        assert_same(penalty(fast, x, trained(net)), wanted)
    assert int(net[1].num_batches_tracked) == 3


def test_convolutions():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.Flatten()
    )
    channels_last = [
        lambda: torch.randn(3, 2, 8, 8),
        lambda: torch.randn(3, 2, 8, 8).contiguous(memory_format=torch.channels_last),
    ]

    def run(fn, x, parameters):
        out = fn(x)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = g.square().sum() + out.sum()
        return [loss, *torch.autograd.grad(loss, [x, *parameters])]

    for make in channels_last:
        against_eager(net, make, run=run)


def test_attributes_that_change(made):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale, self.calls = mlp(), 1.0, 0

        def forward(self, x):
            self.calls += 1
            return self.scale * self.body(x)

    net = Scaled()
    reference, fast = copy.deepcopy(net), compiled(net)
    for scale in (1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0):
        net.scale = reference.scale = scale
        x = torch.randn(5, 4, requires_grad=True)
        wanted = penalty(reference, x, trained(reference))
        assert_same(penalty(fast, x, trained(net)), wanted)
        assert net.calls == reference.calls
    assert len(made) <= 2  # from the second value on it is a symbol


# ----------------------------------------------------------------------------- results


@pytest.mark.parametrize("ask", [lambda t: t.is_leaf, lambda t: t.grad_fn is None])
def test_whether_an_input_is_a_leaf(ask):
    net = nn.Linear(4, 2)

    def run(x):
        return (2 if ask(x) else 1) * net(x).exp()

    fast, x = compiled(run), torch.randn(6, 4, requires_grad=True)
    for t in (x, 1 * x, x, 2 * x):
        assert_same([fast(t)], [run(t)])


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "removed"])
def test_hooks_that_come_and_go(kind):
    net, hook = mlp(), None
    fast = compiled(net)
    for step in range(4):
        if step == 2 and kind == "pre":
            net[2].register_forward_pre_hook(lambda _, args: (0.5 * args[0],))
        elif step == 2 and kind == "backward":
            net[1].register_full_backward_hook(lambda _, given, __: (2 * given[0],))
        elif step == (0 if kind == "removed" else 2):
            hook = net[1].register_forward_hook(lambda *call: 2 * call[-1])
        elif step == 2:
            hook.remove()
        x = torch.randn(6, 4, requires_grad=True)
        wanted = penalty(net, x, trained(net))
        assert_same(penalty(fast, x, trained(net)), wanted)


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global:UserWarning"
)
@pytest.mark.parametrize("kind", ["forward hook", "pre hook", "method"])
def test_what_holds_for_all_modules_of_a_class(kind, monkeypatch):
    """Hooks of every module, and a method that is replaced on a class."""

    class Activation(nn.Module):
        def forward(self, x):
            return x.tanh()

    def doubled(module, args, *out):
        if isinstance(module, Activation):
            return 2 * out[0] if out else (2 * args[0],)

    net = nn.Sequential(nn.Linear(4, 6), Activation(), nn.Linear(6, 2))
    fast, handle = compiled(net), None
    for step in range(6):
        if step == 2 and kind == "method":
            monkeypatch.setattr(Activation, "forward", lambda self, x: x.sin())
        elif step == 2 and kind == "forward hook":
            handle = nn.modules.module.register_module_forward_hook(doubled)
        elif step == 2:
            handle = nn.modules.module.register_module_forward_pre_hook(doubled)
        elif step == 4 and handle is not None:
            handle.remove()
        x = torch.randn(6, 4, requires_grad=True)
        wanted = penalty(net, x, trained(net))
        assert_same(penalty(fast, x, trained(net)), wanted)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        h = self.layer(x).tanh()
        y = 2 * h
        return (
            x, x.view(-1, 2), h[:, :3], h, h.detach(), y.argmax(1), y.t(), 3, None, x.shape[0],
            h.square(), h.square(),
        )  # fmt: skip


def test_results_that_share_memory_or_are_no_numbers():
    net = Many()
    fast = against_eager(net)
    x = torch.randn(6, 4, requires_grad=True)
    for got, wanted in zip(fast(x), net(x), strict=True):
        assert type(got) is type(wanted)
        if isinstance(got, Tensor):
            assert torch.equal(got, wanted) and got.stride() == wanted.stride()
            assert got.requires_grad == wanted.requires_grad
    clone = x.detach().clone().requires_grad_()
    results = fast(2 * clone)
    assert results[1].untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr()
    assert results[2].untyped_storage().data_ptr() == results[3].untyped_storage().data_ptr()
    results[3].mul_(2)
    assert torch.equal(results[2], results[3][:, :3])  # a view of what was written to
    assert not torch.equal(results[10], results[3].square())
    with torch.no_grad():
        before = results[11].clone()
        results[10].zero_()
    assert torch.equal(results[11], before)


class Features(nn.Module):
    """A network that returns values in between, from which others are computed."""

    def __init__(self, run) -> None:
        super().__init__()
        self.run, self.first, self.second = run, nn.Linear(4, 6), nn.Linear(6, 6)
        self.last = mlp_of(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor):
        return self.run(self, x)


def mlp_of(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.SiLU(), nn.Linear(8, 2))


def chain(net, x):
    h = net.first(x).tanh()
    k = net.second(h).sin()
    return net.last(k) + h[:, :2], h, k


def parts(net, x):
    h = net.first(x).tanh()
    a, b = h.chunk(2, 1)
    return net.last(torch.cat([b, a], 1)), h, a


def views(net, x):
    h = net.first(x).tanh()
    return net.last(h), h.view(-1, 2, 3), h.t(), x.view(-1, 2, 2), 3, None


def written(net, x):
    h = net.first(x) * 1
    other = torch.zeros_like(h)
    other[:, 2:] = h[:, :4]
    k = net.second(other).tanh() * 1
    with torch.no_grad():
        k.clamp_(-0.5, 0.5)
        scale = k.mean()
    return net.last(k + other) * scale, other, k


def sizes(net, x):
    h = net.first(x).tanh()
    rows = h.shape[0] * 2
    return net.last(h).repeat(2, 1)[:rows] / rows, h, rows


def cast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = net.first(x)
        with torch.autocast("cpu", enabled=False):
            k = net.second(h.double())
        out = net.last(k)
    return out.double(), h.double(), k


def broken(net, x):
    h = net.first(x).tanh()
    k = net.second(h)
    torch._dynamo.graph_break()
    return net.last(k + h), k, h


def stored(net, x):
    net.kept = net.first(x).tanh()
    return net.last(net.kept), net.kept


def doubled(net, x):
    h = net.first(x)
    return net.last(2 * h), h


def transformed(net, x):
    h = net.first(x).tanh()
    jacobian = torch.func.vmap(torch.func.jacrev(net.last))(h)
    return jacobian.square().sum(2), h, torch.ones(2)


def written_late(net, x):
    z = net.first(x) * 1
    h = net.second(z.clone()).tanh()
    z.add_(h)
    return net.last(h) + z[:, :2], h


def written_off_the_tape(net, x):
    h = net.first(x) * 1
    k = h[:, :2] * 2
    with torch.no_grad():
        h.clamp_(-0.5, 0.5)
    return net.last(h) + k, h


def seen_through(net, x):
    h = net.first(x) * 1
    return net.last(2 * h), h, h.t(), h.detach()[1:], h[:, 1:3]


def slopes(net, x: Tensor, parameters) -> list:
    """Derivatives of first order."""
    total = sum((1 + i) * t.cos().sum() for i, t in enumerate(tensors_of(net(x))))
    return list(torch.autograd.grad(total, [x, *parameters], allow_unused=True))


def by_each_result(net, x: Tensor, parameters) -> list:
    """A loss of gradients by all results, which are computed from one another."""
    results = tensors_of(net(x))
    total = sum((1 + i) * (t.sin() + t.square()).sum() for i, t in enumerate(results))
    found = torch.autograd.grad(total, [*results, x], create_graph=True)
    loss = 0.1 * total + sum(g.square().mean() for g in found)
    return [*found, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)]


@pytest.mark.parametrize(
    "run",
    [chain, parts, views, written, sizes, broken, stored, transformed],
    ids=lambda f: f.__name__,
)
def test_a_result_that_others_are_computed_from(run):
    rows = iter([6, 6, 5, 7])
    against_eager(Features(run), lambda: torch.randn(next(rows), 4), 4, run=by_each_result)


def test_a_result_within_autocast_that_others_are_computed_from():
    net = Features(cast)
    reference, fast = copy.deepcopy(net), compiled(net)
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        wanted = by_each_result(reference, x, trained(reference))
        assert_same(by_each_result(fast, x, trained(net)), wanted, 1e-2)
        assert_same(fast(x), reference(x))


@pytest.mark.parametrize("run", [written_late, written_off_the_tape], ids=lambda f: f.__name__)
def test_a_result_that_others_are_computed_from_is_written_past(run):
    with pytest.warns(db.CaptureWarning, match="writes in place to what was before"):
        against_eager(Features(run), run=by_each_result)


@pytest.mark.parametrize("run", [penalty, slopes], ids=lambda f: f.__name__)
def test_the_caller_writes_to_a_result_that_others_are_computed_from(run):
    """Of which eager keeps nothing."""

    def then_written(net, x, parameters):
        def fn(x):
            out, h = net(x)
            h[:, :2] = h[:, :2] / 2
            return out, h.tanh()

        return run(fn, x, parameters)

    against_eager(Features(doubled), run=then_written)


@pytest.mark.parametrize("run", [penalty, slopes], ids=lambda f: f.__name__)
def test_the_caller_writes_to_a_result_that_others_are_views_and_functions_of(run):
    """A view of it sees what is written, and passes its derivative on; what was computed does
    not."""

    def then_written(net, x, parameters):
        seen: list[Tensor] = []

        def fn(x):
            out, h, turned, cut, part = net(x)
            with torch.no_grad():
                part[:, 0] = 0.25
            seen.extend([h, turned])
            assert not cut.requires_grad and cut._is_view() == turned._is_view()
            part.mul_(0.5)
            return out, h.tanh(), turned.exp(), part.sin()

        return [*run(fn, x, parameters), *seen]

    against_eager(Features(seen_through), run=then_written)


def test_hooks_on_a_result_that_others_are_computed_from():
    def run(net, x, parameters):
        out, h, k = net(x)
        h.register_hook(lambda g: 2 * g)
        k.retain_grad()
        (out.sum() + k.exp().sum()).backward()
        return [k.grad, *torch.autograd.grad(net(x)[0].sum(), parameters)]

    against_eager(Features(chain), run=run)


@pytest.mark.parametrize("create_graph", [True, False])
def test_batches_of_cotangents(create_graph):
    def run(net, x, parameters):
        out = net(x)
        eye = torch.eye(2).unsqueeze(1).expand(2, len(x), 2)
        (jacobian,) = torch.autograd.grad(
            out, x, eye, is_grads_batched=True, create_graph=create_graph, retain_graph=True
        )
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        rows = torch.eye(4).unsqueeze(1).expand(4, len(x), 4)
        (hessian,) = torch.autograd.grad(
            slope, x, rows, is_grads_batched=True, create_graph=create_graph, retain_graph=True
        )
        loss = jacobian.square().sum() + slope.exp().sum() + hessian.square().sum() + out.sum()
        assert jacobian.requires_grad == hessian.requires_grad == create_graph
        return [jacobian, hessian, *torch.autograd.grad(loss, [x, *parameters])]

    against_eager(mlp(), run=run)


def test_inside_a_checkpoint():
    """Which runs a region again in the backward pass, as it ran before."""
    net = mlp()
    fast = compiled(net)

    def run(fn, x):
        out = checkpoint(fn, x, use_reentrant=False)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(out.mean() + g.square().sum(), [x, *trained(net)])

    for rows in (5, 5, 6, 7):
        x = torch.randn(rows, 4, requires_grad=True)
        assert_same(run(fast, x), run(net, x))


def test_a_function_that_differentiates_by_values_of_its_own():
    net = mlp(out=1)

    def loss(x):
        x = x.detach().requires_grad_()
        h = net[1](net[0](x))
        energy = net[4](net[3](net[2](h)))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        (inner,) = torch.autograd.grad(energy.sum(), h, create_graph=True)
        return energy.square().mean() + force.square().sum() + inner.exp().mean()

    step = compiled(loss)
    for rows in (5, 5, 6, 7):
        x = torch.randn(rows, 4)
        wanted = torch.autograd.grad(loss(x), trained(net))
        assert_same(torch.autograd.grad(step(x), trained(net)), wanted)


@pytest.mark.parametrize("grad", [True, False])
def test_a_buffer_that_is_one_number(grad):
    """PyTorch's own backends lose what is written to a float64 without axes."""

    def run(net, x):
        with torch.no_grad():
            net.calls.add_(1)
        return net.last(net.first(x)) * net.calls

    net = Features(run)
    fast = compiled(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", db.CaptureWarning)
        for calls in range(1, 4):
            with torch.set_grad_enabled(grad):
                fast(torch.randn(6, 4))
            assert net.calls == calls


def test_writing_to_a_result_that_is_kept():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    fast = against_eager(net)
    out = fast(torch.randn(6, 4, requires_grad=True))
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -------------------------------------------------------------------------- uses


def test_meta_learning():
    """One step of gradient descent inside, by parameters."""

    def run(fn, x, parameters):
        inner = F.mse_loss(fn(x), torch.ones(6, 2))
        grads = torch.autograd.grad(inner, parameters, create_graph=True)
        outer = sum((p - 0.1 * g).square().sum() for p, g in zip(parameters, grads, strict=True))
        return [outer, *torch.autograd.grad(outer, parameters)]

    against_eager(mlp(), run=run)


def test_hessian_vector_products():
    def run(fn, x, parameters):
        grads = torch.autograd.grad(fn(x).square().sum(), parameters, create_graph=True)
        torch.manual_seed(1)
        along = [torch.randn_like(p) for p in parameters]
        product = torch.autograd.grad(grads, parameters, along, retain_graph=True)
        return [*product, *torch.autograd.grad(grads, [*parameters, x], along)]

    against_eager(mlp(), run=run)


def test_backward_with_create_graph():
    def run(fn, x, parameters):
        for t in (x, *parameters):
            t.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a cycle of references
            fn(x).square().sum().backward(create_graph=True)
        loss = sum(t.grad.square().sum() for t in parameters)
        found = torch.autograd.grad(loss, [x, *parameters])
        for t in (x, *parameters):
            t.grad = None
        return list(found)

    against_eager(mlp(), run=run)


def test_several_gradients_of_one_call():
    def run(fn, x, parameters):
        out = fn(x)
        rows = [torch.autograd.grad(out[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
        loss = sum(((1 + i) * g).cos().sum() for i, g in enumerate(rows)) + out.square().sum()
        return [loss, *torch.autograd.grad(loss, [x, *parameters])]

    against_eager(mlp(), run=run)


def test_cotangents_that_are_differentiated():
    def run(fn, x, parameters):
        torch.manual_seed(2)
        along = torch.randn(6, 2, requires_grad=True)
        (g,) = torch.autograd.grad(fn(x), x, along, create_graph=True)
        loss = g.square().sum()
        return [*torch.autograd.grad(loss, [along], retain_graph=True),
                *torch.autograd.grad(loss, [along, x, *parameters], allow_unused=True)]  # fmt: skip

    against_eager(mlp(), run=run, calls=4)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.a(h), self.b(h), h[:, :2]


def of_one_head(heads, x, order):
    out = heads(x)[order % 2].sum()
    if order == 0:
        return out
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    if order < 3:
        return slope.square().sum()
    other = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    return other.square().sum() + slope.sum()


def test_what_a_loss_does_not_depend_on_has_no_gradient():
    """None, and not zero, by which an optimiser with momentum or decay would change it."""
    net = Heads()
    reference, fast = copy.deepcopy(net), compiled(net)
    optimisers = [
        torch.optim.AdamW(each.parameters(), weight_decay=0.1) for each in (net, reference)
    ]
    for order in (0, 1, 0, 1, 2, 0, 1, 2, 3, 3, 0):
        x = torch.randn(6, 4, requires_grad=True)
        for called, optimiser in zip((fast, reference), optimisers, strict=True):
            optimiser.zero_grad()
            of_one_head(called, x, order).backward()
            optimiser.step()
        grads = [[p.grad for p in each.parameters()] for each in (net, reference)]
        assert_same(*grads)
        assert_same(list(net.parameters()), list(reference.parameters()))


def test_third_derivatives(made):
    def run(fn, x, parameters):
        (g,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        loss = h.square().sum() + g.sum()
        return [loss, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)]

    against_eager(mlp(), run=run)
    assert made


def test_first_and_second_order_calls_mixed():
    def run(fn, x, parameters):
        first = list(torch.autograd.grad(fn(x).square().sum(), parameters))
        both = penalty(fn, x, parameters)
        again = list(torch.autograd.grad(fn(x).square().sum(), [x, *parameters]))
        return first + both + again

    against_eager(mlp(), run=run)


def test_first_order_stays_with_aot_autograd(made):
    net = mlp()
    fast = compiled(net)
    for n in (5, 6, 7):
        x = torch.randn(n, 4)
        out = fast(x)
        assert type(out.grad_fn).__name__ == "CompiledFunctionBackward"
        assert_same(
            torch.autograd.grad(out.sum(), trained(net)),
            torch.autograd.grad(net(x).sum(), trained(net)),
        )
    assert not made


def test_other_gradients_are_asked_for_later(made):
    net = mlp()
    reference, fast = copy.deepcopy(net), compiled(net)

    def run(fn, x, parameters, wanted):
        at = [x] if wanted == "x" else parameters
        grads = torch.autograd.grad(fn(x).square().sum(), at, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), [x, *parameters]))

    for wanted in ("x", "x", "parameters", "parameters", "x"):
        x = torch.randn(5, 4, requires_grad=True)
        expected = run(reference, x, trained(reference), wanted)
        assert_same(run(fast, x, trained(net), wanted), expected)
    assert len(made) == 2


def test_gradients_nobody_asked_for_are_not_computed():
    net = mlp(64)
    fast = against_eager(net)
    x = torch.randn(6, 4, requires_grad=True)

    def products(fn):
        with torch.profiler.profile(acc_events=True) as seen:
            torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return sum(e.name in ("aten::mm", "aten::addmm") for e in seen.events())

    assert products(fast) == products(net) == 6


@pytest.mark.parametrize("before", [0, 2], ids=["by AOTAutograd", "by passes"])
def test_backward_twice(before):
    net = mlp()
    fast = compiled(net)
    for _ in range(before):
        penalty(fast, torch.randn(5, 4, requires_grad=True), trained(net))
    x = torch.randn(5, 4, requires_grad=True)
    out = fast(x).square().sum()
    once = torch.autograd.grad(out, trained(net), retain_graph=True)
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    loss = g.square().sum() + out
    wanted = torch.autograd.grad(loss, trained(net), retain_graph=True)
    assert_same(torch.autograd.grad(loss, trained(net)), wanted)
    assert_same(once, torch.autograd.grad(net(x).square().sum(), trained(net)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, trained(net))


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("before", [0, 2], ids=["by AOTAutograd", "by passes"])
def test_changed_in_place_before_backward(before, create_graph):
    net = mlp()
    fast = compiled(net)
    for _ in range(before):
        penalty(fast, torch.randn(5, 4, requires_grad=True), trained(net))
    x = torch.randn(5, 4, requires_grad=True)
    out = fast(x).sum()
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        torch.autograd.grad(out, x, create_graph=create_graph)


def test_inference():
    net = mlp()
    fast = against_eager(net)
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(fast(x), net(x)) and not fast(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(fast(x), net(x))


def test_autocast_and_grad_scaler():
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).float()
    reference, fast = copy.deepcopy(net), compiled(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def run(fn, own, x):
        own.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = fn(x)
        assert out.dtype is torch.bfloat16
        (g,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        scaler.scale(g.square().sum() + out.float().mean()).backward()
        return [p.grad.clone() for p in own.parameters()]

    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.float32, requires_grad=True)
        wanted = run(reference, reference, x)
        for a, b in zip(run(fast, net, x), wanted, strict=True):
            assert (a - b).abs().max() <= 0.05 * b.abs().max()  # bfloat16


def test_inputs_that_do_not_require_grad():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, weight, index):
            return self.net(x)[index] * weight

    net = Weighted()
    fast = compiled(net)
    weight, index = torch.randn(7, 2), torch.randint(5, (7,))
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        wanted = penalty(lambda x: net(x, weight, index), x, trained(net))
        assert_same(penalty(lambda x: fast(x, weight, index), x, trained(net)), wanted)


def test_inputs_computed_from_one_another():
    """No gradient takes a way from one input to another outside of the region."""

    def run(fn, x, parameters):
        y = x.square()
        out = fn(x, y)
        (g,) = torch.autograd.grad(out.sum(), y, create_graph=True, retain_graph=True)
        (h,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = g.square().sum() + h.sin().sum()
        return [loss, *torch.autograd.grad(loss, [x])]

    def fn(x, y):
        return (x * y).sin() * y

    fast = compiled(fn)
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        assert_same(run(fast, x, ()), run(fn, x, ()))


# ------------------------------------------------------------------------------- sizes


def test_twenty_sizes(made):
    net = mlp()
    reference, fast = copy.deepcopy(net), compiled(net)
    torch._dynamo.utils.counters.clear()
    for n in range(2, 22):
        x = torch.randn(n, 4, requires_grad=True)
        wanted = penalty(reference, x, trained(reference))
        assert_same(penalty(fast, x, trained(net)), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert len(made) <= 3


def test_a_question_about_sizes_is_asked_again_at_each_call(made):
    """What a derivative alone asks is not among Dynamo's guards."""

    # the second derivative of a product with a broadcast factor sums over axes of size one
    def fn(x, y):
        return (torch.cat([x, y]) * x.sum(1, keepdim=True).sum()).sin()

    fast = torch.compile(fn, backend="doubleback", options={"compiler": "eager"}, dynamic=True)
    for n, m in ((3, 5), (5, 3), (4, 4), (4, 4), (2, 9), (9, 2), (6, 6)):
        x, y = torch.randn(n, 4, requires_grad=True), torch.randn(m, 4)
        wanted = penalty(functools.partial(fn, y=y), x, ())
        assert_same(penalty(functools.partial(fast, y=y), x, ()), wanted)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.cutoff = nn.Linear(4, 2), 2.0, 5.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) * (self.scale / self.cutoff)).cos() * self.scale


def test_pythons_numbers_that_change(made):
    """Numbers are open as sizes are: what depends on them is no size that tensors decide."""
    net = Scaled()
    fast = compiled(net, dynamic=True)
    for scale in (2.0, 3.5, 0.25):
        net.scale = scale
        x = torch.randn(6, 4, requires_grad=True)
        wanted = penalty(net, x, trained(net))
        assert_same(penalty(fast, x, trained(net)), wanted)
    assert len(made) == 1


# ------------------------------------------------------------------------- random numbers


def dropout(h, _):
    return F.dropout(h, 0.4, True)


def noise(h, _):
    return h * (1 + 0.5 * torch.randn_like(h)) + 0.1 * torch.rand(6)


def coins(h, _):
    return h * torch.bernoulli(torch.full_like(h, 0.7)) * torch.empty_like(h).uniform_(1, 2)


def several(h, _):
    return F.alpha_dropout(F.dropout(F.dropout(h, 0.2, True).sin(), 0.3, True), 0.3, True)


def checkpointed_dropout(h, _):
    return checkpoint(lambda z: F.dropout(z.sin(), 0.3, True), h, use_reentrant=False)


def drawn_by_weight(h, _):
    return h * torch.multinomial(torch.ones(4), 6, replacement=True).to(h)


def differences(fast, net):
    """The gradient of a penalty against differences, each value with the same draw."""
    weight = net.first.weight
    for seed in range(3):
        x = torch.randn(6, 4, device=weight.device, requires_grad=True)

        def loss(seed=seed, x=x):
            torch.manual_seed(seed)
            out = fast(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return g.square().sum() + out.sum()

        (grad,) = torch.autograd.grad(loss(), weight)
        along, step = torch.randn_like(weight), 1e-5
        values = []
        for sign in (1, -2):
            with torch.no_grad():
                weight.add_(along, alpha=sign * step)
            values.append(loss().item())
        with torch.no_grad():
            weight.add_(along, alpha=step)
        found = (values[0] - values[1]) / (2 * step)
        assert abs(found - (grad * along).sum().item()) <= 1e-6 * (1 + abs(found))
    assert not torch.equal(fast(x), fast(x))


@pytest.mark.parametrize(
    "between", [dropout, noise, coins, several, checkpointed_dropout], ids=lambda f: f.__name__
)
def test_random_numbers_are_the_same_in_all_passes(between, made):
    net = Net(between)
    differences(compiled(net), net)
    assert made


def test_draws_that_depend_on_values():
    net = Net(drawn_by_weight)
    with pytest.warns(db.CaptureWarning, match="multinomial"):
        differences(compiled(net), net)


def test_sizes_of_draws_may_change():
    net = Net(dropout)
    fast = compiled(net)
    for n in (3, 4, 5, 6):
        x = torch.randn(n, 4, requires_grad=True)
        kept = fast(x)
        assert kept.shape == (n, 2)
        penalty(fast, x, trained(net))


# -------------------------------------------------------------- where there are no passes


def test_writing_to_an_input_that_the_derivative_reads():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x):
            h = self.layer(x).tanh()
            out = h / self.scale.sqrt()
            with torch.no_grad():
                self.scale.mul_(0.9).add_(h.detach().square().mean(0), alpha=0.1)
            return out

    with pytest.warns(db.CaptureWarning, match="writes to an input"):
        against_eager(Running())


def test_second_derivatives_that_cannot_be_traced(monkeypatch):
    def refused(*args):
        raise RuntimeError("derivative for aten::exotic is not implemented\nlong story")

    monkeypatch.setattr(backend, "Stages", refused)
    with pytest.warns(db.CaptureWarning, match="aten::exotic is not implemented$") as seen:
        against_eager(mlp())
    assert len([w for w in seen if w.category is db.CaptureWarning]) == 1


def test_a_region_that_fails_leaves_the_transforms_it_entered():
    net = nn.Linear(4, 2)

    def tangent(x):  # which AOTAutograd fails on
        return torch.func.jvp(net, (x[0],), (x[1],))[1].square().sum()

    x = torch.randn(3, 4)
    for _ in range(2):
        with suppress(Exception):
            compiled(tangent)(x)
        assert tangent(x).requires_grad


def test_branches_in_the_graph():
    def between(h, _):
        return torch.cond(h.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (h,))

    with pytest.warns(db.CaptureWarning, match=r"torch\.cond"):
        against_eager(Net(between))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            slope = x.cos()
        return g * slope


def test_a_backward_that_switches_autograd_off():
    fast = compiled(lambda x: Hidden.apply(2 * x).sum())
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(fast(x), x)[0], 2 * (2 * x).cos())
    with pytest.raises(db.CaptureError, match=r"switches autograd off.*compiler.disable"):
        torch.autograd.grad(fast(x), x, create_graph=True)


def backward_of(slope):
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return slope(x, g)

    return Sine.apply


def clipped(x, g):
    return g.clamp(-0.1, 0.1) * x.cos()


def ignored(x, g):
    return x.cos()


def constant(x, g):
    ones = torch.zeros_like(x)
    ones.fill_(2)
    return ones


def shifted(x, g):
    return g * x.cos() + 1


def by_cases(x, g):
    return torch.where(g > 0, g, 2 * g)


def by_parts(x, g):
    y = torch.zeros_like(x)
    y[1:] = g[1:] * x[1:].cos()
    y[:1] += 2 * g[:1]
    return y.masked_fill(x > 0.5, 0.0)


def summed(x, g):
    total = 0
    total += torch.cat([g[:2], g[2:].flip(0)])
    return -(total + g.sum(0, keepdim=True).expand_as(x) / 3) @ torch.eye(x.shape[1])


@pytest.mark.parametrize(
    "slope",
    [clipped, ignored, constant, shifted, by_cases, by_parts, summed],
    ids=lambda f: f.__name__,
)
def test_backwards_that_are_not_linear_run_on_autograd(slope, made):
    """A region's passes call them with parts of what comes in, or with zeros."""
    weight = torch.randn(4, requires_grad=True)
    sine, linear = backward_of(slope), slope in (by_parts, summed)

    def net(x):
        return sine(x * weight) * weight, x.exp()

    fast = compiled(net)
    with nullcontext() if linear else pytest.warns(db.CaptureWarning, match="not linear"):
        for step in range(4):
            x, along = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
            along.requires_grad_(step > 1)
            found = []
            for each in (net, fast):
                y, z = each(x)
                slopes = torch.autograd.grad([y, z], [x, weight], [along, along], create_graph=True)
                loss = sum(g.square().sum() for g in slopes) + (step % 2) * y.square().sum()
                found.append([loss, *torch.autograd.grad(loss, [x, weight])])
            assert_same(found[1], found[0])
    assert bool(made) == linear


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return g * x.cos()

    @staticmethod
    def backward(ctx, q):
        x, g = ctx.saved_tensors
        return -3 * q * g * x.sin(), q * x.cos()


def test_a_backward_that_calls_another_function():
    sine = backward_of(lambda x, g: Inner.apply(x, g))
    fast = compiled(lambda x: sine(2 * x).sum())
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(fast(x), x)[0], 2 * (2 * x).cos())
    with pytest.raises(db.CaptureError, match=r"calls another.*compiler.disable"):
        torch.autograd.grad(fast(x), x, create_graph=True)


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.sin() * weight, x.cos()

    @staticmethod
    def backward(ctx, g, h):
        x, weight = ctx.saved_tensors
        return g * x.cos() * weight - h * x.sin(), (g * x.sin()).sum(0)


def test_a_gradient_that_is_zero_whatever_comes_in():
    weight = torch.randn(4, requires_grad=True)

    def run(fn, x):
        slopes = torch.autograd.grad(fn(x).sum(), [x, weight], create_graph=True)
        return [*slopes, *torch.autograd.grad(slopes[0].square().sum(), [x, weight])]

    def net(x):
        return Pair.apply(x, weight)[1]

    fast = compiled(net)
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        assert_same(run(fast, x), run(net, x))


def test_an_operator_that_draws_and_does_not_say_so():
    @torch.library.custom_op("doubleback_tests::secret_noise", mutates_args=())
    def secret_noise(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    secret_noise.register_fake(torch.empty_like)
    fast = compiled(lambda x: (x * secret_noise(x.detach())).square().sum())
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(db.CaptureError, match="nondeterministic_seeded"):
        torch.autograd.grad(fast(x), x, create_graph=True)


# -------------------------------------------------------------------------- surroundings


def test_memory_is_freed_without_the_collector():
    net = mlp()
    fast = against_eager(net)
    x = torch.randn(6, 4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        out = fast(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        watched = [weakref.ref(out), weakref.ref(g), weakref.ref(out.grad_fn)]
        del out, g
        assert [w() for w in watched] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("retain", [False, True])
def test_what_the_last_pass_reads_is_its_own(made, retain):
    """So that it can be freed at its last use; not where somebody may ask again, or looks on."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    fast = against_eager(net, calls=2)
    second = made[0].second
    run, own, held = second.run, {*made[0].kept, *made[0].kept_by_backward}, []
    weights = {p.data_ptr() for p in net.parameters()}

    def looking(tensors):
        places = [i for i, name in enumerate(second.reads) if name in own]
        refs = [weakref.ref(tensors[i]) for i in places if tensors[i].data_ptr() not in weights]
        copies = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
        tensors.clear()
        held.append(sum(ref() is not None for ref in refs) / len(refs))
        return run(copies)

    second.run = looking
    x = torch.randn(6, 4, requires_grad=True)
    weights.add(x.data_ptr())
    (g,) = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)
    g.square().sum().backward(retain_graph=retain)
    assert held == [float(retain)]
    if retain:
        g.square().sum().backward()
        assert held == [1.0, 0.0]
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            (g,) = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        assert len(seen) >= len(own)
    with pytest.raises(RuntimeError, match="second time"):
        g.square().sum().backward()


def test_options():
    with pytest.raises(Exception, match=r'"compiler".*one of inductor, eager'):
        compiled(mlp(), "fast")(torch.randn(3, 4))
    wrong = {"compiler": "eager", "max_autotune": True}
    with pytest.raises(Exception, match="options of Inductor"):
        torch.compile(mlp(), backend="doubleback", options=wrong)(torch.randn(3, 4))


BY_NAME = """
import sys, torch, doubleback
assert "torch._dynamo" not in sys.modules
from torch._dynamo.backends import registry
assert registry.lookup_backend("doubleback") is sys.modules["doubleback.compile"].backend
assert callable(doubleback.compile) and "doubleback" in torch._dynamo.list_backends()
"""
BY_ENUM = """
import enum, torch
from torch import nn
import doubleback
class Kind(enum.Enum):
    ONE = 1
    TWO = 2
TABLE = {Kind.ONE: 1.0, Kind.TWO: 2.0}
class Scaled(nn.Module):
    def forward(self, x):
        return TABLE[self.kind] * x
net = Scaled()
fast = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
for net.kind in (Kind.ONE, Kind.TWO, Kind.ONE):
    x = torch.ones(3, requires_grad=True)
    assert fast(x).sum() == 3 * net.kind.value, net.kind
"""
SIZES = """
import gc, warnings, torch
import doubleback as db
torch._dynamo.config.capture_dynamic_output_shape_ops = True
net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
def energy(x, mask):
    return net(x[mask.nonzero()[:, 0]]).sum()
def penalty(energy, x, mask):
    (g,) = torch.autograd.grad(energy(x, mask), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), [x, *net.parameters()], allow_unused=True)
fast = torch.compile(energy, backend="doubleback", options={"compiler": "eager"})
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always", db.CaptureWarning)
    for n in (5, 6, 9):
        x = torch.randn(n, 3, dtype=torch.float64, requires_grad=True)
        mask = torch.arange(n) % 3 > 0
        for a, b in zip(penalty(fast, x, mask), penalty(energy, x, mask)):
            assert a is b is None or (a - b).abs().max() < 1e-12, (a, b)
said = [str(w.message) for w in seen if w.category is db.CaptureWarning]
assert len(said) == 1 and "a size depends on what tensors hold" in said[0], said
states = lambda: {each.state for each in db.patch_report()}
assert states() != {"stock"}
del fast
torch._dynamo.reset()
gc.collect()
assert states() == {"stock"}, states()
"""
BY_ENTRY_POINT = """
import importlib.metadata, torch
from torch._dynamo.backends import registry
registry._BACKENDS["doubleback"] = importlib.metadata.EntryPoint(
    "doubleback", "doubleback.compile:backend", "torch_dynamo_backends")
assert registry.lookup_backend("doubleback").__name__ == "backend"
"""


def test_it_is_known_by_name_and_by_entry_point():
    run_fresh(BY_NAME, BY_ENTRY_POINT)


def test_its_guards_are_there_from_the_first_function_on():
    """An Enum that a dictionary is looked up with, before anything else of the library ran."""
    run_fresh(BY_ENUM)


def test_the_entry_point_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["torch_dynamo_backends"]["doubleback"].split(":")
    assert getattr(importlib.import_module(module), name) is backend.backend


# ----------------------------------------------------------------------------- Inductor


def test_inductor_with_sizes_that_change(made):
    net = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 2))
    reference, fast = copy.deepcopy(net), compiled(net, "inductor")
    for n in (3, 5, 6, 7, 4):
        x = torch.randn(n, 4, requires_grad=True)
        wanted = penalty(reference, x, trained(reference))
        assert_same(penalty(fast, x, trained(net)), wanted)
    assert len(made) == 1


def test_inductor_with_random_numbers():
    net = Net(lambda h, _: noise(dropout(h, _), _))
    differences(compiled(net, "inductor"), net)


# -------------------------------------------------------------------------------- a GPU


@needs_gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_on_a_gpu(compiler, made):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 3),
    ).cuda()  # fmt: skip

    def run(fn, x, parameters):
        out = fn(x)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = g.square().sum() + out.sum()
        return [loss, *torch.autograd.grad(loss, [x, *parameters])]

    against_eager(net, lambda: torch.randn(3, 2, 8, 8, device="cuda"), 3, compiler, run)
    assert made


@needs_gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_random_numbers_on_a_gpu(compiler, made):
    net = Net(lambda h, _: dropout(h, _) * (1 + 0.5 * torch.randn_like(h))).cuda()
    differences(compiled(net, compiler), net)
    assert made


@needs_gpu
def test_fused_attention_on_a_gpu(made):
    def between(h, _):
        q = h.reshape(2, -1, 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q.sin(), q.cos()).transpose(1, 2).reshape(-1, 32)

    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh()).cuda()
    fast = compiled(lambda x: between(net(x), None), "inductor")
    for _ in range(3):
        x = torch.randn(32, 4, device="cuda", requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = penalty(lambda x: between(net(x), None), x, trained(net))
        assert_same(penalty(fast, x, trained(net)), wanted, 1e-4)
    assert made


def test_sizes_that_depend_on_what_tensors_hold():
    """Where Dynamo is told to capture them, as NequIP tells it for the whole process, they are
    symbols that no input has: the region runs on autograd, under the patch for as long as Dynamo
    has it."""
    run_fresh(SIZES)
