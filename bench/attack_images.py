"""Damaged and hostile images: each gives right pixels or one `ImageError`, never a hang, a crash or anything else.

    python bench/attack_images.py [--count 50000] [--seed 0] [--workers 2] [--slides DIR] [--only INDEX]

From the seed, every case takes a small image of one reader, codec and layout (or a slide of DIR), damages it, opens it,
and reads boxes and a thumbnail of its levels. Files are damaged blindly (bits, bytes, cuts, blocks removed, doubled,
zeroed, joined) and knowingly (fields of TIFF directories, descriptions that declare 10**8 planes, JSON of other types,
JPEG and PNG that end before their pixels). Workers have limits of time (10 s a case) and memory (300 MiB more than
before the case); one that dies or does not answer is replaced. Of what opens, the pixels must be those of the library
that reads the same file whole (tifffile, Pillow, zarr), and of every undamaged file those that were written.
Progress on stderr; one JSON line last. `--only` repeats one case in this process and shows what it raised.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tifffile
import zarr

from gigagrad.boxes import Box
from gigagrad.errors import GigagradError
from gigagrad.images import Image, open_image, thumbnail
from gigagrad.images.openslide import OpenSlideImage

HEIGHT, WIDTH = 83, 101
SECONDS = 10.0
MORE_BYTES = 300 * 2**20
ADDRESS_BYTES = 6 * 2**30
"""Room for what is reserved and not used; a worker shall not take the machine with it."""
LARGEST_PX = 2**21
"""Larger images are read in part only: their size is a claim that a sparse file may make."""
FAULTS = ("wrong", "leaked", "crashed", "hung", "foreign")
NUMBERS = (0, 1, 2, 3, 7, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 2**63 - 1, 2**64 - 1, 10**8)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 1.5, 1e308, float("nan"), 10**8, 10**12, 10**30, -(10**12), "", "x", "NaN"),
    *("<u2", "|O", ">f8", "|V100000000", "../..", "pickle", "zstd", "blosc", [], [0], [-1, -1], [1, 1, 1, 1], {}),
    *([10**9, 10**9, 10**9], [[1]], {"id": "pickle"}, {"id": "zlib"}, {"name": "zstd"}, [{"id": "pickle"}], "y" * 999),
)
BLIND = ("bit", "byte", "byte", "number", "zero", "ones", "remove", "double", "foreign", "cut", "join")
Files = dict[str, bytes]
"""An image as its files by name; the name "" is that of an image that is one file."""


@dataclass(frozen=True)
class Base:
    """An undamaged image. `truth` is `(C, H, W)` as written, None for lossy codecs and slides."""

    name: str
    suffix: str
    files: Files
    truth: np.ndarray | None


# Undamaged images.


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


# Damage.


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


def damage_field(data: bytearray, rng: random.Random) -> None:
    """Another number in a field of a directory, or in a value that stands elsewhere."""
    entries = tiff_entries(data)
    order = "<" if data[:2] == b"II" else ">"
    if not entries:
        return
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, _, kind, count, value, big = rng.choice(entries)
        wide = 8 if big else 4
        code = {2: "H", 4: "L", 8: "Q"}
        number = rng.choice((*NUMBERS, value, count, value + 1, count - 1, len(data), rng.randrange(2**32)))
        size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 16: 8}.get(kind, 4)
        field = rng.choice(("tag", "type", "count", "value", "value", "value", "elsewhere", "short"))
        if field in ("tag", "type"):
            struct.pack_into(
                order + "H", data, at + 2 * (field == "type"), number % 2**16 if rng.random() < 0.5 else 330
            )
        elif field in ("count", "value"):
            place = at + 4 + (wide if field == "value" else 0)
            struct.pack_into(order + code[wide], data, place, number % 2 ** (8 * wide))
        elif field == "short" or count * size <= wide or value + count * size > len(data) or size == 1:
            struct.pack_into(order + "H", data, at + 4 + wide, number % 2**16)
        else:
            place = value + size * rng.randrange(count)
            unit = min(size, 8)
            struct.pack_into(order + code[unit], data, place, number % 2 ** (8 * unit))


def damage_chain(data: bytearray, rng: random.Random) -> None:
    """Directories that lead to themselves, to another place, or nowhere."""
    entries = tiff_entries(data)
    if not entries:
        return
    order, big = ("<" if data[:2] == b"II" else ">"), entries[0][5]
    size, wide = (20, 8) if big else (12, 4)
    ends = [one[0] + size for one, two in zip(entries, [*entries[1:], (0,)], strict=True) if two[0] != one[0] + size]
    starts = [entries[0][0] - (8 if big else 2)] + [end + wide for end in ends]
    target = rng.choice((*starts, len(data) - 1, len(data), rng.randrange(len(data)), *NUMBERS))
    place = rng.choice((8 if big else 4, *ends))
    struct.pack_into(order + ("Q" if big else "L"), data, place, target % 2 ** (8 * wide))


def damage_description(data: bytearray, rng: random.Random) -> None:
    """A new description at the end of the file, which declares what is not there."""
    described = [entry for entry in tiff_entries(data) if entry[1] in (270, 305)]
    if not described:
        return
    at, _, _, count, value, big = rng.choice(described)
    order, wide = ("<" if data[:2] == b"II" else ">"), 8 if big else 4
    number = rng.choice((10**8, 10**5, 2, 0, -1, 10**18))
    shares = rng.choice(("", f'PlaneCount="{number}"'))
    ome = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels DimensionOrder='
        f'"XYCZT" SizeX="{WIDTH}" SizeY="{HEIGHT}" SizeC="3" SizeZ="1" SizeT="{number}" Type="uint8" ID="P:0"><Channel '
        f'SamplesPerPixel="{rng.choice((1, 3, number))}"/><TiffData {shares}/>'
        "</Pixels></Image></OME>"
    )
    text = bytes(data[value : value + count])
    new = rng.choice(
        (
            ome.encode(),
            f'{{"shape": [{number}, {HEIGHT}, {WIDTH}, 3]}}'.encode(),
            f'{{"shape": [{HEIGHT}, {WIDTH}, 3], "axes": {number}}}'.encode(),
            f"ImageJ=1.11a\nimages={number}\nchannels={number}\nslices=1\nhyperstack=true\n".encode(),
            re.sub(rb"\d+", lambda found: str(number).encode() if rng.random() < 0.3 else found.group(), text),
            rng.choice((b"MedScan", b"Philips", b"<MetaData>", b'{"shape": null}', b"SCANIMAGE", b"Aperio Image")),
        )
    )
    new += b"\0"
    struct.pack_into(order + ("QQ" if big else "LL"), data, at + 4, len(new), len(data))
    if len(new) <= wide:
        data[at + 4 + wide : at + 4 + wide + len(new)] = new
    data += new


def damage_stream(data: bytearray, rng: random.Random) -> None:
    """A JPEG stream that ends early and says that it is whole."""
    starts = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    if not starts:
        return
    start = rng.choice(starts)
    end = data.find(b"\xff\xd9", start)
    if end > start + 20:
        cut = rng.randrange(start + 14, end)
        data[cut : cut + 2] = b"\xff\xd9"
        if data[:2] == b"\xff\xd8" and rng.random() < 0.5:
            frame = re.search(rb"\xff[\xc0-\xc2]\x00[\x08-\x14]", data)
            if frame:
                struct.pack_into(">HH", data, frame.start() + 5, rng.choice((HEIGHT, 8192)), rng.choice((WIDTH, 8192)))


def damage_png(data: bytearray, rng: random.Random) -> None:
    """Chunks changed, left out or cut, with checksums that are right."""
    chunks: list[tuple[bytes, bytearray]] = []
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">L", data, at)
        chunks.append((bytes(data[at + 4 : at + 8]), data[at + 8 : at + 8 + length]))
        at += 12 + length
    kind, body = rng.choice(chunks)
    if kind == b"IHDR":
        struct.pack_into(">L", body, rng.choice((0, 4)), rng.choice(NUMBERS[:12]))
    elif kind == b"IDAT":
        raw = bytearray(zlib.decompress(body))
        del raw[rng.randrange(len(raw)) :]
        body[:] = zlib.compress(raw) if rng.random() < 0.7 else body[: rng.randrange(len(body))]
    elif body:
        body[rng.randrange(len(body))] = rng.randrange(256)
    parts = [struct.pack(">L", len(b)) + k + b + struct.pack(">L", zlib.crc32(k + b)) for k, b in chunks]
    data[8:] = b"".join(parts)


def damage_blindly(data: bytearray, rng: random.Random) -> None:
    """Bits, bytes, numbers, blocks and cuts, anywhere; half of them near the beginning or the end."""
    if not data:
        return
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        edge = min(len(data), 400)
        near = (rng.randrange(edge), len(data) - 1 - rng.randrange(edge))
        at = rng.choice((*near, rng.randrange(len(data)), rng.randrange(len(data))))
        size = min(rng.choice((1, 2, 4, 16, 256, 2000)), len(data) - at)
        kind = rng.choice(BLIND)
        if kind == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = rng.randrange(256)
        elif kind == "number":
            wide = rng.choice((2, 4, 8))
            data[at : at + wide] = (rng.choice(NUMBERS) % 2 ** (8 * wide)).to_bytes(wide, rng.choice(("little", "big")))
        elif kind in ("zero", "ones", "foreign"):
            data[at : at + size] = rng.randbytes(size) if kind == "foreign" else bytes([255 * (kind == "ones")]) * size
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "cut":
            del data[at:]
        else:
            data += data[: rng.randrange(1, 3000)]
        if not data:
            return


def damage_json(data: bytearray, rng: random.Random) -> None:
    """Values of other types, absurd numbers, keys that are missing or stand twice."""
    try:
        tree = json.loads(bytes(data))
    except ValueError:
        return damage_blindly(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
            places += [(node, key) for key in keys]
            waiting += [node[key] for key in keys]
        if not places:
            break
        node, key = rng.choice(places)
        if rng.random() < 0.2:
            del node[key]
        elif rng.random() < 0.1:
            node[key] = [node[key]]
        else:
            node[key] = rng.choice(JSON_VALUES)
    data[:] = json.dumps(tree).encode()
    return None


def damaged(base: Base, rng: random.Random) -> Files:
    """The base's files with one of them damaged; of a folder of files, one may be missing."""
    files = dict(base.files)
    name = rng.choice(sorted(files))
    if name and rng.random() < 0.6:
        name = rng.choice([other for other in sorted(files) if "." in Path(other).name])
    data = bytearray(files[name])
    ways: list[Callable[[bytearray, random.Random], None]] = [damage_blindly]
    if bytes(data[:2]) in (b"II", b"MM"):
        ways += [damage_field, damage_field, damage_field, damage_chain, damage_description, damage_stream]
    elif data[:2] == b"\xff\xd8":
        ways += [damage_stream]
    elif data[:4] == b"\x89PNG":
        ways += [damage_png]
    elif "." in Path(name).name:
        ways = [damage_json, damage_json, damage_json, damage_blindly]
    elif name and rng.random() < 0.1:
        del files[name]
        return files
    rng.choice(ways)(data, rng)
    if rng.random() < 0.1:
        damage_blindly(data, rng)
    files[name] = bytes(data)
    return files


# What a case does.


def look(path: Path, rng: random.Random) -> str:
    """Open, read, compare. Returns fine or wrong; raises what the readers raise."""
    with open_image(path) as image:
        for level in range(min(3, len(image.levels))):
            with image.at_level(level) if level else open_image(path) as one:
                said = look_at(one, path, level, rng)
                if said != "fine":
                    return said
    return "fine"


def look_at(image: Image, path: Path, level: int, rng: random.Random) -> str:
    height, width = image.height, image.width
    y, x = rng.randrange(height), rng.randrange(width)
    corners = ((0, 0), (max(0, height - 40), max(0, width - 40)), (y, x), (-5, -5))
    boxes = [Box(top, left, top + 48, left + 48) for top, left in corners]
    for box in boxes:
        part = np.asarray(image.read(box))
        if part.shape != (image.channels, 48, 48) or part.dtype != image.dtype:
            return f"wrong: {box} has shape {part.shape} and dtype {part.dtype}"
    if height * width * image.channels > LARGEST_PX:
        return "fine"
    small = thumbnail(image, 32)
    if max(small.shape[:2]) > 32:
        return f"wrong: a thumbnail of {small.shape}"
    whole = np.asarray(image.read(Box.whole(height, width)))
    for box in boxes[:3]:
        inside = box.clamp(height, width)
        same = whole[:, inside.y0 : inside.y1, inside.x0 : inside.x1]
        if not np.array_equal(np.asarray(image.read(inside)), same, equal_nan=True):
            return f"wrong: {box} differs from the whole"
    reference = None if isinstance(image, OpenSlideImage) else whole_by_library(path, level)
    if reference is not None and reference.shape == whole.shape and not alike(reference, whole):
        return "wrong: the pixels differ from the library's"
    return "fine"


def alike(one: np.ndarray, two: np.ndarray) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def whole_by_library(path: Path, level: int) -> np.ndarray | None:
    """`(C, H, W)` by the library that owns the format; None where it refuses the file or sees another layout."""
    try:
        if path.is_dir():
            node = zarr.open(path, mode="r")
            array = node if isinstance(node, zarr.Array) else None
            return None if array is None or array.ndim != 3 or level else np.asarray(array[...])
        if path.read_bytes()[:2] not in (b"II", b"MM"):
            with PIL.Image.open(path) as picture:
                plain = picture.mode in ("L", "RGB") and not picture.has_transparency_data
                stored = np.asarray(picture) if plain else None
            return None if stored is None else np.atleast_3d(stored).transpose(2, 0, 1)
        with tifffile.TiffFile(path, _multifile=False) as tif:
            series = tif.series[0].levels[level]
            sparse = any(0 in page.databytecounts for page in series.pages if page is not None)
            if sparse or series.axes not in ("YX", "YXS", "CYX", "SYX", "QYX") or tif.pages[0].software == "MedScan":
                return None
            array = series.asarray()
            array = array[None] if array.ndim == 2 else array
            return array.transpose(2, 0, 1) if series.axes == "YXS" else array
    except Exception:
        return None


def run_case(index: int, seed: int, bases: list[Base], folder: Path) -> tuple[str, str]:
    """One case in this process: how it ended, and what was said."""
    rng = random.Random(f"{seed}/{index}")
    base = rng.choice(bases)
    path = folder / f"image{base.suffix}"
    put(path, damaged(base, rng), base)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    open_files = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, said = verdict(path, rng)
    if (more := memory("VmHWM") - before) > MORE_BYTES:
        kind, said = "crashed", f"{more >> 20} MiB more ({kind}: {said})"
    if kind != "foreign" and still_more_files_than(open_files):
        kind, said = "leaked", f"an open file ({kind}: {said})"
    return kind, f"{base.name}: {said}"


def still_more_files_than(before: int) -> bool:
    """After what waits for the collector, and threads that were reading when another failed, are done."""
    for _ in range(20):
        if len(os.listdir("/proc/self/fd")) <= before:
            return False
        gc.collect()
        time.sleep(0.02)
    return True


def verdict(path: Path, rng: random.Random) -> tuple[str, str]:
    try:
        said = look(path, rng)
    except GigagradError as error:
        said = str(error)
        return ("refused", said) if said and "\n" not in said else ("foreign", f"not one line: {said!r}")
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return said.partition(":")[0], said


def put(path: Path, files: Files, base: Base) -> None:
    """Write the files of a case, in place of those of the case before."""
    if "" in base.files:
        path.write_bytes(files[""])
        return
    shutil.rmtree(path, ignore_errors=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def memory(field: str) -> int:
    """Bytes of this process, by a field of its status."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) * 1024


def check_bases(bases: list[Base], folder: Path) -> list[str]:
    """What is wrong with undamaged images; those that are refused by name are no fault."""
    faults = []
    for base in bases:
        path = folder / f"image{base.suffix}"
        put(path, base.files, base)
        try:
            with warnings.catch_warnings(), open_image(path) as image:
                warnings.simplefilter("ignore")
                said = look(path, random.Random(0))
                whole = np.asarray(image.read(Box.whole(image.height, image.width))) if base.truth is not None else None
            if said != "fine" or (whole is not None and not alike(np.asarray(base.truth), whole)):
                faults.append(f"{base.name}: undamaged, {said} and the pixels that were written do not come back")
        except GigagradError as error:
            print(f"{base.name} is refused: {error}", file=sys.stderr)
    return faults


# Workers.


def work(pipe: Connection, seed: int, bases: list[Base], folder: Path) -> None:
    """Run the cases whose numbers come through the pipe, until None comes."""
    folder.mkdir(exist_ok=True)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    room = memory("VmSize") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries open what they keep (an event loop, codecs) with the first image.
    check_bases(bases, folder)
    while (index := pipe.recv()) is not None:
        pipe.send(run_case(index, seed, bases, folder))


class Worker:
    """A process that may die, and the case it is at."""

    def __init__(self, number: int, seed: int, bases: list[Base], folder: Path) -> None:
        self._make = (seed, bases, folder / f"worker{number}")
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, *self._make), daemon=True)
        self.process.start()
        other.close()
        self.case: int | None = None

    def give(self, case: int) -> None:
        self.case, self.since = case, time.monotonic()
        self.pipe.send(case)

    def answer(self) -> tuple[str, str] | None:
        """How the case ended, None while it runs. A worker that died or hangs is replaced."""
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except EOFError:
                self.process.join()
                code = self.process.exitcode or 0
                said = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        elif time.monotonic() - self.since > SECONDS:
            self.process.kill()
            self.process.join()
            self.start()
            return "hung", f"no answer within {SECONDS:g} s"
        else:
            return None
        self.start()
        return "crashed", said


def campaign(count: int, seed: int, workers: int, bases: list[Base], folder: Path) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    examples: list[str] = []
    cases = iter(range(count))
    crew = [Worker(number, seed, bases, folder) for number in range(workers)]
    busy = [worker for worker in crew if start_next(worker, cases)]
    began = time.monotonic()
    while busy:
        wait([worker.pipe for worker in busy], timeout=0.2)
        for worker in list(busy):
            if (ended := worker.answer()) is None:
                continue
            kind, said = ended
            counts[kind] += 1
            if kind in FAULTS:
                examples.append(f"--seed {seed} --only {worker.case}: {kind}: {said[:200]}")
                print(examples[-1], file=sys.stderr)
            if counts.total() % 1000 == 0:
                rate = counts.total() / (time.monotonic() - began)
                print(f"{counts.total()} of {count}: {dict(counts)}, {rate:.0f} a second", file=sys.stderr)
            if not start_next(worker, cases):
                worker.pipe.send(None)
                busy.remove(worker)
    return counts, examples


def start_next(worker: Worker, cases: Any) -> bool:
    case = next(cases, None)
    if case is None:
        return False
    worker.give(case)
    return True


def prepared(folder: Path, slides: Path | None) -> tuple[list[Base], list[str]]:
    """Bases and what is wrong with them, made in a process of its own: this one stays without threads, to be forked."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def make() -> None:
        bases = make_bases(folder, slides)
        there.send((bases, check_bases(bases, folder)))

    process = context.Process(target=make)
    process.start()
    there.close()
    made: tuple[list[Base], list[str]] = here.recv()
    process.join()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slides", type=Path)
    parser.add_argument("--only", type=int, help="one case, in this process")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases, examples = prepared(folder, chosen.slides)
        if chosen.only is not None:
            print(*run_case(chosen.only, chosen.seed, bases, folder))
            return
        counts, found = campaign(chosen.count, chosen.seed, chosen.workers, bases, folder)
    counts["wrong"] += len(examples)
    kinds = {kind: counts[kind] for kind in ("fine", "refused", *FAULTS)}
    line = {"attack": "images", "seed": chosen.seed, "tried": chosen.count, **kinds}
    print(json.dumps({**line, "examples": (examples + found)[:10]}))
    raise SystemExit(int(any(kinds[kind] for kind in FAULTS)))


if __name__ == "__main__":
    main()
