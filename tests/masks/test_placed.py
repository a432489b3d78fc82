"""Where outlines and masks have their zero: at a slide's corner, where it was scanned, or somewhere on earth."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import openslide
import pytest
import rasterio
import rasterio.features
import rasterio.warp
import shapely
import shapely.geometry
from PIL import Image as Pillow
from rasterio.transform import Affine

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, TargetError
from gigagrad.images import MaskClass, open_image
from gigagrad.images.openslide import _bounds
from gigagrad.images.pixels import Level
from gigagrad.masks import open_mask, read_annotations
from gigagrad.masks.outlines import epsg_of
from gigagrad.prediction.polygons import trace, write_geojson
from tests.images.scanned import write_scn

H, W = 128, 192
CORNER, SLIDE = (60, 100), (320, 440)
RING = [[40.2, 30.3], [80.6, 34.1], [76.4, 71.7], [38.9, 68.2], [40.2, 30.3]]


def write(path, features, **members):
    path.write_text(json.dumps({"type": "FeatureCollection", **members, "features": features}))
    return path


def feature(ring, **properties):
    return {"type": "Feature", "properties": properties, "geometry": {"type": "Polygon", "coordinates": [ring]}}


def north_up(x, y, width, height):
    return Affine(width, 0, x, 0, -height, y)


def whole(image):
    return np.asarray(image.read(Box.whole(image.height, image.width)))[0]


# Slides of which a part was scanned


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """Dark where the ring of QuPath's pixels lies."""
    inside = rasterio.features.rasterize([{"type": "Polygon", "coordinates": [RING]}], (H, W))
    pixels = np.where(inside[..., None] == 1, (90, 40, 110), (232, 232, 232)).astype(np.uint8)
    return write_scn(tmp_path_factory.mktemp("scan") / "a.scn", pixels, corner=CORNER, slide=SLIDE, levels=2)


def dark(scan, level=0):
    with openslide.OpenSlide(scan) as slide:
        return np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]))[..., 1] == 40


def asap(path, ring):
    corners = "".join(f'<Coordinate X="{x}" Y="{y}"/>' for x, y in ring)
    path.write_text(
        '<ASAP_Annotations><Annotations><Annotation Type="Polygon" PartOfGroup="Tumor"><Coordinates>'
        f"{corners}</Coordinates></Annotation></Annotations></ASAP_Annotations>"
    )
    return path


def test_qupath_counts_from_the_scan_and_asap_from_the_corner(scan, tmp_path):
    files = [
        write(tmp_path / "a.geojson", [feature(RING, objectType="annotation", classification={"name": "Tumor"})]),
        write(tmp_path / "b.geojson", [feature(RING, classification="Tumor")]),
        asap(tmp_path / "a.xml", [(x + CORNER[1], y + CORNER[0]) for x, y in RING]),
    ]
    for path in files:
        with open_image(scan) as slide, open_mask(path, slide) as mask:
            assert slide.bounds == Box(CORNER[0], CORNER[1], CORNER[0] + H, CORNER[1] + W)
            np.testing.assert_array_equal(whole(mask) == 1, dark(scan), str(path))
    with open_image(scan, level=1) as slide, open_mask(files[0], slide) as mask:
        assert mask.shape[1:] == (160, 220)
        assert (whole(mask) != dark(scan, 1)).sum() < 40


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((3, 5, 20, 30), Box(5, 3, 35, 23)),
        ((3, 5, 2000, 30), Box(5, 3, 35, 60)),
        ((0, 0, 60, 40), None),
        ((100, 0, 10, 10), None),
        ((-3, 0, 10, 10), None),
        (("a", 0, 10, 10), None),
        ((0, 0, 10), None),
    ],
)
def test_bounds_are_what_openslide_says_where_that_is_a_part(said, expected):
    names = [f"openslide.bounds-{name}" for name in ("x", "y", "width", "height")]
    properties = dict(zip(names, map(str, said), strict=False))
    assert _bounds(SimpleNamespace(properties=properties), Level((40, 60), 1)) == expected


def test_regions_are_exported_as_qupath_counts(scan, tmp_path):
    plane = dark(scan).astype(np.uint8)
    path = tmp_path / "a.geojson"
    with open_image(scan) as slide:
        write_geojson(path, trace(open_image(plane), (MaskClass(1, "Tumor", (1, 2, 3)),)), "a", bounds=slide.bounds)
        with open_mask(path, slide) as mask:
            np.testing.assert_array_equal(whole(mask), plane)
    (region,) = json.loads(path.read_text())["features"]
    moved = shapely.affinity.translate(shapely.geometry.shape(region["geometry"]), *CORNER[::-1])
    np.testing.assert_array_equal(rasterio.features.rasterize([moved], plane.shape), plane)


@pytest.mark.parametrize("step", [1, 2])
def test_a_mask_image_of_what_was_scanned(scan, step):
    small = np.random.default_rng(0).integers(0, 3, (H // step, W // step), dtype=np.uint8)
    expected = np.zeros(SLIDE, np.uint8)
    expected[CORNER[0] : CORNER[0] + H, CORNER[1] : CORNER[1] + W] = small.repeat(step, 0).repeat(step, 1)
    with open_image(scan) as slide, open_mask(small, slide) as mask:
        np.testing.assert_array_equal(whole(mask), expected)
        np.testing.assert_array_equal(np.asarray(mask.read(Box(50, 90, 70, 130)))[0], expected[50:70, 90:130])


def test_a_mask_of_a_level_s_size_is_of_the_whole_slide(tmp_path):
    path = write_scn(tmp_path / "a.scn", np.zeros((100, 148, 3), np.uint8), corner=(10, 20), slide=(200, 300), levels=2)
    coarse = np.random.default_rng(1).integers(0, 3, (100, 150), dtype=np.uint8)
    with open_image(path) as slide, open_mask(coarse, slide) as mask:
        np.testing.assert_array_equal(whole(mask), coarse.repeat(2, 0).repeat(2, 1))


def test_a_mask_that_may_be_of_either_is_refused(tmp_path):
    path = write_scn(tmp_path / "a.scn", np.zeros((100, 150, 3), np.uint8), corner=(10, 20), slide=(200, 300))
    with open_image(path) as slide, pytest.raises(TargetError, match="may be of the whole slide a or of what was"):
        open_mask(np.zeros((100, 150), np.uint8), slide)


# Images on earth

PLACES = {
    "degrees": (4326, north_up(11, 48, 1e-4, 1.5e-4)),
    "metres": (32633, north_up(500000, 5300000, 10, 20)),
    "turned": (3035, Affine.translation(4.4e6, 2.8e6) @ Affine.rotation(40) @ Affine.scale(10, -12)),
}


@pytest.fixture(params=PLACES)
def scene(request, tmp_path):
    epsg, transform = PLACES[request.param]
    path = tmp_path / "scene.tif"
    about = {"height": H, "width": W, "count": 1, "dtype": "uint8", "crs": f"EPSG:{epsg}", "transform": transform}
    with rasterio.open(path, "w", driver="GTiff", **about) as file:
        file.write(np.ones((1, H, W), np.uint8))
    return path, epsg, transform


def on_earth(transform, epsg, other):
    area = {"type": "Polygon", "coordinates": [[transform @ tuple(point) for point in RING]]}
    return rasterio.warp.transform_geom(f"EPSG:{epsg}", f"EPSG:{other}", area) if other != epsg else area


def burnt(area, epsg, other, transform):
    if other != epsg:
        area = rasterio.warp.transform_geom(f"EPSG:{other}", f"EPSG:{epsg}", area)
    return rasterio.features.rasterize([area], (H, W), transform=transform)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        *((other, where) for other in (4326, 32633, 3857) for where in ("in front", "behind")),
        *((4326, "unsaid"), (3857, "in the feature"), (32633, "in the geometry")),
    ],
)
def test_outlines_on_earth_are_painted_as_by_gdal(scene, tmp_path, other, where):
    path, epsg, transform = scene
    area = on_earth(transform, epsg, other)
    drawn: dict[str, Any] = {
        "type": "Feature",
        "properties": {"note": "x" * 5000, "classification": "water"},
        "geometry": dict(area),
    }
    crs = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{other}"}}
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if where == "in front":
        collection["crs"] = crs
    collection["features"] = [drawn]
    if where == "behind":
        collection["crs"] = crs
    if where == "in the feature":
        drawn["crs"] = crs
    if where == "in the geometry":
        drawn["geometry"]["crs"] = {"type": "EPSG", "properties": {"code": other}}
    (tmp_path / "a.geojson").write_text(json.dumps(collection))
    with open_image(path) as slide, open_mask(tmp_path / "a.geojson", slide) as mask:
        np.testing.assert_array_equal(whole(mask), burnt(area, epsg, other, transform))


def test_outlines_in_pixels_over_an_image_on_earth_are_qupath_s_or_say_so(scene, tmp_path):
    path, _, _ = scene
    expected = rasterio.features.rasterize([{"type": "Polygon", "coordinates": [RING]}], (H, W))
    said = [
        write(tmp_path / "a.geojson", [feature(RING, objectType="annotation", classification={"name": "water"})]),
        write(tmp_path / "b.geojson", [feature(RING, classification={"name": "water", "colorRGB": -1})]),
        write(tmp_path / "c.geojson", [feature(RING) | {"id": "PathAnnotationObject"}]),
        write(tmp_path / "d.geojson", [feature(RING, classification="water")], crs=None),
        asap(tmp_path / "a.xml", RING),
    ]
    for each in said:
        with open_image(path) as slide, open_mask(each, slide) as mask:
            np.testing.assert_array_equal(whole(mask), expected, str(each))
    plain = write(tmp_path / "e.geojson", [feature(RING, classification="water")])
    with open_image(path) as slide, pytest.raises(TargetError, match=r"longitudes and latitudes \(RFC 7946\)") as told:
        open_mask(plain, slide)
    assert 'write "crs": null where they are pixels' in str(told.value)


def test_outlines_without_a_system_in_numbers_of_the_image_s_are_refused(tmp_path):
    path = tmp_path / "a.tif"
    about = {"height": H, "width": W, "count": 1, "dtype": "uint8", "crs": "EPSG:3857"}
    far = [[x + 200, y + 300] for x, y in RING]
    with rasterio.open(path, "w", driver="GTiff", transform=north_up(200, 400, 1, 1), **about) as file:
        file.write(np.ones((1, H, W), np.uint8))
    with open_image(path) as slide, pytest.raises(TargetError, match="lies there in its own, EPSG:3857; name their"):
        open_mask(write(tmp_path / "a.geojson", [feature(far)]), slide)


def test_a_world_file_knows_no_system(tmp_path):
    path = tmp_path / "a.png"
    Pillow.fromarray(np.ones((H, W), np.uint8)).save(path)
    path.with_suffix(".pgw").write_text("0.1\n0\n0\n-0.1\n20\n50\n")
    with open_image(path) as slide, pytest.raises(TargetError, match=r"that of a is none; say it by a code of EPSG"):
        open_mask(write(tmp_path / "a.geojson", [feature(RING)]), slide)


@pytest.mark.parametrize("crs", [{"type": "link", "properties": {"href": "a"}}, "EPSG:4326", {"x": [1]}])
def test_a_crs_that_names_nothing_is_refused(tmp_path, crs):
    with pytest.raises(ImageError, match="a 'crs' that names no reference system"):
        read_annotations(write(tmp_path / "a.geojson", [feature(RING)], crs=crs))


def test_several_systems_are_refused(tmp_path):
    named = {"type": "name", "properties": {"name": "EPSG:4326"}}
    features = [feature(RING) | {"crs": named}, feature(RING) | {"crs": None}]
    with pytest.raises(ImageError, match="names several reference systems"):
        read_annotations(write(tmp_path / "a.geojson", features))


def test_names_of_reference_systems():
    crs84 = ["urn:ogc:def:crs:OGC:1.3:CRS84", "urn:ogc:def:crs:OGC::CRS84", "OGC:CRS84"]
    for name in (*crs84, "http://www.opengis.net/def/crs/OGC/1.3/CRS84", "EPSG:4326", "urn:ogc:def:crs:EPSG:6.9:4326"):
        assert epsg_of(name) == 4326, name
    assert epsg_of("epsg:3857") == epsg_of("https://www.opengis.net/def/crs/EPSG/0/3857") == 3857
    assert epsg_of("ESRI:102100") is epsg_of("http://a.b/EPSG/0/3857") is epsg_of("EPSG:4326\n") is None


def test_regions_on_earth_are_read_back_by_gdal_and_by_us(scene, tmp_path):
    path, epsg, transform = scene
    plane = np.kron(np.random.default_rng(1).integers(0, 2, (16, 24)), np.ones((8, 8), int)).astype(np.uint8)
    out = tmp_path / "a.geojson"
    with open_image(path) as slide:
        regions = trace(open_image(plane), (MaskClass(1, "water", (1, 2, 3)),), min_area_px=1)
        write_geojson(out, regions, "a", (1, 1), slide.georeference)
        with open_mask(out, slide) as mask:
            np.testing.assert_array_equal(whole(mask), plane)
    found = json.loads(out.read_text())
    named = rasterio.crs.CRS.from_user_input(found["crs"]["properties"]["name"])
    assert named.to_epsg() == epsg or named.to_string() == "OGC:CRS84"
    areas = [each["geometry"] for each in found["features"]]
    np.testing.assert_array_equal(rasterio.features.rasterize(areas, (H, W), transform=transform), plane)


def test_regions_in_a_system_without_a_name_are_exported_in_pixels(tmp_path):
    path, out = tmp_path / "a.tif", tmp_path / "a.geojson"
    about = {"height": H, "width": W, "count": 1, "dtype": "uint8", "transform": north_up(0, 0, 10, 10)}
    with rasterio.open(path, "w", driver="GTiff", crs="+proj=laea +lat_0=40 +lon_0=9", **about) as file:
        file.write(np.ones((1, H, W), np.uint8))
    plane = np.zeros((H, W), np.uint8)
    plane[20:50, 30:90] = 1
    with open_image(path) as slide:
        assert slide.georeference is not None
        assert slide.georeference.crs_name is None
        write_geojson(out, trace(open_image(plane), (MaskClass(1, "a", (1, 2, 3)),)), "a", (1, 1), slide.georeference)
        with open_mask(out, slide) as mask:
            np.testing.assert_array_equal(whole(mask), plane)
    assert shapely.geometry.shape(json.loads(out.read_text())["features"][0]["geometry"]).bounds == (30, 20, 90, 50)
