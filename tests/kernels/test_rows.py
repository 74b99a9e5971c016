"""Products of rows: one product whatever the layout, and sums that keep it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from doubleback.kernels import affine_rows, times
from doubleback.kernels.attention import _pad8
from doubleback.rules import add

LAYOUTS = {
    "rows": lambda: torch.randn(5, 4, dtype=torch.float64),
    "contiguous": lambda: torch.randn(2, 3, 4, dtype=torch.float64),
    "images": lambda: torch.randn(2, 4, 3, 5, dtype=torch.float64).permute(0, 2, 3, 1),
    "expanded": lambda: torch.randn(2, 1, 4, dtype=torch.float64).expand(2, 3, 4),
    "none": lambda: torch.randn(0, 3, 4, dtype=torch.float64).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_rows(layout, bias):
    x = LAYOUTS[layout]()
    weight = torch.randn(6, 4, dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64) if bias else None
    expected = torch.einsum("...n,mn->...m", x, weight)
    torch.testing.assert_close(times(x, weight.t()), expected)
    torch.testing.assert_close(affine_rows(x, weight, b), expected if b is None else expected + b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_are_one_product(layout):
    """Not one for each matrix of the batch, for which a compiler writes the weight out."""
    x, weight = LAYOUTS[layout](), torch.randn(4, 6, dtype=torch.float64)
    for fn in (times, lambda x, w: affine_rows(x, w.t(), None)):
        graph = make_fx(fn, tracing_mode="fake")(x, weight).graph
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)


def test_a_batch_of_matrices_stays_one():
    a, b = torch.randn(2, 4, 3).transpose(1, 2), torch.randn(2, 4, 5)
    torch.testing.assert_close(times(a, b), a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_layout_of_what_is_not_expanded(dtype):
    """Of tensors without numbers too, from which compilers take their layouts."""
    images = torch.randn(2, 8, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    spread = torch.randn(2, 8, 1, 1, dtype=dtype).expand(2, 8, 3, 3)
    with FakeTensorMode() as fake:
        for left, right in ((images, spread), (spread, images)):
            total = add(fake.from_tensor(left), fake.from_tensor(right))
            assert total.stride() == images.stride()
    assert torch.equal(add(spread, images), images + spread)
    assert add(None, spread) is spread and add(spread, None) is spread


def test_widths_that_need_no_zeros_are_not_copied():
    q = torch.randn(1, 2, 3, 16)
    assert _pad8(q) is q
    padded = _pad8(q[..., :13])
    assert padded.shape[-1] == 16 and not padded[..., 13:].any()
