"""What the examples share: arguments, data, the table, the figure, and the report."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from doubleback import DoublebackError
from doubleback.cli import UsageError, require
from doubleback.cli.shared import Images, device, digits, folder, read_idx

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

try:
    import matplotlib

    matplotlib.use("Agg")  # figures go to files, also where there is no display
    from matplotlib import pyplot as plt
except ModuleNotFoundError:  # a machine that only trains; `_need_figures` says what is missing
    plt: Any = None

INK, BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#22272e", "#2563a8", "#e07b21", "#2f8f5b", "#c63d3d", "#7b4fa3", "#9aa3ad",
)  # fmt: skip
LARGEST = 150_000  # bytes of a figure in the gallery


# ------------------------------------------------------------------------------------- reports


Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass
class Report:
    """What an example found: a table, statements that hold or do not, a figure."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: Figure
    further: list[Table] = field(default_factory=list)  # (columns, rows) of other tables
    claims: list[tuple[bool, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)  # what the table was made from
    settings: dict[str, Any] = field(default_factory=dict)  # in place of the command's
    name: str = ""  # of a second record of the same example
    seconds: dict[str, int] = field(default_factory=dict)  # that the run took, on how many cores

    def claim(self, holds: bool, seen: str, otherwise: str) -> None:
        """State `seen` where it holds, and plainly `otherwise` where it does not."""
        self.claims.append((bool(holds), seen if holds else otherwise))

    def show(self, console: Console) -> None:
        from rich import box
        from rich import table as tables

        title = self.title
        for columns, rows in ((self.columns, self.rows), *self.further):
            table = tables.Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
            for i, name in enumerate(columns):
                table.add_column(name, justify="right" if i else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            title = None
        for holds, text in self.claims:
            console.print(f"{'seen' if holds else 'NOT SEEN'}: {text}", style=None)
        for text in self.notes:
            console.print(f"note: {text}")

    def write(self, folder: Path, name: str, settings: dict[str, Any]) -> list[Path]:
        """NAME.png and NAME.json under `folder`."""
        picture, record = folder / f"{name}.png", folder / f"{name}.json"
        save(self.figure, picture)
        written = {
            "title": self.title,
            "settings": settings,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "further": [{"columns": list(c), "rows": [*map(list, r)]} for c, r in self.further],
            "claims": [{"seen": holds, "text": text} for holds, text in self.claims],
            "notes": self.notes,
            "numbers": self.numbers,
            "seconds": self.seconds,
        }
        record.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
        return [picture, record]


def save(figure: Figure, path: Path) -> None:
    """Write a PNG that is small enough for the gallery: as it is, or else with a palette of 256
    colours at the highest of a few resolutions."""
    from PIL import Image

    options = {"facecolor": "white", "metadata": {"Software": None}}
    figure.savefig(path, dpi=130, **options)
    for dpi in (130, 110, 90, 70):
        if path.stat().st_size <= LARGEST:
            break
        figure.savefig(path, dpi=dpi, **options)
        with Image.open(path) as whole:
            reduced = whole.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
    plt.close(figure)


def spread(values: Sequence[float], style: str = "{:.3g}") -> str:
    """mean ± deviation, or the one value."""
    mean = style.format(statistics.fmean(values))
    return f"{mean} ± {style.format(statistics.stdev(values))}" if len(values) > 1 else mean


# ------------------------------------------------------------------------------------ figures


def style() -> None:
    """The gallery's fonts, colours and spines."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
        }
    )


def panels(columns: int, rows: int = 1, width: float = 10, height: float = 3.4, **kwargs: Any):
    """A figure in the gallery's style, and its axes as a flat list."""
    style()
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **kwargs
    )
    return figure, list(axes.flat)


def picture(axis: Any, values: Any, cmap: str | None = "gray_r", **kwargs: Any) -> None:
    """An image without ticks or frame."""
    axis.imshow(np.asarray(values), cmap=cmap, interpolation="nearest", **kwargs)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


# ---------------------------------------------------------------------------------------- data


def load_images(source: str, train: int | None, seed: int, device: torch.device) -> Images:
    """`digits` (1797 images of 8×8) or `mnist-idx:FOLDER`, shuffled, the first `train` for
    training (None: two thirds)."""
    if source == "digits":
        images, labels, name = *digits(), "scikit-learn's digits, 8×8"
    else:
        images, labels, name = _mnist(source)
    if train is None:
        train = 2 * len(labels) // 3
    if train >= len(labels):
        raise UsageError(f"--data {source}: {len(labels)} images are too few to train on {train}")
    return Images.split(images, labels, train, seed, device, name)


def _mnist(source: str) -> tuple[Tensor, Tensor, str]:
    kind, _, where = source.partition(":")
    if kind != "mnist-idx" or not where:
        raise UsageError(f"--data {source}: choose `digits` or `mnist-idx:FOLDER`")
    folder = Path(where)
    if not folder.is_dir():
        raise UsageError(f"--data {source}: there is no folder {folder}")
    images = read_idx(_idx_file(folder, "images-idx3-ubyte"))
    labels = read_idx(_idx_file(folder, "labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise UsageError(
            f"--data {source}: images of shape {tuple(images.shape)} do not go with labels of "
            f"shape {tuple(labels.shape)}"
        )
    pixels = images[:, None].float() / 255
    return pixels, labels.long(), f"MNIST, {len(labels)} images, 28×28"


def _idx_file(folder: Path, ending: str) -> Path:
    for prefix in ("train", "t10k"):
        for suffix in ("", ".gz"):
            path = folder / f"{prefix}-{ending}{suffix}"
            if path.is_file():
                return path
    raise UsageError(f"{folder} has no file train-{ending} or t10k-{ending} (nor with .gz)")


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The rows of one epoch, shuffled; a last batch that is not full is left out."""
    rows = torch.randperm(count, generator=generator)
    for start in range(0, count - size + 1, size):
        yield rows[start : start + size]


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds to compare ways of computing by: the processor's own on a CPU, which do not count
    what else runs on the machine."""
    return time.process_time if device.type == "cpu" else time.perf_counter


# ------------------------------------------------------------------------------------- command


def _need_figures() -> None:
    require("matplotlib", "rich", extra="examples")


def main(
    name: str,
    description: str | None,
    run: Callable[[argparse.Namespace], Report | None],
    argv: Sequence[str] | None = None,
    *,
    data: bool = False,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Parse, run, print, write. Exit status 2 and one line on stderr for what cannot be run.

    data: whether the example takes images from `--data`; options: adds arguments of its own; with
    one called `--json` that is given, `run` writes its numbers there and nothing is drawn."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=description)
    parser.add_argument("--full", action="store_true", help="the large size, for an hour at most")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …; default: cpu")
    parser.add_argument(
        "--out", default="gallery", metavar="FOLDER", help="for the figure; default: %(default)s"
    )
    if data:
        parser.add_argument(
            "--data",
            default="digits",
            metavar="SOURCE",
            help="digits (default) or mnist-idx:FOLDER",
        )
    if options is not None:
        options(parser)
    arguments = parser.parse_args(argv)
    drawn = getattr(arguments, "json", None) is None
    threads = torch.get_num_threads()
    if not arguments.full and getattr(arguments, "data", "digits") == "digits":
        torch.set_num_threads(1)  # so small, threads wait for each other, long where cores are busy
    try:
        if drawn:
            _need_figures()
        arguments.device = device(arguments.device)
        where = folder(arguments.out) if drawn else None
        torch.manual_seed(arguments.seed)
        start, busy = time.perf_counter(), time.process_time()
        report = run(arguments)
        if report is not None and where is not None:
            if not getattr(arguments, "source", None):  # numbers of earlier runs were drawn only
                report.seconds = {
                    "passed": round(time.perf_counter() - start),
                    "processor": round(time.process_time() - busy),
                    "cores": os.cpu_count() or 1,
                }
            settings = report.settings or _given(arguments)
            mnist = settings.get("data", "digits") != "digits"  # beside the record of the default
            parts = (name, report.name, "mnist" if mnist else "")
            _show(report, where, "-".join(filter(None, parts)), settings)
        print(f"{time.perf_counter() - start:.0f} s")
        return 0
    except (DoublebackError, OSError) as error:
        print(f"examples.{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the record says of the command."""
    given = {k: v for k, v in vars(arguments).items() if isinstance(v, int)}
    source = getattr(arguments, "data", None)
    return given if source is None else {**given, "data": source.partition(":")[0]}


def _show(report: Report, folder: Path, name: str, settings: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    report.show(console)
    for path in report.write(folder, name, settings):
        console.print(f"written: {path}")
