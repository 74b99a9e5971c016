"""Other people's networks, and every operator of PyTorch's: the record of the last full run, and,
marked `zoo` and `operators`, the run itself.

`make test-zoo` and `make test-operators` run them; `tools/zoo.py --json` and `tools/operators.py
--json` write the records.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from support import architectures, families, one_operator
from support.forked import forked

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LIMIT = 600.0  # seconds


def record(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------ the records


def test_no_network_is_wrong_and_nearly_all_are_captured():
    found = record("zoo.json")
    assert {row["verdict"] for row in found["results"]} == {"agrees"}
    assert found["families"] >= 150
    assert found["captured"] >= 0.95 * found["runs"]
    assert all(row["captured"] or row["why"] for row in found["results"])


def test_the_record_is_of_this_catalogue():
    rows = record("zoo.json")["results"]
    ran = {(row["network"], row["mode"]) for row in rows}
    assert ran == {(n.name, mode) for n in families.NETWORKS for mode in architectures.MODES}


def test_every_operator_without_a_second_derivative_has_a_reason():
    found = record("operators.json")
    assert found["count"]["wrong"] == 0
    assert not [fault for row in found["results"] for fault in one_operator.faults(row)]
    named = {row["operator"] for row in found["results"]}
    assert {name for _, name in one_operator.REASONS} <= named


# ----------------------------------------------------------------------------- the machine itself


def plain(net=None) -> architectures.Network:
    def make():
        return net or torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())

    def inputs(g):
        return (torch.randn(2, 3, generator=g, dtype=torch.float64),), {}

    return architectures.Network("own/net", make, inputs)


def test_a_network_that_agrees():
    rows = list(architectures.examine_all([plain()], 120.0))
    assert [r["mode"] for r in rows] == ["eval", "train"]
    assert all(r["captured"] and r["verdict"] == "agrees" for r in rows)


class Lying(torch.autograd.Function):
    """A second derivative that depends on how often it was asked for."""

    asked = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        Lying.asked += 1
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 * Lying.asked


class Wrong(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(3, 4)

    def forward(self, x):
        return Lying.apply(self.dense(x))


def test_a_wrong_gradient_is_found_and_a_crash_loses_nothing():
    def ends(item):
        yield item
        if item == 2:
            torch._C._cuda_init if item is None else __import__("os")._exit(3)

    told = list(forked(ends, [1, 2, 3], 60.0))
    assert [(i, r, bool(w)) for i, r, w in told] == [
        (1, [1], False), (2, [2], True), (3, [3], False)
    ]  # fmt: skip
    rows = list(architectures.examine_all([plain(Wrong())], 120.0))
    assert {r["verdict"] for r in rows} == {"wrong"}
    assert not any(r["captured"] for r in rows)


# ------------------------------------------------------------------------------------- the runs


@pytest.mark.zoo
@pytest.mark.parametrize("network", families.NETWORKS, ids=lambda n: n.name)
def test_a_network_of_other_people_s(network):
    if importlib.util.find_spec(network.package) is None:
        pytest.skip(f"needs {network.package}")
    (found,) = forked(architectures.examine, [network], LIMIT)
    _, rows, why = found
    assert why is None
    assert [row["verdict"] for row in rows] == ["agrees"] * len(architectures.MODES), rows


def names() -> list[str]:
    found = importlib.util.find_spec("expecttest") is not None
    return list(one_operator.operators()) if found else []


@pytest.mark.operators
def test_every_operator():
    pytest.importorskip("expecttest", reason="torch's database of operators imports it")
    examine = partial(one_operator.examine, count=2)
    faults = []
    for name, rows, why in forked(examine, names(), LIMIT):
        faults += [f"{name}: {why}"] if why else []
        faults += [fault for row in rows for fault in one_operator.faults(row)]
    assert not faults, "\n".join(faults)
