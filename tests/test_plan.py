"""What a plan decides before anything runs, on networks small enough to say it by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.graph import draws
from doubleback.plan import _layouts
from support.plans import plan_of


def planned(forward, *sizes, layers=None, penalty=None):
    """The plan of a network with this forward pass, of `layers`, on random numbers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers or [nn.Linear(4, 4)])

        def forward(self, x):
            return forward(x, *self.layers)

    model = db.Penalised(Net(), penalty or db.OutputGradient("sum"), sweeps=True)
    return plan_of(model, torch.randn(*(sizes or (3, 4))))


def named(plan, name):
    (step,) = [s for s in plan.steps if name in str(s.node.op)]
    return step


def deep(x, *layers):
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


def test_what_the_sweeps_start_from():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)]
    plan = planned(deep, layers=layers)
    assert len(plan.effective) == len(plan.constants) == 2
    assert plan.trained.issuperset(plan.effective)
    assert not plan.trained.intersection(plan.constants)
    assert {v for s in plan.steps for v in s.node.inputs} >= {*plan.leaves}


@pytest.mark.parametrize(("most", "early"), [(2, 1), (16, 3)])
def test_gradients_of_a_stretch_are_complete_at_its_end(monkeypatch, most, early):
    monkeypatch.setattr("doubleback.plan.STRETCH", 1)
    monkeypatch.setattr("doubleback.plan.STRETCHES", most)
    plan = planned(deep, layers=[nn.Linear(4, 4) for _ in range(4)])
    *whole, last = plan.stretches
    assert len(whole) == early
    assert [i for s in plan.stretches for i in s.steps] == list(range(len(plan.steps)))
    given = [v for s in plan.stretches for v in s.values]
    assert sorted(given) == sorted((*plan.penalised, *plan.effective))
    assert {*last.values} >= {*plan.penalised}
    backwards = plan.steps[::-1]
    for stretch in whole:
        readers = [i for i, s in enumerate(backwards) if {*s.node.inputs} & {*stretch.values}]
        assert max(readers) == stretch.steps[-1]


def test_no_derivative_reaches_a_number_that_counts():
    def chosen(x, layer):
        found, where = layer(x).topk(2)
        return (found.sin() * (2.0 * where.to(x.dtype))).sum(1, keepdim=True)

    plan = planned(chosen)
    where = named(plan, "topk").node.outputs[1]
    scaled = [s for s in plan.steps if s.node.inputs and "sin" not in str(s.node.op)]
    assert where not in plan.trained | plan.reaching
    assert not next(s for s in scaled if where in s.node.inputs).differentiated
    doubled = next(s for s in scaled if "mul" in str(s.node.op))
    assert not doubled.differentiated
    assert doubled.node.inputs[0] not in plan.kept


def test_whatever_is_not_kept_is_dropped():
    def pooled(x, layer):
        return F.max_pool2d(layer(x), 2, return_indices=True)[0].flatten(1)

    plan = planned(pooled, 2, 1, 4, 4, layers=[nn.Conv2d(1, 2, 1)])
    values = {v for s in plan.steps for v in (*s.node.inputs, *s.node.outputs)}
    dropped = [*chain(*plan.drop_forward)]
    assert len(dropped) == len({*dropped})
    assert {*dropped} == values - plan.kept - {plan.target, *plan.outputs}


def test_at_other_sizes():
    plan = planned(deep)
    assert plan.at(plan.graph) is plan
    other = replace(plan.graph)
    assert plan.at(other).graph is other


@pytest.mark.parametrize("first", [True, False])
def test_numbers_are_drawn_in_the_network_s_order(first):
    """Before the sweeps if before all that x has to do with, else among them."""

    def noisy(x, layer):
        noise = torch.rand(4) if first else None
        h = F.dropout(layer(x), 0.5, training=True)
        return h + (torch.rand(4) if noise is None else noise)

    plan = planned(noisy)
    assert any(draws(n.op) for n in plan.prelude) == first


@pytest.mark.parametrize(
    ("forward", "straight"),
    [
        (lambda x, layer: torch.relu(layer(x)), True),
        (lambda x, layer: layer(x) * x, False),
        (lambda x, layer: layer(x) * 3.0, True),
        (lambda x, layer: torch.tanh(layer(x)), False),
    ],
)
def test_piecewise_linear(forward, straight):
    assert planned(forward).piecewise_linear == straight


def test_callers_may_write_into_what_no_derivative_reads():
    plan = planned(lambda x, layer: layer(x.flatten(1)), 3, 2, 2)
    assert plan.beside == {*plan.penalised}  # its flattened memory is read
    plan = planned(lambda x, layer: layer(x).unflatten(1, (2, 2)))
    assert not plan.beside.intersection(plan.outputs)


def test_channels_last_on_a_gpu():
    layers = [nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 3), nn.Linear(8, 1)]

    def forward(x, depthwise, dense, head):
        return head(dense(depthwise(x)).flatten(1))

    plan = planned(forward, 2, 6, 6, 6, layers=layers)
    graph, gpu = plan.graph, torch.device("cuda")
    values = [m and replace(m, device=gpu) for m in graph.values]
    there = replace(graph, values=tuple(values))
    deep_filter, filters = (s.node.inputs[1] for s in plan.steps[:2])
    outer = (*plan.effective, *plan.constants)
    images, taps = _layouts(there, plan.steps, plan.penalised, outer)
    assert images == {*plan.penalised, filters}
    assert taps == {deep_filter}
    values[plan.penalised[0]] = graph.values[plan.penalised[0]]
    mixed = replace(graph, values=tuple(values))
    for where, steps in ((graph, plan.steps), (mixed, plan.steps), (there, plan.steps[2:])):
        assert _layouts(where, steps, plan.penalised, outer) == (frozenset(), frozenset())
