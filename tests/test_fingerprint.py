"""`fingerprint`: equal exactly while the numbers of a penalty are; None for a caller's code."""

from __future__ import annotations

import pytest
import torch

import doubleback as db
from doubleback import spaces
from doubleback.penalties.losses import Callback, CrossEntropy, make_loss

WEIGHT = torch.tensor([1.0, 2.0, 3.0])

# each makes a penalty of numbers that no other one has
MAKERS = {
    "output": lambda: db.OutputGradient(),
    "output, index": lambda: db.OutputGradient(1),
    "output, index of two axes": lambda: db.OutputGradient((1, 0)),
    "output, sum": lambda: db.OutputGradient(reduction="sum"),
    "output, norm": lambda: db.OutputGradient(norm=db.Norm()),
    "deviation": lambda: db.OutputGradient(norm=db.Deviation(1.0)),
    "deviation from 2": lambda: db.OutputGradient(norm=db.Deviation(2.0)),
    "one-sided": lambda: db.OutputGradient(norm=db.Deviation(1.0, one_sided=True)),
    "weighted": lambda: db.OutputGradient(norm=db.SquaredNorm(space_of(WEIGHT))),
    "grid": lambda: db.OutputGradient(norm=db.SquaredNorm(spaces.Grid(0.5))),
    "finer grid": lambda: db.OutputGradient(norm=db.SquaredNorm(spaces.Grid(0.25))),
    "trapezoid": lambda: db.OutputGradient(norm=db.SquaredNorm(spaces.Grid(0.5, "trapezoid"))),
    "sobolev": lambda: db.OutputGradient(norm=db.SquaredNorm(spaces.Sobolev(1.0, 0.5))),
    "lp": lambda: db.OutputGradient(norm=db.Norm(spaces.Lp(3.0))),
    "product": lambda: db.OutputGradient(
        norm=db.SquaredNorm(spaces.Product(spaces.Euclidean(), spaces.Grid(0.5)))
    ),
    "match": lambda: db.GradientMatch(),
    "bilinear": lambda: db.BilinearForm(),
    "cross entropy": lambda: db.LossGradient(),
    "smoothed": lambda: db.LossGradient(label_smoothing=0.1),
    "ignoring": lambda: db.LossGradient(ignore_index=2),
    "class weights": lambda: db.LossGradient(class_weights=WEIGHT),
    "mse": lambda: db.LossGradient("mse"),
    "bce": lambda: db.LossGradient("bce"),
    "jacobian": lambda: db.Jacobian(),
    "softmax": lambda: db.Jacobian(of="softmax"),
    "projected": lambda: db.Jacobian(projections=2),
    "entries": lambda: db.Jacobian(entries=[0, (1,)]),
    "spectral": lambda: db.SpectralNorm(2),
    "spectral, cold": lambda: db.SpectralNorm(2, warm_start=False),
    "sum": lambda: db.OutputGradient("sum"),
    "log det": lambda: db.LogDet(),
    "log det, exact": lambda: db.LogDet(None, terms=20),
    "log det, cut off": lambda: db.LogDet(roulette=0),
    "jacobian match": lambda: db.JacobianMatch(),
    "jacobian match, projected": lambda: db.JacobianMatch(2),
}

_spaces: dict = {}


def space_of(weight):
    """One space per tensor: `Weighted` holds a view of its weight, which is another tensor."""
    return _spaces.setdefault(id(weight), spaces.Weighted(weight))


def test_equal_for_equal_penalties_and_for_no_others():
    keys = {name: make().fingerprint() for name, make in MAKERS.items()}
    for name, make in MAKERS.items():
        key = make().fingerprint()
        assert key is not None, name
        assert hash(key) == hash(keys[name])
        assert [other for other in keys if keys[other] == key] == [name]


def test_attributes_are_read_at_every_call():
    penalty = db.OutputGradient(norm=db.Deviation(1.0))
    before = penalty.fingerprint()
    assert penalty.fingerprint() == before
    penalty.norm = db.Deviation(3.0)
    between = penalty.fingerprint()
    assert between != before
    object.__setattr__(penalty.norm, "target", 1.0)
    assert penalty.fingerprint() == before
    penalty.reduction = "sum"
    assert penalty.fingerprint() not in (before, between)
    penalty.index = 1
    assert penalty.fingerprint() not in (before, between)


def test_tensors_count_by_identity_and_version():
    weights = torch.ones(3)
    penalty = db.LossGradient(class_weights=weights)
    before = penalty.fingerprint()
    assert penalty.fingerprint() == before
    assert db.LossGradient(class_weights=torch.ones(3)).fingerprint() != before
    weights.mul_(2)
    assert penalty.fingerprint() != before


def test_a_key_keeps_its_tensor():
    """A tensor made later may lie where a dead one lay, and has the same version."""
    keys = set()
    for i in range(50):
        keys.add(db.LossGradient(class_weights=torch.full((3,), float(i))).fingerprint())
    assert len(keys) == 50


def test_a_space_follows_its_weights():
    space = spaces.Weighted(torch.ones(3))
    penalty = db.OutputGradient(norm=db.SquaredNorm(space))
    before = penalty.fingerprint()
    space.weight.mul_(2)
    assert penalty.fingerprint() != before


def test_what_only_counts_is_no_part():
    loss = make_loss("cross_entropy")
    before = loss.fingerprint()
    loss.check((2, 3), torch.tensor([0, 1]))
    assert loss.looked_at == 1
    assert loss.fingerprint() == before


def test_numpy_numbers_count_by_value():
    np = pytest.importorskip("numpy")
    keys = [
        db.OutputGradient(norm=db.Deviation(kind(target))).fingerprint()
        for kind in (np.float32, np.float64, np.int64)
        for target in (1, 2)
    ]
    assert None not in keys
    assert keys[0] != keys[1] and keys[2] != keys[3] and keys[4] != keys[5]


class OwnSpace(spaces.Space):
    def riesz(self, g):
        return g / 4

    def riesz_inverse(self, u):
        return 4 * u


class OwnNorm(db.Norm):
    def value(self, xi):
        return 2 * super().value(xi)


class OwnPenalty(db.OutputGradient):
    def seed(self, out, *extra):
        return 2 * super().seed(out, *extra)


class OwnLoss(CrossEntropy):
    pass


def _own_method():
    penalty = db.OutputGradient()
    penalty.seed = lambda out: 3 * out
    return penalty


CALLERS = {
    "custom": lambda: db.Custom(lambda out: out),
    "p": lambda: db.OutputGradient(norm=lambda xi: xi.square().sum(1)),
    "builtin p": lambda: db.OutputGradient(norm=torch.sum),
    "loss": lambda: db.LossGradient(lambda out, y: out.sum(1)),
    "space": lambda: db.OutputGradient(norm=db.SquaredNorm(OwnSpace())),
    "product": lambda: db.OutputGradient(norm=db.Norm(spaces.Product(OwnSpace()))),
    "norm": lambda: db.OutputGradient(norm=OwnNorm()),
    "penalty": lambda: OwnPenalty(),
    "loss class": lambda: db.LossGradient(OwnLoss(0.0, None, -100)),
    "domain": lambda: db.SpectralNorm(1, domain=OwnSpace()),
    "a method of one object": _own_method,
}


@pytest.mark.parametrize("name", CALLERS)
def test_none_for_a_callers_code(name):
    assert CALLERS[name]().fingerprint() is None


def test_losses():
    assert make_loss("mse").fingerprint() == make_loss("mse").fingerprint()
    assert make_loss("mse").fingerprint() != make_loss("bce").fingerprint()
    assert make_loss(lambda out, y: out.sum(1)).fingerprint() is None
    assert OwnLoss(0.0, None, -100).fingerprint() is None


def test_a_callback_is_a_callers_code():
    from doubleback.penalties.losses import fingerprint

    assert fingerprint(Callback(torch.sum)) is None
    assert fingerprint(db.Norm()) == fingerprint(db.Norm())
