"""Launching again without Triton's look-up, with a stand-in for Triton that keeps the books."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from doubleback.kernels import launch as module
from doubleback.kernels.launch import Launch, look, planned


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
    monkeypatch.setattr(module, "_current_device", lambda: -1)  # where CPU tensors are
    return Kernel()


def how(kernel):
    return [call[0] for call in kernel.ran]


def test_the_second_launch_is_not_looked_up(kernel):
    launch = Launch(kernel, (3,), (8,), B=2, A=1, num_warps=4)
    x, other = torch.zeros(8), torch.ones(8)
    for t in (x, other):
        launch(t, None)
    assert how(kernel) == ["looked up", "again"]
    assert kernel.ran[0][2:] == ((x, None, 8), dict(A=1, B=2, num_warps=4))
    assert kernel.ran[1][1:] == ((3, 1, 1), (other.data_ptr(), None, 8, 1, 2))


def test_pointers_off_the_boundary_are_looked_up(kernel):
    """Triton has compiled another kernel for them, and keeps it."""
    launch = Launch(kernel, (3,), (8,), A=1, B=2)
    whole, shifted = torch.zeros(8), torch.zeros(9)[1:]
    for t in (shifted, whole, shifted, whole, shifted):
        launch(t, None)
    assert how(kernel) == ["looked up", "looked up", "looked up", "again", "looked up"]


def test_another_current_device_is_left_to_triton(kernel, monkeypatch):
    launch = Launch(kernel, (3,), (8,), A=1, B=2)
    launch(torch.zeros(8), None)
    devices = iter((5, 5, -1, -1))  # asked twice, then set by the context
    monkeypatch.setattr(module, "_current_device", lambda: next(devices))
    entered = []

    class Device:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            pass

        def __exit__(self, *args):
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    launch(torch.zeros(8), None)
    assert entered == [-1]
    assert how(kernel) == ["looked up", "looked up"]


def test_an_interpreted_kernel_is_always_called(kernel, monkeypatch):
    monkeypatch.setattr(module.triton, "JITFunction", int)
    launch = Launch(kernel, (3,), (8,), A=1, B=2)
    for _ in range(2):
        launch(torch.zeros(8), None)
    assert how(kernel) == ["looked up", "looked up"]


LIKE = torch.zeros(4, 6)
OTHERS = {
    "shape": torch.zeros(4, 5),
    "strides": torch.zeros(6, 4).t(),
    "dtype": LIKE.double(),
    "nothing": None,
}


@pytest.mark.parametrize("other", OTHERS)
def test_plans_are_kept_by_the_looks_of_tensors(other):
    assert look(LIKE) == look(torch.ones(4, 6))
    assert look(LIKE) != look(OTHERS[other])


def test_plans_are_made_once_and_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    plans, made = {}, []
    for n in (1, 1, 2, 3, 4, 5, 5):
        assert planned(plans, n, lambda n=n: made.append(n) or -n) == -n
        assert len(plans) <= 3
    assert made == [1, 2, 3, 4, 5]
