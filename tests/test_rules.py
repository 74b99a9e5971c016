"""Every rule of the table against autograd and finite differences; a wrong one is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback.capture import dynamo
from doubleback.check.parity import CheckReport, Row
from doubleback.graph import Meta, Node, Ref
from doubleback.rules import Call, Structure, find_rule, registered
from doubleback.rules.structures import Seeded, fold
from doubleback.rules.table import overload
from support.samples import SAMPLES, WITHOUT, WRT

aten = torch.ops.aten
NAMES = sorted(SAMPLES)


def name_of(op) -> str:
    return f"{op._schema.name.rpartition('::')[2]}.{op._overloadname}"


def test_every_rule_has_a_sample():
    """A new operator touches the table and the list of samples; this asks for the second."""
    missing = [
        name_of(op)
        for op in registered()
        if name_of(op) not in SAMPLES
        and name_of(op) not in WITHOUT
        and find_rule(op).structure is not Structure.CONSTANT
        and not name_of(op).startswith("fft_")
    ]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_rule(name):
    op = overload(name)
    assert op is not None, f"this torch has no aten.{name}"
    assert find_rule(op).own, f"{name} has no rule of its own"
    for make in SAMPLES[name]:
        args, kwargs = make()
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # for the oracle: fused attention has no second derivative
            db.check_rule(op, *args, wrt=WRT.get(name), **kwargs)


def test_hardsigmoid_against_its_formula():
    """clamp(x/6 + 1/2, 0, 1): stock autograd stops at the first derivative of the operator."""
    x, y = torch.linspace(-4, 4, 40).double(), torch.randn(40).double()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((leaf / 6 + 0.5).clamp(0, 1), leaf, y)
    rule = find_rule(aten.hardsigmoid.default)
    node = Node(0, "h", aten.hardsigmoid.default, (Ref(0),), {}, (0,), (1,), False, "")
    call = Call(node, (x,), (Meta((40,), x.dtype, x.device),))
    torch.testing.assert_close(rule.backward(call, y, (True,))[0], expected)
    torch.testing.assert_close(rule.tangent(call, (y,)), expected)


DISTANCES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")]


@pytest.mark.parametrize("p", DISTANCES)
def test_distances_against_the_patch(p):
    """Which has formulas of its own for what stock autograd lacks, and finite differences."""
    generator = torch.Generator().manual_seed(0)
    lattice = 0.25 * torch.randperm(44, generator=generator).double()
    apart = lattice + 0.07 * torch.rand(44, generator=generator, dtype=torch.float64)
    x, y = apart[:24].view(2, 3, 4), apart[24:].view(5, 4)
    with db.patched():
        ties = lattice[:24].view(6, 4), lattice[24:].view(5, 4)
        db.check_rule(aten.cdist.default, *ties, p, finite_differences=False)
        for mode in (None, 1, 2):
            db.check_rule(aten.cdist.default, x, y, p, mode)
            db.check_rule(aten._cdist_forward.default, x, y.expand(2, 5, 4), p, mode)
        db.check_rule(aten.pdist.default, x[0], p)
        db.check_rule(aten._pdist_forward.default, x[0], p)


@pytest.mark.parametrize("p", DISTANCES)
def test_no_derivative_where_points_meet(p):
    """As PyTorch has it at first order."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), Distances(p)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(3))
        net[1].centres[1] = 0
    model = db.Penalised(net, db.OutputGradient())
    out, penalty = model(torch.zeros(2, 3, dtype=torch.float64))
    (out.sum() + penalty).backward()
    assert all(t.grad.isfinite().all() for t in net.parameters())
    assert db.check(model, torch.zeros(2, 3, dtype=torch.float64)).passed


class Distances(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.centres = p, torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        to_centres = torch.cdist(x, self.centres, self.p).square().sum(1)
        return to_centres + torch.pdist(self.centres, self.p).square().sum()


def test_a_network_of_distances():
    net = torch.nn.Sequential(torch.nn.Linear(5, 3), Distances(2.0))
    x = torch.randn(6, 5)
    for after in (None, 0):
        model = db.Penalised(net, db.OutputGradient(), flatten_after=after)
        report = db.check(model, x)
        assert report.passed and "db.patch()" in str(report)
        model(x)[1].backward()


def test_flags_that_the_planner_trusts():
    """linear and piecewise linear: no curvature function at all, and no pair of inputs curves."""
    for op in registered():
        rule = find_rule(op)
        if rule.structure in (Structure.LINEAR, Structure.PIECEWISE_LINEAR):
            assert rule.curvature is None and rule.tangent_curvature is None, op
            assert not any(rule.curves(i, j) for i in range(3) for j in range(3)), op


def test_linear_rules_are_linear():
    """A(u + q) − A(u) = A q: step size 1, since a linear map has no truncation error."""
    checked = 0
    for name, makers in SAMPLES.items():
        op = overload(name)
        if find_rule(op).structure is not Structure.LINEAR:
            continue
        for make in makers:
            args, kwargs = make()
            x = args[0]
            if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
                continue
            step = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
            here, there = op(x, *args[1:], **kwargs), op(x + step, *args[1:], **kwargs)
            far = op(x + 2 * step, *args[1:], **kwargs)
            parts = zip(
                *(t if isinstance(t, (tuple, list)) else (t,) for t in (here, there, far)),
                strict=True,
            )
            for a, b, c in parts:
                torch.testing.assert_close(c - b, b - a, rtol=1e-12, atol=1e-12)
            checked += 1
    assert checked > 50


def test_dropout_rule_uses_the_mask_of_the_forward_sweep():
    rule = find_rule(aten.native_dropout.default)
    x = torch.randn(50, dtype=torch.float64)
    node = Node(
        0, "d", aten.native_dropout.default, (Ref(0), 0.4, True), {}, (0,), (1, 2), True, ""
    )
    call = Call(node, (x,), (Meta((50,), x.dtype, x.device),))
    (out, mask), call.saved = rule.forward(call)
    y = torch.randn_like(x)
    expected = torch.where(mask, 1 / 0.6, 0.0).double()
    assert mask.dtype == torch.bool and 0 < int(mask.sum()) < 50
    torch.testing.assert_close(out, x * expected)
    torch.testing.assert_close(rule.backward(call, (y, None), (True,))[0], y * expected)
    torch.testing.assert_close(rule.tangent(call, (y,))[0], y * expected)


def test_sources_come_before_tangents():
    """In a flat graph a layer's ξ is free, its K□ taken, before there is a tangent, where it does
    not wait for a node behind it."""
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(27, 2)
    net = torch.nn.Sequential(*layers)
    model = db.Penalised(net, db.OutputGradient(0), flatten_after=0)
    x, order = torch.randn(2, 2, 5, 5), []
    right = find_rule(aten.conv2d.default)

    def noting(part):
        def run(*args):
            order.append(part)
            return getattr(right, part)(*args)

        return run

    parts = ("tangent", "curvature")
    noted = replace(right, **{part: noting(part) for part in parts})
    db.register_rule(aten.conv2d.default, noted, replace=True)
    try:
        model(x)[1].backward()
    finally:
        db.register_rule(aten.conv2d.default, right, replace=True)
    assert order == ["curvature", "tangent"]


@pytest.mark.parametrize("part", ["backward", "tangent", "curvature"])
def test_a_wrong_rule_is_caught(part):
    right = find_rule(aten.tanh.default)
    function = getattr(right, part)

    def wrong(call, *args):
        result = function(call, *args)
        return tuple(1.001 * r for r in result) if part != "tangent" else 1.001 * result

    with pytest.raises(db.CheckError, match=part):
        db.check_rule(
            aten.tanh.default, torch.randn(4).double(), rule=replace(right, **{part: wrong})
        )


@pytest.fixture
def registered_as():
    """registered_as(op, rule): the rule in the operator's place until the test is over."""
    right = {}

    def enter(op, rule):
        right.setdefault(op, find_rule(op))
        db.register_rule(op, rule, replace=True)

    yield enter
    for op, rule in right.items():
        db.register_rule(op, rule, replace=True)


def _u(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("op", "reads", "inputs"),
    [
        (aten.sin.default, frozenset(), None),  # reads its input
        (aten.tanh.default, frozenset({"inputs"}), None),  # reads its output
        (aten.mm.default, frozenset({"inputs"}), lambda live: (live[0], live[1])),  # the other one
        (aten.mm.default, frozenset({"inputs"}), lambda live: (all(live), all(live))),
    ],
    ids=["input", "output", "the wrong factor", "one factor alone"],
)
def test_a_read_that_is_not_declared_is_caught(registered_as, op, reads, inputs):
    args = (_u(3, 4), _u(4, 5)) if op is aten.mm.default else (_u(3, 4),)
    db.check_rule(op, *args)
    registered_as(op, replace(find_rule(op), reads=reads, reads_inputs=inputs))
    with pytest.raises(db.CheckError, match="undeclared read"):
        db.check_rule(op, *args)


def test_a_read_that_goes_unnoticed_is_caught(registered_as):
    """A rule that takes a missing value for a one does not fail; it is wrong."""
    right = find_rule(aten.sin.default)

    def silent(call, y, wanted):
        u = call.inputs[0]
        return (y if u is None else y * u.cos(),)

    registered_as(aten.sin.default, replace(right, backward=silent, forms=lambda node: ()))
    db.check_rule(aten.sin.default, _u(5))
    tangent = lambda call, q: q[0] * _u(5).cos()  # noqa: E731
    bend = lambda call, xi, q, wanted: (-_u(5).sin() * q[0] * xi,)  # noqa: E731
    registered_as(
        aten.sin.default,
        replace(right, backward=silent, tangent=tangent, curvature=bend, reads=frozenset(),
                seeded=None),
    )  # fmt: skip
    with pytest.raises(db.CheckError, match="declared reads, backward 0"):
        db.check_rule(aten.sin.default, _u(5))


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_a_curvature_that_is_denied_is_caught(registered_as, pair):
    op, args = aten.mul.Tensor, (_u(3, 4), _u(4))
    right = find_rule(op)
    db.check_rule(op, *args)
    registered_as(op, replace(right, curves=lambda i, j: (i, j) != pair and right.curves(i, j)))
    with pytest.raises(db.CheckError, match=rf"curves\({pair[0]}, {pair[1]}\) is False"):
        db.check_rule(op, *args)


def test_a_curvature_of_one_input_that_is_denied_is_caught(registered_as):
    right = find_rule(aten.tanh.default)
    registered_as(aten.tanh.default, replace(right, curves=lambda i, j: False))
    with pytest.raises(db.CheckError, match=r"curves\(0, 0\) is False"):
        db.check_rule(aten.tanh.default, _u(4))


def _halved(way: Seeded, part: str) -> Seeded:
    """A way of running many seeds whose backward, tangent or sources are half of what they are."""

    def half(parts):
        return tuple(None if p is None else p / 2 for p in parts)

    def backward(*args):
        found = way.backward(*args)
        return half(found) if part == "backward" else found

    def both(*args):
        out, sources = way.both(*args)
        if part == "tangent":
            return out / 2, sources
        return out, half(sources) if part == "curvature" else sources

    return replace(way, backward=backward, both=both)


@pytest.mark.parametrize("part", ["backward", "tangent", "curvature"])
@pytest.mark.parametrize("op", [aten.tanh.default, aten.linear.default, aten.softmax.int])
def test_a_wrong_way_with_many_seeds_is_caught(registered_as, op, part):
    args = {
        aten.tanh.default: (_u(4),),
        aten.linear.default: (_u(2, 3), _u(4, 3)),
        aten.softmax.int: (_u(2, 4), 1),
    }[op]
    right = find_rule(op)
    db.check_rule(op, *args)
    registered_as(op, replace(right, seeded=_halved(right.seeded, part)))
    with pytest.raises(db.CheckError, match=f"seeded, {part}"):
        db.check_rule(op, *args)


@pytest.mark.parametrize("part", ["tangent", "curvature", "backward", "onto"])
@pytest.mark.parametrize("op", [aten.layer_norm.default, aten.group_norm.default])
def test_what_is_wrong_together_and_right_apart_is_caught(registered_as, op, part):
    args = {
        aten.layer_norm.default: (_u(3, 4), [4], _u(4), _u(4)),
        aten.group_norm.default: (_u(3, 4, 2), 2, _u(4), _u(4)),
    }[op]
    right = find_rule(op)
    db.check_rule(op, *args)

    def half(parts):
        return tuple(None if p is None else p / 2 for p in parts)

    def at_once(*given):
        found = right.at_once(*given)
        if found is None:
            return None
        pushed, bent, pulled = found
        return (
            pushed / 2 if part == "tangent" and pushed is not None else pushed,
            half(bent) if part == "curvature" else bent,
            half(pulled) if part == "backward" else pulled,
        )

    def onto(call, y, wanted, waiting):
        grads = right.backward(call, y, wanted)
        return (grads[0] + waiting / 2, *grads[1:])

    wrong = {"onto": onto} if part == "onto" else {"at_once": at_once}
    registered_as(op, replace(right, **wrong))
    with pytest.raises(db.CheckError, match="onto, backward 0" if part == "onto" else "at once"):
        db.check_rule(op, *args)


def test_seeds_that_are_folded_where_examples_meet_are_caught(registered_as):
    """A product from the left couples the rows of u; with one input live, its seeds may not join
    the batch."""
    right = find_rule(aten.mm.default)
    registered_as(aten.mm.default, replace(right, seeded=fold(1, lambda call: True)))
    with pytest.raises(db.CheckError, match="seeded='fold' fails"):
        db.check_rule(aten.mm.default, _u(4, 4), _u(4, 4))


def test_a_report_prints_its_ten_worst_rows():
    rows = [Row(f"row {i}", 10.0**-i, 1.0, 1.0) for i in range(2, 40)]
    text = str(CheckReport(tuple(rows), 1e-5))
    lines = text.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:11]] == [
        f"row {i}" for i in range(2, 12)
    ]
    assert sum("← wrong" in line for line in lines) == 3
    assert lines[11] == "… and 28 more, none above 1.0e-12"
    assert lines[12].startswith(
        "DISAGREES with the oracle in 38 quantities; worst 1.0e-02, allowed"
    )
    assert "relative to ‖oracle‖" in lines[12]
    many = str(CheckReport(tuple(rows), 5e-15))
    assert "← wrong" in many and "… and 28 more, 3 of them wrong" in many
    assert "more" not in str(CheckReport(tuple(rows[:10]), 1.0)).splitlines()[-2]


def test_a_wrong_rule_fails_the_check_of_a_model():
    op = aten.tanh.default
    right = find_rule(op)
    wrong = replace(right, curvature=lambda call, xi, q, wanted: (torch.zeros_like(xi),))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = db.Penalised(net, db.OutputGradient())
    assert db.check(model, torch.randn(2, 3)).worst < 1e-10
    db.register_rule(op, wrong, replace=True)
    try:
        with pytest.raises(db.CheckError, match="wrong") as caught:
            db.check(model, torch.randn(2, 3))
        assert caught.value.report.worst > 1e-3
    finally:
        db.register_rule(op, right, replace=True)


class Counting(torch.nn.Module):
    """Leaves something behind in Python, of the kind that is asked for, or in a buffer alone."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.calls, self.seen = torch.nn.Linear(3, 2), kind, 0, []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        if self.kind == "number":
            self.calls += 1
        if self.kind == "list":
            self.seen.append(1)
        self.total += x.detach().mean()
        return (1 + self.calls + len(self.seen)) * torch.tanh(self.linear(x)) * self.total


@pytest.mark.parametrize("kind", ["buffer", "number", "list"])
def test_every_way_of_a_check_starts_from_the_network_as_it_is(kind, monkeypatch):
    """And captures it once, where its calls change buffers alone."""
    lifted, lift = [], dynamo.lift
    monkeypatch.setattr(dynamo, "lift", lambda *a, **k: lifted.append(1) or lift(*a, **k))
    model = db.Penalised(Counting(kind), db.OutputGradient(0))
    report = db.check(model, torch.randn(4, 3))
    assert report.worst < 1e-10 and any(row.name.startswith("flat: ") for row in report.rows)
    assert len(lifted) == (1 if kind == "buffer" else 4)
    assert model.net.calls == len(model.net.seen) == model.net.total == 0


def test_registering_twice_is_an_error():
    with pytest.raises(db.RuleError, match="has a rule already"):
        db.register_rule(aten.tanh.default, find_rule(aten.tanh.default))


def test_an_operator_without_a_rule_runs_on_the_generic_one():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return torch.special.i0e(x @ self.w) + torch.lgamma(x[:, :3].abs() + 1)

    model = db.Penalised(Net(), db.OutputGradient(1), strict=True)
    x = torch.randn(5, 4)
    assert db.check(model, x).worst < 1e-10
    assert "lgamma" in str(model.explain(x).generic)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.unbind.int, (0,)),
        (aten.unbind.int, (-2,)),
        (aten.split.Tensor, (3, 1)),
        (aten.split_with_sizes.default, ([1, 3], -2)),
        (aten.chunk.default, (2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (0, 3, 1, 2)])
@pytest.mark.parametrize("absent", [None, "first", "last"])
def test_pieces_are_joined_as_the_whole_lay_in_memory(op, arguments, order, absent):
    shape = (3, 4, 4, 2)
    laid = torch.randn([shape[axis] for axis in order], dtype=torch.float64)
    x = laid.permute([order.index(axis) for axis in range(4)])
    node = Node(0, "sample", op, (Ref(0), *arguments), {}, (0,), (1,), True, "sample")
    rule, call = find_rule(op), Call(node, (x,), (Meta(shape, x.dtype, x.device),))
    out, call.saved = rule.forward(call)
    pieces = [torch.randn_like(part) for part in out]
    leaf = x.clone().requires_grad_()
    given: list = list(pieces)
    if absent:
        given[0 if absent == "first" else -1] = None
    parts = zip(op(leaf, *arguments), given, strict=True)
    sum((part * piece).sum() for part, piece in parts if piece is not None).backward()
    (found,) = rule.backward(call, tuple(given), (True,))
    assert torch.equal(found, leaf.grad)
    assert found.stride() == x.stride()


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        z = torch.view_as_complex(self.first(x).unflatten(1, (2, 2)))
        return self.last(torch.view_as_real(z * z.conj().sin()).flatten(1))


def test_tangents_through_complex_views():
    """Which `check_rule` has no samples of."""
    model = db.Penalised(Complex(), db.OutputGradient(1), flatten_after=None)
    assert db.check(model, torch.randn(4, 3)).worst < 1e-10


def test_batch_norm_reads_its_settings_where_they_stand(monkeypatch):
    """Behind the running statistics; on a CPU nobody looks at them."""
    seen = []
    monkeypatch.setattr(
        "doubleback.rules.normalisation.batch_norm_now", lambda x, w, b, *rest: seen.append(rest)
    )
    norm = torch.nn.BatchNorm1d(4, eps=0.25, momentum=0.5)
    model = db.Penalised(norm, db.OutputGradient("sum"), sweeps=True, flatten_after=None)
    model(torch.randn(3, 4))
    (((mean, var), momentum, eps),) = seen
    assert torch.is_tensor(mean)
    assert torch.is_tensor(var)
    assert (momentum, eps) == (0.5, 0.25)
