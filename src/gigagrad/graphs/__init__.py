"""From a module to a graph: capture at the image's true size, and the op rules that say how to run on crops."""

from gigagrad.graphs.capture.loss_module import LossModule
from gigagrad.graphs.capture.trace import Captured, capture, lines_through, trace, trace_again
from gigagrad.graphs.draws import Draw
from gigagrad.graphs.graph import (
    FIELD_BINS,
    FIELD_MAX,
    FIELD_SUM,
    GATHER,
    MOMENTS,
    SCATTER,
    Graph,
    InputSpec,
    Node,
    Ref,
)
from gigagrad.graphs.op_rules import (
    Affine,
    Call,
    Gains,
    Layout,
    NotTileable,
    OpRule,
    Saved,
    Site,
    Whole,
    lookup,
    register,
    scaled_gains,
    sum_of_gains,
)
from gigagrad.graphs.operators import Merge, merge_of
from gigagrad.graphs.sizes import Lines
from gigagrad.graphs.whole import Effort, WholeCost

__all__ = [
    "FIELD_BINS",
    "FIELD_MAX",
    "FIELD_SUM",
    "GATHER",
    "MOMENTS",
    "SCATTER",
    "Affine",
    "Call",
    "Captured",
    "Draw",
    "Effort",
    "Gains",
    "Graph",
    "InputSpec",
    "Layout",
    "Lines",
    "LossModule",
    "Merge",
    "Node",
    "NotTileable",
    "OpRule",
    "Ref",
    "Saved",
    "Site",
    "Whole",
    "WholeCost",
    "capture",
    "lines_through",
    "lookup",
    "merge_of",
    "register",
    "scaled_gains",
    "sum_of_gains",
    "trace",
    "trace_again",
]
