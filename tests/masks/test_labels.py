"""Several labels of each pixel: a channel for each, whatever they are made of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gigagrad.boxes import Box
from gigagrad.errors import TargetError
from gigagrad.images import open_image
from gigagrad.masks import IGNORED, LabelMap, open_mask

SIZE = 40
WHOLE = Box.whole(SIZE, SIZE)


@pytest.fixture
def slide():
    return open_image(np.zeros((3, SIZE, SIZE), np.uint8))


def square(name, y, x, side):
    ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}


def geojson(path, *squares):
    path.write_text(json.dumps({"type": "FeatureCollection", "features": list(squares)}))
    return path


def inside(y, x, side):
    plane = np.zeros((SIZE, SIZE), np.uint8)
    plane[y : y + side, x : x + side] = 1
    return plane


def test_outlines_that_overlap_are_all_there(slide, tmp_path):
    drawn = geojson(tmp_path / "a.geojson", square("a", 0, 0, 20), square("b", 10, 10, 20), square("dirt", 15, 0, 10))
    mask = open_mask(drawn, slide, {"a": 1, "b": 2, "dirt": "ignore", "unlabelled": 0}, labels=2)
    expected = np.stack([inside(0, 0, 20), inside(10, 10, 20)])
    expected[:, inside(15, 0, 10) == 1] = IGNORED
    np.testing.assert_array_equal(mask.read(WHOLE), expected)
    np.testing.assert_array_equal(mask.read(Box(8, 9, 30, 31)), expected[:, 8:30, 9:31])
    unsaid = open_mask(drawn, slide, {"a": 1, "b": 2}, labels=2).read(WHOLE)
    covered = (inside(0, 0, 20) | inside(10, 10, 20)) == 1
    assert (unsaid[:, ~covered] == IGNORED).all()
    np.testing.assert_array_equal(unsaid[:, covered], np.stack([inside(0, 0, 20), inside(10, 10, 20)])[:, covered])


def test_class_ids_become_channels(slide):
    ids = np.zeros((SIZE, SIZE), np.uint8)
    ids[:5], ids[5:10], ids[10:12] = 1, 3, IGNORED
    labels = open_mask(ids, slide, labels=3).read(WHOLE)
    assert labels[:, 0, 0].tolist() == [1, 0, 0]
    assert labels[:, 5, 0].tolist() == [0, 0, 1]
    assert labels[:, 10, 0].tolist() == [IGNORED] * 3
    assert not labels[:, 12:].any()
    with pytest.raises(TargetError, match="holds class 3, none of its 2 labels"):
        open_mask(ids, slide, labels=2).read(WHOLE)


REGIONS: dict[str, int | str] = {"whole": "1+2+3", "core": "3+2", "enhancing": 2, "4": "ignore"}


def test_regions_of_several_ids_are_labels(slide):
    ids = np.zeros((SIZE, SIZE), np.uint16)
    ids[:5], ids[5:10], ids[10:12], ids[12:14], ids[14:16] = 1, 2, 3, 4, IGNORED
    mask = open_mask(ids, slide, REGIONS, labels=3)
    by_row = {0: [1, 0, 0], 5: [1, 1, 1], 10: [1, 1, 0], 12: [IGNORED] * 3, 14: [IGNORED] * 3, 16: [0, 0, 0]}
    labels = mask.read(WHOLE)
    assert {row: labels[:, row, 7].tolist() for row in by_row} == by_row
    np.testing.assert_array_equal(mask.read(Box(3, 2, 15, 9)), labels[:, 3:15, 2:9])
    one = open_mask(ids, slide, {"whole": "1+2+3", "4": "ignore"}).read(WHOLE)
    np.testing.assert_array_equal(one, labels[:1])
    with pytest.raises(TargetError, match="holds class 5, none of its 3 labels"):
        open_mask(np.where(ids == 1, 5, ids), slide, REGIONS, labels=3).read(WHOLE)
    with pytest.raises(TargetError, match="has 3 channels and the model 2 output channels"):
        open_mask(ids, slide, REGIONS, labels=2)


def test_regions_become_a_label_map_as_nnunet_makes_it(slide):
    """The loop of its documentation: each region's id in turn, over what lies there."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (3, SIZE, SIZE), np.uint8)
    labels[:, 30:] = IGNORED
    expected = np.zeros((SIZE, SIZE), np.uint8)
    for region, number in enumerate((1, 3, 2)):
        expected[labels[region] == 1] = number
    expected[30:] = IGNORED
    ids = LabelMap(open_image(labels), [1, 3, 2])
    np.testing.assert_array_equal(ids.read(WHOLE)[0], expected)
    np.testing.assert_array_equal(ids.read(Box(-2, 20, 9, 50))[0, 2:, :20], expected[:9, 20:])


def test_a_mask_of_each_label(slide, tmp_path):
    one = 255 * inside(0, 0, 9)
    drawn = geojson(tmp_path / "b.geojson", square("whatever", 3, 3, 9), square("more", 20, 20, 5))
    mask = open_mask((one, drawn), slide, labels=2)
    np.testing.assert_array_equal(mask.read(WHOLE), [inside(0, 0, 9), inside(3, 3, 9) | inside(20, 20, 5)])
    assert mask.read(Box(-1, -1, 1, 1))[:, 0, 0].tolist() == [0, 0]


def test_masks_of_other_dtypes_and_sizes(slide):
    fine, coarse = inside(4, 4, 8), inside(4, 4, 8)[::2, ::2].astype(np.uint16)
    labels = open_mask([fine, coarse], slide, labels=2).read(WHOLE)
    np.testing.assert_array_equal(labels[0], labels[1])


def test_channels_of_one_mask(slide):
    channels = np.stack([255 * inside(0, 0, 9), 7 * inside(3, 3, 9)])
    mask = open_mask(channels, slide, labels=2)
    np.testing.assert_array_equal(mask.read(WHOLE), [inside(0, 0, 9), inside(3, 3, 9)])
    ignoring = open_mask(channels, slide, ["tumour=1", "255=ignore"], labels=2)
    assert ignoring.read(WHOLE)[:, 0, 0].tolist() == [IGNORED, 0]


@pytest.mark.parametrize("source", [np.zeros((3, SIZE, SIZE), np.uint8), (np.zeros((SIZE, SIZE), np.uint8),) * 3])
def test_other_numbers_of_channels_are_refused(slide, source):
    with pytest.raises(TargetError, match="has 3 channels and the model 2 output channels"):
        open_mask(source, slide, labels=2)
