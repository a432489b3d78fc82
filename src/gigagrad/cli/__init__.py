"""The command line: parse, call, print. Everything it does is done elsewhere and can be called from Python."""

from gigagrad.cli.main import main

__all__ = ["main"]
