"""Random small image files for `readers.py`: TIFFs of every layout, written here byte by byte so that blocks may be
left out, cut short or oddly shaped; GeoTIFFs by GDAL; Zarr arrays without some of their chunks."""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import imagecodecs
import numpy as np
import tifffile
import zarr

Tags = dict[int, tuple[int, Any]]
"""Of a directory: TIFF type and values by tag."""

_TABLES = ((324, 325), (273, 279))
_STRUCT = {3: "H", 4: "I", 16: "Q"}
_CODES = {1: "B", 2: "s", 3: "H", 4: "L", 12: "d", 16: "Q", 5: "L"}
_SIZES = {"B": 1, "s": 1, "H": 2, "L": 4, "d": 8, "Q": 8}
_BYTE, _ASCII, _SHORT, _LONG, _RATIONAL, _DOUBLE = 1, 2, 3, 4, 5, 12
_RGB, _YCBCR = 2, 6
_JPEG = 7
_CODECS: dict[int, Callable[[Any], Any]] = {
    1: lambda data: data,
    5: imagecodecs.lzw_encode,
    8: imagecodecs.zlib_encode,
    32946: imagecodecs.zlib_encode,
    32773: imagecodecs.packbits_encode,
    34925: lambda data: imagecodecs.lzma_encode(data, check=0),
    50000: imagecodecs.zstd_encode,
}
_DEFAULTS = {277: 1, 278: 2**32 - 1, 284: 1, 339: 1}
APERIO = "Aperio Image Library v12.0.15\n{0}x{1} (16x16) JPEG/RGB Q=90|AppMag = 20|MPP = 0.5"
GDAL_ITEMS = '<GDALMetadata>\n  <Item name="DESCRIPTION" sample="0" role="description">near</Item>\n</GDALMetadata>'


@dataclass
class Page:
    """One directory: its tags but those of the blocks, the blocks (None and b"" are left out), those below it."""

    tags: Tags
    blocks: list[bytes | None]
    tiled: bool
    below: list[Page] = field(default_factory=list)


def write_tiff(path: Path, pages: list[Page], order: str, big: bool) -> None:
    """The pages as a chain of directories; a block that is left out has neither bytes nor, if it is None, a place."""
    data = bytearray((b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if big else 42))
    data += struct.pack(f"{order}HHQ", 8, 0, 0) if big else struct.pack(f"{order}L", 0)
    link = 8 if big else 4
    for page in pages:
        at, following = _append(data, page, order, big)
        struct.pack_into(f"{order}{'Q' if big else 'L'}", data, link, at)
        link = following
    path.write_bytes(data + bytes(64))


def _append(data: bytearray, page: Page, order: str, big: bool) -> tuple[int, int]:
    """Where the directory stands, and where in it the place of the next one does."""
    below = [_append(data, inner, order, big)[0] for inner in page.below]
    offsets = []
    for block in page.blocks:
        data += bytes(len(data) % 2)
        offsets.append(0 if block is None else len(data))
        data += block or b""
    counts = [len(block or b"") for block in page.blocks]
    wide = 16 if big else _LONG
    tags = page.tags | {324 if page.tiled else 273: (wide, offsets), 325 if page.tiled else 279: (wide, counts)}
    if below:
        tags[330] = (wide, below)
    entries, room, code = b"", 8 if big else 4, "Q" if big else "L"
    for tag, (kind, values) in sorted(tags.items()):
        form = _CODES[kind]
        held = values if isinstance(values, bytes) else struct.pack(f"{order}{len(values)}{form}", *values)
        number = len(held) // _SIZES[form] // (2 if kind == _RATIONAL else 1)
        if len(held) <= room:
            value = held.ljust(room, b"\0")
        else:
            data += bytes(len(data) % 2)
            value = struct.pack(order + code, len(data))
            data += held
        entries += struct.pack(f"{order}HH{code}", tag, kind, number) + value
    data += bytes(len(data) % 2)
    at = len(data)
    data += struct.pack(order + ("Q" if big else "H"), len(tags)) + entries
    data += bytes(room)
    return at, len(data) - room


def ascii_tag(text: str) -> tuple[int, bytes]:
    return _ASCII, text.encode() + b"\0"


def noise(rng: random.Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of the whole range of a dtype, floats that are numbers."""
    random_bytes = np.random.default_rng(rng.getrandbits(32))
    if np.dtype(dtype).kind == "f":
        return random_bytes.normal(0, 100, shape).astype(dtype)
    if np.dtype(dtype).kind == "c":
        return random_bytes.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return random_bytes.integers(info.min, info.max, shape, dtype, endpoint=True)


@dataclass(frozen=True)
class Layout:
    """How the pages of one TIFF are stored. `bits` is 0 where it is that of the dtype."""

    order: Literal["<", ">"]
    segment: tuple[int, int] | None
    rows: int
    planar: bool
    compression: int
    predictor: int
    photometric: int
    extra: tuple[int, ...]
    bits: int
    gaps: float
    reverse: bool


def some_layout(rng: random.Random, dtype: str, samples: int) -> Layout:
    tiled = rng.random() < 0.65
    sides = (16, 32, 48) if rng.random() < 0.8 else (8, 20, 64, 112)
    compression = rng.choice([1, 1, 5, 8, 8, 32946, 32773, 34925, 50000, _JPEG])
    planar = samples > 1 and rng.random() < 0.3
    colours = [1, _RGB] if samples >= 3 else [1]
    photometric = rng.choice(colours) if rng.random() < 0.93 else rng.choice([0, 3, 5, _YCBCR, 8])
    if compression == _JPEG and (dtype != "u1" or samples not in (1, 3) or planar):
        compression = 8
    if compression == _JPEG and samples == 3:
        photometric = rng.choice([_RGB, _YCBCR])
    predictors = [1, 1, 2] if np.dtype(dtype).kind in "iu" else [1, 1, 3] if np.dtype(dtype).kind == "f" else [1]
    predictor = rng.choice(predictors) if compression in (5, 8, 32946, 34925, 50000) else 1
    over = samples - (3 if photometric in (_RGB, _YCBCR, 8) else 4 if photometric == 5 else 1)
    extra = tuple(rng.choice([0, 1, 2, 2]) if over else 0 for _ in range(max(over, 0)))
    few = dtype == "u1" and samples == 1 and compression != _JPEG
    return Layout(
        order=">" if rng.random() < 0.25 else "<",
        segment=(rng.choice(sides), rng.choice(sides)) if tiled else None,
        rows=rng.choice([1, 5, 16, 2**32 - 1]),
        planar=planar,
        compression=compression,
        predictor=predictor,
        photometric=photometric,
        extra=extra if rng.random() < 0.9 else (),
        bits=rng.choice([1, 4]) if few and rng.random() < 0.2 else 0,
        gaps=rng.choice([0, 0, 0, 0.2, 0.6, 1]),
        reverse=compression in (1, 8) and rng.random() < 0.05,
    )


def page_of(rng: random.Random, pixels: np.ndarray, layout: Layout, tags: Tags) -> Page:
    """A page of pixels `(H, W, S)`."""
    height, width, samples = pixels.shape
    tiled = layout.segment is not None
    size = layout.segment or (min(layout.rows, height), width)
    planes = [pixels[..., s : s + 1] for s in range(samples)] if layout.planar else [pixels]
    blocks: list[bytes | None] = []
    places = math.ceil(height / size[0]) * math.ceil(width / size[1])
    # OpenSlide looks at one plane for all.
    alike = layout.photometric == _RGB
    left_out = [[rng.random() < layout.gaps for _ in range(places)] for _ in planes]
    for number, plane in enumerate(planes):
        absent = iter(left_out[0 if alike else number])
        for y in range(0, height, size[0]):
            for x in range(0, width, size[1]):
                part = plane[y : y + size[0], x : x + size[1]]
                if tiled:
                    part = np.pad(part, ((0, size[0] - part.shape[0]), (0, size[1] - part.shape[1]), (0, 0)), "edge")
                blocks.append(_encoded(part, layout) if not next(absent) else rng.choice([None, None, b""]))
    bits = layout.bits or pixels.dtype.itemsize * 8
    kind = {"u": 1, "i": 2, "f": 3, "c": 6}[pixels.dtype.kind]
    known: Tags = {
        256: (_LONG, [width]),
        257: (_LONG, [height]),
        258: (_SHORT, [bits] * samples),
        259: (_SHORT, [layout.compression]),
        262: (_SHORT, [layout.photometric]),
        277: (_SHORT, [samples]),
        284: (_SHORT, [2 if layout.planar else 1]),
        339: (_SHORT, [kind] * samples),
    }
    if tiled:
        known |= {322: (_LONG, [size[1]]), 323: (_LONG, [size[0]])}
    else:
        known |= {278: (_LONG, [layout.rows])}
    if layout.predictor > 1:
        known[317] = (_SHORT, [layout.predictor])
    if layout.extra:
        known[338] = (_SHORT, list(layout.extra))
    if layout.reverse:
        known[266] = (_SHORT, [2])
    if layout.photometric == 3:
        known[320] = (_SHORT, [rng.randrange(2**16) for _ in range(3 * 2 ** min(bits, 8))])
    if layout.photometric == _YCBCR and layout.compression == _JPEG:
        known[530] = (_SHORT, list(_subsampling(size)))
    for tag, default in _DEFAULTS.items():
        if tag in known and set(known[tag][1]) == {default} and rng.random() < 0.1:
            del known[tag]
    return Page(known | tags, blocks, tiled)


def _subsampling(size: tuple[int, int]) -> tuple[int, int]:
    return (2, 2) if size[0] % 16 == 0 and size[1] % 16 == 0 else (1, 1)


def _encoded(part: np.ndarray, layout: Layout) -> bytes:
    part = np.ascontiguousarray(part)
    if layout.compression == _JPEG:
        # Smooth, so that a decoder's rounding is the only thing that may differ.
        smooth = np.ascontiguousarray(part // 8 + 100)
        if part.shape[2] == 1:
            return bytes(imagecodecs.jpeg8_encode(smooth[..., 0], level=90))
        space: dict[str, Any] = {
            "colorspace": "RGB",
            "outcolorspace": "YCBCR" if layout.photometric == _YCBCR else "RGB",
        }
        sub = _subsampling(part.shape[:2]) if layout.photometric == _YCBCR else (1, 1)
        return bytes(imagecodecs.jpeg8_encode(smooth, level=90, subsampling=sub, **space))
    if layout.bits:
        data = bytes(imagecodecs.packints_encode(part.ravel(), layout.bits, runlen=part.shape[1] * part.shape[2]))
    elif layout.predictor == 3:
        data = imagecodecs.floatpred_encode(part.astype(part.dtype.newbyteorder(layout.order)), axis=-2).tobytes()
    else:
        native = imagecodecs.delta_encode(part, axis=-2) if layout.predictor == 2 else part
        data = np.asarray(native).astype(part.dtype.newbyteorder(layout.order)).tobytes()
    packed = bytes(_CODECS[layout.compression](data))
    return bytes(imagecodecs.bitorder_encode(packed)) if layout.reverse else packed


NODATA = ("0", "-9999", "7", "255", "nan", "3.5", "1e40", " 12 ", "-0.5", "65535", "inf")
"""What files say that no data are, for every dtype: numbers that it has not, too."""


def tiff(path: Path, rng: random.Random) -> str:
    """A TIFF of any layout, with levels as pages or below the first, tags of GDAL or Aperio, cut blocks."""
    dtype = rng.choice(["u1", "u1", "u1", "u1", "u2", "i2", "u4", "i4", "i1", "f4", "f4", "f8", "f2", "u8", "c8"])
    samples = rng.choice([1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 5, 7])
    if slide := rng.random() < 0.25:
        dtype, samples = "u1", rng.choice([3, 3, 3, 4])
    height, width = rng.randint(1, 120), rng.randint(1, 120)
    layout = some_layout(rng, dtype, samples)
    if slide:
        sides = rng.choice([16, 32, 64]), rng.choice([16, 32, 64])
        colours = layout.photometric if layout.compression == _JPEG else _RGB
        extra = (rng.choice([1, 2]),) if samples == 4 else ()
        layout = replace(layout, segment=sides, photometric=colours, planar=False, extra=extra)
    pixels = noise(rng, (height, width, samples), dtype)
    if layout.bits:
        pixels &= 2**layout.bits - 1
    if dtype[0] == "u" and samples == 4:
        # In between, OpenSlide rounds colours.
        pixels[..., 3] = np.where(pixels[..., 3] % 3, pixels.dtype.type(np.iinfo(dtype).max), 0)
    kind = "aperio" if slide else rng.choice(["plain", "plain", "geo", "geo", "nodata", "gdal", "aperio"])
    first: Tags = {}
    if kind in ("geo", "nodata"):
        first |= {33550: (_DOUBLE, [2.0, 2.0, 0.0]), 33922: (_DOUBLE, [0.0, 0, 0, 500.0, 900.0, 0])}
    if kind == "nodata" or (kind in ("gdal", "plain") and rng.random() < 0.2):
        value = rng.choice([text for text in NODATA if dtype[0] == "f" or "." not in text])
        if dtype in ("u8", "f2", "c8") or layout.bits:
            value = rng.choice("01")
        first[42113] = ascii_tag(value)
    if kind == "gdal":
        first[42112] = ascii_tag(GDAL_ITEMS)
    if kind == "aperio" and samples == 3 and dtype == "u1" and rng.random() < 0.8:
        first[270] = ascii_tag(APERIO.format(width, height))
    if rng.random() < 0.4:
        first |= {282: (_RATIONAL, [20000, 1]), 283: (_RATIONAL, [20000, 1]), 296: (_SHORT, [rng.choice([1, 2, 3])])}
    if rng.random() < 0.1:
        first[274] = (_SHORT, [rng.randint(1, 8)])
    pages = [page_of(rng, pixels, layout, first)]
    levels = []
    for step in range(1, rng.choice([1, 1, 2, 3]) if min(height, width) > 7 else 1):
        small = np.ascontiguousarray(pixels[:: 2**step, :: 2**step])
        again = {tag: entry for tag, entry in first.items() if tag in (270, 42113)}
        reduced: Tags = {} if kind == "aperio" and rng.random() < 0.5 else {254: (_LONG, [1])}
        levels.append(page_of(rng, small, layout, again | reduced))
    if levels and kind != "aperio" and rng.random() < 0.4:
        pages[0].below = levels
    else:
        pages += levels
    if rng.random() < 0.08 and pages[0].blocks[-1] and not layout.planar:
        block = pages[0].blocks[-1]
        pages[0].blocks[-1] = block[: rng.randrange(len(block))]
    if rng.random() < 0.03 and kind != "aperio":
        pages.insert(1, page_of(rng, pixels, layout, {}))
    write_tiff(path, pages, layout.order, rng.random() < 0.2)
    where = f"tiles {layout.segment}" if layout.segment else f"strips {min(layout.rows, height)}"
    return f"{kind} {dtype} {height}x{width}x{samples} {where} {layout} {len(levels)} levels"


def geotiff(path: Path, rng: random.Random) -> str:
    """A GeoTIFF or COG as GDAL writes it: sparse, of a value of no data, with a mask, with alpha, with levels."""
    import rasterio
    import rasterio.shutil
    from rasterio.enums import ColorInterp
    from rasterio.windows import Window

    dtype = rng.choice(["uint8", "uint8", "uint8", "uint16", "int16", "int32", "uint32", "float32", "float64", "int8"])
    count = rng.choice([1, 1, 2, 3, 3, 4, 4, 6])
    height, width = rng.randint(20, 150), rng.randint(20, 150)
    options: dict[str, Any] = {"SPARSE_OK": "TRUE", "interleave": rng.choice(["pixel", "band"])}
    if rng.random() < 0.7:
        options |= {"tiled": True, "blockxsize": rng.choice([16, 32, 64]), "blockysize": rng.choice([16, 32])}
    elif rng.random() < 0.5:
        options["blockysize"] = rng.choice([1, 7, 16])
    options["compress"] = rng.choice(["none", "deflate", "lzw", "zstd", "packbits"])
    if options["compress"] in ("deflate", "lzw", "zstd"):
        options["predictor"] = rng.choice([1, 2, 3] if dtype.startswith("float") else [1, 2])
    options["photometric"] = rng.choice(["RGB", "MINISBLACK"]) if count in (3, 4) and dtype == "uint8" else "MINISBLACK"
    if dtype == "uint8" and count == 3 and rng.random() < 0.2:
        options |= {"compress": "jpeg", "photometric": "ycbcr", "interleave": "pixel", "predictor": 1}
    if count in (2, 4) and rng.random() < 0.6:
        options["ALPHA"] = rng.choice(["YES", "NON-PREMULTIPLIED"])
    if rng.random() < 0.6 and options["compress"] != "jpeg":
        choices = [0, 7, 200] if dtype.startswith("uint") else [0, -99, 100]
        options["nodata"] = rng.choice([*choices, np.nan, -9999.0] if dtype.startswith("float") else choices)
    if rng.random() < 0.6:
        options["transform"] = rasterio.Affine(2, 0, 100, 0, -2, 900)
    options["BIGTIFF"] = rng.choice(["NO", "NO", "YES"])
    options["ENDIANNESS"] = rng.choice(["LITTLE", "LITTLE", "BIG"])
    inside = rng.random() < 0.7
    masked, overviews, cog = rng.random() < 0.2, rng.random() < 0.3, rng.random() < 0.1
    target = path.with_suffix(".source.tif") if cog else path
    with warnings.catch_warnings(), rasterio.Env(GDAL_TIFF_INTERNAL_MASK=inside, SPARSE_OK_OVERVIEW="ON"):
        warnings.simplefilter("ignore")
        with rasterio.open(target, "w", "GTiff", width, height, count, dtype=dtype, **options) as out:
            if rng.random() < 0.3:
                out.set_band_description(1, "near")
            if "ALPHA" in options and count == 2:
                out.colorinterp = [ColorInterp.gray, ColorInterp.alpha]
            for _ in range(rng.choice([0, 1, 1, 2, 4])):
                y, x = rng.randrange(height), rng.randrange(width)
                h, w = rng.randint(1, height - y), rng.randint(1, width - x)
                block = noise(rng, (count, h, w), dtype)
                block = block // 8 + 100 if options["compress"] == "jpeg" else block
                out.write(block, window=Window(x, y, w, h))
            if masked:
                out.write_mask(np.random.default_rng(rng.getrandbits(32)).random((height, width)) > 0.3)
        if overviews:
            with rasterio.open(target, "r+") as out:
                out.build_overviews([2, 4] if min(height, width) > 60 else [2])
        if cog:
            rasterio.shutil.copy(target, path, driver="COG", blocksize=128, SPARSE_OK="TRUE")
            target.unlink()
    return f"{height}x{width} {count} {dtype} {'mask ' * masked}{'overviews ' * overviews}{'COG ' * cog}{options}"


def of_tifffile(path: Path, rng: random.Random) -> str:
    """An OME-TIFF or a TIFF of several pages by tifffile, with levels below each page, some blocks struck out."""
    dtype = rng.choice(["u1", "u1", "u2", "i2", "f4"])
    colour = dtype[0] == "u" and rng.random() < 0.4
    channels, height, width = rng.choice([1, 2, 3, 5]), rng.randint(20, 120), rng.randint(20, 120)
    shape = (height, width, 3) if colour else (channels, height, width)
    pixels = noise(rng, shape, dtype)
    order, big, ome = rng.choice("<<>"), rng.random() < 0.3, rng.random() < 0.6
    codec = rng.choice([None, "zlib", "lzw", "zstd"])
    options: dict[str, Any] = {"photometric": "rgb" if colour else "minisblack", "compression": codec}
    options |= {"tile": (32, 16)} if rng.random() < 0.6 else {"rowsperstrip": rng.choice([7, 16, 500])}
    axes = {"axes": "YXS" if colour else "CYX"}
    below = rng.choice([0, 0, 1, 2])
    with tifffile.TiffWriter(path, byteorder=order, bigtiff=big, ome=ome) as writer:
        for level in range(below + 1):
            small = pixels[:: 2**level, :: 2**level] if colour else pixels[:, :: 2**level, :: 2**level]
            first = {"subifds": below, "metadata": axes if ome or rng.random() < 0.5 else None}
            writer.write(small, **options, **(first if level == 0 else {"subfiletype": 1, "metadata": None}))
    # Of a page in one strip tifffile does not look whether it is there.
    struck = 0 if codec is None and "tile" not in options else rng.choice([0, 0, 0.3, 0.8])
    with tifffile.TiffFile(path) as tif:
        pages = [page for page in tif.pages for page in (page, *(page.pages or ()))]
        found = [[page.tags[tag] for tag in tags if tag in page.tags] for page in pages for tags in _TABLES]
        tables = [[(tag.valueoffset, f"{order}{tag.count}{_STRUCT[tag.dtype]}") for tag in pair] for pair in found]
    data = bytearray(path.read_bytes())
    masks: dict[int, list[bool]] = {}  # by where the lengths are, which pages may share
    for pair in filter(None, tables):
        kept = masks.setdefault(pair[-1][0], [rng.random() >= struck for _ in range(1000)])
        for at, form in pair:
            values = struct.unpack_from(form, data, at)
            struct.pack_into(form, data, at, *(value * keep for value, keep in zip(values, kept, strict=False)))
    path.write_bytes(data)
    return f"{'OME ' * ome}{shape} {dtype} {order}{' big' * big} {options} {below} below, {struck} struck out"


def zarr_array(path: Path, rng: random.Random) -> str:
    """A Zarr array, some chunks of which were never written."""
    form = rng.choice([2, 3])
    dtype = rng.choice(["uint8", "uint16", "int16", "float32", "float64", "bool"])
    shape = (rng.choice([1, 2, 3, 5]), rng.randint(1, 60), rng.randint(1, 60))[rng.choice([0, 0, 1]) :]
    chunks = tuple(rng.randint(1, length) for length in shape)
    choices = [0, 1] if dtype == "bool" else [0, 7, 255 if dtype == "uint8" else 300]
    fill = rng.choice([*choices, np.nan, -1.5] if dtype.startswith("float") else choices)
    options: dict[str, Any] = {"fill_value": None if form == 2 and rng.random() < 0.2 else fill}
    if form == 3 and rng.random() < 0.3:
        options["shards"] = tuple(chunk * rng.randint(1, 3) for chunk in chunks)
    if form == 2:
        options["order"] = rng.choice("CF")
    if form == 2 and rng.random() < 0.5:
        options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
    made = zarr.create_array(path, shape=shape, chunks=chunks, dtype=dtype, zarr_format=form, **options)
    for _ in range(rng.choice([0, 1, 2])):
        corner = [rng.randrange(length) for length in shape]
        extent = [rng.randint(1, length - at) for length, at in zip(shape, corner, strict=True)]
        part = tuple(slice(at, at + length) for at, length in zip(corner, extent, strict=True))
        values = np.random.default_rng(rng.getrandbits(32)).integers(0, 200, extent)
        made[part] = values.astype(dtype)
    return f"v{form} {shape} chunks {chunks} {dtype} {options}"
