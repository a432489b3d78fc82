"""Capture a model and its loss as a graph: try them out, trace them, and guard everything that tracing could see."""
