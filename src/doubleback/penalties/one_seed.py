"""Penalties R = p(J*v): which v, which p (theory §3), and the head (∂v/∂out)* h (theory §4).

Each penalty is a small record with

    extras             how many arguments of the call are its own (labels, targets)
    varying            whether v depends on the network's output
    seed(out, *e)      v, shaped like `out`
    head(out, h, *e)   (∂v/∂out)* h, where v varies
    measure(ξ, *e)     p per example, and q₀ = ∇p
    at(out, *e)        the same where p sees the output too
    pull(…, *e)        the gradient of e itself, where it is asked for
    check(out, x, *e)  raises before anything runs on a wrong argument
    fingerprint()      a key of its numbers, None where a caller's code is part of it
    program(request)   what computes it with the network

And `Thinning`: a penalty on some calls and some rows only, with the weight that makes it right on
average.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import BatchNorm, TorchDispatchMode, pytree
from ..dtypes import HALF, accumulation, is_half, lifted
from ..errors import InputError
from ..graph import draws
from ..run import CallersProgram, FourSweeps, Request, refuse_others, remember
from ..spaces import Euclidean, per_example
from .losses import (
    PER_EXAMPLE,
    Callback,
    Deviation,
    Loss,
    LossName,
    Norm,
    NormLike,
    Reduction,
    SquaredNorm,
    as_norm,
    fingerprint,
    make_loss,
)

REDUCTIONS = ("mean", "sum", "none")


class _Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn inside."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= draws(func)
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """For a v that is computed a second time, for its derivative."""
        if self.drew:
            raise InputError(
                "v draws random numbers and has a derivative, which would see other numbers: draw "
                "before, and pass what was drawn as an argument (extras=)"
            )


class Penalty(ABC):
    """What `Penalised` asks of a penalty; see the module's docstring.

    An example is a row of the penalised input, along its first axis; several inputs have as many
    rows each. The output may have other rows (atoms in, molecules out): p then measures, for each
    row of the input, the derivative of ⟨v, out⟩ summed over all rows of the output, and the mean
    is that over the input's rows.
    """

    extras: int = 0
    varying: bool = False
    in_seed: tuple[int, ...] = ()  # which extras enter a v that does not vary with the output
    symmetric: bool = False  # whether ∂v/∂out is known to be, as that of a gradient is
    needs_examples: bool = False  # whether a batch without any has to run on autograd
    chance: str | None = None  # why its numbers are no function of weights and inputs alone
    carries: bool = False  # whether a call goes on from what the last one left
    no_graph: str | None = None  # why a CUDA graph cannot compute it
    one_seed: bool = True  # whether one v is all there is: autograd takes the same products then
    iterations: int = 0  # rounds of a power iteration before the sweeps

    def __init__(self, norm: NormLike | None = None, reduction: Reduction = "mean") -> None:
        if reduction not in REDUCTIONS:
            raise InputError(f"reduction must be one of {REDUCTIONS}, not {reduction!r}")
        self.norm = as_norm(norm if norm is not None else SquaredNorm())
        self.reduction = reduction

    def program(self, request: Request) -> Any:
        """The four sweeps with this penalty: all of them flat where no code of a caller's is part
        of them, else flat around it."""
        if self.fingerprint() is None or not request.known:
            return request.phased(
                lambda plan, replay: CallersProgram(
                    plan, self, request.debug, asked=request.asked, replay=replay
                ),
                True, False,
            )  # fmt: skip
        return request.whole(
            lambda plan: FourSweeps(plan, self, request.debug, asked=request.asked)
        )

    def afresh(self) -> Penalty:
        """The same penalty, which goes on from nothing that an earlier call left."""
        return self

    def at(self, out: Tensor | None, *extra: Any) -> Penalty:
        """The penalty whose p knows this output and these extras; itself where p sees ξ alone."""
        return self

    @abstractmethod
    def seed(self, out: Tensor, *extra: Tensor) -> Tensor: ...

    def head(self, out: Tensor, h: Tensor, *extra: Tensor) -> Tensor | None:
        """(∂v/∂out)* h by autograd on the head alone: C numbers per example."""
        with torch.enable_grad():
            leaf = out.detach().requires_grad_()
            with _Draws() as draws:
                v = self.seed(leaf, *extra)
            refuse_others("v", v, leaf)
            if not v.requires_grad:
                return None
            draws.refuse()
            return torch.autograd.grad(v, leaf, h.to(v.dtype), allow_unused=True)[0]

    def measure(self, xi: Sequence[Tensor], *extra: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.norm.measure(xi)

    def value(self, xi: Sequence[Tensor], *extra: Tensor) -> Tensor:
        """p per example, differentiably: what the autograd oracle uses."""
        return self.norm.value(xi)

    @property
    def coupled(self) -> bool:
        """Whether the values of several examples may depend on one another's ξ and are weighted
        differently: then Σ_b ḡ_b ∇p_b is not ḡ⊙∇Σp, and has to be taken with ḡ at hand."""
        ours = type(self).__module__.rpartition(".")[0] == __package__
        return self.reduction == "none" and not (ours and type(self.norm) in PER_EXAMPLE)

    def weighted(
        self, q0: Sequence[Tensor], xi: Sequence[Tensor], weights: Tensor, *extra: Any
    ) -> list[Tensor]:
        """Σ_b ḡ_b ∇p_b; q0: ∇Σ_b p_b. ξ is read where the penalty is `coupled`."""
        if not self.coupled:
            shaped = (weights.reshape(-1, *(1,) * (q.dim() - 1)) for q in q0)
            return [(by * q).to(q.dtype) for by, q in zip(shaped, q0, strict=True)]
        with torch.enable_grad():
            leaves = [u.detach().requires_grad_() for u in xi]
            values = self.value(leaves, *extra)
            if not values.requires_grad:
                return [torch.zeros_like(u) for u in xi]
            along = weights.to(values.dtype)
            grads = torch.autograd.grad(values, leaves, along, allow_unused=True)
        return [torch.zeros_like(u) if g is None else g for u, g in zip(xi, grads, strict=True)]

    def pull(
        self, asked: Sequence[int], out: Tensor, h: Tensor | None, xi: Sequence[Tensor],
        weights: Tensor, *extra: Any,
    ) -> list[Tensor | None]:  # fmt: skip
        """∇ₑ Σ_b ḡ_b p(J*v) = (∂v/∂e)* h + ∂p/∂e* ḡ, at fixed ξ and with h = J(ḡ⊙∇p), by autograd
        on v and p alone. asked: the places of the e among the flattened extras."""
        leaves, spec = pytree.tree_flatten(extra)
        with torch.enable_grad():
            for i in asked:
                leaves[i] = leaves[i].detach().requires_grad_()
            given = pytree.tree_unflatten(leaves, spec)
            pairs = [(self.value(xi, *given), weights)]
            if h is not None:
                with _Draws() as draws:
                    v = self.oracle_seed(out.detach().requires_grad_(), *given)
                if v.requires_grad:
                    draws.refuse()
                pairs.append((v, h))
            pairs = [(end, along.to(end.dtype)) for end, along in pairs if end.requires_grad]
            if not pairs:
                return [None] * len(asked)
            ends, along = zip(*pairs, strict=True)
            chosen = [leaves[i] for i in asked]
            return list(torch.autograd.grad(ends, chosen, along, allow_unused=True))

    def oracle_seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        """v as autograd finds it, for the oracle."""
        return self.seed(out, *extra)

    def oracle_seeds(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Sequence[Tensor]:
        """Every v whose penalty p(J*v) adds to the total, for the oracle."""
        return [self.oracle_seed(out, *extra)]

    def oracle_values(
        self, out: Tensor, pull: Callable[..., list[Tensor]], *extra: Any
    ) -> Tensor | None:
        """p per example, for the oracle of a penalty that is no sum of p(J*v) over `oracle_seeds`.
        pull(v, graph) is J*v, differentiable for None, not for False."""
        return None

    def seeds_from(self, carried: dict) -> Callable[..., Sequence[Tensor]] | None:
        """`oracle_seeds` that go on from what earlier calls left in `carried`, for penalties that
        do so."""
        return None

    def seeds_along(
        self, out: Tensor, tangent: Tensor, *extra: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every v with its derivative (∂v/∂out) t along a tangent t of the output, None for zero;
        of penalties whose ∂v/∂out is `symmetric`, so that the head, its adjoint, gives it."""
        yield self.seed(out, *extra), self.head(out, tangent, *extra) if self.varying else None

    def by_row(self, out: Tensor, x: Sequence[Tensor], *extra: Any) -> list[Tensor]:
        """What a caller's code makes of each row: v, and p at ξ = x; nothing where none runs."""
        if self.fingerprint() is not None:
            return []
        with torch.enable_grad():
            leaf = out.detach().requires_grad_()
            seeds = [self.oracle_seed(leaf, *extra)] if self.one_seed else []
            rows = (*seeds, self.value([t.detach() for t in x], *extra))
        return [t.detach() for t in rows]

    def seed_degree(self, degree: int) -> int | None:
        """The degree of v as a polynomial in whatever the output is one of degree `degree` in; None
        where v is none, or it is not known."""
        return None

    def trial(
        self, out: Tensor, x: Tensor, classes: int | None = None
    ) -> tuple[Tensor, ...] | None:
        """Random extras that fit this output and input, for a call that only tries the network out;
        None where it is not known what they have to be. classes: how many labels tell apart."""
        return None if self.extras else ()

    def pulls(self, out_shape: Sequence[int]) -> int | None:
        """How many v autograd would pull through the network, one by one; None where that is no way
        for this penalty."""
        return 1 if self.one_seed else None

    def quick_seed(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Tensor | None:
        """The one v in the fewest operations, for networks that run on autograd by choice; None
        where `quick_total` or `oracle_values` is the quicker way."""
        if not self.one_seed or type(self).oracle_values is not Penalty.oracle_values:
            return None
        seeds = self.oracle_seeds(out, x, *extra)
        return seeds[0] if len(seeds) == 1 else None

    def quick_total(self, out: Tensor, *extra: Tensor) -> Tensor | None:
        """A scalar whose gradient in the output v is, where there is one for all examples."""
        return None

    def quick_value(self, xi: Sequence[Tensor], *extra: Tensor) -> tuple[Tensor, float]:
        """`reduce(value(ξ))` in the fewest operations, as a tensor and the number to multiply it
        by."""
        if type(self).value is not Penalty.value:
            return self.reduce(self.value(xi, *extra)), 1.0
        return self._quick_value(xi)

    def _quick_value(self, xi: Sequence[Tensor]) -> tuple[Tensor, float]:
        norm: Any = self.norm
        if self._sums_squares(xi):
            return lifted(xi[0]).square().sum(), self._share(xi[0])
        plain = len(xi) == 1 and xi[0].dim() > 1 and type(norm) in (Norm, Deviation)
        if plain and type(norm.space) is Euclidean:  # PyTorch's has the derivative 0 at 0, too
            lengths = torch.linalg.vector_norm(lifted(xi[0]).flatten(1), dim=1)
            return self.reduce(norm.of_length(lengths)), 1.0
        return self.reduce(norm.value(xi)), 1.0

    def _sums_squares(self, xi: Sequence[Tensor]) -> bool:
        """Whether the penalty is Σ ξᵢ², over the number of examples or not."""
        norm, own = self.norm, type(self).reduce is not Penalty.reduce
        square = type(norm) is SquaredNorm and type(norm.space) is Euclidean
        some = len(xi) == 1 and xi[0].dim() > 0 and xi[0].shape[0] > 0
        return square and some and self.reduction != "none" and not own

    def _share(self, x: Tensor) -> float:
        """What one example counts for in a sum over all of them."""
        return 1 / x.shape[0] if self.reduction == "mean" else 1.0

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        """Raise an `InputError` where the arguments do not fit: here, where several inputs do not
        have one row per example each. A penalty of your own calls this one first."""
        shapes = [tuple(t.shape) for t in x]
        if len({shape[:1] for shape in shapes}) > 1:
            raise InputError(
                f"wrt names inputs of different leading sizes, {shapes}, but {type(self).__name__} "
                "measures example by example, one row of each; penalise one of them, or take the "
                "gradients themselves from db.WithGradient(net, wrt=...) and write the penalty in "
                "plain PyTorch"
            )

    def quick_check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        """The same before `quick_seed` or `quick_total`, which may look at numbers themselves."""
        self.check(out_shape, x, *extra)

    def fingerprint(self) -> Hashable | None:
        """A key of all that the numbers depend on: class, attributes, norm, space and loss; None
        where a caller's code runs, which is then to be called as it is every time."""
        return fingerprint(self)

    def refuse_others(self, v: Tensor, out: Tensor, given: Sequence[Any]) -> None:
        """Raise where v depends on a tensor that requires grad and is none of its arguments."""
        own = [t for t in pytree.tree_leaves(tuple(given)) if isinstance(t, Tensor)]
        refuse_others("v", v, out, *own)

    @property
    def own_loss(self) -> Loss | None:
        """The loss whose gradient v is, where it is one: the classical penalty, whose first extra
        is the loss's target."""
        return None

    def shares(self, loss: Any) -> bool:
        """Whether v is the gradient of this very loss, so that it is computed once for both."""
        return loss is not None and self.own_loss is loss

    def reduce(self, values: Tensor) -> Tensor:
        if self.reduction == "mean":
            return values.mean()
        return values.sum() if self.reduction == "sum" else values

    def unreduce(self, grad: Tensor, batch: int) -> Tensor:
        """The gradient with respect to each example's value."""
        if self.reduction == "mean":
            return (grad / batch).expand(batch)
        return grad.expand(batch) if self.reduction == "sum" else grad

    def __repr__(self) -> str:
        return f"{type(self).__name__}(norm={self.norm}, reduction={self.reduction!r})"


class LossGradient(Penalty):
    """Classical double backpropagation: R = p(∇ₓℓ(net(x), y)), ℓ the loss of one example.

    loss: "cross_entropy" (with label_smoothing, class_weights, ignore_index), "mse" (‖out−y‖²),
    "bce" (with logits), or a callable (out, y) → one loss per example. A y that requires grad
    (soft labels) receives its gradient.

    >>> import torch, doubleback as db
    >>> model = db.Penalised(torch.nn.Linear(3, 4), db.LossGradient("cross_entropy"))
    >>> out, penalty = model(torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0]))
    >>> penalty.shape
    torch.Size([])
    """

    extras = 1
    varying = True
    symmetric = True

    def __init__(
        self,
        loss: LossName | Loss | Callable[[Tensor, Any], Tensor] = "cross_entropy",
        norm: NormLike | None = None,
        reduction: Reduction = "mean",
        *,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(norm, reduction)
        self.loss: Loss = make_loss(loss, label_smoothing, class_weights, ignore_index)

    @property
    def own_loss(self) -> Loss | None:
        return self.loss

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        return self.loss.gradient(out, extra[0])

    def oracle_seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        values = self.loss.values(out, extra[0])
        return torch.autograd.grad(values.sum(), out, create_graph=True)[0]

    def quick_seed(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Tensor | None:
        return self.loss.quick_gradient(out, extra[0])

    def quick_total(self, out: Tensor, *extra: Tensor) -> Tensor | None:
        return self.loss.total(out, extra[0])

    def quick_check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        if len(x) > 1:
            super().check(out_shape, x, *extra)
        self.loss.quick_check(out_shape, extra[0])

    def head(self, out: Tensor, h: Tensor, *extra: Tensor) -> Tensor | None:
        return self.loss.hessian(out, extra[0], h)

    def seed_degree(self, degree: int) -> int | None:
        return self.loss.gradient_degree(degree)

    def trial(
        self, out: Tensor, x: Tensor, classes: int | None = None
    ) -> tuple[Tensor, ...] | None:
        labels = self.loss.trial(out, classes)
        return None if labels is None else (labels,)

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        self.loss.check(out_shape, extra[0])


class _OneEntry(Penalty):
    """v = e⟨index⟩, the same for every example; "sum": ones."""

    instead = ""  # what else there is for several outputs

    def __init__(
        self, index: Any = None, norm: NormLike | None = None, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(norm, reduction)
        if index is not None and index != "sum" and not _is_index(index):
            raise InputError(f'index must be an int, a tuple of ints or "sum", not {index!r}')
        self.index: Any = index

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        if self.index is None or self.index == "sum":
            return torch.ones_like(out)
        # a comparison of positions, not an assignment, so that it flattens into one graph
        v = torch.ones((), dtype=out.dtype, device=out.device)
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        for axis, (i, size) in enumerate(zip(index, out.shape[1:], strict=True), start=1):
            hot = (torch.arange(size, device=out.device) == i % size).to(out.dtype)
            v = v * hot.reshape(-1, *(1,) * (out.dim() - axis - 1))
        return v.expand(out.shape).contiguous()

    def quick_seed(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Tensor | None:
        return self.seed(out)

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        entry = tuple(out_shape[1:])
        name = type(self).__name__
        if self.index == "sum":
            return
        if self.index is None:
            if any(size != 1 for size in entry):
                raise InputError(
                    f"{name}() needs one number per example, but the output has shape "
                    f"{tuple(out_shape)}; choose an entry: {name}(index=...), or their "
                    f'sum: {name}(index="sum"){self.instead}'
                )
            return
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        if len(index) != len(entry):
            raise InputError(
                f"{name}(index={self.index!r}) gives {len(index)} coordinates, one example of the "
                f"output has shape {entry}"
            )
        for i, size in zip(index, entry, strict=True):
            if not -size <= i < size:
                raise InputError(
                    f"{name}: index {i} is out of range for an output of shape {tuple(out_shape)}"
                )


def _is_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, int) and not isinstance(i, bool) for i in parts)


class OutputGradient(_OneEntry):
    """R = p(∇ₓ out⟨index⟩); with index=None the network is a scalar critic (R1, WGAN-GP), with
    index="sum" a critic of patches, of whose outputs the sum is differentiated.

    >>> import torch, doubleback as db
    >>> critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> gp = db.Penalised(critic, db.OutputGradient(norm=db.Deviation(1.0)))
    >>> score, penalty = gp(torch.randn(4, 2))
    """

    def seed_degree(self, degree: int) -> int | None:
        return 0


class GradientMatch(_OneEntry):
    """Sobolev training and force matching: R = p(∇ₓ out⟨index⟩ − target).

    The target, shaped like x (a tuple for several inputs), is the call's last argument. One that
    requires grad receives its gradient, ∂R/∂target = −∇p. For several outputs: `JacobianMatch`.
    """

    extras = 1
    instead = ", or match the whole Jacobian: JacobianMatch()"

    def trial(
        self, out: Tensor, x: Tensor, classes: int | None = None
    ) -> tuple[Tensor, ...] | None:
        return (torch.randn_like(x),)

    def _difference(self, xi: Sequence[Tensor], target: Any) -> list[Tensor]:
        return [u - t.to(u.dtype) for u, t in zip(xi, each(target), strict=True)]

    def measure(self, xi: Sequence[Tensor], *extra: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.norm.measure(self._difference(xi, extra[0]))

    def value(self, xi: Sequence[Tensor], *extra: Tensor) -> Tensor:
        return self.norm.value(self._difference(xi, extra[0]))

    def quick_value(self, xi: Sequence[Tensor], *extra: Tensor) -> tuple[Tensor, float]:
        target = extra[0]
        same = isinstance(target, Tensor) and target.dtype is xi[0].dtype
        if same and target.dtype not in HALF and self._sums_squares(xi):
            return F.mse_loss(xi[0], target, reduction="sum"), self._share(target)
        return self._quick_value(self._difference(xi, target))

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        _check_like("GradientMatch's target", x, each(extra[0]))


class BilinearForm(Penalty):
    """R = ⟨w, J q⟩ = ⟨J*w, q⟩ per example: FFJORD's εᵀJε, log-determinant series.

    The call's last two arguments are w, shaped like the output, and q, shaped like x. Those that
    require grad receive theirs, ∂R/∂w = J q and ∂R/∂q = J*w.
    """

    extras = 2
    in_seed = (0,)

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__(None, reduction)

    def trial(
        self, out: Tensor, x: Tensor, classes: int | None = None
    ) -> tuple[Tensor, ...] | None:
        return torch.randn_like(out), torch.randn_like(x)

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        return extra[0].to(out.dtype)

    def quick_seed(self, out: Tensor, x: Sequence[Tensor], *extra: Tensor) -> Tensor | None:
        return extra[0] if extra[0].dtype is out.dtype else extra[0].to(out.dtype)

    def quick_check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        if len(x) > 1 or extra[0].shape != out_shape or extra[1].shape != x[0].shape:
            self.check(out_shape, x, *extra)

    def measure(self, xi: Sequence[Tensor], *extra: Tensor) -> tuple[Tensor, list[Tensor]]:
        along = [q.to(u.dtype) for u, q in zip(xi, each(extra[1]), strict=True)]
        return self.value(xi, *extra), along

    def value(self, xi: Sequence[Tensor], *extra: Tensor) -> Tensor:
        parts = [per_example(u * q) for u, q in zip(xi, each(extra[1]), strict=True)]
        return sum(parts[1:], parts[0])

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        super().check(out_shape, x, *extra)
        w, q = extra
        if not isinstance(w, Tensor) or tuple(w.shape) != tuple(out_shape):
            shape = tuple(w.shape) if isinstance(w, Tensor) else type(w).__name__
            raise InputError(
                f"BilinearForm's w must have the output's shape {tuple(out_shape)}, not {shape}"
            )
        _check_like("BilinearForm's q", x, each(q))


class Custom(Penalty):
    """R = p(J*v) with your own v and p.

    v(out, *extra) → a tensor shaped like out, differentiable in out where it depends on it;
    p(ξ) → one number per example, or any norm; with `sees_output`, p(ξ, out, *extra).
    `extras` says how many of the call's last arguments go to them; those that require grad receive
    theirs, and so do the network's parameters through out.
    """

    varying = True

    def __init__(
        self,
        v: Callable[..., Tensor],
        p: NormLike | Callable[..., Tensor] | None = None,
        *,
        extras: int = 0,
        sees_output: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(p, reduction)
        if not callable(v):
            raise InputError("Custom needs a callable v(out, *extra)")
        if sees_output and not isinstance(self.norm, Callback):
            raise InputError("Custom with sees_output needs a callable p(ξ, out, *extra)")
        self.v = v
        self.extras = extras
        self.sees_output = sees_output

    def at(self, out: Tensor | None, *extra: Any) -> Penalty:
        if not self.sees_output:
            return self
        own, p = copy.copy(self), self.norm.p
        own.norm = Callback(lambda xi: p(xi, out, *extra))
        return own

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        v = self.v(out, *extra)
        if not isinstance(v, Tensor) or v.shape != out.shape:
            given = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise InputError(
                f"Custom: v(out) must have the output's shape {tuple(out.shape)}, not {given}"
            )
        return v


def each(given: Any) -> Sequence[Any]:
    """What was given for each penalised input: a tuple, or the one thing itself."""
    return given if isinstance(given, (tuple, list)) else (given,)


def shapes_of(given: Sequence[Any]) -> list[Any]:
    """For comparisons and messages; of what is no tensor its type."""
    return [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in given]


def _check_like(what: str, x: Sequence[Tensor], given: Sequence[Any]) -> None:
    wanted, shapes = shapes_of(x), shapes_of(given)
    if wanted != shapes:
        raise InputError(f"{what} must be shaped like the penalised input, {wanted}, not {shapes}")


def check_whole(name: str, number: Any, least: int, or_none: bool = False) -> None:
    """Raise unless it is a whole number, and large enough."""
    if number is None and or_none:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        none = ", or None" if or_none else ""
        raise InputError(f"{name} must be an int, at least {least}{none}, not {number!r}")


def check_generator(generator: Any) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator must be a torch.Generator, not {generator!r}")


# ------------------------------------------------------------- on some calls and some rows only


@dataclass(frozen=True)
class Thinning:
    """every: one call out of so many is penalised, the first one to begin with; fraction: of its
    rows, drawn by `generator` without replacement. The weights are 1 over the chance of either, so
    that the average over calls and draws is the whole penalty, and so for its gradient."""

    every: int = 1
    fraction: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        fraction = self.fraction
        check_whole("every", self.every, 1)
        number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if not number or not 0 < fraction <= 1:
            raise InputError(f"fraction must be above 0 and at most 1, not {fraction!r}")
        check_generator(self.generator)

    def __bool__(self) -> bool:
        return self.every > 1 or self.fraction < 1

    def __str__(self) -> str:
        """In words, for `explain`."""
        told = [] if self.every == 1 else [f"1 of {self.every} calls"]
        told += [] if self.fraction == 1 else [f"{100 * self.fraction:.3g} % of the rows"]
        return " and ".join(told)

    def check(self, reduction: str) -> None:
        if self.fraction < 1 and reduction == "none":
            raise InputError(
                'fraction leaves examples without a value: use reduction="mean" or "sum"'
            )

    def price(self, full: float) -> float:
        """What an average call costs in plain steps, where a penalised one costs `full` of them."""
        return 1 + self.fraction / self.every * (full - 1)

    def weight(self, batch: int, count: int, reduction: str) -> float:
        """What the penalty of `count` rows is multiplied by."""
        return self.every * (batch / count if reduction == "sum" else 1.0)

    def count(self, batch: int) -> int:
        """How many rows of a batch are penalised."""
        return min(batch, max(1, math.floor(self.fraction * batch + 0.5)))

    def draw(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(the rows that are penalised, the others), each in order."""
        where = device if self.generator is None else self.generator.device
        order = torch.randperm(batch, generator=self.generator, device=where).to(device)
        count = self.count(batch)
        return order[:count].sort().values, order[count:].sort().values


def nothing(out: Tensor, batch: int, reduction: str) -> Tensor:
    """The penalty of a call that has none: zero, and as differentiable as any."""
    shape = (batch,) if reduction == "none" else ()
    dtype = accumulation(out.dtype).to_real()
    return torch.zeros(shape, dtype=dtype, device=out.device, requires_grad=True)


def at_rows(given: tuple, rows: Tensor, batch: int, shared: Collection[int | str] = ()) -> tuple:
    """(args, kwargs) of a call at some rows; what is named in `shared`, by position or keyword, or
    has no row for each example, stays as it is."""

    def cut(t: Tensor) -> Tensor:
        return t[rows] if t.dim() and t.shape[0] == batch else t

    def each(key: int | str, argument: Any) -> Any:
        return argument if key in shared else pytree.tree_map_only(Tensor, cut, argument)

    args, kwargs = given
    by_name = {key: each(key, argument) for key, argument in kwargs.items()}
    return tuple(each(i, argument) for i, argument in enumerate(args)), by_name


def joined(parts: tuple[Any, Any], rows: tuple[Tensor, Tensor]) -> Any:
    """A network's result from those at some rows and at the others."""
    order = torch.cat(rows).argsort()

    def join(some: Any, others: Any) -> Any:
        if not isinstance(some, Tensor):
            return some
        for part, t in zip(rows, (some, others), strict=True):
            _refuse_shape(t, len(part))
        return torch.cat((some, others))[order]

    return pytree.tree_map(join, *parts)


def _refuse_shape(out: Tensor, examples: int) -> None:
    if out.shape[:1] != (examples,):
        raise InputError(
            f"fraction needs a row of every output for each example: {examples} examples have one "
            f"of shape {tuple(out.shape)}"
        )


class Apart:
    """When to try whether examples depend on one another. No shape tells an argument with a row for
    each example from one that all share and that is as long as the batch, and numbers change in
    training: so at the first, second, fourth, … call of a kind, and as soon as the rows of an
    argument differ that were all the same before, which proved nothing about it."""

    def __init__(self) -> None:
        self.kinds: dict[Any, tuple[int, set[int]]] = {}

    def due(self, given: tuple, shared: Collection[int | str]) -> bool:
        """Whether this call is to be tried; counts it."""
        leaves, spec = pytree.tree_flatten(given)
        tensors = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor)}
        sizes = tuple((i, tuple(t.shape), t.dtype) for i, t in tensors.items())
        key = (spec, sizes, tuple(shared))
        calls, alike = self.kinds.get(key, (0, set(tensors)))
        told = {i for i in alike if _differs(tensors[i])}
        remember(self.kinds, key, (calls + 1, alike - told))
        return bool(told) or calls & (calls + 1) == 0


def _differs(t: Tensor) -> bool:
    """Whether not all rows are the same."""
    return t.dim() > 0 and bool((t[1:] != t[:1]).any())


def refuse_dependent(
    net: nn.Module, run: Callable[[tuple], Any], given: tuple, rows: tuple[Tensor, Tensor],
    cut: Callable[[Tensor], tuple],
) -> None:  # fmt: skip
    """Raise unless what `run` makes of some rows of a call stays when those rows take the place of
    all others, cut(index) being the call at any rows. In the mode the network is in, or, where that
    gives other numbers each time, in evaluation mode; buffers and generators are put back."""
    for name, module in net.named_modules():
        if isinstance(module, BatchNorm) and module.training:
            raise InputError(
                f"fraction: {type(module).__name__} '{name}' computes its statistics from the "
                "whole batch, which a part of it does not have; use every, or another norm"
            )
    batch = len(rows[0]) + len(rows[1])

    def tried(call: tuple) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(_cuda(given)), _buffers_kept(net):
            results = [t for t in pytree.tree_leaves(run(call)) if isinstance(t, Tensor)]
        for t in results:
            _refuse_shape(t, batch)
        return results

    def agree() -> bool:
        whole = tried(given)
        for kept, others in (rows, rows[::-1]):
            index = torch.arange(batch, device=kept.device)
            index[others] = kept[index[: len(others)] % len(kept)]
            if not _close(whole, tried(cut(index)), kept):
                return False
        return True

    modes = {module: module.training for module in net.modules()}
    try:
        if agree():
            return
        if net.training and not _close(tried(given), tried(given)):  # by chance
            net.eval()
            if agree():
                return
    finally:
        for module, mode in modes.items():
            module.training = mode
    raise InputError(
        "fraction: what the network or the penalty computes for an example changes with the other "
        "examples of the batch (or by chance), so that no part of a batch has its penalty; use "
        "every. An argument as long as the batch that all examples share is to be named: shared="
    )


def _close(
    one: Sequence[Tensor], two: Sequence[Tensor], rows: Tensor | slice = slice(None)
) -> bool:
    """Whether the rows of all floating-point tensors agree; NaN is no proof."""
    for a, b in zip(one, two, strict=True):
        if a.is_floating_point() or a.is_complex():
            bound = 0.1 if is_half(a.dtype) else 1e-3
            if not (a[rows] - b[rows]).norm() <= bound * a[rows].norm():
                return False
    return True


@contextmanager
def _buffers_kept(net: nn.Module) -> Iterator[None]:
    """What a call writes into buffers is undone."""
    held = [(m, *named) for m in net.modules() for named in m.named_buffers(recurse=False)]
    before = [t.clone() for *_, t in held]
    try:
        yield
    finally:
        for (module, name, buffer), old in zip(held, before, strict=True):
            setattr(module, name, buffer)
            if not torch.equal(buffer, old):
                buffer.copy_(old)


def _cuda(given: Any) -> list[torch.device]:
    return list(
        {t.device for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and t.is_cuda}
    )
