"""`db.compile`: whole losses with derivatives inside, against stock autograd in float64."""

import copy
import enum
import functools
import gc
import math
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback import _torch

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch.set_default_dtype(torch.float32)


def compiled(fn, **options):
    return db.compile(fn, **{"compiler": "eager", "strict": True, **options})


def mlp(inputs: int = 3, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def gradients(loss: Tensor, tensors) -> list:
    tensors = list(tensors)
    for t in tensors:
        t.grad = None
    loss.backward()
    found = [None if t.grad is None else t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    return found


def first(result):
    return result[0] if isinstance(result, tuple) else result


def agree(step, fn, tensors, *args, **kwargs) -> None:
    """Value and gradients of a step are those of stock autograd."""
    tensors = list(tensors)
    ours = first(step(*args, **kwargs))
    found = gradients(ours, tensors)
    theirs = first(fn(*args, **kwargs))
    wanted = gradients(theirs, tensors)
    close(ours.detach(), theirs.detach())
    assert any(w is not None for w in wanted)
    for g, w in zip(found, wanted, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            close(g, w)


def close(found: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().max().clamp(min=1e-5)  # what is zero but for rounding has no scale
    assert ((found - wanted).abs().max() / scale).item() <= TOLERANCE


def slopes(net, x: Tensor) -> Tensor:
    """∂u/∂x."""
    return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]


# ---------------------------------------------------------------------------- what it serves


class Potential(nn.Module):
    """Continuous-filter convolutions over atoms, as in SchNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.filter = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width))
        self.mix = nn.Linear(width, width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centres", torch.linspace(0, 3, 6))

    def forward(self, z, pos, source, target, molecule, count):
        h = self.embedding(z)
        distance = (pos[source] - pos[target]).square().sum(-1).sqrt()
        w = self.filter(torch.exp(-((distance[:, None] - self.centres) ** 2)))
        for _ in range(2):
            message = torch.zeros_like(h).index_add(0, target, h[source] * w)
            h = h + torch.tanh(self.mix(message))
        atoms = self.out(h).squeeze(-1)
        return atoms.new_zeros(count).index_add(0, molecule, atoms)


def molecules(seed: int) -> tuple:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 7, (3 + seed % 4,), generator=g)
    atoms, count = int(sizes.sum()), len(sizes)
    molecule = torch.repeat_interleave(torch.arange(count), sizes)
    pairs = (molecule[:, None] == molecule[None]).fill_diagonal_(False).nonzero()
    source, target = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    return (
        torch.randint(0, 5, (atoms,), generator=g), torch.randn(atoms, 3, generator=g), source,
        target, molecule, torch.randn(count, generator=g), torch.randn(atoms, 3, generator=g),
    )  # fmt: skip


def force_matching(net):
    def loss(z, pos, source, target, molecule, energy, forces):
        pos = pos.detach().requires_grad_()
        found = net(z, pos, source, target, molecule, energy.shape[0])
        (gradient,) = torch.autograd.grad(found.sum(), pos, create_graph=True)
        return F.mse_loss(found, energy) + F.huber_loss(-gradient, forces), gradient

    return loss


def test_forces_of_molecules_of_all_sizes_take_three_traces():
    net = Potential()
    loss = force_matching(net)
    step = compiled(loss)
    for seed in range(10):
        agree(step, loss, net.parameters(), *molecules(seed))
        value, gradient = step(*molecules(seed))
        close(gradient, loss(*molecules(seed))[1].detach())
        assert value.requires_grad and not gradient.requires_grad
    assert step.traces <= 3


def poisson(net):
    def loss(x):
        x = x.clone().requires_grad_()
        g = slopes(net, x)
        parts = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
        return (sum(part[:, i] for i, part in enumerate(parts)) + x.prod(1)).square().mean()

    return loss


def test_residual_of_a_differential_equation():
    net = mlp(2)
    loss = poisson(net)
    step = compiled(loss)
    for size in (7, 12, 5, 31):
        agree(step, loss, net.parameters(), torch.rand(size, 2))
    assert step.traces <= 2


def test_third_and_fourth_derivatives():
    net = mlp(1)

    def loss(x):
        x = x.detach().requires_grad_()
        y, orders = net(x), []
        for _ in range(4):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            orders.append(y)
        return (orders[3] + orders[2] * orders[0]).square().mean()

    agree(compiled(loss), loss, net.parameters(), torch.rand(6, 1))


def test_laplacian_by_hessian():
    net = mlp()

    def loss(x):
        hessian = torch.func.vmap(torch.func.hessian(lambda t: net(t).squeeze()))(x)
        return hessian.diagonal(dim1=1, dim2=2).sum(1).square().mean()

    step = compiled(loss)
    for size in (4, 9):
        agree(step, loss, net.parameters(), torch.randn(size, 3))


def test_forward_derivatives_at_views():
    """PyTorch remembers their tangents as smaller than they are, and fails at the second trace."""
    net = mlp()

    def loss(x):
        return torch.func.jvp(net, (x[0],), (x[1],))[1].square().sum()

    step = compiled(loss)
    for size in (3, 4, 5):
        agree(step, loss, net.parameters(), torch.randn(size, 3))
    assert step.traces == 2


@pytest.mark.parametrize("kind", ["grad", "vjp", "jvp", "jacrev", "jacfwd"])
def test_transforms_of_torch_func(kind):
    net = mlp()

    def loss(x, v):
        if kind == "grad":
            found = torch.func.grad(lambda t: net(t).sum())(x)
        elif kind == "vjp":
            out, pull = torch.func.vjp(net, x)
            found = pull(out)[0]
        elif kind == "jvp":
            found = torch.func.jvp(net, (x,), (v,))[1]
        elif kind == "jacrev":
            found = torch.func.jacrev(net)(x)
        else:
            found = torch.func.jacfwd(net)(x)
        return found.square().sum()

    agree(compiled(loss), loss, net.parameters(), torch.randn(4, 3), torch.randn(4, 3))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Softplus(), nn.Conv2d(4, 3, 3),
            nn.Flatten(), nn.LazyLinear(1),
        )  # fmt: skip
        self.net(torch.zeros(2, 2, 9, 9))
        self.net[1].reset_running_stats()

    def forward(self, x):
        return self.net(x)


def r1(net):
    def loss(x):
        x = x.detach().requires_grad_()
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.softplus(-out).mean() + 5 * g.square().sum((1, 2, 3)).mean()

    return loss


class Storing(nn.Module):
    """Keeps an auxiliary loss as an attribute, as many networks do."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.linear, self.detached, self.auxiliary = nn.Linear(3, 1), detached, None

    def forward(self, x):
        out = self.linear(x)
        auxiliary = out.square().mean()
        self.auxiliary = auxiliary.detach() if self.detached else auxiliary
        return out.sum()


def test_a_stored_tensor_that_requires_grad_keeps_its_gradient():
    net, x = Storing(), torch.randn(4, 3)
    with pytest.raises(db.CaptureError, match=r"stores a tensor that requires grad.*\n.*Remedy"):
        compiled(net)(x)
    with pytest.warns(db.CaptureWarning, match="stores a tensor"):
        value = db.compile(net, compiler="eager")(x)
    found = gradients(value + 3 * net.auxiliary, net.parameters())
    out = net.linear(x)
    wanted = gradients(out.sum() + 3 * out.square().mean(), net.parameters())
    for g, w in zip(found, wanted, strict=True):
        close(g, w)


def test_a_stored_tensor_that_is_detached_is_stored_at_each_call():
    net = Storing(detached=True)
    step = compiled(net)
    for _ in range(2):
        x = torch.randn(4, 3)
        step(x).backward()
        close(net.auxiliary, net.linear(x).square().mean().detach())
    assert step.traces == 1


@pytest.mark.parametrize("made", ["detach", "clone", "zeros"])
def test_requires_grad_of_what_the_loss_makes(made):
    net = mlp()

    def loss(batch):
        x = batch["x"]
        strain = x.new_zeros(3, 3).requires_grad_()
        x = {"detach": x.detach, "clone": x.clone, "zeros": lambda: x}[made]()
        wanted = [strain] if made == "zeros" else [x.requires_grad_(), strain]
        assert wanted[0].requires_grad
        out = net(x + x @ strain).sum()
        found = torch.autograd.grad(out, wanted, create_graph=True)
        return out + sum(g.square().sum() for g in found)

    step = compiled(loss)
    for size in (4, 5, 6):
        agree(step, loss, net.parameters(), {"x": torch.randn(size, 3)})


def test_r1_with_batch_norm_updates_its_buffers_once():
    net, twin = Discriminator(), Discriminator()
    twin.load_state_dict(net.state_dict())
    step, loss = compiled(r1(net)), r1(twin)
    for size in (3, 5, 4):
        x = torch.randn(size, 2, 9, 9)
        found = gradients(step(x), net.parameters())
        for g, w in zip(found, gradients(loss(x), twin.parameters()), strict=True):
            close(g, w)
        for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            close(ours, theirs)
    assert net.net[1].num_batches_tracked == 3


def test_derivatives_that_pytorch_lacks_are_the_library_s():
    net = nn.Sequential(nn.Linear(3, 6), nn.Hardsigmoid(), nn.Linear(6, 1))

    def loss(x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    def written_out(x):
        h = net[0](x)
        ones = torch.ones_like(h)  # PyTorch rounds its 1/6 in float32
        inner = torch.ops.aten.hardsigmoid_backward(ones, h.detach())
        return ((inner * net[2].weight) @ net[0].weight).square().sum()

    x = 3 * torch.randn(5, 3)
    agree(compiled(loss), written_out, [net[0].weight, net[2].weight], x)


def test_attention():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def loss(x):
        x = x.detach().requires_grad_()
        out = layer(x, x, x, need_weights=False)[0]
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return g.square().mean()

    def taken_apart(x):  # stock's fused kernel has no second derivative
        with sdpa_kernel(SDPBackend.MATH):
            return loss(x)

    agree(compiled(loss), taken_apart, layer.parameters(), torch.randn(2, 5, 8))


def test_inductor_with_open_sizes():
    net = mlp(2, 4)
    loss = poisson(net)
    step = compiled(loss, compiler="inductor", dynamic=True)
    for size in (7, 12, 5):
        agree(step, loss, net.parameters(), torch.rand(size, 2))
    assert step.traces == 1


def test_inductor_takes_options(monkeypatch):
    """Those of a mode too, but for CUDA graphs; its wrapper in C++ serves open sizes as well."""
    seen, original = [], _torch.compile_fx

    def noted(*args, config_patches, **kwargs):
        seen.append(config_patches)
        return original(*args, config_patches=config_patches, **kwargs)

    monkeypatch.setattr(_torch, "compile_fx", noted)
    net = mlp(2, 4)
    loss = poisson(net)
    options = {"cpp-wrapper": True, "epilogue_fusion": False}
    step = compiled(loss, compiler="inductor", mode="max-autotune", options=options, dynamic=True)
    step = copy.copy(step)  # which keeps them
    for size in (7, 12):
        agree(step, loss, net.parameters(), torch.rand(size, 2))
    (taken,) = seen
    assert taken["cpp_wrapper"] and not taken["epilogue_fusion"] and taken["max_autotune"]
    assert taken["triton.cudagraphs"] is False


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "reduce-overhead"}, "without CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "without CUDA graphs"),
        ({"mode": "fastest"}, "mode must be one of default, .*max-autotune"),
        ({"options": {"cpp_wraper": True}}, "no option 'cpp_wraper'; did you mean 'cpp_wrapper'"),
        ({"options": {"cpp_wrapper": True}, "compiler": "eager"}, "alone"),
    ],
)
def test_options_that_inductor_cannot_take(options, message):
    with pytest.raises(db.InputError, match=message):
        db.compile(lambda x: x.sum(), **options)


# ---------------------------------------------------------------------------- nothing stale


class Holder(nn.Module):
    def __init__(self, value) -> None:
        super().__init__()
        self.net = mlp()
        self.value = value

    def loss(self, x):
        return float(self.value) * slopes(self.net, x.detach().requires_grad_()).square().sum()


@pytest.mark.parametrize("kind", [float, int, np.float64, str])
def test_changed_attributes(kind):
    model = Holder(kind(2))
    if kind is np.float64:
        model.loss = lambda x: (
            model.value * slopes(model.net, x.detach().requires_grad_()).square().sum()
        )
    step = compiled(model.loss)
    for value in (2, 5, 3, 2):
        model.value = kind(value)
        agree(step, model.loss, model.parameters(), torch.randn(4, 3))


class Pace(enum.Enum):
    SLOW = 1
    FAST = 2


def test_an_enum_that_a_dictionary_is_looked_up_with():
    net, pace = mlp(), [Pace.SLOW]

    def loss(x):
        by = {Pace.SLOW: 1.0, Pace.FAST: 2.5}[pace[0]]
        return by * slopes(net, x.detach().requires_grad_()).square().sum()

    step = compiled(loss)
    for pace[0] in (Pace.SLOW, Pace.FAST, Pace.SLOW):
        agree(step, loss, net.parameters(), torch.randn(4, 3))


def test_train_and_eval():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    def loss(x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    step = compiled(loss)
    for training in (True, False, True):
        net.train(training)
        agree(step, loss, net.parameters(), torch.randn(4, 3))


def test_a_function_that_says_of_no_module():
    """As `exec` makes them."""
    made = {"slopes": slopes, "net": mlp()}
    exec("def loss(x): return slopes(net, x.detach().requires_grad_()).square().sum()", made)
    step, x = compiled(made["loss"]), torch.randn(4, 3)
    assert made["loss"].__module__ is None
    agree(step, made["loss"], made["net"].parameters(), x)


def test_parameters_changed_in_place_replaced_and_frozen():
    net = mlp()

    def loss(x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    step, x = compiled(loss), torch.randn(4, 3)
    agree(step, loss, net.parameters(), x)
    with torch.no_grad():
        net[0].weight.mul_(2)
    agree(step, loss, net.parameters(), x)
    assert step.traces == 1
    net[0].weight = nn.Parameter(torch.randn(8, 3))
    agree(step, loss, net.parameters(), x)
    net[2].weight.requires_grad_(False)
    agree(step, loss, net.parameters(), x)
    net[2] = nn.Linear(8, 8)
    agree(step, loss, net.parameters(), x)
    net[1] = nn.Sigmoid()
    agree(step, loss, net.parameters(), x)


WEIGHT = 1.0


def test_globals_and_closures():
    global WEIGHT
    net, own, items = mlp(), 1.0, {"power": 2}

    def loss(x):
        g = slopes(net, x.detach().requires_grad_())
        return WEIGHT * own * (g.abs() ** items["power"]).sum()

    step, x = compiled(loss), torch.randn(4, 3)
    agree(step, loss, net.parameters(), x)
    try:
        for number in (2.0, 3.0, 4.5):
            WEIGHT = number
            agree(step, loss, net.parameters(), x)
    finally:
        WEIGHT = 1.0
    own = 0.5
    agree(step, loss, net.parameters(), x)
    items["power"] = 3
    agree(step, loss, net.parameters(), x)
    net = mlp()
    agree(step, loss, net.parameters(), x)


def test_a_weight_that_changes_at_each_call_is_no_reason_to_trace():
    net = mlp()

    def loss(x, weight):
        return weight * slopes(net, x.detach().requires_grad_()).square().sum()

    step = compiled(loss)
    for k in range(6):
        agree(step, loss, net.parameters(), torch.randn(4, 3), 0.3 + 0.7**k)
    assert step.traces <= 2


def test_a_replaced_method():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x)

    net = Scaled()

    def loss(x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    step, x = compiled(loss), torch.randn(4, 3)
    agree(step, loss, net.parameters(), x)
    Scaled.forward = lambda self, x: 2 * self.net(x)
    agree(step, loss, net.parameters(), x)


def test_writes_to_python():
    net, seen = mlp(), []
    net.calls = 0

    def loss(x):
        net.calls += 1
        g = slopes(net, x.detach().requires_grad_())
        seen.append(g.detach())
        return g.square().sum()

    step = compiled(loss)
    for size in (4, 5, 6):
        step(torch.randn(size, 3)).backward()
    assert net.calls == 3
    assert [len(g) for g in seen] == [4, 5, 6]
    assert all(type(g) is Tensor for g in seen)


# ------------------------------------------------------------------------- as autograd does


def test_gradients_of_arguments():
    net = mlp()

    def loss(x, *, scale):
        return scale * torch.func.grad(lambda t: net(t).sum())(x).square().sum()

    step = compiled(loss)
    scale = torch.tensor(2.0, requires_grad=True)
    source = torch.randn(4, 3, requires_grad=True)
    agree(step, loss, [*net.parameters(), source, scale], source, scale=scale)

    def chained(fn):
        return lambda: fn(source.sin(), scale=scale.exp())

    agree(chained(step), chained(loss), [*net.parameters(), source, scale])


def test_requires_grad_of_an_argument_inside():
    net = mlp()

    def loss(x):
        x.requires_grad_()
        return slopes(net, x).square().sum()

    x = torch.randn(4, 3)
    step = compiled(loss)
    found = gradients(step(x), net.parameters())
    assert not x.requires_grad
    for g, w in zip(found, gradients(loss(x), net.parameters()), strict=True):
        assert w is None or (g - w).abs().max() <= TOLERANCE


def test_what_arrives_multiplies_and_adds_up():
    net = mlp()

    def loss(x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    step, x, y = compiled(loss), torch.randn(4, 3), torch.randn(4, 3)

    def several(fn):
        return lambda: 3 * fn(x) + fn(y).exp()

    agree(several(step), several(loss), net.parameters())
    value = step(x)
    once = gradients_kept(value, net)
    twice = gradients(value, net.parameters())
    for a, b in zip(once, twice, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    with pytest.raises(db.StaleGraphError, match="retain_graph"):
        value.backward()


def test_several_numbers_may_arrive_at_once():
    net, x = mlp(), torch.randn(4, 3)
    weights = torch.tensor([1.0, -2.0, 3.0])

    def loss(x):
        return net(x).square().sum()

    def batch(value):
        return torch.autograd.grad(value, list(net.parameters()), weights, is_grads_batched=True)

    for found, wanted in zip(batch(compiled(loss)(x)), batch(loss(x)), strict=True):
        close(found, wanted)


def gradients_kept(value, net) -> list:
    value.backward(retain_graph=True)
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def test_a_derivative_of_the_gradients_is_refused():
    net = mlp()
    step = compiled(lambda x: net(x).square().sum())
    (g,) = torch.autograd.grad(step(torch.randn(4, 3)), [net[0].weight], create_graph=True)
    with pytest.raises(db.ThirdDerivativeError, match="inside the function"):
        g.sum().backward()


def test_hooks_of_parameters_fire_once():
    net, seen = mlp(), []
    net[0].weight.register_hook(lambda g: seen.append(g) or 2 * g)
    step = compiled(lambda x: net(x).square().sum())
    step(torch.randn(4, 3)).backward()
    assert len(seen) == 1
    assert torch.equal(net[0].weight.grad, 2 * seen[0])


def test_without_gradients():
    net = mlp()

    def loss(x):
        with torch.enable_grad():
            g = slopes(net, x.detach().requires_grad_())
        return g.square().sum(), {"largest": g.abs().max()}

    step, x = compiled(loss), torch.randn(4, 3)
    with torch.no_grad():
        value, more = step(x)
    wanted, also = loss(x)
    assert not value.requires_grad and not more["largest"].requires_grad
    close(value, wanted.detach())
    close(more["largest"], also["largest"].detach())
    agree(step, loss, net.parameters(), x)


def test_random_numbers_are_eager_s():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def loss(x):
        x = (x + torch.randn_like(x)).detach().requires_grad_()
        return slopes(net, x).square().sum()

    step, x = compiled(loss), torch.randn(4, 3)
    for seed in (1, 2):

        def seeded(fn, seed=seed):
            def call():
                torch.manual_seed(seed)
                return fn(x)

            return call

        agree(seeded(step), seeded(loss), net.parameters())


@pytest.mark.parametrize("kind", ["module", "method", "partial", "lambda", "decorated"])
def test_kinds_of_functions(kind):
    model, x = Holder(2.0), torch.randn(4, 3)

    class Loss(nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model.loss(x)

    class Decorated:
        net = model.net

        @functools.partial(db.compile, compiler="eager", strict=True)
        def loss(self, x):
            return 2 * slopes(self.net, x.detach().requires_grad_()).square().sum()

    step = {
        "module": lambda: compiled(Loss(model)),
        "method": lambda: compiled(model.loss),
        "partial": lambda: compiled(functools.partial(Holder.loss, model)),
        "lambda": lambda: compiled(lambda x: model.loss(x)),
        "decorated": lambda: Decorated().loss,
    }[kind]()
    agree(step, model.loss, model.parameters(), x)


def test_modules_as_arguments():
    def loss(net, x):
        return slopes(net, x.detach().requires_grad_()).square().sum()

    step = compiled(loss)
    for net in (mlp(), mlp(), mlp(3, 5)):
        agree(step, loss, net.parameters(), net, torch.randn(4, 3))


class Trained(nn.Module):
    """A network that holds its own compiled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.step = compiled(self.loss)

    def loss(self, x):
        return slopes(self.net, x.detach().requires_grad_()).square().sum()

    def forward(self, x):
        return self.step(x)


def test_a_copy_compiles_its_own():
    model, x = Trained(), torch.randn(4, 3)
    agree(model, model.loss, model.parameters(), x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    agree(twin, twin.loss, twin.parameters(), x)
    agree(model, model.loss, model.parameters(), x)


def test_inside_distributed_data_parallel(tmp_path):
    dist = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model, x = Trained(), torch.randn(4, 3)
        wanted = gradients(model.loss(x), model.parameters())
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            found = gradients(wrapped(x), model.parameters())
            for g, w in zip(found, wanted, strict=True):
                assert w is None or (g - w).abs().max() <= TOLERANCE
    finally:
        dist.destroy_process_group()


def test_results_keep_their_kind():
    net = mlp()

    def loss(x):
        value = net(x).square().mean()
        return [value, value, {"rows": len(x), "out": (net(x),)}]

    value, same, more = compiled(loss)(torch.randn(4, 3))
    assert value.requires_grad and not same.requires_grad
    assert torch.equal(value, same)
    assert more["rows"] == 4 and not more["out"][0].requires_grad


def test_training_is_stock_s():
    torch.manual_seed(1)
    net, twin = mlp(2), mlp(2)
    twin.load_state_dict(net.state_dict())
    losses = []
    for model, step in ((net, compiled(poisson(net))), (twin, poisson(twin))):
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        g = torch.Generator().manual_seed(5)
        for size in (8, 9, 10, 11, 12):
            optimiser.zero_grad()
            value = step(torch.rand(size, 2, generator=g))
            value.backward()
            optimiser.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="TorchDynamo before 2.13 crashes where two threads capture"
)
def test_two_threads():
    net = mlp()
    loss = poisson_of_three(net)
    step, found = compiled(loss), {}
    inputs = {size: torch.randn(size, 3) for size in (4, 6)}

    def work(size):
        found[size] = torch.autograd.grad(step(inputs[size]), [net[0].weight])[0]

    threads = [threading.Thread(target=work, args=(size,)) for size in inputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for size, x in inputs.items():
        close(found[size], torch.autograd.grad(loss(x), [net[0].weight])[0])


def poisson_of_three(net):
    return lambda x: slopes(net, x.detach().requires_grad_()).square().sum()


# --------------------------------------------------------------------- float16 and scaling


def halved(net):
    def loss(x):
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        return 1e-6 * out.float().square().mean()

    return loss


def test_a_scaler_scales_inside_the_graph():
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loss, x = halved(net), torch.randn(8, 16)
    step = compiled(loss, scaler=scaler)
    found = gradients(scaler.scale(step(x)), net.parameters())
    wanted = gradients(scaler.scale(loss(x)), net.parameters())
    for g, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    plain = gradients(step(x), net.parameters())
    for g, w in zip(plain, wanted, strict=True):
        torch.testing.assert_close(g, w / 2.0**16, rtol=0, atol=0)
    assert any(not torch.equal(p, g) for p, g in zip(plain, gradients(loss(x), net.parameters()),
                                                     strict=True))  # fmt: skip


def test_float16_without_a_scaler_is_said():
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    step = compiled(halved(net))
    with pytest.warns(db.CaptureWarning, match="scaler=scaler"):
        step(torch.randn(8, 16))


# ------------------------------------------------------------------------------ refusals


def test_what_is_no_loss():
    net, x = mlp(), torch.randn(4, 3)
    for fn, message in (
        (lambda x: net(x), r"shape \(4, 1\)"),
        (lambda x: "nothing", "must return a scalar loss"),
        (lambda x: net(x).sum() > 0, "torch.bool"),
        (lambda x: net(x).sum().detach(), "does not depend"),
        (lambda x: {"loss": net(x).sum()}, "must return a scalar loss"),
    ):
        with pytest.raises(db.InputError, match=message):
            compiled(fn)(x)
    with pytest.raises(db.InputError, match="function"):
        db.compile(3)
    with pytest.raises(db.InputError, match="one of inductor, eager"):
        db.compile(net, compiler="tvm")


def test_data_dependent_branches_run_on_autograd_with_one_warning():
    net = mlp()

    def loss(x):
        g = slopes(net, x.detach().requires_grad_()).square().sum()
        return g if g.item() > math.pi else 2 * g

    step, x = db.compile(loss, compiler="eager"), torch.randn(4, 3)
    with pytest.warns(db.CaptureWarning, match="cannot be traced as one graph") as told:
        agree(step, loss, net.parameters(), x)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(step, loss, net.parameters(), 5 * x)
    assert step.traces == 0
    with pytest.raises(db.CaptureError, match="Remedy"):
        compiled(loss)(x)


def test_on_autograd_the_library_s_derivatives_stay_until_it_is_gone():
    net = nn.Sequential(nn.Linear(3, 6), nn.Hardsigmoid(), nn.Linear(6, 1))

    def loss(x):
        g = slopes(net, x.detach().requires_grad_()).square().sum()
        return g if g.item() > 0 else 2 * g

    def state():
        return next(e.state for e in db.patch_report() if "hardsigmoid" in e.operator)

    step = db.compile(loss, compiler="eager")
    with pytest.warns(db.CaptureWarning):
        step(torch.randn(4, 3)).backward()
    assert net[0].weight.grad is not None
    assert state() == "replaced"
    del step
    gc.collect()
    assert state() == "stock"


def test_a_failed_trace_leaves_no_trace():
    """Its frames hold contexts that would set the gradient mode whenever they are collected."""
    net, other = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)), mlp()

    def stopped(x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return net(x).sum() if x.sum().item() else x

    def laplacian(x):  # forward over reverse of SiLU, on which Dynamo of torch 2.13 fails
        return torch.func.vmap(torch.func.hessian(lambda t: net(t).squeeze()))(x).sum()

    agree(compiled(poisson(net)), poisson(net), net.parameters(), torch.randn(4, 3))
    for fn in (stopped, laplacian):
        try:
            compiled(fn)(torch.randn(4, 3))
        except db.CaptureError as error:
            assert error.__cause__ is None and error.__context__ is None
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        out, penalty = db.Penalised(other, db.OutputGradient())(torch.randn(4, 3))
        assert out.requires_grad and penalty.requires_grad
        laplacian(torch.randn(4, 3)).backward()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def test_functions_with_a_backward_of_their_own_run_on_autograd():
    net = mlp()

    def loss(x):
        return slopes(lambda t: Cube.apply(net(t)), x.detach().requires_grad_()).square().sum()

    step = db.compile(loss, compiler="eager")
    with pytest.warns(db.CaptureWarning, match="autograd"):
        agree(step, loss, net.parameters(), torch.randn(4, 3))


def test_written_tensors_that_share_memory_run_on_autograd():
    net = mlp()

    def loss(x, y):
        x.mul_(2)
        return net(y).square().sum()

    x, twin = torch.randn(4, 3), None
    twin = x.clone()
    step = db.compile(loss, compiler="eager")
    with pytest.warns(db.CaptureWarning, match="shares memory"):
        ours = step(x, x[:2])
    close(ours.detach(), loss(twin, twin[:2]).detach())
    close(x, twin)


@pytest.mark.parametrize("by", ["argument", "parameters"])
@pytest.mark.parametrize("leaf", [True, False])
def test_an_argument_computed_from_what_the_loss_differentiates_by(by, leaf):
    """Autograd's graph outside is a way of the derivative inside: the function runs on autograd."""
    net = mlp()

    def loss(x, y):
        at = [x] if by == "argument" else list(net.parameters())
        found = torch.autograd.grad(net(x).sum() * y.square().sum(), at, create_graph=True)
        return sum(g.square().sum() for g in found) + net(x).mean()

    source = torch.randn(4, 3, requires_grad=True)
    step = db.compile(loss, compiler="eager")

    def dependent(fn):
        x = source if leaf else source * 2
        return fn(x, x[:2] if by == "argument" else net(x))

    with pytest.warns(db.CaptureWarning, match="was computed from"):
        agree(lambda: dependent(step), lambda: dependent(loss), [*net.parameters(), source])

    def independent(fn):
        x = source if leaf else source * 2
        return fn(x, source.sin() if by == "parameters" or not leaf else torch.ones(2))

    strict, tensors = compiled(loss), [*net.parameters(), source]
    agree(lambda: independent(strict), lambda: independent(loss), tensors)
    assert strict.traces == 1


@pytest.mark.parametrize("ask", [lambda t: t.is_leaf, lambda t: t.grad_fn is None])
def test_whether_an_argument_is_a_leaf(ask):
    net = mlp()

    def loss(x):
        return (2 if ask(x) else 1) * net(x).square().mean()

    step, x = compiled(loss, strict=False), torch.randn(4, 3)
    close(step(x), loss(x))
    x.requires_grad_()
    with pytest.warns(db.CaptureWarning, match="asks whether .* a leaf"):
        for t in (x, x * 1):
            close(step(t), loss(t))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_what_the_loss_differentiates_by(when):
    net = mlp()

    def loss(x):
        total = net(x).square().sum()
        found = torch.autograd.grad(total, list(net.parameters()), create_graph=True)
        return sum(g.square().sum() for g in found)

    step = db.compile(loss, compiler="eager")
    if when == "after":
        agree(step, loss, net.parameters(), torch.randn(4, 3))
    hook = net[0].weight.register_hook(lambda g: 2 * g)
    with pytest.warns(db.CaptureWarning, match="hook"):
        agree(step, loss, net.parameters(), torch.randn(4, 3))
    hook.remove()
    agree(compiled(loss), loss, net.parameters(), torch.randn(4, 3))


class Ranged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.of = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), range(3)

    def forward(self, x):
        sums = [x for _ in self.of]
        for i in self.of:
            sums[i] = torch.tanh(self.layers[i](x))
        return sum(sums)


def test_a_range_whose_ends_are_symbols():
    """Dynamo cannot iterate over one, and so is asked for constants."""
    net = Ranged()
    loss = lambda x: net(x).square().sum()  # noqa: E731
    step = db.compile(loss, compiler="eager", dynamic=True, strict=True)
    for n in (5, 6):
        agree(step, loss, net.parameters(), torch.randn(n, 4))
    assert step.traces == 1


def test_the_user_s_own_errors_come_through():
    net = mlp()

    def loss(x):
        if x.shape[0] == 4:
            raise KeyError("four")
        return net(x).sum()

    with pytest.raises(KeyError, match="four"):
        db.compile(loss, compiler="eager")(torch.randn(4, 3))


def test_a_strain_that_the_loss_makes():
    """The stress is a derivative by a tensor of zeros, which Dynamo makes one way only."""
    net = mlp()

    def loss(x, strain):
        (s,) = torch.autograd.grad(net(x + x @ strain).sum(), strain, create_graph=True)
        return s.square().sum()

    strict = compiled(lambda x: loss(x, torch.zeros(3, 3, requires_grad=True)), strict=True)
    with pytest.raises(db.CaptureError, match=r"\.requires_grad_\(\) in the place of"):
        strict(torch.randn(4, 3))
    step = compiled(lambda x: loss(x, torch.zeros(3, 3).requires_grad_()), strict=True)
    for n in (4, 6):
        x = torch.randn(n, 3)
        wanted = torch.autograd.grad(
            loss(x, torch.zeros(3, 3, requires_grad=True)), list(net.parameters()),
            allow_unused=True,
        )  # fmt: skip
        net.zero_grad(set_to_none=True)
        step(x).backward()
        for p, g in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, g)


def test_a_transform_around_it_is_refused():
    net = mlp()
    step = compiled(lambda x: net(x).sum())
    with pytest.raises(db.InputError, match=r"torch\.func"):
        torch.func.grad(step)(torch.randn(4, 3))
