"""Fused formulas: a package per family (attention, standardisation, depthwise, pointwise), and here
what they share with the rest: products in other forms, and how a kernel is to be called now."""

from .locally_connected import local_product, local_transpose, local_weight_adjoint
from .mode import (
    BOUNDARY,
    batched,
    boundary,
    compiling,
    direct,
    eager,
    for_compiler,
    fusing,
    library,
    on_cuda,
    opaque,
    recording,
)
from .rows import affine_rows, times
from .strided import Strided, pays

__all__ = [
    "BOUNDARY",
    "Strided",
    "affine_rows",
    "batched",
    "boundary",
    "compiling",
    "direct",
    "eager",
    "for_compiler",
    "fusing",
    "library",
    "local_product",
    "local_transpose",
    "local_weight_adjoint",
    "on_cuda",
    "opaque",
    "pays",
    "recording",
    "times",
]
