"""Write pyramidal tiled TIFF files strip by strip: slides, masks and predictions of any size in bounded memory.

Level 0 goes straight into the file. Each lower level is made from the rows of the level above as they pass by and
waits, already compressed, in an unnamed temporary file beside the output, because TIFF wants its pages in sequence.
So at most two tile rows of level 0 are in memory at once, however tall the image is.

The plain layout (reduced pages after the first one) is what OpenSlide and other tools' loaders expect; `ome=True`
stores the levels as SubIFDs with OME-XML instead, which QuPath, Bio-Formats and napari prefer.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gigagrad.errors import WriteError
from gigagrad.files import check_destination, replacing
from gigagrad.threads import SideThreads, Task

if TYPE_CHECKING:
    from gigagrad.images.image import Array

_ENCODERS: Final = 2  # threads; zlib and JPEG release the GIL
_IN_FLIGHT: Final = 8  # tiles; bounds the compressed bytes that wait for their turn


def write_pyramid(
    path: str | Path,
    rows: Iterable[Array],
    *,
    shape: tuple[int, int, int],
    dtype: np.dtype[Any] | type[np.generic] | str,
    nearest: bool,
    tile: int = 512,
    compression: Literal["deflate", "jpeg"] = "deflate",
    quality: int = 85,
    mpp: float | None = None,
    levels: int | Literal["auto"] = "auto",
    overwrite: bool = False,
    description: str | None = None,
    expected_bytes: int = 0,
    ome: bool = False,
) -> Path:
    """Write `rows` as a pyramidal BigTIFF and return its path.

    Args:
        rows: horizontal strips `(h, W)` or `(h, W, C)` from top to bottom, of any heights that add up to `H`. A strip
            is done with before the next is asked for, so its memory may be reused.
        shape: `(H, W, C)` of the whole image, in pixels; `C` is 1 or 3.
        dtype: of the strips and of the file.
        nearest: lower levels take every second pixel (class ids) instead of the mean of 2 x 2 (colours).
        tile: side of the square tiles in pixels, a multiple of 16.
        compression: `jpeg` (lossy, uint8 only, with `quality` 1-100) or `deflate`.
        mpp: micrometres per pixel of level 0, stored as resolution tags; None stores no resolution.
        levels: how many, level 0 included; `auto` halves until one tile holds the image.
        description: free text for the file, plain ASCII.
        expected_bytes: refuse at once if the disk has less room than this; 0 where no estimate exists.
        ome: OME-TIFF with SubIFDs instead of plain reduced pages.

    Raises `WriteError` if the file exists (unless `overwrite`), the folder is missing or read-only, the disk is full
    or the strips do not have the promised shape; errors of the strips' producer pass through as they are. After any
    failure or interrupt nothing of the file remains, and a file that was to be replaced is still the old one.
    """
    path = Path(path)
    codec = _Codec(np.dtype(dtype), shape[2], tile, compression, quality, nearest)
    codec.check(path, shape)
    check_destination(path, overwrite=overwrite, expected_bytes=expected_bytes)
    text = None if description is None else description.encode("ascii", "replace").decode()
    job = _Pyramid(path, codec, _level_shapes(shape[0], shape[1], tile, levels), mpp, text, ome)
    try:
        with replacing(path, lambda: job.estimated_bytes) as file:
            job.write(file, rows)
    except _SourceError as error:
        raise error.original from None
    return path


def pyramid_bytes(shape: tuple[int, int, int], dtype: np.dtype[Any], tile: int = 512) -> int:
    """What writing rows of shape `(H, W, C)` holds beside the rows themselves: a band of tiles of each level with the
    one that is made of it, and tiles on their way through the encoder.
    """
    height, width, channels = shape
    band = min(tile, height) * width * channels * dtype.itemsize
    return 3 * band + 2 * (_IN_FLIGHT + _ENCODERS) * tile * tile * channels * dtype.itemsize


class _SourceError(Exception):
    """Carries an error of the strips' producer past the handler for errors of the output file."""

    def __init__(self, original: Exception) -> None:
        self.original = original


@dataclass(frozen=True, slots=True)
class _Codec:
    """How pixels of one file become compressed tiles and lower levels."""

    dtype: np.dtype[Any]
    channels: int
    tile: int
    compression: Literal["deflate", "jpeg"]
    quality: int
    nearest: bool

    def check(self, path: Path, shape: tuple[int, int, int]) -> None:
        if min(shape) < 1 or self.channels not in (1, 3):
            raise WriteError(f"cannot write {path}: got shape (H, W, C) {shape}, expected H, W >= 1 and C 1 or 3")
        if self.tile < 16 or self.tile % 16:
            raise WriteError(
                f"cannot write {path}: got tile {self.tile} px, expected a multiple of 16, e.g. 256 or 512"
            )
        if self.compression == "jpeg" and self.dtype != np.uint8:
            raise WriteError(f"cannot write {path}: JPEG holds uint8, got {self.dtype}; use deflate compression")
        if self.compression == "jpeg" and not 1 <= self.quality <= 100:
            raise WriteError(f"cannot write {path}: got JPEG quality {self.quality}, expected 1 to 100")
        if not self.nearest and self.dtype not in (np.uint8, np.uint16, np.float32, np.float64):
            raise WriteError(f"cannot write {path}: cannot average {self.dtype} pixels; use nearest lower levels")

    def encode(self, pixels: Array) -> bytes:
        """One tile `(h, w, C)`, padded to the full tile by repeating its border (which keeps JPEG free of ringing)."""
        import imagecodecs

        height, width = pixels.shape[:2]
        if (height, width) != (self.tile, self.tile):
            pixels = np.pad(pixels, ((0, self.tile - height), (0, self.tile - width), (0, 0)), mode="edge")
        if self.channels == 1:
            pixels = pixels[..., 0]
        pixels = np.ascontiguousarray(pixels)
        if self.compression == "deflate":
            return bytes(imagecodecs.deflate_encode(pixels.tobytes(), 6))
        colours: dict[str, Any] = {"colorspace": "RGB", "outcolorspace": "YCBCR", "subsampling": "420"}
        return bytes(imagecodecs.jpeg8_encode(pixels, level=self.quality, **(colours if self.channels == 3 else {})))

    def halve(self, pixels: Array) -> Array:
        """The next lower level of `(h, w, C)` pixels, `(h // 2, w // 2, C)`; an odd last row or column is left out."""
        height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
        pixels = pixels[: 2 * height, : 2 * width]
        if self.nearest or not pixels.size:
            return pixels[::2, ::2]
        wide = np.dtype(np.uint32) if self.dtype.kind == "u" else self.dtype
        rows = np.add(pixels[::2], pixels[1::2], dtype=wide)
        means = np.empty((height, width, self.channels), self.dtype)
        for channel in range(self.channels):  # one at a time: an inner loop over three numbers takes twice as long
            total = rows[:, ::2, channel] + rows[:, 1::2, channel]
            means[..., channel] = (total + 2) // 4 if wide.kind == "u" else total / 4
        return means


class _Stack:
    """Collects strips of any height into bands of exactly one tile's height (the last may be lower)."""

    def __init__(self, shape: tuple[int, int], codec: _Codec) -> None:
        self.shape: Final = shape
        self.missing_rows = shape[0]
        self._codec = codec
        self._held: Array | None = None
        self._held_rows = 0

    def push(self, strip: Array) -> Iterator[Array]:
        """The bands that `strip` `(h, W, C)` completes; valid only until the next push."""
        while len(strip):
            wanted = min(self._codec.tile - self._held_rows, self.missing_rows)
            part, strip = strip[:wanted], strip[wanted:]
            self.missing_rows -= len(part)
            complete = len(part) == wanted
            if complete and not self._held_rows:
                yield part  # no copy for strips that are cut at tile borders already
                continue
            if self._held is None:
                self._held = np.empty((self._codec.tile, self.shape[1], self._codec.channels), self._codec.dtype)
            self._held[self._held_rows : self._held_rows + len(part)] = part
            self._held_rows += len(part)
            if complete:
                rows, self._held_rows = self._held_rows, 0
                yield self._held[:rows]


class _Pyramid:
    """One file being written: level 0 as it comes, the lower levels through spools."""

    def __init__(
        self, path: Path, codec: _Codec, shapes: list[tuple[int, int]], mpp: float | None, text: str | None, ome: bool
    ) -> None:
        self._path = path
        self._codec = codec
        self._mpp, self._description, self._ome = mpp, text, ome
        self._stacks = [_Stack(shape, codec) for shape in shapes]
        self._spools: list[IO[bytes]] = []
        self._sizes: list[list[int]] = [[] for _ in shapes]

    @property
    def estimated_bytes(self) -> int:
        """What the whole job needs on disk, judged by the part that is done: the file and its spooled lower levels."""
        level_bytes = [sum(sizes) for sizes in self._sizes]
        height, missing = self._stacks[0].shape[0], self._stacks[0].missing_rows
        done = max(height - missing, 1)
        return (level_bytes[0] + 2 * sum(level_bytes[1:])) * height // done

    def write(self, file: IO[bytes], rows: Iterable[Array]) -> None:
        import tifffile

        with ExitStack() as stack:
            pool = stack.enter_context(SideThreads(_ENCODERS, "gigagrad-encode"))
            for _ in self._stacks[1:]:
                self._spools.append(stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            encoded = self._encode_rows(rows, pool)
            # BigTIFF always: how large a compressed file becomes is known too late, and every reader knows the format.
            tiff = stack.enter_context(tifffile.TiffWriter(file, bigtiff=True, ome=self._ome, shaped=False))
            for index, stacked in enumerate(self._stacks):
                tiff.write(encoded if index == 0 else self._spooled(index), **self._page(index, stacked.shape))
                if index == 0:
                    for _ in encoded:  # runs the producer to its end, so that surplus rows are noticed
                        raise AssertionError("tifffile left tiles of level 0 unwritten")

    def _page(self, index: int, shape: tuple[int, int]) -> dict[str, Any]:
        """tifffile's arguments for the page of one level."""
        codec, mpp, first = self._codec, self._mpp, index == 0
        page: dict[str, Any] = {
            "shape": shape if codec.channels == 1 else (*shape, codec.channels),
            "dtype": codec.dtype,
            "tile": (codec.tile, codec.tile),
            "photometric": "minisblack" if codec.channels == 1 else "rgb",
            "compression": "adobe_deflate" if codec.compression == "deflate" else "jpeg",
            "subfiletype": 0 if first else 1,
            "software": "gigagrad",
            "metadata": None,
        }
        if mpp is not None:
            per_cm = [1e4 / mpp * side / full for side, full in zip(shape, self._stacks[0].shape, strict=True)]
            page |= {"resolution": (per_cm[1], per_cm[0]), "resolutionunit": "CENTIMETER"}
        if self._ome and first:
            page["subifds"] = len(self._stacks) - 1
            page["metadata"] = {"axes": "YX" if codec.channels == 1 else "YXS", "Name": self._path.name}
            if self._description is not None:
                page["metadata"]["Description"] = self._description
            if mpp is not None:
                page["metadata"] |= {f"PhysicalSize{axis}": mpp for axis in "XY"}
                page["metadata"] |= {f"PhysicalSize{axis}Unit": "\u00b5m" for axis in "XY"}
        elif first:
            page["description"] = self._description
        return page

    def _encode_rows(self, rows: Iterable[Array], pool: SideThreads) -> Iterator[bytes]:
        """Level 0's compressed tiles in file order; the lower levels are spooled on the way."""
        stack = self._stacks[0]
        for strip in _guarded(rows):
            yield from self._encode_level(0, self._checked(strip), pool)
        if stack.missing_rows:
            done = stack.shape[0] - stack.missing_rows
            raise WriteError(f"cannot write {self._path}: the rows ended at {done} of {stack.shape[0]}")

    def _checked(self, strip: Array) -> Array:
        stack, codec = self._stacks[0], self._codec
        if strip.ndim == 2:
            strip = strip[..., None]
        if strip.dtype != codec.dtype or strip.shape[1:] != (stack.shape[1], codec.channels):
            raise WriteError(
                f"cannot write {self._path}: got a strip (h, W, C) {strip.shape} of {strip.dtype}, "
                f"expected (h, {stack.shape[1]}, {codec.channels}) of {codec.dtype}"
            )
        if len(strip) > stack.missing_rows:
            raise WriteError(f"cannot write {self._path}: got more than the promised {stack.shape[0]} rows")
        return np.ascontiguousarray(strip)

    def _encode_level(self, index: int, rows: Array, pool: SideThreads) -> Iterator[bytes]:
        """The tiles that these rows complete in a level; what follows from them below it goes to the spools."""
        for band in self._stacks[index].push(rows):
            if index + 1 < len(self._stacks):  # first, because nobody resumes us after the last tile
                self._spools[index].writelines(self._encode_level(index + 1, self._codec.halve(band), pool))
            for data in self._encode_band(band, pool):
                self._sizes[index].append(len(data))
                yield data

    def _encode_band(self, band: Array, pool: SideThreads) -> Iterator[bytes]:
        waiting: deque[Task[bytes]] = deque()
        for x in range(0, band.shape[1], self._codec.tile):
            if len(waiting) == _IN_FLIGHT:
                yield waiting.popleft().result()
            waiting.append(pool.submit(self._codec.encode, band[:, x : x + self._codec.tile]))
        while waiting:
            yield waiting.popleft().result()

    def _spooled(self, index: int) -> Iterator[bytes]:
        spool = self._spools[index - 1]
        spool.seek(0)
        for size in self._sizes[index]:
            yield spool.read(size)
        spool.truncate(0)  # its bytes are in the file now; do not hold them twice


def _level_shapes(height: int, width: int, tile: int, levels: int | Literal["auto"]) -> list[tuple[int, int]]:
    if levels != "auto" and levels < 1:
        raise WriteError(f"got {levels} levels, expected 1 or more, or 'auto'")
    shapes = [(height, width)]
    while min(shapes[-1]) > 1 and (max(shapes[-1]) > tile if levels == "auto" else len(shapes) < levels):
        shapes.append((shapes[-1][0] // 2, shapes[-1][1] // 2))
    return shapes


def _guarded(rows: Iterable[Array]) -> Iterator[Array]:
    try:
        yield from rows
    except Exception as error:
        raise _SourceError(error) from error
