"""Outlines against the mask they were traced from: area, validity, every pixel, and QuPath's structure."""

import json
import uuid

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import polygons
from gigagrad.prediction.outlines import mask_thumbnail
from gigagrad.prediction.polygons import read_sampled, trace, write_geojson

shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))


def covered(regions, shape):
    """Which pixel centres lie in any of the regions."""
    y, x = np.mgrid[: shape[0], : shape[1]] + 0.5
    whole = shapely.unary_union([region.polygon for region in regions])
    return shapely.contains_xy(whole, x, y)


@given(hnp.arrays(np.uint8, shapes, elements=st.integers(0, 1)), st.integers(1, 9))
def test_outlines_are_exact_in_any_blocks(plane, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polygons, "block_side", lambda downsample: block)
        traced = trace(open_image(plane), mask_classes(1), min_area_px=1)
    assert traced.downsample == 1
    assert all(region.polygon.is_valid and region.polygon.geom_type == "Polygon" for region in traced.regions)
    assert sum(region.polygon.area for region in traced.regions) == plane.sum()
    assert np.array_equal(covered(traced.regions, plane.shape), plane == 1)


@given(hnp.arrays(np.uint8, shapes, elements=st.integers(0, 3)))
def test_each_class_has_its_own_regions(plane):
    classes = mask_classes(3)
    regions = trace(open_image(plane), classes, min_area_px=1).regions
    for kind in classes:
        own = [region for region in regions if region.kind == kind]
        assert sum(region.polygon.area for region in own) == np.sum(plane == kind.id)


def test_pixels_that_touch_at_a_point_are_apart_and_their_gap_is_no_trouble():
    ring = np.array([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 1, 1]], np.uint8)
    regions = trace(open_image(ring), mask_classes(1), min_area_px=1).regions
    assert [region.polygon.area for region in regions] == [7, 3]
    assert all(region.polygon.is_valid for region in regions)


def test_an_island_in_a_hole_belongs_to_nobody_else():
    plane = np.ones((30, 30), np.uint8)
    plane[4:26, 4:26] = 0
    plane[8:22, 8:22] = 1
    plane[12:18, 12:18] = 0
    outer, island = (r.polygon for r in trace(open_image(plane), mask_classes(1), min_area_px=1).regions)
    assert [len(outer.interiors), len(island.interiors)] == [1, 1]
    assert outer.area == 900 - 22 * 22
    assert island.area == 14 * 14 - 6 * 6


def test_specks_and_pinholes_are_left_out():
    plane = np.zeros((64, 64), np.uint8)
    plane[10:40, 10:40] = 1
    plane[20:22, 20:22] = 0
    plane[50:52, 50:52] = 1
    (region,) = trace(open_image(plane), mask_classes(1), min_area_px=5).regions
    assert region.polygon.area == 900
    assert len(trace(open_image(plane), mask_classes(1), min_area_px=4).regions) == 2


@given(st.integers(20, 70), st.integers(20, 70), st.integers(0, 2**32 - 1))
def test_noise_is_traced_coarser_within_the_image(height, width, seed):
    plane = (np.random.default_rng(seed).random((height, width)) < 0.5).astype(np.uint8)
    traced = trace(open_image(plane), mask_classes(1), min_area_px=1, max_corners=200)
    assert traced.downsample > 1
    for region in traced.regions:
        x0, y0, x1, y1 = region.polygon.bounds
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height
        assert region.polygon.is_valid


def test_a_coarse_outline_keeps_the_area_of_a_smooth_region():
    y, x = np.mgrid[:401, :523]
    disc = ((y - 200) ** 2 + (x - 260) ** 2 < 150**2).astype(np.uint8)
    traced = trace(open_image(disc), mask_classes(1), max_corners=200)
    assert traced.downsample == 4
    assert traced.regions[0].polygon.area == pytest.approx(disc.sum(), rel=0.02)


def test_more_is_refused_than_guessed():
    with pytest.raises(ImageError, match="no mask"):
        trace(open_image(np.zeros((3, 8, 8), np.uint8)), mask_classes(1))
    with pytest.raises(ImageError, match="no mask"):
        trace(open_image(np.zeros((8, 8), np.float32)), mask_classes(1))


def test_the_file_is_what_qupath_reads(tmp_path):
    plane = np.zeros((90, 120), np.uint8)
    plane[10:60, 20:100] = 1
    plane[20:40, 40:80] = 0
    plane[70:90, 0:30] = 2
    traced = trace(open_image(plane), mask_classes(2, ["Tumour", 'Stroma "soft"']))
    path = tmp_path / "slide.geojson"
    write_geojson(path, traced, "slide")
    collection = json.loads(path.read_text())
    assert collection["type"] == "FeatureCollection"
    tumour, stroma = collection["features"]
    for feature in (tumour, stroma):
        assert feature["type"] == "Feature"
        assert uuid.UUID(feature["id"]).version == 5
        assert feature["properties"]["objectType"] == "annotation"
        assert set(feature["properties"]["classification"]) == {"name", "color"}
        assert len(feature["properties"]["classification"]["color"]) == 3
        for ring in feature["geometry"]["coordinates"]:
            assert ring[0] == ring[-1]
            assert len(ring) >= 4
        assert shapely.geometry.shape(feature["geometry"]).is_valid
    assert tumour["properties"]["classification"]["name"] == "Tumour"
    assert stroma["properties"]["classification"]["name"] == 'Stroma "soft"'
    assert len(tumour["geometry"]["coordinates"]) == 2
    assert shapely.geometry.shape(tumour["geometry"]).area == 50 * 80 - 20 * 40
    assert tumour["id"] != stroma["id"]

    before = path.read_bytes()
    write_geojson(path, traced, "slide")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["slide.geojson"]

    write_geojson(path, traced, "slide", scale=(2, 4.5))
    scaled = json.loads(path.read_text())["features"][0]["geometry"]
    assert shapely.geometry.shape(scaled).bounds == (90, 20, 450, 120)


def test_an_empty_mask_is_an_empty_collection(tmp_path):
    traced = trace(open_image(np.zeros((50, 50), np.uint8)), mask_classes(1))
    write_geojson(tmp_path / "none.geojson", traced, "none")
    assert json.loads((tmp_path / "none.geojson").read_text())["features"] == []


@given(hnp.arrays(np.uint8, shapes), st.integers(1, 9), st.integers(-3, 9), st.integers(-3, 9))
def test_a_coarse_pixel_is_the_middle_one_of_its_block(plane, downsample, y0, x0):
    height, width = plane.shape
    rows = np.minimum(np.arange(0, height, downsample) + downsample // 2, height - 1)
    columns = np.minimum(np.arange(0, width, downsample) + downsample // 2, width - 1)
    coarse = np.pad(plane[np.ix_(rows, columns)], 16)
    read = read_sampled(open_image(plane), Box(y0, x0, y0 + 7, x0 + 5), downsample)
    assert np.array_equal(read, coarse[y0 + 16 :, x0 + 16 :][:7, :5])


@given(hnp.arrays(np.uint8, shapes), st.integers(1, 30), st.integers(1, 30))
def test_thumbnails_take_the_nearest_pixel(plane, height, width):
    small = mask_thumbnail(open_image(plane), height, width)
    rows = (2 * np.arange(height) + 1) * plane.shape[0] // (2 * height)
    columns = (2 * np.arange(width) + 1) * plane.shape[1] // (2 * width)
    assert np.array_equal(small, plane[np.ix_(rows, columns)])
