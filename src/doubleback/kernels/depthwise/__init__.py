"""Depthwise convolutions on CUDA, by Triton kernels."""

from .fused import Depthwise, Part, taps_first

__all__ = ["Depthwise", "Part", "taps_first"]
