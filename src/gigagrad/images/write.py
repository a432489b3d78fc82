"""Write pyramids strip by strip: slides, masks and predictions of any size in bounded memory.

The name says the format. `x.tif` is a plain tiled TIFF, reduced pages after the first one, as OpenSlide and other
tools' loaders expect; `x.ome.tif` an OME-TIFF, which QuPath, Bio-Formats and napari prefer; `x.cog.tif` a
cloud-optimised GeoTIFF; `x.zarr` an OME-Zarr.
Each lower level is made from the rows of the level above as they pass by, so at most two tile rows of level 0 are in
memory at once, however tall the image is.

Level 0 goes straight into a TIFF, plane by plane and level by level as TIFF wants it. What comes too early - lower
levels, planes after the first - waits, already compressed, in an unnamed temporary file beside the output. A
cloud-optimised GeoTIFF has its tables at its head and small levels before large ones, so that a map server reads what
it shows by a few requests: GDAL's own driver makes it of a whole file.
"""

from __future__ import annotations

import shutil
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType
from typing import IO, Any, Final, Literal

import numpy as np

from gigagrad.errors import WriteError, extra
from gigagrad.files import check_destination, replacing, replacing_folder
from gigagrad.images.layout import ENCODERS, IN_FLIGHT, TILE, Layout, MaskClass, SourceError, level_shapes
from gigagrad.images.pixels import Array
from gigagrad.images.zarr import write_zarr
from gigagrad.threads import SideThreads, Task


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

    Raises `WriteError` for the name of another format, if the file exists (unless `overwrite`), the folder is missing
    or read-only, the disk is full or the strips do not have the promised shape; errors of the strips' producer pass
    through as they are. After any failure or interrupt nothing of the file remains, and a file that was to be replaced
    is still the old one.
    """
    path = Path(path)
    if path.suffix.lower() in _OF_OTHER_FORMATS:
        raise WriteError(f"cannot write {path}: a pyramid is a TIFF or a Zarr; call it {path.with_suffix('.tif').name}")
    sides = level_shapes(shape[0], shape[1], tile, levels)
    text = None if description is None else description.encode("ascii", "replace").decode()
    layout = Layout(path, shape, np.dtype(dtype), nearest, tile, sides, mpp, text, channels, classes, tags)
    layout.check()
    job = None if _is_zarr(path) else TiffPyramid(layout, compression, quality)
    check_destination(path, overwrite=overwrite, expected_bytes=expected_bytes, folder=job is None)
    try:
        if job is None:
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


def pyramid_bytes(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> int:
    """Return what writing rows of shape `(H, W, C)` holds beside the rows themselves: a band of tiles of each level
    with the one that is made of it, and tiles on their way through the encoder.
    """
    if _is_zarr(path):
        import zarr  # noqa: F401  # now: a plan is to find it in what the process holds
    height, width, channels = shape
    band = min(TILE, height) * width * channels * dtype.itemsize
    return 3 * band + 2 * (IN_FLIGHT + ENCODERS) * TILE**2 * min(channels, 3) * dtype.itemsize


_OF_OTHER_FORMATS: Final = frozenset(f".{name}" for name in "bmp gif jp2 jpeg jpg npy npz pdf png svs webp".split())
"""Ends of names by which other programs would take a TIFF for what it is not."""


def _is_zarr(path: Path) -> bool:
    return path.suffix.lower() == ".zarr"


class TiffPyramid:
    """A BigTIFF being written: plain, or an OME-TIFF with the levels as SubIFDs where its name says so.

    Raises `WriteError` for a compression that cannot hold the pixels.
    """

    def __init__(self, layout: Layout, compression: Literal["deflate", "jpeg"], quality: int) -> None:
        self._layout, self._quality = layout, quality
        self._jpeg = compression == "jpeg"
        self._ome = layout.path.name.lower().endswith((".ome.tif", ".ome.tiff"))
        self._waiting = [[_Tiles() for _ in range(layout.planes)] for _ in layout.levels]
        self._written_bytes = self._done_rows = 0
        if self._jpeg and layout.dtype != np.uint8:
            raise WriteError(f"cannot write {layout.path}: JPEG holds uint8, got {layout.dtype}; use deflate")
        if self._jpeg and not 1 <= quality <= 100:
            raise WriteError(f"cannot write {layout.path}: got JPEG quality {quality}, expected 1 to 100")

    @property
    def estimated_bytes(self) -> int:
        """Estimate what the whole job needs on disk by the part that is done: the file and what waits beside it."""
        waiting = sum(sum(tiles.sizes) for level in self._waiting for tiles in level)
        return (self._written_bytes + 2 * waiting) * self._layout.shape[0] // max(self._done_rows, 1)

    def write(self, file: IO[bytes], rows: Iterable[Array]) -> None:
        import tifffile

        with ExitStack() as stack:
            pool = stack.enter_context(SideThreads(ENCODERS, "gigagrad-encode"))
            spool = stack.enter_context(TemporaryFile(dir=self._layout.path.parent))
            first = self._first_plane(rows, spool, pool)
            # BigTIFF always: how large a compressed file becomes is known too late, and every reader knows the format.
            tiff = stack.enter_context(tifffile.TiffWriter(file, bigtiff=True, ome=self._ome, shaped=False))
            for level, planes in enumerate(self._waiting):
                waiting = (tiles.read(spool) for tiles in (planes if level else planes[1:]))
                data = chain(*([] if level else [first]), chain.from_iterable(waiting))
                tiff.write(data, **self._page(level))
                for _ in data:  # runs the producer to its end: what follows from the last tile, and surplus rows
                    raise AssertionError(f"tifffile left tiles of level {level} unwritten")

    def _first_plane(self, rows: Iterable[Array], spool: IO[bytes], pool: SideThreads) -> Iterator[bytes]:
        """Yield the compressed tiles of level 0's first plane in file order; all others are spooled on the way."""
        layout = self._layout
        for level, band in layout.bands(rows):
            for plane in range(layout.planes):
                pixels = band if layout.colour else band[..., plane]
                if level or plane:
                    self._waiting[level][plane].add(spool, self._encoded(pixels, pool))
                    continue
                self._done_rows += len(band)
                for data in self._encoded(pixels, pool):
                    self._written_bytes += len(data)
                    yield data

    def _encoded(self, pixels: Array, pool: SideThreads) -> Iterator[bytes]:
        """Encode the tiles of a band of one plane."""
        waiting: deque[Task[bytes]] = deque()
        for x in range(0, pixels.shape[1], self._layout.tile):
            if len(waiting) == IN_FLIGHT:
                yield waiting.popleft().result()
            waiting.append(pool.submit(self._encode, pixels[:, x : x + self._layout.tile]))
        while waiting:
            yield waiting.popleft().result()

    def _encode(self, pixels: Array) -> bytes:
        """Encode a tile `(h, w)` or `(h, w, 3)`, its border repeated to the full tile (to keep JPEG from ringing)."""
        import imagecodecs

        tile, (height, width) = self._layout.tile, pixels.shape[:2]
        if (height, width) != (tile, tile):
            pixels = np.pad(pixels, ((0, tile - height), (0, tile - width), (0, 0))[: pixels.ndim], mode="edge")
        pixels = np.ascontiguousarray(pixels)
        if not self._jpeg:
            return bytes(imagecodecs.deflate_encode(pixels.tobytes(), 6))
        colours: dict[str, Any] = {"colorspace": "RGB", "outcolorspace": "YCBCR", "subsampling": "420"}
        return bytes(imagecodecs.jpeg8_encode(pixels, level=self._quality, **(colours if self._layout.colour else {})))

    def _page(self, level: int) -> dict[str, Any]:
        """Return tifffile's arguments for the pages of one level."""
        layout, (height, width) = self._layout, self._layout.levels[level]
        axes = "YXS" if layout.colour else "CYX" if layout.planes > 1 else "YX"
        sides = {"Y": height, "X": width, "C": layout.planes, "S": 3}
        page: dict[str, Any] = {
            "shape": tuple(sides[axis] for axis in axes),
            "dtype": layout.dtype,
            "tile": (layout.tile, layout.tile),
            "photometric": "rgb" if layout.colour else "minisblack",
            "planarconfig": "separate" if axes == "CYX" and not self._ome else None,
            "compression": "jpeg" if self._jpeg else "adobe_deflate",
            "subfiletype": 1 if level else 0,
            "software": "gigagrad",
            "metadata": None,
        }
        if layout.mpp is not None:
            per_cm = [
                1e4 / layout.mpp * side / full for side, full in zip((height, width), layout.levels[0], strict=True)
            ]
            page |= {"resolution": (per_cm[1], per_cm[0]), "resolutionunit": "CENTIMETER"}
        if not level:
            counts = {tag: 1 + len(value) if kind == "s" else len(value) for tag, (kind, value) in layout.tags.items()}
            page["extratags"] = [(tag, kind, counts[tag], value) for tag, (kind, value) in layout.tags.items()]
        if self._ome and not level:
            page |= {"subifds": len(layout.levels) - 1, "metadata": {"axes": axes, **_ome(layout)}}
        elif not level:
            page["description"] = layout.description
        return page


class _Tiles:
    """Compressed tiles of one plane of one level, where they wait in the spool."""

    def __init__(self) -> None:
        self.sizes, self._places = array("Q"), array("Q")

    def add(self, spool: IO[bytes], tiles: Iterable[bytes]) -> None:
        for data in tiles:
            self._places.append(spool.tell())
            self.sizes.append(spool.write(data))

    def read(self, spool: IO[bytes]) -> Iterator[bytes]:
        for place, size in zip(self._places, self.sizes, strict=True):
            spool.seek(place)
            yield spool.read(size)


def _ome(layout: Layout) -> dict[str, Any]:
    """Return what OME-XML says of the image. A colour is a signed number of the bytes red, green, blue, alpha."""
    metadata: dict[str, Any] = {"Name": layout.path.name}
    if layout.description is not None:
        metadata["Description"] = layout.description
    if layout.mpp is not None:
        metadata |= {f"PhysicalSize{axis}": layout.mpp for axis in "XY"}
        metadata |= {f"PhysicalSize{axis}Unit": "\u00b5m" for axis in "XY"}
    if layout.channels:
        colours = [int.from_bytes(bytes((*kind.color, 255)), "big", signed=True) for kind in layout.channels]
        metadata["Channel"] = {"Name": [kind.name for kind in layout.channels], "Color": colours}
    return metadata


_CACHE_MIB = 64
"""The cache of GDAL's blocks; by default it takes a twentieth of the machine's memory."""
_OPTIONS = {"compress": "DEFLATE", "bigtiff": "IF_SAFER"}


def require_gdal() -> None:
    """Raise `ConfigError` where rasterio, which brings GDAL, is not installed."""
    with extra("geo"):
        import rasterio.shutil  # noqa: F401


def write_cog(source: Path, path: Path, *, nearest: bool) -> Path:
    """Write the TIFF `source` as cloud-optimised GeoTIFF to `path`, which it may be itself, and return that.

    Reference system, transform, nodata and pixels are the same, and channels that are no colours stay none; levels are
    made anew, by every second pixel where `nearest`, else by means. For a while, two more copies are on the disk.
    Raises `WriteError`.
    """
    require_gdal()
    import rasterio
    import rasterio.shutil

    resampling = "NEAREST" if nearest else "AVERAGE"
    options = {"blocksize": TILE, "overviews": "IGNORE_EXISTING", **_OPTIONS}
    with replacing(path) as file, TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        optimised = Path(folder) / "cog.tif"
        try:
            with rasterio.Env(GDAL_CACHEMAX=_CACHE_MIB), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of images that lie nowhere on earth
                rasterio.shutil.copy(source, optimised, driver="COG", overview_resampling=resampling, **options)
                if _calls_channels_colours(optimised):
                    optimised = _without_colours(optimised)
        except Exception as error:  # GDAL's errors have many classes, none of them the system's
            reason = " ".join(str(error).split())[:200]
            raise WriteError(f"cannot write {path} as a cloud-optimised GeoTIFF: {reason}") from error
        with optimised.open("rb") as whole:
            shutil.copyfileobj(whole, file)
    return path


def _calls_channels_colours(path: Path) -> bool:
    """Return whether three or four channels of bytes are red, green, blue and alpha by the TIFF's tags, and not to
    GDAL, whose driver has no option for it: to all who read the tags, a class' probability would be how opaque the
    others are."""
    import rasterio
    import tifffile
    from rasterio.enums import ColorInterp

    with rasterio.open(path) as file, tifffile.TiffFile(path) as tiff:
        return int(tiff.pages[0].photometric) == 2 and file.colorinterp[0] != ColorInterp.red


def _without_colours(path: Path) -> Path:
    """Replace a cloud-optimised GeoTIFF by a copy, laid out alike, whose channels are but numbers."""
    import rasterio.shutil

    plain = path.with_name("plain.tif")
    layout = {"tiled": True, "blockxsize": TILE, "blockysize": TILE, "copy_src_overviews": True}
    rasterio.shutil.copy(path, plain, driver="GTiff", photometric="MINISBLACK", **layout, **_OPTIONS)
    path.unlink()
    return plain
