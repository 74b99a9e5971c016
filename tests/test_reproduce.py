"""The paper's figures: claims hold, wrong rules break them, numbers repeat; and the command."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from doubleback.landscape import drawing
from doubleback.rules import coordinatewise, find_rule, register
from reproduce import (
    FIGURES,
    dependencies,
    experiment,
    gradient,
    penalties,
    reproduce,
    smoothing,
    training,
)
from reproduce.__main__ import main


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


@pytest.mark.parametrize("seed", range(20))
def test_averages_jump_as_theory_says_for_every_seed(seed, monkeypatch):
    """Briefly trained networks: what is said of averages holds for any weights. That the curves are
    autograd's is looked at for a few of them."""
    if seed >= 4:
        monkeypatch.setattr(penalties, "worst_error", lambda *_: 0.0)
    made = experiment.prepare(seed, steps=20)
    for of in ("node", "cdb"):
        for key in ("w", "b"):
            report = experiment.Checked("", "", "")
            curve = made.curves(f"{key} batch")[of]
            penalties.check_batch(made, report, key, of, curve, of == "cdb" or key == "w")
            assert len(report.claims) == 4


def test_a_wrong_average_breaks_the_claim(made, monkeypatch):
    """A batch of 256 that is divided by 255."""
    monkeypatch.setattr(penalties, "BATCH", 255)
    with pytest.raises(experiment.ClaimError, match="largest jump of the mean"):
        curve = made.curves("w batch")["node"]
        penalties.check_batch(made, experiment.Checked("", "", ""), "w", "node", curve, True)


def test_the_training_figure_does_not_skip_its_claim(made, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(training, "MOST", 1)
    with pytest.raises(experiment.ClaimError, match="breakpoints, enough to compare"):
        training.draw(made)


def test_the_dependency_graph_is_the_papers(made):
    """Every edge of the paper's first figure for L = 3 and an identity at the end, and no other."""
    edges, columns = dependencies.dependencies(made.paths["w"].network)
    assert columns == ["x0", "z1", "x1", "z2", "x2", "z3"]
    assert edges == {
        "z1": {"x0", "θ1", "b1"}, "x1": {"z1"},
        "z2": {"x1", "θ2", "b2"}, "x2": {"z2"},
        "z3": {"x2", "θ3", "b3"}, "ℓ": {"z3"},
        "ζ3": {"v"}, "ξ2": {"ζ3", "θ3"}, "ζ2": {"ξ2", "z2"}, "ξ1": {"ζ2", "θ2"},
        "ζ1": {"ξ1", "z1"}, "ξ0": {"ζ1", "θ1"}, "R": {"ξ0"},
    }  # fmt: skip


def test_a_missing_edge_breaks_the_claim(made):
    edges, _ = dependencies.dependencies(made.paths["w"].network)
    edges["ζ2"].discard("z2")
    with pytest.raises(experiment.ClaimError, match="ζ2 of θ2"):
        dependencies.check(made, experiment.Checked("", "", ""), edges)


def test_figures_that_are_not_the_papers_say_so(made):
    with drawing.style():
        report = FIGURES["regions"](made)
    assert report.note == "ours, not in the paper" and report.title.startswith("Figure A")


def test_smoothing_claims_hold_at_reduced_size(made, monkeypatch):
    monkeypatch.setattr(smoothing, "SLOPES", (0.0,))
    monkeypatch.setattr(smoothing, "BETAS", (4.0, 4096.0))
    with drawing.style():
        report = smoothing.draw(made)
    rows = report.numbers["roughness"]["slope 0.0, node"]
    assert [row["M"] for row in rows] == list(smoothing.SIZES)


def test_training_claims_hold_for_a_few_steps(made, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 12)
    monkeypatch.setattr(training, "CROSSED", 2)
    with drawing.style():
        report = training.draw(made)
    runs = report.numbers["M = 1"]["runs"]
    assert len(runs) > 1 and all(len(run["penalty"]) == 13 for run in runs)
    assert sum(step["crossed"] for run in runs for step in run["steps"]) >= 2
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
        "figure-3-gradient.pdf", "figure-3-gradient.png", "figure-4-node.pdf",
        "figure-4-node.png", "index.html", "numbers.json",
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
        if tag not in ("img", "link", "meta"):  # which have no end
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_says_sixty_seven(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    page = Resources()
    page.feed(text)
    assert not page.open
    assert page.loaded.pop(0) == "data:,"  # no icon, so that no browser asks for one
    assert page.loaded and all(src.startswith("data:image/png;base64,") for src in page.loaded)
    assert "67, not the 61 that the paper states" in text
    assert 'href="https://arxiv.org/abs/1906.06637"' in text
    assert "lowest loss of 5" in text and "jumps highest" in text  # what was chosen


def test_reproduce_command(tmp_path, capsys, monkeypatch):
    asked = []

    def record(out, seed, only):
        asked.append((out, seed, only))
        yield from ("network", *only)

    monkeypatch.setattr("reproduce.__main__.reproduce", record)
    assert main(["--out", str(tmp_path), "--seed", "1", "--only", "gradient"]) == 0
    assert asked == [(tmp_path, 1, ("gradient",))]
    printed = capsys.readouterr().out
    assert "gradient" in printed and "every claim holds" in printed
    assert main(["--only", "nothing"]) == 2
    assert "there is no figure 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_claim_that_fails_ends_the_command(tmp_path, capsys, monkeypatch):
    def fails(out, seed, only):
        yield "network"
        raise experiment.ClaimError("figure-4-node: not so: ∂_b R_node is 0 everywhere")

    monkeypatch.setattr("reproduce.__main__.reproduce", fails)
    assert main(["--out", str(tmp_path), "--only", "node"]) == 2
    assert "not so" in capsys.readouterr().err
