"""Measure what planning needs to know of this machine."""

from gigagrad.execution.calibration.measure import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
