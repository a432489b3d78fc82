"""Read Zarr arrays (v2 and v3) and OME-Zarr groups, and write them, chunk by chunk by zarr-python itself.

Metadata are text that anybody may have written: whatever their types, they end in an image or in an `ImageError`, and
what they declare is bounded before a chunk is read.

Written is version 0.4 on Zarr 2, which QuPath and Bio-Formats read, too. Axes are y and x, after c where there are
several channels. A mask whose classes have names is a label image under `labels/classes`, and the image itself shows
the same arrays: they are there once, and open as either. (https://ngff.openmicroscopy.org/0.4/)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.georeference import PixelSize, choose_mpp, micrometres
from gigagrad.images.image import Image
from gigagrad.images.layout import ENCODERS, Layout, MaskClass
from gigagrad.images.pixels import (
    ZARR_NODATA,
    Array,
    check_size,
    choose_level,
    fill_of,
    in_our_words,
    levels_of,
    parse_nodata,
)
from gigagrad.images.views import channels_first
from gigagrad.threads import SideThreads
from gigagrad.units import format_bytes

_MARKERS = ("zarr.json", ".zarray", ".zgroup")
_INDEX_ENTRY_BYTES = 16  # offset and length of one chunk in a shard
_MOST_LEVELS = 64
_COPIES = 2
"""Copies of a chunk while it is decoded, by threads of zarr's own."""
# An allow list: others of numcodecs run code that a chunk holds (pickle) or change values.
_CODECS = frozenset({
    *("bytes", "transpose", "sharding_indexed", "crc32c", "blosc", "zstd", "gzip"),
    *("zlib", "lz4", "bz2", "lzma", "shuffle", "delta", "crc32", "adler32", "fletcher32"),
    *("numcodecs.zlib", "numcodecs.lz4", "numcodecs.bz2", "numcodecs.lzma", "numcodecs.shuffle", "numcodecs.delta"),
})  # fmt: skip
_VERSION: Final = "0.4"
_LABELS: Final = "labels/classes"
_RGB: Final = (
    MaskClass(0, "Red", (255, 0, 0)),
    MaskClass(1, "Green", (0, 255, 0)),
    MaskClass(2, "Blue", (0, 0, 255)),
)


class ZarrImage(Image):
    """A level, one of several zarr.Arrays, whose `axes` are named: a permutation of c, y, x and axes of length 1."""

    def __init__(
        self,
        arrays: Sequence[Any],
        axes: Sequence[str],
        *,
        name: str,
        level: int,
        mpp: float | None,
        channel_names: tuple[str, ...] = (),
        open_level: Callable[..., Image] | None = None,
    ) -> None:
        from gigagrad.images.zarr_codecs import with_bounded_chunks

        levels = levels_of([_shape_of(array, axes)[1:] for array in arrays])
        choose_level(levels, level, name)
        array, shape = arrays[level], _shape_of(arrays[level], axes)
        native = np.dtype(array.dtype).newbyteorder("=")
        super().__init__(
            shape=shape,
            dtype=native,
            name=name,
            fill=fill_of(native, shape[0]),
            mpp=mpp,
            levels=levels,
            level=level,
            nodata=parse_nodata(str(array.attrs.get(ZARR_NODATA)), native),
            channel_names=channel_names,
            open_level=open_level,
            thread_bytes=_COPIES * math.prod(array.chunks) * native.itemsize,
        )
        self._array = with_bounded_chunks(array)
        self._axes = tuple(axes)
        # After the axes of length 1 are dropped: where c, y and x stand in what zarr returns.
        kept = [axis for axis in axes if axis in ("c", "y", "x")]
        self._order = tuple(kept.index(axis) for axis in ("c", "y", "x") if axis in kept)

    @property
    def block_shape(self) -> tuple[int, int]:
        chunk = dict(zip(self._axes, self._array.chunks, strict=True))
        return chunk["y"], chunk["x"]

    def _read_inside(self, box: Box) -> Array:
        wanted = {"c": slice(None), "y": slice(box.y0, box.y1), "x": slice(box.x0, box.x1)}
        with in_our_words(f"cannot read {box} of {self.name}", "a chunk is missing or corrupt"):
            pixels = np.asarray(self._array[tuple(wanted.get(axis, 0) for axis in self._axes)])
        pixels_CHW = pixels.transpose(self._order).reshape(self.channels, *box.shape)
        return pixels_CHW.astype(pixels.dtype.newbyteorder("="), copy=not pixels.flags.writeable)


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is a Zarr array or group."""
    return any((folder / marker).is_file() for marker in _MARKERS)


def open_zarr(path: Path, *, level: int = 0, mpp: float | None = None) -> ZarrImage:
    """Open a Zarr array, or one level of an OME-Zarr image (the first image of a bioformats2raw collection).

    Raises `ImageError` for a damaged store, a group without multiscales, or axes beyond channels, y and x.
    """
    import zarr

    name = path.name.removesuffix(".zarr").removesuffix(".ome") or path.name
    with in_our_words(f"cannot open {path} as Zarr", "its metadata are damaged"):
        node = zarr.open(path, mode="r")
        if isinstance(node, zarr.Array):
            return from_array(node, name=name, level=level, mpp=mpp)
        return _from_group(node, path, name, level, mpp)


def from_array(array: Any, *, name: str | None = None, level: int = 0, mpp: float | None = None) -> ZarrImage:
    """Open a plain zarr.Array: `(C, H, W)` or `(H, W)`, unless its dimension names (c, y, x) say otherwise."""
    name = name or array.basename or "zarr"
    with in_our_words(f"cannot open the Zarr array {name}", "its metadata are damaged"):
        axes = _named_axes(array)
        if axes is None:
            channels_first(array.shape, np.dtype(array.dtype) == np.uint8, name)
            axes = ["c", "y", "x"][-array.ndim :]
        _check_array(array, axes, name)
        return ZarrImage([array], axes, name=name, level=level, mpp=choose_mpp(mpp, name))


def _named_axes(array: Any) -> list[str] | None:
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    lowered = [str(entry).lower() for entry in names] if names else []
    return lowered if {"y", "x"} <= set(lowered) else None


def _from_group(group: Any, path: Path, name: str, level: int, mpp: float | None) -> ZarrImage:
    image = group
    multiscales = _multiscales(group.attrs)
    if multiscales is None and "0" in group:
        image = group["0"]
        multiscales = _multiscales(image.attrs)
    if multiscales is None:
        raise ImageError(
            f"{path} is a Zarr group without OME multiscales metadata; name one of its arrays instead, "
            f"e.g. {path.name}/{next(iter(group.array_keys()), 'ARRAY')}"
        )
    with in_our_words(f"{path} has damaged OME multiscales metadata", "expected axes, and datasets that have a path"):
        entry = multiscales[0]
        if len(entry["datasets"]) > _MOST_LEVELS:
            raise ImageError(f"{path} declares {len(entry['datasets'])} levels; expected at most {_MOST_LEVELS}")
        arrays = [image[dataset["path"]] for dataset in entry["datasets"]]
        axes, units = _axes(entry, arrays[0].ndim)
        scale = _scale(entry["datasets"][0], entry)
        for array in arrays:
            _check_array(array, axes, name)
    sides = [micrometres(scale[axis], units[axis]) for axis in map(axes.index, "xy")] if scale else [None]
    base = choose_mpp(mpp, name, [PixelSize(*sides)])
    return ZarrImage(
        arrays,
        axes,
        name=name,
        level=level,
        mpp=base,
        channel_names=_channel_names(image.attrs, _shape_of(arrays[0], axes)[0]),
        open_level=partial(open_zarr, path, mpp=base),
    )


def _multiscales(attributes: Mapping[str, Any]) -> Any:
    """Return the multiscales of OME-Zarr 0.5's `ome` entry or of 0.4's top level."""
    return (attributes.get("ome") or attributes).get("multiscales")


def _channel_names(attributes: Mapping[str, Any], channels: int) -> tuple[str, ...]:
    """Return the labels that viewers are told to show, empty unless there is one for each channel."""
    shown = (attributes.get("ome") or attributes).get("omero") or {}
    names = tuple(str(channel.get("label", "")).strip() for channel in shown.get("channels", ()))
    return names if len(names) == channels and any(names) else ()


def _axes(entry: Mapping[str, Any], ndim: int) -> tuple[list[str], list[str]]:
    """Return names and units of the axes; versions before 0.4 fixed the order t, c, z, y, x and had no units."""
    axes = entry.get("axes") or [{"name": name} for name in "tczyx"[-ndim:]]
    named = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]
    return [str(axis["name"]).lower() for axis in named], [str(axis.get("unit", "")) for axis in named]


def _scale(dataset: Mapping[str, Any], entry: Mapping[str, Any]) -> list[float] | None:
    """Return level 0's pixel size along each axis: the dataset's scale times the image's, if any."""
    scale: list[float] | None = None
    for holder in (dataset, entry):
        for transformation in holder.get("coordinateTransformations", ()):
            if transformation.get("type") == "scale":
                factors = [float(factor) for factor in transformation["scale"]]
                scale = factors if scale is None else [a * b for a, b in zip(scale, factors, strict=True)]
    return scale


def _shape_of(array: Any, axes: Sequence[str]) -> tuple[int, int, int]:
    """Return `(C, H, W)`, whatever the order of its axes."""
    sizes = dict(zip(axes, array.shape, strict=True))
    return sizes.get("c", 1), sizes["y"], sizes["x"]


def _check_array(array: Any, axes: Sequence[str], name: str) -> None:
    """Raise `ImageError` if there is more than channels, y and x, or what cannot be read safely in bounded memory."""
    from gigagrad.images.zarr_codecs import LARGEST_CHUNK_BYTES, codec_name, codecs_of

    others = [axis for axis, size in zip(axes, array.shape, strict=True) if axis not in ("c", "y", "x") and size != 1]
    if others or not {"y", "x"} <= set(axes) or len(set(axes)) < len(axes):
        raise ImageError(
            f"{name} has axes {', '.join(axes)} of lengths {tuple(array.shape)}; expected channels, y and x (others of "
            "length 1); extract the plane you mean into its own array"
        )
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "buif":
        raise ImageError(f"{name} has dtype {dtype}; expected integers, floats or bool")
    check_size(_shape_of(array, axes), name)
    chunk_bytes = math.prod(array.chunks) * dtype.itemsize
    index_bytes = math.prod(array.shards or ()) // max(1, math.prod(array.chunks)) * _INDEX_ENTRY_BYTES
    if max(chunk_bytes, index_bytes) > LARGEST_CHUNK_BYTES:
        raise ImageError(
            f"{name} has chunks of {tuple(array.chunks)} ({format_bytes(chunk_bytes)}, in shards {array.shards}), "
            f"which are decoded whole; expected at most {format_bytes(LARGEST_CHUNK_BYTES)}; write it in smaller ones"
        )
    if foreign := sorted({codec_name(codec) for codec in codecs_of(array.metadata)} - _CODECS):
        raise ImageError(
            f"{name} is stored with the codec {', '.join(foreign)}, which is not read from files; expected one of "
            f"{', '.join(sorted(_CODECS))}; write it again with one of them"
        )


def write_zarr(folder: Path, layout: Layout, rows: Iterable[Array]) -> None:
    """Write the image into an empty folder. The main thread waits for others that call zarr (see `threads`)."""
    with SideThreads(ENCODERS, "gigagrad-encode") as pool:
        arrays = pool.submit(_create, folder, layout).result()
        done_rows = [0] * len(arrays)
        for level, band in layout.bands(rows):
            place = slice(done_rows[level], done_rows[level] + len(band))
            done_rows[level] = place.stop
            channels = range(band.shape[2])
            tasks = [
                pool.submit(arrays[level].__setitem__, (c, place) if len(channels) > 1 else place, band[..., c])
                for c in channels
            ]
            for task in tasks:
                task.result()


def _create(folder: Path, layout: Layout) -> list[Any]:
    """Create the groups with all that is said of the image, and an array for each level."""
    import zarr
    from numcodecs import Blosc

    several, nodata = layout.shape[2] > 1, layout.nodata
    root = zarr.open_group(folder, mode="a", zarr_format=2)
    inside = f"{_LABELS}/" if layout.classes else ""
    root.attrs.update({"multiscales": _described(layout, layout.path.name, inside), **_omero(layout)})
    if layout.classes:
        name = _LABELS.rpartition("/")[2]
        root.create_group("labels", attributes={"labels": [name]})
        label = {
            "version": _VERSION,
            "colors": [{"label-value": kind.id, "rgba": [*kind.color, 255]} for kind in layout.classes],
            "properties": [{"label-value": kind.id, "name": kind.name} for kind in layout.classes],
            "source": {"image": "../../"},
        }
        attributes = {"multiscales": _described(layout, name), "image-label": label}
        root.create_group(_LABELS, attributes=attributes)
    return [
        root.create_array(
            f"{inside}{level}",
            shape=(layout.shape[2], *sides) if several else sides,
            chunks=(1, layout.tile, layout.tile) if several else (layout.tile, layout.tile),
            dtype=layout.dtype,
            compressors=Blosc(cname="zstd", clevel=3),
            fill_value=0 if nodata is None else nodata,
            attributes={} if nodata is None else {ZARR_NODATA: str(nodata)},
            chunk_key_encoding={"name": "v2", "separator": "/"},
        )
        for level, sides in enumerate(layout.levels)
    ]


def _described(layout: Layout, name: str, inside: str = "") -> list[dict[str, Any]]:
    """Describe the levels, with the size of a pixel in micrometres or, where unknown, in pixels of level 0."""
    unit = {} if layout.mpp is None else {"unit": "micrometer"}
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}] if layout.shape[2] > 1 else []
    axes += [{"name": axis, "type": "space", **unit} for axis in "yx"]
    datasets = [
        {
            "path": f"{inside}{level}",
            "coordinateTransformations": [
                {"type": "scale", "scale": [*([1.0] * (len(axes) - 2)), *[(layout.mpp or 1.0) * 2.0**level] * 2]}
            ],
        }
        for level in range(len(layout.levels))
    ]
    return [{"version": _VERSION, "name": name, "axes": axes, "datasets": datasets}]


def _omero(layout: Layout) -> dict[str, Any]:
    """Describe names and colours of the channels, where they have any."""
    channels = _RGB if layout.colour else layout.channels
    most = 1.0 if layout.dtype.kind == "f" else float(np.iinfo(layout.dtype).max)
    window = {"min": 0.0, "start": 0.0, "max": most, "end": most}
    described = [
        {"label": kind.name, "color": bytes(kind.color).hex().upper(), "window": window, "active": True}
        for kind in channels
    ]
    return {"omero": {"version": _VERSION, "channels": described}} if described else {}
