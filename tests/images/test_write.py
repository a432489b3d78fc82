"""write_pyramid: other readers see the same pixels, levels and resolution, and failures leave nothing behind."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ome_types
import openslide
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.errors import WriteError
from gigagrad.images import MaskClass, open_image
from gigagrad.images.write import write_pyramid

RNG_SEED = 7
CLASSES = (MaskClass(1, "Tumour", (213, 94, 0)), MaskClass(2, "Stroma \u00b5", (0, 158, 115)))


def colour(height: int, width: int) -> np.ndarray:
    """Smooth colour (H, W, 3) uint8, so that JPEG changes it little."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(x / 40), 128 + 100 * np.cos(y / 30), 150 + 80 * np.sin((x + y) / 50)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def strips(pixels: np.ndarray, *heights: int) -> Iterator[np.ndarray]:
    """`pixels` cut into strips of the given heights, the last height repeated."""
    y = index = 0
    while y < len(pixels):
        step = heights[min(index, len(heights) - 1)]
        yield pixels[y : y + step]
        y, index = y + step, index + 1


def halved_mean(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[0] // 2 * 2, pixels.shape[1] // 2 * 2
    p = pixels[:height, :width].astype(np.float64)
    mean = (p[::2, ::2] + p[1::2, ::2] + p[::2, 1::2] + p[1::2, 1::2]) / 4
    return np.floor(mean + 0.5) if pixels.dtype == np.uint8 else mean


def write(path: Path, pixels: np.ndarray, *heights: int, **changes: Any) -> Path:
    options: dict[str, Any] = {"nearest": True, "tile": 64, **changes}
    shape = pixels.shape if pixels.ndim == 3 else (*pixels.shape, 1)
    return write_pyramid(path, strips(pixels, *heights), shape=shape, dtype=pixels.dtype, **options)


def levels_of(path: Path) -> list[np.ndarray]:
    """`(h, w, C)` of every level, as tifffile or zarr reads the file."""
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="r")
        (image,) = group.attrs["multiscales"]
        read = [np.asarray(group[entry["path"]]) for entry in image["datasets"]]
        return [level[..., None] if level.ndim == 2 else np.moveaxis(level, 0, 2) for level in read]
    with tifffile.TiffFile(path) as tiff:
        (series,) = tiff.series
        ours = [(level.asarray(), level.axes) for level in series.levels]
    return [np.moveaxis(p, 0, 2) if len(p.shape) == 3 and axes[-1] != "S" else np.atleast_3d(p) for p, axes in ours]


@pytest.mark.parametrize("name", ["image.tif", "image.ome.tif", "image.ome.zarr"])
def test_every_level_is_exact_for_any_size_and_strips(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    @given(
        height=st.integers(1, 200),
        width=st.integers(1, 200),
        heights=st.lists(st.integers(1, 150), min_size=1, max_size=4),
        nearest=st.booleans(),
        channels=st.sampled_from([1, 2, 3, 5]),
        dtype=st.sampled_from([np.uint8, np.float32]),
    )
    @settings(max_examples=20)
    def check(height: int, width: int, heights: list[int], nearest: bool, channels: int, dtype: type) -> None:
        path = tmp_path_factory.mktemp("any") / name
        rng = np.random.default_rng(RNG_SEED)
        expected = rng.integers(0, 256, (height, width, channels)).astype(dtype)  # type: ignore[var-annotated]
        write(path, expected, *heights, nearest=nearest, levels=3)
        with open_image(path) as image:
            assert image.shape == (channels, height, width)
            np.testing.assert_array_equal(image.read(Box.whole(height, width)), np.moveaxis(expected, 2, 0))
        levels = levels_of(path)
        for pixels in levels:
            np.testing.assert_array_equal(pixels, expected)
            even = expected[: len(expected) // 2 * 2, : expected.shape[1] // 2 * 2]
            expected = even[::2, ::2] if nearest else halved_mean(expected).astype(dtype)
        assert len(levels) == 3 or min(expected.shape[:2]) == 0

    check()


@pytest.mark.parametrize(("compression", "tolerance"), [("deflate", 0), ("jpeg", 12)])
def test_openslide_and_tifffile_see_levels_pixels_and_mpp(tmp_path: Path, compression: str, tolerance: int) -> None:
    pixels = colour(1000, 1300)
    path = write(
        tmp_path / "slide.tif", pixels, 300, nearest=False, tile=256, compression=compression, quality=95, mpp=0.2527
    )
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1300, 1000), (650, 500), (325, 250), (162, 125))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.2527, rel=1e-6)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.2527, rel=1e-6)
        seen = np.asarray(slide.read_region((0, 0), 0, (1300, 1000)))[..., :3]
        half = np.asarray(slide.read_region((0, 0), 1, (650, 500)))[..., :3]
    assert np.abs(seen.astype(int) - pixels).max() <= tolerance
    assert np.abs(half - halved_mean(pixels)).max() <= tolerance
    with tifffile.TiffFile(path) as tiff:
        assert tiff.is_bigtiff
        assert [level.shape[:2] for level in tiff.series[0].levels] == [
            (1000, 1300),
            (500, 650),
            (250, 325),
            (125, 162),
        ]
        np.testing.assert_array_equal(tiff.pages[0].asarray(), seen)


def test_no_mpp_is_not_an_invented_one(tmp_path: Path) -> None:
    path = write(tmp_path / "mask.tif", np.zeros((100, 100), np.uint8), 64)
    with tifffile.TiffFile(path) as tiff:
        assert tiff.pages[0].tags["ResolutionUnit"].value == 1, "unit NONE"


def test_an_ome_tiff_holds_subresolutions_and_physical_size(tmp_path: Path) -> None:
    pixels = colour(300, 400)
    path = write(tmp_path / "slide.ome.tif", pixels, 100, nearest=False, mpp=0.5, description="made up")
    image = ome_types.from_tiff(path).images[0]
    assert (image.description, image.pixels.physical_size_x, image.pixels.physical_size_y) == ("made up", 0.5, 0.5)
    with tifffile.TiffFile(path) as tiff:
        assert tiff.is_ome
        assert [level.shape for level in tiff.series[0].levels] == [
            (300, 400, 3),
            (150, 200, 3),
            (75, 100, 3),
            (37, 50, 3),
        ]
        np.testing.assert_array_equal(tiff.series[0].levels[1].asarray(), halved_mean(pixels))


def test_channels_of_an_ome_tiff_have_names_and_colours(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ome.tif", colour(100, 90)[..., :2], 30, channels=CLASSES, mpp=0.25)
    pixels = ome_types.from_tiff(path).images[0].pixels
    assert (pixels.size_c, pixels.physical_size_x, pixels.physical_size_x_unit.value) == (2, 0.25, "\u00b5m")
    assert [channel.name for channel in pixels.channels] == ["Tumour", "Stroma \u00b5"]
    assert [channel.color.as_rgb_tuple()[:3] for channel in pixels.channels] == [(213, 94, 0), (0, 158, 115)]


def test_three_named_channels_are_no_colours(tmp_path: Path) -> None:
    three = (MaskClass(0, "Background", (255, 255, 255)), *CLASSES)
    path = write(tmp_path / "x.tif", colour(100, 90), 30, channels=three)
    with tifffile.TiffFile(path) as tiff:
        assert (tiff.pages[0].photometric.name, tiff.pages[0].planarconfig.name) == ("MINISBLACK", "SEPARATE")


def test_an_ome_zarr_says_what_channels_and_classes_are(tmp_path: Path) -> None:
    path = write(tmp_path / "p.ome.zarr", colour(200, 90)[..., :2], 30, channels=CLASSES, mpp=0.25, levels=2)
    said = dict(zarr.open_group(path, mode="r", zarr_format=2).attrs)
    (image,) = said["multiscales"]
    assert [axis.get("unit") for axis in image["axes"]] == [None, "micrometer", "micrometer"]
    scales = [entry["coordinateTransformations"][0]["scale"] for entry in image["datasets"]]
    assert scales == [[1, 0.25, 0.25], [1, 0.5, 0.5]]
    assert [(each["label"], each["color"]) for each in said["omero"]["channels"]] == [
        ("Tumour", "D55E00"),
        ("Stroma \u00b5", "009E73"),
    ]
    with open_image(path, level=1) as opened:
        assert (opened.shape, opened.mpp) == ((2, 100, 45), pytest.approx(0.5))  # type: ignore[comparison-overlap]

    ids = np.arange(200 * 90, dtype=np.uint8).reshape(200, 90) % 3
    path = write(tmp_path / "mask.ome.zarr", ids, 30, classes=CLASSES, mpp=0.25)
    group = zarr.open_group(path, mode="r", zarr_format=2)
    assert group["labels"].attrs["labels"] == ["classes"]
    label = group["labels/classes"]
    assert label.attrs["image-label"]["properties"][1] == {"label-value": 2, "name": "Stroma \u00b5"}
    assert label.attrs["image-label"]["colors"][0] == {"label-value": 1, "rgba": [213, 94, 0, 255]}
    for holder in (group, label):
        np.testing.assert_array_equal(holder[holder.attrs["multiscales"][0]["datasets"][0]["path"]], ids)


def test_an_ome_zarr_replaces_one_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "mask.ome.zarr"
    write(path, np.zeros((100, 90), np.uint8), 30, classes=CLASSES)
    with pytest.raises(WriteError, match="exists already"):
        write(path, np.ones((100, 90), np.uint8), 30)
    write(path, np.ones((100, 90), np.uint8), 30, overwrite=True)
    assert levels_of(path)[0].all()
    assert not (path / "labels").exists()
    (tmp_path / "file.zarr").touch()
    with pytest.raises(WriteError, match="it is a file"):
        write(tmp_path / "file.zarr", np.ones((100, 90), np.uint8), 30, overwrite=True)


def test_transposed_views_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    pixels = colour(150, 90)
    planar = np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)
    first = write(tmp_path / "a.tif", pixels, 64).read_bytes()
    assert write(tmp_path / "b.tif", planar, 17, 64, 5).read_bytes() == first


def test_a_reused_strip_buffer_does_not_leak_into_earlier_rows(tmp_path: Path) -> None:
    buffer = np.empty((10, 50), np.uint8)

    def rows() -> Iterator[np.ndarray]:
        for value in range(20):
            buffer[:] = value
            yield buffer

    path = write_pyramid(tmp_path / "x.tif", rows(), shape=(200, 50, 1), dtype=np.uint8, nearest=True, tile=64)
    np.testing.assert_array_equal(tifffile.imread(path)[:, 0], np.repeat(np.arange(20), 10))


def test_existing_file_stays_unless_overwriting(tmp_path: Path) -> None:
    path = tmp_path / "mask.tif"
    path.write_bytes(b"precious")
    with pytest.raises(WriteError, match="exists already"):
        write(path, np.zeros((10, 10), np.uint8), 10)
    assert path.read_bytes() == b"precious"
    write(path, np.ones((10, 10), np.uint8), 10, overwrite=True)
    assert tifffile.imread(path).all()


@pytest.mark.parametrize("name", ["mask.tif", "mask.ome.tif", "mask.zarr"])
@pytest.mark.parametrize("failure", [OSError(errno.EIO, "slide unreadable"), KeyboardInterrupt(), ValueError("bug")])
def test_a_failing_producer_passes_through_and_leaves_the_old_file(
    tmp_path: Path, failure: BaseException, name: str
) -> None:
    path = tmp_path / name
    write(path, np.ones((10, 10), np.uint8), 10)

    def rows() -> Iterator[np.ndarray]:
        yield np.zeros((100, 200), np.uint8)
        raise failure

    with pytest.raises(type(failure)) as caught:
        write_pyramid(path, rows(), shape=(300, 200, 1), dtype=np.uint8, nearest=True, tile=64, overwrite=True)
    assert caught.value is failure
    assert levels_of(path)[0].all()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_the_main_thread_waits_for_zarr_without_a_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/faults/test_interruptions.py, whose process may not have the loop that zarr keeps from then on."""
    entered = []
    enter = threading.Condition.__enter__

    def noted(self: threading.Condition) -> bool:
        entered.append(threading.get_ident())
        return enter(self)

    monkeypatch.setattr(threading.Condition, "__enter__", noted)
    write(tmp_path / "x.zarr", colour(300, 200), 100)
    assert threading.get_ident() not in entered


def test_disk_full_is_one_line_with_numbers_and_nothing_left(tmp_path: Path) -> None:
    noise = np.random.default_rng(RNG_SEED).integers(0, 256, (2048, 1024), dtype=np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the system now refuses bytes past 1 MiB of a file
    try:
        with pytest.raises(WriteError, match=r"disk is too full .* free, about .*MiB needed") as caught:
            write(tmp_path / "noise.tif", noise, 256, tile=256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    def rows() -> Iterator[np.ndarray]:
        raise AssertionError("asked for pixels")
        yield

    with pytest.raises(WriteError, match="too full"):
        write_pyramid(tmp_path / "x.tif", rows(), shape=(9, 9, 1), dtype=np.uint8, nearest=True, expected_bytes=1 << 60)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pixels", "shape", "changes", "message"),
    [
        (np.zeros((20, 30), np.uint8), (25, 30, 1), {}, "ended at 20 of 25"),
        (np.zeros((20, 30), np.uint8), (19, 30, 1), {}, "more than the promised 19"),
        (np.zeros((64, 30), np.uint8), (48, 30, 1), {"heights": 48}, "more than the promised 48"),
        (np.zeros((20, 30), np.uint8), (20, 31, 1), {}, r"expected \(h, 31, 1\) of uint8"),
        (np.zeros((20, 30), np.float32), (20, 30, 1), {}, "expected .* of uint8"),
        (np.zeros((20, 30, 4), np.uint8), (20, 30, 4), {"channels": CLASSES}, "2 names for 4 channels"),
        (np.zeros((20, 0), np.uint8), (20, 0, 1), {}, "each at least 1"),
        (np.zeros((20, 30), np.uint8), (20, 30, 1), {"tile": 100}, "multiple of 16"),
        (np.zeros((20, 30), np.uint8), (20, 30, 1), {"compression": "jpeg", "quality": 0}, "1 to 100"),
        (np.zeros((20, 30), np.uint8), (20, 30, 1), {"levels": 0}, "1 or more"),
    ],
)
def test_wrong_pixels_or_settings_leave_nothing(
    tmp_path: Path, pixels: np.ndarray, shape: tuple[int, int, int], changes: dict[str, Any], message: str
) -> None:
    height = changes.pop("heights", 64)
    settings = {"nearest": True, **changes}
    with pytest.raises(WriteError, match=message):
        write_pyramid(tmp_path / "x.tif", strips(pixels, height), shape=shape, dtype=np.uint8, **settings)
    assert not list(tmp_path.iterdir())


def test_missing_folder_and_folder_as_file(tmp_path: Path) -> None:
    pixels = np.zeros((10, 10), np.uint8)
    with pytest.raises(WriteError, match="no folder"):
        write(tmp_path / "nowhere" / "x.tif", pixels, 10)
    with pytest.raises(WriteError, match="is a folder"):
        write(tmp_path, pixels, 10)


def test_names_of_other_formats_are_refused(tmp_path: Path) -> None:
    """They held TIFFs, which viewers of such files cannot open."""
    with pytest.raises(WriteError, match=r"x\.png: a pyramid is a TIFF or a Zarr; call it x\.tif"):
        write(tmp_path / "x.png", np.zeros((10, 10), np.uint8), 10)
    assert not list(tmp_path.iterdir())


def test_float_jpeg_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="JPEG holds uint8"):
        write(tmp_path / "x.tif", np.zeros((10, 10), np.float32), 10, compression="jpeg")
