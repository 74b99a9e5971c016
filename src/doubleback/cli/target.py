"""From command-line arguments to a model and the tensors to call it with."""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doubleback as db
from doubleback.cli import LOSSES, UsageError, nearest

NORMS = {"squared": db.SquaredNorm, "norm": db.Norm, "deviation": db.Deviation}

OPTIONS = ("loss", "norm", "index", "of", "projections", "chunk", "iterations")


def build(arguments: argparse.Namespace) -> tuple[db.Penalised, tuple[Tensor, ...]]:
    """The penalised model and every positional argument it is called with."""
    where = device(arguments.device)
    torch.manual_seed(arguments.seed)
    model = _penalised(module(arguments.factory), arguments)
    model.to(where).train(model.training and not arguments.eval)
    inputs = tuple(torch.randn(shape).to(where) for shape in arguments.input_shape)
    extras = _extras(model, inputs, arguments.classes)
    return model, (*inputs, *(extra.to(where) for extra in extras))


def device(name: str) -> torch.device:
    """What --device names, if it is there."""
    try:
        found = torch.device(name)
    except RuntimeError:
        nearest("--device", name, ("cpu", "cuda"), "cuda:0, …")
        raise
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: commands run on cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: PyTorch finds no CUDA device here; leave --device out")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return found


def folder(name: str) -> Path:
    """What --out names, made, before anything else takes time."""
    found = Path(name)
    try:
        found.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--out: {found} is a file") from error
    except OSError as error:
        raise UsageError(f"--out: {found} cannot be made: {error.strerror}") from error
    return found


def module(name: str) -> nn.Module:
    """The net that ``package.module:factory`` returns, or is."""
    return _call(factory(name), name)


def factory(name: str) -> Callable[[], object]:
    """``package.module:factory``, with the current directory importable."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} is not of the form package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import {module_name!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1, 0.6)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{module_name!r} has no {attribute!r}{meant}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name!r} is a {type(found).__name__}, not a callable")
    return found


def _call(made: Callable[[], object], name: str) -> nn.Module:
    net = made if isinstance(made, nn.Module) else made()
    if not isinstance(net, nn.Module):
        raise UsageError(f"{name!r} returned a {type(net).__name__}, not a torch.nn.Module")
    return net


def _penalised(net: nn.Module, arguments: argparse.Namespace) -> db.Penalised:
    if isinstance(net, db.Penalised):
        for option in ("penalty", *OPTIONS, "output"):
            if getattr(arguments, option) is not None:
                raise UsageError(
                    f"--{option} has no meaning here: the factory returns a Penalised already"
                )
        return net
    return db.Penalised(net, penalty(arguments), output=key(arguments.output))


def key(text: str | None) -> str | int | None:
    """What --output names: an index or a key."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() else text


TAKEN = {  # which options a penalty takes
    "loss-gradient": ("loss", "norm"),
    "output-gradient": ("index", "norm"),
    "gradient-match": ("index", "norm"),
    "bilinear-form": (),
    "jacobian": ("of", "projections", "chunk"),
    "spectral-norm": ("iterations",),
}


def penalty(arguments: argparse.Namespace, steady: bool = False) -> db.Penalty:
    """The penalty named on the command line; an option it does not take is an error.

    steady: without anything that it carries from call to call.
    """
    name = arguments.penalty or "loss-gradient"
    for option in OPTIONS:
        if option not in TAKEN[name] and getattr(arguments, option) is not None:
            raise UsageError(f"--{option} has no meaning for --penalty {name}")
    nearest("--norm", arguments.norm or "squared", NORMS)
    nearest("--loss", arguments.loss or "cross_entropy", LOSSES)
    norm = NORMS[arguments.norm or "squared"]()
    if name == "loss-gradient":
        return db.LossGradient(arguments.loss or "cross_entropy", norm=norm)
    if name == "output-gradient":
        return db.OutputGradient(arguments.index, norm=norm)
    if name == "gradient-match":
        return db.GradientMatch(arguments.index, norm=norm)
    if name == "jacobian":
        return db.Jacobian(arguments.of or "output", arguments.projections, arguments.chunk)
    if name == "spectral-norm":
        if steady:
            return db.SpectralNorm(arguments.iterations or 5, warm_start=False)
        return db.SpectralNorm(arguments.iterations or 1)
    return db.BilinearForm()


def _extras(model: db.Penalised, inputs: tuple[Tensor, ...], classes: int | None):
    """Random labels, targets or directions of the shapes that the penalty asks for."""
    asked = model.penalty
    if not asked.extras:
        return ()
    try:
        made = asked.trial(_output(model, inputs), inputs[0], classes)
    except db.LabelError as error:
        raise UsageError(f"{error}: choose --loss or --penalty") from error
    if made is None:
        raise UsageError(
            f"the {asked.extras} arguments that {asked!r} takes beside the network's cannot be "
            "made up here: call doubleback.check or explain from Python"
        )
    return made


def _output(model: db.Penalised, inputs: tuple[Tensor, ...]) -> Tensor:
    """The penalised output, from a copy of the net: statistics and random state stay as they are"""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = copy.deepcopy(model.net)(*inputs)
    except Exception as error:
        shapes = " and ".join(str(tuple(x.shape)) for x in inputs)
        raise UsageError(
            f"the net fails on inputs of shape {shapes}: {type(error).__name__}: {error}"
        ) from error
    return chosen(out, model.output)


def chosen(out: Any, output: Any) -> Tensor:
    """The penalised part of what a net returns."""
    for part in output if isinstance(output, tuple) else (output,):
        if part is not None:
            try:
                out = out[part]
            except (KeyError, IndexError, TypeError) as error:
                raise UsageError(f"--output {part}: the net returns no such thing") from error
    if not isinstance(out, Tensor):
        raise UsageError(f"the net returns a {type(out).__name__}: choose with --output")
    return out
