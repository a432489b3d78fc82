"""The rows themselves, by family. Importing this package fills the table."""

from gigagrad.graphs.rows import padding, pointwise, resampling, shaping, transposed, windows

__all__ = ["padding", "pointwise", "resampling", "shaping", "transposed", "windows"]
