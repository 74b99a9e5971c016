"""The paper's figures: claims hold, wrong rules break them, numbers repeat; and the commands."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from doubleback.reproduce import (
    FIGURES,
    experiment,
    gradient,
    penalties,
    reproduce,
    smoothing,
    training,
)

import doubleback as db
from doubleback.cli import main
from doubleback.landscape import drawing
from doubleback.rules import coordinatewise, find_rule, register
from test_cli import NETS


@pytest.fixture(scope="module")
def made():
    return experiment.prepare(3)


def test_the_network_is_the_papers(made):
    assert made.parameters == 67  # the paper says 61
    assert made.loss < 1e-3
    assert float(made.x0) == pytest.approx(1.022, abs=5e-3)
    assert len(made.x) == 1500 and len(made.batch) == 256


@pytest.mark.parametrize("name", [n for n in FIGURES if n not in ("smoothing", "training")])
def test_claims_hold(made, name):
    with drawing.style():
        report = FIGURES[name](made)
    assert report.claims and report.tables and report.caption
    json.dumps(report.numbers)


def test_every_jump_names_its_neuron_and_sample(made):
    with drawing.style():
        report = FIGURES["cdb-batch"](made)
    for table in report.tables:
        assert table.rows
        for at, height, neuron, sample, x in table.rows:
            assert re.fullmatch(r"2\[[0-4]\]", neuron)
            assert 0 <= sample < 256 and abs(x) <= torch.pi
            assert height != 0 and isinstance(at, float)


def test_smoothing_claims_hold_at_reduced_size(made, monkeypatch):
    monkeypatch.setattr(smoothing, "SLOPES", (0.0,))
    monkeypatch.setattr(smoothing, "BETAS", (4.0, 4096.0))
    with drawing.style():
        report = smoothing.draw(made)
    rows = report.numbers["roughness"]["slope 0.0, node"]
    assert [row["M"] for row in rows] == list(smoothing.SIZES)


def test_training_claims_hold_for_a_few_steps(made, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 12)
    with drawing.style():
        report = training.draw(made)
    assert len(report.numbers["M = 1"]["penalty"]) == 13
    summary = report.numbers["M = 256"]["summary"]
    assert summary["R after"] < summary["R before"]
    assert summary["breakpoints crossed per step and example"] > 0


def test_softplus_curve_is_that_of_the_engine(made):
    path = made.paths["w batch"]
    y = made.y[made.batch]
    layers = [
        m if isinstance(m, torch.nn.Linear) else torch.nn.Softplus(16.0, 40.0) for m in made.net
    ]
    for of in ("node", "cdb"):
        sweeps = experiment.engine(torch.nn.Sequential(*layers), path.along, of)
        grid = torch.tensor([path.span[0], 0.1, path.span[1]], dtype=torch.float64)
        value, slope = smoothing._smooth_curve(made, 16.0, grid, path.x, y, of)
        for k, t in enumerate(grid.tolist()):
            truth = sweeps(t, path.x, y)
            assert float(value[k]) == pytest.approx(truth[0], rel=1e-10)
            assert float(slope[k]) == pytest.approx(truth[1], rel=1e-9)


def test_a_wrong_rule_breaks_the_claims(made):
    """ReLU's derivative off by a thousandth on the active side."""
    relu = torch.ops.aten.relu.default
    right = find_rule(relu)
    wrong = coordinatewise("output", lambda call, y: 1.001 * (y > 0).to(y.dtype), None)
    register(relu, wrong, replace=True)
    try:
        with drawing.style(), pytest.raises(experiment.ClaimError, match="autograd"):
            penalties.draw_single(_again(made), "node")
        with drawing.style(), pytest.raises(experiment.ClaimError, match="autograd"):
            gradient.draw(_again(made))
    finally:
        register(relu, right, replace=True)


def _again(made):
    """The experiment with its paths followed anew, under the rules of now."""
    from dataclasses import replace

    from doubleback import landscape as L

    paths = {k: L.follow(made.net, p.x, p.along, p.span) for k, p in made.paths.items()}
    return replace(made, paths=paths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two figures of a network that was trained briefly."""
    out = tmp_path_factory.mktemp("reproduced")
    done = list(reproduce(out, 1, ("gradient", "node"), steps=60))
    assert done == ["network", "gradient", "node"]
    return out


def test_the_same_seed_gives_the_same_files(folder, tmp_path):
    list(reproduce(tmp_path, 1, ("gradient", "node"), steps=60))
    first, second = (
        {f.name: f.read_bytes() for f in sorted(where.iterdir())} for where in (folder, tmp_path)
    )
    assert set(first) == {
        "figure-2-gradient.pdf", "figure-2-gradient.png", "figure-3-node.pdf",
        "figure-3-node.png", "index.html", "numbers.json",
    }  # fmt: skip
    assert first == second


def test_another_seed_gives_another_network():
    (x, _), (other, _) = experiment.sine_data(1), experiment.sine_data(2)
    assert not torch.equal(x, other)
    nets = [experiment.fitted(seed, attempts=1, steps=2)[0] for seed in (1, 2)]
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)


class Resources(HTMLParser):
    """Everything a page would load from elsewhere, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.open = [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in ("img", "script", "link", "iframe"):
            self.loaded.append(values.get("src") or values.get("href"))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_says_sixty_seven(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    page = Resources()
    page.feed(text)
    assert not page.open
    assert page.loaded and all(src.startswith("data:image/png;base64,") for src in page.loaded)
    assert "67, not the 61 that the paper states" in text
    assert "http" not in text


# ------------------------------------------------------------------------------ command line

LAYERS = """

def kinked():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "landscape_cli_nets.py").write_text(NETS + LAYERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "landscape_cli_nets"
    sys.modules.pop("landscape_cli_nets", None)


def test_landscape_writes_figure_page_and_verdict(nets, tmp_path, capsys):
    command = ["landscape", f"{nets}:kinked", "--input-shape", "6,1,4,4", "--out", "found"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("Along 0.weight[") and "batch size 6" in text
    names = {f.name for f in (tmp_path / "found").iterdir()}
    assert names == {"landscape.png", "landscape.pdf", "index.html", "landscape.json"}
    saved = json.loads((tmp_path / "found" / "landscape.json").read_text())
    assert saved["examples"] == 6 and saved["text"] in text


def test_landscape_reads_inputs_and_paths(nets, tmp_path, capsys):
    torch.save(torch.randn(5, 1, 4, 4), tmp_path / "x.pt")
    torch.save(torch.tensor([0, 1, 2, 3, 0]), tmp_path / "y.pt")
    common = ["landscape", f"{nets}:kinked", "--input", "x.pt", "--json", "--span", "-2", "2"]
    for more in (
        ["--labels", "y.pt", "--parameter", "0.bias[1]"],
        ["--layer", "0,4", "--penalty", "output-gradient", "--index", "2"],
        ["--input-line"],
    ):
        assert main([*common, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["examples"] == 5 and found["span"] == [-2.0, 2.0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--input-shape", "2,1,4,4", "--parameter", "0.wieght[0]"], "did you mean '0.weight'"),
        (["--input-shape", "2,1,4,4", "--parameter", "0.bias"], "name[index]"),
        (["--input-shape", "2,1,4,4", "--layer", "0", "--input-line"], "choose one"),
        (["--input", "none.pt"], "cannot read none.pt"),
        ([], "--input"),
    ],
)
def test_landscape_usage_errors(nets, capsys, more, message):
    assert main(["landscape", f"{nets}:kinked", *more]) == 2
    assert message in capsys.readouterr().err


def test_landscape_refuses_smooth_and_coupled_nets(nets, capsys):
    assert main(["landscape", f"{nets}:critic", "--input-shape", "3,6", "--penalty",
                 "output-gradient"]) == 2  # fmt: skip
    assert "softplus" in capsys.readouterr().err
    assert main(["landscape", f"{nets}:classifier", "--input-shape", "3,3,4,4"]) == 2
    assert "BatchNorm2d" in capsys.readouterr().err


def test_reproduce_command(tmp_path, capsys, monkeypatch):
    asked = []

    def record(out, seed, only):
        asked.append((out, seed, only))
        yield from ("network", *only)

    monkeypatch.setattr("doubleback.reproduce.reproduce", record)
    assert main(["reproduce", "--out", str(tmp_path), "--seed", "1", "--only", "gradient"]) == 0
    assert asked == [(tmp_path, 1, ("gradient",))]
    printed = capsys.readouterr().out
    assert "gradient" in printed and "every claim holds" in printed
    assert main(["reproduce", "--only", "nothing"]) == 2
    assert "there is no figure 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "--out", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_claim_that_fails_ends_the_command(tmp_path, capsys, monkeypatch):
    def fails(out, seed, only):
        yield "network"
        raise experiment.ClaimError("figure-3-node: not so: ∂_b R_node is 0 everywhere")

    monkeypatch.setattr("doubleback.reproduce.reproduce", fails)
    assert main(["reproduce", "--out", str(tmp_path), "--only", "node"]) == 2
    assert "not so" in capsys.readouterr().err


def test_matplotlib_is_asked_for_by_name(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(db.DoublebackError, match=r"pip install 'doubleback\[plots\]'"):
        drawing.panels(1)


def test_importing_the_library_imports_no_matplotlib():
    code = "import sys, doubleback.landscape; sys.exit('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
