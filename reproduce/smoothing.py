"""Figure B, ours: pseudo-smoothing in numbers, against the batch size, the slope of leaky ReLU and
softplus."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from doubleback import landscape as L
from doubleback.landscape import Roughness, drawing, fit_exponent, roughness

from .experiment import CDB, NODE, OURS, Checked, Experiment, choose, fitted, span_around

SIZES = (1, 4, 16, 64, 256, 1024, 4096)
SLOPES = (0.0, 0.01, 0.1, 0.3)
BETAS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
REPEATS, GRID = 8, 513
RESOLVED = 0.02  # what 2001 places can tell of a total variation


def draw(experiment: Experiment) -> Checked:
    report = Checked(
        "figure-B-smoothing",
        "Figure B: pseudo-smoothing, quantified",
        "Jumps of ∂_w R along one weight of the second hidden layer, for networks trained with "
        "ReLU and leaky ReLU. (a) Number of jumps and (b) their mean height against the batch size "
        "M, with lines of slope 1 and −1 as the theory has it. (c) Jump variation over smooth "
        "variation: it settles, because heights fall as fast as numbers grow. (d) Softplus with "
        "sharpness β and the ReLU network's weights: R has the ReLU limit, but ∂_w R holds spikes "
        "that grow with β where R jumps (until 2001 places no longer resolve them); ReLU's own "
        "∂_w R leaves them out.",
        OURS,
    )
    measured = {}
    for slope in SLOPES:
        for of, by_size in _measure(experiment, slope).items():
            measured[slope, of] = by_size
    soft = _softplus(experiment)
    _check(report, measured, soft)
    report.figure = _figure(measured, soft)
    report.tables += _tables(measured, soft)
    report.numbers = {
        "roughness": {f"slope {a}, {of}": rows for (a, of), rows in measured.items()},
        "softplus": soft,
    }
    return report


def _measure(experiment: Experiment, slope: float) -> dict[str, list[dict[str, Any]]]:
    """Roughness of ∂_w R and R for each batch size, averaged over up to eight batches."""
    seed = experiment.seed
    if slope == 0.0:
        net, unit, source = experiment.net, experiment.unit, experiment.source
    else:
        net, _ = fitted(seed, partial(nn.LeakyReLU, slope), attempts=2)
        unit, source = choose(net, experiment.x0)
    generator = torch.Generator().manual_seed(seed + 2)
    x = (2 * torch.rand(SIZES[-1], 1, generator=generator, dtype=torch.float64) - 1) * math.pi
    along = L.Coordinate("2.weight", (unit, source))
    span = span_around(net, along)
    path = L.follow(net, x, along, span)
    found: dict[str, list[dict[str, Any]]] = {}
    for of, curve in (("node", L.penalty(path, NODE)), ("cdb", L.penalty(path, CDB, torch.sin(x)))):
        found[of] = [{"M": size} for size in SIZES]
        for what, f in (("slope", curve.slope), ("value", curve.value)):
            table = f.table(torch.linspace(*span, GRID, dtype=torch.float64))
            for row in found[of]:
                batches = torch.arange(SIZES[-1]).split(row["M"])[:REPEATS]
                row[what] = _averaged([roughness(f, batch, table) for batch in batches])
    return found


def _averaged(rows: list[Roughness]) -> dict[str, float]:
    smooth = fmean(r.smooth_variation for r in rows)
    jumps = fmean(r.jump_variation for r in rows)
    counted = [r for r in rows if r.jumps]
    return {
        "jumps": fmean(r.jumps for r in rows),
        "mean height": fmean(r.mean_height for r in counted) if counted else 0.0,
        "largest": fmean(r.largest for r in rows),
        "jump variation": jumps,
        "smooth variation": smooth,
        "total variation": jumps + smooth,
        "ratio": jumps / smooth if smooth else math.inf,
    }


# ---------------------------------------------------------------------------------- softplus


def _softplus(experiment: Experiment) -> dict[str, list[dict]]:
    """Total variation of R and ∂_w R of the batch of 256 with softplus in place of ReLU."""
    path = experiment.paths["w batch"]
    x, y = path.x, experiment.y[experiment.batch]
    grid = torch.linspace(*path.span, 2001, dtype=torch.float64)
    found: dict[str, list[dict]] = {}
    for of, curve in experiment.curves("w batch").items():
        limit = {what: roughness(f) for what, f in (("R", curve.value), ("dR", curve.slope))}
        found[of] = []
        for beta in BETAS:
            value, slope = _smooth_curve(experiment, beta, grid, x, y, of)
            # In the mean: beside a jump the largest distance stays, however sharp the softplus.
            gap = float((value - curve.value.mean(grid)).abs().mean())
            found[of].append(
                {
                    "beta": beta,
                    "variation of R": _variation(value),
                    "variation of dR": _variation(slope),
                    "largest |dR|": float(slope.abs().max()),
                    "mean distance of R from ReLU's": gap,
                }
            )
        ends = {what: r.jump_variation + r.smooth_variation for what, r in limit.items()}
        largest = float(curve.slope.mean(grid).abs().max())
        found[of].append(
            {"beta": math.inf, "variation of R": ends["R"], "variation of dR": ends["dR"],
             "largest |dR|": largest, "mean distance of R from ReLU's": 0.0}
        )  # fmt: skip
    return found


def _variation(values: Tensor) -> float:
    return float((values[1:] - values[:-1]).abs().sum())


def _smooth_curve(
    experiment: Experiment, beta: float, grid: Tensor, x: Tensor, y: Tensor, of: str
) -> tuple[Tensor, Tensor]:
    """R and ∂_w R of the batch mean for every w of the grid, by reverse over reverse."""
    along = experiment.paths["w batch"].along
    assert isinstance(along, L.Coordinate)
    softplus = partial(nn.Softplus, beta, 40.0)  # linear where e^{−βz} is below rounding
    layers = [m if isinstance(m, nn.Linear) else softplus() for m in experiment.net]
    net = nn.Sequential(*layers)
    state = {name: p.detach() for name, p in net.named_parameters()}
    hot = torch.zeros_like(state[along.name])
    hot[along.index] = 1
    rest = state[along.name] * (1 - hot)

    def mean_penalty(w: Tensor) -> Tensor:
        def run(leaf: Tensor) -> Tensor:
            return torch.func.functional_call(net, {**state, along.name: rest + w * hot}, (leaf,))

        z, pull = torch.func.vjp(run, x)[:2]
        (s,) = pull(torch.ones_like(z))
        return (s if of == "node" else 2 * (z - y) * s).square().mean()

    both = torch.vmap(torch.func.grad_and_value(mean_penalty), chunk_size=256)(grid)
    return both[1].detach(), both[0].detach()


# ------------------------------------------------------------------------------------ report


def _check(report: Checked, measured: dict, soft: dict) -> None:
    for (slope, of), rows in measured.items():
        number = fit_exponent(SIZES[1:], [r["slope"]["jumps"] for r in rows[1:]])
        height = fit_exponent(SIZES[1:], [r["slope"]["mean height"] for r in rows[1:]])
        report.claim(
            abs(number - 1) < 0.1 and abs(height + 1) < 0.1,
            f"slope {slope:g}, R_{of}: number of jumps ∝ M^{number:.2f} (theory 1), their height "
            f"∝ M^{height:.2f} (theory −1)",
        )
    for of, rows in soft.items():
        limit = rows[-1]["variation of R"]
        middle, near = (rows[k]["variation of R"] / limit for k in (len(rows) // 2 - 1, -2))
        report.claim(
            abs(near - 1) < min(max(abs(middle - 1), RESOLVED), 0.15),
            f"R_{of}: total variation with softplus tends to ReLU's, jumps included: "
            f"{middle:.3f} of it at β = {BETAS[len(rows) // 2 - 1]:g}, {near:.3f} at {BETAS[-1]:g}",
        )
        gaps = [row["mean distance of R from ReLU's"] for row in rows[:-1]]
        report.claim(
            gaps[-1] < gaps[0] / 4,
            f"R_{of}: and R itself to ReLU's, in the mean over w: {gaps[0]:.2g} → {gaps[-1]:.2g}",
        )


def _figure(measured: dict, soft: dict):
    figure, axes = drawing.panels(2, 2)
    for k, slope in enumerate(SLOPES):
        rows, colour = measured[slope, "node"], drawing.COLOURS[k]
        label = "ReLU" if slope == 0 else f"leaky, {slope:g}"
        for ax, what in zip(axes, ("jumps", "mean height", "ratio"), strict=False):
            kept = [(r["M"], r["slope"][what]) for r in rows if r["slope"]["jumps"]]
            ax.loglog(*zip(*kept, strict=True), marker="o", ms=3.5, lw=1.2, color=colour,
                      label=label)  # fmt: skip
            other = [(r["M"], r["slope"][what]) for r in measured[slope, "cdb"]
                     if r["slope"]["jumps"]]  # fmt: skip
            ax.loglog(*zip(*other, strict=True), marker="s", ms=3, lw=0.9, ls="--", color=colour)
    ends = torch.tensor([SIZES[1], SIZES[-1]], dtype=torch.float64)
    for ax, power in ((axes[0], 1), (axes[1], -1)):
        start = measured[0.0, "node"][1]["slope"]["jumps" if power == 1 else "mean height"]
        line = start * (ends / ends[0]) ** power * (2.5 if power == 1 else 0.4)
        ax.loglog(
            ends,
            line,
            color=drawing.BLACK,
            lw=0.8,
            ls=":",
            label=f"slope {power:+d}".replace("-", "−"),
        )
    axes[0].legend(loc="lower right")
    axes[1].plot([], [], color=drawing.GREY, marker="o", ms=3.5, label="$R_{node}$")
    axes[1].plot([], [], color=drawing.GREY, marker="s", ms=3, lw=0.9, ls="--", label="$R_{cdb}$")
    handles = axes[1].get_legend_handles_labels()
    axes[1].legend(handles[0][-3:], handles[1][-3:], loc="lower left")
    axes[2].plot([], [], color=drawing.GREY, marker="o", ms=3.5, label="$R_{node}$")
    axes[2].plot([], [], color=drawing.GREY, marker="s", ms=3, lw=0.9, ls="--", label="$R_{cdb}$")
    axes[2].set_ylim(top=40 * axes[2].get_ylim()[1])
    axes[2].legend(loc="upper center", ncols=2)
    for colour, (of, rows) in zip(drawing.COLOURS, soft.items(), strict=False):
        betas = [r["beta"] for r in rows[:-1]]
        for what, sign in (("variation of R", "-"), ("variation of dR", "--")):
            name = f"$R_{{{of}}}$" if what == "variation of R" else f"$∂_wR_{{{of}}}$"
            axes[3].loglog(betas, [r[what] / rows[-1][what] for r in rows[:-1]], sign, color=colour,
                           marker="o", ms=3.5, lw=1.2, label=name)  # fmt: skip
    axes[3].axhline(1, color=drawing.BLACK, lw=0.8, ls=":")
    axes[3].legend(loc="upper left")
    names = ("(a) number of jumps", "(b) mean height of a jump", "(c) jump / smooth variation",
             "(d) total variation, softplus / ReLU")  # fmt: skip
    for ax, name in zip(axes, names, strict=True):
        ax.set_title(name)
        ax.set_xlabel("batch size $M$" if ax is not axes[3] else "$β$ of softplus")
    return figure


def _tables(measured: dict, soft: dict) -> list[drawing.Table]:
    heads = ("M", "jumps", "mean height", "largest", "jump variation", "smooth variation", "ratio")
    tables = []
    for (slope, of), rows in measured.items():
        name = "ReLU" if slope == 0 else f"leaky ReLU, slope {slope:g}"
        tables.append(
            drawing.Table(
                f"∂_w R_{of}, {name}",
                heads,
                [(r["M"], *(r["slope"][h] for h in heads[1:])) for r in rows],
            )
        )
    exponents = [
        (
            f"{'ReLU' if slope == 0 else f'leaky {slope:g}'}, R_{of}",
            fit_exponent(SIZES[1:], [r["slope"]["jumps"] for r in rows[1:]]),
            fit_exponent(SIZES[1:], [r["slope"]["mean height"] for r in rows[1:]]),
            rows[-1]["slope"]["ratio"],
            rows[-1]["value"]["ratio"],
        )
        for (slope, of), rows in measured.items()
    ]
    heads = ("", "count exponent (theory 1)", "height exponent (theory −1)",
             "jump / smooth of ∂R", "jump / smooth of R")  # fmt: skip
    tables.insert(0, drawing.Table("Fitted exponents, M = 4 … 4096", heads, exponents))
    for of, rows in soft.items():
        tables.append(
            drawing.Table(
                f"Softplus in place of ReLU, R_{of}, M = 256 (β = ∞ is ReLU, jumps included)",
                tuple(rows[0]),
                [tuple(r.values()) for r in rows],
            )
        )
    return tables
