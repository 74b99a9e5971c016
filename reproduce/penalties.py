"""Figures 4 to 7: ∂_w and ∂_b of R_node and R_cdb, for x₀ alone and averaged over a batch."""

from __future__ import annotations

import torch

from doubleback import landscape as L
from doubleback.landscape import drawing, roughness

from .experiment import (
    BATCH,
    JUMP_HEADS,
    Checked,
    Experiment,
    autograd_slope,
    jump_rows,
    worst_error,
)

LABEL = {"node": "R_{node}", "cdb": "R_{cdb}"}


def draw_single(experiment: Experiment, of: str) -> Checked:
    """Figure 4 (`node`) or 5 (`cdb`): the derivatives, as in the paper, and R itself."""
    plain, number = f"R_{of}", 4 if of == "node" else 5
    report = Checked(
        f"figure-{number}-{of}",
        f"Figure {number}: derivatives of {plain} for one example",
        f"∂{plain}/∂w and ∂{plain}/∂b at x₀ = {float(experiment.x0):.3f} (blue), and {plain} "
        "itself, whose jumps no derivative shows (orange; not in the paper). "
        + (
            "R_node = (∂z_L/∂x₀)². ∂R_node/∂b is 0 wherever it exists, and not drawn."
            if of == "node"
            else "R_cdb = (∂ℓ/∂x₀)², ℓ = (z_L − y)²."
        ),
    )
    curves = {key: experiment.curves(key)[of] for key in ("w", "b")}
    shown = [("w", True), ("w", False), ("b", False)] if of == "node" else [
        ("w", True), ("b", True), ("w", False), ("b", False)
    ]  # fmt: skip
    figure, axes = drawing.panels(3, width=2.6) if of == "node" else drawing.panels(2, 2)
    for letter, ax, (key, slope) in zip("abcd", axes, shown, strict=False):
        curve = curves[key]
        drawing.draw_pieces(
            ax, curve.slope if slope else curve.value,
            colour=drawing.BLUE if slope else drawing.ORANGE,
        )  # fmt: skip
        _label(ax, experiment, key, letter, _name(of, key if slope else None))
    for key, curve in curves.items():
        _check_single(experiment, report, key, of, curve)
        rows = jump_rows(experiment, key, curve.slope)
        report.tables.append(drawing.Table(f"Jumps of ∂{plain}/∂{key}", JUMP_HEADS, rows))
        rows = jump_rows(experiment, key, curve.value)
        report.tables.append(drawing.Table(f"Jumps of {plain} over {key}", JUMP_HEADS, rows))
        report.numbers[key] = {
            "breakpoints": [b.t for b in curve.slope.path.breakpoints],
            "coefficients of the derivative": curve.slope.coefficients.tolist(),
        }
    report.figure = figure
    return report


def _check_single(
    experiment: Experiment, report: Checked, key: str, of: str, curve: L.Curve
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


def draw_batch(experiment: Experiment, of: str) -> Checked:
    """Figure 6 (`node`) or 7 (`cdb`)."""
    plain, number = f"R_{of}", 6 if of == "node" else 7
    report = Checked(
        f"figure-{number}-{of}-batch",
        f"Figure {number}: derivatives of {plain}, averaged over a batch of {BATCH}",
        f"The mean of ∂{plain} over {BATCH} random examples (blue), every jump drawn where it is; "
        f"x₀ alone for comparison (orange). Each example's jump is divided by {BATCH}. "
        + ("(b) shows R_node itself, since ∂R_node/∂b is 0. " if of == "node" else "")
        + "Below: the mean alone where most of its jumps are.",
    )
    figure, axes = drawing.panels(2, 2)
    for column, key in enumerate(("w", "b")):
        slope = of == "cdb" or key == "w"  # for ∂_b R_node = 0, R_node itself
        batch, single = experiment.curves(f"{key} batch")[of], experiment.curves(key)[of]
        f, alone = (batch.slope, single.slope) if slope else (batch.value, single.value)
        if not slope:
            still = float(batch.slope.coefficients.abs().max())
            report.claim(still == 0.0, "∂_b R_node stays 0")
        check_batch(experiment, report, key, of, batch, slope)
        name = _name(of, key if slope else None)
        drawing.draw_pieces(axes[column], alone, colour=drawing.ORANGE, ends=False)
        drawing.draw_mean(axes[column], f)
        _label(axes[column], experiment, key, "ab"[column], name)
        _closer(axes[2 + column], f)
        axes[2 + column].set_xlabel(f"${key}$")
        axes[2 + column].set_title(f"({'cd'[column]}) mean of {name}, closer")
        rows = jump_rows(experiment, f"{key} batch", f)
        what = f"∂{plain}/∂{key}" if slope else f"{plain} over {key}"
        report.tables.append(
            drawing.Table(f"Highest jumps of the mean of {what}", JUMP_HEADS, rows)
        )
        measured = roughness(f)
        report.numbers[key] = {"roughness": vars(measured), "ratio": measured.ratio}
    axes[0].plot([], [], color=drawing.BLUE, label=f"mean of {BATCH}")
    axes[0].plot([], [], color=drawing.ORANGE, label=f"$x_0={float(experiment.x0):.3f}$ alone")
    axes[0].legend(loc="best")
    report.figure = figure
    return report


def _closer(ax, f: L.Piecewise) -> None:
    """The mean alone, where most of its jumps are."""
    drawing.draw_mean(ax, f)
    places = f.jumps().t
    quantiles = torch.tensor([0.1, 0.9], dtype=torch.float64)
    lo, hi = torch.quantile(places, quantiles).tolist()
    t = torch.linspace(lo, hi, 400, dtype=torch.float64)
    values = f.mean(t)
    margin = 0.08 * float(values.max() - values.min())
    ax.set_xlim(lo, hi)
    ax.set_ylim(float(values.min()) - margin, float(values.max()) + margin)


def check_batch(
    experiment: Experiment, report: Checked, key: str, of: str, curve: L.Curve, slope: bool
) -> None:
    """What theory says of an average over M examples: it jumps wherever one of them does, by the
    sum of the examples' jumps there over M. (It does not say that the batch's highest jump is lower
    than that of one chosen example: another example of the batch may jump M times as high.)"""
    error = worst_error(experiment, f"{key} batch", curve, of)
    report.claim(
        error <= 1e-10,
        f"the mean of ∂_{key} equals autograd's and the engine's at 20 random places; worst "
        f"error {error:.0e}",
    )
    f, what = (curve.slope, f"∂_{key} R_{of}") if slope else (curve.value, f"R_{of} over {key}")
    jumps = f.jumps()
    real = jumps.height.abs() > 1e-9
    places, group = jumps.t[real].unique(return_inverse=True)
    sums = torch.zeros_like(places).index_add_(0, group, jumps.height[real])
    top = int(sums.abs().argmax())
    measured = _measured_jump(experiment, f"{key} batch", of, float(places[top]), slope)
    mean, alone = float(sums[top]) / BATCH, jumps.largest
    meeting = int((group == top).sum())
    report.claim(
        abs(measured - mean) <= 1e-6 * (1 + abs(mean)),
        f"the largest jump of the mean of {what} is that of "
        + ("one example" if meeting == 1 else f"{meeting} examples that meet there")
        + f" over {BATCH}: {mean:.3g}, and {measured:.3g} by autograd from left and right",
    )
    report.claim(
        abs(mean) < alone,
        f"averaging shrinks the largest jump of any of the {BATCH} examples: {alone:.3g} → "
        f"{abs(mean):.3g}",
    )
    own = torch.bincount(jumps.example[real], minlength=BATCH)
    report.claim(
        len(places) > int(own.max()),
        f"and multiplies their number: {float(own.double().mean()):.2g} per example, at most "
        f"{int(own.max())} → {len(places)}",
    )


def _measured_jump(experiment: Experiment, key: str, of: str, at: float, slope: bool) -> float:
    """The batch mean's jump by autograd alone: Richardson's extrapolation to the place from either
    side, within the distance to its neighbours."""
    path = experiment.paths[key]
    along = path.along
    assert isinstance(along, L.Coordinate)
    places = torch.tensor([b.t for b in path.breakpoints], dtype=torch.float64).unique()
    apart = (places - at).abs()
    step = min(1e-6, float(apart[apart > 1e-12].min()) / 5) if len(places) > 1 else 1e-6
    x, y = path.x, experiment.y[experiment.batch]

    def mean(t: float) -> float:
        return autograd_slope(experiment.net, along, t, x, y, of)[int(slope)]

    def limit(side: int) -> float:
        return 2 * mean(at + side * step) - mean(at + 2 * side * step)

    return limit(1) - limit(-1)


def _name(of: str, key: str | None) -> str:
    return f"${LABEL[of]}$" if key is None else f"$∂{LABEL[of]}/∂{key}$"


def _label(ax, experiment: Experiment, key: str, letter: str, name: str) -> None:
    drawing.mark_rest(ax, experiment.paths[key].rest)
    ax.set_xlabel(f"${key}$")
    ax.set_title(f"({letter}) {name}")
