"""The commands but ``demo`` and ``train``: ``check``, ``explain``, ``landscape``, ``bench``,
``doctor``, ``completion``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doubleback as db
from doubleback.cli import UsageError, completions, how_to_install, nearest, require, shared


def check(arguments: argparse.Namespace) -> int:
    """The gradients of one model against autograd's, in float64: 0 when every one agrees, 1 when
    one does not."""
    model, inputs = shared.build(arguments)
    try:
        report = db.check(model, *inputs)
    except db.CheckError as error:
        rows = getattr(error.report, "rows", ())
        if not all(math.isfinite(row.oracle) for row in rows):
            raise UsageError(
                "autograd's own gradients are not finite, so that there is nothing to compare "
                "with: are there NaN or infinity among the net's weights, or in its output?"
            ) from error
        if arguments.json and isinstance(error.report, db.CheckReport):
            print(json.dumps(error.report.as_dict(), indent=2))
        else:
            print(error)
        return 1
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """The plan for one model, without running its penalty."""
    model, inputs = shared.build(arguments)
    plan = model.explain(*inputs)
    print(json.dumps(plan.as_dict(), indent=2) if arguments.json else plan)
    return 0


# -------------------------------------------------------------------------------------- landscape


def landscape(arguments: argparse.Namespace) -> int:
    """Follow a path through the parameters, draw the penalty along it, print the verdict."""
    require("matplotlib", extra="plots")
    if arguments.penalty == "jacobian" and arguments.projections is not None:
        raise UsageError(
            "--projections draws random directions, and a landscape is of a function of the "
            "weights: leave it out for the exact Jacobian"
        )
    if arguments.penalty == "spectral-norm":
        raise UsageError(
            "--penalty spectral-norm is found by iteration, and has no landscape; --penalty "
            "jacobian has one"
        )
    if Path(arguments.out).is_file():
        raise UsageError(f"--out: {arguments.out} is a file")
    x = None if arguments.input is None else _load(arguments.input, "--input")
    if x is not None:
        if arguments.input_shape:
            raise UsageError("give --input or --input-shape, not both")
        arguments.input_shape = [tuple(x.shape)]
    elif not arguments.input_shape:
        raise UsageError("give --input FILE or --input-shape M,…")
    model, inputs = shared.build(arguments)
    inputs = inputs if x is None else (x, *inputs[1:])
    if arguments.labels is not None:
        if not model.penalty.extras:
            raise UsageError(f"--labels has no meaning for --penalty {arguments.penalty}")
        inputs = (inputs[0], _load(arguments.labels, "--labels"))
    if len(inputs) != 1 + model.penalty.extras:
        raise UsageError("a landscape takes a network of one input")
    along = _along(arguments, model, inputs)
    span = arguments.span and tuple(arguments.span)
    path = db.landscape.follow(model.net, inputs[0], along, span)
    curve = db.landscape.penalty(path, model.penalty, *inputs[1:])
    verdict = db.landscape.judge(curve)
    print(json.dumps(verdict.as_dict(), indent=2) if arguments.json else verdict)
    files = db.landscape.drawing.write_landscape(shared.folder(arguments.out), curve, verdict)
    if not arguments.json:
        print(f"\nwritten to {', '.join(map(str, files))}")
    return 0


def _load(name: str, option: str) -> Tensor:
    """A tensor saved by torch, or an array saved by NumPy."""
    try:
        if name.endswith(".npy"):
            import numpy

            tensor = torch.from_numpy(numpy.load(name, allow_pickle=False))
        else:
            tensor = torch.load(name, weights_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{option}: cannot read {name}: {error}") from error
    except Exception as error:  # whatever unpickling a file of another kind raises
        raise UsageError(f"{option}: {name} holds no tensor: {type(error).__name__}") from error
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{option}: {name} holds a {type(tensor).__name__}, not a tensor")
    return tensor


def _along(arguments: argparse.Namespace, model: db.Penalised, inputs: tuple[Tensor, ...]):
    chosen = [arguments.parameter, arguments.layer, arguments.input_line or None]
    if sum(item is not None for item in chosen) > 1:
        raise UsageError("choose one of --parameter, --layer and --input-line")
    if arguments.parameter is not None:
        return db.landscape.Coordinate.parse(arguments.parameter)
    if arguments.layer is not None:
        return db.landscape.random_direction(
            model.net, *arguments.layer.split(","), seed=arguments.seed
        )
    if arguments.input_line:
        generator = torch.Generator().manual_seed(arguments.seed)
        direction = torch.randn(inputs[0].shape[1:], generator=generator, dtype=torch.float64)
        return db.landscape.InputLine(direction / direction.norm())
    return _steepest(model, inputs)


def _steepest(model: db.Penalised, inputs: tuple[Tensor, ...]) -> db.landscape.Coordinate:
    """The entry in which the penalty is steepest, of the weights that a kink follows."""
    _, penalty = model(*inputs)
    named = {name: p for name, p in model.net.named_parameters() if p.dim() > 1}
    names = [name for name in db.landscape.before_kinks(model.net, inputs[0]) if name in named]
    if not names:
        raise UsageError("no weight of the net lies before a kink (ReLU, abs, max-pool, …)")
    grads = torch.autograd.grad(penalty.mean(), [named[n] for n in names], allow_unused=True)
    best, entry = -1.0, None
    for name, g in zip(names, grads, strict=True):
        if g is not None and float(g.abs().max()) > best:
            index = torch.unravel_index(g.abs().argmax(), g.shape)
            best, entry = (
                float(g.abs().max()),
                db.landscape.Coordinate(name, tuple(map(int, index))),
            )
    if entry is None:
        raise UsageError("the penalty depends on no weight before a kink: choose --parameter")
    return entry


# ------------------------------------------------------------------------------------------ bench


def bench(arguments: argparse.Namespace) -> int:
    """Steps of small networks by every means, interleaved, within a given time."""
    require("rich", extra="cli")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from doubleback.cli import demo

    nets = arguments.net or list(shared.NETS)
    names = arguments.penalty or ["loss-gradient", "jacobian"]
    for net in nets:
        nearest("--net", net, shared.NETS)
    for name in names:
        nearest("--penalty", name, demo.PENALTIES)
    if arguments.side < 8 or arguments.side % 8:
        raise UsageError(
            f"--side {arguments.side}: give a multiple of 8, the patches' smallest side"
        )
    where = shared.device(arguments.device)
    console = Console(highlight=False, stderr=arguments.json)
    cases = [(net, name) for name in names for net in nets]
    budget = arguments.seconds / len(cases)
    shape = (3, arguments.side, arguments.side)
    torch.manual_seed(arguments.seed)
    x = torch.randn(arguments.batch, *shape).to(where)
    y = torch.randint(10, (arguments.batch,)).to(where)
    summaries: dict[str, dict[str, Any]] = {name: {} for name in names}
    columns = (TextColumn("{task.description:<28}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(cases) * budget)
        for done, (net_name, name) in enumerate(cases):
            bar.update(task, completed=done * budget, description=f"{net_name}, {name}")
            net = shared.network(net_name, shape, arguments.seed).to(where)
            choice = demo.PENALTIES[name]
            ways = shared.steps(net, choice.build(), choice.weight, arguments.compile)
            start, latest = time.perf_counter(), {}
            for times in shared.interleaved(ways, net, x, y, 0.6 * budget):
                latest, passed = times, min(time.perf_counter() - start, budget)
                bar.update(task, completed=done * budget + passed)
            summaries[name][net_name] = shared.summary(latest)
        bar.update(task, completed=len(cases) * budget, description="done")
    results = {"batch": arguments.batch, "side": arguments.side, "versions": _versions(),
               "device": _device_name(where), "clock": shared.clock(where)[1],
               "results": summaries}  # fmt: skip
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        for name in names:
            console.print(_bench_table(demo.PENALTIES[name].formula, summaries[name], results))
    return 0


SHORT = {  # headings of the table
    "stock autograd": "stock",
    "stock under db.patch()": "db.patch()",
    "db.Penalised": "Penalised",
    "… accumulate": "accumulate",
    "… accumulate, compiled": "compiled",
}


def _bench_table(formula: str, rows: dict[str, Any], results: dict[str, Any]):
    from rich import box
    from rich.table import Table

    ways = [way for way in next(iter(rows.values())) if way != "plain"]
    title = f"{formula}: {results['batch']} images of {results['side']}×{results['side']}, "
    title += f"{results['device']}, in plain steps"
    table = Table("network", box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("plain", *ways):
        table.add_column(SHORT.get(column, column), justify="right")
    for net, row in rows.items():
        cells = (f"{row[way]['over plain']:.2f}×" for way in ways)
        table.add_row(net, f"{1e3 * row['plain']['seconds']:.1f} ms", *cells)
    return table


# ----------------------------------------------------------------------------------------- doctor


def doctor(arguments: argparse.Namespace) -> int:
    """What is here, what works, and what to do about what does not."""
    report: dict[str, Any] = {"versions": _versions(), "devices": _devices()}
    report["extras"] = {
        extra: all(importlib.util.find_spec(name) for name in modules)
        for extra, modules in EXTRAS.items()
    }
    try:
        with db.patched():
            entries = db.patch_report()
        states = Counter((entry.family, entry.state) for entry in entries)
        report["patch"] = {"works": True, "families": {}}
        for (family, state), count in states.items():
            report["patch"]["families"].setdefault(family, {})[state] = count
    except db.DoublebackError as error:
        report["patch"] = {"works": False, "reason": str(error)}
    report["sweeps"] = _tried(False, "cpu")
    if not arguments.no_compile:
        kinds = ("cpu", *("cuda",) * torch.cuda.is_available())
        report["compiler"] = {name: _tried(True, name) for name in kinds}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_doctor_lines(report)))
    return 0


EXTRAS = {
    "cli": ("rich",),
    "demo": ("rich", "sklearn"),
    "plots": ("matplotlib",),
    "train": ("safetensors", "tensorboard"),
}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "doubleback": db.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version() or "") or None,
    }
    if importlib.util.find_spec("triton") is not None:
        import triton

        versions["triton"] = triton.__version__
    return {name: version for name, version in versions.items() if version}


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def _device_name(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"CPU, {_threads()}"


def _devices() -> list[str]:
    lines = [f"cpu: {platform.machine()}, {_threads()}"]
    for i in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(i)
        size = f"{seen.total_memory / 2**30:.0f} GiB"
        lines.append(f"cuda:{i}: {seen.name}, {size}, compute {seen.major}.{seen.minor}")
    return lines


def _tried(compiled: bool, where: str) -> dict[str, Any]:
    """A small penalised step against autograd's."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(where)
    x, y = torch.randn(5, 4, device=where), torch.arange(5, device=where) % 3
    model = db.Penalised(net, db.LossGradient(), compile=compiled)
    start = time.perf_counter()
    try:
        worst = db.check(model, x, y).worst
    except Exception as error:  # whatever a missing C++ compiler or a broken driver raises
        reason = str(error).strip().splitlines()
        return {"works": False, "reason": f"{type(error).__name__}: {reason[0] if reason else ''}"}
    return {"works": True, "worst": worst, "seconds": time.perf_counter() - start}


def _doctor_lines(report: dict[str, Any]) -> list[str]:
    lines = ["versions    " + ", ".join(f"{n} {v}" for n, v in report["versions"].items())]
    lines += [f"device      {line}" for line in report["devices"]]
    patch = report["patch"]
    if patch["works"]:
        parts = (
            f"{family} " + ", ".join(f"{count} {state}" for state, count in states.items())
            for family, states in patch["families"].items()
        )
        lines.append(f"db.patch()  works: {'; '.join(parts)}")
    else:
        lines.append(f"db.patch()  does not work: {patch['reason']}")
    tried = {"sweeps": report["sweeps"]}
    tried |= {f"compile {name}": seen for name, seen in report.get("compiler", {}).items()}
    for name, seen in tried.items():
        if seen["works"]:
            told = f"works: agrees with autograd to {seen['worst']:.1e} ({seen['seconds']:.1f} s)"
        else:
            told = f"does not work: {seen['reason']}"
        lines.append(f"{name:<11} {told}")
    if any(name.startswith("compile") and not seen["works"] for name, seen in tried.items()):
        lines.append("            compile=True needs a C++ compiler on a CPU, Triton on a GPU")
    for extra, there in report["extras"].items():
        told = "installed" if there else f"not installed: {how_to_install(extra)}"
        lines.append(f"[{extra}]".ljust(12) + told)
    return lines


# ------------------------------------------------------------------------------------- completion


def completion(arguments: argparse.Namespace) -> int:
    """A script for a shell: commands, their options, and values where these are few."""
    known = completions()
    if arguments.shell == "fish":
        print("\n".join(_fish(known)))
        return 0
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print("\n".join(_bash(known)))
    return 0


def _bash(known: dict) -> list[str]:
    lines = [
        "_doubleback() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    words="{" ".join(known)} --help --version"',
        "  else",
        '    case "${COMP_WORDS[1]} $before" in',
    ]
    for command, options in known.items():
        for option, values in options.items():
            if values:
                lines.append(f'      "{command} {option}") words="{" ".join(values)}" ;;')
    lines += ['      *) case "${COMP_WORDS[1]}" in']
    for command, options in known.items():
        words = "bash zsh fish" if command == "completion" else " ".join(options)
        lines.append(f'        {command}) words="{words}" ;;')
    return [
        *lines,
        "      esac ;;",
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _doubleback doubleback",
    ]


def _fish(known: dict) -> list[str]:
    lines = [f"complete -c doubleback -n __fish_use_subcommand -f -a '{' '.join(known)}'"]
    for command, options in known.items():
        inside = f"complete -c doubleback -n '__fish_seen_subcommand_from {command}'"
        for option, values in options.items():
            more = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"{inside} -l {option[2:]}{more}")
    return lines
