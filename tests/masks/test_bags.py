"""`open_bag`: which patches of a slide there are, and that their pixels are the slide's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tifffile

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError, TargetError
from gigagrad.images import open_image
from gigagrad.masks import read_annotations


def pixels(image, corner, side):
    x, y = corner
    return np.asarray(image.read(Box(int(y), int(x), int(y) + side, int(x) + side)))


@pytest.mark.parametrize("coords", [None, np.array([[880, 20], [-30, 5], [400, 300], [850, 650]])])
def test_patches_of_a_level_as_it_is_are_its_pixels(jpeg_slide, coords):
    with gg.open_bag(jpeg_slide, 64, coords=coords, tissue=None) as bag, open_image(jpeg_slide) as slide:
        assert bag.shape == (len(bag.coords), 3, 64, 64)
        assert (bag.mpp, bag.patch_size_level0, str(bag.dtype)) == (slide.mpp, 64, "uint8")
        for index, corner in enumerate(bag.coords):
            assert np.array_equal(bag.read(index, index + 1)[0], pixels(slide, corner, 64))
        assert np.array_equal(bag.read(0, len(bag))[-1], bag.read(len(bag) - 1, len(bag))[0])


def test_only_patches_with_tissue_are_taken(jpeg_slide):
    with gg.open_bag(jpeg_slide, 64) as bag, gg.open_bag(jpeg_slide, 64, tissue=None) as everything:
        assert len(everything) == 11 * 15  # the last ones over the edge
        assert everything.over_edge.sum() == 11 + 15 - 1
        # Rows from 600 and columns from 800 on are white.
        assert set(map(tuple, bag.coords)) == {(x, y) for x in range(0, 800, 64) for y in range(0, 600, 64)}
        assert bag.tissue_share.min() >= 0.1


def test_a_slide_without_tissue_has_no_bag():
    with pytest.raises(ImageError, match=r"no patch of 64 px .* lower least_tissue"):
        gg.open_bag(np.full((3, 256, 256), 255, np.uint8), 64, mpp=None)


def test_several_slides_are_one_bag(jpeg_slide):
    with gg.open_bag([jpeg_slide, jpeg_slide], 64) as case, gg.open_bag(jpeg_slide, 64) as bag:
        assert len(case) == 2 * len(bag)
        assert case.slide_of_patch.tolist() == [0] * len(bag) + [1] * len(bag)
        middle = np.concatenate([bag.read(len(bag) - 2, len(bag)), bag.read(0, 3)])
        assert np.array_equal(case.read(len(bag) - 2, len(bag) + 3), middle)


def test_a_resolution_is_read_from_the_nearest_level(jpeg_slide):
    with gg.open_bag(jpeg_slide, 64, 1.0) as bag, open_image(jpeg_slide, level=1) as level:
        assert (bag.mpp, bag.patch_size_level0) == (1.0, 128)
        for index, corner in enumerate(bag.coords // 2):
            assert np.array_equal(bag.read(index, index + 1)[0], pixels(level, corner, 64))
    with gg.open_bag(jpeg_slide, 64, 1.5) as bag:
        assert (bag.mpp, bag.patch_size_level0, bag.shape[1:]) == (1.5, 192, (3, 64, 64))


def test_an_unknown_resolution_is_told():
    slide = np.zeros((3, 128, 128), np.uint8)
    with pytest.raises(ImageError, match="no micrometres per pixel"):
        gg.open_bag(slide, 64, tissue=None)
    with gg.open_bag(slide, 64, None, tissue=None) as bag:
        assert (len(bag), bag.mpp) == (4, None)
    with gg.open_bag(open_image(slide, mpp=0.25), 64, tissue=None) as bag:
        assert (len(bag), bag.mpp, bag.patch_size_level0) == (1, 0.5, 128)


def test_steps_are_in_pixels_of_patches(jpeg_slide):
    with gg.open_bag(jpeg_slide, 64, 1.0, step=32, tissue=None) as bag:
        assert {*np.diff(np.unique(bag.coords[:, 0]))} == {64}
        assert bag.overlap == 32


def test_patches_over_the_edge_can_be_left_out(jpeg_slide):
    with gg.open_bag(jpeg_slide, 64, tissue=None, whole_only=True) as bag:
        assert len(bag) == 10 * 14
        assert not bag.over_edge.any()
    with pytest.raises(ImageError, match=r"no patch of 1024 px of level 0 lies wholly in small of 700 x 900 px"):
        gg.open_bag(jpeg_slide, 1024, tissue=None, whole_only=True)


SQUARE = [[100, 100], [400, 100], [400, 300], [100, 300], [100, 100]]
INSIDE = {(x, y) for x in range(64, 400, 64) for y in range(64, 300, 64)}


def geojson(path, **members):
    outline = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [SQUARE]}}
    path.write_text(json.dumps({"type": "FeatureCollection", **members, "features": [outline]}))
    return path


@pytest.mark.parametrize("members", [
    {},
    {"crs": {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::3857"}}},  # as TRIDENT writes it
])  # fmt: skip
def test_outlines_say_what_is_tissue(members, jpeg_slide, tmp_path):
    path = geojson(tmp_path / "tissue.geojson", **members)
    with gg.open_bag(jpeg_slide, 64, tissue=path, least_tissue=0) as bag:
        assert set(map(tuple, bag.coords.tolist())) == INSIDE
    with gg.open_bag(jpeg_slide, 64, tissue=read_annotations(path), least_tissue=1) as bag:
        assert set(map(tuple, bag.coords.tolist())) == {
            (x, y) for x, y in INSIDE if 100 <= x <= 336 and 100 <= y <= 236
        }


@pytest.mark.parametrize("value", [1, 7, 255])
@pytest.mark.parametrize("scale", [1, 4])
def test_masks_say_what_is_tissue(value, scale, jpeg_slide):
    mask = np.zeros((700 // scale, 900 // scale), np.uint8)
    mask[100 // scale : 300 // scale, 100 // scale : 400 // scale] = value
    with gg.open_bag(jpeg_slide, 64, tissue=mask) as bag, gg.open_bag(jpeg_slide, 64, tissue=mask > 0) as same:
        assert set(map(tuple, bag.coords.tolist())) == {
            (x, y)
            for x, y in INSIDE
            if (min(x + 64, 400) - max(x, 100)) * (min(y + 64, 300) - max(y, 100)) >= 0.1 * 64**2
        }
        assert np.array_equal(bag.coords, same.coords)


def test_a_mask_of_another_slide_is_refused(jpeg_slide):
    with pytest.raises(TargetError, match="must show the same part"):
        gg.open_bag(jpeg_slide, 64, tissue=np.ones((100, 300), np.uint8))


@pytest.mark.parametrize(("attributes", "size", "mpp", "found"), [
    ({"patch_size": 64, "patch_size_level0": 128}, 64, 1.0, (128, 1.0)),
    ({"patch_size": 64, "patch_size_level0": 128}, 128, 0.5, (128, 0.5)),  # the same field, sampled otherwise
    ({"patch_size": 64, "patch_size_level0": 140}, 64, 1.0, (140, 1.09375)),  # what a magnification may mean
    ({"patch_size": 64, "patch_size_level0": 128}, 64, None, None),
    ({"patch_size": 64, "patch_size_level0": 128}, 64, 0.5, None),
    ({"patch_size": 64, "patch_size_level0": 128}, 72, 1.0, None),
    ({"patch_size": 64, "patch_level": 1}, 64, 1.0, (128, 1.0)),
    ({"patch_size": 64, "patch_level": 1}, 64, 0.5, None),
    ({}, 64, 0.5, (64, 0.5)),
])  # fmt: skip
def test_files_say_how_large_patches_are(attributes, size, mpp, found, jpeg_slide, tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "small_patches.h5"
    with h5py.File(path, "w") as file:
        file["coords"] = np.array([[0, 0], [128, 64]])
        file["coords"].attrs.update(attributes)
    if found is None:
        with pytest.raises(
            ImageError, match=r"patches of 64 px that are 128 px of level 0; .* open them with size=64, mpp=1"
        ):
            gg.open_bag(jpeg_slide, size, mpp, coords=path)
        return
    with gg.open_bag(jpeg_slide, size, mpp, coords=path) as bag:
        assert (bag.patch_size_level0, bag.mpp) == found
        assert bag.coords.tolist() == [[0, 0], [128, 64]]


def test_patches_outside_the_slide_are_refused(jpeg_slide):
    with gg.open_bag(jpeg_slide, 64, coords=np.array([[-63, 699], [899, -63]])) as bag:
        assert bag.over_edge.all()
    for corner in ([-64, 0], [900, 0], [0, 700], [0, -64]):
        with pytest.raises(ImageError, match="1 of 2 patches outside small of 900 x 700 px"):
            gg.open_bag(jpeg_slide, 64, coords=np.array([[0, 0], corner]))


@pytest.mark.parametrize(("settings", "told"), [
    ({"least_tissue": 1.5}, "got least_tissue 1.5"),
    ({"size": 0}, "got patches of 0 px"),
    ({"mpp": -1.0}, "at -1.0 um/px"),
    ({"mpp": None, "size": 0}, "got patches of 0 px"),
    ({"step": 0}, "got step 0"),
    ({"step": 3, "coords": np.zeros((1, 2), int)}, "a step or a mask"),
    ({"tissue": "mask.tif", "coords": np.zeros((1, 2), int)}, "a step or a mask"),
    ({"tissue": ["auto", None]}, "got tissue of 2 slides for 1"),
])  # fmt: skip
def test_settings_that_are_none_are_refused(settings, told, jpeg_slide):
    with pytest.raises(ConfigError, match=told):
        gg.open_bag(jpeg_slide, **settings)


def test_lists_say_something_of_each_slide(jpeg_slide):
    corners = [np.array([[0, 0]]), np.array([[64, 64], [0, 64]])]
    with gg.open_bag((jpeg_slide, jpeg_slide), 64, coords=corners) as case:
        assert case.coords.tolist() == [[0, 0], [0, 64], [64, 64]]
        assert case.rows.tolist() == [0, 1, 0]
        assert case.patch_size_level0.tolist() == [64] * 3
    with pytest.raises(ConfigError, match="got coords of 1 slides for 2; expected a list"):
        gg.open_bag([jpeg_slide, jpeg_slide], 64, coords=corners[0])
    with pytest.raises(ImageError, match="empty list of slides"):
        gg.open_bag([])


@pytest.mark.parametrize("mpp", [0.5, 1.0])
def test_a_bag_closes_what_it_has_opened(mpp, jpeg_slide):
    with open_image(jpeg_slide) as slide:
        with gg.open_bag(slide, 64, mpp) as bag:
            bag.read(0, 1)
        slide.read(Box(0, 0, 1, 1))
        with pytest.raises(ImageError, match="is closed"):
            bag.read(0, 1)
    bag = gg.open_bag(jpeg_slide, 64, mpp)
    image = bag._image
    bag.close()
    with pytest.raises(ImageError, match="is closed"):
        image.read(Box(0, 0, 1, 1))


def test_an_image_is_opened_at_any_level(jpeg_slide):
    with open_image(jpeg_slide, level=2) as coarse, gg.open_bag(coarse, 64) as bag, gg.open_bag(jpeg_slide, 64) as same:
        assert np.array_equal(bag.coords, same.coords)
        assert (bag.mpp, bag.level0_mpp, bag.level0_shape) == (0.5, 0.5, (700, 900))
        assert np.array_equal(bag.read(0, 5), same.read(0, 5))


def test_no_data_is_black(tmp_path):
    path = tmp_path / "gaps.tif"
    pixels_HWC = np.full((64, 64, 3), 9, np.uint8)
    pixels_HWC[:5] = 7
    tifffile.imwrite(path, pixels_HWC, photometric="rgb", extratags=[(42113, 2, 2, "7", True)])
    with gg.open_bag(path, 32, None, tissue=None) as bag:
        assert np.unique(bag.read(0, 1)[0, :, :5]).tolist() == [0]
        assert np.unique(bag.read(0, 1)[0, :, 5:]).tolist() == [9]


@pytest.mark.slides
@pytest.mark.parametrize("name", ["CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"])
def test_tissue_of_real_slides_is_found(name, real_slides):
    slide = open_image(real_slides / "slides" / f"{name}.svs", mpp=0.5)
    with slide, gg.open_bag(slide) as ours:
        for mask in (f"{name}.tissue.geojson", f"{name}.tissue01.tif"):
            with gg.open_bag(slide, tissue=real_slides / "masks" / mask) as theirs:
                both = {*map(tuple, ours.coords)} & {*map(tuple, theirs.coords)}
                assert len(both) >= 0.9 * max(len(ours), len(theirs))
