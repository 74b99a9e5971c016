"""Penalties over directions that are known before the gradient is taken, Σ_i p_i(J*v⟨i⟩) with v⟨i⟩
held fixed: a Jacobian compared with another, and the log-determinant of I + J by its power series.

The directions and what belongs to each are the *bank*: tensors with one leading axis over the
directions, v first. `start` draws it, `improved` may change it with the help of J* (the series
does), and `measured` yields p and its gradient in ξ⟨i⟩ = J*v⟨i⟩.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dtypes import accumulation, lifted
from ..errors import InputError, PenaltyWarning, warn
from ..jacobian import DirectionsProgram, unit_vectors
from ..run import Replay, Request
from ..spaces import Euclidean, dual_square, per_example
from .losses import Reduction, SquaredNorm
from .many_seeds import check_hilbert, directions
from .one_seed import Penalty

Bank = tuple[Tensor, ...]
Pull = Callable[[Tensor], Tensor]


class Directions(Penalty):
    """What `DirectionsProgram` and the oracle ask of such a penalty."""

    volatile: tuple[str, ...] = ("generator", "told")  # no part of what a flat graph holds
    needs_examples = True
    valued = True  # whether `measured` adds to the value, or to its gradient alone

    def __init__(
        self,
        norm: Any,
        reduction: Reduction,
        projections: int | None,
        chunk: int | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(norm, reduction)
        for name, given in (("projections", projections), ("chunk", chunk)):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
                raise InputError(f"{name} must be an int or None, not {given!r}")
            if given is not None and given < 1:
                raise InputError(f"{name} must be at least 1, not {given}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"generator must be a torch.Generator, not {generator!r}")
        self.projections, self.chunk, self.generator = projections, chunk, generator
        self.told = False

    def pulls(self, out_shape: Sequence[int]) -> tuple[int, int]:
        return self.projections or math.prod(out_shape[1:]), self.steady().drawn_rounds()

    def program(self, request: Request) -> Any:
        replay = request.replay if self.fingerprint() is not None else Replay(False, None)
        return DirectionsProgram(request.plan(), self, request.debug, replay, asked=request.asked)

    @property
    def ungraphed(self) -> str | None:  # type: ignore[override]
        if self.generator is not None:
            return "draws from PyTorch's own generator: leave `generator` out"
        return None

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

    def steady(self) -> Directions:
        """The same with a typical number of rounds and PyTorch's generator, to find out what it
        costs."""
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
            found = [pull(v.to(out.dtype), False)[0] for v in z]
            return torch.stack([u.detach() for u in found])

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
    chance = "JacobianMatch takes many directions"

    def __init__(
        self,
        projections: int | None = None,
        reduction: Reduction = "mean",
        *,
        space: Any = None,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.space = space if space is not None else Euclidean()
        check_hilbert(self.space, "JacobianMatch", "space")
        super().__init__(SquaredNorm(self.space), reduction, projections, chunk, generator)

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
            pulled = [target(v) for v in seeds]
            pulled = [p if isinstance(p, (tuple, list)) else (p,) for p in pulled]
            return [torch.stack(list(parts)) for parts in zip(*pulled, strict=True)]
        targets = target if isinstance(target, (tuple, list)) else (target,)
        size = math.prod(seeds.shape[2:])
        flat = seeds.reshape(*seeds.shape[:2], size)
        found = []
        for t in targets:
            batch, one = t.shape[0], t.shape[seeds.dim() - 1 :]
            rows = t.reshape(batch, size, -1)
            if self.projections is None:
                found.append(rows.transpose(0, 1).reshape(size, batch, *one))
            else:
                by = flat.to(t.dtype)
                product = torch.einsum("nbc,bck->nbk", by, rows)
                found.append(product.reshape(len(by), batch, *one))
        return found

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
        targets = extra[0] if isinstance(extra[0], (tuple, list)) else (extra[0],)
        flat = bank[0].flatten(2)
        found: list[Tensor | None] = []
        for i in asked:
            by = weights.reshape(1, -1, *(1,) * (q[i].dim() - 2))
            scaled = (by * q[i]).flatten(2)
            outer = torch.einsum("nbc,nbk->bck", flat.to(scaled.dtype), scaled)
            found.append((-outer).reshape(targets[i].shape).to(targets[i].dtype))
        return found

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
            raise InputError(
                f"projections={self.projections} exceeds the {most} directions of an output of "
                f"shape {shape}; projections=None is exact and no dearer"
            )
        target = extra[0]
        if callable(target) and not isinstance(target, Tensor):
            return
        given = target if isinstance(target, (tuple, list)) else (target,)
        wanted = [(*shape, *t.shape[1:]) for t in x]
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in given]
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
        if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
            raise InputError(f"terms must be an int, at least 1, not {terms!r}")
        number = isinstance(roulette, (int, float)) and not isinstance(roulette, bool)
        if not number or not 0 <= roulette < 1:
            raise InputError(
                f"roulette must be a probability in [0, 1), 0 to cut the series off, not "
                f"{roulette!r}"
            )
        self.terms, self.roulette = terms, float(roulette)
        self.fixed: int | None = None  # in place of chance

    @property
    def ungraphed(self) -> str | None:  # type: ignore[override]
        if self.roulette and self.fixed is None:
            return "would take the same number of terms in every call, which biases: use roulette=0"
        return super().ungraphed

    @property
    def chance(self) -> str | None:  # type: ignore[override]
        return "LogDet takes many directions, as a rule random ones"

    def drawn_rounds(self) -> int:
        """N with P(N ≥ k) = q^{k − terms} for k > terms, and 1 before."""
        if self.fixed is not None or not self.roulette:
            return self.fixed or self.terms
        where = "cpu" if self.generator is None else self.generator.device
        drawn = torch.rand((), dtype=torch.float64, generator=self.generator, device=where)
        return self.terms + math.floor(math.log1p(-drawn.item()) / math.log(self.roulette))

    def steady(self) -> Directions:
        same = super().steady()
        assert isinstance(same, LogDet)
        more = self.roulette / (1 - self.roulette)  # terms that chance adds, on average
        same.fixed, same.told = self.terms + round(more), True
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


__all__ = ["Directions", "JacobianMatch", "LogDet"]
