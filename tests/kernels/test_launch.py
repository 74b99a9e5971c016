"""Launching again without Triton's look-up, with a stand-in for Triton that keeps the books."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from doubleback.kernels import launch as module
from doubleback.kernels.launch import launch


class Compiled:
    """What Triton returns from a launch; it can be launched again."""

    def __init__(self, ran):
        self.ran = ran

    def __getitem__(self, grid):
        return lambda *arguments: self.ran.append(("again", grid, arguments))


class Kernel:
    arg_names = ("x", "y", "n", "A", "B")

    def __init__(self):
        self.ran = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.ran.append(("looked up", grid, arguments, constants))
            return Compiled(self.ran)

        return run


@pytest.fixture
def kernel(monkeypatch):
    known = SimpleNamespace(JITFunction=Kernel, compiler=SimpleNamespace(CompiledKernel=Compiled))
    monkeypatch.setattr(module, "triton", known)
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where CPU tensors are
    return Kernel()


def how(kernel):
    return [call[0] for call in kernel.ran]


def test_the_second_launch_is_not_looked_up(kernel):
    x, other = torch.zeros(8), torch.ones(8)
    for t in (x, other):
        launch(kernel, (3,), t, None, 8, B=2, A=1, num_warps=4)
    assert how(kernel) == ["looked up", "again"]
    assert kernel.ran[1][1:] == ((3, 1, 1), (other.data_ptr(), None, 8, 1, 2))


class Elsewhere(torch.Tensor):
    def get_device(self):
        return 7


def test_a_tensor_on_another_device_is_triton_s_to_refuse(kernel):
    x = torch.zeros(8)
    for y in (x, x.as_subclass(Elsewhere)):
        launch(kernel, (3,), x, y, 8, A=1, B=2)
    assert how(kernel) == ["looked up", "looked up"]


CHANGES = {
    "a number": dict(n=9),
    "a dtype": dict(x=torch.zeros(8, dtype=torch.float64)),
    "a tensor instead of none": dict(y=torch.zeros(8)),
    "a constant": dict(A=7),
    "an option": dict(num_warps=8),
    "the alignment": dict(x=torch.zeros(9)[1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_compiled_anew_is_looked_up(kernel, change):
    def call(x=torch.zeros(8), y=None, n=8, A=1, num_warps=4):  # noqa: B008
        launch(kernel, (3,), x, y, n, A=A, B=2, num_warps=num_warps)

    call()
    call(**CHANGES[change])
    call(**CHANGES[change])
    call()
    again = "looked up" if change == "the alignment" else "again"
    assert how(kernel) == ["looked up", "looked up", again, "again"]


def test_kinds_of_calls_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for n in (1, 2, 3, 4, 5):
        launch(kernel, (1,), torch.zeros(8), None, n, A=1, B=2)
        assert len(module._found) <= 3
    launch(kernel, (1,), torch.zeros(8), None, 5, A=1, B=2)
    assert how(kernel)[-1] == "again"


def test_an_interpreted_kernel_is_always_called(kernel, monkeypatch):
    monkeypatch.setattr(module.triton, "JITFunction", int)
    for _ in range(2):
        launch(kernel, (3,), torch.zeros(8), None, 8, A=1, B=2)
    assert how(kernel) == ["looked up", "looked up"]
