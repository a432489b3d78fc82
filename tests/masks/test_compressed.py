"""Annotations in `.gz` and `.zip`: the same outlines, and a bound on what becomes of a small file."""

from __future__ import annotations

import gzip
import json
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.errors import ImageError
from gigagrad.masks import is_annotation_file, read_annotations
from gigagrad.masks.annotations import annotation_stem
from tests.masks.test_annotations import feature

GEOJSON = json.dumps({"features": [feature(classification="Tumor"), feature(classification="Stroma")]}).encode()
XML = b"""<ASAP_Annotations><Annotations><Annotation Type="Polygon" PartOfGroup="Tumor"><Coordinates>
<Coordinate X="0" Y="0"/><Coordinate X="10" Y="0"/><Coordinate X="10" Y="10"/></Coordinates></Annotation></Annotations>
</ASAP_Annotations>"""


def zipped(path, *members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(("suffix", "content"), [(".geojson", GEOJSON), (".json", GEOJSON), (".xml", XML)])
def test_the_outlines_are_those_of_the_file_inside(tmp_path, suffix, content):
    plain = tmp_path / f"a.b{suffix}"
    plain.write_bytes(content)
    packed = tmp_path / f"a.b{suffix}.gz"
    packed.write_bytes(gzip.compress(content))
    archive = zipped(tmp_path / "a.b.zip", ("__MACOSX/._a", b"x"), ("sub/", b""), (f"sub/c{suffix}", content))
    stored = zipped(tmp_path / "A.B.ZIP", (f"c{suffix}", content), method=zipfile.ZIP_STORED)
    expected = read_annotations(plain)
    assert len(expected)
    for path in (packed, archive, stored):
        assert is_annotation_file(path)
        assert annotation_stem(path).lower() == "a.b"
        found = read_annotations(path)
        assert found.names == expected.names
        assert np.array_equal(found.points, expected.points)
    assert not is_annotation_file(tmp_path / "a.nii.gz")


def test_a_small_file_that_becomes_a_large_one_is_refused(tmp_path):
    huge = b'{"features": [' + b" " * (90 << 20) + b"]}"
    (tmp_path / "a.geojson.gz").write_bytes(gzip.compress(huge, 1))
    for path in (tmp_path / "a.geojson.gz", zipped(tmp_path / "a.zip", ("a.geojson", huge))):
        with pytest.raises(ImageError, match="becomes more than 100 times as long"):
            read_annotations(path)


@pytest.mark.parametrize(
    ("members", "method", "words"),
    [
        ((), 8, "holds 0 files"),
        ((("a.geojson", GEOJSON), ("b.geojson", GEOJSON)), 8, "holds 2 files"),
        ((("a.tif", GEOJSON),), 8, r"holds 1 files \(a.tif\)"),
        ((("a.geojson.gz", gzip.compress(GEOJSON)),), 8, "expected one, GeoJSON"),
        ((("a.geojson", GEOJSON),), zipfile.ZIP_LZMA, "in a way that is not read"),
    ],
)
def test_what_an_archive_must_not_be_is_said(tmp_path, members, method, words):
    with pytest.raises(ImageError, match=words):
        read_annotations(zipped(tmp_path / "a.zip", *members, method=method))


@given(at=st.integers(0, 400), bit=st.integers(0, 7), cut=st.booleans(), kind=st.sampled_from(("gz", "zip")))
def test_a_damaged_one_is_read_or_refused(tmp_path_factory, at, bit, cut, kind):
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / ("a.geojson.gz" if kind == "gz" else "a.zip")
    path.write_bytes(gzip.compress(GEOJSON)) if kind == "gz" else zipped(path, ("a.geojson", GEOJSON))
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at] ^= 1 << bit
    path.write_bytes(data[:at] if cut else data)
    with suppress(ImageError):
        assert len(read_annotations(path)) == 2
