"""The cohort file: every mistake is found before training and named with its line."""

import json

import numpy as np
import pytest
import tifffile

from gigagrad.cohorts import Size, cases_of, check_images, class_table, read_cohort
from gigagrad.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    for name in ("a.tif", "b.tif", "m.tif"):
        shape = (20, 30) if name == "m.tif" else (20, 30, 3)
        tifffile.imwrite(tmp_path / name, np.zeros(shape, np.uint8), tile=(16, 16))
    return tmp_path


def write(folder, *lines):
    path = folder / "cohort.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_rows_come_back_in_order_with_paths_against_the_file(folder):
    cohort = read_cohort(
        write(folder, "slide,mask,split,mpp", "a.tif,m.tif,train,0.5", "", f"{folder / 'b.tif'}, ,Val,")
    )
    first, second = cohort.rows
    assert (first.slide, first.mask, first.split, first.mpp) == (folder / "a.tif", folder / "m.tif", "train", 0.5)
    assert (second.name, second.mask, second.split, second.mpp, second.line) == ("b", None, "val", None, 4)
    assert cohort.of("val") == (second,)
    assert check_images(cohort, 0) == (Size((3, 20, 30), 1, gaps=False),) * 2


def test_a_byte_order_mark_quotes_and_capital_headers_are_fine(folder):
    path = folder / "cohort.csv"
    path.write_text('Slide, Split\r\n"a.tif",train\r\n', encoding="utf-8-sig")
    assert read_cohort(path).rows[0].slide == folder / "a.tif"


def test_labels_are_numbers(folder):
    cohort = read_cohort(write(folder, "slide,label,split", "a.tif,1,train", "b.tif,0.25,test"))
    assert [row.label for row in cohort.rows] == ["1", "0.25"]


def test_columns_that_nobody_needs_are_left_alone(folder):
    cohort = read_cohort(write(folder, "site,slide,split,age", "x,a.tif,train,61"))
    assert cohort.rows[0].slide == folder / "a.tif"


def test_several_images_and_masks_of_a_row(folder):
    path = write(folder, "Slide,slide: IHC,mask:Tumour,annotation:Vessel,split", "a.tif,b.tif,m.tif,m.tif,train")
    cohort = read_cohort(path)
    (row,) = cohort.rows
    assert (row.slide, row.further_slides) == (folder / "a.tif", (folder / "b.tif",))
    assert row.masks == (folder / "m.tif",) * 2
    assert cohort.classes == ("Tumour", "Vessel")
    table = class_table(cohort, ["255=ignore"])
    assert (table.foreground, table.values) == (("Tumour", "Vessel"), {255: 255})
    assert check_images(cohort, 0, table=table) == (Size((6, 20, 30), 2, gaps=False),)
    with row.open(mpp=2.0) as image:
        assert (image.channels, image.mpp) == (6, 2.0)
    other = write(folder, "Slide,slide: IHC,mask:Tumour,annotation:Vessel,split", "a.tif,a.tif,m.tif,m.tif,train")
    assert read_cohort(other).fingerprint != cohort.fingerprint


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        ("slide,slide:ihc,split", "a.tif,,train", "line 2: the slide:ihc is empty"),
        ("slide,slide:ihc,split", "a.tif,none.tif,train", r"line 2: .*none\.tif does not exist"),
        ("slide,slide2,split", "a.tif,a.tif,train", "unknown column 'slide2'; a further slide is called slide:2"),
        ("slide,mask:a,mask:b,split", "a.tif,m.tif,,train", "line 2: the mask:b is empty"),
        ("slide,mask,mask:b,split", "a.tif,m.tif,m.tif,train", "line 1: of several masks each is of a label"),
        ("slide,mask:a,mask:a,split", "a.tif,m.tif,m.tif,train", "line 1: there are two columns 'mask:a'"),
        ("slide,mask:a,label,split", "a.tif,m.tif,1,train", "line 1: there is a column 'mask' and a column 'label'"),
    ],
)
def test_what_is_wrong_with_several_is_named(folder, header, line, words):
    with pytest.raises(ConfigError, match=words):
        read_cohort(write(folder, header, line))


def test_a_row_may_have_no_mask_at_all(folder):
    cohort = read_cohort(write(folder, "slide,mask:a,mask:b,split", "a.tif,m.tif,m.tif,train", "b.tif,,,val"))
    assert cohort.rows[1].masks == ()
    with pytest.raises(ConfigError, match="line 3: the mask is empty"):
        class_table(cohort)


def test_the_fingerprint_follows_the_rows(folder):
    one = read_cohort(write(folder, "slide,split", "a.tif,train", "b.tif,val")).fingerprint
    assert one == read_cohort(write(folder, "slide,split", "", "a.tif,train", "b.tif,val")).fingerprint
    assert one != read_cohort(write(folder, "slide,split", "a.tif,train", "b.tif,test")).fingerprint


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "line 1: the column 'slide' is missing"),
        (["", "", ""], "the column 'slide' is missing"),
        (["slide,split"], "lists no slides"),
        (["slide,split,mpp", "a.tif,train,-1"], "line 2: the mpp must be a positive number"),
        (["slide,split", "a.tif,"], "line 2: the split is empty"),
        (["slide|split", "a.tif|train"], "line 1: the column 'slide' is missing, got slide|split"),
        (["masks,slide,split", "m.tif,a.tif,train"], "unknown column 'masks', did you mean 'mask'"),
        (["slide,name,split", "a.tif,x/y,train"], "line 2: the name 'x/y' cannot be a file's"),
        (["slide,fold", "a.tif,0"], "choose a fold to validate with --fold"),
        (["slide,splitt", "a.tif,train"], "did you mean 'split'"),
        (["slide,mask", "a.tif,m.tif"], "the column 'split' is missing"),
        (["slide,mask,label,split", "a.tif,m.tif,1,train"], "a cohort has one of them"),
        (["slide,split", "a.tif,later"], "line 2: unknown split 'later'; use train, val, test"),
        (["slide,split", "a.tif,val"], "no row with split 'train'"),
        (["slide,split", "a.tif,train", "c.tif,val"], "line 3: "),
        (["slide,split", "a.tif,train", "c.tif,val"], "c.tif does not exist"),
        (["slide,mask,split", "a.tif,x.tif,train"], "x.tif does not exist"),
        (["slide,split", ",train"], "line 2: the slide is empty"),
        (["slide,split", "a.tif"], "line 2: more or fewer values"),
        (["slide,split", "a.tif,train,3"], "line 2: more or fewer values"),
        (["slide,label,split", "a.tif,,train"], "line 2: the label is empty"),
        (["slide,split,mpp", "a.tif,train,nan"], "the mpp must be a number"),
        (["slide,split", "a.tif,train", "a.tif,test"], "line 3: the slide a.tif is listed on line 2"),
        (["slide,split", '"a.tif,train'], "comma-separated"),
    ],
)
def test_a_mistake_is_named_with_its_line(folder, lines, words):
    with pytest.raises(ConfigError) as caught:
        read_cohort(write(folder, *lines))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_slides_that_share_a_file_name_are_called_by_their_folders_too(folder):
    (folder / "more").mkdir()
    (folder / "more" / "a.png").write_bytes(b"")
    rows = read_cohort(write(folder, "slide,split", "a.tif,train", "more/a.png,test", "b.tif,val")).rows
    assert [row.name for row in rows] == [f"{folder.name}-a", "more-a", "b"]


def test_slides_of_one_given_name_are_refused(folder):
    with pytest.raises(ConfigError, match=r"line 3: the slide b\.tif shares its name with the slide of line 2"):
        read_cohort(write(folder, "slide,name,split", "a.tif,x,train", "b.tif,x,test"))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_other_tools_columns_delimiters_and_words(folder, delimiter):
    lines = ["case_id,slide_id,label,site,fold,Set", "p1,a,normal,x,0,training", "p2,b,tumour,y,1,Validation"]
    rows = read_cohort(write(folder, *(line.replace(",", delimiter) for line in lines))).rows
    assert [(row.slide, row.label, row.split) for row in rows] == [
        (folder / "a.tif", "normal", "train"),
        (folder / "b.tif", "tumour", "val"),
    ]


def test_a_column_of_ours_goes_before_other_tools_names(folder):
    rows = read_cohort(write(folder, "slide_id,slide,image,split", "one,a.tif,nowhere.jpg,train")).rows
    assert (rows[0].slide, rows[0].name) == (folder / "a.tif", "one")


@pytest.mark.parametrize("column", ["case", "bag", "Patient", "patient_id", "case_id"])
def test_slides_of_a_patient_are_a_case(folder, column):
    lines = [f"slide,label,split,{column}", "a.tif,1,train,p1", "b.tif,1,train,p1", "m.tif,0,train,"]
    cases = cases_of(read_cohort(write(folder, *lines)).rows)
    assert [[row.name for row in case] for case in cases] == [["a", "b"], ["m"]]


def test_a_fold_is_validated_and_the_others_are_trained_on(folder):
    path = write(folder, "slide,fold,split", "a.tif,0,", "b.tif,1,", "m.tif,1,test")
    assert [row.split for row in read_cohort(path, 0).rows] == ["val", "train", "test"]
    assert [row.split for row in read_cohort(path, 1).rows] == ["train", "val", "test"]
    with pytest.raises(ConfigError, match="no row of fold 2; its folds are 0, 1"):
        read_cohort(path, 2)
    with pytest.raises(ConfigError, match="column 'fold' is missing"):
        read_cohort(write(folder, "slide,split", "a.tif,train"), 0)


def test_labels_that_are_names_are_classes_from_0(folder):
    cohort = read_cohort(write(folder, "slide,label,split", "a.tif,tumour,train", "b.tif,normal,val"))
    assert class_table(cohort).ids == (("normal", 0), ("tumour", 1))
    assert class_table(cohort, ["tumour=0", "normal=1"]).ids == (("tumour", 0), ("normal", 1))
    with pytest.raises(ConfigError, match="line 3: the label 'normal' is none of the classes"):
        class_table(cohort, ["tumour=0"])
    mixed = read_cohort(write(folder, "slide,label,split", "a.tif,1,train", "b.tif,normal,val"))
    with pytest.raises(ConfigError, match="line 3: the label must be a number, got 'normal'"):
        class_table(mixed)
    assert class_table(read_cohort(write(folder, "slide,label,split", "a.tif,1,train"))) is None


def test_classes_of_annotations(folder):
    def drawn(name, *classes):
        ring = [[0, 0], [9, 0], [9, 9], [0, 0]]
        features = [
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": {"classification": {"name": kind}},
            }
            for kind in classes
        ]
        (folder / name).write_text(json.dumps({"type": "FeatureCollection", "features": features}))

    drawn("a.geojson", "Tumor", "Stroma")
    drawn("b.geojson", "Artefact")
    lines = ["slide,mask,split", "a.tif,a.geojson,train", "b.tif,b.geojson,val"]
    cohort = read_cohort(write(folder, *lines))
    assert class_table(cohort).ids == (("Artefact", 1), ("Stroma", 2), ("Tumor", 3))
    assert class_table(cohort, ["Tumor"]).ids == (("Tumor", 1),)
    with pytest.raises(ConfigError, match="'Tumour', did you mean 'Tumor'"):
        class_table(cohort, ["Tumour"])
    with pytest.raises(
        ConfigError, match=r"cohort\.csv line 3: the mask is empty, and the tissue recipe knows no classes"
    ):
        class_table(read_cohort(write(folder, *lines[:2], "b.tif,,val")))
    drawn("b.geojson")
    (folder / "a.geojson").write_text("{")
    with pytest.raises(ConfigError, match=r"cohort\.csv line 2: .*a\.geojson is no GeoJSON"):
        class_table(cohort)


def test_a_missing_or_binary_file_names_itself(folder):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: No such file"):
        read_cohort(folder / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"a\.tif"):
        read_cohort(folder / "a.tif")


def test_a_mask_that_does_not_fit_its_slide_is_refused(folder):
    tifffile.imwrite(folder / "m.tif", np.zeros((20, 31), np.uint8), tile=(16, 16))
    with pytest.raises(ConfigError, match="20 x 31 px and its slide 20 x 30 px") as caught:
        check_images(read_cohort(write(folder, "slide,mask,split", "a.tif,m.tif,train")), 0)
    assert "line 2" in str(caught.value)


def test_a_damaged_slide_is_named_with_its_line(folder):
    whole = (folder / "b.tif").read_bytes()
    (folder / "b.tif").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"line 3: .*b"):
        check_images(read_cohort(write(folder, "slide,split", "a.tif,train", "b.tif,val")), 0)


@pytest.mark.parametrize("slide", ["a\0b.tif", "x" * 5000, "circle/a.tif", '"' + "y" * 200_000 + '"'])
def test_a_name_that_is_no_path_is_named_with_its_line(folder, slide):
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "c.csv").write_text(f"slide,split\n{slide},train\n")
    with pytest.raises(ConfigError, match=r"c\.csv line") as caught:
        read_cohort(folder / "c.csv")
    assert len(str(caught.value)) < 1000
    (folder / "c.csv").write_text(f"slide,{slide},split\n")
    with pytest.raises(ConfigError, match=r"c\.csv"):
        read_cohort(folder / "c.csv")


def test_classes_of_outlines_are_those_of_qupath(folder):
    ring = [[0, 0], [10, 0], [10, 10], [0, 0]]

    def cohort(*names):
        features = [
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": {"classification": {"names": name.split(": ")}},
            }
            for name in names
        ]
        (folder / "o.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
        return read_cohort(write(folder, "slide,mask,split", "a.tif,o.geojson,train"))

    found = cohort("Tumor: Positive", "Background", "Ignore*", "Region*")
    assert dict(class_table(found).ids) == {"Tumor: Positive": 1, "Background": 0, "Ignore*": 255}
    assert dict(class_table(found, ["Tumor: Positive=3"]).ids) == {"Tumor: Positive": 3, "Ignore*": 255}
    with pytest.raises(ConfigError, match="all annotations are background"):
        class_table(cohort("Background", "Ignore*"))
    with pytest.raises(ConfigError, match="did you mean 'Tumor'"):
        class_table(cohort("Tumor"), ["tumor"])
    with pytest.raises(ConfigError, match="'Tumor', and 'tumor' is another one; write Tumor=1"):
        class_table(cohort("Tumor", "tumor"), ["tumor"])
    with pytest.raises(ConfigError, match="is of the class '255'; they have Tumor"):
        class_table(cohort("Tumor"), ["255=1"])


def test_what_other_programs_write_for_no_value_is_none(folder):
    path = write(folder, "slide,label,case,split", "a.tif,1,NA,train", "b.tif,0,NA,test")
    assert [row.case for row in read_cohort(path).rows] == [None, None]
    with pytest.raises(ConfigError, match="line 3: the label is empty"):
        read_cohort(write(folder, "slide,label,split", "a.tif,tumour,train", "b.tif,NA,test"))


def test_a_fold_is_a_whole_number(folder):
    with pytest.raises(ConfigError, match=r"line 2: the fold must be a whole number, got '1\.5'"):
        read_cohort(write(folder, "slide,fold", "a.tif,1.5", "b.tif,1.0"), 1)


def test_a_slide_or_a_patient_in_two_splits_is_refused(folder):
    with pytest.raises(ConfigError, match=r"line 3: the slide a\.tif has the split val, and on line 2 it has train"):
        read_cohort(write(folder, "slide,name,split", "a.tif,one,train", "a.tif,two,val"))
    with pytest.raises(ConfigError, match="lines 2 and 3: slides of p have the splits train and val"):
        read_cohort(write(folder, "slide,mask,patient_id,split", "a.tif,m.tif,p,train", "b.tif,m.tif,p,val"))


def test_links_are_called_by_their_own_names(folder):
    """In the stores of DVC and git-annex, files are called by digests."""
    (folder / "store").mkdir()
    for name, digest in {"a.tif": "3f2a", "m.tif": "77aa"}.items():
        (folder / name).rename(folder / "store" / digest)
        (folder / name).symlink_to(folder / "store" / digest)
    (folder / "again.tif").symlink_to(folder / "a.tif")
    cohort = read_cohort(write(folder, "slide,mask,split", "a,m.tif,train"))
    (row,) = cohort.rows
    assert (row.name, row.slide, row.mask) == ("a", folder / "a.tif", folder / "m.tif")
    assert check_images(cohort, 0) == (Size((3, 20, 30), 1, gaps=False),)
    with pytest.raises(ConfigError, match=r"the slide again\.tif has the split val, and on line 2 it has train"):
        read_cohort(write(folder, "slide,split", "a.tif,train", "again.tif,val"))


def test_what_is_no_cohort_file_is_told_what_one_is(folder):
    (folder / "slides").mkdir()
    for source, problem in {"a.tif": "it is not UTF-8 text", "slides": "it is a folder without masks"}.items():
        (folder / "a.tif").write_bytes(b"II*\0\xff")
        with pytest.raises(ConfigError, match=f"{problem}; .*a cohort file begins with a line like: slide,mask,split"):
            read_cohort(folder / source)


def test_paths_that_windows_has_written_are_found(folder):
    (folder / "slides").mkdir()
    (folder / "a.tif").rename(folder / "slides" / "a.tif")
    (row,) = read_cohort(write(folder, "slide,mask,split", r"slides\a.tif,.\m.tif,train")).rows
    assert (row.slide, row.mask) == (folder / "slides" / "a.tif", folder / "m.tif")
    with pytest.raises(ConfigError, match=r"line 2: .*none\.tif does not exist"):
        read_cohort(write(folder, "slide,split", r"slides\none.tif,train"))
