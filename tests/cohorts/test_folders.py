"""Folders as cohorts: nnU-Net's, and images beside masks."""

from __future__ import annotations

import json

import pytest

from gigagrad.cohorts import class_table, find_slides, read_cohort
from gigagrad.errors import ConfigError


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def nnunet(folder, labels, *names, **further):
    settings = {"channel_names": {"0": "R"}, "labels": labels, "numTraining": 2, "file_ending": ".png"}
    (folder / "dataset.json").write_text(json.dumps(settings | further))
    return touch(folder, *names)


def test_images_beside_masks(tmp_path):
    touch(tmp_path, *(f"images/{k}.png" for k in range(6)), *(f"masks/{k}.tif" for k in range(6)), "images/.hidden.png")
    rows = read_cohort(tmp_path).rows
    assert [row.slide.name for row in rows] == [f"{k}.png" for k in range(6)]
    assert [row.mask for row in rows] == [tmp_path / "masks" / f"{k}.tif" for k in range(6)]
    assert [row.split for row in rows] == ["train"] * 4 + ["val", "train"]
    assert [row.name for row in find_slides([tmp_path], split="val")] == ["4"]


def test_images_beside_masks_of_each_split(tmp_path):
    touch(tmp_path, "train/images/a.png", "train/labels/a.geojson", "test/images/b.png", "test/labels/b.png")
    assert [(row.name, row.mask.name, row.split) for row in read_cohort(tmp_path).rows] == [
        ("a", "a.geojson", "train"),
        ("b", "b.png", "test"),
    ]


def test_images_of_one_name_in_two_splits_are_told_apart(tmp_path):
    touch(tmp_path, *(f"{split}/{kind}/a.png" for split in ("train", "val") for kind in ("images", "masks")))
    assert [row.name for row in read_cohort(tmp_path).rows] == ["train-images-a", "val-images-a"]


def test_a_dataset_of_nnunet(tmp_path):
    cases = [f"imagesTr/c{k}_0000.png" for k in range(5)] + [f"labelsTr/c{k}.png" for k in range(5)]
    labels = {"background": 0, "tumour": 1, "ignore": 2}
    cohort = read_cohort(nnunet(tmp_path, labels, *cases, "imagesTs/t_0000.png", "labelsTs/t.png"))
    assert [(row.name, row.split) for row in cohort.rows] == [
        *[(f"c{k}", "train") for k in range(4)],
        ("c4", "val"),
        ("t", "test"),
    ]
    assert cohort.classes == ("background=0", "tumour=1", "2=ignore")


@pytest.mark.parametrize(
    ("labels", "order", "classes"),
    [
        (
            {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4},
            [1, 2, 3],
            ("background=0", "whole=1+2+3", "core=2+3", "enhancing=3", "4=ignore"),
        ),
        (
            {"background": [0], "kidney": [1, 2, 3], "masses": [2, 3], "tumor": [2]},
            [1, 3, 2],
            ("background=0", "kidney=1+2+3", "masses=3+2", "tumor=2"),
        ),
        ({"background": 0, "a": [2], "b": [1]}, None, ("background=0", "a=2", "b=1")),
    ],
)
def test_regions_of_nnunet(tmp_path, labels, order, classes):
    folder = nnunet(tmp_path, labels, "imagesTr/c_0000.png", "labelsTr/c.png", regions_class_order=order)
    cohort = read_cohort(folder)
    assert cohort.classes == classes
    assert class_table(cohort).entries[: len(classes)] == classes


def test_channels_of_a_case_in_files_of_their_own(tmp_path):
    files = [f"imagesTr/{case}_{channel}.png" for case in ("a", "a1") for channel in ("0000", "0001")]
    (first, second) = read_cohort(nnunet(tmp_path, {"x": 1}, *files, "labelsTr/a.png", "labelsTr/a1.png")).rows
    assert {first.name, second.name} == {"a", "a1"}
    for row in (first, second):
        assert [file.name for file in (row.slide, *row.further_slides)] == [
            f"{row.name}_0000.png",
            f"{row.name}_0001.png",
        ]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["images/a.png"], "no folder of masks; expected one of masks, labels, annotations"),
        (["images/a.png", "masks/b.png"], r"a\.png has no mask; expected masks/a"),
        (["train/images/notes.txt", "train/masks/b.png"], "holds no images"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path, names, words):
    with pytest.raises(ConfigError, match=words):
        read_cohort(touch(tmp_path, *names))


@pytest.mark.parametrize(
    ("labels", "names", "words"),
    [
        ({"a": 1}, [], "has no case; expected imagesTr/CASE_0000.png"),
        ({"a": 1}, ["imagesTr/c_0000.png"], r"has no mask; expected .*labelsTr/c\.png"),
        ({"a": 1}, ["imagesTr/c_0000.png", "imagesTr/c_0002.png"], r"c_0002\.png is there and .*c_0001\.png is not"),
        ({"a": [1, 2]}, [], "as nnU-Net's: regions_class_order is None"),
        ({"a": []}, [], "a label is neither an id nor a list of ids"),
        ({"a": "1"}, [], "a label is neither an id nor a list of ids"),
        (None, [], "cannot read .*dataset.json as nnU-Net's"),
    ],
)
def test_a_dataset_of_nnunet_that_is_none_is_named(tmp_path, labels, names, words):
    with pytest.raises(ConfigError, match=words):
        read_cohort(nnunet(tmp_path, labels, *names))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (None, "regions_class_order is None, and there are 2 regions"),
        ([1], r"regions_class_order is \[1\]"),
        ([3, 2], "regions_class_order has 3 for 'whole', whose ids are"),
    ],
)
def test_an_order_of_regions_that_is_none_is_named(tmp_path, order, words):
    with pytest.raises(ConfigError, match=words):
        read_cohort(nnunet(tmp_path, {"whole": [1, 2], "core": 2}, regions_class_order=order))


def test_a_damaged_dataset_is_named(tmp_path):
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_cohort(tmp_path)


def test_annotations_that_are_compressed_belong_to_their_slides(tmp_path):
    touch(tmp_path, "images/a.svs", "images/b.ome.tif", "images/c.tif")
    touch(tmp_path, "annotations/a.geojson.gz", "annotations/b.zip", "annotations/c.geojson")
    assert [(row.name, row.mask.name) for row in read_cohort(tmp_path).rows] == [
        ("a", "a.geojson.gz"),
        ("b", "b.zip"),
        ("c", "c.geojson"),
    ]


def test_an_image_with_several_masks_is_refused(tmp_path):
    touch(tmp_path, "images/a.png", "masks/a.png", "masks/a.geojson")
    with pytest.raises(ConfigError, match=r"has several masks in masks/, a\.geojson and a\.png; leave one"):
        read_cohort(tmp_path)
