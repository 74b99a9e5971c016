"""Every way to take one training step with the penalty ‖J‖²_F, J = ∂out/∂x, that is compared.

A step leaves the gradient of mean_i ℓ_i + weight · mean_i ‖J_i‖²_F in `.grad` (ℓ: cross entropy;
‖out − x‖² for nets whose output is as long as their input) and returns (loss, penalty).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import nets

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


# --- networks -------------------------------------------------------------------------------------


class AutoEncoder(nn.Module):
    """Dense layers with ReLU between them, down to a waist and back."""

    def __init__(self, sizes: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Encoder(nn.Module):
    """One dense layer under a sigmoid: the contractive auto-encoder's encoder."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.dense = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.dense(x))


_WIDE, _NARROW = (64, 64, 128, 128, 256, 256), (16, 16, 32, 32, 64, 64)


# name: (network, one example's shape, batch, weight), full size and reduced
TABLE: dict[str, tuple] = {
    "conv": (lambda: nets.ConvStack(_WIDE), (3, 32, 32), 512, 1.0),
    "depthwise": (lambda: nets.DepthwiseStack(_WIDE), (3, 32, 32), 512, 1.0),
    "mlp-small": (lambda: nets.MLP(784, 512, 2), (784,), 512, 1e-2),
    "mlp": (lambda: nets.MLP(3072, 4096, 7), (3072,), 512, 1e-2),
    "resnet": (
        lambda: nets.ResNet((2, 2, 2, 2), (64, 128, 256, 512), 10),
        (3, 64, 64),
        256,
        1e-2,
    ),
    "autoencoder": (lambda: AutoEncoder((784, 512, 32, 512, 784)), (784,), 256, 1e-3),
    "contractive": (lambda: Encoder(784, 1000), (784,), 256, 1e-2),
}
SMALL: dict[str, tuple] = {
    "conv": (lambda: nets.ConvStack(_NARROW), (3, 32, 32), 16, 1.0),
    "depthwise": (lambda: nets.DepthwiseStack(_NARROW), (3, 32, 32), 16, 1.0),
    "mlp-small": (lambda: nets.MLP(784, 512, 2), (784,), 128, 1e-2),
    "mlp": (lambda: nets.MLP(768, 512, 7), (768,), 128, 1e-2),
    "resnet": (lambda: nets.ResNet((1, 1, 1, 1), (16, 32, 64, 128), 10), (3, 64, 64), 8, 1e-2),
    "autoencoder": (lambda: AutoEncoder((784, 512, 32, 512, 784)), (784,), 16, 1e-3),
    "contractive": (lambda: Encoder(784, 1000), (784,), 64, 1e-2),
}


def problem(name: str, small: bool, dtype: torch.dtype, device: str, sets: int = 2):
    """(network, batches of inputs, batches of labels, weight)."""
    build, shape, batch, weight = (SMALL if small else TABLE)[name]
    torch.manual_seed(0)
    net = build()
    xs = [torch.randn(batch, *shape) for _ in range(sets)]
    ys = [torch.randint(10, (batch,)) for _ in range(sets)]
    net = net.to(device=device, dtype=dtype).train()
    return net, [x.to(device, dtype) for x in xs], [y.to(device) for y in ys], weight


def loss_of(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if out.shape[1] == 10:
        return F.cross_entropy(out, y)
    return out.square().sum(1).mean()


def squares(rows: Tensor) -> Tensor:
    """Σ over rows and entries, mean over the batch, of (rows, batch, …)."""
    return rows.float().square().sum() / rows.shape[1]


# --- methods: build(net, x, y, weight) -> step ----------------------------------------------------


def plain(net, x, y, weight) -> Step:
    def step(x, y):
        loss = loss_of(net(x), x, y)
        loss.backward()
        return loss.detach(), None

    return step


def plain_compiled(net, x, y, weight) -> Step:
    whole = torch.compile(lambda x, y: loss_of(net(x), x, y), fullgraph=True, dynamic=False)

    def step(x, y):
        loss = whole(x, y)
        loss.backward()
        return loss.detach(), None

    return step


def stock_loop(net, x, y, weight) -> Step:
    """One backward per output, each row's graph freed before the next."""

    def step(x, y):
        x = x.detach().requires_grad_()
        out = net(x)
        total = torch.zeros((), device=x.device)
        for i in range(out.shape[1]):
            (row,) = torch.autograd.grad(out[:, i].sum(), x, create_graph=True, retain_graph=True)
            penalty = squares(row[None])
            (weight * penalty).backward(retain_graph=True)
            total += penalty.detach()
        loss = loss_of(out, x, y)
        loss.backward()
        return loss.detach(), total

    return step


def stock_at_once(net, x, y, weight) -> Step:
    """All rows' graphs kept, one backward at the end."""

    def step(x, y):
        x = x.detach().requires_grad_()
        out = net(x)
        rows = [
            torch.autograd.grad(out[:, i].sum(), x, create_graph=True, retain_graph=True)[0]
            for i in range(out.shape[1])
        ]
        penalty = sum(squares(row[None]) for row in rows)
        loss = loss_of(out, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def stock_batched(net, x, y, weight) -> Step:
    """All rows by `is_grads_batched`, that is by vmap over autograd."""

    def step(x, y):
        x = x.detach().requires_grad_()
        out = net(x)
        eye = torch.eye(out.shape[1], device=x.device, dtype=out.dtype)
        seeds = eye[:, None].expand(-1, out.shape[0], -1)
        (rows,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True, create_graph=True)
        penalty, loss = squares(rows), loss_of(out, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def func_jacrev(net, x, y, weight) -> Step:
    """torch.func.jacrev of the outputs summed over the batch."""

    def step(x, y):
        parameters = dict(net.named_parameters())
        buffers = {name: b.clone() for name, b in net.named_buffers()}

        def summed(x):
            out = functional_call(net, (parameters, buffers), (x,))
            return out.sum(0), out

        rows, out = jacrev(summed, has_aux=True)(x)
        penalty, loss = squares(rows), loss_of(out, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def projected(net, x, y, weight) -> Step:
    """The usual estimate from one random direction; stock autograd."""

    def step(x, y):
        x = x.detach().requires_grad_()
        out = net(x)
        v = torch.randn_like(out)
        v = v / v.norm(dim=1, keepdim=True)
        (row,) = torch.autograd.grad(out, x, v, create_graph=True)
        penalty, loss = out.shape[1] * squares(row[None]), loss_of(out, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def closed_form(net, x, y, weight) -> Step:
    """The contractive auto-encoder's penalty by hand: Σ_i (s(1 − s))²‖W_i‖²."""
    if not isinstance(net, Encoder):
        raise ValueError("the closed form is the contractive encoder's")

    def step(x, y):
        s = net(x)
        rows = net.dense.weight.float().square().sum(1)
        penalty = ((s * (1 - s)).float().square() * rows).sum(1).mean()
        loss = loss_of(s, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def doubleback(compile=False, one_shot=False, cuda_graph=False, **options) -> Callable[..., Step]:
    def build(net, x, y, weight) -> Step:
        import doubleback as db

        model = db.Penalised(net, db.Jacobian(**options), compile=compile, cuda_graph=cuda_graph)

        def two_calls(x, y):
            out, penalty = model(x)
            loss = loss_of(out, x, y)
            (loss + weight * penalty).backward()
            return loss.detach(), penalty.detach()

        classifies = [m for m in net.modules() if isinstance(m, nn.Linear)][-1].out_features == 10
        kind = "cross_entropy" if classifies else lambda out, y: out.square().sum(1)

        def one_call(x, y):
            _, loss, penalty = model.accumulate(x, y, loss=kind, weight=weight)
            return loss, penalty

        return one_call if one_shot else two_calls

    return build


METHODS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "plain compiled": plain_compiled,
    "doubleback": doubleback(),
    "doubleback one-shot": doubleback(one_shot=True),
    "doubleback compiled": doubleback(compile=True),
    "doubleback one-shot CUDA graph": doubleback(one_shot=True, cuda_graph=True),
    "doubleback chunk 1": doubleback(chunk=1),
    "doubleback chunk 2": doubleback(chunk=2),
    "doubleback projections 1": doubleback(projections=1),
    "stock loop": stock_loop,
    "stock at once": stock_at_once,
    "stock batched": stock_batched,
    "torch.func.jacrev": func_jacrev,
    "stock projections 1": projected,
    "closed form": closed_form,
}
COMPILED = ("plain compiled", "doubleback compiled")
ROW_BY_ROW = ("stock loop", "stock at once")  # seconds a step with hundreds of outputs
ESTIMATES = ("doubleback projections 1", "stock projections 1")
