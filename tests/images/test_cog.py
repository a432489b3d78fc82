"""Cloud-optimised GeoTIFF, as GDAL and map servers want it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import rasterio
import tifffile

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, WriteError
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.georeference import Georeference, geotiff_tags
from gigagrad.images.write import write_cog

SIDE = 1200
UTM = Georeference((10, 0, 5e5, 0, -10, 5.3e6), (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32633))
IDS = np.random.default_rng(0).integers(0, 4, (SIDE // 8, SIDE // 8), np.uint8).repeat(8, 0).repeat(8, 1)


@pytest.fixture
def pyramid(tmp_path):
    path, shape = tmp_path / "a.tif", (SIDE, SIDE, 1)
    return write_pyramid(path, [IDS], shape=shape, dtype=np.uint8, nearest=True, tags=geotiff_tags(UTM, 255))


def offsets(path):
    """Where the first tile of each level is, the largest first."""
    with tifffile.TiffFile(path) as tif:
        return [page.dataoffsets[0] for page in tif.pages]


@pytest.mark.parametrize("name", ["a.tif", "of another name.tif"])
def test_gdal_knows_it_as_one(pyramid, name) -> None:
    assert offsets(pyramid) == sorted(offsets(pyramid))
    path = write_cog(pyramid, pyramid.with_name(name), nearest=True)
    with rasterio.open(path) as file:
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert (file.crs.to_epsg(), file.transform[:6], file.nodata) == (32633, UTM.transform, 255)
        assert file.overviews(1) == [2, 4]
        np.testing.assert_array_equal(file.read(1), IDS)
        np.testing.assert_array_equal(file.read(1, out_shape=(SIDE // 4, SIDE // 4)), IDS[::4, ::4])
    found = offsets(path)
    assert found == sorted(found, reverse=True)
    with open_image(path) as image:
        assert image.georeference.transform == UTM.transform
        np.testing.assert_array_equal(image.read(Box.whole(SIDE, SIDE))[0], IDS)
    assert {entry.name for entry in path.parent.iterdir()} == {"a.tif", name}


def test_a_slide_from_nowhere_is_one_too(tmp_path) -> None:
    path = write_pyramid(tmp_path / "a.tif", [IDS], shape=(SIDE, SIDE, 1), dtype=np.uint8, nearest=True)
    assert offsets(write_cog(path, path, nearest=True)) == sorted(offsets(path), reverse=True)


def test_what_cannot_be_made_leaves_nothing_and_no_harm(pyramid, monkeypatch) -> None:
    before = pyramid.read_bytes()
    with pytest.raises(WriteError, match="as a cloud-optimised GeoTIFF"):
        write_cog(pyramid.with_name("missing.tif"), pyramid, nearest=True)
    assert pyramid.read_bytes() == before
    assert [entry.name for entry in pyramid.parent.iterdir()] == ["a.tif"]
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ConfigError, match=r"pip install 'gigagrad\[geo\]'"):
        write_cog(pyramid, pyramid, nearest=True)
