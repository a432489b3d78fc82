"""Cohorts whose masks are annotations, or have numbers or sizes of their own: what is learnt, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import yaml

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import Notice
from gigagrad.images import open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import PredictConfig, predict
from gigagrad.prediction.cohort_scores import evaluate_masks, evaluate_model
from gigagrad.prediction.polygons import trace, write_geojson
from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import Checkpoint, RunFolder

SIZE = 176


def recast(cohort_csv, tmp_path, make):
    """The cohort with other masks: `make(plane, path)` writes one and returns its path."""
    lines = ["slide,mask,split"]
    for line in cohort_csv.read_text().splitlines()[1:]:
        slide, mask, split = line.split(",")
        made = make(tifffile.imread(cohort_csv.parent / mask), tmp_path / mask.split(".")[0])
        lines.append(f"{cohort_csv.parent / slide},{made},{split}")
    path = tmp_path / "recast.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def geojson(plane, path, names=("Tumor",)):
    made = path.with_suffix(".geojson")
    write_geojson(made, trace(open_image(plane), mask_classes(len(names), names), min_area_px=1), "x")
    return made


def png(plane, path):
    from PIL import Image

    Image.fromarray(plane).save(path.with_suffix(".png"))
    return path.with_suffix(".png")


@pytest.fixture
def config(cohort_csv, tmp_path):
    return FitConfig(slides=str(cohort_csv), out=str(tmp_path / "run"), epochs=1, checkpoint_seconds=0)


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """A module of the user's own, with models of two and three output channels."""
    (tmp_path / "networks_of_test_annotated.py").write_text(
        "import torch\n"
        "from gigagrad.models import Preprocess\n"
        "class Two(torch.nn.Sequential):\n"
        "    channels = 2\n"
        "    def __init__(self):\n"
        "        super().__init__(Preprocess(), torch.nn.Conv2d(1, self.channels, 3, padding=1))\n"
        "class Three(Two):\n"
        "    channels = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return "networks_of_test_annotated"


@pytest.fixture
def three_channels(networks):
    return f"{networks}:Three"


def weights(config):
    return Checkpoint.load(RunFolder(Path(config.out)).checkpoint).model


def test_outlines_of_a_mask_train_like_the_mask(config, cohort_csv, tmp_path):
    fit(config)
    said = []
    drawn = replace(config, slides=str(recast(cohort_csv, tmp_path, geojson)), out=str(tmp_path / "drawn"))
    result = fit(drawn, [lambda event: said.append(event.text) if isinstance(event, Notice) else None])
    assert "classes: Tumor = 1, unlabelled = 0" in said
    one, other = weights(config), weights(drawn)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert yaml.safe_load(RunFolder(result.out).config.read_text())["classes"] == ["Tumor=1", "unlabelled=0"]
    (first, *_) = predict(PredictConfig(run=drawn.out, slides=(drawn.slides,), out=tmp_path / "out", split="test"))
    features = json.loads((tmp_path / "out" / first.files["geojson"]).read_text())["features"]
    assert {feature["properties"]["classification"]["name"] for feature in features} <= {"Tumor"}
    assert first.dice == pytest.approx(result.scores[first.name])
    assert evaluate_model(drawn.out, drawn.slides, split="test").dice[0] == pytest.approx(result.mean)
    assert evaluate_masks(tmp_path / "out", drawn.slides, split="test").dice[0] == pytest.approx(result.mean)
    with pytest.raises(ConfigError, match=r"no annotation of .* is of the class 'tumour', did you mean 'Tumor'"):
        evaluate_masks(tmp_path / "out", drawn.slides, split="test", classes=("tumour",))


def test_coarse_masks_and_masks_of_other_numbers_train_alike(config, cohort_csv, tmp_path):
    """A PNG of half the size with 255 for the foreground, and the mask that it stands for."""
    fine = recast(
        cohort_csv, tmp_path, lambda plane, path: png(np.kron(plane[::2, ::2], np.ones((2, 2), np.uint8)), path)
    )
    fit(replace(config, slides=str(fine)))
    (tmp_path / "coarse").mkdir()
    coarse = recast(cohort_csv, tmp_path / "coarse", lambda plane, path: png(plane[::2, ::2] * 255, path))
    named = replace(config, slides=str(coarse), classes=("255=1",), out=str(tmp_path / "named"))
    fit(named)
    assert all(torch.equal(weights(config)[key], tensor) for key, tensor in weights(named).items())


def test_unlabelled_pixels_are_ignored(config, cohort_csv, three_channels, tmp_path):
    """Three classes drawn over a part of each slide; the loss, and all scores, are those of that part."""

    def drawn(plane, path):
        labels = plane + 1
        labels[: SIZE // 2] = 0
        return geojson(labels, path, ("Glass", "Tissue"))

    settings = replace(
        config,
        slides=str(recast(cohort_csv, tmp_path, drawn)),
        model=three_channels,
        loss="ce",
        classes=("Glass=0", "Tissue=2"),
        augment=False,
    )
    result = fit(settings)
    trust = (three_channels,)
    assert evaluate_model(settings.out, settings.slides, split="test", trust=trust).dice[0] == pytest.approx(
        result.mean
    )
    made = predict(
        PredictConfig(run=settings.out, slides=(settings.slides,), out=tmp_path / "out", split="test", trust=trust)
    )
    assert [slide.classes for slide in made] == [3, 3]
    assert [slide.dice for slide in made] == pytest.approx(list(result.scores.values()))
    with open_image(tmp_path / "out" / made[0].files["mask"]) as mask:
        predicted = mask.read(Box.whole(SIZE, SIZE))[0][SIZE // 2 :]
    truth = 2 * tifffile.imread(cohort_csv.parent / f"{made[0].name}.mask.tif")[SIZE // 2 :]
    both, total = ((predicted == 2) & (truth == 2)).sum(), (predicted == 2).sum() + (truth == 2).sum()
    ones = (predicted == 1).any()
    assert made[0].dice == pytest.approx((2 * both / total) / (2 if ones else 1))
    assert evaluate_masks(tmp_path / "out", settings.slides, split="test").dice[0] == pytest.approx(result.mean)


@pytest.mark.parametrize("classes", [(), ("Tissue",)])
def test_all_scores_of_two_channels_leave_out_what_training_does(config, cohort_csv, networks, tmp_path, classes):
    """255 in a mask file is ignored by a loss of class ids, whether classes have names or not."""

    def part(plane, path):
        labels = plane.copy()
        labels[: SIZE // 2] = 255
        return png(labels, path)

    model, slides = f"{networks}:Two", str(recast(cohort_csv, tmp_path, part))
    result = fit(replace(config, slides=slides, model=model, loss="ce", classes=classes, learning_rate=0.1, epochs=3))
    trust = (model,)
    made = predict(PredictConfig(run=config.out, slides=(slides,), out=tmp_path / "out", split="test", trust=trust))
    assert 0 < result.mean < 1
    with open_image(tmp_path / "out" / made[0].files["mask"]) as mask:
        predicted = mask.read(Box.whole(SIZE, SIZE))[0][SIZE // 2 :]
    truth = tifffile.imread(cohort_csv.parent / f"{made[0].name}.mask.tif")[SIZE // 2 :]
    assert made[0].dice == pytest.approx(2 * (predicted & truth).sum() / (predicted.sum() + truth.sum()))
    assert [slide.dice for slide in made] == pytest.approx(list(result.scores.values()))
    assert evaluate_model(config.out, slides, split="test", trust=trust).dice[0] == pytest.approx(result.mean)
    assert evaluate_masks(tmp_path / "out", slides, split="test").dice[0] == pytest.approx(result.mean)
    assert evaluate_masks(tmp_path / "out", slides, split="test", classes=["A"]).dice[0] == pytest.approx(result.mean)


@pytest.mark.parametrize("loss", ["bce", "bce_dice"])
def test_a_binary_loss_ignores_what_is_called_so(config, cohort_csv, tmp_path, loss):
    def drawn(plane, path):
        labels = plane + 1
        labels[: SIZE // 2] = 0
        return geojson(labels, path, ("Glass", "Tissue"))

    slides = str(recast(cohort_csv, tmp_path, drawn))
    result = fit(replace(config, slides=slides, loss=loss, classes=("Glass=0", "Tissue=1")))
    assert evaluate_model(config.out, slides, split="test").dice[0] == pytest.approx(result.mean)


def test_masks_of_0_and_255_are_asked_about(config, cohort_csv, three_channels, tmp_path):
    slides = str(recast(cohort_csv, tmp_path, lambda plane, path: png(plane * 255, path)))
    settings = replace(config, slides=slides, model=three_channels, loss="ce")
    with pytest.raises(TargetError, match=r"hold 0 and 255 only.*--classes 255=1"):
        fit(settings)
    # What was refused binds nobody.
    fit(replace(settings, classes=("255=1",)))
    model = RunFolder(tmp_path / "run").best
    (tmp_path / "alone").mkdir()
    model.rename(tmp_path / "alone" / "best.pt")
    trust = (three_channels,)
    with pytest.raises(TargetError, match="hold 0 and 255 only"):
        evaluate_model(tmp_path / "alone", slides, split="test", trust=trust)
    assert evaluate_model(tmp_path / "alone", slides, split="test", classes=["255=1"], trust=trust).scores


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": ("Tumour",)}, "'Tumour', did you mean 'Tumor'"),
        ({"classes": ("Tumor=3", "unlabelled=0"), "loss": "ce"}, "4 classes.* has 1 output channels"),
        ({"loss": "mse", "classes": ("Tumor", "unlabelled=ignore")}, "the loss takes every pixel"),
    ],
)
def test_classes_that_do_not_fit_are_refused_before_anything_is_written(config, cohort_csv, tmp_path, settings, words):
    slides = str(recast(cohort_csv, tmp_path, geojson))
    with pytest.raises(ConfigError, match=words):
        fit(replace(config, slides=slides, **settings))
    assert not (tmp_path / "run").exists()


def test_slide_labels_are_no_masks(config, cohort_csv, tmp_path):
    fit(config)
    labelled = tmp_path / "labels.csv"
    labelled.write_text(f"slide,label,split\n{cohort_csv.parent / 'slide0.tif'},1,test\n")
    with pytest.raises(ConfigError, match="has a label of each slide and no masks"):
        evaluate_model(config.out, labelled)
