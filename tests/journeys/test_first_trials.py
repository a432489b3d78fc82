"""First trials as a newcomer types them: a handful of commands, from files as other programs write them to files that
other programs read."""

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
from gigagrad.images import make_cohort
from gigagrad.prediction.classes import mask_classes
from gigagrad.prediction.polygons import trace

pytestmark = pytest.mark.slow

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


def test_from_qupath_and_back(here: Path) -> None:
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
        "fit --config run.yaml --epochs 1 --learning-rate 0.003 "
        "--model smp:Unet?encoder_name=resnet18&classes=3&encoder_depth=3&decoder_channels=32,16,8 "
        "--classes Stroma=1 Tumor=2 unlabelled=0 --class-weights balanced --schedule cosine --out runs/first"
    )
    typed("predict --run runs/first --slides cohort.csv --split test --out predictions")
    typed("evaluate --run runs/first --slides cohort.csv")
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
    model = gg.models.load("runs/first/model")
    tensors = load_file(here / "runs" / "first" / "model" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()


def test_a_mask_of_the_tissue(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tissue = np.minimum(blobs(0), 1)
    write_slide(here / "a.tif", tissue, 0)
    (here / "a.geojson").write_text(json.dumps(annotated(tissue)))
    (here / "outlines.csv").write_text("slide,mask\na.tif,a.geojson\n")
    typed("label a.tif --out tissue/masks")
    typed("evaluate --predictions tissue --slides outlines.csv --json")
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["mean"] > 0.9


def test_a_classifier_of_slides(here: Path) -> None:
    lines = ["case_id,slide_id,label,Set"]
    for number in range(8):
        labels = np.full((SIDE, SIDE), number % 2 + 1, np.uint8)
        write_slide(here / f"s{number}.tif", labels, number)
        lines.append(
            f"p{number},s{number},{'tumor' if number % 2 else 'normal'},{'training' if number < 5 else 'test'}"
        )
    (here / "cohort.csv").write_text("\n".join(lines) + "\n")
    typed("init --slides cohort.csv")
    assert yaml.safe_load((here / "run.yaml").read_text())["loss"] == "ce"
    typed(
        "fit --config run.yaml --model timm:test_resnet?num_classes=2 --epochs 1 --frozen network.conv1 "
        "--out runs/slides"
    )
    typed("predict --run runs/slides --slides cohort.csv --split test --out scores")
    rows = list(csv.DictReader((here / "scores" / "slides.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == ["s5", "s6", "s7"]
    for row in rows:
        assert float(row["probability_normal"]) + float(row["probability_tumor"]) == pytest.approx(1)
        assert row["predicted"] in ("normal", "tumor")
    typed("evaluate --run runs/slides --slides cohort.csv --json")
    typed("evaluate --predictions scores --slides cohort.csv")


def test_a_network_that_somebody_trained(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, folder in enumerate(("theirs", "mine"), 1):
        make_cohort(folder, 1, height=128, width=128, seed=number)
    net = "smp:Unet?encoder_name=tu-test_resnet&encoder_depth=2&decoder_channels=16,8"
    settings = "--epochs 1 --learning-rate 0.01 --no-augment"
    typed(f"fit --slides theirs/cohort.csv --model {net}&classes=3 --loss ce {settings} --out runs/theirs")
    mine = f"fit --slides mine/cohort.csv --model {net} --loss bce_dice {settings}"
    capsys.readouterr()
    typed(f"{mine} --weights runs/theirs --frozen network.encoder --out runs/heads")
    said = " ".join(capsys.readouterr().out.split())
    assert "54 of 56 tensors begin as in" in said
    assert "network.segmentation_head.0.bias (3 there, 1 here)" in said
    assert "parameters are frozen, from network.encoder." in said
    typed(f"{mine} --weights runs/heads --rates network.encoder=0.1 --out runs/tuned")
    assert "56 of 56 tensors begin as in" in " ".join(capsys.readouterr().out.split())
    runs = (here / "runs" / name for name in ("theirs", "heads", "tuned"))
    theirs, heads, tuned = (load_file(run / "model" / "model.safetensors") for run in runs)
    encoder, decoder = "network.encoder.model.conv1.0.weight", "network.decoder.blocks.0.conv1.0.weight"
    assert theirs[encoder].equal(heads[encoder])
    assert not theirs[decoder].equal(heads[decoder])
    # One step of Adam is the rate, whatever the gradient.
    assert (tuned[encoder] - heads[encoder]).abs().max() == pytest.approx(0.001, rel=1e-2)
    assert (tuned[decoder] - heads[decoder]).abs().max() == pytest.approx(0.01, rel=1e-2)


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
        row["bag"]: float(row["risk"]) for row in csv.DictReader((here / "risks/bags.csv").read_text().splitlines())
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
