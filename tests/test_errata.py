"""The formulas and numbers of docs/theory.md, computed again in float64; and every 'theory §N' in
the repository leads to a section of that page."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doubleback as db

ROOT = Path(__file__).parents[1]
THEORY = ROOT / "docs" / "theory.md"


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------------ §4, §9.1: heads


def _eta(z: Tensor, h: Tensor, zeta) -> Tensor:
    """η_L = ∇_z⟨ζ_L(z), h⟩ by autograd."""
    leaf = z.clone().requires_grad_()
    return torch.autograd.grad((zeta(leaf) * h).sum(), leaf)[0]


def _softmax_zeta(v: Tensor):
    def zeta(z: Tensor) -> Tensor:
        x = z.softmax(0)
        return torch.autograd.grad(x, z, v, create_graph=True)[0]

    return zeta


def test_eta_of_a_softmax_and_the_printed_one():
    z, v, h = _draw(5), _draw(5, seed=1), _draw(5, seed=2)
    x = z.softmax(0)
    truth = _eta(z, h, _softmax_zeta(v))
    xv, xh, xvh = x @ v, x @ h, x @ (v * h)
    right = x * v * h - xv * x * h - xh * x * v - xvh * x + 2 * xv * xh * x
    printed = x * v * h - xv * x * v - xvh + 2 * xv * xh * x
    assert float((right - truth).norm()) <= 1e-15
    assert float((printed - truth).norm()) > float(truth.norm())
    # each of the three corrections is needed
    for partly in (
        x * v * h - xv * x * v - xh * x * v - xvh * x + 2 * xv * xh * x,
        x * v * h - xv * x * h - xvh * x + 2 * xv * xh * x,
        x * v * h - xv * x * h - xh * x * v - xvh + 2 * xv * xh * x,
    ):
        assert float((partly - truth).norm()) > 0.05 * float(truth.norm())


def test_the_printed_derivative_of_zeta_is_transposed():
    x, v = _draw(5).softmax(0), _draw(5, seed=1)
    truth = torch.autograd.functional.jacobian(lambda x: x * v - (x @ v) * x, x)
    eye = torch.eye(5, dtype=torch.float64)
    printed = torch.diag(v) - (x @ v) * eye - torch.outer(v, x)
    assert float((printed.T - truth).norm()) <= 1e-15
    assert float((printed - truth).norm()) > 1e-1


def test_heads_of_losses():
    z, h, y = _draw(5), _draw(5, seed=2), torch.tensor(3)
    x, hot = z.softmax(0), F.one_hot(y, 5).double()

    def gradient(loss):
        return lambda z: torch.autograd.grad(loss(z), z, create_graph=True)[0]

    likelihood = gradient(lambda z: F.cross_entropy(z, y))
    torch.testing.assert_close(likelihood(z.clone().requires_grad_()).detach(), x - hot)
    torch.testing.assert_close(_eta(z, h, likelihood), x * h - (x @ h) * x)
    squared = gradient(lambda z: (z - hot).square().sum())
    torch.testing.assert_close(squared(z.clone().requires_grad_()).detach(), 2 * (z - hot))
    torch.testing.assert_close(_eta(z, h, squared), 2 * h)


# ------------------------------------------------------------------- §1, §9.3: three operators


def test_the_three_operators_of_a_layer_that_is_not_square():
    """⟨K(θ,x), y⟩ = ⟨x, Kᵀ(θ,y)⟩ = ⟨θ, K□(x,y)⟩, K□ with (input, output) in this order."""
    theta, x, y = _draw(3, 5), _draw(5, seed=1), _draw(3, seed=2)
    dense = db.operators.Dense()
    number = dense.forward(theta, x) @ y
    torch.testing.assert_close(x @ dense.transpose(theta, y), number)
    square = dense.weight_adjoint(x, y)
    torch.testing.assert_close((theta * square).sum(), number)
    assert square.shape == theta.shape and dense.weight_adjoint(y, x).shape != theta.shape


# ------------------------------------------------------------------------- §2: the four sweeps


def test_four_sweeps_by_hand_are_autograds_double_backward():
    """The table of §2 for L = 3, R = ‖J*v‖² and ℓ = Σ x_L riding along."""
    widths = (4, 6, 5, 3)
    shapes = list(zip(widths[1:], widths[:-1], strict=True))
    theta = [_draw(*s, seed=i) for i, s in enumerate(shapes)]
    bias = [_draw(n, seed=9 + i) for i, n in enumerate(widths[1:])]
    x0, v = _draw(4, seed=20), _draw(3, seed=21)
    slope, bend = (lambda z: 1 - z.tanh() ** 2), (lambda z: -2 * z.tanh() * (1 - z.tanh() ** 2))
    x, z = [x0], []
    for w, b in zip(theta, bias, strict=True):
        z.append(w @ x[-1] + b)
        x.append(z[-1].tanh())
    xi, zeta = [v], []  # from the output to the input
    for w, zj in zip(reversed(theta), reversed(z), strict=True):
        zeta.append(slope(zj) * xi[-1])
        xi.append(w.T @ zeta[-1])
    xi, zeta = xi[::-1], zeta[::-1]
    q, h = [2 * xi[0]], []
    for w, zj in zip(theta, z, strict=True):
        h.append(w @ q[-1])
        q.append(slope(zj) * h[-1])
    gamma = torch.ones(3, dtype=torch.float64)  # ∇ℓ
    ours = {}
    for j in (2, 1, 0):
        eta = bend(z[j]) * h[j] * xi[j + 1] + slope(z[j]) * gamma
        ours[j] = (torch.outer(zeta[j], q[j]) + torch.outer(eta, x[j]), eta)
        gamma = theta[j].T @ eta

    leaves = [t.clone().requires_grad_() for t in (*theta, *bias)]
    leaf = x0.clone().requires_grad_()
    out = leaf
    for w, b in zip(leaves[:3], leaves[3:], strict=True):
        out = torch.tanh(w @ out + b)
    (pulled,) = torch.autograd.grad(out, leaf, v, create_graph=True)
    truth = torch.autograd.grad(pulled.square().sum() + out.sum(), leaves)
    for j in range(3):
        torch.testing.assert_close(ours[j][0], truth[j], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(ours[j][1], truth[3 + j], rtol=1e-12, atol=1e-13)


# --------------------------------------------------------------------- §2.3: standardisation

EPS = 1e-5
NORMS = {  # axes of a group, whether the mean is taken off, how the weight lies over x, the oracle
    "layer": ((2, 3), True, (1, 1, 4, 5), lambda x, w, b: F.layer_norm(x, (4, 5), w, b, EPS)),
    "batch": (
        (0, 2, 3), True, (1, 3, 1, 1),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS),
    ),
    "instance": (
        (2, 3), True, (1, 3, 1, 1), lambda x, w, b: F.instance_norm(x, None, None, w, b, True)
    ),
    "rms": ((2, 3), False, (1, 1, 4, 5), lambda x, w, b: F.rms_norm(x, (4, 5), w, EPS) + b),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_one_formula_for_every_norm(name):
    """γ_x, ∇w and ∇b of ⟨ξ, ∂F q⟩ + ⟨γ, F⟩ to 1e-14 of their size."""
    axes, centred, shape, oracle = NORMS[name]
    x, xi, q, gamma = (_draw(2, 3, 4, 5, seed=i) for i in range(4))
    size = tuple(n for n in shape if n > 1)
    w, b = _draw(*size, seed=5), _draw(*size, seed=6)

    def mean(u: Tensor) -> Tensor:
        return u.mean(axes, keepdim=True)

    mu = mean(x) if centred else torch.zeros(())
    r = (mean((x - mu) ** 2) + EPS) ** -0.5
    hat, wide = (x - mu) * r, w.reshape(shape)

    def project(u: Tensor) -> Tensor:
        return u - (mean(u) if centred else 0) - hat * mean(u * hat)

    g = wide * xi
    a, c = mean(g * hat), mean(q * hat)
    phi = r * (mean(g * q) - (mean(g) * mean(q) if centred else 0) - a * c)
    ours = (
        r * project(wide * gamma - r * (c * g + a * q)) - r * phi * hat,
        (gamma * hat + xi * r * project(q)).sum_to_size(shape).reshape(size),
        gamma.sum_to_size(shape).reshape(size),
    )

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    out = oracle(*leaves)
    (pulled,) = torch.autograd.grad(out, leaves[0], xi, create_graph=True)
    truth = torch.autograd.grad((pulled * q).sum() + (out * gamma).sum(), leaves)
    for mine, theirs in zip(ours, truth, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) <= 1e-14
    # the tangent r P(q) is the stock backward of a unit weight, applied to q
    one = torch.ones_like(w)
    leaf = x.clone().requires_grad_()
    (pushed,) = torch.autograd.grad(oracle(leaf, one, 0 * b), leaf, q)
    torch.testing.assert_close(r * project(q), pushed, rtol=1e-12, atol=1e-13)


# -------------------------------------------------------------------------- §5 and §6: Jacobians


def test_one_seed_less_for_a_softmax():
    """‖SJ‖_F by C − 1 orthonormal directions of the complement of ones."""
    x, jacobian = _draw(5).softmax(0), _draw(5, 7, seed=1)
    s = torch.diag(x) - torch.outer(x, x)
    assert float((s @ torch.ones(5, dtype=torch.float64)).abs().max()) <= 1e-16
    basis = torch.linalg.svd(torch.ones(1, 5, dtype=torch.float64)).Vh[1:]
    torch.testing.assert_close((basis @ s @ jacobian).norm(), (s @ jacobian).norm())
    assert float((basis[1:] @ s @ jacobian).norm()) < 0.999 * float((s @ jacobian).norm())


def test_waist_and_gram_matrix():
    a, b = _draw(6, 2), _draw(2, 7, seed=1)
    torch.testing.assert_close((a @ b).norm() ** 2, ((a.T @ a) * (b @ b.T)).sum())
    w, zeta = _draw(4, 9), _draw(4, seed=1)
    torch.testing.assert_close((w.T @ zeta).norm() ** 2, zeta @ (w @ w.T) @ zeta)


def test_variance_of_one_projection():
    """Exactly, by the fourth moments of the unit sphere: E[v_i v_j v_k v_l] is 1/(C(C+2)) times the
    number of pairings; and by a million draws."""
    c, jacobian = 4, _draw(4, 6)
    gram = jacobian @ jacobian.T
    eye = torch.eye(c, dtype=torch.float64)
    pairings = sum(
        torch.einsum(f"{p},{r}->ijkl", eye, eye)
        for p, r in (("ij", "kl"), ("ik", "jl"), ("il", "jk"))
    )
    second = torch.einsum("ij,kl,ijkl->", gram, gram, pairings) * c**2 / (c * (c + 2))
    frobenius = float(gram.trace())
    exact = float(second) - frobenius**2
    stated = 2 * c / (c + 2) * float((gram @ gram).trace()) - 2 / (c + 2) * frobenius**2
    assert stated == pytest.approx(exact, rel=1e-12)
    v = _draw(1_000_000, c, seed=3)
    estimates = c * (F.normalize(v, dim=1) @ jacobian).square().sum(1)
    # standard errors: deviation/√n of the mean, and about deviation²·√((κ−1)/n) of the variance
    n, deviation = len(v), math.sqrt(stated)
    assert abs(float(estimates.mean()) - frobenius) < 5 * deviation / math.sqrt(n)
    fourth = float(((estimates - frobenius) ** 4).mean()) / stated**2
    assert abs(float(estimates.var()) - stated) < 5 * stated * math.sqrt((fourth - 1) / n)


# ------------------------------------------------------------------------- §9.4, §9.5: numbers


def test_the_example_network_has_67_parameters():
    net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1))
    assert sum(p.numel() for p in net.parameters()) == 67


def test_weight_adjoints_are_a_third_of_a_penalised_step():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with db.count_operations() as ops:
        out, penalty = model(x, y)
        (F.cross_entropy(out, y) + penalty).backward()
    assert (ops.forward + ops.transpose, ops.weight_adjoint) == (4 * 3 - 1, 2 * 3)
    assert ops.weight_adjoint / (ops.forward + ops.transpose + ops.weight_adjoint) >= 1 / 3


# ------------------------------------------------------------------------------- references


def _sections() -> set[str]:
    """'5' and '5.2' for the anchors s5 and s5-2."""
    text = THEORY.read_text(encoding="utf-8")
    return {name.replace("-", ".") for name in re.findall(r'<a id="s([\d-]+)"></a>', text)}


def _references(text: str) -> list[tuple[int, str]]:
    """(line, section) of every §N and §N.M."""
    return [
        (text[: match.start()].count("\n") + 1, match[1])
        for match in re.finditer(r"§\s?(\d+(?:\.\d+)*)", text)
    ]


FOLDERS = ("src", "tests", "benchmarks", "reproduce")
FILES = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
FILES += [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]


def test_every_reference_to_the_theory_leads_somewhere():
    sections = _sections()
    dangling = [
        f"{file.relative_to(ROOT)}:{line}: §{section}"
        for file in FILES
        for line, section in _references(file.read_text(encoding="utf-8"))
        if section not in sections
    ]
    assert not dangling


def test_references_are_found_and_dangling_ones_noticed():
    mark = chr(167)  # written so, this file holds no reference of its own here
    text = f"theory {mark}2,\n{mark}5.2 and {mark}12"
    assert _references(text) == [(1, "2"), (2, "5.2"), (2, "12")]
    assert {"1", "2", "3", "4", "5", "6", "7", "8", "9", "5.2"} <= _sections()
    assert "12" not in _sections()
    used = {s for f in (ROOT / "src").rglob("*.py") for _, s in _references(f.read_text("utf-8"))}
    assert len(used) >= 8


def test_headings_carry_the_number_of_their_anchor():
    text = THEORY.read_text(encoding="utf-8")
    above = re.findall(r'<a id="s([\d-]+)"></a>\n#+ ([\d.]+?)\.? ', text)
    within = re.findall(r'^(\d+)\. <a id="s\d+-(\d+)"></a>', text, re.MULTILINE)  # list items
    assert len(above) + len(within) == len(_sections())
    assert all(number == anchor.replace("-", ".") for anchor, number in above)
    assert all(number == anchor for number, anchor in within)


def test_links_within_the_page_lead_somewhere():
    text = THEORY.read_text(encoding="utf-8")
    anchors = set(re.findall(r'<a id="([^"]+)"></a>', text))
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        assert target in anchors


def test_the_glossary_holds_every_symbol_and_word():
    glossary = THEORY.read_text(encoding="utf-8").partition("## Glossary")[2]
    entries = " ".join(re.findall(r"^\| (.+?) \|", glossary, re.MULTILINE))
    for word in (
        *("K", "Kᵀ", "K□", "ξ", "ζ", "q", "h", "γ", "η", "v", "p"),
        *("seed", "waist", "renewal", "effective parameter", "prelude", "source", "penalised"),
        *("target", "head", "chunk", "segment", "flat graph", "lend", "bank", "light", "form"),
    ):
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", entries), word
