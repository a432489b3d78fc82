"""Work is counted for the mean tile, and yet for every tile."""

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.plans import Grid, split_stages
from gigagrad.plans.work import MAPPED_BYTES, layer_kind, mean_tile, sweep_work, whole_work

CACHE = 2**30


def normed(channels):
    """A convolution, a norm, and one channel of what they give."""
    return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.Conv2d(channels, 1, 1))


@given(st.integers(1, 400), st.integers(1, 600))
def test_mean_areas_add_up_to_the_areas_of_all_tiles(unet, height, width):
    (stage,) = split_stages(unet)
    grid = Grid(unet, stage, (height, width))
    mean = mean_tile(grid)
    if max(grid.shape) <= 24:
        for node in stage.fields:
            total = sum(box.area for tile in map(grid.__getitem__, range(len(grid))) if (box := tile.box(node)))
            assert mean.areas[node] * len(grid) == pytest.approx(total)
    for target in grid.targets:
        assert mean.shares[target] * len(grid) == pytest.approx(unet[target].size(0) * unet[target].size(1), rel=0.1)


def test_few_rows_and_columns_stand_for_many(unet):
    (stage,) = split_stages(unet)
    grid = Grid(unet, stage, (5, 7))
    assert min(grid.shape) > 24
    mean = mean_tile(grid)
    for node in stage.fields:
        total = sum(box.area for tile in map(grid.__getitem__, range(len(grid))) if (box := tile.box(node)))
        assert mean.areas[node] * len(grid) == pytest.approx(total, rel=0.1)


def test_one_tile_does_the_whole_image(graph_of):
    graph = graph_of(nn.Conv2d(1, 32, 3, padding=1), lambda o, t: (o.mean(1, keepdim=True) - t).mean(), (20, 30))
    (stage,) = split_stages(graph)
    forward, both = (
        sweep_work(graph, stage, mean_tile(Grid(graph, stage, (20, 30))), CACHE, gradient=g) for g in (False, True)
    )
    flops = 2 * 9 * 32 * 600
    assert forward["thin_in.f.flops"] == both["thin_in.f.flops"] == both["thin_in.w.flops"] == flops
    assert "thin_in.x.flops" not in both  # nobody asks for the image's gradient
    assert forward["tile.calls"] == 1
    assert both["leaf.bytes"] >= 4 * (32 * 9 + 32)
    assert not any(".b." in kind for kind in forward)


def test_halos_are_work(unet):
    (stage,) = split_stages(unet)
    small, large = (
        sweep_work(unet, stage, mean_tile(Grid(unet, stage, (s, s))), CACHE, gradient=True) for s in (20, 200)
    )
    for kind in ("thin.f.flops", "tile.calls", "transposed.blocks.w.flops"):
        assert small[kind] > large[kind]


def test_a_kept_convolution_is_not_computed_again_for_its_gradient(graph_of):
    graph = graph_of(normed(20), F.mse_loss, (40, 40))
    kept = next(node.id for node in graph.nodes if node.op.startswith("aten.conv"))
    first = split_stages(graph, [kept])[0]
    forward, back = (
        sweep_work(graph, first, mean_tile(Grid(graph, first, (40, 40))), CACHE, gradient=g) for g in (False, True)
    )
    assert "thin_in.f.flops" in forward
    assert "thin_in.f.flops" not in back
    assert "thin_in.w.flops" in back
    assert forward["store.write"] == 4 * 20 * 1600
    assert back["store.read"] == 2 * forward["store.write"]


def test_what_leaves_the_cache_is_counted_apart(unet):
    (stage,) = split_stages(unet)
    tile = mean_tile(Grid(unet, stage, (331, 517)))
    roomy, tiny = (sweep_work(unet, stage, tile, cache, gradient=True) for cache in (CACHE, 2))
    assert not any(kind.endswith(".cold") for kind in roomy)
    assert not any(kind.endswith(".hot") for kind in tiny)
    assert sum(v for k, v in roomy.items() if k.endswith(".hot")) == pytest.approx(
        sum(v for k, v in tiny.items() if k.endswith(".cold"))
    )


def test_a_large_field_and_its_cotangents_are_fresh_once(graph_of):
    graph = graph_of(normed(32), F.mse_loss, (256, 256))
    kept = next(node.id for node in graph.nodes if node.op.startswith("aten.conv"))
    first = split_stages(graph, [kept])[0]
    for gradient in (False, True):
        work = sweep_work(graph, first, mean_tile(Grid(graph, first, (64, 64))), CACHE, gradient=gradient)
        assert work["fresh.bytes"] == MAPPED_BYTES


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv2d(1, 4, 3, padding=1), "thin"),
        (nn.Conv2d(1, 64, 3, padding=1), "thin_in"),
        (nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 4, 3, padding=1)), "thin_out"),
        (nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 64, 3, padding=1)), "dense"),
        (nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 64, 1)), "pointwise"),
        (nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64)), "depthwise"),
        (nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=8)), "grouped"),
        (nn.ConvTranspose2d(1, 4, 2, 2), "transposed.thin"),
        (nn.ConvTranspose2d(1, 64, 2, 2), "transposed"),
        (nn.ConvTranspose2d(1, 3, 15, 8, 7), "transposed.blocks"),
    ],
)
def test_kinds_of_layers(graph_of, layer, kind):
    graph = graph_of(layer, lambda o, t: o.mean() + t.mean(), (24, 24))
    last = [node for node in graph.nodes if node.op.startswith("aten.conv")][-1]
    found, flops = layer_kind(graph, last)
    assert found == kind
    assert flops > 0


def test_operators_on_whole_fields_are_counted(graph_of):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.project = nn.Conv2d(1, 8, 4, 4), nn.Linear(8, 8)

        def forward(self, x):
            tokens = self.patch(x).flatten(2).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0]
            return self.project(mixed.softmax(1))

    graph = graph_of(Attention(), lambda o, t: o.square().mean() + t.mean(), (32, 32))
    forward, both = (whole_work(graph, CACHE, backward=b) for b in (False, True))
    assert forward["linear.f.flops"] >= 4 * 64 * 64 * 8 + 2 * 64 * 8 * 8
    assert both["linear.w.flops"] == both["linear.x.flops"] == both["linear.f.flops"] == forward["linear.f.flops"]
    assert "linear.w.flops" not in forward


def test_a_network_without_whole_fields_has_no_such_work(unet):
    assert whole_work(unet, CACHE, backward=True) == {}
