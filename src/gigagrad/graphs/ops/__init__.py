"""Op rules by family. Importing this package registers them."""

from gigagrad.graphs.ops import convolution, padding, pointwise, resampling, shaping, transposed, windows

__all__ = ["convolution", "padding", "pointwise", "resampling", "shaping", "transposed", "windows"]
