"""The TIFF fast path: real and damaged files, pixel sizes, layouts that are refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import tifffile

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ImageError
from gigagrad.execution.sources import read_ahead
from gigagrad.images import GuessedResolutionWarning, open_image
from gigagrad.images.openslide import open_openslide
from gigagrad.images.pixels import TileCache
from gigagrad.images.tiff import TiffImage
from gigagrad.threads import SideThreads

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


def test_tiles_of_jpeg_lie_where_they_are_decoded_fastest(jpeg_slide: Path) -> None:
    """At the lower and right edge, too."""
    with open_image(jpeg_slide) as image:
        assert isinstance(image, TiffImage)
        blocks = [image.block(row, column) for row, column in np.ndindex(image._segments.offsets.shape[1:])]
    assert len(blocks) > 1
    assert {block.__array_interface__["data"][0] % 32 for block in blocks} == {16}


def test_a_system_may_give_fewer_bytes_than_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tif")
    expected, read = tifffile.imread(path).transpose(2, 0, 1), os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: read(file, min(count, 700), offset))
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
    monkeypatch.setattr("gigagrad.images.tiff.LARGEST_SEGMENT_BYTES", 96 * 80 * 3 - 1)
    path = write(tmp_path / "a.tif", tile=None, rowsperstrip=96)
    with pytest.raises(ImageError, match=r"pieces of 96 x 80 px .* write it again as a tiled TIFF"):
        open_image(path)


def test_uncompressed_strips_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigagrad.images.tiff._RAW_STRIP_BYTES", 5 * 80 * 3)
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


def decodings(
    image: TiffImage, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object] = lambda: None
) -> list[Any]:
    """Those of file tiles from now on."""
    done: list[Any] = []
    decode = image._decode

    def counted(key: Any) -> Any:
        done.append(key[0])
        wait()
        return decode(key)

    monkeypatch.setattr(image, "_decode", counted)
    return done


@pytest.mark.parametrize("kind", ["colour", "grey", "bands"])
def test_the_file_tiles_of_one_crop_are_decoded_side_by_side(
    jpeg_slide: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    box, together = Box(0, 0, 700, 900), Barrier(3)  # that no fewer than three can pass
    with open_image(jpeg_slide) as image, SideThreads(3, "test-read") as readers:
        assert isinstance(image, TiffImage)
        view = {"colour": image, "grey": image.grey(), "bands": image.bands((3, 1))}[kind]
        expected = np.asarray(view.read(box))
        image._cache.clear()
        waits = iter(range(3))
        done = decodings(image, monkeypatch, lambda: together.wait(60) if next(waits, None) is not None else None)
        np.testing.assert_array_equal(readers.submit(view.read, box).result(), expected)
    assert len(done) == len(set(done)) > 3


@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_readers_decode_each_file_tile_once(
    jpeg_slide: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whichever crops touch it."""
    with open_image(jpeg_slide) as image, SideThreads(count, "test-read") as readers:
        assert isinstance(image, TiffImage)
        grown = [Box(b.y0 - 9, b.x0 - 9, b.y1 + 9, b.x1 + 9).clamp(700, 900) for b in tiles(700, 900, 150, 170)]
        expected = [np.asarray(image.read(box)) for box in grown]
        image._cache.clear()
        done = decodings(image, monkeypatch)
        for (_, found), pixels in zip(read_ahead(grown, image.read, readers), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(found), pixels)
    assert len(done) == len(set(done)) == image._segments.counts.size


def test_a_corrupt_tile_among_those_side_by_side_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif")
    offsets, _ = tile_table(path)
    overwrite(path, offsets[4], b"\0" * 16)
    with open_image(path) as image, SideThreads(3, "test-read") as readers:
        task = readers.submit(image.read, Box.whole(96, 80))
        with pytest.raises(ImageError, match="tile in row 1, column 1"):
            task.result()


def test_bands_of_a_file_with_planes_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (9, 64, 64), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(32, 32), photometric="minisblack", planarconfig="separate")
    with open_image(tmp_path / "a.tif") as image:
        assert isinstance(image, TiffImage)
        done = decodings(image, monkeypatch)
        chosen = image.bands((8, 3))
        np.testing.assert_array_equal(np.asarray(chosen.read(Box(5, 6, 40, 50))), pixels[[7, 2], 5:40, 6:50])
        assert {plane for plane, _, _ in done} == {7, 2}


@pytest.mark.parametrize("bands", [(1,), (3, 2, 1), (1, 3, 5), (5, 3, 1), (2, 2), (4, 1, 2), (5, 4)])
def test_any_choice_of_bands(tmp_path: Path, bands: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 48, 5), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(32, 32), photometric="minisblack", planarconfig="contig")
    expected = pixels.transpose(2, 0, 1)[[band - 1 for band in bands]]
    for source in (tmp_path / "a.tif", pixels.transpose(2, 0, 1).copy()):
        with open_image(source) as image:
            found = image.bands(bands).read(Box(-2, 3, 50, 40))
            np.testing.assert_array_equal(np.asarray(found)[:, 2:], expected[:, :50, 3:40])
