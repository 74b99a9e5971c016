"""Under the patch, the surroundings that people train in: compile, checkpoint, DDP, autocast."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import doubleback as db
from support.derivatives import error

D = torch.float64


class Small(nn.Module):
    """Every patched family in one net."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.group = nn.GroupNorm(2, 8)
        self.layer = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def body(self, x):
        x = F.silu(self.batch(self.conv(x)))
        return F.silu(self.group(self.depthwise(x)))

    def forward(self, x):
        x = self.body(x).flatten(2).mT
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return F.hardsigmoid(self.head(self.layer(x).mean(1)))


class Hard(torch.autograd.Function):
    """hardsigmoid with a second derivative, for stock."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.hardsigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        slope = torch.ops.aten.hardsigmoid_backward(torch.ones_like(x), x.detach())
        return g * slope.detach()


@contextlib.contextmanager
def stock(monkeypatch):
    """What stock needs to take these derivatives at all."""
    with monkeypatch.context() as m, sdpa_kernel(SDPBackend.MATH):
        m.setattr(F, "hardsigmoid", Hard.apply)
        yield


def net_and_input(dtype=D):
    torch.manual_seed(0)
    return Small().to(dtype).train(), torch.randn(3, 2, 8, 8, dtype=dtype)


def penalised(forward, net, x):
    """The gradients of loss and penalty together, by .backward()."""
    net.zero_grad()
    leaf = x.detach().requires_grad_()
    losses = forward(leaf).square().sum(1)
    (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    (losses.mean() + g.square().sum()).backward()
    return [[leaf.grad, *(p.grad.clone() for p in net.parameters())]]


def expected(monkeypatch, net, x, run=penalised):
    original = F.hardsigmoid
    Hard.forward = staticmethod(lambda ctx, x: (ctx.save_for_backward(x), original(x))[1])
    with stock(monkeypatch):
        return run(net, net, x)


def test_one_net_with_everything(monkeypatch):
    net, x = net_and_input()
    reference = expected(monkeypatch, net, x)
    with db.patched():
        assert error(penalised(net, net, x), reference) < 1e-12


def test_checkpointing(monkeypatch):
    net, x = net_and_input()
    net.batch.momentum = 0.0  # recomputed twice
    reference = expected(monkeypatch, net, x)

    def forward(x):
        return checkpoint(net, x, use_reentrant=False)

    with db.patched():
        assert error(penalised(forward, net, x), reference) < 1e-12


DISTRIBUTED = """
import os, sys
sys.path[:0] = sys.argv[2:]
import pytest, torch, test_integration as here
from torch import nn
import doubleback as db

net, x = here.net_and_input()
reference = here.expected(pytest.MonkeyPatch(), net, x)
store = torch.distributed.FileStore(sys.argv[1], 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel = nn.parallel.DistributedDataParallel(net)
with db.patched():
    found = here.error(here.penalised(parallel, net, x), reference)
print(found, flush=True)
os._exit(0 if found < 1e-12 else 1)
"""


def test_distributed_data_parallel(tmp_path):
    """In a process of its own, which ends without taking the process group down: the group's
    threads may wait for the interpreter that waits for them."""
    folders = [path for path in sys.path if path]
    command = [sys.executable, "-c", DISTRIBUTED, str(tmp_path / "store"), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def functional(net, x):
    """The penalised gradient as a function of parameters, by torch.func."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}

    def total(parameters, x):
        def losses(x):
            state = {name: b.clone() for name, b in buffers.items()}
            return functional_call(net, (parameters, state), (x,)).square().sum()

        return torch.func.grad(losses)(x).square().sum()

    return torch.func.grad(total), {n: p.detach() for n, p in net.named_parameters()}


def test_torch_func_and_make_fx(monkeypatch):
    net, x = net_and_input()

    def by_autograd(forward, net, x):
        net.zero_grad()
        leaf = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(forward(leaf).square().sum(), leaf, create_graph=True)
        g.square().sum().backward()
        return [[p.grad.clone() for p in net.parameters()]]

    reference = expected(monkeypatch, net, x, by_autograd)
    with db.patched():
        gradient, parameters = functional(net, x)
        found = [[*gradient(parameters, x).values()]]
        assert error(found, reference) < 1e-12
        graph = make_fx(gradient, tracing_mode="fake", _allow_non_fake_inputs=True)(parameters, x)
    with torch.no_grad():  # the graph keeps the formulas, with the patch or without
        traced = [[*graph(parameters, x).values()]]
    assert error(traced, reference) < 1e-12


def test_a_compiled_step_of_torch_func():
    net, x = net_and_input()
    with db.patched():
        gradient, parameters = functional(net, x)
        reference = [[*gradient(parameters, x).values()]]
        compiled = torch.compile(gradient, backend="aot_eager")
        found = [[*compiled(parameters, x).values()]]
    assert error(found, reference) < 1e-12


def test_autocast():
    net, x = net_and_input(torch.float32)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    with db.patched():
        ((_, *found),) = penalised(forward, net, x)
        ((_, *exact),) = penalised(net, net, x)
    size = torch.cat([g.flatten() for g in exact]).norm()
    apart = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)]).norm()
    assert apart / size < 0.2  # bfloat16 through some thirty layers


@pytest.mark.parametrize("retain", [False, True])
def test_a_graph_made_under_the_patch_outlives_it(retain, monkeypatch):
    net, x = net_and_input()
    reference = expected(monkeypatch, net, x)
    net.zero_grad()
    leaf = x.detach().requires_grad_()
    with db.patched():
        losses = net(leaf).square().sum(1)
        (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    total = losses.mean() + g.square().sum()
    if retain:
        total.backward(retain_graph=True)
        net.zero_grad()
        leaf.grad = None
    total.backward()
    assert error([[leaf.grad, *(p.grad for p in net.parameters())]], reference) < 1e-12
