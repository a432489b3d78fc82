"""What a region measures against the pixels of its class that its polygon covers, one by one."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import shapely
from scipy import ndimage

from gigagrad.boxes import Box
from gigagrad.images import MaskClass, open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import polygons
from gigagrad.prediction.graphs import tissue_graph
from gigagrad.prediction.polygons import measured, trace, write_annotations, write_geojson, write_instances

HEIGHT, WIDTH = 90, 120


@pytest.fixture
def mask():
    """Two regions of the first class, one of them around a hole and a pinhole, and one of the second in the hole."""
    ids = np.zeros((HEIGHT, WIDTH), np.uint8)
    ids[10:60, 20:100] = 1
    ids[20:40, 40:80] = 0
    ids[50, 50] = 0
    ids[25:35, 45:75] = 2
    ids[70:90, 0:30] = 1
    return open_image(ids)


@pytest.fixture
def traced(mask):
    return trace(mask, mask_classes(2, ["Tumour", "Stroma"]), min_area_px=9)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("block", [7, 1024])
def test_pixels_inside_count_but_those_of_pinholes(traced, mask, block, background, monkeypatch):
    monkeypatch.setattr(polygons, "_MEANS_BLOCK_PX", block)
    classes = mask_classes(2, ["Tumour", "Stroma"])
    planes = np.random.default_rng(0).integers(0, 256, (2, HEIGHT, WIDTH), np.uint8)
    named = (MaskClass(0, "Background", (0, 0, 0)), *classes) if background else classes
    shown = np.concatenate([255 - planes[:1], planes]) if background else planes
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    found = measured(traced, mask, named, open_image(shown)).regions
    ids = np.asarray(mask.read(Box.whole(HEIGHT, WIDTH)))[0]
    assert [region.kind.name for region in found] == ["Tumour", "Tumour", "Stroma"]
    assert [region.polygon.area - region.pixels.area for region in found] == [1, 0, 0]
    for region in found:
        inside = shapely.contains_xy(region.polygon, x, y) & (ids == region.kind.id)
        assert region.pixels == pytest.approx((inside.sum(), x[inside].mean(), y[inside].mean()), rel=1e-12)
        assert region.probability == pytest.approx(planes[region.kind.id - 1][inside].mean() / 255, rel=1e-12)


def test_areas_are_those_of_scipy_and_of_the_graph():
    """Of blobs with many small holes; outlines of half the resolution hold no pixel twice."""
    ids = (ndimage.gaussian_filter(np.random.default_rng(1).normal(size=(300, 400)), 4) > 0).astype(np.uint8)
    ids[::7, ::5] = 0
    mask, classes = open_image(ids), mask_classes(1)
    exact, coarse = (measured(trace(mask, classes, max_corners=most), mask, classes) for most in (10**6, 4000))
    areas, few = (sorted(each.pixels.area for each in found.regions if each.pixels) for found in (exact, coarse))
    numbers, _ = ndimage.label(ids)
    assert areas == [area for area in sorted(np.bincount(numbers.flat)[1:].tolist()) if area >= 256]
    assert areas == sorted(tissue_graph(mask, classes).x[:, 0].tolist())
    assert sum(region.polygon.area for region in exact.regions) > 1.02 * sum(areas)
    assert coarse.downsample > 1
    assert 0.8 * ids.sum() < sum(few) <= ids.sum()


def test_labels_that_overlap_have_pixels_each():
    planes = np.zeros((2, 40, 50), np.uint8)
    planes[0, 5:30, 5:45] = planes[1, 10:35, 10:40] = 1
    mask, classes = open_image(planes), mask_classes(2)
    found = measured(trace(mask, classes), mask, classes).regions
    assert [region.pixels for region in found] == [(25 * 40, 25, 17.5), (25 * 30, 25, 22.5)]


def test_it_stands_in_every_file(traced, mask, tmp_path):
    classes = mask_classes(2, ["Tumour", "Stroma"])
    planes = np.full((2, HEIGHT, WIDTH), 204, np.uint8)
    of_both = measured(traced, mask, classes, open_image(planes))
    for made, expected in ((of_both, 0.8), (measured(traced, mask, classes), None)):
        write_geojson(tmp_path / "a.geojson", made, "a")
        properties = [each["properties"] for each in json.loads((tmp_path / "a.geojson").read_text())["features"]]
        assert {each.get("measurements", {}).get("Mean probability") for each in properties} == {expected}
        write_instances(tmp_path / "a.csv", made, "a", (1, 1), None)
        with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
            assert {row["mean_probability"] for row in csv.DictReader(file)} == {str(expected or "")}
        write_annotations(tmp_path / "a.db", made, "a")
        with closing(sqlite3.connect(tmp_path / "a.db")) as store:
            said = [json.loads(text) for (text,) in store.execute("SELECT properties FROM annotations")]
        assert {each.get("mean_probability") for each in said} == {expected}
