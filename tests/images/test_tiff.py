"""The TIFF fast path: real and damaged files, pixel sizes, layouts that are refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import GuessedResolutionWarning, open_image
from gigagrad.images.openslide import open_openslide
from gigagrad.images.tiff import TiffImage
from gigagrad.images.tile_cache import TileCache

CORNER = Box(0, 0, 1, 1)


def whole(path: Path, level: int = 0) -> np.ndarray:
    with open_image(path, level=level) as image:
        return np.asarray(image.read(Box.whole(image.height, image.width)))


def write(path: Path, *, shape: tuple[int, ...] = (96, 80, 3), **options: Any) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    defaults = {"photometric": "rgb", "tile": (32, 32), "compression": "deflate", "metadata": None}
    tifffile.imwrite(path, pixels, **{**defaults, **options})
    return path


def tile_table(path: Path) -> tuple[list[int], list[int]]:
    with tifffile.TiffFile(path) as tif:
        return list(tif.pages[0].dataoffsets), list(tif.pages[0].databytecounts)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_jpeg_pixels_are_those_of_tifffile(jpeg_slide: Path, level: int) -> None:
    with tifffile.TiffFile(jpeg_slide) as tif:
        expected = tif.series[0].levels[level].asarray().transpose(2, 0, 1)
    np.testing.assert_array_equal(whole(jpeg_slide, level), expected)


def test_a_system_may_give_fewer_bytes_than_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tif")
    expected, read = tifffile.imread(path).transpose(2, 0, 1), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:700]], offset))
    np.testing.assert_array_equal(whole(path), expected)


def test_jpeg_pixels_are_those_of_openslide(jpeg_slide: Path) -> None:
    with open_openslide(jpeg_slide) as reference:
        np.testing.assert_array_equal(whole(jpeg_slide), reference.read(Box.whole(700, 900)))
        assert reference.mpp == pytest.approx(0.5)


@pytest.mark.slides
@pytest.mark.parametrize("stem", ["CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"])
def test_real_slides_have_the_pixels_of_openslide(real_slides: Path, stem: str) -> None:
    path = real_slides / "slides" / f"{stem}.svs"
    with open_image(path) as image, open_openslide(path) as reference:
        assert isinstance(image, TiffImage)
        assert image.levels == reference.levels
        assert image.mpp == reference.mpp
        for box in (Box(0, 0, 700, 900), Box(image.height - 300, image.width - 400, image.height, image.width)):
            np.testing.assert_array_equal(image.read(box), reference.read(box))


@pytest.mark.slides
def test_real_slides_tell_their_pixel_size(real_slides: Path) -> None:
    assert open_image(real_slides / "slides" / "CMU-1-Small-Region.svs").mpp == 0.499
    assert open_image(real_slides / "slides" / "TCGA-CR-7395-01A-01-TS1.svs").mpp is None
    assert open_image(real_slides / "masks" / "CMU-1-Small-Region.tissue01.tif").mpp == pytest.approx(0.499)
    # Resolution 25.4 dots per inch would be 1000 um/px.
    assert open_image(real_slides / "masks" / "TCGA-CR-7395-01A-01-TS1.tissue01.tif").mpp is None


def test_levels_scale_the_pixel_size(jpeg_slide: Path) -> None:
    assert open_image(jpeg_slide).mpp == pytest.approx(0.5)
    assert open_image(jpeg_slide, level=2).mpp == pytest.approx(2.0)
    assert open_image(jpeg_slide, level=2, mpp=0.25).mpp == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "mpp"),
    [
        ({}, None),
        ({"resolution": (40000, 40000), "resolutionunit": "CENTIMETER"}, 0.25),
        ({"resolution": (101600, 101600), "resolutionunit": "INCH"}, 0.25),
        ({"resolution": (1, 1), "resolutionunit": "INCH"}, None),
        ({"resolution": (72, 72), "resolutionunit": "INCH"}, None),
        ({"resolution": (40000, 40000), "resolutionunit": "NONE"}, None),
        ({"description": "Aperio Image Library v1\n80x96|AppMag = 20|MPP = 0.4990"}, 0.499),
    ],
)
def test_pixel_size_from_the_directory(tmp_path: Path, options: dict[str, Any], mpp: float | None) -> None:
    found = open_image(write(tmp_path / "a.tif", **options)).mpp
    assert found == (mpp if mpp is None else pytest.approx(mpp))


@pytest.mark.parametrize(
    ("size", "unit", "mpp"), [(0.3, "µm", 0.3), (300, "nm", 0.3), (0.0003, "mm", 0.3), (2, "pixel", None)]
)
def test_pixel_size_from_ome(tmp_path: Path, size: float, unit: str, mpp: float | None) -> None:
    path = tmp_path / "a.ome.tif"
    metadata = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeXUnit": unit}
    tifffile.imwrite(path, np.zeros((32, 32, 3), np.uint8), photometric="rgb", metadata=metadata)
    assert open_image(path).mpp == (mpp if mpp is None else pytest.approx(mpp))


def test_the_objective_is_the_last_resort_and_warns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", description="Aperio Image Library v1\n80x96|AppMag = 40")
    with pytest.warns(GuessedResolutionWarning, match=r"40x objective = 0\.25 .*--mpp"):
        assert open_image(path).mpp == 0.25
    assert open_image(path, mpp=0.3).mpp == 0.3


def test_left_out_tiles_are_fill(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif")
    with tifffile.TiffFile(path) as tif:
        tag = tif.pages[0].tags["TileByteCounts"]
        offset, kind = tag.valueoffset, struct.Struct({3: "<H", 4: "<I"}[tag.dtype])
    before = whole(path)
    overwrite(path, offset + 4 * kind.size, kind.pack(0))  # the tile in row 1, column 1 of 3 x 3
    expected = before.copy()
    expected[:, 32:64, 32:64] = 255
    np.testing.assert_array_equal(whole(path), expected)


@pytest.mark.parametrize("options", [{}, {"tile": None, "rowsperstrip": 8}, {"tile": None, "compression": None}])
@pytest.mark.parametrize("share", [0.999, 0.5, 0.02])
def test_a_truncated_file_is_refused_at_once(tmp_path: Path, options: dict[str, Any], share: float) -> None:
    path = write(tmp_path / "a.tif", **options)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ImageError, match=r"a\.tif.*(is truncated|truncated or corrupt)"):
        open_image(path)


def test_a_truncated_pyramid_is_refused_whatever_the_level(tmp_path: Path, jpeg_slide: Path) -> None:
    path = tmp_path / "cut.tif"
    path.write_bytes(jpeg_slide.read_bytes()[:-100])
    with pytest.raises(ImageError, match=r"cut\.tif is truncated: it has \d+ bytes, but 1 of its 1 tiles lie beyond"):
        open_image(path, level=0)


@pytest.mark.parametrize("garbage", [bytes(20000), b"\xff" * 20000, b"not a jpeg" * 2000])
def test_a_corrupt_jpeg_tile_is_named_when_read(tmp_path: Path, jpeg_slide: Path, garbage: bytes) -> None:
    path = tmp_path / "corrupt.tif"
    path.write_bytes(jpeg_slide.read_bytes())
    offsets, counts = tile_table(path)
    overwrite(path, offsets[6], garbage[: counts[6]])  # 3 x 4 tiles: row 1, column 2
    with open_image(path) as image:
        image.read(Box(0, 0, 256, 900))
        with pytest.raises(ImageError, match=r"tile in row 1, column 2 of .*corrupt\.tif"):
            image.read(Box(200, 500, 300, 600))


def test_a_jpeg_tile_that_stops_half_way_is_not_painted_over(tmp_path: Path, jpeg_slide: Path) -> None:
    path = tmp_path / "corrupt.tif"
    path.write_bytes(jpeg_slide.read_bytes())
    offsets, counts = tile_table(path)
    half = counts[0] // 2
    overwrite(path, offsets[0] + half, bytes(counts[0] - half))
    with open_image(path) as image, pytest.raises(ImageError, match=r"row 0, column 0 of .*: it is cut off"):
        image.read(CORNER)


@pytest.mark.parametrize("compression", ["deflate", "lzw", "jpeg2000"])
def test_other_codecs_notice_too(tmp_path: Path, compression: str) -> None:
    path = write(tmp_path / "a.tif", compression=compression)
    offsets, counts = tile_table(path)
    overwrite(path, offsets[0] + counts[0] // 2, bytes(counts[0] - counts[0] // 2))
    with open_image(path) as image, pytest.raises(ImageError, match=r"row 0, column 0 of .*a\.tif"):
        image.read(CORNER)


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif")
    with tifffile.TiffFile(path) as tif:
        offset = tif.pages[0].tags["Compression"].valueoffset
    overwrite(path, offset, struct.pack("<H", 34999))
    with pytest.raises(ImageError, match=r"a\.tif is compressed as 34999, which cannot be decoded"):
        open_image(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"shape": (4, 96, 80), "photometric": "minisblack", "metadata": {"axes": "ZYX"}},
            "axes ZYX .* extract the plane",
        ),
        ({"shape": (96, 80), "photometric": "miniswhite"}, "colours as MINISWHITE; expected RGB"),
    ],
)
def test_layouts_that_are_no_slide_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ImageError, match=words):
        open_image(write(tmp_path / "a.tif", **options))


def decoded_pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, np.ndarray]]:
    """What will be decoded from now on, with its key in the cache."""
    pieces: list[tuple[Any, np.ndarray]] = []
    get = TileCache.get

    def watched(cache: TileCache, key: Any, decode: Any) -> np.ndarray:
        def decode_and_tell(key: Any) -> np.ndarray:
            pieces.append((key, decode(key)))
            return pieces[-1][1]

        return get(cache, key, decode_and_tell)

    monkeypatch.setattr(TileCache, "get", watched)
    return pieces


def test_one_enormous_compressed_strip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigagrad.images.tiff_segments.LARGEST_SEGMENT_BYTES", 96 * 80 * 3 - 1)
    path = write(tmp_path / "a.tif", tile=None, rowsperstrip=96)
    with pytest.raises(ImageError, match=r"pieces of 96 x 80 px .* write it again as a tiled TIFF"):
        open_image(path)


def test_uncompressed_strips_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigagrad.images.tiff_segments._RAW_STRIP_BYTES", 5 * 80 * 3)
    path = write(tmp_path / "a.tif", tile=None, compression=None, rowsperstrip=96)
    pieces = decoded_pieces(monkeypatch)
    np.testing.assert_array_equal(whole(path), tifffile.imread(path).transpose(2, 0, 1))
    assert max(pixels_HWC.shape for _, pixels_HWC in pieces) == (5, 80, 3)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif")
    with open_image(path) as image:
        offsets, _ = tile_table(path)
        with path.open("r+b") as file:
            file.truncate(offsets[-1] + 3)
        with pytest.raises(ImageError, match=r"row 2, column 2 .*the file shrank"):
            image.read(Box(90, 75, 91, 76))


def test_neighbouring_reads_decode_a_tile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = decoded_pieces(monkeypatch)
    with open_image(write(tmp_path / "a.tif")) as image:
        for y in range(0, 96, 24):
            image.read(Box(y - 4, -4, y + 28, 84))
    assert sorted(place for (place, _), _ in pieces) == [(0, row, column) for row in range(3) for column in range(3)]


def test_an_image_nobody_closed_gives_its_file_back(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif")
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else pytest.skip("no /proc")
    for _ in range(5):
        open_image(path).read(CORNER)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
