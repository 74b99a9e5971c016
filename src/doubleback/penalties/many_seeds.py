"""Penalties with many seeds (theory §3, §5, §6): of the whole Jacobian, its Frobenius norm, exact
or projected, and its operator norm; and over directions that are fixed before they are measured.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..dtypes import accumulation, lifted
from ..errors import InputError, PenaltyWarning, warn
from ..jacobian import DirectionsProgram, SpectralProgram, coupling, plan_jacobian, unit_vectors
from ..plan import Plan
from ..rules import softmax_curvature, softmax_derivative
from ..run import Replay, Request
from ..spaces import Euclidean, dual_square, per_example
from .losses import Norm, NormLike, Reduction, SquaredNorm
from .one_seed import Penalty, check_generator, check_whole, each, shapes_of

# ------------------------------------------------------------------------------- the whole Jacobian


PLANS = ("auto", "rows", "columns", "waist", "diagonal")
FRESH = 1e-6  # the share of a new direction in one that is carried on


class Jacobian(Penalty):
    """R = ‖∂out/∂x‖²_F per example, without a factor ½.

    of: "output", or "softmax" for the class probabilities of a network that outputs logits.
    projections: None for the exact value; n for an unbiased estimate from n random orthogonal
        directions of the output, D/n·Σ‖J*vᵢ‖² with D outputs.
    chunk: how many seeds are swept at once, folded into the batch; None: as many as fit into
        `memory` and, on a CPU, into its caches. Fewer seeds take less memory, more take fewer
        calls; the result is the same.
    entries: which outputs count: None for all of an output of shape (batch, C); a list of
        entries (numbers, or index tuples into one example's output); "all" for every entry of
        an output of any shape, however many.
    space: the space of inputs in which the rows of J are measured.
    plan: "auto" picks the cheapest; "rows" sweeps cotangents, "columns" tangents, "waist" meets
        in a narrow layer that every path crosses, "diagonal" is the closed form of one dense
        layer under a coordinate-wise function.
    memory: how many bytes the sweeps may use beyond what is in use; None: most of what is free.

    A layer that couples the examples of a batch (batch norm in training) makes every output
    depend on every example; what is penalised then is, for each output i, the derivative of
    Σ_b out_b⟨i⟩ with respect to each example.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> model = db.Penalised(net, db.Jacobian())
    >>> out, penalty = model(torch.randn(5, 4))
    >>> (out.square().mean() + 0.01 * penalty).backward()
    """

    def __init__(
        self,
        of: Literal["output", "softmax"] = "output",
        projections: int | None = None,
        chunk: int | None = None,
        reduction: Reduction = "mean",
        *,
        entries: Any = None,
        space: Any = None,
        plan: Literal["auto", "rows", "columns", "waist", "diagonal"] = "auto",
        memory: int | None = None,
    ) -> None:
        super().__init__(SquaredNorm(Euclidean() if space is None else space), reduction)
        if of not in ("output", "softmax"):
            raise InputError(f'of must be "output" or "softmax", not {of!r}')
        if plan not in PLANS:
            raise InputError(f"plan must be one of {PLANS}, not {plan!r}")
        for name, given in (("projections", projections), ("chunk", chunk), ("memory", memory)):
            check_whole(name, given, 1, or_none=True)
        if of == "softmax" and entries is not None:
            raise InputError('of="softmax" penalises all class probabilities; leave entries out')
        if projections is not None and entries not in (None, "all"):
            raise InputError("projections are taken over all outputs; leave entries out")
        if plan in ("columns", "waist", "diagonal") and projections is not None:
            raise InputError(f'plan="{plan}" is exact; projections are swept by rows')
        _check_hilbert(self.space, "Jacobian", "space")
        self.of, self.projections, self.chunk = of, projections, chunk
        self.entries, self.plan, self.memory = entries, plan, memory

    @property
    def varying(self) -> bool:  # type: ignore[override]
        return self.of == "softmax"

    @property
    def space(self) -> Any:
        return self.norm.space  # type: ignore[attr-defined]

    symmetric = True
    needs_examples = True

    # ------------------------------------------------------------------------------ seeds

    @property
    def unit_seeds(self) -> bool:
        """Whether the seeds are unit vectors e⟨i⟩, so that rows can be read."""
        return self.of == "output" and self.projections is None

    @property
    def whole(self) -> bool:
        """Whether every output counts, exactly: then any plan gives ‖J‖²_F."""
        return self.projections is None and (self.entries is None or self.entries == "all")

    def seed_count(self, out_shape: Sequence[int]) -> int:
        """How many cotangents are swept by rows."""
        if self.projections is not None:
            return self.projections
        size = math.prod(out_shape[1:])
        if self.of == "softmax":
            return size - 1
        return size if self.whole else len(_entries(self.entries, out_shape))

    def scale(self, out_shape: Sequence[int]) -> float:
        """What the sum over seeds is multiplied by: D/n for n projections."""
        if self.projections is None:
            return 1.0
        size = math.prod(out_shape[1:]) - (self.of == "softmax")
        return size / self.projections

    def bank(self, out: Tensor) -> Tensor:
        """One entry per seed: its number for unit vectors, else a direction (n, batch or 1, D)."""
        size = math.prod(out.shape[1:])
        if self.unit_seeds:
            if self.whole:
                return torch.arange(size, device=out.device)
            return torch.tensor(_entries(self.entries, out.shape), device=out.device)
        wide = accumulation(out.dtype)
        basis = helmert(size, wide, out.device) if self.of == "softmax" else None
        if self.projections is None:
            assert basis is not None
            return basis[:, None].to(out.dtype)
        inner = size if basis is None else size - 1
        drawn = directions(out.shape[0], inner, self.projections, out.device).to(wide)
        return (drawn if basis is None else drawn @ basis).to(out.dtype)

    def vectors(self, out: Tensor, bank: Tensor) -> Tensor:
        """v⟨i⟩, shaped (seeds, *out.shape)."""
        if self.unit_seeds:
            return unit_vectors(bank, out.shape, out.dtype)
        if self.of == "softmax":
            return softmax_derivative(out.softmax(-1), bank)
        return bank.reshape(len(bank), *out.shape).to(out.dtype)

    def head_of(self, out: Tensor, bank: Tensor, h: Tensor) -> Tensor | None:
        """Σ_i (∂v⟨i⟩/∂out)* h⟨i⟩."""
        if self.of != "softmax":
            return None
        return softmax_curvature(out.softmax(-1), bank, h, -1).sum(0)

    def program(self, request: Request) -> Any:
        flat = self.fingerprint() is not None  # else a space of the caller's runs in the phases
        return request.phased(
            lambda plan, replay: plan_jacobian(plan, self, request.debug, replay),
            flat, self.memory is not None,
        )  # fmt: skip

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        raise InputError("Jacobian has many seeds; see oracle_seeds")

    def seeds_along(
        self, out: Tensor, tangent: Tensor, *extra: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        for one in self.bank(out).split(1):
            yield self.vectors(out, one)[0], self.head_of(out, one, tangent[None])

    def seed_degree(self, degree: int) -> int | None:
        return None if self.varying else 0

    @property
    def chance(self) -> str | None:
        if self.projections is None:
            return None
        return f"Jacobian(projections={self.projections}) draws random directions"

    @property
    def one_seed(self) -> bool:
        return self.projections == 1

    def pulls(self, out_shape: Sequence[int]) -> int | None:
        told = self.chunk is not None or self.memory is not None or self.plan != "auto"
        return None if told else self.seed_count(out_shape)

    def oracle_seeds(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Sequence[Tensor]:
        """Every v⟨i⟩ by its definition, for the oracle: for softmax the rows of S themselves."""
        if self.of == "softmax" and self.projections is None:
            s = out.softmax(-1)
            eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
            return [softmax_derivative(s, e) for e in eye]
        bank = self.bank(out.detach())
        return [math.sqrt(self.scale(out.shape)) * v for v in self.vectors(out, bank)]

    def quick_seed(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Tensor | None:
        if self.of == "softmax" or self.projections != 1:
            return super().quick_seed(out, x, *extra)
        batch, size = out.shape[0], math.prod(out.shape[1:])
        drawn = torch.randn((batch, size, 1), dtype=torch.float32, device=out.device)
        drawn = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
        return math.sqrt(size) * drawn.reshape(out.shape).to(out.dtype)

    # ------------------------------------------------------------------------------ errors

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        shape = tuple(out_shape)
        if len(shape) < 2:
            raise InputError(
                f"Jacobian needs an output of shape (batch, C), not {shape}; keep the last axis"
            )
        if self.of == "softmax" and (len(shape) != 2 or shape[1] < 2):
            raise InputError(
                f'of="softmax" needs logits of shape (batch, C) with C ≥ 2, not {shape}'
            )
        if len(shape) != 2 and self.entries is None and self.projections is None:
            raise InputError(
                f"the output has shape {shape}, {math.prod(shape[1:])} entries per example; choose "
                'some with entries=[...], all of them with entries="all", or estimate with '
                "projections=n"
            )
        if self.projections is not None:
            most = math.prod(shape[1:]) - (self.of == "softmax")
            if self.projections > most:
                raise _too_many(self.projections, most, shape)
        elif not self.whole:
            _entries(self.entries, shape)

    def __repr__(self) -> str:
        parts = [f"of={self.of!r}"]
        for name in ("projections", "chunk", "entries"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        if not isinstance(self.space, Euclidean):
            parts.append(f"space={self.space!r}")
        if self.plan != "auto":
            parts.append(f"plan={self.plan!r}")
        return f"Jacobian({', '.join(parts)}, reduction={self.reduction!r})"


class SpectralNorm(Penalty):
    """R = p(J*v) with v the top left singular vector of J = ∂out/∂x, one per example: with the
    default p = ‖·‖ the operator norm σ₁ of the Jacobian.

    v comes from `iterations` rounds of power iteration, v ← JJ*v/‖JJ*v‖, by backward and
    tangent sweeps; it is held fixed in the gradient, which is right at a simple singular value
    (envelope theorem). warm_start: begin where the last call with this output shape ended, so
    that few iterations per training step are enough; otherwise every call draws v anew.

    domain, codomain: the spaces of x and out between which the norm is taken.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Linear(4, 3)
    >>> model = db.Penalised(net, db.SpectralNorm(iterations=200))
    >>> sigma = model(torch.randn(2, 4))[1]
    >>> torch.allclose(sigma, torch.linalg.matrix_norm(net.weight, 2), rtol=1e-4)
    True
    """

    def __init__(
        self,
        iterations: int = 1,
        warm_start: bool = True,
        norm: NormLike | None = None,
        reduction: Reduction = "mean",
        *,
        domain: Any = None,
        codomain: Any = None,
    ) -> None:
        self.domain = domain if domain is not None else Euclidean()
        self.codomain = codomain if codomain is not None else Euclidean()
        super().__init__(norm if norm is not None else Norm(self.domain), reduction)
        check_whole("iterations", iterations, 0)
        if iterations == 0 and not warm_start:
            raise InputError("iterations=0 without warm_start measures J along a random direction")
        _check_hilbert(self.domain, "SpectralNorm", "domain")
        _check_hilbert(self.codomain, "SpectralNorm", "codomain")
        self.iterations, self.warm_start = iterations, warm_start

    needs_examples = True
    chance = "SpectralNorm finds its direction by iteration, from a random one"

    @property
    def carries(self) -> bool:
        return self.warm_start

    @property
    def no_graph(self) -> str | None:
        if not self.warm_start:
            return None
        return (
            "a CUDA graph cannot carry SpectralNorm's vector from call to call; use "
            "warm_start=False or cuda_graph=False"
        )

    def afresh(self) -> SpectralNorm:
        other = copy.copy(self)
        other.iterations, other.warm_start = max(1, self.iterations), False
        return other

    def program(self, request: Request) -> Any:
        def make(plan: Plan, replay: Replay) -> SpectralProgram:
            return SpectralProgram.build(plan, self, request.debug, replay, request.carried)

        return request.phased(make, self.fingerprint() is not None, False)

    def start(self, out: Tensor) -> Tensor:
        """A random unit direction per example."""
        drawn = torch.randn(out.shape, dtype=torch.float32, device=out.device).to(out.dtype)
        return self.normalised(drawn)

    def begin(self, out: Tensor, carried: Mapping[Any, Tensor]) -> Tensor:
        """Where this call's iterations start: the last call's v, with a trace of a new direction.
        By itself v never leaves a subspace that J keeps apart from the rest (positions or channels
        that do not mix, dead outputs), though the batch of today has its largest singular value
        elsewhere."""
        v = carried.get(_slot(out)) if self.warm_start else None
        if v is None:
            return self.start(out)
        return self.normalised(v + FRESH * self.start(out)) if self.iterations else v

    def carry(self, carried: dict, out: Tensor, v: Tensor) -> None:
        """Leave this call's v for the next one."""
        if self.warm_start:
            carried[_slot(out)] = v.detach()

    def normalised(self, w: Tensor, before: Tensor | None = None) -> Tensor:
        """w/‖w‖ in the codomain, `before` or zero where w is zero or not finite: a direction that
        is zero once would stay so in every later call."""
        norm = self.codomain.norm(w).reshape(-1, *(1,) * (w.dim() - 1))
        unit = (w / norm).to(w.dtype)
        return torch.where((norm > 0) & norm.isfinite(), unit, 0 if before is None else before)

    def covector(self, v: Tensor) -> Tensor:
        """The functional ⟨v, ·⟩ of the codomain as a Euclidean cotangent: G v."""
        if isinstance(self.codomain, Euclidean):
            return v
        return self.codomain.riesz_inverse(v)

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        raise InputError("SpectralNorm finds its seed by power iteration")

    @property
    def one_seed(self) -> bool:
        return False

    def seeds_from(self, carried: dict) -> Callable[..., Sequence[Tensor]]:
        return partial(self.oracle_seeds, carried=carried)

    def oracle_seeds(
        self, out: Tensor, x: Sequence[Tensor], *extra: Tensor, carried: dict | None = None
    ) -> Sequence[Tensor]:
        """v by the same iterations on autograd: J q as the derivative of ⟨J*w, q⟩ in w.
        carried: v of earlier calls, which gains this one's."""
        v = self.begin(out, carried or {})
        # linear in w, with the same derivative at any; that of logcumsumexp has logarithms of w
        w = torch.ones_like(out, requires_grad=True)
        xi = torch.autograd.grad(out, list(x), w, create_graph=True, allow_unused=True)
        pairs = [(i, u) for i, u in enumerate(xi) if u is not None and u.requires_grad]
        for _ in range(self.iterations if pairs else 0):
            pulled = torch.autograd.grad(
                out, [x[i] for i, _ in pairs], self.covector(v), retain_graph=True
            )
            _, along = dual_square(self.domain, pulled)
            (h,) = torch.autograd.grad([u for _, u in pairs], w, along, retain_graph=True)
            v = self.normalised(h.detach(), v)
        if carried is not None:
            self.carry(carried, out, v)
        return [self.covector(v)]

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        if len(out_shape) < 2:
            raise InputError(
                f"SpectralNorm needs an output of shape (batch, …), not {tuple(out_shape)}"
            )

    def __repr__(self) -> str:
        return (
            f"SpectralNorm(iterations={self.iterations}, warm_start={self.warm_start}, "
            f"norm={self.norm}, reduction={self.reduction!r})"
        )


def _slot(out: Tensor) -> tuple:
    """Under which the direction is carried from call to call: outputs that look alike share it."""
    return tuple(out.shape), out.dtype, out.device


def _check_hilbert(space: Any, penalty: str, name: str) -> None:
    """‖J‖_F and adjoints need an inner product."""
    if not getattr(space, "hilbert", True):
        raise InputError(
            f"{penalty}({name}={space!r}) needs a space with an inner product; an Lᵖ norm with "
            "p ≠ 2 goes with LossGradient and OutputGradient"
        )


def _too_many(projections: int, most: int, shape: tuple[int, ...]) -> InputError:
    return InputError(
        f"projections={projections} exceeds the {most} directions of an output of shape {shape}; "
        "projections=None is exact and no dearer"
    )


def helmert(size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """An orthonormal basis of the vectors whose entries sum to zero, (size − 1, size):
    row i is (1, …, 1, −i, 0, …, 0)/√(i(i+1)), i ones."""
    i = torch.arange(1, size, dtype=torch.float64, device=device)[:, None]
    k = torch.arange(size, dtype=torch.float64, device=device)[None]
    rows = torch.where(k < i, 1.0, torch.where(k == i, -i, 0.0))
    return (rows / torch.sqrt(i * (i + 1))).to(dtype)


def directions(
    batch: int, size: int, count: int, device: Any, generator: torch.Generator | None = None
) -> Tensor:
    """`count` orthonormal directions per example, each uniform on the sphere: (count, batch, size)
    in float64 where they had to be made orthogonal."""
    where = device if generator is None else generator.device
    shape = (batch, size, count)
    drawn = torch.randn(shape, dtype=torch.float32, device=where, generator=generator).to(device)
    if count == 1:
        return (drawn / drawn.norm(dim=1, keepdim=True)).permute(2, 0, 1)
    return torch.linalg.qr(drawn.double()).Q.permute(2, 0, 1)


def _entries(entries: Any, out_shape: Sequence[int]) -> list[int]:
    """Entries of one example's output as flat numbers."""
    shape = tuple(out_shape[1:])
    items = [entries] if isinstance(entries, (int, tuple)) else list(entries)
    if not items:
        raise InputError("entries is empty; choose at least one output")
    places = []
    for item in items:
        index = item if isinstance(item, tuple) else (item,)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in index):
            raise InputError(f"entries must be ints or tuples of ints, not {item!r}")
        sizes = shape if isinstance(item, tuple) else (math.prod(shape),)
        if len(index) != len(sizes):
            raise InputError(f"entry {item!r} does not index one output of shape {shape}")
        flat = 0
        for i, size in zip(index, sizes, strict=True):
            if not -size <= i < size:
                raise InputError(f"entry {item!r} is out of range for an output of shape {shape}")
            flat = flat * size + i % size
        places.append(flat)
    return places


# --------------------------------------------------------------------------------- fixed directions
#
# Σ_i p_i(J*v⟨i⟩) with v⟨i⟩ held fixed: a Jacobian compared with another, and the log-determinant
# of I + J by its power series. The directions and what belongs to each are the *bank*: tensors with
# one leading axis over the directions, v first. `start` draws it, `improved` may change it with the
# help of J* (the series does), and `measured` yields p and its gradient in ξ⟨i⟩ = J*v⟨i⟩.


Bank = tuple[Tensor, ...]
Pull = Callable[[Tensor], Tensor]


class Directions(Penalty):
    """What `DirectionsProgram` and the oracle ask of such a penalty."""

    volatile: tuple[str, ...] = ("generator", "told")  # no part of what a flat graph holds
    valued = True  # whether `measured` adds to the value, or to its gradient alone
    needs_examples = True

    def __init__(
        self,
        norm: Any,
        reduction: Reduction,
        projections: int | None,
        chunk: int | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(norm, reduction)
        check_whole("projections", projections, 1, or_none=True)
        check_whole("chunk", chunk, 1, or_none=True)
        check_generator(generator)
        self.projections, self.chunk, self.generator = projections, chunk, generator
        self.told = False

    @property
    def chance(self) -> str:
        return f"{type(self).__name__} measures many directions of its own"

    @property
    def no_graph(self) -> str | None:
        name = type(self).__name__
        if not self.fixed_rounds:
            return (
                f"a CUDA graph would take the same number of terms in every call, which biases "
                f"{name}; use roulette=0 or cuda_graph=False"
            )
        if self.generator is None:
            return None
        return (
            f"a CUDA graph draws from PyTorch's own generator; leave {name}'s generator out or use "
            "cuda_graph=False"
        )

    def program(self, request: Request) -> Any:
        def make(plan: Plan, replay: Replay) -> DirectionsProgram:
            return self._program(plan, request, replay)

        return request.phased(make, self.fingerprint() is not None, False)

    def _program(self, plan: Plan, request: Request, replay: Replay) -> DirectionsProgram:
        return DirectionsProgram(plan, self, request.debug, replay=replay, asked=request.asked)

    def count(self, out_shape: Sequence[int]) -> int:
        """How many directions there are."""
        return self.projections or math.prod(out_shape[1:])

    @abstractmethod
    def start(self, out: Tensor, *extra: Any) -> Bank:
        """The bank as it is drawn."""

    def improved(self, bank: Bank, pull: Pull, rounds: int) -> tuple[Bank, Tensor | None]:
        """(the bank that is measured, what it adds to the value of each example). pull(z) is J*z
        for a part of the bank; rounds: what `drawn_rounds` said."""
        return bank, None

    def drawn_rounds(self) -> int:
        """How many times `improved` pulls, by chance where it is random."""
        return 0

    @property
    def fixed_rounds(self) -> bool:
        """Whether every call pulls as often as the last."""
        return True

    @abstractmethod
    def measured(self, xi: Sequence[Tensor], bank: Bank) -> tuple[Tensor, list[Tensor]]:
        """(p summed over the directions, per example; its gradient in each ξ⟨i⟩)."""

    @abstractmethod
    def measured_value(self, xi: Sequence[Tensor], bank: Bank) -> Tensor:
        """A scalar per example with that value and that gradient, by autograd."""

    def own(
        self, asked: Sequence[int], q: Sequence[Tensor], bank: Bank, weights: Tensor, *extra: Any
    ) -> list[Tensor | None]:
        """The gradients of the penalty's own arguments, from ∇p at every direction."""
        return [None] * len(asked)

    def cheap(self) -> Directions:
        """The same for finding out what it costs: with PyTorch's generator and fixed rounds."""
        same = copy.copy(self)
        same.generator = None
        return same

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        raise InputError(f"{type(self).__name__} has many directions; see start")

    @property
    def one_seed(self) -> bool:
        return False

    def oracle_values(self, out: Tensor, pull: Callable[..., list[Tensor]], *extra: Any) -> Tensor:
        bank = self.start(out, *extra)

        def detached(z: Tensor) -> Tensor:
            return torch.stack([pull(v.to(out.dtype), False)[0].detach() for v in z])

        bank, total = self.improved(bank, detached, self.drawn_rounds())
        for i in range(bank[0].shape[0]):
            part = tuple(t[i : i + 1] for t in bank)
            xi = [u[None] for u in pull(part[0][0].to(out.dtype), None)]
            value = self.measured_value(xi, part)
            total = value if total is None else total + value
        assert total is not None
        return total


# ------------------------------------------------------------------------------ matching Jacobians


class JacobianMatch(Directions):
    """Sobolev training with vector outputs: R = ‖∂out/∂x − T‖²_F per example.

    The target T is the call's last argument, of shape (batch, *output, *x) without their batch axes
    (a tuple for several inputs); or a function v ↦ T*v from a tensor shaped like the output to one
    shaped like x, such as `torch.func.vjp` makes of a teacher, whose Jacobian is then never written
    down. A tensor that requires grad receives its gradient.

    projections: None for every output's row; n for an unbiased estimate from n random orthogonal
        directions, D/n·Σ‖J*vᵢ − T*vᵢ‖² with D outputs (Czarnecki et al. 2017).
    space: the space of inputs in which rows are measured.
    chunk: how many directions are swept at once; None: all. Fewer take less memory.
    generator: draws the directions; None: PyTorch's own.

    >>> import torch, doubleback as db
    >>> teacher, student = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    >>> x = torch.randn(5, 3)
    >>> model = db.Penalised(student, db.JacobianMatch())
    >>> out, penalty = model(x, teacher.weight.detach().expand(5, 4, 3))
    >>> torch.allclose(penalty, (student.weight - teacher.weight).square().sum())
    True
    """

    extras = 1

    def __init__(
        self,
        projections: int | None = None,
        reduction: Reduction = "mean",
        *,
        space: Any = None,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        norm = SquaredNorm(Euclidean() if space is None else space)
        super().__init__(norm, reduction, projections, chunk, generator)
        _check_hilbert(self.space, "JacobianMatch", "space")

    @property
    def space(self) -> Any:
        return self.norm.space  # type: ignore[attr-defined]

    def start(self, out: Tensor, *extra: Any) -> Bank:
        batch, *one = out.shape
        size = math.prod(one)
        if self.projections is None:
            index = torch.arange(size, device=out.device)
            seeds = unit_vectors(index, out.shape, out.dtype).contiguous()
        else:
            drawn = directions(batch, size, self.projections, out.device, self.generator)
            scaled = math.sqrt(size / self.projections) * drawn
            seeds = scaled.to(accumulation(out.dtype)).reshape(-1, *out.shape).to(out.dtype)
        return (seeds, *self._targets(seeds, extra[0]))

    def _targets(self, seeds: Tensor, target: Any) -> list[Tensor]:
        """T*v⟨i⟩ for every direction, one tensor for each input."""
        if callable(target):
            pulled = [each(target(v)) for v in seeds]
            return [torch.stack(list(parts)) for parts in zip(*pulled, strict=True)]
        size = math.prod(seeds.shape[2:])
        flat = seeds.reshape(*seeds.shape[:2], size)
        parts = []
        for t in each(target):
            batch, one = t.shape[0], t.shape[seeds.dim() - 1 :]
            rows = t.reshape(batch, size, -1)
            if self.projections is None:
                parts.append(rows.transpose(0, 1).reshape(size, batch, *one))
            else:
                by = flat.to(t.dtype)
                product = torch.einsum("nbc,bck->nbk", by, rows)
                parts.append(product.reshape(len(by), batch, *one))
        return parts

    def _square(self, differences: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        count, batch = differences[0].shape[:2]
        square, along = dual_square(self.space, [d.flatten(0, 1) for d in differences])
        return (
            square.reshape(count, batch).sum(0),
            [u.unflatten(0, (count, batch)) for u in along],
        )

    def _differences(self, xi: Sequence[Tensor], bank: Bank) -> list[Tensor]:
        return [u - t.to(u.dtype) for u, t in zip(xi, bank[1:], strict=True)]

    def measured(self, xi: Sequence[Tensor], bank: Bank) -> tuple[Tensor, list[Tensor]]:
        values, along = self._square(self._differences(xi, bank))
        return values, [(2 * u).to(x.dtype) for u, x in zip(along, xi, strict=True)]

    def measured_value(self, xi: Sequence[Tensor], bank: Bank) -> Tensor:
        return self._square(self._differences(xi, bank))[0]

    def own(
        self, asked: Sequence[int], q: Sequence[Tensor], bank: Bank, weights: Tensor, *extra: Any
    ) -> list[Tensor | None]:
        """∂R/∂T = −Σ_i v⟨i⟩ ⊗ ∇p⟨i⟩."""
        targets = each(extra[0])
        flat = bank[0].flatten(2)
        gradients: list[Tensor | None] = []
        for i in asked:
            by = weights.reshape(1, -1, *(1,) * (q[i].dim() - 2))
            scaled = (by * q[i]).flatten(2)
            outer = torch.einsum("nbc,nbk->bck", flat.to(scaled.dtype), scaled)
            gradients.append((-outer).reshape(targets[i].shape).to(targets[i].dtype))
        return gradients

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        shape = tuple(out_shape)
        if len(shape) < 2 or (x and shape[0] != x[0].shape[0]):
            raise InputError(
                f"JacobianMatch needs an output of shape (batch, …) with a row for each of x, not "
                f"{shape}; with one number per example use GradientMatch"
            )
        most = math.prod(shape[1:])
        if self.projections is not None and self.projections > most:
            raise _too_many(self.projections, most, shape)
        target = extra[0]
        if callable(target) and not isinstance(target, Tensor):
            return
        wanted, shapes = [(*shape, *t.shape[1:]) for t in x], shapes_of(each(target))
        if wanted != shapes:
            raise InputError(
                f"JacobianMatch's target must have shape (batch, *output, *input), {wanted}, not "
                f"{shapes}; or be a function v ↦ T*v"
            )

    def __repr__(self) -> str:
        space = "" if isinstance(self.space, Euclidean) else f", space={self.space!r}"
        return f"JacobianMatch(projections={self.projections}{space}, reduction={self.reduction!r})"


# --------------------------------------------------------------------------------- log-determinant


class LogDet(Directions):
    """R = log |det(I + J)| per example, J = ∂out/∂x: what the invertible residual block x + net(x)
    does to volumes, for networks that contract (Lipschitz constant L < 1). By its power series

        log det(I + J) = Σ_{k ≥ 1} (−1)^{k+1}/k tr(Jᵏ),    tr A = E εᵀAε.

    projections: n for Hutchinson's estimate of the traces from n random vectors ε of signs; None
        for the exact traces, one direction for each input.
    terms: how many terms of the series are always taken.
    roulette: the probability q with which each further term is taken, weighted by one over the
        probability of getting there, so that the estimate is unbiased (Russian roulette); one
        number of terms for the whole batch. 0 cuts the series off, with an error of at most
        D L^{n+1} / ((n+1)(1 − L)) for D inputs. The variance is finite for q > L².
    chunk: how many directions are swept at once; None: all. Fewer take less memory.
    generator: draws ε and the number of terms; None: PyTorch's own.

    The gradient is that of ⟨w, J ε⟩ with w = Σ_k (−1)^{k+1} (J*)^{k−1} ε held fixed (Chen et al.
    2019): one pair of sweeps, however many terms. With exact traces it is the gradient of the
    series as far as it was taken, otherwise unbiased as the value is, though not the derivative of
    the estimated value. Batch norm in training makes examples depend on one another, which has no
    determinant per example.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> for p in net.parameters():
    ...     p.data *= 0.5
    >>> flow = db.Penalised(net, db.LogDet(projections=None, terms=30, roulette=0))
    >>> x = torch.randn(5, 3)
    >>> out, volume = flow(x)
    >>> jacobian = torch.func.vmap(torch.func.jacrev(net))(x)
    >>> exact = torch.linalg.slogdet(torch.eye(3) + jacobian).logabsdet.mean()
    >>> torch.allclose(volume, exact, atol=1e-5)
    True
    """

    valued = False

    def __init__(
        self,
        projections: int | None = 1,
        terms: int = 8,
        roulette: float = 0.5,
        reduction: Reduction = "mean",
        *,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(None, reduction, projections, chunk, generator)
        check_whole("terms", terms, 1)
        number = isinstance(roulette, (int, float)) and not isinstance(roulette, bool)
        if not number or not 0 <= roulette < 1:
            raise InputError(
                f"roulette must be a probability in [0, 1), 0 to cut the series off, not "
                f"{roulette!r}"
            )
        self.terms, self.roulette = terms, float(roulette)

    def _program(self, plan: Plan, request: Request, replay: Replay) -> DirectionsProgram:
        reason = coupling(plan)
        if reason is not None:
            warn(
                f"LogDet: {reason}, and then there is no determinant for each of them; use a norm "
                "that treats examples one by one, or net.eval()",
                PenaltyWarning,
            )
        return super()._program(plan, request, replay)

    @property
    def fixed_rounds(self) -> bool:
        return not self.roulette

    def drawn_rounds(self) -> int:
        """N with P(N ≥ k) = q^{k − terms} for k > terms, and 1 before."""
        if not self.roulette:
            return self.terms
        where = "cpu" if self.generator is None else self.generator.device
        drawn = torch.rand((), dtype=torch.float64, generator=self.generator, device=where)
        return self.terms + math.floor(math.log1p(-drawn.item()) / math.log(self.roulette))

    def cheap(self) -> Directions:
        same = super().cheap()
        assert isinstance(same, LogDet)
        by_chance = self.roulette / (1 - self.roulette)  # on average
        same.terms += round(by_chance)
        same.roulette, same.told = 0.0, True
        return same

    def start(self, out: Tensor, *extra: Any) -> Bank:
        if self.projections is None:
            index = torch.arange(math.prod(out.shape[1:]), device=out.device)
            return (unit_vectors(index, out.shape, out.dtype).contiguous(),)
        where = out.device if self.generator is None else self.generator.device
        shape = (self.projections, *out.shape)
        signs = torch.randint(2, shape, generator=self.generator, device=where)
        return ((2 * signs - 1).to(out.device, out.dtype),)

    def improved(self, bank: Bank, pull: Pull, rounds: int) -> tuple[Bank, Tensor | None]:
        """((w, ε), the series): ζ_k = (J*)ᵏ ε, w = Σ ±c_k ζ_{k−1}, Σ ±c_k/k ⟨ζ_k, ε⟩, c_k one over
        the probability of taking term k."""
        (noise,) = bank
        zeta, w, value, share = noise, None, None, 1.0
        for k in range(1, rounds + 1):
            if k > self.terms:
                share /= self.roulette
            by = share if k % 2 else -share
            w = by * lifted(zeta) if w is None else w + by * lifted(zeta)
            zeta = pull(zeta).to(noise.dtype)
            term = per_example(lifted(zeta) * lifted(noise), 2).sum(0) * (by / k)
            value = term if value is None else value + term
        assert w is not None and value is not None
        self._watch(noise, zeta)
        return (w.to(noise.dtype), noise), self._scaled(value)

    def _scaled(self, value: Tensor) -> Tensor:
        return value if self.projections is None else value / self.projections

    def _watch(self, noise: Tensor, zeta: Tensor) -> None:
        """(J*)ᵏ makes every vector shorter where the network contracts. Looked at once at a time
        when it costs no waiting for a device."""
        if self.told or noise.device.type != "cpu" or not noise.numel():
            return
        before, after = (per_example(t.detach().square(), 2) for t in (noise, zeta))
        if bool((after > before).any()):
            self.told = True
            warn(
                "LogDet: the network does not contract, (J*)ᵏε is longer than ε, so that the "
                "power series need not converge to log |det(I + J)|; bound the layers' operator "
                "norms below 1 (torch.nn.utils.parametrizations.spectral_norm times a constant)",
                PenaltyWarning,
            )

    def measured(self, xi: Sequence[Tensor], bank: Bank) -> tuple[Tensor, list[Tensor]]:
        """The value is known from the series; ∇⟨ξ, ε⟩ = ε."""
        zero = per_example(lifted(xi[0][0])) * 0
        return zero, [self._scaled(lifted(bank[1])).to(xi[0].dtype)]

    def measured_value(self, xi: Sequence[Tensor], bank: Bank) -> Tensor:
        form = per_example(lifted(xi[0]) * lifted(bank[1]), 2).sum(0)
        return self._scaled(form - form.detach())

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        shapes = [tuple(t.shape) for t in x]
        if shapes != [tuple(out_shape)] or len(out_shape) < 2:
            raise InputError(
                "LogDet needs a square Jacobian, an output of x's own shape (batch, …): the output "
                f"has shape {tuple(out_shape)}, x {shapes[0] if len(shapes) == 1 else shapes}"
            )
        if not x[0].is_floating_point():
            raise InputError(f"LogDet takes real numbers, not {x[0].dtype}")

    def __repr__(self) -> str:
        return (
            f"LogDet(projections={self.projections}, terms={self.terms}, "
            f"roulette={self.roulette:g}, reduction={self.reduction!r})"
        )
