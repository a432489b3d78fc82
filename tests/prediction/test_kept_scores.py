"""Cohorts scored in shares, or again: the numbers of one process, from what was kept of each slide."""

import importlib
import json
import os
from functools import cache

import numpy as np
import pytest
import tifffile

from gigagrad.cohorts.records import MadeWith, SlideResult, write_record
from gigagrad.errors import ConfigError
from gigagrad.events import Event, Notice
from gigagrad.images import write_pyramid
from gigagrad.prediction import slide_scores
from gigagrad.prediction.cohort_scores import OfModel, evaluate_masks, evaluate_model
from gigagrad.prediction.predict import _digest
from gigagrad.prediction.scores import Confusion
from tests.prediction.networks import Brightness, Darkness

cohort_scores = importlib.import_module("gigagrad.prediction.cohort_scores")


@pytest.fixture
def cohort(tmp_path):
    """Five slides, and a mask of each; the labels are of patients of two slides."""
    random = np.random.default_rng(0)
    lines, labelled = ["slide,mask"], ["slide,label,case"]
    for number in range(5):
        pixels = random.integers(0, 51 * (number + 1), (3, 48, 64), np.uint8)
        tifffile.imwrite(tmp_path / f"s{number}.tif", pixels.transpose(1, 2, 0), tile=(16, 16), photometric="rgb")
        truth = (pixels[0] < 60).astype(np.uint8)
        tifffile.imwrite(tmp_path / f"m{number}.tif", truth, tile=(16, 16), photometric="minisblack")
        lines.append(f"s{number}.tif,m{number}.tif")
        labelled.append(f"s{number}.tif,{int(number > 2)},p{number if number < 3 else 3}")
    (tmp_path / "labels.csv").write_text("\n".join(labelled))
    (tmp_path / "cohort.csv").write_text("\n".join(lines))
    return tmp_path / "cohort.csv"


class Scored:
    """Scores a cohort by a model; `names` are of the slides that were scored anew the last time."""

    def __init__(self, folder, monkeypatch):
        self.run, self.names = folder / "best.pt", []
        self.run.write_bytes(b"weights")
        (folder / "config.yaml").write_text("loss: bce\n")
        self.patch = monkeypatch.setattr
        self.patch(cohort_scores, "compile_engine", cache(cohort_scores.compile_engine))  # one capture serves all
        self.patch(slide_scores, "RESAMPLES", 20)
        for kind in ("counts", "scores"):
            self.patch(OfModel, kind, self.watched(getattr(OfModel, kind)))

    def watched(self, method):
        def call(source, entry):
            self.names.append(entry.name)
            return method(source, entry)

        return call

    def __call__(self, model, slides, **settings):
        self.patch(cohort_scores, "load_model", lambda path, trust: (type(model).__name__, model.eval()))
        self.names.clear()
        return evaluate_model(self.run, slides, **settings)


@pytest.fixture
def scored(tmp_path, monkeypatch):
    return Scored(tmp_path, monkeypatch)


@pytest.mark.parametrize(("model", "table"), [(Darkness(), "cohort.csv"), (Brightness(), "labels.csv")])
def test_shares_give_the_numbers_of_one_process(scored, cohort, tmp_path, model, table):
    slides = cohort.with_name(table)
    alone = scored(model, slides, out=tmp_path / "alone")
    assert scored(model, slides).to_dict() == alone.to_dict()

    heard: list[Event] = []
    assert scored(model, slides, out=tmp_path / "apart", share="2/3", listeners=(heard.append,)) is None
    assert [event.text for event in heard if isinstance(event, Notice)] == [
        "2 of 5 slides are scored; the share that ends last tells the scores, or this command given again"
    ]
    assert scored(model, slides, out=tmp_path / "apart", share="1/3") is None
    assert not (tmp_path / "apart/evaluation.json").exists()
    last = scored(model, slides, out=tmp_path / "apart", share="3/3")
    assert len(scored.names) == 2
    assert last.to_dict() == alone.to_dict()
    written = [(tmp_path / out / "evaluation.json").read_bytes() for out in ("alone", "apart")]
    assert written[0] == written[1] == json.dumps(alone.to_dict(), indent=2).encode() + b"\n"
    assert scored(model, slides, out=tmp_path / "apart").to_dict() == alone.to_dict()
    assert scored.names == []
    assert sorted(os.listdir(tmp_path / "apart")) == ["evaluation.json", "scores"]


def test_what_has_changed_is_scored_again(scored, cohort, tmp_path):
    first = scored(Darkness(), cohort, out=tmp_path / "out")
    assert len(scored.names) == 5
    truth = tifffile.imread(tmp_path / "m1.tif")
    tifffile.imwrite(tmp_path / "m1.tif", 1 - truth, tile=(16, 16), photometric="minisblack")
    (tmp_path / "out/scores/s2.json").write_text("{")
    (tmp_path / "out/scores/s4.json").unlink()
    again = scored(Darkness(), cohort, out=tmp_path / "out")
    assert scored.names == ["s1", "s2", "s4"]
    assert [a == b for a, b in zip(first.scores, again.scores, strict=True)] == [True, False, True, True, True]
    (tmp_path / "best.pt").write_bytes(b"other weights")
    scored(Darkness(), cohort, out=tmp_path / "out")
    assert len(scored.names) == 5


def test_masks_in_folders_that_have_changed_are_scored_again(scored, cohort, tmp_path):
    """The time of a Zarr's folder says nothing of the blocks in folders inside."""
    for number in range(2):
        mask = tifffile.imread(tmp_path / f"m{number}.tif")
        for name, pixels in (("m", mask), ("other", 1 - mask)):
            path, shape = tmp_path / f"{name}{number}.zarr", (*mask.shape, 1)
            write_pyramid(path, [pixels], shape=shape, dtype=np.uint8, nearest=True)
    cohort.write_text("slide,mask\ns0.tif,m0.zarr\ns1.tif,m1.zarr\n")
    first = scored(Darkness(), cohort, out=tmp_path / "out")
    for block in (tmp_path / "other1.zarr").rglob("*"):
        if block.is_file():
            (tmp_path / "m1.zarr" / block.relative_to(tmp_path / "other1.zarr")).write_bytes(block.read_bytes())
    again = scored(Darkness(), cohort, out=tmp_path / "out")
    assert [a == b for a, b in zip(first.scores, again.scores, strict=True)] == [True, False]


def test_predictions_of_slides_that_were_replaced_are_told(cohort, tmp_path):
    masks = tmp_path / "predictions/masks"
    masks.mkdir(parents=True)
    made_with = MadeWith("m", "0", 0.5, (), 0)
    for number in range(5):
        (masks / f"s{number}.tif").write_bytes((tmp_path / f"m{number}.tif").read_bytes())
        content = _digest([tmp_path / f"s{number}.tif"])
        record = SlideResult(
            name=f"s{number}",
            slide="s",
            slide_bytes=1,
            made_with=made_with,
            status="done",
            classes=2,
            content=content,
        )
        write_record(tmp_path / "predictions", record)
    heard: list[Event] = []
    evaluate_masks(tmp_path / "predictions", cohort, listeners=(heard.append,))
    assert not any(isinstance(event, Notice) for event in heard)
    (tmp_path / "s3.tif").write_bytes((tmp_path / "s2.tif").read_bytes())
    evaluate_masks(tmp_path / "predictions", cohort, listeners=(heard.append,))
    (told,) = [event.text for event in heard if isinstance(event, Notice)]
    assert told.startswith("1 of 5 predictions, that of s3 for one, were made of other files")


def test_masks_are_scored_in_shares_too(cohort, tmp_path):
    masks = tmp_path / "predictions/masks"
    masks.mkdir(parents=True)
    for number in range(5):
        mask = np.roll(tifffile.imread(tmp_path / f"m{number}.tif"), number, 1)
        tifffile.imwrite(masks / f"s{number}.tif", mask, tile=(16, 16), photometric="minisblack")
    alone = evaluate_masks(tmp_path / "predictions", cohort)
    assert evaluate_masks(tmp_path / "predictions", cohort, out=tmp_path / "out", share="2/2") is None
    assert evaluate_masks(tmp_path / "predictions", cohort, out=tmp_path / "out", share="1/2") == alone
    with pytest.raises(ConfigError, match="name it with --out"):
        evaluate_masks(tmp_path / "predictions", cohort, share="2/2")


def test_counts_come_back_whole():
    several = Confusion(3, ignored=255)
    several.add(np.array([0, 1, 2, 2]), np.array([0, 2, 2, 255]))
    labels = Confusion(ignored=7, planes=2)
    labels.add(np.array([[0, 1], [1, 1]]), np.array([[7, 1], [0, 1]]))
    for counts in (several, labels):
        read = Confusion.from_dict(json.loads(json.dumps(counts.to_dict())))
        assert read.to_dict() == counts.to_dict()
        assert read.plus(read).dice == counts.dice
    with pytest.raises((KeyError, ValueError, TypeError)):
        Confusion.from_dict({"counts": [[1, 2], [3]], "ignored": None, "ignored_pixels": 0})
