"""Files, folders and CSV files as one list of slides; settings that make no sense are refused."""

from pathlib import Path

import pytest

from gigagrad.errors import ConfigError
from gigagrad.prediction.config import PredictConfig
from gigagrad.prediction.inputs import SlideInput, find_slides


@pytest.fixture
def folder(tmp_path):
    for name in ("b.svs", "a.tif", ".a.tif.partial", "notes.txt", "m.tif"):
        (tmp_path / name).touch()
    return tmp_path


def test_folders_and_files(folder):
    assert [entry.stem for entry in find_slides([folder])] == ["a", "b", "m"]
    assert find_slides([folder / "b.svs", folder / "b.svs"]) == (SlideInput(folder / "b.svs"),)


def test_csv_rows(folder):
    table = folder / "cohort.csv"
    table.write_text("\ufeffslide, mask,split,mpp\na.tif,m.tif,test,0.5\nb.svs,,train,\n", encoding="utf-8")
    assert find_slides([table]) == (
        SlideInput(folder / "a.tif", folder / "m.tif", 0.5),
        SlideInput(folder / "b.svs"),
    )
    assert [entry.stem for entry in find_slides([table], split="test")] == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'slide'"),
        ("\n\n", "no column 'slide'"),
        ("image\na.tif\n", "no column 'slide'; its columns are: image"),
        ("slide\n", "no rows"),
        ("slide\n\nnone.tif\n", "line 3: there is no"),
        ("slide,mask\n,m.tif\n", "line 2: the slide is missing"),
        ("slide,mask\na.tif,none.tif\n", "line 2: there is no mask"),
        ("slide,mpp\na.tif,fine\n", "line 2: mpp is 'fine'"),
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
    with pytest.raises(ConfigError, match="no readable CSV"):
        find_slides([table])


def test_missing_empty_and_colliding_sources(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match="there is no"):
        find_slides([folder / "none.svs"])
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="holds no slides"):
        find_slides([empty])
    (empty / "a.svs").touch()
    with pytest.raises(ConfigError, match="both be written as a"):
        find_slides([folder, empty])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
        ({"mpp": -1}, "mpp"),
        ({"memory": "much"}, "much"),
        ({"slides": ()}, "no slides"),
        ({"treshold": 0.4}, "treshold"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        PredictConfig.of({"run": "r", "slides": ("s",), "out": "o", **settings})


def test_settings_from_a_mapping():
    with pytest.raises(ConfigError, match="'out'"):
        PredictConfig.of({"run": "r", "slides": "s"})
    config = PredictConfig.of({"run": "r", "slides": "s.svs", "out": "o"})
    assert config.slides == ("s.svs",)
    assert PredictConfig.of(config) is config
    assert config.model_path == Path("r")


def test_the_level_is_the_one_of_the_run(tmp_path):
    config = PredictConfig(run=tmp_path, slides=("s",), out="o")
    assert config.resolved_level == 0
    (tmp_path / "config.yaml").write_text("level: 2\n")
    assert config.resolved_level == 2
    assert PredictConfig(run=tmp_path, slides=("s",), out="o", level=1).resolved_level == 1
    (tmp_path / "config.yaml").write_text("- no mapping\n")
    with pytest.raises(ConfigError, match="level"):
        _ = config.resolved_level


@pytest.mark.parametrize(
    "text", ["[" * 5000, "level: .inf", "level: [1]", "level: 2001-99-99", "level: !!python/name:os.system"]
)
def test_a_level_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="give one as --level"):
        _ = PredictConfig(run=tmp_path, slides=("a",), out="out").resolved_level
