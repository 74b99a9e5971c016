"""Flat graphs by Inductor: how they are called and cached, and what is held between sweeps."""

import os
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import doubleback as db
from doubleback.kernels import AGAIN, BOUNDARY, boundary, for_compiler, had_again
from doubleback.run import inductor, straight_line

aten = torch.ops.aten


# Calls ----------------------------------------------------------------------------------------


def sum_of_three(a, b, c, d):
    return (a.mm(b) + c.mm(d) + d.mm(c),)


def compiled(compiler=True):
    tensors = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]
    graph = make_fx(sum_of_three, tracing_mode="fake")(*tensors)
    straight_line.clean(graph, for_compiler=True)
    return inductor.compiled(graph, compiler), tensors


@pytest.mark.parametrize("compiler", [True, "default"])
def test_compiled_graphs_take_their_inputs_out_of_the_list(compiler):
    run, tensors = compiled(compiler)
    for _ in range(2):
        given = list(tensors)
        (found,) = run(given)
        assert not given
        torch.testing.assert_close(found, sum_of_three(*tensors)[0])


def test_compiled_graphs_free_an_input_at_its_last_use():
    library = torch.library.Library("doubleback_tests", "FRAGMENT")
    library.define("seen(Tensor t) -> Tensor")
    torch.library.register_fake("doubleback_tests::seen", torch.empty_like, lib=library)
    alive = []

    def seen(t):
        alive.append(first() is not None)
        return t.clone()

    library.impl("seen", seen, "CPU")
    tensors = [torch.randn(4, 4) for _ in range(2)]
    fn = lambda a, b: (torch.ops.doubleback_tests.seen(a.sin()) @ b,)  # noqa: E731
    graph = make_fx(fn, tracing_mode="fake")(*tensors)
    straight_line.clean(graph, for_compiler=True)
    run = inductor.compiled(graph, True)
    for _ in range(2):
        given = [t.clone() for t in tensors]
        first = weakref.ref(given[0])
        run(given)
    assert alive[-2:] == [False, False]


COMPILED_ONCE = """
import torch, doubleback as db
from torch._dynamo.utils import counters
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True)
model.accumulate(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], found["fxgraph_cache_bypass"])
"""


@pytest.mark.long
def test_the_next_process_does_not_compile_again(tmp_path):
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILED_ONCE], capture_output=True, text=True, check=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        seen.append(done.stdout.split())
    assert seen == [["1", "0", "0"], ["0", "1", "0"]]


def test_compiled_graphs_are_kept_on_disk():
    """A second model does not compile again."""
    with fresh_cache():
        counters.clear()
        for _ in range(2):
            run, tensors = compiled()
            run(list(tensors))
        found = counters["inductor"]
    assert found["fxgraph_cache_bypass"] == 0
    assert (found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]) == (1, 1)


def test_compiled_graphs_heed_deterministic_algorithms(monkeypatch):
    run, tensors = compiled()
    run(list(tensors))
    made = []
    by_inductor = inductor._by_inductor
    monkeypatch.setattr(
        inductor, "_by_inductor", lambda *given: made.append(given) or by_inductor(*given)
    )
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            (found,) = run(list(tensors))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) == 1
    torch.testing.assert_close(found, sum_of_three(*tensors)[0])


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_that_lie_inside_of_longer_ones_are_copied(turned):
    """As those that Inductor hands on after a concatenation may."""
    stand_in = torch.randn(6, 4).t() if turned else torch.randn(4, 6)
    graph = make_fx(lambda a, b: a.sin() + b)(stand_in, torch.ones(4, 6)).graph
    seen = []
    run = inductor.laid_out(graph, [stand_in, torch.ones(4, 6)], lambda given: seen.extend(given))
    whole = torch.randn(6, 9)[:, :4].t() if turned else torch.randn(4, 9)[:, :6]
    for given in (whole, whole.contiguous(), stand_in):
        seen.clear()
        run([given, torch.ones(4, 6)])
        assert seen[0].stride() == stand_in.stride() and torch.equal(seen[0], given)


def test_what_a_graph_writes_to_is_not_copied():
    x = torch.randn(4, 6)
    graph = make_fx(lambda a: a.add_(1))(x).graph
    whole = torch.randn(4, 9)[:, :6]
    seen = []
    inductor.laid_out(graph, [x], lambda given: seen.extend(given))([whole])
    assert seen[0] is whole


# Between sweeps -------------------------------------------------------------------------------


def held(fn, *tensors, recompute=False):
    """The graph of `fn`, and by target what is held in it."""
    with for_compiler():
        graph = make_fx(fn, tracing_mode="fake")(*tensors)
    inductor.hold(graph, recompute)
    marks = [node.args[0] for node in graph.graph.nodes if node.target is inductor.HELD]
    targets = [node.target for node in graph.graph.nodes]
    assert BOUNDARY not in targets
    for given, expected in zip(graph(*tensors), fn(*tensors), strict=True):
        assert torch.equal(given, expected)
    return targets, [node.target for node in marks]


def test_what_a_later_sweep_reads_is_held():
    def fn(x):
        first, second = x @ x, x.sum(0)
        boundary((None, first))
        return first.t() + 1, second + first

    _, marks = held(fn, torch.randn(3, 3))
    assert sorted(map(str, marks)) == ["aten.mm.default", "aten.sum.dim_IntList"]


def test_views_and_inputs_are_not_held_themselves():
    def fn(x, y):
        a, b = (x @ x).view(2, 2, 4).unbind(0)
        boundary((a,))
        return a + b, x + y.t()

    _, marks = held(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert marks == [aten.mm.default]


def count(targets, op) -> int:
    return targets.count(op)


def test_a_chain_behind_a_product_is_computed_again_by_each_later_sweep():
    def fn(x):
        z = x @ x
        a = z.tanh().exp()
        b = a.sum()
        boundary((b,))
        c = (a * b).sum()
        boundary((c,))
        return c * a, z.sin()

    targets, marks = held(fn, torch.randn(3, 3))
    assert marks == [aten.mm.default, aten.sum.default, aten.sum.default]
    assert count(targets, aten.mm.default) == 1 and count(targets, aten.tanh.default) == 3


def test_what_a_product_reads_later_is_held_unless_asked_otherwise():
    def fn(x):
        z = x @ x
        a = z.tanh()
        b = a @ x
        boundary((b,))
        return a @ b, z * b

    targets, marks = held(fn, torch.randn(3, 3))
    assert count(targets, aten.tanh.default) == 1
    assert sorted(map(str, marks)) == ["aten.mm.default", "aten.mm.default", "aten.tanh.default"]
    targets, marks = held(fn, torch.randn(3, 3), recompute=True)
    assert count(targets, aten.tanh.default) == 2 and marks == [aten.mm.default] * 2


def chain_of_products(width, depth=8):
    """tanh between products: a later sweep reads it for a product, and what it is computed from."""

    def fn(x):
        layers = []
        a = x
        for _ in range(depth):
            z = a @ x
            a = z.tanh()
            layers.append((z, a))
        last = a.sum(0)
        boundary((last,))
        return tuple((a @ x) * z + last for z, a in layers)

    return fn, torch.randn(width, width, dtype=torch.float64)


def test_as_much_is_computed_again_as_the_estimated_time_allows(monkeypatch):
    """Of the time that it takes to compute all of it again, a part is allowed."""
    fn, x = chain_of_products(64)
    with for_compiler():
        graph = make_fx(fn, tracing_mode="fake")(x).graph
    least, most = (inductor.traffic(*inductor._cut(deepcopy(graph), share)) for share in (0, 1))
    assert most > least
    again = []
    for part in (0.0, 0.6, 1.1):
        monkeypatch.setattr(inductor, "SLOWER", part * (most / least - 1))
        assert inductor.traffic(*inductor.shorten(graph, None)) <= least + part * (most - least)
        targets, marks = held(fn, x, recompute=None)
        again.append(count(targets, aten.tanh.default) - 8)
        assert len(marks) == 17 - again[-1]
    assert 0 <= again[0] < again[1] < again[2] == 8


def test_the_least_number_of_bytes_is_held():
    def fn(x):
        wide = x @ x.t()
        narrow = (wide[:, :1] * 2).tanh()
        boundary((narrow,))
        return narrow + 1, narrow.exp()

    _, marks = held(fn, torch.randn(6, 6))
    assert marks == [aten.tanh.default]


def test_random_numbers_and_what_is_written_to_are_not_computed_again():
    def fn(x):
        noise = torch.rand_like(x)
        a = x.exp()
        b = a.sin()
        a.add_(1)
        boundary((a,))
        return noise + 1, b + a

    with for_compiler():
        graph = make_fx(fn, tracing_mode="fake")(torch.randn(3, 3))
    inductor.hold(graph, True)
    targets = [node.target for node in graph.graph.nodes]
    for op in (aten.rand_like.default, aten.exp.default, aten.sin.default, aten.add_.Tensor):
        assert count(targets, op) == 1


def test_a_result_is_held_anyway():
    def fn(x):
        z = x @ x
        a = z.exp()
        boundary((a,))
        return a, a.sin()

    targets, _ = held(fn, torch.randn(3, 3))
    assert count(targets, aten.exp.default) == 1


def test_what_an_index_picks_from_is_held():
    places = torch.tensor([[0, 2], [1, 1]])

    def fn(x, places):
        return ((x.double() * 2).float().gather(1, places) + 1,)

    _, marks = held(fn, torch.randn(2, 3), places)
    assert marks == [aten._to_copy.default]


class Deep(nn.Module):
    """Layers whose formulas Inductor would take apart: norms in float32 between bfloat16."""

    def __init__(self, width=32, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def peak(code):
    """Most bytes of buffers at a time, read off Inductor's code."""
    sizes = {"torch.bfloat16": 2, "torch.float32": 4, "torch.bool": 1, "torch.int64": 8}
    made = re.compile(r"(buf\d+) = empty_strided\w+\(\((.*?)\), \(.*?\), (torch\.\w+)\)")
    taken = re.compile(r"(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b.*; del")
    live, most = {}, 0
    for line in code[code.index("def call(") :].splitlines():
        for name, shape, dtype in made.findall(line):
            live[name] = sizes[dtype] * torch.Size(eval(f"[{shape}]")).numel()
        for name, other in taken.findall(line):
            live[name] = live.pop(other)
        for name in re.findall(r"^ *del (buf\d+)", line):
            live.pop(name, None)
        most = max(most, sum(live.values()))
    return most


def peak_of_a_step(monkeypatch, marked):
    """Of one compiled step. Its kernels are not compiled, which takes a minute; nor do they run."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    if not marked:
        monkeypatch.setattr(inductor, "_mark", lambda graph, node: node)
        monkeypatch.setattr(inductor, "heuristics", nullcontext)
    net = Deep().to(torch.bfloat16)
    x, y = torch.randn(256, 32, dtype=torch.bfloat16), torch.randint(32, (256,))
    loss = db.LossGradient("cross_entropy")
    model = db.Penalised(net, loss, compile=True, recompute=False)
    with config.patch({"force_disable_caches": True, "cpp.simdlen": 1}):
        _, (code,) = run_and_get_code(model.accumulate, x, y, loss="cross_entropy", weight=1.0)
    return peak(code)


def test_lifetimes_of_a_compiled_step(monkeypatch):
    """Four norms and activations: less is held than Inductor would hold by itself."""
    with monkeypatch.context() as patch:
        alone = peak_of_a_step(patch, marked=False)
    assert peak_of_a_step(monkeypatch, marked=True) < 0.85 * alone


def test_a_compiled_step_for_all_sizes_is_compiled_once(monkeypatch):
    """What is estimated on the way asks nothing about an open size, which would close it."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    made = []
    compiled_open = inductor.compiled_open
    monkeypatch.setattr(
        inductor, "compiled_open", lambda *given: made.append(given) or compiled_open(*given)
    )
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True)
    with config.patch({"force_disable_caches": True}):
        for rows in (6, 9, 14, 23, 40):
            x, y = torch.randn(rows, 8), torch.randint(3, (rows,))
            model.accumulate(x, y, loss="cross_entropy", weight=1.0)
    assert len(made) == 1


def test_an_estimate_refuses_nothing():
    """PyTorch's own formulas raise at shapes that its kernels take (grouped queries)."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(aten.mm.default, (a, b))
    a.meta["val"], b.meta["val"] = torch.empty(2, 3), torch.empty(4, 5)
    product.meta["val"] = torch.empty(2, 5)
    graph.output((product,))
    assert inductor._operations(product) == 0
    assert inductor.traffic(graph, dict.fromkeys(graph.nodes, 0)) == 4 * (6 + 20 + 10)


class Picked(nn.Module):
    def forward(self, x):
        return torch.sin(x).index_select(0, torch.tensor([0, 1, 1, 0]))


def test_nothing_is_written_into_rows_that_lie_in_one_place():
    """vmap adds to zeros that it expands, and Inductor would add into these themselves."""
    net = nn.Sequential(nn.Linear(3, 2), Picked(), nn.Linear(2, 2)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    results = []
    for compile in (True, False):
        _, gradient = db.WithGradient(net, v=[0, 1], compile=compile)(x)
        gradient.square().sum().backward()
        results.append([gradient, *[p.grad for p in net.parameters() if p.grad is not None]])
        net.zero_grad()
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=1e-14)


def test_nor_in_a_loss():
    index = torch.tensor([0, 1, 1, 0])

    def loss(weight):
        def added(row):
            return torch.zeros(2, 3, dtype=weight.dtype).index_add(0, index, row)

        return torch.func.vmap(added)(weight).pow(3).sum()

    weight = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(weight), weight)
    db.compile(loss)(weight).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-14)


# From one graph to the next -------------------------------------------------------------------


def two_graphs(fn, count, *tensors, recompute=True):
    """fn's graph, how its results after the first `count` are had again, and both their results."""
    with for_compiler():
        graph = make_fx(fn, tracing_mode="symbolic")(*tensors)
    recipe = inductor.hand_less(graph, count, recompute)
    results = graph(*tensors)
    if recipe is None:
        return None, results, None
    sizes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    assert len(sizes) == len(tensors)
    inputs = [tensors[i] for i in recipe.inputs]
    return recipe, results, recipe([*inputs, *results[count:]])


def messages(x, w, i):
    h = x.mm(w)
    a = torch.tanh(h)
    sent = a.index_select(0, i)
    return sent.sum(), a, sent, torch.sin(sent)


def test_the_next_graph_has_again_what_takes_no_product():
    x, w, i = torch.randn(5, 3), torch.randn(3, 4), torch.randint(5, (40,))
    recipe, results, again = two_graphs(messages, 1, x, w, i)
    assert [tuple(t.shape) for t in recipe.held] == [(5, 4)]  # h, and nothing for each of 40 edges
    assert torch.equal(results[0], messages(x, w, i)[0])
    for found, expected in zip(again, messages(x, w, i)[1:], strict=True):
        assert torch.equal(found, expected)


def test_what_a_product_reads_is_had_again_only_if_asked():
    """It is written down once more for that."""

    def fn(x, w):
        h = x.mm(w)
        a = torch.tanh(h)
        return a.mm(w).sum(), a, torch.sin(h), torch.cos(h)

    x, w = torch.randn(64, 64), torch.randn(64, 64)
    for recompute, count in ((True, 1), (False, 2)):
        recipe, results, again = two_graphs(fn, 1, x, w, recompute=recompute)
        assert len(recipe.held) == count == len(results) - 1
        for found, expected in zip(again, fn(x, w)[1:], strict=True):
            torch.testing.assert_close(found, expected)


def test_what_is_handed_on_shares_no_memory_with_what_a_caller_receives():
    def fn(x, w):
        h = x.mm(w)
        return h, torch.tanh(h), torch.sin(h)

    recipe, results, again = two_graphs(fn, 1, torch.randn(3, 3), torch.randn(3, 3))
    assert len(recipe.held) == 1
    results[0].zero_()
    assert again[0].abs().sum() > 0
    assert results[1].data_ptr() != results[0].data_ptr()


def test_nothing_is_had_again_where_that_holds_as_much():
    def fn(x, w):
        return x.sum(), x.mm(w)

    recipe, results, _ = two_graphs(fn, 1, torch.randn(3, 3), torch.randn(3, 3))
    assert recipe is None
    assert len(results) == 2


def test_what_is_had_again_stands_where_it_is_read():
    """One copy for each sweep that reads it, none before."""

    def fn(h, q, w):
        a = torch.tanh(h)
        had_again([a])
        first = (q * a).mm(w)
        boundary([first])
        return first, (first * a).mm(w)

    with for_compiler():
        graph = make_fx(fn, tracing_mode="fake")(*(torch.randn(3, 3) for _ in range(3)))
    inductor.hold(graph, False)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count(aten.tanh.default) == 2
    assert targets.index(aten.mm.default) < len(targets) - 1 - targets[::-1].index(
        aten.tanh.default
    )
    assert AGAIN not in targets
    given = [torch.randn(3, 3) for _ in range(3)]
    for found, expected in zip(graph(*given), fn(*given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("changed", ["x", "bias"])
def test_changing_what_the_last_sweeps_begin_from_is_refused(changed):
    """Of a tanh, its bias is not kept, but the tanh is had again from it, or from x."""
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    out, gradient = db.WithGradient(net, compile=True, recompute=True)(x)
    with torch.no_grad():
        (x if changed == "x" else net[1].bias).add_(1.0)
    with pytest.raises(db.StaleGraphError):
        (out.sum() + gradient.square().sum()).backward()
