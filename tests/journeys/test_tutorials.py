"""What the pages for newcomers say, typed: with less data and fewer epochs, and what they promise looked at."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.features
import yaml
from safetensors.torch import load_file
from shapely.geometry import shape

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cli import main
from gigagrad.images import make_cohort
from tests.pages import play

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("some_page")]

TINY = (("height=768, width=1024", "height=96, width=128"), ("200, 300)", "60, 80)"))
FEWER = ("--epochs 15", "--epochs 1")
SMALL = ("height=768, width=1024", "height=176, width=208")
NOISE = (("(768, 1024, 3)", "(192, 256, 3)"), ("rng.integers(64, 512, 2)", "rng.integers(0, 64, 2)"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def typed(line: str) -> None:
    assert main(line.split()) == 0, line


def rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))


def test_segmentation_and_what_is_done_with_its_slides(capsys: pytest.CaptureFixture[str]) -> None:
    """One small cohort serves the pages that say what to do with slides, annotations and a run."""
    brief = ("--config run.yaml", "--config run.yaml --epochs 1 --model paper-unet --memory 16GiB")
    play("tutorials/segmentation.md", [("--epochs 20", "--epochs 5"), SMALL, brief])
    assert yaml.safe_load(Path("run.yaml").read_text())["classes"] == {"Tissue": 1, "unlabelled": 0}
    assert rows("predictions/instances/synthetic-004.csv")[0].keys() >= {"class", "area_um2"}
    (feature, *_) = json.loads(Path("predictions/geojson/synthetic-004.geojson").read_text())["features"]
    assert feature["properties"]["classification"]["name"] == "Tissue"
    play("start/first-result.md", [("--epochs 20", "--epochs 5")])
    assert "Dice" in Path("report.html").read_text()
    capsys.readouterr()
    play("how-to/interrupted.md", [("--epochs 20", "--epochs 5")])
    assert "train" not in capsys.readouterr().out
    play("tutorials/several-machines.md", [("4000x4000", "400x400")])
    shares = [path.stem for path in sorted(Path("predictions/records").iterdir())]
    assert shares == [f"synthetic-{number:03d}" for number in range(5)]
    play("how-to/tissue.md")
    assert "Dice 0.9" in capsys.readouterr().out
    play(
        "how-to/own-model.md",
        [("--epochs 2", "--epochs 1"), ("(3, 300, 400)", "(3, 30, 40)"), ("1, 300, 400", "1, 30, 40")],
    )
    assert Path("small/masks/synthetic-004.tif").is_file()


def test_a_classifier_of_slides() -> None:
    play("tutorials/slide-classifier.md", [*NOISE, FEWER])
    scored = rows("scores/slides.csv")
    assert [row["name"] for row in scored] == ["s10", "s11"]
    for row in scored:
        assert float(row["probability_normal"]) + float(row["probability_tumour"]) == pytest.approx(1)
        assert row["predicted"] in ("normal", "tumour")
    assert Path("maps/s11.png").is_file()
    assert Path("attention/s11.tif").is_file()
    # A table as other programs write it, and what they call its columns.
    lines = [f"p{k},s{k},{row['label']},{'training' if k < 10 else 'test'}" for k, row in enumerate(rows("cohort.csv"))]
    Path("theirs.csv").write_text("\n".join(["case_id,slide_id,label,Set", *lines]) + "\n")
    typed("init --slides theirs.csv")
    assert yaml.safe_load(Path("run.yaml").read_text())["loss"] == "ce"
    typed("evaluate --predictions scores --slides theirs.csv")


def test_all_patches_of_a_slide(capsys: pytest.CaptureFixture[str]) -> None:
    small = "patch_nets:Encoder&features=16"
    larger = [("timm:resnet18&encoder.pretrained=true", small), ("--patch-size 224", "--patch-size 64 --epochs 1")]
    play("tutorials/bags.md", [*NOISE, FEWER, ("--patches 2000", "--patches 200"), *larger])
    assert "8 steps, best epoch" in capsys.readouterr().out
    scored = rows("scores/slides.csv")
    made = sorted(path.name for path in Path("scores/attention/s11").iterdir())
    assert made == ["patches.png", "s11.geojson", "s11.png", "s11.tif"]

    encoder = ("timm:resnet18?pretrained=true", "patch_nets:Encoder")
    play("how-to/features.md", [encoder, ("patch-size 224", "patch-size 64")])
    assert gg.open_features(next(Path("features").rglob("s1.h5"))).features.shape[1:] == (16,)

    capsys.readouterr()
    slides, tested = ["--slides", "cohort.csv"], ["--split", "test", "--trust", "patch_nets:Encoder"]
    found = []
    for source in (["--predictions", "scores", "--split", "test"], ["--run", "runs/bags", *tested]):
        assert main(["evaluate", *source, *slides, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["slides"]["s11"]["scores"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["probability_tumour"] == pytest.approx(float(scored[1]["probability_tumour"]))

    # The folder to pass on reads slides in the same way, and what is there is left alone.
    assert main(["predict", "--run", "runs/bags/model", *slides, "--out", "again", *tested]) == 0
    assert rows("again/slides.csv")[1]["probability_tumour"] == scored[1]["probability_tumour"]
    capsys.readouterr()
    assert main(["predict", "--run", "runs/bags", *slides, "--out", "scores", *tested]) == 0
    assert "done before" in capsys.readouterr().out
    assert main(["predict", "--run", "runs/bags", *slides, "--out", "scores", "--overlap", "8", *tested]) == 2
    assert "patches" in capsys.readouterr().err


def test_a_network_that_somebody_trained(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_cohort("mine", 1, height=128, width=128)
    net = "smp:Unet?encoder_name=tu-test_resnet&encoder_depth=2&decoder_channels=16,8&classes=3"
    model = gg.models.resolve(net)
    Path("runs").mkdir()
    gg.models.save_model("runs/theirs.pt", net, model)
    theirs = model.state_dict()
    small = [("=mobilenet_v2", "=tu-test_resnet"), ("--epochs 2", "--epochs 1")]
    play("how-to/fine-tune.md", [*small, ("--weights runs/theirs", "--weights runs/theirs.pt")])
    said = " ".join(capsys.readouterr().out.split())
    assert "54 of 56 tensors begin as in" in said
    assert "network.segmentation_head.0.bias (3 there, 1 here)" in said
    assert "parameters are frozen, from network.encoder." in said
    assert "56 of 56 tensors begin as in" in said
    runs = (here / "runs" / name for name in ("heads", "tuned"))
    heads, tuned = (load_file(run / "model" / "model.safetensors") for run in runs)
    encoder, decoder = "network.encoder.model.conv1.0.weight", "network.decoder.blocks.0.conv1.0.weight"
    assert theirs[encoder].equal(heads[encoder])
    assert not theirs[decoder].equal(heads[decoder])
    # One step of Adam is the rate, whatever the gradient.
    assert (tuned[encoder] - heads[encoder]).abs().max() == pytest.approx(0.0003, rel=1e-2)
    assert (tuned[decoder] - heads[decoder]).abs().max() == pytest.approx(0.003, rel=1e-2)


def test_a_satellite_image(capsys: pytest.CaptureFixture[str]) -> None:
    side = 192
    play(
        "tutorials/satellite.md",
        [
            ("SIDE = 512", f"SIDE = {side}"),
            ("(0, 0, 30), (SIDE, SIDE, 90)", "(0, 0, 15), (SIDE, SIDE, 45)"),
            ("< 200", "< 90"),
        ],
    )
    assert yaml.safe_load(Path("runs/lakes/config.yaml").read_text())["bands"] == ["B08", "B04", "B03"]
    lines = Path("runs/lakes/metrics.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(line).get("loss", 0)) for line in lines)
    predict = "predict --run runs/lakes --slides cohort.csv --split test --classes Lake --trust band_nets:PerPixel"
    typed(f"{predict} --out map")  # done before
    found = []
    for what in ("--run runs/lakes --trust band_nets:PerPixel", "--predictions map"):
        capsys.readouterr()
        typed(f"evaluate {what} --slides cohort.csv --json")
        found.append(json.loads(capsys.readouterr().out))

    with rasterio.open("s3.tif") as scene, rasterio.open("map/masks/s3.tif") as mask:
        assert (mask.crs, mask.transform, mask.nodata) == (scene.crs, scene.transform, 255)
        place, ids, missing = scene.transform, mask.read(1), scene.dataset_mask() == 0
    np.testing.assert_array_equal(ids == 255, missing)
    record = json.loads(Path("map/predictions.json").read_text())["slides"][0]
    assert record["mpp"] == 10e6
    with rasterio.open("s3-water.tif") as file:
        water = file.read(1)
    both, total = (ids[~missing] & water[~missing]).sum(), ids[~missing].sum() + water[~missing].sum()
    assert record["dice"] > 0.95
    for scores in found:
        assert scores["mean"] == pytest.approx(record["dice"])
        assert sum(map(sum, scores["confusion"])) == (~missing).sum()
    assert record["dice"] == pytest.approx(2 * int(both) / int(total))

    collection = json.loads(Path("map/geojson/s3.geojson").read_text())
    assert collection["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32633"
    shapes = [feature["geometry"] for feature in collection["features"]]
    assert shapes
    polygons: list[Any] = list(map(shape, shapes))
    assert all(polygon.exterior.is_ccw for polygon in polygons)
    burnt = rasterio.features.rasterize(shapes, ids.shape, transform=place)
    # Regions and holes that are too small to be outlined are all that differs.
    assert (burnt == (ids == 1)).mean() > 0.97
    with gg.open_image("s3.tif") as opened, gg.open_mask("map/geojson/s3.geojson", opened) as again:
        np.testing.assert_array_equal(again.read(Box.whole(side, side))[0], burnt)


def test_your_own_loop() -> None:
    names = play("tutorials/own-loop.md", [*TINY, ("for epoch in range(3)", "for epoch in range(1)")])
    assert Path("prediction.tif").is_file()
    assert names["engine"].in_tiles


def test_what_is_said_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    play("how-it-works/plan.md", [("16000x64000 --memory", "1600x1600 --memory")])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("predicted peak", "predicted time", "smallest budget", "what would help"))
    play("scaling.md", [("16000x64000 --memory", "1600x1600 --memory"), ("1..10000", "1..4")])
    assert "\n15-1 0.04" in capsys.readouterr().out
