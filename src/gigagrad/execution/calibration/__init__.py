"""Measures what the planner's model of time needs to know of this machine."""

from gigagrad.execution.calibration.measure import FULL, QUICK, Calibration, Effort, calibrate

__all__ = ["FULL", "QUICK", "Calibration", "Effort", "calibrate"]
