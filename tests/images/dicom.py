"""A whole slide in DICOM (supplement 145), as small as OpenSlide takes it: one instance for each level."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, VLWholeSlideMicroscopyImageStorage, generate_uid


def write_dicom(folder: Path, pixels_HWC: np.ndarray, *, tile: int = 256, levels: int = 2, mpp: float = 0.5) -> Path:
    """Every level has half the pixels of the one before; JPEG tiles, `(tile, tile)` each."""
    folder.mkdir(parents=True)
    series, study = generate_uid(), generate_uid()
    for level in range(levels):
        step = 2**level
        dataset = _instance(pixels_HWC[::step, ::step], tile, mpp * step / 1000, level)
        dataset.SeriesInstanceUID, dataset.StudyInstanceUID = series, study
        dataset.save_as(folder / f"{level}.dcm", enforce_file_format=True)
    return folder


def _instance(pixels_HWC: np.ndarray, tile: int, spacing_mm: float, level: int) -> Dataset:
    height, width = pixels_HWC.shape[:2]
    dataset, meta = Dataset(), FileMetaDataset()
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID = VLWholeSlideMicroscopyImageStorage
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = JPEGBaseline8Bit
    dataset.file_meta = meta
    dataset.Modality, dataset.InstanceNumber = "SM", level + 1
    kind = ("DERIVED", "RESAMPLED") if level else ("ORIGINAL", "NONE")
    dataset.ImageType = [kind[0], "PRIMARY", "VOLUME", kind[1]]
    dataset.Rows = dataset.Columns = tile
    dataset.TotalPixelMatrixRows, dataset.TotalPixelMatrixColumns = height, width
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PlanarConfiguration = 3, "YBR_FULL_422", 0
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.DimensionOrganizationType = "TILED_FULL"
    dataset.TotalPixelMatrixFocalPlanes = dataset.NumberOfOpticalPaths = 1
    measures, shared, path = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = [spacing_mm, spacing_mm]
    shared.PixelMeasuresSequence = [measures]
    dataset.SharedFunctionalGroupsSequence = [shared]
    path.OpticalPathIdentifier = "1"
    dataset.OpticalPathSequence = [path]
    corners = [(y, x) for y in range(0, height, tile) for x in range(0, width, tile)]
    frames = [_jpeg(pixels_HWC[y : y + tile, x : x + tile], tile) for y, x in corners]
    dataset.NumberOfFrames = len(frames)
    dataset.PixelData = encapsulate(frames)
    dataset["PixelData"].is_undefined_length = True
    return dataset


def _jpeg(part_HWC: np.ndarray, tile: int) -> bytes:
    full, out = np.full((tile, tile, 3), 255, np.uint8), io.BytesIO()
    full[: part_HWC.shape[0], : part_HWC.shape[1]] = part_HWC
    Pillow.fromarray(full).save(out, "JPEG", quality=95)
    return out.getvalue()
