"""The mean probability of a region against the pixels that its polygon covers, one by one."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import shapely

from gigagrad.images import MaskClass, open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import polygons
from gigagrad.prediction.polygons import trace, with_probabilities, write_annotations, write_geojson, write_instances

HEIGHT, WIDTH = 90, 120


@pytest.fixture
def traced():
    """Two regions of the first class, one of them around a hole and a pinhole, and one of the second in the hole."""
    ids = np.zeros((HEIGHT, WIDTH), np.uint8)
    ids[10:60, 20:100] = 1
    ids[20:40, 40:80] = 0
    ids[50, 50] = 0
    ids[25:35, 45:75] = 2
    ids[70:90, 0:30] = 1
    return trace(open_image(ids), mask_classes(2, ["Tumour", "Stroma"]), min_area_px=9)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("block", [7, 1024])
def test_the_mean_is_of_the_pixels_inside(traced, block, background, monkeypatch):
    monkeypatch.setattr(polygons, "_MEANS_BLOCK_PX", block)
    classes = mask_classes(2, ["Tumour", "Stroma"])
    planes = np.random.default_rng(0).integers(0, 256, (2, HEIGHT, WIDTH), np.uint8)
    named = (MaskClass(0, "Background", (0, 0, 0)), *classes) if background else classes
    shown = np.concatenate([255 - planes[:1], planes]) if background else planes
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    measured = with_probabilities(traced, open_image(shown), named)
    assert [region.kind.name for region in measured.regions] == ["Tumour", "Tumour", "Stroma"]
    for region in measured.regions:
        inside = shapely.contains_xy(region.polygon, x, y)
        assert region.probability == pytest.approx(planes[region.kind.id - 1][inside].mean() / 255, rel=1e-12)


def test_it_stands_in_every_file(traced, tmp_path):
    classes = mask_classes(2, ["Tumour", "Stroma"])
    planes = np.full((2, HEIGHT, WIDTH), 204, np.uint8)
    measured = with_probabilities(traced, open_image(planes), classes)
    for made, expected in ((measured, 0.8), (traced, None)):
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
