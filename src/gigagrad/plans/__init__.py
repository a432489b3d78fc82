"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.choose import make_plan
from gigagrad.plans.cost import Machine
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.keeping import Lifetime, lifetimes
from gigagrad.plans.limits import Limits
from gigagrad.plans.plan import DISK, HOST, MEMORY, KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.stages import Stage, levels, split_stages

__all__ = [
    "DISK",
    "HOST",
    "MEMORY",
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
