"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.choose import Limits, make_plan
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.keeping import Lifetime, lifetimes
from gigagrad.plans.machine import Machine
from gigagrad.plans.plan import KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.stages import Stage, levels, split_stages

__all__ = [
    "Grid",
    "KeptField",
    "Lifetime",
    "Limits",
    "Machine",
    "Pass",
    "Plan",
    "Stage",
    "StagePlan",
    "TileGeometry",
    "WholeField",
    "levels",
    "lifetimes",
    "make_plan",
    "split_stages",
]
