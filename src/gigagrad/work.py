"""Name the kinds of work that operators do, each of which a machine does at rates of its own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod

from gigagrad.allowances import LANES

_LEAST_CHANNELS = 4
"""From so many channels on, oneDNN brings a field into vectors of channels."""
_PART_OF_VECTOR = (4, 8)
"""Channels of a group that oneDNN has vectors for beside whole ones."""
_LARGEST_WINDOW_PX = 3
"""The widest window over which oneDNN has a kernel of its own for the gradient of a depthwise weight."""


class Work(Enum):
    """Kind of work that takes most of an operator's time."""

    VALUES = "each value by itself"
    """Element by element, in the order in which values lie; products of matrices, too."""
    REORDERED = "values in another layout"
    """Convolutions, whose library brings fields into a layout of its own, and resampling."""
    UNFOLDED = "windows unfolded into columns"
    """Convolutions of few channels a group for which the library has no kernel: a product for each group."""
    STATISTICS = "means and variances"
    """The moments of a norm, with or without its normalising."""
    WINDOWS = "values around each pixel"
    """Pools: a loop over a window for every pixel."""

    @classmethod
    def of_convolution(cls, weight: Sequence[int], groups: int, *, of_weight: bool = False) -> Work:
        """Return the kind of a convolution whose weight has this shape, or `of_weight` of its weight's gradient."""
        outputs, channels, *sides = weight
        if groups == 1 or channels % _PART_OF_VECTOR[1] == 0:
            return cls.REORDERED
        if channels != outputs // groups or channels not in (1, _PART_OF_VECTOR[0]):
            return cls.UNFOLDED
        has_kernel = not of_weight or (channels == 1 and max(sides) <= _LARGEST_WINDOW_PX)
        return cls.REORDERED if has_kernel else cls.UNFOLDED


def unfolded_flops(pixels: int, weight: Sequence[int], groups: int) -> float:
    """Count products of unfolded windows as those of one channel, as which a group's channels take about as long."""
    return 2.0 * pixels * groups * prod(weight[1:])


def is_ragged(channels: int, groups: int) -> bool:
    """Say whether the channels of a convolution's input or output fill no whole vectors, so that the library reorders
    them one by one.
    """
    each = channels // groups
    if groups == 1 or each == 1:
        return channels >= _LEAST_CHANNELS and channels % LANES > 0
    return each % LANES > 0 and each not in _PART_OF_VECTOR
