"""The figures of the paper, each drawn by its own module from exact breakpoints, each checked, and
three of our own. Outside the package: the library does not need the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import doubleback as db
from doubleback.landscape import drawing

from . import dependencies, gradient, inputs, penalties, regions, smoothing, training
from .experiment import ATTEMPTS, SEED, STEPS, Checked, Experiment, prepare

# The paper's figures 1 to 7 in its order, then ours.
FIGURES: dict[str, Callable[[Experiment], Checked]] = {
    "dependencies": dependencies.draw,
    "inputs": inputs.draw,
    "gradient": gradient.draw,
    "node": partial(penalties.draw_single, of="node"),
    "cdb": partial(penalties.draw_single, of="cdb"),
    "node-batch": partial(penalties.draw_batch, of="node"),
    "cdb-batch": partial(penalties.draw_batch, of="cdb"),
    "regions": regions.draw,
    "smoothing": smoothing.draw,
    "training": training.draw,
}

TITLE = "Loss landscapes of gradient penalties"
LEAD = (
    "The seven figures of C. Etmann, “A Closer Look at Double Backpropagation” (2019), by its own "
    "numbers, and three more that are not in it (A, B, C). Redrawn from exact breakpoints: every "
    "jump is where it is drawn, its height is a difference of one-sided limits, and the neuron and "
    "the sample behind it are named. Each tick is an assertion that was checked while this page "
    "was made."
)
PAPER = "https://arxiv.org/abs/1906.06637"


def reproduce(
    out: Path, seed: int = SEED, only: tuple[str, ...] = (), steps: int = STEPS
) -> Iterator[str]:
    """Draw the figures into `out`; yields the name of each part when it is done.

    only: some of `FIGURES`, all by default; steps: of training.

    Files: name.png and name.pdf per figure, index.html, numbers.json.
    """
    names = [name for name in FIGURES if not only or name in only]
    out.mkdir(parents=True, exist_ok=True)
    experiment = prepare(seed, steps)
    yield "network"
    reports, images = [], []
    for name in names:
        with drawing.style():
            report = FIGURES[name](experiment)
            images.append(drawing.save(report.figure, out, report.name)[0])
        reports.append(report)
        yield name
    links = [("The paper: arXiv 1906.06637", PAPER)]
    drawing.write_page(out / "index.html", TITLE, LEAD, _facts(experiment), reports, images, links)
    numbers = {report.name: {"claims": report.claims, **report.numbers} for report in reports}
    text = json.dumps(_plain(numbers), indent=1, allow_nan=False)
    (out / "numbers.json").write_text(text + "\n", encoding="utf-8")


def _facts(experiment: Experiment) -> list[tuple[str, str]]:
    return [
        ("network", "1–8–5–1, ReLU, linear output, squared loss, float64"),
        (
            "parameters",
            f"{experiment.parameters}, not the 61 that the paper states: "
            "(1·8 + 8) + (8·5 + 5) + (5·1 + 1)",
        ),
        ("data", "1500 points, uniform on [−π, π], y = sin x"),
        ("training loss", f"{experiment.loss:.2e}"),
        ("x₀", f"{float(experiment.x0):.4f} (sample {experiment.example}), the sample nearest to "
               "the paper's 1.022"),
        ("w, b", f"{experiment.paths['w'].along}, {experiment.paths['b'].along}; neurons are named "
                 "layer[index], layers 0 and 2 being the hidden ones"),
        ("chosen, not typical", f"the network is the one with the lowest loss of {ATTEMPTS} that "
         "were trained from different weights; w is the weight of the second hidden layer at which "
         "∂R_node/∂w of x₀ jumps highest, b the bias of the same neuron: another pair may not jump "
         "at all"),
        ("seed", str(experiment.seed)),
        ("versions", f"doubleback {db.__version__}, torch {torch.__version__}"),
    ]  # fmt: skip


def _plain(item: Any) -> Any:
    """Numbers as JSON knows them: infinity as a word."""
    if isinstance(item, dict):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(value) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item
