"""Capture a model and its loss as a graph: try them out, trace them, and guard everything that tracing could see."""

from gigagrad.graphs.capture.loss_module import LossModule
from gigagrad.graphs.capture.trace import Captured, capture, trace

__all__ = ["Captured", "LossModule", "capture", "trace"]
