"""Smaller pictures that JPEG 2000 stores: about the means of squares, and exactly where those lie."""

from __future__ import annotations

import re

import imagecodecs
import numpy as np
import pytest
import tifffile

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image

SIZE = 700, 900


@pytest.fixture(scope="module")
def waves():
    """Red of vertical waves, green of horizontal ones, 128 px long: up to 5 levels steeper with each pixel."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    red, green = (np.rint(127.5 + 100 * np.sin(2 * np.pi * each / 128)) for each in (x, y))
    return np.stack([red, green, np.full(SIZE, 77.0)], axis=-1).astype(np.uint8)


@pytest.fixture(scope="module")
def slide(waves, tmp_path_factory):
    path = tmp_path_factory.mktemp("halved") / "waves.tif"
    options = {"reversible": False, "level": 60, "resolutions": 4}
    tifffile.imwrite(path, waves, tile=(256, 256), photometric="rgb", compression="jpeg2000", compressionargs=options)
    return path


def means(pixels_HWC, side):
    height, width = (length // side for length in pixels_HWC.shape[:2])
    whole = pixels_HWC[: height * side, : width * side].reshape(height, side, width, side, 3)
    return whole.mean((1, 3)).transpose(2, 0, 1)


def inner(shape, tile):
    """Tell pixels that lie inside of their tile, where a wavelet meets no border."""
    places = [np.arange(length) % tile for length in shape[1:]]
    rows, columns = ((at >= 3) & (at < tile - 3) & (np.arange(len(at)) < len(at) - 3) for at in places)
    return np.broadcast_to(rows[:, None] & columns[None], shape)


@pytest.mark.parametrize("halvings", [1, 2, 3])
def test_pixels_are_about_the_means_of_their_squares(slide, waves, halvings):
    side = 2**halvings
    with open_image(slide) as image:
        small = image.halved(halvings)
        assert small is not None
        assert small.shape == (3, -(-SIZE[0] // side), -(-SIZE[1] // side))
        expected = means(waves, side)
        got = np.asarray(small.read(Box.whole(*expected.shape[1:]))).astype(float)
        small.close()
    off = np.abs(got - expected)
    assert off.mean() < 2
    assert off[inner(off.shape, 256 // side)].max() <= 3  # half a pixel beside it there would be 10 and more


def test_a_box_anywhere_is_that_part_of_the_whole(slide):
    with open_image(slide) as image:
        small = image.halved(2)
        assert small is not None
        whole = np.pad(np.asarray(small.read(Box.whole(175, 225))), [(0, 0), (9, 9), (9, 9)], constant_values=255)
        for box in (Box(0, 0, 1, 1), Box(60, 60, 70, 130), Box(-9, 170, 20, 234), Box(174, 224, 184, 234)):
            part = box.shift(9, 9)
            np.testing.assert_array_equal(small.read(box), whole[:, part.y0 : part.y1, part.x0 : part.x1])
        small.close()
        with pytest.raises(ImageError, match="closed"):
            small.read(Box(0, 0, 1, 1))
        assert image.read(Box(0, 0, 1, 1)) is not None


def test_what_stores_no_smaller_pictures_has_none(slide, jpeg_slide, waves, tmp_path):
    with open_image(slide) as image:
        assert image.halved(4) is None, "its streams store three smaller ones"
    with open_image(jpeg_slide) as image:
        assert image.halved(2) is None
    for name, options in (("odd.tif", {"tile": (272, 272)}), ("nodata.tif", {"extratags": [(42113, 2, 2, "7", True)]})):
        given = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg2000", **options}
        tifffile.imwrite(tmp_path / name, waves, **given)
        with open_image(tmp_path / name) as image:
            assert image.halved(5 if name == "odd.tif" else 2) is None


def test_a_tile_that_stores_fewer_pictures_than_the_first_is_read_all_the_same(waves, tmp_path):
    tiles = []
    for row, column in np.ndindex(3, 4):
        tile = np.zeros((256, 256, 3), np.uint8)
        part = waves[256 * row : 256 * (row + 1), 256 * column : 256 * (column + 1)]
        tile[: part.shape[0], : part.shape[1]] = part
        sizes = 2 if (row, column) == (1, 1) else 4
        tiles.append(imagecodecs.jpeg2k_encode(tile, 60, codecformat="j2k", reversible=False, resolutions=sizes))
    given = {"shape": waves.shape, "dtype": np.uint8, "tile": (256, 256), "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "mixed.tif", iter(tiles), compression="jpeg2000", **given)
    with open_image(tmp_path / "mixed.tif") as image:
        small = image.halved(3)
        assert small is not None
        got = np.asarray(small.read(Box.whole(87, 112))).astype(float)
        small.close()
    off = np.abs(got - means(waves, 8))
    assert off[:, 35:61, 35:61].max() <= 5


def test_a_damaged_tile_is_told(slide, tmp_path):
    data = bytearray(slide.read_bytes())
    places = [match.start() for match in re.finditer(b"\xff\x4f\xff\x51", bytes(data))]
    data[places[1] + 4] ^= 0xFF
    (tmp_path / "broken.tif").write_bytes(data)
    with open_image(tmp_path / "broken.tif") as image:
        small = image.halved(2)
        assert small is not None
        small.read(Box(0, 0, 60, 60))
        with pytest.raises(ImageError, match="cannot decode the tile in row 0, column 1"):
            small.read(Box(0, 64, 60, 128))
        small.close()
