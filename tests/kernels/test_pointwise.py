"""g″(z)⊙h⊙ξ, g′(z)⊙h and g′(z)⊙ξ against autograd's derivatives of the stock functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from doubleback.errors import InputError
from doubleback.kernels import pointwise, second
from doubleback.kernels.pointwise import launch_bend, launch_gate, launch_onto, supports
from support.gpu import CUDA, DEVICE, TRITON, needs_triton

pytestmark = [  # raised inside Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]

# Largest error, relative to the largest entry of the exact result. float32: exp and division are
# approximate on the device. 16 bit: the last place of the result (the interpreter truncates).
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    name: str
    function: Callable[[Tensor], Tensor]
    parameters: tuple[float, ...] = ()
    from_output: bool = False
    positive: bool = False

    @property
    def label(self) -> str:
        return " ".join((self.name, *map(str, self.parameters)))


CASES = [
    Case("gelu", F.gelu),
    Case("gelu_tanh", lambda z: F.gelu(z, approximate="tanh")),
    Case("silu", F.silu),
    Case("sigmoid", torch.sigmoid, from_output=True),
    Case("tanh", torch.tanh, from_output=True),
    Case("softplus", lambda z: F.softplus(z, 2.0, 5.0), (2.0, 5.0)),
    Case("logsigmoid", F.logsigmoid),
    Case("mish", F.mish),
    Case("elu", lambda z: torch.ops.aten.elu(z, 1.3, 1.1, 0.7), (1.3, 1.1, 0.7)),
    Case("elu", F.selu, (1.6732632423543772, 1.0507009873554805, 1.0)),
    Case("elu", lambda z: F.celu(z, 0.5), (0.5, 1.0, 2.0)),  # autograd rounds α to float32
    Case("hardswish", F.hardswish),
    Case("exp", torch.exp, from_output=True),
    Case("log", torch.log, positive=True),
    Case("sin", torch.sin),
    Case("cos", torch.cos),
    Case("sqrt", torch.sqrt, from_output=True, positive=True),
    Case("rsqrt", torch.rsqrt, from_output=True, positive=True),
    Case("reciprocal", torch.reciprocal, from_output=True),
]
LABELS = [case.label for case in CASES]


def draw(case: Case, shape=(3, 401), dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """z, h, ξ; |z| is kept off 0, where powers, log and reciprocal have their pole."""
    torch.manual_seed(0)
    z, h, xi = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    z = 2 * z + 0.3 * z.sign()
    z = z.abs() if case.positive else z
    return tuple(t.to(dtype).to(DEVICE) for t in (z, h, xi))


def truth(case: Case, z: Tensor, h: Tensor, xi: Tensor) -> Tensor:
    """Reverse over reverse, in float64."""
    z, h, xi = (t.detach().double() for t in (z, h, xi))
    z.requires_grad_()
    (first,) = torch.autograd.grad(case.function(z), z, xi, create_graph=True)
    if not first.requires_grad:
        return torch.zeros_like(z)
    (second,) = torch.autograd.grad(first, z, h, allow_unused=True)
    return torch.zeros_like(z) if second is None else second


def slope(case: Case, z: Tensor, y: Tensor) -> Tensor:
    """g′⊙y, in float64."""
    z = z.detach().double().requires_grad_()
    return torch.autograd.grad(case.function(z), z, y.double())[0]


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor, *parameters: float) -> Tensor:
    return launch_bend(name, z, h, xi, parameters)[0]


def error(found: Tensor, exact: Tensor) -> float:
    scale = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return ((found.double() - exact).abs().max() / scale).item()


def argument(case: Case, z: Tensor) -> Tensor:
    return case.function(z) if case.from_output else z


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_parity_in_float64(case):
    z, h, xi = draw(case)
    given = (case.name, argument(case, z), h, xi, case.parameters)
    source, tangent, pulled = launch_bend(*given, tangent=True, pulled=True)
    assert error(source, truth(case, z, h, xi)) <= 1e-10
    assert error(tangent, slope(case, z, h)) <= 1e-10
    assert error(pulled, slope(case, z, xi)) <= 1e-10
    for wanted, one in (({"tangent": True}, tangent), ({"pulled": True}, pulled)):
        first, second = launch_bend(*given, **wanted)
        assert torch.equal(first, source) and torch.equal(second, one)
    there = launch_onto(case.name, argument(case, z), h, xi, case.parameters)
    assert error(there, slope(case, z, h) + xi) <= 1e-10


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES if CUDA else DTYPES[:1], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_lower_precision(case, dtype):
    z, h, xi = draw(case, dtype=dtype)
    if case.from_output:  # g″ is a function of the rounded y: compare at the z that y belongs to
        y = case.function(z.double()).to(dtype)
        inverse = {
            "sigmoid": torch.logit, "tanh": torch.atanh, "exp": torch.log, "sqrt": torch.square,
            "rsqrt": lambda y: 1 / y.square(), "reciprocal": lambda y: 1 / y,
        }  # fmt: skip
        inside = y.abs() < 1 if case.name in ("sigmoid", "tanh") else y != 0
        y, h, xi = y[inside], h[inside], xi[inside]
        given, z = y, inverse[case.name](y.double())
    else:
        given = z
    found = launch_bend(case.name, given, h, xi, case.parameters, tangent=True, pulled=True)
    found.append(launch_onto(case.name, given, h, xi, case.parameters))
    exact = [truth(case, z, h, xi), slope(case, z, h), slope(case, z, xi)]
    exact.append(exact[1] + xi.double())
    assert all(t.dtype == dtype for t in found)
    assert max(map(error, found, exact)) <= TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(t.shape),
        lambda t: t[..., 0, 0],
    ],
    ids=["contiguous", "channels-last", "transposed", "sliced", "expanded", "two axes"],
)
def test_layouts(layout):
    """Dense tensors of one layout are read as flat memory, others are copied first."""
    case = CASES[LABELS.index("silu")]
    z, h, xi = (layout(t) for t in draw(case, (4, 6, 5, 3)))
    for other in (h, h.contiguous()):
        found = launch_bend("silu", z, other, xi, (), tangent=True, pulled=True)
        found.append(launch_onto("silu", z, other, xi))
        assert all(t.shape == z.shape for t in found)
        assert all(t.stride() == torch.empty_like(z).stride() for t in found)
        exact = [truth(case, z, other, xi), slope(case, z, other), slope(case, z, xi)]
        exact.append(exact[1] + xi)
        assert max(map(error, found, exact)) <= 1e-10


@needs_triton
@pytest.mark.parametrize(
    "name", ["gelu", "gelu_tanh", "silu", "mish", "softplus", "logsigmoid", "elu"]
)
def test_far_out_the_curvature_vanishes(name):
    case = next(c for c in CASES if c.name == name)
    z = torch.tensor([1e30, 300.0, -300.0, -1e30], device=DEVICE)
    one = torch.ones_like(z)
    found, slopes = launch_bend(name, z, one, one, case.parameters, tangent=True)
    assert found.abs().max() <= 1e-30
    torch.testing.assert_close(slopes.double(), slope(case, z, one))


@needs_triton
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "softplus", "elu", "tanh"])
def test_nan_is_not_hidden(name):
    case = next(c for c in CASES if c.name == name)
    z = torch.full((3,), float("nan"), device=DEVICE)
    one = torch.ones_like(z)
    for found in launch_bend(name, z, one, one, case.parameters, tangent=True, pulled=True):
        assert found.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "softplus", "elu"])
def test_far_out_in_plain_operations(name, dtype):
    """No overflow makes 0·∞ of what vanishes, and NaN stays NaN."""
    case = next(c for c in CASES if c.name == name)
    z = torch.tensor([1e38, 1e20, 300.0, -300.0, -1e20, float("nan")], dtype=dtype, device=DEVICE)
    *far, nan = second(name, z, *case.parameters)
    assert torch.stack(far).abs().max() <= 1e-30 and nan.isnan()


@needs_triton
@pytest.mark.parametrize("name", ["elu", "hardswish"])
def test_kinks_follow_autograd(name):
    case = next(c for c in CASES if c.name == name)
    z = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64, device=DEVICE)
    one = torch.ones_like(z)
    found, slopes = launch_bend(name, z, one, one, case.parameters, tangent=True)
    torch.testing.assert_close(found, truth(case, z, one, one))
    torch.testing.assert_close(slopes, slope(case, z, one))


@needs_triton
def test_empty():
    z = torch.empty(0, 3, device=DEVICE)
    assert curvature("gelu", z, z, z).shape == (0, 3)


@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_plain_operations(case):
    z, h, xi = draw(case)
    found = second(case.name, argument(case, z), *case.parameters) * h * xi
    assert error(found, truth(case, z, h, xi)) <= 1e-10


def test_every_function_is_tested():
    assert {case.name for case in CASES} == set(pointwise.TABLE)


@needs_triton
@pytest.mark.parametrize("moves", ["both", "a", "b"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_product_of_two(dtype, moves):
    """Everything at once and each by itself, from no more than it reads; unlike layouts."""
    if dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter truncates 16-bit numbers")
    torch.manual_seed(0)
    a, b, qa, qb, xi = (torch.randn(3, 4, 5, 37).to(DEVICE, dtype) for _ in range(5))
    qa, qb = (qa if moves != "b" else None), (qb if moves != "a" else None)
    b = b.contiguous(memory_format=torch.channels_last)
    wide = [None if t is None else t.double() for t in (a, b, qa, qb, xi)]
    parts = [
        p * q
        for p, q in ((wide[2], wide[1]), (wide[0], wide[3]))
        if p is not None and q is not None
    ]
    exact = [
        sum(parts), None if qb is None else wide[4] * wide[3],
        None if qa is None else wide[4] * wide[2], wide[4] * wide[1], wide[4] * wide[0],
    ]  # fmt: skip
    every = [e is not None for e in exact]
    found = launch_gate((a, b, qa, qb, xi), every)
    theirs = [e for e in exact if e is not None]
    assert all(t.dtype == dtype for t in found)
    assert max(map(error, found, theirs)) <= TOLERANCE[dtype]
    reads = {0: (qb is not None, qa is not None, 1, 1, 0), 1: (0, 0, 0, 1, 1), 2: (0, 0, 1, 0, 1),
             3: (0, 1, 0, 0, 1), 4: (1, 0, 0, 0, 1)}  # fmt: skip
    for i in [i for i, there in enumerate(every) if there]:
        given = [t if on else None for t, on in zip((a, b, qa, qb, xi), reads[i], strict=True)]
        (one,) = launch_gate(given, [j == i for j in range(5)])
        assert torch.equal(one, found[sum(every[:i])])


def test_supports():
    z = torch.ones(3, device=DEVICE)
    assert supports("gelu", z, z, z) == (CUDA and TRITON)
    assert not supports("no such function", z, z, z)
    assert not supports("gelu", z, z[:1], z)
    assert not supports("gelu", z.int(), z, z)
    assert not supports("gelu", z.cpu(), z.cpu(), z.cpu())


@pytest.mark.parametrize(("name", "parameters"), [("relu", ()), ("gelu", (1.0,)), ("elu", (1.0,))])
def test_unknown_functions_raise(name, parameters):
    z = torch.ones(3)
    with pytest.raises(InputError, match=rf"'{name}' of {len(parameters)} .* softplus beta thresh"):
        curvature(name, z, z, z, *parameters)


PLACES = {
    "one number each": ((3, 5, 4, 6), (3, 5, 1, 1)),
    "the same for all examples": ((3, 5, 4, 6), (1, 5, 1, 1)),
    "volumes": ((2, 3, 2, 3, 4), (2, 3, 1, 1, 1)),
    "more than a tile": ((2, 131, 9, 5), (2, 131, 1, 1)),
}


@needs_triton
@pytest.mark.parametrize("expanded", [False, True], ids=["of size 1", "expanded"])
@pytest.mark.parametrize("turned", [False, True], ids=["image first", "image second"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PLACES)
def test_one_number_per_channel(name, dtype, turned, expanded, monkeypatch):
    """By the kernel, bit for bit what PyTorch computes."""
    monkeypatch.setattr(pointwise, "MANY", 0)
    monkeypatch.setattr(pointwise, "_places_plans", {})
    monkeypatch.setattr(pointwise, "constant_over_places", anywhere)
    shape, small = PLACES[name]
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, dtype=dtype, device=DEVICE).contiguous(memory_format=form)
    s = torch.randn(small, dtype=dtype, device=DEVICE)
    s = s.expand(shape) if expanded else s
    assert pointwise._planned_over_places(x, s, torch.mul) is not None
    pair = (s, x) if turned else (x, s)
    for ours, theirs in (
        (pointwise.times_over_places, torch.mul),
        (pointwise.plus_over_places, torch.add),
    ):
        result, expected = ours(*pair), theirs(*pair)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


_on_a_gpu = pointwise.constant_over_places


def anywhere(x: Tensor, s: Tensor) -> bool:
    """As on a GPU, without asking for one."""

    class OnAGpu:
        is_cuda = True

        def __init__(self, t: Tensor) -> None:
            self.t = t

        def __getattr__(self, name: str):
            return getattr(self.t, name)

    return _on_a_gpu(OnAGpu(x), OnAGpu(s))  # type: ignore[arg-type]


NOT_SO = {
    "another dtype": lambda x: x[:, :, :1, :1].float(),
    "one number for all channels": lambda x: x[:, :1, :1, :1],
    "different at every place": lambda x: x.clone(),
    "one number per row": lambda x: x[:, :, :, :1],
}


@pytest.mark.parametrize("name", NOT_SO)
def test_what_is_not_constant_over_places(name, monkeypatch):
    monkeypatch.setattr(pointwise, "MANY", 0)
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert anywhere(x, x[:, :, :1, :1])
    assert not anywhere(x.contiguous(), x[:, :, :1, :1])
    s = NOT_SO[name](x)
    assert not anywhere(x, s)
    assert torch.equal(pointwise.times_over_places(x, s), x * s)


# ------------------------------------------------------------------------------ softmax along rows


def softmax_truth(u: Tensor, xi: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(∂_u⟨ξ, S q⟩, S q) by autograd in float64, S the derivative of softmax at u."""
    u, xi = u.double().requires_grad_(), xi.double().requires_grad_()
    (pulled,) = torch.autograd.grad(u.softmax(-1), u, xi, create_graph=True)
    source, tangent = torch.autograd.grad((pulled * q.double()).sum(), (u, xi))
    return source, tangent


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float64, *(DTYPES if CUDA else DTYPES[:1])], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 5, 49), (7, 64), (2, 1), (1, 300), (5, 0)], ids=str)
def test_softmax(shape, dtype):
    """Rows that fill a block and rows that do not; tensors that are laid out in other ways."""
    u, xi, q = (torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype) for _ in range(3))
    s = u.softmax(-1) if dtype == torch.float64 else u.double().softmax(-1).to(dtype)
    xi = xi.mT.contiguous().mT
    truth = softmax_truth(s.double().log(), xi, q)
    for tangent in (True, False):
        found = pointwise.launch_softmax(s, xi, q, tangent)
        assert len(found) == 1 + tangent
        for mine, its in zip(found, truth, strict=False):
            assert mine.dtype == dtype and mine.shape == shape
            assert not mine.numel() or error(mine, its) <= TOLERANCE[dtype]


@needs_triton
def test_softmax_of_rows_that_are_masked_throughout():
    s = torch.zeros(2, 5, device=DEVICE)
    s[0, :2] = 0.5
    source, tangent = pointwise.launch_softmax(s, torch.ones_like(s), torch.ones_like(s), True)
    assert not source[1].any() and not tangent[1].any()


@needs_triton
@pytest.mark.parametrize("open_size", [False, True], ids=["one size", "sizes that change"])
def test_what_runs_at_sizes_that_change_is_not_fused_further(open_size):
    """A launch at a new size takes the host longer than PyTorch's kernels for the same."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    rows = mode.from_tensor(torch.empty(6), symbolic_context=dynamic).shape[0] if open_size else 6
    with mode:
        a, b, q, xi = (torch.empty(rows, 4, device="cuda") for _ in range(4))
        source = pointwise.fused_bend("silu", a, q, xi, (), False, False)
        further = [
            pointwise.fused_bend("silu", a, q, xi, (), True, False),
            pointwise.fused_bend("silu", a, q, xi, (), False, True),
            pointwise.fused_onto("silu", a, q, xi, ()),
            pointwise.fused_gate((a, b, q, None, xi), (True, False, True, False, False)),
        ]
    assert source is not None and source[0].shape == a.shape
    assert [found is None for found in further] == [open_size] * 4
