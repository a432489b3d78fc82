"""Files made to hang, to kill or to fill memory: one `ImageError`, soon and small, from a process of its own.

`bench/attack_images.py` looks for more of them; what it found is kept here and in the tests beside each reader.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numcodecs
import numpy as np
import pytest
import tifffile
import zarr
import zarr.codecs.numcodecs
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image

PIXELS = np.random.default_rng(0).integers(0, 255, (96, 80, 3), np.uint8)
GENEROUS_S = 100
MORE_BYTES = 300 * 2**20
OPEN_AND_READ = """
import resource, sys
from pathlib import Path
from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image

def look(path):
    try:
        with open_image(path) as image:
            image.read(Box(0, 0, min(64, image.height), min(64, image.width)))
        return "it opens"
    except ImageError as error:
        return str(error)

look(sys.argv[1])  # what the libraries take for themselves
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(look(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def said_about(sound: Path, hostile: Path) -> str:
    """What opening and reading says; asserts that the process lives, answers and takes little memory."""
    command = [sys.executable, "-c", OPEN_AND_READ, str(sound), str(hostile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    said, more = done.stdout.rstrip().rsplit("\n", 1)
    assert int(more) < MORE_BYTES
    assert "\n" not in said
    return said


def write(path: Path, **options: Any) -> Path:
    defaults = {"photometric": "rgb", "tile": (32, 32), "compression": "deflate", "metadata": None}
    tifffile.imwrite(path, PIXELS, **{**defaults, **options})
    return path


def set_tag(path: Path, tag: str, value: int, *, part: str = "value") -> None:
    """Overwrite the count or the value of an entry of the first directory."""
    with tifffile.TiffFile(path) as tif:
        at = tif.pages[0].tags[tag].offset
    data = bytearray(path.read_bytes())
    struct.pack_into("<L", data, at + (4 if part == "count" else 8), value)
    path.write_bytes(data)


def huge_count(path: Path) -> None:
    set_tag(path, "TileOffsets", 2**32 - 1, part="count")


def huge_length(path: Path) -> None:
    write(path, compression=None, tile=None)
    set_tag(path, "ImageLength", 2**32 - 1)


def huge_length_in_tiles(path: Path) -> None:
    set_tag(path, "ImageLength", 2**31 - 1)


def loop(path: Path) -> None:
    data = bytearray(path.read_bytes())
    (count,) = struct.unpack_from("<H", data, 8)
    struct.pack_into("<L", data, 10 + 12 * count, 8)
    path.write_bytes(data)


def ome(size_t: int | str, share: str) -> str:
    return (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="I"><Pixels '
        f'DimensionOrder="XYCZT" SizeX="80" SizeY="96" SizeC="3" SizeZ="1" SizeT="{size_t}" Type="uint8" ID="P">'
        f'<Channel SamplesPerPixel="3"/><TiffData {share}/></Pixels></Image></OME>'
    )


def many_planes_in_json(path: Path) -> None:
    write(path, description=json.dumps({"shape": [100_000_000, 96, 80, 3]}), tile=None, compression=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (huge_count, "tag 324 of directory 0 has 4294967295 values"),
        (huge_length, r"directory 0 declares 3 x 4294967295 x 80"),
        (huge_length_in_tiles, "directory 0 is 2147483647 x 80 px, .* tiles or strips, but lists 9"),
        (loop, "directory 1 comes twice"),
        (lambda path: write(path, description=ome(10**8, "")), "declares 300000000 planes"),
        (lambda path: write(path, description=ome(1, 'PlaneCount="300000000"')), "declares 300000000 planes"),
        (lambda path: write(path, description=ome("&#49;00000000", "")), "declares 300000000 planes"),
        (lambda path: write(path, description="  " + ome(10**8, "") + "\0  "), "declares 300000000 planes"),
        (lambda path: write(path, description="<!DOCTYPE OME>" + ome(1, "")), "definitions of its own"),
        (lambda path: write(path, description=ome("x", "")), "no number where one should be"),
        (many_planes_in_json, "100000000 planes of 96 x 80 px"),
        (lambda path: set_tag(path, "SamplesPerPixel", 0), "describes no image"),
        (lambda path: set_tag(path, "PlanarConfiguration", 7), "tag 284 of directory 0 is 7"),
        (lambda path: set_tag(path, "TileWidth", 0), "has tiles of 32 x 0 px"),
    ],
)
def test_a_tiff_whose_numbers_are_lies(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = write(tmp_path / "a.tif")
    damage(path)
    said = said_about(write(tmp_path / "sound.tif"), path)
    assert "a.tif" in said
    assert re.search(words, said), said


def test_a_codec_that_can_end_the_process_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", compression="jpegxr")
    with tifffile.TiffFile(path) as tif:
        start, size = tif.pages[0].dataoffsets[0], tif.pages[0].databytecounts[0]
    sound = write(tmp_path / "sound.tif")
    data = path.read_bytes()
    for at in range(start, start + min(size, 6)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        assert "a.tif is compressed as JPEGXR" in said_about(sound, path)


def test_a_tile_that_says_it_is_larger_is_not_decoded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", compression="jpeg")
    data = path.read_bytes()
    frame = data.index(b"\xff\xc0")
    path.write_bytes(data[: frame + 5] + struct.pack(">HH", 30000, 30000) + data[frame + 9 :])
    assert "30000 x 30000 px, the directory says 32 x 32" in said_about(write(tmp_path / "sound.tif"), path)


def jpeg(path: Path, height: int, width: int) -> Path:
    """A JPEG of 64 x 64 px whose header says another size."""
    Pillow.fromarray(PIXELS[:64, :64]).save(path)
    data = path.read_bytes()
    frame = data.index(b"\xff\xc0")
    path.write_bytes(data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :])
    return path


@pytest.mark.parametrize(("height", "width"), [(8192, 8192), (128, 64)])
def test_a_picture_that_claims_more_than_it_has(tmp_path: Path, height: int, width: int) -> None:
    said = said_about(jpeg(tmp_path / "sound.jpg", 64, 64), jpeg(tmp_path / "a.jpg", height, width))
    assert "ends before its pixels" in said
    assert height == 8192 or "at row 6" in said  # colours are shared by two rows at the border


@pytest.mark.parametrize(
    "metadata",
    [
        {"shape": [3, 2**40, 8]},
        {"shape": "x"},
        {"shape": [3, -1, 8]},
        {"shape": None},
        {"data_type": "object"},
        {"data_type": {"name": "bytes", "configuration": 3}},
        {"codecs": []},
        {"codecs": [{"name": "bytes"}, {"name": "nothing"}]},
        {"codecs": {"name": "bytes"}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 2**20, 2**20]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 0, 8]}}},
        {"chunk_grid": 1},
        {"fill_value": {}},
        {"dimension_names": ["y", "y", "x"]},
        {"dimension_names": 3},
        {"zarr_format": 9},
        {"attributes": []},
    ],
    ids=lambda entry: json.dumps(entry)[:50],
)
def test_zarr_metadata_of_any_kind(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(3, 8, 8), chunks=(3, 8, 8), dtype="u1")[...] = 7
    tree = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps({**tree, **metadata}))
    with pytest.raises(ImageError) as caught, open_image(path) as image:
        image.read(Box(0, 0, 8, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "multiscales",
    [
        3,
        [],
        [3],
        {"datasets": []},
        [{"datasets": [{"path": 3}]}],
        [{"datasets": [{"path": "../../etc"}]}],
        [{"datasets": [{"path": "0"}], "axes": 7}],
        [{"datasets": [{"path": "0"}], "axes": ["y", "x"]}],
        [{"datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": "abc"}]}]}],
        [{"datasets": [{"path": "0", "coordinateTransformations": 5}]}],
        [{"datasets": [{"path": "0"}] * 1000}],
    ],
    ids=str,
)
def test_multiscales_of_any_kind(tmp_path: Path, multiscales: Any) -> None:
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("0", shape=(3, 8, 8), dtype="u1")
    group.attrs["ome"] = {"multiscales": multiscales}
    with pytest.raises(ImageError) as caught:
        open_image(tmp_path / "g.zarr")
    assert "\n" not in str(caught.value)


def test_a_codec_of_zarr_that_is_on_no_list(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(3, 8, 8), chunks=(3, 8, 8), dtype="u1", zarr_format=2)[...] = 7
    tree = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps({**tree, "compressor": {"id": "base64"}}))
    with pytest.raises(ImageError, match="stored with the codec base64, which is not read from files"):
        open_image(path)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_blosc_chunk_that_is_cut_off_is_not_read_on(tmp_path: Path, zarr_format: int) -> None:
    """The library reads as many bytes as the chunk says it has, and made pixels of what follows it in memory."""
    codec = numcodecs.Blosc() if zarr_format == 2 else zarr.codecs.BloscCodec()
    path = tmp_path / "a.zarr"
    array = zarr.create_array(
        path, shape=(96, 80, 3), chunks=(96, 80, 3), dtype="u1", zarr_format=zarr_format, compressors=codec
    )
    array.attrs["_ARRAY_DIMENSIONS"] = ["y", "x", "c"]
    array[...] = PIXELS
    (chunk,) = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".z", "zarr"))]
    with open_image(path) as image:
        np.testing.assert_array_equal(image.read(Box(0, 0, 96, 80)), PIXELS.transpose(2, 0, 1))
    chunk.write_bytes(chunk.read_bytes()[:100])
    for source in (path, zarr.open(path, mode="r")):
        with open_image(source) as image, pytest.raises(ImageError, match="100 bytes, its header says"):
            image.read(Box(0, 0, 8, 8))


def zstandard_of_unnamed_length(blocks: int, block: int = 2**17) -> bytes:
    """A frame (RFC 8878, 3.1) that does not say how much it holds: that many blocks of one byte, each repeated."""
    headers = [block << 3 | 1 << 1 | (index == blocks - 1) for index in range(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(header.to_bytes(3, "little") + b"\7" for header in headers)


CLASSES = {"gzip": "GZip", "zlib": "Zlib", "bz2": "BZ2", "lzma": "LZMA", "zstd": "Zstd", "lz4": "LZ4"}
BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "zstd": imagecodecs.zstd_encode,  # type: ignore[dict-item]
    "zstd of unnamed length": lambda zeros: zstandard_of_unnamed_length(len(zeros) >> 17),
    "lz4": numcodecs.LZ4().encode,
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("name", BOMBS)
def test_a_chunk_that_holds_more_than_it_may_is_not_unpacked(tmp_path: Path, name: str, zarr_format: int) -> None:
    kind = name.split()[0]
    own = {"gzip": zarr.codecs.GzipCodec, "zstd": zarr.codecs.ZstdCodec} if zarr_format == 3 else {}
    path = tmp_path / "a.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every reader knows all of these
        known = zarr.codecs.numcodecs if zarr_format == 3 else numcodecs
        codec = own.get(kind, getattr(known, CLASSES[kind]))()
        zarr.create_array(
            path, shape=(3, 64, 64), chunks=(3, 64, 64), dtype="u1", zarr_format=zarr_format, compressors=codec
        )[...] = 7
        (chunk,) = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".z", "zarr"))]
        if name.endswith("length"):
            chunk.write_bytes(zstandard_of_unnamed_length(3, 2**12))
        with open_image(path) as image:
            assert (np.asarray(image.read(Box(0, 0, 64, 64))) == 7).all()
        chunk.write_bytes(BOMBS[name](bytes(2**27)))
        with open_image(path) as image, pytest.raises(ImageError, match=r"at most 160 KiB"):
            image.read(Box(0, 0, 8, 8))


def test_a_thousand_damaged_images() -> None:
    """The campaign of the benchmark, in short: no pixel wrong, nothing left open, no crash, no hang, no other error."""
    script = Path(__file__).parents[2] / "bench" / "attack_images.py"
    command = [sys.executable, str(script), "--count", "1000", "--seed", "17", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
