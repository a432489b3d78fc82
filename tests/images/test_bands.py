"""Some of an image's channels, in an order of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import given

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import InputView, open_image
from tests.images.conformance import HEIGHT, WIDTH, boxes
from tests.images.test_georeference import make

PIXELS = np.random.default_rng(5).integers(0, 2000, (5, HEIGHT, WIDTH), np.uint16)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: torch.from_numpy(x.astype(np.float32))])
@given(boxes())
def test_bands_are_those_channels(make: Any, box: Box) -> None:
    image = open_image(make(PIXELS))
    seen = image.bands((5, 1, 5))
    assert seen.shape == (3, HEIGHT, WIDTH)
    np.testing.assert_array_equal(np.asarray(seen.read(box)), np.asarray(image.read(box))[[4, 0, 4]])


def test_all_of_them_in_order_are_the_image_itself() -> None:
    image = open_image(PIXELS)
    assert image.bands(range(1, 6)) is image
    with pytest.raises(ImageError, match="array has no band 6; choose from 1 to 5"):
        image.bands((1, 6))
    with pytest.raises(ImageError, match="has no band 0"):
        image.bands((0,))


def test_a_look_is_of_bands_then_of_grey() -> None:
    image = open_image(PIXELS.astype(np.uint8))
    assert InputView().of(image) is image
    rgb = InputView(grey=True, bands=(3, 2, 1)).of(image)
    np.testing.assert_array_equal(rgb.read(Box.whole(9, 9)), image.bands((3, 2, 1)).grey().read(Box.whole(9, 9)))
    assert str(InputView(True, (3, 2, 1))) == "bands 3, 2, 1, grey, one channel"
    assert str(InputView()) == "as stored"


@pytest.mark.parametrize(("extra", "channels"), [("unspecified", 4), ("unassalpha", 3)])
def test_a_fourth_band_is_left_out_only_where_it_is_alpha(tmp_path, extra, channels) -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (64, 80, 4), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=[extra], tile=(32, 32))
    with open_image(tmp_path / "a.tif") as image:
        assert image.channels == channels
        np.testing.assert_array_equal(image.read(Box.whole(64, 80)), pixels.transpose(2, 0, 1)[:channels])


def gdal(path: Path) -> None:
    make(path, PIXELS[:3, :20, :30], names=("DAPI", "CD8 & more", "488"))


def ome_tiff(path: Path) -> None:
    metadata = {"axes": "CYX", "Channel": {"Name": ["DAPI", "CD8 & more", "488"]}}
    tifffile.imwrite(path, PIXELS[:3, :20, :30], ome=True, photometric="minisblack", metadata=metadata)


def ome_zarr(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=PIXELS[:3, :20, :30])
    axes = [{"name": name} for name in "cyx"]
    image = {"axes": axes, "datasets": [{"path": "0"}], "version": "0.5"}
    channels = [{"label": label} for label in ("DAPI", "CD8 & more", "488")]
    group.attrs["ome"] = {"multiscales": [image], "omero": {"channels": channels}}


@pytest.mark.parametrize("write", [gdal, ome_tiff, ome_zarr])
def test_channels_have_names(tmp_path, write) -> None:
    write(tmp_path / "a")
    with open_image(tmp_path / "a") as image:
        assert image.channel_names == ("DAPI", "CD8 & more", "488")
        seen = InputView(bands=(488, "dapi", 2)).of(image)
        assert seen.channel_names == ("488", "DAPI", "CD8 & more")
        np.testing.assert_array_equal(seen.read(Box.whole(20, 30)), PIXELS[[2, 0, 1], :20, :30])
        with pytest.raises(
            ImageError, match=r"no band 'DAPY', did you mean 'DAPI'\?; it has DAPI, CD8 & more, 488 and"
        ):
            image.bands(("DAPY",))


def test_names_that_are_not_one_for_each_channel(tmp_path) -> None:
    metadata = {"axes": "YXS", "Channel": {"Name": ["stain"]}}
    tifffile.imwrite(
        tmp_path / "a.ome.tif", PIXELS[:3, :20, :30].transpose(1, 2, 0), photometric="rgb", metadata=metadata
    )
    with open_image(tmp_path / "a.ome.tif") as image:
        assert image.channel_names == ()
        with pytest.raises(ImageError, match="no band 'stain'; its bands have no names, but numbers from 1 to 3"):
            image.bands(("stain",))
    make(tmp_path / "b.tif", PIXELS[:3], names=("", "Red", "RED"))
    with open_image(tmp_path / "b.tif") as image:
        assert image.channel_names == ("", "Red", "RED")
        np.testing.assert_array_equal(image.bands(("RED",)).channel_names, ("RED",))
        with pytest.raises(ImageError, match=r"2 bands red; choose one by its number: \[2, 3\]"):
            image.bands(("red",))


def test_an_alpha_channel_takes_its_name_along(tmp_path) -> None:
    pixels = PIXELS[:4].astype(np.uint8)
    make(tmp_path / "a.tif", pixels, names=("r", "g", "b", "a"), photometric="RGB", alpha="YES")
    with open_image(tmp_path / "a.tif") as image:
        assert image.channel_names == ("r", "g", "b")
