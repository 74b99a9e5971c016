"""Where Triton kernels can run here: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and not CUDA and os.environ.get("TRITON_INTERPRET") == "1"  # see conftest
TRITON = INSTALLED and (CUDA or INTERPRETED)
needs_triton = pytest.mark.skipif(
    not TRITON, reason="Triton kernel not run: needs Triton, the extra `test` brings it"
)
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


def on_gpu_all(everything: Iterable[str], *some: str) -> list[str]:
    """All names on a GPU, `some` of them in Triton's interpreter, which is slow."""
    names = list(everything)
    assert set(some) <= set(names)
    return names if CUDA else list(some)
