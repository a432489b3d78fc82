"""A network that was exported, as a folder: `model.onnx` and a `config.json` that says what it takes and gives.

ONNX Runtime runs it; neither PyTorch's own networks nor any code of a library is built for it. A pixel of its output
depends on `margins` around the pixel alone, and an image that is moved by whole multiples of `stride` has the same
output, moved. So the output for a box is that for a crop which holds the margins and begins at a multiple of the
stride; it ends at one, too, or where the image ends: borders are then where the network pads, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box, Span
from gigagrad.errors import ModelError, extra
from gigagrad.files import read_record
from gigagrad.models.saved import CONFIG

KIND: Final = "gigagrad export"
DTYPE: Final = np.dtype(np.uint8)
"""The dtype of images: what a network makes of other integers is traced into it otherwise."""
_LARGEST: Final = 1 << 20
"""Margins and strides in a file are at most so many pixels."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which crop of an image gives a box of the output, along y and x, in pixels."""

    stride: tuple[int, int]
    margins: tuple[tuple[int, int], tuple[int, int]]
    """Before and behind a pixel, along y and along x."""

    def crop(self, box: Box, height: int, width: int) -> Box:
        """Return the part of a `height x width` image whose output has that of `box` in it."""
        spans = []
        for axis, (span, size) in enumerate(zip((box.y, box.x), (height, width), strict=True)):
            stride, (before, behind) = self.stride[axis], self.margins[axis]
            start = max(0, span.start - before) // stride * stride
            spans.append(Span(start, min(size, -(-(span.stop + behind) // stride) * stride)))
        return Box.of(*spans)

    def around(self, axis: int) -> int:
        """Return the most pixels that a crop has beyond its box."""
        return sum(self.margins[axis]) + 2 * (self.stride[axis] - 1)


@dataclass(frozen=True, slots=True)
class ExportedNetwork:
    """A network `(1, C, H, W)` uint8 -> `(1, outputs, H, W)` float32 in a file, for images of any size."""

    path: Path
    spec: str
    """The name of the model that it was made of."""
    channels: int
    outputs: int
    geometry: Geometry
    bytes_per_pixel: float
    """Memory that a crop is expected to take while it is computed, by its pixels."""
    int8: bool

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `config.json` beside a file says of it. Raises `ModelError` for a damaged one."""
        try:
            said = read_record(path.with_name(CONFIG), KIND)
            network = cls(
                path,
                str(said["spec"]),
                _number(said, "channels"),
                _number(said, "outputs"),
                Geometry(
                    (_number(said["stride"], "y", 1), _number(said["stride"], "x", 1)),
                    (_pair(said["margins"], "y"), _pair(said["margins"], "x")),
                ),
                float(_number(said, "bytes_per_pixel")),
                said["int8"] is True,
            )
            if not network.spec.isprintable() or not path.is_file():
                raise ValueError(f"there is no {path.name} beside it")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error!s}" if isinstance(error, ValueError) else f"damaged at {error}"
            raise ModelError(f"cannot read the exported network {path}: {reason}; export it again") from error
        return network

    def described(self) -> dict[str, Any]:
        """Return what `read` finds in the file again."""
        (sy, sx), (my, mx) = self.geometry.stride, self.geometry.margins
        return {
            "spec": self.spec,
            "channels": self.channels,
            "outputs": self.outputs,
            "dtype": str(DTYPE),
            "stride": {"y": sy, "x": sx},
            "margins": {"y": list(my), "x": list(mx)},
            "bytes_per_pixel": round(self.bytes_per_pixel),
            "int8": self.int8,
        }

    def open(self, threads: int) -> Session:
        """Load the file into ONNX Runtime, for computation by so many threads. Raises `ModelError`."""
        return Session(self.path, threads)


class Session:
    """An ONNX file with one input and one output, loaded."""

    def __init__(self, path: Path, threads: int) -> None:
        """Load it. Raises `ModelError` for a file that ONNX Runtime refuses, `ConfigError` where that is missing."""
        with extra("export"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            (self._input,) = (given.name for given in self._session.get_inputs())
        except Exception as error:  # ONNX Runtime's own classes share no other base
            raise ModelError(f"ONNX Runtime cannot load {path}: {reason_of(error)}; export it again") from error
        self._name = path

    def run(self, pixels_NCHW: NDArray[Any]) -> NDArray[Any]:
        """Compute the output of a batch. Raises `ModelError`."""
        try:
            (output,) = self._session.run(None, {self._input: np.ascontiguousarray(pixels_NCHW)})
        except Exception as error:
            raise ModelError(f"{self._name} fails on an image {pixels_NCHW.shape}: {reason_of(error)}") from error
        return np.asarray(output)


def reason_of(error: Exception | None) -> str:
    """Return the text of another library's error in one line."""
    return " ".join(str(error).split())[:300]


def _number(said: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = said[name]
    if type(value) is not int or not least <= value <= _LARGEST:
        raise ValueError(f"{name} is {value!r}")
    return value


def _pair(said: Mapping[str, Any], name: str) -> tuple[int, int]:
    before, behind = said[name]
    return _number({name: before}, name, 0), _number({name: behind}, name, 0)
