"""Logits to class ids, by one rule."""

import math

import numpy as np
import pytest
import torch

from gigagrad.errors import ConfigError, ModelError
from gigagrad.prediction.classes import class_ids, foreground_count, mask_classes


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.5, 0.9])
def test_one_channel_is_thresholded_on_the_probability(threshold):
    logits = torch.linspace(-8, 8, 400, dtype=torch.float64).reshape(1, 1, 20, 20)
    expected = (torch.sigmoid(logits) > threshold)[0, 0].numpy()
    ids = class_ids(logits, threshold)
    assert ids.dtype == np.uint8
    assert np.array_equal(ids, expected)


def test_several_channels_take_the_largest():
    logits = torch.randn(1, 5, 6, 7)
    assert np.array_equal(class_ids(logits), logits[0].argmax(0).numpy())


def test_nan_never_wins():
    assert class_ids(torch.tensor([[[[math.nan, 1.0]]]])).tolist() == [[0, 1]]
    logits = torch.tensor([[[[math.nan]], [[-5.0]], [[math.nan]]]])
    assert class_ids(logits).tolist() == [[1]]


def test_refuses_outputs_that_are_no_segmentation():
    with pytest.raises(ModelError, match=r"\(1, 10\)"):
        class_ids(torch.zeros(1, 10))
    with pytest.raises(ModelError, match="300 output channels"):
        class_ids(torch.zeros(1, 300, 2, 2))


def test_classes_have_names_and_colours():
    assert foreground_count(1) == foreground_count(2) == 1
    assert foreground_count(4) == 3
    assert [kind.name for kind in mask_classes(1)] == ["Foreground"]
    assert [(kind.id, kind.name) for kind in mask_classes(2, ["Tumour", "Stroma"])] == [(1, "Tumour"), (2, "Stroma")]
    assert len({kind.color for kind in mask_classes(7)}) == 7
    with pytest.raises(ConfigError, match="2 class names"):
        mask_classes(1, ["a", "b"])
