"""From a graph and a budget to a plan: stages, tile geometry, memory, cost. Nothing here runs anything."""

from gigagrad.plans.advice import WORTH_SAYING, Advice, advise
from gigagrad.plans.choose import make_plan
from gigagrad.plans.cost import Costs
from gigagrad.plans.fates import Fate, fates
from gigagrad.plans.geometry import Grid, TileGeometry
from gigagrad.plans.keeping import Lifetime, holds_whole, lifetimes
from gigagrad.plans.order import PlanFault
from gigagrad.plans.packing import Packing
from gigagrad.plans.parts import Parts
from gigagrad.plans.plan import EXACT, MEMORY, Amount, KeptField, Pass, Plan, StagePlan, WholeField
from gigagrad.plans.problem import Problem
from gigagrad.plans.simulate import Moment, Simulation, simulate
from gigagrad.plans.stages import Stage, levels, split_stages
from gigagrad.plans.tradeoff import PlanAt, Point, smallest_budget, trade_off

__all__ = [
    "EXACT",
    "MEMORY",
    "WORTH_SAYING",
    "Advice",
    "Amount",
    "Costs",
    "Fate",
    "Grid",
    "KeptField",
    "Lifetime",
    "Moment",
    "Packing",
    "Parts",
    "Pass",
    "Plan",
    "PlanAt",
    "PlanFault",
    "Point",
    "Problem",
    "Simulation",
    "Stage",
    "StagePlan",
    "TileGeometry",
    "WholeField",
    "advise",
    "fates",
    "holds_whole",
    "levels",
    "lifetimes",
    "make_plan",
    "simulate",
    "smallest_budget",
    "split_stages",
    "trade_off",
]
