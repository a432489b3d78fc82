"""What a person looks at: progress in the terminal, a plan as a table, the HTML report, the machine's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigagrad.reports.doctor import Check as Check
    from gigagrad.reports.doctor import diagnose as diagnose
    from gigagrad.reports.doctor import doctor_table as doctor_table
    from gigagrad.reports.report import write_report as write_report
    from gigagrad.reports.terminal import Terminal as Terminal

__all__ = ["Check", "Terminal", "diagnose", "doctor_table", "write_report"]

_HOMES = {
    "Check": "doctor",
    "Terminal": "terminal",
    "diagnose": "doctor",
    "doctor_table": "doctor",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    """Entered when its names are used: a progress bar need not load PyTorch, matplotlib and jinja2."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"gigagrad.reports.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gigagrad.reports' has no attribute {name!r}")
