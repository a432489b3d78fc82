"""Labels of slides to the end: fit, predict and evaluate agree, of classes by name and of numbers."""

import csv
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from torch.nn import functional as F

from gigagrad.cli import main
from gigagrad.errors import ConfigError, TargetError
from gigagrad.events import MetricsLogged, Notice
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


@pytest.mark.parametrize(("loss", "column"), [("mse", "output"), ("bce", "probability_1")])
def test_the_folder_to_pass_on_says_what_the_output_is(cohort, loss, column):
    """A number was read as the logit of a class."""
    path = cohort(0, 1)
    fit(replace(config_of(path, "One", loss), epochs=1))
    for run in ("run", "run/model"):
        (slide, *_) = predict(run, slides=[path], out=f"out/{run}", split="test", trust=TRUST)
        assert list(slide.scores) == [column]


def test_numbers_that_are_names_are_refused(cohort):
    """With a comma before decimals they are: each was learnt as its place in alphabetical order."""
    config = config_of(cohort("low", "high"), "One", "mse")
    with pytest.raises(ConfigError, match=r"mse learns numbers, and the labels of .* are names \(high = 0, low = 1"):
        fit(config)
    assert fit(replace(config, classes=("low=1", "high=4"), epochs=1)).metric == "loss"


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


@pytest.mark.parametrize(
    ("outputs", "loss", "labels", "words"),
    [
        (1000, "ce", ("normal", "tumour"), "of 2 classes and .* has 1000 outputs; make them as many, as in timm:NAME"),
        (3, "ce", (0, 1), "of 2 classes and .* has 3 outputs"),
        (300, "ce", (0, 299), "has 300 outputs, and ce leaves out what has the id 255"),
        (2, "bce", (0, 1), "bce takes one output of a slide, and .* has 2; give it one"),
    ],
)
def test_a_classifier_has_an_output_for_each_class(cohort, outputs, loss, labels, words):
    with pytest.raises(ConfigError, match=words):
        fit(config_of(cohort(*labels), f"Two?outputs={outputs}", loss))


def test_classes_that_the_cohort_does_not_show_may_be_named(cohort):
    result = fit(replace(config_of(cohort(0, 1), "Two?outputs=3", "ce"), epochs=1, classes=("0=0", "1=1", "2=2")))
    assert result.scores


def test_what_a_person_sees(cohort, capsys):
    path = cohort("normal", "tumour")
    fit(config_of(path, "Two", "ce"))
    predicted(path)
    assert main(["evaluate", "--predictions", "out", "--slides", str(path)]) == 0
    text = capsys.readouterr().out
    for words in ("scores", "area under the ROC curve", "95 % interval", "1.0000 to 1.0000", "true \\ predicted"):
        assert words in text
    assert re.search(r"s3 +tumour +tumour +normal 0\.\d{4}, tumour 0\.\d{4}", text)
    assert main(["evaluate", "--predictions", "out", "--slides", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["confusion"] == [[2, 0], [0, 2]]
    assert told["slides"]["s3"]["label"] == "tumour"


PATIENTS = "slide,patient,survival_months,censorship,split"


@pytest.fixture
def patients(cohort, slides, tmp_path):
    """Nine patients, three of them with two slides; the darker ones live shorter. `write(**columns)` the cohort."""
    cohort(0, 1)  # the networks
    random = np.random.default_rng(1)
    lines = []
    for number in range(9):
        months = 3 * number + 2
        for part in range(1 + (number % 3 == 0)):
            pixels = random.integers(0, 20, (48, 64, 3)) + 20 * number + 20 * part
            tifffile.imwrite(tmp_path / f"p{number}-{part}.tif", pixels.astype(np.uint8), photometric="rgb")
            split = "train" if number % 2 else "val" if number == 0 else "test"
            lines.append(f"p{number}-{part}.tif,p{number},{months},{int(number == 8)},{split}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join([PATIENTS, *lines]) + "\n")
    return path


def test_survival_of_patients(patients, capsys):
    config = replace(config_of(patients, "One", "cox"), accumulate=4, epochs=6)
    with pytest.raises(ConfigError, match="--accumulate 8"):
        fit(replace(config, accumulate=1))
    result = fit(config)
    assert result.metric == "risk"
    assert list(result.scores) == ["p2", "p4", "p6", "p8"]
    assert result.c_index == 1
    assert FitResult.load(result.out) == result
    evaluation = evaluate_model("run", patients, split="test", trust=TRUST)
    assert {slide.name: slide.scores["risk"] for slide in evaluation.slides} == pytest.approx(result.scores, rel=1e-5)
    assert [(slide.truth, slide.event) for slide in evaluation.slides][-1] == (26, False)
    predicted(patients)
    assert evaluate_masks("out", patients, split="test").to_dict() == evaluation.to_dict()
    with open("out/slides.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["case"] for line in lines if line["name"].startswith("p6")] == ["p6", "p6"]
    with open("out/cases.csv", newline="") as file:
        cases = {line["case"]: line for line in csv.DictReader(file)}
    assert float(cases["p6"]["risk"]) == pytest.approx(result.scores["p6"], rel=1e-5)
    assert cases["p6"]["slides"] == "2"
    assert main(["evaluate", "--predictions", "out", "--slides", str(patients)]) == 0
    assert "C-index" in capsys.readouterr().out


def test_survival_that_compares_nothing_is_told(patients):
    config = replace(config_of(patients, "One", "cox"), accumulate=4, epochs=1)
    told: list[str] = []
    fit(config, [lambda event: told.append(event.text) if isinstance(event, Notice) and event.warning else None])
    assert any("compares nothing in split 'val'" in text and "of the first one are kept" in text for text in told)
    patients.write_text(re.sub(r",\d,train", ",1,train", patients.read_text()))
    with pytest.raises(ConfigError, match="compares nothing in split 'train'"):
        fit(replace(config, out="other"))


def test_classes_of_patients_are_those_of_the_mean_output(patients):
    lines = patients.read_text().splitlines()
    labelled = [line.split(",") for line in lines[1:]]
    rows = [
        f"{slide},{patient},{'late' if float(months) > 12 else 'early'},{split}"
        for slide, patient, months, _, split in labelled
    ]
    patients.write_text("\n".join(["slide,case_id,label,split", *rows]) + "\n")
    result = fit(replace(config_of(patients, "Two", "ce"), accumulate=2, epochs=4))
    evaluation = evaluate_model("run", patients, split="test", trust=TRUST)
    _, model = load_model("run", TRUST)
    found = {slide.name: slide for slide in evaluation.slides}["p6"]
    pixels = [torch.from_numpy(tifffile.imread(f"p6-{part}.tif")).permute(2, 0, 1)[None] for part in range(2)]
    with torch.no_grad():
        output = torch.cat([model(each) for each in pixels]).mean(0).double()
    assert found.outputs == pytest.approx(output.softmax(0).tolist(), rel=1e-4)
    assert result.scores["p6"] == pytest.approx(-math.log(found.outputs[int(found.truth)]), rel=1e-4)
    predicted(patients)
    again = evaluate_masks("out", patients, split="test")
    assert [slide.outputs for slide in again.slides] == [pytest.approx(s.outputs, rel=1e-9) for s in evaluation.slides]


def test_what_a_case_or_a_time_may_not_be(patients, cohort):
    text = patients.read_text()
    patients.write_text(text.replace("p6-1.tif,p6,20,0,test", "p6-1.tif,p6,20,0,val"))
    with pytest.raises(ConfigError, match=r"lines 10 and 11: slides of p6 have the splits test and val"):
        fit(replace(config_of(patients, "One", "cox"), accumulate=4))
    patients.write_text(text.replace("p6-1.tif,p6,20,0", "p6-1.tif,p6,21,0"))
    with pytest.raises(ConfigError, match=r"the labels 20 and 21"):
        fit(replace(config_of(patients, "One", "cox"), accumulate=4))
    patients.write_text(text.replace(",20,0,", ",20,perhaps,"))
    with pytest.raises(ConfigError, match=r"line 10: the censored is 'perhaps'; write 1 or 0"):
        fit(replace(config_of(patients, "One", "cox"), accumulate=4))
    patients.write_text(text)
    with pytest.raises(ConfigError, match=r"cox takes one output of a slide, a risk, and .* has 2"):
        fit(replace(config_of(patients, "Two", "cox"), accumulate=4))
    with pytest.raises(TargetError, match=r"26\+, a survival time; say --loss cox"):
        fit(config_of(patients, "One", "mse"))
    with pytest.raises(TargetError, match="'normal'; cox takes a time and an event"):
        fit(replace(config_of(cohort("normal", "tumour"), "One", "cox"), accumulate=2))


def test_a_run_of_cases_goes_on_bit_for_bit(patients):
    config = replace(config_of(patients, "One", "cox"), accumulate=2, epochs=3, checkpoint_seconds=0)
    fit(config)
    _, whole = load_model("run", TRUST)
    steps = []

    def stop(event):
        if isinstance(event, MetricsLogged) and event.split == "train":
            steps.append(event)
            if len(steps) == 5:
                raise KeyboardInterrupt

    cut = replace(config, out="cut")
    with pytest.raises(KeyboardInterrupt):
        fit(cut, (stop,))
    fit(cut)
    _, again = load_model("cut", TRUST)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
