"""Formulas computed better than operation by operation: attention, standardisation, depthwise,
strided and locally connected products, curvature of activations; and how a kernel is to be called
now."""

from .attention import (
    BITS,
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    Dropout,
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
    recovered,
)
from .depthwise import Depthwise, Part, taps_first
from .launch import (
    AGAIN,
    BOUNDARY,
    batched,
    being_flattened,
    boundary,
    direct,
    eager,
    for_compiler,
    fusing,
    had_again,
    library,
    on_cuda,
    opaque,
)
from .pointwise import (
    Gate,
    cleared,
    constant_over_places,
    curvature,
    fused_bend,
    fused_gate,
    fused_onto,
    fused_softmax,
    plus_over_places,
    second,
    times_over_places,
)
from .products import (
    Strided,
    Turned,
    affine_rows,
    local_product,
    local_transpose,
    local_weight_adjoint,
    pays,
    times,
)
from .standardisation import (
    Groups,
    Point,
    adds_onto,
    affine,
    backward_now,
    batch_norm_now,
    second_now,
    standardise,
    standardise_again,
    standardise_backward,
    standardise_second,
    statistics,
)
