"""Compiled derivatives: a whole loss with derivatives inside as one graph (`compile`), and a
backend of `torch.compile` whose regions can be differentiated twice (`backend`)."""

from .backend import backend, register
from .loss import Compiled, compile

__all__ = ["Compiled", "backend", "compile", "register"]
