"""What becomes of each field under a plan."""

from gigagrad.plans import fates, smallest_budget


def test_the_fate_of_each_field(norms, plan_at):
    plan = plan_at(None)
    found = fates(norms, plan)
    sizes = [fate.size_bytes for fate in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({fate.node for fate in found}) == len(found)
    kept = [fate for fate in found if fate.kept]
    assert {fate.node for fate in kept} == {field.node for field in plan.kept}
    for fate in kept:
        assert len(fate.stages) == 1  # nobody else has to compute it
        assert min(fate.readers) > fate.stages[0]
        assert fate.sweeps == 2  # forward, and again for its gradient
    lean = {fate.node: fate for fate in fates(norms, smallest_budget(plan_at)[1])}
    assert not any(fate.kept for fate in lean.values())
    first = min(kept, key=lambda fate: fate.node)
    assert lean[first.node].sweeps > first.sweeps
    assert lean[first.node].readers == ()
