"""Scores of masks in files, block by block."""

import importlib
from typing import Any

import numpy as np
import pytest

from gigagrad.errors import ImageError, TargetError
from gigagrad.images import open_image
from gigagrad.images.write import write_pyramid
from gigagrad.prediction.evaluate import evaluate, score_masks, score_tiles


def write(path, plane):
    return write_pyramid(path, [plane], shape=(*plane.shape, 1), dtype=np.uint8, nearest=True, tile=64)


def test_slides_by_name_with_mean_and_spread(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("gigagrad.prediction.evaluate"), "_BLOCK_PX", 50)
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
        score_masks(open_image(np.zeros((10, 20), np.uint8)), open_image(np.zeros((10, 21), np.uint8)))


def test_a_slide_is_no_true_mask():
    with pytest.raises(ImageError, match="no mask"):
        score_tiles([], open_image(np.zeros((3, 10, 20), np.uint8)))
