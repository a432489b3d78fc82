"""What is true where a slide, or a mask, holds no data: nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import rasterio.features
import torch

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import TargetError
from gigagrad.images import InputView, open_image
from gigagrad.masks import IGNORED, ignoring_missing, open_mask
from tests.images.test_georeference import NORTH_UP, H, W, make

ALL = Box.whole(H, W)
RNG = np.random.default_rng(8)
IDS = RNG.integers(0, 3, (1, H, W), np.uint8)


def gappy_slide(folder, dtype="float32", nodata=np.nan, bands=3):
    pixels = RNG.random((bands, H, W)).astype(dtype)
    pixels[:, RNG.random((H, W)) < 0.2] = nodata
    return make(folder / "slide.tif", pixels, nodata=nodata)


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int8", "uint16", "float32"])
def test_a_mask_is_ignored_where_its_slide_has_no_data(tmp_path, dtype):
    ids = (IDS > 0).astype(dtype)
    with open_image(gappy_slide(tmp_path)) as slide:
        mask = ignoring_missing(open_image(ids), slide)
        missing = slide.missing(ALL)
        assert missing is not None
        np.testing.assert_array_equal(mask.read(ALL)[0], np.where(missing, IGNORED, ids[0].astype(int)))
        around = Box(-3, -3, H + 3, W + 3)
        np.testing.assert_array_equal(mask.read(around)[0, 3:-3, 3:-3], mask.read(ALL)[0])
        assert mask.nodata == IGNORED
        assert mask.thread_bytes == slide.missing_bytes > 0


def test_nothing_is_ignored_where_all_is_there(tmp_path):
    mask = open_image(IDS)
    with open_image(make(tmp_path / "a.tif")) as slide:
        assert ignoring_missing(mask, slide) is mask


@pytest.mark.parametrize(
    ("nodata", "classes", "expected"),
    [
        (2, None, {0: 0, 1: 1, 2: IGNORED}),
        (0, None, {0: IGNORED, 1: 1, 2: 2}),
        (0, {"1": 1, "2": 2}, {0: IGNORED, 1: 1, 2: 2}),
        (0, {"2": 1}, {0: 0, 1: 1, 2: 1}),  # of one class, the rest is what it is told from
        (0, {"1": 1, "2": 2, "unlabelled": 0}, {0: 0, 1: 1, 2: 2}),
        (2, {"1": 1, "2": "ignore", "unlabelled": 0}, {0: 0, 1: 1, 2: IGNORED}),
    ],
)
def test_a_masks_own_nodata_is_what_is_unlabelled(tmp_path, nodata, classes, expected):
    path = make(tmp_path / "m.tif", IDS, nodata=nodata)
    with open_mask(path, open_image(np.zeros((3, H, W), np.uint8)), classes) as mask:
        np.testing.assert_array_equal(mask.read(ALL), np.vectorize(expected.__getitem__)(IDS))


def test_nan_in_a_mask_of_floats_is_no_data_only_if_it_says_so(tmp_path):
    pixels = IDS.astype(np.float32)
    pixels[:, :5] = np.nan
    slide = open_image(np.zeros((3, H, W), np.uint8))
    with open_mask(make(tmp_path / "m.tif", pixels, nodata=np.nan), slide) as mask:
        assert (mask.read(ALL)[:, :5] == IGNORED).all()
    with open_mask(make(tmp_path / "n.tif", pixels), slide, {"2": 1}) as mask:
        assert np.isnan(mask.read(ALL)[:, :5]).all()


def test_the_gradient_is_that_of_the_pixels_that_are_there(tmp_path):
    """NaN in the slide and 255 in the target against a plain step on those that are there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 3, padding=1)
    )
    with open_image(gappy_slide(tmp_path)) as slide:
        seen = InputView().of(slide)
        engine = gg.compile(model, gg.losses.ce, tile=(37, 41))
        value = engine.backward(seen, ignoring_missing(open_image(IDS), seen))
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        pixels, missing = slide.read(ALL), torch.from_numpy(slide.missing(ALL))
    x = torch.from_numpy(np.nan_to_num(pixels, nan=0.0))[None]
    entropy = torch.nn.functional.cross_entropy(model(x), torch.from_numpy(IDS).long(), reduction="none")
    expected = entropy[0][~missing].mean()
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def geojson(folder, crs, to_x=0.0, to_y=0.0):
    """A ring with a hole, of class water, in UTM coordinates."""
    corners = [[[0, 0], [600, 0], [600, -900], [0, -900], [0, 0]], [[93, -157], [403, -157], [403, -503], [93, -157]]]
    rings = [[[500100 + x + to_x, 5299800 + y + to_y] for x, y in ring] for ring in corners]
    geometry = {"type": "Polygon", "coordinates": rings}
    feature = {"type": "Feature", "properties": {"classification": "water"}, "geometry": geometry}
    named = {"crs": {"type": "name", "properties": {"name": crs}}} if crs else {}
    path = folder / "a.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "name": "a", **named, "features": [feature]}))
    return path, geometry


@pytest.mark.parametrize("crs", ["urn:ogc:def:crs:EPSG::32633", "EPSG:32633"])
def test_outlines_on_earth_are_painted_as_by_gdal(tmp_path, crs):
    path, geometry = geojson(tmp_path, crs)
    burnt = rasterio.features.rasterize([geometry], (H, W), transform=NORTH_UP)
    with open_image(make(tmp_path / "a.tif")) as slide, open_mask(path, slide) as mask:
        np.testing.assert_array_equal(mask.read(ALL)[0], burnt)
        assert burnt.any()
    small = make(tmp_path / "b.tif")
    with rasterio.open(small, "r+") as file:
        file.build_overviews([2])
    with open_image(small, level=1) as slide, open_mask(path, slide) as mask:
        assert mask.shape == (1, H // 2, W // 2)
        assert abs(int(mask.read(ALL).sum()) - int(burnt.sum()) // 4) < 100


@pytest.mark.parametrize(
    ("crs", "slide_crs", "said"),
    [
        ("urn:ogc:def:crs:OGC:1.3:CRS84", "EPSG:32633", "cannot be brought from EPSG:4326 to EPSG:32633"),
        ("EPSG:32633", None, "that of a is none; say it by a code of EPSG (gdal_edit -a_srs), or give them in pixels"),
        ("my town's", "EPSG:32633", "ogr2ogr -t_srs EPSG:32633"),
        (None, "EPSG:32633", 'lies there in its own, EPSG:32633; name their reference system in a member "crs"'),
    ],
)
def test_outlines_of_another_system_are_refused_with_the_way_there(tmp_path, crs, slide_crs, said):
    path, _ = geojson(tmp_path, crs)
    with (
        open_image(make(tmp_path / "a.tif", crs=slide_crs)) as slide,
        pytest.raises(TargetError) as caught,
    ):
        open_mask(path, slide)
    assert said in str(caught.value)
