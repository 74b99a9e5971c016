"""Module → graph. TorchDynamo captures; the graph it hands over is lifted to ATen operators."""

from .arguments import (
    Arguments,
    accept_plain_keys,
    choose_output,
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
    guard_identity,
    hooked,
    trackers_off,
    turn,
)
from .lifting import as_eager, mark, stop_gradient

__all__ = [
    "PATIENCE",
    "Arguments",
    "Surroundings",
    "accept_plain_keys",
    "as_eager",
    "capture_of",
    "choose_output",
    "find_graph",
    "forget",
    "guard_identity",
    "hooked",
    "mark",
    "only_one",
    "place_of",
    "plain",
    "requires_grad",
    "stop_gradient",
    "take_apart",
    "trackers_off",
    "turn",
]
