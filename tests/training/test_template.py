"""The settings file to begin with: it is one, and it says what every setting means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from gigagrad import cli
from gigagrad.errors import WriteError
from gigagrad.settings import described, schema
from gigagrad.training import FitConfig
from gigagrad.training.template import write_template


def cohort(folder, *lines):
    for name in ("a.tif", "b.tif"):
        (folder / name).touch()
    ring = [[0, 0], [9, 0], [9, 9], [0, 0]]
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {"classification": name},
        }
        for name in ("Tumor", "Stroma")
    ]
    (folder / "a.geojson").write_text(json.dumps(features))
    path = folder / "cohort.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("slide,split", "a.tif,train"), {"model": "smp:Unet?encoder_name=resnet34", "loss": "bce_dice"}),
        (
            ("slide,mask,split", "a.tif,a.geojson,train"),
            {
                "model": "smp:Unet?encoder_name=resnet34&classes=3",
                "loss": "ce",
                "classes": {"Stroma": 1, "Tumor": 2, "unlabelled": "ignore"},
            },
        ),
        (
            ("slide,mask:one,mask:two,split", "a.tif,a.geojson,a.geojson,train"),
            {"model": "smp:Unet?encoder_name=resnet34&classes=2", "loss": "bce_dice"},
        ),
        (
            ("slide,label,split", "a.tif,good,train", "b.tif,bad,val"),
            {"model": "timm:resnet18?num_classes=2", "loss": "ce"},
        ),
    ],
)
def test_what_the_cohort_calls_for_stands_in_it(tmp_path, lines, expected):
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, *lines))
    settings = yaml.safe_load(path.read_text())
    assert settings | expected == settings
    assert FitConfig.from_yaml(path).slides == str(tmp_path / "cohort.csv")
    with pytest.raises(WriteError, match="exists"):
        write_template(path, tmp_path / "cohort.csv")


def test_every_setting_is_there_with_its_default(tmp_path):
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, "slide,split", "a.tif,train"))
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines()]
    text = "\n".join(line for line in lines if line.partition(":")[0] in described(FitConfig))
    assert {field.name for field in dataclasses.fields(FitConfig)} <= set(yaml.safe_load(text))


def test_every_setting_is_described():
    assert set(described(FitConfig)) == {field.name for field in dataclasses.fields(FitConfig)}
    assert all(len(meaning) > 10 and not meaning.endswith(" ") for meaning in described(FitConfig).values())
    rules = schema(FitConfig)
    assert rules["required"] == ["slides", "out"]
    assert rules["properties"]["epochs"] == {
        "description": "passes over the training slides.",
        "type": "integer",
        "minimum": 1,
        "default": 20,
    }
    assert rules["properties"]["clip"]["type"] == ["number", "null"]


def test_the_documented_settings_are_those_there_are():
    """docs/settings.md is a table of names, defaults and meanings; this says what to put there."""
    defaults = {field.name: field.default for field in dataclasses.fields(FitConfig)}
    rows = []
    for name, meaning in described(FitConfig).items():
        default = defaults[name]
        text = str(default).lower() if isinstance(default, bool) else str(default)
        required = default is dataclasses.MISSING
        shown = "required" if required else "" if default in (None, ()) else f"`{text}`"
        rows.append(f"| `{name}` | {shown} | {meaning} |")
    document = Path(__file__).parents[2] / "docs" / "settings.md"
    assert "\n".join(rows) in document.read_text(encoding="utf-8"), "\n".join(rows)


def test_at_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort(tmp_path, "slide,split", "a.tif,train")
    assert cli.main(["init", "--slides", "cohort.csv"]) == 0
    assert capsys.readouterr().out == "run.yaml\n"
    assert cli.main(["init", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema(FitConfig)
    assert cli.main(["init"]) == 2
    assert "--slides" in capsys.readouterr().err
