"""The record of predictions, where somebody else wrote it."""

import json

import pytest

from gigagrad.errors import ConfigError
from gigagrad.prediction.records import MadeWith, SlideResult, file_names, read_records, write_records

MADE_WITH = MadeWith("paper-unet", "00", 0.5, (), 0)


def result(name="a", **changes):
    base = {"slide": "/slides/a.tif", "slide_bytes": 1, "made_with": MADE_WITH, "status": "done"}
    return SlideResult(name=name, **{**base, **file_names(name), **changes})


def test_what_is_written_comes_back(tmp_path):
    records = {"a": result(), "b": result("b", status="failed", mask="", geojson="", overlay="")}
    write_records(tmp_path, records)
    assert read_records(tmp_path) == records


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "../../secret.tif"},
        {"overlay": "/etc/passwd"},
        {"geojson": 3},
        {"name": "../a"},
        {"name": 3},
        {"made_with": 3},
        {"made_with": {"model": "m"}},
        {"unknown": 1},
    ],
)
def test_nothing_outside_the_folder_is_believed(tmp_path, changes):
    write_records(tmp_path, {"a": result()})
    path = tmp_path / "predictions.json"
    content = json.loads(path.read_text())
    content["slides"][0] |= changes
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"predictions\.json"):
        read_records(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"slides": {"a": 1}}', '{"slides": 3}', "[" * 5000])
def test_what_is_no_record_is_one_line(tmp_path, text):
    (tmp_path / "predictions.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_records(tmp_path)
