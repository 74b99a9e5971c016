"""`accumulate`: the loss is the mean over its own rows, and every `.grad` has memory of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.penalties import losses
from support.stock import WEIGHT, assert_close, numbers, pair, same_training

# ------------------------------------------------------------------- atoms and molecules


class Molecules(nn.Module):
    """Atoms of `width` numbers → one row of `out` numbers per molecule."""

    def __init__(self, molecules: int, width: int = 5, out: int = 1, spread: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 6), nn.Linear(6, out)
        self.molecules, self.spread = molecules, spread

    def forward(self, x, owner):
        h = torch.tanh(self.first(x))
        if self.spread:  # fewer rows in than out
            return self.last(h[owner])
        pooled = h.new_zeros(self.molecules, 6).index_add(0, owner, h)
        return self.last(pooled.tanh())


OWNERS = {2: [0, 0, 1, 1, 1, 0], 1: [0] * 6, 6: [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("molecules", OWNERS)
def test_fewer_rows_out_than_in(molecules, how):
    torch.manual_seed(0)
    model, twin = pair(Molecules(molecules))
    owner = torch.tensor(OWNERS[molecules])
    same_training(
        model, twin, how=how, batch=lambda i: (numbers(i, 6, 5), owner),
        target=lambda i: numbers(50 + i, molecules, 1),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_more_rows_out_than_in(how):
    torch.manual_seed(0)
    model, twin = pair(Molecules(3, spread=True))
    owner = torch.tensor([0, 0, 1, 1, 2, 0, 2])
    same_training(
        model, twin, how=how, batch=lambda i: (numbers(i, 3, 5), owner),
        target=lambda i: numbers(50 + i, 7, 1),
    )  # fmt: skip


def _loss_gradient(net, x, owner, y):
    """‖∇ₓ Σ_m ‖out_m − y_m‖²‖² per atom."""
    leaf = x.clone().requires_grad_()
    out = net(leaf, owner)
    (xi,) = torch.autograd.grad((out - y).square().sum(), leaf, create_graph=True)
    return out, xi.square().sum(1)


def _jacobian(net, x, owner, y):
    """Σᵢ ‖∇ₓ Σ_m out_m⟨i⟩‖² per atom."""
    leaf = x.clone().requires_grad_()
    out = net(leaf, owner)
    rows = [
        torch.autograd.grad(out[:, i].sum(), leaf, create_graph=True)[0].square().sum(1)
        for i in range(out.shape[1])
    ]
    return out, torch.stack(rows).sum(0)


SIBLINGS = {
    "loss gradient": (lambda r: db.LossGradient("mse", reduction=r), _loss_gradient),
    "jacobian": (lambda r: db.Jacobian(reduction=r), _jacobian),
    "jacobian by one": (lambda r: db.Jacobian(reduction=r, chunk=1), _jacobian),
}
# with 9 a Gram matrix stands for the first layer of a Jacobian
POOLED = [(name, molecules, 5) for name in SIBLINGS for molecules in (1, 2)]
POOLED += [(name, 2, 9) for name in SIBLINGS if name.startswith("jacobian")]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "molecules", "width"), POOLED)
def test_other_penalties_of_pooled_rows(name, molecules, width, reduction):
    make, oracle = SIBLINGS[name]
    torch.manual_seed(1)
    model, twin = pair(Molecules(molecules, width, out=2), make(reduction))
    owner = torch.tensor(OWNERS[molecules])
    named = {} if name == "loss gradient" else {"loss": "mse"}
    for i, how in itertools.product(range(4), ("backward", "accumulate")):
        x, y = numbers(i, 6, width), numbers(20 + i, molecules, 2)
        model.zero_grad(), twin.zero_grad()
        if how == "accumulate":
            out, _, penalty = model.accumulate(x, owner, y, weight=WEIGHT, **named)
        else:
            extra = (y,) if name == "loss gradient" else ()
            out, penalty = model(x, owner, *extra)
            ((out - y).square().sum(1).mean() + WEIGHT * penalty.sum()).backward()
        wanted_out, values = oracle(twin, x, owner, y)
        wanted = values if reduction == "none" else getattr(values, reduction)()
        ((wanted_out - y).square().sum(1).mean() + WEIGHT * wanted.sum()).backward()
        assert_close(out, wanted_out, "out")
        assert_close(penalty, wanted, f"{how}, penalty")
        for (key, t), other in zip(model.net.named_parameters(), twin.parameters(), strict=True):
            assert_close(t.grad, other.grad, f"{how}, gradient of {key}")


def test_spectral_norm_of_pooled_rows():
    """One molecule: σ₁ of the map from all atoms to the molecule, v from power iteration."""
    torch.manual_seed(2)
    model, twin = pair(Molecules(1, out=2), db.SpectralNorm(iterations=40))
    owner = torch.tensor(OWNERS[1])
    for i in range(4):
        x = numbers(0, 6, 5)
        model.zero_grad(), twin.zero_grad()
        _, penalty = model(x, owner)
        penalty.backward()
        leaf = x.clone().requires_grad_()
        out = twin(leaf, owner)
        rows = [torch.autograd.grad(out[0, k], leaf, create_graph=True)[0] for k in range(2)]
        jacobian = torch.stack([row.flatten() for row in rows])
        with torch.no_grad():
            v = torch.linalg.svd(jacobian)[0][:, 0]
        wanted = (v @ jacobian).reshape(6, 5).norm(dim=1).mean()  # one norm per atom
        wanted.backward()
        torch.testing.assert_close(penalty, wanted, rtol=1e-8, atol=0)
        for t, other in zip(model.net.parameters(), twin.parameters(), strict=True):
            if other.grad is not None:
                scale = other.grad.abs().max().item()
                torch.testing.assert_close(
                    t.grad, other.grad, rtol=0, atol=1e-6 * scale, msg=f"call {i}"
                )


# ----------------------------------------------------------------------- memory of one's own


class Sums(nn.Module):
    """f(x) + b + c.view(4, 6) + d[:, 2:5]…: gradients that are one another's views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.b, self.c = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(24))
        self.e = nn.Parameter(torch.randn(4, 6))
        self.scale = nn.Parameter(torch.randn(()))
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x)) + self.b + self.c.view(4, 6) + self.e + self.scale
        return self.last(torch.tanh(h))


class OutputSums(nn.Module):
    """The last thing that happens is a sum: its gradient is the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(5, 6)
        self.b, self.c = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(24))

    def forward(self, x):
        return torch.tanh(self.f(x)) + self.b + self.c.view(4, 6)


def _regions(model: nn.Module) -> list[tuple[str, int, int]]:
    """(name, first byte, last byte) of every `.grad`'s storage."""
    found = []
    for name, t in model.named_parameters():
        if t.grad is not None:
            storage = t.grad.untyped_storage()
            found.append((name, storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


@pytest.mark.parametrize("kind", [Sums, OutputSums])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_gradients_share_no_memory(kind, weight):
    torch.manual_seed(0)
    entries = {} if kind is Sums else {"entries": [0]}
    model = db.Penalised(kind().double(), db.Jacobian(**entries))
    columns = 1 if kind is Sums else 6
    for i in range(4):
        x, y = numbers(i, 4, 5), numbers(10 + i, 4, columns)
        model.zero_grad(set_to_none=True)
        model.accumulate(x, y, loss="mse", weight=weight)
        for (one, start, end), (other, begin, stop) in itertools.combinations(_regions(model), 2):
            assert end <= begin or stop <= start, f"step {i}: {one} and {other} share memory"
        for name, t in model.named_parameters():
            if t.grad is not None:
                size = t.grad.numel() * t.grad.element_size()
                assert t.grad.untyped_storage().nbytes() == size, f"step {i}: {name}"


@pytest.mark.parametrize("kind", [Sums, OutputSums])
def test_accumulating_twice_doubles_and_clipping_clips(kind):
    torch.manual_seed(0)
    entries = {} if kind is Sums else {"entries": [0]}
    model = db.Penalised(kind().double(), db.Jacobian(**entries))
    columns = 1 if kind is Sums else 6
    for i in range(4):
        x, y = numbers(i, 4, 5), numbers(10 + i, 4, columns)
        model.zero_grad(set_to_none=True)
        model.accumulate(x, y, loss="mse", weight=0.7)
        once = {name: t.grad.clone() for name, t in model.named_parameters() if t.grad is not None}
        model.accumulate(x, y, loss="mse", weight=0.7)
        for name, t in model.named_parameters():
            if name in once:
                assert_close(t.grad, 2 * once[name], f"step {i}, {name}")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms = [t.grad.norm() for t in model.parameters() if t.grad is not None]
        torch.testing.assert_close(torch.stack(norms).norm().item(), 0.5, rtol=1e-4, atol=0)


class Shift(nn.Module):
    """out = x + b: J is the identity, so that ∂⟨w, Jq⟩/∂q is w itself."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return x + self.b


def test_gradients_alias_no_argument_and_no_output():
    for i in range(4):
        model = db.Penalised(Shift().double(), db.BilinearForm(reduction="sum"), flatten_after=0)
        x, w = numbers(i, 4, 5), numbers(1, 4, 5).requires_grad_()
        q = numbers(2, 4, 5).requires_grad_()
        for _ in range(4):
            w.grad = q.grad = None
            out, _, _ = model.accumulate(x, torch.zeros(4, 5).double(), w, q, loss="mse")
            before = [t.detach().clone() for t in (x, w, q, out)]
            w.grad.add_(100), q.grad.add_(100), model.net.b.grad.add_(100)
            for t, old in zip((x, w, q, out), before, strict=True):
                assert_close(t.detach(), old, "what a gradient was written over")
            model.zero_grad()


@pytest.mark.parametrize("sweeps", [True, False])
def test_labels_that_loss_and_penalty_share_are_checked_once(sweeps):
    """On a GPU each look at them waits for all that was launched before."""
    penalty = db.LossGradient("cross_entropy")
    model = db.Penalised(nn.Linear(4, 3), penalty, sweeps=sweeps)
    model.accumulate(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert penalty.own_loss.looked_at == 1
    with pytest.raises(db.LabelError):
        model.accumulate(torch.randn(5, 4), torch.tensor([0, 1, 3, 0, 1]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_wrong_label_where_nobody_looks_is_no_ignored_one(monkeypatch, smoothing):
    """On a GPU only the first batches of labels are looked at."""
    monkeypatch.setattr(losses, "_unread", lambda y: True)
    monkeypatch.setattr(losses, "GPU_CHECKS", 0)
    own = losses.CrossEntropy(smoothing, None, -100)
    wide, y = torch.randn(2, 3, 2, 2), torch.tensor([[[0, 1], [2, -100]], [[0, 1], [2, 3]]])
    assert own.values(wide, y).isnan().tolist() == [False, True]
    assert own.gradient(wide, y).isnan().sum() == 3
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    penalty = db.LossGradient("cross_entropy", label_smoothing=smoothing)
    model = db.Penalised(net, penalty, sweeps=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    for last, wrong in ((2, False), (-100, False), (3, True), (-1, True), (2, False), (7, True)):
        y = torch.tensor([0, 1, 2, last])
        out, measured = model(x, y)
        _, loss, again = model.accumulate(x, y)
        assert [t.isnan().item() for t in (measured, loss, again)] == [wrong] * 3
        if not wrong:
            values = F.cross_entropy(out, y, label_smoothing=smoothing, reduction="none")
            torch.testing.assert_close(loss, values.mean())
