"""``python -m reproduce``, from the repository's root: the paper's figures, checked, as PNG, PDF
and one HTML page. Exit status 0 when every claim holds, 2 otherwise."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from doubleback.cli import UsageError, require
from doubleback.errors import DoublebackError

from . import FIGURES, reproduce
from .experiment import SEED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reproduce",
        description="Draw the figures of the paper, and check what it says about them.",
    )
    parser.add_argument(
        "--out", default="reproduced", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=SEED, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--only", action="append", metavar="FIGURE", help=f"may be repeated: {', '.join(FIGURES)}"
    )
    try:
        return run(parser.parse_args(argv))
    except (DoublebackError, OSError) as error:
        print(f"reproduce: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Draw, with a progress bar on a terminal and a line per figure elsewhere."""
    require("matplotlib", extra="plots")
    require("rich", extra="cli")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    only = tuple(arguments.only or ())
    unknown = [name for name in only if name not in FIGURES]
    if unknown:
        raise UsageError(f"there is no figure {unknown[0]!r}; there are: {', '.join(FIGURES)}")
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is a file")
    console = Console(highlight=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small run faster, and always the same, on one thread
    start = time.perf_counter()
    columns = (TextColumn("{task.description:<12}"), BarColumn(bar_width=28),
               TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())  # fmt: skip
    names = [name for name in FIGURES if not only or name in only]
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("network", total=1 + len(names))
            for done, upcoming in zip(
                reproduce(out, arguments.seed, only), [*names, "done"], strict=True
            ):
                bar.update(task, advance=1, description=upcoming)
                if not console.is_terminal:
                    console.print(f"{time.perf_counter() - start:6.1f} s  {done}")
    finally:
        torch.set_num_threads(threads)
    console.print(f"every claim holds; open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
