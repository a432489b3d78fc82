"""Write pyramids strip by strip: slides, masks and predictions of any size in bounded memory.

The name says the format. `x.tif` is a plain tiled TIFF, reduced pages after the first one, as OpenSlide and other
tools' loaders expect; `x.ome.tif` an OME-TIFF, which QuPath, Bio-Formats and napari prefer; `x.cog.tif` a
cloud-optimised GeoTIFF; `x.zarr` an OME-Zarr.
Each lower level is made from the rows of the level above as they pass by, so at most two tile rows of level 0 are in
memory at once, however tall the image is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gigagrad.files import check_destination, replacing, replacing_folder
from gigagrad.images.layout import ENCODERS, IN_FLIGHT, TILE, Layout, MaskClass, SourceError, level_shapes
from gigagrad.images.write_tiff import TiffPyramid, require_gdal, write_cog

if TYPE_CHECKING:
    from gigagrad.images.pixels import Array


def write_pyramid(
    path: str | Path,
    rows: Iterable[Array],
    *,
    shape: tuple[int, int, int],
    dtype: np.dtype[Any] | type[np.generic] | str,
    nearest: bool,
    tile: int = TILE,
    compression: Literal["deflate", "jpeg"] = "deflate",
    quality: int = 85,
    mpp: float | None = None,
    levels: int | Literal["auto"] = "auto",
    overwrite: bool = False,
    description: str | None = None,
    expected_bytes: int = 0,
    channels: Sequence[MaskClass] = (),
    classes: Sequence[MaskClass] = (),
    tags: Mapping[int, tuple[str, Any]] = MappingProxyType({}),
) -> Path:
    """Write `rows` as a pyramidal BigTIFF, or an OME-Zarr (0.4) where `path` ends in `.zarr`, and return the path.

    Args:
        rows: horizontal strips `(h, W)` or `(h, W, C)` from top to bottom, of any heights that add up to `H`. A strip
            is done with before the next is asked for, so its memory may be reused.
        shape: `(H, W, C)` of the whole image, in pixels. Three channels of integers are red, green and blue unless
            `channels` says otherwise.
        dtype: of the strips and of the file.
        nearest: lower levels take every second pixel (class ids) instead of the mean of 2 x 2 (colours).
        tile: side of the square tiles in pixels, a multiple of 16.
        compression: of a TIFF: `jpeg` (lossy, uint8 only, with `quality` 1-100) or `deflate`.
        mpp: micrometres per pixel of level 0; None stores no resolution.
        levels: how many, level 0 included; `auto` halves until one tile holds the image.
        description: free text for a TIFF, plain ASCII.
        expected_bytes: refuse at once if the disk has less room than this; 0 where no estimate exists.
        channels: what the channels are called; OME-TIFF and OME-Zarr have places for it.
        classes: of class ids, what they are called; an OME-Zarr then has them under `labels/`.
        tags: further tags of a TIFF's level 0, each with the type of its value or values as struct writes it; as
            `georeference.geotiff_tags` makes them.

    Raises `WriteError` if the file exists (unless `overwrite`), the folder is missing or read-only, the disk is full
    or the strips do not have the promised shape; errors of the strips' producer pass through as they are. After any
    failure or interrupt nothing of the file remains, and a file that was to be replaced is still the old one.
    """
    path = Path(path)
    sides = level_shapes(shape[0], shape[1], tile, levels)
    text = None if description is None else description.encode("ascii", "replace").decode()
    layout = Layout(path, shape, np.dtype(dtype), nearest, tile, sides, mpp, text, channels, classes, tags)
    layout.check()
    job = None if _is_zarr(path) else TiffPyramid(layout, compression, quality)
    check_destination(path, overwrite=overwrite, expected_bytes=expected_bytes, folder=job is None)
    try:
        if job is None:
            from gigagrad.images.write_zarr import write_zarr

            with replacing_folder(path) as folder:
                write_zarr(folder, layout, rows)
        elif path.name.lower().endswith(".cog.tif"):
            require_gdal()
            with TemporaryDirectory(dir=path.parent, prefix=".") as hidden:
                write_cog(_write_tiff(Path(hidden) / path.name, job, rows), path, nearest=nearest)
        else:
            _write_tiff(path, job, rows)
    except SourceError as error:
        raise error.original from None
    return path


def _write_tiff(path: Path, job: TiffPyramid, rows: Iterable[Array]) -> Path:
    with replacing(path, lambda: job.estimated_bytes) as file:
        job.write(file, rows)
    return path


def pyramid_bytes(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any], tile: int = TILE) -> int:
    """Return what writing rows of shape `(H, W, C)` holds beside the rows themselves: a band of tiles of each level
    with the one that is made of it, and tiles on their way through the encoder.
    """
    if _is_zarr(path):
        from gigagrad.images import write_zarr  # noqa: F401  # now: a plan is to find zarr in what the process holds
    height, width, channels = shape
    band = min(tile, height) * width * channels * dtype.itemsize
    return 3 * band + 2 * (IN_FLIGHT + ENCODERS) * tile * tile * min(channels, 3) * dtype.itemsize


def _is_zarr(path: Path) -> bool:
    return path.suffix.lower() == ".zarr"
