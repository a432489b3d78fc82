"""Counts add up over strips, and the scores are the textbook ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gigagrad.errors import TargetError
from gigagrad.masks import IGNORED
from gigagrad.prediction.scores import ClassScore, Confusion, mean_sd

shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(st.data(), shapes, st.integers(2, 5), st.integers(1, 11))
def test_strips_add_up_to_the_whole_plane(data, shape, classes, cut):
    ids = st.integers(0, classes - 1)
    pred = data.draw(hnp.arrays(np.uint8, shape, elements=ids))
    truth = data.draw(hnp.arrays(np.uint8, shape, elements=ids))
    confusion = Confusion(classes)
    for rows in (slice(0, cut), slice(cut, None)):
        if pred[rows].size:
            confusion.add(pred[rows], truth[rows])
    expected = [[np.sum((truth == t) & (pred == p)) for p in range(classes)] for t in range(classes)]
    assert confusion.counts[0].tolist() == np.array(expected).tolist()
    assert confusion.pixels == pred.size


@given(hnp.arrays(np.bool_, (9, 7)), hnp.arrays(np.bool_, (9, 7)))
def test_dice_and_iou_by_their_definitions(pred, truth):
    confusion = Confusion()
    confusion.add(pred, truth)
    both, either, total = (pred & truth).sum(), (pred | truth).sum(), pred.sum() + truth.sum()
    assert confusion.dice == pytest.approx(2 * both / total if total else 1)
    assert confusion.iou == pytest.approx(both / either if either else 1)


def test_any_foreground_value_counts_as_one_with_two_classes():
    confusion = Confusion()
    confusion.add(np.array([[0, 1, 1]], np.uint8), np.array([[0, 255, 0]], np.uint8))
    assert confusion.counts[0].tolist() == [[1, 1], [0, 1]]


def test_several_classes_average_over_those_that_occur():
    confusion = Confusion(4)
    confusion.add(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]))
    assert ClassScore.of("", 1, confusion.counts[0]).dice == pytest.approx(2 / 3)
    assert ClassScore.of("", 2, confusion.counts[0]).dice == pytest.approx(2 / 3)
    assert ClassScore.of("", 3, confusion.counts[0]).dice is None
    assert confusion.dice == pytest.approx(2 / 3)
    assert confusion.iou == pytest.approx(1 / 2)


def narrowed(pred: list[int], truth: list[int]) -> Confusion:
    counts = Confusion(IGNORED + 1)
    counts.add(np.array(pred, np.uint8), np.array(truth, np.uint8))
    return counts.narrowed(IGNORED)


def test_foreground_of_255_counts_beside_a_mask_that_leaves_pixels_out():
    confusion = narrowed([255, 255, 0, 255, 0], [1, 0, 1, 255, 0])
    assert confusion.counts[0].tolist() == [[1, 1], [1, 1]]
    assert (confusion.dice, confusion.ignored_pixels) == (0.5, 1)
    assert narrowed([1, 1, 0, 1, 0], [1, 0, 1, 255, 0]).counts[0].tolist() == [[1, 1], [1, 1]]


def test_pixels_of_255_beside_class_ids_of_a_prediction_are_not_left_out():
    with pytest.raises(TargetError, match="prediction holds the value 255 beside class ids"):
        narrowed([1, 2, 255, 255, 0], [1, 2, 2, 0, 0])
    assert narrowed([1, 2, 255], [1, 2, 255]).dice == 1  # where the truth leaves them out, too


def test_refuses_what_cannot_be_compared():
    with pytest.raises(TargetError, match=r"\(2, 2\).*\(2, 3\)"):
        Confusion().add(np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(TargetError, match="true mask holds class ids 0 to 3"):
        Confusion(3).add(np.zeros(2, np.uint8), np.array([0, 3], np.uint8))
    with pytest.raises(TargetError, match="prediction holds class ids -1 to 0"):
        Confusion(3).add(np.array([0, -1]), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="at least 2"):
        Confusion(1)


def test_mean_sd():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))  # type: ignore[comparison-overlap]
    assert mean_sd([0.5]) == (0.5, 0.0)
    assert all(math.isnan(value) for value in mean_sd([]))
