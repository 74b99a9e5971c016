"""Two processes: gradients that `accumulate` adds are averaged as DDP averages those of `backward`,
`backward` hands them over while its last sweep runs, and a network that FSDP shards is left as it
was by a capture that fails."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import doubleback as db
from doubleback import plan
from support.stock import WEIGHT, assert_close, numbers, own_step, stock_step

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

WORLD = 2
CASES: dict = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def _worker(rank: int, names: list[str], place: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    for name in names:
        globals()[name](rank)
        dist.barrier()
    os._exit(0)  # where Python ends as usual, gloo's threads may abort it: docs/distributed.md


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class Uncaptured(nn.Module):
    """Runs on autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x) if float(x.sum()) < 1e9 else x


def whole(i: int):
    """The batch of step i, over all processes."""
    return numbers(i, 8, 5), numbers(50 + i, 8, 1)


def share(i: int, rank: int):
    x, y = whole(i)
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def descend(net: nn.Module) -> None:
    with torch.no_grad():
        for t in net.parameters():
            if t.grad is not None:
                t -= 0.05 * t.grad
    net.zero_grad()


def same(net: nn.Module, twin: nn.Module, what: str) -> None:
    for (name, t), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert_close(t.grad, other.grad, f"{what}, gradient of {name}")
        assert_close(t, other, f"{what}, {name}")


def train(net: nn.Module, rank: int, how: str) -> None:
    """Five steps against one process that sees the whole batch."""
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient())
    ddp = DDP(model)
    for i in range(5):
        x, y = share(i, rank)
        own_step(ddp.module if how == "accumulate" else ddp, (x,), y, how)
        stock_step(twin, (whole(i)[0],), whole(i)[1])
        same(net, twin, f"rank {rank}, step {i}")
        descend(net)
        descend(twin)


@case
def accumulate_is_averaged(rank):
    train(network(), rank, "accumulate")


@case
def accumulate_is_averaged_where_the_wrapper_is_frozen(rank):
    """`gc.freeze`, with which long runs begin, hides all that lives from `gc.get_objects`."""
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient())
    ddp = DDP(model)
    gc.freeze()
    try:
        own_step(ddp.module, (share(0, rank)[0],), share(0, rank)[1], "accumulate")
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    stock_step(twin, (whole(0)[0],), whole(0)[1])
    same(net, twin, f"rank {rank}")


@case
def backward_is_averaged(rank):
    train(network(), rank, "backward")


@case
def accumulate_on_autograd_is_averaged(rank):
    train(Uncaptured(), rank, "accumulate")


@case
def accumulating_without_synchronisation(rank):
    """Two batches inside no_sync and a third outside: the sum of all is averaged, once."""
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient())
    ddp = DDP(model)
    for i in range(4):
        alone = copy.deepcopy(twin)
        with ddp.no_sync():
            for k in (0, 1):
                x, y = share(3 * i + k, rank)
                own_step(model, (x,), y, "accumulate")
                stock_step(alone, (x,), y)
        same(net, alone, f"rank {rank}, step {i}, not yet averaged")
        x, y = share(3 * i + 2, rank)
        own_step(model, (x,), y, "accumulate")
        for k in range(3):
            stock_step(twin, (whole(3 * i + k)[0],), whole(3 * i + k)[1])
        same(net, twin, f"rank {rank}, step {i}")
        descend(net)
        descend(twin)


@case
def both_ways_in_turn(rank):
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient())
    ddp = DDP(model)
    for i in range(6):
        x, y = share(i, rank)
        how = ("backward", "accumulate")[i % 2]
        own_step(ddp if how == "backward" else model, (x,), y, how)
        stock_step(twin, (whole(i)[0],), whole(i)[1])
        same(net, twin, f"rank {rank}, step {i}, {how}")
        descend(net)
        descend(twin)


class Branches(nn.Module):
    """Each process uses another branch; a third is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(5, 6) for _ in range(3)])
        self.last = nn.Linear(6, 1)
        self.which = 0
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.branches[self.which](x)))


@case
def parameters_that_some_do_not_use(rank):
    net = Branches()
    net.which = rank
    twins = [copy.deepcopy(net) for _ in range(2)]
    model = db.Penalised(net, db.OutputGradient())
    ddp = DDP(model, find_unused_parameters=True)
    assert ddp.module is model
    for i in range(4):
        own_step(model, (share(i, rank)[0],), share(i, rank)[1], "accumulate")
        for k, twin in enumerate(twins):
            twin.which = k
            twin.zero_grad()
            stock_step(twin, (share(i, k)[0],), share(i, k)[1])
        for t, one, two in zip(*(n.parameters() for n in (net, *twins)), strict=True):
            parts = [g.grad for g in (one, two) if g.grad is not None]
            assert_close(t.grad, sum(parts) / 2 if parts else None, f"rank {rank}, step {i}")
        model.zero_grad()


class Stepping(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return self.model.accumulate(x, y, loss="mse", weight=WEIGHT)


@case
def accumulate_inside_a_wrapped_forward(rank):
    """Refused with words that say what to do."""
    ddp = DDP(Stepping(db.Penalised(network(), db.OutputGradient())))
    with pytest.raises(db.DoublebackError, match=r"accumulate inside the forward.*backward\(\)"):
        ddp(*share(0, rank))


@case
def without_a_wrapper_nothing_is_averaged(rank):
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient())
    for i in range(4):
        x, y = share(i, rank)
        own_step(model, (x,), y, "accumulate")
        stock_step(twin, (x,), y)
        same(net, twin, f"rank {rank}, step {i}")


# ---------------------------------------------------- gradients as they become complete

EVENTS: list[str] = []


@torch.library.custom_op("tests_distributed::noted", mutates_args=())
def noted(y: torch.Tensor) -> torch.Tensor:
    EVENTS.append("sweep")
    return y.clone()


@noted.register_fake
def _(y):
    return torch.empty_like(y)


@torch.library.custom_op("tests_distributed::early", mutates_args=())
def early(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@early.register_fake
def _(x):
    return torch.empty_like(x)


noted.register_autograd(lambda ctx, y: noted(y))
early.register_autograd(lambda ctx, y: noted(y))


class Noting(nn.Module):
    """Sweeps that go back through the first layer leave a note."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(5, 64), nn.Linear(64, 2100)
        self.last = nn.Linear(2100, 1)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.inner(torch.tanh(early(self.first(x))))))


@case
def gradients_are_sent_while_the_last_sweep_runs(rank, compile=False):
    """Eager at the first steps, flat later; a network of several buckets is captured too."""
    net = Noting()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(), strict=True, sweeps=True, compile=compile)
    ddp = DDP(model, bucket_cap_mb=1)

    def send(_, bucket):
        EVENTS.append("send")
        future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, send)
    for i in range(5):
        x, y = share(i, rank)
        EVENTS.clear()
        own_step(ddp, (x,), y, "backward")
        last = len(EVENTS) - EVENTS[::-1].index("sweep")
        if i:  # DDP's first step is one bucket, of which it learns the order
            assert "send" in EVENTS[:last], f"step {i}: {EVENTS}"
        stock_step(twin, (whole(i)[0],), whole(i)[1])
        same(net, twin, f"rank {rank}, step {i}")
        descend(net)
        descend(twin)


class Mixed(nn.Module):
    """Tied and parametrised weights, a frozen one, a norm, a convolution, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(5)
        self.tied = nn.Linear(15, 15)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(15, 15))
        self.last = nn.Linear(15, 1)
        self.last.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        h = self.norm(self.convolution(x[:, None])).flatten(1)
        h = torch.tanh(self.tied(torch.sigmoid(self.tied(h))))
        return self.last(self.normed(h) * h)


def small_stretches():
    plan.STRETCH, plan.STRETCHES = 1, 1000


@case
def every_program_by_stretches(rank):
    """Each layer's gradients on their own: the same as all at once, whatever the program."""
    small_stretches()
    penalties = {
        "a loss": db.LossGradient("mse"),
        "a caller's": db.LossGradient(lambda out, y: (out - y).square().sum(1)),
        "a Jacobian": db.Jacobian(),
    }
    for name, penalty in penalties.items():
        net = Mixed()
        twin = copy.deepcopy(net)
        model = db.Penalised(net, penalty, strict=True, sweeps=True)
        reference = db.Penalised(twin, copy.deepcopy(penalty), sweeps=False)
        for i in range(5):
            rows = 4 if i < 4 else 3  # open sizes at last
            x, y = share(i, rank)
            x, y = x[:rows].requires_grad_(i % 2 == 0), y[:rows]
            args = (x, y) if penalty.extras else (x,)
            found, wanted = [], []
            for one, into in ((model, found), (reference, wanted)):
                x.grad = None
                one.zero_grad()
                out, p = one(*args)
                loss = (out - y).square().mean() + WEIGHT * p
                loss.backward(retain_graph=i == 3)
                if i == 3:
                    loss.backward()
                into += [x.grad, *(t.grad for t in one.parameters())]
            for k, (g, w) in enumerate(zip(found, wanted, strict=True)):
                assert_close(g, w, f"{name}, step {i}, gradient {k}")


@case
def some_gradients_and_gradients_of_gradients(rank):
    small_stretches()
    net = network()
    model = db.Penalised(net, db.OutputGradient(), sweeps=True)
    x, y = share(0, rank)
    weight = torch.tensor(WEIGHT, dtype=x.dtype, requires_grad=True)
    for _ in range(4):
        out, p = model(x)
        loss = (out - y).square().mean() + weight * p
        parameters = list(net.parameters())
        late = torch.autograd.grad(loss, parameters[-2:], retain_graph=True)
        early = torch.autograd.grad(loss, parameters[:2], retain_graph=True)
        every = torch.autograd.grad(loss, parameters, create_graph=True)
        for one, other in zip((*early, *late), every, strict=True):
            assert_close(one, other.detach(), f"rank {rank}")
        (found,) = torch.autograd.grad(sum(g.sum() for g in every), weight)
        twin, by = network(), weight.detach().clone().requires_grad_()
        x1 = x.detach().requires_grad_()
        stock = twin(x1)
        (slope,) = torch.autograd.grad(stock.sum(), x1, create_graph=True)
        total = (stock - y).square().mean() + by * slope.square().sum(1).mean()
        grads = torch.autograd.grad(total, list(twin.parameters()), create_graph=True)
        (wanted,) = torch.autograd.grad(sum(g.sum() for g in grads), by)
        assert_close(found, wanted, f"rank {rank}, in the weight")
    p = model(x)[1]
    torch.autograd.grad(p, parameters[:3])
    with pytest.raises(db.StaleGraphError, match="a second time"):
        torch.autograd.grad(p, parameters[:3])


@case
def parameters_that_move_as_soon_as_their_gradient_is_there(rank):
    """An optimiser inside backward: no stretch to come reads what it has written."""
    small_stretches()
    net = Mixed()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(), sweeps=True)

    def step(t):
        with torch.no_grad():
            t -= 0.05 * t.grad
        t.grad = None

    for t in net.parameters():
        if t.requires_grad:
            t.register_post_accumulate_grad_hook(step)
    for i in range(5):
        x, y = share(i, rank)
        own_step(model, (x,), y, "backward")
        stock_step(twin, (x,), y)
        descend(twin)
        same(net, twin, f"rank {rank}, step {i}")


@case
def a_sharded_network(rank):
    """Refused, whole as its parameters may be after a call of its own, and `net(x)` works as
    before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    twin = network()
    for layers in ((), (0, 2)):
        net = copy.deepcopy(twin)
        for part in (*(net[i] for i in layers), net):
            fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)))
        model = db.Penalised(net, db.OutputGradient())
        for i in range(3):
            x, y = share(i, rank)
            with pytest.raises(db.InputError, match="the other way round"):
                own_step(model, (x,), y, "backward")
            with torch.no_grad():
                assert_close(net(x), twin(x), f"rank {rank}, step {i}, the network itself")


@case
def a_network_split_between_processes(rank):
    """Tensor parallelism is refused wherever it is met, and the network trains on as before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    twin = network()
    mesh, how = init_device_mesh("cpu", (WORLD,)), (ColwiseParallel(), RowwiseParallel())
    net = parallelize_module(copy.deepcopy(twin), mesh, {"0": how[0], "2": how[1]})
    model = db.Penalised(network(), db.OutputGradient())
    inside = parallelize_module(model, mesh, {"net.0": how[0], "net.2": how[1]})
    x, y = whole(0)

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().sum()

    for refused in (
        lambda: own_step(db.Penalised(net, db.OutputGradient()), (x,), y, "backward"),
        lambda: own_step(db.Penalised(net, db.OutputGradient()), (x,), y, "accumulate"),
        lambda: own_step(inside, (x,), y, "backward"),
        lambda: db.WithGradient(net)(x),
        lambda: db.compile(slope, compiler="eager")(x),
    ):
        with pytest.raises(db.InputError, match="split between processes"):
            refused()
    for one in (net, twin):
        (one(x) - y).square().mean().backward()
    for t, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(t.grad.full_tensor(), other.grad, f"rank {rank}")


@case
def the_wrapper_inside(rank):
    """Said before anything runs; the wrapped network trains on as before."""
    net = network()
    twin = copy.deepcopy(net)
    ddp = DDP(net)
    for make in (lambda: db.Penalised(ddp, db.OutputGradient()), lambda: db.WithGradient(ddp)):
        with pytest.raises(db.InputError, match="wrap the other way round"):
            make()
    x, y = share(0, rank)
    (ddp(x) - y).square().mean().backward()
    x, y = whole(0)
    (twin(x) - y).square().mean().backward()
    same(net, twin, f"rank {rank}")


@case
def a_sharded_model(rank):
    """`fully_shard` around it: a call and `backward` train as one process does, `accumulate` says
    what to do instead."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(), sweeps=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    with pytest.raises(db.DoublebackError, match=r"fully_shard has wrapped.*backward\(\)"):
        own_step(model, (share(0, rank)[0],), share(0, rank)[1], "accumulate")
    for i in range(4):
        own_step(model, (share(i, rank)[0],), share(i, rank)[1], "backward")
        stock_step(twin, (whole(i)[0],), whole(i)[1])
        for (name, t), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert_close(t.grad.full_tensor(), other.grad, f"step {i}, gradient of {name}")
        model.zero_grad()
        twin.zero_grad()


def compiled_gradients_are_sent_while_the_last_sweep_runs(rank):
    gradients_are_sent_while_the_last_sweep_runs(rank, compile=True)


@pytest.mark.long
def test_two_processes_compiled(tmp_path):
    case = compiled_gradients_are_sent_while_the_last_sweep_runs
    mp.spawn(_worker, ([case.__name__], str(tmp_path / "store")), nprocs=WORLD, join=True)


def test_two_processes(tmp_path):
    """All cases in one pair of processes, whose start takes longer than they do; the one that
    failed is in the traceback."""
    mp.spawn(_worker, (list(CASES), str(tmp_path / "store")), nprocs=WORLD, join=True)
