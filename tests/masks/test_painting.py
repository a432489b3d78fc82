"""Outlines as masks: exact, the same in whatever box, and back where they came from."""

from __future__ import annotations

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.images import open_image, write_pyramid
from gigagrad.masks import AnnotationMask, ClassTable, Outlines, open_mask, read_annotations
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction.polygons import trace, write_geojson

HEIGHT, WIDTH = 40, 50
SLIDE = open_image(np.zeros((3, HEIGHT, WIDTH), np.uint8))
WHOLE = Box.whole(HEIGHT, WIDTH)

coordinates = st.one_of(st.integers(-10, 60).map(float), st.integers(-80, 480).map(lambda k: k / 8), st.floats(-10, 60))
rings = st.lists(st.tuples(coordinates, coordinates), min_size=3, max_size=9)
polygons = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.lists(rings, min_size=1, max_size=3)), max_size=5)


def mask_of(drawn, table="a=1 b=2 Unclassified=3 unlabelled=0") -> AnnotationMask:
    return AnnotationMask(Outlines.pack(drawn, "drawn"), ClassTable.parse(table.split()), SLIDE, name="drawn")


def by_even_odd(drawn) -> np.ndarray:
    """Every pixel's centre against every edge, one by one: Shimrat's rule (1962) without any cleverness."""
    plane = np.zeros((HEIGHT, WIDTH), np.uint8)
    for name, rings_of_one in drawn:
        for y in range(HEIGHT):
            for x in range(WIDTH):
                inside = False
                for ring in rings_of_one:
                    for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
                        (xa, ya), (xb, yb) = ((x0, y0), (x1, y1)) if y0 <= y1 else ((x1, y1), (x0, y0))
                        if ya <= y + 0.5 < yb and xa + (y + 0.5 - ya) * ((xb - xa) / (yb - ya)) <= x + 0.5:
                            inside = not inside
                if inside:
                    plane[y, x] = {"a": 1, "b": 2, None: 3}[name]
    return plane


@given(polygons)
def test_a_pixel_is_inside_where_its_centre_is(drawn) -> None:
    np.testing.assert_array_equal(mask_of(drawn).read(WHOLE)[0], by_even_odd(drawn))


@given(polygons, st.integers(-5, HEIGHT), st.integers(-5, WIDTH), st.integers(1, 30), st.integers(1, 30))
def test_a_pixel_is_the_same_in_whatever_box(drawn, y, x, height, width) -> None:
    mask = mask_of(drawn)
    whole = np.pad(mask.read(WHOLE)[0], 60)
    box = Box(y, x, y + height, x + width)
    np.testing.assert_array_equal(mask.read(box)[0], whole[y + 60 : y + height + 60, x + 60 : x + width + 60])


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 0.8))
def test_outlines_of_a_mask_give_back_the_mask(tmp_path_factory, seed, density) -> None:
    plane = (np.random.default_rng(seed).random((HEIGHT, WIDTH)) < density).astype(np.uint8)
    path = tmp_path_factory.mktemp("traced") / "a.geojson"
    classes = mask_classes(1)
    write_geojson(path, trace(open_image(plane), classes, min_area_px=1), "a")
    if plane.any():
        np.testing.assert_array_equal(open_mask(path, SLIDE, {"Foreground": 1}).read(WHOLE)[0], plane)


@given(st.lists(st.tuples(st.floats(0, WIDTH), st.floats(0, HEIGHT)), min_size=4, max_size=12, unique=True))
def test_neighbours_neither_overlap_nor_leave_a_gap(points) -> None:
    every = shapely.MultiPoint(points)
    painted = np.zeros((HEIGHT, WIDTH), int)
    for cell in shapely.get_parts(shapely.delaunay_triangles(every)):
        painted += mask_of([("a", [list(cell.exterior.coords)])]).read(WHOLE)[0]
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    inside = shapely.contains_xy(every.convex_hull.buffer(-1e-6), x, y)
    assert painted.max(initial=0) <= 1
    assert painted[inside].min(initial=1) == 1


def test_later_outlines_lie_over_earlier_ones_and_holes_stay_open() -> None:
    square = [(0, 0), (20, 0), (20, 20), (0, 20)]
    hole = [(5, 5), (15, 5), (15, 15), (5, 15)]
    plane = mask_of([("a", [square]), ("b", [square, hole])]).read(WHOLE)[0]
    assert plane[2, 2] == 2
    assert plane[10, 10] == 1
    assert plane[30, 30] == 0


def test_what_the_table_does_not_name_covers_nothing() -> None:
    square = [(0, 0), (20, 0), (20, 20), (0, 20)]
    plane = mask_of([("a", [square]), ("b", [square])], "a=7 other=1").read(WHOLE)[0]
    assert set(np.unique(plane)) == {7, 255}


def test_a_coarser_level_has_the_same_outlines(tmp_path) -> None:
    blank = [np.zeros((400, 600, 3), np.uint8)]
    write_pyramid(tmp_path / "s.tif", blank, shape=(400, 600, 3), dtype=np.uint8, nearest=False, tile=64, levels=2)
    outlines = Outlines.pack([("a", [[(100, 40), (300, 40), (300, 200), (100, 200)]])], "drawn")
    with open_image(tmp_path / "s.tif", level=1) as slide:
        assert slide.shape == (3, 200, 300)
        plane = open_mask(outlines, slide, {"a": 1}).read(Box.whole(200, 300))[0]
    assert plane[20:100, 50:150].all()
    assert plane.sum() == 80 * 100


@pytest.mark.parametrize("suffix", ["geojson", "xml"])
def test_a_file_and_its_polygons_are_one(tmp_path, suffix) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "xml":
        path.write_text(
            '<ASAP_Annotations><Annotations><Annotation Name="0" Type="Polygon" PartOfGroup="a"><Coordinates>'
            '<Coordinate Order="0" X="1.5" Y="2"/><Coordinate Order="1" X="30" Y="2"/>'
            '<Coordinate Order="2" X="30" Y="35"/></Coordinates></Annotation></Annotations></ASAP_Annotations>'
        )
    else:
        ring = [[1.5, 2], [30, 2], [30, 35], [1.5, 2]]
        path.write_text(
            '{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [' + str(ring) + ']}, "properties": '
            '{"classification": {"name": "a"}}}'
        )
    plane = open_mask(path, SLIDE, ["a"]).read(WHOLE)[0]
    np.testing.assert_array_equal(plane, by_even_odd([("a", [[(1.5, 2), (30, 2), (30, 35)]])]))
    assert read_annotations(path).names == ("a",)
