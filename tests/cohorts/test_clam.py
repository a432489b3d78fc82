"""CLAM's layout: a table of labels, slides in a folder of theirs, splits in files of theirs."""

from __future__ import annotations

import pytest

from gigagrad.cohorts import find_slides, folds_of, read_cohort, read_rows
from gigagrad.errors import ConfigError

FIRST, SECOND = ",train,val,test\n0,a,b,c\n1,d,,\n", ",train,val,test\n0,b,a,c\n"


@pytest.fixture
def table(tmp_path):
    (tmp_path / "slides").mkdir()
    for name in "abcde":
        (tmp_path / "slides" / f"{name}.svs").touch()
    path = tmp_path / "dataset.csv"
    path.write_text("case_id,slide_id,label\n" + "".join(f"p{name},{name},normal\n" for name in "abcde"))
    return path


def write(table, text, number=0, place="."):
    folder = table.parent / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"splits_{number}.csv").write_text(text)
    (folder / f"splits_{number}_bool.csv").write_text(",train,val,test\na,True,False,False\n")
    (folder / f"splits_{number}_descriptor.csv").write_text(",train,val,test\nnormal,1,1,1\n")


def splits(rows):
    return {row.slide.stem: row.split for row in rows}


@pytest.mark.parametrize("place", [".", "splits", "splits/task_1_100"])
def test_splits_and_slides_are_found(table, place):
    write(table, FIRST, place=place)
    rows = read_cohort(table).rows
    assert splits(rows) == {"a": "train", "b": "val", "c": "test", "d": "train"}  # e is in none
    assert rows[0].slide == table.parent / "slides" / "a.svs"
    assert splits(find_slides([table], "test")) == {"c": "test"}
    assert len(find_slides([table])) == 5


def test_several_files_are_folds(table):
    write(table, FIRST)
    write(table, SECOND, 1)
    assert folds_of(table, *read_rows(table)) == [0, 1]
    assert splits(read_cohort(table, 1).rows) == {"a": "val", "b": "train", "c": "test"}
    assert splits(find_slides([table], "val", 1)) == {"a": "val"}
    with pytest.raises(ConfigError, match=r"2 split files, of the folds 0, 1; train with --fold 0"):
        read_cohort(table)
    with pytest.raises(ConfigError, match="no split file of fold 2; its folds are 0, 1"):
        read_cohort(table, 2)


def test_a_column_of_ones_own_goes_before_files(table):
    write(table, FIRST)
    table.write_text("slide,label,split\na,x,train\nb,y,test\n")
    assert splits(read_cohort(table).rows) == {"a": "train", "b": "test"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (",train,val,test\n0,a,b,f\n", "lists the slide 'f', which"),
        (",train,val,test\n0,a,b,a\n", "line 2: 'a' is in train and in test"),
        (",train,val\n0,a,b\n", "expected the columns train, val, test"),
        ("\0\xff", "split"),
        (",train,val,test\n0,,b,c\n", "no row with split 'train'"),
    ],
)
def test_what_is_wrong_with_a_split_file_is_named(table, text, words):
    write(table, text)
    with pytest.raises(ConfigError, match=words):
        read_cohort(table)


def test_two_tasks_are_not_mixed(table):
    write(table, FIRST, place="splits/one")
    write(table, SECOND, 1, place="splits/two")
    with pytest.raises(ConfigError, match=r"split files in .*one and .*two"):
        read_cohort(table)


def test_without_any_the_column_is_asked_for(table):
    with pytest.raises(ConfigError, match="the column 'split' is missing"):
        read_cohort(table)


def test_names_that_are_not_one_slides_are_refused(table):
    for name in ("one", "two"):
        (table.parent / name).mkdir()
        (table.parent / name / "a.svs").touch()
    table.write_text("slide,label\none/a.svs,x\ntwo/a.svs,y\nb,x\n")
    write(table, ",train,val,test\n0,a,b,\n")
    with pytest.raises(ConfigError, match=r"lists the slide 'a', which .* has several of"):
        read_cohort(table)
    write(table, ",train,val,test\n0,one-a,b,\n1,two-a,b.svs,\n2,b.svs,,\n")
    with pytest.raises(ConfigError, match=r"line 4: 'b\.svs' is in val and in train"):
        read_cohort(table)
    write(table, ",train,val,test\n0,one-a,b,\n1,b.svs,,\n")
    with pytest.raises(ConfigError, match=r"lists b\.svs by two names, in val and in train"):
        read_cohort(table)
