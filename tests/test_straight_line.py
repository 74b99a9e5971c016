"""Flat graphs after cleaning: what is joined, what is written in place, and what must not be."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from doubleback.run import straight_line


def sum_of_two(a, b, c, d):
    return (a.mm(b) + c.mm(d),)


def sum_of_three(a, b, c, d):
    return (a.mm(b) + c.mm(d) + d.mm(c),)


def summand_read_later(a, b, c, d):
    first = a.mm(b)
    return first + c.mm(d), first.relu()


def summand_returned(a, b, c, d):
    first = a.mm(b)
    return first + c.mm(d), first


def summand_of_two_sums(a, b, c, d):
    first = a.mm(b)
    return first + c.mm(d), first + d.mm(c)


def summand_given(a, b, c, d):
    return (a + c.mm(d),)


def summand_viewed(a, b, c, d):
    first = a.mm(b)
    return first + c.mm(d), first.t()


def summand_broadcast(a, b, c, d):
    return (a.mm(b)[:1] + c.mm(d),)


IN_PLACE = {
    sum_of_two: 1, sum_of_three: 2, summand_read_later: 0, summand_returned: 0,
    summand_of_two_sums: 0, summand_given: 0, summand_viewed: 0, summand_broadcast: 0,
}  # fmt: skip


@pytest.mark.parametrize("for_compiler", [False, True])
@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda fn: fn.__name__)
def test_sums_of_products(fn, for_compiler):
    """A product that nobody else reads takes the next one in; everything else stays as it was."""
    tensors = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]
    given = [t.clone() for t in tensors]
    graph = make_fx(fn, tracing_mode="fake")(*tensors)
    straight_line.clean(graph, for_compiler)
    target = straight_line.ADD_PRODUCT if for_compiler else "addmm_"
    assert [node.target for node in graph.graph.nodes].count(target) == IN_PLACE[fn]
    boxed = None if for_compiler else straight_line.boxed(graph)
    for _ in range(2):
        results = graph(*tensors) if boxed is None else boxed(list(tensors))
        for found, expected in zip(results, fn(*given), strict=True):
            torch.testing.assert_close(found, expected)
    for t, before in zip(tensors, given, strict=True):
        assert torch.equal(t, before)


JOINED = {
    "batches": (lambda a, b, c, d: (a.bmm(b) + c.bmm(d),), {"baddbmm_": 1}),
    "three batches": (lambda a, b, c, d: (a.bmm(b) + c.bmm(d) + d.bmm(a),), {"baddbmm_": 2}),
    "a batch that is read again": (
        lambda a, b, c, d: (lambda p: (p + c.bmm(d), p.relu()))(a.bmm(b)), {"baddbmm_": 0},
    ),
    "a batch that is returned": (
        lambda a, b, c, d: (lambda p: (p + c.bmm(d), p))(a.bmm(b)), {"baddbmm_": 0},
    ),
    "a batch added to something given": (lambda a, b, c, d: (a + c.bmm(d),), {"baddbmm_": 0}),
    "multiples": (lambda a, b, c, d: (a * b + c * d,), {"addcmul": 1}),
    "a multiple on the left": (lambda a, b, c, d: (a * b + c,), {"addcmul": 1}),
    "broadcast within": (lambda a, b, c, d: (a + b[:1] * c,), {"addcmul": 1}),
    "broadcast": (lambda a, b, c, d: (a + b[:1] * c[:1],), {"addcmul": 0}),
    "to a row": (lambda a, b, c, d: (a[:1] + b * c,), {"addcmul": 0}),
    "a number": (lambda a, b, c, d: (a + b * 2.0,), {"addcmul": 0}),
    "read twice": (lambda a, b, c, d: (lambda p: (a + p, p))(b * c), {"addcmul": 0}),
    "another dtype": (lambda a, b, c, d: (a + b.float() * c.float(),), {"addcmul": 0}),
    "turned": (lambda a, b, c, d: (a.mT + b * c,), {"addcmul": 1}),
    "laid out unlike the sum": (lambda a, b, c, d: (b * c + a.mT,), {"addcmul": 0}),
}  # fmt: skip


@pytest.mark.parametrize("for_compiler", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_sums_of_batches_and_multiples(name, for_compiler):
    """By one kernel, and the summands of others untouched; a compiler gets them as they were."""
    fn, expected = JOINED[name]
    tensors = [torch.randn(3, 4, 4, dtype=torch.float64) for _ in range(4)]
    given = [t.clone() for t in tensors]
    graph = make_fx(fn, tracing_mode="fake")(*tensors)
    straight_line.clean(graph, for_compiler)
    ((kind, count),) = expected.items()
    found = [str(node.target).removeprefix("aten.").split(".")[0] for node in graph.graph.nodes]
    assert found.count(kind) == (0 if for_compiler else count)
    if not for_compiler:
        boxed = straight_line.boxed(graph)
        for _ in range(2):
            for mine, its in zip(boxed(list(tensors)), fn(*given), strict=True):
                torch.testing.assert_close(mine, its)
                assert mine.stride() == its.stride()
    assert all(map(torch.equal, tensors, given))


def flat_at_other_strides(fn, traced, given):
    graph = make_fx(fn, tracing_mode="fake")(traced)
    straight_line.clean(graph)
    return straight_line.boxed(graph)([given])


def test_strides_other_than_the_fakes():
    """A view is a copy where the numbers lie otherwise than they did in the trace, as behind a
    kernel whose fake is wrong about its strides."""
    x = torch.randn(3, 4, 5)
    other = x.mT.contiguous().mT
    (found,) = flat_at_other_strides(lambda t: (t.view(3, 20).sin(),), x, other)
    assert torch.equal(found, x.view(3, 20).sin())

    def sum_of_products(t):
        rows = t.view(3, 20)
        return (rows.mm(rows.t()) + rows.mm(rows.t().sin()),)

    (found,) = flat_at_other_strides(sum_of_products, x, other)
    torch.testing.assert_close(found, sum_of_products(x)[0])


def test_what_is_written_through_a_view_is_not_lost():
    def fn(t):
        y = t.clone()
        y.view(3, 20).add_(1.0)
        return (y,)

    x = torch.randn(3, 4, 5)
    (found,) = flat_at_other_strides(fn, x, x)
    assert torch.equal(found, x + 1.0)
    with pytest.raises(RuntimeError, match="view size"):
        flat_at_other_strides(fn, x, x.mT.contiguous().mT)


def foreach_added(b, z):
    torch._foreach_add_([z.sin(), b], [z, z])


@pytest.mark.parametrize(
    "product", [torch.mul, torch.mm, lambda a, b: torch.bmm(a[None], b[None])[0]]
)
@pytest.mark.parametrize("write", [Tensor.add_, lambda b, z: b[1:].copy_(z[1:]), foreach_added])
def test_a_product_is_not_moved_past_what_writes_to_its_factors(product, write):
    def fn(a, b, z):
        b = b.clone()
        c = product(a, b)
        write(b, z)
        return a + c, b

    given = [torch.randn(4, 4) for _ in range(3)]
    graph = straight_line.record(fn, given)
    straight_line.clean(graph)
    for got, wanted in zip(straight_line.boxed(graph)(list(given)), fn(*given), strict=True):
        torch.testing.assert_close(got, wanted)


def twice_and_a_constant(a, b):
    """A constant that is made inside and written to, one from outside, a draw, several results."""
    made = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made.mul_(2)
    values, places = (a * made + WEIGHTS).max(0)
    return values, places, a - b, torch.bernoulli(b.sigmoid())


WEIGHTS = torch.arange(4.0)


def test_a_tape_holds_what_a_function_calls():
    """As make_fx would; two inputs that were one tensor once are two."""
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    run = straight_line.boxed(straight_line.record(twice_and_a_constant, [a, a]))
    for _ in range(2):
        torch.manual_seed(0)
        results = run([a, b])
        torch.manual_seed(0)
        for got, wanted in zip(results, twice_and_a_constant(a, b), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_what_a_tape_does_not_hold():
    """Numbers read off tensors, sizes that they decide: no graph, rather than one with this call's
    numbers in it."""
    x = torch.ones(3)
    for fn in (
        lambda t: [t * float(t[0])],
        lambda t: [t * t.tolist()[0]],
        lambda t: [t + torch.from_numpy(t.numpy())],
        lambda t: [t + t.data_ptr()],
        lambda t: [t.nonzero()],
    ):
        with pytest.raises((RuntimeError, straight_line.OffTape)):
            straight_line.record(fn, [x])


# ------------------------------------------------------------------- PyTorch's own bindings


def pieces(x):
    return x[1:3], x[-2:], x[:, :-1], x[:, 2:100], x[5:], x[:, -100:1], x[::2], x[:0]


def casts(x):
    return x.to(torch.float64), (x > 0).to(x.dtype), x.to(torch.float32, copy=True)


def made(x):
    axis, zeros = torch.arange(4, device=x.device), torch.zeros(2, 3, device=x.device)
    return axis, zeros, x.new_zeros(3), torch.ones_like(x), x.new_empty(2, 0), 2 - x


def curves(x):
    mask = (x >= 0) & (x <= 1)
    parts = x.softmax(1), x.log_softmax(0), torch.nn.functional.silu(x), x.masked_fill(mask, 2.0)
    rows = torch.tensor([2, 0], device=x.device)
    moved = x.index_add(0, rows, x[:2], alpha=2), x.index_select(0, rows)
    return *parts, *moved, torch.nn.functional.softplus(x, 2.0, 5.0), *x.split(3)


@pytest.mark.parametrize("fn", [pieces, casts, made, curves], ids=lambda fn: fn.__name__)
def test_bindings_compute_what_operators_do(fn):
    """And each is called by a binding, but for slices with gaps; results of their own memory stay
    so."""
    x = torch.randn(4, 5)
    taped = straight_line.record(lambda *given: list(fn(*given)), [x])
    run = straight_line.boxed(taped)
    results, expected = run([x]), fn(x)
    for a, b in zip(results, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        mine, theirs = (t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in (a, b))
        assert mine == theirs
    overloads = [n.target for n in taped.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    names = [op._schema.name.removeprefix("aten::") for op in overloads]
    kept = {pieces: ["slice"], casts: ["_to_copy"]}.get(fn, [])  # with gaps; without a cast
    others = ("detach", "bitwise_and", "lift_fresh_copy", "silu", "split")
    assert [name for name in names if name not in others] == kept


def test_a_default_device_does_not_reach_into_a_replay():
    x = torch.randn(3)
    run = straight_line.boxed(straight_line.record(lambda x: [torch.arange(3) + x], [x]))
    with torch.device("meta"):
        (result,) = run([x])
    assert result.device.type == "cpu"


def test_operators_whose_joined_names_are_one_stay_two():
    """`a_b::c` and `a::b_c` are two operators, in whatever way code may call them."""
    libraries = [torch.library.Library(n, "FRAGMENT") for n in ("dbtest_one", "dbtest")]
    for library, name, factor in zip(libraries, ("two", "one_two"), (2.0, 3.0), strict=True):
        library.define(f"{name}(Tensor t) -> Tensor")
        library.impl(name, lambda t, factor=factor: t * factor, "CompositeExplicitAutograd")
    double, triple = torch.ops.dbtest_one.two, torch.ops.dbtest.one_two
    x = torch.randn(3)
    graph = make_fx(lambda t: (double(t), triple(t)))(x)
    first, second = straight_line.boxed(graph)([x])
    assert torch.equal(first, 2 * x) and torch.equal(second, 3 * x)
