"""A plan is data."""

import dataclasses
import json

import pytest

from gigagrad.plans import Plan


@pytest.fixture(params=["unet", "gate"])
def plan(request, plan_for):
    return plan_for(request.getfixturevalue(request.param), 2**30)


def test_a_plan_survives_json(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert str(again) == str(plan)


def test_a_plan_is_frozen(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.device = "cuda"


def test_the_table_says_what_a_person_asks(plan):
    text = str(plan)
    for word in ("stage", "tile px", "crop px", "predicted peak", "budget 1 GiB", "on cpu"):
        assert word in text
    for stage in plan.stages:
        assert f"{stage.tile[0]} x {stage.tile[1]}" in text
    columns = [line for line in text.splitlines() if line.startswith(("stage", "0 ", "1 "))]
    assert len({len(line) for line in columns}) == 1


def test_totals(plan):
    assert plan.tile == plan.stages[-1].tile
    counts = {stage.index: stage.tiles[0] * stage.tiles[1] for stage in plan.stages}
    assert plan.tile_count == sum(counts[p.stage] for p in plan.passes)


def test_a_predicted_time_is_shown(plan):
    timed = dataclasses.replace(plan, timed_seconds=83.0)
    assert "about 1 min 23 s a step" in str(timed)
    assert "predicted time: about" in str(plan)
