"""A folder of DICOM instances is one slide."""

from __future__ import annotations

from shutil import copyfile

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate, generate_frames

from gigagrad.boxes import Box
from gigagrad.cohorts import find_slides
from gigagrad.errors import ImageError
from gigagrad.images import open_image
from tests.images.dicom import write_dicom

PIXELS = np.kron(np.random.default_rng(0).integers(0, 256, (10, 15, 3), np.uint8), np.ones((40, 40, 1), np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dicom(tmp_path_factory.mktemp("dicom") / "biopsy", PIXELS)


def test_a_folder_is_opened_as_a_slide(folder):
    for source in (folder, folder / "0.dcm"):
        with open_image(source) as slide:
            assert (slide.name, slide.shape, slide.mpp) == ("biopsy", (3, 400, 600), 0.5)
            assert [level.shape for level in slide.levels] == [(400, 600), (200, 300)]
            near = np.abs(np.asarray(slide.read(Box.whole(400, 600))).transpose(1, 2, 0).astype(int) - PIXELS)
            assert near.mean() < 4
    with open_image(folder, level=1) as slide:
        assert (slide.shape, slide.mpp) == ((3, 200, 300), 1.0)


def test_a_folder_is_one_slide_of_a_list(folder):
    assert [(row.slide, row.name) for row in find_slides([folder])] == [(folder, "biopsy")]


def test_a_folder_of_two_slides_is_refused(folder, tmp_path):
    """The first one was opened, and the other one was left out."""
    other = write_dicom(tmp_path / "other", PIXELS[:200])
    both = tmp_path / "both"
    both.mkdir()
    for path in (*folder.iterdir(), *other.iterdir()):
        copyfile(path, both / f"{path.parent.name}-{path.name}")
    with pytest.raises(ImageError, match=r"biopsy-0.dcm and other-0.dcm are of two series; give each"):
        open_image(both)
    with open_image(both / "other-1.dcm") as slide:
        assert slide.shape == (3, 200, 600)
    for path in both.glob("other*"):  # what is no slide, as a segmentation, stays beside one
        path.write_bytes(path.read_bytes().replace(b"10008.5.1.4.1.1.77.1.6", b"10008.5.1.4.1.1.66.4\0\0"))
    with open_image(both) as slide:
        assert slide.shape == (3, 400, 600)


def test_several_optical_paths_are_refused(tmp_path):
    """The first one was read, and the others were left out."""
    path = write_dicom(tmp_path / "two", PIXELS[:200], levels=1) / "0.dcm"
    instance = pydicom.dcmread(path)
    frames = list(generate_frames(instance.PixelData, number_of_frames=instance.NumberOfFrames))
    second = Dataset()
    second.OpticalPathIdentifier = "2"
    instance.OpticalPathSequence.append(second)
    instance.NumberOfOpticalPaths, instance.NumberOfFrames = 2, 2 * len(frames)
    instance.PixelData = encapsulate(frames + frames[::-1])
    instance.save_as(path)
    with pytest.raises(ImageError, match=r"0\.dcm holds 2 optical paths, of which OpenSlide reads the first alone"):
        open_image(path.parent)


def test_other_folders_and_instances_are_named(folder, tmp_path):
    with pytest.raises(ImageError, match="is a folder, no image, Zarr store or DICOM slide"):
        open_image(tmp_path)
    (tmp_path / "x.dcm").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="DICOM slide"):
        open_image(tmp_path)
