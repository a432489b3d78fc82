"""Graphs with kept fields, and plans of them, for one rank."""

from __future__ import annotations

import pytest

from gigagrad.plans import split_stages
from tests.plans.networks import Ladder, graph_of, kept_at_best, plan_of, problem_of


class Planned:
    """A ladder's problem, with plans of any tiles."""

    def __init__(self) -> None:
        self.graph = graph_of(Ladder(), size=96)
        self.problem = problem_of(self.graph)
        self.kept = kept_at_best(self.graph)
        self.stages = split_stages(self.graph, self.kept)

    def plan(self, tile=(8, 16)):
        return plan_of(self.graph, tiles=(tile,) * len(self.stages), kept=self.kept)


@pytest.fixture(scope="session")
def ladder():
    return Planned()
