"""From a module to a graph: capture at the image's true size, and the operator table that says how to run on crops."""

from gigagrad.graphs.capture import Captured, InputSpec, capture, trace
from gigagrad.graphs.composite import Composite
from gigagrad.graphs.graph import FIELD_BINS, FIELD_MAX, FIELD_SUM, GATHER, MOMENTS, SCATTER, Graph, Node, Ref
from gigagrad.graphs.operators import is_view
from gigagrad.graphs.table import Call, Row, Saved, Site, lookup, register

__all__ = [
    "FIELD_BINS",
    "FIELD_MAX",
    "FIELD_SUM",
    "GATHER",
    "MOMENTS",
    "SCATTER",
    "Call",
    "Captured",
    "Composite",
    "Graph",
    "InputSpec",
    "Node",
    "Ref",
    "Row",
    "Saved",
    "Site",
    "capture",
    "is_view",
    "lookup",
    "register",
    "trace",
]
