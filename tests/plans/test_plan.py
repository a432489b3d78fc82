"""A plan is data."""

import dataclasses
import json
import re

import pytest

from gigagrad.plans import Plan, placements, smallest_budget


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


def test_the_text_says_what_a_person_asks(plan):
    text = str(plan)
    for word in (
        "segment",
        "tile px",
        "crop px",
        "predicted peak",
        "(budget 1 GiB)",
        "on cpu",
        "Most of the time: segment",
    ):
        assert word in text
    for segment in plan.segments:
        assert f"{segment.tile[0]} x {segment.tile[1]}" in text
    for name, _ in plan.memory_parts():
        assert name in text
    segments = text.partition("\nSegments\n")[2].splitlines()[: 1 + len(plan.segments)]
    assert len({len(line) for line in segments}) == 1


def test_totals(plan):
    assert plan.tile == plan.segments[-1].tile
    counts = {segment.index: segment.tiles[0] * segment.tiles[1] for segment in plan.segments}
    assert plan.tile_count == sum(counts[p.segment] for p in plan.passes)


def test_a_predicted_time_is_shown(plan):
    timed = dataclasses.replace(plan, timed_seconds=(83.0, *(0.0 for _ in plan.passes[1:])))
    assert "about 1 min 23 s a step" in str(timed)
    assert "a step (from tiles that were timed)" in str(timed)
    assert re.search(r"predicted time +about .* a step \(by the cost model\)", str(plan))


def test_the_placement_of_each_field(norms, plan_at):
    plan = plan_at(None)
    found = placements(norms, plan)
    sizes = [placement.size_bytes for placement in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({placement.node for placement in found}) == len(found)
    kept = [placement for placement in found if placement.kept]
    assert {placement.node for placement in kept} == {field.node for field in plan.kept}
    for placement in kept:
        assert len(placement.segments) == 1  # nobody else has to compute it
        assert min(placement.readers) > placement.segments[0]
        assert placement.passes == 2  # forward, and again for its gradient
    lean = {placement.node: placement for placement in placements(norms, smallest_budget(plan_at)[1])}
    assert not any(placement.kept for placement in lean.values())
    first = min(kept, key=lambda placement: placement.node)
    assert lean[first.node].passes > first.passes
    assert lean[first.node].readers == ()
