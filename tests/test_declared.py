"""What a rule declares of its structure earns the short cut, for operators of users' own too; what
it does not declare costs the short cut and nothing else; what is not so is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import doubleback as db
from doubleback.rules import alone, bilinear_rule, coordinatewise, find_rule, linear


def _operator(name: str, forward, backward):
    """A custom operator with a fake and a differentiable backward."""
    op = torch.library.custom_op(f"declared::{name}", forward, mutates_args=())
    op.register_fake(forward)
    op.register_autograd(
        lambda ctx, y: backward(y, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op, getattr(torch.ops.declared, name).default


def _rows_of(u: Tensor) -> Tensor:
    return u.reshape(u.shape[0], -1).clone()


def _mirrored(u: Tensor) -> Tensor:
    return u.flip(1)


def _cubed(u: Tensor) -> Tensor:
    return u**3


def _product(u: Tensor, w: Tensor) -> Tensor:
    return u @ w


rows_of, ROWS = _operator("rows_of", _rows_of, lambda y, u: y.reshape(u.shape))
mirrored, MIRRORED = _operator("mirrored", _mirrored, lambda y, u: y.flip(1))
cubed, CUBED = _operator("cubed", _cubed, lambda y, u: 3 * u**2 * y)
product, PRODUCT = _operator("product", _product, lambda y, u, w: (y @ w.t(), u.t() @ y))

RULES = {
    ROWS: linear(lambda call, y: y.reshape(call.metas[0].shape)),
    MIRRORED: linear(lambda call, y: y.flip(1)),
    CUBED: replace(
        coordinatewise("input", lambda c, u: 3 * u**2, lambda c, u: 6 * u), diagonal=False
    ),
    PRODUCT: bilinear_rule(
        lambda call, u, w: u @ w, lambda call, w, y: y @ w.t(), lambda call, u, y: u.t() @ y
    ),
}


class Apply(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, u):
        return self.fn(u)


class Times(nn.Module):
    def __init__(self, n: int, m: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m))

    def forward(self, u):
        return product(u, self.weight)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.fixture
def declare():
    """declare(op, **flags): the operator's rule, with these declarations."""
    used = []

    def enter(op, **flags):
        if op in used:
            db.unregister_rule(op)
        else:
            used.append(op)
        db.register_rule(op, replace(RULES[op], **flags))

    yield enter
    for op in used:
        db.unregister_rule(op)


def told(net, x, **options) -> dict:
    """The plan, after the results agreed with autograd under every plan there is."""
    plan = db.Penalised(net, db.Jacobian(**options)).explain(x).as_dict()["plan"]
    for name in plan["candidates"]:
        model = db.Penalised(net, db.Jacobian(plan=name, **options))
        assert db.check(model, x).worst <= 1e-10
    return plan


def test_same_entries(declare):
    net = nn.Sequential(Apply(lambda u: rows_of(u)), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(4, 2, 3, 4)
    declare(ROWS)
    assert "Gram matrix of the first layer" not in told(net, x)["shortcuts"]
    declare(ROWS, same_entries=True)
    plan = told(net, x)
    assert "Gram matrix of the first layer" in plan["shortcuts"]
    assert "columns" in plan["candidates"]  # entries that stay in place do not mix examples


def test_per_example(declare):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Apply(lambda u: mirrored(u)), nn.Linear(8, 40))
    x = torch.randn(4, 3)
    declare(MIRRORED)
    plan = told(net, x, entries="all")
    assert plan["chosen"] == "rows" and "couple" in plan["excluded"]["columns"]
    declare(MIRRORED, per_example=alone())
    assert told(net, x, entries="all")["chosen"] == "columns"


def test_diagonal(declare):
    net = nn.Sequential(nn.Linear(6, 5), Apply(lambda u: cubed(u)))
    x = torch.randn(4, 6)
    declare(CUBED)
    assert "diagonal" in told(net, x)["excluded"]
    declare(CUBED, diagonal=True)
    assert told(net, x)["chosen"] == "diagonal"


@pytest.mark.parametrize("layer", [False, True])
def test_layer(layer):
    """explain's counts are those of what really runs, whether the operator is a layer or not."""
    formulas = (
        lambda call, u, w: u @ w,
        lambda call, w, y: y @ w.t(),
        lambda call, u, y: u.t() @ y,
    )
    db.register_rule(PRODUCT, bilinear_rule(*formulas, layer=layer))
    try:
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Times(6, 3))
        model = db.Penalised(net, db.LossGradient("cross_entropy"))
        x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        assert db.check(model, x, y).worst <= 1e-10
        explained = model.explain(x, y)
        assert explained.layers == 1 + layer
        with db.count_operations() as ops:
            out, penalty = model(x, y)
            (nn.functional.cross_entropy(out, y) + penalty).backward()
        assert explained.total == vars(ops)
    finally:
        db.unregister_rule(PRODUCT)


PRODUCTS = {
    "offset": lambda x, w: torch.addmm(w[0], x, w).tanh() @ w,
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, w).tanh() @ w,
    "activations": lambda x, w: (x.tanh() @ x.tanh().t()).tanh() @ w,
    "weight on the left": lambda x, w: torch.mm(w, x).tanh() @ x,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_as_explained(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return PRODUCTS[name](x, self.w)

    model, x = db.Penalised(Net(), db.OutputGradient(1)), torch.randn(4, 4)
    with db.count_operations() as ops:
        out, penalty = model(x)
        (out.sum() + penalty).backward()
    assert model.explain(x).total == vars(ops)


def test_products_count_as_the_dense_layers_they_are():
    class Net(nn.Module):
        def __init__(self, product):
            super().__init__()
            self.w, self.product = nn.Parameter(torch.randn(4, 4)), product

        def forward(self, x):
            return self.product(self.product(x, self.w).tanh(), self.w)

    def counted(product) -> dict[str, int]:
        model = db.Penalised(Net(product), db.OutputGradient(1), strict=True)
        with db.count_operations() as ops:
            out, penalty = model(torch.randn(5, 4))
            (out.square().sum() + penalty).backward()
        return vars(ops)

    wanted = counted(nn.functional.linear)
    assert wanted["transpose"] and wanted["weight_adjoint"]
    assert counted(lambda x, w: x @ w.t()) == wanted
    assert counted(lambda x, w: torch.einsum("bi,ji->bj", x, w)) == wanted


def test_a_product_from_the_left_couples_examples():
    """A x mixes the rows of x, x A does not, although both are one operator."""

    class Net(nn.Module):
        def __init__(self, left: bool):
            super().__init__()
            self.lift, self.left = nn.Linear(2, 20), left
            self.register_buffer("a", torch.randn(5, 5) if left else torch.randn(20, 20))

        def forward(self, x):
            u = self.lift(x).tanh()
            return torch.mm(self.a, u) if self.left else torch.mm(u, self.a)

    x = torch.randn(5, 2)
    assert told(Net(True), x, entries="all")["chosen"] == "rows"
    assert told(Net(False), x, entries="all")["chosen"] == "columns"


@pytest.mark.parametrize(
    ("op", "flags", "what"),
    [
        (torch.ops.aten.roll.default, {"per_example": alone()}, "per example"),
        (torch.ops.aten.roll.default, {"same_entries": True}, "same entries"),
        (torch.ops.aten.cumsum.default, {"diagonal": True}, "diagonal"),
    ],
)
def test_a_false_declaration_is_caught(op, flags, what):
    args = ([1], [0]) if op is torch.ops.aten.roll.default else (1,)
    u = torch.randn(3, 4, dtype=torch.float64)
    db.check_rule(op, u, *args)
    with pytest.raises(db.CheckError, match=what):
        db.check_rule(op, u, *args, rule=replace(find_rule(op), **flags))
