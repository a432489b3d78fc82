"""Rows of a cohort as bags: a slide by itself, a case of several, as a network sees them; and where patches are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts import Row, read_cohort
from gigagrad.cohorts.patches import Bags, Patches, joined
from gigagrad.errors import ConfigError, ImageError
from gigagrad.images import InputView
from gigagrad.images.slide_bag import CaseBag, tissue_cells

PATCHES = Patches(16, mpp=1.0)


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Row, ...]:
    """Slides of two levels with a dark square each; the second and the third are of one case."""
    random = np.random.default_rng(0)
    found = []
    for number in range(3):
        pixels = np.full((128, 160, 3), 245, np.uint8)
        pixels[32:96, 32 : 96 + 16 * number] = random.integers(40, 140, (64, 64 + 16 * number, 3))
        path = tmp_path / f"s{number}.tif"
        with tifffile.TiffWriter(path) as file:
            shared = {"tile": (32, 32), "photometric": "rgb"}
            file.write(pixels, subifds=1, resolution=(20000, 20000), resolutionunit="CENTIMETER", **shared)
            file.write(pixels[::2, ::2], subfiletype=1, **shared)
        found.append(Row(path, label="1", split="train", case=None if not number else "p", line=number + 2))
    return tuple(found)


def test_a_row_is_the_bag_of_its_slide(rows) -> None:
    with Bags(PATCHES).open(rows[0]) as bag, gg.open_bag(rows[0].slide, 16, 1.0) as expected:
        np.testing.assert_array_equal(bag.coords, expected.coords)
        np.testing.assert_array_equal(bag.read(0, len(bag)), expected.read(0, len(expected)))


def test_a_case_is_one_bag_of_its_slides_in_their_order(rows) -> None:
    first, case = joined(rows)
    assert (first, case.name, case.members, case.case) == (rows[0], "p", rows[1:], None)
    assert case.files == (rows[1].slide, rows[2].slide)
    with Bags(PATCHES).open(case) as bag:
        assert isinstance(bag, CaseBag)
        assert bag.name == "p"
        parts = [gg.open_bag(row.slide, 16, 1.0) for row in rows[1:]]
        assert len(bag) == sum(map(len, parts))
        np.testing.assert_array_equal(
            bag.read(0, len(bag)), np.concatenate([each.read(0, len(each)) for each in parts])
        )


@pytest.mark.parametrize("case", ["a/b", "..", "x" * 201, "s0"])
def test_a_case_has_a_name_that_files_can_have(rows, case) -> None:
    with pytest.raises(ConfigError, match=r"the case|two slides or cases"):
        joined([rows[0], *(replace(row, case=case) for row in rows[1:])])


def test_bags_are_as_the_network_sees_slides(rows) -> None:
    with Bags(PATCHES).open(rows[0]) as bag, Bags(PATCHES, InputView(bands=(3, 1))).open(rows[0]) as seen:
        np.testing.assert_array_equal(seen.read(0, len(seen)), np.asarray(bag.read(0, len(bag)))[:, [2, 0]])
        assert seen.mpp == bag.mpp
    with Bags(Patches(16, mpp=0.5), InputView(grey=True)).open(rows[0]) as seen, gg.open_image(rows[0].slide) as slide:
        patches, grey = np.asarray(seen.read(0, len(seen))), slide.grey()
        for patch, (x, y) in zip(patches, seen.coords.tolist(), strict=True):
            np.testing.assert_array_equal(patch, grey.read(Box(y, x, y + 16, x + 16)))


def test_tissue_is_looked_for_once_in_a_slide(rows, monkeypatch) -> None:
    looked = []

    def recipe(*given: Any) -> Any:
        looked.append(given)
        return tissue_cells(*given)

    monkeypatch.setattr("gigagrad.masks.bags.tissue_cells", recipe)
    bags, found = Bags(PATCHES), []
    for _ in range(3):
        with bags.open(rows[0]) as bag:
            found.append(np.asarray(bag.read(0, len(bag))))
    assert len(looked) == 1
    assert all((each == found[0]).all() for each in found)


def test_masks_and_all_patches_and_corners(rows, tmp_path) -> None:
    mask = np.zeros((128, 160), np.uint8)
    mask[:64, :64] = 1
    tifffile.imwrite(tmp_path / "mask.tif", mask, tile=(32, 32), photometric="minisblack")
    row = replace(rows[0], mask=tmp_path / "mask.tif")
    with Bags(replace(PATCHES, tissue="mask")).open(row) as bag:
        assert sorted(map(tuple, bag.coords.tolist())) == [(0, 0), (0, 32), (32, 0), (32, 32)]
    with Bags(replace(PATCHES, tissue="all", overlap=8)).open(row) as bag:
        assert len(bag) == 10 * 8
    (tmp_path / "coords").mkdir()
    (tmp_path / "coords" / "s0.csv").write_text("x,y\n64,32\n0,0\n")
    chosen = replace(PATCHES, coords=tmp_path / "coords")
    with Bags(chosen).open(row) as bag:
        assert sorted(map(tuple, bag.coords.tolist())) == [(0, 0), (64, 32)]
    assert [*chosen.contents(row)] == [str(tmp_path / "coords" / "s0.csv")]
    with pytest.raises(ImageError, match=r"has no corners of s1: neither s1\.h5 nor"), Bags(chosen).open(rows[1]):
        pass
    with (
        pytest.raises(ImageError, match="s0 has no mask of tissue"),
        Bags(replace(PATCHES, tissue="mask")).open(rows[0]),
    ):
        pass


def test_numbers_out_of_range_and_words() -> None:
    for wrong in ({"mpp": 0.0}, {"mpp": float("inf")}, {"overlap": 16}):
        with pytest.raises(ConfigError, match=r"mpp must be|overlap by less"):
            replace(PATCHES, **wrong)
    assert str(PATCHES) == "16 px at 1 um/px, tissue auto, at least 0.1 of each"
    assert str(Patches(16, None, 4, "all")) == "16 px at level 0 with an overlap of 4 px, tissue all"


def test_a_cohort_of_bags(rows, tmp_path) -> None:
    table = tmp_path / "cohort.csv"
    table.write_text("slide,label,split,patient\ns0.tif,0,train,a\ns1.tif,1,val,b\ns2.tif,1,val,b\n")
    cohort = read_cohort(table, patches=PATCHES)
    assert [(row.name, len(row.members), row.split) for row in cohort.rows] == [("a", 1, "train"), ("b", 2, "val")]
    assert [*cohort.contents(cohort.rows[1])] == [str(row.slide) for row in rows[1:]]
    assert cohort.fingerprint == read_cohort(table).fingerprint, "of the same rows"
    table.write_text("slide,label,split,patient\ns0.tif,0,train,a\ns1.tif,1,val,b\ns2.tif,0,val,b\n")
    with pytest.raises(ConfigError, match="slides of b have the labels 1 and 0"):
        read_cohort(table, patches=PATCHES)
    table.write_text("slide,mask,split\ns0.tif,s1.tif,train\n")
    with pytest.raises(ConfigError, match="learns from a label of the slide"):
        read_cohort(table, patches=PATCHES)
    table.write_text("slide,mask,label,split\ns0.tif,s1.tif,1,train\n")
    assert read_cohort(table, patches=replace(PATCHES, tissue="mask")).rows[0].mask == rows[1].slide
    with pytest.raises(ConfigError, match="a cohort has one of them"):
        read_cohort(table, patches=PATCHES)
