"""What becomes of each field under a plan."""

from gigagrad.plans import placements, smallest_budget


def test_the_placement_of_each_field(norms, plan_at):
    plan = plan_at(None)
    found = placements(norms, plan)
    sizes = [placement.size_bytes for placement in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({placement.node for placement in found}) == len(found)
    kept = [placement for placement in found if placement.kept]
    assert {placement.node for placement in kept} == {field.node for field in plan.kept}
    for placement in kept:
        assert len(placement.stages) == 1  # nobody else has to compute it
        assert min(placement.readers) > placement.stages[0]
        assert placement.passes == 2  # forward, and again for its gradient
    lean = {placement.node: placement for placement in placements(norms, smallest_budget(plan_at)[1])}
    assert not any(placement.kept for placement in lean.values())
    first = min(kept, key=lambda placement: placement.node)
    assert lean[first.node].passes > first.passes
    assert lean[first.node].readers == ()
