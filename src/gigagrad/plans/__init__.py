"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.choose import make_plan
from gigagrad.plans.cost import Costs
from gigagrad.plans.fates import Fate, fates
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.keeping import Lifetime, lifetimes
from gigagrad.plans.limits import Limits
from gigagrad.plans.machine import Machine
from gigagrad.plans.order import PlanFault
from gigagrad.plans.packing import Packing
from gigagrad.plans.plan import DISK, EXACT, HOST, MEMORY, KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.simulate import Moment, Simulation, simulate
from gigagrad.plans.stages import Stage, levels, split_stages
from gigagrad.plans.tradeoff import PlanAt, Point, smallest_budget, trade_off

__all__ = [
    "DISK",
    "EXACT",
    "HOST",
    "MEMORY",
    "Costs",
    "Fate",
    "Grid",
    "KeptField",
    "Lifetime",
    "Limits",
    "Machine",
    "Moment",
    "Packing",
    "Pass",
    "Plan",
    "PlanAt",
    "PlanFault",
    "Point",
    "Simulation",
    "Stage",
    "StagePlan",
    "TileGeometry",
    "WholeField",
    "fates",
    "levels",
    "lifetimes",
    "make_plan",
    "simulate",
    "smallest_budget",
    "split_stages",
    "trade_off",
]
