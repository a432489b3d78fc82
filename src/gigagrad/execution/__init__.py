"""Runs plans: forward, backward, accumulate."""

from gigagrad.execution.engine import Engine, compile

__all__ = ["Engine", "compile"]
