"""Scores of masks in files, block by block."""

import importlib
import json
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gigagrad.errors import ConfigError, ImageError, TargetError
from gigagrad.events import Notice
from gigagrad.images import open_image
from gigagrad.images.write import write_pyramid
from gigagrad.masks import ClassTable
from gigagrad.prediction.cohort_scores import evaluate_masks
from gigagrad.prediction.scores import Confusion, Evaluation, evaluate, score_masks
from gigagrad.reports.tables import Shown, evaluation_tables


def write(path, plane):
    return write_pyramid(path, [plane], shape=(*plane.shape, 1), dtype=np.uint8, nearest=True, tile=64)


def test_slides_by_name_with_mean_and_spread(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("gigagrad.prediction.scores"), "_BLOCK_PX", 50)
    random = np.random.default_rng(0)
    truth = (random.random((170, 230)) < 0.4).astype(np.uint8)
    worse = np.where(random.random(truth.shape) < 0.1, 1 - truth, truth).astype(np.uint8)
    pairs = [
        ("same", write(tmp_path / "a.tif", truth), write(tmp_path / "t.tif", truth)),
        ("worse", write(tmp_path / "b.tif", worse), tmp_path / "t.tif"),
    ]
    heard: list[Any] = []
    result = evaluate(pairs, listeners=(heard.append,))
    both = np.sum((worse == 1) & (truth == 1))
    dice = 2 * both / (worse.sum() + truth.sum(dtype=np.int64))
    assert [score.dice for score in result.scores] == [1.0, pytest.approx(dice)]
    assert result.scores[1].iou == pytest.approx(dice / (2 - dice))
    assert result.to_dict()["dice"] == {"same": 1.0, "worse": pytest.approx(dice)}
    assert result.to_dict()["mean"] == pytest.approx((1 + dice) / 2)
    assert result.to_dict()["sd"] == pytest.approx(abs(1 - dice) / np.sqrt(2))
    assert len(heard) == 4


def test_masks_of_other_sizes_are_refused():
    with pytest.raises(TargetError, match=r"10 x 20 px and the true mask .* 10 x 21 px"):
        score_masks(open_image(np.zeros((10, 20), np.uint8)), open_image(np.zeros((10, 21), np.uint8)), Confusion())


def test_a_slide_is_no_true_mask():
    with pytest.raises(ImageError, match="no mask"):
        score_masks(open_image(np.zeros((10, 20), np.uint8)), open_image(np.zeros((3, 10, 20), np.uint8)), Confusion())


def test_classes_by_name_over_all_slides():
    random = np.random.default_rng(1)
    slides = [(random.integers(classes, size=(40, 50)), random.integers(3, size=(40, 50))) for classes in (3, 3)]
    slides[0][0][slides[0][1] == 2] = 2

    def counted(pred, truth):
        confusion = Confusion(4)
        confusion.add(pred, truth)
        return confusion

    counts = {str(number): counted(*pair) for number, pair in enumerate(slides)}
    found = Evaluation.of(counts, ClassTable((("glass", 0), ("tumour", 1))))
    pred, truth = (np.concatenate([pair[which] for pair in slides]) for which in (0, 1))
    told = found.to_dict()
    assert list(told["classes"]) == ["glass", "tumour", "Class 2", "Class 3"]
    for number, name in enumerate(("glass", "tumour", "Class 2")):
        both, true = np.sum((pred == number) & (truth == number)), np.sum(truth == number)
        assert told["classes"][name]["dice"] == pytest.approx(2 * both / (true + np.sum(pred == number)))
        assert told["classes"][name]["iou"] == pytest.approx(both / np.sum((pred == number) | (truth == number)))
        assert told["classes"][name]["pixels"] == true
        assert told["confusion"][number] == [np.sum((truth == number) & (pred == other)) for other in range(4)]
    assert told["classes"]["Class 3"] == {"dice": None, "iou": None, "pixels": 0}


def test_slides_whose_masks_have_other_numbers_of_classes_add_up():
    few, many = Confusion(), Confusion(3)
    few.add(np.array([1, 0]), np.array([1, 1]))
    many.add(np.array([2, 1]), np.array([2, 2]))
    found = Evaluation.of({"few": few, "many": many})
    assert found.confusion == ((0, 0, 0), (1, 1, 0), (0, 1, 1))
    assert found.classes == ("Background", "Class 1", "Class 2")
    assert Evaluation.of({"few": few}).classes == ("Background", "Foreground")


def test_labels_by_name_over_all_slides():
    random = np.random.default_rng(2)
    pred, truth = random.integers(0, 2, (2, 2, 3, 60, 50), np.uint8)
    pred[:, 2] = truth[:, 2] = 0
    truth[0, 0, :9] = 255

    def counted(number):
        counts = Confusion(ignored=255, planes=3)
        return score_masks(open_image(pred[number]), open_image(truth[number]), counts)

    found = Evaluation.of({str(n): counted(n) for n in (0, 1)}, ClassTable((("a", 1), ("b", 2))))
    assert (found.classes, found.confusion) == (("a", "b", "Class 3"), ())
    known = truth[:, 0] != 255
    both, total = np.sum(pred[:, 0] & truth[:, 0] & known), np.sum(pred[:, 0][known]) + np.sum(truth[:, 0][known])
    assert found.of_classes[0].dice == pytest.approx(2 * both / total)
    assert found.of_classes[2].dice is None
    of_labels = [2 * np.sum(pred[1, k] & truth[1, k]) / (pred[1, k].sum() + truth[1, k].sum()) for k in (0, 1)]
    assert found.scores[1].dice == pytest.approx(np.mean(of_labels))
    assert found.scores[1].pixels == 60 * 50
    text = StringIO()
    Console(file=text, width=100).print(*map(Shown, evaluation_tables(found)))
    assert "label" in text.getvalue()
    assert "%" not in text.getvalue()


def test_a_table_of_classes_as_a_person_sees_it():
    def shown(count):
        confusion = Confusion(count)
        confusion.add(np.arange(count), np.arange(count))
        confusion.add(np.array([0, 0]), np.array([1, 1]))
        text = StringIO()
        Console(file=text, width=100).print(*map(Shown, evaluation_tables(Evaluation.of({"s": confusion}))))
        return text.getvalue()

    assert "class" not in shown(2).lower()
    assert "66.7%" in shown(3)
    assert "Class 2" in shown(3)
    assert "%" not in shown(12)
    assert "Class 11" in shown(12)


def test_classes_of_one_name_are_told_apart():
    confusion = Confusion(4)
    confusion.add(np.array([0, 1, 2, 3]), np.array([0, 1, 1, 3]))
    found = Evaluation.of({"s": confusion}, ClassTable.parse(["Tumour=1", "Class 2=3"]))
    assert found.same_names == {"Class 2": [2, 3]}
    assert found.classes == ("Background", "Tumour", "Class 2 (2)", "Class 2 (3)")
    told = found.to_dict()["classes"]
    assert [told[name]["pixels"] for name in found.classes] == [1, 2, 0, 1]
    text = StringIO()
    Console(file=text, width=120).print(*map(Shown, evaluation_tables(found)))
    assert "Class 2 (3)" in text.getvalue()
    labels = Confusion(planes=2)
    assert Evaluation.of({"s": labels}, ClassTable((("a", 1), ("a ", 2)))).same_names == {}


def test_predictions_of_several_tables_of_classes_are_refused(tmp_path):
    records = []
    for name, classes in (("a", ["x=1", "y=2"]), ("b", ["y=1", "x=2"])):
        write(tmp_path / f"{name}.tif", np.zeros((8, 8), np.uint8))
        (tmp_path / "masks").mkdir(exist_ok=True)
        write(tmp_path / "masks" / f"{name}.tif", np.zeros((8, 8), np.uint8))
        made = {"model": "m", "model_sha256": "0", "threshold": 0.5, "classes": classes, "level": 0}
        records.append({"name": name, "slide": "s", "slide_bytes": 1, "made_with": made, "status": "done"})
    (tmp_path / "predictions.json").write_text(json.dumps({"slides": records}))
    (tmp_path / "cohort.csv").write_text("slide,mask\na.tif,a.tif\nb.tif,b.tif\n")
    with pytest.raises(ConfigError, match=r"of different classes: x=1, y=2.* and y=1, x=2"):
        evaluate_masks(tmp_path, tmp_path / "cohort.csv")
    heard: list[Any] = []
    found = evaluate_masks(tmp_path, tmp_path / "cohort.csv", classes=["x=1", "Class 2=3"], listeners=(heard.append,))
    assert isinstance(found, Evaluation)
    assert [event.text for event in heard if isinstance(event, Notice)] == [
        "the classes 2, 3 are all called 'Class 2'; their scores have the ids behind it, and --classes names them apart"
    ]


def test_masks_of_one_other_value_beside_masks_of_several_are_refused(tmp_path):
    """As foreground and background they agreed, class 1 with class 2."""
    (tmp_path / "masks").mkdir()
    lines = ["slide,mask"]
    for name, true, found in (("a", [1, 1], [2, 2]), ("b", [1, 2], [1, 2])):
        for plane, file in ((true, f"{name}.true.tif"), (found, f"masks/{name}.tif"), ([9, 9], f"{name}.tif")):
            write(tmp_path / file, np.repeat(np.array([0, *plane], np.uint8), 8)[None].repeat(8, 0))
        lines.append(f"{name}.tif,{name}.true.tif")
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("\n".join(lines))
    for _ in range(2):  # the second time of what was kept
        with pytest.raises(TargetError, match=r"of some slides hold one value above 0, other than 1.*--classes NAME"):
            evaluate_masks(tmp_path, cohort, out=tmp_path / "scores")
    result = evaluate_masks(tmp_path, cohort, classes=["x=1", "y=2"])
    assert isinstance(result, Evaluation)
    assert [score.dice for score in result.scores] == [0, 1]
    cohort.write_text("\n".join(lines[:2]))
    alone = evaluate_masks(tmp_path, cohort)
    assert isinstance(alone, Evaluation)
    assert alone.dice[0] == 1


def test_masks_beside_slides_of_a_folder_are_compared_with_and_missing_ones_are_told(tmp_path):
    """A folder's masks were left aside for the recipe's, without a word."""
    true = np.repeat(np.array([0, 1, 1], np.uint8), 8)[None].repeat(8, 0)
    for file in ("slides/a_mask.tif", "masks/a.tif", "masks/b.tif"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write(tmp_path / file, true)
    write(tmp_path / "slides" / "a.tif", np.full_like(true, 9))
    heard: list[Any] = []
    alone = evaluate_masks(tmp_path, tmp_path / "slides", listeners=(heard.append,))
    assert isinstance(alone, Evaluation)
    assert alone.dice[0] == 1
    assert not [event for event in heard if isinstance(event, Notice)]
    write(tmp_path / "slides" / "b.tif", np.full_like(true, 9))
    evaluate_masks(tmp_path, tmp_path / "slides", listeners=(heard.append,))
    assert [event.text for event in heard if isinstance(event, Notice)] == [
        "1 of 2 slides name no mask: they are compared with the tissue that the recipe finds"
    ]
