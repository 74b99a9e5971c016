"""Random networks and training steps, each compared with stock autograd in float64.

    cases = draw(17)                # a network, and several penalties and ways to run them
    verdicts = run_all(cases)       # .kind: "agrees", an excuse, or a failure
    script(shrink(cases[0], verdicts[0]))  # the smallest case that fails alike, as a program

A `Case` says everything in plain words and numbers, so that it can be printed. The network is a
list of steps over three pools of tensors (support.vocabulary); whatever nobody used is summed into
the head, so every operator drawn reaches the output, in a graph with branches, joins and reuse.
Each case takes several training steps with an optimiser in between. The oracle starts every step
from the network's own numbers and the same generator state.

Where the two disagree at a kink, a tie or an ill-conditioned point, the oracle disagrees with
itself after a change of its input in the last place: such cases are excused, and counted.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from doubleback.capture import dynamo
from doubleback.penalised import autograd_penalty
from support import oracle, vocabulary
from support.oracle import WEIGHT, Result, Spec
from support.penalties import library_penalty, quartic, turned
from support.vocabulary import KINDS, OPS, SHAPES
from support.zoo import double

# A long drawn graph sums more roundings into a gradient that cancels exactly than the zoo's nets.
FLOOR = 1e-5
LIMIT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
EPSILON = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11}
LARGE = 1e8  # numbers beyond are not compared
TINY = 1e-30  # a smaller penalty is what the roundings of a saturated softmax leave, squared

PATHS = ("nodes", "flat", "default", "accumulate", "gradient", "patch", "step")
# minutes for a hundred
SLOW_PATHS = ("backend", "compiled", "compiled accumulate", "compiled gradient", "compiled step")
# A network is captured once and then trained in all these ways, each with a penalty of its own.
# None: another of PATHS, which are flattened, and take longer for it.
EACH = (*["nodes"] * 5, "patch", "patch", None)
PENALTIES = (
    "cross entropy", "smoothed", "mse", "bce", "own loss", "output", "one-sided", "sum", "match",
    "bilinear", "custom", "own p", "jacobian", "entries", "softmax", "projections", "spectral",
)  # fmt: skip
LAYOUTS = ("plain", "channels last", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """steps: (operator, first operand, second operand, seed of its options)."""

    seed: int
    steps: tuple[tuple[str, int, int, int], ...]
    penalty: str = "output"
    path: str = "flat"
    wrt: str = "x"
    dtype: str = "float64"
    layout: str = "plain"
    training: bool = True
    frozen: bool = False  # half of the parameters, for the first two steps
    tied: bool = False  # equal steps share their module
    x_grad: bool = True
    attribute: bool = False  # a number and a word that change between steps
    reduction: str = "mean"
    batches: tuple[int, ...] = (3,)
    device: str = "cpu"

    @property
    def way(self) -> str:
        """The path, compiled or not."""
        return self.path.removeprefix("compiled ")

    @property
    def compiled(self) -> bool:
        return self.path.startswith("compiled")


DEFAULTS = {f.name: f.default for f in fields(Case) if f.name not in ("seed", "steps")}


def draw(
    seed: int,
    names: tuple[str, ...] = vocabulary.NAMES,
    slow: float = 0.0,
    paths: tuple[str, ...] = (),
    device: str = "cpu",
) -> list[Case]:
    """The cases of one network. slow: how often one of the slow paths is among them; paths: those
    to choose from instead. Most networks are small: tracing them is what a case costs, and few
    errors need many operators."""
    r = random.Random(seed)
    count = r.choice((1, 1, 2, 2, 2, 3, 3, 4, 8))
    steps = [
        (r.choice(names), r.randrange(3), r.randrange(3), r.randrange(99)) for _ in range(count)
    ]
    tied = r.random() < 0.15
    if tied:
        steps += r.choices(steps, k=min(2, count))
    low = r.random() < 0.12
    batches = r.choice(((3,) * 4, (3,) * 5, (4,) * 4, (4, 3, 5, 3, 2, 4), (2, 2, 3, 3, 2, 3)))
    others = ("flat", "default", "accumulate", "gradient") * 3 + ("step",)
    ways = [path or r.choice(others) for path in EACH]
    if paths:
        ways = [paths[seed % len(paths)]]
    elif r.random() < slow:
        ways = [r.choice(SLOW_PATHS), "nodes", "patch"]
    if any(path in SLOW_PATHS for path in ways):
        steps, batches = steps[:3], batches[:4]
    network = Case(
        seed,
        tuple(steps),
        dtype=r.choice(("float32", "bfloat16", "float16")) if low else "float64",
        layout=r.choice(("plain", *LAYOUTS)),
        training=r.random() < 0.75,
        frozen=r.random() < 0.2,
        tied=tied,
        x_grad=r.random() < 0.6,
        attribute=r.random() < 0.15,
        batches=batches,
        device=device,
    )
    wrt = ("x", "x", "z", "both")
    if not network.x_grad:  # another capture for each, since others require grad
        wrt = (r.choice(wrt),)
    cases = [
        replace(
            network,
            path=path,
            penalty=r.choice(PENALTIES),
            wrt=r.choice(wrt),
            reduction=r.choice(("mean", "mean", "sum", "none")),
        )
        for path in ways
    ]
    first, *rest = [settled(case) for case in cases]
    return [first, *(case for case in rest if case.dtype == first.dtype)]


# ------------------------------------------------------------------------------------ networks


class Program(nn.Module):
    """A drawn network. Its forward pass is written out as Python, one line per step, since most of
    a case's time is TorchDynamo's, which reads it. A result whose size strays from 1 is rescaled by
    a constant, so that long programs neither overflow nor vanish.

    direct: x reaches the operators as it is laid out in memory; otherwise x and z are joined first.
    changes: the forward pass reads a number and a word that change between steps.
    """

    source: str

    def __init__(
        self, steps: tuple, x: Tensor, z: Tensor, tied: bool = False, direct: bool = True,
        changes: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.alpha, self.word = 1.0, "tanh"
        self.draws = False
        pools: dict[str, list[str]] = {}  # names of the tensors
        lines, values, used = [], {"x": x, "z": z}, set()
        functions: dict[str, Any] = {}
        made: dict[tuple[str, int], str] = {}

        def begin(kind: str) -> list[str]:
            """The first member of a pool."""
            if kind not in pools:
                name = f"{kind}_0"
                joined = "x * z[:, :4, None, None]"
                if kind == "image":
                    text = "x" if direct else joined
                elif kind == "sequence":
                    self.stem_of_sequence = nn.Linear(16, 6)
                    text = "self.stem_of_sequence(x.flatten(2))"
                else:
                    self.stem_of_vector = nn.Linear(64, 6)
                    text = "self.stem_of_vector(x.flatten(1)) + z"
                pools[kind] = []
                add(kind, name, text)
            return pools[kind]

        def add(kind: str, name: str, text: str) -> Tensor:
            lines.append(f"{name} = {text}")
            before = torch.get_rng_state()
            values[name] = eval(text, {**functions, "torch": torch, "self": self}, values)
            self.draws = self.draws or not torch.equal(before, torch.get_rng_state())
            pools[kind].append(name)
            return values[name]

        for number, (name, first, second, seed) in enumerate(steps):
            spec, r = OPS[name], random.Random(seed)
            kind = r.choice(KINDS) if spec.kind == "any" else spec.kind
            pool = begin(kind)
            picks = [pool[-1 - k % min(len(pool), 3)] for k in (first, second)[: spec.arity]]
            used.update(picks)
            node = made.get((name, seed)) if tied else None
            if node is None:
                built = spec.build(r)
                node = f"node_{number}"
                if isinstance(built, nn.Module):
                    setattr(self, node, built)
                    node = f"self.{node}"
                else:
                    functions[node] = built
                made[name, seed] = node
            to = spec.to or kind
            begin(to)
            result = f"{to}_{number + 1}"
            y = add(to, result, f"{node}({', '.join(picks)})")
            if y.shape[1:] != SHAPES[to]:
                raise AssertionError(f"{name} maps {kind} to {tuple(y.shape)}")
            size = y.square().mean().sqrt().item()
            if not 0.2 < size < 3.0 and 1e-6 < size < 1e30:
                pools[to].pop()
                add(to, result, f"{1 / size!r} * {result}")
        used |= {pool[0] for pool in pools.values() if len(pool) > 1}
        if not pools:
            begin("vector")
        curve, parts, width = "torch.tanh", [], 0
        if changes:
            curve = "curve"
            lines.append('curve = torch.tanh if self.word == "tanh" else torch.sin')
        for kind, pool in pools.items():
            loose = [name for name in pool if name not in used] or pool[:1]
            parts.append(f"{curve}({' + '.join(loose)})" + ".flatten(1)" * (kind != "vector"))
            width += math.prod(SHAPES[kind])
        if "vector" not in pools and (direct or "image" not in pools):
            parts.append("z.sin()")
            width += 6
        self.head = nn.Linear(width, 3)
        joined = f"torch.cat([{', '.join(parts)}], 1)" if len(parts) > 1 else parts[0]
        lines.append(f"return {'self.alpha * ' * changes}self.head({joined})")
        self.source = "\n    ".join(["def forward(self, x, z):", *lines])
        inside = self.source.replace("\n", "\n    ")
        text = f"def make({', '.join(functions)}):\n    {inside}\n    return forward"
        made_here: dict[str, Any] = {}
        exec(compile(text, "<a drawn network>", "exec"), globals(), made_here)
        self.__class__ = type("Program", (Program,), {"forward": made_here["make"](**functions)})


def build(case: Case) -> Program:
    with double(), torch.no_grad():
        torch.manual_seed(case.seed)
        direct = case.layout != "plain"
        net = Program(case.steps, *inputs(case, 0), case.tied, direct, case.attribute)
    return net.train(case.training)


def inputs(case: Case, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * case.seed + step)
    b = case.batches[step]
    x = torch.randn(b, 4, 4, 4, generator=g, dtype=torch.float64)
    z = torch.randn(b, 6, generator=g, dtype=torch.float64)
    return x, z


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers (but for "expanded") in other memory."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "sliced":
        return torch.stack([x, x], -1)[..., 0]
    return x


def spec_of(case: Case, step: int) -> Spec:
    g = torch.Generator().manual_seed(1000 * case.seed + step)
    b = case.batches[step]

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    out, q = normal(b, 3), (normal(b, 4, 4, 4), normal(b, 6))
    along = {"x": q[0], "z": q[1], "both": q}[case.wrt]
    labels = torch.randint(0, 3, (b,), generator=g)
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, device=case.device)
    kinds: dict[str, dict[str, Any]] = {
        "cross entropy": {"kind": "loss", "loss": "cross_entropy", "extras": (labels,)},
        "smoothed": {"kind": "loss", "loss": "cross_entropy", "extras": (labels,),
                     "label_smoothing": 0.1, "class_weights": weights, "norm": ("norm",)},
        "mse": {"kind": "loss", "loss": "mse", "norm": ("norm",), "extras": (out,)},
        "bce": {"kind": "loss", "loss": "bce", "extras": (out.sigmoid(),)},
        "own loss": {"kind": "loss", "loss": own_loss, "extras": (out,)},
        "output": {"kind": "output", "index": 2},
        "one-sided": {"kind": "output", "index": 1, "norm": ("deviation", 0.1, True)},
        "sum": {"kind": "custom", "v": ones, "p": None, "norm": ("deviation", 1.0, False)},
        "match": {"kind": "match", "index": 0, "extras": (along,)},
        "bilinear": {"kind": "bilinear", "extras": (out, along)},
        "custom": {"kind": "custom", "v": turned, "p": quartic, "extras": (out,)},
        "own p": {"kind": "custom", "v": ones, "p": coupled},
        "jacobian": {"kind": "jacobian"},
        "entries": {"kind": "jacobian", "entries": (0, 2)},
        "softmax": {"kind": "jacobian", "softmax": True},
        "projections": {"kind": "library"},
        "spectral": {"kind": "library"},
    }  # fmt: skip
    return Spec(case.penalty, reduction=case.reduction, **kinds[case.penalty])


def ones(out: Tensor) -> Tensor:
    return torch.ones_like(out)


def own_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.softplus(out - y).square().sum(1)


def coupled(xi: Any) -> Tensor:
    """One number per example that depends on the whole batch."""
    parts = [xi] if isinstance(xi, Tensor) else list(xi)
    rows = torch.cat([t.flatten(1) for t in parts], 1)
    return (rows - 0.3 * rows.mean(0)).square().sum(1).add(1.0).sqrt()


def penalty_of(case: Case, spec: Spec) -> Any:
    if case.penalty == "projections":
        return db.Jacobian(projections=2, reduction=case.reduction)
    if case.penalty == "spectral":
        return db.SpectralNorm(iterations=2, warm_start=False, reduction=case.reduction)
    if case.penalty == "sum":
        return db.Custom(ones, db.Deviation(1.0), reduction=case.reduction)
    return library_penalty(spec)


# -------------------------------------------------------------------------------------- a step


@dataclass
class Step:
    """What both sides of one training step are given."""

    case: Case
    number: int
    args: tuple[Tensor, ...]
    spec: Spec
    target: Tensor  # of the ordinary loss, where the whole step is one call

    @classmethod
    def of(cls, case: Case, number: int, dtype: torch.dtype) -> Step:
        x, z = (t.to(dtype) for t in inputs(case, number))
        x, z = laid_out(x.to(case.device), case.layout), z.to(case.device)
        if case.layout == "expanded":
            x = x[:1].expand(x.shape)
        spec = spec_of(case, number)
        extras = tuple(_cast(e, dtype, case.device) for e in spec.extras)
        target = torch.linspace(-1, 1, 3 * len(x), dtype=dtype, device=case.device)
        target = target.view(len(x), 3)
        args = (x.requires_grad_(case.x_grad), z.requires_grad_(case.x_grad))
        return cls(case, number, args, replace(spec, extras=extras), target)

    def fresh(self, dtype: torch.dtype | None = None, noise: float = 0.0) -> Step:
        """The same numbers in other tensors; noise: relative, from a generator of its own."""
        g = torch.Generator().manual_seed(self.number + 77)

        def again(t: Tensor) -> Tensor:
            copy_ = t.detach().to(dtype or t.dtype)
            if noise:
                drawn = torch.randn(t.shape, generator=g, dtype=torch.float64).to(copy_)
                copy_ = copy_ * (1 + noise * drawn)
            elif copy_.dtype == t.dtype:
                copy_ = copy_.as_strided(t.shape, t.stride()) if 0 in t.stride() else copy_.clone()
            return copy_.requires_grad_(t.requires_grad)

        extras = tuple(_cast(e, dtype) if dtype else e for e in self.spec.extras)
        target = self.target.to(dtype) if dtype else self.target
        args = tuple(again(t) for t in self.args)
        return Step(self.case, self.number, args, replace(self.spec, extras=extras), target)

    @property
    def wrt(self) -> Any:
        return {"x": 0, "z": 1, "both": (0, 1)}[self.case.wrt]

    @property
    def seed(self) -> int:
        return 31 * self.case.seed + self.number


def _cast(item: Any, dtype: torch.dtype | None, device: str | None = None) -> Any:
    if isinstance(item, tuple):
        return tuple(_cast(part, dtype, device) for part in item)
    if not isinstance(item, Tensor):
        return item
    return item.to(device, dtype if item.is_floating_point() else None)


def total(step: Step, out: Tensor, penalty: Tensor) -> Tensor:
    if step.case.way != "accumulate":
        return oracle.total_loss(out, penalty)
    spec = step.spec
    if spec.kind == "loss":
        losses = oracle.example_losses(spec, out, *spec.extras)
    else:
        losses = (out - step.target).square().sum(1)
    return losses.mean() + WEIGHT * (penalty.mean() if penalty.dim() else penalty)


def stock(net: Any, step: Step) -> tuple[Tensor, Tensor]:
    """(out, penalty) by autograd."""
    chosen = [step.args[0], step.args[1]] if step.case.wrt == "both" else [step.args[step.wrt]]
    if step.spec.kind == "library":
        places = (0, 1) if step.case.wrt == "both" else (step.wrt,)

        def call(x: Any) -> Tensor:
            args = list(step.args)
            for place, t in zip(places, x, strict=True):
                args[place] = t
            return net(*args)

        return autograd_penalty(call, lambda y: y, chosen, penalty_of(step.case, step.spec), ())
    for t in chosen:
        t.requires_grad_()
    if step.spec.kind == "custom" and step.spec.p is None:
        return oracle.value(net, step.args, replace(step.spec, p=_deviation), wrt=step.wrt)
    return oracle.value(net, step.args, step.spec, wrt=step.wrt)


def _deviation(xi: Any) -> Tensor:
    parts = [xi] if isinstance(xi, Tensor) else list(xi)
    size = torch.linalg.vector_norm(torch.cat([t.flatten(1) for t in parts], 1), dim=1)
    return (size - 1.0).square()


def collected(net: Program, step: Step, out: Tensor, penalty: Tensor) -> Result:
    found = oracle.collect(net, step.args, out, penalty)
    if not step.case.x_grad:
        found.gradients = {n: g for n, g in found.gradients.items() if not n.startswith("input")}
    return found


def truth_of(net: Program, step: Step, plain: bool = False) -> Result:
    """One training step of `net` under stock autograd; plain: nothing replaced by what is twice
    differentiable."""
    for p in net.parameters():
        p.grad = None
    torch.manual_seed(step.seed)
    with contextlib.nullcontext() if plain else oracle.twice_differentiable():
        out, penalty = stock(net, step)
        total(step, out, penalty).backward()
    return collected(net, step, out, penalty)


class Runner:
    """The library's side: a model that lives through all steps."""

    def __init__(self, net: Program, case: Case, spec: Spec) -> None:
        self.net, self.case = net, case
        wrt = {"x": 0, "z": 1, "both": (0, 1)}[case.wrt]
        how: dict[str, Any] = {
            "nodes": {"debug": True}, "flat": {"flatten_after": 0}, "gradient": {"flatten_after": 1}
        }.get(case.path, {})  # fmt: skip
        if case.compiled and case.way != "step":
            how = {"compile": True}
        self.model: Any = None
        if case.way == "gradient":
            both = [0, 1] if case.wrt == "both" else wrt
            self.model = db.WithGradient(net, wrt=both, v=self.v(spec), allow_unused=True, **how)
        elif case.path == "backend":
            self.model = torch.compile(net, backend="doubleback")
        elif case.way == "step":
            compiler = "inductor" if case.compiled else "eager"
            self.model = db.compile(written(net, spec, wrt, case.x_grad), compiler=compiler)
        elif case.path != "patch":
            self.model = db.Penalised(
                net, penalty_of(case, spec), wrt=wrt, allow_unused=True, **how
            )

    def v(self, spec: Spec) -> Any:
        """In words where there are some, so that the sweeps are flattened; else as a function."""
        if self.case.penalty == "sum":
            return "sum"
        named = spec.kind in ("output", "match")
        return self.cotangent if not named else "sum" if spec.index is None else spec.index

    def cotangent(self, out: Tensor) -> Tensor:
        return oracle.seed_at_output(self.spec, out)

    def __call__(self, step: Step) -> Result:
        case, net, self.spec = self.case, self.net, step.spec
        torch.manual_seed(step.seed)
        if case.path in ("patch", "backend"):
            with db.patched():
                out, penalty = stock(net if self.model is None else self.model, step)
                total(step, out, penalty).backward()
        elif case.way == "accumulate":
            extras = step.spec.extras
            if step.spec.kind == "loss":
                out, _, penalty = self.model.accumulate(*step.args, *extras, weight=WEIGHT)
            else:
                out, _, penalty = self.model.accumulate(
                    *step.args, step.target, *extras, loss="mse", weight=WEIGHT
                )
        elif case.way == "step":
            loss, out, penalty = self.model(*step.args, *step.spec.extras)
            loss.backward()
        elif case.way == "gradient":
            out, xi = self.model(*step.args)
            spec = replace(step.spec, p=step.spec.p or _deviation)
            xi = (xi,) if isinstance(xi, Tensor) else tuple(xi)
            penalty = oracle.reduced(spec, oracle.per_example(spec, xi))
            oracle.total_loss(out, penalty).backward()
        else:
            out, penalty = self.model(*step.args, *step.spec.extras)
            oracle.total_loss(out, penalty).backward()
        return collected(net, step, out, penalty)


def written(net: Program, spec: Spec, wrt: Any, x_grad: bool) -> Callable:
    """The whole loss as a function, its derivatives taken inside, for `db.compile`."""
    places = wrt if isinstance(wrt, tuple) else (wrt,)
    p = _deviation if spec.kind == "custom" and spec.p is None else spec.p
    spec = replace(spec, p=p, extras=())

    def loss(x: Tensor, z: Tensor, *extras: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        args = (x, z) if x_grad else (x.detach().requires_grad_(), z.detach().requires_grad_())
        out = net(*args)
        if spec.kind == "loss":
            head, v = oracle.example_losses(spec, out, *extras).sum(), None
        else:
            head, v = out, oracle.seed_at_output(spec, out)
        chosen = [args[i] for i in places]
        xi = torch.autograd.grad(head, chosen, v, create_graph=True, materialize_grads=True)
        penalty = oracle.reduced(spec, oracle.per_example(spec, xi))
        return oracle.total_loss(out, penalty), out, penalty

    return loss


def settled(case: Case) -> Case:
    """The case without what its path has no use for."""
    losses = ("cross entropy", "smoothed", "mse", "bce", "own loss")
    if case.way == "step" and case.penalty not in (*losses, "output", "one-sided", "sum", "own p"):
        case = replace(case, penalty=losses[case.seed % len(losses)])
    simple = ("output", "one-sided", "sum", "match", "bilinear", "custom", "own p")
    if case.way == "gradient" and case.penalty not in simple:
        case = replace(case, penalty=simple[case.seed % len(simple)])
    if case.way == "gradient" and case.penalty == "custom":
        case = replace(case, penalty="own p")  # its seed would be given the labels
    if case.way == "accumulate":
        case = replace(case, reduction="mean")
    compiles = case.path == "backend" or case.compiled or case.way == "step"
    if case.dtype != "float64" and (compiles or case.penalty in ("projections", "spectral")):
        case = replace(case, dtype="float64")  # what is drawn differs from dtype to dtype
    return case


# ------------------------------------------------------------------------------------- verdicts


@dataclass
class Verdict:
    """kind: "agrees", "wrong", "raises", or an excuse: "stock raises", "not finite", "unstable",
    "draws" (random numbers of another dtype, or on a GPU, are others)."""

    kind: str
    detail: str = ""
    step: int = 0
    captured: bool = True
    reasons: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "raises")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def precision(case: Case) -> Any:
    """Autocast for the 16-bit dtypes."""
    if case.dtype in ("bfloat16", "float16"):
        return torch.autocast(case.device, getattr(torch, case.dtype))
    return contextlib.nullcontext()


def eager_numbers() -> Any:
    """Compiled code draws the random numbers of uncompiled code."""
    from torch._inductor import config

    return config.patch(fallback_random=True)


def run(case: Case) -> Verdict:
    """All steps of a case against the oracle."""
    return run_all([case])[0]


def run_all(cases: Sequence[Case]) -> list[Verdict]:
    """The same of several cases with one network, each from where it began. They share what was
    captured of it, as models of a user's do."""
    cases = [settled(case) for case in cases]
    first = cases[0]
    dtype = torch.float32 if first.dtype != "float64" else torch.float64
    net = build(first)
    # a GPU's kernels draw as many numbers as they have threads: the parts of an operator others
    if net.draws and (dtype != torch.float64 or first.device != "cpu"):
        return [Verdict("draws") for _ in cases]
    net.to(first.device, dtype)
    twin, start = copy.deepcopy(net).double(), copy.deepcopy(net.state_dict())
    verdicts = []
    for case in cases:
        verdict = Verdict("agrees")
        verdicts.append(verdict)
        net.load_state_dict(start)
        net.requires_grad_()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                _run(case, verdict, net, twin)
            finally:
                texts = [str(w.message) for w in said if issubclass(w.category, db.CaptureWarning)]
                verdict.reasons = [t.splitlines()[0] for t in texts if "autograd" in t]
                verdict.captured = not verdict.reasons and case.path != "patch"
    return verdicts


def _run(case: Case, verdict: Verdict, net: Program, twin: Program) -> None:
    dtype = next(iter(net.parameters())).dtype
    net.alpha, net.word = 1.0, "tanh"
    if case.frozen:
        for p in list(net.parameters())[::2]:
            p.requires_grad_(False)
    runner = Runner(net, case, spec_of(case, 0))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    for k in range(len(case.batches)):
        verdict.step = k
        if case.attribute:
            net.alpha, net.word = 1.0 + 0.25 * (k % 2), ("tanh", "sin")[k % 2]
        if case.frozen and k == 2:
            for p in net.parameters():
                p.requires_grad_(True)
        follow(twin, net)
        step = Step.of(case, k, dtype)
        start = copy.deepcopy(net.state_dict())
        try:
            with double():
                truth = truth_of(twin, step.fresh(torch.float64))
        except Exception as error:
            verdict.kind, verdict.detail = "stock raises", f"{type(error).__name__}: {error}"
            return
        if not finite(truth):
            verdict.kind = "not finite"
            return
        optimiser.zero_grad()
        try:
            with default_dtype(dtype), precision(case), eager_numbers():
                got = runner(step)
        except Exception as error:
            first = (str(error).strip() or "nothing").splitlines()[0]
            verdict.kind, verdict.detail = "raises", f"{type(error).__name__}: {first}"
            if case.dtype != "float64" and stock_raises(case, net, start, step):
                verdict.kind = "stock raises"
            return
        try:
            errors = oracle.compare(got, truth, max(FLOOR, LIMIT[case.dtype]) if (
                case.dtype != "float64") else FLOOR)  # fmt: skip
        except AssertionError as error:
            verdict.kind, verdict.detail = "wrong", str(error)
            return
        bad = {n: e for n, e in errors.items() if not e <= LIMIT[case.dtype]}
        if bad and any(name == "hardsigmoid" for name, *_ in case.steps):
            rounded = with_rounded_slope(twin, start, step, truth)
            bad = {n: e for n, e in bad.items() if not e <= LIMIT[case.dtype] + 2 * rounded[n]}
        if bad:
            shaken = shake(case, net, twin, start, step, truth)
            if truth.penalty.abs().max() < TINY:
                shaken["penalty"] = float("inf")
            bad = {n: e for n, e in bad.items() if not e <= 4 * shaken[n]}
            if bad:
                verdict.kind = "wrong"
                verdict.detail = ", ".join(f"{n} {e:.1e}" for n, e in bad.items())
                return
            verdict.kind = "unstable"
            return
        optimiser.step()


def with_rounded_slope(twin: Program, start: dict, step: Step, truth: Result) -> dict[str, float]:
    """How far the oracle moves when the slope of hardsigmoid is 1/6 rounded to float32, which it is
    in PyTorch's own backward in float64 too: under the patch, on autograd, and in what does not
    depend on the penalised input."""
    sixth = torch.tensor(1 / 6, dtype=torch.float32).item()
    load(twin, start)
    with double(), oracle.twice_differentiable(sixth):
        return oracle.compare(truth_of(twin, step.fresh(torch.float64), plain=True), truth, FLOOR)


def load(twin: Program, start: dict) -> None:
    """In the oracle's float64."""
    twin.load_state_dict({n: t.double() if t.is_floating_point() else t for n, t in start.items()})


def stock_raises(case: Case, net: Program, start: dict, step: Step) -> bool:
    """Whether stock autograd cannot take this step in the case's dtype either."""
    other = copy.deepcopy(net)
    other.load_state_dict(start)
    with default_dtype(torch.float32), precision(case):
        try:
            truth_of(other, step.fresh())
        except Exception:
            return True
    return False


def follow(twin: Program, net: Program) -> None:
    """Make the oracle's network what the other one is now."""
    with torch.no_grad():
        for a, b in zip(twin.parameters(), net.parameters(), strict=True):
            a.copy_(b).requires_grad_(b.requires_grad)
        for a, b in zip(twin.buffers(), net.buffers(), strict=True):
            a.copy_(b)
    twin.alpha, twin.word = net.alpha, net.word


def finite(result: Result) -> bool:
    tensors = (*result.out, result.penalty, *result.gradients.values())
    return all(t is None or (t.isfinite().all() and t.abs().max() < LARGE) for t in tensors)


def shake(
    case: Case, net: Program, twin: Program, start: dict, step: Step, truth: Result
) -> dict[str, float]:
    """How far the oracle itself moves when its input is rounded differently, and how far stock
    autograd is off in this dtype."""
    errors = dict.fromkeys(oracle.compare(truth, truth, FLOOR), 0.0)
    low = case.dtype != "float64"

    def note(found: Result) -> None:
        for name, e in oracle.compare(found, truth, LIMIT[case.dtype] if low else FLOOR).items():
            errors[name] = max(errors[name], e if e == e else float("inf"))

    tries = [(1.0, 1), (4.0, 2)] if low else [(1.0, 1)]
    for size, number in tries:
        load(twin, start)
        moved = step.fresh(torch.float64, noise=size * EPSILON[case.dtype])
        moved.number += 0 * number
        with double(), contextlib.suppress(Exception):
            note(truth_of(twin, moved))
    if low:
        other = copy.deepcopy(net)
        other.load_state_dict(start)
        with default_dtype(torch.float32), precision(case):
            try:
                note(truth_of(other, step.fresh()))
            except Exception:  # stock cannot at all: there is nothing to measure by
                errors = dict.fromkeys(errors, float("inf"))
    return errors


# ------------------------------------------------------------------------------------ shrinking


def shrink(case: Case, verdict: Verdict, seconds: float = 60.0) -> Case:
    """The smallest case found that fails in the same way."""
    end = time.monotonic() + seconds

    def fails(candidate: Case) -> bool:
        if time.monotonic() > end:
            return False
        try:
            found = run(candidate)
        except Exception:
            return False
        return found.kind == verdict.kind and (
            verdict.kind == "wrong" or found.detail[:40] == verdict.detail[:40]
        )

    case, changed = settled(case), True
    while changed and time.monotonic() < end:
        changed = False
        for candidate in smaller(case):
            if fails(candidate):
                case, changed = candidate, True
                break
    return case


def smaller(case: Case) -> Iterator[Case]:
    steps = case.steps
    for k in range(1, len(case.batches)):
        yield replace(case, batches=case.batches[:k])
    if len(steps) > 2:
        yield replace(case, steps=steps[: len(steps) // 2])
        yield replace(case, steps=steps[len(steps) // 2 :])
    for k in range(len(steps)):
        yield replace(case, steps=steps[:k] + steps[k + 1 :])
    for name, default in DEFAULTS.items():
        if name not in ("batches",) and getattr(case, name) != default:
            yield replace(case, **{name: default})
    if len(set(case.batches)) > 1:
        yield replace(case, batches=(3,) * len(case.batches))


def script(case: Case, verdict: Verdict, before: Sequence[Case] = ()) -> str:
    """A program that shows the failure, for `PYTHONPATH=src:tests`. before: cases of the same
    network without which it does not fail."""

    def told(one: Case) -> str:
        given = {n: getattr(one, n) for n, d in DEFAULTS.items() if getattr(one, n) != d}
        words = [str(one.seed), "steps", *(f"{n}={v!r}" for n, v in given.items())]
        return f"Case({', '.join(words)})"

    known = [f"before_{k}" for k in range(len(before))]
    text = sources()
    shown = [f"    {s!r},  # {text.get(s[0], '')[:70]}".rstrip(" #") for s in case.steps]
    if len(shown) > 12:
        shown = [f"    *{case.steps[k : k + 4]!r}," for k in range(0, len(case.steps), 4)]
    return "\n".join(
        [
            f"# {verdict.kind}: {verdict.detail[:150]}",
            "from support.fuzz import Case, run_all",
            "",
            "steps = (",
            *shown,
            ")",
            *(f"{name} = {told(one)}" for name, one in zip(known, before, strict=True)),
            f"case = {told(case)}",
            f"print(run_all([{', '.join([*known, 'case'])}])[-1])",
        ]
    )


@functools.cache
def sources() -> dict[str, str]:
    """What each operator of the vocabulary is, as it is written there."""
    found = {}
    tree = ast.parse(Path(vocabulary.__file__).read_text())
    for call in ast.walk(tree):
        if (
            isinstance(call, ast.Call)
            and len(call.args) > 1
            and isinstance(call.args[0], ast.Constant)
        ):
            found[call.args[0].value] = " ".join(ast.unparse(call.args[1]).split())
    return found


@contextlib.contextmanager
def operators_seen(into: set[str]) -> Iterator[None]:
    """Collects the ATen operators of every graph that is captured inside."""
    lift: Callable = dynamo.lift

    def watched(*args: Any) -> Any:
        graph = lift(*args)
        into.update(str(node.op) for node in graph.nodes)
        return graph

    dynamo.lift = watched
    try:
        yield
    finally:
        dynamo.lift = lift
