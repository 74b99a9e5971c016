"""Training with a gradient penalty by stock autograd, `create_graph=True`, beside the library's.

    model, twin = pair(net)                      # Penalised(net), and a copy of net
    same_training(model, twin, change=change)    # six steps of both, everything compared

A step minimises mean_b ‖out_b − y_b‖² + 0.7 · penalty, by `backward` or by `accumulate`. Compared
are the output, the penalty, every gradient (None included), every buffer, the state of the random
generator, and whatever Python side effects a test names. A model that cannot be captured runs on
autograd, which is right too: the warning about it is none of these tests' business.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import doubleback as db

WEIGHT = 0.7  # of the penalty beside the loss
TOLERANCE = 1e-10  # relative, float64


def squared(xi: Sequence[Tensor]) -> Tensor:
    """‖ξ‖² per example, over several inputs."""
    return torch.stack([u.flatten(1).square().sum(1) for u in xi]).sum(0)


def stock_penalty(
    net: Callable,
    args: Sequence[Any],
    wrt: Sequence[int] = (0,),
    p: Callable[[Sequence[Tensor]], Tensor] = squared,
    v: Callable[[Tensor], Tensor] = torch.ones_like,
) -> tuple[Tensor, Tensor]:
    """(net(*args), p(J*v) per example), both with a graph."""
    given = list(args)
    for i in wrt:
        given[i] = given[i].detach().requires_grad_()
    with torch.enable_grad():
        out = net(*given)
        xi = torch.autograd.grad(out, [given[i] for i in wrt], v(out), create_graph=True)
        return out, p(xi)


def pair(net: nn.Module, penalty: Any = None, **options: Any) -> tuple[db.Penalised, nn.Module]:
    """The model, and a copy of its network for stock autograd; both in float64."""
    net = net.double()
    return db.Penalised(net, penalty or db.OutputGradient(), **options), copy.deepcopy(net)


def assert_close(found: Any, wanted: Any, what: str) -> None:
    if not isinstance(wanted, Tensor):
        assert found == wanted, f"{what}: {found} instead of {wanted}"
        return
    assert isinstance(found, Tensor), f"{what}: {found!r}"
    assert type(found) in (Tensor, nn.Parameter), f"{what} is a {type(found).__name__}"
    assert found.shape == wanted.shape, f"{what}: {found.shape} instead of {wanted.shape}"
    torch.testing.assert_close(
        found.detach(), wanted.detach(), rtol=TOLERANCE, atol=1e-12,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def assert_same_state(net: nn.Module, twin: nn.Module, what: str) -> None:
    """Gradients, parameters and buffers of two networks."""
    names = dict(net.named_parameters())
    assert names.keys() == dict(twin.named_parameters()).keys()
    for name, wanted in twin.named_parameters():
        assert_close(names[name].grad, wanted.grad, f"{what}, gradient of {name}")
        assert_close(names[name], wanted, f"{what}, {name}")
    buffers = dict(net.named_buffers())
    for name, wanted in twin.named_buffers():
        assert_close(buffers[name], wanted, f"{what}, buffer {name}")


def own_step(model: db.Penalised, args: Sequence[Any], y: Tensor, how: str) -> tuple[Any, Tensor]:
    """One step of the library's: adds to `.grad`, returns (out, penalty)."""
    if how == "accumulate":
        out, _, penalty = model.accumulate(*args, y, loss="mse", weight=WEIGHT)
        return out, penalty
    out, penalty = model(*args)
    ((out - y).square().flatten(1).sum(1).mean() + WEIGHT * penalty).backward()
    return out, penalty


def stock_step(net: nn.Module, args: Sequence[Any], y: Tensor, **options) -> tuple[Any, Tensor]:
    """The same step by stock autograd."""
    out, values = stock_penalty(net, args, **options)
    penalty = values.mean()
    ((out - y).square().flatten(1).sum(1).mean() + WEIGHT * penalty).backward()
    return out, penalty


def same_training(
    model: db.Penalised,
    twin: nn.Module,
    *,
    change: Callable[[nn.Module, int], None] | None = None,
    effects: Callable[[nn.Module], Any] | None = None,
    batch: Callable[[int], tuple] | None = None,
    target: Callable[[int], Tensor] | None = None,
    how: str = "backward",
    steps: int = 6,
    rate: float = 0.02,
    own_first: bool = False,
    **options: Any,
) -> None:
    """`steps` steps of gradient descent of both, compared after each.

    change(net, i): what happens to a network before step i; effects(net): what else to compare;
    batch(i), target(i): arguments and target of step i, by default four examples of five numbers
    and of one; own_first: the library's step before stock's, which may share state with it.
    """
    for i in range(steps):
        args = batch(i) if batch else (numbers(i, 4, 5),)
        y = target(i) if target else numbers(50 + i, args[0].shape[0], 1)
        found = {}
        for net in (model.net, twin) if own_first else (twin, model.net):
            if change is not None:
                change(net, i)
            net.zero_grad()
            torch.manual_seed(200 + i)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", db.CaptureWarning)
                if net is twin:
                    out, penalty = stock_step(net, args, y, **options)
                else:
                    out, penalty = own_step(model, args, y, how)
            seen = effects(net) if effects else None
            found[net is twin] = (out, penalty, seen, torch.get_rng_state())
        out, penalty, seen, own = found[False]
        wanted_out, wanted_penalty, wanted_seen, state = found[True]
        assert_close(out, wanted_out, f"step {i}, out")
        assert_close(penalty, wanted_penalty, f"step {i}, penalty")
        assert_close(seen, wanted_seen, f"step {i}, side effects")
        assert torch.equal(own, state), f"step {i}: the generator was left in another state"
        assert_same_state(model.net, twin, f"step {i}")
        for net in (model.net, twin):
            with torch.no_grad():
                for t in net.parameters():
                    if t.grad is not None:
                        t -= rate * t.grad


def numbers(seed: int, *shape: int) -> Tensor:
    """Random numbers that leave the global generator alone."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
