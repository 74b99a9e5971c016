"""What a type checker says of a user's file: what is right passes, what is misspelt does not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# `# WRONG` ends the lines at which a checker has to complain, and no others.
FILE = """
import torch
from torch import Tensor, nn
from typing_extensions import assert_type
from typing import Any

import doubleback as db

net = nn.Linear(3, 2)
x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])

model = db.Penalised(net, db.LossGradient("cross_entropy"))
out, penalty = model(x, y)
assert_type(penalty, Tensor)
assert_type(model(x, y), tuple[Any, Tensor])
(out.sum() + penalty).backward()
out, loss, penalty = model.accumulate(x, y, loss="mse", weight=0.1)
assert_type(loss, Tensor)
energy, gradient = db.WithGradient(net)(x)


def own(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().sum(1)


def slope(gradient: Tensor) -> Tensor:
    return gradient.abs().sum(1)


penalties: list[db.Penalty] = [
    db.LossGradient(own, norm=slope),
    db.LossGradient("bce", norm=db.Norm(db.spaces.Lp(float("inf"))), reduction="none"),
    db.OutputGradient(0, norm=db.Deviation(1.0)),
    db.Jacobian(of="softmax", reduction="sum"),
    db.SpectralNorm(norm=db.SquaredNorm()),
    db.JacobianMatch(2, "none", generator=torch.Generator()),
    db.LogDet(None, terms=20, roulette=0.0, reduction="sum"),
    db.Custom(lambda out: torch.ones_like(out), slope),
]

db.LossGradient("cros_entropy")  # WRONG
db.LossGradient("cross_entropy", norm=3)  # WRONG
db.OutputGradient(norm=3)  # WRONG
db.LossGradient(reduction="avg")  # WRONG
db.Jacobian(of="sofmax")  # WRONG
db.Jacobian(plan="row")  # WRONG
model.accumulate(x, y, loss="cros_entropy")  # WRONG
db.Penalised(net, "jacobian")  # WRONG
"""


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "training.py"
    path.write_text(FILE)
    marked = {n for n, line in enumerate(FILE.splitlines(), 1) if line.endswith("# WRONG")}
    assert len(marked) == 8
    return path, marked


def _run(*command: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.stdout or pytest.fail(done.stderr)


def test_pyright(users_file):
    pytest.importorskip("pyright")
    path, marked = users_file
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    told = _run("pyright", "--outputjson", "--pythonpath", sys.executable, folder=path.parent)
    found = {d["range"]["start"]["line"] + 1: d for d in json.loads(told)["generalDiagnostics"]}
    assert set(found) == marked, found


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_mypy(users_file):
    """Without a look into torch, of whose types it makes Any: that takes three times as long."""
    path, marked = users_file
    settings = "[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n"
    (path.parent / "mypy.ini").write_text(settings)
    told = _run("mypy", "--cache-dir", str(path.parent / "cache"), path.name, folder=path.parent)
    lines = re.findall(r"^training\.py:(\d+): error", told, re.MULTILINE)
    assert set(map(int, lines)) == marked, told
