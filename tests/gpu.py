"""Where Triton kernels can run here: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRITON = importlib.util.find_spec("triton") is not None and (
    CUDA or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(
    not TRITON, reason="Triton kernel not run: it needs a CUDA device, or TRITON_INTERPRET=1"
)
