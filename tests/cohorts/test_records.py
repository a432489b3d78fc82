"""The record of predictions, where somebody else wrote it."""

import dataclasses
import json

import pytest

from gigagrad.cohorts.records import MadeWith, SlideResult, file_names, read_records, summary, write_record
from gigagrad.errors import ConfigError

MADE_WITH = MadeWith("paper-unet", "00", 0.5, (), 0)


def result(name="a", **changes):
    base = {"slide": "/slides/a.tif", "slide_bytes": 1, "made_with": MADE_WITH, "status": "done"}
    return SlideResult(name=name, **{**base, "files": file_names(name, "tiff"), **changes})


def test_what_is_written_comes_back(tmp_path):
    records = {"a": result(), "b": result("b", status="failed", files={})}
    for each in records.values():
        write_record(tmp_path, each)
    assert read_records(tmp_path) == records
    assert read_records(tmp_path, ["b", "c"]) == {"b": records["b"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"mask": "../../secret.tif"}},
        {"files": {"overlay": "/etc/passwd"}},
        {"files": {"geojson": 3}},
        {"files": {"mine": "a"}},
        {"files": ["mask"]},
        {"files": {"mask": "masks/a.ome.tif"}},
        {"made_with": {**dataclasses.asdict(MADE_WITH), "format": "png"}},
        {"name": "../a"},
        {"name": 3},
        {"made_with": 3},
        {"made_with": {"model": "m"}},
        {"unknown": 1},
    ],
)
def test_nothing_outside_the_folder_is_believed(tmp_path, changes):
    path = tmp_path / "predictions.json"
    path.write_text(summary([result()]))
    content = json.loads(path.read_text())
    content["slides"][0] |= changes
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"predictions\.json"):
        read_records(tmp_path)


def test_records_of_three_outputs_and_one_format_are_read(tmp_path):
    path = tmp_path / "predictions.json"
    path.write_text(summary([result()]))
    content = json.loads(path.read_text())
    (entry,) = content["slides"]
    del entry["made_with"]["format"]
    entry |= {output: file for output, file in entry.pop("files").items() if output in ("mask", "geojson", "overlay")}
    path.write_text(json.dumps(content))
    (read,) = read_records(tmp_path).values()
    assert read.made_with == MADE_WITH
    assert read.files == {"mask": "masks/a.tif", "geojson": "geojson/a.geojson", "overlay": "overlays/a.png"}


def test_a_case_is_read_by_its_earlier_name(tmp_path):
    path = tmp_path / "predictions.json"
    path.write_text(summary([result(case="p1")]).replace('"case"', '"bag"'))
    assert read_records(tmp_path)["a"].case == "p1"


@pytest.mark.parametrize("text", ["[]", '{"slides": {"a": 1}}', '{"slides": 3}', "[" * 5000])
def test_what_is_no_record_is_one_line(tmp_path, text):
    (tmp_path / "predictions.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_records(tmp_path)
