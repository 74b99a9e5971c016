"""The command line: ``doubleback demo``, ``train``, ``bench``, ``doctor``, ``check``, ``explain``,
``landscape``, ``completion``; also ``python -m doubleback``.

Exit status: 0 for success, 1 when ``check`` finds a wrong gradient and only then, 2 for what
cannot be run (a bad argument, a missing extra, any :class:`~doubleback.DoublebackError`: one line
on stderr; an exception of the user's own code: its traceback), 130 after Ctrl-C.

What a command needs is imported when it is called, so that neither ``import doubleback`` nor
``doubleback explain`` needs more than torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from doubleback.errors import DoublebackError

__all__ = ["UsageError", "how_to_install", "main", "nearest", "require"]

LOSSES = ("cross_entropy", "mse", "bce")
NORMS = ("squared", "norm", "deviation")
PENALTIES = ("loss-gradient", "output-gradient", "gradient-match", "bilinear-form", "jacobian",
             "spectral-norm")  # fmt: skip
NETS = ("separable", "conv", "residual", "mlp", "transformer")  # of demo and bench
SHOWN = ("loss-gradient", "jacobian", "spectral-norm")  # theirs too
SHELLS = ("bash", "zsh", "fish")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# What the library says to Python, in the words of the command line.
WORDS = (
    (r"call net\.eval\(\) first", "pass --eval"),
    (r"train, and call net\.eval\(\)", "train, and pass --eval"),
    (r"with output= *(\([^)]*\))?", "with --output KEY"),
    (r"\boutput=('[^']*'|-?\d+)", r"--output \1"),
    (r"\bprojections=(\d+|n|…)", r"--projections \1"),
    (r"\bprojections=None is", "leave it out, which is"),
    (r"choose some with entries=.*\"all\", or estimate", "estimate"),
    (r", choose outputs with entries=.*\"all\"", ""),
    (r"\bof=\"(\w+)\"", r"--of \1"),
    (r"Jacobian\(chunk=\.\.\.\)", "--chunk"),
    (r" wrt=0 of shape", " of shape"),
    (r" Pass allow_unused=True if that is meant", ""),
    (r"\bindex=\.\.\.", "--index I"),
    (r'\bindex="sum"', "--index sum"),
    (r"(OutputGradient|GradientMatch)\((--index \w+)\)", r"\2"),
    (r", or match the whole Jacobian: JacobianMatch\(\)", ""),
    (r"[,;]? *(or )?(pass|use|leave) strict=False[^;.]*", ""),
)


class UsageError(DoublebackError):
    """What was typed cannot be run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    arguments = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = partial(_warned, warnings.showwarning)
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    room, _, function = COMMANDS[arguments.command][0].partition(":")
    try:
        command = getattr(importlib.import_module(f"doubleback.cli.{room}"), function)
        return command(arguments)
    except DoublebackError as error:
        print(f"doubleback: {_told(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("doubleback: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `doubleback … | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            where = f" ({error.filename})" if error.filename else ""
            print(f"doubleback: {error.strerror}{where}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2


def require(*modules: str, extra: str) -> None:
    """Raise a :class:`UsageError` that names the extra unless every module can be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"this command needs {' and '.join(missing)}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The command, for a package and for a checkout."""
    return f"pip install 'doubleback[{extra}]' (in a checkout: pip install -e '.[{extra}]')"


def nearest(option: str, given: str, known: Iterable[str], more: str = "") -> None:
    """Raise a :class:`UsageError` with the name that was probably meant, unless it is known."""
    if given not in (names := list(known)):
        raise UsageError(f"{option}: {_unknown(given, names, more)}")


def _unknown(given: str, names: Sequence[str], more: str = "") -> str:
    near = difflib.get_close_matches(given, names, 1, 0.6)
    near = near or [name for name in names if len(given) > 2 and name.startswith(given)]
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {given!r}{meant} (choose from {', '.join(names)}{', ' if more else ''}{more})"


def _warned(otherwise: Callable[..., Any], message: Any, category: Any, *where: Any) -> None:
    """The library's own warnings, like its errors: on one line, without a place in the source."""
    if category.__module__.partition(".")[0] == "doubleback":
        print(f"doubleback: warning: {_told(message)}", file=sys.stderr)
    else:
        otherwise(message, category, *where)


def _told(error: BaseException) -> str:
    """On one line, with options in place of Python."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = " ".join(s if s.endswith((".", ":", ";", ",")) else f"{s}." for s in lines[:-1])
    text = " ".join([text, *lines[-1:]]).strip()
    for pattern, words in WORDS:
        text = re.sub(pattern, words, text)
    return text


# --------------------------------------------------------------------------------- the arguments


class _Parser(argparse.ArgumentParser):
    """Unknown options and commands are answered with the nearest one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        first = next((word for word in given if not word.startswith("-")), None)
        if first is not None and first not in COMMANDS and given[0] == first:
            self.error(f"command: {_unknown(first, list(COMMANDS))}")
        if first in COMMANDS and given[0] == first:
            self._refuse_unknown(first, given[1:])
        arguments, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self._refuse(arguments.command, unknown[0], [])
        return arguments

    def _refuse_unknown(self, command: str, words: Sequence[str]) -> None:
        """Before anything is found missing: it may be there, misspelt."""
        known = [o for _, options in _options(self, command) for o in options]
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(o.startswith(name) for o in known):
                self._refuse(command, word, difflib.get_close_matches(name, known, 1, 0.75))

    def _refuse(self, command: str, word: str, near: Sequence[str]) -> NoReturn:
        meant = f"; did you mean {near[0]}?" if near else ""
        self.prog += f" {command}"
        self.error(f"{command} has no argument {word!r}{meant}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"doubleback: {message} (see {self.prog} --help)\n")


def _options(parser: argparse.ArgumentParser, command: str) -> list[tuple[Any, Sequence[str]]]:
    """The options of a command, as argparse holds them."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [(a, a.option_strings) for a in commands.choices[command]._actions if a.option_strings]


def _parser() -> argparse.ArgumentParser:
    from doubleback import __version__

    parser = _Parser(prog="doubleback", description="Training with derivatives in the loss.")
    parser.add_argument("--version", action="version", version=f"doubleback {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_, add, told) in COMMANDS.items():
        one = commands.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
        add(one)
        if name != "completion":
            one.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(_unknown(text, names))
        return text

    return parse


def _choice(parser: argparse.ArgumentParser, option: str, names: Sequence[str], told: str) -> None:
    """An option with few values: argparse would not say which one was meant."""
    action = parser.add_argument(
        option, type=_one_of(names), metavar="|".join(names) if len(names) < 4 else "NAME",
        help=f"{', '.join(names)}; {told}" if len(names) > 3 else told,
    )  # fmt: skip
    action.completions = names  # type: ignore[attr-defined]


def _add(parser: argparse.ArgumentParser, *rows: tuple[str, Any, str, str]) -> None:
    """Options as (name, kind, metavar, help): a function of the word that is given, `bool` for a
    flag, `list` for words of an option that may be repeated."""
    for option, kind, metavar, told in rows:
        if kind is bool:
            parser.add_argument(option, action="store_true", help=told)
        elif kind is list:
            parser.add_argument(option, action="append", metavar=metavar, help=told)
        else:
            parser.add_argument(option, type=kind, metavar=metavar, help=told)


def _complete(parser: argparse.ArgumentParser, **names: Sequence[str]) -> None:
    """What a shell completes these options with; others may be given."""
    for action in parser._actions:
        if action.dest in names:
            action.completions = names[action.dest]  # type: ignore[attr-defined]


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        ("--net", str, "NAME",
         f"{', '.join(NETS)}, or package.module:factory; default: %(default)s"),
        ("--weight", _weight, "λ", "of every penalty; default: one for each"),
        ("--epochs", _count, "N", "default: 16 for the digits, fewer for more images"),
        ("--data", str, "SOURCE", "digits (default) or mnist-idx:FOLDER"),
        ("--seconds", _weight, "T", "for each penalty's timing"),
        ("--out", str, "FOLDER", "for the report, default: %(default)s"),
    )  # fmt: skip
    parser.set_defaults(net="separable", data="digits", seconds=5.0, out="demo")
    _add_timed(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        ("--net", list, "NAME",
         f"{', '.join(NETS)}; repeat it for several; default: all"),
        ("--side", _count, "N", "of the images"),
        ("--batch", _count, "B", "default: %(default)s"),
        ("--seconds", _weight, "T", "for all measurements together, default: %(default)g"),
    )  # fmt: skip
    parser.set_defaults(side=16, batch=32, seconds=90.0)
    _add_timed(parser)


def _add_timed(parser: argparse.ArgumentParser) -> None:
    """What `demo` and `bench` take alike."""
    _add(
        parser,
        ("--penalty", list, "NAME", f"{', '.join(SHOWN)}; repeat it; default: the first two"),
        ("--compile", bool, "", "compile the sweeps too (slow start)"),
    )
    _complete(parser, net=NETS, penalty=SHOWN)
    _add_common(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    """No defaults here: a TOML file may give what no flag does."""
    parser.add_argument("config", nargs="?", metavar="FILE.toml", help="keys as the options below")
    _choice(parser, "--penalty", [n for n in PENALTIES if n != "bilinear-form"], "as for check")
    _choice(parser, "--loss", LOSSES, f"default: {LOSSES[0]}")
    _choice(parser, "--optimiser", ("adam", "adamw", "sgd"), "default: adam")
    _choice(parser, "--schedule", ("constant", "cosine"), "of the learning rate; default: constant")
    _choice(parser, "--wrap", ("ddp", "fsdp2"), "under torchrun, default: ddp")
    _add_penalty(parser)
    _add(
        parser,
        ("--model", str, "package.module:factory", "returns the net, or a doubleback.Penalised"),
        ("--data", str, "package.module:factory",
         "returns a data set of (x, y), or (training, test)"),
        ("--out", str, "FOLDER", "for checkpoints, metrics and the trained net"),
        ("--device", str, "D", "cpu (default), cuda, …"),
        ("--weight", _weight, "λ", "of the penalty, default: 0.1"),
        ("--lr", _weight, "R", "learning rate, default: 0.001"),
        ("--weight-decay", _weight, "D", "default: 0"),
        ("--momentum", _weight, "M", "of sgd, default: 0"),
        ("--epochs", _count, "N", "default: 10"),
        ("--batch", _count, "B", "of all processes together, default: 64"),
        ("--seed", int, "S", "default: 0"),
        ("--checkpoint-every", _count, "N", "steps, default: 100"),
        ("--log-every", _count, "N", "steps, default: 10"),
        ("--keep", _count, "N", "checkpoints, default: 2"),
        ("--resume", bool, "", "go on from the latest checkpoint"),
    )  # fmt: skip
    parser.add_argument("--tensorboard", action="store_true", default=None, help="write events too")


def _add_penalty(parser: argparse.ArgumentParser) -> None:
    """What a penalty is made with, whichever it is."""
    _choice(parser, "--norm", NORMS, f"of the gradient, default: {NORMS[0]}")
    _choice(parser, "--of", ("output", "softmax"), "of jacobian, default: output")
    _add(
        parser,
        ("--index", _index, "I", "output node of output-gradient and gradient-match, or sum"),
        ("--projections", _count, "N", "of jacobian: estimate"),
        ("--chunk", _count, "C", "of jacobian: seeds at a time"),
        ("--iterations", _count, "K", "of spectral-norm, default: 1 (train: 5)"),
        ("--output", str, "KEY", "which output, when the net returns a tuple or a dict"),
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        ("--device", str, "D", "cpu (default), cuda, cuda:1, …"),
        ("--seed", int, "S", "default: %(default)s"),
    )
    parser.set_defaults(device="cpu", seed=0)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add(parser, ("--no-compile", bool, "", "do not try the compiler, which takes a while"))


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", type=_one_of(SHELLS), metavar="|".join(SHELLS))


def _add_landscape(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, shape_required=False)
    _add(
        parser,
        ("--input", str, "FILE", "a batch, saved by torch.save or NumPy"),
        ("--labels", str, "FILE", "its labels or targets; default: random"),
        ("--parameter", str, "NAME[I,J]",
         "such as fc1.weight[3,1]; default: the weight in which the penalty is steepest"),
        ("--layer", str, "NAME,…", "a random direction over the parameters of these layers"),
        ("--input-line", bool, "", "a random line through the inputs"),
        ("--out", str, "FOLDER", "default: %(default)s"),
    )  # fmt: skip
    parser.add_argument(
        "--span", type=float, nargs=2, metavar=("FROM", "TO"), help="default: ±1 around the net"
    )
    parser.set_defaults(out="landscape")


def _add_model(parser: argparse.ArgumentParser, shape_required: bool = True) -> None:
    """What every command that takes a net needs to build it and call it."""
    parser.add_argument(
        "factory", metavar="package.module:factory",
        help="a callable without arguments that returns the net, or a doubleback.Penalised",
    )  # fmt: skip
    parser.add_argument(
        "--input-shape", type=_shape, action="append", required=shape_required,
        metavar="4,3,32,32",
        help="batch first; repeat it for further inputs (the first one is penalised)",
    )  # fmt: skip
    _choice(parser, "--penalty", PENALTIES, f"default: {PENALTIES[0]}")
    _choice(parser, "--loss", LOSSES, f"of loss-gradient, default: {LOSSES[0]}")
    _add_penalty(parser)
    _add(
        parser,
        ("--classes", _count, "C", "labels are below C, default: the output's"),
        ("--eval", bool, "", "put the net into evaluation mode first"),
    )
    _add_common(parser)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": ("demo:run", _add_demo, "train on handwritten digits with and without penalties, "
             "compare, write a report"),
    "train": ("train:run", _add_train, "train a net of your own with a penalty: checkpoints, "
              "resume, several processes under torchrun"),
    "bench": ("commands:bench", _add_bench, "what a penalised step costs on this machine, by "
              "stock autograd and by doubleback, in two minutes"),
    "doctor": ("commands:doctor", _add_doctor, "versions, devices, what the patch replaces here, "
               "whether the compiler works"),
    "check": ("commands:check", _add_model, "compare a model's gradients with autograd's, in "
              "float64"),
    "explain": ("commands:explain", _add_model, "show how a model would be computed, and why"),
    "landscape": ("commands:landscape", _add_landscape, "find the jumps of a penalty along one "
                  "parameter of a net, exactly"),
    "completion": ("commands:completion", _add_completion, "print completions for a shell: eval "
                   '"$(doubleback completion bash)"'),
}  # fmt: skip


def completions() -> dict[str, dict[str, Sequence[str]]]:
    """The options of every command, with their values where these are few."""
    parser = _parser()
    return {
        name: {
            option: getattr(action, "completions", ())
            for action, options in _options(parser, name)
            for option in options
            if option.startswith("--")
        }
        for name in COMMANDS
    }


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


def _index(text: str) -> int | str:
    try:
        return text if text == "sum" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor sum") from None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = float("nan")
    if not 0 <= weight < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number ≥ 0")
    return weight
