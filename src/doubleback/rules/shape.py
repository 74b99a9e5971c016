"""Operators that move entries about or average them: shape operators, linear, so that the
transpose is all there is to say and often not even that; pooling and resampling, of which
averages and interpolation are linear and a maximum keeps its indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._torch import AutoDispatchBelowAutograd
from ..kernels import library
from ..operators import AveragePool, InvertibleDownsampling, InvertibleUpsampling
from .structures import base, fold, linear
from .table import Call, Rule, Structure, Tensors, alone, light, named, run, sum_to, tangent_of

aten = torch.ops.aten

library.define("stop_gradient(Tensor x) -> Tensor")
library.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
stop_gradient = torch.ops.doubleback.stop_gradient.default


def _stop_gradient_under_autograd(x: Tensor) -> Tensor:
    with AutoDispatchBelowAutograd():
        return stop_gradient(x)


library.impl("stop_gradient", _stop_gradient_under_autograd, "Autograd")


def _reshape() -> Rule:
    """A view by another shape; a copy where the sweeps' layout does not allow a view."""

    def forward(call: Call) -> tuple[Tensor, None]:
        return call.inputs[0].reshape(call.argument(1, "size")), None  # type: ignore[union-attr]

    return linear(
        lambda call, y: y.reshape(call.metas[0].shape),
        tangent=lambda call, q: q[0].reshape(call.argument(1, "size")),  # type: ignore[union-attr]
        forward=forward,
        same_entries=True,
    )


def _same_entries() -> Rule:
    """squeeze, unsqueeze, flatten: the same entries under another shape."""
    return linear(lambda call, y: y.reshape(call.metas[0].shape), same_entries=True)


def _permute() -> Rule:
    def transpose(call: Call, y: Tensor) -> Tensor:
        dims = [d % y.dim() for d in call.argument(1, "dims")]
        inverse = [0] * len(dims)
        for new, old in enumerate(dims):
            inverse[old] = new
        return y.permute(inverse)

    return linear(transpose)


def _cat() -> Rule:
    """Concatenation; the transpose cuts. Pieces without a tangent are zeros."""

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        dim = call.argument(1, "dim", 0)
        grads: list[Tensor | None] = []
        start = 0
        for meta, want in zip(call.metas, wanted, strict=True):
            if meta.shape == (0,):  # cat skips empty one-dimensional tensors
                grads.append(torch.zeros(0, dtype=meta.dtype, device=meta.device) if want else None)
                continue
            size = meta.shape[dim]
            grads.append(y.narrow(dim, start, size).to(meta.dtype) if want else None)
            start += size
        return grads

    return linear(backward=backward)


def _stack() -> Rule:
    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        parts = y.unbind(call.argument(1, "dim", 0))
        return [part if want else None for part, want in zip(parts, wanted, strict=True)]

    return linear(backward=backward)


def _pieces(join: str) -> Rule:
    """split, chunk, unbind: the transpose joins the pieces, absent ones as zeros. What was split is
    put together as it lay in memory: behind a permutation, as of q, k and v, another copy would
    follow."""

    def forward(call: Call) -> tuple[Any, tuple[int, ...] | None]:
        strides = call.value(0).stride()
        order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
        return call.apply(call.inputs), None if order == tuple(range(len(order))) else order

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        meta = call.metas[0]
        if join == "stack":
            dim = call.argument(1, "dim", 0)
            shape = list(meta.shape)
            del shape[dim % len(shape)]
            sizes = [shape] * len(y)
        else:
            dim = call.argument(2, "dim", 0)
            lengths = _lengths(call, len(y), meta.shape[dim])
            sizes = [_resized(meta.shape, dim, n) for n in lengths]
        like = next(part for part in y if part is not None)
        parts = [
            part if part is not None else like.new_zeros(size)
            for part, size in zip(y, sizes, strict=True)
        ]
        rank = len(meta.shape)
        return (_joined(parts, dim % rank, call.saved or range(rank), join == "stack"),)

    return linear(backward=backward, forward=forward)


def _joined(parts: Sequence[Tensor], dim: int, order: Sequence[int], stack: bool) -> Tensor:
    """The parts joined along axis `dim`, with the axes in this order in memory."""
    kept = [axis - (axis > dim) for axis in order if axis != dim] if stack else list(order)
    moved = [part.permute(kept) for part in parts]
    at = order.index(dim)
    whole = torch.stack(moved, at) if stack else torch.cat(moved, at)
    return whole.permute([order.index(axis) for axis in range(len(order))])


def _lengths(call: Call, count: int, total: int) -> list[int]:
    asked = call.argument(1, "split_size")
    if asked is None:
        asked = call.argument(1, "split_sizes")
    if isinstance(asked, (list, tuple)):
        return list(asked)
    if call.node.op._schema.name == "aten::chunk":
        asked = -(-total // asked)
    return [min(asked, total - i * asked) for i in range(count)]


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    new = list(shape)
    new[dim] = size
    return new


def _slice() -> Rule:
    def transpose(call: Call, y: Tensor) -> Tensor:
        shape = call.metas[0].shape
        dim = call.argument(1, "dim", 0)
        start, end = call.argument(2, "start"), call.argument(3, "end")
        step = call.argument(4, "step", 1)
        end = shape[dim] if end is None else end
        return aten.slice_backward(y, list(shape), dim, start or 0, end, step)

    return linear(transpose)


def _select() -> Rule:
    return linear(
        lambda call, y: aten.select_backward(
            y, list(call.metas[0].shape), call.argument(1, "dim"), call.argument(2, "index")
        )
    )


def _scatter(part: Callable[..., Tensor]) -> Rule:
    """y = u with w in the place of a part: the transpose cuts the part out. (Autograd has no
    derivative of these operators at complex numbers.)"""

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        cut = part(y, *call.node.args[2:], **call.node.kwargs)
        rest = call.apply([base(y), torch.zeros_like(cut)]) if wanted[0] else None
        return rest, cut if wanted[1] else None

    return linear(backward=backward, writes=True)


def _cast() -> Rule:
    """A change of dtype, device or layout: the transpose changes back."""

    def transpose(call: Call, y: Tensor) -> Tensor:
        meta = call.metas[0]
        return y.to(device=meta.device, dtype=meta.dtype)

    return linear(transpose, per_example=alone())


def _dropout() -> Rule:
    """y = m⊙u/(1−p) with the boolean mask m drawn in the forward sweep."""

    def forward(call: Call) -> tuple[Any, Any]:
        x, p, train = call.inputs[0], call.argument(1, "p"), call.argument(2, "train", True)
        assert x is not None
        if not train or p == 0:
            return (x.clone(), torch.ones_like(x, dtype=torch.bool)), None
        if x.is_cuda or p == 1:
            out, mask = aten.native_dropout(x, p, True)
            if not x.is_contiguous():  # in which layout is not said; from here on it is
                out, mask = (t.clone(memory_format=torch.contiguous_format) for t in (out, mask))
            return (out, mask), mask
        mask = torch.empty_like(x).bernoulli_(1 - p).bool()  # the numbers `F.dropout` draws
        return (x * mask / (1 - p), mask), mask

    def scale(call: Call, t: Tensor) -> Tensor:
        p = call.argument(1, "p")
        if call.saved is None:
            return t
        factor = 0.0 if p == 1 else 1 / (1 - p)
        if not t.is_cuda:  # its kernel returns other strides than it promises
            return t * call.saved * factor
        return aten.native_dropout_backward(t, call.saved, factor)

    return linear(
        backward=lambda call, y, wanted: (scale(call, y[0]),),
        tangent=lambda call, q: (scale(call, q[0]), None),  # type: ignore[arg-type]
        forward=forward,
        per_example=alone(),
    )


def _pad() -> Rule:
    """Padding with a constant, which has no tangent; the transpose crops."""

    def tangent(call: Call, q: Tensors) -> Tensor:
        return aten.constant_pad_nd(tangent_of(q), call.argument(1, "pad"), 0)

    def transpose(call: Call, y: Tensor) -> Tensor:
        return aten.constant_pad_nd(y, [-p for p in call.argument(1, "pad")], 0)

    def inside(call: Call) -> bool:
        return len(call.argument(1, "pad")) < 2 * len(call.metas[0].shape)

    return linear(transpose, tangent=tangent, per_example=alone(where=inside))


def _pad_by_mode() -> Rule:
    """`F.pad` in any mode: linear but for the constant that is filled in."""

    def tangent(call: Call, q: Tensors) -> Tensor:
        mode = call.argument(2, "mode", "constant")
        return aten.pad(tangent_of(q), call.argument(1, "pad"), mode)

    return linear(tangent=tangent)


def _overwrite(position: int) -> Rule:
    """copy(u, w) and fill(u, w): y = w, broadcast to the shape of u."""

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        meta = call.metas[position]
        return None, sum_to(y, meta.shape).to(meta.dtype) if wanted[position] else None

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        t = q[position]
        return None if t is None else t.to(call.metas[0].dtype).expand(call.metas[0].shape)

    return linear(backward=backward, tangent=tangent)


def _resampling(kind: type[InvertibleDownsampling] | type[InvertibleUpsampling]) -> Rule:
    """pixel_unshuffle and pixel_shuffle: each the other's transpose."""

    def operator(call: Call) -> Any:
        name = "upscale_factor" if kind is InvertibleUpsampling else "downscale_factor"
        return kind((call.argument(1, name),) * 2)

    return linear(
        lambda call, y: operator(call).transpose(None, y),
        tangent=lambda call, q: operator(call).forward(None, tangent_of(q)),
        forward=lambda call: (operator(call).forward(None, call.value(0)), None),
        per_example=alone(where=lambda call: len(call.metas[0].shape) > 3),
    )


def _stop(forward: Callable[[Call], tuple[Any, Any]] = run) -> Rule:
    """The derivative ends here: detach, comparisons' results, rounding."""

    def absent(*_: Any) -> Any:
        raise AssertionError("a stopped derivative is never taken")

    return Rule(
        Structure.CONSTANT, forward, absent, absent, reads=frozenset(), curves=lambda i, j: False
    )


def drawn_in_place(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """`x.bernoulli_(p)` as a graph tells it (`bernoulli.p`), drawn in the order of x's memory."""
    return torch.empty_like(x).bernoulli_(p, generator=generator)


def _bernoulli(call: Call) -> tuple[Tensor, None]:
    p, generator = call.argument(1, "p", 0.5), call.argument(2, "generator")
    return drawn_in_place(call.value(0), p, generator=generator), None


def _as_real(call: Call, q: Tensors) -> Tensor | None:
    """Tangents may come as conjugates yet to be taken, of which there is no such view."""
    return None if q[0] is None else torch.view_as_real(q[0].resolve_conj())


def _shapes() -> Iterator[tuple[str, Rule]]:
    same = [
        "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default",
        "flatten.using_ints", "unflatten.int", "view_as.default", "reshape_as.default",
    ]  # fmt: skip
    by_reverse_mode = [
        "reflection_pad1d.default", "reflection_pad2d.default",
        "reflection_pad3d.default", "replication_pad1d.default", "replication_pad2d.default",
        "replication_pad3d.default", "roll.default", "flip.default", "rot90.default",
        "tril.default", "triu.default", "diagonal.default", "diag_embed.default",
        "unfold.default", "im2col.default", "col2im.default", "repeat.default",
        "repeat_interleave.self_int", "repeat_interleave.Tensor", "tile.default",
        "movedim.intlist", "movedim.int", "swapaxes.default", "cumsum.default",
        "channel_shuffle.default",
        "gather.default", "index_select.default", "index.Tensor", "embedding.default",
        "take_along_dim.default", "trace.default", "broadcast_to.default",
        "real.default", "imag.default",
        "expand_as.default", "lerp.Scalar", "fft_fft.default",
        "fft_ifft.default", "fft_rfft.default", "fft_irfft.default", "fft_fft2.default",
        "fft_ifft2.default", "fft_rfft2.default", "fft_irfft2.default", "fft_fftn.default",
        "fft_ifftn.default", "fft_rfftn.default", "fft_irfftn.default", "fft_fftshift.default",
        "fft_ifftshift.default",
    ]  # fmt: skip
    writing = [
        "index_add.default", "scatter_add.default", "index_copy.default", "scatter.src",
        "masked_scatter.default",
    ]  # fmt: skip
    identical = [
        "clone.default", "contiguous.default", "alias.default", "lift_fresh_copy.default",
        "lift_fresh.default", "positive.default",
    ]  # fmt: skip
    stopped = [
        "detach.default", "sign.default", "round.default", "floor.default", "ceil.default",
        "trunc.default", "zeros_like.default", "ones_like.default", "empty_like.default",
        "full_like.default", "rand_like.default", "randn_like.default", "bernoulli.default",
        "new_zeros.default", "new_ones.default", "new_full.default",
        "new_empty.default", "heaviside.default", "fill.Scalar",
    ]  # fmt: skip
    table: dict[Rule, list[str]] = {
        linear(tangent=_as_real): ["view_as_real.default"],
        _reshape(): ["view.default", "reshape.default", "_unsafe_view.default"],
        _same_entries(): same,
        light(_permute()): ["permute.default"],
        light(
            linear(lambda call, y: y.transpose(call.argument(1, "dim0"), call.argument(2, "dim1")))
        ): ["transpose.int"],
        light(linear(lambda call, y: y.t())): ["t.default", "numpy_T.default"],
        linear(lambda call, y: sum_to(y, call.metas[0].shape)): ["expand.default"],
        _cat(): ["cat.default"],
        _stack(): ["stack.default"],
        _pieces("cat"): [
            "split.Tensor", "split_with_sizes.default", "chunk.default", "split.sizes",
        ],
        _pieces("stack"): ["unbind.int"],
        _slice(): ["slice.Tensor"],
        _select(): ["select.int"],
        light(_cast()): [
            "_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "type_as.default",
        ],
        light(_dropout()): ["native_dropout.default"],
        _pad(): ["constant_pad_nd.default"],
        _pad_by_mode(): ["pad.default"],
        _overwrite(1): ["copy.default", "fill.Tensor"],
        linear(lambda call, y: y, same_entries=True): identical,
        linear(): by_reverse_mode,
        linear(writes=True): writing,
        _scatter(aten.slice.Tensor): ["slice_scatter.default"],
        _scatter(aten.select.int): ["select_scatter.default"],
        _resampling(InvertibleDownsampling): ["pixel_unshuffle.default"],
        _resampling(InvertibleUpsampling): ["pixel_shuffle.default"],
        _stop(): stopped,
        _stop(_bernoulli): ["bernoulli.p"],
    }  # fmt: skip
    yield from named(table.items())
    yield "stop_gradient.default", _stop()


# ------------------------------------------------------------------------- pooling and resampling


def _max_pool(n: int) -> Rule:
    """y = u at the index of each window's maximum: a gather by the indices of the forward sweep."""
    pool = {1: aten.max_pool2d_with_indices, 2: aten.max_pool2d_with_indices,
            3: aten.max_pool3d_with_indices}[n]  # fmt: skip

    def options(call: Call) -> list[Any]:
        def sizes(value: Any) -> list[int]:
            items = [value] if isinstance(value, int) else list(value)
            return items * n if len(items) == 1 else items

        kernel = sizes(call.argument(1, "kernel_size"))
        stride = call.argument(2, "stride", ()) or kernel
        geometry = [kernel, sizes(stride), sizes(call.argument(3, "padding", 0)),
                 sizes(call.argument(4, "dilation", 1))]  # fmt: skip
        if n == 1:  # a row of height one
            geometry = [[fill, *part] for fill, part in zip((1, 1, 0, 1), geometry, strict=True)]
        return [*geometry, call.argument(5, "ceil_mode", False)]

    def forward(call: Call) -> tuple[Any, Tensor]:
        x = call.inputs[0]
        assert x is not None
        y, index = pool(x.unsqueeze(-2) if n == 1 else x, *options(call))
        y = y.squeeze(-2) if n == 1 else y
        saved = index.squeeze(-2) if n == 1 else index
        if call.node.many:
            return (y, saved), saved
        return y, saved

    return _by_indices(forward, spatial=n)


def _adaptive_max_pool(n: int) -> Rule:
    def forward(call: Call) -> tuple[Any, Tensor]:
        y, index = call.apply(call.inputs)
        return (y, index), index

    return _by_indices(forward, spatial=n)


def _images(n: int) -> Callable[[Call], bool]:
    """Whether the input has a batch and a channel axis before its n spatial ones."""
    return lambda call: len(call.metas[0].shape) == n + 2


def _by_indices(forward: Any, spatial: int) -> Rule:
    """q_y = q[index]; ξ_u scatters back; indices count inside each spatial plane."""

    def first(call: Call, y: Any) -> Tensor:
        return y[0] if call.node.many else y

    def order(t: Tensor) -> tuple[list[int], list[int], int]:
        """A permutation under which t is contiguous with its spatial axes side by side, its
        inverse, and the first spatial axis there: nothing is copied channels-last either."""
        n = t.dim()
        dims = list(range(n))
        if t.is_contiguous() or n < spatial + 2:
            return dims, dims, n - spatial
        channel = n - spatial - 1
        there = [*dims[:channel], *dims[channel + 1 :], channel]
        back = [there.index(i) for i in dims]
        return there, back, channel

    def planes(t: Tensor, there: Sequence[int], axis: int) -> Tensor:
        return t.permute(list(there)).flatten(axis, axis + spatial - 1)

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        y, index = first(call, y), call.saved
        there, back, axis = order(index)
        shape = [call.metas[0].shape[i] for i in there]
        size = 1
        for s in shape[axis : axis + spatial]:
            size *= s
        zero = y.new_zeros(*shape[:axis], size, *shape[axis + spatial :])
        flat = zero.scatter_add(axis, planes(index, there, axis), planes(y, there, axis))
        return (flat.reshape(shape).permute(back),)

    def tangent(call: Call, q: Tensors) -> Any:
        t, index = q[0], call.saved
        assert t is not None
        there, back, axis = order(index)
        out = planes(t, there, axis).gather(axis, planes(index, there, axis))
        out = out.reshape([index.shape[i] for i in there]).permute(back)
        return (out, None) if call.node.many else out

    return linear(
        backward=backward, tangent=tangent, forward=forward,
        structure=Structure.PIECEWISE_LINEAR, per_example=alone(where=_images(spatial)),
    )  # fmt: skip


def _average_pool(n: int) -> Rule:
    """y = the mean of each window."""

    def operator(call: Call) -> AveragePool:
        def sizes(value: Any) -> tuple[int, ...]:
            items = (value,) if isinstance(value, int) else tuple(value)
            return items * n if len(items) == 1 else items

        get = call.argument
        return AveragePool(
            sizes(get(1, "kernel_size")), sizes(get(2, "stride", ())), sizes(get(3, "padding", 0)),
            get(4, "ceil_mode", False), get(5, "count_include_pad", True),
            get(6, "divisor_override"),
        )  # fmt: skip

    rule = linear(
        lambda call, y: operator(call).transpose(None, y, call.metas[0].shape),
        tangent=lambda call, q: operator(call).forward(None, tangent_of(q)),
        forward=lambda call: (operator(call).forward(None, call.value(0)), None),
    )
    return replace(rule, seeded=fold(0, _images(n)))


def _pools() -> Iterator[tuple[str, Rule]]:
    averages = {
        1: ["adaptive_avg_pool1d.default", "upsample_nearest1d.vec", "upsample_nearest1d.default",
            "_upsample_nearest_exact1d.vec", "upsample_linear1d.vec", "upsample_linear1d.default"],
        2: ["adaptive_avg_pool2d.default", "_adaptive_avg_pool2d.default",
            "upsample_nearest2d.vec", "upsample_nearest2d.default",
            "_upsample_nearest_exact2d.vec", "upsample_bilinear2d.vec",
            "upsample_bilinear2d.default", "upsample_bicubic2d.vec", "upsample_bicubic2d.default",
            "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec"],
        3: ["adaptive_avg_pool3d.default", "_adaptive_avg_pool3d.default",
            "upsample_nearest3d.vec", "upsample_nearest3d.default",
            "_upsample_nearest_exact3d.vec", "upsample_trilinear3d.vec",
            "upsample_trilinear3d.default"],
    }  # fmt: skip
    maxima = {
        1: ["max_pool1d.default"],
        2: ["max_pool2d.default", "max_pool2d_with_indices.default"],
        3: ["max_pool3d.default", "max_pool3d_with_indices.default"],
    }
    table: list[tuple[Rule, list[str]]] = [
        (linear(per_example=alone(where=_images(n))), names) for n, names in averages.items()
    ]
    table += [(_max_pool(n), names) for n, names in maxima.items()]
    table += [(_average_pool(n), [f"avg_pool{n}d.default"]) for n in (1, 2, 3)]
    table += [(_adaptive_max_pool(n), [f"adaptive_max_pool{n}d.default"]) for n in (1, 2, 3)]
    yield from named(table)


def rules() -> Iterator[tuple[str, Rule]]:
    return chain(_shapes(), _pools())
