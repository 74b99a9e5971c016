"""The command line: exit status, what is printed where, and what it needs installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from doubleback.cli import main

NETS = """
import torch
from torch import nn

import doubleback as db


def classifier():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def critic():
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, z):
        hidden = torch.tanh(self.left(x)) * self.right(z)
        return {"logits": hidden, "hidden": hidden.square()}


class Namespace:
    net = critic


ready = nn.Linear(3, 2)


def penalised():
    return db.Penalised(critic(), db.OutputGradient())


def own_loss():
    return db.Penalised(classifier(), db.LossGradient(lambda out, y: (out - y).square().sum(1)))


def not_a_net():
    return 3


def raises():
    raise KeyError("no such weight")


number = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A module of the user's own, importable only because it lies in the current directory."""
    (tmp_path / "their_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("their_nets", None)


def _run(*arguments: str) -> int:
    return main([str(argument) for argument in arguments])


IMAGES = ("--input-shape", "3,3,4,4")
ROWS = ("--input-shape", "4,6")
PAIR = ("--input-shape", "4,3", "--input-shape", "4,2")

GOOD = [
    ("classifier", *IMAGES),
    ("classifier", *IMAGES, "--eval", "--classes", "2", "--seed", "7"),
    ("classifier", *IMAGES, "--loss", "mse", "--norm", "norm"),
    ("classifier", *IMAGES, "--loss", "bce", "--norm", "deviation"),
    ("classifier", *IMAGES, "--penalty", "output-gradient", "--index", "2"),
    ("classifier", *IMAGES, "--penalty", "gradient-match", "--index", "0"),
    ("classifier", *IMAGES, "--penalty", "bilinear-form"),
    ("classifier", *IMAGES, "--penalty", "jacobian", "--of", "softmax", "--chunk", "3"),
    ("classifier", *IMAGES, "--penalty", "jacobian", "--projections", "2"),
    ("critic", *ROWS, "--penalty", "spectral-norm", "--iterations", "2"),
    ("critic", *ROWS, "--penalty", "output-gradient"),
    ("Namespace.net", *ROWS, "--penalty", "output-gradient"),
    ("ready", "--input-shape", "4,3"),
    ("penalised", *ROWS),
    ("TwoInputs", *PAIR, "--output", "logits"),
]


@pytest.mark.parametrize("arguments", GOOD, ids=" ".join)
def test_check_passes_and_reports(nets, capsys, arguments):
    assert _run("check", f"their_nets:{arguments[0]}", *arguments[1:], "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["worst"] <= 1e-10


@pytest.mark.parametrize("command", ["check", "explain"])
def test_text_output(nets, capsys, command):
    assert _run(command, "their_nets:classifier", *IMAGES) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and not printed.err
    assert printed.out.isprintable() or not set(printed.out) & {"\x1b", "\r"}


def test_explain_json(nets, capsys):
    assert (
        _run("explain", "their_nets:critic", *ROWS, "--penalty", "output-gradient", "--json") == 0
    )
    assert isinstance(json.loads(capsys.readouterr().out), dict)


BAD = [
    ("their_nets", ROWS, "not of the form package.module:factory"),
    ("no_such_module:net", ROWS, "cannot import 'no_such_module'"),
    ("their_nets:missing", ROWS, "has no 'missing'"),
    ("their_nets:number", ROWS, "not a callable"),
    ("their_nets:not_a_net", ROWS, "returned a int"),
    ("their_nets:critic", (*ROWS, "--penalty", "bilinear-form", "--norm", "norm"), "no meaning"),
    ("their_nets:penalised", (*ROWS, "--penalty", "output-gradient"), "a Penalised already"),
    ("their_nets:classifier", ROWS, "the net fails on inputs of shape (4, 6): RuntimeError"),
    ("their_nets:own_loss", IMAGES, "a loss of your own"),
    ("their_nets:TwoInputs", PAIR, "choose with --output"),
    ("their_nets:classifier", (*IMAGES, "--classes", "500"), ""),
    ("their_nets:classifier", (*IMAGES, "--penalty", "output-gradient", "--index", "9"), ""),
]


@pytest.mark.parametrize(("target", "arguments", "message"), BAD)
def test_an_error_is_one_line_on_stderr(nets, capsys, target, arguments, message):
    assert _run("check", target, *arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("doubleback: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_an_error_of_the_users_own_is_shown_whole(nets, capsys):
    assert _run("check", "their_nets:raises", *ROWS) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "no such weight" in error and "their_nets.py" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "a:b", "--input-shape", "4,x"),
        ("check", "a:b", "--input-shape", "4,0"),
        ("check", "a:b"),
        ("demo", "--weight", "-1"),
        ("demo", "--weight", "nan"),
        ("demo", "--epochs", "0"),
        ("polish",),
        (),
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        _run(*arguments)
    assert stop.value.code == 2
    assert "usage: doubleback" in capsys.readouterr().err


def test_demo(tmp_path, capsys):
    path = tmp_path / "demo.json"
    assert _run("demo", "--epochs", "1", "--json", path) == 0
    printed = capsys.readouterr().out
    assert not set(printed) & {"\x1b", "\r"}
    assert max(map(len, printed.splitlines())) <= 80
    results = json.loads(path.read_text())
    assert results["plain"].keys() == results["penalised"].keys()
    assert results["penalised"]["mean input-gradient norm"] > 0
    assert set(results["seconds per step"]) == {"plain", "autograd", "doubleback"}
    assert results["worst error against autograd"] <= 1e-10


def test_demo_refuses_a_missing_folder_before_it_trains(tmp_path, capsys):
    assert _run("demo", "--json", tmp_path / "nowhere" / "demo.json") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rich", "sklearn"])
def test_a_missing_extra_is_named(monkeypatch, capsys, missing):
    find = importlib.util.find_spec
    hide = lambda name, package=None: None if name == missing else find(name, package)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    assert _run("demo") == 2
    error = capsys.readouterr().err
    assert missing in error and "pip install 'doubleback[demo]'" in error


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_import_needs_torch_alone(tmp_path):
    code = """
import sys
sys.modules.update(dict.fromkeys(("rich", "sklearn"), None))  # import of these now fails
import doubleback
from doubleback.cli import main
open("small.py", "w").write("from torch import nn\\ndef net(): return nn.Linear(3, 2)\\n")
sys.exit(main(["check", "small:net", "--input-shape", "4,3"]))
"""
    done = _python(code, tmp_path)
    assert done.returncode == 0, done.stderr


WRONG = """
import torch
from torch import nn

import doubleback as db
from doubleback.rules import coordinatewise

op = torch.ops.aten.tanh.default
db.unregister_rule(op)
db.register_rule(  # g″ has the wrong sign
    op,
    coordinatewise("output", lambda call, y: 1 - y * y, lambda call, y: 2 * y * (1 - y * y)),
)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
"""


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_a_wrong_gradient_exits_with_1(tmp_path, form):
    """In a process of its own: the wrong rule must not reach other tests."""
    (tmp_path / "wrong.py").write_text(WRONG)
    arguments = ["check", "wrong:net", "--input-shape", "4,3", *form]
    done = _python(f"import sys, doubleback.cli as c; sys.exit(c.main({arguments}))", tmp_path)
    assert done.returncode == 1, done.stderr
    if form:
        assert json.loads(done.stdout)["passed"] is False
    else:
        assert "← wrong" in done.stdout and not done.stderr
