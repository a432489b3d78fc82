"""One way in: what `open_image` takes, and what it says to what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from PIL import Image as Pillow

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image, require_mpp
from gigagrad.images.openslide import OpenSlideImage, open_openslide


def test_an_open_image_is_returned_as_it_is() -> None:
    image = open_image(np.zeros((8, 9)))
    assert open_image(image) is image
    with pytest.raises(ImageError, match="open already"):
        open_image(image, level=1)


@pytest.mark.parametrize("source", ["a string path", "a Path"])
def test_paths_may_be_strings(jpeg_slide: Path, source: str) -> None:
    with open_image(str(jpeg_slide) if source == "a string path" else jpeg_slide) as image:
        assert (image.name, image.shape) == ("small", (3, 700, 900))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.svs does not exist"):
        open_image(tmp_path / "nowhere.svs")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is a folder, no image"):
        open_image(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello, I am text, and long enough to look at", "of no known kind"),
        (b"II*\x00", "truncated or corrupt"),
        (b"II*\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00", "truncated or corrupt"),
        (b"MM\x00*\xff\xff\xff\xff", "truncated or corrupt"),
        (b"\x89PNG\r\n\x1a\nno more", "truncated or corrupt"),
        (b"\xff\xd8\xff\xe0", "truncated or corrupt"),
    ],
)
def test_files_that_are_no_image(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.svs").write_bytes(content)
    with pytest.raises(ImageError, match=words) as caught:
        open_image(tmp_path / "x.svs")
    assert "\n" not in str(caught.value)
    assert "x.svs" in str(caught.value)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_cut_off_picture(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    Pillow.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ImageError, match="truncated or corrupt"):
        open_image(path)


def test_a_picture_too_large_to_decode_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigagrad.images.opening._LARGEST_PICTURE_PX", 63)
    Pillow.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "x.png")
    with pytest.raises(ImageError, match=r"8 x 8 px\); .* convert it to a tiled TIFF"):
        open_image(tmp_path / "x.png")


def test_transparent_pictures_lie_on_white(tmp_path: Path) -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[0, 0] = (10, 20, 30, 255)
    Pillow.fromarray(rgba).save(tmp_path / "x.png")
    pixels = np.asarray(open_image(tmp_path / "x.png").read(Box(0, 0, 1, 2)))
    np.testing.assert_array_equal(pixels[:, 0], [[10, 255], [20, 255], [30, 255]])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros(5), r"shape \(5,\); expected \(C, H, W\) or \(H, W\)"),
        (torch.zeros(1, 3, 8, 8), r"drop the batch axis with x\[0\]"),
        (np.zeros((300, 400, 3), np.uint8), r"looks like \(H, W, C\)"),
        (np.zeros((3, 0, 4)), "has no pixels"),
        (np.zeros((4, 4), complex), "dtype complex128"),
        (42, "cannot open a int"),
        ([1, 2], "cannot open a int"),
    ],
)
def test_objects_that_are_no_image(source: Any, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        open_image(source)


def test_a_tensor_stays_on_its_graph_side() -> None:
    image = open_image(torch.ones(2, 4, 4, requires_grad=True))
    assert not image.read(Box(0, 0, 2, 2)).requires_grad


@pytest.mark.cuda
def test_a_tensor_stays_on_its_device() -> None:
    image = open_image(torch.ones(2, 4, 4, device="cuda"))
    assert image.read(Box(-1, -1, 2, 2)).device.type == "cuda"


def test_a_zarr_group_without_multiscales_names_its_arrays(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "g.zarr").create_array("raw", shape=(4, 4), dtype="u1")
    with pytest.raises(ImageError, match=r"without OME multiscales .* g\.zarr/raw"):
        open_image(tmp_path / "g.zarr")
    assert open_image(tmp_path / "g.zarr" / "raw").shape == (1, 4, 4)


def test_damaged_multiscales(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "g.zarr").attrs["ome"] = {"multiscales": [{"datasets": [{"path": "gone"}]}]}
    with pytest.raises(ImageError, match="damaged OME multiscales"):
        open_image(tmp_path / "g.zarr")


def test_a_bioformats2raw_collection_opens_its_first_image(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=2).create_group("0")
    group.create_array("0", shape=(1, 3, 1, 8, 9), dtype="u1")
    axes = [{"name": name} for name in "tczyx"]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": [{"path": "0"}]}]
    assert open_image(tmp_path / "g.zarr").shape == (3, 8, 9)


def test_time_series_are_refused(tmp_path: Path) -> None:
    names = ("t", "y", "x")
    zarr.create_array(tmp_path / "g.zarr", shape=(5, 8, 8), dtype="u1", dimension_names=names)
    with pytest.raises(ImageError, match=r"axes t, y, x of lengths \(5, 8, 8\)"):
        open_image(tmp_path / "g.zarr")


def test_a_corrupt_chunk_is_reported(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3, 8, 8), chunks=(3, 8, 8), dtype="u1")
    array[...] = 7
    (chunk,) = [path for path in (tmp_path / "a.zarr" / "c").rglob("*") if path.is_file()]
    chunk.write_bytes(b"broken")
    with pytest.raises(ImageError, match="a chunk is missing or corrupt"):
        open_image(tmp_path / "a.zarr").read(Box(0, 0, 2, 2))


def test_mpp_is_asked_for_where_it_is_needed() -> None:
    assert require_mpp(open_image(np.zeros((8, 8)), mpp=0.5)) == 0.5
    with pytest.raises(ImageError, match="--mpp"):
        require_mpp(open_image(np.zeros((8, 8))))


def test_openslide_pixels_do_not_depend_on_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSlide resamples a level by where the read begins, if its downsample is no whole number (here 2.0054)."""
    monkeypatch.setattr("gigagrad.images.openslide._BLOCK", 64)
    noise = np.random.default_rng(0).integers(0, 256, (741, 923, 3), np.uint8)
    with tifffile.TiffWriter(tmp_path / "odd.tif") as writer:
        for kind, pixels in enumerate((noise, noise[:739:2, :919:2])):
            options = {"tile": (64, 64), "compression": "deflate", "metadata": None}
            writer.write(pixels, photometric="rgb", subfiletype=kind, **options)
    with open_openslide(tmp_path / "odd.tif", level=1) as image:
        assert isinstance(image, OpenSlideImage)
        everything = image.read(Box.whole(image.height, image.width))
        for box in (Box(1, 1, 200, 301), Box(63, 129, 65, 131), Box(300, 400, 350, 450)):
            np.testing.assert_array_equal(image.read(box), everything[:, box.y0 : box.y1, box.x0 : box.x1])


def test_opening_does_not_pay_for_what_it_does_not_use(jpeg_slide: Path) -> None:
    """A labelling run needs neither PyTorch nor Zarr nor OpenSlide in memory."""
    heavy = ["torch", "zarr", "openslide", "cv2", "PIL", "matplotlib", "scipy"]
    code = (
        "import sys; from gigagrad.images import open_image, thumbnail; "
        f"thumbnail(open_image({str(jpeg_slide)!r}), 64); print([name for name in {heavy!r} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
