"""What many ranks gain, as tables that fit a terminal, and as plain types."""

from __future__ import annotations

import json
from math import inf

import pytest

from gigagrad.plans.description import GOOD
from gigagrad.reports.plan_study import scale_rows, scale_tables
from gigagrad.scaling import Link, Scaling
from tests.plans.networks import Ladder, graph_of, plan_of, problem_of


@pytest.fixture(scope="module")
def scaling():
    graph = graph_of(Ladder(), size=96)
    problem, plan = problem_of(graph), plan_of(graph, tiles=((24, 96),) * 9)
    return lambda images, link: Scaling(problem, plan, link, images)


def test_a_row_for_each_number_of_ranks_that_gains_something(scaling):
    (table,) = scale_tables(scaling(1, Link(inf, 0.0)), (1, 2, 4, 8, 10_000))
    assert [row[0] for row in table.rows] == ["1", "2", "4"]  # segments have four tiles
    assert table.tones[:2] == (GOOD, GOOD)
    assert "idle ranks are left out" in table.note
    assert table.rows[0][1:6:2] == (table.rows[0][1], "100 %", "-")
    assert table.rows[0][2] == "1x"
    (slow,) = scale_tables(scaling(1, Link(inf, 1.0)), (2, 4))
    assert [row[-1].split(",")[0] for row in slow.rows] == ["latency", "latency"]
    assert "idle" not in slow.note


def test_several_images_a_step_are_told_which_way_is_fastest(scaling):
    ranks, ways = scale_tables(scaling(4, Link(1e9, 1e-6)), (1, 2, 4, 16))
    assert [row[0] for row in ways.rows] == ["2", "4", "16"]
    assert [row[-2] for row in ways.rows] == ["data", "data", "data x tile"]
    assert [row[6] for row in ranks.rows] == ["1 x 1", "2 x 1", "4 x 1", "4 x 4"]
    assert len(ways.fitting(100).columns) == len(ways.columns)
    assert len(ranks.fitting(100).columns) == len(ranks.columns)


def test_the_same_for_programs(scaling):
    rows = scale_rows(scaling(4, Link(1e9, 1e-6)), (1, 16))
    assert rows == json.loads(json.dumps(rows))
    one, many = rows
    assert one["times_faster"] == pytest.approx(1)
    assert (one["groups"], one["ranks_a_group"], one["sent_bytes"]) == (1, 1, 0)
    assert many["seconds"] == many["ways_seconds"]["data x tile"] < one["seconds"] / 8
    assert many["lost_seconds"].keys() == one["lost_seconds"].keys()
