"""Attention of patches: as the head says, at their place in the slide, in QuPath's form, and in pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts import Row
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.slide_bag import CaseBag
from gigagrad.models.mil import HEADS, BagNetwork
from gigagrad.prediction.attention import WithAttention, attends, cell_px, painted, ranks, write_attention
from tests.devices.fake import FakeCpu


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.conv(x / 255)).mean((2, 3))


@pytest.mark.parametrize("head", ["abmil", "clam", "max", "mean", "transmil"])
def test_attention_and_output_are_the_models_own_and_the_encoder_runs_once(head) -> None:
    torch.manual_seed(0)
    width = {} if head in ("max", "mean") else {"width": 8}
    encoder = Encoder()
    network = BagNetwork(encoder, HEADS[head](4, 2, **width))
    model = nn.Sequential(nn.Identity(), network).eval()
    bag = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    assert attends(model)
    output, attention = gg.compile(WithAttention(model).eval(), memory="1.5 GiB", device=FakeCpu()).forward(bag)
    with torch.no_grad():
        torch.testing.assert_close(output, model(bag))
        torch.testing.assert_close(attention, network.attention(bag))
        before = encoder.calls
        WithAttention(model)(bag)
    assert encoder.calls == before + 1


def test_a_model_without_attention() -> None:
    assert not attends(nn.Sequential(nn.Conv2d(3, 4, 3)))
    named = nn.Module()
    named.attention = nn.Linear(4, 1)  # a layer of that name says nothing of patches
    assert not attends(named)


def test_ranks_are_shares_of_patches_with_less() -> None:
    np.testing.assert_allclose(ranks(np.array([0.1, 0.4, 0.2, 0.3])), [1 / 8, 7 / 8, 3 / 8, 5 / 8])
    np.testing.assert_allclose(ranks(np.full(5, 0.2)), 0.5)


def test_squares_are_painted_where_they_are() -> None:
    corners = np.array([[0, 0], [4, 0], [2, 8], [-2, 8]])
    plane = painted(corners, 4, np.array([1.0, 2.0, 3.0, 5.0]), (6, 5), (2, 2))
    expected = np.zeros((6, 5))
    expected[:2, :2], expected[:2, 2:4], expected[4:6, 1:3] = 1, 2, 3
    expected[4:6, 0] = 5
    np.testing.assert_array_equal(plane, expected)
    wide = painted(np.array([[8, 2]]), 4, np.array([7.0]), (4, 4), (2, 4))
    np.testing.assert_array_equal(np.argwhere(wide), [[1, 2], [2, 2]])
    twice = painted(np.array([[0, 0], [2, 0]]), 4, np.array([1.0, 2.0]), (2, 3), (2, 2))
    np.testing.assert_array_equal(twice, [[1, 1.5, 2]] * 2)


def test_a_map_hits_all_corners_or_an_eighth_of_a_patch() -> None:
    assert cell_px(np.array([[0, 0], [256, 512]]), 256) == 256
    assert cell_px(np.array([[64, 0], [256, 512]]), 256) == 64
    assert cell_px(np.array([[3, 5], [256, 512]]), 256) == 32


def test_files_of_a_case(tmp_path: Path) -> None:
    random, rows = np.random.default_rng(0), []
    for number, width in enumerate((96, 64)):
        path = tmp_path / f"s{number}.tif"
        pixels = random.integers(0, 256, (80, width, 3), np.uint8)
        write_pyramid(path, [pixels], shape=pixels.shape, dtype=np.uint8, nearest=False, mpp=0.5)
        rows.append(Row(path))
    case = Row(rows[0].slide, called="p", of_case=tuple(rows))
    with gg.open_bag([row.slide for row in rows], 16, 1.0, tissue=[None] * 2) as bag:
        attention = torch.arange(len(bag), dtype=torch.float32) / 100
        write_attention(tmp_path / "p", case, bag, attention, "attention")
        made = sorted(path.name for path in (tmp_path / "p").iterdir())
        assert made == ["patches.png", *(f"s{k}.{end}" for k in (0, 1) for end in ("geojson", "png", "tif"))]
        start = 0
        assert isinstance(bag, CaseBag)
        for each, row in zip(bag.bags, rows, strict=True):
            values = attention[start : start + len(each)].numpy()
            with open_image(tmp_path / "p" / f"{row.name}.tif") as heat:
                assert heat.mpp == pytest.approx(0.5 * 32)
                seen = np.asarray(heat.read(Box.whole(heat.height, heat.width)))[0]
            assert seen.shape == (3, -(-each.level0_shape[1] // 32))
            for (x, y), value in zip(each.coords.tolist(), values, strict=True):
                assert seen[y // 32, x // 32] == value
            features = json.loads((tmp_path / "p" / f"{row.name}.geojson").read_text())["features"]
            for feature, (x, y), value in zip(features, each.coords.tolist(), values, strict=True):
                ring = feature["geometry"]["coordinates"][0]
                assert (ring[0], ring[2], ring[4]) == ([x, y], [x + 32, y + 32], [x, y])
                assert feature["properties"]["objectType"] == "tile"
                assert feature["properties"]["measurements"]["attention"] == pytest.approx(value, 1e-5)
            start += len(each)
        last = np.asarray(bag.read(len(bag) - 1, len(bag)))[0].transpose(1, 2, 0)
    ranked = [each["properties"]["measurements"]["attention rank"] for each in features]
    assert ranked == sorted(ranked)
    assert ranked[-1] > 0.9
    with Pillow.open(tmp_path / "p" / "patches.png") as strip:
        shown = strip.crop((8, 24, 8 + 192, 24 + 192))
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(Pillow.fromarray(last).resize((192, 192))))
    with Pillow.open(tmp_path / "p" / "s1.png") as picture:
        drawn = np.asarray(picture).astype(int)
    # Of the second slide all patches have more attention than the median: they are coloured, the last one most.
    corner = drawn[79, 31], drawn[0, 0]
    assert np.ptp(corner[0]) > np.ptp(corner[1])


def test_patches_of_other_numbers_than_bytes_are_shown_by_one_scale(tmp_path: Path) -> None:
    from gigagrad.prediction.attention import draw_patches

    pixels = np.zeros((1, 32, 64), np.uint16)
    pixels[:, :, 32:] = 4000
    with gg.open_bag(open_image(pixels), 32, None, tissue=None) as bag:
        page = draw_patches(bag, np.array([0.9, 0.1]))
    assert page[100, 100].tolist() == [0, 0, 0]
    assert page[100, 300].tolist() == [255, 255, 255]
