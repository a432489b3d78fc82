"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.choose import Limits, make_plan
from gigagrad.plans.cost import Machine
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.keeping import Lifetime, lifetimes
from gigagrad.plans.plan import KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.simulate import Moment, PlanFault, Simulation, simulate
from gigagrad.plans.stages import Stage, levels, split_stages

__all__ = [
    "Grid",
    "KeptField",
    "Lifetime",
    "Limits",
    "Machine",
    "Moment",
    "Pass",
    "Plan",
    "PlanFault",
    "Simulation",
    "Stage",
    "StagePlan",
    "TileGeometry",
    "WholeField",
    "levels",
    "lifetimes",
    "make_plan",
    "simulate",
    "split_stages",
]
