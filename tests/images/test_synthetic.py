"""Synthetic slides: repeatable, independent of blocks, readable by others, labelled by the recipe as their masks."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, WriteError
from gigagrad.images import open_image
from gigagrad.images.synthetic import make_cohort, make_slide
from gigagrad.images.synthetic.painting import STEP, Painter, upsample
from gigagrad.images.synthetic.textures import PERIOD, Textures, make_textures
from gigagrad.images.tissue import label_image


@pytest.fixture(scope="module")
def textures() -> Textures:
    return make_textures()


@pytest.fixture(scope="module")
def painter(textures: Textures) -> Painter:
    return Painter(1000, 1500, 3, textures)


def dice(first: np.ndarray, second: np.ndarray) -> float:
    return 2 * np.count_nonzero(first & second) / (np.count_nonzero(first) + np.count_nonzero(second))


def test_the_seed_decides_every_byte(tmp_path: Path, textures: Textures) -> None:
    def digest(name: str, seed: int, given: Textures | None) -> tuple[str, str]:
        slide, mask = tmp_path / f"{name}.tif", tmp_path / f"{name}.mask.tif"
        make_slide(slide, height=300, width=500, seed=seed, mask_path=mask, textures=given)
        return hashlib.sha256(slide.read_bytes()).hexdigest(), hashlib.sha256(mask.read_bytes()).hexdigest()

    first = digest("a", 5, textures)
    assert digest("b", 5, None) == first
    other = digest("c", 6, textures)
    assert other[0] != first[0]
    assert other[1] != first[1]


def test_pixels_do_not_depend_on_how_the_slide_is_cut(painter: Painter) -> None:
    """Painting one large block gives what strips of small blocks give, to a rounding of the texture coordinates."""
    whole = painter.paint(Box.whole(1000, 1500)).astype(int)
    strips = np.concatenate([strip.copy() for strip in painter.rows()]).astype(int)
    assert strips.shape == (1000, 1500, 3)
    assert np.mean(np.abs(whole - strips) > 2) < 1e-3
    mask = painter.tissue(Box.whole(1000, 1500))
    np.testing.assert_array_equal(np.concatenate(list(painter.mask_rows())), mask)
    np.testing.assert_array_equal(painter.tissue(Box(320, 640, 500, 901)), mask[320:500, 640:901])


def test_upsampling_is_the_same_in_every_box(painter: Painter) -> None:
    whole = upsample(painter.outline, Box.whole(1000, 1500))
    for box in (Box(0, 0, 16, 16), Box(256, 512, 512, 1024), Box(992, 1488, 1000, 1500), Box(48, 160, 49, 161)):
        np.testing.assert_array_equal(upsample(painter.outline, box), whole[box.y0 : box.y1, box.x0 : box.x1])


def test_textures_repeat_without_a_seam(textures: Textures) -> None:
    """Neighbours across the border differ no more than along some other line."""
    for texture in (textures.stroma, textures.epithelium, textures.fat, textures.roughness):
        assert texture.shape[:2] == (PERIOD, PERIOD)
        for axis in (0, 1):
            steps = np.abs(np.diff(texture.astype(float), axis=axis, append=np.take(texture, [0], axis)))
            lines = np.moveaxis(steps, axis, 0).reshape(PERIOD, -1).mean(axis=1)
            assert lines[-1] < 1.05 * lines[:-1].max()


@pytest.mark.parametrize("seed", range(4))
def test_the_recipe_finds_the_exact_mask(textures: Textures, tmp_path: Path, seed: int) -> None:
    slide, mask = tmp_path / "slide.tif", tmp_path / "mask.tif"
    make_slide(slide, height=1024, width=1536, seed=seed, mask_path=mask, textures=textures)
    with open_image(slide) as image:
        label = np.asarray(label_image(image).read(Box.whole(1024, 1536)))[0]
        assert image.mpp == pytest.approx(0.5)
    exact = tifffile.imread(mask, key=0)
    assert set(np.unique(exact)) == {0, 1}
    assert 0.15 < exact.mean() < 0.7
    assert dice(label, exact) >= 0.97


def test_colours_are_those_of_a_scanned_section(textures: Textures) -> None:
    """Pure white beside scanned glass of 237; tissue pink to purple with dark nuclei and white vacuoles inside."""
    painter = Painter(2048, 3072, 1, textures)
    pixels = np.concatenate([strip.copy() for strip in painter.rows()])
    mask = np.concatenate(list(painter.mask_rows())) > 0
    glass = pixels[~mask].mean(axis=1)
    assert np.mean(glass == 255) > 0.02, "fields that the scanner left out"
    scanned = glass[(glass != 255) & (glass > 225)]
    assert 236 <= np.median(scanned) <= 241
    red, green, blue = pixels[mask].astype(int).mean(axis=0)
    assert green < blue < red
    tissue = pixels[mask].mean(axis=1)
    assert np.mean(tissue < 130) > 0.05, "nuclei"
    assert np.mean(tissue > 230) > 0.005, "vacuoles, lumens and slits"


def test_painters_have_all_the_parts_a_slide_has(textures: Textures) -> None:
    painters = [Painter(2048, 4096, seed, textures) for seed in range(3)]
    for painter in painters:
        assert painter.outline.shape == (2048 // STEP + 2, 4096 // STEP + 2)
        assert painter.outline.min() < 0 < painter.outline.max()
        assert painter.epithelium.min() == 0
        assert painter.epithelium.max() == 255
        assert (painter.fields < 0).any()
        assert (painter.fields >= 0).any()
        assert painter.pen is not None
        assert painter.pen.max() > 0
    assert any(painter.fat.max() == 255 for painter in painters)
    assert any(painter.stain.max() > 190 for painter in painters), "folds"


@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 1000), (1000, 65), (257, 513)])
def test_any_size_works_and_others_can_read_it(tmp_path: Path, textures: Textures, height: int, width: int) -> None:
    path = make_slide(
        tmp_path / "x.tif", height=height, width=width, seed=2, mask_path=tmp_path / "m.tif", textures=textures
    )
    with openslide.OpenSlide(path) as slide:
        assert slide.dimensions == (width, height)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        seen = np.asarray(slide.read_region((0, 0), 0, (width, height)))[..., :3]
    with tifffile.TiffFile(path) as tiff:
        assert tiff.is_bigtiff
        assert tiff.pages[0].tile == (256, 256)
        np.testing.assert_array_equal(tiff.pages[0].asarray(), seen)
    assert tifffile.imread(tmp_path / "m.tif", key=0).shape == (height, width)


def test_cohort_table_names_files_that_exist(tmp_path: Path) -> None:
    table = make_cohort(tmp_path / "cohort", 6, height=128, width=192, seed=1)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["split"] for row in rows] == ["train"] * 4 + ["val", "test"]
    for row in rows:
        with open_image(table.parent / row["slide"]) as slide, open_image(table.parent / row["mask"]) as mask:
            assert slide.shape == (3, 128, 192)
            assert mask.shape == (1, 128, 192)
    assert len({(table.parent / row["slide"]).read_bytes() for row in rows}) == 6
    with pytest.raises(WriteError, match="exists already"):
        make_cohort(tmp_path / "cohort", 6, height=128, width=192, seed=1)


def test_a_cohort_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WriteError, match=r"cannot write .*cohort"):
        make_cohort(tmp_path / "file" / "cohort", 1, height=100, width=100)


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 64 px"):
        make_slide(tmp_path / "x.tif", height=10, width=1000, seed=0)
    with pytest.raises(ConfigError, match="mpp"):
        make_slide(tmp_path / "x.tif", height=100, width=100, seed=0, mpp=50)
    with pytest.raises(ConfigError, match="at least 1"):
        make_cohort(tmp_path, 0, height=100, width=100)
    assert not list(tmp_path.iterdir())
