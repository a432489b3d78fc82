"""Whole runs on small slides: right pixels, resumable, and one slide's failure is its own."""

import csv
import importlib
import json
import os
import time
from typing import Any

import numpy as np
import openslide
import pytest
import shapely
import tifffile
import torch
from torch import nn

from gigagrad.at_work import works_in
from gigagrad.boxes import Box
from gigagrad.cohorts.records import file_names, read_records
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, ModelError, WriteError
from gigagrad.events import JobAdvanced, JobFinished, JobStarted, Notice, StepMeasured, TileDone
from gigagrad.images import open_image
from gigagrad.images.write import write_pyramid
from gigagrad.models import resolve, save_model
from gigagrad.prediction import outputs
from gigagrad.prediction.predict import predict

module = importlib.import_module("gigagrad.prediction.predict")
cohort_scores = importlib.import_module("gigagrad.prediction.cohort_scores")


class Darkness(nn.Module):
    """One logit: positive where the slide is darker than 160. Exact in any tiling."""

    def forward(self, x_NCHW):
        return (160 - x_NCHW.float()).mean(1, keepdim=True)


class Bands(nn.Module):
    """Three classes by brightness."""

    def forward(self, x_NCHW):
        grey = x_NCHW.float().mean(1, keepdim=True)
        return torch.cat([grey - 200, torch.zeros_like(grey), 150 - grey], 1)


class Shrinking(nn.Module):
    def forward(self, x_NCHW):
        return nn.functional.avg_pool2d(x_NCHW.float(), 2)[:, :1]


def whole(path, level=0):
    with open_image(path, level=level) as image:
        return np.asarray(image.read(Box.whole(*image.shape[1:])))


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Predict with a module of this file instead of a saved one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.pt").write_bytes(b"weights")

    def choose(model):
        monkeypatch.setattr(module, "load_model", lambda path, trust: (type(model).__name__, model.eval()))

    choose(Darkness())
    return choose


@pytest.fixture
def config(tmp_path, jpeg_slide, use):
    def make(**settings):
        return PredictConfig(**{"run": tmp_path / "run", "slides": (jpeg_slide,), "out": tmp_path / "out", **settings})

    return make


def test_while_it_predicts_it_says_which_tile_is_computed(config, tmp_path, jpeg_slide, monkeypatch):
    monkeypatch.setattr("gigagrad.at_work._EVERY_SECONDS", 0.001)
    monkeypatch.setattr("gigagrad.at_work._SHARE", 0)
    told: list[dict[str, Any]] = []

    def listen(event: Any) -> None:
        end = time.monotonic() + 60
        while isinstance(event, TileDone) and not any("boxes" in work for work in told):
            assert time.monotonic() < end, "nothing is written"
            told[:] = works_in(tmp_path / "out")

    predict(config(), (listen,))
    (work,) = told
    assert (work["slide"], work["job"]) == (str(jpeg_slide), "predict")
    assert all(Box(*box).within(Box.whole(700, 900)) for box in work["boxes"])
    assert not list((tmp_path / "out").glob(".now*"))


def test_a_model_is_scored_as_it_predicts(config, tmp_path, jpeg_slide, monkeypatch):
    truth = (whole(jpeg_slide).astype(np.float32).mean(0) < 160).astype(np.uint8)
    write_pyramid(tmp_path / "true.tif", [truth], shape=(*truth.shape, 1), dtype=np.uint8, nearest=True)
    table = tmp_path / "cohort.csv"
    table.write_text(f"slide,mask\n{jpeg_slide},true.tif\n")
    settings: dict[str, Any] = {"threshold": 0.9999, "mpp": 1.0, "target_mpp": 2.0}
    (result,) = predict(config(slides=(table,), outputs=("mask",), **settings))
    assert (result.height, result.width) == (350, 450)  # the level of 1 um/px by what the file says
    assert result.dice is not None
    assert result.dice < 0.99
    monkeypatch.setattr(cohort_scores, "load_model", lambda path, trust: ("Darkness", Darkness().eval()))
    assert cohort_scores.evaluate_model(tmp_path / "run", table, **settings).dice[0] == result.dice
    assert cohort_scores.evaluate_masks(tmp_path / "out", table).dice[0] == result.dice
    with pytest.raises(ConfigError, match="only_tissue is of predictions"):
        cohort_scores.evaluate_model(tmp_path / "run", table, only_tissue="auto")


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_all_outputs_of_one_slide(config, tmp_path, jpeg_slide):
    expected = (whole(jpeg_slide).astype(np.float32).mean(0) < 160).astype(np.uint8)
    write_pyramid(tmp_path / "true.tif", [expected], shape=(*expected.shape, 1), dtype=np.uint8, nearest=True)
    (tmp_path / "cohort.csv").write_text(f"slide,mask\n{jpeg_slide},true.tif\n")
    heard: list[Any] = []
    (result,) = predict(config(slides=(tmp_path / "cohort.csv",)), (heard.append,))

    out = tmp_path / "out"
    assert files_in(out) == [
        "geojson/small.geojson",
        "masks/small.tif",
        "overlays/small.png",
        "predictions.json",
        "records/small.json",
    ]
    assert np.array_equal(whole(out / result.files["mask"])[0], expected)
    assert (result.dice, result.iou) == (1.0, 1.0)
    assert (result.height, result.width, result.mpp) == (700, 900, pytest.approx(0.5))  # type: ignore[comparison-overlap]
    with openslide.OpenSlide(out / result.files["mask"]) as opened:
        assert opened.level_count == 2
        assert float(opened.properties["openslide.mpp-x"]) == pytest.approx(0.5, rel=1e-3)
    features = json.loads((out / result.files["geojson"]).read_text())["features"]
    area = sum(shapely.geometry.shape(feature["geometry"]).area for feature in features)
    assert area == pytest.approx(expected.sum(), rel=0.02)
    assert len(features) == result.regions

    assert isinstance(heard[0], JobStarted)
    assert isinstance(heard[-1], JobFinished)
    assert any(isinstance(event, TileDone) for event in heard)
    assert [event.pixels for event in heard if isinstance(event, StepMeasured)] == [700 * 900]
    assert [event.done for event in heard if isinstance(event, JobAdvanced)] == [1]
    assert read_records(out) == {"small": result}


def test_the_papers_network_predicts_as_it_does_on_the_whole_image(tmp_path, jpeg_slide):
    torch.manual_seed(3)
    model = resolve("paper-unet").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.ascontiguousarray(whole(jpeg_slide)))[None])[0, 0].numpy()
    middle = float(logits.mean())
    threshold = 1 / (1 + np.exp(-middle))
    save_model(tmp_path / "model.pt", "paper-unet", model)
    predict(PredictConfig(run=tmp_path / "model.pt", slides=(jpeg_slide,), out=tmp_path / "out", threshold=threshold))
    sure = np.abs(logits - middle) > 1e-5
    assert sure.mean() > 0.9
    assert np.array_equal(whole(tmp_path / "out/masks/small.tif")[0][sure], logits[sure] > middle)


def test_a_second_run_leaves_complete_slides_alone(config, tmp_path):
    (first,) = predict(config())
    times = {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in files_in(tmp_path / "out")}
    heard: list[Any] = []
    assert predict(config(), (heard.append,)) == (first,)
    assert {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in times} == times
    assert not any(isinstance(event, TileDone) for event in heard)

    (tmp_path / "out" / first.files["overlay"]).unlink()
    heard.clear()
    (again,) = predict(config(), (heard.append,))
    assert not any(isinstance(event, TileDone) for event in heard)
    assert (tmp_path / "out" / again.files["overlay"]).is_file()

    (tmp_path / "out" / first.files["mask"]).unlink()
    (again,) = predict(config(), (heard.append,))
    assert any(isinstance(event, TileDone) for event in heard)
    assert (tmp_path / "out" / again.files["mask"]).is_file()


def test_a_further_output_is_made_of_the_mask_or_in_another_sweep(config, use, tmp_path):
    use(Bands())
    predict(config())
    overlay = os.stat(tmp_path / "out/overlays/small.png").st_mtime_ns
    heard: list[Any] = []
    (result,) = predict(config(outputs=("instances", "graph", "tiatoolbox")), (heard.append,))
    assert list(result.files) == ["mask", "geojson", "overlay", "instances", "graph", "tiatoolbox"]
    assert not any(isinstance(event, TileDone) for event in heard)
    assert os.stat(tmp_path / "out/overlays/small.png").st_mtime_ns == overlay
    assert predict(config()) == (result,)

    (result,) = predict(config(outputs=("probabilities",)), (heard.append,))
    assert any(isinstance(event, TileDone) for event in heard)
    assert files_in(tmp_path / "out") == sorted([*result.files.values(), "predictions.json", "records/small.json"])
    assert len(result.files) == 7
    features = json.loads((tmp_path / "out" / result.files["geojson"]).read_text())["features"]
    with (tmp_path / "out" / result.files["instances"]).open(newline="", encoding="utf-8") as file:
        measured = [float(row["mean_probability"]) for row in csv.DictReader(file)]
    assert [each["properties"]["measurements"]["Mean probability"] for each in features] == measured
    assert measured
    assert all(1 / 3 < each <= 1 for each in measured)
    assert os.stat(tmp_path / "out/overlays/small.png").st_mtime_ns > overlay


def test_a_further_output_replaces_nobody_s_file(config, tmp_path):
    predict(config(outputs=("mask",)))
    (tmp_path / "out" / "instances").mkdir()
    (tmp_path / "out" / "instances" / "small.csv").write_text("precious")
    with pytest.raises(WriteError, match="not predicted here"):
        predict(config(outputs=("instances",)))
    assert (tmp_path / "out" / "instances" / "small.csv").read_text() == "precious"


def test_images_in_other_formats(config, use, tmp_path, jpeg_slide):
    use(Bands())
    predict(config(outputs=("mask", "probabilities")))
    with pytest.raises(ConfigError, match="format or class names"):
        predict(config(format="ome-zarr"))
    for form, suffix in (("ome-tiff", ".ome.tif"), ("ome-zarr", ".ome.zarr")):
        (result,) = predict(config(format=form, outputs=("probabilities", "geojson"), out=tmp_path / form))
        assert result.files["mask"] == f"masks/small{suffix}"
        for output, shape in (("mask", (1, 700, 900)), ("probabilities", (3, 700, 900))):
            plain = tmp_path / "out" / file_names("small", "tiff")[output]
            assert np.array_equal(whole(tmp_path / form / result.files[output]), whole(plain))
            with open_image(tmp_path / form / result.files[output]) as image:
                assert (image.shape, image.mpp) == (shape, pytest.approx(0.5))  # type: ignore[comparison-overlap]
        assert predict(config(format=form, outputs=("mask",), out=tmp_path / form)) == (result,)


def test_other_settings_or_another_slide_need_permission(config, tmp_path, jpeg_slide):
    predict(config())
    with pytest.raises(ConfigError, match="another model, threshold"):
        predict(config(threshold=0.9))
    (tmp_path / "small.tif").write_bytes(jpeg_slide.read_bytes())
    with pytest.raises(ConfigError, match="another slide of this name"):
        predict(config(slides=(tmp_path / "small.tif",)))
    (result,) = predict(config(threshold=0.9, overwrite=True))
    assert result.made_with.threshold == 0.9


def test_files_of_other_programs_are_not_replaced(config, tmp_path):
    (tmp_path / "out" / "masks").mkdir(parents=True)
    (tmp_path / "out" / "masks" / "small.tif").write_bytes(b"precious")
    with pytest.raises(WriteError, match="not predicted here"):
        predict(config())
    assert (tmp_path / "out" / "masks" / "small.tif").read_bytes() == b"precious"
    (result,) = predict(config(overwrite=True))
    assert result.status == "done"


def test_one_bad_slide_does_not_lose_the_others(config, tmp_path, jpeg_slide):
    bad = tmp_path / "bad.tif"
    bad.write_bytes(jpeg_slide.read_bytes()[:3000])
    heard: list[Any] = []
    broken, good = predict(config(slides=(bad, jpeg_slide)), (heard.append,))
    assert (broken.status, good.status) == ("failed", "done")
    assert "bad" in broken.error
    assert [event.warning for event in heard if isinstance(event, Notice)] == [True]
    assert [name for name in files_in(tmp_path / "out") if "bad" in name] == ["records/bad.json"]

    bad.write_bytes(jpeg_slide.read_bytes())
    heard.clear()
    mended, kept = predict(config(slides=(bad, jpeg_slide)), (heard.append,))
    assert mended.status == "done"
    assert kept == good


def test_a_run_stopped_in_the_middle_continues(config, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "write_overlay", stop)
        with pytest.raises(KeyboardInterrupt):
            predict(config())
    assert read_records(tmp_path / "out")["small"].status == "running"
    (result,) = predict(config())
    assert result.status == "done"


def test_a_mask_of_another_size_is_refused_before_any_work(config, tmp_path, jpeg_slide):
    small = np.zeros((10, 10), np.uint8)
    write_pyramid(tmp_path / "true.tif", [small], shape=(10, 10, 1), dtype=np.uint8, nearest=True)
    (tmp_path / "cohort.csv").write_text(f"slide,mask\n{jpeg_slide},true.tif\n")
    (result,) = predict(config(slides=(tmp_path / "cohort.csv",)))
    assert "10 x 10 px and its slide 700 x 900 px" in result.error
    assert files_in(tmp_path / "out") == ["predictions.json", "records/small.json"]


def test_several_classes(config, use, tmp_path, jpeg_slide):
    use(Bands())
    (result,) = predict(config(classes=("Middle", "Dark")))
    grey = torch.from_numpy(np.ascontiguousarray(whole(jpeg_slide))).float().mean(0)
    expected = torch.stack([grey - 200, torch.zeros_like(grey), 150 - grey]).argmax(0)
    assert np.array_equal(whole(tmp_path / "out" / result.files["mask"])[0], expected.numpy())
    features = json.loads((tmp_path / "out" / result.files["geojson"]).read_text())["features"]
    assert {feature["properties"]["classification"]["name"] for feature in features} == {"Middle", "Dark"}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Bands(), {"classes": ("One",)}, "1 class names"),
        (Shrinking(), {}, "pixel for pixel"),
        (Darkness(), {"memory": "1 MiB"}, "the budget is 1 MiB"),
    ],
    ids=["names", "size", "budget"],
)
def test_what_cannot_work_leaves_no_files(config, use, tmp_path, model, settings, message):
    use(model)
    (result,) = predict(config(**settings))
    assert message in result.error
    assert files_in(tmp_path / "out") == ["predictions.json", "records/small.json"]


def test_a_lower_level_gives_outlines_in_level_0_pixels(config, tmp_path, jpeg_slide):
    (result,) = predict(config(level=1))
    assert (result.height, result.width, result.mpp) == (350, 450, pytest.approx(1.0))  # type: ignore[comparison-overlap]
    expected = whole(jpeg_slide, level=1).astype(np.float32).mean(0) < 160
    assert np.array_equal(whole(tmp_path / "out" / result.files["mask"])[0], expected)
    features = json.loads((tmp_path / "out" / result.files["geojson"]).read_text())["features"]
    shapes = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    assert sum(shape.area for shape in shapes) == pytest.approx(4 * expected.sum(), rel=0.02)


def test_what_concerns_all_slides_is_raised(config, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        predict(config())
    monkeypatch.undo()
    with pytest.raises(ModelError):
        predict(config(run=tmp_path / "nothing.pt"))


def test_an_output_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot make the folder"):
        predict(config(out=tmp_path / "file" / "out"))


@pytest.mark.slides
def test_a_real_slide(config, real_slides):
    (result,) = predict(config(slides=(real_slides / "slides" / "CMU-1-Small-Region.svs",)))
    assert (result.status, result.height, result.width) == ("done", 2967, 2220)
    assert result.mpp == pytest.approx(0.499)
    assert result.regions


def test_a_run_is_named_by_its_folder(config, jpeg_slide, tmp_path):
    """`gg.predict("runs/a", slides=..., out=...)`; settings take the place of a config's own."""
    (by_name,) = predict(str(tmp_path / "run"), slides=jpeg_slide, out=tmp_path / "one", outputs=("mask",))
    predict(config(), out=tmp_path / "two", outputs=("mask",))
    assert not by_name.failed
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="unknown setting 'slide'"):
        predict("runs/a", slide="x.svs", out="y")


def test_another_resolution_or_true_mask_counts_in_a_second_run(config, tmp_path, jpeg_slide):
    """Records said what an earlier run had found by them."""
    expected = (whole(jpeg_slide).astype(np.float32).mean(0) < 160).astype(np.uint8)
    mask, cohort = tmp_path / "true.tif", tmp_path / "cohort.csv"

    def again(true, mpp=""):
        write_pyramid(mask, [true], shape=(*true.shape, 1), dtype=np.uint8, nearest=True, overwrite=True)
        cohort.write_text(f"slide,mask,mpp\n{jpeg_slide},true.tif,{mpp}\n")
        steps: list[Any] = []
        (result,) = predict(
            config(slides=(cohort,), outputs=("mask", "overlay")),
            (lambda event: steps.append(event) if isinstance(event, TileDone) else None,),
        )
        return result, bool(steps)

    first, computed = again(expected)
    assert (first.dice, computed) == (1, True)
    overlay = tmp_path / "out" / first.files["overlay"]
    drawn = overlay.read_bytes()
    corrected = expected.copy()
    corrected[: len(corrected) // 2] = 0
    result, computed = again(corrected)
    assert result.dice is not None
    assert result.dice < 1
    assert not computed
    assert overlay.read_bytes() != drawn
    assert again(corrected) == (result, False)
    result, computed = again(corrected, mpp=0.3)
    assert (result.mpp, computed) == (0.3, True)
    assert again(corrected, mpp=0.3) == (result, False)


def test_a_slide_that_was_replaced_is_predicted_anew(config, tmp_path):
    """Another one of as many bytes was taken for it."""
    slide = tmp_path / "slide.tif"
    for value in (250, 50):
        tifffile.imwrite(slide, np.full((40, 48, 3), value, np.uint8), tile=(16, 16), photometric="rgb")
        (result,) = predict(config(slides=(slide,)))
        assert whole(tmp_path / "out" / result.files["mask"]).any() == (value == 50)
