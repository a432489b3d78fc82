"""What a person looks at: progress in the terminal, a plan as a table, the HTML report, the machine's state."""

from gigagrad.reports.doctor import Check, diagnose, doctor_table
from gigagrad.reports.plan_view import plan_renderable
from gigagrad.reports.report import write_report
from gigagrad.reports.terminal import Terminal

__all__ = ["Check", "Terminal", "diagnose", "doctor_table", "plan_renderable", "write_report"]
