"""Files, folders and CSV files as one list of slides."""

import pytest

from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.rows import masks_beside
from gigagrad.errors import ConfigError
from gigagrad.files import content_digest


@pytest.fixture
def folder(tmp_path):
    for name in ("b.svs", "a.tif", ".a.tif.partial", "notes.txt", "m.tif"):
        (tmp_path / name).touch()
    return tmp_path


def test_folders_and_files(folder):
    assert [entry.name for entry in find_slides([folder])] == ["a", "b", "m"]
    assert find_slides([folder / "b.svs", folder / "b.svs"]) == (Row(folder / "b.svs"),)


def test_a_mask_beside_its_slide_is_no_slide(folder):
    for name in ("a_mask.tif", "b-Labels.png", "c_mask.tif", "mask.tif"):
        (folder / name).touch()
    assert [entry.name for entry in find_slides([folder])] == ["a", "b", "c_mask", "m", "mask"]
    assert masks_beside(folder) == {
        folder / "a.tif": [folder / "a_mask.tif"],
        folder / "b.svs": [folder / "b-Labels.png"],
    }
    assert [entry.name for entry in find_slides([folder / "a_mask.tif"])] == ["a_mask"], "who names it means it"


def test_csv_rows(folder):
    table = folder / "cohort.csv"
    table.write_text("\ufeffslide, mask,split,mpp\na.tif,m.tif,test,0.5\nb.svs,,train,\n", encoding="utf-8")
    assert find_slides([table]) == (
        Row(folder / "a.tif", folder / "m.tif", 0.5, "test"),
        Row(folder / "b.svs", split="train"),
    )
    assert [entry.name for entry in find_slides([table], split="test")] == ["a"]


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("split", "train", "choose another, its splits are train"),
        ("name", "one", "it has no splits; leave out --split"),
        ("fold", "3", "its rows have folds: give the run of one, as RUN/fold-3, with --split val"),
    ],
)
def test_a_split_that_is_not_there_says_what_to_give(folder, column, value, remedy):
    table = folder / "cohort.csv"
    table.write_text(f"slide,{column}\na.tif,{value}\n")
    with pytest.raises(ConfigError, match=remedy):
        find_slides([table], split="test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'slide' is missing"),
        ("\n\n", "column 'slide' is missing"),
        ("picture\na.tif\n", "column 'slide' is missing, got picture"),
        ("slide\n", "lists no slides"),
        ("slide\n\nnone.tif\n", "line 3: .*none.tif does not exist"),
        ("slide,mask\n,m.tif\n", "line 2: the slide is empty"),
        ("slide,mask\na.tif,none.tif\n", "line 2: .*none.tif does not exist"),
        ("slide,mpp\na.tif,fine\n", "line 2: the mpp must be a number, got 'fine'"),
    ],
)
def test_bad_csv_files_get_one_clear_line(folder, text, message):
    table = folder / "cohort.csv"
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_slides([table])


def test_bytes_are_no_csv(folder):
    table = folder / "cohort.csv"
    table.write_bytes(b"slide\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="it is not UTF-8 text; save the table as 'CSV UTF-8'"):
        find_slides([table])


def test_missing_empty_and_colliding_sources(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match="there is no"):
        find_slides([folder / "none.svs"])
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="holds no slides"):
        find_slides([empty])
    (empty / "a.svs").touch()
    assert [row.name for row in find_slides([folder, empty])] == [f"{folder.name}-a", "b", "m", f"{empty.name}-a"]
    (empty / "a.png").touch()
    with pytest.raises(ConfigError, match=f"both be written as {empty.name}-a"):
        find_slides([folder, empty])


def test_a_slide_that_is_named_twice_has_what_is_known_of_it_and_no_two_masks(folder):
    table = folder / "cohort.tsv"
    table.write_text("slide\tmask\na.tif\tm.tif\n")
    for sources in ([folder / "a.tif", table], [table, folder / "a.tif"]):
        (row,) = find_slides(sources)
        assert row.mask == folder / "m.tif"
    table.write_text("slide\tmask\na.tif\tm.tif\na.tif\tb.svs\n")
    with pytest.raises(ConfigError, match=r"a is named twice, by lines 2 and 3, with the mask .*m\.tif and .*b\.svs"):
        find_slides([table])
    table.write_text("slide\tlabel\na.tif\t1\na.tif\t0\nb.svs\t0\nb.svs\t0\n")
    with pytest.raises(ConfigError, match="by lines 2 and 3, with the label 1 and 0"):
        find_slides([table])


def test_a_split_of_slides_that_have_none_is_refused(folder):
    for source in (folder, folder / "a.tif"):
        with pytest.raises(ConfigError, match="has no splits; leave out --split, or name the cohort file"):
            find_slides([source], split="test")
    table = folder / "cohort.csv"
    table.write_text("slide,split\nb.svs,test\n")
    assert [row.name for row in find_slides([table, folder / "a.tif"], split="test")] == ["b", "a"]


@pytest.mark.parametrize("name", ["a.ome.tif", "a.cog.tif", "a.tif", "a.ome.zarr"])
def test_a_name_in_results_says_no_format(tmp_path, name):
    (tmp_path / name).touch()
    assert [row.name for row in find_slides([tmp_path / name])] == ["a"]
    (tmp_path / "c.csv").write_text(f"slide,name\n{name},b.ome\n")
    assert [row.name for row in find_slides([tmp_path / "c.csv"])] == ["b"]


def test_two_formats_of_one_slide_are_not_written_into_each_other(tmp_path):
    for name in ("a.ome.tif", "a.tif"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="would both be written as"):
        find_slides([tmp_path])


@pytest.mark.parametrize(
    ("slide", "beside", "others"),
    [
        ("a.mrxs", ["a/Slidedat.ini", "a/Data0000.dat"], ["ab/Data0000.dat", "b.mrxs"]),
        ("a.vms", ["a(1,0).jpg", "far.opt"], ["a_mask.tif"]),
        ("dicom/0.dcm", ["dicom/1.dcm"], ["dicom/notes.txt"]),
        ("a.svs", [], ["a.xml"]),
    ],
)
def test_a_slide_is_known_by_all_of_its_files(tmp_path, slide, beside, others):
    lists = "".join(f"\nImageFile = {name}" for name in beside)
    for name in (slide, *beside, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"before{lists}")
    row = Row(tmp_path / slide)

    def digests():
        assert row.slides == row.files
        return [content_digest(path) for path in row.slides]

    known = digests()
    for name in (slide, *beside, *others):
        (tmp_path / name).write_text(f"behind{lists}")
        assert (digests() != known) == (name not in others)
        known = digests()


def test_slides_beside_instances_of_dicom_are_not_left_out(tmp_path):
    for name in ("0.dcm", "thumbnail.jpg", "mask.tif"):
        (tmp_path / name).write_text("")
    assert [row.slide for row in find_slides([tmp_path])] == [tmp_path]
    (tmp_path / "b.svs").write_text("")
    with pytest.raises(ConfigError, match=r"holds instances of DICOM, which are one slide, and b\.svs; move"):
        find_slides([tmp_path])
