"""``doubleback landscape``: the jumps of a penalty along one parameter of your own network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import doubleback as db
from doubleback import landscape as L
from doubleback.cli import UsageError, require
from doubleback.cli.target import build


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
    files = L.drawing.write_landscape(out, curve, verdict)
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
        return L.Coordinate.parse(arguments.parameter)
    if arguments.layer is not None:
        return L.random_direction(model.net, *arguments.layer.split(","), seed=arguments.seed)
    if arguments.input_line:
        generator = torch.Generator().manual_seed(arguments.seed)
        direction = torch.randn(inputs[0].shape[1:], generator=generator, dtype=torch.float64)
        return L.InputLine(direction / direction.norm())
    return _steepest(model, inputs)


def _steepest(model: db.Penalised, inputs: tuple[Tensor, ...]) -> L.Coordinate:
    """The entry in which the penalty is steepest, of the weights that a kink follows."""
    _, penalty = model(*inputs)
    named = {name: p for name, p in model.net.named_parameters() if p.dim() > 1}
    names = [name for name in L.before_kinks(model.net, inputs[0]) if name in named]
    if not names:
        raise UsageError("no weight of the net lies before a kink (ReLU, abs, max-pool, …)")
    grads = torch.autograd.grad(penalty.mean(), [named[n] for n in names], allow_unused=True)
    best, entry = -1.0, None
    for name, g in zip(names, grads, strict=True):
        if g is not None and float(g.abs().max()) > best:
            index = torch.unravel_index(g.abs().argmax(), g.shape)
            best, entry = float(g.abs().max()), L.Coordinate(name, tuple(map(int, index)))
    if entry is None:
        raise UsageError("the penalty depends on no weight before a kink: choose --parameter")
    return entry
