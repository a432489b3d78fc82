"""A handful of commands, from files as other programs write them to files that other programs read, and longer ways
than those of `test_tutorials.py`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import tifffile
import yaml
from safetensors.torch import load_file
from shapely.geometry import shape

import gigagrad as gg
from gigagrad import cli
from gigagrad.boxes import Box
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction.polygons import trace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("some_page")]

SIDE = 192


def typed(line: str) -> None:
    assert cli.main(line.split()) == 0, line


def blobs(seed: int) -> np.ndarray:
    """Two kinds of discs over nothing: ids 0, 1 and 2."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    labels = np.zeros((SIDE, SIDE), np.uint8)
    for number in range(6):
        cy, cx, radius = rng.integers(SIDE), rng.integers(SIDE), rng.integers(20, 45)
        labels[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = number % 2 + 1
    return labels


def write_slide(path: Path, labels: np.ndarray, seed: int) -> None:
    colours = np.array([(245, 245, 245), (120, 60, 140), (220, 130, 160)])[labels]
    noisy = colours + np.random.default_rng(seed).integers(-10, 10, colours.shape)
    tifffile.imwrite(path, noisy.clip(0, 255).astype(np.uint8), tile=(64, 64), photometric="rgb")


def annotated(labels: np.ndarray) -> dict[str, Any]:
    """As QuPath exports it: outlines of a person's hand, so simplified, with class names and colours."""
    features = []
    for region in trace(gg.open_image(labels), mask_classes(2, ["Tumor", "Stroma"])).regions:
        outline = json.loads(shapely.to_geojson(region.polygon.simplify(1.5)))
        kind = {"name": region.kind.name, "color": [200, 0, 0]}
        properties = {"objectType": "annotation", "classification": kind}
        features.append({"type": "Feature", "geometry": outline, "properties": properties})
    return {"type": "FeatureCollection", "features": features}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMOOTH = """
import gigagrad as gg
from torch import nn

class Smooth(nn.Sequential):
    def __init__(self):
        first, last = nn.Conv2d(3, 8, 9, padding=4), nn.Conv2d(8, 3, 9, padding=4)
        super().__init__(gg.models.Normalise((0.5,) * 3, (0.5,) * 3), first, nn.ReLU(), last)
"""


def test_from_qupath_and_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "networks_of_two_classes.py").write_text(SMOOTH)
    monkeypatch.syspath_prepend(here)
    lines = ["slide;mask;split"]
    (here / "slides").mkdir()
    for number, split in enumerate(("train", "train", "val", "test")):
        labels = blobs(number)
        write_slide(here / "slides" / f"{number}.tif", labels, number)
        (here / f"{number}.geojson").write_text(json.dumps(annotated(labels)))
        lines.append(f"slides/{number}.tif;{number}.geojson;{split}")
    (here / "cohort.csv").write_text("\n".join(lines) + "\n")
    typed("init --slides cohort.csv")
    proposed = yaml.safe_load((here / "run.yaml").read_text())
    assert proposed["classes"] == {"Stroma": 1, "Tumor": 2, "unlabelled": "ignore"}
    assert proposed["model"].endswith("classes=3")
    typed(
        "fit --config run.yaml --epochs 6 --learning-rate 0.01 "
        "--model networks_of_two_classes:Smooth "
        "--classes Stroma=1 Tumor=2 unlabelled=0 --class-weights balanced --schedule cosine --out runs/first"
    )
    trust = "--trust networks_of_two_classes:Smooth"
    typed(f"predict --run runs/first --slides cohort.csv --split test --out predictions {trust}")
    typed(f"evaluate --run runs/first --slides cohort.csv {trust}")
    typed("evaluate --predictions predictions --slides cohort.csv")
    typed("report --run runs/first --predictions predictions --out report.html")
    collection = json.loads((here / "predictions" / "geojson" / "3.geojson").read_text())
    mask = tifffile.imread(here / "predictions" / "masks" / "3.tif")
    assert mask.shape == (SIDE, SIDE)
    for feature in collection["features"]:
        assert shape(feature["geometry"]).is_valid
        assert feature["properties"]["classification"]["name"] in ("Stroma", "Tumor")
    with (
        gg.open_image(here / "slides" / "3.tif") as slide,
        gg.open_mask(
            here / "predictions" / "geojson" / "3.geojson", slide, {"Stroma": 1, "Tumor": 2, "unlabelled": 0}
        ) as again,
    ):
        painted = again.read(Box.whole(SIDE, SIDE))[0]
    # Regions and holes that are too small to be outlined are all that differs.
    assert painted.any()
    assert (painted == mask)[painted > 0].mean() > 0.9
    model = gg.models.load("runs/first/model", trust=["networks_of_two_classes:Smooth"])
    tensors = load_file(here / "runs" / "first" / "model" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()


SLIDE_NET = """
import torch
from torch import nn

class SlideNet(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU())
        self.weigh, self.head = nn.Conv2d(8, 1, 1), nn.Linear(8, outputs)
        self.attention = nn.Sigmoid()

    def forward(self, x):
        features = self.features(x / 255 - 0.5)
        weights = self.attention(self.weigh(features))
        return self.head((features * weights).sum((2, 3)) / weights.sum((2, 3)))
"""


def test_from_patients_to_risks_and_where_they_come_from(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the dark square lives shorter; every third patient has two slides."""
    (here / "networks_of_a_journey.py").write_text(SLIDE_NET)
    monkeypatch.syspath_prepend(here)
    rng = np.random.default_rng(0)
    lines = ["slide,patient,survival_months,censorship,split"]
    for number in range(12):
        split = "train" if number < 8 else "test"
        for part in range(1 + (number % 3 == 0)):
            pixels = rng.integers(180, 250, (96, 128, 3))
            pixels[24:56, 64:96] = rng.integers(20, 80, (32, 32, 3)) if number % 2 else 200
            tifffile.imwrite(here / f"p{number}-{part}.tif", pixels.astype(np.uint8), tile=(64, 64), photometric="rgb")
            lines.append(
                f"p{number}-{part}.tif,p{number},{number % 5 + (6 if number % 2 else 30)},{int(number == 11)},{split}"
            )
    (here / "survival.csv").write_text("\n".join(lines) + "\n")
    net = "networks_of_a_journey:SlideNet"
    typed(
        f"fit --slides survival.csv --model {net}?outputs=1 --loss cox --accumulate 8 --epochs 12 --learning-rate 0.05 "
        "--no-augment --out runs/risk"
    )
    typed(f"predict --run runs/risk --slides survival.csv --split test --out risks --trust {net}")
    typed("evaluate --predictions risks --slides survival.csv")
    risks = {
        row["case"]: float(row["risk"]) for row in csv.DictReader((here / "risks/cases.csv").read_text().splitlines())
    }
    assert min(risks["p9"], risks["p11"]) > max(risks["p8"], risks["p10"])
    typed(f"attribute --run runs/risk --slides p9-0.tif --out maps --trust {net}")
    found = tifffile.imread(here / "maps" / "p9-0.tif")
    inside = np.zeros(found.shape, bool)
    inside[3:7, 8:12] = True
    assert found[inside].mean() > 1.5 * found[~inside].mean()
    typed(f"attribute --run runs/risk --slides p9-0.tif --module attention --out attention --trust {net}")
    assert tifffile.imread(here / "attention" / "p9-0.tif").shape == (23, 31)
    typed("report --run runs/risk --out report.html")
    assert "C-index" in (here / "report.html").read_text()
