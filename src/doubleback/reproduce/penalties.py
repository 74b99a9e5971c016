"""Figures 3 to 6: ∂_w and ∂_b of R_node and R_cdb, for x₀ alone and averaged over a batch."""

from __future__ import annotations

import torch

from doubleback import landscape as L
from doubleback.landscape import drawing
from doubleback.landscape.statistics import roughness

from .experiment import BATCH, JUMP_HEADS, Experiment, Report, Table, jump_rows, worst_error

LABEL = {"node": "R_{node}", "cdb": "R_{cdb}"}


def draw_single(experiment: Experiment, of: str) -> Report:
    """Figure 3 (`node`) or 4 (`cdb`)."""
    plain = f"R_{of}"
    report = Report(
        f"figure-{3 if of == 'node' else 4}-{of}",
        f"Derivatives of {plain} for one example",
        f"∂{plain}/∂w and ∂{plain}/∂b at x₀ = {float(experiment.x0):.3f}. "
        + ("R_node = (∂z_L/∂x₀)²." if of == "node" else "R_cdb = (∂ℓ/∂x₀)², ℓ = (z_L − y)²."),
    )
    figure, axes = drawing.panels(2)
    for ax, key in zip(axes, ("w", "b"), strict=True):
        curve = experiment.curves(key)[of]
        _check_single(experiment, report, key, of, curve)
        drawing.draw_pieces(ax, curve.slope)
        _label(ax, experiment, key, of)
        rows = jump_rows(experiment, key, curve.slope)
        report.tables.append(Table(f"Jumps of ∂{plain}/∂{key}", JUMP_HEADS, rows))
        report.numbers[key] = {
            "breakpoints": [b.t for b in curve.slope.path.breakpoints],
            "coefficients of the derivative": curve.slope.coefficients.tolist(),
        }
    report.figure = figure
    return report


def _check_single(
    experiment: Experiment, report: Report, key: str, of: str, curve: L.Curve
) -> None:
    error = worst_error(experiment, key, curve, of)
    report.claim(
        error <= 1e-10,
        f"∂_{key} equals autograd's and the engine's on each piece; worst error {error:.0e}",
    )
    slope = curve.slope.coefficients
    size = float(slope.abs().max())
    if of == "node" and key == "b":
        report.claim(size == 0.0, "∂_b R_node is 0 everywhere")
        report.claim(curve.value.jumps().largest > 1e-3, "R_node itself jumps in b")
    elif of == "node":
        report.claim(slope.shape[1] == 2 and size > 1e-3, "∂_w R_node is piecewise affine")
        report.claim(
            bool((slope.abs().max(1).values == 0).any()), "with a locally constant portion (zero)"
        )
        report.claim(curve.slope.jumps().largest > 1e-3, "and a jump")
    elif key == "b":
        report.claim(size > 1e-3, "∂_b R_cdb is not 0")
    else:
        bent = float(slope[:, 2:].abs().max())
        report.claim(bent > 1e-3, "∂_w R_cdb is not piecewise affine")
    if of == "cdb":
        other = experiment.curves(key)["node"].value
        same = _places(other) == _places(curve.value)
        report.claim(same, f"R_cdb jumps over {key} in the same places as R_node")


def _places(f: L.Piecewise) -> list[float]:
    jumps = f.jumps()
    return jumps.t[jumps.height.abs() > 1e-9].tolist()


def draw_batch(experiment: Experiment, of: str) -> Report:
    """Figure 5 (`node`) or 6 (`cdb`)."""
    plain = f"R_{of}"
    report = Report(
        f"figure-{5 if of == 'node' else 6}-{of}-batch",
        f"Derivatives of {plain}, averaged over a batch of {BATCH}",
        f"The mean of ∂{plain} over {BATCH} random examples (blue), every jump drawn where it is; "
        f"x₀ alone for comparison (orange). Each example's jump is divided by {BATCH}. Below: the "
        "mean alone where most of its jumps are.",
    )
    figure, axes = drawing.panels(2, 2)
    for column, key in enumerate(("w", "b")):
        curve = experiment.curves(f"{key} batch")[of]
        single = experiment.curves(key)[of]
        _check_batch(experiment, report, key, of, curve, single)
        drawing.draw_pieces(axes[column], single.slope, colour=drawing.ORANGE, ends=False)
        drawing.draw_mean(axes[column], curve.slope)
        _label(axes[column], experiment, key, of)
        _closer(axes[2 + column], experiment, key, of, curve)
        rows = jump_rows(experiment, f"{key} batch", curve.slope)
        if of == "cdb" or key == "w":
            report.tables.append(
                Table(f"Highest jumps of the mean of ∂{plain}/∂{key}", JUMP_HEADS, rows)
            )
        measured = roughness(curve.slope)
        report.numbers[key] = {"roughness": vars(measured), "ratio": measured.ratio}
    axes[0].plot([], [], color=drawing.BLUE, label=f"mean of {BATCH}")
    axes[0].plot([], [], color=drawing.ORANGE, label=f"$x_0={float(experiment.x0):.3f}$ alone")
    axes[0].legend(loc="best")
    report.figure = figure
    return report


def _closer(ax, experiment: Experiment, key: str, of: str, curve: L.Curve) -> None:
    """The mean alone, where most of its jumps are; for ∂_b R_node = 0, R_node itself."""
    flat = of == "node" and key == "b"
    f = curve.value if flat else curve.slope
    drawing.draw_mean(ax, f)
    places = f.jumps().t
    quantiles = torch.tensor([0.1, 0.9], dtype=torch.float64)
    lo, hi = torch.quantile(places, quantiles).tolist()
    t = torch.linspace(lo, hi, 400, dtype=torch.float64)
    values = f.mean(t)
    margin = 0.08 * float(values.max() - values.min())
    ax.set_xlim(lo, hi)
    ax.set_ylim(float(values.min()) - margin, float(values.max()) + margin)
    ax.set_xlabel(f"${key}$")
    name = f"${LABEL[of]}$" if flat else f"$∂{LABEL[of]}/∂{key}$"
    ax.set_title(f"({'c' if key == 'w' else 'd'}) mean of {name}, closer")


def _check_batch(
    experiment: Experiment, report: Report, key: str, of: str, curve: L.Curve, single: L.Curve
) -> None:
    error = worst_error(experiment, f"{key} batch", curve, of)
    report.claim(
        error <= 1e-10,
        f"the mean of ∂_{key} equals autograd's and the engine's at 20 random places; worst "
        f"error {error:.0e}",
    )
    if of == "node" and key == "b":
        report.claim(float(curve.slope.coefficients.abs().max()) == 0.0, "∂_b R_node stays 0")
        f, alone = curve.value, single.value
        what = "R_node in b"
    else:
        f, alone, what = curve.slope, single.slope, f"∂_{key} {LABEL[of]}"
        what = what.replace("{", "").replace("}", "")
    averaged, before = f.jumps().largest / BATCH, alone.jumps().largest
    text = f"averaging shrinks the largest jump of {what}: {before:.3g} → {averaged:.3g}"
    report.claim(averaged < before, text)
    count = int((f.jumps().height.abs() > 1e-9).sum())
    own = int((alone.jumps().height.abs() > 1e-9).sum())
    report.claim(count > own, f"and multiplies their number: {own} → {count}")


def _label(ax, experiment: Experiment, key: str, of: str) -> None:
    drawing.mark_rest(ax, experiment.paths[key].rest)
    ax.set_xlabel(f"${key}$")
    ax.set_title(f"({'a' if key == 'w' else 'b'}) $∂{LABEL[of]}/∂{key}$")
    lo, hi = ax.get_ylim()
    if torch.tensor([lo, hi]).abs().max() < 0.06:  # a curve that is zero throughout
        ax.set_ylim(-1, 1)
