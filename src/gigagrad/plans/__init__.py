"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.choose import Limits, Machine, make_plan
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.plan import Pass, Plan, StagePlan
from gigagrad.plans.stages import Stage, split_stages

__all__ = [
    "Grid",
    "Limits",
    "Machine",
    "Pass",
    "Plan",
    "Stage",
    "StagePlan",
    "TileGeometry",
    "make_plan",
    "split_stages",
]
