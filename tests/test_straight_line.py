"""Flat graphs after cleaning: what is joined, what is written in place, and what must not be."""

import pytest
import torch
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
