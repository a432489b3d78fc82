"""The settings file to begin with: it is one, and it says what every setting means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import yaml

from gigagrad import cli
from gigagrad.cohorts import class_table, read_cohort
from gigagrad.config import described, schema
from gigagrad.config.fit import write_template
from gigagrad.errors import ImageError, WriteError
from gigagrad.models import resolve
from gigagrad.named import parse_named
from gigagrad.training import FitConfig
from tests.images.test_georeference import make


def cohort(folder, *lines, pixels=None):
    for name in ("a.tif", "b.tif"):
        values = np.zeros((9, 9, 3), np.uint8) if pixels is None else pixels
        tifffile.imwrite(folder / name, values, photometric="rgb" if values.shape[2:] == (3,) else "minisblack")
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
        (
            ("slide,survival_months,censorship,split", "a.tif,12,1,train", "b.tif,9,0,train"),
            {"model": "timm:resnet18?num_classes=1", "loss": "cox", "accumulate": 8},
        ),
        (
            ("slide,time,event,split", "a.tif,12,1,train", "b.tif,9,1,train"),
            {"model": "timm:resnet18?num_classes=1", "loss": "cox", "accumulate": 8},
        ),
        (
            ("slide,label,split", "a.tif,12+,train", "b.tif,9,train"),
            {"model": "timm:resnet18?num_classes=1", "loss": "cox"},
        ),
        (
            ("slide,label,split", "a.tif,12.5,train", "b.tif,9,train"),
            {"model": "timm:resnet18?num_classes=1", "loss": "mse"},
        ),
        (
            ("slide,label,split", "a.tif,61,train", "b.tif,44,train"),
            {"model": "timm:resnet18?num_classes=1", "loss": "mse"},
        ),
        (("slide,label,split", "a.tif,0,train", "b.tif,2,train"), {"model": "timm:resnet18?num_classes=3"}),
        (
            ("slide,label,fold", "a.tif,good,4", "b.tif,bad,3"),
            {"model": "timm:resnet18?num_classes=2", "loss": "ce", "fold": 3},
        ),
    ],
)
def test_what_the_cohort_calls_for_stands_in_it(tmp_path, lines, expected):
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, *lines))
    settings = yaml.safe_load(path.read_text())
    assert settings | expected == settings
    config = FitConfig.from_yaml(path)
    assert config.slides == str(tmp_path / "cohort.csv")
    class_table(read_cohort(config.slides, config.fold), config.classes)
    with pytest.raises(WriteError, match="exists"):
        write_template(path, tmp_path / "cohort.csv")


def noise(low, high, dtype):
    """Evenly from low to high, but for a hundredth far beyond; `(1, 300, 300)`."""
    values = np.random.default_rng(0).uniform(low, high, (1, 300, 300))
    values[:, ::10, ::10] = 7 * high
    return values.astype(dtype)


@pytest.mark.parametrize(
    ("pixels", "scale"),
    [
        (noise(1000, 4000, np.int16), (1060, 3970)),
        (noise(0.002, 0.2, np.float32), (0.006, 0.198)),
        (noise(-20, 300, np.float64), (-13.6, 296.8)),
        (np.linspace(0, 65535, 9000).reshape(1, 90, 100).astype(np.uint16), None),
        (np.linspace(0, 1, 9000).reshape(1, 90, 100), None),
        (np.zeros((1, 9, 9), np.uint16), None),
        (noise(2, 30, np.uint8), None),
    ],
)
def test_a_scale_is_proposed_from_percentiles(tmp_path, pixels, scale):
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, "slide,split", "a.tif,train", pixels=pixels))
    settings = parse_named(yaml.safe_load(path.read_text())["model"])[1]
    assert settings["in_channels"] == 1
    assert settings.get("scale") == (scale and pytest.approx(scale, rel=0.05))
    said = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines())
    assert ("percentiles, from a look at 1 of the slides" in said) == (scale is not None)


def test_a_scale_has_a_pair_for_each_band_and_leaves_out_no_data(tmp_path):
    bands = np.concatenate([noise(1000 * band, 4000 * band, np.int32) for band in (1, 2, 3, 4)])
    bands[:, :60, :60] = -9999
    make(tmp_path / "bands.tif", bands, nodata=-9999)
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, "slide,split", "bands.tif,train"))
    model = yaml.safe_load(path.read_text())["model"]
    settings = parse_named(model)[1]
    assert settings["in_channels"] == 4
    expected = [value * band for band in (1, 2, 3, 4) for value in (1060, 3970)]
    assert settings["scale"] == pytest.approx(expected, rel=0.05)
    resolve(model)


def test_a_slide_that_cannot_be_looked_at_is_named(tmp_path):
    table = cohort(tmp_path, "slide,split", "a.tif,train")
    (tmp_path / "a.tif").write_bytes(b"")
    with pytest.raises(ImageError, match=r"cohort\.csv line 2: .*a\.tif is empty"):
        write_template(tmp_path / "run.yaml", table)


def test_every_setting_is_there_with_its_default(tmp_path):
    path = write_template(tmp_path / "run.yaml", cohort(tmp_path, "slide,split", "a.tif,train"))
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines()]
    text = "\n".join(line for line in lines if line.partition(":")[0] in described(FitConfig))
    assert {field.name for field in dataclasses.fields(FitConfig)} <= set(yaml.safe_load(text))


def test_names_in_it_are_as_people_write_them(tmp_path):
    folder = tmp_path / "Gef\u00e4\u00dfe # 1"
    folder.mkdir()
    path = write_template(folder / "run.yaml", cohort(folder, "slide,mask,split", "a.tif,a.geojson,train"))
    assert f"slides: {folder}/cohort.csv" in path.read_text(encoding="utf-8").replace("'", "").replace('"', "")
    assert Path(FitConfig.from_yaml(path).slides) == folder / "cohort.csv"


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


@pytest.mark.parametrize(
    ("side", "column", "proposed"),
    [
        (
            896,
            "label",
            {"model": "mil:encoder=timm:resnet18&classes=2", "loss": "ce", "patch_size": 224, "patch_mpp": None},
        ),
        (895, "label", {"model": "timm:resnet18?num_classes=2", "loss": "ce"}),
        (896, "mask", {"loss": "bce_dice"}),
    ],
)
def test_labels_of_large_slides_are_learned_from_their_patches(tmp_path, side, column, proposed):
    values = {"label": ("0", "1"), "mask": ("a.tif", "b.tif")}[column]
    lines = [f"{name}.tif,{value},train" for name, value in zip("ab", values, strict=True)]
    path = cohort(tmp_path, f"slide,{column},split", *lines, pixels=np.zeros((side, side, 3), np.uint8))
    settings = yaml.safe_load(write_template(tmp_path / "run.yaml", path).read_text())
    assert settings | proposed == settings
    assert ("patch_size" in settings) == ("patch_size" in proposed)


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
