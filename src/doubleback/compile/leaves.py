"""`requires_grad_()` inside a loss, for a TorchDynamo that cannot follow it (before 2.13).

Most losses with derivatives inside say `x = x.detach().requires_grad_()`. What Dynamo lacks is
little: the call as a node of the graph, and the answer to whoever asks the tensor afterwards. Both
are given to it here, for tensors that the graph itself makes; one of the caller's would have to be
changed outside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .. import _torch


@cache
def follow_requires_grad(ours: Callable[[], Any]) -> None:
    """Teach Dynamo `requires_grad_()`, once, where it has not learned it itself.

    ours: whether a loss of ours is being captured in this thread. All other programs meet PyTorch's
    own answer.
    """
    if hasattr(_torch.SpeculationLog, "graph_break_on_requires_grad_"):
        return
    variable = _torch.TensorVariable
    original = variable.method_requires_grad_

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
        value = self.as_proxy().node.meta["example_value"]
        if not ours() or self.source is not None or value.requires_grad == wanted:
            return original(self, tx, requires_grad)
        value.requires_grad_(wanted)
        tx.output.create_proxy("call_method", "requires_grad_", (self.as_proxy(), wanted), {})
        self.requires_grad = wanted
        return self

    variable.method_requires_grad_ = method_requires_grad_  # type: ignore[method-assign]
