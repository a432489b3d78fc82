"""Regions and holes of a mask against `scipy.ndimage`, in bands of any height, and the memory that they take."""

import tracemalloc

import numpy as np
import pytest
import torch
from scipy import ndimage

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import fill_holes, find_regions, open_image, regions
from gigagrad.images.image import Image


def random_mask(draw, values=1):
    """A plane of up to 24 px a side with any density, and how many pixels a band has."""
    shape = draw.integers(1, 24, 2)
    plane = np.where(draw.random(shape) < draw.random(), draw.integers(1, values, shape, endpoint=True), 0)
    return plane.astype(np.uint8), int(draw.integers(1, 200))


def whole(image):
    return np.asarray(image.read(Box.whole(*image.shape[1:])))[0]


def test_regions_and_holes_are_scipy_s(monkeypatch):
    draw = np.random.default_rng(0)
    for number in range(500):
        plane, band = random_mask(draw)
        monkeypatch.setattr(regions, "_BAND_PX", band)
        corners = bool(number % 2)
        expected, count = ndimage.label(plane, np.ones((3, 3)) if corners else None)
        found = find_regions(open_image(plane), corners=corners)
        assert np.array_equal(whole(found), expected)
        assert np.array_equal(found.areas, np.bincount(expected.ravel(), minlength=count + 1)[1:])
        slices = [(y.start, x.start, y.stop, x.stop) for y, x in ndimage.find_objects(expected)]
        assert list(map(tuple, found.bounds_of.tolist())) == slices
        if count:
            middle = np.array(ndimage.center_of_mass(plane, expected, range(1, count + 1))) + 0.5
            np.testing.assert_allclose(found.centroids, middle, rtol=1e-12)
        assert np.array_equal(whole(fill_holes(open_image(plane))), ndimage.binary_fill_holes(plane))


def test_neighbours_perimeters_and_means_are_those_of_single_pixels(monkeypatch):
    draw = np.random.default_rng(1)
    for _ in range(60):
        plane, band = random_mask(draw, 3)
        monkeypatch.setattr(regions, "_BAND_PX", band)
        colours = draw.integers(0, 256, (2, *plane.shape), np.uint8)
        found = find_regions(open_image(plane), min_area_px=2, seen=open_image(colours))
        labels = np.pad(whole(found), 1)
        assert np.array_equal(plane[labels[1:-1, 1:-1] > 0], found.values[labels[labels > 0] - 1])
        edges = np.concatenate(
            [
                np.stack((labels[1:].ravel(), labels[:-1].ravel())),
                np.stack((labels[:, 1:].ravel(), labels[:, :-1].ravel())),
            ],
            axis=1,
        )
        edges = np.sort(edges[:, edges[0] != edges[1]], axis=0)
        assert np.array_equal(found.perimeters, np.bincount(edges.ravel(), minlength=len(found) + 1)[1:])
        pairs, borders = np.unique(edges[:, edges[0] > 0] - 1, axis=1, return_counts=True)
        assert np.array_equal(found.pairs, pairs.T)
        assert np.array_equal(found.borders, borders)
        for number, mean in enumerate(found.means, 1):
            np.testing.assert_allclose(mean, colours[:, labels[1:-1, 1:-1] == number].mean(axis=1), rtol=1e-12)


@pytest.mark.parametrize("dtype", [bool, np.uint16, np.int64])
def test_masks_of_any_integers_have_regions(dtype):
    plane = (np.arange(35).reshape(5, 7) % 3 > 0).astype(dtype)
    assert np.array_equal(whole(find_regions(open_image(plane))), ndimage.label(plane)[0])
    ring = np.pad(np.zeros((2, 2), dtype), 1, constant_values=1)
    for filled in (fill_holes(open_image(ring)), fill_holes(open_image(torch.from_numpy(ring)))):
        assert filled.dtype == dtype
        assert np.array_equal(filled.read(Box(-1, 0, 4, 4))[0], np.pad(np.ones((4, 4), dtype), ((1, 0), (0, 0))))


def test_a_hole_gets_the_class_around_it_and_large_ones_may_stay():
    plane = np.zeros((12, 20), np.uint8)
    plane[1:11, 1:9], plane[1:11, 10:18] = 2, 5
    plane[3:5, 3:5], plane[3:9, 12:16] = 0, 0
    filled = whole(fill_holes(open_image(plane)))
    assert [int((filled == value).sum()) for value in (2, 5)] == [80, 80]
    assert int((whole(fill_holes(open_image(plane), max_area_px=4)) > 0).sum()) == 160 - 24


def test_regions_of_chosen_classes_are_measured_alone():
    plane = np.array([[1, 1, 2, 255], [1, 0, 2, 2]], np.uint8)
    found = find_regions(open_image(plane), [2, 255])
    assert (found.values.tolist(), found.areas.tolist(), found.pairs.tolist()) == ([2, 255], [3, 1], [[0, 1]])
    assert found.borders.tolist() == [2]


class Discs(Image):
    """A mask of a disc in each 64 px, made as it is read, and how many pixels were read."""

    def __init__(self, height, width):
        super().__init__(shape=(1, height, width), dtype=np.dtype(np.uint8), name="discs")
        self.pixels = 0

    def _read_inside(self, box):
        self.pixels += box.height * box.width
        y, x = (np.arange(first, stop) % 64 - 32 for first, stop in ((box.y0, box.y1), (box.x0, box.x1)))
        return (y[:, None] ** 2 + x**2 < 500).astype(np.uint8)[None]


def test_a_mask_is_read_once_and_memory_is_that_of_a_band(monkeypatch):
    """Eight times the height takes no more memory but for the table; 100 bytes for each region of a band."""
    monkeypatch.setattr(regions, "_BAND_PX", 1 << 18)
    peaks = []
    for height in (1024, 8192):
        mask = Discs(height, 1024)
        tracemalloc.start()
        found = find_regions(mask)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found) == height * 16 // 64
        assert mask.pixels == height * 1024 + 1
    assert peaks[1] - peaks[0] < 400 * 1792
    assert peaks[1] < 12 * (1 << 18)


def test_what_is_no_mask_is_refused(monkeypatch):
    with pytest.raises(ImageError, match="no mask of class ids: 3 channels of uint8; choose one with bands"):
        find_regions(open_image(np.zeros((3, 8, 8), np.uint8)))
    with pytest.raises(ImageError, match="1 channels of float32"):
        fill_holes(open_image(np.zeros((8, 8), np.float32)))
    with pytest.raises(ImageError, match="is 4 x 8 px and the mask array 8 x 8 px"):
        find_regions(open_image(np.zeros((8, 8), np.uint8)), seen=open_image(np.zeros((4, 8), np.uint8)))
    monkeypatch.setattr(regions, "_MOST", 3)
    with pytest.raises(ImageError, match="more than 3 regions down to row 8: it is noise"):
        find_regions(open_image(np.eye(8, dtype=np.uint8)))
