"""Every architecture of the zoo under every penalty, against stock autograd; then the behaviour
of the module around it."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import doubleback as db
from support import oracle, zoo
from support.oracle import Spec
from support.penalties import TOLERANCE, library_penalty, quartic, turned

# ---------------------------------------------------------------------------------- the penalties


def log_cosh(out, y):
    return torch.log(torch.cosh(out - y)).reshape(len(out), -1).sum(1)


def specs(case: zoo.Case, out: Tensor, xs: list[Tensor], dtype=torch.float64) -> list[Spec]:
    """Every penalty that applies to an output and inputs of these shapes. Between them: each
    kind, each norm, each reduction, each option of cross entropy."""
    g = torch.Generator().manual_seed(5)

    def noise(like):
        return torch.randn(like.shape, generator=g, dtype=torch.float64).to(dtype)

    def inputs():
        drawn = [noise(x) for x in xs]
        return drawn[0] if len(drawn) == 1 else tuple(drawn)

    y, chance = noise(out), torch.rand(out.shape, generator=g, dtype=torch.float64).to(dtype)
    found = [
        Spec("mse", "loss", loss="mse", extras=(y,)),
        Spec("mse norm", "loss", loss="mse", norm=("norm",), reduction="sum", extras=(y,)),
        Spec("bce deviation", "loss", loss="bce", norm=("deviation", 0.3, False), extras=(chance,)),
        Spec("callable", "loss", loss=log_cosh, reduction="none", extras=(y,)),
        Spec("bilinear", "bilinear", extras=(noise(out), inputs())),
        Spec("custom", "custom", v=turned, p=quartic, extras=(y,)),
    ]
    if case.classes:
        labels = torch.randint(0, case.classes, (out.shape[0], *out.shape[2:]), generator=g)
        ignored = labels.clone()
        ignored.view(-1)[-1] = -7
        weights = torch.rand(case.classes, generator=g, dtype=torch.float64).add(0.5).to(dtype)
        ce = Spec("cross entropy", "loss", loss="cross_entropy", extras=(labels,))
        found += [
            ce,
            replace(ce, name="cross entropy smoothed, norm, none", label_smoothing=0.1,
                    norm=("norm",), reduction="none"),
            replace(ce, name="cross entropy weighted, deviation", class_weights=weights,
                    norm=("deviation", 0.5, True), reduction="sum"),
            replace(ce, name="cross entropy all options", class_weights=weights, ignore_index=-7,
                    label_smoothing=0.2, extras=(ignored,)),
        ]  # fmt: skip
    if case.scalar:
        node = Spec("output", "output")
    elif case.classes and out.dim() == 2:
        node = Spec("output", "output", index=1)
    else:
        return found
    return [
        *found,
        node,
        replace(node, name="output norm, none", norm=("norm",), reduction="none"),
        replace(node, name="output deviation", norm=("deviation", 1.0, False)),
        replace(node, name="output one-sided", norm=("deviation", 0.2, True), reduction="sum"),
        replace(node, name="match", kind="match", extras=(inputs(),)),
    ]


def jacobian(case: zoo.Case, out: Tensor) -> list[Spec]:
    """Every rule over a seed axis: all class probabilities, or some outputs of other nets."""
    if out.dim() == 1:  # one number per example
        return []
    if case.classes and out.dim() == 2 and case.name != "softmax_output":  # which is warned of
        return [Spec("jacobian of softmax", "jacobian", softmax=True, reduction="none")]
    size = out[0].numel()
    return [Spec("jacobian", "jacobian", entries=tuple(sorted({0, size // 2, size - 1})))]


# ------------------------------------------------------------------------------------- the harness


UNUSED = ("independent_of_input", "integer_path_only")  # nets that do not depend on x


class Bench:
    """One case, twice: a net for the library and its twin for the oracle, both rewound before
    every step."""

    def __init__(self, case: zoo.Case, dtype=torch.float64):
        self.case, self.dtype = case, dtype
        self.net, self.args = zoo.build(case, dtype)
        self.twin, twin_args = zoo.build(case, dtype)
        self.twin, self.twin_args = self.twin.double(), zoo.leaves(twin_args, torch.float64)
        self.start = [copy.deepcopy(net.state_dict()) for net in (self.net, self.twin)]

    def rewind(self):
        for net, args, state in zip((self.net, self.twin), (self.args, self.twin_args), self.start,
                                    strict=True):  # fmt: skip
            net.load_state_dict(state)
            net.zero_grad()
            for t in tree_leaves(args):
                if isinstance(t, Tensor):
                    t.grad = None

    def specs(self) -> list[Spec]:
        with torch.no_grad():
            out = oracle.choose(self.twin(*self.twin_args), self.case.output)
        xs = oracle.penalised_inputs(self.twin, self.twin_args, {}, self.case.wrt)
        return specs(self.case, out, xs, self.dtype) + jacobian(self.case, out)

    def library(self, spec: Spec, seed: int) -> oracle.Result:
        model = db.Penalised(
            self.net, library_penalty(spec), wrt=self.case.wrt, output=self.case.output,
            strict=True, allow_unused=self.case.name in UNUSED,
        )  # fmt: skip
        torch.manual_seed(seed)
        out, penalty = model(*self.args, *spec.extras)
        oracle.total_loss(out, penalty).backward()
        return oracle.collect(self.net, self.args, out, penalty)

    def truth(self, spec: Spec, seed: int) -> oracle.Result:
        spec = replace(spec, extras=tree_map_only(Tensor, widen, spec.extras))
        return oracle.solve(self.twin, self.twin_args, spec, self.case.wrt, self.case.output, seed)

    def failures(self, spec: Spec, seed: int = 11) -> list[str]:
        """What disagrees, worst first; a step that raises is a disagreement too."""
        self.rewind()
        truth = self.truth(spec, seed)
        try:
            got = self.library(spec, seed)
        except Exception as error:
            return [f"{spec.name}: {type(error).__name__}: {error}"]
        limit, floor = TOLERANCE[self.dtype]
        errors = oracle.compare(got, truth, floor)
        bad = sorted(((e, name) for name, e in errors.items() if not e <= limit), reverse=True)
        return [f"{spec.name}: {name} off by {e:.2e}" for e, name in bad]


def widen(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def report(case: zoo.Case, failures: list[str]) -> None:
    if failures:
        pytest.fail(f"{case.name}: {len(failures)} disagree\n  " + "\n  ".join(failures),
                    pytrace=False)  # fmt: skip


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


# ------------------------------------------------------------------------------------------ parity


@named(zoo.CASES)
def test_float64_parity(case):
    """Output, penalty, every parameter's and input's gradient, every buffer: each penalty."""
    bench = Bench(case)
    report(case, [line for spec in bench.specs() for line in bench.failures(spec)])


# RReLU draws its slopes in the dtype of x, so float32 and float64 see different nets.
DRAWS_IN_DTYPE = {"rrelu"}


@named([c for c in zoo.CASES if c.name not in DRAWS_IN_DTYPE])
def test_float32_parity(case):
    bench = Bench(case, torch.float32)
    chosen = {"mse", "cross entropy", "output"}
    report(case, [line for spec in bench.specs() if spec.name in chosen
                  for line in bench.failures(spec)])  # fmt: skip


SMOOTH = ["mlp_tanh", "mlp_gelu", "siren", "resnet_bn_eval", "convnext", "vit", "gpt", "lstm",
          "unet_interpolate", "layer_norm_2d", "group_norm", "weight_norm"]  # fmt: skip


@named([zoo.BY_NAME[name] for name in SMOOTH])
def test_bfloat16_parity(case):
    """A module held in bfloat16, against float64 on the same rounded weights."""
    bench = Bench(case, torch.bfloat16)
    chosen = {"mse", "cross entropy", "output"}
    report(case, [line for spec in bench.specs() if spec.name in chosen
                  for line in bench.failures(spec)])  # fmt: skip


# Exactly on a kink, or on a tie, each derivative is the one that autograd takes there. Not here:
# PReLU at 0, where autograd contradicts itself (vjp: the slope, jvp: 1).
KINKED = {
    **{name: getattr(F, name) for name in (
        "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "hardtanh", "hardswish",
        "softshrink", "hardshrink", "softsign", "logsigmoid", "mish", "silu", "gelu")},
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "threshold": lambda x: F.threshold(x, 0.2, 0.5),
    "softplus threshold": lambda x: F.softplus(x, 2.0, 4.0),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0.2),
    "clamp tensor": lambda x: x.clamp(min=torch.zeros_like(x)),
    "maximum": lambda x: torch.maximum(x, x * x),
    "minimum": lambda x: torch.minimum(x, x * x),
    "amax": lambda x: x * x.clamp(-1, 1).amax(1, keepdim=True),
    "max": lambda x: x * x.clamp(-1, 1).max(1, keepdim=True).values,
    "sort": lambda x: x * x.clamp(-1, 1).sort(1).values,
    "median": lambda x: x * x.clamp(-1, 1).median(1, keepdim=True).values,
    "max_pool1d": lambda x: x * F.max_pool1d(x.clamp(-1, 1), 3, 1, 1),
    "where": lambda x: torch.where(x > 0, x * x, x),
    "sign": lambda x: x.sign() * x * x,
    "pow 2": lambda x: x**2,
    "pow 0": lambda x: x**0,
    "pow 2.5": lambda x: x.abs() ** 2.5,
    "prod": lambda x: x * (x * (x > 1)).prod(1, keepdim=True),
    "norm": lambda x: x * (0 * x).norm(dim=1, keepdim=True) + x,
    "xlogy": lambda x: torch.xlogy(x.relu(), x.relu() + 1),
}  # fmt: skip


class OnKinks(nn.Module):
    """Row k is KINKED's k-th function times a weight."""

    def __init__(self, points: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, points).repeat(len(KINKED), 1))

    def forward(self, x):
        rows = [f(x[:, k]) for k, f in enumerate(KINKED.values())]
        return self.weight * torch.stack(rows, 1) + 0.1 * x * x


def test_on_kinks_and_ties():
    points = torch.tensor([-6.0, -4, -3, -2, -1, -0.5, -0.2, 0, 0.2, 0.5, 1, 2, 3, 4, 6, 20, 21])
    x = points.double().repeat(2, len(KINKED), 1).requires_grad_()
    net, g = OnKinks(len(points)).double(), torch.Generator().manual_seed(0)
    w, q = (torch.randn(x.shape, generator=g, dtype=torch.float64) for _ in range(2))
    spec = Spec("bilinear", "bilinear", extras=(w, q))
    truth = oracle.solve(copy.deepcopy(net), (x,), spec)
    x = x.detach().clone().requires_grad_()
    out, penalty = db.Penalised(net, db.BilinearForm(), strict=True)(x, w, q)
    oracle.total_loss(out, penalty).backward()
    want_w, want_x = truth.gradients["weight"], truth.gradients["input 0"]
    errors = {name: max(oracle.relative(net.weight.grad[k], want_w[k]),
                        oracle.relative(x.grad[:, k], want_x[:, k]))
              for k, name in enumerate(KINKED)}  # fmt: skip
    wrong = {name: f"{e:.1e}" for name, e in errors.items() if e > 1e-10}
    assert not wrong, ", ".join(f"{name} {e}" for name, e in wrong.items())


def test_the_harness_sees_a_wrong_gradient():
    """A relative error of 1e-9 in one parameter, or one buffer update too many, is reported."""
    bench = Bench(zoo.BY_NAME["resnet_bn_train"])
    spec = bench.specs()[0]
    bench.rewind()
    truth = bench.truth(spec, 11)
    wrong = copy.deepcopy(truth)
    wrong.gradients["head.2.weight"] *= 1 + 1e-9
    wrong.buffers["stem.1.num_batches_tracked"] += 1
    limit, floor = TOLERANCE[torch.float64]
    errors = oracle.compare(wrong, truth, floor)
    assert {n for n, e in errors.items() if e > limit} == {
        "grad head.2.weight", "buffer stem.1.num_batches_tracked"}  # fmt: skip


# --------------------------------------------------------------------------------------- behaviour


BEHAVIOUR = named([zoo.BY_NAME[n] for n in ("mlp_tanh", "resnet_bn_train")])
WITH_ATTENTION = named([zoo.BY_NAME[n] for n in ("mlp_tanh", "resnet_bn_train", "vit")])
CROSS_ENTROPY = "cross entropy"


def setting(case: zoo.Case, name: str = CROSS_ENTROPY):
    """(bench, spec, model) for one named penalty; the model has not run yet."""
    bench = Bench(case)
    spec = next(s for s in bench.specs() if s.name == name)
    bench.rewind()
    model = db.Penalised(bench.net, library_penalty(spec), wrt=case.wrt, output=case.output,
                         strict=True, allow_unused=case.name in UNUSED)  # fmt: skip
    return bench, spec, model


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], truth: dict[str, Tensor], scale: float = 1.0):
    assert got.keys() == truth.keys()
    largest = max(t.norm().item() for t in truth.values())
    for name, b in truth.items():
        error = oracle.relative(got[name], scale * b, TOLERANCE[torch.float64].floor * largest)
        assert error <= 1e-10, f"{name} off by {error:.2e}"


@WITH_ATTENTION
def test_gradients_accumulate(case):
    """Two steps without zero_grad add up, also on top of what was there."""
    bench, spec, model = setting(case)
    once = bench.truth(spec, 3).gradients
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(2):
        torch.manual_seed(3)
        oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    got = {n: g - 1 for n, g in gradients(bench.net).items()}
    assert_close(got, {n: g for n, g in once.items() if n in got}, scale=2.0)
    assert_close({"x": bench.args[0].grad}, {"x": once["input 0"]}, scale=2.0)


@WITH_ATTENTION
def test_retain_graph(case):
    """The same graph, backward twice; then it is gone."""
    bench, spec, model = setting(case)
    truth = {n: g for n, g in bench.truth(spec, 3).gradients.items() if "input" not in n}
    loss = oracle.total_loss(*model(*bench.args, *spec.extras))
    loss.backward(retain_graph=True)
    assert_close(gradients(bench.net), truth)
    loss.backward()
    assert_close(gradients(bench.net), truth, scale=2.0)
    with pytest.raises(RuntimeError):
        loss.backward()


@WITH_ATTENTION
def test_autograd_grad(case):
    """torch.autograd.grad of out and penalty alone, in either order, from one graph."""
    bench, spec, model = setting(case)
    names = [n for n, _ in bench.net.named_parameters()]
    out, penalty = model(*bench.args, *spec.extras)
    with oracle.twice_differentiable():
        out_, penalty_ = oracle.value(bench.twin, bench.twin_args, spec)
    for one, other in ((penalty, penalty_), (out.sin().sum(), out_.sin().sum())):
        got = torch.autograd.grad(
            one,
            [*bench.net.parameters(), bench.args[0]],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        want = torch.autograd.grad(
            other,
            [*bench.twin.parameters(), bench.twin_args[0]],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        assert_close(dict(zip([*names, "x"], got, strict=True)),
                     dict(zip([*names, "x"], want, strict=True)))  # fmt: skip
    assert all(p.grad is None for p in bench.net.parameters())


@WITH_ATTENTION
def test_frozen_parameters(case):
    """Half of the parameters frozen, also between two steps of one model: None there, exact
    elsewhere."""
    bench, spec, model = setting(case)
    oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    bench.rewind()
    for net in (bench.net, bench.twin):
        for p in list(net.parameters())[::2]:
            p.requires_grad_(False)
    truth = {n: g for n, g in bench.truth(spec, 3).gradients.items() if "input" not in n}
    oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    assert_close(gradients(bench.net), {n: g for n, g in truth.items() if g is not None})
    assert [p.grad is None for p in bench.net.parameters()] == [g is None for g in truth.values()]


@BEHAVIOUR
def test_only_the_input_requires_grad(case):
    bench, spec, model = setting(case)
    for net in (bench.net, bench.twin):
        net.requires_grad_(False)
    truth = bench.truth(spec, 3)
    oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    assert_close({"x": bench.args[0].grad}, {"x": truth.gradients["input 0"]})


@BEHAVIOUR
def test_plain_input(case):
    """An input that does not require grad, as in a training loop: it is left alone."""
    bench, spec, model = setting(case)
    truth = {n: g for n, g in bench.truth(spec, 3).gradients.items() if "input" not in n}
    x = bench.args[0].detach()
    oracle.total_loss(*model(x, *spec.extras)).backward()
    assert_close(gradients(bench.net), truth)
    assert not x.requires_grad and x.grad is None


@WITH_ATTENTION
def test_no_grad_gives_the_value(case):
    bench, spec, model = setting(case)
    truth = bench.truth(spec, 3)
    with torch.no_grad():
        out, penalty = model(*bench.args, *spec.extras)
    assert not out.requires_grad and not penalty.requires_grad
    assert oracle.relative(out, truth.out[0]) <= 1e-12
    assert oracle.relative(penalty, truth.penalty) <= 1e-10
    for name, buffer in bench.net.named_buffers():
        assert oracle.relative(buffer, truth.buffers[name]) <= 1e-12, name


@BEHAVIOUR
def test_train_and_eval(case):
    """One model, switched to and fro: each call follows the mode of that call."""
    bench, spec, model = setting(case)
    for mode in (True, False, True, False):
        bench.rewind()
        bench.twin.train(mode)
        model.train(mode)
        assert bench.net.training is mode
        truth = bench.truth(spec, 3)
        out, penalty = model(*bench.args, *spec.extras)
        oracle.total_loss(out, penalty).backward()
        got = oracle.collect(bench.net, bench.args, out, penalty)
        errors = oracle.compare(got, truth, TOLERANCE[torch.float64].floor)
        assert max(errors.values()) <= 1e-10, (mode, errors)


@BEHAVIOUR
def test_batch_sizes(case):
    """3, 1 (where the net allows it), 2, 3 examples through one model."""
    bench, spec, model = setting(case)
    for size in (3, 2, 3) if case.name.startswith("resnet") else (3, 1, 2, 3):
        bench.rewind()
        x, labels = bench.args[0].detach()[:size].requires_grad_(), spec.extras[0][:size]
        truth = oracle.solve(bench.twin, (x.detach().clone().requires_grad_(),),
                             replace(spec, extras=(labels,)))  # fmt: skip
        out, penalty = model(x, labels)
        oracle.total_loss(out, penalty).backward()
        got = oracle.collect(bench.net, (x,), out, penalty)
        errors = oracle.compare(got, truth, TOLERANCE[torch.float64].floor)
        assert max(errors.values()) <= 1e-10, (size, errors)


@BEHAVIOUR
def test_change_of_dtype(case):
    """.to(float32) after a float64 step, and back: parameters stay tied to their module."""
    bench, spec, model = setting(case)
    truth = bench.truth(spec, 3)
    oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    model.to(torch.float32)
    model.zero_grad()
    x = bench.args[0].detach().float()
    out, penalty = model(x, *spec.extras)
    oracle.total_loss(out, penalty).backward()
    assert out.dtype == torch.float32 and penalty.dtype == torch.float32
    assert oracle.relative(penalty, truth.penalty) <= 1e-3
    assert all(p.grad.dtype == torch.float32 for p in bench.net.parameters())


@BEHAVIOUR
def test_state_dict(case):
    bench, spec, model = setting(case)
    oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
    assert list(model.state_dict()) == [f"net.{k}" for k in bench.net.state_dict()]
    other, _ = zoo.build(case, seed=99)
    twin = db.Penalised(other, library_penalty(spec), strict=True)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.eval(), twin.eval()
        torch.testing.assert_close(
            twin(*bench.args, *spec.extras), model(*bench.args, *spec.extras)
        )


@BEHAVIOUR
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])  # fmt: skip
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_copies(case, copier, used):
    """A copy, taken before or after a step, owns its parameters and gives the same step."""
    bench, spec, model = setting(case)
    if used:
        oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
        bench.rewind()
    truth = {n: g for n, g in bench.truth(spec, 3).gradients.items() if "input" not in n}
    twin = copier(model)
    oracle.total_loss(*twin(*bench.args, *spec.extras)).backward()
    assert_close(gradients(twin.net), truth)
    assert all(p.grad is None for p in model.parameters())


@BEHAVIOUR
def test_parameter_changed_in_place(case):
    """An optimiser step between forward and backward would mix two networks: refused."""
    bench, spec, model = setting(case)
    loss = oracle.total_loss(*model(*bench.args, *spec.extras))
    with torch.no_grad():
        for p in bench.net.parameters():
            p.add_(0.1)
    with pytest.raises(RuntimeError):
        loss.backward()


@BEHAVIOUR
def test_third_derivative_is_refused(case):
    bench, spec, model = setting(case)
    _, penalty = model(*bench.args, *spec.extras)
    with pytest.raises(db.DoublebackError):
        g = torch.autograd.grad(penalty, list(bench.net.parameters()), create_graph=True,
                                allow_unused=True)  # fmt: skip
        sum(t.square().sum() for t in g if t is not None).backward()


@WITH_ATTENTION
def test_several_steps_of_training(case):
    """Ten optimiser steps stay with the oracle's, so nothing stale is kept between steps."""
    bench, spec, model = setting(case)
    optimisers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
                  for net in (bench.net, bench.twin)]  # fmt: skip
    for step in range(10):
        for optimiser in optimisers:
            optimiser.zero_grad()
        bench.truth(spec, step)
        torch.manual_seed(step)
        oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
        for optimiser in optimisers:
            optimiser.step()
    for (name, a), b in zip(bench.net.state_dict().items(), bench.twin.state_dict().values(),
                            strict=True):  # fmt: skip
        assert oracle.relative(a, b) <= 1e-8, name  # errors compound over the steps


def test_shape_of_the_result():
    """The whole structure that the net returns comes back, the penalised part included."""
    bench, spec, model = setting(zoo.BY_NAME["dict_output"])
    out, _ = model(*bench.args, *spec.extras)
    assert out.keys() == {"heads", "cost"} and out["heads"].keys() == {"policy", "value"}
    bench, spec, model = setting(zoo.BY_NAME["tuple_output"])
    out, _ = model(*bench.args, *spec.extras)
    assert isinstance(out, tuple) and [t.shape for t in out] == [(3, 4), (3, 1), ()]


def test_unused_and_frozen_parameters_have_no_gradient():
    """As after autograd's backward: None, so that an optimiser leaves them alone."""
    for name in ("unused_parameter", "frozen_branch", "identity"):
        bench, spec, model = setting(zoo.BY_NAME[name])
        truth = bench.truth(spec, 3).gradients
        oracle.total_loss(*model(*bench.args, *spec.extras)).backward()
        for key, p in bench.net.named_parameters():
            assert (p.grad is None) == (truth[key] is None), (name, key)


@pytest.mark.parametrize("name", ["independent_of_input", "integer_path_only", "dead_relu"])
def test_no_dependence_on_the_input(name):
    """Penalty exactly 0, and its gradient exactly 0 or None, for every norm that is 0 at 0."""
    bench = Bench(zoo.BY_NAME[name])
    for spec in bench.specs():
        if spec.kind not in ("output", "loss") or spec.norm == ("deviation", 1.0, False):
            continue
        if spec.norm[0] == "deviation" and not spec.norm[2]:
            continue
        bench.rewind()
        model = db.Penalised(bench.net, library_penalty(spec), strict=True)
        if name in UNUSED:  # dead units depend on it all the same
            with pytest.raises(db.InputError, match="does not depend"):
                model(*bench.args, *spec.extras)
            model.allow_unused = True
        _, penalty = model(*bench.args, *spec.extras)
        assert torch.equal(penalty, torch.zeros_like(penalty)), spec.name
        if penalty.requires_grad:
            penalty.sum().backward()
        for key, p in bench.net.named_parameters():
            assert p.grad is None or not p.grad.any(), (spec.name, key)


def test_keyword_arguments():
    """net(a, b=b): b penalised by name, and handed through when it is not."""
    case = zoo.BY_NAME["two_inputs_both"]
    net, (a, b) = zoo.build(case)
    twin, (a_, b_) = zoo.build(case)
    y = torch.tensor([0, 3, 1])
    spec = Spec("cross entropy", "loss", loss="cross_entropy", extras=(y,))
    for wrt in ("b", 0, (0, "b")):
        truth = oracle.solve(twin, (a_,), spec, wrt, kwargs={"b": b_})
        model = db.Penalised(net, library_penalty(spec), wrt=wrt, strict=True)
        out, penalty = model(a, y, b=b)
        oracle.total_loss(out, penalty).backward()
        got = oracle.collect(net, (a, {"b": b}), out, penalty)
        errors = oracle.compare(got, truth, TOLERANCE[torch.float64].floor)
        assert max(errors.values()) <= 1e-10, (wrt, errors)
        for t in (*net.parameters(), *twin.parameters(), a, b, a_, b_):
            t.grad = None


def test_what_cannot_be_captured():
    """strict: an error, nothing changed. Otherwise one warning, then autograd's own numbers."""
    case = zoo.UNCAPTURABLE
    bench, spec, model = setting(case)
    before = copy.deepcopy(bench.net.state_dict())
    with pytest.raises(db.DoublebackError):
        model(*bench.args, *spec.extras)
    assert all(torch.equal(a, b) for a, b in
               zip(bench.net.state_dict().values(), before.values(), strict=True))  # fmt: skip
    model = db.Penalised(bench.net, library_penalty(spec))
    with pytest.warns(UserWarning, match="cannot be captured as one graph"):
        model(*bench.args, *spec.extras)
    bench.rewind()
    truth = bench.truth(spec, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, penalty = model(*bench.args, *spec.extras)
    oracle.total_loss(out, penalty).backward()
    got = oracle.collect(bench.net, bench.args, out, penalty)
    assert max(oracle.compare(got, truth, TOLERANCE[torch.float64].floor).values()) <= 1e-10


def test_random_state_advances_as_in_the_net():
    """The call draws exactly what net(x) draws, the first call (which captures) included."""
    bench, spec, model = setting(zoo.BY_NAME["dropout"])
    for _ in range(2):
        torch.manual_seed(8)
        bench.twin(*bench.twin_args)
        want = torch.get_rng_state()
        torch.manual_seed(8)
        model(*bench.args, *spec.extras)
        assert torch.equal(torch.get_rng_state(), want)


@pytest.mark.parametrize("case", zoo.CASES[::5], ids=lambda case: case.name)
def test_flattened_sweeps_equal_those_node_by_node(case):
    """The straight list of kernel calls against the walk over the plan, a fifth of the zoo."""
    found = []
    bench = Bench(case)
    net, args = bench.net, bench.args
    for after in (None, 0):
        bench.rewind()
        model = db.Penalised(
            net, db.Custom(lambda out: out * out), wrt=case.wrt, output=case.output,
            allow_unused=case.name in UNUSED, strict=True, flatten_after=after,
        )  # fmt: skip
        torch.manual_seed(5)
        _, penalty = model(*args)
        if penalty.requires_grad:
            penalty.backward()
        buffers = [t.clone() for t in net.buffers()]
        found.append([penalty.detach(), *(p.grad for p in net.parameters()), *buffers])
    scale = max(float(t.norm()) for t in found[0] if t is not None and t.is_floating_point())
    for walked, flat in zip(*found, strict=True):
        assert (walked is None) == (flat is None)
        if walked is not None:
            difference = float((walked.double() - flat.double()).norm())
            assert difference <= 1e-10 * max(float(walked.double().norm()), 1e-6 * scale)
