"""Fitting tiles beside what else a process holds."""

import itertools
import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.allowances import ROWS_AT_ONCE
from gigagrad.devices import Machine
from gigagrad.devices.machine import Gpu
from gigagrad.errors import BudgetError
from gigagrad.plans import Grid, estimate, make_plan
from gigagrad.plans.cost import Costs
from gigagrad.plans.estimate import SegmentTiles, TileChoice
from gigagrad.plans.fit import Fitter, _fastest_within
from gigagrad.plans.memory import compiled_convolutions
from gigagrad.plans.plan import amount_of
from gigagrad.plans.segments import split_segments
from gigagrad.plans.whole import whole_plan
from gigagrad.stores import DiskTier, HostTier, MemoryTier
from gigagrad.stores.disk import Bricks
from tests.plans.networks import MIB, Ladder, graph_of, kept_at_best, plan_of, problem_of, residual


def kernels(room, each):
    """Of so many bytes, until the cache is full."""
    return lambda count: min(count, room) * each


def plan(graph, tile, **more):
    return make_plan(problem_of(graph, base=100 * MIB, **more), tiles=None if tile is None else (tile,))


def compiled_to(graph, made):
    segments = split_segments(graph, [field.node for field in made.kept])
    grids = [Grid(graph, segment, made.segments[segment.index].tile) for segment in segments]
    return sum(compiled_convolutions(grid, backward=True) for grid in grids)


@pytest.mark.parametrize("tile", [(1024, 1024), (512, 1000), (256, 256)])
def test_a_prediction_counts_the_convolutions_of_the_tiles_chosen(tile):
    """Shapes of crops that do not occur are not compiled, and no more than the cache has room for; each takes what it
    takes on this processor.
    """
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    warm, cold, little = (plan(graph, tile, compiled_bytes=kernels(room, 5000)) for room in (0, 1024, 1))
    compiled = compiled_to(graph, cold)
    assert compiled == 3 * (2 if tile[1] == 1000 else 1)
    assert cold.predicted_peak_bytes - warm.predicted_peak_bytes == compiled * 5000
    assert amount_of(cold.memory_at_peak, estimate.COMPILED) == compiled * 5000
    assert little.predicted_peak_bytes - warm.predicted_peak_bytes == 5000


def test_no_tensor_on_a_gpu_has_more_numbers_than_its_kernels_count():
    graph = graph_of(nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 1, 1)), size=8192)
    plans = {one: make_plan(problem_of(graph, machine=Gpu(), device=one)) for one in ("cuda", "cpu")}
    assert max(math.prod(segment.tile) for segment in plans["cuda"].segments) * 64 < 2**31
    assert whole_plan(problem_of(graph, device="cuda", whole=graph.whole[True]), "contiguous") is None
    assert whole_plan(problem_of(graph, whole=graph.whole[True]), "contiguous") is not None


@pytest.mark.parametrize("tile", [(1024, 1024), (700, 1024), (16, 16)])
def test_freed_blocks_stay_as_far_as_tiles_use_them_and_the_budget_has_room(tile):
    graph = graph_of(nn.Conv2d(3, 8, 3, padding=1), size=1024)
    free = plan(graph, tile)
    held = amount_of(free.memory_at_peak, estimate.ALLOCATOR_CACHE)
    tiles = max(amount_of(segment.memory, estimate.TILES) for segment in free.segments)
    assert held == min(max(64 * MIB, 2 * tiles), 160 * MIB)
    without = free.predicted_peak_bytes - held - amount_of(free.memory_at_peak, estimate.WEIGHTS)
    for room in (0, 5 * MIB, held + MIB):
        assert amount_of(plan(graph, tile, budget=without + room).memory_at_peak, estimate.ALLOCATOR_CACHE) == min(
            room, held
        )


def test_where_freed_blocks_may_not_stay_new_pages_take_time():
    """Each tile touches anew what may not stay, so that a budget is better spent on smaller tiles."""
    graph = graph_of(nn.Conv2d(3, 8, 3, padding=1), size=1024)
    free = plan(graph, (256, 256))
    held = amount_of(free.memory_at_peak, estimate.ALLOCATOR_CACHE)
    without = free.predicted_peak_bytes - held - amount_of(free.memory_at_peak, estimate.WEIGHTS)
    budgets = without, without + held // 2, free.predicted_peak_bytes
    none, half, all_ = (plan(graph, (256, 256), budget=budget).modelled_seconds for budget in budgets)
    assert all_ == free.modelled_seconds
    assert none - all_ == pytest.approx(2 * (half - all_))
    new = sum(segment.tile_count * segment.tile_peak_bytes for segment in free.segments for p in free.passes)
    assert len(free.segments) == 1
    assert none - all_ == pytest.approx(0.4 * problem_of(graph).machine.page_seconds(new))


def test_where_memory_is_short_tiles_are_chosen_that_compile_to_little():
    """What is set aside for compiled convolutions is what the chosen tiles need, not the most that any would."""
    graph = graph_of(residual(3), size=100)
    counted = {"compiled_bytes": kernels(1024, 72 * 2**10)}
    small = plan(graph, (16, 16), **counted)
    with pytest.raises(BudgetError) as refused:
        plan(graph, None, budget=100 * MIB, **counted)
    needed = refused.value.needed_bytes
    tight = plan(graph, None, budget=needed, **counted)
    assert tight.predicted_peak_bytes <= needed
    assert compiled_to(graph, tight) < compiled_to(graph, small) / 2
    with pytest.raises(BudgetError):
        plan(graph, None, budget=needed - 1, **counted)


def test_no_more_crops_are_read_ahead_than_there_are_tiles():
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)

    def waiting(*tile):
        return amount_of(plan_of(graph, tiles=(tile,)).memory_at_peak, estimate.WAITING)

    assert waiting(1024, 1024) == 0
    image, target = 513 * 1024 * 3 * 4, 512 * 1024 * 4
    assert waiting(512, 1024) == image + target
    assert waiting(128, 1024) == 2 * (130 * 1024 * 3 * 4 + 128 * 1024 * 4)


def test_blocks_that_freed_memory_does_not_serve_are_told_segment_by_segment():
    """Contributions to large weights, and large crops that wait."""
    graph = graph_of(
        nn.Sequential(
            nn.Conv2d(3, 512, 1), nn.Conv2d(512, 512, 3, padding=1), nn.BatchNorm2d(512), nn.Conv2d(512, 1, 1)
        )
    )
    beside = {side: plan_of(graph, tiles=((side, side),)).segments for side in (16, 128)}
    weights = 512 * 512 * 9 * 4
    assert [segment.beside_bytes for segment in beside[16]] == [weights, 0]
    waiting = beside[128][1].beside_bytes
    assert waiting > 2 * 128 * 128 * 512 * 4  # two crops of the field before the norm, and their cotangents
    light = graph_of(residual(3))
    assert {segment.beside_bytes for segment in plan_of(light, tiles=((64, 64),)).segments} == {0}


@pytest.mark.parametrize(
    ("tile", "threads", "doublings"), [(128, 2, 0), (64, 2, math.log2(2.56)), (8, 2, 5), (64, 1, 0)]
)
def test_very_many_tiles_side_by_side_have_room_for_the_worst_of_their_orders(tile, threads, doublings):
    """In the prediction, and kept free between tiles: what is freed does not serve there."""
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    made = plan(graph, (tile, tile), machine=Machine(threads=threads))
    (segment,) = made.segments
    assert made.workers == threads
    tiles = made.workers * segment.tile_peak_bytes
    assert segment.beside_bytes == pytest.approx(0.05 * doublings * tiles, abs=1)
    assert amount_of(made.memory_at_peak, estimate.FRAGMENTATION) == pytest.approx(
        (0.5 + 0.05 * doublings) * tiles, abs=2
    )


def test_kept_shares_lie_beside_the_tiles_that_compute_them_again():
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)
    alone = plan_of(graph, tiles=((10**4, 10**4),), kept=kept)
    assert all(segment.tile_count == 1 for segment in alone.segments)
    waiting = [amount_of(segment.memory, estimate.WAITING) for segment in alone.segments]
    assert waiting == [sum(graph[i].nbytes for i in segment.kept) for segment in split_segments(graph, kept)]


def test_bricks_on_their_way_to_files_are_counted():
    """Rows of them, beside the crops that wait."""
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)
    segment = split_segments(graph, kept)[2]
    cost = Costs(graph, Machine()).of(segment, (64, 64), backward=True)
    problem = problem_of(graph, tiers=(MemoryTier(), HostTier(), DiskTier(Path())))
    estimates = [
        SegmentTiles(problem, segment, 1, dict.fromkeys(kept, tier), (0, 0), ("backward",)) for tier in ("disk", "host")
    ]
    in_files, elsewhere = (amount_of(one.amounts(cost), estimate.WAITING) for one in estimates)
    fields = [graph[i] for i in (*segment.reads, *segment.kept) if i in kept]
    rows = [
        Bricks(field.size(0), field.size(1), field.bytes_per_pixel).row_bytes(cost.crops[field.id][1])
        for field in fields
    ]
    assert in_files - elsewhere == ROWS_AT_ONCE * max(rows) > 0
    assert estimates[0].mapped_bytes(cost) >= in_files - elsewhere, "beside tiles, however small their crops are"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_files_cost_processors_beside_tiles_and_a_slow_disk_hides_both(phase):
    graph, threads = graph_of(residual(3)), 2
    kept = kept_at_best(graph)
    segment = split_segments(graph, kept)[2]

    def seconds(tier, **rates):
        machine = Machine(threads=threads, **rates)
        tiers = MemoryTier(), DiskTier(Path())
        problem = problem_of(graph, machine=machine, tiers=tiers, rooms={"disk": 2**40})
        made = make_plan(problem, tiles=((64, 64),), kept=dict.fromkeys(kept, tier))
        return getattr(made.segments[segment.index], f"{phase}_seconds")

    in_memory = seconds("memory")
    fast = {"disk_write_bytes_per_second": 1e15, "disk_read_bytes_per_second": 1e15}
    on_disk = seconds("disk", **fast, file_bytes_per_second=1e8)
    moved = (on_disk - in_memory) * 1e8 * threads
    assert moved > 2 * graph[kept[2]].nbytes
    slow = {"disk_write_bytes_per_second": 1e6, "disk_read_bytes_per_second": 1e6}
    assert seconds("disk", **slow) == pytest.approx(moved / 1e6)


offered = st.lists(
    st.lists(
        st.builds(TileChoice, st.floats(0, 10), st.integers(0, 20), st.integers(0, 6), st.none()),
        min_size=1,
        max_size=4,
    ),
    max_size=4,
)


@given(offered, st.integers(0, 20), st.integers(0, 20))
def test_tiles_within_caps_are_found_where_there_are_any(choices, room, most_compiled):
    legal = [
        choice
        for choice in itertools.product(*choices)
        if all(each.size_bytes <= room for each in choice) and sum(each.compiled for each in choice) <= most_compiled
    ]
    found = _fastest_within(choices, room, most_compiled)
    assert (found is not None) == bool(legal)
    if found is None:
        return
    assert tuple(found) in legal
    # Never worse than the leanest in kernels, and the fastest where kernels are no matter.
    fewest = min(
        legal, key=lambda choice: (sum(each.compiled for each in choice), sum(each.seconds for each in choice))
    )
    assert sum(each.seconds for each in found) <= sum(each.seconds for each in fewest) + 1e-9
    if sum(max(each.compiled for each in some) for some in choices) <= most_compiled:
        best = min(sum(each.seconds for each in choice) for choice in legal)
        assert sum(each.seconds for each in found) == pytest.approx(best)


@pytest.mark.parametrize(("network", "each"), [(residual(3), 72), (residual(3), 400), (Ladder(), 72), (Ladder(), 400)])
def test_tight_budgets_do_not_end_in_tiny_tiles(network, each):
    """With tiles of one's own choice, all of one size, nothing is faster that keeps the same fields and fits."""
    graph = graph_of(network)
    more = {"kept": kept_at_best(graph), "base": 100 * MIB, "compiled_bytes": kernels(1024, each * 1024)}
    with pytest.raises(BudgetError) as refused:
        plan_of(graph, budget=100 * MIB, **more)
    for share in (1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2):
        budget = int(refused.value.needed_bytes * share)
        found = plan_of(graph, budget=budget, **more)
        assert found.predicted_peak_bytes <= budget
        for side in (16, 32, 48, 64, 96, 128, 256):
            with suppress(BudgetError):
                uniform = plan_of(graph, budget=budget, tiles=((side, side),), **more)
                assert found.modelled_seconds <= 1.1 * uniform.modelled_seconds, (share, side)


def test_what_other_choices_of_fields_found_of_a_segment_changes_no_plan():
    """Beside other fields that are held, and where tiles of it were settled exactly."""
    graph = graph_of(residual(4))
    kept = kept_at_best(graph)
    budget = int(0.8 * plan_of(graph, kept=kept).predicted_peak_bytes)
    problem = problem_of(graph, budget, tiers=(MemoryTier(), DiskTier(Path())), rooms={"disk": 2**40})
    choices = [dict.fromkeys(kept, "memory"), dict.fromkeys(kept[1:], "memory"), dict.fromkeys(kept, "disk")]
    fitter = Fitter(problem, Costs(graph, Machine()), None)
    for choice in (*choices, *choices):
        alone = Fitter(problem, Costs(graph, Machine()), None)
        assert fitter.rough_seconds(choice) == alone.rough_seconds(choice)
        assert fitter.fit(choice) == alone.fit(choice)


def test_a_rough_look_ends_where_it_takes_more_than_is_known_to_do():
    graph = graph_of(residual(4))
    kept = dict.fromkeys(kept_at_best(graph), "memory")
    problem = problem_of(graph, int(0.8 * plan_of(graph).predicted_peak_bytes))
    seconds = Fitter(problem, Costs(graph, Machine()), None).rough_seconds(kept)
    costs = Costs(graph, Machine())
    assert Fitter(problem, costs, None).rough_seconds(kept, at_most=0.9 * seconds) == math.inf
    assert Fitter(problem, costs, None).rough_seconds(kept, at_most=1.01 * seconds) == seconds
    with pytest.raises(BudgetError):
        Fitter(problem_of(graph, 2 * MIB), costs, None).rough_seconds(kept, at_most=seconds)


def test_a_close_look_ends_where_a_segment_needs_as_much_as_is_known_to_do():
    graph = graph_of(residual(4))
    kept = dict.fromkeys(kept_at_best(graph), "memory")

    def needed(**limit):
        with pytest.raises(BudgetError) as caught:
            Fitter(problem_of(graph, 2 * MIB), Costs(graph, Machine()), None).fit(kept, closely=True, **limit)
        return caught.value.needed_bytes, "its leanest tile" in str(caught.value)

    all_of_it, _ = needed()
    assert needed(below=all_of_it + 1) == (all_of_it, True)
    assert needed(below=2 * MIB + 1)[1] is False


@pytest.mark.parametrize("most", [8, 10**6])
@pytest.mark.parametrize(("network", "threads"), [(residual(4), 1), (residual(4), 2), (Ladder(), 2)])
def test_a_refusal_says_what_a_look_at_all_tiles_does(network, threads, most, monkeypatch):
    """Few are costed exactly where more kernels are compiled than are ever held."""
    graph = graph_of(network)
    kept = dict.fromkeys(kept_at_best(graph), "memory")
    more = {"machine": Machine(threads=threads), "compiled_bytes": kernels(most, 10 * 1024)}

    def refused():
        exact, cost = list[bool](), Costs._cost

        def costed(costs, segment, shape, **how):
            exact.append(not how["roughly"])
            return cost(costs, segment, shape, **how)

        fitter = Fitter(problem_of(graph, 2 * MIB, **more), Costs(graph, more["machine"]), None)
        with monkeypatch.context() as patch:
            patch.setattr(Costs, "_cost", costed)
            with pytest.raises(BudgetError) as caught:
                fitter.fit(kept, closely=True)
        return str(caught.value), caught.value.needed_bytes, sum(exact)

    *told, few = refused()
    monkeypatch.setattr(Fitter, "_see_that_leanest_fit", lambda *args: None)
    *all_of_it, many = refused()
    assert told == all_of_it
    assert few < 0.5 * many or most > 8
    Fitter(problem_of(graph, told[1], **more), Costs(graph, more["machine"]), None).fit(kept, closely=True)


def test_what_is_held_beside_a_segment_is_counted_anew():
    graph = graph_of(residual(4))
    segment = split_segments(graph, [])[0]
    fitter = Fitter(problem_of(graph, 500 * MIB), Costs(graph, Machine()), None)
    shapes = fitter._shapes_of(segment, 1, {}, [("forward", (0, 0))], closely=False)
    totals = [choice.size_bytes for choice in shapes.choices()]
    more = shapes.beside(segment, (5 * MIB, 2 * MIB))
    assert [choice.size_bytes for choice in more.choices()] == [total + 7 * MIB for total in totals]
    assert more.least_bytes == shapes.least_bytes + 7 * MIB
    assert [choice.size_bytes for choice in shapes.choices()] == totals
