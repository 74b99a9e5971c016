"""``doubleback demo``: the same net trained plainly and with a gradient penalty, compared."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import doubleback as db
from doubleback.cli import UsageError, digits, require

if TYPE_CHECKING:
    from rich.console import Console

STEPS = {
    "plain": "plain (no penalty)",
    "autograd": "penalty by autograd, create_graph=True",
    "doubleback": "penalty by doubleback",
}


def run(arguments: argparse.Namespace) -> int:
    """Train twice, measure, print two tables, and write JSON when asked."""
    require("rich", "sklearn", extra="demo")
    from rich.console import Console

    if arguments.json and not Path(arguments.json).parent.is_dir():
        raise UsageError(f"--json: there is no folder {Path(arguments.json).parent}")
    console = Console(highlight=False)
    results = _results(console, arguments)
    _show(console, results)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"written to {arguments.json}")
    return 0


def _results(console: Console, arguments: argparse.Namespace) -> dict:
    epochs, seed, weight = arguments.epochs, arguments.seed, arguments.weight
    data = digits.Digits.load(seed)
    console.print(
        f"{len(data.train[1])} training and {len(data.test[1])} test images of handwritten digits, "
        f"8×8, seed {seed}\nplain: ℓ = cross-entropy   penalised: ℓ + {weight:g} · ‖∇ₓℓ‖²\n"
    )
    plain, smooth = digits.network(seed), digits.network(seed)
    model = digits.penalised(smooth)
    _train(console, "plain", plain, partial(digits.plain_step, plain), data, epochs, seed)
    step = partial(digits.sweeps_step, model, weight)
    _train(console, "penalised", smooth, step, data, epochs, seed)
    few = tuple(values[:16] for values in data.test)
    with console.status("measuring"):
        return {
            "settings": {"epochs": epochs, "seed": seed, "weight": weight, "batch": digits.BATCH},
            "versions": {"torch": torch.__version__, "threads": torch.get_num_threads()},
            "plain": digits.measure(plain, data, seed),
            "penalised": digits.measure(smooth, data, seed),
            "seconds per step": digits.seconds_per_step(smooth, weight, data),
            "worst error against autograd": float(db.check(model, *few).worst),
        }


def _train(
    console: Console,
    name: str,
    net: nn.Module,
    step: digits.Step,
    data: digits.Digits,
    epochs: int,
    seed: int,
) -> None:
    """A progress bar on a terminal; elsewhere a line at every quarter of the epochs."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=epochs, state="")
        for epoch, loss, accuracy in digits.train(net, step, data, epochs, seed):
            state = f"epoch {epoch:>3}/{epochs}   loss {loss:6.3f}   accuracy {accuracy:6.1%}"
            bar.update(task, completed=epoch, state=state)
            if not console.is_terminal and (epoch * 4) // epochs > ((epoch - 1) * 4) // epochs:
                console.print(f"{name:<9} {state}")


def _show(console: Console, results: dict) -> None:
    from rich import box
    from rich.table import Table

    quality = Table("on the test set", box=box.SIMPLE_HEAD)
    for column in ("plain", "penalised"):
        quality.add_column(column, justify="right")
    for metric, value in results["plain"].items():
        style = "{:.1%}" if "accuracy" in metric else "{:.3f}"
        quality.add_row(metric, style.format(value), style.format(results["penalised"][metric]))
    console.print(quality)

    seconds = results["seconds per step"]
    cost = Table("one training step", box=box.SIMPLE_HEAD)
    for column in ("time", "over plain"):
        cost.add_column(column, justify="right")
    for name, title in STEPS.items():
        cost.add_row(
            title, f"{1e3 * seconds[name]:.1f} ms", f"{seconds[name] / seconds['plain']:.2f}×"
        )
    console.print(cost)
    console.print(
        "Gradients of the trained net agree with autograd's: worst relative error "
        f"{results['worst error against autograd']:.1e} (float64, every parameter)."
    )
