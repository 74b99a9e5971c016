"""Weights of a plain network for a module that wraps it: both name them alike but for a prefix."""

from __future__ import annotations

from typing import Any

from torch import nn


def accept_plain_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """A hook before `load_state_dict` of a module that holds a network as `net`: where the keys are
    those of the network itself (`0.weight`), they become the module's (`net.0.weight`).

    >>> import torch, doubleback as db
    >>> net = torch.nn.Linear(3, 2)
    >>> db.Penalised(net, db.OutputGradient(0)).load_state_dict(net.state_dict())
    <All keys matched successfully>
    """
    own = module.get_submodule("net").state_dict(keep_vars=True)
    wrapped = any(f"{prefix}net.{name}" in state_dict for name in own)
    plain = [name for name in own if prefix + name in state_dict]
    if wrapped or not plain:
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}net.{key.removeprefix(prefix)}"] = state_dict.pop(key)
