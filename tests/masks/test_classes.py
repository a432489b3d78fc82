"""Class tables: what people write, what it means, and one clear line for the rest."""

from __future__ import annotations

import pytest

from gigagrad.errors import ConfigError
from gigagrad.masks import IGNORED, ClassTable


def test_names_alone_count_from_one() -> None:
    table = ClassTable.parse(["tumour", "stroma"])
    assert table.ids == (("tumour", 1), ("stroma", 2))
    assert table.unlabelled == IGNORED
    assert table.foreground == ("tumour", "stroma")
    assert table.count == 3


def test_one_class_is_told_from_the_rest() -> None:
    assert ClassTable.parse(["tumour"]).unlabelled == 0
    assert ClassTable.parse(["tumour=1", "artefact=ignore"]).unlabelled == 0
    assert ClassTable.parse(["tumour=1", "normal=0"]).unlabelled == IGNORED
    assert ClassTable.parse(["tumour", "unlabelled=ignore"]).unlabelled == IGNORED
    assert not ClassTable.parse(["tumour"]).ignores
    assert ClassTable.parse(["tumour=1", "artefact=ignore"]).ignores


def test_several_names_may_mean_one_class() -> None:
    table = ClassTable.parse(["In situ=2", "Invasive = 2", "a=b=1", "Necrosis=ignore", "unlabelled=0"])
    assert dict(table.ids) == {"In situ": 2, "Invasive": 2, "a=b": 1, "Necrosis": IGNORED}
    assert table.foreground == ("a=b", "In situ")
    assert ClassTable.parse(table.entries) == table
    assert str(table) == "In situ = 2, Invasive = 2, a=b = 1, Necrosis = ignore, unlabelled = 0"


def test_classes_of_several_ids_are_regions() -> None:
    table = ClassTable.parse(["background=0", "kidney=1+2+3", "masses = 3 + 2", "tumor=2", "vessel", "9=ignore"])
    assert table.regions == ((1, 2, 3), (3, 2), (2,), (4,))
    assert table.foreground == ("kidney", "masses", "tumor", "vessel")
    assert table.values == {9: IGNORED}
    assert table.count == 5
    assert ClassTable.parse(table.entries) == table
    assert str(table).startswith("background = 0, kidney = 1+2+3, masses = 3+2, tumor = 2, vessel = 4, 9 = ignore")
    assert not ClassTable.parse(["a=2", "b=1"]).regions


def test_numbers_are_values_of_mask_files() -> None:
    assert ClassTable.parse(["255=1", "7=ignore", "x=2"]).values == {255: 1, 7: IGNORED}


def test_all_names_in_alphabetical_order() -> None:
    assert ClassTable.of_names(["b", "Unclassified", "a", "b"]).ids == (("a", 1), ("b", 2))
    assert ClassTable.of_names(["Unclassified"]).ids == (("Unclassified", 1),)


def test_the_background_is_zero_and_what_qupath_ignores_is_ignored() -> None:
    found = ["Tumor", "Ignore*", "Background", "Stroma: Artefact*", "Region*", "Immune"]
    table = ClassTable.of_names(found)
    assert dict(table.ids) == {"Background": 0, "Immune": 1, "Tumor": 2, "Ignore*": 255, "Stroma: Artefact*": 255}
    assert table.foreground == ("Immune", "Tumor")
    assert (table.unlabelled, table.ignores, table.count) == (IGNORED, True, 3)
    assert ClassTable.parse(table.entries) == table
    assert ClassTable.of_names(["Tumor", "Ignore*"]).unlabelled == 0
    assert ClassTable.of_names(["Tumor", "Region*"]).ids == (("Tumor", 1),)
    assert ClassTable.of_names(["Unclassified", "Region*"]).ids == (("Unclassified", 1),)
    assert dict(ClassTable.parse(["background", "Tumor", "Ignore*"]).ids) == {
        "background": 0,
        "Tumor": 1,
        "Ignore*": IGNORED,
    }
    named = ClassTable.parse(["Ignore*=2", "Tumor=1"])
    assert named.ignoring(["Ignore*", "Region*", "Necrosis*"]).ids == (*named.ids, ("Necrosis*", IGNORED))
    with pytest.raises(ConfigError, match=r"are of Ignore\*, Region\* alone, which QuPath ignores"):
        ClassTable.of_names(["Region*", "Ignore*"])


def test_capitals_count() -> None:
    table = ClassTable.parse(["tumor=1", "stroma=2", "dirt=ignore"])
    table.check_spelt(["tumor", "Stroma2", "dirt"], "a")
    with pytest.raises(ConfigError, match="of the class 'Stroma', and 'stroma' is another one; write Stroma=2"):
        table.check_spelt(["tumor", "Stroma"], "a")
    with pytest.raises(ConfigError, match="write Dirt=ignore"):
        table.check_spelt(["tumor", "Dirt"], "a")
    ClassTable.parse(["tumor=1", "Tumor=1"]).check_spelt(["tumor", "Tumor"], "a")


def test_outlines_of_none_of_the_classes_are_no_background() -> None:
    table = ClassTable.parse(["tumor=1", "stroma=2"])
    table.check_any_used(["stroma", "x"], "a")
    with pytest.raises(ConfigError, match="is of the classes 'tumor', 'stroma', did you mean 'Tumor'"):
        table.check_any_used(["Tumor", "Stroma"], "a")
    with pytest.raises(ConfigError, match="is of the class '255'; they have Tumor; name what they have"):
        ClassTable.parse(["255=1"]).check_any_used(["Tumor"], "a")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "no class is named"),
        (["unlabelled=0"], "no class is named"),
        (["=1"], "names no class"),
        (["a=x"], "has no class id"),
        (["a=-1"], "has no class id"),
        (["a=256"], "from 0 to 254"),
        (["a", "a=2"], "given twice"),
        (["3"], "is a number; name each class"),
        (["a=1+"], "has no class id"),
        (["a=1+0"], "a=1\\+0 beside regions; these have names, and ids from 1 to 254"),
        (["a=1+ignore"], "a=1\\+255 beside regions"),
        (["a=1+2", "7=2"], "7=2 beside regions"),
        (["a=1+2", "unlabelled=2"], "unlabelled=2 beside regions"),
    ],
)
def test_a_mistake_gets_one_clear_line(entries, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ClassTable.parse(entries)


def test_a_class_that_no_annotation_has_is_named() -> None:
    with pytest.raises(ConfigError, match="'Tumour', did you mean 'Tumor'"):
        ClassTable.parse(["Tumour"]).check_used(["Tumor", "Stroma"], "cohort.csv")
    with pytest.raises(ConfigError, match="they have Stroma, Tumor"):
        ClassTable.parse(["x"]).check_used(["Tumor", "Stroma"], "cohort.csv")
