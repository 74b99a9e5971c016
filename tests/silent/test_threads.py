"""Several threads and one model: a capture in one must not be seen by the forward of another."""

from __future__ import annotations

import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch.fx._symbolic_trace import is_fx_tracing

import doubleback as db
from support.stock import assert_close, numbers, pair, stock_penalty

TRIALS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(5, 8)]
    for _ in range(3):
        layers += [nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8).eval()]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def together(*jobs) -> list:
    """Each job in a thread of its own, begun at the same moment; what they returned."""
    results: list = [None] * len(jobs)
    errors: list = []
    gate = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        try:
            gate.wait()
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", db.CaptureWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, repr(errors[0])
    assert not [w for w in told if issubclass(w.category, db.CaptureWarning)]
    assert not is_fx_tracing(), "after this torch.compile refuses everything"
    return results


def assert_plain(net: nn.Module, before: dict) -> None:
    """Parameters and buffers are the tensors that they were."""
    for name, t in net.state_dict(keep_vars=True).items():
        assert t is before[name], f"{name} is another tensor now: {type(t).__name__}"
        assert type(t) in (torch.Tensor, nn.Parameter)


def test_the_first_call_in_two_threads():
    for trial in range(TRIALS):
        model, twin = pair(network())
        before = model.net.state_dict(keep_vars=True)
        given = [numbers(2 * trial + i, 4, 5) for i in range(2)]
        found = together(*(partial(model, x) for x in given))
        assert_plain(model.net, before)
        for x, (out, penalty) in zip(given, found, strict=True):
            wanted, values = stock_penalty(twin, (x,))
            assert_close(out, wanted, f"trial {trial}, out")
            assert_close(penalty, values.mean(), f"trial {trial}, penalty")


def test_two_models_of_one_network_in_two_threads():
    for trial in range(TRIALS):
        model, twin = pair(network())
        other = db.Penalised(model.net, db.OutputGradient())
        before = model.net.state_dict(keep_vars=True)
        x = numbers(trial, 4, 5)
        found = together(partial(model, x), partial(other, x))
        assert_plain(model.net, before)
        wanted, values = stock_penalty(twin, (x,))
        for out, penalty in found:
            assert_close(out, wanted, f"trial {trial}, out")
            assert_close(penalty, values.mean(), f"trial {trial}, penalty")


def test_the_network_alone_while_another_thread_meets_a_new_shape():
    model, twin = pair(network())
    x = numbers(0, 3, 5)
    with torch.no_grad():
        wanted = twin(x)
    stop = threading.Event()

    def captures() -> None:
        try:
            for size in range(4, 10):
                model(numbers(size, size, 5))
        finally:
            stop.set()

    def evaluates() -> list:
        seen = []
        with torch.no_grad():
            while not stop.is_set():
                seen.append(model.net(x))
        return seen

    _, seen = together(captures, evaluates)
    assert seen
    for i, out in enumerate(seen):
        assert_close(out, wanted, f"evaluation {i}")


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_model_per_thread(how):
    """Models that share nothing train side by side, each as it would alone."""
    pairs = [pair(network()) for _ in range(2)]
    rows = [[numbers(10 * k + i, 4, 5) for i in range(5)] for k in range(2)]

    def train(model: db.Penalised, batches: list) -> None:
        for x in batches:
            if how == "backward":
                out, penalty = model(x)
                (out.square().sum(1).mean() + 0.5 * penalty).backward()
            else:
                model.accumulate(x, torch.zeros(4, 1).double(), loss="mse", weight=0.5)

    together(*(partial(train, m, b) for (m, _), b in zip(pairs, rows, strict=True)))
    for (model, twin), batches in zip(pairs, rows, strict=True):
        for x in batches:
            out, values = stock_penalty(twin, (x,))
            (out.square().sum(1).mean() + 0.5 * values.mean()).backward()
        found = dict(model.net.named_parameters())
        for name, t in twin.named_parameters():
            assert_close(found[name].grad, t.grad, name)


def dynamo_settings() -> dict:
    """All of them that are plain, as this thread sees them."""
    held = config.get_config_copy()
    return {name: v for name, v in held.items() if type(v) in (bool, int, float, str)}


def test_settings_of_pytorch_are_left_as_they_were():
    """Of two calls the one that came first leaves first; what runs in them sees the caller's."""
    before = dynamo_settings()
    seen: list = []
    one, both, left = threading.Event(), threading.Event(), threading.Event()

    def first(out):
        seen.append(dynamo_settings())
        one.set()
        assert both.wait(60)
        return out

    def second(out):
        seen.append(dynamo_settings())
        both.set()
        assert left.wait(60)
        return out

    def call(v, start, end):
        model = db.Penalised(network(), db.Custom(v), sweeps=True, strict=True)
        assert start is None or start.wait(60)
        with torch.no_grad():
            model(torch.randn(4, 5))
        end.set()

    together(partial(call, first, None, left), partial(call, second, one, threading.Event()))
    assert seen == [before, before] and dynamo_settings() == before
