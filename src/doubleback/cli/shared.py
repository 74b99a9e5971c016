"""What commands share: a model and tensors from command-line arguments; images, small networks,
steps by several means, a clock."""

from __future__ import annotations

import argparse
import copy
import difflib
import gzip
import importlib
import inspect
import math
import os
import statistics
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback.cli import LOSSES, UsageError, nearest, require

# --------------------------------------------------------------------------- a model from arguments


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
        where = torch.device(name)
    except RuntimeError:
        nearest("--device", name, ("cpu", "cuda"), "cuda:0, …")
        raise
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: commands run on cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: PyTorch finds no CUDA device here; leave --device out")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return where


def folder(name: str) -> Path:
    """What --out names, made, before anything else takes time."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--out: {path} is a file") from error
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be made: {error.strerror}") from error
    return path


def write(path: Path, raw: bytes) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, raw: bytes) -> None:
    """A file's new content, whole or not at all."""
    draft = path.with_name(f".{path.name}.writing")
    try:
        write(draft, raw)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"{path} could not be written ({error.strerror})") from error


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
        item = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import {module_name!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(item, part):
            near = difflib.get_close_matches(part, dir(item), 1, 0.6)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{module_name!r} has no {attribute!r}{meant}")
        item = getattr(item, part)
    if not callable(item):
        raise UsageError(f"{name!r} is a {type(item).__name__}, not a callable")
    if not isinstance(item, nn.Module):
        with suppress(ValueError):  # a callable without a signature
            try:
                inspect.signature(item).bind()
            except TypeError as error:
                raise UsageError(f"{name!r} is called without arguments: {error}") from error
    return item


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
        own = f"the {asked.extras} extra arguments that {type(asked).__name__} takes"
        raise UsageError(
            f"{own if asked.own_loss is None else 'labels for a loss of your own'} cannot be made "
            "up here: call doubleback.check or explain from Python"
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
                out = None if isinstance(part, str) and isinstance(out, Tensor) else out[part]
            except (KeyError, IndexError, TypeError):
                out = None
            if out is None:
                raise UsageError(f"--output {part}: the net returns no such thing")
    if not isinstance(out, Tensor):
        raise UsageError(f"the net returns a {type(out).__name__}: choose with --output")
    return out


Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def keep_memory() -> None:
    """Let a training step's memory stay with the process until the next step: a block that glibc
    frees, of up to 32 MiB, is the size from which on it asks the system for memory page by page,
    and twice that what it keeps. Elsewhere this does nothing."""
    torch.empty(31 << 20, dtype=torch.uint8)


# ---------------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class Images:
    """Images (N, 1, H, W) in [0, 1] and labels (N,), split into training and test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].shape[1:])

    @property
    def side(self) -> int:
        return self.train[0].shape[-1]

    @classmethod
    def split(
        cls, images: Tensor, labels: Tensor, train: int, seed: int, device: torch.device, name: str
    ) -> Images:
        """Shuffled, the first `train` for training."""
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        images, labels = images[order].to(device), labels[order].to(device)
        return cls((images[:train], labels[:train]), (images[train:], labels[train:]), name)

    @classmethod
    def load(cls, source: str, seed: int, device: torch.device) -> Images:
        """`digits` or `mnist-idx:FOLDER`; two thirds for training where the source has no split."""
        if source == "digits":
            images, labels = digits()
            return cls.split(images, labels, 2 * len(labels) // 3, seed, device, "8×8 digits")
        kind, _, where = source.partition(":")
        if kind != "mnist-idx" or not where:
            raise UsageError(f"--data {source}: choose digits or mnist-idx:FOLDER")
        folder = Path(where)
        if not folder.is_dir():
            raise UsageError(f"--data {source}: there is no folder {folder}")
        there = [s for s in ("train", "t10k") if any(folder.glob(f"{s}-*-ubyte*"))]
        pairs = [_idx_pair(folder, split, device) for split in there or ["train"]]
        images, labels = pairs[0]
        name = f"{images.shape[2]}×{images.shape[3]} images of {folder}"
        if len(pairs) == 1:
            return cls.split(images, labels, 2 * len(labels) // 3, seed, device, name)
        if images.shape[1:] != pairs[1][0].shape[1:]:
            raise UsageError(f"--data {source}: training and test images differ in size")
        return cls(pairs[0], pairs[1], name)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 digits, (N, 1, 8, 8) in [0, 1], and their labels."""
    require("sklearn", extra="demo")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels, dtype=torch.long)


def _idx_pair(folder: Path, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
    images = read_idx(_idx_file(folder, f"{split}-images-idx3-ubyte"))
    labels = read_idx(_idx_file(folder, f"{split}-labels-idx1-ubyte"))
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels) or not len(labels):
        raise UsageError(
            f"--data: in {folder}, {split} images of shape {tuple(images.shape)} do not go with "
            f"labels of shape {tuple(labels.shape)}"
        )
    if int(labels.max()) > 9:
        raise UsageError(
            f"--data: {folder} has a label {int(labels.max())}; the demo has classes 0–9"
        )
    return images[:, None].float().div(255).to(device), labels.long().to(device)


def _idx_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(f"--data: {folder} has no file {name} (nor {name}.gz)")


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, the type 8, the number of axes, their sizes, the data."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--data: {path} cannot be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or not 1 <= raw[3] <= 3:
        raise UsageError(f"--data: {path} is not an idx file of bytes")
    header = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:header]) if len(raw) >= header else ()
    wanted = header + (math.prod(shape) if shape else 0)
    if len(raw) != wanted:
        kind = "truncated" if len(raw) < wanted else "too long"
        raise UsageError(
            f"--data: {path} is {kind}: {wanted} bytes are announced, {len(raw)} are here"
        )
    if len(raw) == header:
        raise UsageError(f"--data: {path} holds nothing")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


# -------------------------------------------------------------------------------------- networks


class Separable(nn.Module):
    """Depthwise 3×3, pointwise 1×1, group norm, SiLU."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
        self.pointwise = nn.Conv2d(before, width, 1, bias=False)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.pointwise(self.depthwise(x))))


class Residual(nn.Module):
    """x + two 3×3 convolutions with batch norm and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Patches(nn.Module):
    """Patches of an image as a sequence of tokens, with learned positions."""

    def __init__(self, channels: int, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    """A pre-norm transformer layer with fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TokenMean(nn.Module):
    """The mean over a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _pooled(width: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)


def _separable(channels: int, side: int) -> nn.Module:
    stem = (nn.Conv2d(channels, 16, 3, padding=1), nn.SiLU())
    return nn.Sequential(
        *stem, Separable(16, 32), Separable(32, 32, 2), Separable(32, 64), *_pooled(64)
    )


def _conv(channels: int, side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        *_pooled(64),
    )  # fmt: skip


def _residual(channels: int, side: int) -> nn.Module:
    down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
    stem = nn.Conv2d(channels, 32, 3, padding=1)
    return nn.Sequential(stem, nn.ReLU(), Residual(32), down, nn.ReLU(), Residual(64), *_pooled(64))


def _mlp(channels: int, side: int) -> nn.Module:
    layers = (nn.Linear(channels * side * side, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))


def _transformer(channels: int, side: int) -> nn.Module:
    blocks = (Attention(64, 4), Attention(64, 4))
    return nn.Sequential(
        Patches(channels, side, max(2, side // 8), 64), *blocks, nn.LayerNorm(64), TokenMean(),
        nn.Linear(64, 10),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[int, int], nn.Module], str]] = {
    "separable": (_separable, "depthwise and pointwise convolutions, group norm, SiLU"),
    "conv": (_conv, "3×3 convolutions, ReLU"),
    "residual": (_residual, "residual blocks of 3×3 convolutions, batch norm, ReLU"),
    "mlp": (_mlp, "three dense layers, tanh"),
    "transformer": (_transformer, "patches, two layers of attention, layer norm, GELU"),
}


def network(name: str, shape: tuple[int, ...], seed: int) -> nn.Module:
    """One of `NETS` for images (channels, side, side); the seed fixes its weights."""
    torch.manual_seed(seed)
    return NETS[name][0](shape[0], shape[-1])


# ----------------------------------------------------------------------------------------- steps


def plain_step(net: nn.Module) -> Step:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = net(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return out, loss

    return step


def stock_step(net: nn.Module, penalty: db.Penalty, weight: float) -> Step:
    """∇(ℓ + λR) by autograd alone: one `create_graph=True` for each v of the penalty."""
    double = _double_backward(net, penalty, weight)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):  # the one with a second derivative in PyTorch
            return double(x, y)

    return step


def _double_backward(net: nn.Module, penalty: db.Penalty, weight: float) -> Step:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = net(x)
        extra = (y,)[: penalty.extras]
        total: Any = 0
        for v in penalty.oracle_seeds(out, [x], *extra):
            gradient = torch.autograd.grad(out, x, v, create_graph=True)
            total = total + penalty.value(gradient, *extra)
        loss = F.cross_entropy(out, y) + weight * penalty.reduce(total)
        loss.backward()
        return out, loss

    return step


def sweeps_step(model: db.Penalised, weight: float) -> Step:
    """∇(ℓ + λR) by four explicit sweeps."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, penalty = model(x, *(y,)[: model.penalty.extras])
        loss = F.cross_entropy(out, y) + weight * penalty
        loss.backward()
        return out, loss

    return step


def accumulated_step(model: db.Penalised, weight: float) -> Step:
    """The same in one call."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, loss, penalty = model.accumulate(x, y, loss="cross_entropy", weight=weight)
        return out, loss + weight * penalty

    return step


PLAIN, STOCK, PATCH, OURS, ONE_CALL = (
    "plain", "stock autograd", "stock under db.patch()", "db.Penalised", "… accumulate",
)  # fmt: skip


def steps(net: nn.Module, penalty: db.Penalty, weight: float, compile: bool) -> dict[str, Step]:
    """The same gradient by every means, and a plain step beside them."""
    model = db.Penalised(net, penalty)
    ways = {
        PLAIN: plain_step(net),
        STOCK: stock_step(net, penalty, weight),
        PATCH: _double_backward(net, penalty, weight),  # the same code, `around` it the patch
        OURS: sweeps_step(model, weight),
        ONE_CALL: accumulated_step(model, weight),
    }
    if compile:
        fast = db.Penalised(net, penalty, compile=True)
        ways["… accumulate, compiled"] = accumulated_step(fast, weight)
    return ways


def around(name: str) -> AbstractContextManager:
    """What a way of `steps` runs in: the patch goes in and out between turns, untimed."""
    return db.patched() if name == PATCH else nullcontext()


# ----------------------------------------------------------------------------------------- clock


def clock(device: torch.device) -> tuple[Callable[[], float], str]:
    """What steps are timed with, and its name. One thread's work is its processor time, on which
    other programs have little influence; with more of them, or a GPU, only the time that passes
    says how long a step takes."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time, "processor time"
    return time.perf_counter, "time"


def interleaved(
    ways: Mapping[str, Step], net: nn.Module, x: Tensor, y: Tensor, seconds: float
) -> Iterator[dict[str, list[float]]]:
    """Times of each step so far, after every round: all take a turn per round, so that a busy
    machine slows them alike. Three rounds warm up, then as many follow as fit into `seconds`, five
    at least."""
    wait, (now, _) = torch.cuda.synchronize if x.is_cuda else lambda: None, clock(x.device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    turn, begin = 0, time.perf_counter()
    while turn < 8 or time.perf_counter() - begin < seconds:
        if turn == 3:
            begin = time.perf_counter()
        for name, step in ways.items():
            net.zero_grad()
            with around(name):
                wait()
                start = now()
                step(x, y)
                wait()
                passed = now() - start
            if turn >= 3:
                times[name].append(passed)
        turn += 1
        yield times
    net.zero_grad()


def summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Medians in seconds, their quartiles, and the median of the ratios to the plain step of the
    same round."""
    plain = times[PLAIN]
    return {
        name: {
            "seconds": statistics.median(values),
            "quartiles": statistics.quantiles(values, n=4, method="inclusive")[::2],
            "over plain": statistics.median(a / b for a, b in zip(values, plain, strict=True)),
            "rounds": len(values),
        }
        for name, values in times.items()
    }
