"""Runs plans: forward, backward, accumulate."""

from gigagrad.execution.compiling import compile
from gigagrad.execution.engine import Engine

__all__ = ["Engine", "compile"]
