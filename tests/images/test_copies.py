"""Copies and pickles of images, and a DataLoader that has them in another process."""

import copy
import pickle

import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch.utils.data import DataLoader, Dataset

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images.openslide import open_openslide

BOX = Box(100, 40, 180, 130)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 255, (3, 300, 200), dtype=np.uint8)


def of_zarr(folder):
    zarr.save_array(folder / "image.zarr", PIXELS)
    return gg.open_image(folder / "image.zarr")


def annotated(folder):
    (folder / "a.geojson").write_text(
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": '
        '[[[50, 100], [120, 100], [120, 170], [50, 170], [50, 100]]]}, "properties": {}}]}'
    )
    return gg.open_mask(folder / "a.geojson", gg.open_image(PIXELS))


def of_tiff(folder, level=0):
    with tifffile.TiffWriter(folder / "image.tif") as writer:
        for step in (1, 2):
            pixels = PIXELS[:, ::step, ::step].transpose(1, 2, 0)
            writer.write(pixels, tile=(64, 64), photometric="rgb", subfiletype=int(step > 1), metadata=None)
    return gg.open_image(folder / "image.tif", level=level, mpp=0.5)


KINDS = {
    "array": lambda folder: gg.open_image(PIXELS),
    "tensor": lambda folder: gg.open_image(torch.from_numpy(PIXELS)),
    "tiff": of_tiff,
    "level": lambda folder: of_tiff(folder, level=1),
    "openslide": lambda folder: open_openslide(of_tiff(folder)._path),
    "zarr": of_zarr,
    "grey": lambda folder: of_tiff(folder).grey(),
    "bands": lambda folder: of_tiff(folder).bands([3, 1]),
    "annotation": annotated,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda image: pickle.loads(pickle.dumps(image))], ids=["copy", "pickle"]
)
def test_a_copy_reads_the_same(kind, copied, tmp_path):
    with KINDS[kind](tmp_path) as image:
        expected = np.asarray(image.read(BOX))
        made = copied(image)
    with made:
        assert (made.shape, made.dtype, made.mpp, made.fill, made.name) == (
            image.shape, image.dtype, image.mpp, image.fill, image.name,
        )  # fmt: skip
        assert np.array_equal(np.asarray(made.read(BOX)), expected)


def test_a_pickle_of_a_file_holds_no_pixels(tmp_path):
    with of_tiff(tmp_path) as image:
        image.read(BOX)
        assert len(pickle.dumps(image)) < 1000
    with pytest.raises(ImageError, match="is closed"):
        copy.copy(image)


class Slides(Dataset):
    """Opened where it is made, read by whoever has it."""

    def __init__(self, image):
        self.image = image

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.image, np.asarray(self.image.read(BOX)).sum(dtype=np.int64)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_of_a_dataloader_reads_and_hands_over_images(start, tmp_path):
    with of_tiff(tmp_path) as image:
        expected = np.asarray(image.read(BOX)).sum(dtype=np.int64)
        loader = DataLoader(Slides(image), batch_size=None, num_workers=1, multiprocessing_context=start)
        for handed, total in loader:
            assert total == expected
            assert np.asarray(handed.read(BOX)).sum(dtype=np.int64) == expected
