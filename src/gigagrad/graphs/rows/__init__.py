"""The rows themselves, by family. Importing this package fills the table."""

from gigagrad.graphs.rows import convolution, padding, pointwise, resampling, shaping, transposed, windows

__all__ = ["convolution", "padding", "pointwise", "resampling", "shaping", "transposed", "windows"]
