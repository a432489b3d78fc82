"""Images read in grey, against the luma of what is read in colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import open_image
from tests.images.conformance import ALL, HEIGHT, WIDTH, boxes

COLOURS = np.random.default_rng(3).integers(0, 256, (3, HEIGHT, WIDTH), dtype=np.uint8)


def luma(colours: Any) -> Any:
    return 0.299 * colours[:1] + 0.587 * colours[1:2] + 0.114 * colours[2:]


def source(kind: str, folder: Path) -> Any:
    """The same colours in every kind; floats between 0 and 1."""
    if kind == "deflate":
        tifffile.imwrite(folder / "a.tif", COLOURS.transpose(1, 2, 0), compression="deflate", tile=(32, 32))
        return folder / "a.tif"
    return {
        "array": COLOURS,
        "16 bit": COLOURS.astype(np.uint16) * 257,
        "floats": COLOURS.astype(np.float32) / 255,
        "tensor": torch.from_numpy(COLOURS),
        "float tensor": torch.from_numpy(COLOURS).double() / 255,
    }[kind]


@pytest.mark.parametrize("kind", ["array", "16 bit", "floats", "tensor", "float tensor", "deflate"])
@given(box=boxes())
def test_is_the_luma_of_the_colours(kind: str, tmp_path_factory: pytest.TempPathFactory, box: Box) -> None:
    with open_image(source(kind, tmp_path_factory.mktemp("grey"))) as image:
        grey = image.grey()
        assert (grey.shape, grey.dtype, grey.mpp) == ((1, *image.shape[1:]), image.dtype, image.mpp)
        read, expected = grey.read(box), luma(np.asarray(image.read(box)).astype(np.float64))
    assert isinstance(read, torch.Tensor) == ("tensor" in kind)
    integers = np.asarray(read).dtype.kind == "u"
    np.testing.assert_allclose(np.asarray(read), expected, rtol=1e-6, atol=0.501 if integers else 1e-6)


def test_jpeg_tiles_give_the_luma_that_they_store(tmp_path: Path) -> None:
    """Of noise, whose decoded colours are cut to 0 to 255, so that their luma is another; read both ways in turns."""
    path, colours = tmp_path / "a.tif", COLOURS.transpose(1, 2, 0)
    tifffile.imwrite(path, colours, photometric="ycbcr", compression="jpeg", subsampling=(2, 2), tile=(32, 32))
    with tifffile.TiffFile(path) as tif:
        page = tif.pages[0]
        data = tif.filehandle.read_array("u1", page.databytecounts[0], page.dataoffsets[0]).tobytes()
        decoded = page.asarray()[:32, :32].transpose(2, 0, 1)
    stored = imagecodecs.jpeg8_decode(data, tables=page.jpegtables, colorspace="YCBCR", outcolorspace="YCBCR")[..., 0]
    box = Box.whole(32, 32)
    with open_image(path) as image:
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(image.grey().read(box))[0], stored)
            np.testing.assert_array_equal(np.asarray(image.read(box)), decoded)
    inside = ((decoded > 0) & (decoded < 255)).all(axis=0)
    off = np.abs(luma(decoded.astype(float))[0] - stored)
    assert off[inside].max() <= 2 < off.max()


def test_outside_is_white_as_in_colours() -> None:
    assert (np.asarray(open_image(COLOURS).grey().read(Box(-3, -3, 0, 0))) == 255).all()


def test_one_channel_is_grey_already() -> None:
    image = open_image(COLOURS[:1])
    assert image.grey() is image


def test_other_channels_are_refused() -> None:
    with pytest.raises(ImageError, match="has 2 channels; grey is made of three"):
        open_image(COLOURS[:2]).grey()


def test_ends_with_its_image() -> None:
    image = open_image(COLOURS)
    grey = image.grey()
    image.close()
    with pytest.raises(ImageError, match="closed"):
        grey.read(ALL)
    assert grey.height == HEIGHT


def test_closing_it_leaves_the_image_open() -> None:
    image = open_image(COLOURS)
    image.grey().close()
    assert np.asarray(image.read(ALL)).shape == (3, HEIGHT, WIDTH)
