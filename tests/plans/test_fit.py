"""Fitting tiles beside what else a process holds."""

import math

import pytest
from torch import nn

from gigagrad.bricks import ROWS_AT_ONCE, Bricks
from gigagrad.errors import BudgetError
from gigagrad.plans import DISK, HOST, MEMORY, Grid, Limits, Machine, make_plan
from gigagrad.plans.cost import Costs
from gigagrad.plans.memory import compiled_convolutions
from gigagrad.plans.packing import AS_THEY_ARE
from gigagrad.plans.stages import split_stages
from gigagrad.plans.traffic import traffic_bytes, waiting_bytes
from tests.plans.networks import MIB, graph_of, kept_at_best, plan_of, residual


def limits(**more):
    return Limits(
        **{"budget_bytes": None, "base_bytes": 100 * MIB, "reader_cache_bytes": 0, "runtime_bytes": 0, **more}
    )


def plan(graph, given, tile):
    return make_plan(
        graph,
        given,
        Machine(),
        image_shape=graph.source("image").shape,
        backward=True,
        device="cpu",
        memory_format="contiguous",
        tiles=None if tile is None else (tile,),
    )


def compiled_to(graph, made):
    stages = split_stages(graph, [field.node for field in made.kept])
    grids = [Grid(graph, stage, made.stages[stage.index].tile) for stage in stages]
    return sum(compiled_convolutions(grid, backward=True) for grid in grids)


@pytest.mark.parametrize("tile", [(1024, 1024), (512, 1000), (256, 256)])
def test_a_prediction_counts_the_convolutions_of_the_tiles_chosen(tile):
    """Shapes of crops that do not occur are not compiled, and no more than the cache has room for; each takes what it
    takes on this processor.
    """
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    warm, cold, little = (plan(graph, limits(compiled_room=room, kernel_bytes=5000), tile) for room in (0, 1024, 1))
    compiled = compiled_to(graph, cold)
    assert compiled == 3 * (2 if tile[1] == 1000 else 1)
    assert cold.predicted_peak_bytes - warm.predicted_peak_bytes == compiled * 5000
    assert cold.runtime_bytes - warm.runtime_bytes == compiled * 5000
    assert little.predicted_peak_bytes - warm.predicted_peak_bytes == 5000


def test_where_memory_is_short_tiles_are_chosen_that_compile_to_little():
    """What is set aside for compiled convolutions is what the chosen tiles need, not the most that any would."""
    graph = graph_of(residual(3), size=100)
    small = plan(graph, limits(), (16, 16))
    with pytest.raises(BudgetError) as refused:
        plan(graph, limits(budget_bytes=100 * MIB), None)
    needed = refused.value.needed_bytes
    tight = plan(graph, limits(budget_bytes=needed), None)
    assert tight.predicted_peak_bytes <= needed
    assert compiled_to(graph, tight) < compiled_to(graph, small) / 2
    with pytest.raises(BudgetError):
        plan(graph, limits(budget_bytes=needed - 1), None)


def test_no_more_crops_are_read_ahead_than_there_are_tiles():
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    assert plan_of(graph, tiles=((1024, 1024),)).reader_bytes == 0
    image, target = 513 * 1024 * 3 * 4, 512 * 1024 * 4
    assert plan_of(graph, tiles=((512, 1024),)).reader_bytes == image + target
    assert plan_of(graph, tiles=((128, 1024),)).reader_bytes == 2 * (130 * 1024 * 3 * 4 + 128 * 1024 * 4)


def test_blocks_that_freed_memory_does_not_serve_are_told_stage_by_stage():
    """Contributions to large weights, and large crops that wait."""
    graph = graph_of(
        nn.Sequential(
            nn.Conv2d(3, 512, 1), nn.Conv2d(512, 512, 3, padding=1), nn.BatchNorm2d(512), nn.Conv2d(512, 1, 1)
        )
    )
    beside = {side: plan_of(graph, tiles=((side, side),)).stages for side in (16, 128)}
    weights = 512 * 512 * 9 * 4
    assert [stage.beside_bytes for stage in beside[16]] == [weights, 0]
    waiting = beside[128][1].beside_bytes
    assert waiting > 2 * 128 * 128 * 512 * 4  # two crops of the field before the norm, and their cotangents
    light = graph_of(residual(3))
    assert {stage.beside_bytes for stage in plan_of(light, tiles=((64, 64),)).stages} == {0}


@pytest.mark.parametrize(
    ("tile", "threads", "doublings"), [(128, 2, 0), (64, 2, math.log2(2.56)), (8, 2, 5), (64, 1, 0)]
)
def test_very_many_tiles_side_by_side_have_room_for_the_worst_of_their_orders(tile, threads, doublings):
    """In the prediction, and kept free between tiles: what is freed does not serve there."""
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    made = make_plan(
        graph,
        limits(),
        Machine(threads=threads),
        image_shape=graph.source("image").shape,
        backward=True,
        device="cpu",
        memory_format="contiguous",
        tiles=((tile, tile),),
    )
    (stage,) = made.stages
    assert made.workers == threads
    tiles = made.workers * stage.tile_peak_bytes
    assert stage.beside_bytes == pytest.approx(0.05 * doublings * tiles, abs=1)
    counted = sum(size for _, size in made.memory_parts())
    assert made.predicted_peak_bytes - counted == pytest.approx((0.5 + 0.05 * doublings) * tiles, abs=2)


def test_kept_shares_lie_beside_the_tiles_that_compute_them_again():
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)
    alone = plan_of(graph, tiles=((10**4, 10**4),), kept=kept)
    assert all(stage.tile_count == 1 for stage in alone.stages)
    assert alone.reader_bytes == max(sum(graph[i].nbytes for i in stage.kept) for stage in split_stages(graph, kept))


def test_bricks_on_their_way_to_files_are_counted():
    """Rows of them, beside the crops that wait."""
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)
    stage = split_stages(graph, kept)[2]
    cost = Costs(graph, Machine()).of(stage, (64, 64), backward=True)
    in_files, elsewhere = (
        waiting_bytes(graph, stage, cost.crops, dict.fromkeys(kept, tier), backward=True) for tier in (DISK, HOST)
    )
    fields = [graph[i] for i in (*stage.reads, *stage.kept) if i in kept]
    rows = [
        Bricks(field.size(0), field.size(1), field.bytes_per_pixel).row_bytes(cost.crops[field.id][1])
        for field in fields
    ]
    assert in_files - elsewhere == ROWS_AT_ONCE * max(rows) > 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_files_cost_processors_beside_tiles_and_a_slow_disk_hides_both(phase):
    graph, threads = graph_of(residual(3)), 2
    kept = kept_at_best(graph)
    stage = split_stages(graph, kept)[2]
    there = dict.fromkeys(kept, DISK)

    def seconds(tiers, **rates):
        machine = Machine(threads=threads, **rates)
        cost = Costs(graph, machine).of(stage, (64, 64), backward=True)
        moved = cost.plan.tile_count * traffic_bytes(graph, stage, cost.crops, tiers, phase, DISK, AS_THEY_ARE)
        made = make_plan(
            graph,
            limits(scratch_bytes=2**40),
            machine,
            image_shape=graph.source("image").shape,
            backward=True,
            device="cpu",
            memory_format="contiguous",
            tiles=((64, 64),),
            kept=tiers,
        )
        return getattr(made.stages[stage.index], f"{phase}_seconds"), moved

    in_memory, _ = seconds(dict.fromkeys(kept, MEMORY))
    fast = {"disk_write_bytes_per_second": 1e15, "disk_read_bytes_per_second": 1e15}
    on_disk, moved = seconds(there, **fast, file_bytes_per_second=1e8)
    assert moved > 2 * graph[kept[2]].nbytes
    assert on_disk == pytest.approx(in_memory + moved / 1e8 / threads)
    slow = {"disk_write_bytes_per_second": 1e6, "disk_read_bytes_per_second": 1e6}
    assert seconds(there, **slow)[0] == pytest.approx(moved / 1e6)
