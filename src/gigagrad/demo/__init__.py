"""The demo: every room of the house once, in the order of the work, on slides made up for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigagrad.demo.run import FULL as FULL
    from gigagrad.demo.run import QUICK as QUICK
    from gigagrad.demo.run import DemoResult as DemoResult
    from gigagrad.demo.run import Scale as Scale
    from gigagrad.demo.run import run_demo as run_demo

__all__ = ["FULL", "QUICK", "DemoResult", "Scale", "run_demo"]


def __getattr__(name: str) -> Any:
    """Import when a name is used: the large step is a process of its own with `demo.step` in it; it need not hold what
    only the demo needs.
    """
    if name in __all__:
        from gigagrad.demo import run

        return getattr(run, name)
    raise AttributeError(f"module 'gigagrad.demo' has no attribute {name!r}")
