"""Calls that used to end in PyTorch's own errors: each works, or says what to do instead."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import doubleback as db
from doubleback.run import flattening
from support.stock import numbers, pair, same_training
from support.zoo import double


@pytest.fixture(autouse=True)
def in_double():
    with double():
        torch.manual_seed(3)
        yield


def mlp(activation=nn.Tanh):
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 3))


def batch():
    return torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def stock(net, x, y):
    """(penalty, gradients of penalty + loss) by autograd."""
    x = x.clone().requires_grad_()
    losses = nn.functional.cross_entropy(net(x), y, reduction="none")
    (u,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    penalty = u.square().flatten(1).sum(1).mean()
    return penalty, torch.autograd.grad(penalty + losses.mean(), list(net.parameters()))


def agrees(model, net, args, wanted):
    """The model's penalty and gradients beside `stock`'s."""
    out, penalty = model(*args)
    total = penalty + nn.functional.cross_entropy(out, args[-1])
    found = torch.autograd.grad(total, list(net.parameters()))
    torch.testing.assert_close((penalty, found), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("penalty", [db.Jacobian(), db.OutputGradient(0)])
def test_a_label_for_a_penalty_that_takes_none(penalty):
    model, (x, y) = db.Penalised(mlp(), penalty), batch()
    for call in (model, model.accumulate):
        with pytest.raises(db.InputError, match="takes no label or target of its own"):
            call(x, y)
    model(x)
    model.accumulate(x, y, loss="cross_entropy")


def test_an_argument_too_many_beside_a_label():
    x, y = batch()
    with pytest.raises(db.InputError, match="Sequential takes 1 by position"):
        db.Penalised(mlp(), db.LossGradient("cross_entropy"))(x, x, y)


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, *inputs, scale=1.0, **options):
        return self.net(inputs[0]) * scale


def test_any_number_of_arguments_is_the_network_s_business():
    x, y = batch()
    out, _ = db.Penalised(Flexible(), db.LossGradient("cross_entropy"))(x, x, y, scale=2.0, k=1)
    assert out.shape == (4, 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_check_has_an_oracle_for_hardsigmoid(inplace):
    net = mlp(lambda: nn.Hardsigmoid(inplace))
    report = db.check(db.Penalised(net, db.LossGradient("cross_entropy")), *batch())
    assert report.worst < 1e-10


def test_the_meta_device_yields_shapes():
    net, (x, y) = mlp().to("meta"), (t.to("meta") for t in batch())
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    for _ in range(4):
        out, penalty = model(x, y)
        (penalty + out.sum()).backward()
    assert (out.shape, penalty.shape, net[0].weight.grad.shape) == ((4, 3), (), (8, 6))
    assert model.accumulate(x, y)[1].is_meta


@pytest.mark.parametrize("where", ["", "0"])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_is_named(kind, where):
    plain, (x, y) = mlp(), batch()
    net = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        part = net[0] if where else net
        part = torch.jit.script(part) if kind == "script" else torch.jit.trace(part, x)
        net = nn.Sequential(part, *net[1:]) if where else part
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):  # the later ones by a shorter way
            net.zero_grad()
            agrees(model, net, (x, y), stock(plain, x, y))
    (warning,) = [w for w in told if w.category is db.CaptureWarning]
    assert "is TorchScript" in str(warning.message) and "plain Python module" in str(
        warning.message
    )
    assert warning.filename == __file__  # the caller's line, not one of PyTorch's


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse"])
def test_a_sparse_input_runs_on_autograd(layout, asked):
    net, (x, y) = nn.Linear(6, 3), batch()
    wanted = stock(net, x, y)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    agrees(model, net, (getattr(x, layout)().requires_grad_(asked), y), wanted)


class Multiplied(nn.Module):
    def __init__(self, matrix):
        super().__init__()
        self.dense = nn.Linear(6, 3)
        self.register_buffer("matrix", matrix)

    def forward(self, x):
        return self.dense(self.matrix @ x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_matrix_inside_is_named():
    x, y = batch()
    matrix = torch.randn(4, 4)
    net, dense = Multiplied(matrix.to_sparse_csr()), Multiplied(matrix)
    net.dense.load_state_dict(dense.dense.state_dict())
    with pytest.warns(db.CaptureWarning, match="indices and values"):
        agrees(db.Penalised(net, db.LossGradient("cross_entropy")), net, (x, y), stock(dense, x, y))


@pytest.mark.choice
@pytest.mark.parametrize("asked", [False, True])
def test_operations_are_counted_in_every_call(asked):
    net, (x, y) = mlp(), batch()
    x.requires_grad_(asked)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    counts = []
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            out, penalty = model(x, y)
            (penalty + out.sum()).backward()
        counts.append(counter.get_total_flops())
    assert all(counts) and counts[1] == counts[2]  # the first by sweeps, the others by choice


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
def test_quantisation_aware_training_runs_on_autograd():
    from torch.ao import quantization as q

    torch.set_default_dtype(torch.float32)  # the observers know no other
    net = nn.Sequential(q.QuantStub(), *mlp(nn.ReLU), q.DeQuantStub()).float().train()
    net.qconfig = q.get_default_qat_qconfig("fbgemm")
    q.prepare_qat(net, inplace=True)
    twin = copy.deepcopy(net)
    x, y = batch()
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    for step in range(3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _, penalty = model(x.float(), y)
        messages = [str(w.message) for w in told if w.category is db.CaptureWarning]
        assert ["quantisation observes" in m for m in messages] == [True] * (step == 0)
        wanted = stock(twin, x.float(), y)
        torch.testing.assert_close(penalty, wanted[0])
        for a, b in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b)


def test_distributed_tensors_are_refused_wherever_they_are(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        net, (x, y) = mlp(), batch()
        with pytest.raises(db.InputError, match="to_local"):
            db.Penalised(net, db.LossGradient("cross_entropy"))(DTensor.from_local(x, mesh), y)
        net[2].weight = nn.Parameter(DTensor.from_local(net[2].weight.detach(), mesh))
        with pytest.raises(db.InputError, match=r"distributed parameter of shape \(3, 8\)"):
            db.Penalised(net, db.LossGradient("cross_entropy"))(x, y)
    finally:
        torch.distributed.destroy_process_group()


def test_sweeps_that_cannot_be_flattened_go_on_without_a_word(monkeypatch):
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which tells of failed attempts
    told = []
    monkeypatch.setattr(log, "callHandlers", told.append)

    def refused(*args, **kwargs):
        log.error("failed while attempting to run meta for view_as_complex")
        raise RuntimeError("no tensor without numbers")

    monkeypatch.setattr(flattening, "flatten", refused)
    net, (x, y) = mlp(), batch()
    wanted = stock(net, x, y)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), strict=True)
    for _ in range(4):
        agrees(model, net, (x, y), wanted)
    assert not told


@pytest.mark.parametrize("activation", [nn.Hardswish, nn.ELU])
def test_kernels_that_lay_out_otherwise_than_their_fakes_say(activation):
    """hardswish's derivative at a permuted gradient, for one: the flat sweeps viewed what needs a
    copy, and raised."""
    net = nn.Sequential(nn.Linear(3, 3), activation(), Turned(), nn.Linear(2, 3), nn.Tanh(), Mean())
    x, y = torch.randn(4, 2, 3), torch.tensor([0, 1, 2, 0])
    net.eval()
    wanted = stock(net, x, y)
    for how in ({"flatten_after": 0}, {"debug": True}):
        model = db.Penalised(net, db.LossGradient("cross_entropy"), strict=True, **how)
        for _ in range(2):
            agrees(model, net, (x, y), wanted)


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Routed(nn.Module):
    """Rows are chosen by what attention makes of the input, or of numbers that are given."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.last, self.given = nn.Linear(6, 3), given
        self.register_buffer("other", torch.randn(1, 4, 6))

    def forward(self, x):
        seen = self.other if self.given else x[None]
        seen = nn.functional.scaled_dot_product_attention(seen, seen, seen)[0]
        rows = (seen.sum(1) > 0).nonzero()[:, 0]
        return self.last(x.index_add(0, rows, x[rows].tanh()))


def test_attention_that_decides_a_size():
    """It was said to draw random numbers."""
    x, y = batch()
    net = Routed(True)
    wanted = stock(net, x, y)
    agrees(db.Penalised(net, db.LossGradient("cross_entropy"), strict=True), net, (x, y), wanted)
    model = db.Penalised(Routed(False), db.LossGradient("cross_entropy"), strict=True)
    with pytest.raises(db.CaptureError, match="computed from the penalised input"):
        model(x, y)


def test_a_capture_that_fails_logs_nothing(caplog):
    """PyTorch logs the failure of an operator on tensors without numbers, with its whole trace,
    before it raises: here an einsum under autocast."""

    class Contraction(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(24, 3)
            self.w = nn.Parameter(torch.randn(6, 6, 6) / 6)

        def forward(self, x):
            h = self.first(x)
            return self.last(torch.einsum("bti,ijk,btk->btj", h, self.w, h).flatten(1))

    model = db.Penalised(Contraction().float(), db.LossGradient("cross_entropy"))
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", dtype=torch.float16):
            model(torch.randn(2, 4, 6).float(), torch.tensor([0, 1]))
    assert not [r for r in caplog.records if "fake_tensor" in r.name]
    assert log.level == before


class Attending(nn.Module):
    """Attention over a graph's edges. One rule reads the edges' ends in the last sweep, where
    another operator is going to need them again."""

    def __init__(self):
        super().__init__()
        self.first, self.score, self.last = nn.Linear(5, 6), nn.Linear(12, 1), nn.Linear(6, 1)

    def forward(self, x, edges):
        start, end = edges[0], edges[1]
        h = self.first(x)
        score = F.leaky_relu(self.score(torch.cat([h[start], h[end]], 1)), 0.2).squeeze(1)
        most = torch.full((len(x),), -1e9, dtype=x.dtype).scatter_reduce(0, end, score, "amax")
        weight = (score - most[end]).exp()
        total = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, end, weight)
        rows = h[start] * (weight / (total[end] + 1e-9)).unsqueeze(1)
        return self.last(F.elu(torch.zeros_like(h).index_add(0, end, rows)))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("growing", [0, 1])
def test_indices_that_two_operators_share(how, growing):
    def batch(i):
        rows = 6 + growing * i
        edges = torch.randint(0, rows, (2, 3 * rows), generator=torch.Generator().manual_seed(i))
        return numbers(i, rows, 5), edges

    torch.manual_seed(1)
    model, twin = pair(Attending(), strict=True)
    same_training(model, twin, how=how, batch=batch, steps=5)


def test_a_default_device_is_no_reason_not_to_capture():
    torch.set_default_device("cpu")
    try:
        model, twin = pair(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)), strict=True)
        same_training(model, twin, steps=2)
    finally:
        torch.set_default_device(None)
