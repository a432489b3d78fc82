"""Several images a step: groups, a pipeline, and which is fastest."""

from __future__ import annotations

from math import inf

import pytest

from gigagrad.errors import ConfigError
from gigagrad.scaling import DATA, GROUPS, PIPELINE, TILE, Layer, Link, Scaling

FREE = Link(inf, 0.0)


@pytest.fixture
def scaling(ladder):
    return lambda images, link=FREE: Scaling(ladder.problem, ladder.plan(), link, images)


def test_images_are_taken_in_turns_and_groups_share_theirs(scaling):
    alone = scaling(1).shared(1).seconds
    found = scaling(6).grouped(8, 4)
    assert (found.groups, found.tile.ranks, found.images, found.busy) == (4, 2, 2, 8)
    assert found.seconds == pytest.approx(2 * found.tile.seconds)
    assert found.times_faster == pytest.approx(6 * alone / found.seconds)
    assert found.efficiency == pytest.approx(found.times_faster / 8)


@pytest.mark.parametrize(("images", "ranks", "groups"), [(1, 4, 1), (4, 4, 2), (6, 8, 4), (3, 10_000, 3), (5, 3, 3)])
def test_losses_of_groups_add_up(scaling, images, ranks, groups):
    found = scaling(images, Link(1e8, 1e-5)).grouped(ranks, groups)
    assert found.seconds == pytest.approx(found.alone_seconds / ranks + sum(found.lost.values()))
    assert min(found.lost.values()) >= -1e-12


def test_data_where_only_gradients_travel_tiles_where_images_are_few(scaling):
    free = scaling(8)
    assert free.ways(8)[DATA] == pytest.approx(free.ways(1)[TILE] / 8)
    assert free.shared(8).groups == 8
    assert free.shared(16).groups == 8
    one = scaling(1)
    assert one.ways(8)[TILE] == one.ways(8)[GROUPS] < one.ways(8)[DATA] == pytest.approx(one.ways(1)[TILE])
    assert scaling(9).shared(8).groups == 1  # in eight groups, seven would wait for the ninth image


def test_each_group_adds_up_a_share_of_the_gradients(scaling, ladder):
    gradients = sum(node.nbytes for node in ladder.graph.nodes if node.op == "parameter")
    link = Link(1e6, 1e-3)
    found = scaling(8, link).grouped(8, 8)
    assert found.sums_seconds == pytest.approx(14 * (1e-3 + gradients / 8 / 1e6))
    assert found.sent_bytes == 2 * gradients * 7 // 8


def test_a_pipeline_of_one_image_gains_nothing_and_never_beats_free_data(scaling):
    alone = scaling(1).ways(1)[PIPELINE]
    assert alone == pytest.approx(scaling(1).shared(1).seconds)
    assert scaling(1).ways(8)[PIPELINE] >= alone * (1 - 1e-9)
    for images, ranks in ((2, 2), (8, 4), (5, 8)):
        ways = scaling(images).ways(ranks)
        assert ways[PIPELINE] >= alone * (1 + (images - 1) / ranks) * (1 - 1e-9)
        assert ways[PIPELINE] >= ways[DATA] * (1 - 1e-9)
    assert scaling(8).ways(4)[PIPELINE] < 8 * alone  # but it does gain


def test_segments_as_a_chain_are_crossed_by_what_later_ones_read(scaling, ladder):
    layers = scaling(1).layers
    plan, made = ladder.plan(), {field: segment.index for segment in ladder.segments for field in segment.kept}
    read = {field: segment.index for segment in ladder.segments for field in segment.reads}
    crossings = sum(field.size_bytes * (read[field.node] - made[field.node]) for field in plan.kept)
    assert sum(layer.cut_bytes for layer in layers) == crossings > 0
    assert layers[-1].cut_bytes == 0
    assert sum(layer.seconds for layer in layers) == pytest.approx(plan.predicted_seconds)
    assert max(layer.parameter_bytes for layer in layers) > 0


def test_a_pipeline_is_cut_where_gradients_cost_more_than_fields(scaling, ladder):
    """With parameters of a gigabyte copies are dear, and each rank takes layers of its own."""
    ways = scaling(100, Link(1e9, 0.0))
    ways.layers = [Layer(1.0, 10_000, 10**9), Layer(1.0, 10_000, 10**9)]
    assert ways.pipeline_seconds(2) == pytest.approx(2 + 2e-5 + 99)
    ways.layers = [Layer(1.0, 10**10, 1000), Layer(1.0, 10**10, 1000)]
    assert ways.pipeline_seconds(2) == pytest.approx(2 + 99 + 2 * 2000 / 1e9)
    two = scaling(2)
    two.layers = [Layer(1.0, 0, 0), Layer(1.0, 0, 0)]
    assert two.pipeline_seconds(8) == pytest.approx(2 + 0.5)  # more copies than images have nothing to do


def test_ranks_without_work_are_worked_out_once(scaling):
    ways = scaling(1)
    assert ways.grouped(1000, 1).tile is ways.grouped(10_000, 1).tile


def test_a_step_without_images_is_refused(scaling):
    with pytest.raises(ConfigError, match="an image at least, got 0"):
        scaling(0)
