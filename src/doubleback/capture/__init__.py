"""Module → graph. TorchDynamo captures; the graph it hands over is lifted to ATen operators."""

from .arguments import Arguments, choose_output, only_one, plain, requires_grad, take_apart
from .decompositions import stop_gradient
from .dynamo import capture_of, find_graph
from .lifting import mark
from .reasons import forget
from .surroundings import Surroundings

__all__ = [
    "Arguments",
    "Surroundings",
    "capture_of",
    "choose_output",
    "find_graph",
    "forget",
    "mark",
    "only_one",
    "plain",
    "requires_grad",
    "stop_gradient",
    "take_apart",
]
