"""``doubleback landscape``: the jumps of a penalty along one parameter of your own network."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import doubleback as db
from doubleback import landscape as L
from doubleback.cli import UsageError, require
from doubleback.cli.target import build
from doubleback.landscape.program import make_program
from doubleback.landscape.structure import find_motion


def run(arguments: argparse.Namespace) -> int:
    """Follow the path, draw it, print the verdict."""
    require("matplotlib", extra="plots")
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is a file")
    x = None if arguments.input is None else _load(arguments.input, "--input")
    if x is not None:
        if arguments.input_shape:
            raise UsageError("give --input or --input-shape, not both")
        arguments.input_shape = [tuple(x.shape)]
    elif not arguments.input_shape:
        raise UsageError("give --input FILE or --input-shape M,…")
    model, inputs = build(arguments)
    inputs = inputs if x is None else (x, *inputs[1:])
    if arguments.labels is not None:
        inputs = (inputs[0], _load(arguments.labels, "--labels"))
    if len(inputs) != 1 + model.penalty.extras:
        raise UsageError("a landscape takes a network of one input")
    along = _along(arguments, model, inputs)
    path = L.follow(model.net, inputs[0], along, _span(arguments.span))
    curve = L.penalty(path, model.penalty, *inputs[1:])
    verdict = L.judge(curve)
    files = _write(out, path, curve, verdict)
    if arguments.json:
        print(json.dumps(verdict.as_dict(), indent=2))
    else:
        print(f"{verdict}\n\nwritten to {', '.join(map(str, files))}")
    return 0


def _load(name: str, option: str) -> Tensor:
    """A tensor saved by torch, or an array saved by NumPy."""
    try:
        if name.endswith(".npy"):
            import numpy

            found = torch.from_numpy(numpy.load(name, allow_pickle=False))
        else:
            found = torch.load(name, weights_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{option}: cannot read {name}: {error}") from error
    except Exception as error:  # whatever unpickling a file of another kind raises
        raise UsageError(f"{option}: {name} holds no tensor: {type(error).__name__}") from error
    if not isinstance(found, Tensor):
        raise UsageError(f"{option}: {name} holds a {type(found).__name__}, not a tensor")
    return found


def _span(given: list[float] | None) -> tuple[float, float] | None:
    return None if given is None else (given[0], given[1])


def _along(arguments: argparse.Namespace, model: db.Penalised, inputs: tuple[Tensor, ...]):
    chosen = [arguments.parameter, arguments.layer, arguments.input_line or None]
    if sum(item is not None for item in chosen) > 1:
        raise UsageError("choose one of --parameter, --layer and --input-line")
    if arguments.parameter is not None:
        return L.Entry.parse(arguments.parameter)
    if arguments.layer is not None:
        return L.random_direction(model.net, *arguments.layer.split(","), seed=arguments.seed)
    if arguments.input_line:
        generator = torch.Generator().manual_seed(arguments.seed)
        direction = torch.randn(inputs[0].shape[1:], generator=generator, dtype=torch.float64)
        return L.InputLine(direction / direction.norm())
    return _steepest(model, inputs)


def _steepest(model: db.Penalised, inputs: tuple[Tensor, ...]) -> L.Entry:
    """The entry in which the penalty is steepest, of the weights that a kink follows."""
    _, penalty = model(*inputs)
    named = {name: p for name, p in model.net.named_parameters() if p.dim() > 1}
    names = _before_kinks(model.net, inputs[0], named)
    grads = torch.autograd.grad(penalty.mean(), [named[n] for n in names], allow_unused=True)
    best, entry = -1.0, None
    for name, g in zip(names, grads, strict=True):
        if g is not None and float(g.abs().max()) > best:
            index = torch.unravel_index(g.abs().argmax(), g.shape)
            best, entry = float(g.abs().max()), L.Entry(name, tuple(map(int, index)))
    if entry is None:
        raise UsageError("the penalty depends on no weight before a kink: choose --parameter")
    return entry


def _before_kinks(net: nn.Module, x: Tensor, named: Iterable[str]) -> list[str]:
    program, found, refused = make_program(net, x), [], None
    for name in named:
        try:
            if name in program.names and find_motion(program, {program.names[name]: 1}).kinks:
                found.append(name)
        except db.NotPiecewiseLinearError as error:
            refused = refused or error
    if found:
        return found
    raise refused or UsageError("no weight of the net lies before a kink (ReLU, abs, max-pool, …)")


def _write(out: Path, path: L.Path, curve: L.Curve, verdict: L.Verdict) -> list[Path]:
    from doubleback.landscape import drawing
    from doubleback.reproduce.experiment import Report, Table
    from doubleback.reproduce.page import write_page

    worst = curve.slope.jumps()
    example = int(worst.example[worst.height.abs().argmax()]) if len(worst) else 0
    with drawing.style():
        figure, axes = drawing.panels(2, 2)
        for row, (name, f) in enumerate((("$R$", curve.value), ("$∂R$", curve.slope))):
            drawing.draw_mean(axes[2 * row], f)
            axes[2 * row].set_title(f"mean of {name} over {path.examples}")
            drawing.draw_pieces(axes[2 * row + 1], f, example, drawing.ORANGE)
            axes[2 * row + 1].set_title(f"{name}, example {example}")
        for ax in axes:
            drawing.mark_rest(ax, path.rest)
            ax.set_xlabel(str(path.along) if isinstance(path.along, L.Entry) else "$t$")
        png, pdf = drawing.save(figure, out, "landscape")
    order = worst.height.abs().argsort(descending=True)[:20].tolist()
    rows = [
        (path.breakpoints[k].t, float(worst.height[k]) / path.examples,
         ", ".join(map(str, path.breakpoints[k].units[:4])), path.breakpoints[k].example)
        for k in order
    ]  # fmt: skip
    report = Report(
        "landscape", str(path.along),
        "The penalty R and its derivative along the path: the batch mean, with every jump, and the "
        "example with the highest jump. Dashed: the network as it is.",
        tables=[
            Table("Highest jumps of the mean of ∂R", ("at", "height", "units", "example"), rows),
            Table("Roughness", ("", "R", "∂R"),
                  [(k, v, getattr(verdict.slope, k)) for k, v in vars(verdict.value).items()]),
        ],
    )  # fmt: skip
    page, numbers = out / "index.html", out / "landscape.json"
    between = "exact" if curve.value.exact else "interpolated; exact at breakpoints"
    facts = [("penalty", curve.name), ("between breakpoints", between)]
    write_page(page, "Loss landscape", str(verdict), facts, [report], [png])
    numbers.write_text(json.dumps(verdict.as_dict(), indent=1) + "\n", encoding="utf-8")
    return [png, pdf, page, numbers]
