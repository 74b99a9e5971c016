"""Penalties on the whole Jacobian: its Frobenius norm, exact or projected, and its operator norm
(theory §3, §5, §6)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..dtypes import accumulation
from ..errors import InputError
from ..jacobian import SpectralProgram, plan_jacobian, unit_vectors
from ..rules import softmax_curvature, softmax_derivative
from ..run import Replay, Request
from ..spaces import Euclidean, dual_square
from .losses import Norm, NormLike, Reduction, SquaredNorm
from .one_seed import Penalty

PLANS = ("auto", "rows", "columns", "waist", "diagonal")
FRESH = 1e-6  # the share of a new direction in one that is carried on


class Jacobian(Penalty):
    """R = ‖∂out/∂x‖²_F per example, without a factor ½.

    of: "output", or "softmax" for the class probabilities of a network that outputs logits.
    projections: None for the exact value; n for an unbiased estimate from n random orthogonal
        directions of the output, D/n·Σ‖J*vᵢ‖² with D outputs.
    chunk: how many seeds are swept at once, folded into the batch; None: as many as fit into
        `memory`. Fewer seeds take less memory, more are faster; the result is the same.
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
        self.space = space if space is not None else Euclidean()
        super().__init__(SquaredNorm(self.space), reduction)
        if of not in ("output", "softmax"):
            raise InputError(f'of must be "output" or "softmax", not {of!r}')
        if plan not in PLANS:
            raise InputError(f"plan must be one of {PLANS}, not {plan!r}")
        for name, given in (("projections", projections), ("chunk", chunk), ("memory", memory)):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
                raise InputError(f"{name} must be an int or None, not {given!r}")
            if given is not None and given < 1:
                raise InputError(f"{name} must be at least 1, not {given}")
        if of == "softmax" and entries is not None:
            raise InputError('of="softmax" penalises all class probabilities; leave entries out')
        if projections is not None and entries not in (None, "all"):
            raise InputError("projections are taken over all outputs; leave entries out")
        if plan in ("columns", "waist", "diagonal") and projections is not None:
            raise InputError(f'plan="{plan}" is exact; projections are swept by rows')
        check_hilbert(self.space, "Jacobian", "space")
        self.of, self.projections, self.chunk = of, projections, chunk
        self.entries, self.plan, self.memory = entries, plan, memory
        self.varying = of == "softmax"

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
        return plan_jacobian(request.plan(), self, request.debug, _replay(self, request))

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

    def oracle_seeds(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Sequence[Tensor]:
        """Every v⟨i⟩ by its definition, for the oracle: for softmax the rows of S themselves."""
        if self.of == "softmax" and self.projections is None:
            s = out.softmax(-1)
            eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
            return [softmax_derivative(s, e) for e in eye]
        bank = self.bank(out.detach())
        return [math.sqrt(self.scale(out.shape)) * v for v in self.vectors(out, bank)]

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
                raise InputError(
                    f"projections={self.projections} exceeds the {most} directions of an output "
                    f"of shape {shape}; projections=None is exact and no dearer"
                )
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
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
            raise InputError(f"iterations must be an int, at least 0, not {iterations!r}")
        if iterations == 0 and not warm_start:
            raise InputError("iterations=0 without warm_start measures J along a random direction")
        check_hilbert(self.domain, "SpectralNorm", "domain")
        check_hilbert(self.codomain, "SpectralNorm", "codomain")
        self.iterations, self.warm_start = iterations, warm_start

    needs_examples = True
    chance = "SpectralNorm finds its direction by iteration, from a random one"

    @property
    def carries(self) -> bool:
        return self.warm_start

    def afresh(self) -> SpectralNorm:
        other = copy.copy(self)
        other.iterations, other.warm_start = max(1, self.iterations), False
        return other

    def program(self, request: Request) -> Any:
        replay = _replay(self, request)
        return SpectralProgram.build(request.plan(), self, request.debug, replay, request.carried)

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


def _replay(penalty: Penalty, request: Request) -> Replay:
    """Flat graphs for the phases, unless a norm or space of the caller's runs in them."""
    return request.replay if penalty.fingerprint() is not None else Replay(False, None)


def _slot(out: Tensor) -> tuple:
    """Under which the direction is carried from call to call: outputs that look alike share it."""
    return tuple(out.shape), out.dtype, out.device


def check_hilbert(space: Any, penalty: str, name: str) -> None:
    """‖J‖_F and adjoints need an inner product."""
    if not getattr(space, "hilbert", True):
        raise InputError(
            f"{penalty}({name}={space!r}) needs a space with an inner product; an Lᵖ norm with "
            "p ≠ 2 goes with LossGradient and OutputGradient"
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


__all__ = ["Jacobian", "SpectralNorm"]
