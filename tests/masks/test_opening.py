"""`open_mask`: whatever resolution a mask has, whatever numbers are in it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import rasterio
import torch
from PIL import Image as Pillow

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError, TargetError
from gigagrad.images import open_image, write_pyramid
from gigagrad.masks import ClassTable, Outlines, open_mask
from gigagrad.masks.classes import class_names


@pytest.fixture
def slide():
    return open_image(np.zeros((3, 90, 120), np.uint8))


def write(folder, plane, name="m.png"):
    Pillow.fromarray(plane).save(folder / name)
    return folder / name


def test_a_mask_of_the_slides_size_is_itself(tmp_path, slide) -> None:
    plane = np.random.default_rng(0).integers(0, 3, (90, 120), np.uint8)
    with gg.open_mask(write(tmp_path, plane), slide) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], plane)


def pyramid(path, pixels) -> None:
    write_pyramid(path, [pixels], shape=pixels.shape, dtype=np.uint8, nearest=True, tile=64, levels=3)


@pytest.mark.parametrize("factor", [2, 3, 8])
def test_a_coarse_mask_counts_by_its_nearest_pixel(tmp_path, slide, factor) -> None:
    small = np.random.default_rng(1).integers(0, 5, (-(-90 // factor), -(-120 // factor)), np.uint8)
    with open_mask(write(tmp_path, small), slide) as mask:
        assert mask.shape == (1, 90, 120)
        rows = ((np.arange(90) + 0.5) * small.shape[0] / 90).astype(int)
        columns = ((np.arange(120) + 0.5) * small.shape[1] / 120).astype(int)
        expected = small[np.ix_(rows, columns)]
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], expected)
        np.testing.assert_array_equal(mask.read(Box(7, 11, 60, 70))[0], expected[7:60, 11:70])


def test_a_fine_mask_of_a_coarse_level(tmp_path) -> None:
    plane = np.kron(np.random.default_rng(2).integers(0, 3, (75, 100), np.uint8), np.ones((4, 4), np.uint8))
    pyramid(tmp_path / "s.tif", np.zeros((300, 400, 3), np.uint8))
    with open_image(tmp_path / "s.tif", level=2) as level, open_mask(write(tmp_path, plane), level) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(75, 100))[0], plane[2::4, 2::4])


def test_the_level_of_the_slides_size_is_taken(tmp_path, slide) -> None:
    plane = np.random.default_rng(3).integers(0, 2, (180, 240), np.uint8)
    pyramid(tmp_path / "m.tif", plane[..., None])
    with open_image(tmp_path / "m.tif", level=1) as level, open_mask(tmp_path / "m.tif", slide) as mask:
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120)), level.read(Box.whole(90, 120)))


def test_values_are_renamed(tmp_path, slide) -> None:
    plane = np.random.default_rng(4).choice(np.array([0, 1, 128, 255], np.uint8), (90, 120))
    with open_mask(write(tmp_path, plane), slide, {"255": 1, "1": 255, "128": "ignore"}) as mask:
        expected = np.array([{0: 0, 1: 255, 128: 255, 255: 1}[value] for value in plane.ravel()]).reshape(plane.shape)
        np.testing.assert_array_equal(mask.read(Box.whole(90, 120))[0], expected)


def test_arrays_and_tensors_are_masks_too(slide) -> None:
    plane = np.random.default_rng(5).integers(0, 3, (90, 120), np.uint8)
    for source in (plane, torch.from_numpy(plane), open_image(plane), np.kron(plane, np.ones((2, 2), np.uint8))):
        with open_mask(source, slide, {"2": 1}) as mask:
            np.testing.assert_array_equal(np.asarray(mask.read(Box.whole(90, 120)))[0], plane - (plane == 2))


def test_a_mask_of_something_else_is_refused(tmp_path, slide) -> None:
    with pytest.raises(TargetError, match="100 x 120 px and its slide 90 x 120 px; both must show the same part"):
        open_mask(write(tmp_path, np.zeros((100, 120), np.uint8)), slide)
    with pytest.raises(ImageError, match="does not exist"):
        open_mask(tmp_path / "none.png", slide)
    with pytest.raises(ConfigError, match="has no class id"):
        open_mask(write(tmp_path, np.zeros((90, 120), np.uint8)), slide, {"a": "b"})


def test_outlines_of_another_slide_are_refused(slide) -> None:
    far = Outlines.pack([("a", [[(500, 0), (600, 0), (600, 50)]])], "far")
    with pytest.raises(TargetError, match=r"lie from \(500, 0\) to \(600, 50\), outside their slide array of 90 x 120"):
        open_mask(far, slide)
    with pytest.raises(TargetError, match="no outline that covers an area"):
        open_mask(Outlines.pack([("a", [])], "empty"), slide)


def test_closing_closes_the_file(tmp_path, slide) -> None:
    for classes in (None, {"1": 2}):
        mask = open_mask(write(tmp_path, np.ones((45, 60), np.uint8)), slide, classes)
        mask.close()
        with pytest.raises(ImageError, match="closed"):
            mask.read(Box.whole(1, 1))


# Classes of outlines


@pytest.fixture
def drawn(tmp_path):
    """Squares of 20 px side by side, of the classes asked for."""

    def draw(*names):
        features = []
        for number, name in enumerate(names):
            x = 20 * number
            ring = [[x, 0], [x + 20, 0], [x + 20, 20], [x, 20], [x, 0]]
            about = {"objectType": "annotation", "classification": {"name": name}}
            geometry = {"type": "Polygon", "coordinates": [ring]}
            features.append({"type": "Feature", "geometry": geometry, "properties": about})
        path = tmp_path / "drawn.geojson"
        path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
        return path

    return draw


def squares(mask, count):
    """The values in the squares and behind the last one."""
    plane = np.asarray(mask.read(Box.whole(90, 120)))[0]
    return plane[10, 10 : 20 * count + 20 : 20].tolist()


def test_what_qupath_ignores_is_ignored(slide, drawn):
    path = drawn("Tumor", "Ignore*", "Region*", "Necrosis*")
    for classes in (None, {"Tumor": 1}, ClassTable.parse(["Tumor=1"])):
        with open_mask(path, slide, classes) as mask:
            assert squares(mask, 4) == [1, 255, 0, 255, 0]
            assert mask.nodata == 255
    with open_mask(path, slide, {"Tumor": 1, "Ignore*": 2, "Region*": 3, "Necrosis*": 0}) as mask:
        assert squares(mask, 4) == [1, 2, 3, 0, 255]
        assert mask.nodata is None
    with open_mask([path, np.zeros((90, 120), np.uint8)], slide, labels=2) as mask:
        assert squares(mask, 4) == [1, 255, 0, 255, 0]


def test_a_class_called_background_is_the_background(slide, drawn):
    with open_mask(drawn("Background", "Tumor", "Stroma"), slide) as mask:
        assert squares(mask, 3) == [0, 2, 1, 255]
    assert class_names(3, ClassTable.of_names(["Background", "Tumor", "Stroma"])) == ("Background", "Stroma", "Tumor")
    assert class_names(3, ClassTable.parse(["Background=1", "Tumor=2"])) == ("Class 0", "Background", "Tumor")


def test_names_that_no_outline_has_are_refused(slide, drawn):
    path = drawn("Tumor", "Stroma")
    for classes in ({"tumor": 1}, ["tumour"], {"255": 1}):
        with pytest.raises(ConfigError, match=r"no annotation of drawn is of the class '.*Tumor"):
            open_mask(path, slide, classes)
    with pytest.raises(ConfigError, match="of the class 'Stroma', and 'stroma' is another one; write Stroma=2"):
        open_mask(path, slide, {"Tumor": 1, "stroma": 2})
    # Of a cohort's classes a slide may have none.
    with open_mask(path, slide, ClassTable.parse(["Necrosis=1", "unlabelled=0"])) as mask:
        assert squares(mask, 2) == [0, 0, 0]


# Numbers of masks


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_ids_are_the_indices_of_a_palette(tmp_path, slide, bits):
    plane = np.random.default_rng(6).integers(0, 2**bits, (90, 120), dtype=np.uint8)
    picture = Pillow.fromarray(plane)
    picture.putpalette([value for number in range(256) for value in (255 - number, 7 * number % 256, 128)])
    picture.save(tmp_path / "p.png", bits=bits, transparency=0)
    with Pillow.open(tmp_path / "p.png") as saved:
        assert saved.mode == "P"
    with open_mask(tmp_path / "p.png", slide) as mask:
        np.testing.assert_array_equal(np.asarray(mask.read(Box.whole(90, 120)))[0], plane)
    with open_image(tmp_path / "p.png") as colours:
        assert colours.channels == 3


def test_ids_are_the_indices_of_a_tiff_with_colours_too(tmp_path, slide):
    plane = np.random.default_rng(7).integers(0, 9, (180, 240), dtype=np.uint8)
    path = tmp_path / "p.tif"
    about = {"height": 180, "width": 240, "count": 1, "dtype": "uint8", "transform": rasterio.Affine.scale(2)}
    with rasterio.open(path, "w", driver="GTiff", tiled=True, **about) as file:
        file.write(plane, 1)
        file.write_colormap(1, {number: (20 * number, 0, 255 - number, 255) for number in range(9)})
    with rasterio.open(path, "r+") as file:
        file.build_overviews([2])
    with open_mask(path, slide) as mask, rasterio.open(path, overview_level=0) as theirs:
        np.testing.assert_array_equal(np.asarray(mask.read(Box.whole(90, 120))), theirs.read())


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int16", "int32", "int64"])
def test_ids_of_any_width_are_numbers_that_pytorch_compares(slide, dtype):
    plane = np.random.default_rng(8).choice(np.array([0, 1, 300, 65535], "uint16"), (90, 120)).astype(dtype)
    for source in (open_image(plane), open_image(torch.from_numpy(plane))):
        with open_mask(source, slide) as mask:
            pixels = torch.as_tensor(np.asarray(mask.read(Box.whole(90, 120))))
            assert bool((pixels > 0).any())
            np.testing.assert_array_equal(pixels[0].numpy(), plane.astype(np.int64 if dtype != "int16" else dtype))


def test_a_path_in_the_place_of_the_open_slide_is_told(tmp_path):
    with pytest.raises(ImageError, match=r"its slide, open, and got 'a\.tif'"):
        open_mask(tmp_path / "a.geojson", "a.tif")  # type: ignore[arg-type]
