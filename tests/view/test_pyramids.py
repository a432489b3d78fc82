"""Tiles of every size, of files with pyramids and without, in bounded memory."""

import numpy as np
import pytest
import tifffile

from gigagrad.boxes import Box
from gigagrad.images import open_image
from gigagrad.images.tiff import TiffImage
from gigagrad.images.views import ArrayImage
from gigagrad.masks import ClassTable, Outlines
from gigagrad.view import pyramids
from gigagrad.view.pyramids import (
    FALSE,
    MISSED,
    OTHER_CLASS,
    TILE,
    ImagePyramid,
    MadePyramid,
    OutlinePyramid,
    errors,
    nearest,
)


@pytest.fixture
def colours():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (3, 2 * TILE + 77, 3 * TILE + 5), np.uint8)


def whole(pyramid, level):
    """Put a level together from its tiles, as a page does."""
    height, width = pyramid.shapes[level]
    canvas = None
    for row in range(-(-height // TILE)):
        for column in range(-(-width // TILE)):
            box = pyramid.tile(level, column, row)
            pixels = pyramid.read(level, box)
            canvas = np.zeros((len(pixels), height, width), pixels.dtype) if canvas is None else canvas
            canvas[:, box.y0 : box.y1, box.x0 : box.x1] = pixels
    assert pyramid.tile(level, -(-width // TILE), 0) is None
    assert pyramid.tile(level, 0, -(-height // TILE)) is None
    return canvas


def halved(pixels):
    padded = np.pad(pixels, [(0, 0), (0, pixels.shape[1] % 2), (0, pixels.shape[2] % 2)], mode="edge").astype(int)
    quarter = padded[:, ::2, ::2] + padded[:, 1::2, ::2] + padded[:, ::2, 1::2] + padded[:, 1::2, 1::2]
    return ((quarter + 2) // 4).astype(pixels.dtype)


@pytest.mark.parametrize(
    ("keeping", "channels", "dtype"),
    [(True, 3, "uint8"), (False, 3, "uint8"), (True, 1, "uint8"), (True, 2, "uint8"), (True, 1, "uint16")],
)
def test_levels_that_no_file_has_are_means_of_the_one_above(colours, keeping, channels, dtype, monkeypatch):
    if not keeping:
        monkeypatch.setattr(pyramids, "_KEPT_BYTES", 0)
    colours = colours[:channels].astype(dtype) * (1 if dtype == "uint8" else 257)
    pyramid = ImagePyramid(ArrayImage(colours))
    assert pyramid.shapes == ((1101, 1541), (551, 771), (276, 386))
    expected = colours
    for level in range(len(pyramid.shapes)):
        np.testing.assert_array_equal(whole(pyramid, level), expected)
        expected = halved(expected)


def test_class_ids_are_never_averaged(colours):
    ids = colours[:1] // 100
    pyramid = ImagePyramid(ArrayImage(ids), ids=True)
    np.testing.assert_array_equal(whole(pyramid, 2), ids[:, ::2, ::2][:, ::2, ::2])


def test_a_file_s_own_levels_are_read_as_they_are(jpeg_slide):
    with open_image(jpeg_slide) as slide:
        pyramid = ImagePyramid(slide)
        assert pyramid.shapes == tuple(level.shape for level in slide.levels)
        with slide.at_level(2) as small:
            np.testing.assert_array_equal(whole(pyramid, 2), small.read(Box.whole(*small.shape[1:])))
        pyramid.close()
        assert slide.read(Box(0, 0, 1, 1)) is not None


@pytest.mark.parametrize(("held", "side"), [(True, 128), (False, 64)])
def test_coarse_levels_of_wavelets_are_decoded_from_a_part_of_them(held, side, tmp_path, monkeypatch):
    """They are about the means of the level above, and nothing is decoded whole for them; from levels that stay in
    memory coarser ones are made."""
    monkeypatch.setattr(pyramids, "CACHE_BYTES", 2**25 if held else 0)
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 256, (9, 13, 3), np.uint8)
    pixels = np.kron(patches, np.ones((128, 128, 1), np.uint8))[:1101, :1541]
    given = {"photometric": "rgb", "compression": "jpeg2000", "compressionargs": {"level": 60, "reversible": False}}
    tifffile.imwrite(tmp_path / "slide.tif", pixels, tile=(256, 256), **given)
    with open_image(tmp_path / "slide.tif") as slide:
        pyramid = ImagePyramid(slide)
        read: list[np.ndarray] = []
        monkeypatch.setattr(TiffImage, "_decode", recorded(TiffImage._decode, read))
        coarse = whole(pyramid, 2)
        assert read
        assert all(tile.shape == (side, side, 3) for tile in read)
        expected = halved(halved(pixels.transpose(2, 0, 1)))
        assert coarse.shape == expected.shape
        assert np.abs(coarse.astype(int) - expected).mean() < 5
        assert len(read) == 5 * 7, "each tile of the file once"
        ids = ImagePyramid(slide, ids=True)
        np.testing.assert_array_equal(whole(ids, 2), whole(ids, 0)[:, ::2, ::2][:, ::2, ::2])
        pyramid.close()
        assert slide.read(Box(0, 0, 1, 1)) is not None


def recorded(method, results):
    def call(self, *given):
        results.append(method(self, *given))
        return results[-1]

    return call


def test_between_distant_levels_one_is_made():
    class Quartered(ArrayImage):
        def __init__(self, array):
            super().__init__(array)
            object.__setattr__(self, "levels", open_levels(array.shape[1:], array.shape[1] // 4, array.shape[2] // 4))

    def open_levels(full, height, width):
        from gigagrad.images.pixels import levels_of

        return levels_of([full, (height, width)])

    pyramid = ImagePyramid(Quartered(np.zeros((1, 4000, 6000), np.uint8)))
    assert pyramid.shapes == ((4000, 6000), (2000, 3000), (1000, 1500), (500, 750), (250, 375))
    assert pyramid._stored == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_box_anywhere_is_put_together_from_tiles(colours):
    pyramid = ImagePyramid(ArrayImage(colours))
    expected = np.pad(halved(colours), [(0, 0), (9, 9), (9, 9)], constant_values=255)
    got = pyramid.read(1, Box(-9, -9, 560, 780))
    np.testing.assert_array_equal(got, expected[:, :569, :789])


def test_each_pixel_of_a_file_without_a_pyramid_is_decoded_once_for_its_coarse_tiles(colours, monkeypatch):
    image = ArrayImage(np.tile(colours[:1], (1, 8, 6)))
    read = []

    def counted(self, box):
        read.append(box.area)
        return self.view(box)

    monkeypatch.setattr(type(image), "_read_inside", counted)
    pyramid = ImagePyramid(image)
    for level in reversed(range(2, len(pyramid.shapes))):
        whole(pyramid, level)
    assert sum(read) == image.height * image.width


def test_what_is_held_of_made_tiles_is_bounded(colours, monkeypatch):
    monkeypatch.setattr(pyramids, "_KEPT_BYTES", 3 * TILE * TILE)
    pyramid = ImagePyramid(ArrayImage(np.tile(colours[:1], (1, 8, 6))))
    coarse = whole(pyramid, len(pyramid.shapes) - 1)
    held = [made.held_bytes for made in pyramid._made]
    assert held[0] == held[1] == 0
    assert 0 < max(held) <= 3 * TILE * TILE
    np.testing.assert_array_equal(whole(pyramid, len(pyramid.shapes) - 1), coarse)


def square(x0, y0, x1, y1):
    return [[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]]


def test_outlines_are_painted_at_every_size(colours):
    slide = ArrayImage(colours)
    outlines = Outlines.pack([("b", square(0, 0, 400, 400)), ("a", square(800, 400, 1200, 1000))], "test")
    pyramid = OutlinePyramid(outlines, ClassTable.of_names(outlines.names), slide, ImagePyramid(slide).shapes)
    finest, coarse = whole(pyramid, 0)[0], whole(pyramid, 2)[0]
    assert finest[10, 10] == 2
    assert finest[500, 900] == 1
    assert finest[399, 399] == 2
    assert finest[400, 400] == 255
    assert coarse[10, 10] == 2
    assert coarse[500 // 4, 900 // 4] == 1
    assert coarse[110, 110] == 255


def test_errors_are_told_by_kind_and_what_is_ignored_is_none():
    predicted = np.array([[[0, 1, 1, 0, 1, 2, 1]]], np.uint8)
    label = np.array([[[0, 1, 0, 1, 2, 2, 255]]], np.uint8)
    assert errors(predicted, label)[0, 0].tolist() == [0, 1, FALSE, MISSED, OTHER_CLASS, 1, 0]


def test_a_label_of_another_resolution_is_compared_by_its_nearest_pixels(colours):
    label = (np.arange(300 * 400).reshape(1, 300, 400) % 3).astype(np.uint8)
    predicted = np.kron(label, np.ones((1, 4, 4), np.uint8))
    predicted[:, 8:12, 8:12] = 0
    pyramid = MadePyramid(
        errors, ImagePyramid(ArrayImage(predicted), ids=True), ImagePyramid(ArrayImage(label), ids=True)
    )
    expected = errors(predicted, np.kron(label, np.ones((1, 4, 4), np.uint8)))
    np.testing.assert_array_equal(whole(pyramid, 0), expected)


def test_nearest_pixels_outside_are_background():
    pyramid = ImagePyramid(ArrayImage(np.ones((1, 10, 10), np.uint8)), ids=True)
    got = nearest(pyramid, (20, 20), Box(-2, -2, 22, 22))[0]
    assert got[2:-2, 2:-2].all()
    assert got.sum() == 400
