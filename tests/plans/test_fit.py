"""Fitting tiles beside what else a process holds."""

import pytest
from torch import nn

from gigagrad.plans import Limits, Machine, make_plan
from gigagrad.plans.memory import compiled_bytes
from gigagrad.plans.stages import split_stages
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
        tiles=(tile,),
    )


@pytest.mark.parametrize(("room", "expected"), [(100, 57), (3, 53), (0, 50)])
def test_no_more_is_compiled_than_the_cache_has_room_for(room, expected):
    assert limits(runtime_bytes=50, compiled_room_bytes=room).added_bytes(7) == expected


@pytest.mark.parametrize("tile", [(1024, 1024), (512, 1024), (256, 256)])
def test_a_prediction_counts_the_convolutions_of_the_tiles_chosen(tile):
    """Shapes of crops that do not occur are not compiled."""
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    warm, cold = (plan(graph, limits(compiled_room_bytes=room), tile) for room in (0, 2**30))
    compiled = compiled_bytes(graph, split_stages(graph), [s.tiles for s in cold.stages], backward=True)
    assert 0 < compiled <= compiled_bytes(graph, split_stages(graph), backward=True)
    assert cold.predicted_peak_bytes - warm.predicted_peak_bytes == compiled
    assert cold.runtime_bytes - warm.runtime_bytes == compiled


def test_no_more_crops_are_read_ahead_than_there_are_tiles():
    graph = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
    assert plan_of(graph, tiles=((1024, 1024),)).reader_bytes == 0
    image, target = 513 * 1024 * 3 * 4, 512 * 1024 * 4
    assert plan_of(graph, tiles=((512, 1024),)).reader_bytes == image + target
    assert plan_of(graph, tiles=((128, 1024),)).reader_bytes == 2 * (130 * 1024 * 3 * 4 + 128 * 1024 * 4)


def test_kept_shares_lie_beside_the_tiles_that_compute_them_again():
    graph = graph_of(residual(3))
    kept = kept_at_best(graph)
    alone = plan_of(graph, tiles=((10**4, 10**4),), kept=kept)
    assert all(stage.tile_count == 1 for stage in alone.stages)
    assert alone.reader_bytes == max(sum(graph[i].nbytes for i in stage.kept) for stage in split_stages(graph, kept))
