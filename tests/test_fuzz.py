"""A slice of the fuzzer with fixed seeds: every operator of the vocabulary, and whole cases as
`make fuzz` draws them. What it would print of a failure is tested too."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from doubleback.rules import find_rule, registered
from doubleback.rules import register as register_rule
from doubleback.rules import unregister as unregister_rule
from support import fuzz
from support.fuzz import PENALTIES, Case, draw, operators_seen, run, run_all, script, shrink
from support.vocabulary import NAMES, UNCAPTURED
from tools import fuzz as tool

PROGRAMS = 27
SEEDS = range(3)
# Rules whose operators no network of the vocabulary leaves in its graph.
NOT_DRAWN = frozenset({
    # composite: the capture leaves their parts instead
    "_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", "alias.default",
    "broadcast_to.default",
    "chunk.default", "contiguous.default", "expand_as.default", "flatten.using_ints",
    "hardshrink.default", "imag.default", "movedim.int", "movedim.intlist", "numpy_T.default",
    "positive.default", "real.default", "reshape.default", "reshape_as.default",
    "softshrink.default", "split.sizes", "swapaxes.default", "type_as.default", "unflatten.int",
    "view_as.default", "to.device", "to.dtype", "to.dtype_layout", "detach.default",
    "lift_fresh.default", "lift_fresh_copy.default", "sub.Scalar", "fill.Scalar",
    # parts: the capture leaves the whole instead (conv2d, softmax, pad, interpolate)
    "_softmax.default", "_log_softmax.default", "convolution.default", "constant_pad_nd.default",
    "reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default",
    "replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default",
    "upsample_bicubic2d.default", "upsample_bilinear2d.default", "upsample_linear1d.default",
    "upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default",
    "upsample_trilinear3d.default",
    # no second derivative in stock autograd: tests/test_rules.py
    "cdist.default", "_cdist_forward.default", "pdist.default", "_pdist_forward.default",
    # become zeros
    "empty.memory_format", "empty_like.default", "new_empty.default",
    # the size of the result depends on values
    "repeat_interleave.Tensor",
    # casts of constants, which are in the zoo (bert, integer_path_only); a cast of an activation
    # rounds, so that float64 parity would be lost to the last bit of float32
    "_to_copy.default",
    # in the zoo: tied weights, zero states, slices assigned into zeros
    "t.default", "new_zeros.default", "zeros_like.default",
})  # fmt: skip


def fixed(number: int, seed: int) -> Case:
    """Each PROGRAMS-th operator of the vocabulary once, in one network; then the others. Sweeps run
    node by node, which is what the rules are; flattening takes longer than all else together, and
    two programs show that it changes nothing."""
    captured = [name for name in NAMES if name not in UNCAPTURED]
    names = captured[number::PROGRAMS] if number < PROGRAMS else UNCAPTURED
    names = [*names[seed:], *names[:seed]]
    steps = tuple((name, k % 3, (k + 1) % 3, k) for k, name in enumerate(names))
    path = "flat" if number % 14 == 1 else ("nodes", "default", "accumulate")[number % 3]
    return Case(seed, steps, PENALTIES[number % len(PENALTIES)], path, batches=(3,))


def told(case: Case, verdict: fuzz.Verdict) -> str:
    small = shrink(case, verdict)
    return f"\n{script(small, run(small))}"


def test_every_operator_and_every_rule():
    """The fixed programs hold every operator that has a rule; what they cannot hold is listed."""
    seen: set[str] = set()
    with operators_seen(seen):
        for number in range(PROGRAMS + 1):
            for seed in range(5):
                case = fixed(number, seed)
                verdict = run(case)
                assert not verdict.failed, told(case, verdict)
                assert verdict.captured is (number < PROGRAMS), verdict.reasons
                if verdict.kind == "agrees":
                    break
            else:
                raise AssertionError(f"program {number} is {verdict.kind}: {verdict.detail}")
    rules = {str(op).removeprefix("aten.") for op in registered() if str(op) not in seen}
    assert rules <= NOT_DRAWN, f"add to the vocabulary: {sorted(rules - NOT_DRAWN)}"
    assert len(NAMES) >= 500 and len(seen) >= 250


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_cases(seed):
    cases = draw(seed)
    for case, verdict in zip(cases, run_all(cases), strict=True):
        assert not verdict.failed, told(case, verdict)


@pytest.fixture
def wrong_erf():
    """A rule whose tangent is a tenth too long."""
    op = torch.ops.aten.erf.default
    right = find_rule(op)
    unregister_rule(op)
    register_rule(op, replace(right, tangent=lambda call, q: 1.1 * right.tangent(call, q)))
    yield
    unregister_rule(op)
    register_rule(op, right)


CASE = Case(
    5, (("sin", 0, 0, 1), ("erf", 0, 0, 4), ("tanh", 1, 0, 5), ("add", 0, 1, 2)), "match",
    "nodes", frozen=True, attribute=True, batches=(3, 4, 3),
)  # fmt: skip


def test_a_wrong_rule_is_found_and_shrunk(wrong_erf):
    verdict = run(CASE)
    assert verdict.kind == "wrong"
    small = shrink(CASE, verdict)
    assert [name for name, *_ in small.steps] == ["erf"] and small.batches == (3,)
    assert (small.frozen, small.attribute) == (False, False)


def test_a_failure_is_printed_as_a_program(capsys):
    text = script(CASE, run(CASE))
    assert len(text.splitlines()) <= 20 and "torch.erf" in text
    exec(compile(text, "printed", "exec"), {})
    assert "agrees" in capsys.readouterr().out


def test_an_excuse_is_no_agreement(wrong_erf, monkeypatch):
    """Where the oracle moves by itself further than the two differ."""
    monkeypatch.setattr(fuzz, "shake", lambda *args: defaultdict(lambda: 1.0))
    assert run(CASE).kind == "unstable"


def test_the_slope_of_hardsigmoid_may_be_rounded_and_nothing_else(monkeypatch):
    """PyTorch's own backward, which the patch leaves as it is, rounds it to float32."""
    steps = (("vector_to_image", 0, 0, 1), ("hardsigmoid", 0, 0, 3), ("hardsigmoid", 0, 0, 4))
    case = Case(3, steps, path="patch", wrt="both", batches=(4,))
    assert run(case).kind == "agrees"
    monkeypatch.setattr(fuzz, "with_rounded_slope", lambda *args: defaultdict(float))
    monkeypatch.setattr(fuzz, "shake", lambda *args: defaultdict(float))
    assert run(case).kind == "wrong"


def test_a_wrong_rule_is_found_beside_a_rounded_slope(wrong_erf):
    steps = (("hardsigmoid", 2, 2, 72), ("erf", 0, 0, 4), ("erf", 0, 0, 5))
    assert run(Case(5, steps, "match", "nodes", wrt="both", batches=(3,))).kind == "wrong"


def some_end_badly(pipe, said):
    """A process of the fuzzer in which one case crashes, one hangs and one is wrong."""
    pipe.send(("ready",))
    while (cases := pipe.recv()) is not None:
        seed = cases[0].seed
        if seed == 1:
            os._exit(3)
        if seed == 2:
            time.sleep(100)
        kinds = ["agrees", "wrong" if seed == 3 else "agrees"]
        text = "a script" if seed == 3 else None
        verdicts = [fuzz.Verdict(kind) for kind in kinds]
        pipe.send(("done", seed, verdicts, {"aten.sin.default"}, text))


def test_a_case_that_crashes_or_hangs_loses_no_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tool, "work", some_end_badly)
    monkeypatch.setattr(tool, "START", "fork")  # quick
    tally = tool.Tally()
    networks = ([Case(seed, (("sin", 0, 0, 1),))] * 2 for seed in range(6))
    done = set(tool.crowd(networks, jobs=2, limit=1.0, end=float("inf"), tally=tally))
    assert done == set(range(6)) and dict(tally.kinds) == {
        "agrees": 7, "crashes": 1, "hangs": 1, "wrong": 1, "left out": 2
    }  # fmt: skip
    found = {failure["seed"]: failure["kind"] for failure in tally.failures}
    assert found == {1: "crashes", 2: "hangs", 3: "wrong"}
    assert "ended with 3" in capsys.readouterr().out
    record = {"started": "today", "seeds_from": 0, "paths": [], **tally.document()}
    file = tmp_path / "fuzz.json"
    for _ in range(2):  # the second replaces the first
        tool.write(file, tool.kept(file, record))
    total = json.loads(file.read_text())["total"]
    assert (total["networks"], total["cases"]) == (6, 12)
    assert (total["agree"], total["failed"]) == (7, 3)


@pytest.mark.parametrize("name", ["bernoulli_share", "bernoulli_in_place", "alpha_dropout"])
def test_draws_in_the_order_of_memory(name):
    """Where x is laid out otherwise, penalised or not."""
    ways = [("nodes", "x"), ("nodes", "z"), ("accumulate", "z")]
    cases = [
        Case(1, ((name, 0, 0, 66), (name, 0, 0, 3)), path=path, wrt=wrt, layout="transposed")
        for path, wrt in ways
    ]
    assert [verdict.kind for verdict in run_all(cases)] == ["agrees"] * len(ways)
