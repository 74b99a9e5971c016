"""Installing, removing, nesting, reporting; first order untouched."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import doubleback as db
from doubleback.patch import mechanism
from doubleback.patch.mechanism import Formula
from support.fresh import run_fresh


def states(family: str = "convolution") -> set[str]:
    return {entry.state for entry in db.patch_report() if entry.family == family}


def double_backward() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 6, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 1, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x, weight, groups=4).sin()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), weight)
    return h


def node_name() -> str:
    x, weight = torch.randn(1, 1, 3, 3, requires_grad=True), torch.randn(1, 1, 2, 2)
    (g,) = torch.autograd.grad(F.conv2d(x, weight.requires_grad_()).sum(), x, create_graph=True)
    return type(g.grad_fn).__name__


def registered() -> str:
    return torch._C._dispatch_dump("aten::convolution_backward")


def test_patch_and_unpatch_leave_no_trace():
    before = registered()
    expected = double_backward()
    hooks = torch.autograd._engine_run_backward, torch.autograd.forward_ad.enter_dual_level
    db.patch()
    assert states() == {"ready"} and registered() == before  # nothing until it is needed
    found = double_backward()
    assert states() == {"replaced"} and registered() != before
    assert node_name() == "DerivativeNodeBackward"
    db.patch()
    db.unpatch()
    assert states() == {"stock"} and registered() == before
    assert node_name() == "ConvolutionBackwardBackward0"
    assert hooks == (
        torch.autograd._engine_run_backward,
        torch.autograd.forward_ad.enter_dual_level,
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_first_order_training_alone_registers_nothing():
    before = registered()
    db.patch()
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    F.conv2d(x, torch.randn(3, 2, 3, 3)).sum().backward()
    assert registered() == before


def test_blocks_nest_and_outlive_unpatch():
    with db.patched(only="convolution"):
        double_backward()
        with db.patched():
            pass
        assert states() == {"replaced"}
        db.patch()
        db.unpatch()
        assert states() == {"replaced"}
    assert states() == {"stock"}


def test_a_block_ends_after_an_error():
    with pytest.raises(ZeroDivisionError), db.patched():
        double_backward()
        raise ZeroDivisionError
    assert states() == {"stock"}


def test_only_chooses_families():
    with db.patched(only=("convolution",)):
        found = {entry.family for entry in db.patch_report() if entry.state != "stock"}
    assert found <= {"convolution"}


def test_unknown_family_names_the_nearest():
    with pytest.raises(db.PatchError, match="did you mean 'convolution'"):
        db.patch(only=["convolutions"])
    assert states() == {"stock"}


def test_threads():
    expected, failures = double_backward(), []

    def work():
        for _ in range(10):
            with db.patched():
                if not torch.allclose(double_backward(), expected, rtol=1e-13):
                    failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and states() == {"stock"}


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0a0+git123", "1.13"])
def test_unsupported_version_patches_nothing(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    for call in (db.patch, lambda: db.patched().__enter__()):
        with pytest.raises(db.PatchError, match=r"2\.11 to 2\.13"):
            call()
    assert states() == {"stock"}


def test_an_operator_that_this_build_lacks_is_skipped():
    ghost = Formula("no_such_operator_backward", "ghosts", "")
    patcher = mechanism.Patcher([ghost])
    patcher.patch(None)
    patcher.arm("create_graph")
    assert patcher.report()[0].state == "missing" and not patcher.libraries
    patcher.unpatch()


@pytest.mark.parametrize("key", ["AutogradCPU", "AutogradCUDA"])
def test_another_library_s_kernel_is_left_alone(key):
    stock = torch.library.get_kernel("aten::convolution_backward", key)
    calls = []

    def theirs(keyset, *args):
        calls.append(1)
        return stock.call_boxed(keyset, *args)

    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_backward", theirs, key, with_keyset=True)
    try:
        with db.patched():
            double_backward()
            entry = db.patch_report()[0]
            assert entry.state == "foreign" and "test_mechanism.py" in entry.reason
            assert key != "AutogradCPU" or calls
    finally:
        library._destroy()
    with db.patched():
        double_backward()
        assert states() == {"replaced"}


def test_the_name_of_the_file_is_of_no_account(tmp_path):
    """Our own kernels are told from another library's, wherever the code that registers them is."""
    home = Path(db.__file__).parent
    shutil.copytree(home, tmp_path / "doubleback", ignore=shutil.ignore_patterns("__pycache__"))
    patch = tmp_path / "doubleback" / "patch"
    (patch / "mechanism.py").rename(patch / "renamed.py")
    for path in patch.glob("*.py"):
        path.write_text(path.read_text().replace("from .mechanism import", "from .renamed import"))
    script = """
import doubleback as db
with db.patched():
    print({entry.state for entry in db.patch_report()})
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert "replaced" in run.stdout and "foreign" not in run.stdout


def test_report_prints_a_table():
    text = str(db.patch_report())
    assert text.splitlines()[0].split() == ["operator", "family", "state", "reason"]
    assert "convolution_backward" in text


ORDERS = [
    "import doubleback as db, torch; db.patch()",
    "import torch, torch.func; import doubleback as db; db.patch(); db.unpatch(); db.patch()",
    "import torch._dynamo, doubleback as db; db.patch()",
]


def test_import_order_in_a_fresh_process_without_a_warning():
    script = """
import torch.nn.functional as F
x = torch.randn(1, 2, 4, 4, requires_grad=True)
w = torch.randn(2, 1, 3, 3, requires_grad=True)
g, = torch.autograd.grad(F.conv2d(x, w, groups=2).square().sum(), x, create_graph=True)
g.square().sum().backward()
assert type(g.grad_fn).__name__ == "DerivativeNodeBackward"
"""
    run_fresh(*(order + script for order in ORDERS))


def test_first_order_is_bit_identical():
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, groups=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.Hardswish(),
            torch.nn.Conv2d(8, 8, 3, groups=8),
            torch.nn.GroupNorm(2, 8),
            torch.nn.Flatten(),
            torch.nn.LayerNorm(128),
            torch.nn.TransformerEncoderLayer(128, 4, 32, dropout=0.0, batch_first=True),
        )
        x = torch.randn(4, 3, 8, 8, requires_grad=True)
        net(x).square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    expected = train()
    with db.patched():
        double_backward()  # arms
        found = train()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def first_order():
    x = torch.randn(1, 1, 3, 3, requires_grad=True)
    F.conv2d(x, torch.randn(1, 1, 2, 2, requires_grad=True)).sum().backward()


def test_kernels_outlive_a_block_switched_off(monkeypatch):
    """So that to enter the next block costs little; training without one pays for a few calls."""
    monkeypatch.setattr(mechanism, "IN_VAIN", 3)
    before, silu = registered(), torch._C._dispatch_dump("aten::silu")
    engine = torch.autograd.graph._engine_run_backward
    with db.patched():
        double_backward()
        assert node_name() == "DerivativeNodeBackward"
    assert registered() != before and states() == {"stock"}
    assert torch.autograd.graph._engine_run_backward is engine
    assert torch._C._dispatch_dump("aten::silu") == silu  # which forward passes call
    assert node_name() == "ConvolutionBackwardBackward0"
    with db.patched():
        assert node_name() == "DerivativeNodeBackward"
    for _ in range(3):
        assert registered() != before
        first_order()
    assert registered() == before


def test_a_block_s_kernels_do_not_count_as_patched():
    with db.patched():
        double_backward()
    before = registered()
    db.patch()
    assert states() == {"ready"} and registered() != before
    db.unpatch()
    assert states() == {"stock"}


@pytest.mark.choice
def test_what_does_not_pay_rests_for_a_while(monkeypatch):
    monkeypatch.setattr(mechanism, "PATIENCE", 10)
    monkeypatch.setattr(mechanism, "REST", 4)

    def one(groups: int = 1) -> str:
        x = torch.randn(2, 4, 5, 5, requires_grad=True)
        y = torch.nn.Conv2d(4, 4, 3, groups=groups)(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return "ours" if "DerivativeNode" in g.grad_fn.name() else "stock's"

    db.patch()
    assert one(4) == "ours"  # which ends whatever row of small ones other tests began
    for _ in range(10):
        assert one() == "stock's" and states() == {"replaced"}
    assert [one(4) for _ in range(4)] == ["stock's"] * 4  # resting
    assert one(4) == "ours"
    assert [one(), one(), one(4)] == ["stock's", "stock's", "ours"]  # no row of small ones
    db.patch()
    assert one(4) == "ours"


@pytest.mark.choice
@pytest.mark.parametrize(
    "rows, channels, groups, replaced",
    [(2, 8, 1, False), (2, 8, 8, True), (64, 64, 1, True)],
    ids=["small", "small, in groups", "large"],
)
def test_on_a_cpu_small_convolutions_keep_stock_s_derivative(rows, channels, groups, replaced):
    x = torch.randn(rows, channels, 16, 16, requires_grad=True)
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
    with db.patched():
        (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert ("DerivativeNode" in g.grad_fn.name()) == replaced


@pytest.mark.choice
@pytest.mark.parametrize("count, replaced", [(1000, False), (1 << 18, True)])
def test_on_a_cpu_small_activations_keep_stock_s_derivative(count, replaced):
    x = torch.randn(count, requires_grad=True)
    with db.patched():
        y = torch.nn.functional.silu(x)
    assert ("DerivativeNode" in y.grad_fn.name()) == replaced
