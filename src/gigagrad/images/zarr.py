"""Read Zarr arrays (v2 and v3) and OME-Zarr groups, chunk by chunk by zarr-python itself.

Metadata are text that anybody may have written: whatever their types, they end in an image or in an `ImageError`, and
what they declare is bounded before a chunk is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.image import Image
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
from gigagrad.images.resolution import choose_mpp, micrometres
from gigagrad.images.views import channels_first
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
    x = axes.index("x")
    base = choose_mpp(mpp, name, [micrometres(scale[x], units[x]) if scale else None])
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
