"""Undamaged images for `attack_images.py`: one of every reader, codec and layout, and slides of a folder."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tifffile
import zarr

HEIGHT, WIDTH = 83, 101
Files = dict[str, bytes]
"""An image as its files by name; the name "" is that of an image that is one file."""


@dataclass(frozen=True)
class Base:
    """An undamaged image. `truth` is `(C, H, W)` as written, None for lossy codecs and slides."""

    name: str
    suffix: str
    files: Files
    truth: np.ndarray | None


def pixels(channels: int = 3, dtype: str = "u1", smooth: bool = False) -> np.ndarray:
    """`(C, H, W)`: noise, or for lossy codecs something smooth with no mid-grey corner."""
    if smooth:
        y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
        return np.stack([(40 * np.sin(y / 9 + c) + 30 * np.cos(x / 7) + 170) for c in range(channels)]).astype(dtype)
    rng = np.random.default_rng(1)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal((channels, HEIGHT, WIDTH)).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max, (channels, HEIGHT, WIDTH), dtype=np.dtype(dtype).newbyteorder("="))


def tiff_options() -> dict[str, dict[str, Any]]:
    """What tifffile is told, by the name of the base; `of` says which pixels, `steps` how many levels."""
    tiled: dict[str, Any] = {"tile": (32, 32)}
    lossless: dict[str, dict[str, Any]] = {
        "lzw": {"compression": "lzw"},
        "deflate": {"compression": "deflate"},
        "predicted": {"compression": "deflate", "predictor": True},
        "packbits": {"compression": "packbits"},
        "zstd": {"compression": "zstd"},
        "lzma": {"compression": "lzma"},
        "png": {"compression": "png"},
        "webp": {"compression": "webp", "compressionargs": {"lossless": True}},
        "jpeg2000": {"compression": "jpeg2000"},
        "jpegxr": {"compression": "jpegxr"},
        "jpegxl": {"compression": "jpegxl"},
        "lerc": {"compression": "lerc"},
    }
    named = {f"tiled-{name}": {**tiled, **options} for name, options in lossless.items()}
    named |= {f"striped-{name}": {"rowsperstrip": 16, **lossless[name]} for name in ("lzw", "deflate", "zstd")}
    lossy = {"of": (3, "u1", True), "compression": "jpeg"}
    return named | {
        "tiled-raw": tiled,
        "striped-raw": {},
        "jpeg": {**tiled, **lossy},
        "jpeg-strips": {**lossy, "rowsperstrip": 16},
        "jpeg-rgb": {**tiled, **lossy, "photometric": "rgb"},
        "jpeg-ycbcr": {**tiled, **lossy, "photometric": "ycbcr", "subsampling": (2, 2)},
        "jpeg-grey": {**tiled, **lossy, "of": (1, "u1", True)},
        "webp-lossy": {**tiled, "of": (3, "u1", True), "compression": "webp"},
        "planar": {**tiled, "compression": "deflate", "planarconfig": "separate"},
        "planar-strips": {"compression": "lzw", "planarconfig": "separate", "rowsperstrip": 9},
        "bigtiff": {**tiled, "compression": "deflate", "bigtiff": True},
        "bigtiff-big-endian": {**tiled, "of": (3, "u2", False), "byteorder": ">", "bigtiff": True},
        "floats": {**tiled, "of": (1, "f4", False), "compression": "deflate", "predictor": 3},
        "channels": {**tiled, "of": (5, "f4", False), "compression": "deflate"},
        "raw-channels": {"of": (5, "u2", False)},
        "mask": {**tiled, "of": (1, "u1", False), "compression": "deflate"},
        "plain": {**tiled, "compression": "deflate", "metadata": None},
        "pyramid": {**tiled, "compression": "deflate", "metadata": None, "steps": 3},
        "pyramid-jpeg": {**tiled, **lossy, "metadata": None, "steps": 2},
        "svs": {**tiled, **lossy, "metadata": None, "description": "Aperio Image\n1x1|AppMag = 20|MPP = 0.5"},
        "imagej": {"of": (3, "u2", False), "imagej": True, "metadata": {"axes": "CYX"}},
        "ome": {**tiled, "compression": "deflate", "ome": True, "metadata": {"axes": "CYX"}, "subifds": 1},
        "ome-rgb": {**tiled, "compression": "deflate", "ome": True, "metadata": {"axes": "YXS"}},
        "trestle": {
            **tiled,
            **lossy,
            "metadata": None,
            "software": "MedScan",
            "description": "Background Color=FFFFFF;White Balance=112,99,92;Objective Power=20;OverlapsXY= 0 0",
        },
        "aperio-jp2": {**tiled, "compression": "jpeg2000", "metadata": None, "description": "Aperio Image\nx"},
    }  # fmt: skip


def make_tiff(path: Path, options: dict[str, Any]) -> np.ndarray | None:
    """Write it; the `(C, H, W)` to expect, None for lossy codecs."""
    options = dict(options)
    of, steps = options.pop("of", (3, "u1", False)), options.pop("steps", 1)
    whole = pixels(*of)
    kinds = {name: options.pop(name) for name in ("bigtiff", "byteorder", "ome", "imagej") if name in options}
    apart = options.get("planarconfig") == "separate" or len(whole) == 5 or options.get("metadata") == {"axes": "CYX"}
    defaults = {"photometric": "rgb" if len(whole) == 3 and not (apart and kinds) else "minisblack"}
    with tifffile.TiffWriter(path, **kinds) as writer:
        for step in [2**level for level in range(steps + options.get("subifds", 0))]:
            level = whole[:, ::step, ::step]
            extra = {"subfiletype": int(step > 1), "resolution": (20000 / step, 20000 / step), "resolutionunit": 3}
            written = {**defaults, **options, **extra}
            if step > 1:
                written = {key: value for key, value in written.items() if key not in ("subifds", "metadata")}
                written["metadata"] = None
            if "imagej" in kinds:
                written = {"metadata": options["metadata"]}
            writer.write(level.squeeze() if apart or len(whole) == 1 else level.transpose(1, 2, 0), **written)
    return None if of[2] else whole


def make_pictures(folder: Path) -> dict[str, tuple[Path, np.ndarray | None]]:
    """PNG and JPEG of every colour that Pillow writes."""
    made: dict[str, tuple[Path, np.ndarray | None]] = {}
    rgb, smooth = pixels().transpose(1, 2, 0), PIL.Image.fromarray(pixels(smooth=True).transpose(1, 2, 0))
    colours: dict[str, PIL.Image.Image] = {
        "rgb": PIL.Image.fromarray(rgb),
        "grey": PIL.Image.fromarray(rgb[..., 0]),
        "deep": PIL.Image.fromarray(pixels(1, "u2")[0]),
        "alpha": PIL.Image.fromarray(np.concatenate([rgb, rgb[..., :1]], -1)),
        "palette": smooth.quantize(16),
        "bits": PIL.Image.fromarray(rgb[..., 0] > 99),
    }
    for name, picture in colours.items():
        path = folder / f"{name}.png"
        picture.save(path)
        truth = {"rgb": rgb.transpose(2, 0, 1), "grey": rgb[None, ..., 0], "deep": pixels(1, "u2")}.get(name)
        made[f"png-{name}"] = (path, truth)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "progressive": {"progressive": True},
        "restarts": {"restart_marker_blocks": 4},
        "444": {"subsampling": 0, "optimize": True},
    }
    for name, chosen in options.items():
        smooth.save(folder / f"{name}.jpg", **chosen)
        made[f"jpeg-{name}"] = (folder / f"{name}.jpg", None)
    for mode in ("L", "CMYK"):
        smooth.convert(mode).save(folder / f"{mode}.jpg")
        made[f"jpeg-{mode}"] = (folder / f"{mode}.jpg", None)
    return made


def make_zarrs(folder: Path) -> dict[str, tuple[Path, np.ndarray | None]]:
    """Arrays of both formats with their codecs, and OME-Zarr groups of both versions."""
    made: dict[str, tuple[Path, np.ndarray | None]] = {}
    from zarr.codecs import BloscCodec, GzipCodec

    whole = pixels()
    options: dict[str, dict[str, Any]] = {
        "3": {},
        "3-raw": {"compressors": None},
        "3-blosc": {"compressors": BloscCodec()},
        "3-gzip": {"compressors": GzipCodec(), "dimension_names": ("c", "y", "x")},
        "3-shards": {"chunks": (3, 16, 16), "shards": (3, 64, 64)},
        "2": {"zarr_format": 2},
        "2-raw": {"zarr_format": 2, "compressors": None},
    }
    for name, chosen in options.items():
        path = folder / f"{name}.zarr"
        zarr.create_array(path, **{"shape": whole.shape, "chunks": (3, 48, 64), "dtype": "u1", **chosen})[...] = whole
        made[f"zarr-{name}"] = (path, whole)
    for version in (2, 3):
        path = folder / f"{version}.ome.zarr"
        group = zarr.create_group(path, zarr_format=version)
        for level in (0, 1):
            part = whole[None, :, None, :: 2**level, :: 2**level]
            array = group.create_array(str(level), shape=part.shape, chunks=(1, 3, 1, 48, 64), dtype="u1")
            array[...] = part
        scaled = [{"type": "scale", "scale": [1, 1, 1, 0.5, 0.5]}]
        datasets = [{"path": str(level), "coordinateTransformations": scaled} for level in (0, 1)]
        axes = [{"name": name} for name in "tcz"] + [{"name": name, "unit": "micrometer"} for name in "yx"]
        multiscales = [{"axes": axes, "datasets": datasets}]
        group.attrs.update({"multiscales": multiscales} if version == 2 else {"ome": {"multiscales": multiscales}})
        made[f"ome-zarr-{version}"] = (path, whole)
    return made


def make_bases(folder: Path, slides: Path | None) -> list[Base]:
    made: dict[str, tuple[Path, np.ndarray | None]] = {}
    for name, options in tiff_options().items():
        made[name] = (folder / f"{name}.tif", make_tiff(folder / f"{name}.tif", options))
    hand_over_to_openslide(made["aperio-jp2"][0])
    made["aperio-jp2"] = (made["aperio-jp2"][0], None)
    made |= make_pictures(folder) | make_zarrs(folder)
    made |= {path.name: (path, None) for path in (sorted(slides.iterdir()) if slides else ()) if path.is_file()}
    bases = []
    for name, (path, truth) in made.items():
        inside = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else []
        files = {str(file.relative_to(path)): file.read_bytes() for file in inside} or {"": path.read_bytes()}
        bases.append(Base(name, path.suffix, files, truth))
    return bases


def hand_over_to_openslide(path: Path) -> None:
    """JPEG 2000 as Aperio marks it where the reader has to turn YCbCr into RGB."""
    data = bytearray(path.read_bytes())
    for at, tag, *_ in tiff_entries(data):
        if tag == 259:
            struct.pack_into("<H", data, at + 8, 33003)
    path.write_bytes(data)


def tiff_entries(data: bytes | bytearray) -> list[tuple[int, int, int, int, int, bool]]:
    """`(position, tag, type, count, value, big)` of every entry of the main chain; [] for what is no sound TIFF."""
    order, big = ("<" if data[:2] == b"II" else ">"), data[2:4] in (b"+\0", b"\0+")
    found: list[tuple[int, int, int, int, int, bool]] = []
    try:
        (at,) = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)
        while at and len(found) < 5000:
            (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
            form, at = order + ("HHQQ" if big else "HHLL"), at + (8 if big else 2)
            for index in range(min(count, 100)):
                place = at + index * struct.calcsize(form)
                found.append((place, *struct.unpack_from(form, data, place), big))
            at += count * struct.calcsize(form)
            (at,) = struct.unpack_from(order + ("Q" if big else "L"), data, at)
    except struct.error:
        pass
    return found
