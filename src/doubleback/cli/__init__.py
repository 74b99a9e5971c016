"""The command line: ``doubleback demo``, ``check``, ``explain``, ``landscape``.

Exit status: 0 for success, 1 when ``check`` finds a wrong gradient and only then, 2 for what
cannot be run (a bad argument, a missing extra, any :class:`~doubleback.DoublebackError`: one line
on stderr; an exception of the user's own code: its traceback).

Each command lives in its own module and is imported when it is called, so that neither
``import doubleback`` nor ``doubleback explain`` needs more than torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence

from doubleback.errors import DoublebackError

__all__ = ["UsageError", "main", "require"]

LOSSES = ("cross_entropy", "mse", "bce")
NORMS = ("squared", "norm", "deviation")
PENALTIES = ("loss-gradient", "output-gradient", "gradient-match", "bilinear-form", "jacobian",
             "spectral-norm")  # fmt: skip


class UsageError(DoublebackError):
    """What was typed cannot be run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = _parser().parse_args(argv)
    command = importlib.import_module(f"doubleback.cli.{arguments.command}")
    try:
        return command.run(arguments)
    except DoublebackError as error:
        print(f"doubleback: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("doubleback: interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 2


def require(*modules: str, extra: str) -> None:
    """Raise a :class:`UsageError` that names the extra unless every module can be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this command needs {' and '.join(missing)}: pip install 'doubleback[{extra}]'"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="doubleback", description="Training with derivatives in the loss."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = commands.add_parser(
        "demo", help="train on handwritten digits with and without a penalty, and compare"
    )
    demo.add_argument("--epochs", type=_count, default=20, metavar="N", help="default: %(default)s")
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    demo.add_argument(
        "--weight", type=_weight, default=1.0, metavar="λ", help="of the penalty, default: 1"
    )
    demo.add_argument("--json", metavar="PATH", help="write the results to this file too")

    check = commands.add_parser(
        "check", help="compare a model's gradients with autograd's, in float64"
    )
    _add_model_arguments(check)
    explain = commands.add_parser("explain", help="show how a model would be computed, and why")
    _add_model_arguments(explain)
    _add_landscape(
        commands.add_parser(
            "landscape", help="find the jumps of a penalty along one parameter of a net, exactly"
        )
    )
    return parser


def _add_landscape(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser, shape_required=False)
    parser.add_argument("--input", metavar="FILE", help="a batch, saved by torch.save or NumPy")
    parser.add_argument("--labels", metavar="FILE", help="its labels or targets; default: random")
    parser.add_argument(
        "--parameter",
        metavar="NAME[I,J]",
        help="such as fc1.weight[3,1]; default: the weight in which the penalty is steepest",
    )
    parser.add_argument(
        "--layer", metavar="NAME,…", help="a random direction over the parameters of these layers"
    )
    parser.add_argument(
        "--input-line", action="store_true", help="a random line through the inputs"
    )
    parser.add_argument(
        "--span", type=float, nargs=2, metavar=("FROM", "TO"), help="default: ±1 around the net"
    )
    parser.add_argument("--out", default="landscape", metavar="FOLDER", help="default: %(default)s")


def _add_model_arguments(parser: argparse.ArgumentParser, shape_required: bool = True) -> None:
    """What every command that takes a net needs to build it and call it."""
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a callable without arguments that returns the net, or a doubleback.Penalised",
    )
    parser.add_argument(
        "--input-shape",
        type=_shape,
        action="append",
        required=shape_required,
        metavar="4,3,32,32",
        help="batch first; repeat it for further inputs (the first one is penalised)",
    )
    parser.add_argument("--penalty", choices=PENALTIES, help=f"default: {PENALTIES[0]}")
    parser.add_argument("--loss", choices=LOSSES, help=f"of loss-gradient, default: {LOSSES[0]}")
    parser.add_argument("--norm", choices=NORMS, help=f"of the gradient, default: {NORMS[0]}")
    parser.add_argument(
        "--index", type=int, metavar="I", help="output node of output-gradient and gradient-match"
    )
    parser.add_argument("--of", choices=("output", "softmax"), help="of jacobian, default: output")
    parser.add_argument("--projections", type=_count, metavar="N", help="of jacobian: estimate")
    parser.add_argument("--chunk", type=_count, metavar="C", help="of jacobian: seeds at a time")
    parser.add_argument("--iterations", type=_count, metavar="K", help="of spectral-norm")
    parser.add_argument(
        "--output", metavar="KEY", help="which output, when the net returns a tuple or a dict"
    )
    parser.add_argument(
        "--classes", type=_count, metavar="C", help="labels are below C, default: the output's"
    )
    parser.add_argument("--eval", action="store_true", help="call net.eval() first")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 4,3,32,32")
    return shape


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 <= weight < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number ≥ 0")
    return weight
