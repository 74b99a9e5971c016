"""Other people's networks, and every operator of PyTorch's: the record of the last full run, and,
marked `zoo` and `operators`, the run itself.

`make test-zoo` and `make test-operators` run them; `tools/zoo.py --json` and `tools/operators.py
--json` write the records.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import doubleback as db
from doubleback.rules import coordinatewise
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
    assert found["captured"] >= 0.93 * found["runs"]
    assert all(row["captured"] or row["why"] for row in found["results"])


def test_the_record_is_of_this_catalogue():
    found = record("zoo.json")
    ran = {(row["network"], row["mode"]) for row in found["results"]}
    names = {name for name, _ in ran}
    assert ran == {(n.name, mode) for n in families.NETWORKS if n.name in names for mode in n.modes}
    assert len(ran) == len(found["results"]) == found["runs"]
    assert len(names) == found["families"]


def test_every_operator_without_a_second_derivative_has_a_reason():
    found = record("operators.json")
    assert found["count"]["wrong"] == 0
    assert not [fault for row in found["results"] for fault in one_operator.faults(row)]
    named = {row["operator"] for row in found["results"]}
    assert {name for _, name in one_operator.REASONS} <= named


# ----------------------------------------------------------------------------- the machine itself


def network(make) -> architectures.Network:
    def inputs(g):
        return (torch.randn(2, 3, generator=g, dtype=torch.float64),), {}

    return architectures.Network("own/net", make, inputs)


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())


def wrong() -> torch.nn.Module:
    """With a rule for tanh whose second derivative has lost its factor 2; in this process alone."""
    rule = coordinatewise(
        "output",
        first=lambda call, y: 1 - y.square(),
        second=lambda call, y: -y * (1 - y.square()),
    )
    db.register_rule(torch.ops.aten.tanh.default, rule, replace=True)
    return plain()


def test_a_right_gradient_and_a_wrong_one():
    networks = [network(wrong), network(plain)]
    rows = list(architectures.examine_all(networks, 120.0))
    assert [row["mode"] for row in rows] == ["eval", "train"] * 2
    assert [row["verdict"] for row in rows] == ["wrong"] * 2 + ["agrees"] * 2
    assert all(row["captured"] for row in rows)
    assert rows[0]["worst"]["way"] == "penalised" and rows[0]["errors"]["patch"] < 1e-10


def test_a_crash_and_an_endless_loop_lose_nothing():
    def ends(item):
        yield item
        if item == 2:
            os._exit(3)
        while item == 3:
            time.sleep(1)

    told = [(item, rows, why) for item, rows, why in forked(ends, [1, 2, 3, 4], 2.0)]
    assert [(item, rows) for item, rows, _ in told] == [(i, [i]) for i in (1, 2, 3, 4)]
    assert [why and why.split()[0] for *_, why in told] == [None, "the", "not", None]


# ------------------------------------------------------------------------------------- the runs


@pytest.mark.zoo
@pytest.mark.parametrize("network", families.NETWORKS, ids=lambda n: n.name)
def test_a_network_of_other_people_s(network):
    if importlib.util.find_spec(network.package) is None:
        pytest.skip(f"needs {network.package}")
    (found,) = forked(architectures.examine, [network], LIMIT)
    _, rows, why = found
    assert why is None
    assert [row["verdict"] for row in rows] == ["agrees"] * len(network.modes), rows


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
