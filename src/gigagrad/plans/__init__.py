"""Make a plan of a graph and a budget: segments, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.advice import WORTH_SAYING, Advice, PlanAt, Point, advise, smallest_budget, trade_off
from gigagrad.plans.check import PlanFault, check
from gigagrad.plans.choose import make_plan
from gigagrad.plans.chunks import Chunks
from gigagrad.plans.cost import Costs
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.liveness import lifetimes
from gigagrad.plans.plan import EXACT, MEMORY, Amount, KeptField, Placement, Plan, SegmentPlan, WholeField, placements
from gigagrad.plans.problem import Problem
from gigagrad.plans.program import Tiles
from gigagrad.plans.segments import Segment, levels, split_segments

__all__ = [
    "EXACT",
    "MEMORY",
    "WORTH_SAYING",
    "Advice",
    "Amount",
    "Chunks",
    "Costs",
    "Grid",
    "KeptField",
    "Placement",
    "Plan",
    "PlanAt",
    "PlanFault",
    "Point",
    "Problem",
    "Segment",
    "SegmentPlan",
    "TileGeometry",
    "Tiles",
    "WholeField",
    "advise",
    "check",
    "levels",
    "lifetimes",
    "make_plan",
    "placements",
    "smallest_budget",
    "split_segments",
    "trade_off",
]
