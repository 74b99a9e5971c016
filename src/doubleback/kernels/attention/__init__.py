"""Attention O = softmax(s·QKᵀ + mask) V and its derivatives; the formulas stand in formulas.py."""

from .formulas import attention_backward, attention_forward, attention_second, attention_tangent
from .stock import BITS, CUDNN, EFFICIENT, FLASH, MATH, Dropout, recovered

__all__ = [
    "BITS",
    "CUDNN",
    "EFFICIENT",
    "FLASH",
    "MATH",
    "Dropout",
    "attention_backward",
    "attention_forward",
    "attention_second",
    "attention_tangent",
    "recovered",
]
