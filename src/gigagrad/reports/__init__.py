"""Reports for people: a plan as a table, the HTML report, the machine's state."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigagrad.reports.doctor import Check as Check
    from gigagrad.reports.doctor import diagnose as diagnose
    from gigagrad.reports.doctor import doctor_table as doctor_table
    from gigagrad.reports.report import write_report as write_report

__all__ = ["Check", "diagnose", "doctor_table", "write_report"]


def __getattr__(name: str) -> Any:
    """Enter the room when its names are used: a check of the machine need not load matplotlib and jinja2."""
    if name not in __all__:
        raise AttributeError(f"module 'gigagrad.reports' has no attribute {name!r}")
    home = "report" if name == "write_report" else "doctor"
    return getattr(importlib.import_module(f"gigagrad.reports.{home}"), name)
