"""Other people's networks: families of timm, transformers, torchvision, torch-geometric,
segmentation-models-pytorch and MONAI, in tiny sizes with random weights.

    for row in examine(BY_NAME["timm/resnet"]): ...      # {"mode": "train", "verdict": "agrees", …}
    row_by_row = examine_all(names, limit=300)           # each network in a process of its own

A network runs a few training steps in float64 in evaluation and in training mode. The step's loss
is mean_b ‖out_b − y_b‖² plus the mean over x's rows of the squared gradient in x of the summed
loss, weighted so that both are of one size. Output, penalty, the gradient of every parameter and
of x, and every buffer are compared with stock autograd's (`create_graph=True`) for

    penalised   Penalised(net), backward()
    accumulate  its accumulate()
    patch       the loop as it stands, under db.patched()

two steps node by node in evaluation; in training a third one, by flat graphs, which take longest
to make.

What rounding alone does to a network is measured: stock autograd once more, with parameters and
input changed in their last digits. A difference counts as wrong if it exceeds 1e-10 and a hundred
times that. Some networks compute in float32 in between, by name (norms of language models): there
the last digits are float32's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import doubleback as db
from support import oracle
from support.forked import forked
from support.zoo import unsettle

MODES = ("eval", "train")
STEPS = {"eval": 2, "train": 3}
FLATTEN_AFTER = {"eval": None, "train": 2}
TOLERANCE = 1e-10
LAST_DIGITS = 1e-15  # relative change of parameters and input, for what rounding does
LAST_DIGITS_SINGLE = 1e-8  # the same where float32 occurs
ROUNDING = 100  # times that change's effect is allowed
UNSTABLE = 1e-3  # where rounding moves a gradient by more, nothing can be said


@dataclass(frozen=True)
class Network:
    """name: package/family; make: the module; inputs: generator → (args, kwargs), floating-point
    tensors in float64; wrt, output: as `Penalised` takes them; modes: in which stock autograd can
    differentiate it."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[tuple, dict]]
    wrt: Any = 0
    output: Any = None
    modes: tuple[str, ...] = MODES

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


# ------------------------------------------------------------------------------------ one network


@dataclass
class Step:
    """What a step yields, by name."""

    values: dict[str, Tensor | None] = field(default_factory=dict)


class Bench:
    """A network and its twin for the oracle, with the same numbers in both."""

    def __init__(self, network: Network, mode: str) -> None:
        self.network, self.mode = network, mode
        self.net, self.twin = (build(network, mode == "train") for _ in range(2))
        self.args, self.kwargs = network.inputs(torch.Generator().manual_seed(7))
        for net in (self.net, self.twin):  # some settle at their first call: both then
            start = save(net)
            with torch.no_grad(), self.seeded(0), _Dtypes() as seen:
                out = oracle.choose(net(*self.args, **self.kwargs), network.output)
            restore(net, start)
        self.single = torch.float32 in seen.found
        self.shape, self.scale = out.shape, float(out.std()) or 1.0
        self.weight: float | None = None  # of the penalty: as large as the loss at first

    @contextlib.contextmanager
    def seeded(self, step: int) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(1000 + step)
            yield

    def target(self, step: int) -> Tensor:
        g = torch.Generator().manual_seed(500 + step)
        return self.scale * torch.randn(self.shape, generator=g, dtype=torch.float64)

    def inputs(self) -> tuple[tuple, dict, list[Tensor]]:
        """Arguments of their own for each step, and those among them that are penalised."""
        args, kwargs = fresh((self.args, self.kwargs))
        wrt = self.network.wrt
        wrt = wrt if isinstance(wrt, tuple) else (wrt,)
        chosen = [kwargs[w] if isinstance(w, str) else args[w] for w in wrt]
        for x in chosen:
            x.requires_grad_()
        return args, kwargs, chosen

    def stock(self, step: int, noise: float = 0.0) -> Step:
        """The oracle: as one writes it without the library; x changed by `noise`, relative."""
        args, kwargs, xs = self.inputs()
        with torch.no_grad():
            for x in xs:
                x.mul_(1 + noise * torch.randn_like(x))
        self.twin.zero_grad()
        with self.seeded(step):
            out = oracle.choose(self.twin(*args, **kwargs), self.network.output)
            losses = (out - self.target(step)).square().flatten(1).sum(1)
            xi = torch.autograd.grad(losses.sum(), xs, create_graph=True)
            penalty = torch.stack([u.flatten(1).square().sum(1).sum() for u in xi]).sum()
            penalty = penalty / xs[0].shape[0]
            if self.weight is None:
                self.weight = float(losses.detach().mean() / penalty.detach().clamp_min(1e-300))
            (losses.mean() + self.weight * penalty).backward()
        return collect(self.twin, out, penalty, xs)

    def penalised(self, model: db.Penalised, step: int) -> Step:
        args, kwargs, xs = self.inputs()
        y = self.target(step)
        self.net.zero_grad()
        with self.seeded(step):
            result, penalty = model(*args, y, **kwargs)
            out = oracle.choose(result, self.network.output)
            loss = (out - y).square().flatten(1).sum(1).mean()
            (loss + self.weight * penalty).backward()
        return collect(self.net, out, penalty, xs)

    def accumulate(self, model: db.Penalised, step: int) -> Step:
        args, kwargs, xs = self.inputs()
        self.net.zero_grad()
        with self.seeded(step):
            result, _, penalty = model.accumulate(
                *args, self.target(step), weight=self.weight, **kwargs
            )
        return collect(self.net, oracle.choose(result, self.network.output), penalty, xs)

    def descend(self, truth: Step) -> None:
        """One step of gradient descent for both, by the oracle's gradients."""
        named = dict(self.net.named_parameters())
        gradients = {n: g for n in named if (g := truth.values[f"gradient of {n}"]) is not None}
        size = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        weights = sum(float(p.detach().square().sum()) for p in named.values()) ** 0.5
        with torch.no_grad():
            for name, q in self.twin.named_parameters():
                if name in gradients:
                    q.sub_(gradients[name], alpha=1e-3 * weights / max(size, 1e-300))
                named[name].copy_(q)


def without_paths(text: str) -> str:
    """Files by what comes after the folder that packages are installed in."""
    return re.sub(r"/\S*/(?:site-packages|python[\d.]+)/", "", text)


class _Dtypes(TorchDispatchMode):
    """Which dtypes occur."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result


def build(network: Network, training: bool) -> nn.Module:
    """In float64, with scales, shifts and statistics away from zeros and ones."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = unsettle(network.make().double().train(training))
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p), alpha=0.02)
    return net


def fresh(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(fresh(t) for t in tree)
    if isinstance(tree, dict):
        return {k: fresh(t) for k, t in tree.items()}
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def collect(net: nn.Module, out: Tensor, penalty: Tensor, xs: Sequence[Tensor]) -> Step:
    values: dict[str, Tensor | None] = {"out": out.detach(), "penalty": penalty.detach()}
    values |= {f"gradient of x {i}": x.grad for i, x in enumerate(xs)}
    for name, p in net.named_parameters():
        values[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
    values |= {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    return Step(values)


def save(net: nn.Module) -> list[Tensor]:
    return [b.clone() for b in net.buffers()]


def restore(net: nn.Module, state: Sequence[Tensor]) -> None:
    for b, old in zip(net.buffers(), state, strict=True):
        b.copy_(old)


def errors(found: Step, truth: Step) -> dict[str, float]:
    """Relative to the oracle's norm, for gradients at least to a millionth of the largest one."""
    if found.values.keys() != truth.values.keys():
        raise AssertionError(f"names differ: {found.values.keys() ^ truth.values.keys()}")
    gradients = [t for n, t in truth.values.items() if n.startswith("gradient") and t is not None]
    floor = 1e-6 * max((float(g.norm()) for g in gradients), default=0.0)
    return {
        name: oracle.relative(
            oracle.zeros_for_none(found.values[name], t),
            oracle.zeros_for_none(t, found.values[name]),
            floor if name.startswith("gradient") else 0.0,
        )
        for name, t in truth.values.items()
    }


def examine(network: Network) -> Iterator[dict[str, Any]]:
    """A row for each mode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # what a forward pass makes itself is float64 too
    try:
        for mode in network.modes:
            yield _examined(network, mode)
    finally:
        torch.set_default_dtype(before)


def _examined(network: Network, mode: str) -> dict[str, Any]:
    start = time.perf_counter()
    row: dict[str, Any] = {"network": network.name, "mode": mode}
    try:
        with warnings.catch_warnings(), oracle.twice_differentiable():
            warnings.simplefilter("ignore")
            row |= compare(Bench(network, mode))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = str(error).strip().splitlines()[:1] or [""]
        row |= {
            "verdict": "raises",
            "why": f"{type(error).__name__}: {told[0][:200]} "
            f"({os.path.basename(where.filename)}:{where.lineno})",
        }
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def compare(bench: Bench) -> dict[str, Any]:
    model = db.Penalised(
        bench.net, db.LossGradient("mse"), wrt=bench.network.wrt, output=bench.network.output,
        strict=True, sweeps=True, flatten_after=FLATTEN_AFTER[bench.mode],
    )  # fmt: skip
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in bench.net.parameters()), "captured": True,
        **({"single": True} if bench.single else {}),
    }  # fmt: skip
    worst = {"penalised": 0.0, "accumulate": 0.0, "patch": 0.0}
    wrong: dict[str, Any] | None = None
    rounding: dict[str, float] = {}
    for step in range(STEPS[bench.mode]):
        start = save(bench.twin)
        truth = bench.stock(step)
        end = save(bench.twin)
        found = {}
        if step == 0:
            restore(bench.twin, start)
            with db.patched():
                found["patch"] = bench.stock(step)
            restore(bench.twin, start)
            digits = LAST_DIGITS_SINGLE if bench.single else LAST_DIGITS
            with last_digits_changed(bench.twin, digits):
                rounding = errors(bench.stock(step, digits), truth)
            restore(bench.twin, end)
        try:
            found["penalised"] = bench.penalised(model, step)
        except db.CaptureError as error:
            row |= {"captured": False, "why": without_paths(" ".join(str(error).split()))[:300]}
            model.strict = False
            restore(bench.net, start)
            found["penalised"] = bench.penalised(model, step)
        restore(bench.net, start)
        found["accumulate"] = bench.accumulate(model, step)
        for way, got in found.items():
            for name, error in errors(got, truth).items():
                worst[way] = max(worst[way], error)
                limit = max(TOLERANCE, ROUNDING * rounding[name])
                if not error <= limit and (wrong is None or error > wrong["error"]):
                    wrong = {"way": way, "step": step, "what": name, "error": error,
                             "allowed": limit}  # fmt: skip
        bench.descend(truth)
    most = max(rounding.values())
    verdict = "wrong" if wrong else "unstable" if most > UNSTABLE else "agrees"
    row |= {"verdict": verdict, "errors": worst, "rounding": most}
    return row | ({"worst": wrong} if wrong else {})


@contextlib.contextmanager
def last_digits_changed(net: nn.Module, digits: float) -> Iterator[None]:
    """Parameters changed by rounding, and back."""
    before = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + digits * torch.randn_like(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(net.parameters(), before, strict=True):
                p.copy_(old)


# ----------------------------------------------------------------------------------- all networks


def examine_all(networks: Sequence[Network], limit: float) -> Iterator[dict[str, Any]]:
    """The rows of each network, from a process of its own that has `limit` seconds."""
    warm = Network("warm", lambda: nn.Linear(3, 2), lambda g: ((torch.randn(2, 3).double(),), {}))
    list(examine(warm))  # what the first capture imports is imported once, before processes part
    for network, rows, why in forked(examine, networks, limit):
        yield from rows
        for mode in network.modes[len(rows) :]:
            yield {"network": network.name, "mode": mode, "verdict": "raises", "why": str(why)}
