"""Labels of slides to the end: fit, predict and evaluate agree, of classes by name and of numbers."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from torch.nn import functional as F

from gigagrad.cli import main
from gigagrad.errors import ConfigError
from gigagrad.models import load_model
from gigagrad.prediction import PredictConfig, SlideEvaluation, predict
from gigagrad.prediction.cohort_scores import evaluate_masks, evaluate_model
from gigagrad.training import FitConfig, FitResult, fit

TRUST = ["networks_of_test_slide_level:Two", "networks_of_test_slide_level:One"]


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    """Two slides to train on, one to validate, four to test: every second one is dark."""
    folder = tmp_path_factory.mktemp("labelled")
    random = np.random.default_rng(0)
    for index in range(7):
        pixels = random.integers(0, 60, (64, 64, 3)) + (60 if index % 2 else 180)
        tifffile.imwrite(folder / f"s{index}.tif", pixels.astype(np.uint8), tile=(64, 64), photometric="rgb")
    return folder


@pytest.fixture
def cohort(slides, tmp_path, monkeypatch):
    """`cohort(first, second)`: the CSV in which light slides have the one label and dark slides the other."""
    (tmp_path / "networks_of_test_slide_level.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def __init__(self, outputs=2):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(3, outputs, 1)\n"
        "    def forward(self, x):\n"
        "        return self.conv(x / 255 - 0.5).mean((2, 3))\n"
        "class One(Two):\n"
        "    def __init__(self):\n"
        "        super().__init__(1)\n"
    )
    monkeypatch.chdir(tmp_path)

    def write(*labels):
        splits = ["train", "train", "val", "test", "test", "test", "test"]
        lines = [f"{slides / f's{i}.tif'},{labels[i % 2]},{split}" for i, split in enumerate(splits)]
        path = tmp_path / "cohort.csv"
        path.write_text("\n".join(["slide,label,split", *lines]) + "\n")
        return path

    return write


def config_of(path, model, loss):
    name = f"networks_of_test_slide_level:{model}"
    return FitConfig(slides=str(path), out="run", model=name, loss=loss, epochs=20, learning_rate=0.1)


def predicted(path):
    return predict(PredictConfig(run="run", slides=(path,), out="out", split="test", trust=tuple(TRUST)))


@pytest.mark.parametrize(
    ("model", "loss", "labels"),
    [("Two", "ce", ("normal", "tumour")), ("Two", "ce", (0, 1)), ("One", "bce", ("normal", "tumour"))],
)
def test_classes(cohort, model, loss, labels):
    path = cohort(*labels)
    result = fit(config_of(path, model, loss))
    assert result.metric == "loss"
    assert result.accuracy == 1
    assert FitResult.load(result.out) == result

    evaluation = evaluate_model("run", path, split="test", trust=TRUST)
    assert isinstance(evaluation, SlideEvaluation)
    assert evaluation.classes == tuple(map(str, labels))
    assert evaluation.confusion == ((2, 0), (0, 2))
    assert [evaluation.measures[name].value for name in ("accuracy", "auc")] == [1, 1]
    # The loss that the run told is the logarithm of the probability that the label has.
    losses = {slide.name: -np.log(slide.outputs[int(slide.truth)]) for slide in evaluation.slides}
    assert losses == pytest.approx(result.scores, rel=1e-4)

    predicted(path)
    assert evaluate_masks("out", path, split="test") == evaluation
    with open("out/slides.csv", newline="") as file:
        assert [line["predicted"] == line["label"] for line in csv.DictReader(file)] == [True] * 4


def test_numbers(cohort):
    path = cohort(1.5, 4)
    result = fit(config_of(path, "One", "mse"))
    assert result.accuracy is None
    evaluation = evaluate_model("run", path, split="test", trust=TRUST)
    assert evaluation.measures["mse"].value == pytest.approx(result.mean, rel=1e-4)
    predicted(path)
    assert evaluate_masks("out", path, split="test") == evaluation


def test_the_loss_of_a_test_slide_is_the_engine_s(cohort, slides):
    result = fit(replace(config_of(cohort(0, 1), "Two", "ce"), epochs=1))
    _, model = load_model("run", TRUST)
    pixels = torch.from_numpy(tifffile.imread(slides / "s3.tif")).permute(2, 0, 1)[None]
    with torch.no_grad():
        assert result.scores["s3"] == pytest.approx(float(F.cross_entropy(model(pixels), torch.tensor([1]))), rel=1e-5)


def test_what_does_not_belong_together_is_said(cohort, slides, tmp_path):
    path = cohort("normal", "tumour")
    fit(replace(config_of(path, "Two", "ce"), epochs=1))
    bare = tmp_path / "bare.csv"
    bare.write_text(f"slide,mask,split\n{slides / 's3.tif'},,test\n")
    with pytest.raises(ConfigError, match=r"scores whole slides, and .* has no labels"):
        evaluate_model("run", bare, trust=TRUST)
    with pytest.raises(ConfigError, match="no prediction of s3 in out; predict the slide first"):
        evaluate_masks("out", path, split="test")
    predicted(path)
    with pytest.raises(ConfigError, match=r"scores whole slides, and .* has no labels"):
        evaluate_masks("out", bare)
    bare.write_text(f"slide,label,split\n{slides / 's3.tif'},,test\n{slides / 's4.tif'},normal,test\n")
    with pytest.raises(ConfigError, match=r"none of s3 .*; give every slide a label"):
        evaluate_model("run", bare, trust=TRUST)


def test_what_a_person_sees(cohort, capsys):
    path = cohort("normal", "tumour")
    fit(config_of(path, "Two", "ce"))
    predicted(path)
    assert main(["evaluate", "--predictions", "out", "--slides", str(path)]) == 0
    text = capsys.readouterr().out
    for words in ("Probability", "area under the ROC curve", "95 % interval", "1.0000 to 1.0000", "True \\ predicted"):
        assert words in text
    assert main(["evaluate", "--predictions", "out", "--slides", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["confusion"] == [[2, 0], [0, 2]]
    assert told["slides"]["s3"]["label"] == "tumour"
