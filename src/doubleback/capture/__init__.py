"""Module → graph. TorchDynamo captures; the graph it hands over is lifted to ATen operators."""

from .arguments import (
    Arguments,
    accept_plain_keys,
    check_choice,
    choose_output,
    is_distributed,
    is_sharded,
    only_one,
    place_of,
    plain,
    requires_grad,
    take_apart,
    usable,
)
from .dynamo import (
    PATIENCE,
    capture_of,
    captured_by,
    find_graph,
    first_line,
    forget,
    leaving_transforms,
    refuse_modes,
    remedy,
    stopped_at,
    trackers_off,
)
from .guards import Surroundings, hooked, teach
from .lifting import THROUGH, as_eager, assigns_data, graphs_in, kept_by_squeeze, mark
