"""Where pixels lie on earth, as GDAL sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import tifffile
from rasterio.transform import Affine

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import Image, open_image, write_pyramid
from gigagrad.images.georeference import TAGS, Georeference, geotiff_tags
from gigagrad.images.pixels import parse_nodata
from gigagrad.training.dataset import D4_TRANSFORMS, D4View

H, W = 90, 130
NORTH_UP = Affine(10, 0, 500000, 0, -20, 5300000)
TRANSFORMS = {
    "north up": NORTH_UP,
    "south up": Affine(0.5, 0, 10, 0, 0.25, -40),
    "turned": Affine(0.087, -0.1, 10, 0.05, 0.17, 50),
    "mirrored": Affine(-10, 0, 500000, 0, -10, 0),
}


def make(
    path: Path, pixels: np.ndarray | None = None, point: str = "Area", names: tuple[str, ...] = (), **options: Any
) -> Path:
    pixels = np.zeros((1, H, W), np.uint8) if pixels is None else pixels
    given = {"crs": "EPSG:32633", "transform": NORTH_UP, **options}
    shape = {"count": pixels.shape[0], "height": pixels.shape[1], "width": pixels.shape[2], "dtype": pixels.dtype}
    with rasterio.open(path, "w", driver="GTiff", **shape, **given) as file:
        file.write(pixels)
        file.update_tags(AREA_OR_POINT=point)
        for number, name in enumerate(names, 1):
            if name:
                file.set_band_description(number, name)
    return path


def placed(image: Image) -> Georeference:
    assert image.georeference is not None
    return image.georeference


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("options", [{}, {"point": "Point"}, {"BIGTIFF": "YES"}, {"crs": None}], ids=str)
def test_transforms_are_those_of_gdal_read_and_written(tmp_path, name, options):
    path = make(tmp_path / "a.tif", transform=TRANSFORMS[name], **options)
    with open_image(path) as image:
        place = placed(image)
    again = tmp_path / "b.tif"
    shape, tags = (H, W, 1), geotiff_tags(place, 255)
    write_pyramid(again, [np.zeros(shape, np.uint8)], shape=shape, dtype=np.uint8, nearest=True, tile=32, tags=tags)
    with rasterio.open(path) as theirs, rasterio.open(again) as ours:
        assert place.transform == pytest.approx(theirs.transform[:6], abs=1e-9)
        assert ours.transform.almost_equals(theirs.transform, 1e-9)
        assert ours.crs == theirs.crs
        assert ours.nodata == 255
        assert ours.overviews(1) == [2, 4]
    with open_image(again) as image:
        assert placed(image).transform == pytest.approx(place.transform, abs=1e-9)


def test_the_middle_of_a_pixel_is_where_a_point_was_tied(tmp_path):
    make(tmp_path / "a.tif", point="Point")
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        tie = tif.pages[0].tags[33922].value
    with open_image(tmp_path / "a.tif") as image:
        assert placed(image).points(np.array([(0.5, 0.5)]))[0] == pytest.approx(tie[3:5])


@pytest.mark.parametrize(
    ("crs", "epsg", "mpp", "name"),
    [
        ("EPSG:32633", 32633, 10e6, "urn:ogc:def:crs:EPSG::32633"),
        ("EPSG:4326", 4326, None, "urn:ogc:def:crs:OGC:1.3:CRS84"),
        ("EPSG:2263", 2263, 10e6 * 1200 / 3937, "urn:ogc:def:crs:EPSG::2263"),
        ("+proj=laea +lat_0=51 +lon_0=11 +datum=WGS84 +units=m", None, 10e6, None),
        (None, None, None, None),
    ],
)
def test_reference_systems(tmp_path, crs, epsg, mpp, name):
    with open_image(make(tmp_path / "a.tif", crs=crs)) as image:
        place = placed(image)
        assert (place.epsg, place.crs_name) == (epsg, name)
        assert image.mpp == (None if mpp is None else pytest.approx(mpp))


def test_a_pixel_of_metres_is_no_slip_and_72_dots_an_inch_are_none(tmp_path):
    path = make(tmp_path / "a.tif", transform=Affine(0.3, 0, 0, 0, -0.3, 0))
    with open_image(path) as image, open_image(path, mpp=250_000) as given:
        assert image.mpp == pytest.approx(300_000)
        assert "0.3 m/px" in repr(image)
        assert given.mpp == 250_000
    tags = geotiff_tags(Georeference((1, 0, 0, 0, -1, 0)), None)
    write_pyramid(
        tmp_path / "b.tif", [np.zeros((9, 9))], shape=(9, 9, 1), dtype=np.float64, nearest=True, mpp=0.5, tags=tags
    )
    with open_image(tmp_path / "b.tif") as image:
        assert image.mpp is None


def test_levels_cover_the_same_ground(tmp_path):
    make(tmp_path / "a.tif")
    with rasterio.open(tmp_path / "a.tif", "r+") as file:
        file.build_overviews([2, 4])
    with open_image(tmp_path / "a.tif") as image, image.at_level(2) as small:
        corners = [each.georeference.points(np.array([(each.width, each.height)])) for each in (image, small)]
        np.testing.assert_allclose(corners[0], corners[1])
        assert small.mpp == pytest.approx((image.mpp or 0) * 4, rel=0.02)


WORLD = {
    "a.tif": {"driver": "GTiff", "PROFILE": "BASELINE", "TFW": "YES"},
    "a.png": {"driver": "PNG", "WORLDFILE": "YES"},
    "a.jpg": {"driver": "JPEG", "WORLDFILE": "YES"},
}


@pytest.mark.parametrize("transform", ["north up", "turned"])
@pytest.mark.parametrize("name", WORLD)
def test_world_files_are_those_of_gdal(tmp_path, name, transform):
    path = tmp_path / "with a space" / name
    path.parent.mkdir()
    pixels = np.arange(H * W, dtype=np.uint8).reshape(1, H, W)
    shape = {"count": 1, "height": H, "width": W, "dtype": "uint8"}
    with rasterio.open(path, "w", transform=TRANSFORMS[transform], **shape, **WORLD[name]) as file:
        file.write(pixels)
    for beside in path.parent.glob("*.aux.xml"):
        beside.unlink()
    with rasterio.open(path) as theirs, open_image(path) as image:
        assert image.mpp is None
        assert placed(image).transform == pytest.approx(theirs.transform[:6], abs=1e-9)
        assert placed(image).transform == pytest.approx(TRANSFORMS[transform][:6], abs=1e-9)
    (world,) = (file for file in path.parent.iterdir() if file != path)
    for suffix in (f"{path.suffix}w", f".{path.suffix[1]}{path.suffix[-1]}w"):
        world = world.rename(world.with_suffix(suffix))
        with open_image(path) as image, rasterio.open(path) as theirs:
            assert placed(image).transform == pytest.approx(theirs.transform[:6], abs=1e-9)


def test_a_world_file_counts_where_the_file_has_no_place_and_has_to_be_one(tmp_path):
    make(tmp_path / "a.tif")
    for name in ("B.TIF", "no suffix"):
        tifffile.imwrite(tmp_path / name, np.zeros((9, 9), np.uint8))
        with open_image(tmp_path / name) as image:
            assert image.georeference is None
    for name in ("a.tfw", "B.TFW"):
        (tmp_path / name).write_text("2\n0\n0\n-2\n11\n29\n")
    with open_image(tmp_path / "a.tif") as image:
        assert placed(image).transform == pytest.approx(NORTH_UP[:6])
    with open_image(tmp_path / "B.TIF", mpp=0.5) as image:
        assert (placed(image).transform, image.mpp) == ((2, 0, 10, 0, -2, 30), 0.5)
    for text, words in (("1 2 3", "six numbers"), ("a b c d e f", "six numbers"), ("0 " * 6, "places no pixel")):
        (tmp_path / "B.TFW").write_text(text)
        with pytest.raises(ImageError, match=words):
            open_image(tmp_path / "B.TIF")


@pytest.mark.parametrize("turn", range(D4_TRANSFORMS))
def test_views_know_their_place(tmp_path, turn):
    """Every pixel holds its own number, so that it is found again wherever it was turned to."""
    numbers = np.arange(3 * H * W, dtype=np.uint16).reshape(3, H, W)
    with open_image(make(tmp_path / "a.tif", numbers, transform=TRANSFORMS["turned"])) as image:
        view = D4View(image.bands((2,)).grey(), turn)
        (rows, columns), count = np.divmod(np.arange(view.height * view.width), view.width), H * W
        from_view = placed(view).points(np.stack((columns, rows), axis=1) + 0.5)
        of_image = view.read(Box.whole(view.height, view.width)).ravel().astype(int) - count
        from_image = placed(image).points(np.stack((of_image % W, of_image // W), axis=1) + 0.5)
        np.testing.assert_allclose(from_view, from_image)


def test_pixels_are_points_backwards():
    place = Georeference(tuple(TRANSFORMS["turned"])[:6])
    pixels = np.random.default_rng(0).uniform(-5, 300, (50, 2))
    np.testing.assert_allclose(place.pixels(place.points(pixels)), pixels)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {33550: (1.0, 1.0, 0.0)},
        {33550: (1.0, 1.0, 0.0), 33922: (0.0,) * 12},  # ground control points
        {33550: (0.0, 1.0, 0.0), 33922: (0.0,) * 6},
        {33550: (float("nan"), 1.0, 0.0), 33922: (0.0,) * 6},
        {34264: (1.0,) * 16},
        {34264: "text"},
        {34264: 7.0},
    ],
)
def test_what_places_no_pixel_is_no_place(tags):
    assert Georeference.of_tags(tags) is None


@pytest.mark.parametrize("keys", [(1, 1, 0, 9), (1, 1), "no numbers", (), (1, 1, 0, 1, 1024, 0, 1)])
def test_a_directory_that_is_none_leaves_the_system_unknown(keys):
    place = Georeference.of_tags({33550: (1.0, 1.0, 0.0), 33922: (0.0,) * 6, 34735: keys})
    assert (place.keys, place.epsg, place.mpp) == ((), None, None)


def test_our_tags_are_gdals_byte_by_byte(tmp_path):
    with open_image(make(tmp_path / "a.tif", crs="EPSG:4326")) as image:
        ours = geotiff_tags(image.georeference, None)
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        for tag in TAGS:
            entry = tif.pages[0].tags.get(tag)
            value = None if entry is None else entry.value
            value = value.encode() if isinstance(value, str) else value
            assert ours.get(tag, (None, None))[1] == value


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [
        ("0", "uint16", 0),
        (" -9999 ", "int16", -9999),
        ("-9999", "uint8", None),
        ("70000", "uint16", None),
        ("0.5", "uint8", None),
        ("1e3", "uint16", 1000),
        ("nan", "uint8", None),
        ("inf", "int32", None),
        ("9007199254740993", "int64", 9007199254740993),
        ("-3.4028234663852886e+38", "float32", float(np.finfo(np.float32).min)),
        ("0.1", "float32", float(np.float32(0.1))),
        ("1e40", "float32", float("inf")),
        ("", "float32", None),
        (None, "float32", None),
        ("none", "uint8", None),
        ("0", "bool", 0),
    ],
)
def test_values_of_no_data(text, dtype, value):
    assert parse_nodata(text, np.dtype(dtype)) == value


def test_nan_of_floats_is_no_data():
    found = parse_nodata("nan", np.dtype("float32"))
    assert found is not None
    assert np.isnan(found)
