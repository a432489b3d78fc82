"""Models without an image output: what their numbers mean, and the table of scores that `predict` writes."""

import csv
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gigagrad import losses
from gigagrad.boxes import Box
from gigagrad.cohorts import Row
from gigagrad.cohorts.records import read_records, write_record
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError, ModelError, TargetError
from gigagrad.events import Notice, TileDone
from gigagrad.images import open_image
from gigagrad.masks import ClassTable
from gigagrad.prediction.predict import predict
from gigagrad.prediction.slide_scores import Reading, label_value

module = importlib.import_module("gigagrad.prediction.predict")
TABLE = ClassTable((("normal", 0), ("tumour", 1)))


class Logits(nn.Module):
    """As many logits as asked for, of the mean of the whole slide."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x_NCHW):
        mean = x_NCHW.float().mean((2, 3)).mean(1, keepdim=True) / 100
        return torch.cat([mean * k - k for k in range(1, self.outputs + 1)], 1)


class Pair(nn.Module):
    def forward(self, x_NCHW):
        mean = x_NCHW.float().mean((2, 3))
        return mean, mean


class Lost(nn.Module):
    def forward(self, x_NCHW):
        return x_NCHW.float().mean((2, 3)) * float("nan")


def logits_of(path, outputs):
    with open_image(path) as image:
        pixels = np.asarray(image.read(Box.whole(*image.shape[1:])))
    return Logits(outputs)(torch.from_numpy(np.ascontiguousarray(pixels))[None])[0].double()


def table_of(folder):
    with (folder / "slides.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def predicted(monkeypatch, tmp_path, jpeg_slide):
    """Predict with a module of this file, as a run with this loss and these classes would."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.pt").write_bytes(b"weights")

    def call(model, listeners=(), *, loss="ce", classes=(), **settings):
        monkeypatch.setattr(module, "load_model", lambda path, trust: (type(model).__name__, model.eval()))
        (run / "config.yaml").write_text(f"loss: {loss}\nclasses: {list(classes)}\n")
        return predict(
            PredictConfig(**{"run": run, "slides": (jpeg_slide,), "out": tmp_path / "out", **settings}), listeners
        )

    return call


def test_every_named_loss_has_a_meaning():
    for name in losses._LOSSES:
        loss = losses.named_loss(name)
        reading = Reading.of(1, name, None)
        assert reading == Reading.of_columns(reading.columns, None) or loss.class_ids
        assert bool(reading.names) == (loss.binary or loss.class_ids)
        assert (reading.columns == ("probability_1",)) == loss.binary
    assert Reading.of(2, "ce", None) == Reading(("probability_0", "probability_1"), ("0", "1"))
    for several in ("ce?label_smoothing=0.1", "0.5*mine:dice + ce", "mine:dice?smooth=1 + 2*ce?label_smoothing=0.1"):
        assert Reading.of(2, several, None) == Reading.of(2, "ce", None)


@pytest.mark.parametrize(
    ("outputs", "loss", "table", "columns"),
    [
        (2, "ce", TABLE, ("probability_normal", "probability_tumour")),
        (3, "ce", TABLE, ("probability_normal", "probability_tumour", "probability_Class 2")),
        (1, "focal", TABLE, ("probability_tumour",)),
        (1, "mse", None, ("output",)),
        (2, "mine:weighted", TABLE, ("probability_normal", "probability_tumour")),
        (2, "mine:hazards", None, ("output_0", "output_1")),
        (2, "", None, ("probability_0", "probability_1")),
        (1, "", None, ("probability_1",)),
    ],
)
def test_the_loss_decides_what_the_outputs_are(outputs, loss, table, columns):
    reading = Reading.of(outputs, loss, table)
    assert reading.columns == columns
    assert Reading.of_columns(columns, table) == reading


def test_a_loss_or_classes_of_other_outputs_are_refused():
    with pytest.raises(ModelError, match="2 outputs and bce takes one"):
        Reading.of(2, "bce", None)
    with pytest.raises(ConfigError, match=r"3 classes .* the model tells 2 apart"):
        Reading.of(2, "ce", ClassTable.parse(["normal", "tumour"]))


def test_probabilities_of_logits_no_exponential_can_hold():
    two = Reading.of(2, "ce", TABLE)
    scores = two.scores(torch.tensor([[1000.0, -1000.0]]))
    assert scores == {"probability_normal": 1.0, "probability_tumour": 0.0}
    assert two.predicted(scores, 0.5) == "normal"
    one = Reading.of(1, "bce", TABLE)
    scores = one.scores(torch.tensor([[0.4]]))
    assert scores["probability_tumour"] == pytest.approx(1 / (1 + np.exp(-np.float64(np.float32(0.4)))))
    assert [one.predicted(scores, threshold) for threshold in (0.5, 0.7)] == ["tumour", "normal"]
    assert sum(one.outputs(scores)) == 1


def test_labels_are_classes_or_numbers():
    classes, numbers = Reading.of(2, "ce", TABLE), Reading.of(1, "mse", None)
    row = Row(slide=Path("a.tif"), label="tumour")
    assert label_value(row, classes, TABLE) == 1
    assert label_value(Row(slide=row.slide, label="0"), classes, None) == 0
    assert label_value(Row(slide=row.slide, label="2.5"), numbers, None) == 2.5
    with pytest.raises(TargetError, match="the label of a is 'tumour', expected 0, 1"):
        label_value(row, Reading.of(2, "ce", None), None)
    with pytest.raises(TargetError, match="'2'; the model's classes are 0 to 1"):
        label_value(Row(slide=row.slide, label="2"), classes, TABLE)


def test_a_table_of_probabilities(predicted, tmp_path, jpeg_slide):
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(f"slide,label,name\n{jpeg_slide},tumour,first\n")
    (result,) = predicted(Logits(2), slides=(cohort,), classes=("normal=0", "tumour=1"))
    expected = logits_of(jpeg_slide, 2).softmax(0).tolist()
    (line,) = table_of(tmp_path / "out")
    assert list(line) == ["name", "slide", "probability_normal", "probability_tumour", "predicted", "label"]
    assert [float(line[f"probability_{name}"]) for name in ("normal", "tumour")] == pytest.approx(expected)
    assert (line["name"], line["slide"], line["label"]) == ("first", str(jpeg_slide), "tumour")
    assert line["predicted"] == ("normal", "tumour")[int(np.argmax(expected))]
    assert (result.status, result.files, result.height, result.width) == ("done", {}, 700, 900)
    assert read_records(tmp_path / "out") == {"first": result}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["predictions.json", "records", "slides.csv"]


@pytest.mark.parametrize(("loss", "column"), [("bce", "probability_1"), ("mse", "output")])
def test_one_output_without_a_label(predicted, tmp_path, jpeg_slide, loss, column):
    predicted(Logits(1), loss=loss)
    (line,) = table_of(tmp_path / "out")
    logit = float(logits_of(jpeg_slide, 1))
    value = logit if loss == "mse" else 1 / (1 + np.exp(-logit))
    assert list(line) == ["name", "slide", column, "predicted"]
    assert float(line[column]) == pytest.approx(value)
    assert line["predicted"] == (f"{value:g}" if loss == "mse" else str(int(value > 0.5)))


@pytest.mark.parametrize(("outputs", "loss", "told"), [(1, "bce", False), (2, "ce", True), (1, "mse", True)])
def test_a_threshold_that_changes_nothing_is_told(predicted, outputs, loss, told):
    heard: list[object] = []
    predicted(Logits(outputs), [heard.append], loss=loss, threshold=0.3)
    texts = [event.text for event in heard if isinstance(event, Notice)]
    assert any("threshold 0.3 changes nothing" in text for text in texts) == told
    heard.clear()
    predicted(Logits(outputs), [heard.append], loss=loss, overwrite=True)
    assert not any(isinstance(event, Notice) for event in heard)


def test_a_slide_done_before_is_left_alone_and_a_bad_one_stops_nobody(predicted, tmp_path, jpeg_slide):
    bad = tmp_path / "bad.tif"
    bad.write_bytes(jpeg_slide.read_bytes()[:3000])
    broken, good = predicted(Logits(2), slides=(bad, jpeg_slide))
    assert (broken.status, good.status) == ("failed", "done")
    assert [line["name"] for line in table_of(tmp_path / "out")] == ["small"]

    (tmp_path / "out" / "slides.csv").unlink()
    heard: list[Any] = []
    assert predicted(Logits(2), (heard.append,)) == (good,)
    assert not any(isinstance(event, TileDone) for event in heard)
    assert [line["name"] for line in table_of(tmp_path / "out")] == ["small"]

    labelled = tmp_path / "cohort.csv"
    labelled.write_text(f"slide,label\n{jpeg_slide},1\n")
    (again,) = predicted(Logits(2), (heard.append,), slides=(labelled,))
    assert not any(isinstance(event, TileDone) for event in heard)
    assert again.label == table_of(tmp_path / "out")[0]["label"] == "1"

    labelled.write_text(f"slide,label,case\n{jpeg_slide},1,patient\n")  # which had no table of cases
    predicted(Logits(2), (heard.append,), slides=(labelled,))
    assert not any(isinstance(event, TileDone) for event in heard)
    assert (tmp_path / "out" / "cases.csv").read_text().splitlines()[1].startswith("patient,1,")


def test_every_slide_has_a_line(predicted, tmp_path, jpeg_slide):
    other = tmp_path / "other.tif"
    other.write_bytes(jpeg_slide.read_bytes())
    heard: list[Any] = []
    results = predicted(Logits(2), (heard.append,), slides=(jpeg_slide, other))
    assert [result.status for result in results] == ["done", "done"]
    assert [line["name"] for line in table_of(tmp_path / "out")] == ["small", "other"]
    assert any(isinstance(event, TileDone) for event in heard)


def test_tables_of_others_are_not_replaced(predicted, tmp_path, jpeg_slide):
    out = tmp_path / "out"
    out.mkdir()
    (out / "slides.csv").write_text(f"slide,label\n{jpeg_slide},1\n")
    (result,) = predicted(Logits(2))
    assert "not predicted here" in result.error
    (result,) = predicted(Logits(2), slides=(out / "slides.csv",), overwrite=True)
    assert "is the cohort itself" in result.error
    assert (out / "slides.csv").read_text().startswith("slide,label")
    predicted(Logits(2), overwrite=True)
    assert table_of(out)[0]["predicted"]


@pytest.mark.parametrize(("model", "said"), [(Pair(), "a tuple"), (Lost(), "nan")], ids=["pair", "nan"])
def test_outputs_that_are_no_scores_fail_by_name(predicted, model, said):
    heard: list[Any] = []
    (result,) = predicted(model, (heard.append,))
    assert result.status == "failed"
    assert said in result.error
    assert [event.warning for event in heard if isinstance(event, Notice)] == [True]


def test_scores_in_a_record_are_numbers(predicted, tmp_path):
    (result,) = predicted(Logits(2))
    result.scores["probability_0"] = "high"
    write_record(tmp_path / "out", result)
    with pytest.raises(ConfigError, match="no numbers"):
        read_records(tmp_path / "out")
