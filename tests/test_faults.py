"""Steps that fail: whatever was raised, and wherever, the network, its gradients, the generators
and the process are as they were, and the next step is right by stock autograd in float64.

`make fuzz-faults` runs the long ones too: 200 interruptions of every kind of step, captures and
compilations included.
"""

from __future__ import annotations

import copy
import datetime
import errno
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import doubleback as db
from doubleback.run import flattening, inductor, straight_line
from support.faults import Fault, changed, kernels, world

Y = torch.tensor([0, 1, 2, 0])
LIMIT = 1e-10
TORCH = str(Path(torch.__file__).parent)
WAYS = {
    "nodes": {"flatten_after": None},
    "flat": {"flatten_after": 0},
    "accumulate nodes": {"flatten_after": None},
    "accumulate flat": {"flatten_after": 0},
    "autograd": {"sweeps": False},
    "compiled": {"compile": True},
    "accumulate compiled": {"compile": True},
}
TRACERS = ("record", "make_fx")  # of which one makes the flat graphs
QUICK = [way for way in WAYS if "compiled" not in way]


class Net(nn.Module):
    """With buffers, random numbers and an activation that bends."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.hidden, self.drop, self.head = nn.Linear(8, 5), nn.Dropout(drop), nn.Linear(5, 3)

    def forward(self, x):
        h = self.norm(self.convolution(x)).tanh().flatten(1)
        return self.head(F.gelu(self.drop(self.hidden(h))))


class Trial:
    """A model and the steps it takes, each from the same numbers."""

    def __init__(self, way: str, net: nn.Module | None = None, penalty=None, **how) -> None:
        self.way, self.net = way, (Net(0 if "compiled" in way else 0.3) if net is None else net)
        self.net.double()
        penalty = db.LossGradient("cross_entropy") if penalty is None else penalty
        self.model = db.Penalised(self.net, penalty, **{**WAYS[way], **how})
        self.start = copy.deepcopy(self.net.state_dict())
        self.numbers = torch.Generator().manual_seed(1)

    def data(self):
        return torch.randn(4, 1, 4, 4, dtype=torch.float64, generator=self.numbers)

    def step(self, x) -> None:
        if self.way.startswith("accumulate"):
            self.model.accumulate(x, Y)
        else:
            out, penalty = self.model(x, Y)
            (F.cross_entropy(out, Y) + penalty).backward()

    def reset(self) -> None:
        self.net.zero_grad()
        self.net.load_state_dict(self.start)

    def world(self):
        return world(self.net)

    def warm(self) -> Trial:
        """After its first steps, which capture and flatten, or see what of the patch they use."""
        for _ in range(5):
            self.step(self.data())
        self.reset()
        return self

    def count(self, *kind) -> int:
        """How many places there are in a step to fail at."""
        with Fault(None, *kind) as fault:
            self.step(self.data())
        self.reset()
        return fault.count

    def fail(self, fault: Fault) -> list[str]:
        """What is not as it was after a step that met a fault."""
        x, before = self.data(), self.world()
        with fault:
            try:
                self.step(x)
            except fault.error:
                pass
            else:  # PyTorch loses what is raised where it checks guards; the step is whole then
                lost = fault.where is not None and not fault.where.startswith(TORCH)
                assert not lost, f"{fault.error} was lost: raised in {fault.where}"
        return changed(before, self.world())

    def assert_next_is_right(self) -> None:
        self.reset()
        x, twin = self.data(), copy.deepcopy(self.net)
        torch.manual_seed(3)
        self.step(x)
        torch.manual_seed(3)
        stock(twin, x)
        for p, q in zip(self.net.parameters(), twin.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= LIMIT * max(1e-2, q.grad.norm())
        for b, c in zip(self.net.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=LIMIT, atol=LIMIT)
        self.reset()


def stock(net: nn.Module, x) -> None:
    x = x.clone().requires_grad_()
    out = net(x)
    (xi,) = torch.autograd.grad(F.cross_entropy(out, Y, reduction="sum"), x, create_graph=True)
    (F.cross_entropy(out, Y) + xi.square().flatten(1).sum(1).mean()).backward()


def unexpected(names: list[str], net: nn.Module, whole: bool | None) -> list[str]:
    """Of what changed, what may not: a forward pass that was complete has written its buffers and
    drawn its numbers, under stock autograd too. whole: gradients may be there, if they all are;
    None: some may be, since PyTorch hands over each when it is computed."""
    rest = [n for n in names if not n.startswith("buffer ") and n != "generator"]
    grads = {f"grad of {name}" for name, _ in net.named_parameters()}
    may = whole is None or (whole and grads <= set(rest))
    return [n for n in rest if n not in grads] if may else rest


# --------------------------------------------------------------------------------- out of memory


def out_of_memory(way: str, places: int) -> None:
    trial = Trial(way).warm()
    kind = (torch.OutOfMemoryError, kernels)
    count = trial.count(*kind)
    assert count > 5
    for k in range(places):
        at = 1 + k * (count - 1) // max(1, places - 1)
        fault = Fault(at, *kind)
        names = trial.fail(fault)
        assert fault.where is not None
        assert not unexpected(names, trial.net, False), fault.where
        trial.assert_next_is_right()


@pytest.mark.parametrize("way", QUICK)
def test_out_of_memory(way):
    out_of_memory(way, 6)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_out_of_memory_at_each_kernel(way):
    out_of_memory(way, 60)


@pytest.mark.parametrize("way", ["nodes", "flat"])
def test_backward_again_after_one_that_failed(way):
    """Its values are used up; it says so instead of failing at random."""
    trial = Trial(way).warm()
    out, penalty = trial.model(trial.data(), Y)
    with pytest.raises(torch.OutOfMemoryError), Fault(5, torch.OutOfMemoryError, kernels):
        penalty.backward()
    with pytest.raises(db.StaleGraphError, match="run forward again"):
        penalty.backward()
    del out, penalty
    trial.assert_next_is_right()


# ------------------------------------------------------------------------------------ Ctrl-C


def interrupt(way: str, trials: int) -> None:
    trial = Trial(way).warm()
    count, drawn = trial.count(), random.Random(0)
    for _ in range(trials):
        fault = Fault(drawn.randrange(1, count + 1))
        names = trial.fail(fault)
        whole = None if way == "autograd" else True
        assert not unexpected(names, trial.net, whole), fault.where
        trial.assert_next_is_right()


@pytest.mark.parametrize("way", QUICK)
def test_interrupted_anywhere(way):
    interrupt(way, 20)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_interrupted_anywhere_often(way):
    interrupt(way, 200)


def interrupt_first(way: str, trials: int) -> None:
    """While the network is captured, its sweeps flattened, and the result compiled."""
    drawn = random.Random(0)
    fresh = Trial(way)
    with Fault() as counting:
        fresh.step(fresh.data())
    for _ in range(trials):
        trial = Trial(way)
        fault = Fault(drawn.randrange(1, counting.count))
        names = trial.fail(fault)
        assert not unexpected(names, trial.net, True), fault.where
        trial.assert_next_is_right()


@pytest.mark.parametrize("way", ["accumulate flat"])
def test_interrupted_in_the_first_step(way):
    interrupt_first(way, 1)


@pytest.mark.long
@pytest.mark.parametrize("way", [w for w in WAYS if w != "autograd"])
def test_interrupted_in_the_first_step_often(way):
    interrupt_first(way, 20)


@pytest.mark.parametrize("way", ["flat", "accumulate flat", "compiled"])
def test_an_interruption_that_pytorch_turns_into_an_error(way, monkeypatch):
    """Ctrl-C while PyTorch has a mode taken off: its cleaning up fails, and that error came out as
    one of the sweeps', which were never flattened again."""
    real = {name: getattr(flattening, name) for name in TRACERS}

    def interrupted(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    def replayed(graph, *_):
        return straight_line.boxed(graph)

    monkeypatch.setattr(flattening.inductor, "compiled", replayed)  # it is not about Inductor
    trial = Trial(way)
    for name in TRACERS:
        monkeypatch.setattr(flattening, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.step(trial.data())
    calls = []
    for name in TRACERS:
        trace = lambda *a, by=real[name], **k: calls.append(1) or by(*a, **k)  # noqa: E731
        monkeypatch.setattr(flattening, name, trace)
    trial.assert_next_is_right()
    assert calls  # the sweeps are flattened now


def test_a_network_that_cannot_be_captured_while_an_interruption_is_handled():
    """As by a loop that evaluates once more before it ends: no interruption is raised again."""

    class Branching(Net):
        def forward(self, x):
            return super().forward(x) if x.sum() < 1e9 else x

    trial = Trial("flat", Branching())
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.warns(db.CaptureWarning, match="branching"):
            trial.step(trial.data())


# ------------------------------------------------------------------------------- users' own code


class Broken(Exception):
    pass


class Switch:
    """Raises while it is on."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, *_):
        if self.on:
            raise Broken("made up")


def fails_once(trial: Trial, switch: Switch, grads: bool = False) -> None:
    """grads: autograd may have delivered those of other parameters before."""
    trial.warm()
    x, before = trial.data(), trial.world()
    switch.on = True
    with pytest.raises(Broken):
        trial.step(x)
    switch.on = False
    names = unexpected(changed(before, trial.world()), trial.net, True)
    assert [n for n in names if not (grads and n.startswith("grad of"))] == []
    trial.assert_next_is_right()


@pytest.mark.parametrize("way", QUICK)
def test_an_error_in_the_loss(way):
    switch = Switch()

    def loss(out, y):
        switch()
        return F.cross_entropy(out, y, reduction="none")

    fails_once(Trial(way, penalty=db.LossGradient(loss)), switch)


@pytest.mark.parametrize("way", QUICK)
def test_an_error_in_a_tensors_hook(way):
    trial, switch = Trial(way), Switch()
    trial.net.hidden.weight.register_hook(switch)
    fails_once(trial, switch, grads=True)


@pytest.mark.parametrize("way", ["flat", "autograd"])
def test_an_error_in_a_forward_hook(way):
    """A hook that runs in Python, so that the network runs on autograd."""
    trial, switch = Trial(way), Switch()
    trial.net.hidden.register_forward_hook(torch.compiler.disable(switch))
    if way == "flat":
        with pytest.warns(db.CaptureWarning):
            trial.warm()
    fails_once(trial, switch)


class Dependent(Net):
    """Raises where a number is too large."""

    def forward(self, x):
        if bool(x.abs().max() > 100):
            raise Broken("made up")
        return super().forward(x)


@pytest.mark.parametrize("way", ["flat", "accumulate flat"])
def test_an_error_that_depends_on_numbers(way):
    trial = Trial(way, Dependent())
    with pytest.warns(db.CaptureWarning, match="data"):
        trial.warm()
    before = trial.world()
    with pytest.raises(Broken):
        trial.step(1000 * trial.data())
    assert changed(before, trial.world()) == []
    trial.assert_next_is_right()


def test_an_error_of_the_network_in_the_first_step():
    """Raised while it is captured."""

    class Strict(Net):
        def forward(self, x):
            if x.shape[-1] != 4:
                raise Broken("made up")
            return super().forward(x)

    trial = Trial("flat", Strict())
    before = trial.world()
    with pytest.raises(Broken):
        trial.step(torch.zeros(4, 1, 5, 5, dtype=torch.float64))
    assert changed(before, trial.world()) == []
    trial.assert_next_is_right()


# ------------------------------------------------------------------ flattening and compilation


@pytest.mark.parametrize("way", ["flat", "accumulate flat"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_an_error_while_sweeps_are_flattened(way, error, monkeypatch):
    """Memory is the user's matter. Anything else says that these sweeps cannot be flattened."""
    trial = Trial(way)
    before, x = trial.world(), trial.data()

    def fails(*args, **kwargs):
        raise error("made up")

    with monkeypatch.context() as patch:
        for name in TRACERS:
            patch.setattr(flattening, name, fails)
        if error is torch.OutOfMemoryError:
            with pytest.raises(error):
                trial.step(x)
            assert changed(before, trial.world()) == []
        else:
            trial.step(x)
    trial.assert_next_is_right()


@pytest.mark.parametrize("way", ["compiled", "accumulate compiled"])
def test_an_error_of_the_compiler(way, monkeypatch):
    trial = Trial(way)
    before, x = trial.world(), trial.data()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_by_inductor", full)
        with pytest.raises(OSError, match="No space left"):
            trial.step(x)
    assert unexpected(changed(before, trial.world()), trial.net, False) == []
    monkeypatch.setattr(inductor, "_by_inductor", lambda graph, _: lambda given: graph(*given))
    trial.assert_next_is_right()


@pytest.mark.long
@pytest.mark.parametrize("place", ["full", "unwritable"])
def test_no_place_for_what_the_compiler_writes(place, monkeypatch, tmp_path):
    """A full disk, and a folder that cannot be made: the error says which, and when there is room
    again the same model goes on."""
    from torch._inductor import codecache

    # Inductor raises the limit at its first compilation, for good
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
    trial = Trial("accumulate compiled")
    before, x = trial.world(), trial.data()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        folder = tmp_path / "kernels"
        if place == "full":
            patch.setattr(codecache, "write_atomic", full)
        else:
            (tmp_path / "file").touch()
            folder = tmp_path / "file" / "kernels"
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        with pytest.raises(Exception, match=r"No space left|Not a directory"):
            trial.step(x)
    assert changed(before, trial.world()) == []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "room"))
    trial.assert_next_is_right()


# ----------------------------------------------------------------------------- NaN and infinity


def small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {
        "image": lambda: Net(0.0),
        "dense": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3)
        ),
    }[kind]().double()  # fmt: skip


PENALTIES = {
    "loss": lambda: db.LossGradient("cross_entropy"),
    "norm": lambda: db.OutputGradient(1, norm=db.Norm()),
    "deviation": lambda: db.OutputGradient(1, norm=db.Deviation(1.0)),
    "one-sided": lambda: db.OutputGradient(1, norm=db.Deviation(0.1, one_sided=True)),
    "space": lambda: db.OutputGradient(1, norm=db.Norm(db.spaces.Lp(3.0))),
    "jacobian": lambda: db.Jacobian(),
    "spectral": lambda: db.SpectralNorm(iterations=1),
}


@pytest.mark.parametrize("poison", ["NaN in x", "infinity in x", "NaN in w", "infinity in w"])
@pytest.mark.parametrize("kind, penalty", [
    ("image", "loss"), *(("dense", name) for name in PENALTIES)
])  # fmt: skip
def test_not_a_number_is_not_hidden(kind, penalty, poison):
    """What autograd makes NaN is NaN, and all else is the number that autograd finds."""
    bad = float("nan" if "NaN" in poison else "inf")
    net, x = small(kind), torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 1, 4, 4)
    with torch.no_grad():
        (x[1] if "x" in poison else next(net.parameters())).view(-1)[1] = bad
    net.eval()  # batch statistics would carry it everywhere
    twin = copy.deepcopy(net)
    results = []
    for copied, how in ((net, {"strict": True}), (twin, {"sweeps": False})):
        model = db.Penalised(copied, PENALTIES[penalty](), **how)
        own = x.clone().requires_grad_()
        torch.manual_seed(4)
        out, value = model(own, *([Y] if penalty == "loss" else []))
        (F.cross_entropy(out, Y) + value).backward()
        results.append([out, value, own.grad, *(p.grad for p in copied.parameters())])
    assert bad == float("inf") or results[1][1].isnan()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, equal_nan=True)


# ------------------------------------------------------------------------------ several processes


def _one_of_two(rank: int, place: str) -> None:
    """The second process ends without a word; the first must not wait for it for ever."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    model = db.Penalised(Net(0.0).double(), db.LossGradient("cross_entropy"))
    together = DDP(model)
    x = torch.ones(4, 1, 4, 4, dtype=torch.float64)
    model.accumulate(x, Y)
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        model.accumulate(x, Y)
    except RuntimeError as error:
        Path(f"{place}.said").write_text(f"{time.monotonic() - start} {error}")
    del together
    os._exit(0)


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_process_that_is_gone(tmp_path):
    place = tmp_path / "meet"
    mp.spawn(_one_of_two, (str(place),), nprocs=2)
    seconds, _, text = Path(f"{place}.said").read_text().partition(" ")
    known = ("closed", "reset by peer", "timed out")
    assert float(seconds) < 30 and any(word in text.lower() for word in known), text
