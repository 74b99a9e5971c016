"""Module → graph. TorchDynamo captures; the graph it hands over is lifted to ATen operators."""

from .arguments import (
    Arguments,
    accept_plain_keys,
    choose_output,
    is_distributed,
    is_sharded,
    only_one,
    place_of,
    plain,
    requires_grad,
    take_apart,
)
from .dynamo import (
    PATIENCE,
    Surroundings,
    capture_of,
    find_graph,
    forget,
    hooked,
    leaving_transforms,
    teach,
    trackers_off,
    turn,
)
from .lifting import as_eager, assigns_data, mark, stop_gradient

__all__ = [
    "PATIENCE",
    "Arguments",
    "Surroundings",
    "accept_plain_keys",
    "as_eager",
    "assigns_data",
    "capture_of",
    "choose_output",
    "find_graph",
    "forget",
    "hooked",
    "is_distributed",
    "is_sharded",
    "leaving_transforms",
    "mark",
    "only_one",
    "place_of",
    "plain",
    "requires_grad",
    "stop_gradient",
    "take_apart",
    "teach",
    "trackers_off",
    "turn",
]
