"""Op rules by family. Importing this package registers them."""

from gigagrad.graphs.ops import (
    convolution,
    each,
    padding,
    pointwise,
    regrouping,
    resampling,
    shaping,
    transposed,
    windows,
)

__all__ = [
    "convolution",
    "each",
    "padding",
    "pointwise",
    "regrouping",
    "resampling",
    "shaping",
    "transposed",
    "windows",
]
