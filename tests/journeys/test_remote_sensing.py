"""From a satellite's bands to a map: 16 bits, four bands by name, a corner without data, and all in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.features
import yaml
from rasterio.transform import Affine
from shapely.geometry import shape

import gigagrad as gg
from gigagrad import cli
from gigagrad.boxes import Box

pytestmark = pytest.mark.slow

SIDE = 192
PLACE = Affine(10, 0, 399960, 0, -10, 5300040)

MODEL = """
import gigagrad as gg
from torch import nn


class OfEachPixel(nn.Sequential):
    def __init__(self):
        super().__init__(gg.models.Normalise((0, 0, 0), (1, 1, 1), scale=(0, 5000)), nn.Conv2d(3, 1, 1))
"""


def typed(line: str) -> None:
    assert cli.main(line.split()) == 0, line


def write_scene(name: str, seed: int) -> None:
    """Fields and lakes in reflectance times 10000; 0 is no data. The lakes are the mask."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    water = np.zeros((SIDE, SIDE), bool)
    for _ in range(5):
        cy, cx, radius = rng.integers(SIDE), rng.integers(SIDE), rng.integers(15, 45)
        water |= (y - cy) ** 2 + (x - cx) ** 2 < radius**2
    of_fields, of_water = (np.array(each)[:, None, None] for each in ((500, 900, 700, 4200), (700, 600, 400, 150)))
    bands = np.where(water, of_water, of_fields) + rng.integers(-80, 80, (4, SIDE, SIDE))
    bands[:, y + 2 * x < 90] = 0
    common = {"width": SIDE, "height": SIDE, "crs": "EPSG:32633", "transform": PLACE}
    with rasterio.open(f"{name}.tif", "w", count=4, dtype="uint16", nodata=0, **common) as file:
        file.write(bands.astype(np.uint16))
        for number, band in enumerate(("B02", "B03", "B04", "B08"), 1):
            file.set_band_description(number, band)
    with rasterio.open(f"{name}-water.tif", "w", count=1, dtype="uint8", **common) as file:
        file.write(water.astype(np.uint8), 1)


def test_lakes_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["slide,mask,split"]
    for number, split in enumerate(("train", "train", "val", "test")):
        write_scene(f"s{number}", number)
        lines.append(f"s{number}.tif,s{number}-water.tif,{split}")
    Path("cohort.csv").write_text("\n".join(lines) + "\n")
    Path("mine.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    settings = "--model mine:OfEachPixel --bands b08 B04 B03 --epochs 8 --learning-rate 0.5"
    typed(f"fit --slides cohort.csv {settings} --out run")
    assert yaml.safe_load(Path("run/config.yaml").read_text())["bands"] == ["b08", "B04", "B03"]
    assert all(
        np.isfinite(json.loads(line).get("loss", 0))
        for line in Path("run/metrics.jsonl").read_text().split("\n")
        if line
    )
    typed("predict --run run --slides cohort.csv --split test --trust mine:OfEachPixel --out map")
    typed("predict --run run --slides cohort.csv --split test --trust mine:OfEachPixel --out map")  # done before
    found = []
    for what in ("--run run --trust mine:OfEachPixel", "--predictions map"):
        capsys.readouterr()
        typed(f"evaluate {what} --slides cohort.csv --json")
        found.append(json.loads(capsys.readouterr().out))

    with rasterio.open("s3.tif") as scene, rasterio.open("map/masks/s3.tif") as mask:
        assert (mask.crs, mask.transform, mask.nodata) == (scene.crs, scene.transform, 255)
        ids, missing = mask.read(1), scene.dataset_mask() == 0
    np.testing.assert_array_equal(ids == 255, missing)
    record = json.loads(Path("map/predictions.json").read_text())["slides"][0]
    assert record["mpp"] == 10e6
    with rasterio.open("s3-water.tif") as file:
        water = file.read(1)
    both, total = (ids[~missing] & water[~missing]).sum(), ids[~missing].sum() + water[~missing].sum()
    assert record["dice"] > 0.95
    for scores in found:
        assert scores["mean"] == pytest.approx(record["dice"])
        assert sum(map(sum, scores["confusion"])) == (~missing).sum()
    assert record["dice"] == pytest.approx(2 * int(both) / int(total))

    collection = json.loads(Path("map/geojson/s3.geojson").read_text())
    assert collection["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32633"
    shapes = [feature["geometry"] for feature in collection["features"]]
    assert shapes
    polygons: list[Any] = list(map(shape, shapes))
    assert all(polygon.exterior.is_ccw for polygon in polygons)
    burnt = rasterio.features.rasterize(shapes, ids.shape, transform=PLACE)
    # Regions and holes that are too small to be outlined are all that differs.
    assert (burnt == (ids == 1)).mean() > 0.97
    with gg.open_image("s3.tif") as scene, gg.open_mask("map/geojson/s3.geojson", scene) as again:
        np.testing.assert_array_equal(again.read(Box.whole(SIDE, SIDE))[0], burnt)
