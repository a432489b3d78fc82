"""Name the kinds of work that operators do, each of which a machine does at rates of its own."""

from __future__ import annotations

from enum import Enum

_FEW_CHANNELS = 4
"""Below so many channels a group, oneDNN computes a channel by itself."""


class Work(Enum):
    """Kind of work that takes most of an operator's time."""

    VALUES = "each value by itself"
    """Element by element, in the order in which values lie; products of matrices, too."""
    REORDERED = "values in another layout"
    """Convolutions of many channels, whose library brings fields into a layout of its own, and resampling."""
    CHANNELWISE = "products inside a channel"
    """Convolutions of so few channels a group that products do not fill the processor's units."""
    STATISTICS = "means and variances"
    """The moments of a norm, with or without its normalising."""
    WINDOWS = "values around each pixel"
    """Pools: a loop over a window for every pixel."""

    @classmethod
    def of_convolution(cls, group_channels: int, groups: int) -> Work:
        """Return the kind of a convolution whose weight has so many channels a group (its second axis)."""
        return cls.CHANNELWISE if groups > 1 and group_channels < _FEW_CHANNELS else cls.REORDERED
