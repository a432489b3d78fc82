"""Logits to class ids, by one rule."""

import math

import numpy as np
import pytest
import torch

from gigagrad.errors import ConfigError, ModelError
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction.classes import Channels


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.5, 0.9])
def test_one_channel_is_thresholded_on_the_probability(threshold):
    logits = torch.linspace(-8, 8, 400, dtype=torch.float64).reshape(1, 1, 20, 20)
    expected = (torch.sigmoid(logits) > threshold)[0, 0].numpy()
    (ids,) = Channels(1).mask(logits, threshold)
    assert ids.dtype == np.uint8
    assert np.array_equal(ids, expected)


def test_several_channels_take_the_largest():
    logits = torch.randn(1, 5, 6, 7)
    assert np.array_equal(Channels(5).mask(logits), logits[0].argmax(0, keepdim=True).numpy())


def test_labels_are_there_by_themselves():
    logits = torch.randn(1, 3, 6, 7)
    channels = Channels.of(3, "0.5*bce + dice")
    assert np.array_equal(channels.mask(logits, 0.7), (torch.sigmoid(logits) > 0.7)[0].numpy())
    assert (channels.planes, channels.foreground, channels.ignored(None)) == (3, 3, 255)
    assert Channels.of(3, "ce") == Channels.of(3, "") == Channels.of(3, "mine:loss") == Channels(3)
    assert Channels.of(1, "bce") == Channels(1)


def test_nan_never_wins():
    assert Channels(1).mask(torch.tensor([[[[math.nan, 1.0]]]])).tolist() == [[[0, 1]]]
    logits = torch.tensor([[[[math.nan]], [[-5.0]], [[math.nan]]]])
    assert Channels(3).mask(logits).tolist() == [[[1]]]


def test_refuses_outputs_that_are_no_segmentation():
    with pytest.raises(ModelError, match=r"\(1, 10\)"):
        Channels(10).mask(torch.zeros(1, 10))
    with pytest.raises(ModelError, match="300 output channels"):
        Channels(300).mask(torch.zeros(1, 300, 2, 2))


def test_classes_have_names_and_colours():
    assert Channels(1).foreground == Channels(2).foreground == 1
    assert Channels(4).foreground == 3
    assert [kind.name for kind in mask_classes(1)] == ["Foreground"]
    assert [(kind.id, kind.name) for kind in mask_classes(2, ["Tumour", "Stroma"])] == [(1, "Tumour"), (2, "Stroma")]
    assert len({kind.color for kind in mask_classes(7)}) == 7
    with pytest.raises(ConfigError, match="2 class names"):
        mask_classes(1, ["a", "b"])
