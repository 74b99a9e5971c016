"""``doubleback train``: interrupted at any moment it ends where it would have; nothing is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from doubleback.cli import main, shared, train

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
ROOT = Path(__file__).parents[1]

THEIRS = """
import os
import random
import time

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import doubleback as db


def net():
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def other():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def energy():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def carrying():
    return db.Penalised(plain(), db.SpectralNorm())


class Shaken(Dataset):
    '''Draws from every generator, and takes its time.'''

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 6, generator=generator)
        self.y = torch.randint(3, (64,), generator=generator)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return self.x[i] + 0.1 * torch.randn(6) + 0.1 * random.random(), self.y[i]


def shaken():
    return Shaken(), Shaken()


def still():
    whole = Shaken()
    return TensorDataset(whole.x, whole.y)


def parted():
    return still(), still()


def slopes():
    whole = Shaken()
    return TensorDataset(whole.x, (whole.x**2).sum(1, keepdim=True), 2 * whole.x)


def none():
    return 3
"""
SHORT = ("--epochs", "3", "--batch", "16", "--checkpoint-every", "3", "--log-every", "2")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("theirs", None)


def _train(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def _weights(folder: str) -> dict[str, torch.Tensor]:
    return safetensors.load_file(Path(folder) / "model.safetensors")


def _equal(one: str, two: str) -> bool:
    a, b = _weights(one), _weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


NET = ("--model", "theirs:net", "--data", "theirs:shaken", *SHORT)


def test_a_run(theirs, capsys):
    assert _train(*NET, "--out", "run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 12 and 0 <= told["test accuracy"] <= 1
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["epoch"] for row in rows if "test loss" in row] == [1, 2, 3]
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == [
        "step-00000009", "step-00000012",
    ]  # fmt: skip
    assert set(_weights("run")) == set(sys.modules["theirs"].net().state_dict())


def test_the_weights_are_those_of_a_loop_by_hand(theirs):
    """Which is what the command stands for."""
    import torch.nn.functional as F

    import doubleback as db

    options = ("--weight", "0.5", "--optimiser", "sgd", "--lr", "0.1", "--batch", "16")
    data = ("--model", "theirs:plain", "--data", "theirs:still")
    assert _train(*data, *options, "--epochs", "2", "--out", "run", "--json") == 0
    torch.manual_seed(0)
    net = sys.modules["theirs"].plain()
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = sys.modules["theirs"].still().tensors
    for epoch in range(2):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(16):
            optimiser.zero_grad()
            out, penalty = model(x[rows], y[rows])
            (F.cross_entropy(out, y[rows]) + 0.5 * penalty).backward()
            optimiser.step()
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(_weights("run")[name], weight)


def test_stopped_and_resumed(theirs, capsys, monkeypatch):
    """Ctrl-C ends the step, saves, and says how to go on; what follows is as if nothing was."""
    assert _train(*NET, "--out", "whole") == 0
    once = train.Training.once

    def interrupted(self, batch):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return once(self, batch)

    monkeypatch.setattr(train.Training, "once", interrupted)
    assert _train(*NET, "--out", "run") == 130
    told = capsys.readouterr().err
    assert "stopped after step 5" in told and "--out run" in told and told.endswith("--resume\n")
    monkeypatch.setattr(train.Training, "once", once)
    assert _train(*NET, "--out", "run") == 2
    assert "holds a run of 5 steps" in capsys.readouterr().err
    assert _train(*NET, "--out", "run", "--resume") == 0
    assert _equal("whole", "run")
    lines = [Path(folder, "metrics.jsonl").read_text() for folder in ("whole", "run")]
    assert lines[0] == lines[1]


def test_stopped_under_torchrun(theirs, capsys, monkeypatch):
    """It hands the terminal's Ctrl-C on to processes that have had it: every one has two."""
    once = train.Training.once

    def interrupted(self, batch):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return once(self, batch)

    monkeypatch.setattr(train.Training, "once", interrupted)
    assert _train(*NET, "--out", "alone") == 130
    assert capsys.readouterr().err == "doubleback: interrupted\n"
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "x"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    assert _train(*NET, "--out", "run") == 130
    told = capsys.readouterr().err
    assert "stopped after step 5" in told
    assert "  torchrun --nnodes 2 --nproc-per-node 2 -m doubleback train --model" in told


def _go(folder: str, slow: str) -> None:
    """In a process of its own."""
    os.chdir(folder)
    os.environ["SLOW"] = slow
    sys.stdout = io.StringIO()
    torch.set_num_threads(1)
    os._exit(_train(*NET, "--out", "run", "--checkpoint-every", "1", "--resume"))


@pytest.mark.parametrize("often", [8, pytest.param(30, marks=pytest.mark.long)])
def test_kills(theirs, often):
    """kill -9 at random moments: the last one to end has the weights of a run that was left alone.

    Runs are short and their checkpoints many, so that kills fall into the writing of them too.
    """
    assert _train(*NET, "--checkpoint-every", "1", "--out", "whole") == 0
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "doubleback.cli.train", "torch._dynamo"])
    dice, kills, ends = random.Random(0), 0, 0
    deadline = time.monotonic() + 400
    while kills < often and time.monotonic() < deadline:
        child = context.Process(target=_go, args=(str(theirs), "0.002"))
        child.start()
        child.join(dice.uniform(0.05, 1.6))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
            child.join()
        else:
            assert child.exitcode == 0
            assert _equal("whole", "run")
            ends += 1
            for path in sorted(Path("run").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    child = context.Process(target=_go, args=(str(theirs), "0"))
    child.start()
    child.join()
    assert child.exitcode == 0 and kills == often
    assert _equal("whole", "run")


def test_a_full_disk_keeps_the_old_checkpoint(theirs, capsys, monkeypatch):
    assert _train(*NET, "--out", "whole") == 0
    real = shared.write

    def full(path, raw):
        if "step-00000006" in str(path) and path.name == "optimiser.safetensors":
            real(path, raw[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, raw)

    monkeypatch.setattr(shared, "write", full)
    assert _train(*NET, "--out", "run") == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "that of step 3 is kept" in error
    assert error.count("\n") == 1
    there = {path.name for path in Path("run/checkpoints").iterdir()}
    assert there == {"step-00000000", "step-00000003"}
    monkeypatch.setattr(shared, "write", real)
    assert _train(*NET, "--out", "run", "--resume") == 0
    assert _equal("whole", "run")


@pytest.mark.parametrize("kind", ["cut", "changed", "foreign", "other net", "other seed"])
def test_checkpoints_that_do_not_fit(theirs, capsys, kind):
    still = ("--model", "theirs:plain", "--data", "theirs:still", *SHORT, "--out", "run")
    assert _train(*still) == 0
    capsys.readouterr()
    path = Path("run/checkpoints/step-00000012")
    more: tuple[str, ...] = ()
    if kind == "cut":
        raw = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(raw[:-7])
    elif kind == "changed":
        raw = bytearray((path / "optimiser.safetensors").read_bytes())
        raw[-3] ^= 1
        (path / "optimiser.safetensors").write_bytes(raw)
    elif kind == "foreign":
        (path / "state.json").write_text("[]")
    elif kind == "other net":
        text = (path / "state.json").read_text().replace("theirs:plain", "theirs:other")
        (path / "state.json").write_text(text)
        more = ("--model", "theirs:other")
    else:
        more = ("--seed", "3")
    assert _train(*still, *more, "--resume", "--epochs", "4") == 2
    error = capsys.readouterr().err
    expected = {
        "cut": "is damaged", "changed": "is damaged", "foreign": "no checkpoint of doubleback's",
        "other net": "does not fit --model theirs:other", "other seed": "was run with seed = 0",
    }  # fmt: skip
    assert expected[kind] in error and error.count("\n") == 1


def test_more_epochs_after_the_end(theirs):
    still = ("--model", "theirs:plain", "--data", "theirs:still", *SHORT)
    assert _train(*still, "--out", "run") == 0
    assert _train(*still, "--epochs", "5", "--out", "run", "--resume") == 0
    assert _train(*still, "--epochs", "5", "--out", "whole") == 0
    assert _equal("whole", "run")


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "theirs:plain", "--penalty", "jacobian", "--data", "theirs:still"),
        ("--model", "theirs:plain", "--penalty", "spectral-norm", "--data", "theirs:still"),
        ("--model", "theirs:energy", "--penalty", "gradient-match", "--loss", "mse",
         "--data", "theirs:slopes", "--schedule", "cosine", "--optimiser", "adamw"),
    ],
    ids=["jacobian", "spectral-norm", "gradient-match"],
)  # fmt: skip
def test_other_penalties_resume_too(theirs, options):
    assert _train(*options, *SHORT, "--out", "whole") == 0
    assert _train(*options, *SHORT, "--out", "run", "--epochs", "1") == 0
    if "cosine" not in options:  # whose rates depend on the number of epochs
        assert _train(*options, *SHORT, "--out", "run", "--resume") == 0
        assert _equal("whole", "run")


def test_a_toml_file(theirs, capsys):
    Path("run.toml").write_text(
        'model = "theirs:plain"\ndata = "theirs:still"\nout = "run"\n'
        'epochs = 1\nbatch = 16\ncheckpoint-every = 2\npenalty = "jacobian"\nweight = 1\n'
    )
    assert _train("run.toml", "--epochs", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    assert json.loads(Path("run/settings.json").read_text())["weight"] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('penalti = "jacobian"', "did you mean 'penalty'?"),
        ('penalty = "jacobain"', "did you mean 'jacobian'?"),
        ("epochs = 1.5", "epochs must be a whole number, not 1.5"),
        ('penalty = "output-gradient"\nindex = "all"', "index must be"),
        ("epochs = 0", "at least 1"),
        ("epochs = ", "is no TOML"),
        ('data = "theirs:none"', "must return a data set"),
        ("batch = 100", "more than the 64 training examples"),
        ('model = "theirs:carrying"', "warm_start=False"),
        ('penalty = "gradient-match"\nindex = 0', "needs 1 more tensors"),
        ('loss = "cros_entropy"', "did you mean 'cross_entropy'?"),
        ('optimiser = "adm"', "did you mean 'adam'?"),
    ],
)
def test_bad_settings_are_one_line(theirs, capsys, text, message):
    lines = {"model": '"theirs:plain"', "data": '"theirs:still"', "out": '"run"'}
    own = text.partition(" ")[0]
    base = "".join(f"{key} = {value}\n" for key, value in lines.items() if key != own)
    Path("run.toml").write_text(base + text)
    assert _train("run.toml") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_what_is_missing_is_named(theirs, capsys):
    assert _train("--model", "theirs:plain") == 2
    assert "give --data" in capsys.readouterr().err
    assert _train("none.toml") == 2
    assert "cannot be read" in capsys.readouterr().err


# Several runs in one pair of processes, whose start takes longer than they do, and in one group.
SEVERAL = """
import json, os, sys
import torch.distributed as dist
from doubleback.cli import main

dist.destroy_process_group = lambda: None
for arguments in json.loads(sys.argv[1]):
    assert main(["train", *arguments]) == 0, arguments
dist.barrier()
os._exit(0)  # where Python ends as usual, gloo's threads may abort it: docs/distributed.md
"""


def test_two_processes_are_one(theirs):
    """And go on after both were stopped. They measure the same on the test set, too."""
    (theirs / "several.py").write_text(SEVERAL)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(theirs)]),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--model", "theirs:plain", "--data", "theirs:parted", *SHORT]

    def launch(*runs: tuple[str, ...]) -> None:
        told = json.dumps([[*options, *more] for more in runs])
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             "2", "several.py", told],
            env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]

    ddp, fsdp = ("--wrap", "ddp", "--out", "ddp"), ("--wrap", "fsdp2", "--out", "fsdp2")
    launch((*ddp, "--epochs", "2"), (*fsdp, "--epochs", "2"), ("--wrap", "ddp", "--out", "whole"))
    launch((*ddp, "--resume"), (*fsdp, "--resume"))
    assert _equal("ddp", "whole")
    assert _train(*options, "--out", "one") == 0
    for name, weight in _weights("one").items():
        for two in ("ddp", "fsdp2"):
            torch.testing.assert_close(_weights(two)[name], weight, rtol=1e-4, atol=1e-5)
    last = {two: json.loads(Path(two, "metrics.jsonl").read_text().splitlines()[-1])
            for two in ("one", "ddp", "fsdp2")}  # fmt: skip
    assert last["ddp"] == pytest.approx(last["one"], rel=1e-4)
    assert last["fsdp2"] == pytest.approx(last["one"], rel=1e-4) and "test loss" in last["one"]
