"""Figure 3: the input gradient s = ∂z_L/∂x₀ as a function of one weight and of one bias."""

from __future__ import annotations

import torch

from doubleback import landscape as L
from doubleback.landscape import drawing

from .experiment import JUMP_HEADS, Checked, Experiment, autograd_slope, jump_rows


def draw(experiment: Experiment) -> Checked:
    x0 = float(experiment.x0)
    report = Checked(
        "figure-3-gradient",
        "Figure 3: the gradient as a function of one parameter",
        f"s = ∂z_L/∂x₀ at x₀ = {x0:.3f} against the weight w = {experiment.paths['w'].along} and "
        f"the bias b = {experiment.paths['b'].along}. Dashed: the trained value.",
    )
    figure, axes = drawing.panels(2)
    for ax, key in zip(axes, ("w", "b"), strict=True):
        path = experiment.paths[key]
        s = L.gradient(path).value
        _check(experiment, report, key, s)
        drawing.draw_pieces(ax, s)
        drawing.mark_rest(ax, path.rest)
        ax.set_xlabel(f"${key}$")
        ax.set_title(f"({'a' if key == 'w' else 'b'}) $∂z_L/∂x_0$ over ${key}$")
        report.tables.append(
            drawing.Table(f"Jumps over {key}", JUMP_HEADS, jump_rows(experiment, key, s))
        )
        report.numbers[key] = {
            "breakpoints": [b.t for b in path.breakpoints],
            "coefficients": s.coefficients.tolist(),
        }
    report.figure = figure
    return report


def _check(experiment: Experiment, report: Checked, key: str, s: L.Piecewise) -> None:
    """Three random points of each piece, by autograd: on a line (w), all the same (b)."""
    path = experiment.paths[key]
    assert isinstance(path.along, L.Coordinate)
    generator = torch.Generator().manual_seed(experiment.seed)
    bend = spread = error = 0.0
    for start, end in path.pieces_of(0):
        t = (
            start
            + (end - start) * torch.rand(3, generator=generator, dtype=torch.float64).sort()[0]
        )
        net, x0, y0 = experiment.net, experiment.x0, experiment.y0
        found = [autograd_slope(net, path.along, p, x0, y0, "node")[2] for p in t.tolist()]
        values = torch.tensor(found, dtype=torch.float64)
        weight = (t[1] - t[0]) / (t[2] - t[0])
        bend = max(bend, float((values[1] - values[0] - weight * (values[2] - values[0])).abs()))
        spread = max(spread, float(values.max() - values.min()))
        error = max(error, float((s(t) - values).abs().max()))
    report.claim(error <= 1e-10, f"s over {key} equals autograd's; worst difference {error:.0e}")
    if key == "w":
        report.claim(bend <= 1e-12, "s is affine in w on each piece")
        report.claim(spread > 1e-3, "s is not constant in w")
    else:
        report.claim(spread <= 1e-12, "s is constant in b on each piece")
    report.claim(s.jumps().largest > 1e-3, f"s jumps in {key}")
