"""Annotation files as QuPath and ASAP save them, and everything else that may bear their suffix."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.errors import GigagradError, ImageError
from gigagrad.masks import read_annotations

SQUARE = [[0, 0], [10, 0], [10, 10], [0, 10], [0, 0]]
HOLE = [[2, 2], [4, 2], [4, 4], [2, 4], [2, 2]]


def feature(kind="Polygon", coordinates=(SQUARE,), **properties):
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": properties}


def write(tmp_path, content, name="a.geojson"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_collection_of_qupath(tmp_path) -> None:
    collection = {
        "type": "FeatureCollection",
        "features": [
            feature(objectType="annotation", classification={"name": "Tumor", "color": [200, 0, 0]}),
            feature("MultiPolygon", [[SQUARE, HOLE], [SQUARE]], classification={"names": ["x"], "name": "Stroma"}),
            feature(coordinates=[SQUARE, HOLE]),
            feature(classification="Tumor"),
            feature("Point", [3, 4], classification={"name": "Point"}),
            feature("LineString", [[3, 4], [5, 6]]),
            {"type": "Feature", "geometry": None, "properties": None},
        ],
    }
    outlines = read_annotations(write(tmp_path, collection))
    assert [outlines.names[index] for index in outlines.class_of] == [
        "Tumor",
        "Stroma",
        "Stroma",
        "Unclassified",
        "Tumor",
    ]
    assert outlines.skipped == 3
    assert np.diff(outlines.starts).tolist() == [5, 10, 5, 10, 5]
    assert outlines.closing.sum() == 7
    assert outlines.bounds().tolist() == [[0, 0, 10, 10]] * 5


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ({"names": ["Tumor", "Positive"], "color": [1, 2, 3]}, "Tumor: Positive"),
        ({"names": ["Tumor"]}, "Tumor"),
        ({"name": "Tumor: Negative", "colorRGB": -1}, "Tumor: Negative"),
        (" Tumor ", "Tumor"),
        ({"names": []}, "Unclassified"),
        ({"color": [1, 2, 3]}, "Unclassified"),
        (None, "Unclassified"),
    ],
)
def test_classes_are_called_as_qupath_shows_them(tmp_path, kind, name) -> None:
    assert read_annotations(write(tmp_path, feature(classification=kind))).names == (name,)


def test_what_lies_within_others_in_qupath_s_hierarchy(tmp_path) -> None:
    inner = feature(classification={"name": "Vessel"})
    outlines = read_annotations(write(tmp_path, feature(classification={"name": "Tumor"}, childObjects=[inner])))
    assert outlines.names == ("Tumor", "Vessel")


@pytest.mark.parametrize(
    "content",
    [
        [feature(), feature()],
        feature(coordinates=[SQUARE]) | {"geometry": {"type": "MultiPolygon", "coordinates": [[SQUARE], [SQUARE]]}},
        {"type": "GeometryCollection", "geometries": [{"type": "Polygon", "coordinates": [SQUARE]}] * 2},
        "\ufeff" + json.dumps({"features": [feature(), feature()], "type": "FeatureCollection", "crs": None}),
        {"type": "MultiPolygon", "coordinates": [[SQUARE[:-1]], [SQUARE]]},
    ],
)
def test_all_forms_of_geojson(tmp_path, content) -> None:
    outlines = read_annotations(write(tmp_path, content))
    assert len(outlines) == 2
    assert len(outlines.points) == 10


def test_a_collection_of_asap(tmp_path) -> None:
    def annotation(kind, group, points):
        corners = "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}" />' for k, (x, y) in enumerate(points))
        return f'<Annotation Type="{kind}" PartOfGroup="{group}"><Coordinates>{corners}</Coordinates></Annotation>'

    text = (
        '<?xml version="1.0"?><ASAP_Annotations><Annotations>'
        + annotation("Polygon", "Tumor", SQUARE[:4])
        + annotation("Spline", "None", SQUARE[:3])
        + annotation("Dot", "Tumor", SQUARE[:1])
        + annotation("Rectangle", "Tumor", SQUARE[:4])
        + '</Annotations><AnnotationGroups><Group Name="Tumor" PartOfGroup="None" Color="#f00"/></AnnotationGroups>'
        "</ASAP_Annotations>"
    )
    outlines = read_annotations(write(tmp_path, text, "a.xml"))
    assert [outlines.names[index] for index in outlines.class_of] == ["Tumor", "Unclassified", "Tumor"]
    assert outlines.skipped == 1
    assert np.diff(outlines.starts).tolist() == [5, 4, 5]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.geojson", "", "is no GeoJSON"),
        ("a.geojson", "hello", "is no GeoJSON"),
        ("a.geojson", '{"type": "FeatureCollection", "features": [{"type"', "is no GeoJSON"),
        ("a.geojson", "{}", "has no type"),
        ("a.geojson", "[1]", "has no type"),
        ("a.geojson", {"type": "Feature", "geometry": {"type": "Circle"}}, "without a geometry"),
        ("a.geojson", feature(coordinates=[[[0, 0], ["a", 1], [2, 2], [3, 3]]]), "not pairs of numbers"),
        ("a.geojson", feature(coordinates=[[[0], [1], [2], [3]]]), "not pairs of numbers"),
        ("a.geojson", feature(coordinates=[5]), "not lists of points"),
        ("a.geojson", feature(coordinates=[[[0, 0], [1, 1e999], [2, 2], [3, 3]]]), "is no GeoJSON"),
        ("a.xml", "", "is no XML"),
        ("a.xml", "<Annotations/>", "another kind"),
        ("a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><ASAP_Annotations/>', "defines entities"),
        (
            "a.xml",
            '<ASAP_Annotations><Annotation Type="Polygon"><Coordinate X="nan" Y="1"/></Annotation></ASAP_Annotations>',
            "no finite number",
        ),
        (
            "a.xml",
            '<ASAP_Annotations><Annotation Type="Polygon"><Coordinate X="a" Y="1"/></Annotation></ASAP_Annotations>',
            "without numbers X and Y",
        ),
    ],
)
def test_another_kind_of_file_gets_one_clear_line(tmp_path, name, content, words) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        read_annotations(write(tmp_path, content, name))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ImageError, match=r"none\.xml: No such file"):
        read_annotations(tmp_path / "none.xml")


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "features", "geometry", "coordinates", "properties"]), inner, max_size=4
        )
    ),
)


@given(values)
def test_no_json_ends_in_a_traceback(tmp_path_factory, value) -> None:
    path = write(tmp_path_factory.mktemp("any"), value)
    with suppress(GigagradError):
        read_annotations(path)
