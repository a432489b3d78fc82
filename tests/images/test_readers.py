"""Every reader against the one conformance suite."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tifffile
import torch
import zarr
from PIL import Image as Pillow

from gigagrad.images import Image
from gigagrad.images.openslide import open_openslide
from tests.images.conformance import PyramidConformance, ReaderConformance


class TestArray(ReaderConformance):
    name = "array"

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return array_CHW


class TestFloatArray(TestArray):
    channels, dtype, fill = 5, np.float64, 0


class TestBigEndianArray(TestArray):
    channels, dtype, fill = 2, np.uint16, 0

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return array_CHW.astype(">u2")


class TestMaskArray(TestArray):
    channels, fill = 1, 0

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return array_CHW[0]


class TestMemoryMap(TestArray):
    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        np.save(folder / "x.npy", array_CHW)
        return np.load(folder / "x.npy", mmap_mode="r")


class TestTensor(ReaderConformance):
    name = "tensor"

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return torch.from_numpy(array_CHW.copy())


class TestFloatTensor(TestTensor):
    channels, dtype, fill = 2, np.float32, 0

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return torch.from_numpy(array_CHW.copy()).requires_grad_()


class TiffConformance(ReaderConformance):
    """A TIFF written by tifffile with `options`, pixels `axes`: HWC or CHW."""

    options: ClassVar[dict[str, Any]] = {}
    axes = "HWC"

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        path = folder / "image.tif"
        pixels = array_CHW.transpose(1, 2, 0) if self.axes == "HWC" else array_CHW
        defaults = {"photometric": "rgb" if self.channels in (3, 4) else "minisblack"}
        tifffile.imwrite(path, pixels.squeeze(), **{**defaults, **self.options})
        return path


class TestTiledTiff(TiffConformance):
    options: ClassVar = {"tile": (32, 16)}


class TestDeflateTiff(TiffConformance):
    options: ClassVar = {"tile": (32, 32), "compression": "deflate", "predictor": True}


class TestLzwTiff(TiffConformance):
    options: ClassVar = {"tile": (16, 48), "compression": "lzw"}


class TestZstdTiff(TiffConformance):
    options: ClassVar = {"tile": (16, 48), "compression": "zstd"}


class TestJpeg2000Tiff(TiffConformance):
    options: ClassVar = {"tile": (32, 32), "compression": "jpeg2000"}


class TestPlanarTiff(TiffConformance):
    axes = "CHW"
    options: ClassVar = {"tile": (32, 32), "planarconfig": "separate", "compression": "deflate"}


class TestPlanarStripedTiff(TiffConformance):
    axes = "CHW"
    options: ClassVar = {"rowsperstrip": 7, "planarconfig": "separate", "compression": "deflate"}


class TestRawTiff(TiffConformance):
    """One uncompressed strip as tall as the image."""


class TestStripedTiff(TiffConformance):
    options: ClassVar = {"rowsperstrip": 9, "compression": "lzw"}


class TestBigEndianBigTiff(TiffConformance):
    dtype, fill = np.uint16, 65535
    options: ClassVar = {"tile": (32, 32), "byteorder": ">", "bigtiff": True}


class TestRawBigEndianTiff(TiffConformance):
    dtype, fill = np.uint16, 65535
    options: ClassVar = {"byteorder": ">"}


class TestFloatTiff(TiffConformance):
    channels, dtype, fill = 1, np.float32, 0
    options: ClassVar = {"tile": (32, 32), "compression": "deflate", "predictor": 3}


class TestManyChannelTiff(TiffConformance):
    """A page for each channel, as a float prediction is written."""

    channels, dtype, fill, axes = 5, np.float32, 0, "CHW"
    options: ClassVar = {"tile": (32, 32), "compression": "deflate"}


class TestRawManyChannelTiff(TiffConformance):
    channels, dtype, fill, axes = 5, np.float32, 0, "CHW"


class TestMaskTiff(TiffConformance):
    channels, fill = 1, 0
    options: ClassVar = {"tile": (32, 32), "compression": "deflate"}


class TestAlphaTiff(TiffConformance):
    options: ClassVar = {"tile": (32, 32), "extrasamples": ["unassalpha"]}

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        return super().make(folder, np.concatenate([array_CHW, array_CHW[:1] // 2]))


class TestPyramidTiff(PyramidConformance):
    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        path = folder / "image.tif"
        with tifffile.TiffWriter(path) as writer:
            for step in (1, 2):
                writer.write(
                    array_CHW[:, ::step, ::step].transpose(1, 2, 0),
                    photometric="rgb",
                    tile=(16, 32),
                    compression="deflate",
                    subfiletype=int(step > 1),
                    metadata=None,
                )
        return path


class TestOmeTiff(PyramidConformance):
    """A page for each channel, the lower level in SubIFDs, as Bio-Formats writes it."""

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        path = folder / "image.tif"
        options = {"photometric": "minisblack", "tile": (32, 32), "compression": "deflate"}
        with tifffile.TiffWriter(path, ome=True) as writer:
            writer.write(array_CHW, metadata={"axes": "CYX"}, subifds=1, **options)
            writer.write(array_CHW[:, ::2, ::2], subfiletype=1, **options)
        return path


class TestOpenSlide(ReaderConformance):
    """OpenSlide itself, by name: `open_image` would take the fast path."""

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        path = folder / "image.tif"
        pixels = array_CHW.transpose(1, 2, 0)
        tifffile.imwrite(path, pixels, photometric="rgb", tile=(32, 32), compression="deflate")
        return path

    def open(self, source: Any, **options: Any) -> Image:
        image = open_openslide(source, **options)
        assert image is not None
        return image


class TestZarr3(ReaderConformance):
    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        array = zarr.create_array(folder / "image.zarr", shape=array_CHW.shape, chunks=(1, 32, 40), dtype=self.dtype)
        array[...] = array_CHW
        return folder / "image.zarr"


class TestZarr2BigEndian(ReaderConformance):
    channels, dtype, fill = 2, np.int16, 0

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        array = zarr.create_array(
            folder / "image.zarr", shape=array_CHW.shape, chunks=(2, 16, 101), dtype=">i2", zarr_format=2
        )
        array[...] = array_CHW
        return folder / "image.zarr"


class TestZarrArray(ReaderConformance):
    """An open zarr.Array with named axes, channels last."""

    name = "pixels"

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        array = zarr.create_array(
            folder / "store",
            name="pixels",
            shape=(*array_CHW.shape[1:], self.channels),
            chunks=(32, 32, 3),
            dtype=self.dtype,
            dimension_names=("y", "x", "c"),
        )
        array[...] = array_CHW.transpose(1, 2, 0)
        return array


class OmeZarrConformance(PyramidConformance):
    zarr_format: int

    @abstractmethod
    def attributes(self, multiscales: list[Any]) -> dict[str, Any]:
        """The group's attributes that hold these."""

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        group = zarr.create_group(folder / "image.ome.zarr", zarr_format=self.zarr_format)
        datasets = []
        for index, step in enumerate((1, 2)):
            pixels = array_CHW[None, :, None, ::step, ::step]
            array = group.create_array(str(index), shape=pixels.shape, chunks=(1, 1, 1, 32, 32), dtype=self.dtype)
            array[...] = pixels
            scale = [1, 1, 1, 0.4 * step, 0.4 * step]
            transformations = [{"type": "scale", "scale": scale}]
            datasets.append({"path": str(index), "coordinateTransformations": transformations})
        axes = [{"name": name} for name in "tcz"] + [{"name": name, "unit": "micrometer"} for name in "yx"]
        group.attrs.update(self.attributes([{"axes": axes, "datasets": datasets}]))
        return folder / "image.ome.zarr"

    def test_reads_the_pixel_size(self, image: Image) -> None:
        assert image.mpp == 0.4


class TestOmeZarr04(OmeZarrConformance):
    zarr_format = 2

    def attributes(self, multiscales: list[Any]) -> dict[str, Any]:
        return {"multiscales": multiscales}


class TestOmeZarr05(OmeZarrConformance):
    zarr_format = 3

    def attributes(self, multiscales: list[Any]) -> dict[str, Any]:
        return {"ome": {"version": "0.5", "multiscales": multiscales}}


class TestPng(ReaderConformance):
    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        Pillow.fromarray(array_CHW.transpose(1, 2, 0)).save(folder / "image.png")
        return folder / "image.png"


class TestMaskPng(ReaderConformance):
    channels, fill = 1, 0

    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        Pillow.fromarray(array_CHW[0]).save(folder / "image.png")
        return folder / "image.png"
