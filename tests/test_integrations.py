"""examples/integrations: each is short, runs, and learns; two processes end where one does.

Those that need a package which is not installed are skipped; `make test-integrations` installs
them all.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import doubleback as db

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "integrations"
LOOPS = ("plain_loop", "mixed_precision")
# what these packages say of themselves on a CPU, of their own futures, and of workers
QUIET = pytest.mark.filterwarnings("ignore", "error::doubleback.CaptureWarning")


def script(name: str):
    return importlib.import_module(f"examples.integrations.{name}")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_is_short_and_shown(path):
    assert len(path.read_text().splitlines()) <= 60
    page = (ROOT / "docs" / "integrations.md").read_text()
    # as a block: on one line it would be read, and formatted, as an expression of Python
    shown = f"--8<--\nexamples/integrations/{path.name}\n--8<--"
    assert path.stem == "__init__" or shown in page


@pytest.mark.parametrize("name", LOOPS)
def test_loops_learn(name):
    losses = script(name).main(25)
    assert losses[-1] < 0.9 * losses[0]


def test_compiled_is_the_plain_loop():
    """The same steps; without Inductor, whose graphs other tests compile."""
    module, real = script("compiled"), db.Penalised
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db, "Penalised", lambda net, penalty, compile: real(net, penalty))
        found = module.main(10)
    torch.testing.assert_close(found, script("plain_loop").main(10))


@QUIET
def test_lightning():
    pytest.importorskip("lightning")
    module = script("lightning_module")
    assert module.main(6) < module.main(1)


@QUIET
def test_hugging_face():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    module = script("hf_trainer")
    assert module.main(12) < module.main(1)


@QUIET
def test_accelerate():
    pytest.importorskip("accelerate")
    losses = script("accelerate_loop").main(4)
    assert losses[-1] < losses[0]


# What gloo's threads may do to a process that is done, stock PyTorch's too: docs/distributed.md.
ABORTED = "terminate called without an active exception"


def _launch(name: str, processes: int) -> set[str]:
    """The weights' sums that the processes print."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(processes)]
    else:  # as torchrun would start it
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for _ in range(3):
        done = subprocess.run(
            [*command, "-m", f"examples.integrations.{name}"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if not done.returncode or ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    # the lines of two processes may stand on one
    found = re.findall(r"rank \d+: weights add up to (-?\d+\.\d{12})", done.stdout)
    assert len(found) == processes
    return set(found)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_end_where_one_does(name):
    (one,), two = _launch(name, 1), _launch(name, 2)
    assert len(two) == 1, "the processes drifted apart"
    assert float(two.pop()) == pytest.approx(float(one), rel=1e-4)
