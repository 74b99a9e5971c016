"""Piecewise linear networks of many kinds, paths through them, and what plain PyTorch says of both.

The oracle knows nothing of the library: it runs the net with the parameters of the path at t, and
reads every kink's region off the operators that PyTorch dispatches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from doubleback import landscape as L

aten = torch.ops.aten


def mlp(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), act(), nn.Linear(8, 6), act(), nn.Linear(6, 2))


class Residual(nn.Module):
    """Convolutions, batch norm, a residual sum, max and average pooling, a flatten by `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.inner, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        x = F.leaky_relu(x + self.inner(x), 0.2)
        x = F.avg_pool2d(x, 2)
        return self.head(x.view(x.size(0), -1).abs())


class Maxout(nn.Module):
    """Maxima of two tensors, along an axis, of windows that adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.maximum(self.a(x), self.b(x))
        h = torch.minimum(h, torch.full_like(h, 0.8))
        h = h.reshape(-1, 2, 3).amax(1)
        return F.adaptive_max_pool1d(self.c(h).unsqueeze(1), 2).squeeze(1)


class Clamped(nn.Module):
    """Thresholds away from zero, several per coordinate, and a scalar product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardtanh(self.a(x), -0.4, 0.5) * 1.5
        h = F.relu6(6 * self.b(h)) / 3
        return self.c(F.hardsigmoid(3 * h.clamp(min=0.1, max=1.2)))


def prepared(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = make().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    return net.eval()


def _layers(*names: str) -> Callable[[nn.Module], L.Direction]:
    return lambda net: L.random_direction(net, *names, seed=1)


def _input(shape: tuple[int, ...]) -> Callable[[nn.Module], L.InputLine]:
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    return lambda net: L.InputLine(direction)


# name → (network, shape of an example, path, span)
CASES: dict[str, tuple] = {
    "relu, weight": (mlp, (3,), "0.weight[2,1]", (-3, 3)),
    "relu, deep weight": (mlp, (3,), "2.weight[2,1]", (-3, 3)),
    "relu, bias": (mlp, (3,), "0.bias[2]", (-3, 3)),
    "relu, input": (mlp, (3,), _input((3,)), (-4, 4)),
    "relu, one layer": (mlp, (3,), _layers("0"), (-4, 4)),
    "relu, two layers": (mlp, (3,), _layers("0", "2"), (-4, 4)),
    "relu, all layers": (mlp, (3,), _layers(), (-5, 5)),
    "leaky, weight": (lambda: mlp(lambda: nn.LeakyReLU(0.3)), (3,), "0.weight[2,1]", (-3, 3)),
    "prelu, all layers": (lambda: mlp(nn.PReLU), (3,), _layers(), (-4, 4)),
    "prelu, its own slope": (lambda: mlp(nn.PReLU), (3,), "1.weight[0]", (-3, 3)),
    "residual, first filter": (Residual, (1, 8, 8), "stem.weight[1,0,1,2]", (-2, 2)),
    "residual, first bias": (Residual, (1, 8, 8), "stem.bias[1]", (-2, 2)),
    "residual, norm": (Residual, (1, 8, 8), "norm.weight[1]", (-2, 2)),
    "residual, input": (Residual, (1, 8, 8), _input((1, 8, 8)), (-1, 1)),
    "residual, all layers": (Residual, (1, 8, 8), _layers(), (-1, 1)),
    "maxout, weight": (Maxout, (4,), "a.weight[1,2]", (-3, 3)),
    "maxout, input": (Maxout, (4,), _input((4,)), (-3, 3)),
    "maxout, all layers": (Maxout, (4,), _layers(), (-3, 3)),
    "clamped, weight": (Clamped, (3,), "a.weight[1,2]", (-3, 3)),
    "clamped, input": (Clamped, (3,), _input((3,)), (-3, 3)),
    "clamped, all layers": (Clamped, (3,), _layers(), (-2, 2)),
}


def build(
    case: str, examples: int = 3
) -> tuple[nn.Module, Tensor, L.Coordinate | L.Direction, tuple]:
    make, shape, along, span = CASES[case]
    net = prepared(make)
    x = torch.randn(examples, *shape, generator=torch.Generator().manual_seed(2)).double()
    return net, x, L.Coordinate.parse(along) if isinstance(along, str) else along(net), span


def run_at(net: nn.Module, x: Tensor, along, t: Tensor) -> Tensor:
    """net(x) at the place t of the path, differentiable in t."""
    state = dict(net.named_parameters())
    if isinstance(along, L.InputLine):
        return net(x + t * along.direction)
    if isinstance(along, L.Coordinate):
        hot = torch.zeros_like(state[along.name])
        hot[along.index] = 1
        moved = {along.name: state[along.name].detach() * (1 - hot) + t * hot}
    else:
        moved = {name: state[name].detach() + t * d for name, d in along.by_name.items()}
    return torch.func.functional_call(net, moved, (x,))


TIE = -1


def changes(left: Tensor, right: Tensor) -> Tensor:
    """Units in different regions; a maximum that is tied has no region of its own."""
    return (left != right) & (left != TIE) & (right != TIE)


THRESHOLDS = {
    aten.relu.default: lambda a: (0,),
    aten.leaky_relu.default: lambda a: (0,),
    aten._prelu_kernel.default: lambda a: (0,),
    aten.abs.default: lambda a: (0,),
    aten.hardtanh.default: lambda a: a[1:3],
    aten.hardsigmoid.default: lambda a: (-3, 3),
    aten.clamp.default: lambda a: a[1:3],
}
INDICES = (aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default)


class Regions(TorchDispatchMode):
    """Every kink's region, in the order in which PyTorch runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in THRESHOLDS:
            bounds = THRESHOLDS[func](args)
            self.found.append(torch.stack([args[0] > b for b in bounds]).sum(0).flatten(1))
        elif func in INDICES:
            tied = func is aten.max_pool2d_with_indices.default  # behind a ReLU: zeros tie
            self.found.append(torch.where((out[0] > 0) | (not tied), out[1], TIE).flatten(1))
        elif func in (aten.maximum.default, aten.minimum.default):
            self.found.append((args[0] > args[1]).long().flatten(1))
        elif func is aten.amax.default:
            top = args[0].topk(2, args[1][0])
            best, second = top.values.unbind(args[1][0])
            winner = top.indices.select(args[1][0], 0)
            self.found.append(torch.where(best > second, winner, TIE).flatten(1))
        return out


def pattern(net: nn.Module, x: Tensor, along, t: float) -> Tensor:
    """(M, units) regions at t."""
    with torch.no_grad(), Regions() as seen:
        run_at(net, x, along, torch.tensor(t, dtype=torch.float64))
    return torch.cat([part.long() for part in seen.found], 1)
