"""The command line: exit status, what is printed where, and what it needs installed."""

from __future__ import annotations

import base64
import errno
import gzip
import html
import importlib.util
import io
import json
import os
import platform
import struct
import subprocess
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import doubleback as db
from doubleback.cli import UsageError, main, shared
from doubleback.cli import demo as demo_command

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


def relu():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def penalised():
    return db.Penalised(critic(), db.OutputGradient())


def own_loss():
    return db.Penalised(classifier(), db.LossGradient(lambda out, y: (out - y).square().sum(1)))


def not_a_net():
    return 3


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        u = self.linear(x)
        return u if u.sum() > 0 else -u


def branches():
    return Branches()


def wide(width):
    return nn.Linear(6, width)


def not_finite():
    net = critic()
    nn.init.constant_(next(net.parameters()), float("nan"))
    return net


def maps():
    return nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (3, 4)))


def probabilities():
    return nn.Sequential(nn.Linear(6, 3), nn.Softmax(1))


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
    ("classifier", *IMAGES, "--penalty", "output-gradient", "--index", "sum"),
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
    ("their_nets:wide", ROWS, "is called without arguments: missing a required argument: 'width'"),
    ("their_nets:not_finite", ROWS, "autograd's own gradients are not finite"),
    (
        "their_nets:maps",
        (*ROWS, "--penalty", "jacobian"),
        "12 entries per example; estimate with --projections n",
    ),
    (
        "their_nets:classifier",
        (*IMAGES, "--penalty", "jacobian", "--projections", "9"),
        "exceeds the 5 directions of an output of shape (3, 5); leave it out, which is exact",
    ),
    ("their_nets:TwoInputs", PAIR, "choose with --output"),
    ("their_nets:classifier", (*IMAGES, "--output", "logits"), "the net returns no such thing"),
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


@pytest.mark.filterwarnings("default::doubleback.errors.PenaltyWarning")
def test_a_warning_is_one_line_on_stderr(nets, capsys):
    softmax = ("--penalty", "jacobian", "--of", "softmax")
    assert _run("explain", "their_nets:probabilities", *ROWS, *softmax) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("doubleback: warning: --of softmax on a network that already ends in")
    assert line.endswith("Use --of output")


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
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_exits_with_2(capsys, arguments):
    """One line, which says where to read on."""
    with pytest.raises(SystemExit) as stop:
        _run(*arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("doubleback: ") and line.endswith("--help)")


def test_nothing_at_all_shows_the_commands(capsys):
    assert _run() == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: doubleback") and "landscape" in error


def _idx(path: Path, values: torch.Tensor) -> None:
    head = struct.pack(f">2x2B{values.dim()}I", 8, values.dim(), *values.shape)
    raw = head + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def _mnist(folder: Path) -> Path:
    """Noise with labels, in MNIST's form."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 128), ("t10k", 32)):
        images = torch.randint(256, (count, 8, 8), generator=generator)
        _idx(folder / f"{split}-images-idx3-ubyte.gz", images)
        _idx(folder / f"{split}-labels-idx1-ubyte", torch.arange(count) % 10)
    return folder


@pytest.fixture
def mnist(tmp_path):
    return _mnist(tmp_path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One short run on few images: the folder with its report, and what it printed."""
    folder = _mnist(tmp_path_factory.mktemp("demo"))
    printed = io.StringIO()
    short = ("--data", f"mnist-idx:{folder}", "--epochs", "5", "--weight", "1", "--seconds", "0",
             "--net", "mlp")  # fmt: skip
    with redirect_stdout(printed):
        assert _run("demo", *short, "--out", folder / "out") == 0
    return folder / "out", printed.getvalue()


def test_demo_prints_two_tables_for_80_columns(demo):
    _, printed = demo
    assert not set(printed) & {"\x1b", "\r"}
    told, _, where = printed.partition("\nreport:")
    assert max(map(len, told.splitlines())) <= 80 and "report.html" in where
    for name in ("stock autograd", "stock under db.patch()", "db.Penalised", "PGD", "FGSM"):
        assert name in told


def test_demo_measures_what_it_says(demo):
    results = json.loads((demo[0] / "results.json").read_text())
    settings = results["settings"]
    assert (settings["training images"], settings["test images"]) == (128, 32)
    assert list(results["quality"]) == ["plain", "loss-gradient", "jacobian"]
    for row in results["quality"].values():
        assert row["max ‖∇ₓℓ‖"] > row["mean ‖∇ₓℓ‖"] > 0 and row["mean ‖J‖_F"] > 0
        for attack in ("FGSM", "PGD"):
            assert len(row[attack]) == len(results["settings"]["sizes"])
            assert row[attack][0] == row["accuracy"]  # ε = 0
    assert results["quality"]["jacobian"]["mean ‖J‖_F"] < results["quality"]["plain"]["mean ‖J‖_F"]
    for cost in results["costs"].values():
        assert cost["plain"]["over plain"] == 1 and len(cost) == 5
        assert all(way["seconds"] > 0 and way["rounds"] >= 5 for way in cost.values())
    assert max(row["worst"] for row in results["parity"].values()) <= 1e-10
    norms = [
        sum(v * v for row in g for v in row) for g in results["pictures"]["gradients"]["plain"]
    ]
    assert norms == sorted(norms) and len(norms) == 8
    most = results["quality"]["plain"]["max ‖∇ₓℓ‖"]
    assert norms[-1] ** 0.5 == pytest.approx(most, rel=1e-4)


def test_the_report_says_what_was_measured(demo):
    """The summary at its top, and the change of the loop for the first penalty."""
    results = json.loads((demo[0] / "results.json").read_text())
    told = html.unescape((demo[0] / "report.html").read_text())
    for sentence in demo_command.sentences(results):
        assert f"<li>{sentence}</li>" in told
    plain, *others = results["quality"].values()
    at = results["settings"]["sizes"].index(demo_command.ATTACK)
    assert f"{plain['PGD'][at]:.1%} plain ({plain['accuracy']:.1%})" in told
    assert all(f"{row['PGD'][at]:.1%} with 1 · " in told for row in others)
    assert '+ model = db.Penalised(net, db.LossGradient("cross_entropy"))' in told


def test_what_is_measured_in_parts_is_that_of_the_whole(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    x, y = torch.rand(7, 1, 8, 8), torch.arange(7)
    whole = demo_command.measure(net, x, y)
    assert {len(whole[attack]) for attack in ("FGSM", "PGD")} == {len(demo_command.SIZES)}
    monkeypatch.setattr(demo_command, "AT_ONCE", 3 * 64)
    for name, value in demo_command.measure(net, x, y).items():
        assert value == pytest.approx(whole[name]), name


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_a_steps_memory_stays_with_the_process():
    """Or each step asks for every page of it again."""
    import resource

    def step():
        return len([torch.ones(2 << 18) for _ in range(16)])  # of 2 MiB each

    shared.keep_memory()
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4096  # of 8192 pages


def test_attacks_stay_in_their_ball_and_raise_the_loss():
    torch.manual_seed(0)
    net = shared.network("mlp", (1, 8, 8), 0)
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 10
    loss = torch.nn.functional.cross_entropy
    seen = demo_command.pgd(net, x, y, 0.1)
    assert float((seen - x).abs().max()) <= 0.1 + 1e-6
    assert float(seen.min()) >= 0 and float(seen.max()) <= 1
    gradient = demo_command.input_gradient(net, x, y)[1]
    one_step = (x + 0.1 * gradient.sign()).clamp(0, 1)
    assert loss(net(seen), y) >= loss(net(one_step), y) > loss(net(x), y)


def test_the_report_is_one_file_that_loads_nothing(demo):
    """Well-formed as HTML, with inline pictures, without a link to anywhere."""
    text = (demo[0] / "report.html").read_text()
    seen: list[tuple[str, dict]] = []
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            seen.append((tag, dict(attributes)))
            if tag not in ("meta", "link", "img", "line", "circle"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attributes):
            seen.append((tag, dict(attributes)))

        def handle_endtag(self, tag):
            if tag in ("circle",):
                return
            assert open_tags.pop() == tag

    Reader().feed(text)
    assert not open_tags
    for _, attributes in seen:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    tags = [tag for tag, _ in seen]
    assert tags.count("svg") == 2 and tags.count("img") == 8 * 4 and tags.count("pre") == 5
    picture = next(a["src"] for tag, a in seen if tag == "img")
    assert base64.b64decode(picture.partition(",")[2]).startswith(b"\x89PNG")


def test_demo_json_goes_to_stdout_alone(tmp_path, capsys):
    options = ("--epochs", "1", "--seconds", "0", "--penalty", "spectral-norm", "--net", "mlp")
    assert _run("demo", *options, "--weight", "0.01", "--out", tmp_path, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["settings"]["weights"] == {"spectral-norm": 0.01}
    assert results["parity"]["spectral-norm"]["worst"] <= 1e-10


def test_a_full_disk_loses_nothing(demo, mnist, nets, capsys, monkeypatch):
    """What was found is printed, and an older report stays."""
    report, write = mnist / "report.html", Path.write_bytes
    report.write_text("an older one")

    def full(path, raw):
        write(path, raw[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared, "write", full)
    monkeypatch.setattr(demo_command.Demo, "run", lambda self: results)
    results = json.loads((demo[0] / "results.json").read_text())
    assert _run("demo", "--data", f"mnist-idx:{mnist}", "--out", mnist) == 2
    told = capsys.readouterr()
    assert "PGD" in told.out and "report:" not in told.out
    assert told.err == f"doubleback: {report} could not be written (No space left on device)\n"
    assert report.read_text() == "an older one"
    assert not list(mnist.glob(".*"))

    drawing = db.landscape.drawing
    monkeypatch.setattr(drawing, "write_landscape", lambda *_: full(mnist / "drawn.png", b""))
    options = ("--input-shape", "2,3", "--parameter", "0.weight[0,0]", "--out", mnist)
    assert _run("landscape", "their_nets:relu", *options) == 2
    told = capsys.readouterr()
    assert told.out and told.err == "doubleback: No space left on device\n"


def test_images_without_a_split_are_split(mnist):
    for path in mnist.glob("t10k-*"):
        path.unlink()
    data = shared.Images.load(f"mnist-idx:{mnist}", 0, torch.device("cpu"))
    assert (len(data.train[1]), len(data.test[1])) == (85, 43)
    with pytest.raises(UsageError, match="has no file train-images-idx3-ubyte"):
        (mnist / "empty").mkdir()
        shared.Images.load(f"mnist-idx:{mnist / 'empty'}", 0, torch.device("cpu"))


def _cut(folder):
    path = folder / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-3])


def _lose(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()


def _foreign(folder):
    (folder / "train-labels-idx1-ubyte").write_text("label\n3\n")


def _no_gzip(folder):
    (folder / "train-images-idx3-ubyte.gz").write_text("no archive")


def _rotten(folder):
    path = folder / "train-images-idx3-ubyte.gz"
    raw = bytearray(path.read_bytes())
    raw[10] = 0xFF  # a block of a kind that there is not
    path.write_bytes(raw)


def _mixed(folder):
    _idx(folder / "train-labels-idx1-ubyte", torch.arange(5))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "is truncated: 136 bytes are announced, 133 are here"),
        (_lose, "has no file t10k-labels-idx1-ubyte"),
        (_foreign, "is not an idx file"),
        (_no_gzip, "cannot be read"),
        (_rotten, "cannot be read"),
        (_mixed, "do not go with labels of shape (5,)"),
    ],
)
def test_bad_idx_files_are_one_line(mnist, capsys, spoil, message):
    spoil(mnist)
    assert _run("demo", "--data", f"mnist-idx:{mnist}", "--out", mnist / "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--net", "seperable"), "did you mean 'separable'?"),
        (("demo", "--penalty", "jacobain"), "did you mean 'jacobian'?"),
        (("demo", "--net", "their_nets:classifier"), "fails on images of shape (1, 8, 8)"),
        (("demo", "--net", "their_nets:ready"), "fails on images"),
        (("demo", "--data", "cifar"), "choose digits or mnist-idx:FOLDER"),
        (("demo", "--data", "mnist-idx:nowhere"), "there is no folder nowhere"),
        (("demo", "--out", "their_nets.py"), "is a file"),
        (("bench", "--net", "mpl"), "did you mean 'mlp'?"),
        (("bench", "--penalty", "jac"), "did you mean 'jacobian'?"),
        (("bench", "--side", "9"), "multiple of 8"),
        (("check", "their_nets:clasifier", *IMAGES), "did you mean 'classifier'?"),
        (("check", "their_nets:critic", *ROWS, "--device", "gpu"), "choose from cpu, cuda"),
        (("explain", "their_nets:TwoInputs", *PAIR, "--penalty", "jacobian"), "--output KEY"),
        (
            ("explain", "their_nets:classifier", *IMAGES, "--penalty", "output-gradient"),
            "choose an entry: --index I, or their sum: --index sum",
        ),
        (
            ("explain", "their_nets:classifier", *IMAGES, "--penalty", "gradient-match"),
            "or their sum: --index sum\n",
        ),
        (
            ("check", "their_nets:branches", *ROWS),
            ": return u if u.sum() > 0 else -u. Remedy: ",
        ),
        pytest.param(
            ("check", "their_nets:critic", *ROWS, "--device", "cuda"),
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_values_are_answered_in_one_line(nets, capsys, arguments, message):
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "net.eval()" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "a:b", *ROWS, "--index", "all"), "'all' is neither a number nor sum"),
        (("chek",), "did you mean 'check'?"),
        (("check", "a:b", *ROWS, "--penalty", "jacobain"), "did you mean 'jacobian'?"),
        (("check", "a:b", *ROWS, "--los", "cros_entropy"), "did you mean 'cross_entropy'?"),
        (("check", "a:b", *ROWS, "--penaltie", "jacobian"), "did you mean --penalty?"),
        (("check", "a:b", "--inputshape", "8,20"), "did you mean --input-shape?"),
        (("check", "a:b", *ROWS, "more"), "check has no argument 'more'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_was_probably_meant(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        _run(*arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_bench_measures_every_way(capsys):
    options = ("--net", "mlp", "--net", "transformer", "--penalty", "loss-gradient")
    assert _run("bench", *options, "--side", "8", "--batch", "4", "--seconds", "0") == 0
    printed = capsys.readouterr().out
    assert "transformer" in printed and "db.patch()" in printed
    options = ("--net", "mlp", "--penalty", "loss-gradient")
    assert _run("bench", *options, "--side", "8", "--batch", "4", "--seconds", "0", "--json") == 0
    found = json.loads(capsys.readouterr().out)["results"]["loss-gradient"]
    assert set(found) == {"mlp"}
    assert all(way["rounds"] >= 5 for row in found.values() for way in row.values())


def test_steps_by_every_means_give_the_same_gradient():
    """What is timed is the same thing."""
    torch.manual_seed(0)
    x, y = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6)
    for name in shared.NETS:
        net = shared.network(name, (1, 8, 8), 0).double()
        for penalty in (db.LossGradient(), db.Jacobian()):
            found = {}
            for way, step in shared.steps(net, penalty, 0.1, False).items():
                net.zero_grad()
                with shared.around(way):
                    step(x, y)
                found[way] = torch.cat([p.grad.flatten() for p in net.parameters()])
            plain = found.pop(shared.PLAIN)
            for gradient in found.values():
                torch.testing.assert_close(gradient, found[shared.STOCK])
                assert (gradient - plain).norm() > 1e-6


def test_doctor(capsys):
    assert _run("doctor", "--no-compile") == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "db.patch()  works: convolution" in printed
    assert "agrees with autograd" in printed
    assert _run("doctor", "--no-compile", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sweeps"]["works"] and found["sweeps"]["worst"] <= 1e-10
    assert "compiler" not in found


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        _run("--version")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"doubleback {db.__version__}\n"


def test_completions_are_those_of_the_commands(capsys, tmp_path):
    """The bash script is run: it must offer what can be typed, and nothing else."""
    assert _run("completion", "bash") == 0
    script = capsys.readouterr().out

    def offered(*words):
        line = " ".join(f"'{word}'" for word in words)
        code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _doubleback\n"
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert offered("doubleback", "de") == ["demo"]
    assert offered("doubleback", "check", "--pen") == ["--penalty"]
    assert offered("doubleback", "check", "--penalty", "spec") == ["spectral-norm"]
    assert offered("doubleback", "demo", "--net", "") == list(shared.NETS)
    assert offered("doubleback", "bench", "--penalty", "") == list(demo_command.PENALTIES)
    assert "zsh" in offered("doubleback", "completion", "")
    for shell in ("zsh", "fish"):
        assert _run("completion", shell) == 0
        assert "landscape" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["rich", "sklearn"])
def test_a_missing_extra_is_named(monkeypatch, capsys, tmp_path, missing):
    find = importlib.util.find_spec
    hide = lambda name, package=None: None if name == missing else find(name, package)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    assert _run("demo", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert missing in error and "pip install 'doubleback[demo]'" in error
    assert "pip install -e '.[demo]'" in error


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


def test_python_m(tmp_path):
    code = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('doubleback')"
    done = _python(code, tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("doubleback "), done.stderr


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


def test_a_wrong_gradient_exits_with_1(tmp_path):
    """In a process of its own: the wrong rule must not reach other tests."""
    (tmp_path / "wrong.py").write_text(WRONG)
    arguments = ["check", "wrong:net", "--input-shape", "4,3"]
    done = _python(
        f"import doubleback.cli as c; print(c.main({arguments}))\n"
        f"print('then'); print(c.main({[*arguments, '--json']}))",
        tmp_path,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    text, _, rest = done.stdout.partition("then\n")
    assert "← wrong" in text and text.endswith("\n1\n")
    *told, code = rest.splitlines()
    assert json.loads("\n".join(told))["passed"] is False and code == "1"
